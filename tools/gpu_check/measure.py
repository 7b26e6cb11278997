"""What gpu-check measures: kernels beside the copy bandwidth, products beside the best of cuBLASLt, attention, training steps, and
profiles of kernels. Steps of `Check` in tools/gpu-check, which has the programs."""
import json
import pathlib

from compare_cuda import CASES as ALL_CASES
from gpu_check.correct import TINY
from gpu_check.figures import (below_expected, beside_prediction, chosen_loss, expected_shares, idle_figures, json_lines, operation_times,
                               predicted_figures, step_figures)
from gpu_check.parts import PROFILED
from gpu_check.steps import Failed, Skipped, say, short

CASES = {name: case for name, case in ALL_CASES.items() if not name.startswith("tiny")}
SHARES = pathlib.Path(__file__).resolve().parents[2] / "kernels/cuda/shares.txt"
SHARE_MARK = 0.75  # the aim is 0.85
WORLD = 8  # a step is timed as that of one rank of so many
MACHINES = {"H200": "h200", "H100": "h100", "A100": "a100", "B200": "b200"}  # of include/tessera/detail/device/machine.hpp
PEAK_TFLOPS = {"H200": 989.4, "H100": 989.4, "A100": 312.0, "B200": 2250.0}  # dense bf16, vendors' data sheets
NO_FP8 = "A100"
# What else a step may be, beside the one that is timed for a case: (options, which cases).
VARIANTS = {
    "captured": (["--training.captured_step=true", "--training.stop_on_nan=false"], ""),
    "fused projections": (["--model.projections=fused"], "llama"),
    "fp8": (["--quantize.linear.float8.recipe_name=tensorwise"], ""),
}


