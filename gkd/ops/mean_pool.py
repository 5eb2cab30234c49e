"""One vector a text: the mean of the vectors of its tokens."""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar

import numpy as np

from gkd.dtype import DType
from gkd.kernel import KernelPlan, KernelSpec, Launch, ceil_div
from gkd.ops.contract import Array, Signature, float_dtype

# Tokens that are added up together, from position 0 of each text; the sums are then added in order. Two levels
# keep the rounding of 8192 tokens to that of 64 + 128 additions.
_TOKEN_BLOCK = 64
_NUM_THREADS = 128


@dataclass(frozen=True, slots=True)
class MeanPool:
    """out[i] = the mean of all tokens of text i, specials included.

    Shapes:  out (max_texts, hidden_size), hidden (num_tokens, hidden_size), cu_seqlens (max_texts + 1,). Of an empty
             text, which fills up a list, nothing is written.
    Dtypes:  one floating dtype; int32 cu_seqlens, ascending, which the caller has checked.
    """

    hidden_size: int

    name: ClassVar[str] = "mean_pool"

    def check(self, out: Array, hidden: Array, cu_seqlens: Array) -> None:
        dtype = float_dtype(self.name, "hidden", hidden)
        signature = Signature(self.name)
        signature.match("hidden", hidden, ("num_tokens", self.hidden_size), dtype)
        signature.match("out", out, (cu_seqlens.shape[0] - 1, self.hidden_size), dtype)
        signature.match("cu_seqlens", cu_seqlens, ("max_texts + 1",), DType.I32)

    def reference(self, out: Array, hidden: Array, cu_seqlens: Array) -> None:
        for text, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
            if start < end:
                sums = np.add.reduceat(hidden[start:end], range(0, end - start, _TOKEN_BLOCK), axis=0)
                np.divide(np.add.reduce(sums, axis=0), out.dtype.type(end - start), out=out[text])

    def plan(self, dtype: DType, arch: int) -> KernelPlan:
        defines = (("HIDDEN_SIZE", self.hidden_size), ("TOKEN_BLOCK", _TOKEN_BLOCK), ("NUM_THREADS", _NUM_THREADS))
        spec = KernelSpec(self.name, defines)
        return KernelPlan((spec,), partial(self._launch, spec))

    def _launch(self, spec: KernelSpec, out: Array, hidden: Array, cu_seqlens: Array) -> Launch:
        grid = (ceil_div(self.hidden_size, _NUM_THREADS), cu_seqlens.shape[0] - 1, 1)
        return Launch(spec, grid, _NUM_THREADS, (out, hidden, cu_seqlens))
