"""Runs a kernel plan on the CPU: the kernel's own .cu file, compiled by g++ against cusim.

The plain build is a shared library that runs in this process, on copies of the NumPy arrays with margins. The sanitized
build is a program of its own, to which each array goes as an allocation of exactly its size; an access outside it,
outside shared memory, or a misaligned one is a CusimError that names the line of the .cu file.
"""

import ctypes
import hashlib
import os
import re
import struct
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gkd.dtype import DType
from gkd.kernel import KernelPlan, KernelSpec, Launch, TensorMap

Array = NDArray[Any]

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels"
HERE = ROOT / "tests" / "cusim"
CACHE = ROOT / "build" / "cusim"

FORWARD, REVERSE, RANDOM = ORDERS = (0, 1, 2)
"""In which order blocks are run and the threads of a block take turns."""

_COMPILER = "g++"
# As NVRTC's defaults: C++17, multiplications and additions contracted where the compiler likes. A pattern in variables
# that were never set shows where NVRTC would leave whatever a register held. GCC would note that it once passed what is
# aligned as a tensor map otherwise.
_FLAGS = (
    "-std=c++17",
    "-march=x86-64-v3",
    "-ffp-contract=fast",
    "-fno-strict-aliasing",
    "-ftrivial-auto-var-init=pattern",
    "-fPIC",
    "-g1",
    "-Wno-psabi",
    "-DCUSIM",
    "-Itests/cusim",
)
_PLAIN_FLAGS = ("-O2",)
_SANITIZER_FLAGS = (
    "-O1",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fsanitize-sections=cusim_shared",
)
# The runtime is no kernel: it is to know that there is a sanitizer, not to be slowed by it.
_SANITIZED_RUNTIME_FLAGS = (
    *_FLAGS,
    *_SANITIZER_FLAGS,
    "-O2",
    "--param=asan-instrument-reads=0",
    "--param=asan-instrument-writes=0",
    "--param=asan-stack=0",
)
_TIMEOUT_S = 120

# `extern __shared__ __align__(16) T name[];`, alignment optional. No macro could make this a declaration of memory
# whose size the launch gives; as an allocation the sanitizer sees its end.
_EXTERN_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?(\w[\w:<> ]*?)\s*\b(\w+)\s*\[\s*\]\s*;"
)


class CusimError(Exception):
    """A kernel did not compile, or its launch failed: deadlock, misuse of a collective, or a sanitizer's report."""


def run(
    plan: KernelPlan,
    *tensors: Any,
    order: int = FORWARD,
    sanitize: bool = False,
    arch: int = 80,
    num_sms: int = 2,
    sources: Path = KERNELS,
) -> None:
    """Launches the plan's kernel on these tensors, as the device would: NumPy arrays, bf16 as uint16.

    arch is what `plan` was made for; the kernel sees it as __CUDA_ARCH__. Arrays are C-contiguous, and either the same
    or apart. The plain build trusts the kernel not to write far outside them; the sanitized one does not. A persistent
    launch gets at most num_sms blocks: few, so that each has several things to do.
    """
    launch = plan.launch(*tensors)
    if 0 in launch.grid:
        raise CusimError(f"{launch.spec.name}: the grid {launch.grid} is empty")
    grid_x, *grid_yz = launch.grid
    if launch.persistent:
        grid_x = min(grid_x, num_sms)
    binary = build(launch.spec, sanitize=sanitize, arch=arch, sources=sources)
    kinds = "".join(_kind(argument) for argument in launch.arguments)
    shape = struct.pack("<6I", grid_x, *grid_yz, launch.num_threads, launch.smem_bytes, order)
    error = (_run_program if sanitize else _run_library)(binary, shape, kinds, launch)
    if error:
        raise CusimError(f"{launch.spec.name}: {error}")


def build(spec: KernelSpec, *, sanitize: bool = False, arch: int = 80, sources: Path = KERNELS) -> Path:
    """The shared library of a kernel: compiled unless the same was before."""
    source = sources / f"{spec.name}.cu"
    unit = "\n".join(
        (
            "#include <cusim.h>",
            f'#line 1 "{_relative(source)}"',
            _EXTERN_SHARED.sub(r"\1*& \2 = cusim::dynamic_shared<\1>();", source.read_text()),
            f"CUSIM_EXPORT({spec.name})",
        )
    )
    flags = (
        *_flags(sanitize),
        f"-I{_relative(sources)}",
        f"-I{_relative(KERNELS)}",
        f"-DCUSIM_ARCH={arch * 10}",
        *(("-D__CUDA_ARCH_FEAT_SM90_ALL=1",) if arch == 90 else ()),
        *(f"-D{name}={value}" for name, value in spec.defines),
    )
    target = CACHE / f"{spec.name}-{_digest(unit, *flags, _headers_digest(sources))}.so"
    if not target.exists():
        # What is undefined is the runtime's, which is there when the kernel is loaded: linking is then short.
        _compile(target, (*flags, "-shared", "-nostdlib", "-x", "c++", "-"), unit)
    _runtime(sanitize)
    return target


