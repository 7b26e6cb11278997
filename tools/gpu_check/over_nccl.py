"""What gpu-check asks of one process for each GPU, over NCCL: NCCL itself on one GPU, every collective, the losses of threads, captured
steps, and what killed, stopped and stalled processes come to. Steps of `Check` in tools/gpu-check. What is measured is in
`nccl_figures.py`. No machine with several GPUs has run them; tests/tools/gpu_check_nccl runs them over a double of NCCL."""
import json
import os
import random
import signal
import time

from gpu_check import ranks as started
from gpu_check.correct import TINY
from gpu_check.figures import json_lines
from gpu_check.machine import count_of_driver
from gpu_check.steps import Failed, Late, Skipped

STEPS, LOSS_BOUND = 20, 1e-6  # the bound is of NCCL's own sums, which add in another order
MIXED = "--training.mixed_precision_param=bfloat16"
PATIENT = [MIXED, "--comm.train_timeout_seconds=20"]
FAILURES, HEARS_WITHIN = 5, 20  # of each kind; seconds, beyond which it is a hang
IMPATIENT = [MIXED, "--comm.heartbeat_timeout_seconds=1", "--comm.train_timeout_seconds=3"]
# What is done to a rank, what the others say of it, and within how many seconds they have ended: what was waited for above, a second,
# and the two that NCCL's abort has.
LOST = {"killed": (started.kill, "is gone", 3), "stopped": (started.stop, "shows no life", 4), "stalled": (started.stall, "has taken 3 s", 6)}
SLACK = 1  # multiplies them


