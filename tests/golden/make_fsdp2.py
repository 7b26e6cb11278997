#!/usr/bin/env python3
"""Writes fsdp2.json beside itself: losses, gradient norms and gradients of tiny Llamas that PyTorch's fully_shard trains on 2 and 4 ranks
(CPU, gloo).

    pip install torch        # the CPU build does
    python3 tests/golden/make_fsdp2.py [CELL...]

tests/parity/fsdp2_golden_test trains the same cells: weights and tokens come from the formulas of make_losses.py. Beside each stands what
one process gives in float64, which says how much of a difference is rounding. Of a gradient stands, for the first step and the last,
the sum of its elements with signs from a formula: of each parameter, by name, null for none.
"""
import datetime
import json
import math
import pathlib
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from make_losses import SEED, VOCAB, bits, causal_attention, fnv1a, rotate, weight

STEPS, ROWS, LENGTH = 10, 4, 8  # rows of a micro-batch, over all ranks
CONFIG = dict(dim=24, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=40, vocab_size=VOCAB, max_seq_len=LENGTH, rope_theta=10000.0, norm_eps=1e-5)
UNEVEN = CONFIG | dict(dim=6, n_heads=1, n_kv_heads=1, ffn_dim=7)  # of 6 rows the last of 4 ranks has none
ADAMW = dict(name="AdamW", lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
SGD = dict(name="SGD", lr=0.5, momentum=0.9)  # AdamW counts the steps of each parameter, ours those of the optimizer
RANKS = (2, 4)
PLAIN = dict(replicas=1, config=CONFIG, tied=False, param_dtype="float32", optimizer=ADAMW, no_decay=False, micro_batches=1,
             reduces="each", norm_type=2.0, max_norm=1.0, recompute=False, frozen=[], thaws_at=0, offload=False)
CELLS = {  # replicas: as many, or as many as there are ranks
    "plain": {},
    "bf16": dict(param_dtype="bfloat16"),
    "hybrid": dict(replicas=2),
    "replicated": dict(replicas=4),
    "3 micro-batches, each reduced": dict(micro_batches=3),
    "3 micro-batches, the last reduced": dict(micro_batches=3, reduces="last"),
    "3 micro-batches, hybrid, reduced over replicas at the last": dict(replicas=2, micro_batches=3, reduces="over replicas last"),
    "clipped by the sum of magnitudes": dict(norm_type=1.0, max_norm=20.0),
    "clipped by the largest magnitude": dict(norm_type=math.inf, max_norm=0.02),
    "tied": dict(tied=True),
    "uneven": dict(config=UNEVEN),
    "a block frozen and thawed": dict(optimizer=SGD, frozen=["model.layers.0."], thaws_at=5),
    "norms frozen": dict(optimizer=SGD, frozen=["norm.weight"], thaws_at=STEPS),
    "recomputed": dict(recompute=True),
    "offloaded": dict(offload=True),
    "offloaded, bf16, 3 micro-batches": dict(param_dtype="bfloat16", micro_batches=3, offload=True),
    "no decay of norms and embeddings": dict(no_decay=True, optimizer=ADAMW | dict(weight_decay=1.0)),
}


class Norm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(dim)), eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, self.head, self.theta = c["dim"], c["dim"] // c["n_heads"], c["rope_theta"]
        self.q_proj, self.o_proj = linear(d, d), linear(d, d)
        self.k_proj, self.v_proj = (linear(d, self.head * c["n_kv_heads"]) for _ in "kv")

    def forward(self, x):
        q, k, v = (p(x).view(*x.shape[:2], -1, self.head) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(causal_attention(rotate(q, self.theta), rotate(k, self.theta), v))


class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj, self.up_proj = (linear(c["dim"], c["ffn_dim"]) for _ in "gu")
        self.down_proj = linear(c["ffn_dim"], c["dim"])

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (Norm(c["dim"], c["norm_eps"]) for _ in "ip")
        self.self_attn, self.mlp = Attention(c), Mlp(c)

    def forward(self, h):
        h = h + self.self_attn(self.input_layernorm(h))
        return h + self.mlp(self.post_attention_layernorm(h))


class Llama(nn.Module):
    def __init__(self, c, tied, recompute):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCAB, c["dim"])
        self.model.layers = nn.ModuleList(Block(c) for _ in range(c["n_layers"]))
        self.model.norm = Norm(c["dim"], c["norm_eps"])
        self.lm_head = linear(c["dim"], VOCAB)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.tied, self.recompute = tied, recompute

    def parts(self):
        return [*self.model.layers] if self.tied else [self.model.embed_tokens, *self.model.layers, self.lm_head]

    def forward(self, tokens, targets):
        h = self.model.embed_tokens(tokens)
        for block in self.model.layers:
            h = checkpoint(block, h, use_reentrant=False) if self.recompute else block(h)
        logits = self.lm_head(self.model.norm(h))
        return F.cross_entropy(logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten())


def batch(step, micro, rank, ranks):
    """This rank's rows of a micro-batch; two batches take turns."""
    tokens = bits(fnv1a(f"{SEED} tokens {step % 2} {micro}"), ROWS * (LENGTH + 1)) % VOCAB
    tokens = torch.from_numpy(tokens.astype("int64").reshape(ROWS, LENGTH + 1)).chunk(ranks)[rank]
    return tokens[:, :-1], tokens[:, 1:]


