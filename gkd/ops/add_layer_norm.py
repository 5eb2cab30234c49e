"""out = LayerNorm(x + residual): the end of each half of a post-norm block."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gkd.ops.contract import Array, Signature, float_dtype
from gkd.ops.layer_norm import layer_norm_, row_blocks


@dataclass(frozen=True, slots=True)
class AddLayerNorm:
    """out = LayerNorm(x + residual) * gamma + beta.

    Shapes:  out, x, residual (num_tokens, hidden_size); gamma, beta (hidden_size,). out may be residual or x.
    Dtypes:  one floating dtype throughout.
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
            signature.match(name, tensor, (self.hidden_size,), dtype)

    def reference(self, out: Array, x: Array, residual: Array, gamma: Array, beta: Array) -> None:
        for rows in row_blocks(len(x), self.hidden_size):
            np.add(x[rows], residual[rows], out=out[rows])
            layer_norm_(out[rows], gamma, beta, self.eps)
