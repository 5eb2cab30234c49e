"""The contract of an operator, and the matcher that states the shapes of one call."""

from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from gkd.errors import DtypeError, ShapeError

# An array of whatever dtype the operator's check has let through.
Array = NDArray[Any]


class Operator(Protocol):
    """One step of a forward pass, specialised for a model's geometry."""

    name: ClassVar[str]

    def check(self, *tensors: Any) -> None:
        """Raises ShapeError or DtypeError unless the tensors fit."""

    def reference(self, *tensors: Any) -> None:
        """Writes the output tensor; the tensors have passed `check`."""


class Signature:
    """Checks the tensors of one call: a named size is the same number wherever its name stands."""

    def __init__(self, op: str) -> None:
        self._op = op
        self._sizes: dict[str, int] = {}

    def match(self, name: str, tensor: Array, shape: tuple[int | str, ...], dtype: Any) -> None:
        """Raises unless `tensor` has this dtype and shape; a size given by name is bound at its first use."""
        if tensor.dtype != np.dtype(dtype):
            raise DtypeError(f"{self._op}: `{name}` is {tensor.dtype}, expected {np.dtype(dtype)}")
        if len(tensor.shape) != len(shape):
            raise ShapeError(f"{self._op}: `{name}` has shape {tensor.shape}, expected {self._spell(shape)}")
        for actual, size in zip(tensor.shape, shape, strict=True):
            expected = self._sizes.setdefault(size, actual) if isinstance(size, str) else size
            if actual != expected:
                raise ShapeError(f"{self._op}: `{name}` has shape {tensor.shape}, expected {self._spell(shape)}")

    def _spell(self, shape: tuple[int | str, ...]) -> str:
        sizes = [
            f"{size}={self._sizes[size]}" if isinstance(size, str) and size in self._sizes else str(size)
            for size in shape
        ]
        return f"({', '.join(sizes)})"


def float_dtype(op: str, name: str, tensor: Array) -> Any:
    """The floating dtype in which this call computes, which its other floating tensors must share."""
    if tensor.dtype not in (np.float32, np.float64):
        raise DtypeError(f"{op}: `{name}` is {tensor.dtype}, expected float32 or float64")
    return tensor.dtype
