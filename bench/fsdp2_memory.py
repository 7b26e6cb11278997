#!/usr/bin/env python3
"""How much memory does PyTorch's fully_shard hold at its peak?  Counted by PyTorch itself (FSDPMemTracker), without a GPU and without memory:
fake tensors, the `fake` process group.

Usage: bench/fsdp2_memory.py                 all of bench/planned_peak's rows, each in a process of its own: a line a row
       bench/fsdp2_memory.py MODEL RANKS     one of them

Needs PyTorch 2.15. The configuration is that of bench/planned_peak: one sequence of 8192 tokens a rank, every block recomputed, bf16 compute,
f32 reduction, f32 weights and AdamW moments, the loss over eight recomputed chunks of logits; units are the embedding, each block and
the head with the last norm, which stays open after forward; tied weights are the root's. The peak is that of the second
step up to its optimizer, whose temporaries the tracker counts for all parameters at a time.

Prints: MODEL RANKS GIB.
"""
import pathlib
import subprocess
import sys

MODELS = {  # width, blocks, heads, heads of keys and values, inner width, tied; Meta's Llama 3.2 1B, Llama 3.1 8B and 70B
    "1B": (2048, 16, 32, 8, 8192, True),
    "8B": (4096, 32, 32, 8, 14336, False),
    "70B": (8192, 80, 64, 8, 28672, False),
}
RANKS = (8, 64, 512)
TOKENS, VOCABULARY, CHUNKS = 8192, 128256, 8


def build(width, blocks, heads, kv_heads, inner, tied):
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint

    def linear(out_of, into):
        return nn.Linear(out_of, into, bias=False)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            head = width // heads
            self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
            self.q, self.k, self.v, self.out = (linear(width, n) for n in (width, kv_heads * head, kv_heads * head, width))
            self.gate, self.up, self.down = linear(width, inner), linear(width, inner), linear(inner, width)

        def body(self, x):
            def split(y, n):
                return y.unflatten(-1, (n, width // heads)).transpose(1, 2)
            h = self.before_attention(x)
            mixed = F.scaled_dot_product_attention(split(self.q(h), heads), split(self.k(h), kv_heads), split(self.v(h), kv_heads),
                                                   is_causal=True, enable_gqa=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            h = self.before_mlp(x)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.weight = nn.RMSNorm(width), nn.Parameter(torch.empty(VOCABULARY, width))

        def part(self, h, targets):
            logits = F.linear(h, self.weight).float()
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

        def forward(self, h, targets):
            parts = zip(self.norm(h).chunk(CHUNKS, 1), targets.chunk(CHUNKS, 1))
            return sum(checkpoint(self.part, *part, use_reentrant=False) for part in parts) / TOKENS

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, width)
            self.blocks = nn.ModuleList(Block() for _ in range(blocks))
            self.loss = Loss()
            if tied:
                self.loss.weight = self.embedding.weight

        def forward(self, tokens, targets):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return self.loss(x, targets)

    return Llama()


def peak_bytes(model, ranks):
    import torch
    from torch import distributed
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (ranks,))
    with FakeTensorMode():
        llama, tied = build(*MODELS[model]), MODELS[model][-1]
        options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
        for block in llama.blocks:
            fully_shard(block, **options)
        if not tied:
            fully_shard(llama.embedding, **options)
            fully_shard(llama.loss, reshard_after_forward=False, **options)
        fully_shard(llama, **options)
        optimizer = torch.optim.AdamW(llama.parameters(), foreach=False)
        batch = [torch.randint(0, VOCABULARY, (1, TOKENS)) for _ in range(2)]
        tracker = FSDPMemTracker(llama, optimizer)
        tracker.track_inputs(tuple(batch))
        with tracker:
            llama(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        with tracker:  # the peak begins anew
            tracker.reset_mod_stats()
            llama(*batch).backward()
            snapshot = tracker.get_tracker_snapshot("peak")
    distributed.destroy_process_group()
    return max(by_kind["Total"] for by_kind in snapshot.values())


def main(arguments):
    if arguments:
        model, ranks = arguments[0], int(arguments[1])
        print(f"{model} {ranks} {peak_bytes(model, ranks) / 2**30:.2f}")
        return 0
    for model in MODELS:
        for ranks in RANKS:
            subprocess.run([sys.executable, pathlib.Path(__file__), model, str(ranks)], check=True)
    return 0


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]) or len(sys.argv) not in (1, 3):
        print(__doc__)
        sys.exit(0 if {"-h", "--help"} & set(sys.argv[1:]) else 2)
    sys.exit(main(sys.argv[1:]))