class OverNccl:
    def over_nccl(self):
        gpus = count_of_driver() if self.gpu else 0
        sizes = sorted({2, max(gpus, 2)})
        self.step("NCCL on one GPU", self.one_rank)
        for ranks in sizes:
            self.step(f"over NCCL: battery, {ranks} ranks", lambda ranks=ranks: self.battery_over_nccl(ranks))
        for ranks in sizes:
            self.step(f"over NCCL: losses, {ranks} ranks", lambda ranks=ranks: self.losses_over_nccl(ranks))
        self.step("over NCCL: captured steps", lambda: self.captured_over_nccl(sizes[-1]))
        for kind in LOST:
            self.step(f"over NCCL: {kind} ranks", lambda kind=kind: self.lost_over_nccl(sizes[-1], kind))
        self.measure_nccl(sizes[-1])

    def expect_gpus(self, needed):
        if not self.gpu:
            raise Skipped("needs a GPU; `tools/test gpu_check_nccl` runs it over a double of NCCL")
        gpus = count_of_driver()
        if gpus < needed:
            raise Skipped(f"needs {needed} GPUs, here {'is' if gpus == 1 else 'are'} {gpus}")

    # ---- processes

    def ranks_of(self, command, ranks, folder, environment=None):
        """One for each GPU, in `folder`."""
        self.note("$ " + " ".join(map(str, command)))
        return started.Ranks(command, ranks, folder, dict(TESSERA_CUDA_MODULE=str(self.module())) | (environment or {}))

    def ends_of(self, processes, seconds, leave_out=()):
        """As Ranks.end, with everything in the step's log.  Raises: Late."""
        left = self.left()
        ends = processes.end(min(seconds, max(left, 0)), leave_out)
        self.note("".join(f"--- rank {rank}, code {code}\n{output}" for rank, code, output in ends))
        if left < seconds and any(code is None for _, code, _ in ends):
            raise Late(f"ranks were ended after {left:.0f} s, when the time was over; see {self.log}")
        return ends

    def outputs_of(self, command, ranks, folder, environment=None, seconds=120):
        """What each rank writes; all must end well."""
        folder.mkdir(parents=True, exist_ok=True)
        with self.ranks_of(command, ranks, folder, environment) as processes:
            ends = self.ends_of(processes, seconds)
        failed = [f"rank {rank}: {(output.strip().splitlines() or [code])[-1]}" for rank, code, output in ends if code != 0]
        if failed:
            raise Failed("; ".join(failed), output=ends[0][2])
        return [output for _, _, output in ends]

    def train_over_nccl(self, setup, steps, folder, *more, options=PATIENT):
        return [*self.train_command(setup, steps, folder), "--device=cuda", f"--device.module={self.module()}", *options, *more]

    def run_over_nccl(self, ranks, folder, *options):
        """The losses and gradient norms of its steps, and the bytes of the weights."""
        self.outputs_of(self.train_over_nccl(TINY, STEPS, folder, f"--save={folder}/w.safetensors", *options), ranks, folder)
        lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
        return [(line["loss"], line["grad_norm"]) for line in lines], (folder / "w.safetensors").read_bytes()

    # ---- what is right

    def one_rank(self):
        """Init, split, window, a captured call, abort, and init again, without peers."""
        self.expect_gpus(1)
        found, = json_lines(self.run([self.program("gpu-check-nccl"), "one", self.module(), self.options.device], timeout=120))
        return found

    def hashes(self, text_of_ranks):
        """{rank: line} of `gpu-check-nccl battery`, which a failure in between may not have changed."""
        lines = {line["rank"]: line for text in text_of_ranks for line in json_lines(text)}
        changed = [rank for rank, line in lines.items() if line["hash"] != line["again"]]
        if changed:
            raise Failed(f"behind a failure that they ended, ranks {changed} have other bits")
        return lines

    def battery_over_nccl(self, ranks):
        self.expect_gpus(ranks)
        seed = random.Random(f"{os.environ.get('SEED_BASE', 1)} battery").randrange(1 << 31)
        command, folder = [self.program("gpu-check-nccl"), "battery", seed], self.work / f"battery{ranks}"
        threads = self.hashes([self.run([*command, "--cpu", f"--ranks={ranks}"])])
        runs = {"": [], "--windows": ["--windows"], "--ordered-sums": ["--ordered-sums"]}
        for name, options in runs.items():
            found = self.hashes(self.outputs_of([*command, *options], ranks, folder))
            if sorted(found) != list(range(ranks)) or any(line["world"] != "nccl" for line in found.values()):
                raise Failed(f"{name}: not {ranks} ranks over NCCL: {found}")
            # Two summands have one order.
            for key in ("control", "hash") if ranks == 2 or name == "--ordered-sums" else ("control",):
                other = [rank for rank in found if found[rank][key] != threads[rank][key]]
                if other:
                    raise Failed(f"{name}: ranks {other} have other bits than threads ({key})")
        return dict(ranks=ranks, seed=seed, runs=len(runs))

    def losses_over_nccl(self, ranks):
        self.expect_gpus(ranks)
        folder = self.work / f"over_nccl{ranks}"
        lines, _ = self.train(TINY, "cuda", STEPS, folder, *PATIENT, f"--save={folder}/w.safetensors", ranks=ranks, own_gpus=True)
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
        self.expect_gpus(ranks)
        folder = self.work / "captured_over_nccl"
        eager, captured = (self.run_over_nccl(ranks, folder, "--comm.ordered_sums=true", "--training.stop_on_nan=false",
                                              f"--training.captured_step={captures}") for captures in ("false", "true"))
        if eager != captured:
            raise Failed("a captured step has other bits")
        return dict(ranks=ranks, steps=STEPS)

    # ---- who is lost

    def lost_over_nccl(self, ranks, kind):
        """Whoever is left ends with 1, and names who is gone; who was only held up ends with 1, too."""
        self.expect_gpus(ranks)
        happens, says, within = LOST[kind]
        folder, slowest = self.work / f"{kind}_over_nccl", 0.0
        command = self.train_over_nccl(TINY, 10**6, folder, options=IMPATIENT)
        for trial in range(FAILURES):
            victim = trial % ranks
            (folder / "out.jsonl").write_text("")
            with self.ranks_of(command, ranks, folder) as processes:
                while (folder / "out.jsonl").read_text().count("\n") < 3 and processes.run() and self.left() > 0:
                    time.sleep(0.05)
                begin = time.monotonic()
                try:
                    undo = happens(processes.processes[victim])
                except OSError as e:
                    raise Skipped(f"nothing can be {kind} here: {e}") from None
                ends = self.ends_of(processes, HEARS_WITHIN, leave_out=[victim])
                slowest = max(slowest, time.monotonic() - begin)
                undo()
                held_up = self.ends_of(processes, HEARS_WITHIN, leave_out=[rank for rank, *_ in ends])[0]
            wrong = [(rank, code, output[-300:]) for rank, code, output in ends
                     if code != 1 or says not in output or f"rank {victim}" not in output]
            if wrong or held_up[1] != (-signal.SIGKILL if kind == "killed" else 1):
                raise Failed(f"trial {trial}, rank {victim} {kind}: {(wrong or [held_up])[0]}")
        if not slowest <= within * SLACK:
            raise Failed(f"the others have ended after {slowest:.2f} s, and the bound is {within * SLACK}")
        return dict(trials=FAILURES, slowest_seconds=round(slowest, 2))
