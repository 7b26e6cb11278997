#!/usr/bin/env python3
"""Writes sgd.json beside itself: values and momentum after five steps of torch.optim.SGD.

    pip install torch        # the CPU build does
    python3 tests/golden/make_sgd.py

tests/parity takes the same steps. Value i is sin(1 + 0.7 i), its gradient at step t cos(t + 1.3 i + 0.1 i t).
"""
import json
import pathlib

import torch

STEPS, COUNT = 5, 11


def steps(dtype, **options):
    i = torch.arange(COUNT, dtype=torch.float64)
    p = torch.nn.Parameter(torch.sin(1 + 0.7 * i).float().to(dtype))
    optimizer = torch.optim.SGD([p], **options)
    for t in range(STEPS):
        p.grad = torch.cos(t + 1.3 * i + 0.1 * i * t).float().to(dtype)
        optimizer.step()
    momentum = optimizer.state[p].get("momentum_buffer")
    return [[round(x, 12) for x in each.detach().double().tolist()] for each in (p, momentum) if each is not None]


CASES = []
for options in ({}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.9}, {"momentum": 0.5, "dampening": 0.25}):
    for weight_decay in (0.0, 0.1):
        given = {"lr": 0.05, "momentum": 0.0, "dampening": 0.0, "nesterov": False} | options | {"weight_decay": weight_decay}
        CASES.append(given | {"f64": steps(torch.float64, **given), "f32": steps(torch.float32, **given)})
text = ",\n".join(json.dumps(case) for case in CASES)
pathlib.Path(__file__).with_name("sgd.json").write_text(f"[\n{text}\n]\n")
