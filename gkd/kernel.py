"""What an operator says of its kernel: the source and the constants it is compiled with, and how it is launched."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gkd.dtype import DType


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel specialised by constants: what is compiled."""

    name: str
    """kernels/<name>.cu, whose one entry has this name."""
    defines: tuple[tuple[str, int | str], ...]
    """-D constants, in order: only what changes the code."""


@dataclass(frozen=True, slots=True)
class TensorMap:
    """An argument by which the copy engine of sm_90 and later moves boxes of a matrix, swizzled over 128 bytes."""

    tensor: Any
    """(rows, columns), contiguous, a row of a multiple of 16 bytes. A split one has the columns of its high parts, then
    those of its low ones."""
    box_rows: int
    """Rows of a box, at most 256; its columns are 128 bytes."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: kernel, geometry and arguments."""

    spec: KernelSpec
    grid: tuple[int, int, int]
    """Blocks."""
    num_threads: int
    """Threads of a block."""
    arguments: tuple[Any, ...]
    """In the order of the kernel's parameters: tensors, tensor maps, int for `int`, float for `float`."""
    smem_bytes: int = 0
    """Dynamic shared memory of a block."""
    persistent: bool = False
    """The blocks share out what there is to do: at most one for each multiprocessor is started."""


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """How an operator runs on a device: what to compile at load, and how to launch it for the tensors of a call."""

    specs: tuple[KernelSpec, ...]
    """Every kernel that a launch may name."""
    launch: Callable[..., Launch]


def dtype_define(dtype: DType) -> tuple[str, int]:
    """The constant that sets `T` in kernels/include/types.cuh."""
    return f"DTYPE_{dtype.name}", 1


def ceil_div(a: int, b: int) -> int:
    """The number of pieces of size b that hold a."""
    return -(-a // b)
