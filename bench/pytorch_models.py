"""The models of the comparisons as PyTorch writes them, with Hugging Face's parameter names, and the weights that both sides
start from. Imports torch only where a function needs it."""
import json
import math
import mmap
import struct

THETA, EPS = 10000.0, 1e-5


def read_safetensors(path):
    """The file's tensors, mapped: pages are read when they are used, and written to a copy."""
    import torch
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    size, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    return {name: torch.frombuffer(data, dtype=torch.float32, count=math.prod(e["shape"]),
                                   offset=8 + size + e["data_offsets"][0]).reshape(e["shape"]) for name, e in header.items()}


def build(c):
    """`c`: the keys of tessera-train's model section, and length."""
    return build_gpt2(c) if c["name"] == "gpt2" else build_llama(c)


def units(model):
    """What fully_shard takes as units of their own, the root besides."""
    if hasattr(model, "transformer"):
        return list(model.transformer.h)
    return [model.model.embed_tokens, *model.model.layers, model.lm_head]


def last_norms(model):
    """What stands between the blocks and the head; a head of its own is a unit."""
    return [model.transformer.ln_f] if hasattr(model, "transformer") else [model.model.norm]


def build_llama(c):
    """Half rotation, grouped queries."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    head = c["dim"] // c["n_heads"]
    hidden = c.get("ffn_dim") or (math.ceil(8 * c["dim"] / 3) + 31) // 32 * 32

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            for name, heads in (("q", c["n_heads"]), ("k", c["n_kv_heads"]), ("v", c["n_kv_heads"])):
                setattr(self, name + "_proj", nn.Linear(c["dim"], heads * head, bias=False))
            self.o_proj = nn.Linear(c["dim"], c["dim"], bias=False)

        def forward(self, x, cos, sin):
            b, t, _ = x.shape
            q, k, v = (p(x).view(b, t, -1, head).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))

            def rotate(z):
                one, two = z.chunk(2, -1)
                return z * cos.to(z.dtype) + torch.cat((-two, one), -1) * sin.to(z.dtype)
            out = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True,
                                                 enable_gqa=c["n_kv_heads"] != c["n_heads"])
            return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = (nn.Linear(c["dim"], hidden, bias=False) for _ in range(2))
            self.down_proj = nn.Linear(hidden, c["dim"], bias=False)

        def forward(self, x):
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(c["dim"], EPS) for _ in range(2))
            self.self_attn, self.mlp = Attention(), Mlp()

        def forward(self, h, cos, sin):
            h = h + self.self_attn(self.input_layernorm(h), cos, sin)
            return h + self.mlp(self.post_attention_layernorm(h))

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens = nn.Embedding(c["vocab_size"], c["dim"])
            self.layers = nn.ModuleList(Block() for _ in range(c["n_layers"]))
            self.norm = nn.RMSNorm(c["dim"], EPS)

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.lm_head = Inner(), nn.Linear(c["dim"], c["vocab_size"], bias=False)
            with torch.device("cpu"):  # values, also where the weights are yet without memory
                angle = torch.outer(torch.arange(c["length"]).double(), THETA ** (-torch.arange(head // 2).double() / (head // 2)))
                angle = torch.cat((angle, angle), -1)
                self.cos, self.sin = angle.cos().float(), angle.sin().float()

        def forward(self, tokens):
            h = self.model.embed_tokens(tokens)
            for block in self.model.layers:
                h = block(h, self.cos, self.sin)
            return self.lm_head(self.model.norm(h))

    return Llama()


def build_gpt2(c):
    """One weight for embedding and head; the linear layers of the blocks are stored [in, out]."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Conv1D(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.empty(inputs, outputs)), nn.Parameter(torch.empty(outputs))

        def forward(self, x):
            return torch.addmm(self.bias, x.flatten(0, 1), self.weight).view(*x.shape[:2], -1)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_attn, self.c_proj = Conv1D(c["dim"], 3 * c["dim"]), Conv1D(c["dim"], c["dim"])

        def forward(self, x):
            b, t, _ = x.shape
            q, k, v = (z.view(b, t, c["n_heads"], -1).transpose(1, 2) for z in self.c_attn(x).chunk(3, -1))
            return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1))

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_fc, self.c_proj = Conv1D(c["dim"], 4 * c["dim"]), Conv1D(4 * c["dim"], c["dim"])

        def forward(self, x):
            return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.ln_2 = (nn.LayerNorm(c["dim"], EPS) for _ in range(2))
            self.attn, self.mlp = Attention(), Mlp()

        def forward(self, x):
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(c["vocab_size"], c["dim"]), nn.Embedding(c["max_seq_len"], c["dim"])
            self.h = nn.ModuleList(Block() for _ in range(c["n_layers"]))
            self.ln_f = nn.LayerNorm(c["dim"], EPS)

    class Gpt2(nn.Module):
        def __init__(self):
            super().__init__()
            self.transformer = Inner()

        def forward(self, tokens):
            inner = self.transformer
            x = inner.wte(tokens) + inner.wpe(torch.arange(tokens.shape[1], device=tokens.device))
            for block in inner.h:
                x = block(x)
            return F.linear(inner.ln_f(x), inner.wte.weight)

    return Gpt2()
