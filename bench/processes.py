"""Child processes: with a time limit, of which nothing stays behind; and how much memory they take."""
import os
import signal
import subprocess
import sys
import tempfile


def end_group(process, patience):
    """Ends a process that leads a group, if it still runs, and whatever it has started. `patience`: seconds to end by itself."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


# Starts a program in its place and writes the largest resident set of it in KiB to PREFIX.RANK. Ranks that share a stream do not
# take turns on it: what two of them print at once may come out as one number.
MEASURED = """
import os, resource, subprocess, sys
code = subprocess.call(sys.argv[2:], stdout=subprocess.DEVNULL)
with open(sys.argv[1] + "." + os.environ.get("OMPI_COMM_WORLD_RANK", "0"), "w") as file:
    file.write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(code)
"""


def resident_kib(command, folder, launcher=(), **more):
    """The largest resident set of `command`, of all its ranks under `launcher`, in KiB."""
    with tempfile.TemporaryDirectory(dir=folder) as files:
        prefix = os.path.join(files, "kib")
        subprocess.run([*launcher, sys.executable, "-c", MEASURED, prefix, *command], check=True, stdout=subprocess.DEVNULL, **more)
        found = [int(open(os.path.join(files, name), encoding="ascii").read()) for name in os.listdir(files)]
    if not found:
        raise RuntimeError(f"{command[0]}: no rank has said how much memory it took")
    return max(found)


def run_group(command, timeout, patience=5, **more):
    """(exit code, stdout, stderr); the code is None after `timeout` seconds, and what was written until then is there."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                   start_new_session=True, **more)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process, patience)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    return code, *texts
