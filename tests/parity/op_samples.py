#!/usr/bin/env python3
"""op_samples.py PROGRAM: every sample of PyTorch's own database of operations (torch.testing._internal) that an operation of ours
stands beside, forward and backward, and what PyTorch refuses.
op_samples.py --write FILE N: at most N small samples an operation and dtype, or one that is not small, as lines of JSON that the suite
`parity` runs without PyTorch. Operations that are others by another name are left out.
op_samples.py --missing: what stands beside nothing, of ours with the reason, and of PyTorch's by name.

PROGRAM is op_db, which reads such lines and prints a table; its exit code is ours. A sample of an integer dtype that we refuse is no
difference: nothing is promoted here. Everything is drawn from seed 0, on the CPU.
"""
import json
import math
import pathlib
import re
import subprocess
import sys

import torch
from op_adapters import DTYPES, Other
from op_table import ALSO, NONE, OPS
from torch.testing._internal.common_methods_invocations import op_db

torch.manual_seed(0)
COMPARED = set()  # ours, of the lines that were made
TABLE = pathlib.Path(__file__).resolve().parent.parent.parent / "include/tessera/tensor/README.md"


def number(x):
    if isinstance(x, float) and not math.isfinite(x):
        return {"number": "nan" if math.isnan(x) else "inf" if x > 0 else "-inf"}
    return x


def tensor_json(x):
    x = x.detach()
    if x.dtype not in DTYPES:
        raise Other(f"dtype {x.dtype}")
    values = x.contiguous().reshape(-1).tolist()
    if x.dtype == torch.float32:
        values = [float(f"{v:.9g}") for v in values]  # nine digits say which float it is
    return {"shape": list(x.shape), "dtype": DTYPES[x.dtype], "values": [number(v) for v in values]}


class Call:
    def __init__(self):
        self.tensors = []

    def argument(self, x):
        if isinstance(x, torch.Tensor):
            self.tensors.append(x)
            return {"tensor": len(self.tensors) - 1}
        if isinstance(x, (list, tuple)):
            return [self.argument(i) for i in x]
        if isinstance(x, dict):
            return {key: self.argument(value) for key, value in x.items()}
        if isinstance(x, float):
            return number(x)
        if x is None or isinstance(x, (bool, int, str)):
            return x
        raise Other(f"an argument of {type(x).__name__}")


def outputs_of(result):
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for t in result if isinstance(t, torch.Tensor)]


def name_of(op):
    return op.name + ("." + op.variant_test_name if op.variant_test_name else "")


def pair_of(op):
    """Ours and its adapter, or None; some variants differ in their samples alone."""
    plain = op.variant_test_name in ("no_rounding_mode", "tensor_overload", "list", "unbiased")
    table = OPS | ALSO
    return table.get(name_of(op), table.get(op.name) if plain else None)


def forgotten():
    """Operations of the table that no line so far was held against."""
    rows = [re.split(r"(?<!\\)\|", line) for line in TABLE.read_text().splitlines()]
    named = {name for row in rows if len(row) == 5 for name in re.findall(r"`(?:Tensor::)?([a-z_]\w*)`", row[2])}
    return named - COMPARED


