#!/usr/bin/env python3
"""op_samples.py PROGRAM: every sample of PyTorch's own database of operations (torch.testing._internal) that an operation of ours
stands beside, forward and backward, and what PyTorch refuses. op_samples.py --write FILE N: at most N small samples an operation
and dtype, as lines of JSON that the suite `parity` runs without PyTorch.

PROGRAM is op_db, which reads such lines and prints a table; its exit code is ours. A sample of an integer dtype that we refuse is no
difference: nothing is promoted here. Everything is drawn from seed 0, on the CPU.
"""
import json
import math
import subprocess
import sys

import torch
from torch.testing._internal.common_methods_invocations import op_db

torch.manual_seed(0)
DTYPES = {torch.float64: "f64", torch.float32: "f32", torch.int64: "i64", torch.bool: "bool", torch.int32: "i32"}


class Other(Exception):
    """What ours does not have, by design: the table in include/tessera/tensor/README.md says why."""


def only(kwargs, *known):
    for name, value in kwargs.items():
        if name not in known and value is not None:
            raise Other(name)


def dims(dim):
    if dim is None:
        return []
    return list(dim) if isinstance(dim, (tuple, list, torch.Size)) else [dim]


def unary(x, *a, **k):
    only(k)
    return [x, *a]


def binary(a, b, **k):
    only(k)
    return [a, b]


def scaled(a, b, **k):
    if k.get("alpha", 1) != 1:
        raise Other("alpha: b * alpha")
    return [a, b]


def reduction(x, dim=None, keepdim=False, **k):
    only(k)
    return [x, dims(dim), bool(keepdim)]


def spread(x, *a, **k):
    only(k, "dim", "unbiased", "correction", "keepdim")
    if a and isinstance(a[0], bool):
        k["unbiased"], a = a[0], a[1:]
    correction = k.get("correction")
    if correction is None:
        correction = int(k.get("unbiased", True)) if k.get("unbiased") is not None else 1
    return [x, dims(a[0] if a else k.get("dim")), correction, bool(k.get("keepdim", False))]


def one_dim(x, dim=None, keepdim=False, **k):
    only(k)
    return [x, dim, bool(keepdim)]


def vector_norm(x, ord=2, dim=None, keepdim=False, dtype=None):
    if ord != 2 or dtype is not None:
        raise Other("another order")
    return [x, dims(dim), bool(keepdim)]


def clamp(x, min=None, max=None):
    if isinstance(min, torch.Tensor) or isinstance(max, torch.Tensor):
        raise Other("tensors as bounds: minimum and maximum")
    return [x, min, max]


def where(x, c, other=None):
    return [c, x, other]


def activation(name, default):
    def of(x, *a, **k):
        only(k, name, "inplace")
        return [x, a[0] if a else k.get(name, default)]
    return of


def elu(x, alpha=1.0, scale=1, input_scale=1, inplace=False):
    if scale != 1 or input_scale != 1:
        raise Other("scales")
    return [x, alpha]


def gelu(x, approximate="none"):
    if approximate not in ("none", "tanh"):
        raise Other("another name")
    return [x, approximate]


def softplus(x, beta=1, threshold=20):
    if beta != 1:
        raise Other("beta: softplus(beta x) / beta")
    return [x]


def round_(x, decimals=0, **k):
    if decimals:
        raise Other("decimals")
    return [x]


def div(a, b, rounding_mode=None):
    if rounding_mode is not None:
        raise Other("rounding_mode")
    return [a, b]


def cumsum(x, dim, dtype=None):
    if dtype is not None:
        raise Other("dtype")
    return [x, dim]


def sort(x, *a, **k):
    names = ("dim", "descending", "stable") if not (a and isinstance(a[0], bool)) else ("stable", "dim", "descending")
    k = {**dict(zip(names, a)), **k}
    return [x, k.get("dim", -1), bool(k.get("descending", False))]


def argsort(x, *a, **k):
    if a and isinstance(a[0], bool):
        return [x, *(list(a[1:]) + [-1, False])[:2]]
    return sort(x, *a, **k)


def topk(x, k, dim=-1, largest=True, sorted=True):
    return [x, k, dim, bool(largest)]


def shape(x, *sizes, **k):
    only(k, "size", "shape")
    if sizes and isinstance(sizes[0], (tuple, list, torch.Size)):
        sizes = sizes[0]
    return [x, list(sizes if sizes else k.get("size", k.get("shape", ())))]


def flatten(x, start_dim=0, end_dim=-1):
    return [x, start_dim, end_dim]


def squeeze(x, dim=None):
    if isinstance(dim, (tuple, list)):
        raise Other("several dimensions")
    return [x, dim]


def split(x, size, dim=0):
    if isinstance(size, (tuple, list)):
        raise Other("sizes: slices")
    return [x, size, dim]


def parts(x, dim=0, **k):
    only(k)
    if any(not isinstance(t, torch.Tensor) for t in x):
        raise Other("no tensors")
    if any(t.shape == (0,) for t in x) and any(t.ndim > 1 for t in x):
        raise Other("an empty vector among matrices")
    return [list(x), dim]


