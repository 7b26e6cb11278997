"""The steps of a check. Each leaves a result file and a log; a later call keeps what passed, where nothing that it depends on
has changed: sources, GPU, driver, architecture, programs."""
import datetime
import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import time
import traceback

from processes import run_group

SOURCES = ("bench", "include", "kernels", "nn", "runtime", "tests/cuda", "tests/kernels", "tools")


def say(*words):
    print(*words, flush=True)


class Failed(Exception):
    """A step found something wrong; its words are the result, beside what it measured. `output`: of a program that failed."""

    def __init__(self, words, measured=None, output=""):
        super().__init__(words)
        self.measured, self.output = measured, output


class Skipped(Exception):
    """A step can't run here; its words say why."""


def source_digest(root):
    total = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".cpp", ".hpp", ".cu", ".py", ".in") or path.name in ("CMakeLists.txt", "compile", "gpu-check"):
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
    def __init__(self, out, commit, fresh):
        self.out, self.commit, self.rows, self.key = out, commit, [], None
        for folder in (out / "steps", out / "logs"):
            if fresh:
                shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
        self.log = out / "logs" / "begin.log"

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

    def step(self, name, work):
        """The result of `work()`, or of an earlier call; None unless it passed."""
        stem = re.sub(r"[^\w.-]", "_", name)
        path, self.log = self.out / "steps" / f"{stem}.json", self.out / "logs" / f"{stem}.log"
        done = self.kept(path)
        if done:
            say(f"  {name}: kept from before")
        else:
            self.log.unlink(missing_ok=True)
            begin = time.monotonic()
            done = dict(key=self.key, time=datetime.datetime.now().isoformat(timespec="seconds"))
            try:
                done.update(status="passed", result=work())
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
        self.rows.append(dict(name=name, **done))
        say(f"  {done['status']:7} {done['seconds']:6.1f} s  {name}: {short(done['result'])}")
        return done["result"] if done["status"] == "passed" else None

    def note(self, text):
        with open(self.log, "a") as log:
            log.write(text.rstrip("\n") + "\n")

    def run(self, command, timeout=600, environment=None, **more):
        """What the command writes to stdout; everything goes to the step's log.  Raises: Failed, which has that output too."""
        self.note("$ " + shlex.join(str(word) for word in command))
        code, out, err = run_group(command, timeout, env=os.environ | (environment or {}), **more)
        self.note(out + err)
        if code:
            raise Failed(f"{pathlib.Path(str(command[0])).name} ended with {code}: {telling_line(err + out)}; see {self.log}", output=out)
        if code is None:
            raise Failed(f"{pathlib.Path(str(command[0])).name} took longer than {timeout:.0f} s; see {self.log}", output=out)
        return out


def short(result):
    """One cell of the table; lists are for the files."""
    if isinstance(result, dict):
        return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {short(v)}" for k, v in result.items())
    if isinstance(result, list):
        return f"{len(result)} entries"
    return str(result)
