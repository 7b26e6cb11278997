"""The steps of a check. Each leaves a result file and a log, and all of them in one tar; a later call keeps what passed, where
nothing that it depends on has changed: sources, GPU, driver, architecture, programs. With a deadline, what fits is run."""
import concurrent.futures
import contextlib
import datetime
import hashlib
import io
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tarfile
import threading
import time
import traceback

from processes import run_group

SOURCES = ("bench", "include", "kernels", "nn", "runtime", "tests/comm", "tests/cuda", "tests/kernels", "tests/support", "tools")


def say(*words):
    print(*words, flush=True)


class Failed(Exception):
    """A step found something wrong; its words are the result, beside what it measured. `output`: of a program that failed."""

    def __init__(self, words, measured=None, output=""):
        super().__init__(words)
        self.measured, self.output = measured, output


class Skipped(Exception):
    """A step can't run here; its words say why."""


class Late(Exception):
    """The time of the deadline does not reach for a step, or was over within it; its words say how much there was."""


PATIENCE = 10  # seconds that the end of a call takes: a program that is ended, a last tar
LOG_BYTES = 1 << 20  # of a log's end go into the tar
SIDE_BY_SIDE = 8  # steps at most
TAR = "results.tgz"
CARRIED = re.compile(r"(steps/[\w.-]+\.json|logs/[\w.-]+\.log|logs/[\w.-]+\.csv|compare-[\w.-]+\.json|summary\.json)")


def source_digest(root):
    total = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".cpp", ".hpp", ".cu", ".py", ".in", ".txt") or path.name in ("CMakeLists.txt", "compile", "gpu-check"):
                total.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def describe_commit(root, vendor):
    """The commit, with -dirty where files differ from it. Without git it is the one that `pack` wrote; else "unknown"."""
    if (root / ".git").exists() and shutil.which("git"):
        commit, status = (subprocess.run(["git", *words.split()], cwd=root, capture_output=True, text=True)
                          for words in ("describe --always --abbrev=12", "status --porcelain"))
        if commit.returncode == 0 == status.returncode:
            return commit.stdout.strip() + ("-dirty" if status.stdout else "")
    try:
        commit, digest = (vendor / "commit").read_text().split()
    except (OSError, ValueError):
        return "unknown"
    return commit if digest == source_digest(root) else commit.removesuffix("-dirty") + "-dirty"


def write_commit(root, vendor):
    (vendor / "commit").write_text(f"{describe_commit(root, vendor)} {source_digest(root)}\n")