def narrow(x, dim, start, length):
    if isinstance(start, torch.Tensor):
        raise Other("a tensor as number")
    return [x, dim, start + x.shape[dim] if start < 0 else start, length]


def diagonal(x, offset=0, dim1=0, dim2=1):
    return [x, offset, dim1, dim2]


def interleave(x, repeats, dim=None, output_size=None):
    if isinstance(repeats, torch.Tensor) or dim is None:
        raise Other("repeats of a tensor, or without a dimension")
    return [x, repeats, dim]


def roll(x, shifts, dims=None):
    if isinstance(shifts, (tuple, list)) or dims is None or isinstance(dims, (tuple, list)):
        if isinstance(shifts, (tuple, list)) and isinstance(dims, (tuple, list)) and len(shifts) == len(dims) == 1:
            return [x, shifts[0], dims[0]]
        raise Other("several dimensions, or none")
    return [x, shifts, dims]


def pad(x, pad, mode="constant", value=None):
    return [x, list(pad), float(value or 0)]


def index_add(x, dim, index, source, *, alpha=1):
    if alpha != 1:
        raise Other("alpha: source * alpha")
    return [x, dim, index, source]


def index_put(x, indices, values, accumulate=False):
    if any(i is None or i.dtype in (torch.bool, torch.uint8) for i in indices):
        raise Other("boolean indices")
    return [x, list(indices), values, bool(accumulate)]


def scatter(x, dim, index, src=None, *, value=None, reduce=None):
    if reduce is not None:
        raise Other("reduce")
    return [x, dim, index, src if src is not None else value]


def item(x, *at):
    at = at[0] if len(at) == 1 else at
    places = []
    for i in at if isinstance(at, tuple) else (at,):
        if isinstance(i, slice):
            if i.step is not None and i.step < 0:
                raise Other("negative step")
            places.append({"range": [i.start, i.stop, i.step or 1]})
        elif i is Ellipsis:
            places.append({"all": 0})
        elif i is None:
            places.append({"new": 0})
        elif isinstance(i, (list, tuple)):
            places.append({"at": torch.tensor(i)})
        elif isinstance(i, torch.Tensor):
            if i.dtype in (torch.bool, torch.uint8):
                raise Other("boolean indices")
            places.append({"at": i})
        elif isinstance(i, bool):
            raise Other("boolean indices")
        else:
            places.append({"place": i})
    return [x, places]


def einsum(x, formula):
    if len(x) != 2:
        raise Other("other than two operands")
    return [formula, x[0], x[1]]


def masked_fill(x, mask, value):
    if isinstance(value, torch.Tensor):
        if value.requires_grad or value.ndim != 0:
            raise Other("a tensor as value: where")
        value = value.item()
    return [x, mask, value]


def one_hot(x, num_classes=-1):
    if num_classes < 0:
        raise Other("a number of classes that the values say")
    return [x, num_classes]


def linspace(start, end, steps, **k):
    if isinstance(start, torch.Tensor) or isinstance(end, torch.Tensor) or k.get("dtype") not in (None, torch.float64):
        raise Other("tensors, other dtypes")
    if isinstance(steps, float):
        raise Other("a number of steps that is not whole")
    return [start, end, steps, "f64" if k.get("dtype") == torch.float64 else "f32"]


def softmax(x, dim, dtype=None, **k):
    if dtype is not None or x.ndim == 0 or dim % max(x.ndim, 1) != x.ndim - 1:
        raise Other("another dimension")
    return [x]


def left(a, b):
    return [b, a]


