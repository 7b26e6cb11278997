"""Tessera beside PyTorch FSDP2 on one GPU, each as one rank of a world of 8 whose peers are not there: Tessera's emulated world,
PyTorch's `fake` process group. Same weights, tokens and precision (bf16 compute, f32 reduction, f32 states), taking turns.

PyTorch is at its best: fused AdamW, of its attentions the one that is fastest at this shape on this GPU, the next unit's gather ahead in
forward, segments that grow; "compiled" also compiles blocks, last norm, head and loss. Which attention ran is in the result.

PyTorch's attention adds up in any order in its backward pass, and so does Tessera's in "tessera, any order" (debug.deterministic=false),
to which ratios are; "tessera" is what it does by default, the same bits from every run.

Called by compare_pytorch.py --device; `--worker --launched` is a rank of a real world of torchrun's, for tools/gpu-check. On both sides the chunks of absent peers are filled from this rank's own in every gather
and sums count this rank eight times, so the memory traffic of a gather is there, and the wire costs nothing. Losses are
therefore meaningless; that both sides train the same model is checked before, at one rank.
"""
import hashlib
import json
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import time

from book import write_book
from processes import run_group
from pytorch_models import build, last_norms, read_safetensors, units

WORLD = 8
SKIPPED_STEPS = 10
LR = 3e-4
# Of the whole world; a rank has `batch` sequences.
GPT2_124M = dict(name="gpt2", dim=768, n_layers=12, n_heads=12, max_seq_len=1024, vocab_size=50304)
LLAMA_1B = dict(name="llama", dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim=8192, vocab_size=128256)
CASES = {
    "gpt2-124m": dict(model=GPT2_124M, length=1024, batch=8),
    "gpt2-124m-64": dict(model=GPT2_124M, length=1024, batch=64),
    "llama-1.2b": dict(model=LLAMA_1B, length=4096, batch=2),
    "llama-1.2b-8192": dict(model=LLAMA_1B, length=8192, batch=1),
    "llama-8b-width": dict(model=LLAMA_1B | dict(dim=4096, n_layers=8, ffn_dim=14336), length=4096, batch=2),
    # For a look at the comparison itself, on a CPU too.
    "tiny": dict(model=dict(name="llama", dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=256), length=32, batch=2),
    "tiny-gpt2": dict(model=dict(name="gpt2", dim=64, n_layers=2, n_heads=4, max_seq_len=32, vocab_size=256), length=32, batch=2),
}
ANY_ORDER = "tessera, any order"
OURS = ("tessera", ANY_ORDER)
VARIANTS = {"eager": (False, False), "compiled": (True, False)}  # compiled, math attention
# Run once, beside the pairs: what no one would train with.
NOTES = {"eager, math attention": (False, True)}
# First losses at one rank: both compute in bf16, with other orders of summation and other roundings between operations; 1e-4 was
# seen on a CPU.
LOSS_BOUND = 2e-3
ALLOCATOR = "expandable_segments:True"


# ---- PyTorch's side, a process of its own: --worker

def fill_fake_collectives(dist, world):
    """The fake group moves nothing. What Tessera's emulated world does: other ranks' chunks from this rank's."""
    # PyTorch's own names: some releases of FSDP2 call by name.
    def all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False):
        output_tensor.view(world, -1).copy_(input_tensor.reshape(1, -1).expand(world, -1))

    def reduce_scatter_tensor(output, input, op=None, group=None, async_op=False):
        output.copy_(input.view(world, -1)[0].view_as(output)).mul_(1 if "AVG" in str(op) else world)
    dist.all_gather_into_tensor, dist.reduce_scatter_tensor = all_gather_into_tensor, reduce_scatter_tensor


