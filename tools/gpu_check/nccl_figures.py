"""What gpu-check measures of ranks over NCCL: what NCCL says that it does, bus bandwidths beside nccl-tests', its ways beside compute,
memory beside the ledger, and tokens/s beside PyTorch FSDP2 on the same GPUs. Steps of `Check` in tools/gpu-check."""
import json
import os
import pathlib
import re
import shutil
import subprocess
import time

from book import write_book
from compare_cuda import CASES, LOSS_BOUND, LR, SKIPPED_STEPS
from gpu_check.correct import TINY
from gpu_check.figures import step_figures
from gpu_check.steps import Failed, Skipped, say, short

BUS_MARK, TOKENS_MARK, TOKENS_AIM = 0.95, 1.0, 1.15
BUS = ["-b", "64M", "-e", "256M", "-f", "4", "-n", "20", "-w", "5"]
TESTS = {"all_gather": "all_gather_perf", "reduce_scatter": "reduce_scatter_perf"}  # ours, and nccl-tests' programs
TEST_FOLDERS = ("/usr/local/bin", "/usr/local/nccl-tests/build", "/opt/nccl-tests/build", "/opt/nccl_tests/build")
IN_PLACE = 11  # the column of its bus bandwidth, of both
FSDP2_CASE, FSDP2_STEPS = "gpt2-124m", 30
PYTORCH = pathlib.Path(__file__).resolve().parents[2] / "bench/compare_pytorch.py"
MEASURED_DIM = 2048


def bus_bandwidths(text):
    """{bytes: GB/s in place} of a table of nccl-tests or of ours."""
    rows = [line.split() for line in text.splitlines() if re.match(r"\s*\d+\s+\d+\s", line)]
    if any(row[IN_PLACE + 1] not in ("0", "N/A") for row in rows):
        raise Failed("values are wrong", output=text)
    return {int(row[0]): float(row[IN_PLACE]) for row in rows}


def named_in(log):
    """Which of NCCL's ways are in its log, as NCCL 2.27 to 2.29 write it for NCCL_DEBUG_SUBSYS=TUNING."""
    return {name: f"[{name}]" in log for name in ("Symmetric", "Copy Engine")}


