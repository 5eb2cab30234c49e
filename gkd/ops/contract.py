"""The contract of an operator, and the matcher that states the shapes of one call."""

from typing import Any, ClassVar, Protocol

from numpy.typing import NDArray

from gkd.dtype import DType, dtype_of
from gkd.errors import DtypeError, ShapeError
from gkd.kernel import KernelPlan

# A NumPy array, in references; a device tensor has the `shape` and `dtype` that contracts look at.
Array = NDArray[Any]

FLOATS = (DType.F32, DType.F16, DType.BF16, DType.TF32, DType.F64, DType.SPLIT)


class Operator(Protocol):
    """One step of a forward pass, specialised for a model's geometry."""

    name: ClassVar[str]

    def check(self, *tensors: Any) -> None:
        """Raises ShapeError or DtypeError unless the tensors fit."""

    def reference(self, *tensors: Any) -> None:
        """Writes the output; the tensors have passed `check` and are float32 or float64 arrays."""

    def plan(self, dtype: DType, arch: int) -> KernelPlan:
        """The kernel for tensors of this element type on a compute capability, as 90 for 9.0."""


class Signature:
    """Checks the tensors of one call: a named size is the same number wherever its name stands."""

    def __init__(self, op: str) -> None:
        self._op = op
        self._sizes: dict[str, int] = {}

    def match(self, name: str, tensor: Any, shape: tuple[int | str, ...], dtype: DType) -> None:
        """Raises unless `tensor` has this dtype and shape; a size given by name is bound at its first use."""
        if dtype_of(tensor) is not dtype:
            raise DtypeError(f"{self._op}: `{name}` is {_dtype_name(tensor)}, expected {dtype.value}")
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


def float_dtype(op: str, name: str, tensor: Any) -> DType:
    """The floating dtype in which this call computes, which its other floating tensors must share."""
    dtype = dtype_of(tensor)
    if dtype is None or dtype not in FLOATS:
        expected = ", ".join(dtype.value for dtype in FLOATS)
        raise DtypeError(f"{op}: `{name}` is {_dtype_name(tensor)}, expected one of {expected}")
    return dtype


def _dtype_name(tensor: Any) -> str:
    dtype = dtype_of(tensor)
    return dtype.value if dtype is not None else str(tensor.dtype)
