"""The kinds of hostile input that tests/cli/attacks draws. Each function draws one attack: it may write into the folder that it is
given, and knows from how the input was made, or from a reader of its format that is not the program's, which exit codes are right.
"""
import json
import math
import os
import re
import signal
import string
import tomllib

SMALL = {"model.dim": 8, "model.n_layers": 1, "model.n_heads": 2, "model.ffn_dim": 8, "model.vocab_size": 256,
         "training.seq_len": 8, "training.global_batch_size": 2, "training.steps": 1}
NASTY = ["\x00", "\x1b[31m", "\n", "\r", "\t", "\x7f", "\x9b", "\u202e", "\udcff", "\udcc3(", "é", "💥", "\u2028", "'", '"', "\\",
         "%s%n", "$(id)", "=", ".", "-", " "]
NUMBERS = ["", "x", "1e", "0x10", "1_0", " 1", "1 ", "1,5", "--1", "+", "-", "nan", "-nan", "inf", "-inf", "1e999", "-1", "-99999999999999999999",
           "９", "1\x0b", "1" * 5000, "-9223372036854775808", "9" * 40, "0x", "1/2", "NaN(1)", "1\udcff", "true", "null", "[1]", "\x1b[2J"]
FILES = {"--load": "weights", "--save": "save", "--trace": "trace", "--metrics.jsonl": "lines", "--comm.flight_record": "record"}


class Attack:
    """What is typed, around it, and what shall come of it."""

    def __init__(self, *words, codes=(2,), culprits=(), before="", after="", signals=(), writes=None, env=None, check=None, late=None):
        self.words, self.codes, self.culprits = [str(word) for word in words], set(codes), culprits
        self.before, self.after = before, after  # of the shell's: limits, redirections
        self.signals = signals                   # (seconds, signal)
        self.writes = writes or {}               # {file: its kind}
        self.env, self.check = env or {}, check  # check(stdout, folder) raises AssertionError
        self.late = late                         # of what is bad in this way it is told while it is read, behind other lines


def options(**given):
    """The words of a run that takes no time, with other values and further keys; None leaves one out."""
    values = SMALL | {"data.path": "book.txt"} | {name.replace("__", "."): value for name, value in given.items()}
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


def mutated(draw, data, most=4):
    """Some of these bytes flipped, dropped, doubled, cut off or moved."""
    data = bytearray(data)
    for _ in range(draw.randint(1, most)):
        at = draw.randrange(len(data) + 1)
        length = min(draw.choice([1, 1, 2, 8, 40]), len(data) - at)
        what = draw.randrange(6)
        if what == 0 and length:
            data[at] ^= 1 << draw.randrange(8)
        elif what == 1:
            del data[at:at + length]
        elif what == 2:
            data[at:at] = data[at:at + length]
        elif what == 3:
            data[at:at] = draw.choice(NASTY + list('[]{}":,=.#-09eE')).encode(errors="surrogateescape")
        elif what == 4 and draw.random() < 0.3:
            del data[at:]
        elif length:
            data[at:at + length] = draw.randbytes(length)
    return bytes(data)


# --- the formats, read by other means than the program's ---------------------------------------------------------------

SIZES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I32": 4, "I64": 8, "BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "U32": 4, "U64": 8}


def once(pairs):
    names = dict(pairs)
    assert len(names) == len(pairs)
    return names


def read_weights(data):
    """{tensor: (dtype, shape)} of safetensors, or AssertionError, ValueError and the like."""
    length = int.from_bytes(data[:8], "little")
    assert 8 + length <= len(data) and length <= 10**8 and data[8:9] == b"{"
    header = json.loads(data[8:8 + length].decode(), object_pairs_hook=once)
    metadata, end = header.pop("__metadata__", {}), 0
    assert all(isinstance(value, str) for value in metadata.values())
    for begin, stop, name in sorted((*tensor["data_offsets"], name) for name, tensor in header.items()):
        tensor = header[name]
        assert set(tensor) == {"dtype", "shape", "data_offsets"} and begin == end
        assert all(type(extent) is int and extent >= 0 for extent in tensor["shape"])
        assert stop - begin == SIZES[tensor["dtype"]] * math.prod(tensor["shape"])
        end = stop
    assert end == len(data) - 8 - length
    return {name: (tensor["dtype"], tuple(tensor["shape"])) for name, tensor in header.items()}


