"""A tensor in device memory: an address, a shape and a type. It owns nothing; its arena or workspace does."""

from dataclasses import dataclass, replace
from math import prod

from gkd.dtype import DType


@dataclass(frozen=True, slots=True)
class Tensor:
    """A contiguous tensor."""

    pointer: int
    """Device address."""
    shape: tuple[int, ...]
    dtype: DType
    scale: float = 1.0
    """By what the numbers of a split tensor are multiplied; a power of two."""

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return prod(self.shape) * self.dtype.itemsize

    def view(self, shape: tuple[int, ...], start: int = 0) -> "Tensor":
        """A tensor of another shape in this one's memory, from an element on."""
        if start < 0 or start + prod(shape) > prod(self.shape):
            raise ValueError(f"a tensor of shape {shape} does not fit at element {start} of one of shape {self.shape}")
        return replace(self, pointer=self.pointer + start * self.dtype.itemsize, shape=shape)

    def scaled(self, scale: float) -> "Tensor":
        """The same memory, for numbers of another scale."""
        return replace(self, scale=scale)

    def rows(self, start: int, end: int) -> "Tensor":
        """Rows [start, end) along the first axis."""
        if not 0 <= start <= end <= self.shape[0]:
            raise ValueError(f"rows [{start}, {end}) of a tensor of shape {self.shape}")
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        return replace(self, pointer=self.pointer + start * row_bytes, shape=(end - start, *self.shape[1:]))
