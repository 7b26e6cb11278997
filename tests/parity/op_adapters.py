"""How the arguments of PyTorch's operations become those of ours. Raises Other for what ours does not have, by design."""
import math

import torch

DTYPES = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "i64", torch.int32: "i32",
          torch.bool: "bool"}


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


def rsub(a, b, **k):
    if not isinstance(a, torch.Tensor):
        raise Other("a number on the left: sub")
    return scaled(b, a, **k)


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
    return [x, min, max]


def hardtanh(x, min_val=-1.0, max_val=1.0, inplace=False):
    if min_val > max_val:
        raise Other("a low bound above the high one: clamp gives the high one")
    return [x, min_val, max_val]


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
    if (x * beta > threshold).any():
        raise Other("threshold: beyond it theirs is x itself")
    return [x, beta]


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
    if length < 0:
        raise Other("a negative length: an end of slice, which counts from the back")
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


def dtype_name(k, default):
    only(k, "dtype", "device", "layout", "requires_grad", "memory_format", "pin_memory")
    dtype = k.get("dtype") or default
    if dtype not in DTYPES:
        raise Other(f"dtype {dtype}")
    return DTYPES[dtype]


def dtype_of(*numbers):
    kinds = [type(n) for n in numbers]
    return torch.float32 if float in kinds else torch.bool if kinds == [bool] else torch.int64


def arange(*bounds, **k):
    bounds = [*bounds, k.pop("end")] if "end" in k else list(bounds)
    dtype = dtype_name(k, dtype_of(*bounds))
    if dtype[0] == "i" and any(n != int(n) for n in bounds):
        raise Other("fractions of integers, each cut off before the steps are counted")
    return [*([0, *bounds, 1] if len(bounds) == 1 else [*bounds, 1])[:3], dtype]


def eye(rows, cols=None, **k):
    return [rows, cols, dtype_name(k, torch.float32)]


def full(size, value, **k):
    return [list(size), value, dtype_name(k, dtype_of(value))]


def full_of(value):
    return lambda size, **k: [list(size), value, dtype_name(k, torch.float32)]


def full_like(*value):
    return lambda x, *v, **k: [list(x.shape), *(value or v), dtype_name(k, x.dtype)]


def new_full(*value):
    return lambda x, size, *v, **k: [list(size), *(value or v), dtype_name(k, x.dtype)]


def cast(dtype):
    def of(x, **k):
        return [x, dtype_name(k, dtype)]
    return of


def to(x, *a, **k):
    only(k, "memory_format", "copy", "dtype", "device")
    dtype = next((i.dtype if isinstance(i, torch.Tensor) else i for i in a if isinstance(i, (torch.dtype, torch.Tensor))), x.dtype)
    return [x, dtype_name({}, dtype)]


def linspace(start, end, steps, **k):
    if isinstance(start, torch.Tensor) or isinstance(end, torch.Tensor) or k.get("dtype") not in (None, torch.float64):
        raise Other("tensors, other dtypes")
    if isinstance(steps, float):
        raise Other("a number of steps that is not whole")
    return [start, end, steps, "f64" if k.get("dtype") == torch.float64 else "f32"]


def softmax(x, dim, dtype=None, **k):
    only(k)
    return [x, dim, dtype and dtype_name({}, dtype)]


def loss(*known):
    def of(x, target, *a, **k):
        only(k, "reduction", "size_average", "reduce", *known)
        if k.get("size_average") is not None or k.get("reduce") is not None:
            raise Other("size_average, reduce: reduction")
        if target.is_floating_point() and x.shape != target.shape:
            raise Other("shapes that broadcast: expand")
        return [x, target, {**dict(zip(known, a)), **{name: value for name, value in k.items() if value is not None}}]
    return of


def class_loss(x, target, **k):
    if target.is_floating_point():
        raise Other("probabilities as targets: kl_div")
    return loss("weight", "ignore_index", "label_smoothing")(x, target, **k)


def linear_cross_entropy(x, linear_weight, target, *, linear_bias=None, options=None, reduction="mean", **k):
    only(k)
    if reduction != "mean":
        raise Other("another reduction")
    if target.is_floating_point() or target.ndim != 1 or linear_weight.ndim != 2:
        raise Other("targets that are no vector of classes")
    return [x, linear_weight, linear_bias, target, 3]


def linear(x, weight, bias=None):
    if weight.ndim == 1:
        raise Other("a vector as weight: matmul")
    return [x, weight, bias]


def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if dropout_p:
        raise Other("dropout: random")
    if any(t.ndim not in (3, 4) or t.shape[:-3] != q.shape[:-3] for t in (k, v)):
        raise Other("batches that broadcast: expand")
    name = "mask" if attn_mask is not None and attn_mask.dtype == torch.bool else "bias"
    return [q, k, v, {name: attn_mask, "is_causal": is_causal, "scale": scale}]


def embedding(weight, ids, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False):
    if padding_idx is not None or max_norm is not None or scale_grad_by_freq or sparse:
        raise Other("padding_idx, max_norm, scale_grad_by_freq, sparse")
    return [weight, ids]


def layer_norm(x, shape, weight=None, bias=None, eps=1e-5):
    if math.prod(shape) == 1:
        raise Other("of one element, whose gradient is 0 there but for rounding")
    return [x, weight, bias, eps, len(shape)]


def rms_norm(x, shape, weight=None, eps=None):
    if not shape or tuple(shape) != x.shape[-len(shape):]:
        raise Other("a shape that is not that of the last dimensions: ours is the weight's")
    return [x, weight, torch.finfo(x.dtype).eps if eps is None else eps, len(shape)]


def dropout(x, p=0.5, training=True, inplace=False):
    if training and 0 < p < 1:
        raise Other("random")
    return [x, p if training else 0.0]


def norm(x, p="fro", dim=None, keepdim=False, dtype=None):
    if p not in (2, "fro") or dtype is not None:
        raise Other("another order")
    return [x, dims(dim), bool(keepdim)]


def linalg_norm(x, ord=None, dim=None, keepdim=False, dtype=None):
    if ord not in (None, "fro") and (ord != 2 or (x.ndim if dim is None else len(dims(dim))) != 1):
        raise Other("another order")
    return norm(x, "fro", dim, keepdim, dtype)


def split_sizes(x, sizes, dim=0):
    return [x, list(sizes), dim]


def slice_(x, dim=0, start=None, end=None, step=1):
    begin, end, step = slice(start, end, step).indices(x.shape[dim])
    return [x, dim, begin, max(begin, end), step]


def take_along_dim(x, index, dim=None):
    if (index < 0).any():
        raise Other("negative places: index")
    if dim is None or any(a != b for d, (a, b) in enumerate(zip(x.shape, index.shape)) if d != dim % x.ndim):
        raise Other("shapes that broadcast, or no dimension: expand, flatten")
    return [x, dim, index]


def like(x, other):
    return [x, list(other.shape)]


def t(x):
    if x.ndim > 2:
        raise Other("more than a matrix: permute")
    return [x, list(range(x.ndim))[::-1]]


def left(a, b):
    return [b, a]
