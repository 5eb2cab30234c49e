"""`embed doctor`: what there is to compute with, what `embed serve` would use of it, and why not a GPU.

Nothing here raises: a probe that fails says why in its line.
"""

import ctypes
import importlib.metadata
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gkd import driver
from gkd.arch import arch_name
from gkd.env import read_env
from gkd.errors import DeviceError

# Those that mean something to us, and hold nothing secret; of others that begin with GKD_ only the name is shown.
KNOWN_VARIABLES = (
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "GKD_ASSERT_CACHED",
    "GKD_CACHE_DIR",
    "GKD_GPU_DEVICE",
    "GKD_SYNC",
)

_ACRONYMS = {"blas", "cpu", "cuda", "gpu", "nvrtc"}

# Compiled, loaded and run: a driver that is too old for the compiler refuses it, whatever versions say.
_TRIAL = 'extern "C" __global__ void trial(int) {}\n'


@dataclass(frozen=True, slots=True)
class Trial:
    """What a device did when it was tried."""

    device: Any
    """gkd.device.Device."""
    free_bytes: int
    seconds: float
    """Of compiling, loading and running a kernel."""


@dataclass(slots=True)
class Diagnosis:
    """Values by name, in the order in which they are shown, and what is wrong with some."""

    values: dict[str, Any] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    ok: bool = True
    """`embed serve` has something to compute on, and it is what the environment names."""

    def probe(self, name: str, find: Callable[[], Any]) -> None:
        """Adds what `find` returns, or why it raised."""
        self.values[name] = None
        try:
            self.values[name] = _printable(find())
        except Exception as error:
            self.problems[name] = _reason(error)

    def as_json(self) -> dict[str, Any]:
        """The same for machines: None is null, and `problems` says why."""
        return {**self.values, "ok": self.ok, "problems": self.problems}

    def lines(self) -> list[str]:
        """`name: value` for people."""
        return [*self._lines(), f"ok: {_show(self.ok)}"]

    def _lines(self) -> Iterator[str]:
        for name, value in self.values.items():
            words = " ".join(
                word.upper() if word in _ACRONYMS else word for word in name.removesuffix("_bytes").split("_")
            )
            if name in self.problems:
                yield f"{words}: {'not available' if value is None else _show(value)}: {self.problems[name]}"
            elif name == "devices":
                yield from (f"device {device['ordinal']}: {_show_device(device)}" for device in value)
            elif name == "environment":
                yield from (f"{variable}: {text}" for variable, text in value.items())
                if not value:
                    yield "environment: nothing set that is read here"
            elif value is not None:
                yield f"{words}: {_size(value) if name.endswith('_bytes') else _show(value)}"


def diagnose() -> Diagnosis:
    """Looks at everything, and tries the device that `embed serve` would use; takes some seconds on a GPU."""
    found = Diagnosis()
    found.probe("version", lambda: importlib.metadata.version("gkd-engines"))
    found.probe("python", platform.python_version)
    found.probe("cpu", _cpu)
    found.probe("cores", _cores)
    found.probe("blas", _blas)
    found.probe("driver_version", _driver_version)
    found.probe("driver_cuda_release", lambda: "{}.{}".format(*_cuda_release()))
    found.probe("cuda_python", _cuda_python)
    found.probe("nvrtc_version", _nvrtc_version)
    found.probe("nvrtc_library", _nvrtc_library)
    found.probe("cache_directory", lambda: str(_cache_directory() or "off"))
    found.probe("cache_kernels", lambda: _cache_usage()[0])
    found.probe("cache_size_bytes", lambda: _cache_usage()[1])
    found.probe("cache_writable", _cache_writable)
    if "cache_writable" in found.problems:
        found.values["cache_writable"] = False
    found.probe("environment", _environment)
    _decide(found)
    return found