def line_of(op, ours, adapt, sample, fails):
    call = Call()
    try:
        arguments = call.argument(adapt(sample.input, *sample.args, **sample.kwargs))
    except TypeError as error:
        raise Other(f"arguments: {error}") from error
    line = {"theirs": name_of(op), "ours": ours, "args": arguments}
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in call.tensors]
    line["tensors"] = [{**tensor_json(t), "grad": t.requires_grad} for t in leaves]
    if fails:
        line["fails"] = True
        return line
    kept = dict(zip(map(id, call.tensors), leaves))
    swap = lambda x: (kept.get(id(x), x) if isinstance(x, torch.Tensor) else type(x)(map(swap, x)) if isinstance(x, (list, tuple))
                      and not isinstance(x, torch.Size) else x)
    kwargs = {key: swap(value) for key, value in sample.kwargs.items()}
    args = swap(list(sample.args))
    if op.name in ("sort", "argsort"):
        args, kwargs = [], {"stable": True, "dim": arguments[1], "descending": arguments[2]}
    if op.name == "topk":  # which of equal ones comes first is left open there
        ordered = torch.sort(swap(sample.input), dim=arguments[2], descending=arguments[3], stable=True)
        result = [t.narrow(arguments[2], 0, arguments[1]) if t.ndim else t for t in ordered]
    else:
        result = outputs_of(op.op(swap(sample.input), *args, **kwargs))
    line["out"] = [tensor_json(t) for t in result]
    roots = [t for t in result if t.requires_grad and t.is_floating_point()]
    if roots:
        cotangents = [torch.randn(t.shape, dtype=t.dtype) for t in roots]
        wanted = [t for t in leaves if t.requires_grad]
        grads = torch.autograd.grad(roots, wanted, cotangents, allow_unused=True)
        line["cotangents"] = [tensor_json(c) for c in cotangents]
        of = {id(t): g for t, g in zip(wanted, grads)}
        line["gradients"] = [tensor_json(of[id(t)]) if of.get(id(t)) is not None else None for t in leaves]
    return line


def lines(limit=None, largest=1 << 30):
    left_out = {}
    for op in op_db:
        name, pair = name_of(op), pair_of(op)
        if pair is None or (limit is not None and name in ALSO):
            continue
        smallest = None
        for dtype in (torch.float64, torch.float32, torch.int64):
            count = 0
            if dtype not in op.supported_dtypes("cpu"):
                continue
            grad = dtype.is_floating_point and op.supports_autograd
            kinds = [(op.sample_inputs("cpu", dtype, requires_grad=grad), False)]
            if op.error_inputs_func is not None and dtype == torch.float64:
                errors = [e for e in op.error_inputs("cpu") if "out of bounds" not in e.error_regex]  # ours cannot look at values
                kinds.append((() if name.startswith("__r") else (e.sample_input for e in errors), True))
            for samples, fails in kinds:
                for sample in samples:
                    try:
                        line = line_of(op, *pair, sample, fails)
                    except Other as reason:
                        key = f"{name}: {reason}"
                        left_out[key] = left_out.get(key, 0) + 1
                        continue
                    COMPARED.add(line["ours"])
                    text = json.dumps(line, separators=(",", ":"))
                    if smallest is None or len(text) < len(smallest):
                        smallest = text
                    if len(text) > largest or (limit is not None and count >= limit and not fails):
                        continue
                    count += 1
                    yield text
        if smallest is not None and len(smallest) > largest:
            yield smallest
    for reason, times in sorted(left_out.items()):
        print(f"left out {times:4}  {reason}", file=sys.stderr)


def main(arguments):
    if len(arguments) == 3 and arguments[0] == "--write":
        with open(arguments[1], "w") as file:
            for line in lines(int(arguments[2]), 900):
                file.write(line + "\n")
        return 0
    if arguments == ["--missing"]:
        list(lines(1))
        for name in sorted(forgotten()):
            print(f"ours    {name}: {NONE.get(name, 'FORGOTTEN')}")
        for name in sorted(name_of(op) for op in op_db if not pair_of(op)):
            print(f"theirs  {name}")
        return 1 if forgotten() - NONE.keys() else 0
    if len(arguments) != 1:
        print(__doc__)
        return 2
    program = subprocess.Popen([arguments[0]], stdin=subprocess.PIPE, text=True)
    for line in lines():
        program.stdin.write(line + "\n")
    program.stdin.close()
    for name in sorted(forgotten() - NONE.keys()):
        print(f"no sample is held against {name}", file=sys.stderr)
    return program.wait() or (1 if forgotten() - NONE.keys() else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
