"""What of a check takes how long on one H100 with 16 processors, and a little more, and how it is cut into calls of at most nine
minutes: by these seconds a deadline decides what is begun, and results bring the measured ones beside them.
"""
SECONDS = {  # of a step whose name begins so, the longest that fits
    "build": 180, "device": 3, "list of kernels": 2, "kernel ": 12, "kernel elementwise": 35, "losses of the CPU, ": 12,
    "2 ranks": 45, "4 ranks": 45, "8 ranks": 45, "ranks on GPUs": 30, "captured steps": 30, "memcheck ": 8, "memcheck reduce": 25, "racecheck ": 30,
    "racecheck attention": 45, "racecheck embedding": 35, "initcheck ": 36, "synccheck ": 15, "bandwidth": 10, "step of ": 20, "profile of ": 6, "attention, ": 12, "products of ": 25,
    # On eight GPUs.
    "NCCL on one GPU": 20, "over NCCL: battery": 25, "over NCCL: losses": 45, "over NCCL: captured": 30, "over NCCL: killed": 45,
    "over NCCL: stopped": 50, "over NCCL: stalled": 75, "over NCCL: its log": 15, "over NCCL: bandwidths": 35, "over NCCL: ways": 30,
    "over NCCL: memory": 15, "over NCCL: beside FSDP2": 65,
    "beside PyTorch: ": 100,  # one pair, where programs and weights are there; more pairs take what is left
}
PART_SECONDS = 540
# Each is worth something alone: what it calls, in order. See Check in tools/gpu-check.
PARTS = {
    1: ("every kernel against the CPU, losses, ranks give the same bits, bandwidths", ["right", "bandwidths"]),
    2: ("training steps, also captured, with fused projections and in fp8; compute-sanitizer but its racecheck and initcheck", ["few_steps", "other_checks"]),
    3: ("attention through cuDNN beside our own, products beside the best of cuBLASLt and in fp8, profiles, racecheck",
        ["attention", "model_products", "fp8_products", "profiles", "racechecks"]),
    4: ("half of initcheck; GPT-2 124M beside PyTorch", ["first_initchecks", "compare_small"]),
    5: ("its other half; a Llama of 1.2 B and 8 layers of 8 B width beside PyTorch", ["other_initchecks", "compare_large"]),
    6: ("a process for each GPU, over NCCL: every collective, losses, captured steps, lost ranks, bandwidths, memory, FSDP2 on all of them",
        ["over_nccl"]),
}
# What the compute sanitizers look at: kernels with shared memory, the first four cases of each, which call all of them.
SANITIZED = ("norm", "attention", "attention_backward", "embedding", "softmax", "cross_entropy", "reduce", "optimizer", "flat", "quantize",
             "e4m3_rows", "cumsum")
TOOLS = dict.fromkeys(("memcheck", "racecheck", "initcheck", "synccheck"), SANITIZED)
# Names of the bench, as its program takes them.
PROFILED = ("swiglu_backward", "layer_norm_backward", "rms_norm_backward", "adamw", "cross_entropy", "embedding_backward", "attention")


def estimate(name):
    fitting = [prefix for prefix in SECONDS if name.startswith(prefix)]
    return SECONDS[max(fitting, key=len)] if fitting else 0
