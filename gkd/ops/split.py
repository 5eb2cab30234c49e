"""out = x, split for the tensor cores: the way of a weight into a product in fp32."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from gkd.dtype import DType, scale_of
from gkd.errors import DtypeError
from gkd.kernel import KernelPlan, KernelSpec, Launch, ceil_div
from gkd.ops.contract import Array, Signature

_NUM_THREADS = 256
_ELEMENTS_PER_THREAD = 8


@dataclass(frozen=True, slots=True)
class Split:
    """out = x: each number the sum of two f16 over the scale of out (`DType.SPLIT`).

    Shapes:  out, x (num_rows, width).
    Dtypes:  out split; x of type `source`: f32, f16 or bf16.
    Source:  Ootomo & Yokota 2022.
    """

    source: DType

    name: ClassVar[str] = "split"

    def __post_init__(self) -> None:
        if self.source not in (DType.F32, DType.F16, DType.BF16):
            raise DtypeError(f"split: from {self.source.value} is not supported")

    def check(self, out: Array, x: Array) -> None:
        signature = Signature(self.name)
        signature.match("x", x, ("num_rows", "width"), self.source)
        signature.match("out", out, ("num_rows", "width"), DType.SPLIT)

    def reference(self, out: Array, x: Array) -> None:
        """`out` is float64 here: the numbers that the halves stand for, with a scale of 1."""
        high = x.astype(np.float16).astype(np.float64)
        out[:] = high + (x - high).astype(np.float16)

    def plan(self, dtype: DType, arch: int) -> KernelPlan:
        defines = (
            ("DTYPE_SPLIT", 1),
            (f"SOURCE_{self.source.name}", 1),
            ("ELEMENTS_PER_THREAD", _ELEMENTS_PER_THREAD),
            ("NUM_THREADS", _NUM_THREADS),
        )
        spec = KernelSpec(self.name, defines)
        return KernelPlan((spec,), partial(self._launch, spec))

    def _launch(self, spec: KernelSpec, out: Array, x: Array) -> Launch:
        num_rows, width = x.shape
        num_blocks = ceil_div(num_rows * width, _NUM_THREADS * _ELEMENTS_PER_THREAD)
        return Launch(spec, (num_blocks, 1, 1), _NUM_THREADS, (out, x, num_rows, width, scale_of(out)))
