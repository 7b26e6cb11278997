#!/usr/bin/env python3
"""Tessera beside PyTorch FSDP2: the same Llama from the same weights on the same tokens, in turn.

    pip install torch        # the CPU build does
    bench/compare_pytorch.py BUILD_FOLDER [--ranks N] [--pairs N] [--steps N] [--size small|medium]
    bench/compare_pytorch.py BUILD_FOLDER --against BUILD_FOLDER         another build of Tessera, as of an older commit
    bench/compare_pytorch.py BUILD_FOLDER --device cuda [--case gpt2-124m] [--json FILE]     (see compare_cuda.py)

Two (or N) processes each: tessera-train behind mpirun, and fully_shard of torch.distributed over gloo, with PyTorch's own
rms_norm, scaled_dot_product_attention and fused AdamW. float32, one thread a rank, the whole machine to whoever's turn it is.
Prints per pair the time of a step (median over the steps after the first three) and the largest resident set of a rank less
that of the bare process (imports, no model), then the medians of the ratios. Losses must agree, or the comparison is void.
"""
import argparse
import json
import os
import pathlib
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import compare_cuda
import processes
from book import write_book
from pytorch_models import build, read_safetensors, units

SIZES = {
    "small": dict(name="llama", dim=256, n_layers=4, n_heads=8, n_kv_heads=4, vocab_size=256, batch=8, length=128),
    "medium": dict(name="llama", dim=512, n_layers=8, n_heads=8, n_kv_heads=8, vocab_size=256, batch=8, length=256),
}
LR = 1e-3
SKIPPED_STEPS = 3


def resident_kib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# ---- PyTorch's side: one process a rank, started by this file with --worker

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
    model = build(c)
    model.load_state_dict(read_safetensors(folder / "start.safetensors"))
    mesh = init_device_mesh("cpu", (world,))
    for part in units(model):
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
    return [f"--model.{key}={c[key]}" for key in ("name", "dim", "n_layers", "n_heads", "n_kv_heads")]


def program_of(build):
    folders = [build.resolve() / "tools", build.resolve()]  # as Meson builds, and as gpu-check does
    program = next((f / "tessera-train" for f in folders if (f / "tessera-train").is_file()), None)
    return program or sys.exit(f"compare_pytorch: there is no tessera-train in {build}; build it first")


def run_tessera(options, folder, program):
    c = SIZES[options.size]
    environment = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                                "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    (folder / "tessera.jsonl").unlink(missing_ok=True)  # of the run before
    line = [str(program), *model_keys(c),
            f"--data.path={folder}/book.txt", "--data.order=sequential", f"--training.seq_len={c['length']}",
            f"--training.global_batch_size={c['batch']}", f"--optimizer.lr={LR}", "--threads=1",
            f"--load={folder}/start.safetensors", f"--metrics.jsonl={folder}/tessera.jsonl", f"--training.steps={options.steps}"]
    kib = processes.resident_kib(line, folder, ["mpirun", "-n", str(options.ranks)], env=environment)
    kib -= processes.resident_kib([str(program), "--version"], folder)
    steps = [json.loads(text) for text in (folder / "tessera.jsonl").read_text().splitlines()]
    return dict(losses=[s["loss"] for s in steps], resident_kib=kib,
                step_seconds=[c["batch"] * c["length"] / s["tokens_per_second"] for s in steps])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path, help="a build folder with tools/tessera-train")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, help="5, on a GPU 3")
    parser.add_argument("--steps", type=int, help="13, on a GPU 40")
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--against", type=pathlib.Path, help="compare with this other build of Tessera in place of PyTorch")
    parser.add_argument("--python", default=sys.executable, help="a Python that has torch")
    parser.add_argument("--device", help="cuda or cuda:N: both sides on this GPU, as one rank of 8")
    parser.add_argument("--case", choices=list(compare_cuda.CASES), default="gpt2-124m", help="what is trained on a GPU")
    parser.add_argument("--module", type=pathlib.Path, help="Tessera's driver module for a GPU, where it is not near tessera-train")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures of a GPU to this file, after each run")
    parser.add_argument("--key", help="go on with the runs in --json that were made under the same key, such as a commit")
    parser.add_argument("--seconds", type=float, default=3600, help="on a GPU: end by then, with the pairs that are whole [3600]")
    parser.add_argument("--no-notes", action="store_true", help="on a GPU: leave out what no one would train with, math attention")
    parser.add_argument("--start", type=pathlib.Path, help="keep the weights that a case begins with in this folder")
    for name in ("worker", "variant"):
        parser.add_argument("--" + name, help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--launched", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.pairs = options.pairs or (3 if options.device else 5)
    options.steps = options.steps or (40 if options.device else 13)
    if os.sep in options.python:  # both sides run in a folder of their own
        options.python = os.path.abspath(options.python)
    options.module = options.module and options.module.resolve()
    options.start = options.start and options.start.resolve()
    if options.worker:
        return compare_cuda.worker(options) if options.device else worker(options)
    options.program = program_of(options.build)
    if options.device:
        if options.steps <= compare_cuda.SKIPPED_STEPS:
            sys.exit(f"compare_pytorch: --steps must be more than {compare_cuda.SKIPPED_STEPS}")
        return compare_cuda.compare(options)
    c = SIZES[options.size]
    if c["batch"] % options.ranks or options.steps <= SKIPPED_STEPS:
        sys.exit(f"compare_pytorch: --ranks must divide {c['batch']}, --steps must be more than {SKIPPED_STEPS}")
    other = program_of(options.against) if options.against else None
    ratios = dict(time=[], memory=[])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_book(folder / "book.txt", 1_200_000)
        subprocess.run([options.program, *model_keys(c), "--training.steps=0",
                        f"--save={folder}/start.safetensors"], check=True, stdout=subprocess.DEVNULL)
        for pair in range(options.pairs):
            sides = [lambda: run_tessera(options, folder, options.program),
                     lambda: run_tessera(options, folder, other) if other else run_pytorch(options, folder)]
            turn = -1 if pair % 2 else 1  # who goes first warms the machine for the other
            ours, theirs = [side() for side in sides[::turn]][::turn]
            worst = max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
            if not worst < 1e-3:
                sys.exit(f"compare_pytorch: losses differ by {worst:.2e}; this is not the same training")
            s, p = (statistics.median(side["step_seconds"][SKIPPED_STEPS:]) for side in (ours, theirs))
            ratios["time"].append(p / s)
            ratios["memory"].append(theirs["resident_kib"] / ours["resident_kib"])
            print(f"pair {pair + 1}: step {s * 1e3:7.1f} ms and {p * 1e3:7.1f} ms, resident {ours['resident_kib'] / 1024:6.1f} "
                  f"and {theirs['resident_kib'] / 1024:6.1f} MiB, losses within {worst:.1e}", flush=True)
    rival = "the other build" if other else "PyTorch " + theirs["version"]
    print(f"Tessera and {rival}, {options.size}, {options.ranks} ranks, one thread each, float32: {rival} takes {statistics.median(ratios['time']):.2f} times the time "
          f"({min(ratios['time']):.2f} to {max(ratios['time']):.2f}) and {statistics.median(ratios['memory']):.2f} times the memory")


if __name__ == "__main__":
    main()