def build_all(
    specs: Iterable[KernelSpec],
    *,
    sanitize: Sequence[bool] = (False, True),
    arch: int = 80,
    sources: Path = KERNELS,
) -> None:
    """Compiles these kernels on all cores, so that the tests that run them find them in the cache."""
    specs = list(dict.fromkeys(specs))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        builds = [
            pool.submit(build, spec, sanitize=kind, arch=arch, sources=sources) for kind in sanitize for spec in specs
        ]
    for job in builds:
        job.result()


# ---- Compiling ------------------------------------------------------------------------------------------------------


def _relative(path: Path) -> str:
    """As the compiler, which runs in the root, and its reports should spell it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _flags(sanitize: bool) -> tuple[str, ...]:
    return _FLAGS + (_SANITIZER_FLAGS if sanitize else _PLAIN_FLAGS)


_runtime_lock = threading.Lock()


def _runtime(sanitize: bool) -> Path:
    """What the kernels' libraries are loaded into: a library for this process, or the sanitized program."""
    with _runtime_lock:
        # These touch no memory of a kernel's that they, or cusim_ptx.h, have not checked: they need not be slow.
        compile_only = ("-c", *_flags(sanitize=False))
        parts = [str(_runtime_unit(unit, compile_only)) for unit in ("cusim_ptx.cpp", "cusim_sm90.cpp")]
        if sanitize:
            return _runtime_unit("cusim_main.cpp", ("cusim.cpp", *parts, "-rdynamic", *_SANITIZED_RUNTIME_FLAGS))
        return _runtime_unit("cusim.cpp", (*parts, "-shared", *_flags(sanitize)))


def _runtime_unit(unit: str, arguments: tuple[str, ...]) -> Path:
    target = CACHE / f"{unit}-{_digest(*arguments, _runtime_digest())}"
    if not target.exists():
        sources = [_relative(HERE / name) if name.endswith(".cpp") else name for name in (unit, *arguments)]
        _compile(target, (*sources, "-DCUSIM_ARCH=0"))
    return target


def _compile(target: Path, arguments: tuple[str, ...], unit: str = "") -> None:
    """Writes under another name first: tests in another process may build the same."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.{threading.get_ident()}")
    command = [_COMPILER, *arguments, "-o", str(unfinished)]
    compiled = subprocess.run(command, input=unit, cwd=ROOT, capture_output=True, text=True)
    if compiled.returncode != 0:
        raise CusimError(f"{' '.join(command)}\n{compiled.stderr}")
    unfinished.replace(target)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _content_digest(paths: Iterable[Path]) -> str:
    return _digest(*(f"{path.name}\0{path.read_text()}" for path in sorted(paths)))


@cache
def _runtime_digest() -> str:
    version = subprocess.run([_COMPILER, "--version"], capture_output=True, text=True, check=True).stdout
    return _digest(version, _content_digest(HERE.glob("cusim*")))


@cache
def _headers_digest(sources: Path) -> str:
    """Of everything that a kernel's unit may include or is linked with."""
    return _digest(_runtime_digest(), _content_digest({*KERNELS.rglob("*.cuh"), *sources.rglob("*.cuh")}))


# ---- Launching ------------------------------------------------------------------------------------------------------


def _kind(argument: Any) -> str:
    """As cusim.h's Entry spells it."""
    if isinstance(argument, TensorMap):
        _kind(argument.tensor)
        _check_tensor_map(argument)
        return "m"
    if isinstance(argument, np.ndarray):
        if not argument.flags.c_contiguous:
            raise CusimError("a tensor is not contiguous")
        return str(_halves(argument).itemsize)
    if isinstance(argument, float | int) and not isinstance(argument, bool):
        return "f" if isinstance(argument, float) else "i"
    raise CusimError(f"a kernel takes arrays, tensor maps, int and float, not {type(argument).__name__}")


def _halves(array: Array) -> Array:
    """What a kernel sees of it: of a split tensor the f16 that its rows are made of."""
    return array.view(np.float16) if array.dtype == DType.SPLIT.storage else array


def _check_tensor_map(argument: TensorMap) -> None:
    """What cuTensorMapEncodeTiled would refuse."""
    matrix = argument.tensor
    if matrix.ndim != 2 or matrix.size == 0:
        raise CusimError(f"a tensor map is of a matrix, not of shape {matrix.shape}")
    if not 1 <= argument.box_rows <= 256:
        raise CusimError(f"a tensor map's box has 1 to 256 rows, not {argument.box_rows}")
    if matrix.shape[1] * matrix.itemsize % 16 != 0:
        raise CusimError(f"a tensor map's rows are of whole 16 bytes, not {matrix.shape[1]} of {matrix.itemsize}")
    if argument.slices and matrix.shape[1] * matrix.itemsize % 128 != 0:
        raise CusimError(f"a row of {matrix.shape[1]} of {matrix.itemsize} bytes is not one of whole slices")
    if not 0 <= argument.slices <= 256:
        raise CusimError(f"a tensor map's box has at most 256 slices, not {argument.slices}")
    if matrix.ctypes.data % 16 != 0:
        raise CusimError("a tensor map's matrix does not lie at 16 bytes")


