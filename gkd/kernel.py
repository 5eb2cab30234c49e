"""What an operator says of its kernel: the source and the constants it is compiled with, and how it is launched."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gkd.dtype import DType, dtype_of


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel specialised by constants: what is compiled."""

    name: str
    """kernels/<name>.cu, whose one entry has this name."""
    defines: tuple[tuple[str, int | str], ...]
    """-D constants, in order: only what changes the code."""


@dataclass(frozen=True, slots=True)
class TensorMap:
    """An argument by which the copy engine of sm_90 and later moves boxes of a matrix, swizzled over 128 bytes.

    A box is 128 bytes of some neighbouring rows, from any column on. Of a split matrix it is that of the high parts,
    and then that of the low ones. With `slices` a row is cut into slices of 128 bytes, and a box is so many
    neighbouring slices of the rows, one after another.
    """

    tensor: Any
    """(rows, columns), contiguous, a row of a multiple of 16 bytes, and of whole slices if it is cut."""
    box_rows: int
    """At most 256."""
    slices: int = 0

    def planes(self, num_columns: int, element_bytes: int) -> tuple[int, int]:
        """How the rows, of so many elements, are divided into planes of equal width, one after another in a row.

        Returns the elements of a plane's row, and how many planes a box has.
        """
        if self.slices:
            return 128 // element_bytes, self.slices
        num_parts = 2 if dtype_of(self.tensor) is DType.SPLIT else 1
        return num_columns // num_parts, num_parts


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