def read_lines(data):
    """The steps of metrics, from 1 on."""
    assert data == b"" or data.endswith(b"\n")
    steps = [json.loads(line)["step"] for line in data.splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    return steps


WHOLE = {"save": read_weights, "trace": json.loads, "lines": read_lines, "record": json.loads}


def attempt(read, data):
    try:
        return read(data)
    except (AssertionError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


# --- the families: each draws one attack in the folder that it is given ---------------------------------------------------

def spelling(draw, folder, fixture):
    name = draw.choice(list(fixture.types))
    while name in fixture.types:
        at, extra = draw.randrange(len(name) + 1), draw.choice(NASTY[1:] + list(string.ascii_letters))
        name = draw.choice([name[:at] + extra + name[at:], name[:at] + name[at + 1:], name.upper(), name.partition(".")[2],
                            name[::-1], name + "." + name, name.replace("_", "-"), extra * 5000, name[:at]]).partition("=")[0]
    dashes = draw.choice(["--"] * 6 + ["-", "---"])
    if draw.random() < 0.1:
        return Attack(*options(), "--" + draw.choice([n for n, t in fixture.types.items() if t and t != "true|false"]), culprits=["lacks its value"])
    if draw.random() < 0.1:
        return Attack("run.toml", name or " ", culprits=["unexpected argument"] if not name.startswith("-") else ["unknown option"])
    return Attack(*options(), f"{dashes}{name}" + draw.choice(["=1", "="]), culprits=["unknown option"])


def values(draw, folder, fixture):
    name, kind = draw.choice([item for item in fixture.types.items() if item[1]])
    if kind in "NX":
        bad = draw.choice(NUMBERS)
        while kind == "X" and bad in ("1" * 5000, "9" * 40):
            bad = draw.choice(NUMBERS)
    elif "|" in kind:
        right = draw.choice(kind.split("|"))
        bad = draw.choice(["", right.swapcase(), right + draw.choice(NASTY[1:]), " " + right, right[:-1], right * 1000, right + "\n"])
        bad = bad if bad not in kind.split("|") else "x"
    elif kind in ("DEVICE", "KINDS"):
        bad = draw.choice(["", "x", "cpu:0", "cuda:", "cuda:-1", "cuda:1e3", "cuda:99999999999", "norms,,biases", ",", "n" * 5000] + NASTY[1:])
    elif name == "data.path" or name == "load":
        bad = draw.choice(["", "nowhere", "x" * 5000, "folder", "pipe", "loop", "book.txt/x", "/dev/null", "/dev/zero", "/proc/self/fd/99"]
                          + [f"a{nasty}b" for nasty in NASTY[1:]])
    else:
        bad = draw.choice(["", "folder/nowhere/x", "folder/" + "y" * 300, "none/" * 1200]) if kind == "FILE" else ""
    words = [word for word in options() if not word.startswith(f"--{name}=")]
    attached = draw.random() < 0.7 or kind == "true|false"
    return Attack(*words, *([f"--{name}={bad}"] if attached else [f"--{name}", bad]), culprits=[name])


def contradictions(draw, folder, fixture):
    """Values that are well each, and may not fit together: a model of the rules says so."""
    c = {"model.dim": draw.randint(1, 64), "model.n_heads": draw.choice([1, 2, 3, 4, 8]), "model.n_kv_heads": draw.choice([1, 2, 3, 4]),
         "training.steps": draw.randint(0, 50), "lr_scheduler.warmup_steps": draw.randint(0, 60)}
    ranks, batch, local = draw.choice([1, 2, 3, 4]), draw.randint(1, 24), draw.choice([1, 2, 3, 4])
    extra = {"model.dropout": draw.choice([None, None, 0.5]), "optimizer.momentum": draw.choice([None, None, 0.9]),
             "lr_scheduler.min_lr_factor": draw.choice([None, None, 0.5]), "debug.delay_seed": draw.choice([None, None, 7]),
             "sample-tokens": draw.choice([None, None, 5]), "device.tf32": draw.choice([None, None, None, "true"])}
    extra = {name: value for name, value in extra.items() if value is not None}
    good = (c["model.dim"] % c["model.n_heads"] == 0 and c["model.dim"] // c["model.n_heads"] % 2 == 0
            and c["model.n_heads"] % c["model.n_kv_heads"] == 0 and batch % (ranks * local) == 0 and not extra
            and (c["training.steps"] == 0 or c["lr_scheduler.warmup_steps"] <= c["training.steps"]))
    c |= extra | {"training.global_batch_size": batch, "training.local_batch_size": local, "ranks": ranks}

    def as_given(out, _):
        printed = tomllib.loads(out)
        for name, value in c.items():
            section, _, key = name.partition(".")
            assert not key or printed[section][key] == value, f"{name} is not printed as {value}"
    return Attack(*(f"--{name}={value}" for name, value in draw.sample(list(c.items()), len(c))), "--print-config", codes=[0 if good else 2],
                  culprits=["model.", "training.", "lr_scheduler.", *extra], check=as_given)


def toml(draw, folder, fixture):
    text = fixture.files["run.toml"]
    what = draw.randrange(8)
    if what < 3:
        text = mutated(draw, text)
    elif what == 3:
        text = text.replace(b"\n", b"\r\n").rstrip() if draw.random() < 0.5 else b"\xef\xbb\xbf" + text.rstrip()
    elif what == 4:
        depth = draw.choice([10, 300, 5000, 100000])
        text = draw.choice([b"[model]\ndim = " + b"[" * depth + b"]" * depth, b"a = " + b"{a=" * depth, b"[" + b"a." * depth + b"a]",
                            b"x = " + b"[" * depth, b"[" * depth, b'"\\"".' + b"a." * depth + b"a = 1",
                            b'x = ["""\n\'""", {' + b"a." * depth + b"a = 1}]"])
    elif what == 5:
        key, value = draw.choice(["model.dim", "data.path", "optimizer.lr", "model.tie_embeddings", "nothing.x", "x"]), draw.choice(
            ["[1]", "{a=1}", "1979-05-27", "07:32:00", '"x"', "nan", "-inf", "1e400", "0xffffffffffffffff", "true", '"""\n"""', "'\\'",
             '"\\u0000"', '"\\ud800"', '"\\u001b"', "9" * 400, "1.", "+-1", "", "01", '"' + "q" * 5000 + '"'])
        section, _, last = key.rpartition(".")
        text = (f"[{section}]\n" if section else "").encode() + f"{last} = {value}\n".encode()
    elif what == 6:
        text = draw.choice([text * 2, b"#" * draw.choice([1 << 20, (1 << 20) - 10, 5 << 20]), b"\0" * 100, b"", draw.randbytes(300),
                            b"[" + b"k" * 5000 + b"]\nx=1", b'[model]\n"' + b"k" * 5000 + b'"=1', b"[model]\n\x1b[2J=1", b"[model]\ndim=8" * 2])
    (folder / "run.toml").write_bytes(text)
    is_read = len(text) < 1 << 20 and text.count(b".") < 10_000  # tomllib takes memory by the square of a key's depth
    parsed = attempt(lambda data: tomllib.loads(data.decode().removeprefix("\ufeff")), text) if is_read else None
    codes = [2] if parsed is None else [0] if parsed == fixture.toml else [0, 2]

    def as_given(out, _):
        printed = tomllib.loads(out)
        for section, keys in (parsed or {}).items():
            for key, value in keys.items():
                assert printed[section][key] == value, f"{section}.{key} is not printed as {value}"
    return Attack("run.toml", "--print-config", codes=codes, culprits=["run.toml", *SMALL, "optimizer.", "lr_", "data."], check=as_given)


def data(draw, folder, fixture):
    seq_len, ids = draw.choice([1, 8, 100]), [draw.randrange(256) for _ in range(draw.choice([0, 1, 2, 8, 9, 101, 4000]))]
    vocabulary, kind, odd = draw.choice([256, 256, 100, 65536]), draw.choice(["x.txt", "x.bin", "x.bin"]), draw.random() < 0.2
    if kind == "x.bin" and ids and draw.random() < 0.3:
        ids[draw.randrange(len(ids))] = draw.choice([256, 65535])
    contents = bytes(ids) if kind == "x.txt" else b"".join(token.to_bytes(2, "little") for token in ids) + b"\0" * odd
    (folder / kind).write_bytes(contents)
    good = len(ids) > seq_len and max(ids) < vocabulary and not (odd and kind == "x.bin")
    if draw.random() < 0.3:
        kind = draw.choice(["folder", "pipe", "loop", "none/x", "/dev/full", "/dev/zero", "/proc/self/status", "/dev/stdin", "socket\n", "/", "x.bin/"])
        good = False
    elif draw.random() < 0.2:
        (folder / kind).chmod(0)
        good = good and os.access(folder / kind, os.R_OK)
    run = options(data__path=kind, training__seq_len=seq_len, model__vocab_size=vocabulary)
    return Attack(*run, codes=[0 if good else 2], culprits=["data.path"])


def weights(draw, folder, fixture):
    data, what = fixture.files["m.safetensors"], draw.randrange(8)
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8:8 + length]), data[8 + length:]
    name = draw.choice([name for name in header if name != "__metadata__"])
    if what == 0:
        data = draw.choice([length + 1, length - 1, 0, 1, len(data), len(data) - 8, 10**8 + 1, 2**63, 2**64 - 1, 2**64 - 8]).to_bytes(8, "little") + data[8:]
    elif what == 1:
        data = data[:8] + mutated(draw, data[8:8 + length]) + rest
    elif what in (2, 3):
        key, value = draw.choice([("dtype", draw.choice(["F16", "F64", "I32", "U8", "F8_E4M3", "X", "", 3, None, "F\x1b[2J"])),
                                  ("shape", draw.choice([[], [8], [2**62, 4], [2**63], [-1, -8], [0], [1e3], ["8"], [8] * 40, [[8]], None, {}])),
                                  ("data_offsets", draw.choice([[0, 8], [8, 0], [-8, 0], [0, 2**63], [2**64, 2**64], [0], [], [0, 0, 0], "0", [0.0, 8.0]])),
                                  ("extra", 1), ("x" * 5000, "\x1b")])
        header[name][key] = value
        if draw.random() < 0.2:
            header = draw.choice([[], {}, header | {"\x1b[31m" * 3: header[name]}, header | {"__metadata__": {"a": 1}}, {name: header[name]}, 7])
    elif what == 4:
        data = draw.choice([data[:draw.randrange(len(data))], data + b"\0" * draw.choice([1, 8]), mutated(draw, data)])
    elif what == 5:
        data = data[:8 + length] + draw.randbytes(len(rest))
    if what in (2, 3):
        text = json.dumps(header).encode()
        data = len(text).to_bytes(8, "little") + text + rest
    (folder / "m.safetensors").write_bytes(data)
    read, loads = attempt(read_weights, data), "m.safetensors"
    codes = [2] if read is None else [0] if read == fixture.tensors else [0, 2]
    if what in (6, 7):  # the model in several files, by their index
        (folder / "m.safetensors").write_bytes(fixture.files["m.safetensors"])
        loads, files = "model.safetensors.index.json", {name: "m.safetensors" for name in fixture.tensors}
        if what == 7:
            files[name] = draw.choice(["none", "", "folder", "pipe", "loop", loads, "../" * 30 + "etc/passwd", "/etc/passwd", "book.txt", 3, None, [],
                                       "x" * 5000, "\x1b[2J", "a\0b"])
        index = json.dumps({"metadata": {"total_size": 1}, "weight_map": files}).encode()
        mutates = draw.random() < 0.5
        (folder / loads).write_bytes(mutated(draw, index) if mutates else index)
        codes = [0, 2] if mutates else [2] if what == 7 else [0]
    if draw.random() < 0.1:
        loads, codes = draw.choice(["folder", "pipe", "loop", "/dev/full", "book.txt", "run.toml", "/proc/self/exe", "/proc/self/mem", "/"]), [2]
    return Attack(*options(data__path=None, training__steps=0, training__stop_on_nan="false", load=loads, save="out"), codes=codes, culprits=["--load"], writes={"out": "save"})


