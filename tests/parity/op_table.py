"""OPS and ALSO: PyTorch's operations, and ours that stand beside them. NONE: ours that stand beside nothing."""
import pathlib
import re

import torch
from op_adapters import *

ROWS = pathlib.Path(__file__).resolve().parent.parent.parent / "include/tessera/kernels/unary.def"

# theirs -> ours, and how their arguments become ours
OPS = {
    "add": ("add", scaled), "sub": ("sub", scaled), "mul": ("mul", binary), "div": ("div", div), "neg": ("neg", unary),
    "__radd__": ("add", left), "__rmul__": ("mul", left), "__rsub__": ("sub", left), "__rdiv__": ("div", left),
    "pow": ("pow", binary), "__rpow__": ("pow", left), "square": ("square", unary), "reciprocal": ("reciprocal", unary),
    "minimum": ("minimum", binary), "maximum": ("maximum", binary), "clamp": ("clamp", clamp),
    "nn.functional.hardtanh": ("clamp", hardtanh),
    "eq": ("eq", binary), "ne": ("ne", binary), "lt": ("lt", binary), "le": ("le", binary), "gt": ("gt", binary),
    "ge": ("ge", binary), "logical_and": ("logical_and", binary), "logical_or": ("logical_or", binary),
    "logical_not": ("logical_not", unary), "isnan": ("isnan", unary), "isinf": ("isinf", unary), "isfinite": ("isfinite", unary),
    "where": ("where", where), "masked_fill": ("masked_fill", masked_fill),
    # the rows of unary.def, of which some take more below
    **{theirs: (ours, unary) for ours, theirs in re.findall(r'^TESSERA_UNARY\((\w+), *"([\w.]+)".*(?:fused|composed|steps),', ROWS.read_text(), re.MULTILINE)},
    "round": ("round", round_), "nn.functional.leaky_relu": ("leaky_relu", activation("negative_slope", 0.01)),
    "nn.functional.elu": ("elu", elu), "nn.functional.gelu": ("gelu", gelu),
    "nn.functional.logsigmoid": ("log_sigmoid", unary), "nn.functional.softplus": ("softplus", softplus),
    "nn.functional.silu": ("silu", activation("inplace", None)),
    "sum": ("sum", reduction), "mean": ("mean", reduction), "prod": ("prod", reduction), "var": ("var", spread),
    "std": ("stddev", spread), "linalg.vector_norm": ("norm", vector_norm), "logsumexp": ("logsumexp", reduction),
    "any": ("any", reduction), "all": ("all", reduction), "amax": ("amax", reduction), "amin": ("amin", reduction),
    "max.reduction_with_dim": ("max_with_index", one_dim), "min.reduction_with_dim": ("min_with_index", one_dim),
    "max.reduction_no_dim": ("max", unary), "min.reduction_no_dim": ("min", unary),
    "argmax": ("argmax", one_dim), "argmin": ("argmin", one_dim), "cumsum": ("cumsum", cumsum), "sort": ("sort", sort),
    "argsort": ("argsort", argsort), "topk": ("topk", topk),
    "reshape": ("reshape", shape), "flatten": ("flatten", flatten), "squeeze": ("squeeze", squeeze),
    "unsqueeze": ("unsqueeze", unary), "transpose": ("transpose", unary), "permute": ("permute", shape), "expand": ("expand", shape),
    "narrow": ("narrow", narrow), "slice": ("slice", slice_), "select": ("select", unary), "diagonal": ("diagonal", diagonal),
    "split": ("split", split), "split.list_args": ("split_sizes", split_sizes),
    "chunk": ("chunk", lambda x, n, dim=0: [x, n, dim]), "cat": ("cat", parts), "stack": ("stack", parts),
    "repeat": ("repeat", shape), "tile": ("repeat", lambda x, *n: shape(x, *n)), "repeat_interleave": ("repeat_interleave", interleave),
    "flip": ("flip", lambda x, *d, **k: [x, dims(d[0] if d else k["dims"])]), "roll": ("roll", roll),
    "nn.functional.pad.constant": ("pad", pad), "tril": ("tril", unary), "triu": ("triu", unary), "diag": ("diag", unary),
    "index_select": ("index_select", unary), "index_copy": ("index_copy", unary), "index_add": ("index_add", index_add),
    "index_put": ("index_put", index_put), "gather": ("gather", unary), "scatter": ("scatter", scatter),
    "scatter_add": ("scatter_add", scatter), "__getitem__": ("index", item), "einsum": ("einsum", einsum), "outer": ("outer", unary),
    "nn.functional.one_hot": ("one_hot", one_hot), "linspace": ("linspace", linspace), "matmul": ("matmul", unary),
    "mm": ("matmul", unary), "bmm": ("matmul", unary), "mv": ("matmul", unary), "dot": ("matmul", unary), "vdot": ("matmul", unary),
    "__rmatmul__": ("matmul", left), "nn.functional.linear": ("linear", linear),
    "softmax": ("softmax", softmax), "log_softmax": ("log_softmax", softmax),
    "nn.functional.scaled_dot_product_attention": ("scaled_dot_product_attention", attention),
    "nn.functional.cross_entropy": ("cross_entropy", class_loss), "nn.functional.nll_loss": ("nll_loss", class_loss),
    "nn.functional.linear_cross_entropy": ("linear_cross_entropy", linear_cross_entropy),
    "nn.functional.kl_div": ("kl_div", loss("log_target")), "nn.functional.mse_loss": ("mse_loss", loss()),
    "nn.functional.l1_loss": ("l1_loss", loss()), "nn.functional.smooth_l1_loss": ("smooth_l1_loss", loss("beta")),
    "nn.functional.huber_loss": ("huber_loss", loss("delta")),
    "nn.functional.binary_cross_entropy": ("binary_cross_entropy", loss("weight")),
    "nn.functional.binary_cross_entropy_with_logits": ("binary_cross_entropy_with_logits", loss("weight", "pos_weight")),
    "nn.functional.embedding": ("embedding", embedding), "nn.functional.layer_norm": ("layer_norm", layer_norm),
    "nn.functional.rms_norm": ("rms_norm", rms_norm), "nn.functional.dropout": ("dropout", dropout),
    "arange": ("arange", arange), "eye": ("eye", eye), "full": ("full", full), "zeros": ("zeros", full_of(0)), "ones": ("ones", full_of(1)),
    "to": ("cast", to), "float": ("cast", cast(torch.float32)), "double": ("cast", cast(torch.float64)),
    "half": ("cast", cast(torch.float16)), "bfloat16": ("cast", cast(torch.bfloat16)), "long": ("cast", cast(torch.int64)),
    "int": ("cast", cast(torch.int32)), "bool": ("cast", cast(torch.bool)), "contiguous": ("contiguous", lambda x, **k: [x]),
    # as the table of operations spells them
    "logical_xor": ("logical_xor", unary), "ceil": ("ceil", unary), "trunc": ("trunc", unary), "tan": ("tan", unary),
    "exp2": ("exp2", unary),
}

