#!/usr/bin/env python3
"""Writes functions.json beside itself: values and gradients of attention and losses by PyTorch, in float64.

    pip install torch        # the CPU build does
    python3 tests/golden/make_functions.py

tests/parity computes the same cases by name. Inputs are sin(a + 0.7 i), a the input's number from 1; the gradient of the
result is cos(i). A case holds the result, then the gradient of each input that has one. NaN and infinities are strings.
"""
import json
import math
import pathlib

import torch
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)
CASES = {}


def wave(number, *shape):
    return torch.sin(number + 0.7 * torch.arange(math.prod(shape))).reshape(shape)


def text(x):
    return [round(v, 10) if math.isfinite(v) else str(v) for v in x.flatten().tolist()]


def case(name, f, *inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = f(*leaves)
    y.backward(torch.cos(torch.arange(y.numel(), dtype=torch.float64)).reshape(y.shape))
    CASES[name] = [text(y)] + [text(x.grad) for x in leaves]


attention = F.scaled_dot_product_attention
q, k, v = wave(1, 2, 4, 3, 2), wave(2, 2, 2, 5, 2), wave(3, 2, 2, 5, 3)
mask = torch.tensor([[True, False, True, True, False], [False] * 5, [False, True, True, False, True]])
bias = wave(4, 4, 1, 5)
case("attention grouped", lambda q, k, v: attention(q, k, v, enable_gqa=True), q, k, v)
case("attention causal top left", lambda q, k, v: attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True), q, k, v)
case("attention masked", lambda q, k, v: attention(q, k, v, attn_mask=mask, enable_gqa=True), q, k, v)
case("attention biased", lambda q, k, v, b: attention(q, k, v, attn_mask=b, enable_gqa=True), q, k, v, bias)
same = wave(1, 1, 2, 4, 2), wave(2, 1, 2, 4, 2), wave(3, 1, 2, 4, 2)
case("attention fused", lambda q, k, v: attention(q, k, v, scale=0.25), *same)
case("attention fused causal", lambda q, k, v: attention(q, k, v, is_causal=True), *same)

x3 = wave(1, 2, 3, 2)
for dim in (0, 1, 2):
    case(f"softmax {dim}", lambda x, d=dim: F.softmax(x, d), x3)
    case(f"log_softmax {dim}", lambda x, d=dim: F.log_softmax(x, d), x3)

logits, targets = wave(1, 4, 3), torch.tensor([2, 1, 0, 1])
images, pixels = wave(2, 2, 3, 2), torch.tensor([[0, 2], [1, 1]])
weight = torch.tensor([0.5, 1.5, 2.0])
for reduction in ("mean", "sum", "none"):
    for smoothing in (0.0, 0.2):
        for w in (None, weight):
            name = f"{reduction} {smoothing} {'weighted' if w is not None else 'plain'}"
            options = dict(reduction=reduction, label_smoothing=smoothing, weight=w, ignore_index=1)
            case(f"cross_entropy {name}", lambda x, o=options: F.cross_entropy(x, targets, **o), logits)
            case(f"cross_entropy images {name}", lambda x, o=options: F.cross_entropy(x, pixels, **o), images)
    case(f"nll_loss {reduction}", lambda x, r=reduction: F.nll_loss(x, targets, weight, ignore_index=1, reduction=r), logits)
    case(f"nll_loss images {reduction}", lambda x, r=reduction: F.nll_loss(x, pixels, reduction=r), images)
    x, t = 2 * wave(1, 2, 3), wave(2, 2, 3)
    p, u = 0.5 + 0.4 * wave(1, 2, 3), 0.5 + 0.5 * wave(2, 2, 3)
    scale = 1 + 0.5 * wave(3, 2, 3)
    case(f"mse_loss {reduction}", lambda x, t, r=reduction: F.mse_loss(x, t, reduction=r), x, t)
    case(f"l1_loss {reduction}", lambda x, t, r=reduction: F.l1_loss(x, t, reduction=r), x, t)
    case(f"huber_loss {reduction}", lambda x, t, r=reduction: F.huber_loss(x, t, reduction=r, delta=0.6), x, t)
    case(f"smooth_l1_loss {reduction}", lambda x, t, r=reduction: F.smooth_l1_loss(x, t, reduction=r, beta=0.6), x, t)
    case(f"binary_cross_entropy {reduction}", lambda p, u, r=reduction: F.binary_cross_entropy(p, u, weight=scale, reduction=r), p, u)
    case(f"binary_cross_entropy_with_logits {reduction}",
         lambda x, u, r=reduction: F.binary_cross_entropy_with_logits(x, u, weight=scale, pos_weight=weight, reduction=r), 20 * x, u)
    case(f"kl_div {reduction}", lambda x, u, r=reduction: F.kl_div(x, u, reduction=r), x, u)
    case(f"kl_div log {reduction}", lambda x, t, r=reduction: F.kl_div(x, t, reduction=r, log_target=True), x, t)
case("kl_div batchmean", lambda x, u: F.kl_div(x, u, reduction="batchmean"), x, u)
case("cross_entropy all ignored", lambda x: F.cross_entropy(x, torch.full((4,), -100)), logits)
case("binary_cross_entropy at the ends", lambda p, u: F.binary_cross_entropy(p, u, reduction="none"),
     torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.tensor([0.25, 0.25, 0.0, 1.0]))

path = pathlib.Path(__file__).with_name("functions.json")
path.write_text("{\n" + ",\n".join(f"{json.dumps(n)}: {json.dumps(c, separators=(',', ':'))}" for n, c in CASES.items()) + "\n}\n")