def checkpoints(draw, folder, fixture):
    """A folder of checkpoints that is not as a run left it, and one that is."""
    for name, contents in fixture.checkpoint.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(contents)
    step, name = folder / "saved/step-1", draw.choice(list(fixture.checkpoint))
    file, part, good, given = folder / name, draw.choice(["model", "optimizer"]), False, {}
    other = [path for path in fixture.checkpoint if path != name and path.endswith(".safetensors")]

    def instead(path, what):
        kept = folder / "kept"
        path.rename(kept)
        if what == "link":
            path.symlink_to(kept)
        elif what == "relative":
            path.symlink_to(os.path.relpath(kept, path.parent))
        elif what == "loop":
            path.symlink_to(path.name)
        elif what == "pipe":
            os.mkfifo(path)
        elif what == "folder":
            path.mkdir()
        elif what == "device":
            path.symlink_to("/dev/zero")
        elif what == "text":
            path.write_text("no")
    kinds = ["link", "relative", "loop", "pipe", "folder", "device", "text", "gone"]
    what = draw.randrange(11)
    if what == 0:
        good = True
    elif what <= 3:
        file.write_bytes(mutated(draw, fixture.checkpoint[name], draw.choice([1, 1, 4])))
        good = file.read_bytes() == fixture.checkpoint[name]
    elif what == 4:
        instead(file, draw.choice(kinds))
    elif what == 5:
        instead(step / part, draw.choice(kinds))
    elif what == 6:
        file = folder / draw.choice(other)
        file.write_bytes(fixture.checkpoint[draw.choice([path for path in other if folder / path != file])])
        good = file.read_bytes() == fixture.checkpoint[str(file.relative_to(folder))]
    elif what == 7:
        (step / part / (draw.choice(["more", "\x1b[31m", "\udcff", "a\nb", ".more"]) + ".safetensors")).write_bytes(draw.randbytes(9))
    elif what == 8:
        step.rename(folder / "saved/step-5")
    elif what == 9:
        given["checkpoint__load_step"] = draw.choice([0, 2, 2**40])
    else:
        given["checkpoint__folder"] = draw.choice(["book.txt", "book.txt/x", "pipe", "loop", "n" * 300, "/proc/x", "/dev/null", "x/" * 3000 + "y"])
    if what < 10:
        given |= {"checkpoint__load_only": "true", "checkpoint__folder": "saved"}
    if what < 8 and draw.random() < 0.3:  # its weights alone
        is_read = what < 6 and not name.startswith("saved/step-1/optimizer") and part != "optimizer"
        return Attack(*options(training__steps=0, load="saved/step-1"), codes=[0] if good else [2] if is_read else [0, 2], culprits=["saved", "load"],
                      late=b"has other bytes than were saved")
    is_none = what == 4 and name.endswith("manifest.json")  # a folder without a manifest is no checkpoint
    return Attack(*options(training__steps=2, checkpoint__enable="true", ranks=draw.choice([1, 2]), **given),
                  codes=[0] if good else [0, 2] if is_none else [2], culprits=["saved", "checkpoint."],
                  late=b"has other bytes than were saved")


