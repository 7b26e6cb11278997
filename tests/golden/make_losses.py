#!/usr/bin/env python3
"""Writes llama.json and gpt2.json beside itself: losses and gradient norms of tiny models trained by PyTorch.

    pip install torch        # the CPU build does
    python3 tests/golden/make_losses.py

tests/parity repeats the training from the same weights and tokens, which both sides compute by the formulas below. The
models are written out here in plain functions, with Hugging Face's parameter names, shapes and orientation. Each file also
holds what the same training gives in float64: it says how much of a difference is rounding.
"""
import json
import math
import pathlib

import numpy
import torch
import torch.nn.functional as F

SEED = 1
STEPS = 20
BATCH, LENGTH, VOCAB = 3, 16, 61
OPTIMIZER = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
MAX_NORM = 1.0

LLAMA = dict(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=VOCAB, max_seq_len=LENGTH,
             rope_theta=10000.0, norm_eps=1e-5)
GPT2 = dict(dim=32, n_layers=2, n_heads=4, ffn_dim=128, vocab_size=VOCAB, max_seq_len=24, norm_eps=1e-5)


def fnv1a(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) % 2**64
    return value


def bits(key, count):
    """splitmix64 of key + 0, key + 1, ... as uint64 (Steele, Lea and Flood, 2014)."""
    with numpy.errstate(over="ignore"):
        z = (numpy.arange(count, dtype=numpy.uint64) + numpy.uint64(key)) * numpy.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        return z ^ (z >> numpy.uint64(31))


def weight(name, shape):
    """1/16 of a number in [-1, 1) with 24 bits, plus 1 for the weights of norms: exact in float32 but for that sum."""
    unit = (bits(fnv1a(f"{SEED} {name}"), math.prod(shape)) >> numpy.uint64(40)).astype(numpy.float64) * 2.0**-23 - 1
    centre = 1.0 if len(shape) == 1 and name.endswith("weight") else 0.0
    return torch.from_numpy((centre + unit / 16).astype(numpy.float32).reshape(shape))


def batch(step):
    """Inputs and targets: two batches take turns, so that there is something to learn."""
    tokens = bits(fnv1a(f"{SEED} tokens {step % 2}"), BATCH * (LENGTH + 1)) % numpy.uint64(VOCAB)
    tokens = torch.from_numpy(tokens.astype(numpy.int64).reshape(BATCH, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def causal_attention(q, k, v):
    """q [B, T, H, D], k and v [B, T, K, D]."""
    repeat = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeat, dim=2), v.repeat_interleave(repeat, dim=2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[3])
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(future, -math.inf).softmax(-1), v).flatten(2)


def rms_norm(x, w, eps):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * w


def rotate(x, theta):
    half = x.shape[3] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype)[None, :, None], angle.sin().to(x.dtype)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def llama_shapes(c):
    d, kv = c["dim"], c["dim"] // c["n_heads"] * c["n_kv_heads"]
    shapes = {"model.embed_tokens.weight": (VOCAB, d), "model.norm.weight": (d,), "lm_head.weight": (VOCAB, d)}
    for i in range(c["n_layers"]):
        p = f"model.layers.{i}."
        shapes |= {p + "self_attn.q_proj.weight": (d, d), p + "self_attn.k_proj.weight": (kv, d),
                   p + "self_attn.v_proj.weight": (kv, d), p + "self_attn.o_proj.weight": (d, d),
                   p + "mlp.gate_proj.weight": (c["ffn_dim"], d), p + "mlp.up_proj.weight": (c["ffn_dim"], d),
                   p + "mlp.down_proj.weight": (d, c["ffn_dim"]), p + "input_layernorm.weight": (d,),
                   p + "post_attention_layernorm.weight": (d,)}
    return shapes


