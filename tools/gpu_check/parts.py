"""What of a check takes how long on one H200, and how it is cut into calls of at most nine minutes. No GPU has measured these
seconds: they are budgets, by which a deadline decides what is begun, and results bring the measured ones beside them.
"""
SECONDS = {  # of a step whose name begins so, the longest that fits
    "build": 180, "device": 10, "list of kernels": 3, "kernel ": 4, "kernel attention": 15, "kernel gemm": 15,
    "losses of the CPU, ": 45, "2 ranks": 20, "4 ranks": 20, "8 ranks": 30, "ranks on GPUs": 30, "memcheck ": 8, "racecheck ": 12, "initcheck ": 8,
    "synccheck ": 8, "bandwidth": 40, "step of ": 35, "profile of ": 12, "attention, ": 40, "products of the models": 60,
    "beside PyTorch: ": 120,  # one pair, where programs and weights are there; more pairs take what is left
}
PART_SECONDS = 540
# Each is worth something alone: what it calls, in order. See Check in tools/gpu-check.
PARTS = {
    1: ("every kernel against the CPU, losses, ranks give the same bits, bandwidths", ["right", "bandwidths"]),
    2: ("training steps, compute-sanitizer, profiles", ["few_steps", "sanitizers", "profiles"]),
    3: ("attention through cuDNN beside our own, products beside the best of cuBLASLt", ["attention", "model_products"]),
    4: ("GPT-2 124M beside PyTorch", ["compare_small"]),
    5: ("a Llama of 1.2 B and 8 layers of 8 B width beside PyTorch", ["compare_large"]),
}
# What the compute sanitizers look at: kernels with shared memory, the first cases of each.
SANITIZED = ("norm", "attention", "embedding", "softmax", "cross_entropy", "reduce", "optimizer", "flat")
TOOLS = {"memcheck": SANITIZED, "racecheck": SANITIZED, "initcheck": ("norm",), "synccheck": ("norm", "attention")}
# Names of the bench, as its program takes them.
PROFILED = ("swiglu_backward", "layer_norm_backward", "rms_norm_backward", "adamw", "cross_entropy", "embedding_backward", "attention")


def estimate(name):
    fitting = [prefix for prefix in SECONDS if name.startswith(prefix)]
    return SECONDS[max(fitting, key=len)] if fitting else 0