def telling_line(text):
    """The first line that speaks of an error, else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)), lines[-1] if lines else "no word")


class Steps:
    """`work`: the folder of results, logs and runs. `out`: where the tar goes."""

    def __init__(self, work, out, commit, fresh, deadline=None):
        self.work, self.out, self.commit, self.rows, self.key = work, out, commit, [], None
        self.current, self.closing = threading.local(), threading.Lock()  # the step of this thread; one ends at a time
        self.end = time.monotonic() + deadline - PATIENCE if deadline else float("inf")
        for folder in (work / "steps", work / "logs"):
            if fresh:
                shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
        out.mkdir(parents=True, exist_ok=True)

    @property
    def log(self):
        """Of the step that runs in this thread."""
        return getattr(self.current, "log", self.work / "logs" / "begin.log")

    @property
    def watched(self):
        """Who looks at the GPU for the step that runs in this thread."""
        return getattr(self.current, "watched", None)

    def left(self):
        return self.end - time.monotonic()

    # ---- the tar

    def results(self):
        """What travels: {name in the tar: file}."""
        files = [f for pattern in ("summary.json", "steps/*.json", "compare-*.json", "logs/*.log", "logs/*.csv")
                 for f in sorted(self.work.glob(pattern))]
        return {str(f.relative_to(self.work)): f for f in files}

    def write_results(self):
        """Whole at each moment: a call that is ended between two steps leaves the tar of the first."""
        temporary = self.out / (TAR + ".tmp")
        with tarfile.open(temporary, "w:gz", compresslevel=3) as tar:
            for name, file in self.results().items():
                data = file.read_bytes()[-LOG_BYTES:] if name.startswith("logs/") else file.read_bytes()
                entry = tarfile.TarInfo(name)
                entry.size, entry.mtime = len(data), int(file.stat().st_mtime)
                tar.addfile(entry, io.BytesIO(data))
        temporary.replace(self.out / TAR)

    def resume(self, tar):
        """Takes the results of an earlier call, and returns how many steps. Whether one is kept, its key decides."""
        steps = 0
        with tarfile.open(tar) as held:
            for entry in held:
                if entry.isfile() and CARRIED.fullmatch(entry.name):
                    (self.work / entry.name).write_bytes(held.extractfile(entry).read())
                    steps += entry.name.startswith("steps/")
        return steps

    # ---- steps

    def keep_for(self, **what):
        """Keeps steps of earlier calls that had the same commit and `what`; none where the commit doesn't tell the sources."""
        exact = self.commit != "unknown" and not self.commit.endswith("-dirty")
        self.key = dict(commit=self.commit, **what) if exact else None

    def kept(self, path):
        try:
            kept = json.loads(path.read_text())
        except (OSError, ValueError):
            return None
        return kept if self.key and kept.get("key") == self.key and kept.get("status") == "passed" else None

    def step(self, name, work, alone=True):
        """The result of `work()`, or of an earlier call; None unless it passed. Nobody looks at the GPU for one that is not alone."""
        stem = re.sub(r"[^\w.-]", "_", name)
        path, self.current.log = self.work / "steps" / f"{stem}.json", self.work / "logs" / f"{stem}.log"
        done, needs = self.kept(path), self.estimate(name)
        if done:
            say(f"  {name}: kept from before")
        elif self.left() < needs:
            done = dict(status="left", result=f"not begun: about {needs:.0f} s, {max(self.left(), 0):.0f} s are left", seconds=0.0)
        else:
            self.log.unlink(missing_ok=True)
            begin = time.monotonic()
            done = dict(key=self.key, time=datetime.datetime.now().isoformat(timespec="seconds"))
            try:
                with self.watch() if alone else contextlib.nullcontext() as watch:
                    self.current.watched = watch
                    try:
                        done.update(status="passed", result=work())
                    finally:
                        done["gpu_state"] = watch.summary() if watch else None
            except Late as e:
                done.update(status="left", result=str(e))
            except Skipped as e:
                done.update(status="skipped", result=str(e))
            except Failed as e:
                done.update(status="failed", result=str(e), measured=e.measured)
            except Exception as e:
                self.note(traceback.format_exc())
                done.update(status="failed", result=f"{type(e).__name__}: {e}; see {self.log}")
            done["seconds"] = round(time.monotonic() - begin, 1)
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(done, indent=1))
            temporary.replace(path)
        with self.closing:
            self.rows.append(dict(name=name, **done))
            say(f"  {done['status']:7} {done['seconds']:6.1f} s  {name}: {short(done['result'])}{state_words(done.get('gpu_state'))}")
            self.write_summary()
            self.write_results()
        return done["result"] if done["status"] == "passed" else None

    def steps_together(self, works):
        """Steps whose times mean nothing, {name: work}: side by side, one for two processors."""
        workers = min(SIDE_BY_SIDE, (os.cpu_count() or 1) // 2)
        if workers < 2:
            for name, work in works.items():
                self.step(name, work)
            return
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(lambda named: self.step(*named, alone=False), works.items()):
                pass

    def estimate(self, name):
        """Seconds that a step of this name may take: with less left it is not begun."""
        return 0

    def watch(self):
        """What looks at the GPU while a step runs; nothing here."""
        return contextlib.nullcontext()

    def write_summary(self):
        """Of the steps so far."""

    def note(self, text):
        with open(self.log, "a") as log:
            log.write(text.rstrip("\n") + "\n")

    def run(self, command, timeout=600, environment=None, **more):
        """What the command writes to stdout; everything goes to the step's log.  Raises: Failed, which has that output too."""
        self.note("$ " + shlex.join(str(word) for word in command))
        left = self.left()
        if left <= 0:
            raise Late(f"the time was over before {pathlib.Path(str(command[0])).name}")
        code, out, err = run_group(command, min(timeout, left), env=os.environ | (environment or {}), **more)
        self.note(out + err)
        if code is None and left < timeout:
            raise Late(f"{pathlib.Path(str(command[0])).name} was ended after {left:.0f} s, when the time was over; see {self.log}")
        if code:
            raise Failed(f"{pathlib.Path(str(command[0])).name} ended with {code}: {telling_line(err + out)}; see {self.log}", output=out)
        if code is None:
            raise Failed(f"{pathlib.Path(str(command[0])).name} took longer than {timeout:.0f} s; see {self.log}", output=out)
        return out


def state_words(state):
    """Least to largest of each, beside what was measured."""
    units = dict(sm_mhz="MHz", memory_mhz="MHz of memory", watts="W", celsius="C")
    words = [f"{low:.0f} to {high:.0f} {units.get(name, name)}" for name, (low, _, high) in (state or {}).items()]
    return f"  [{', '.join(words)}]" if words else ""


def short(result):
    """One cell of the table; lists are for the files."""
    if isinstance(result, dict):
        return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {short(v)}" for k, v in result.items())
    if isinstance(result, list):
        return f"{len(result)} entries"
    return str(result)