def make_optimizer(model, cell):
    options = {key: value for key, value in cell["optimizer"].items() if key != "name"}
    decayed = [p for name, p in model.named_parameters() if not cell["no_decay"] or "norm" not in name and "embed" not in name]
    others = [p for p in model.parameters() if not any(p is q for q in decayed)]
    groups = [dict(params=decayed)] + ([dict(params=others, weight_decay=0.0)] if others else [])
    return getattr(torch.optim, cell["optimizer"]["name"])(groups, **options)


def signed_sum(name, gradient):
    signs = 1.0 - 2.0 * torch.from_numpy((bits(fnv1a(f"{SEED} signs {name}"), gradient.numel()) & 1).astype("float64"))
    return (gradient.flatten().double() * signs).sum().item()


def train(cell, rank, ranks, dtype=torch.float32):
    """Of each step the mean loss of the ranks and the norm before clipping; signed sums of the gradients of the first and the last. In one
    rank there are no units."""
    model = Llama(cell["config"], cell["tied"], cell["recompute"]).to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weight(name, tuple(p.shape)))
    if ranks > 1:
        sizes, names = (ranks,), ("shard",)
        replicas = min(cell["replicas"], ranks)
        if replicas > 1:
            sizes, names = (replicas, ranks // replicas), ("replicate", "shard")
        options = dict(mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
        if cell["param_dtype"] != "float32":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=getattr(torch, cell["param_dtype"]), reduce_dtype=torch.float32)
        if cell["offload"]:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)  # of the device cpu there is nothing to pin
        for part in model.parts():
            fully_shard(part, **options)
        fully_shard(model, **options)
    optimizer = make_optimizer(model, cell)
    losses, norms, gradients = [], [], []
    for step in range(STEPS):
        for name, p in model.named_parameters():
            if any(part in name for part in cell["frozen"]):
                p.requires_grad_(step >= cell["thaws_at"])
        loss_of_step = torch.zeros((), dtype=torch.float64)
        for micro in range(cell["micro_batches"]):
            is_last = micro + 1 == cell["micro_batches"]
            if ranks > 1 and cell["reduces"] == "last":
                model.set_requires_gradient_sync(is_last)
            if ranks > 1 and cell["reduces"] == "over replicas last":
                model.set_requires_all_reduce(is_last)
            loss = model(*batch(step, micro, rank, ranks)) / cell["micro_batches"]
            loss.backward()
            loss_of_step += loss.detach()
        if step in (0, STEPS - 1):
            whole = {name: p.grad if ranks == 1 or p.grad is None else p.grad.full_tensor() for name, p in model.named_parameters()}
            gradients.append([None if g is None else signed_sum(name, g) for name, g in sorted(whole.items())])
        norm = nn.utils.clip_grad_norm_(model.parameters(), cell["max_norm"], norm_type=cell["norm_type"])
        norms.append((norm.full_tensor() if ranks > 1 else norm).item())
        if ranks > 1:
            dist.all_reduce(loss_of_step)
        losses.append(loss_of_step.item() / ranks)
        optimizer.step()
        optimizer.zero_grad()
    return dict(losses=losses, grad_norms=norms, gradients=gradients)


def run_rank(rank, ranks, cells, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{ranks}", rank=rank, world_size=ranks,
                            timeout=datetime.timedelta(seconds=300))
    found = {name: train(cell, rank, ranks) for name, cell in cells.items()}
    if rank == 0:
        pathlib.Path(folder, f"{ranks}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def rounded(value):
    """Nine digits, which every float32 keeps."""
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return value if value is None else float(f"{value:.9g}")


def main():
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or list(CELLS)
    cells = {name: PLAIN | CELLS[name] for name in chosen}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in RANKS:
            torch.multiprocessing.spawn(run_rank, (ranks, cells, folder), nprocs=ranks)
            found[ranks] = json.loads(pathlib.Path(folder, f"{ranks}.json").read_text())
    lines = []
    for name, cell in cells.items():
        runs = {"float64": train(cell, 0, 1, torch.float64)} | {str(ranks): found[ranks][name] for ranks in RANKS}
        runs = {of: {what: rounded(values) for what, values in run.items()} for of, run in runs.items()}
        lines.append("  " + json.dumps(dict(name=name) | CELLS[name] | dict(runs=runs)).replace("Infinity", '"inf"'))
        exact = runs["float64"]
        for ranks in map(str, RANKS):
            losses, norms = runs[ranks]["losses"], runs[ranks]["grad_norms"]
            print(f"{name}, {ranks} ranks: loss {losses[0]:.6f} -> {losses[-1]:.6f}, norm {norms[0]:.4f}, float64 differs by at most "
                  f"{max(abs(a - b) for a, b in zip(losses, exact['losses'])):.1e}, norms "
                  f"{max(abs(a / b - 1) for a, b in zip(norms, exact['grad_norms'])):.1e}")
    head = dict(made_by="tests/golden/make_fsdp2.py", pytorch=torch.__version__, seed=SEED, rows=ROWS, length=LENGTH, plain=PLAIN)
    text = "{\n" + "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    text += ' "cells": [\n' + ",\n".join(lines) + "\n ]\n}\n"
    if not sys.argv[1:]:
        (pathlib.Path(__file__).parent / "fsdp2.json").write_text(text)


if __name__ == "__main__":
    main()
