"""Bidirectional self-attention over packed texts of any lengths, without an n x n buffer."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from gkd.dtype import DType, scale_of
from gkd.errors import ShapeError
from gkd.kernel import KernelPlan, KernelSpec, Launch, TensorMap, dtype_define
from gkd.ops.contract import Array, Signature, float_dtype
from gkd.ops.threads import for_each

AttentionKernel = Literal["auto", "plain", "simt", "mma", "wgmma"]

# Keys are walked in blocks of a fixed width from position 0 of each text, of this one here and of its own in each
# kernel: a text's bits then do not depend on where it lies in the batch.
KEY_BLOCK = 256
# Queries that one pass of the reference holds scores for; any width gives the same bits per query only if it is fixed.
_QUERY_BLOCK = 256


@dataclass(frozen=True, slots=True)
class _Tiling:
    """How a kernel cuts a text: a block of threads holds block_q queries and walks the keys by block_k.

    Only block_k is part of the order of sums: another one gives other bits.
    """

    kernel: str
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
_PLAIN = _Tiling("attention_plain", 4, 32)


def _mma_tiling(dtype: DType, head_dim: int, arch: int, has_bias: bool) -> _Tiling:
    """Queries, and two stages of keys and values: 24, 48 and 64 KiB in 16 bits, and 48 and 96 KiB in tf32."""
    # More queries of 128 dimensions: for 12.x NVRTC 12.9 spills, and those of tf32 do not fit into a block's memory.
    small = head_dim == 128 and (arch >= 120 or dtype is DType.TF32)
    block_q, block_k = 64 if small else 128, 32 if head_dim == 128 else 64
    # With a bias, in tf32, and for 12.x NVRTC 12.9 in any case, three spill.
    min_blocks = 3 if head_dim == 32 and arch < 120 and not has_bias and dtype is not DType.TF32 else 2
    smem_bytes = dtype.itemsize * head_dim * (block_q + 2 * 2 * block_k)
    return _Tiling("attention_mma", block_q, block_k, (("MIN_BLOCKS", min_blocks),), smem_bytes)


def _mma_split_tiling(head_dim: int, block_q: int) -> _Tiling:
    """Both parts of queries, and of two stages of keys and values: 40 to 96 KiB, of which an SM of 9.0 holds two."""
    block_k = 32 if head_dim == 128 else 64
    smem_bytes = 2 * 2 * head_dim * (block_q + 2 * 2 * block_k)
    return _Tiling("attention_mma_split", block_q, block_k, (("MIN_BLOCKS", 2),), smem_bytes)


# For short texts 16 queries a warp, and for long ones 32, which share what is read of keys and values. With 128
# dimensions they would not fit into registers, nor with 64 for 8.0 or with a bias.
_MMA_SPLIT = {
    32: (_mma_split_tiling(32, 64), _mma_split_tiling(32, 128)),
    64: (_mma_split_tiling(64, 64), _mma_split_tiling(64, 128)),
    128: (_mma_split_tiling(128, 64),),
}


def _wgmma_tiling(head_dim: int, num_consumers: int, num_stages: int, min_blocks: int) -> _Tiling:
    """64 queries a warpgroup that computes, one warpgroup more that copies; stages of keys and values."""
    block_q, block_k = 64 * num_consumers, 128
    smem_bytes = 2 * head_dim * (block_q + 2 * num_stages * block_k) + 8 * (2 + 4 * num_stages)
    constants = (("NUM_STAGES", num_stages), ("MIN_BLOCKS", min_blocks))
    return _Tiling("attention_wgmma", block_q, block_k, constants, smem_bytes, 128 * (num_consumers + 1))


# For short texts, and for long ones as many warpgroups as registers allow: each block of keys serves more queries.
_WGMMA = {
    64: (_wgmma_tiling(64, 1, num_stages=2, min_blocks=2), _wgmma_tiling(64, 3, num_stages=4, min_blocks=1)),
    128: (_wgmma_tiling(128, 1, num_stages=1, min_blocks=2), _wgmma_tiling(128, 2, num_stages=2, min_blocks=1)),
}


def _simt_tiling(head_dim: int, arch: int) -> _Tiling:
    """Queries, keys, values and weights in fp32: at most 87 KiB, and 60 before 8.0, which has 64 for a block."""
    block_q, block_k = 64 if head_dim == 128 else 128, 32 if head_dim == 128 else 64
    if arch < 80 and head_dim > 32:
        block_q //= 2
    padded_rows = (block_q + block_k) * (head_dim + 4) + block_q * (32 + 8)
    smem_bytes = 4 * (padded_rows + block_k * head_dim)
    return _Tiling("attention_simt", block_q, block_k, (("MIN_BLOCKS", 2),), smem_bytes)


@dataclass(frozen=True, slots=True)
class Attention:
    """out = softmax(q @ k.T / sqrt(head_dim) + b) @ v within each text and head.

    With max_distance, b = bias[head, clip(key - query, -max_distance, max_distance) + max_distance], of places in a
    text: what lies further away is as far as that. Without it there is no bias, and b = 0.

    Shapes:  out (num_tokens, num_heads * head_dim); qkv (num_tokens, 3 * num_heads * head_dim), a row being
             all queries, all keys, all values; work (num_items, 3), see `attention_work`, whose block_q, one of
             `block_sizes`, is a number that the host knows; bias (num_heads, 2 * max_distance + 1). What no item
             names is left as it is.
    Dtypes:  one floating dtype; int32 work, which the caller has checked; bias in the accumulator's, f32 for all but
             f64.
    Source:  Milakov & Gimelshein 2018, the running maximum and sum; blocks as in Dao et al. 2022.

    `kernel` is what runs on a GPU: `wgmma` takes 16 bits, head widths of 64 and 128, compute capability 9.0, and no
    bias; `mma` all but f32, head widths of 32, 64 and 128, and 8.0 and later; `simt` these widths, but no split
    operands; `plain` any up to 256; `auto` is the first of them that can. Each adds in an order of its own.
    """

    num_heads: int
    head_dim: int
    kernel: AttentionKernel = "auto"
    max_distance: int | None = None

    name: ClassVar[str] = "attention"

    def __post_init__(self) -> None:
        if self.kernel == "wgmma" and self.max_distance is not None:
            raise ValueError(f"{self.name}: the kernel `wgmma` takes no bias, expected `auto` or another one")

    def check(self, out: Array, qkv: Array, work: Array, block_q: int, bias: Array | None = None) -> None:
        dtype = float_dtype(self.name, "out", out)
        hidden_size = self.num_heads * self.head_dim
        signature = Signature(self.name)
        signature.match("qkv", qkv, ("num_tokens", 3 * hidden_size), dtype)
        signature.match("out", out, ("num_tokens", hidden_size), dtype)
        signature.match("work", work, ("num_items", 3), DType.I32)
        if self.max_distance is None:
            if bias is not None:
                raise ShapeError(f"{self.name}: `bias` has shape {bias.shape}, expected none without max_distance")
            return
        shape = (self.num_heads, 2 * self.max_distance + 1)
        if bias is None:
            raise ShapeError(f"{self.name}: `bias` is missing, expected {shape}")
        signature.match("bias", bias, shape, dtype.accumulator)

    def block_sizes(self, dtype: DType, arch: int) -> tuple[int, ...]:
        """The block_q that work may have on this compute capability, or, for 0, on the CPU; ascending."""
        return tuple(tiling.block_q for tiling in self._tilings(dtype, arch)) if arch else (_QUERY_BLOCK,)

    def reference(self, out: Array, qkv: Array, work: Array, block_q: int, bias: Array | None = None) -> None:
        heads = (self.num_heads, self.head_dim)

        def attend(piece: tuple[int, int]) -> None:
            item, query_block = piece
            start, length, first_query = work[item].tolist()
            # Views: (3, num_heads, length, head_dim) and (num_heads, length, head_dim).
            query, key, value = qkv[start : start + length].reshape(-1, 3, *heads).transpose(1, 2, 0, 3)
            context = out[start : start + length].reshape(-1, *heads).transpose(1, 0, 2)
            first = first_query + query_block
            queries = slice(first, min(first + _QUERY_BLOCK, first_query + block_q))
            if first < length:
                self._attend(context[:, queries], query[:, queries], key, value, bias, first)

        for_each(attend, [(item, first) for item in range(len(work)) for first in range(0, block_q, _QUERY_BLOCK)])

    def plan(self, dtype: DType, arch: int) -> KernelPlan:
        sizes: tuple[tuple[str, int], ...] = (
            dtype_define(dtype),
            ("NUM_HEADS", self.num_heads),
            ("HEAD_DIM", self.head_dim),
        )
        if self.max_distance is not None:
            sizes = (*sizes, ("MAX_DISTANCE", self.max_distance))
        kernels = {
            tiling.block_q: (KernelSpec(tiling.kernel, (*sizes, *tiling.defines)), tiling)
            for tiling in self._tilings(dtype, arch)
        }
        return KernelPlan(tuple(spec for spec, _ in kernels.values()), partial(self._launch, kernels))

    def _choose(self, dtype: DType, arch: int) -> AttentionKernel:
        if self.head_dim not in (32, 64, 128):
            return "plain"
        if dtype is DType.SPLIT:
            return "mma" if arch >= 80 else "plain"
        if dtype is DType.F32 or arch < 80:
            return "simt"
        # Values are a right operand in columns, which wgmma takes in 16 bits only.
        by_wgmma = arch == 90 and self.head_dim >= 64 and self.max_distance is None and dtype is not DType.TF32
        return "wgmma" if by_wgmma else "mma"

    def _tilings(self, dtype: DType, arch: int) -> tuple[_Tiling, ...]:
        has_bias = self.max_distance is not None
        match self._choose(dtype, arch) if self.kernel == "auto" else self.kernel:
            case "wgmma":
                return _WGMMA[self.head_dim]
            case "mma" if dtype is DType.SPLIT:
                return _MMA_SPLIT[self.head_dim] if arch == 90 and not has_bias else _MMA_SPLIT[self.head_dim][:1]
            case "mma":
                return (_mma_tiling(dtype, self.head_dim, arch, has_bias),)
            case "simt":
                return (_simt_tiling(self.head_dim, arch),)
            case _:
                return (_PLAIN,)

    def _launch(
        self,
        kernels: dict[int, tuple[KernelSpec, _Tiling]],
        out: Array,
        qkv: Array,
        work: Array,
        block_q: int,
        bias: Array | None = None,
    ) -> Launch:
        spec, tiling = kernels[block_q]
        # Products of queries and keys are scaled twice, and what is made of values once.
        scale = 1 / (math.sqrt(self.head_dim) * scale_of(qkv) ** 2)
        inputs: tuple[Any, ...] = (qkv,)
        bias_arguments: tuple[Any, ...] = () if bias is None else (bias,)
        if tiling.kernel in ("attention_mma", "attention_mma_split", "attention_wgmma"):
            if bias is not None:
                bias_arguments = (bias, 1 / scale)  # added to products, before their scale
            scale *= math.log2(math.e)  # their exponentials are powers of two
        if tiling.kernel == "attention_wgmma":
            inputs = (TensorMap(qkv, 64), TensorMap(qkv, tiling.block_k))
        arguments: tuple[Any, ...] = (out, *inputs, work, scale)
        if tiling.kernel in ("attention_plain", "attention_mma_split"):
            arguments = (*arguments, scale_of(out) / scale_of(qkv))
        arguments = (*arguments, *bias_arguments)
        return Launch(spec, (work.shape[0], self.num_heads, 1), tiling.num_threads, arguments, tiling.smem_bytes)

    def _attend(
        self, context: Array, query: Array, key: Array, value: Array, bias: Array | None, first_query: int
    ) -> None:
        """One block of queries (num_heads, rows, head_dim), from first_query on, against all keys of its text."""
        dtype = query.dtype.type
        query = query * dtype(1 / math.sqrt(self.head_dim))
        running_max: Array | None = None
        for first in range(0, key.shape[1], KEY_BLOCK):
            keys = slice(first, first + KEY_BLOCK)
            weights = query @ np.ascontiguousarray(key[:, keys].transpose(0, 2, 1))
            if bias is not None:
                weights += _bias_of_block(bias, weights.shape[1], weights.shape[2], first - first_query)
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


def _bias_of_block(bias: Array, num_rows: int, num_keys: int, first_distance: int) -> Array:
    """Of scores (num_heads, num_rows, num_keys), whose first key is first_distance after the first query."""
    max_distance = bias.shape[1] // 2
    distances = first_distance + np.arange(1 - num_rows, num_keys)
    line = bias[:, np.clip(distances, -max_distance, max_distance) + max_distance]
    # A view: each row's window begins one before that of the row above.
    return sliding_window_view(line, num_keys, axis=1)[:, ::-1]


def attention_items(cu_seqlens: Array, block_q: int) -> Array:
    """(num_texts,): how many items of `attention_work` each text has."""
    return np.asarray(-(-np.diff(cu_seqlens) // block_q))


def attention_work(cu_seqlens: Array, block_q: int) -> Array:
    """What an attention has to do: (num_items, 3) int32, an item for each block_q queries of each text.

    An item is the text's first token, its length, and the first of the queries, counted from the text's first token.
    One of length 0 stands for nothing: it fills up a list.
    """
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    if np.maximum.reduce(lengths) <= block_q:  # an item a text: in a few microseconds
        work = np.zeros((len(lengths), 3), np.int32)
        work[:, 0], work[:, 1] = cu_seqlens[:-1], lengths
        return work
    num_items = attention_items(cu_seqlens, block_q)
    texts = np.repeat(np.arange(len(lengths)), num_items)
    first_item = np.cumsum(num_items) - num_items
    first_query = (np.arange(len(texts)) - first_item[texts]) * block_q
    return np.stack([cu_seqlens[texts], lengths[texts], first_query], axis=1).astype(np.int32)