def _decide(found: Diagnosis) -> None:
    """What `embed serve` without flags would compute on: as embed.model chooses, and whether that works."""
    complaint: str | None = None
    trial: Trial | None = None
    why_not_gpu = _attempt(driver.unavailable)
    if why_not_gpu is not None:
        uses = "cpu"
        # On the CPU an engine reads none of these.
        complaint = _attempt(_complain)
    else:
        try:
            uses, trial = "cuda", _try_device()
        except Exception as error:
            # Never the CPU instead: a GPU that is there and fails is an error, and so it is in `embed serve`.
            uses, why_not_gpu = "nothing", f"{_reason(error)}{_hint_at_releases(error)}"
    found.probe("devices", lambda: _devices(trial))
    found.values["trial_kernel"] = None
    if trial is not None:
        found.probe("trial_kernel", lambda: _describe_trial(trial))
    found.values["serve_uses"] = uses
    found.probe("serve_device", lambda: trial.device.name if trial is not None else _cpu() if uses == "cpu" else None)
    found.values["serve_dtypes"] = None if uses == "nothing" else _dtypes(trial)
    found.values["why_not_gpu"] = None if why_not_gpu is None else _printable(why_not_gpu)
    found.values["complaint"] = None if complaint is None else _printable(complaint)
    found.ok = uses != "nothing" and complaint is None


def _attempt(find: Callable[[], str | None]) -> str | None:
    """What it returns, or the reason for which it raises."""
    try:
        return find()
    except Exception as error:
        return _reason(error)


def _complain() -> str | None:
    """What the environment asks for that a machine without a usable GPU does not have; raises EnvError."""
    read_env()
    for name in ("GKD_GPU_DEVICE", "CUDA_VISIBLE_DEVICES"):
        value = os.environ.get(name, "")
        # CUDA takes the devices before the first value that names none: with one of these, no device at all.
        if value and not value.startswith("-") and value not in ("NoDevFiles", "none", "void"):
            return f"{name}={value} asks for a GPU, and none can be used"
    return None


def _try_device() -> Trial:
    """Takes the device as an engine does, compiles a kernel for it, and runs it. Raises GkdError."""
    from gkd.compiler import compile_kernel, compile_options
    from gkd.cuda import CudaBackend
    from gkd.device import choose_device
    from gkd.dtype import DType
    from gkd.kernel import KernelSpec, Launch
    from gkd.module import Kernel
    from gkd.sources import KernelSource
    from gkd.stream import Stream

    device = choose_device(-1)
    backend = CudaBackend(device, DType.F32)

    def work() -> Trial:
        backend.acquire()
        free_bytes, _ = driver.memory_bytes()
        start_s = time.perf_counter()
        spec, arch = KernelSpec("trial", ()), arch_name(device.capability)
        cubin = compile_kernel(KernelSource("trial", _TRIAL, ()), compile_options(spec, arch), arch)
        kernel, stream = Kernel(spec, cubin, device), Stream()
        kernel.launch(stream, Launch(spec, (1, 1, 1), 32, (0,)), overlap=False)
        stream.synchronize()
        seconds = time.perf_counter() - start_s
        stream.close()
        kernel.close()
        return Trial(device, free_bytes, seconds)

    try:
        return backend.call(work)
    finally:
        backend.stop()


def _hint_at_releases(error: Exception) -> str:
    """What to do where a driver refuses what a compiler of a newer CUDA release made; else nothing."""
    from gkd.compiler import nvrtc_build

    # The bindings raise RuntimeError for a function that the driver lacks.
    if not isinstance(error, RuntimeError) and "cuModuleLoadData" not in str(error):
        return ""
    try:
        driver_release = driver.cuda_release()
        numbers = nvrtc_build().partition(" ")[0].removeprefix("V").split(".")
        nvrtc_release = int(numbers[0]), int(numbers[1])
    except Exception:
        return ""
    if nvrtc_release <= driver_release:
        return ""
    text = "; NVRTC is of CUDA {}.{}, the driver only of {}.{}".format(*nvrtc_release, *driver_release)
    if nvrtc_release[0] > driver_release[0] == 12:
        return f"{text}: install 'gkd-engines[cu12]' in a new environment, or a newer driver"
    return f"{text}: install a newer driver"


def _describe_trial(trial: Trial) -> str:
    return f"compiled for {arch_name(trial.device.capability)}, loaded and run in {trial.seconds:.2f} s"


