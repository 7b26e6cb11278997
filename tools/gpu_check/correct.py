"""What gpu-check asks of a GPU before it asks how fast it is: kernels and losses of the CPU, the same bits from every run, and
nothing that compute-sanitizer sees. Steps of `Check` in tools/gpu-check, which has the programs."""
import os
import random
import shutil
import subprocess

from gpu_check.figures import json_lines
from gpu_check.machine import count_of_driver
from gpu_check.parts import TOOLS
from gpu_check.steps import Failed, Skipped

TINY = dict(model=dict(name="llama", dim=64, n_layers=2, n_heads=4, n_kv_heads=2), length=32, batch=8)
TINY_GPT2 = dict(model=dict(name="gpt2", dim=64, n_layers=2, n_heads=4), length=32, batch=8)  # one weight for embedding and head
# The line that tools/README.md trains with on the CPU, on the King James Bible.
REFERENCE = dict(model=dict(name="llama", dim=128, n_layers=4, n_heads=4, n_kv_heads=2), length=128, batch=12)
REFERENCE_STEPS, EMULATED_STEPS = 50, 5  # a step takes the emulated GPU 5 s
# What else of training runs under random delays.
CELLS = {"bf16, recompute, 2 micro-batches": (TINY, "--training.mixed_precision_param=bfloat16", "--activation_checkpoint.mode=full",
                                              "--training.local_batch_size={half}"),
         "a tied GPT-2": (TINY_GPT2,)}
LOSS_BOUND = 1e-4