def _value(argument: Any, place: Callable[[Array], int]) -> bytes:
    """What the kernel's parameter is made of, in at least 8 bytes; `place` says what stands for an array."""
    if isinstance(argument, TensorMap):
        matrix = _halves(argument.tensor)
        (num_rows, num_columns), element_bytes = matrix.shape, matrix.itemsize
        width, box_planes = argument.planes(num_columns, element_bytes)
        num_dimensions = 2 if width == num_columns and not argument.slices else 3
        sizes = (num_rows, width, num_columns // width, element_bytes, argument.box_rows, box_planes, num_dimensions)
        return struct.pack("<4Q4I80x", place(matrix), *sizes)
    if isinstance(argument, np.ndarray):
        return struct.pack("<Q", place(argument))
    return struct.pack("<f4x" if isinstance(argument, float) else "<i4x", argument)


def _buffers(launch: Launch) -> dict[tuple[int, int], Array]:
    """The launch's arrays, each once, by place and size."""
    tensors = (argument.tensor if isinstance(argument, TensorMap) else argument for argument in launch.arguments)
    return {_key(tensor): tensor for tensor in tensors if isinstance(tensor, np.ndarray)}


def _key(array: Array) -> tuple[int, int]:
    return array.ctypes.data, array.nbytes


def _give_back(buffer: Array, contents: Array) -> None:
    """Copies bytes into an array; a test may have made it read-only, for a kernel that must leave it alone."""
    if buffer.flags.writeable:
        buffer.reshape(-1).view(np.uint8)[:] = contents
    elif buffer.tobytes() != contents.tobytes():
        raise CusimError("the kernel wrote to a read-only tensor")


# A library runs one launch at a time: its threads' indices are global variables.
_launch_lock = threading.Lock()
# Bytes on either side of an array, looked at afterwards. To who reads there they are NaN, of a kind that no arithmetic
# yields, so that writing what was read there shows, too; or, among integers, -1.
_MARGIN_BYTES = 16384
_MARGINS = {True: np.full(_MARGIN_BYTES // 2, 0xFFFF, np.uint16), False: np.full(_MARGIN_BYTES // 2, 0x7F91, np.uint16)}


@cache
def _runtime_library() -> Any:
    launch = ctypes.CDLL(str(_runtime(sanitize=False)), ctypes.RTLD_GLOBAL).cusim_launch
    launch.restype = ctypes.c_char_p
    return launch


@cache
def _entry(path: Path) -> Any:
    """The kernel's, as cusim_launch takes it."""
    _runtime_library()
    return ctypes.byref(ctypes.c_char.in_dll(ctypes.CDLL(str(path)), "cusim_entry"))


def _run_library(path: Path, shape: bytes, kinds: str, launch: Launch) -> str:
    buffers = _buffers(launch)
    padded = {key: _with_margins(buffer) for key, buffer in buffers.items()}

    def place(array: Array) -> int:
        return padded[_key(array)].ctypes.data + _MARGIN_BYTES

    values = [ctypes.create_string_buffer(_value(argument, place)) for argument in launch.arguments]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    with _launch_lock:
        error = _runtime_library()(_entry(path), shape, kinds.encode(), pointers)
        if error:
            return str(error.decode())
    for index, (key, buffer) in enumerate(buffers.items()):
        contents = padded[key][_MARGIN_BYTES:-_MARGIN_BYTES]
        if not np.array_equal(padded[key], _with_margins(buffer, contents)):
            return f"wrote outside tensor {index}: the sanitized build says where"
        _give_back(buffer, contents)
    return ""


def _with_margins(buffer: Array, contents: Array | None = None) -> Array:
    """The bytes of a buffer, or `contents` in their place, between margins."""
    margin = _MARGINS[buffer.dtype == np.int32].view(np.uint8)
    inside = np.frombuffer(buffer.tobytes(), np.uint8) if contents is None else contents
    return np.concatenate([margin, inside, margin])


def _run_program(path: Path, shape: bytes, kinds: str, launch: Launch) -> str:
    buffers = _buffers(launch)
    message = [shape, struct.pack("<I", len(buffers))]
    message += (struct.pack("<Q", buffer.nbytes) + buffer.tobytes() for buffer in buffers.values())
    message += [struct.pack("<I", len(kinds))]

    def place(array: Array) -> int:
        return list(buffers).index(_key(array))

    for kind, argument in zip(kinds, launch.arguments, strict=True):
        message += [kind.encode(), _value(argument, place)]

    # The kernel's line is what matters; leaks at an error's exit do not.
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    try:
        done = subprocess.run(
            [_runtime(sanitize=True), path],
            input=b"".join(message),
            capture_output=True,
            env=environment,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"still running after {_TIMEOUT_S} s"
    if done.returncode != 0:
        report = done.stderr.decode(errors="replace").partition("\nShadow bytes")[0].strip()
        return report or f"exit status {done.returncode}"
    offset = 0
    for buffer in buffers.values():
        _give_back(buffer, np.frombuffer(done.stdout, np.uint8, buffer.nbytes, offset))
        offset += buffer.nbytes
    return ""
