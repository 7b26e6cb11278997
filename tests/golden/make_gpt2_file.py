#!/usr/bin/env python3
"""Writes gpt2.safetensors and gpt2_logits.json beside itself: a tiny GPT-2 in the form of the public files, and its logits.

    python3 tests/golden/make_gpt2_file.py        # plain Python, a second

The form is that of huggingface.co/openai-community/gpt2: names without "transformer.", linear layers as [in, out], the mask of
attention as the buffer h.N.attn.bias, no lm_head, which is wte. The logits are computed here in float64.
"""
import json
import math
import pathlib
import struct

DIM, LAYERS, HEADS, VOCAB, LENGTH = 8, 2, 2, 11, 6
TOKENS = [3, 1, 4, 1, 5]
EPS = 1e-5


def splitmix(z):
    z = z * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def values(name, count):
    """Multiples of 1/64 within 1/2 of 0, or of 1 for the weights of norms: exact in bfloat16 too."""
    key = sum(ord(c) * 257**i for i, c in enumerate(name)) % 2**64
    centre = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
    return [centre + (splitmix(key + i) % 64 - 32) / 64 for i in range(count)]


def shapes():
    yield "wte.weight", [VOCAB, DIM]
    yield "wpe.weight", [LENGTH, DIM]
    for i in range(LAYERS):
        for part, shape in [("ln_1.weight", [DIM]), ("ln_1.bias", [DIM]), ("attn.bias", [1, 1, LENGTH, LENGTH]),
                            ("attn.c_attn.weight", [DIM, 3 * DIM]), ("attn.c_attn.bias", [3 * DIM]),
                            ("attn.c_proj.weight", [DIM, DIM]), ("attn.c_proj.bias", [DIM]),
                            ("ln_2.weight", [DIM]), ("ln_2.bias", [DIM]),
                            ("mlp.c_fc.weight", [DIM, 4 * DIM]), ("mlp.c_fc.bias", [4 * DIM]),
                            ("mlp.c_proj.weight", [4 * DIM, DIM]), ("mlp.c_proj.bias", [DIM])]:
            yield f"h.{i}.{part}", shape
    yield "ln_f.weight", [DIM]
    yield "ln_f.bias", [DIM]


def write_file(path, tensors):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (shape, floats) in tensors.items():
        end = len(data) + 4 * len(floats)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), end]}
        data += struct.pack(f"<{len(floats)}f", *floats)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def logits(weights):
    def matrix(name):
        (rows, columns), flat = weights[name]
        return [flat[r * columns:(r + 1) * columns] for r in range(rows)]

    def norm(x, name):
        mean = sum(x) / DIM
        scale = 1 / math.sqrt(sum((v - mean) ** 2 for v in x) / DIM + EPS)
        return [(v - mean) * scale * w + b for v, w, b in zip(x, weights[name + ".weight"][1], weights[name + ".bias"][1])]

    def linear(x, name):
        w, b = matrix(name + ".weight"), weights[name + ".bias"][1]
        return [sum(v * row[o] for v, row in zip(x, w)) + b[o] for o in range(len(b))]

    def gelu(v):
        return 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))

    def attention(rows, name):
        qkv, width, mixed = [linear(x, name + ".c_attn") for x in rows], DIM // HEADS, []
        for t, row in enumerate(qkv):
            out = []
            for first in range(0, DIM, width):
                q = row[first:first + width]
                scores = [sum(a * b for a, b in zip(q, qkv[s][DIM + first:])) / math.sqrt(width) for s in range(t + 1)]
                shares = [math.exp(v - max(scores)) for v in scores]
                out += [sum(p * qkv[s][2 * DIM + first + d] for s, p in enumerate(shares)) / sum(shares) for d in range(width)]
            mixed.append(linear(out, name + ".c_proj"))
        return mixed

    wte, wpe = matrix("wte.weight"), matrix("wpe.weight")
    h = [[a + b for a, b in zip(wte[token], wpe[t])] for t, token in enumerate(TOKENS)]
    for i in range(LAYERS):
        for x, y in zip(h, attention([norm(x, f"h.{i}.ln_1") for x in h], f"h.{i}.attn")):
            x[:] = [a + b for a, b in zip(x, y)]
        for x in h:
            y = linear([gelu(v) for v in linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")], f"h.{i}.mlp.c_proj")
            x[:] = [a + b for a, b in zip(x, y)]
    return [[sum(a * b for a, b in zip(norm(x, "ln_f"), row)) for row in wte] for x in h]


def main():
    folder = pathlib.Path(__file__).resolve().parent
    mask = [float(s <= t) for t in range(LENGTH) for s in range(LENGTH)]
    tensors = {name: (shape, mask if name.endswith(".attn.bias") else values(name, math.prod(shape))) for name, shape in shapes()}
    write_file(folder / "gpt2.safetensors", tensors)
    config = dict(dim=DIM, n_layers=LAYERS, n_heads=HEADS, vocab_size=VOCAB, max_seq_len=LENGTH)
    text = json.dumps(dict(config=config, tokens=TOKENS, logits=logits(tensors)))
    (folder / "gpt2_logits.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