def king_james():
    bible = shutil.which("bible", path=os.environ["PATH"] + ":/usr/games")  # of the Debian package bible-kjv
    if not bible:
        return None
    done = subprocess.run([bible, "-f", "gen1:1-rev22:21"], check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return "".join(line.partition(" ")[2] + "\n" for line in done.stdout.splitlines())  # "Ge1:1 In the beginning"


class Correct:
    def correct(self):
        self.right()
        self.sanitizers()

    def right(self):
        """Everything that is compared, side by side."""
        ops = self.step("list of kernels", lambda: self.run([self.program("gpu-check-cases"), "--list"]).split()) or []
        self.steps_together(self.losses() | self.bits() | {f"kernel {op}": lambda op=op: self.cases(op) for op in ops})
        self.step("ranks on GPUs of their own", self.own_gpus)
        self.step("captured steps", self.captured)

    def losses(self):
        return {f"losses of the CPU, {ranks} ranks": lambda ranks=ranks: self.parity(ranks) for ranks in ((1, 2) if self.gpu else (1,))}

    def bits(self):
        works = {f"{ranks} ranks on one device": lambda ranks=ranks: self.same_bits(f"{ranks}", ranks) for ranks in (2, 4, 8)}
        ranks = 4 if self.gpu else 2
        for i, (name, (setup, *options)) in enumerate(CELLS.items()):
            options = [option.format(half=setup["batch"] // ranks // 2) for option in options]
            works[f"{ranks} ranks: {name}"] = lambda i=i, setup=setup, options=options: self.same_bits(f"cell{i}", ranks, setup, *options)
        return works

    def sanitizers(self):
        self.racechecks()
        self.other_checks()
        self.first_initchecks()
        self.other_initchecks()

    def racechecks(self):
        self.checks_by("racecheck")

    def other_checks(self):
        self.checks_by("memcheck", "synccheck")

    def first_initchecks(self):
        self.checks_by("initcheck", ops=TOOLS["initcheck"][::2])

    def other_initchecks(self):
        self.checks_by("initcheck", ops=TOOLS["initcheck"][1::2])

    def checks_by(self, *tools, ops=None):
        self.steps_together({f"{tool} {op}": lambda tool=tool, op=op: self.sanitize(tool, op) for tool in tools for op in ops or TOOLS[tool]})

    def cases(self, op):
        try:
            text = self.run([self.program("gpu-check-cases"), self.module(), *self.on_device(), op], timeout=240)
        except Failed as e:
            failed = [f"{c['case']}: {c['failure']}" for c in json_lines(e.output) if not c["passed"]]
            raise Failed("; ".join(failed) or str(e)) from None
        cases = json_lines(text)
        if not cases:
            raise Failed(f"no case; see {self.log}")
        return dict(cases=len(cases), compared=sum(c["compared"] for c in cases), worst=max(c["worst"] for c in cases))

    def book(self):
        """The King James Bible, carried by `pack` or printed here."""
        for book in (self.options.vendor / "book.txt", self.work / "book.txt"):
            if book.exists():
                return book
        text = king_james()
        if text is None:
            words = "there is no book.txt in --vendor, and no program bible; run `tools/gpu-check pack` where bible-kjv is installed"
            raise Failed(words) if self.gpu else Skipped(words)
        book.write_text(text)
        return book

    def parity(self, ranks):
        steps = REFERENCE_STEPS if self.gpu else EMULATED_STEPS
        folder, book = self.work / f"parity{ranks}", self.book()
        cpu, _ = self.train(REFERENCE, "cpu", steps, folder, "--optimizer.lr=1e-3", book=book, ranks=ranks)
        gpu, text = self.train(REFERENCE, "cuda", steps, folder, "--optimizer.lr=1e-3", book=book, ranks=ranks)
        worst = max(abs(a["loss"] - b["loss"]) for a, b in zip(cpu, gpu, strict=True))
        if not worst <= LOSS_BOUND:
            raise Failed(f"losses differ by {worst:.2e} where the bound is {LOSS_BOUND}")
        if "as planned" not in text:
            raise Failed(f"memory is not as planned: {[l for l in text.splitlines() if 'planned' in l][-1]}")
        return dict(steps=len(gpu), last_loss=gpu[-1]["loss"], worst=worst)

    def same_bits(self, name, ranks, setup=TINY, *options):
        """Undisturbed runs, and others with random delays on every stream, under the race checker."""
        steps, delays = (20, 4) if self.gpu else (2, 1)
        if not self.gpu:
            setup = setup | dict(length=16)
        folder = self.work / "bits" / name
        weights = []
        for seed in [0, *([0] if self.gpu else []), *random.Random(f"{os.environ.get('SEED_BASE', 1)} {name}").sample(range(1, 1 << 30), delays)]:
            lines, text = self.train(setup, "cuda", steps, folder, f"--save={folder}/w.safetensors", f"--debug.delay_seed={seed}",
                                     *options, ranks=ranks,
                                     # As many queues as streams: else waits of one hold another up that shares its queue.
                                     environment=dict(TESSERA_CHECK="1", CUDA_DEVICE_MAX_CONNECTIONS="32"))
            if ", 0 races" not in text:
                raise Failed("the race checker did not close with 0 races")
            if "as planned" not in text:
                raise Failed("memory is not as planned")
            weights.append(((folder / "w.safetensors").read_bytes(), [line["loss"] for line in lines]))
            if weights[-1] != weights[0]:
                raise Failed(f"other bits than the first run, with --debug.delay_seed={seed}")
        return dict(runs=len(weights), steps=steps)

    def own_gpus(self):
        """Rank r on GPU r, as many as there are up to 8: the bits of as many ranks on one GPU. On the emulated GPU also where GPUs
        can't read each other's memory."""
        count = count_of_driver() if self.gpu else 2
        if count < 2:
            raise Skipped("needs 2 GPUs, here is 1")
        ranks = 8 if count >= 8 else 4 if count >= 4 else 2
        setup, steps = (TINY, 20) if self.gpu else (TINY | dict(length=16), 2)
        folder, runs = self.work / "own_gpus", {}
        for name, own, gpus in (("one", False, "2"), ("own", True, "2"), *(() if self.gpu else (("apart", True, "2 apart"),))):
            lines, text = self.train(setup, "cuda", steps, folder, f"--save={folder}/w.safetensors", ranks=ranks, own_gpus=own,
                                     environment=dict(TESSERA_CHECK="1", TESSERA_EMULATED_GPUS=gpus))
            if ", 0 races" not in text:
                raise Failed("the race checker did not close with 0 races")
            if "as planned" not in text:
                raise Failed("memory is not as planned")
            if own and f"rank r of {ranks} is on GPU r" not in text + self.log.read_text():
                raise Failed(f"the {ranks} ranks are not on GPUs of their own")
            runs[name] = ((folder / "w.safetensors").read_bytes(), [line["loss"] for line in lines])
            if runs[name] != runs["one"]:
                raise Failed(f"{ranks} ranks, {name}: other bits than on one GPU")
        return dict(ranks=ranks, steps=steps, runs=len(runs))

    def captured(self):
        """Steps that the device runs again have the bits of steps that the host submits."""
        steps = 40 if self.gpu else 5
        for i, (name, (setup, *options)) in enumerate(CELLS.items()):
            setup, runs = (setup if self.gpu else setup | dict(length=16)), []
            for captures in "false", "true":
                folder = self.work / f"captured{i}"
                lines, _ = self.train(setup, "cuda", steps, folder, f"--save={folder}/w.safetensors", "--training.stop_on_nan=false",
                                      f"--training.captured_step={captures}", *(o.format(half=setup["batch"] // 2) for o in options))
                runs.append(((folder / "w.safetensors").read_bytes(), [line["loss"] for line in lines]))
            if runs[0] != runs[1]:
                raise Failed(f"{name}: a captured step has other bits")
        return dict(cells=len(CELLS), steps=steps)

    def sanitize(self, tool, op):
        """The emulated GPU runs the threads of a block in turns: what they do to each other between barriers only a GPU can show."""
        if not self.gpu:
            raise Skipped("needs a GPU")
        program = self.tool("compute-sanitizer")
        try:
            # What NVIDIA's own kernels do with barriers of the hardware is a race to racecheck, and breaks under synccheck.
            self.run([program, "--tool", tool, "--error-exitcode", "9", "--kernel-name-exclude", "kns=cudnn",
                      self.program("gpu-check-cases"), self.module(), *self.on_device(), "--first", 4, op], timeout=180)
        except Failed as e:
            if "Device not supported" in e.output + self.log.read_text():
                raise Skipped(f"compute-sanitizer refuses this device; see {self.log}") from None
            raise
        return f"the first 4 cases of {op}: no error"
