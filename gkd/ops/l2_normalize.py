"""out = x / ||x||, row by row."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from gkd.dtype import DType
from gkd.kernel import KernelPlan, KernelSpec, Launch, ceil_div
from gkd.ops.contract import Array, Signature, float_dtype

_NUM_THREADS = 128


@dataclass(frozen=True, slots=True)
class L2Normalize:
    """out = x / max(||x||, eps), each row by itself; a zero row stays zero.

    Shapes:  out, x (num_texts, hidden_size). out may be x.
    Dtypes:  one floating dtype.
    Source:  torch.nn.functional.normalize, whose eps sentence-transformers keeps.
    """

    hidden_size: int
    eps: float = 1e-12

    name: ClassVar[str] = "l2_normalize"

    def check(self, out: Array, x: Array) -> None:
        dtype = float_dtype(self.name, "x", x)
        signature = Signature(self.name)
        signature.match("x", x, ("num_texts", self.hidden_size), dtype)
        signature.match("out", out, ("num_texts", self.hidden_size), dtype)

    def reference(self, out: Array, x: Array) -> None:
        norm = np.sqrt(np.add.reduce(np.square(x), axis=-1, keepdims=True))
        np.divide(x, np.maximum(norm, x.dtype.type(self.eps)), out=out)

    def plan(self, dtype: DType, arch: int) -> KernelPlan:
        defines = (("HIDDEN_SIZE", self.hidden_size), ("NUM_THREADS", _NUM_THREADS))
        spec = KernelSpec(self.name, defines)
        return KernelPlan((spec,), partial(self._launch, spec))

    def _launch(self, spec: KernelSpec, out: Array, x: Array) -> Launch:
        num_rows = x.shape[0]
        return Launch(
            spec, (ceil_div(num_rows, _NUM_THREADS // 32), 1, 1), _NUM_THREADS, (out, x, num_rows, float(self.eps))
        )
