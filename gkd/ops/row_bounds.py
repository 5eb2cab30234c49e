"""How large the results of a product can be, by its weights."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from gkd.dtype import DType, scale_of
from gkd.kernel import KernelPlan, KernelSpec, Launch, ceil_div
from gkd.ops.contract import Array, Signature

_NUM_THREADS = 128


@dataclass(frozen=True, slots=True)
class RowBounds:
    """bound = the largest norm of a row of x; infinity where x is not finite.

    Shapes:  bound (1,), zero before; x (num_rows, width).
    Dtypes:  f32 bound; x split.
    """

    width: int

    name: ClassVar[str] = "row_bounds"

    def check(self, bound: Array, x: Array) -> None:
        signature = Signature(self.name)
        signature.match("x", x, ("num_rows", self.width), DType.SPLIT)
        signature.match("bound", bound, (1,), DType.F32)

    def reference(self, bound: Array, x: Array) -> None:
        """`x` holds the numbers themselves here."""
        norms = np.sqrt(np.add.reduce(np.square(x), axis=-1))
        bound[0] = norms.max() if np.isfinite(norms).all() else np.inf

    def plan(self, dtype: DType, arch: int) -> KernelPlan:
        defines = (("DTYPE_SPLIT", 1), ("WIDTH", self.width), ("NUM_THREADS", _NUM_THREADS))
        spec = KernelSpec(self.name, defines)
        return KernelPlan((spec,), partial(self._launch, spec))

    def _launch(self, spec: KernelSpec, bound: Array, x: Array) -> Launch:
        grid = (ceil_div(x.shape[0], _NUM_THREADS // 32), 1, 1)
        return Launch(spec, grid, _NUM_THREADS, (bound, x, x.shape[0], 1.0 / scale_of(x)))
