"""out = x in another floating type: how a checkpoint's weights become those of the computation."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from gkd.dtype import DType
from gkd.kernel import KernelPlan, KernelSpec, Launch, ceil_div
from gkd.ops.contract import Array, Signature

_NUM_THREADS = 256
_ELEMENTS_PER_THREAD = 8


@dataclass(frozen=True, slots=True)
class Cast:
    """out = x, rounded to nearest where `target` is narrower, of two as near to the even one, or, as the devices do in
    tf32, away from zero; NaN stays NaN.

    Shapes:  out, x of one shape.
    Dtypes:  f32, f16 or bf16, on either side; tf32 as the target.
    """

    source: DType
    target: DType

    name: ClassVar[str] = "cast"

    def check(self, out: Array, x: Array) -> None:
        signature = Signature(self.name)
        signature.match("x", x, x.shape, self.source)
        signature.match("out", out, x.shape, self.target)

    def reference(self, out: Array, x: Array) -> None:
        if self.source is self.target:
            out[...] = x
            return
        wide = _widen_bf16(x) if self.source is DType.BF16 else x.astype(np.float32, copy=False)
        if self.target is DType.TF32:
            out[...] = _round_tf32(wide)
        else:
            out[...] = _narrow_bf16(wide) if self.target is DType.BF16 else wide

    def plan(self, dtype: DType, arch: int) -> KernelPlan:
        defines = (
            (f"SOURCE_{self.source.name}", 1),
            (f"TARGET_{self.target.name}", 1),
            ("NUM_THREADS", _NUM_THREADS),
            ("ELEMENTS_PER_THREAD", _ELEMENTS_PER_THREAD),
        )
        spec = KernelSpec(self.name, defines)
        return KernelPlan((spec,), partial(self._launch, spec))

    def _launch(self, spec: KernelSpec, out: Array, x: Array) -> Launch:
        num_elements = int(np.prod(x.shape))
        blocks = ceil_div(num_elements, _NUM_THREADS * _ELEMENTS_PER_THREAD)
        return Launch(spec, (blocks, 1, 1), _NUM_THREADS, (out, x, num_elements))


def _widen_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _narrow_bf16(x: Array) -> Array:
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Rounding would carry a NaN's mantissa into the exponent: truncate it and keep it quiet instead.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(x), quiet, rounded).astype(np.uint16)


def _round_tf32(x: Array) -> Array:
    bits = np.ascontiguousarray(x).view(np.uint32)
    # The other 13 bits are zero. A carry into the exponent is right; a NaN's would go on into the sign.
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), rounded).view(DType.TF32.storage)