def fastest_attention(case, device):
    """PyTorch's attention that takes the shortest time forward and backward at a layer's shape, and the milliseconds of each."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    model, milliseconds = case["model"], {}
    heads, shape = model["n_heads"], (case["batch"], model["n_heads"], case["length"], model["dim"] // model["n_heads"])
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        q = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16)[:, :model.get("n_kv_heads") or heads].requires_grad_() for _ in "kv")
        try:
            for turn in range(8):
                if turn == 3:
                    torch.cuda.synchronize(device)
                    begin = time.perf_counter()
                with sdpa_kernel(backend):
                    torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != heads).sum().backward()
            torch.cuda.synchronize(device)
            milliseconds[backend.name] = 200 * (time.perf_counter() - begin)
        except RuntimeError:
            continue  # it does not take this shape
    return SDPBackend.__members__[min(milliseconds, key=milliseconds.get)], milliseconds


def attention_that_ran(profile):
    """Of a profiled step, PyTorch's own names."""
    return sorted({e.key.removeprefix("aten::_scaled_dot_product_") for e in profile.key_averages()
                   if e.key.startswith("aten::_scaled_dot_product_") and not e.key.endswith("_backward")})


def prefetch_forward(parts):
    """Each unit's gather is issued before the compute of the one ahead of it."""
    for one, two in zip(parts, parts[1:]):
        one.set_modules_to_forward_prefetch([two])