def llama(c, w, tokens):
    b, t, head = *tokens.shape, c["dim"] // c["n_heads"]
    h = w["model.embed_tokens.weight"][tokens]
    for i in range(c["n_layers"]):
        def part(name):
            return w[f"model.layers.{i}.{name}.weight"]
        x = rms_norm(h, part("input_layernorm"), c["norm_eps"])
        q, k, v = ((x @ part(f"self_attn.{n}_proj").T).view(b, t, -1, head) for n in "qkv")
        q, k = rotate(q, c["rope_theta"]), rotate(k, c["rope_theta"])
        h = h + causal_attention(q, k, v) @ part("self_attn.o_proj").T
        x = rms_norm(h, part("post_attention_layernorm"), c["norm_eps"])
        h = h + (F.silu(x @ part("mlp.gate_proj").T) * (x @ part("mlp.up_proj").T)) @ part("mlp.down_proj").T
    return rms_norm(h, w["model.norm.weight"], c["norm_eps"]) @ w["lm_head.weight"].T


def gpt2_shapes(c):
    d = c["dim"]
    shapes = {"transformer.wte.weight": (VOCAB, d), "transformer.wpe.weight": (c["max_seq_len"], d),
              "transformer.ln_f.weight": (d,), "transformer.ln_f.bias": (d,)}
    for i in range(c["n_layers"]):
        p = f"transformer.h.{i}."
        for norm in ("ln_1", "ln_2"):
            shapes |= {p + norm + ".weight": (d,), p + norm + ".bias": (d,)}
        for name, rows, columns in (("attn.c_attn", d, 3 * d), ("attn.c_proj", d, d), ("mlp.c_fc", d, c["ffn_dim"]),
                                    ("mlp.c_proj", c["ffn_dim"], d)):
            shapes |= {p + name + ".weight": (rows, columns), p + name + ".bias": (columns,)}
    return shapes


def gpt2(c, w, tokens):
    b, t, d = *tokens.shape, c["dim"]
    h = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][:t]
    for i in range(c["n_layers"]):
        def linear(name, x):
            return x @ w[f"transformer.h.{i}.{name}.weight"] + w[f"transformer.h.{i}.{name}.bias"]

        def norm(name, x):
            p = f"transformer.h.{i}.{name}."
            return F.layer_norm(x, (d,), w[p + "weight"], w[p + "bias"], c["norm_eps"])
        q, k, v = (x.view(b, t, c["n_heads"], -1) for x in linear("attn.c_attn", norm("ln_1", h)).split(d, -1))
        h = h + linear("attn.c_proj", causal_attention(q, k, v))
        h = h + linear("mlp.c_proj", F.gelu(linear("mlp.c_fc", norm("ln_2", h)), approximate="tanh"))
    h = F.layer_norm(h, (d,), w["transformer.ln_f.weight"], w["transformer.ln_f.bias"], c["norm_eps"])
    return h @ w["transformer.wte.weight"].T


def train(model, config, shapes, dtype):
    w = {name: weight(name, shape).to(dtype).requires_grad_() for name, shape in shapes.items()}
    optimizer = torch.optim.AdamW(w.values(), **OPTIMIZER)
    losses, norms = [], []
    for step in range(STEPS):
        tokens, targets = batch(step)
        loss = F.cross_entropy(model(config, w, tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(w.values(), MAX_NORM).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def main():
    torch.set_num_threads(1)
    folder = pathlib.Path(__file__).parent
    for name, model, config, shapes in (("llama", llama, LLAMA, llama_shapes), ("gpt2", gpt2, GPT2, gpt2_shapes)):
        losses, norms = train(model, config, shapes(config), torch.float32)
        exact_losses, exact_norms = train(model, config, shapes(config), torch.float64)
        golden = dict(made_by="tests/golden/make_losses.py", pytorch=torch.__version__, seed=SEED, config=config,
                      batch=BATCH, length=LENGTH, max_norm=MAX_NORM, optimizer=OPTIMIZER,
                      losses=losses, grad_norms=norms, losses_f64=exact_losses, grad_norms_f64=exact_norms)
        lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in golden.items())
        (folder / f"{name}.json").write_text("{\n" + lines + "\n}\n")
        worst = max(abs(a - b) for a, b in zip(losses, exact_losses))
        print(f"{name}: loss {losses[0]:.6f} -> {losses[-1]:.6f}, float32 and float64 differ by at most {worst:.1e}")


if __name__ == "__main__":
    main()