# theirs -> ours, and how their arguments become ours
OPS = {
    "add": ("add", scaled), "sub": ("sub", scaled), "mul": ("mul", binary), "div": ("div", div), "neg": ("neg", unary),
    "__radd__": ("add", left), "__rmul__": ("mul", left), "__rsub__": ("sub", left), "__rdiv__": ("div", left),
    "pow": ("pow", binary), "__rpow__": ("pow", left), "square": ("square", unary), "reciprocal": ("reciprocal", unary),
    "minimum": ("minimum", binary), "maximum": ("maximum", binary), "clamp": ("clamp", clamp),
    "eq": ("eq", binary), "ne": ("ne", binary), "lt": ("lt", binary), "le": ("le", binary), "gt": ("gt", binary),
    "ge": ("ge", binary), "logical_and": ("logical_and", binary), "logical_or": ("logical_or", binary),
    "logical_not": ("logical_not", unary), "isnan": ("isnan", unary), "isinf": ("isinf", unary), "isfinite": ("isfinite", unary),
    "where": ("where", where), "masked_fill": ("masked_fill", masked_fill),
    "exp": ("exp", unary), "expm1": ("expm1", unary), "log": ("log", unary), "log1p": ("log1p", unary), "sqrt": ("sqrt", unary),
    "rsqrt": ("rsqrt", unary), "sin": ("sin", unary), "cos": ("cos", unary), "tanh": ("tanh", unary), "erf": ("erf", unary),
    "abs": ("abs", unary), "sign": ("sign", unary), "floor": ("floor", unary), "round": ("round", round_),
    "nn.functional.relu": ("relu", unary), "nn.functional.leaky_relu": ("leaky_relu", activation("negative_slope", 0.01)),
    "nn.functional.elu": ("elu", elu), "nn.functional.gelu": ("gelu", gelu), "sigmoid": ("sigmoid", unary),
    "nn.functional.logsigmoid": ("log_sigmoid", unary), "nn.functional.softplus": ("softplus", softplus),
    "nn.functional.silu": ("silu", activation("inplace", None)),
    "sum": ("sum", reduction), "mean": ("mean", reduction), "prod": ("prod", reduction), "var": ("var", spread),
    "std": ("stddev", spread), "linalg.vector_norm": ("norm", vector_norm), "logsumexp": ("logsumexp", reduction),
    "any": ("any", reduction), "all": ("all", reduction), "amax": ("amax", reduction), "amin": ("amin", reduction),
    "max.reduction_with_dim": ("max_with_index", one_dim), "min.reduction_with_dim": ("min_with_index", one_dim),
    "max.reduction_no_dim": ("amax", reduction), "min.reduction_no_dim": ("amin", reduction),
    "max.binary": ("maximum", binary), "min.binary": ("minimum", binary),
    "argmax": ("argmax", one_dim), "argmin": ("argmin", one_dim), "cumsum": ("cumsum", cumsum), "sort": ("sort", sort),
    "argsort": ("argsort", argsort), "topk": ("topk", topk),
    "reshape": ("reshape", shape), "view": ("reshape", shape), "flatten": ("flatten", flatten), "squeeze": ("squeeze", squeeze),
    "unsqueeze": ("unsqueeze", unary), "transpose": ("transpose", unary), "permute": ("permute", shape), "expand": ("expand", shape),
    "broadcast_to": ("expand", shape), "narrow": ("narrow", narrow), "select": ("select", unary), "diagonal": ("diagonal", diagonal),
    "split": ("split", split), "chunk": ("chunk", lambda x, n, dim=0: [x, n, dim]), "cat": ("cat", parts), "stack": ("stack", parts),
    "repeat": ("repeat", shape), "tile": ("repeat", lambda x, *n: shape(x, *n)), "repeat_interleave": ("repeat_interleave", interleave),
    "flip": ("flip", lambda x, *d, **k: [x, dims(d[0] if d else k["dims"])]), "roll": ("roll", roll),
    "nn.functional.pad.constant": ("pad", pad), "tril": ("tril", unary), "triu": ("triu", unary), "diag": ("diag", unary),
    "index_select": ("index_select", unary), "index_copy": ("index_copy", unary), "index_add": ("index_add", index_add),
    "index_put": ("index_put", index_put), "gather": ("gather", unary), "scatter": ("scatter", scatter),
    "scatter_add": ("scatter_add", scatter), "__getitem__": ("index", item), "einsum": ("einsum", einsum), "outer": ("outer", unary),
    "nn.functional.one_hot": ("one_hot", one_hot), "linspace": ("linspace", linspace), "matmul": ("matmul", unary),
    "mm": ("matmul", unary), "bmm": ("matmul", unary), "softmax": ("softmax", softmax),
}
def number(x):
    if isinstance(x, float) and not math.isfinite(x):
        return {"number": "nan" if math.isnan(x) else "inf" if x > 0 else "-inf"}
    return x


def tensor_json(x):
    x = x.detach()
    if x.dtype not in DTYPES:
        raise Other(f"dtype {x.dtype}")
    values = x.contiguous().reshape(-1).tolist()
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


def line_of(op, ours, adapt, sample, fails):
    call = Call()
    try:
        arguments = call.argument(adapt(sample.input, *sample.args, **sample.kwargs))
    except TypeError as error:
        raise Other(f"arguments: {error}") from error
    line = {"theirs": op.name + ("." + op.variant_test_name if op.variant_test_name else ""), "ours": ours, "args": arguments}
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
        name = op.name + ("." + op.variant_test_name if op.variant_test_name else "")
        ours, adapt = OPS.get(name, OPS.get(op.name if op.variant_test_name in ("", "no_rounding_mode", "tensor_overload", "list",
                                                                                "unbiased") else "", (None, None)))
        if ours is None:
            continue
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
                        line = line_of(op, ours, adapt, sample, fails)
                    except Other as reason:
                        key = f"{name}: {reason}"
                        left_out[key] = left_out.get(key, 0) + 1
                        continue
                    text = json.dumps(line, separators=(",", ":"))
                    if len(text) > largest or (limit is not None and count >= limit and not fails):
                        continue
                    count += 1
                    yield text
    for reason, times in sorted(left_out.items()):
        print(f"left out {times:4}  {reason}", file=sys.stderr)


def main(arguments):
    if len(arguments) == 3 and arguments[0] == "--write":
        with open(arguments[1], "w") as file:
            for line in lines(int(arguments[2]), 1200):
                file.write(line + "\n")
        return 0
    if len(arguments) != 1:
        print(__doc__)
        return 2
    program = subprocess.Popen([arguments[0]], stdin=subprocess.PIPE, text=True)
    for line in lines():
        program.stdin.write(line + "\n")
    program.stdin.close()
    return program.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