def outputs(draw, folder, fixture):
    option, kind = draw.choice(list(FILES.items())[1:])
    where, good = draw.choice([("new", True), ("old", True), ("link", True), ("dangling", True), ("hard", False), ("soft", False), ("folder", False),
                               ("folder/", False), ("none/x", False), ("book.txt/x", False), ("book.txt", False), ("loop", False), ("pipe", False),
                               ("n" * 300, False), ("folder/../book.txt", False), ("folder/../new", True), ("/proc/x", False), ("/proc/version", None),
                               ("/dev/full", None), ("/dev/null", None), (" \n\x1b[31m", True), ("\udcff", True), ("run.toml", False), ("m.safetensors", False),
                               ("locked", None), ("folder/locked/x", None), ("n" * 243, None), ("./" * 1000 + "new", True)])
    (folder / "locked").touch(0o444)
    (folder / "folder/locked").mkdir(0o555)
    words = ["run.toml", *options(data__path="book.txt", load="m.safetensors"), f"{option}={where}"]
    if option == "--comm.flight_record" and where in ("hard", "soft", "book.txt", "folder/../book.txt", "run.toml", "m.safetensors"):
        good = None  # it is never this name that is written, but one with the rank's number
    if option == "--save" and where == "m.safetensors":
        good = None  # saved where it was loaded from
    if where in ("new", "old", "link", "dangling") and draw.random() < 0.3:
        other = draw.choice([o for o in list(FILES)[1:4] if o != option])
        words, good = [*words, f"{other}=./{where}"], option == "--comm.flight_record"
        kind = FILES[other] if good else kind
    if option == "--comm.flight_record" and kind == "record":
        return Attack(*words, codes={True: [0], False: [2], None: [0, 1, 2]}[good], culprits=[name[2:] for name in FILES])
    written = {"link": "old", "dangling": "target", "folder/../new": "new", "./" * 1000 + "new": "new"}.get(where, where)
    return Attack(*words, codes={True: [0], False: [2], None: [0, 1, 2]}[good], culprits=[name[2:] for name in FILES], writes={written: kind})


