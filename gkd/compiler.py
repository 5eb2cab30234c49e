"""NVRTC: CUDA C++ to a cubin, with no toolkit, no header of CUDA and no GPU."""

import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gkd.errors import CompileError, DeviceError
from gkd.kernel import KernelSpec
from gkd.sources import KernelSource

_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_STATIC_SMEM = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, slots=True)
class Resources:
    """What one thread, or one block, of a kernel takes."""

    registers: int
    """Of a thread."""
    stack_bytes: int
    """Of a thread: the frames of the kernel and of every function that was not inlined, spilled registers included."""
    spill_bytes: int
    """Of a thread: stores and loads of registers that did not fit."""
    static_smem_bytes: int
    """Of a block."""


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """How a cubin came to be."""

    name: str
    """The kernel, and its entry."""
    arch: str
    """NVRTC's name: sm_90a."""
    options: tuple[str, ...]
    nvrtc: str
    """The compiler's build."""
    seconds: float
    log: str
    resources: Resources | None
    """None where the log does not tell."""


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code of one kernel for one architecture."""

    code: bytes
    info: BuildInfo


def compile_options(spec: KernelSpec, arch: str) -> tuple[str, ...]:
    """The compiler's options, which with the source, the headers and the compiler decide every byte of the cubin.

    A real architecture, never a virtual one: an older driver refuses newer PTX, and only assembling checks inline PTX.
    """
    return (
        f"--gpu-architecture={arch}",
        "--std=c++17",
        # Headers come in memory. Without this NVRTC also looks in the working directory, and finds what no key knows.
        "--no-source-include",
        "--ptxas-options=-v",
        *(f"-D{name}={value}" for name, value in spec.defines),
    )


def compile_kernel(source: KernelSource, options: Sequence[str], arch: str) -> Cubin:
    """The cubin of a kernel. Raises CompileError with the compiler's log; DeviceError without NVRTC.

    NVRTC lets go of the GIL. It recurses: a thread needs a stack of 8 MiB to be safe from deep expressions.
    """
    nvrtc = _load()
    started = time.perf_counter()
    names = [name.encode() for name, _ in source.headers]
    texts = [text.encode() for _, text in source.headers]
    program = _check(
        nvrtc.nvrtcCreateProgram(source.text.encode(), f"{source.name}.cu".encode(), len(names), texts, names)
    )
    try:
        [status] = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log_bytes = _read(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        log = log_bytes.decode(errors="replace").strip("\0 \n")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(_failure(source, options, arch, status.name, log))
        code = _read(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    seconds = time.perf_counter() - started
    return Cubin(code, BuildInfo(source.name, arch, tuple(options), nvrtc_build(), seconds, log, _resources(log)))


@cache
def nvrtc_build() -> str:
    """The compiler's version and build, as `V13.0.88 CL-36424714`. Raises DeviceError without NVRTC.

    nvrtcVersion has no patch level, and two builds may compile differently; the banner of PTX has both.
    """
    nvrtc = _load()
    program = _check(nvrtc.nvrtcCreateProgram(b"", b"empty.cu", 0, [], []))
    try:
        _check(nvrtc.nvrtcCompileProgram(program, 0, []))
        banner = _read(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).decode().partition(".version")[0]
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    version, build = re.search(r"V[\d.]+", banner), re.search(r"CL-\d+", banner)
    return f"{version[0]} {build[0]}" if version and build else banner


def _load() -> Any:
    """cuda.bindings.nvrtc with its library found."""
    try:
        from cuda.bindings import nvrtc

        # The first call finds the library.
        _check(nvrtc.nvrtcVersion())
    except (ImportError, RuntimeError, OSError) as error:
        raise DeviceError(
            "NVRTC, which compiles the kernels, is not installed: `pip install 'gkd-engines[cu13]'`, "
            f"or [cu12] for a CUDA 12 driver ({str(error).strip().partition(chr(10))[0]})"
        ) from error
    return nvrtc


def _check(result: tuple[Any, ...]) -> Any:
    """The value of a call to NVRTC that cannot fail on account of what is compiled."""
    status, *values = result
    if status.value:
        raise CompileError(f"NVRTC failed: {status.name}; if memory is not short, report it with the NVRTC version")
    return values[0] if len(values) == 1 else values


def _read(program: Any, get_size: Any, get: Any) -> bytes:
    """What NVRTC writes into a buffer of the size that it tells."""
    # A bytearray: NVRTC would write into a bytes object as well, and those are shared.
    buffer = bytearray(_check(get_size(program)))
    _check(get(program, buffer))
    return bytes(buffer)


def _resources(log: str) -> Resources | None:
    frames, registers = _FRAME.findall(log), _REGISTERS.findall(log)
    if not frames or not registers:
        return None
    return Resources(
        registers=max(map(int, registers)),
        stack_bytes=sum(int(stack) for stack, _, _ in frames),
        spill_bytes=sum(int(stores) + int(loads) for _, stores, loads in frames),
        static_smem_bytes=max(map(int, _STATIC_SMEM.findall(log)), default=0),
    )


def _failure(source: KernelSource, options: Sequence[str], arch: str, status: str, log: str) -> str:
    try:
        dumped = str(source.write(Path(tempfile.mkdtemp(prefix=f"gkd-{source.name}-"))))
    except OSError as error:
        dumped = f"could not be written: {error}"
    return (
        f"kernel `{source.name}` does not compile for {arch}: {status} of NVRTC {nvrtc_build()}\n"
        f"options: {' '.join(options)}\n"
        f"source:  {dumped}\n"
        f"{log}"
    )