class Measure:
    def bench(self):
        self.bandwidths()
        self.attention()
        self.model_products()
        self.fp8_products()
        if not self.gpu:
            self.step("step of a tiny model", self.tiny_step)
        self.model_steps()
        self.profiles()

    def bandwidths(self):
        self.step("bandwidth", self.bandwidth)

    def attention(self):
        self.step("attention, cuDNN's and our own", lambda: self.measured("attention"))

    def model_products(self):
        self.step("products of the models", lambda: self.measured("model_products"))

    def fp8_products(self):
        self.step("products of 8-bit floats", self.products_in_8_bits)

    def products_in_8_bits(self):
        self.expect_8_bits()
        return self.measured("fp8_products")

    def expect_8_bits(self):
        if self.gpu and NO_FP8 in self.gpu["name"]:
            raise Skipped(f"an {NO_FP8} multiplies no 8-bit floats")

    def few_steps(self):
        self.model_steps(["gpt2-124m", "llama-1.2b"])

    def model_steps(self, names=tuple(CASES)):
        for name in names:
            self.step(f"step of {name}", lambda name=name: self.training_step(name))
            for variant, (_, models) in VARIANTS.items():
                if models in name:
                    self.step(f"step of {name}, {variant}", lambda name=name, variant=variant: self.variant_step(name, variant))

    def profiles(self):
        for kernel in PROFILED:
            self.step(f"profile of {kernel}", lambda kernel=kernel: self.profile(kernel))

    def in_table(self):
        """The option that names this GPU in the device table; none where it is not there."""
        name = next((v for k, v in MACHINES.items() if self.gpu and k in self.gpu["name"]), None)
        return ["--machine", name] if name else []

    def measured(self, what):
        """What one part of the bench prints; on the emulated GPU only that it runs."""
        scale = [] if self.gpu else ["--scale", "0.0001"]
        lines = json_lines(self.run([self.program("gpu-check-bench"), self.module(), *self.on_device(), *self.in_table(), *scale, what],
                                    timeout=400))
        lines = [self.beside_state(line) for line in lines if line.get("kernel") != "copy"]
        if refused := [f"{line['kernel']}: {line['error']}" for line in lines if "error" in line]:
            raise Failed("; ".join(refused), lines)
        if not lines:
            raise Failed(f"nothing was measured; see {self.log}")
        if not self.gpu:
            raise Skipped(f"{len(lines)} ran on the emulated GPU, whose times mean nothing")
        for line in lines:
            say("    " + short({k: v for k, v in line.items() if k not in ("ended", "gpu_state")}))
        return lines

    def beside_state(self, line):
        """A figure, with clocks, power and temperature of the moment at which it was measured."""
        at = self.watched.at(line["ended"]) if self.watched and "ended" in line else None
        return line | (dict(gpu_state=at) if at else {})

    def profile(self, kernel):
        if not self.gpu:
            raise Skipped("needs a GPU")
        text = self.run([self.tool("ncu"), "--clock-control", "none", "--csv", "--page", "details", "--launch-skip", "3", "--launch-count",
                         "2", self.program("gpu-check-bench"), self.module(), *self.on_device(), kernel], timeout=120)
        file = self.work / "logs" / f"ncu-{kernel}.csv"
        file.write_text("".join(line + "\n" for line in text.splitlines() if line.startswith('"')))
        if not file.stat().st_size:
            raise Failed(f"ncu has measured nothing; see {self.log}")
        return f"in {file.name}"

    def bandwidth(self):
        scale = [] if self.gpu else ["--scale", "0.0001"]
        failure = None
        try:
            text = self.run([self.program("gpu-check-bench"), self.module(), *self.on_device(), *self.in_table(), *scale], timeout=240)
        except Failed as e:
            text, failure = e.output, str(e)  # what it had measured until then counts
        lines = json_lines(text)
        refused = [f"{line['kernel']}: {line['error']}" for line in lines if "error" in line] + ([failure] if failure else [])
        lines = [self.beside_state(line) for line in lines if "error" not in line]
        for line in lines if self.gpu else []:
            if "product" in line:
                say(f"    {line['product']:24} {line['tflops']:8.1f} TFLOP/s {100 * line['share_of_best']:5.1f} % of the best of "
                    f"{line['choices']} algorithms  {line['shape']}{beside_prediction(line)}")
            else:
                say(f"    {line['kernel']:24} {line['gb_per_second']:8.1f} GB/s  {100 * line['share_of_copy']:5.1f} % of copy  "
                    f"{line['shape']}{beside_prediction(line)}")
        if refused or not lines:
            raise Failed("; ".join(refused) or f"no kernel; see {self.log}", lines)
        if not self.gpu:
            raise Skipped(f"{len(lines)} kernels ran on the emulated GPU, whose times mean nothing")
        failures, misses = below_expected(lines, expected_shares(SHARES), SHARE_MARK)
        for miss in misses:
            say(f"    below the mark of {100 * SHARE_MARK:.0f} %, as expected: {miss}")
        if failures:
            raise Failed(f"of the copy bandwidth: {', '.join(failures)}", lines)
        return lines

    def of_a_world(self, name):
        """A case's setup for a whole world, and the options that make this process one rank of it."""
        if not self.gpu:
            raise Skipped("needs a GPU")
        case = CASES[name]
        return case | dict(batch=case["batch"] * WORLD), ["--training.mixed_precision_param=bfloat16", f"--emulate={WORLD}"]

    def variant_step(self, name, variant):
        whole, options = self.of_a_world(name)
        if variant == "fp8":
            self.expect_8_bits()
        lines, _ = self.train(whole, "cuda", 30, self.work / name, *options, *VARIANTS[variant][0])
        return step_figures(lines)

    def training_step(self, name):
        whole, options = self.of_a_world(name)
        peak = next((v for k, v in PEAK_TFLOPS.items() if k in self.gpu["name"]), None)
        lines, text = self.train(whole, "cuda", 30, self.work / name, *options, *([f"--metrics.peak_tflops={peak}"] if peak else []))
        self.train(whole, "cuda", 10, self.work / name, *options, "--trace=trace.json")
        figures = step_figures(lines)
        if figures["exposed_comm_ms"] is None:
            raise Failed("the run does not say how long communication was exposed", figures)
        events = json.loads((self.work / name / "trace.json").read_text())["traceEvents"]
        any_order, _ = self.train(whole, "cuda", 30, self.work / name, *options, "--debug.deterministic=false")
        figures["any_order_tokens_per_second"] = step_figures(any_order)["tokens_per_second"]
        return figures | idle_figures(events) | self.predicted_step(whole, chosen_loss(text)) | dict(operations_ms=operation_times(events))

    def predicted_step(self, setup, loss):
        """The same step by the device table, on as many GPUs; the measured one has no peers and its wire takes no time."""
        if not self.in_table():
            return {}
        return predicted_figures(self.run(
            [self.program("tessera-train"), "--dry-run", "--device=cuda", *self.in_table(), "--ranks", WORLD,
             *(f"--model.{k}={v}" for k, v in setup["model"].items()), f"--training.seq_len={setup['length']}",
             f"--training.global_batch_size={setup['batch']}", "--training.mixed_precision_param=bfloat16",
             f"--training.loss={loss}"], timeout=60))

    def tiny_step(self):
        """What makes the figures of a step, tried where there is no GPU to measure."""
        folder = self.work / "tiny"
        lines, _ = self.train(TINY | dict(length=16), "cuda", 4, folder, f"--trace={folder}/trace.json", ranks=2)
        figures = step_figures(lines, 2) | idle_figures(json.loads((folder / "trace.json").read_text())["traceEvents"])
        if not (figures["tokens_per_second"] > 0 and 0 <= figures["idle_share"] < 1 and figures["exposed_comm_ms"] >= 0):
            raise Failed(f"no figures of a step: {short(figures)}", figures)
        return "figures come from its lines and its trace; on the emulated GPU its times mean nothing"