def environment(draw, folder, fixture):
    env = {}
    launchers = [["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"],
                 ["OMPI_COMM_WORLD_" + name for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")], ["PMI_RANK", "PMI_SIZE"],
                 ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE",
                  "SLURM_NODEID"], ["PMIX_RANK"], ["TESSERA_RANK", "TESSERA_WORLD_SIZE", "TESSERA_STORE", "TESSERA_LOCAL_RANK"],
                 ["JOB_COMPLETION_INDEX", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]]
    for name in draw.choice(launchers) + (draw.choice(launchers) if draw.random() < 0.3 else []):
        if draw.random() < 0.8:
            env[name] = draw.choice(["0", "0", "0", "1", "", "-1", "x", "2", "99999999999", "1.0", "0x1", " 1", "1\x1b[31m", "\udcff", "9" * 5000])
    if draw.random() < 0.5:
        env |= {draw.choice(["TESSERA_CHECK", "TERM", "LC_ALL", "LANG", "TMPDIR", "HOME", "PATH", "OMP_NUM_THREADS", "COLUMNS", "NO_COLOR", "TZ"]):
                draw.choice(["", "0", "1", "2", "-1", "x", "/nowhere", "\udcff", "9" * 5000, "\x1b[31m"])}
    if len(env) > 1:  # a launcher's, where Open MPI says in words of its own that it finds no ssh
        env.pop("PATH", None)
    return Attack(*options(ranks=draw.choice([None, 1, 2])), codes=[0, 1, 2], env=env,
                  culprits=[*env, *(name for one in launchers for name in one), "--ranks", "global_batch_size"])


