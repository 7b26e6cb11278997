"""The machine that gpu-check runs on: its GPU and what state it is in, nvcc, and where the libraries of CUDA lie."""
import ctypes
import glob
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import threading
import time

NVCC = (12, 8)
TOOLKIT = pathlib.Path("/usr/local/cuda")
LIBRARIES = {"cublasLt": "libcublasLt.so.1[0-9]", "cudnn": "libcudnn.so.9", "nccl": "libnccl.so.2"}
HEADERS = {"cublasLt": "cublasLt.h", "cudnn": "cudnn_graph.h", "nccl": "nccl.h"}
STATE = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "watts": "power.draw", "celsius": "temperature.gpu"}


class NoState(Exception):
    """There is a GPU, and nobody who can say which one and how warm it is."""


def count_of_driver():
    """The GPUs that the driver's library counts, as CUDA_VISIBLE_DEVICES and MIG leave them; 0 where there is none."""
    try:
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
        return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0
    except (OSError, AttributeError):
        return 0


def find_gpu(device):
    """Name, driver and memory, or None without a GPU.  Raises: NoState."""
    query, answer = shutil.which("nvidia-smi"), "nvidia-smi is missing"
    if query:
        done = subprocess.run([query, f"--id={device}", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
                              capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.strip():
            name, driver, memory = (word.strip() for word in done.stdout.strip().splitlines()[0].split(","))
            return dict(name=name, driver=driver, memory=memory)
        answer = f"nvidia-smi ended with {done.returncode}: {(done.stdout + done.stderr).strip() or 'no word'}"
    sign = next(iter(sorted(glob.glob("/dev/nvidia[0-9]*"))), None) or (count_of_driver() and "libcuda.so.1 counts one")
    if sign:
        raise NoState(f"there is a GPU ({sign}), but {answer}; put nvidia-smi into PATH, or give --emulated to leave the GPU alone")
    return None


def find_nvcc():
    """Its path, or None and why there is none to use."""
    nvcc = shutil.which("nvcc", path=os.environ["PATH"] + ":/usr/local/cuda/bin")
    if not nvcc:
        return None, "no nvcc in PATH or /usr/local/cuda/bin"
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", text)
    if not release or tuple(map(int, release.groups())) < NVCC:
        return None, f"{nvcc} is of release {'.'.join(release.groups()) if release else '?'}, where {NVCC[0]}.{NVCC[1]} or newer is needed"
    return nvcc, None


# ---- libraries: the toolkit's, the system's, and those that Python wheels bring

def wheel_folders(python):
    """The folders `nvidia/*` of a Python's packages."""
    try:
        done = subprocess.run([python, "-c", "import nvidia; print('\\n'.join(nvidia.__path__))"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [folder for place in done.stdout.splitlines() for folder in sorted(pathlib.Path(place).glob("*")) if folder.is_dir()]


def system_folders():
    """Those of the loader's cache."""
    loader = shutil.which("ldconfig", path=os.environ["PATH"] + ":/usr/sbin:/sbin")
    text = subprocess.run([loader, "-p"], capture_output=True, text=True).stdout if loader else ""
    return list(dict.fromkeys(pathlib.Path(line.rpartition(" => ")[2]).parent for line in text.splitlines() if " => " in line))


def find_libraries(nvcc, python):
    """{name: dict(file, include)} of what is there; include is None where the headers are not. First come LD_LIBRARY_PATH and the
    toolkit, last the wheels, and headers only from where the library is, or the toolkit."""
    toolkits = [pathlib.Path(nvcc).resolve().parent.parent] if nvcc else []
    toolkits.append(TOOLKIT)
    named = [pathlib.Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    places = named + [root / "lib64" for root in toolkits] + system_folders() + [root / "lib" for root in wheel_folders(python)]
    found = {}
    for name, pattern in LIBRARIES.items():
        file = next((file for place in places for file in sorted(place.glob(pattern), reverse=True)), None)
        if file:
            roots = [file.parent.parent, *toolkits, pathlib.Path("/usr")]
            include = next((root / "include" for root in roots if (root / "include" / HEADERS[name]).exists()), None)
            found[name] = dict(file=str(file), include=include and str(include))
    return found


def library_path(libraries):
    """LD_LIBRARY_PATH with which programs find those of wheels, nvidia/*/lib. The others are found without, and would come between
    PyTorch and its own."""
    folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    found = [pathlib.Path(library["file"]) for library in libraries.values()]
    return ":".join(dict.fromkeys(folders + [str(file.parent) for file in found if file.parents[2].name == "nvidia"]))


# ---- what state the GPU is in

class GpuWatch:
    """Clocks, power and temperature every half second, while it is entered. It only asks: nothing of the GPU is set."""

    def __init__(self, device):
        self.samples, self.device, self.process = [], device, None

    def __enter__(self):
        query = shutil.which("nvidia-smi")
        if query:
            self.process = subprocess.Popen([query, f"--id={self.device}", "--query-gpu=" + ",".join(STATE.values()),
                                             "--format=csv,noheader,nounits", "-lms", "500"], stdout=subprocess.PIPE,
                                            stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True)
            self.reader = threading.Thread(target=self.read, daemon=True)
            self.reader.start()
        return self

    def read(self):
        for line in self.process.stdout:
            words = [word.strip() for word in line.split(",")]
            if len(words) == len(STATE):
                self.samples.append((time.time(), dict(zip(STATE, map(number, words)))))

    def __exit__(self, *_):
        if self.process:
            self.process.kill()
            self.process.wait()
            self.reader.join()
            self.process.stdout.close()

    def at(self, when):
        """The sample next to a time in seconds since 1970."""
        return min(self.samples, key=lambda sample: abs(sample[0] - when))[1] if self.samples else None

    def summary(self):
        """Least, median and largest of each."""
        figures = {}
        for name in STATE:
            values = sorted(sample[name] for _, sample in self.samples if sample[name] is not None)
            if values:
                figures[name] = [values[0], statistics.median(values), values[-1]]
        return figures or None


def number(word):
    try:
        return float(word)
    except ValueError:
        return None  # "[N/A]"
