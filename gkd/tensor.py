"""A tensor in device memory: an address, a shape and a type. It owns nothing; its arena or workspace does."""

from dataclasses import dataclass
from math import prod

from gkd.dtype import DType


@dataclass(frozen=True, slots=True)
class Tensor:
    """A contiguous tensor."""

    pointer: int
    """Device address."""
    shape: tuple[int, ...]
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return prod(self.shape) * self.dtype.itemsize

    def head(self, shape: tuple[int, ...]) -> "Tensor":
        """A tensor of another shape at the beginning of this one's memory."""
        if prod(shape) > prod(self.shape):
            raise ValueError(f"a tensor of shape {shape} does not fit into one of shape {self.shape}")
        return Tensor(self.pointer, shape, self.dtype)

    def flat(self) -> "Tensor":
        """The same elements along one axis."""
        return Tensor(self.pointer, (prod(self.shape),), self.dtype)

    def rows(self, start: int, end: int) -> "Tensor":
        """Rows [start, end) along the first axis."""
        if not 0 <= start <= end <= self.shape[0]:
            raise ValueError(f"rows [{start}, {end}) of a tensor of shape {self.shape}")
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        return Tensor(self.pointer + start * row_bytes, (end - start, *self.shape[1:]), self.dtype)
