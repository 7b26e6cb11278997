"""Child processes with a time limit, of which nothing stays behind."""
import os
import signal
import subprocess
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
