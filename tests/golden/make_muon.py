#!/usr/bin/env python3
"""Writes muon.json beside itself: matrices after five steps of torch.optim.Muon.

    pip install torch        # 2.9 or later; the CPU build does
    python3 tests/golden/make_muon.py

tests/parity takes the same steps. Element i of a matrix is sin(1 + 0.7 i), of its gradient at step t cos(t + 1.3 i + 0.1 i t). PyTorch
iterates in bf16: `bf16` is what it gives. For `f32` and `f64` its bfloat16 is that type, for the iteration as for the rest.
"""
import json
import math
import pathlib

import torch

STEPS = 5


def steps(shape, dtype, iterated, **options):
    count = math.prod(shape)
    i = torch.arange(count, dtype=torch.float64)
    p = torch.nn.Parameter(torch.sin(1 + 0.7 * i).float().to(dtype).reshape(shape))
    optimizer = torch.optim.Muon([p], **options)
    kept = torch.bfloat16, torch.Tensor.bfloat16
    torch.bfloat16, torch.Tensor.bfloat16 = iterated, lambda x: x.to(iterated)
    try:
        for t in range(STEPS):
            p.grad = torch.cos(t + 1.3 * i + 0.1 * i * t).float().to(dtype).reshape(shape)
            optimizer.step()
    finally:
        torch.bfloat16, torch.Tensor.bfloat16 = kept
    return [round(x, 12) for x in p.detach().double().flatten().tolist()]


CASES = []
for shape in ((4, 6), (7, 3), (5, 5), (1, 4)):
    for options in ({}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}, {"ns_steps": 2, "momentum": 0.5, "weight_decay": 0.0}):
        given = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "adjust_lr_fn": "original", "ns_steps": 5} | options
        CASES.append({"shape": shape} | given | {
            "f64": steps(shape, torch.float64, torch.float64, **given),
            "f32": steps(shape, torch.float32, torch.float32, **given),
            "bf16": steps(shape, torch.float32, torch.bfloat16, **given)})
text = ",\n".join(json.dumps(case) for case in CASES)
pathlib.Path(__file__).with_name("muon.json").write_text(f"[\n{text}\n]\n")
