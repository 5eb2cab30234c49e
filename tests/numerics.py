"""Comparing what a kernel computed with a reference in float64."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gkd.dtype import DType, dtype_of
from gkd.ops import Cast

Array = NDArray[Any]

UNIT = {
    DType.F32: 2.0**-24,
    DType.F16: 2.0**-11,
    DType.BF16: 2.0**-8,
    DType.TF32: 2.0**-11,
    DType.SPLIT: 2.0**-22,
}
"""Of rounding: half of the gap between neighbours, relative to the value."""

SMALLEST_NORMAL = {
    DType.F32: 2.0**-126,
    DType.F16: 2.0**-14,
    DType.BF16: 2.0**-126,
    DType.TF32: 2.0**-126,
    DType.SPLIT: 2.0**-3,
}
"""Below it the error is no longer relative. A split number ends with the smallest f16, 2^-24."""


def count(number: int) -> Array:
    """As a kernel reads it on the device."""
    return np.array([number], np.int32)


def narrowed(values: Array, dtype: DType) -> Array:
    """float32 values rounded to a type, in its storage."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype is DType.SPLIT:
        with np.errstate(over="ignore", invalid="ignore"):  # infinity, and what is left of it
            high = values.astype(np.float16)
            low = (values - high.astype(np.float32)).astype(np.float16)
        return np.concatenate([high, low], axis=-1).view(np.uint32)
    out = np.empty(values.shape, dtype.storage)
    Cast(DType.F32, dtype).reference(out, values)
    return out


def widened(array: Array) -> Array:
    """A stored array in float64; integers as they are."""
    dtype = dtype_of(array)
    if dtype is DType.BF16:
        wide = np.empty(array.shape, np.float32)
        Cast(DType.BF16, DType.F32).reference(wide, array)
        return wide.astype(np.float64)
    if dtype is DType.TF32:
        array = array.view(np.float32)
    if dtype is DType.SPLIT:
        with np.errstate(invalid="ignore"):  # infinity and its like of the other sign
            high, low = np.split(array.view(np.float16).astype(np.float64), 2, axis=-1)
            return np.asarray(high + low)
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return array if dtype is DType.I32 else array.astype(np.float64)


def poisoned(shape: tuple[int, ...], dtype: DType) -> Array:
    """An output in which an element left unwritten shows: NaN in every floating type."""
    return np.full((*shape, dtype.itemsize), 0xFF, np.uint8).view(dtype.storage).reshape(shape)


def assert_close(got: Array, want: Array, bound: Array | float) -> None:
    """|got - want| is within the computation's error `bound` and one rounding to the type of `got`; NaN fails."""
    dtype = dtype_of(got)
    assert dtype is not None
    assert dtype is not DType.TF32 or not (got.view(np.uint32) & 0x1FFF).any(), "not rounded"
    assert got.shape == want.shape
    error = np.abs(widened(got) - want)
    tolerance = bound + UNIT[dtype] * np.maximum(np.abs(want) + bound, SMALLEST_NORMAL[dtype])
    ok = error <= tolerance
    if not ok.all():
        worst = np.unravel_index(np.argmax(np.where(ok, 0, np.nan_to_num(error / tolerance, nan=np.inf))), ok.shape)
        raise AssertionError(
            f"{(~ok).sum()} of {ok.size} out of bounds, worst at {[int(i) for i in worst]}: "
            f"{widened(got)[worst]} for {want[worst]}, allowed {np.broadcast_to(tolerance, ok.shape)[worst]}"
        )