def _devices(trial: Trial | None) -> list[dict[str, Any]]:
    if driver.unavailable():
        return []
    from gkd.device import devices

    return [
        {
            "ordinal": device.ordinal,
            "name": device.name,
            "compute_capability": f"{device.capability // 10}.{device.capability % 10}",
            "memory_bytes": device.memory_bytes,
            # Only a context tells, and one is made only of the device that would be used.
            "free_bytes": trial.free_bytes if trial is not None and trial.device == device else None,
        }
        for device in devices()
    ]


def _dtypes(trial: Trial | None) -> str:
    from embed.precision import precisions

    return ", ".join(dtype.value for dtype in precisions(trial.device.capability if trial is not None else 0))


def _cpu() -> str:
    from gkd.cpu import CpuBackend

    return CpuBackend().device_name


def _cores() -> int:
    from gkd.ops.threads import num_cores

    return num_cores()


def _blas() -> str:
    import numpy  # noqa: F401  loads it
    from threadpoolctl import threadpool_info

    for library in threadpool_info():
        if library["user_api"] == "blas":
            parts = (library["internal_api"], library["version"], library.get("architecture"))
            return f"{' '.join(str(part) for part in parts if part)}, {library['num_threads']} threads"
    raise LookupError("NumPy uses none that threadpoolctl knows")


def _driver_version() -> str:
    """As NVIDIA counts: 580.65.06. CUDA's own library does not know it."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    status = nvml.nvmlInit_v2()
    if status:
        raise DeviceError(f"libnvidia-ml.so.1 does not start: error {status}")
    text = ctypes.create_string_buffer(80)
    status = nvml.nvmlSystemGetDriverVersion(text, len(text))
    nvml.nvmlShutdown()
    if status:
        raise DeviceError(f"libnvidia-ml.so.1 does not tell: error {status}")
    return text.value.decode()


def _cuda_release() -> tuple[int, int]:
    if driver.cu is None:
        raise DeviceError(str(driver.unavailable()))
    return driver.cuda_release()


def _cuda_python() -> str:
    try:
        return importlib.metadata.version("cuda-python")
    except importlib.metadata.PackageNotFoundError:
        raise LookupError("not installed: pip install 'gkd-engines[cu13]', or [cu12] for a CUDA 12 driver") from None


def _nvrtc_version() -> str:
    from gkd.compiler import nvrtc_build

    return nvrtc_build()


def _nvrtc_library() -> str:
    """The file that is loaded, which may be another than the one that pip installed."""
    _nvrtc_version()
    for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
        # address permissions offset device inode path
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and os.path.basename(fields[5]).startswith("libnvrtc.so"):
            return fields[5]
    raise LookupError("it is loaded under another name than libnvrtc.so")


def _cache_directory() -> Path | None:
    # Only these: another variable's bad value is another line's matter.
    names = ("GKD_CACHE_DIR", "XDG_CACHE_HOME")
    return read_env({name: os.environ[name] for name in names if name in os.environ}).cache_dir


def _cache_usage() -> tuple[int, int]:
    from gkd.cache import cache_usage

    directory = _cache_directory()
    return (0, 0) if directory is None else cache_usage(directory)


def _cache_writable() -> bool | None:
    """True, or raises OSError; nothing is left behind, the directory itself neither. None where there is no cache."""
    directory = _cache_directory()
    if directory is None:
        return None
    while not os.path.lexists(directory):
        directory = directory.parent
    try:
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError as error:
        raise OSError(f"{directory}: {error.strerror}") from None


def _environment() -> dict[str, str]:
    names = sorted(name for name in os.environ if name in KNOWN_VARIABLES or name.startswith("GKD_"))
    return {name: os.environ[name] if name in KNOWN_VARIABLES else "set, and not known" for name in names}


def _reason(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if isinstance(error.filename, str) else error.strerror
    else:
        text = str(error).strip().partition("\n")[0] or type(error).__name__
    return str(_printable(text))


def _printable(value: Any) -> Any:
    """The value with every character of its texts that a terminal or JSON might not take written as an escape."""
    if isinstance(value, str):
        return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in value)
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return value


def _show(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _show_device(device: dict[str, Any]) -> str:
    free = device["free_bytes"]
    return (
        f"{device['name']}, compute capability {device['compute_capability']}, {_size(device['memory_bytes'])}"
        f"{'' if free is None else f', {_size(free)} free'}"
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
