"""residual = LayerNorm(x + residual): the end of each half of a post-norm block."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from gkd.dtype import DType, scale_of
from gkd.errors import ShapeError
from gkd.kernel import KernelPlan, KernelSpec, Launch, ceil_div, dtype_define
from gkd.ops.blocks import row_blocks
from gkd.ops.contract import Array, Signature, float_dtype
from gkd.ops.layer_norm import layer_norm_
from gkd.ops.threads import for_each

_NUM_THREADS = 128
_FEW_ROWS = 512


@dataclass(frozen=True, slots=True)
class AddLayerNorm:
    """residual = LayerNorm(x + residual) * gamma + beta, and out the same, rounded to what a product takes.

    Shapes:  out, residual, x (max_rows, hidden_size); gamma, beta (hidden_size,); num_rows (1,): so many first rows are
             computed.
    Dtypes:  one floating dtype for out and x, but f32 for x where out is split or tf32; residual, gamma and beta in
             its accumulator's, f32 for 16 bits. Where out's and residual's are one, out is residual itself. int32
             num_rows.
    """

    hidden_size: int
    eps: float

    name: ClassVar[str] = "add_layer_norm"

    def check(self, out: Array, residual: Array, x: Array, gamma: Array, beta: Array, num_rows: Array) -> None:
        dtype = float_dtype(self.name, "out", out)
        signature = Signature(self.name)
        kinds = (("x", x, dtype.summand), ("out", out, dtype), ("residual", residual, dtype.accumulator))
        for name, tensor, kind in kinds:
            signature.match(name, tensor, ("max_rows", self.hidden_size), kind)
        for name, tensor in (("gamma", gamma), ("beta", beta)):
            signature.match(name, tensor, (self.hidden_size,), dtype.accumulator)
        signature.match("num_rows", num_rows, (1,), DType.I32)
        if dtype is dtype.accumulator and out is not residual:
            raise ShapeError(f"{self.name}: `out` is {dtype.value} as `residual` is, expected the same tensor")

    def reference(self, out: Array, residual: Array, x: Array, gamma: Array, beta: Array, num_rows: Array) -> None:
        def normalize(rows: slice) -> None:
            np.add(x[rows], residual[rows], out=residual[rows])
            layer_norm_(residual[rows], gamma, beta, self.eps)
            if out is not residual:
                out[rows] = residual[rows]

        for_each(normalize, row_blocks(num_rows[0], self.hidden_size))

    def plan(self, dtype: DType, arch: int) -> KernelPlan:
        defines = (dtype_define(dtype), ("HIDDEN_SIZE", self.hidden_size), ("NUM_THREADS", _NUM_THREADS))
        spec = KernelSpec(self.name, defines)
        return KernelPlan((spec,), partial(self._launch, spec))

    def _launch(
        self, spec: KernelSpec, out: Array, residual: Array, x: Array, gamma: Array, beta: Array, num_rows: Array
    ) -> Launch:
        arguments = (out, residual, x, gamma, beta, num_rows, float(self.eps), scale_of(out))
        # Few rows take their time from the way of a row through one SM: each gets an SM for itself.
        num_threads = 32 if x.shape[0] <= _FEW_ROWS else _NUM_THREADS
        return Launch(spec, (ceil_div(x.shape[0], num_threads // 32), 1, 1), num_threads, arguments)