class NcclFigures:
    def measure_nccl(self, ranks):
        self.step("over NCCL: its log", lambda: self.log_of_nccl(ranks))
        self.step("over NCCL: bandwidths", lambda: self.bandwidths_over_nccl(ranks))
        self.step("over NCCL: ways beside compute", lambda: self.ways_beside_compute(ranks))
        self.step("over NCCL: memory", lambda: self.memory_over_nccl(ranks))
        self.step("over NCCL: beside FSDP2", lambda: self.beside_fsdp2(ranks))

    def has_option(self, name):
        """Whether tessera-train knows it."""
        return f"--{name}=" in self.run([self.program("tessera-train"), "--help=all"], timeout=60)

    # ---- what NCCL says

    def log_of_nccl(self, ranks):
        """Memory in windows is moved by symmetric kernels, and without any block of threads by copy engines, where GPUs have NVLink."""
        self.expect_gpus(ranks)
        folder, planned = self.work / "log_of_nccl", {"Symmetric": []}
        if self.has_option("comm.gather_policy"):
            planned["Copy Engine"] = ["--comm.gather_policy=zero"]
        setup, found = TINY | dict(model=TINY["model"] | dict(dim=256)), {}
        for way, options in planned.items():
            folder.mkdir(parents=True, exist_ok=True)
            for file in folder.glob("nccl-*"):
                file.unlink()
            self.outputs_of(self.train_over_nccl(setup, 3, folder, "--comm.windows=true", *options), ranks, folder,
                            dict(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,TUNING", NCCL_DEBUG_FILE=f"{folder}/nccl-%h-%p"))
            log = "".join(file.read_text(errors="replace") for file in sorted(folder.glob("nccl-*")))
            if not log:
                raise Skipped("NCCL has written no log to NCCL_DEBUG_FILE")
            self.note(log)
            found[way] = named_in(log)[way]
        missing = [way for way, is_named in found.items() if not is_named]
        if missing and not self.have_nvlink():
            raise Skipped(f"{', '.join(missing)}: not in NCCL's log, and the GPUs have no NVLink")
        if missing:
            raise Failed(f"planned, and not in NCCL's log: {', '.join(missing)}")
        return found | ({} if "Copy Engine" in planned else {"Copy Engine": "not tried: no option asks for it"})

    def have_nvlink(self):
        text = self.run([self.tool("nvidia-smi"), "topo", "-m"], timeout=30)
        return re.search(r"\bNV\d+\b", text) is not None

    # ---- collectives

    def collectives(self, ranks, words, environment=None):
        folder = self.work / "collectives"
        return self.outputs_of([self.program("bench-collectives"), *words, "--device", "cuda", "--threads", "1"], ranks, folder, environment)[0]

    def bandwidths_over_nccl(self, ranks):
        self.expect_gpus(ranks)
        figures, low, path = {}, [], os.pathsep.join([os.environ["PATH"], *TEST_FOLDERS])
        measured = {operation: bus_bandwidths(self.collectives(ranks, [operation, *BUS])) for operation in TESTS}
        for operation, test in TESTS.items():
            ours, program = measured[operation], shutil.which(test, path=path)
            if not program:
                raise Skipped(f"{test} of nccl-tests is neither in PATH nor in {', '.join(TEST_FOLDERS[1:])}; ours, in GB/s: {measured}")
            theirs = bus_bandwidths(self.run([program, "-g", ranks, *BUS], timeout=120))
            if not ours or sorted(ours) != sorted(theirs):
                raise Failed(f"{operation}: sizes {sorted(ours)} and {sorted(theirs)}; see {self.log}")
            for size in ours:
                figures[f"{operation} {size} B"] = dict(gb_per_second=ours[size], of_nccl_tests=ours[size] / theirs[size])
                if not ours[size] >= BUS_MARK * theirs[size]:
                    low.append(f"{operation} of {size} B: {ours[size]:.1f} GB/s, and nccl-tests have {theirs[size]:.1f}")
        if low:
            raise Failed(f"below {BUS_MARK} of nccl-tests: {'; '.join(low)}", figures)
        return figures

    def ways_beside_compute(self, ranks):
        """Gathers and reductions of a job's largest unit beside products, each in two ways, as a job measures before its first step."""
        self.expect_gpus(ranks)
        setup = TINY | dict(model=TINY["model"] | dict(dim=MEASURED_DIM))
        text = self.outputs_of(self.train_over_nccl(setup, 1, self.work / "ways", "--comm.windows=true", "--comm.gather_policy=measured",
                                                    "--comm.reduce_max_ctas=-1"), ranks, self.work / "ways")[0]
        line = re.search(r"NCCL, medians of .*", text)
        if not line:
            raise Failed("no line says what was measured", output=text)
        say(f"    {line[0]}")
        ways = re.findall(r"(gathers|reductions) of (\d+) bytes .*? take ([\d.]+) us, .*?, alone ([\d.]+) us: ([^;]*)", line[0])
        return {call: dict(bytes=int(size), us=float(us), alone_us=float(alone), chosen=chosen) for call, size, us, alone, chosen in ways}

    # ---- memory

    def used_bytes(self):
        """Of all GPUs, by the driver."""
        text = self.run([self.tool("nvidia-smi"), "--query-gpu=memory.used", "--format=csv,noheader,nounits"], timeout=30)
        return sum(int(line) for line in text.split()) << 20

    def memory_over_nccl(self, ranks):
        """What the driver counts for a rank, beside what the trainer reserves, and says of NCCL: contexts are the rest."""
        self.expect_gpus(ranks)
        folder, before = self.work / "memory_over_nccl", self.used_bytes()
        command = self.train_over_nccl(TINY, 10**6, folder)
        (folder / "out.jsonl").write_text("")
        with self.ranks_of(command, ranks, folder) as processes:
            while (folder / "out.jsonl").read_text().count("\n") < 5 and processes.run() and self.left() > 0:
                time.sleep(0.05)
            used = (self.used_bytes() - before) / ranks
            ends = self.ends_of(processes, 0)
        if any(code is not None for _, code, _ in ends):
            raise Failed(f"a rank has ended: {ends}")
        line = json.loads((folder / "out.jsonl").read_text().splitlines()[4])
        figures = dict(used_mib=used / 2**20, reserved_mib=line["memory_reserved_bytes"] / 2**20, planned_mib=line["memory_planned_bytes"] / 2**20)
        of_nccl = re.search(r"memory of NCCL's communicators, on top: measured (\d+) bytes", ends[0][2])
        figures["nccl_mib"] = int(of_nccl[1]) / 2**20 if of_nccl else 0.0
        if not line["memory_peak_bytes"] <= line["memory_planned_bytes"]:
            raise Failed("the peak is above its plan", figures)
        if not figures["used_mib"] >= figures["reserved_mib"] + figures["nccl_mib"]:
            raise Failed("the driver counts less than the ledger", figures)
        return figures | dict(beside_mib=figures["used_mib"] - figures["reserved_mib"] - figures["nccl_mib"])

    # ---- PyTorch

    def beside_fsdp2(self, ranks):
        """Both on all GPUs, from the same weights and tokens, in turn: PyTorch under torchrun."""
        self.expect_gpus(ranks)
        python, case, folder = self.options.python, CASES[FSDP2_CASE], self.work / "beside_fsdp2"
        if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode != 0:
            raise Skipped(f"{python} has no torch; --python names one that has")
        folder.mkdir(parents=True, exist_ok=True)
        setup = dict(model=case["model"], length=case["length"], batch=case["batch"] * ranks)
        write_book(folder / "book.txt", (FSDP2_STEPS + 1) * setup["batch"] * setup["length"] + 1)
        self.run([*self.train_command(setup, 0, folder, folder / "book.txt"), "--training.steps=0", f"--save={folder}/start.safetensors",
                  "--device=cuda:0", f"--device.module={self.module()}"], cwd=folder, timeout=120)
        ours = [*self.train_command(setup, FSDP2_STEPS, folder, folder / "book.txt"), f"--load={folder}/start.safetensors", f"--optimizer.lr={LR}",
                "--device=cuda", f"--device.module={self.module()}", "--training.mixed_precision_param=bfloat16", "--debug.deterministic=false"]
        self.outputs_of(ours, ranks, folder)
        lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
        self.run([python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, PYTORCH, self.programs, "--worker", folder,
                  "--device", self.torch_device, "--case", FSDP2_CASE, "--variant", "eager", "--world", ranks, "--steps", FSDP2_STEPS, "--launched"],
                 cwd=folder, timeout=180)
        theirs = json.loads((folder / "pytorch.json").read_text())
        tokens = case["batch"] * case["length"]
        seconds = sorted(theirs["step_seconds"][SKIPPED_STEPS:])
        figures = dict(tokens_per_second=step_figures(lines, SKIPPED_STEPS)["tokens_per_second"] / ranks,
                       of_fsdp2=tokens / seconds[len(seconds) // 2], pytorch=theirs["version"])
        figures["ratio"], apart = figures["tokens_per_second"] / figures["of_fsdp2"], abs(lines[0]["loss"] - theirs["losses"][0])
        if not apart <= LOSS_BOUND:
            raise Failed(f"first losses {lines[0]['loss']} and {theirs['losses'][0]}: not the same training", figures)
        if not figures["ratio"] >= TOKENS_MARK:
            raise Failed(f"{figures['ratio']:.3f} of the tokens/s of FSDP2, where the mark is {TOKENS_MARK} and the aim {TOKENS_AIM}", figures)
        return figures