def huge(draw, folder, fixture):
    """Sizes that no machine has, planned or refused."""
    most = {"model.dim": 1 << 20, "model.n_layers": 64, "model.n_heads": 1 << 12, "model.ffn_dim": 1 << 24, "model.vocab_size": 1 << 24,
            "training.seq_len": 1 << 24, "training.global_batch_size": 1 << 24}
    sizes = {name: draw.choice([size, size // 2, size - 1]) for name, size in most.items() if draw.random() < 0.3}
    if "model.vocab_size" in sizes:  # logits are planned part by part: many tokens, too, are minutes, which is not what is looked for
        sizes.pop("training.global_batch_size", None)
        sizes.pop("training.seq_len", None)
    kind, writes = draw.choice([(["--dry-run"], {}), (["--dry-run", "--ranks=64"], {}), (["--ranks=2"], {}), ([], {}),
                                (["--training.steps=0", "--save=out"], {"out": "save"})])
    if "--dry-run" not in kind:  # some hours of work are well, too, but not what is looked for
        sizes |= {"model.dim": 1 << 20, "model.n_heads": 1 << 12}
    return Attack(*options(**sizes), *kind, codes=[0, 1, 2] if kind[0:1] == ["--dry-run"] else [1, 2], culprits=[*most, "data.path", "--save"], writes=writes)


RUN = {"save": "out", "metrics__jsonl": "lines", "trace": "trace"}
WRITES = {"out": "save", "lines": "lines", "trace": "trace"}


def limits(draw, folder, fixture):
    limit = draw.choice([f"-v {draw.randint(60000, 400000)}", f"-f {draw.randint(1, 60)}", f"-s {draw.randint(64, 1024)}", f"-n {draw.randint(4, 14)}"])
    steps = draw.choice([1, 3, 20])
    return Attack(*options(**RUN, training__steps=steps, ranks=draw.choice([None, 2])), codes=[0, 1, 2], before=f"ulimit {limit};",
                  culprits=["out", "lines", "trace", "limit", "memory", "ulimit", "data.path", "Too many open files"],
                  writes=WRITES | {f"flight_record.{rank}.json": "record" for rank in (0, 1)})  # where a rank runs, and peers wait for it


def streams(draw, folder, fixture):
    words, writes = draw.choice([(options(**RUN), WRITES), (options(**RUN), WRITES), (options(training__steps=0, load="m.safetensors", sample="x"), {}),
                                 (["--help=all"], {}), (["--print-config"], {}), (["--version"], {}), (["--dry-run"], {}), (["--dmi"], {})])
    after, fails = draw.choice([(">&-", True), (">/dev/full", True), ("<&-", False), ("2>&-", False), ("2>/dev/full", False), (">&- 2>&- <&-", True),
                                (">/dev/full 2>&1", True), ("> >(:)", None), ("</dev/full", False), (">/dev/null", False), ("1</dev/null", True)])
    codes = [2] if words == ["--dmi"] else [0, 1] if fails is None else [int(fails)]
    return Attack(*words, codes=codes, after=after, culprits=["stdout", "--dmi"], writes=writes)


def signals(draw, folder, fixture):
    endless = draw.random() < 0.7
    words = options(**RUN, training__steps=10**9 if endless else 20, metrics__log_freq=draw.choice([1, 1000]), ranks=draw.choice([None, 2]))
    if draw.random() < 0.2:
        words, endless = options(training__steps=0, load="m.safetensors", sample="x", **{"sample-tokens": 1 << 24}), True
    sent = [(draw.uniform(0, 0.15), draw.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP])) for _ in range(draw.choice([1, 1, 2]))]
    return Attack(*words, codes=[128 + number for _, number in sent] + ([] if endless else [0]), signals=sorted(sent), writes=WRITES)


def valid(draw, folder, fixture):
    steps, gpt2 = draw.randint(1, 4), draw.random() < 0.3
    given = RUN | {"training__steps": steps, "ranks": draw.choice([1, 2]), "model__name": "gpt2" if gpt2 else "llama",
                   "model__dim": draw.choice([2, 8, 24]), "model__n_heads": 1, "debug__seed": draw.choice([0, 2**53]),
                   "training__local_batch_size": draw.choice([None, 1]), "model__tie_embeddings": draw.choice([None, "true", "false"]),
                   "training__mixed_precision_param": draw.choice([None, "bfloat16"]), "optimizer__name": draw.choice([None, "SGD", "Muon"]),
                   "data__heldout": draw.choice([None, 0.1]), "checkpoint__export_dtype": draw.choice([None, "float16", "bfloat16"]),
                   "activation_checkpoint__mode": draw.choice([None, "selective", "full"]), "debug__executor": draw.choice([None, "inline"]),
                   "sample": draw.choice([None, "In the"]), "sample-tokens": None}
    if given["activation_checkpoint__mode"] == "selective":  # of the one block
        given["activation_checkpoint__selective_ac_option"] = draw.choice(["1", "op", "every_op"])

    def as_many(_, folder):
        assert (folder / "lines").read_bytes().count(b"\n") == steps, "the metrics are not a line a step"
    return Attack(*options(**given), codes=[0], writes=WRITES, check=as_many)


FAMILIES = [spelling, values, contradictions, toml, toml, data, weights, weights, checkpoints, outputs, environment, huge, limits, streams, signals, valid, valid]
