"""out = x[rows]: of some tokens, what stands for them."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from gkd.dtype import DType
from gkd.errors import ShapeError
from gkd.kernel import KernelPlan, KernelSpec, Launch, ceil_div, dtype_define
from gkd.ops.contract import Array, Signature, float_dtype

_NUM_THREADS = 128


@dataclass(frozen=True, slots=True)
class GatherRows:
    """out[i] = x[rows[i]].

    Shapes:  out (max_rows, width), x (any, width), rows (at least max_rows,); num_rows (1,): so many first rows are
             copied.
    Dtypes:  one floating dtype, on a device `dtype`; int32 rows, in range, which the caller has checked, and num_rows.
    """

    width: int
    dtype: DType

    name: ClassVar[str] = "gather_rows"

    def check(self, out: Array, x: Array, rows: Array, num_rows: Array) -> None:
        dtype = float_dtype(self.name, "x", x)
        signature = Signature(self.name)
        signature.match("x", x, ("rows of x", self.width), dtype)
        signature.match("out", out, ("max_rows", self.width), dtype)
        signature.match("rows", rows, ("number of rows",), DType.I32)
        signature.match("num_rows", num_rows, (1,), DType.I32)
        if out.shape[0] > rows.shape[0]:
            raise ShapeError(f"{self.name}: `out` has shape {out.shape}, expected at most {rows.shape[0]} rows")

    def reference(self, out: Array, x: Array, rows: Array, num_rows: Array) -> None:
        out[: num_rows[0]] = x[rows[: num_rows[0]]]

    def plan(self, dtype: DType, arch: int) -> KernelPlan:
        # A row of split or tf32 is moved as the f32 that it takes the place of.
        defines = (dtype_define(self.dtype.summand), ("WIDTH", self.width), ("NUM_THREADS", _NUM_THREADS))
        spec = KernelSpec(self.name, defines)
        return KernelPlan((spec,), partial(self._launch, spec))

    def _launch(self, spec: KernelSpec, out: Array, x: Array, rows: Array, num_rows: Array) -> Launch:
        grid = (ceil_div(out.shape[0], _NUM_THREADS // 32), 1, 1)
        return Launch(spec, grid, _NUM_THREADS, (out, x, rows, num_rows))
