#!/usr/bin/env python3
"""PyTorch's distributed checkpoint beside raw writes and reads, as bench-checkpoint has ours: the same matrices, in turn.

    pip install torch safetensors        # the CPU build does
    bench/compare_checkpoint.py FOLDER [--mib 1024] [--samples 5] [--bench BUILD/bench/bench-checkpoint]

One process, no network. `hf` is HuggingFaceStorageWriter with a file a rank, whose format ours is; `dcp` is FileSystemWriter,
PyTorch's own format. Both fsync (sync_files). With --bench each sample is followed by one of bench-checkpoint, so that a
machine that slows down slows both. Medians and ranges; a ratio is the median of raw over its neighbour."""
import argparse
import os
import pathlib
import shutil
import statistics
import subprocess
import time
import warnings

CALL, SIDE = 4 << 20, 2048


def seconds(f):
    begin = time.perf_counter()
    f()
    return time.perf_counter() - begin


def write_raw(path, weights):
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    for values in weights.values():
        view = memoryview(values.numpy()).cast("B")
        for at in range(0, len(view), CALL):
            assert os.write(file, view[at:at + CALL]) == CALL
    os.fsync(file)
    os.close(file)


def read_raw(files, weights):
    """All bytes, to where the weights lie."""
    views = [memoryview(values.numpy()).cast("B") for values in weights.values()]
    places = [view[at:at + CALL] for view in views for at in range(0, len(view), CALL)]
    for path in files:
        file, left = os.open(path, os.O_RDONLY), path.stat().st_size
        at = left % CALL
        os.preadv(file, [bytearray(at)], 0)
        while at < left:
            at += os.preadv(file, [places[at // CALL % len(places)]], at)
        os.close(file)


def drop(files):
    os.sync()
    for path in files:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def main():
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, HuggingFaceStorageReader, HuggingFaceStorageWriter
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--bench", type=pathlib.Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    weights = {f"weight_{i}": torch.randn(SIDE, SIDE) for i in range(options.mib // 16)}
    options.folder.mkdir(exist_ok=True)
    ways = {"hf": (lambda to: HuggingFaceStorageWriter(to, save_distributed=True), HuggingFaceStorageReader),
            "dcp": (FileSystemWriter, FileSystemReader)}
    taken = {}

    def sample(turn, name, own, raw, before=lambda: None):
        times = {}
        for which in ("raw", "own")[::-1 if turn % 2 else 1]:
            before()
            times[which] = seconds(own if which == "own" else raw)
        taken.setdefault(name, []).append((times["own"], times["raw"]))

    for turn in range(options.samples):
        for name, (writer, reader) in ways.items():
            to, raw = options.folder / name, options.folder / "raw"
            sample(turn, f"{name}: save", lambda: dcp.save(weights, storage_writer=writer(str(to)), no_dist=True),
                   lambda: write_raw(raw, weights), os.sync)
            raw.unlink()
            files = [path for path in to.iterdir() if path.stat().st_size > CALL]

            def load():
                dcp.load(weights, storage_reader=reader(str(to)), no_dist=True)

            def read():
                read_raw(files, weights)
            sample(turn, f"{name}: load from the disk", load, read, lambda: drop(files))
            sample(turn, f"{name}: load from the cache", load, read)
            shutil.rmtree(to)
        if options.bench:
            print(subprocess.run([options.bench, options.folder, str(options.mib), "1"], check=True, text=True,
                                 stdout=subprocess.PIPE).stdout, end="", flush=True)
    print(f"torch {torch.__version__}, {options.mib} MiB, {options.samples} samples")
    for name, times in taken.items():
        own, raw = ([options.mib / t[i] for t in times] for i in (0, 1))
        ratios = [t[1] / t[0] for t in times]
        print(f"{name:26} {statistics.median(own):6.0f} MiB/s ({min(own):5.0f} to {max(own):5.0f})   raw {statistics.median(raw):6.0f} MiB/s "
              f"({min(raw):5.0f} to {max(raw):5.0f})   ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
