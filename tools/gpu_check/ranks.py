"""A process for each rank, as torchrun starts them, and how one of them is held up."""
import ctypes
import os
import signal
import socket
import subprocess
import time

PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH, ALL_CHILDREN = 0x4206, 0x4207, 17, 0x40000000


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Ranks:
    """What each writes is in `rank0.txt` and so on, in `folder`. Whoever is left at the end of the scope is killed."""

    def __init__(self, command, ranks, folder, environment=None):
        self.files, self.processes = [folder / f"rank{rank}.txt" for rank in range(ranks)], []
        shared = dict(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()),
                      TORCHELASTIC_RUN_ID="gpu-check") | (environment or {})
        for rank, file in enumerate(self.files):
            with file.open("w") as out:
                self.processes.append(subprocess.Popen([str(word) for word in command], cwd=folder, stdin=subprocess.DEVNULL, stdout=out,
                                                       stderr=subprocess.STDOUT, start_new_session=True,
                                                       env=os.environ | shared | dict(RANK=str(rank), LOCAL_RANK=str(rank))))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def run(self):
        return all(process.poll() is None for process in self.processes)

    def end(self, seconds, leave_out=()):
        """[(rank, exit code, output)]; the code of who is still there by then is None."""
        end = time.monotonic() + seconds
        ranks = [rank for rank in range(len(self.processes)) if rank not in leave_out]
        while any(self.processes[rank].poll() is None for rank in ranks) and time.monotonic() < end:
            time.sleep(0.01)
        return [(rank, self.processes[rank].poll(), self.files[rank].read_text(errors="replace")) for rank in ranks]


# ---- what is done to a process; each returns what undoes it

def kill(process):
    process.send_signal(signal.SIGKILL)
    return lambda: None


def stop(process):
    process.send_signal(signal.SIGSTOP)
    return lambda: process.send_signal(signal.SIGCONT)


def stall(process):
    """Its main thread sleeps where it is, and the others go on: it shows life, and comes to no collective.  Raises: OSError."""
    libc = ctypes.CDLL(None, use_errno=True)

    def ptrace(request):
        if libc.ptrace(request, process.pid, None, None) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"ptrace of a child: {os.strerror(error)}")
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    ptrace(PTRACE_SEIZE)
    ptrace(PTRACE_INTERRUPT)
    os.waitpid(process.pid, ALL_CHILDREN)  # that it has stopped, which `poll` would take for its end
    return lambda: ptrace(PTRACE_DETACH)
