"""The element types of tensors."""

from enum import Enum
from typing import Any

import numpy as np


class DType(Enum):
    """An element type, by the name that users and flags know it by."""

    F64 = "f64"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    TF32 = "tf32"
    """f32 whose mantissa is rounded to the 10 bits that tensor cores multiply; what is added to something stays f32."""
    I32 = "i32"
    SPLIT = "split"
    """A number as the sum of two f16 over a power of two, the scale of its tensor: 22 bits of it. A row of a tensor
    holds all high parts, then all low ones. Tensor cores multiply such numbers about as exactly as fp32; only a device
    computes with them. A device tensor knows its scale; the scale of an array is 1."""

    @property
    def storage(self) -> np.dtype[Any]:
        """The NumPy type that holds an element in host memory. NumPy has neither bf16, carried as uint16 with its bits,
        nor tf32, carried as 4 bytes without a type, so that no f32 passes for it."""
        return _STORAGE[self]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.storage.itemsize

    @property
    def accumulator(self) -> "DType":
        """The type of sums, and of the vectors that are added to them: biases, gamma and beta."""
        return DType.F64 if self is DType.F64 else DType.F32

    @property
    def summand(self) -> "DType":
        """The type of what is added to a sum before anything is multiplied by it: 16 bits where operands have them."""
        return DType.F32 if self in (DType.SPLIT, DType.TF32) else self


_STORAGE: dict[DType, np.dtype[Any]] = {
    DType.F64: np.dtype(np.float64),
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(np.uint16),
    DType.TF32: np.dtype("V4"),
    DType.I32: np.dtype(np.int32),
    DType.SPLIT: np.dtype(np.uint32),
}
_BY_STORAGE: dict[np.dtype[Any], DType] = {storage: dtype for dtype, storage in _STORAGE.items()}


def dtype_of(tensor: Any) -> DType | None:
    """The element type of a Tensor or of a NumPy array; None for an array that no operator takes."""
    dtype = tensor.dtype
    return dtype if isinstance(dtype, DType) else _BY_STORAGE.get(dtype)


def scale_of(tensor: Any) -> float:
    """By what the numbers of a split tensor are multiplied where they lie."""
    return float(getattr(tensor, "scale", 1.0))
