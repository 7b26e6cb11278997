#!/usr/bin/env python3
"""Writes adafactor.json beside itself: parameters after five steps of torch.optim.Adafactor.

    pip install torch        # 2.9 or later; the CPU build does
    python3 tests/golden/make_adafactor.py

tests/parity takes the same steps. Element i of a parameter is sin(1 + 0.7 i), of its gradient at step t cos(t + 1.3 i + 0.1 i t).
"""
import json
import math
import pathlib

import torch

STEPS = 5


def steps(shape, dtype, **options):
    i = torch.arange(math.prod(shape), dtype=torch.float64)
    p = torch.nn.Parameter(torch.sin(1 + 0.7 * i).float().to(dtype).reshape(shape))
    optimizer = torch.optim.Adafactor([p], eps=(2.0**-23, options.pop("eps2")), foreach=False, **options)
    for t in range(STEPS):
        p.grad = torch.cos(t + 1.3 * i + 0.1 * i * t).float().to(dtype).reshape(shape)
        optimizer.step()
    state = optimizer.state[p]
    names = {"row": "row_var", "col": "col_var", "variance": "variance"}
    values = {"p": p} | {ours: state[theirs] for ours, theirs in names.items() if state.get(theirs) is not None}
    return {name: [round(x, 12) for x in value.detach().double().flatten().tolist()] for name, value in values.items()}


CASES = []
for shape in ((4, 6), (7, 3), (2, 3, 4), (9,)):
    for options in ({}, {"lr": 0.7, "d": 1.1, "weight_decay": 0.1, "beta2_decay": -0.5, "eps2": 0.9}):
        given = {"lr": 0.05, "beta2_decay": -0.8, "eps2": 1e-3, "d": 1.0, "weight_decay": 0.0} | options
        CASES.append({"shape": shape} | given | {name: steps(shape, dtype, **given)
                                                 for name, dtype in (("f64", torch.float64), ("f32", torch.float32))})
text = ",\n".join(json.dumps(case) for case in CASES)
pathlib.Path(__file__).with_name("adafactor.json").write_text(f"[\n{text}\n]\n")
