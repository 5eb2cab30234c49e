"""The only module that calls the CUDA driver.

It imports and answers on a machine without a driver or without cuda-python: `unavailable()` says what is missing.
Everything else may be called only where it says nothing.
"""

import ctypes
from functools import cache
from typing import Any

from gkd.errors import DriverError, OutOfMemory

try:
    # First the driver, in a tenth of a millisecond: without one the bindings would be a tenth of a second for nothing.
    ctypes.CDLL("libcuda.so.1")
    from cuda.bindings import driver as _bindings
except (OSError, ImportError):
    _bindings = None

cu: Any = _bindings

# What a code means for whoever reads it, where the driver's own text does not say.
_EXPLANATIONS = {
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the kernel was compiled for another architecture",
    "CUDA_ERROR_INVALID_IMAGE": "the compiled kernel is damaged, or of a newer CUDA release than the driver",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the compiler is of a newer CUDA release than the driver",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the driver was updated and the machine not restarted",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel accessed memory that is not its own; the context is lost",
    "CUDA_ERROR_LAUNCH_FAILED": "a kernel was stopped; the context is lost",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": "the device was given back while something still used it",
}


@cache
def unavailable() -> str | None:
    """Why CUDA cannot be used in this process, or None where it can."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver is installed (libcuda.so.1 was not found)"
    if cu is None:
        return "a CUDA driver is installed, but cuda-python is not: pip install 'gkd-engines[cu13]' (or cu12)"
    try:
        check("cuInit", cu.cuInit(0))
        count = check("cuDeviceGetCount", cu.cuDeviceGetCount())
    except (DriverError, RuntimeError) as error:
        return f"the CUDA driver does not start: {error}"
    return None if count else "the CUDA driver finds no device"


def cuda_release() -> tuple[int, int]:
    """The CUDA release that the driver is of, as (13, 0)."""
    number = int(check("cuDriverGetVersion", cu.cuDriverGetVersion()))
    return number // 1000, number % 1000 // 10


def memory_bytes() -> tuple[int, int]:
    """Free and total memory of the device whose context is current to this thread."""
    free, total = check("cuMemGetInfo", cu.cuMemGetInfo())
    return int(free), int(total)


def check(call: str, result: Any) -> Any:
    """The value of a driver call's (status, *values), or the values if there are several; raises DriverError."""
    status, *values = result
    if status != cu.CUresult.CUDA_SUCCESS:
        raise _error(call, status)
    return values[0] if len(values) == 1 else tuple(values)


def _error(call: str, status: Any) -> DriverError:
    name = getattr(status, "name", str(status))
    explanation = _EXPLANATIONS.get(name)
    if explanation is None:
        found, text = cu.cuGetErrorString(status)
        explanation = text.decode() if found == cu.CUresult.CUDA_SUCCESS and text else "no explanation"
    kind = OutOfMemory if name == "CUDA_ERROR_OUT_OF_MEMORY" else DriverError
    return kind(f"{name} in {call}: {explanation}")
