"""Bidirectional self-attention over packed texts of any lengths, without an n x n buffer."""

import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np

from gkd.dtype import DType
from gkd.kernel import KernelPlan, KernelSpec, Launch, TensorMap, ceil_div, dtype_define
from gkd.ops.contract import Array, Signature, float_dtype
from gkd.ops.threads import for_each

AttentionKernel = Literal["auto", "plain", "simt", "mma", "wgmma"]

# Keys are walked in blocks of a fixed width from position 0 of each text, of this one here and of its own in each
# kernel: a text's bits then do not depend on where it lies in the batch.
KEY_BLOCK = 256
# Queries that one pass holds scores for; any width gives the same bits per query only if it is fixed.
_QUERY_BLOCK = 256


@dataclass(frozen=True, slots=True)
class _Tiling:
    """How a kernel cuts a text: a block of threads holds block_q queries and walks the keys by block_k.

    Only block_k is part of the order of sums: another one gives other bits.
    """

    block_q: int
    block_k: int
    constants: tuple[tuple[str, int], ...] = ()
    """MIN_BLOCKS that share an SM and its 65,536 registers: as many as leave a thread enough not to spill."""
    smem_bytes: int = 0
    num_threads: int = 128

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        tile = (("BLOCK_Q", self.block_q), ("BLOCK_K", self.block_k), ("NUM_THREADS", self.num_threads))
        return (*tile, *self.constants, ("SMEM_BYTES", self.smem_bytes))


# A warp a query, a lane a key.
_PLAIN = _Tiling(4, 32)


def _mma_tiling(head_dim: int, arch: int) -> _Tiling:
    """Queries, and two stages of keys and values: 24, 48 and 64 KiB."""
    block_q, block_k = 128, 32 if head_dim == 128 else 64
    # For 12.x, NVRTC 12.9 spills with three.
    min_blocks = 3 if head_dim == 32 and arch < 120 else 2
    smem_bytes = 2 * head_dim * (block_q + 2 * 2 * block_k)
    return _Tiling(block_q, block_k, (("MIN_BLOCKS", min_blocks),), smem_bytes)


def _wgmma_tiling(head_dim: int) -> _Tiling:
    """64 queries a warpgroup, as many of them as registers allow; stages of keys and values: 152 and 160 KiB."""
    num_consumers, num_stages = (3, 4) if head_dim == 64 else (2, 2)
    block_q, block_k = 64 * num_consumers, 128
    smem_bytes = 2 * head_dim * (block_q + 2 * num_stages * block_k) + 8 * (2 + 4 * num_stages)
    return _Tiling(block_q, block_k, (("NUM_STAGES", num_stages),), smem_bytes, 128 * (num_consumers + 1))


def _simt_tiling(head_dim: int, arch: int) -> _Tiling:
    """Queries, keys, values and weights in fp32: at most 87 KiB, and 60 before 8.0, which has 64 for a block."""
    block_q, block_k = 64 if head_dim == 128 else 128, 32 if head_dim == 128 else 64
    if arch < 80 and head_dim > 32:
        block_q //= 2
    padded_rows = (block_q + block_k) * (head_dim + 4) + block_q * (32 + 8)
    return _Tiling(block_q, block_k, (("MIN_BLOCKS", 2),), 4 * (padded_rows + block_k * head_dim))