def worker(options):
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", ALLOCATOR)
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.testing._internal.distributed.fake_pg import FakeStore
    compiled, math_attention = (VARIANTS | NOTES)[options.variant]
    case, folder, device = CASES[options.case], pathlib.Path(options.worker), torch.device(options.device)
    gpu, rank = device.type == "cuda", 0
    if gpu and options.launched:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if gpu:
        torch.cuda.set_device(device)
    if options.launched:
        dist.init_process_group("nccl" if gpu else "gloo")
        rank = dist.get_rank()
    else:
        dist.init_process_group("fake", rank=0, world_size=options.world, store=FakeStore())
        fill_fake_collectives(dist, options.world)
    with torch.device("meta"):  # the weights are mapped from the file, neither drawn nor copied
        model = build(case["model"] | dict(length=case["length"]))
    missing = model.load_state_dict(read_safetensors(folder / "start.safetensors"), strict=False, assign=True)
    assert not missing.missing_keys, missing
    model.to(device)
    for name in ("cos", "sin"):
        if hasattr(model, name):
            setattr(model, name, getattr(model, name).to(device))
    mesh = init_device_mesh(device.type, (options.world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parts = units(model)
    for part in parts:
        if compiled:
            part.compile()
        fully_shard(part, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    prefetch_forward(parts)

    def loss_of(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    if compiled:
        loss_of = torch.compile(loss_of)
        for norm in last_norms(model):
            norm.compile()
    if gpu:  # the peak is one of steps, not of sharding the whole model
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    text = torch.frombuffer(bytearray((folder / "book.txt").read_bytes()), dtype=torch.uint8).long()
    timed = {}
    if math_attention:
        backends = [SDPBackend.MATH]
    elif gpu:
        best, timed = fastest_attention(case, device)
        backends = [best]
    else:
        backends = list(SDPBackend.__members__.values())[1:]

    def train(step):
        """A step's loss, and its seconds."""
        begin, first = time.perf_counter(), (step * options.world + rank) * case["batch"]
        rows = torch.stack([text[i * case["length"]:(i + 1) * case["length"] + 1] for i in range(first, first + case["batch"])])
        rows = rows.to(device, non_blocking=True)
        with sdpa_kernel(backends):
            loss = loss_of(model(rows[:, :-1]), rows[:, 1:])
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), time.perf_counter() - begin
    losses, seconds = zip(*map(train, range(options.steps)))
    if options.launched:
        mean = torch.tensor(losses, device=device) / options.world
        dist.all_reduce(mean)
        losses = mean.tolist()
    peak, reserved = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if gpu else (0, 0)
    with torch.profiler.profile() as profile:  # last, so that it can't touch what is timed
        train(0)
    ran = attention_that_ran(profile)
    if options.launched:
        dist.barrier()
    if rank != 0:
        os._exit(0)
    (folder / "pytorch.json").write_text(json.dumps(dict(
        losses=losses, step_seconds=seconds, attention=ran, attention_ms=timed, peak_bytes=peak, reserved_bytes=reserved, version=torch.__version__,
        cuda=torch.version.cuda, device=torch.cuda.get_device_name(device) if gpu else "cpu")))
    os._exit(0)


class Late(Exception):
    """The time of `--seconds` does not reach for the next run."""


def run_side(options, side, command, folder):
    """A run of one side within what is left of the time."""
    begin = time.monotonic()
    left = options.deadline - begin
    if left < options.longest.get(side, 0):
        raise Late(f"{left:.0f} s are left, {side} has taken {options.longest[side]:.0f} s before")
    code, _, err = run_group(command, left, patience=1, cwd=folder)
    if code is None:
        raise Late(f"{side} was ended after {left:.0f} s, when the time was over")
    if code:
        sys.exit(f"compare_pytorch: {side} failed: {(err.strip().splitlines() or ['no word'])[-1]}")
    options.longest[side] = max(options.longest.get(side, 0), time.monotonic() - begin)


def run_pytorch(options, folder, variant, world, steps):
    program = pathlib.Path(__file__).resolve().with_name("compare_pytorch.py")
    command = [options.python, program, options.build.resolve(), "--worker", folder, "--device", options.device,
               "--case", options.case, "--variant", variant, "--world", world, "--steps", steps]
    run_side(options, f"PyTorch {variant}", command, folder)
    return json.loads((folder / "pytorch.json").read_text())


# ---- Tessera's side

def run_tessera(options, folder, world, steps, side="tessera"):
    case = CASES[options.case]
    command = [options.program, *(f"--model.{k}={v}" for k, v in case["model"].items()), f"--data.path={folder}/book.txt",
               "--data.order=sequential", f"--training.seq_len={case['length']}", "--training.mixed_precision_param=bfloat16",
               f"--training.global_batch_size={case['batch'] * world}", f"--training.steps={steps}", f"--optimizer.lr={LR}",
               f"--load={folder}/start.safetensors", f"--metrics.jsonl={folder}/tessera.jsonl", *on_device(options)]
    if world > 1:
        command.append(f"--emulate={world}")
    if side == ANY_ORDER and options.device != "cpu":
        command.append("--debug.deterministic=false")
    run_side(options, "Tessera", command, folder)
    lines = [json.loads(text) for text in (folder / "tessera.jsonl").read_text().splitlines()]
    tokens = case["batch"] * world * case["length"]
    return dict(losses=[s["loss"] for s in lines], step_seconds=[tokens / s["tokens_per_second"] for s in lines],
                peak_bytes=max(s["memory_peak_bytes"] for s in lines), host_ms=statistics.median(s["host_ms"] for s in lines),
                reserved_bytes=max(s["memory_reserved_bytes"] for s in lines))


def kept_result(options):
    """What an earlier call has left in `--json` for the same `--key`."""
    try:
        kept = json.loads(options.json.read_text()) if options.json and options.key else {}
    except (OSError, ValueError):
        kept = {}
    same = dict(key=options.key, case=options.case, steps=options.steps)
    return kept if {k: kept.get(k) for k in same} == same else same | dict(pairs=[])


def write_result(options, result):
    if options.json:
        temporary = options.json.with_suffix(".tmp")
        temporary.write_text(json.dumps(result, indent=1))
        temporary.replace(options.json)


def on_device(options):
    return [f"--device={options.device}", *([f"--device.module={options.module}"] if options.module else [])]


def start(options, folder):
    """The weights and tokens that both sides begin with. Weights are drawn on the GPU, and kept in `--start` for the next call."""
    case = CASES[options.case]
    write_book(folder / "book.txt", (options.steps + 1) * case["batch"] * WORLD * case["length"] + 1)
    weights, kept = folder / "start.safetensors", None
    if options.start:
        options.start.mkdir(parents=True, exist_ok=True)
        kept = options.start / (hashlib.sha256(json.dumps([case["model"], options.key]).encode()).hexdigest()[:16] + ".safetensors")
    if not (kept and kept.exists()):
        drawn = kept.with_suffix(".tmp") if kept else weights
        run_side(options, "the start", [options.program, *(f"--model.{k}={v}" for k, v in case["model"].items()), "--training.steps=0",
                                        f"--training.seq_len={case['length']}", f"--save={drawn}", *on_device(options)], folder)
        if kept:
            drawn.replace(kept)
    if kept:
        weights.symlink_to(kept)


def same_model(options, folder):
    ours, theirs = run_tessera(options, folder, 1, 2), run_pytorch(options, folder, "eager", 1, 2)
    first = abs(ours["losses"][0] - theirs["losses"][0])
    if not first <= LOSS_BOUND:
        sys.exit(f"compare_pytorch: first losses {ours['losses'][0]} and {theirs['losses'][0]}: not the same model")
    return dict(first_losses_within=first, device=theirs["device"], pytorch=theirs["version"], cuda_of_pytorch=theirs["cuda"])


def run_pairs(options, result, folder):
    """Adds what is missing of the pairs; each run is written at once."""
    case, sides = CASES[options.case], [*OURS, *VARIANTS]
    for pair in range(options.pairs):
        if pair == len(result["pairs"]):
            result["pairs"].append({})
        row = result["pairs"][pair]
        for side in (s for s in [*sides, *(NOTES if pair == 0 and not options.no_notes else ())] if s not in row):
            run = run_tessera(options, folder, WORLD, options.steps, side) if side in OURS else run_pytorch(
                options, folder, side, WORLD, options.steps)
            run["tokens_per_second"] = case["batch"] * case["length"] / statistics.median(run["step_seconds"][SKIPPED_STEPS:])
            row[side] = run
            write_result(options, result)
            attention = f", attention {', '.join(run['attention'])}" if run.get("attention") else ""
            print(f"pair {pair + 1}: {side:24} {run['tokens_per_second']:10.0f} tokens/s a rank, peak "
                  f"{run['peak_bytes'] / 2**30:6.2f} GiB, reserved {run['reserved_bytes'] / 2**30:6.2f} GiB{attention}", flush=True)


def compare(options):
    """Prints as it goes, and writes `--json` as it goes. Ends in time, with the pairs that are whole."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the run on its way is ended too
    options.deadline, options.longest = time.monotonic() + options.seconds, {}
    result, late = kept_result(options), None
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        try:
            start(options, folder)
            if "first_losses_within" not in result:
                result |= same_model(options, folder)
                write_result(options, result)
            print(f"{result['device']}, PyTorch {result['pytorch']}; first losses at one rank within "
                  f"{result['first_losses_within']:.1e}", flush=True)
            run_pairs(options, result, folder)
        except Late as e:
            late = str(e)
    whole = [row for row in result["pairs"] if all(side in row for side in (*OURS, *VARIANTS))]
    if late:
        print(f"{options.case}: {len(whole)} of {options.pairs} pairs in {options.seconds:.0f} s: {late}; call again to go on")
    if not whole:
        sys.exit(f"compare_pytorch: {options.case}: not one pair in {options.seconds:.0f} s: {late}")
    result["tokens_per_second"] = {side: statistics.median(row[side]["tokens_per_second"] for row in whole) for side in (*OURS, *VARIANTS)}
    result["ratios"], result["deterministic"] = {}, {}
    for ours, kept in ((ANY_ORDER, "ratios"), ("tessera", "deterministic")):
        for side in VARIANTS:
            ratios = [row[ours]["tokens_per_second"] / row[side]["tokens_per_second"] for row in whole]
            result[kept][side] = statistics.median(ratios)
            print(f"{options.case}: {ours} has {statistics.median(ratios):.3f} of the tokens/s of PyTorch {side} "
                  f"({min(ratios):.3f} to {max(ratios):.3f})")
    result["notes"] = {note: whole[0][ANY_ORDER]["tokens_per_second"] / whole[0][note]["tokens_per_second"] for note in NOTES
                       if note in whole[0]}
    result["attention"] = {side: whole[0][side]["attention"] for side in VARIANTS}
    write_result(options, result)
