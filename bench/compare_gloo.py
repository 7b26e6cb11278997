#!/usr/bin/env python3
"""Our collectives between processes of one machine beside gloo's, which PyTorch takes on CPUs: all_gather and reduce_scatter in place.

    pip install torch numpy        # the CPU build does
    bench/compare_gloo.py BUILD_FOLDER [--ranks 2] [--sizes 28M 112M ...] [--pairs 5] [--iters 20]

In turn, for each size, bench-collectives and torch.distributed over gloo run as so many processes, started alike and with one thread
each. A size is that of the whole array, as in nccl-tests. In place means that a rank's own part is not copied: gloo gets a slice of its
output. Times are means over ranks and iterations; a ratio is gloo's time over ours of one pair, and medians and ranges are
printed, with ours as a share of what memcpy reaches in the same run.
"""
import argparse
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time

OPERATIONS = ("all_gather", "reduce_scatter")
WARMUP = 3
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def worker(options):
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    count = options.sizes[0] // 4 // world
    whole = torch.ones(count * world)
    mine = whole[rank * count:(rank + 1) * count]

    def gather():
        dist.all_gather_into_tensor(whole, mine)

    def scatter():
        dist.reduce_scatter_tensor(mine, whole)
    found = {}
    for name, call in zip(OPERATIONS, (gather, scatter)):
        whole.fill_(0)
        mine.fill_(rank + 1)
        if name == "reduce_scatter":
            whole.fill_(rank + 1)
        call()  # and it must be right
        sent = [r + 1 for r in range(world)]
        right = all(whole[r * count] == sent[r] and whole[r * count + count - 1] == sent[r] for r in range(world)) if name == "all_gather" \
            else bool((mine == sum(sent)).all())
        if not right:
            sys.exit(f"compare_gloo: gloo's {name} gives wrong values in place")
        whole.fill_(0)  # sums of zeros stay zero, so that no iteration overflows
        for _ in range(WARMUP):
            call()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(options.iters):
            call()
        taken = torch.tensor((time.perf_counter() - begin) / options.iters, dtype=torch.float64)
        dist.all_reduce(taken)
        found[name] = taken.item() / world
    if rank == 0:
        pathlib.Path(options.worker).write_text(json.dumps(found | {"version": torch.__version__}))
    dist.barrier()
    os._exit(0)  # at a normal end gloo's threads now and then bring the interpreter down


def run_ranks(command, ranks, **more):
    """stdout of rank 0."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randint(20000, 31000)), "WORLD_SIZE": str(ranks),
           "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen([str(word) for word in command], env=os.environ | job | {"RANK": str(r), "LOCAL_RANK": str(r)},
                                  stdout=subprocess.PIPE if r == 0 else subprocess.DEVNULL, text=True, **more) for r in range(ranks)]
    out = processes[0].communicate()[0]
    if any([process.wait() for process in processes]):
        sys.exit(f"compare_gloo: {command[0]} has failed")
    return out


def ours(options, size):
    """{operation: (seconds in place, its share of memcpy)}."""
    program = options.build / "bench" / "bench-collectives"
    text = run_ranks([program, *OPERATIONS, "-b", size, "-e", size, "-n", options.iters, "-w", WARMUP, "--threads", "1"], options.ranks)
    rows = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    shares = re.findall(r"([\d.]+) in place$", text, re.M)
    if len(rows) != len(OPERATIONS) or any(row[12] != "0" for row in rows):
        sys.exit(f"compare_gloo: our values are wrong, or there are none:\n{text}")
    return {name: (float(row[9]) * 1e-6, float(share)) for name, row, share in zip(OPERATIONS, rows, shares)}


def theirs(options, size):
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "gloo.json"
        run_ranks([options.python, __file__, options.build, "--worker", file, "--sizes", size, "--iters", options.iters], options.ranks)
        return json.loads(file.read_text())


def bytes_of(text):
    found = re.fullmatch(r"(\d+)([KMG]?)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"'{text}' is no size, such as 28M")
    return int(found[1]) * UNITS.get(found[2], 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path, help="a build folder, configured with -Dbench=enabled")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=bytes_of, nargs="+", default=[28 << 20, 112 << 20, 448 << 20], help="of the whole array [28M 112M 448M]")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--python", default=sys.executable, help="a Python that has torch")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options)
    version = "?"
    for size in options.sizes:
        taken = {name: [] for name in OPERATIONS}
        for pair in range(options.pairs):
            sides = [lambda: ours(options, size), lambda: theirs(options, size)]
            turn = -1 if pair % 2 else 1  # who goes first warms the machine for the other
            mine, gloo = [side() for side in sides[::turn]][::turn]
            version = gloo["version"]
            for name in OPERATIONS:
                taken[name].append((*mine[name], gloo[name]))
        for name, times in taken.items():
            ratios = [gloo / own for own, _, gloo in times]
            own, share, gloo = (statistics.median(column) for column in zip(*times))
            print(f"{name:15} {size / (1 << 20):6.1f} MiB, {options.ranks} ranks: {own * 1e3:8.2f} ms, gloo {gloo * 1e3:8.2f} ms, ratio "
                  f"{statistics.median(ratios):5.2f} ({min(ratios):.2f} to {max(ratios):.2f}); {share:.2f} of memcpy", flush=True)
    print(f"torch {version}, {options.pairs} pairs, in place, f32, one thread a rank")
    return 0


if __name__ == "__main__":
    sys.exit(main())
