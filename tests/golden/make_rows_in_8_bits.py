#!/usr/bin/env python3
"""Writes rows_in_8_bits.json beside itself: a linear layer, a head's loss and an embedding of weights in float8_e4m3fn with a scale a row, by PyTorch.

    pip install torch        # 2.9 or later; the CPU build does
    python3 tests/golden/make_rows_in_8_bits.py

The head's targets are 3 i mod 7, the embedding's ids 5 i mod 7. Element i of x is sin(1 + 0.7 i), of the weight 0.05 cos(0.3 i) 1.7^(i mod 5 - 2), of y's gradient cos(2 + 1.1 i).
"""
import json
import pathlib

import torch

N, IN, OUT = 5, 12, 7


def filled(shape, f):
    i = torch.arange(shape[0] * shape[1], dtype=torch.float64)
    return f(i).float().reshape(shape)


x = filled((N, IN), lambda i: torch.sin(1 + 0.7 * i)).requires_grad_()
weight = filled((OUT, IN), lambda i: 0.05 * torch.cos(0.3 * i) * 1.7 ** (i % 5 - 2))
scales = torch.exp2(torch.ceil(torch.log2(weight.abs().amax(1, keepdim=True) / 448)))
codes = (weight / scales).to(torch.float8_e4m3fn)
y = torch.nn.functional.linear(x, codes.float() * scales)
y.backward(filled((N, OUT), lambda i: torch.cos(2 + 1.1 * i)))
head = x.detach().clone().requires_grad_()
loss = torch.nn.functional.cross_entropy(torch.nn.functional.linear(head, codes.float() * scales), torch.arange(N) * 3 % OUT)
loss.backward()
looked_up = torch.nn.functional.embedding(torch.arange(N) * 5 % OUT, codes.float() * scales)
out = {"codes": codes.view(torch.uint8).flatten().tolist(), "scales": scales.flatten().tolist(),
       "y": [round(v, 9) for v in y.detach().flatten().tolist()], "dx": [round(v, 9) for v in x.grad.flatten().tolist()],
       "loss": [round(loss.item(), 9)], "head_dx": [round(v, 9) for v in head.grad.flatten().tolist()],
       "looked_up": [round(v, 9) for v in looked_up.flatten().tolist()]}
pathlib.Path(__file__).with_name("rows_in_8_bits.json").write_text(json.dumps(out) + "\n")
