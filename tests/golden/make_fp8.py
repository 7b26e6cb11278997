#!/usr/bin/env python3
"""Writes fp8.json beside itself: what PyTorch's float8_e4m3fn and float8_e5m2 hold, and what floats become in them.

    pip install torch        # 2.15 or later, whose casts to float8_e4m3fn saturate; the CPU build does
    python3 tests/golden/make_fp8.py

`codes` are the 256 values of each, "nan" among them. `casts` are [bits of an f32, its e4m3, its e5m2]: of every two neighbours the
middle, and the f32 on either side of it; what is beyond the largest; subnormals and zeros; and as many of any size.
"""
import json
import math
import pathlib
import random

import torch

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
codes = {name: torch.arange(256, dtype=torch.uint8).view(dtype).double() for name, dtype in DTYPES.items()}

draw = random.Random(8)
values = [0.0, 2.0**-149, 2.0**-126, 3.4e38, math.inf, math.nan]
for name in DTYPES:
    held = sorted({v for v in codes[name].tolist() if v >= 0 and math.isfinite(v)})
    held.append(2 * held[-1] - held[-2])  # where the next one would lie
    values += held + [(a + b) / 2 for a, b in zip(held, held[1:])]
x = torch.tensor(values, dtype=torch.float32)
x = torch.cat([x, torch.nextafter(x, torch.tensor(math.inf)), torch.nextafter(x, torch.tensor(0.0))])
x = torch.cat([x, torch.tensor([2.0 ** draw.uniform(-20, 20) for _ in range(300)])])
x = x * torch.tensor([draw.choice([-1.0, 1.0]) for _ in x])

bits = x.view(torch.int32).long() & 0xffffffff
casts = zip(bits.tolist(), *(x.to(dtype).view(torch.uint8).tolist() for dtype in DTYPES.values()))
out = pathlib.Path(__file__).parent / "fp8.json"
shown = {name: [v if math.isfinite(v) else str(v) for v in held.tolist()] for name, held in codes.items()}
lines = ",\n".join(json.dumps(list(row), separators=(",", ":")) for row in casts)
out.write_text(f'{{"torch": {json.dumps(torch.__version__)},\n"codes": {json.dumps(shown)},\n"casts": [\n{lines}]}}\n')
