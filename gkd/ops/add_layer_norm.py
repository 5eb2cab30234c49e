"""out = LayerNorm(x + residual): the end of each half of a post-norm block."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gkd.dtype import DType
from gkd.kernel import KernelPlan, KernelSpec, Launch, ceil_div, dtype_define
from gkd.ops.blocks import row_blocks
from gkd.ops.contract import Array, Signature, float_dtype
from gkd.ops.layer_norm import layer_norm_
from gkd.ops.threads import for_each

_NUM_THREADS = 128


@dataclass(frozen=True, slots=True)
class AddLayerNorm:
    """out = LayerNorm(x + residual) * gamma + beta.

    Shapes:  out, x, residual (num_tokens, hidden_size); gamma, beta (hidden_size,). out may be residual or x.
    Dtypes:  one floating dtype; gamma and beta in its accumulator's, f32 for 16 bits.
    """

    hidden_size: int
    eps: float

    name: ClassVar[str] = "add_layer_norm"

    def check(self, out: Array, x: Array, residual: Array, gamma: Array, beta: Array) -> None:
        dtype = float_dtype(self.name, "x", x)
        signature = Signature(self.name)
        for name, tensor in (("x", x), ("residual", residual), ("out", out)):
            signature.match(name, tensor, ("num_tokens", self.hidden_size), dtype)
        for name, tensor in (("gamma", gamma), ("beta", beta)):
            signature.match(name, tensor, (self.hidden_size,), dtype.accumulator)

    def reference(self, out: Array, x: Array, residual: Array, gamma: Array, beta: Array) -> None:
        def normalize(rows: slice) -> None:
            np.add(x[rows], residual[rows], out=out[rows])
            layer_norm_(out[rows], gamma, beta, self.eps)

        for_each(normalize, row_blocks(len(x), self.hidden_size))

    def plan(self, dtype: DType, arch: int) -> KernelPlan:
        defines = (dtype_define(dtype), ("HIDDEN_SIZE", self.hidden_size), ("NUM_THREADS", _NUM_THREADS))
        return KernelPlan(KernelSpec(self.name, defines), self._launch)

    def _launch(self, out: Array, x: Array, residual: Array, gamma: Array, beta: Array) -> Launch:
        num_rows = x.shape[0]
        arguments = (out, x, residual, gamma, beta, num_rows, float(self.eps))
        return Launch((ceil_div(num_rows, _NUM_THREADS // 32), 1, 1), _NUM_THREADS, arguments)
