"""What gpu-check asks of one process for each GPU, over NCCL: the losses of threads, what killed and stopped processes come to, windows,
captured steps. Steps of `Check` in tools/gpu-check. No machine with several GPUs has run them. Without a GPU they are left out:
`tools/test nccl nccl_jobs` takes a double of NCCL."""
import json
import os
import signal
import socket
import subprocess
import time

from gpu_check.correct import TINY
from gpu_check.machine import count_of_driver
from gpu_check.steps import Failed, Skipped

STEPS, LOSS_BOUND = 20, 1e-6  # the bound is of NCCL's own sums, which add in another order
FAILURES, HEARS_WITHIN = 5, 20  # of each kind; seconds, far more than a heartbeat of one
OPTIONS = ["--training.mixed_precision_param=bfloat16", "--comm.heartbeat_timeout_seconds=1", "--comm.train_timeout_seconds=10"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class OverNccl:
    def over_nccl(self):
        gpus = count_of_driver() if self.gpu else 0
        sizes = sorted({n for n in (1, 2, gpus) if n <= max(gpus, 1)})
        for ranks in sizes:
            self.step(f"over NCCL: {ranks} ranks", lambda ranks=ranks: self.losses_over_nccl(ranks))
        for ranks in sizes[-1:]:
            self.step(f"over NCCL: captured steps, {ranks} ranks", lambda ranks=ranks: self.captured_over_nccl(ranks))
        for kind, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
            self.step(f"over NCCL: {kind} ranks", lambda number=number: self.lost_over_nccl(gpus, number))

    def expect_gpus(self, gpus, needed):
        if not self.gpu:
            raise Skipped("needs a GPU; `tools/test nccl nccl_jobs` runs ranks over a double of NCCL")
        if gpus < needed:
            raise Skipped(f"needs {needed} GPUs, here is {gpus}")

    def start_over_nccl(self, ranks, steps, folder, *options):
        """A process for each rank, as torchrun starts them."""
        port, command = free_port(), self.train_command(TINY, steps, folder)
        command += ["--device=cuda", f"--device.module={self.module()}", *OPTIONS, *options]
        seats = [dict(RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="gpu-check") for r in range(ranks)]
        return [subprocess.Popen([str(word) for word in command], cwd=folder, env=os.environ | seat, stdin=subprocess.DEVNULL,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for seat in seats]

    def end_over_nccl(self, processes, seconds):
        """(code, output) of each; who is still there by then is killed, and has the code None."""
        end, ends = time.monotonic() + seconds, []
        for process in processes:
            try:
                output, code = process.communicate(timeout=max(end - time.monotonic(), 0.1))[0], process.returncode
            except subprocess.TimeoutExpired:
                process.kill()
                output, code = process.communicate()[0], None
            ends.append((code, output))
        with self.log.open("a") as log:
            log.writelines(f"--- process {i}, code {code}\n{output}" for i, (code, output) in enumerate(ends))
        return ends

    def run_over_nccl(self, ranks, folder, *options):
        """The losses and gradient norms of its steps, and the bytes of the weights."""
        ends = self.end_over_nccl(self.start_over_nccl(ranks, STEPS, folder, f"--save={folder}/w.safetensors", *options), 240)
        failed = [f"rank {i}: {output.strip().splitlines()[-1:] or code}" for i, (code, output) in enumerate(ends) if code != 0]
        if failed:
            raise Failed("; ".join(failed), output=ends[0][1])
        lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
        return [(line["loss"], line["grad_norm"]) for line in lines], (folder / "w.safetensors").read_bytes()

    def losses_over_nccl(self, ranks):
        self.expect_gpus(count_of_driver() if self.gpu else 0, ranks)
        folder = self.work / f"over_nccl{ranks}"
        lines, _ = self.train(TINY, "cuda", STEPS, folder, *OPTIONS, f"--save={folder}/w.safetensors", ranks=ranks, own_gpus=ranks > 1)
        threads = [(line["loss"], line["grad_norm"]) for line in lines]
        weights, worst = (folder / "w.safetensors").read_bytes(), 0.0
        for options in ([], ["--comm.windows=true"]):
            found, _ = self.run_over_nccl(ranks, folder, *options)
            worst = max([worst, *(abs(a[0] - b[0]) for a, b in zip(found, threads, strict=True))])
            if not worst <= LOSS_BOUND:
                raise Failed(f"{options}: losses differ from those of threads by {worst:.2e}, and the bound is {LOSS_BOUND}")
        if self.run_over_nccl(ranks, folder, "--comm.ordered_sums=true") != (threads, weights):
            raise Failed("with --comm.ordered_sums=true the bits are not those of threads")
        return dict(ranks=ranks, steps=STEPS, worst=worst)

    def captured_over_nccl(self, ranks):
        self.expect_gpus(count_of_driver() if self.gpu else 0, ranks)
        folder = self.work / "captured_over_nccl"
        self.train(TINY, "cuda", 1, folder)  # makes the book
        eager, captured = (self.run_over_nccl(ranks, folder, "--comm.ordered_sums=true", "--training.stop_on_nan=false",
                                              f"--training.captured_step={captures}") for captures in ("false", "true"))
        if eager != captured:
            raise Failed("a captured step has other bits")
        return dict(ranks=ranks, steps=STEPS)

    def lost_over_nccl(self, gpus, number):
        """Whoever is left ends with 1, and names who is gone."""
        self.expect_gpus(gpus, 2)
        folder, slowest = self.work / "lost_over_nccl", 0.0
        self.train(TINY, "cuda", 1, folder)
        for trial in range(FAILURES):
            victim = trial % gpus
            (folder / "out.jsonl").write_text("")
            processes = self.start_over_nccl(gpus, 10**6, folder)
            while (folder / "out.jsonl").read_text().count("\n") < 3 and all(p.poll() is None for p in processes):
                time.sleep(0.05)
            begin = time.monotonic()
            processes[victim].send_signal(number)
            left = [process for process in processes if process is not processes[victim]]
            ends = self.end_over_nccl(left, HEARS_WITHIN)
            slowest = max(slowest, time.monotonic() - begin)
            processes[victim].kill()
            processes[victim].communicate()
            wrong = [(code, output[-300:]) for code, output in ends if code != 1 or f"rank {victim}" not in output]
            if wrong:
                raise Failed(f"trial {trial}, rank {victim}: {wrong[0]}")
        return dict(trials=FAILURES, slowest_seconds=round(slowest, 2))