# the same by other names: in the whole run, not among the samples that are kept
ALSO = {
    "true_divide": ("div", div), "rsub": ("sub", rsub),
    "clamp_min": ("maximum", unary), "clamp_max": ("minimum", unary),
    "max.binary": ("maximum", binary), "min.binary": ("minimum", binary),
    "full_like": ("full", full_like()), "zeros_like": ("zeros", full_like(0)), "ones_like": ("ones", full_like(1)),
    "new_full": ("full", new_full()), "new_zeros": ("zeros", new_full(0)), "new_ones": ("ones", new_full(1)),
    "scalar_tensor": ("full", lambda value, **k: [[], value, dtype_name(k, torch.float32)]),
    "softmax.with_dtype": ("softmax", softmax), "log_softmax.with_dtype": ("log_softmax", softmax),
    "nn.functional.linear_cross_entropy.chunked": ("linear_cross_entropy", linear_cross_entropy),
    "norm": ("norm", norm), "norm.fro": ("norm", norm), "linalg.norm": ("norm", linalg_norm),
    "linalg.matrix_norm": ("norm", lambda x, ord="fro", dim=(-2, -1), *a, **k: norm(x, "fro" if ord == "fro" else 0, dim, *a, **k)),
    "split_with_sizes": ("split_sizes", split_sizes),
    "unsafe_split": ("split", split), "unsafe_chunk": ("chunk", lambda x, n, dim=0: [x, n, dim]),
    "take_along_dim": ("gather", take_along_dim), "ravel": ("flatten", flatten),
    "view": ("reshape", shape), "broadcast_to": ("expand", shape), "expand_as": ("expand", like),
    "view_as": ("reshape", like), "reshape_as": ("reshape", like),
    "T": ("permute", t), "t": ("permute", t), "mT": ("transpose", lambda x: [x, -2, -1]),
    "view_copy": ("reshape", shape), "expand_copy": ("expand", shape), "permute_copy": ("permute", shape),
    "squeeze_copy": ("squeeze", squeeze), "unsqueeze_copy": ("unsqueeze", unary), "transpose_copy": ("transpose", unary),
    "t_copy": ("permute", t), "narrow_copy": ("narrow", narrow), "diagonal_copy": ("diagonal", diagonal),
    "linalg.diagonal": ("diagonal", lambda x, *, offset=0, dim1=-2, dim2=-1: [x, offset, dim1, dim2]),
    "constant_pad_nd": ("pad", lambda x, widths, value=0: pad(x, widths, value=value)),
}

# ours -> why no sample is held against it
RANDOM = "random; tests/autograd and tests/tensor hold its moments"
NONE = {
    "gelu_exact": "gelu calls it where approximate says none",
    "causal_attention": "scaled_dot_product_attention, is_causal, in another layout", "swiglu": "silu(a) * b", "empty": "it has no values",
    "from": "every sample's tensors are made by it", "uniform": RANDOM, "randn": RANDOM, "normal": RANDOM, "randint": RANDOM,
    "bernoulli": RANDOM, "randperm": RANDOM, "multinomial": RANDOM,
}
