#!/usr/bin/env python3
"""Tessera beside PyTorch FSDP2: the same Llama from the same weights on the same tokens, in turn.

    pip install torch        # the CPU build does
    bench/compare_pytorch.py BUILD_FOLDER [--ranks N] [--pairs N] [--steps N] [--size small|medium]

Two (or N) processes each: tessera-train behind mpirun, and fully_shard of torch.distributed over gloo, with PyTorch's own
rms_norm, scaled_dot_product_attention and fused AdamW. float32, one thread a rank, the whole machine to whoever's turn it is.
Prints per pair the time of a step (median over the steps after the first three) and the largest resident set of a rank less
that of the bare process (imports, no model), then the medians of the ratios. Losses must agree, or the comparison is void.
"""
import argparse
import json
import math
import os
import pathlib
import random
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time

SIZES = {
    "small": dict(dim=256, n_layers=4, n_heads=8, n_kv_heads=4, batch=8, length=128),
    "medium": dict(dim=512, n_layers=8, n_heads=8, n_kv_heads=8, batch=8, length=256),
}
VOCAB, THETA, EPS, LR = 256, 10000.0, 1e-5, 1e-3
SKIPPED_STEPS = 3


def resident_kib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# ---- PyTorch's side: one process a rank, started by this file with --worker

def read_safetensors(path):
    import torch
    data = path.read_bytes()
    size, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    return {name: torch.frombuffer(bytearray(data[8 + size + e["data_offsets"][0]:8 + size + e["data_offsets"][1]]),
                                   dtype=torch.float32).reshape(e["shape"]) for name, e in header.items()}


