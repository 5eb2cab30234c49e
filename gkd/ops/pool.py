"""One vector a text, of the vectors of its tokens."""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from gkd.dtype import DType
from gkd.kernel import KernelPlan, KernelSpec, Launch, ceil_div
from gkd.ops.contract import Array, Signature, float_dtype

PoolMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
POOL_MODES: tuple[PoolMode, ...] = get_args(PoolMode)

# Tokens that are added up together, from the first pooled one of each text; the sums are then added in order. Two
# levels keep the rounding of 8192 tokens to that of 64 + 128 additions.
_TOKEN_BLOCK = 64
_NUM_THREADS = 128


@dataclass(frozen=True, slots=True)
class Pool:
    """Block `index` of out[i] = the tokens of text i from its first pooled one on, special tokens included, as one.

    cls is the first of them, lasttoken the last; max, mean and the rest go by columns: mean_sqrt_len_tokens is the
    sum over the root of their number, weightedmean the mean with the place in the text, from 1, as the weight.

    Shapes:  out (max_texts, num_blocks * hidden_size), hidden (num_tokens, hidden_size), cu_seqlens (max_texts + 1,),
             first_pooled (max_texts,), below the text's length. Of an empty text, which fills up a list, nothing is
             written.
    Dtypes:  one floating dtype; int32 cu_seqlens, ascending, and first_pooled, which the caller has checked.
    Source:  sentence-transformers' Pooling.
    """

    hidden_size: int
    mode: PoolMode = "mean"
    num_blocks: int = 1
    index: int = 0

    name: ClassVar[str] = "pool"

    def check(self, out: Array, hidden: Array, cu_seqlens: Array, first_pooled: Array) -> None:
        dtype = float_dtype(self.name, "hidden", hidden)
        signature = Signature(self.name)
        signature.match("hidden", hidden, ("num_tokens", self.hidden_size), dtype)
        signature.match("first_pooled", first_pooled, ("max_texts",), DType.I32)
        signature.match("out", out, ("max_texts", self.num_blocks * self.hidden_size), dtype)
        signature.match("cu_seqlens", cu_seqlens, (first_pooled.shape[0] + 1,), DType.I32)

    def reference(self, out: Array, hidden: Array, cu_seqlens: Array, first_pooled: Array) -> None:
        block = out[:, self.index * self.hidden_size : (self.index + 1) * self.hidden_size]
        for text, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
            if start < end:
                block[text] = self._pool(hidden[start:end], int(first_pooled[text]))

    def _pool(self, rows: Array, first: int) -> Any:
        rows, dtype = rows[first:], rows.dtype.type
        match self.mode:
            case "cls":
                return rows[0]
            case "lasttoken":
                return rows[-1]
            case "max":
                return np.maximum.reduce(rows, axis=0)
            case "weightedmean":
                places = np.arange(first + 1, first + len(rows) + 1)
                return self._sum(rows * places.astype(dtype)[:, None]) / dtype(places.sum())
            case "mean_sqrt_len_tokens":
                return self._sum(rows) / np.sqrt(dtype(len(rows)))
            case _:
                return self._sum(rows) / dtype(len(rows))

    def _sum(self, rows: Array) -> Array:
        return np.asarray(np.add.reduce(np.add.reduceat(rows, range(0, len(rows), _TOKEN_BLOCK), axis=0), axis=0))

    def plan(self, dtype: DType, arch: int) -> KernelPlan:
        width, column = self.num_blocks * self.hidden_size, self.index * self.hidden_size
        sizes = (("HIDDEN_SIZE", self.hidden_size), ("OUT_WIDTH", width), ("FIRST_COLUMN", column))
        blocks = (("TOKEN_BLOCK", _TOKEN_BLOCK), ("NUM_THREADS", _NUM_THREADS))
        spec = KernelSpec(self.name, ((f"MODE_{self.mode.upper()}", 1), *sizes, *blocks))
        return KernelPlan((spec,), partial(self._launch, spec))

    def _launch(self, spec: KernelSpec, out: Array, hidden: Array, cu_seqlens: Array, first_pooled: Array) -> Launch:
        grid = (ceil_div(self.hidden_size, _NUM_THREADS), first_pooled.shape[0], 1)
        return Launch(spec, grid, _NUM_THREADS, (out, hidden, cu_seqlens, first_pooled))