@dataclass(frozen=True, slots=True)
class Attention:
    """out = softmax(q @ k.T / sqrt(head_dim)) @ v within each text and head.

    Shapes:  out (num_tokens, num_heads * head_dim); qkv (num_tokens, 3 * num_heads * head_dim), a row being
             all queries, all keys, all values; cu_seqlens (num_texts + 1,), from 0 to num_tokens;
             max_seqlen, the longest text's tokens, is a number that the host knows.
    Dtypes:  one floating dtype; int32 cu_seqlens, ascending, which the caller has checked.
    Source:  Milakov & Gimelshein 2018, the running maximum and sum; blocks as in Dao et al. 2022.

    `kernel` is what runs on a GPU: `wgmma` takes 16 bits, head widths of 64 and 128, and compute capability 9.0; `mma`
    16 bits, head widths of 32, 64 and 128, and 8.0 and later; `simt` these widths; `plain` any up to 256; `auto` is the
    first of them that can. Each adds in an order of its own.
    """

    num_heads: int
    head_dim: int
    kernel: AttentionKernel = "auto"

    name: ClassVar[str] = "attention"

    def check(self, out: Array, qkv: Array, cu_seqlens: Array, max_seqlen: int) -> None:
        dtype = float_dtype(self.name, "qkv", qkv)
        hidden_size = self.num_heads * self.head_dim
        signature = Signature(self.name)
        signature.match("qkv", qkv, ("num_tokens", 3 * hidden_size), dtype)
        signature.match("out", out, ("num_tokens", hidden_size), dtype)
        signature.match("cu_seqlens", cu_seqlens, ("num_texts + 1",), DType.I32)

    def reference(self, out: Array, qkv: Array, cu_seqlens: Array, max_seqlen: int) -> None:
        heads = (self.num_heads, self.head_dim)

        def attend(piece: tuple[int, int, int]) -> None:
            start, end, first = piece
            # Views: (3, num_heads, length, head_dim) and (num_heads, length, head_dim).
            query, key, value = qkv[start:end].reshape(-1, 3, *heads).transpose(1, 2, 0, 3)
            context = out[start:end].reshape(-1, *heads).transpose(1, 0, 2)
            queries = slice(first, first + _QUERY_BLOCK)
            self._attend(context[:, queries], query[:, queries], key, value)

        texts = pairwise(cu_seqlens.tolist())
        for_each(attend, [(start, end, first) for start, end in texts for first in range(0, end - start, _QUERY_BLOCK)])

    def plan(self, dtype: DType, arch: int) -> KernelPlan:
        kernel = self._choose(dtype, arch) if self.kernel == "auto" else self.kernel
        tiling = self._tiling(kernel, arch)
        sizes = (("NUM_HEADS", self.num_heads), ("HEAD_DIM", self.head_dim))
        spec = KernelSpec(f"attention_{kernel}", (dtype_define(dtype), *sizes, *tiling.defines))
        scale = 1 / math.sqrt(self.head_dim)
        if kernel in ("mma", "wgmma"):
            scale *= math.log2(math.e)  # their exponentials are powers of two
        return KernelPlan(spec, partial(self._launch_wgmma if kernel == "wgmma" else self._launch, tiling, scale))

    def _choose(self, dtype: DType, arch: int) -> AttentionKernel:
        if self.head_dim not in (32, 64, 128):
            return "plain"
        if dtype not in (DType.F16, DType.BF16) or arch < 80:
            return "simt"
        return "wgmma" if arch == 90 and self.head_dim >= 64 else "mma"

    def _tiling(self, kernel: AttentionKernel, arch: int) -> _Tiling:
        match kernel:
            case "wgmma":
                return _wgmma_tiling(self.head_dim)
            case "mma":
                return _mma_tiling(self.head_dim, arch)
            case "simt":
                return _simt_tiling(self.head_dim, arch)
            case _:
                return _PLAIN

    def _launch(
        self, tiling: _Tiling, scale: float, out: Array, qkv: Array, cu_seqlens: Array, max_seqlen: int
    ) -> Launch:
        arguments = (out, qkv, cu_seqlens, scale)
        return Launch(self._grid(tiling, cu_seqlens, max_seqlen), tiling.num_threads, arguments, tiling.smem_bytes)

    def _launch_wgmma(
        self, tiling: _Tiling, scale: float, out: Array, qkv: Array, cu_seqlens: Array, max_seqlen: int
    ) -> Launch:
        arguments = (out, TensorMap(qkv, 64), TensorMap(qkv, tiling.block_k), cu_seqlens, scale)
        return Launch(self._grid(tiling, cu_seqlens, max_seqlen), tiling.num_threads, arguments, tiling.smem_bytes)

    def _grid(self, tiling: _Tiling, cu_seqlens: Array, max_seqlen: int) -> tuple[int, int, int]:
        return ceil_div(max_seqlen, tiling.block_q), self.num_heads, cu_seqlens.shape[0] - 1

    def _attend(self, context: Array, query: Array, key: Array, value: Array) -> None:
        """One block of queries (num_heads, rows, head_dim) against all keys of its text."""
        dtype = query.dtype.type
        query = query * dtype(1 / math.sqrt(self.head_dim))
        running_max: Array | None = None
        for first in range(0, key.shape[1], KEY_BLOCK):
            keys = slice(first, first + KEY_BLOCK)
            weights = query @ np.ascontiguousarray(key[:, keys].transpose(0, 2, 1))
            block_max = weights.max(axis=-1, keepdims=True)
            new_max = block_max if running_max is None else np.maximum(running_max, block_max)
            weights -= new_max
            np.exp(weights, out=weights)
            block_sum = np.add.reduce(weights, axis=-1, keepdims=True)
            block_context = weights @ value[:, keys]
            if running_max is None:
                running_sum, accumulator = block_sum, block_context
            else:
                correction = np.exp(running_max - new_max)
                running_sum = running_sum * correction + block_sum
                accumulator = accumulator * correction + block_context
            running_max = new_max
        np.divide(accumulator, running_sum, out=context)
