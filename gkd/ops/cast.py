"""out = x in another floating type: how 16-bit checkpoints become float32 and back."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from gkd.ops.contract import Array, Signature

FloatType = Literal["f32", "f16", "bf16"]

# NumPy has no bfloat16: its bits are carried as uint16.
_STORAGE: dict[FloatType, Any] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


@dataclass(frozen=True, slots=True)
class Cast:
    """out = x, rounded to nearest even where `target` is narrower; NaN stays NaN.

    Shapes:  out, x of one shape.
    Dtypes:  float32 for f32, float16 for f16, uint16 holding the bits for bf16.
    """

    source: FloatType
    target: FloatType

    name: ClassVar[str] = "cast"

    def check(self, out: Array, x: Array) -> None:
        signature = Signature(self.name)
        signature.match("x", x, x.shape, _STORAGE[self.source])
        signature.match("out", out, x.shape, _STORAGE[self.target])

    def reference(self, out: Array, x: Array) -> None:
        if self.source == self.target:
            out[...] = x
            return
        wide = _widen_bf16(x) if self.source == "bf16" else x.astype(np.float32, copy=False)
        out[...] = _narrow_bf16(wide) if self.target == "bf16" else wide


def _widen_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _narrow_bf16(x: Array) -> Array:
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Rounding would carry a NaN's mantissa into the exponent: truncate it and keep it quiet instead.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(x), quiet, rounded).astype(np.uint16)