def build_llama(c):
    """Hugging Face's names; half rotation; grouped queries."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    head = c["dim"] // c["n_heads"]
    hidden = (math.ceil(8 * c["dim"] / 3) + 31) // 32 * 32

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
                return z * cos + torch.cat((-two, one), -1) * sin
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
            self.embed_tokens = nn.Embedding(VOCAB, c["dim"])
            self.layers = nn.ModuleList(Block() for _ in range(c["n_layers"]))
            self.norm = nn.RMSNorm(c["dim"], EPS)

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.lm_head = Inner(), nn.Linear(c["dim"], VOCAB, bias=False)
            angle = torch.outer(torch.arange(c["length"]).double(), THETA ** (-torch.arange(head // 2).double() / (head // 2)))
            angle = torch.cat((angle, angle), -1)
            self.cos, self.sin = angle.cos().float(), angle.sin().float()

        def forward(self, tokens):
            h = self.model.embed_tokens(tokens)
            for block in self.model.layers:
                h = block(h, self.cos, self.sin)
            return self.lm_head(self.model.norm(h))

    return Llama()


def worker(options):
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    torch.set_num_threads(1)
    c, folder = SIZES[options.size], pathlib.Path(options.worker)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    bare_kib = resident_kib()
    model = build_llama(c)
    model.load_state_dict(read_safetensors(folder / "start.safetensors"))
    mesh = init_device_mesh("cpu", (world,))
    for part in (model.model.embed_tokens, *model.model.layers, model.lm_head):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    text = (folder / "book.txt").read_bytes()
    losses, seconds = [], []
    for step in range(options.steps):
        begin = time.perf_counter()
        first = step * c["batch"] + rank * (c["batch"] // world)
        rows = torch.tensor([list(text[i * c["length"]:(i + 1) * c["length"] + 1])
                             for i in range(first, first + c["batch"] // world)])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
        seconds.append(time.perf_counter() - begin)
    kib = torch.tensor([resident_kib() - bare_kib])
    dist.all_reduce(kib, dist.ReduceOp.MAX)
    if rank == 0:
        (folder / "pytorch.json").write_text(json.dumps(dict(
            losses=losses, step_seconds=seconds, resident_kib=kib.item(), version=torch.__version__)))
    dist.barrier()
    os._exit(0)  # at a normal end gloo's threads now and then bring the interpreter down


def run_pytorch(options, folder):
    base = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randint(20000, 60000)),
                         "WORLD_SIZE": str(options.ranks), "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([options.python, __file__, str(options.build), "--worker", str(folder), "--size", options.size,
                               "--steps", str(options.steps)], env=base | {"RANK": str(r), "LOCAL_RANK": str(r)})
             for r in range(options.ranks)]
    if any([process.wait() for process in ranks]):
        sys.exit("compare_pytorch: PyTorch's side failed; is torch installed for this Python?")
    return json.loads((folder / "pytorch.json").read_text())


# ---- Tessera's side

def model_keys(c):
    return [f"--model.{key}={c[key]}" for key in ("dim", "n_layers", "n_heads", "n_kv_heads")]


def run_tessera(options, folder):
    c = SIZES[options.size]
    environment = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                                "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    line = ["mpirun", "-n", str(options.ranks), str(options.program), "--model.name=llama", *model_keys(c),
            f"--data.path={folder}/book.txt", "--data.order=sequential", f"--training.seq_len={c['length']}",
            f"--training.global_batch_size={c['batch']}", f"--optimizer.lr={LR}", "--threads=1",
            f"--load={folder}/start.safetensors", f"--metrics.jsonl={folder}/tessera.jsonl"]

    def resident(steps):  # KiB, of the largest rank
        script = ("import resource,subprocess,sys; code=subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL); "
                  "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr); sys.exit(code)")
        command = line[:3] + [sys.executable, "-c", script] + line[3:] + [f"--training.steps={steps}"]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return max(int(word) for word in done.stderr.split() if word.isdigit())
    bare = int(subprocess.run([sys.executable, "-c", "import resource,subprocess,sys; subprocess.call(sys.argv[1:], "
                               "stdout=subprocess.DEVNULL); print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)",
                               str(options.program), "--version"], check=True, capture_output=True, text=True).stdout)
    kib = resident(options.steps) - bare
    steps = [json.loads(text) for text in (folder / "tessera.jsonl").read_text().splitlines()]
    return dict(losses=[s["loss"] for s in steps], resident_kib=kib,
                step_seconds=[c["batch"] * c["length"] / s["tokens_per_second"] for s in steps])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path, help="a build folder with tools/tessera-train")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--python", default=sys.executable, help="a Python that has torch")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options)
    options.program = options.build.resolve() / "tools" / "tessera-train"
    if not options.program.is_file():
        sys.exit(f"compare_pytorch: there is no {options.program}; build it first")
    c = SIZES[options.size]
    if c["batch"] % options.ranks or options.steps <= SKIPPED_STEPS:
        sys.exit(f"compare_pytorch: --ranks must divide {c['batch']}, --steps must be more than {SKIPPED_STEPS}")
    ratios = dict(time=[], memory=[])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        random.seed(1)
        words = ["".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=random.randint(2, 8))) for _ in range(500)]
        (folder / "book.txt").write_text(" ".join(random.choices(words, k=400_000)))
        subprocess.run([options.program, "--model.name=llama", *model_keys(c), "--training.steps=0",
                        f"--save={folder}/start.safetensors"], check=True, stdout=subprocess.DEVNULL)
        for pair in range(options.pairs):
            ours, theirs = run_tessera(options, folder), run_pytorch(options, folder)
            worst = max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
            if not worst < 1e-3:
                sys.exit(f"compare_pytorch: losses differ by {worst:.2e}; this is not the same training")
            s, p = (statistics.median(side["step_seconds"][SKIPPED_STEPS:]) for side in (ours, theirs))
            ratios["time"].append(p / s)
            ratios["memory"].append(theirs["resident_kib"] / ours["resident_kib"])
            print(f"pair {pair + 1}: step {s * 1e3:7.1f} ms and {p * 1e3:7.1f} ms, resident {ours['resident_kib'] / 1024:6.1f} "
                  f"and {theirs['resident_kib'] / 1024:6.1f} MiB, losses within {worst:.1e}", flush=True)
    print(f"Tessera and PyTorch {theirs['version']}, {options.size}, {options.ranks} ranks, one thread each, float32: "
          f"PyTorch takes {statistics.median(ratios['time']):.2f} times the time "
          f"({min(ratios['time']):.2f} to {max(ratios['time']):.2f}) and {statistics.median(ratios['memory']):.2f} times the memory")


if __name__ == "__main__":
    main()
