"""One vector a text from the vectors of its tokens."""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal, get_args

import numpy as np

from gkd.dtype import DType
from gkd.kernel import KernelPlan, KernelSpec, Launch, ceil_div, dtype_define
from gkd.ops.contract import Array, Signature, float_dtype

PoolMode = Literal["cls", "mean"]
POOL_MODES: tuple[PoolMode, ...] = get_args(PoolMode)

# Tokens that are added up together, from position 0 of each text; the sums are then added in order. Two levels
# keep the rounding of 8192 tokens to that of 64 + 128 additions.
_TOKEN_BLOCK = 64
_NUM_THREADS = 128


@dataclass(frozen=True, slots=True)
class Pool:
    """out[i] = the first token of text i (`cls`), or the mean of all its tokens, specials included (`mean`).

    Shapes:  out (num_texts, hidden_size), hidden (num_tokens, hidden_size), cu_seqlens (num_texts + 1,).
    Dtypes:  one floating dtype for hidden, its accumulator's for out, f32 for 16 bits; int32 cu_seqlens, strictly
             ascending, which the caller has checked.
    """

    hidden_size: int
    mode: PoolMode

    name: ClassVar[str] = "pool"

    def check(self, out: Array, hidden: Array, cu_seqlens: Array) -> None:
        dtype = float_dtype(self.name, "hidden", hidden)
        signature = Signature(self.name)
        signature.match("hidden", hidden, ("num_tokens", self.hidden_size), dtype)
        signature.match("out", out, (cu_seqlens.shape[0] - 1, self.hidden_size), dtype.accumulator)
        signature.match("cu_seqlens", cu_seqlens, ("num_texts + 1",), DType.I32)

    def reference(self, out: Array, hidden: Array, cu_seqlens: Array) -> None:
        if self.mode == "cls":
            out[:] = hidden[cu_seqlens[:-1]]
            return
        for text, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
            sums = np.add.reduceat(hidden[start:end], range(0, end - start, _TOKEN_BLOCK), axis=0)
            np.divide(np.add.reduce(sums, axis=0), out.dtype.type(end - start), out=out[text])

    def plan(self, dtype: DType, arch: int) -> KernelPlan:
        defines = (
            dtype_define(dtype),
            ("HIDDEN_SIZE", self.hidden_size),
            ("TOKEN_BLOCK", _TOKEN_BLOCK),
            ("NUM_THREADS", _NUM_THREADS),
        )
        return KernelPlan(KernelSpec(f"pool_{self.mode}", defines), self._launch)

    def _launch(self, out: Array, hidden: Array, cu_seqlens: Array) -> Launch:
        grid = (ceil_div(self.hidden_size, _NUM_THREADS), cu_seqlens.shape[0] - 1, 1)
        return Launch(grid, _NUM_THREADS, (out, hidden, cu_seqlens))
