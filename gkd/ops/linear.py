"""out = activation(x @ weight.T + bias)."""

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, Literal

import numpy as np

from gkd.dtype import DType, dtype_of, scale_of
from gkd.kernel import KernelPlan, KernelSpec, Launch, TensorMap, ceil_div, dtype_define
from gkd.ops.blocks import row_blocks
from gkd.ops.contract import Array, Signature, float_dtype
from gkd.ops.gelu import gelu_
from gkd.ops.threads import for_each, num_cores

Activation = Literal["none", "gelu", "tanh"]
LinearKernel = Literal["auto", "simt", "mma", "wgmma"]

# Rows of one BLAS call: a short input takes a small block, a long one the block that BLAS is fast at.
_BLOCK_ROWS = (256, 128, 64, 32, 16, 8, 4)
# Up to here a product takes its time from the weights, which several cores share by columns; above, they share rows.
_SPLIT_ROWS = 64


@dataclass(frozen=True, slots=True)
class _Tiling:
    """How a kernel cuts the product: a block of threads computes block_m x block_n results. Only CHUNK_K sets bits."""

    kernel: str
    block_m: int
    block_n: int
    num_threads: int
    constants: tuple[tuple[str, int], ...]
    smem_bytes: int = 0
    slices: int = 0
    """Of a box of its tensor maps."""

    def defines(self, dtype: DType) -> tuple[tuple[str, int], ...]:
        tile = (("BLOCK_M", self.block_m), ("BLOCK_N", self.block_n), ("NUM_THREADS", self.num_threads))
        depth = (("BLOCK_K", _ROW_BYTES // dtype.itemsize),) if self.kernel == "linear_mma" else ()
        return (*tile, *self.constants, *depth)


# Of K, in the stages of the kernels for tensor cores: what a swizzle takes.
_ROW_BYTES = 128


# CHUNK_K is part of the order of the sums, which every fp32 kernel follows: one chain over a K of 1024 to 4096 would be
# 3 to 5 times less exact than sums of chains of 64, which are about as exact as cuBLAS.
_SIMT = _Tiling("linear_simt", 128, 64, 128, (("CHUNK_K", 64),))


def _mma_tiling(block: tuple[int, int], warp: tuple[int, int], num_stages: int) -> _Tiling:
    """Blocks of (m, n) results, (m, n) of them a warp, from so many stages."""
    (block_m, block_n), (warp_m, warp_n) = block, warp
    num_warps = max(4, block_m * block_n // (warp_m * warp_n))
    constants = (("WARP_M", warp_m), ("WARP_N", warp_n), ("NUM_STAGES", num_stages))
    smem_bytes = num_stages * (block_m + block_n) * _ROW_BYTES
    return _Tiling("linear_mma", block_m, block_n, num_warps * 32, constants, smem_bytes)


# 96 KiB of stages. Of compute capability 9.0 two blocks share an SM, so that one computes while the other waits for its
# first tile or stores its results; 8.6, 8.9 and 12.x give a block 99 KiB and hold one.
_MMA = _mma_tiling((128, 128), (64, 64), num_stages=3)
# Of compute capability 10.0 NVRTC 13.0 spills a register with three stages, for K = 384; an SM there has room for four.
_MMA_SM100 = _mma_tiling((128, 128), (64, 64), num_stages=4)
# For at most so many rows, tiles that give every SM a share of the weights, and as much of it under way at once as
# memory takes: 64 to 96 KiB of stages.
_MMA_FEW_ROWS = (
    (16, _mma_tiling((16, 16), (16, 16), num_stages=16)),
    (64, _mma_tiling((64, 16), (16, 16), num_stages=8)),
    (128, _mma_tiling((64, 32), (32, 16), num_stages=8)),
    (512, _mma_tiling((64, 64), (32, 32), num_stages=6)),
)


def _wgmma_tiling(num_stages: int, result_bytes: int) -> _Tiling:
    """Stages of x and weight, two consumers' results of so many bytes, and the barriers of the stages: 224 KiB."""
    block_m, block_n = 128, 128
    smem_bytes = num_stages * (block_m + block_n) * _ROW_BYTES + 2 * block_m * block_n * result_bytes
    smem_bytes += 16 * (num_stages + 1)
    constants = (("NUM_STAGES", num_stages), ("SMEM_BYTES", smem_bytes))
    return _Tiling("linear_wgmma", block_m, block_n, 384, constants, smem_bytes)


_WGMMA = _wgmma_tiling(num_stages=5, result_bytes=2)
# Results of 4 bytes leave from registers.
_WGMMA_TF32 = _wgmma_tiling(num_stages=7, result_bytes=0)


def _wgmma_split_tiling(block_m: int, block_n: int, num_stages: int, min_blocks: int) -> _Tiling:
    """Stages of both parts of x and of the weights, and their barriers; a warpgroup computes 64 rows."""
    smem_bytes = num_stages * (2 * (block_m + block_n) * 128 + 16)
    constants = (("NUM_STAGES", num_stages), ("MIN_BLOCKS", min_blocks), ("SMEM_BYTES", smem_bytes))
    num_threads = 128 * (block_m // 64 + 1)
    return _Tiling("linear_wgmma_split", block_m, block_n, num_threads, constants, smem_bytes)


_WGMMA_SPLIT = _wgmma_split_tiling(128, 128, num_stages=3, min_blocks=1)

# What follows is for so few rows that a product takes its time from the weights. Then each SM should read a part of
# them, and begin while the kernel before still runs: two blocks of half its memory share it.
_FEW_ROWS = (16, 32, 64, 128, 256)
_FEW_SPLIT_ROWS, _SOME_SPLIT_ROWS = (16, 64), (128, 256)
_FEW_COLUMNS = (8, 16, 32, 64)
_FEW_BLOCKS = 132  # the SMs of an H200
_FEW_SMEM_BYTES = 113 << 10


def _few_columns(out_features: int, row_blocks: int, most: int) -> int:
    """As few columns a block as there are SMs for."""
    blocks = ((columns, row_blocks * ceil_div(out_features, columns)) for columns in _FEW_COLUMNS)
    return min(next((columns for columns, num_blocks in blocks if num_blocks <= _FEW_BLOCKS), most), most)


def _few_tiling(row_bytes: int, out_features: int, max_rows: int) -> _Tiling:
    """Stages of some slices of rows of x and weight. A warp computes 8 columns, or a warpgroup 64 rows."""
    block_m, num_slices_k = min(64, max_rows), row_bytes // _ROW_BYTES
    block_n = _few_columns(out_features, ceil_div(max_rows, block_m), 64)
    slice_bytes = (block_m + block_n) * _ROW_BYTES
    # A copy costs the copy engine 50 to 100 cycles however small it is; some stages have to be under way.
    fitting = (n for n in (4, 2) if num_slices_k % n == 0 and 4 * n * slice_bytes <= _FEW_SMEM_BYTES)
    num_slices = next(fitting, 1)
    num_stages = min(num_slices_k // num_slices, _FEW_SMEM_BYTES // (num_slices * slice_bytes + 16))
    smem_bytes = num_stages * (num_slices * slice_bytes + 16)
    num_warps = 4 if block_m == 64 else block_n // 8
    constants = (("NUM_SLICES", num_slices), ("NUM_STAGES", num_stages), ("SMEM_BYTES", smem_bytes))
    return _Tiling("linear_few", block_m, block_n, 32 * (num_warps + 2), constants, smem_bytes, num_slices)


def _few_split_tiling(in_features: int, out_features: int, max_rows: int) -> _Tiling:
    """Warps take turns with the chunks of 64 columns of K: memory for a chunk of x each, the rest for weights."""
    block_m, num_chunks = 16, in_features // 64
    block_n = _few_columns(out_features, ceil_div(max_rows, block_m), 32)
    num_warps = min(12 if block_n == 8 else 8, num_chunks)
    warp_bytes, weight_bytes = block_m * (256 + block_n * 4) + 32, block_n * 256 + 16
    fitting = (_FEW_SMEM_BYTES // num_warps - warp_bytes) // weight_bytes
    num_rounds = max(1, min(fitting, ceil_div(num_chunks, num_warps)))
    smem_bytes = num_warps * (warp_bytes + num_rounds * weight_bytes)
    constants = (("NUM_WARPS", num_warps), ("NUM_ROUNDS", num_rounds), ("SMEM_BYTES", smem_bytes))
    return _Tiling("linear_few_split", block_m, block_n, 32 * (num_warps + block_n // 8 + 2), constants, smem_bytes)


def _some_split_tiling(out_features: int, max_rows: int) -> _Tiling:
    """As for many rows, with a warpgroup a block."""
    block_m, block_n = 64, _few_columns(out_features, ceil_div(max_rows, 64), 64)
    num_stages = _FEW_SMEM_BYTES // (2 * (block_m + block_n) * 128 + 16)
    return _wgmma_split_tiling(block_m, block_n, num_stages, min_blocks=2)


@dataclass(frozen=True, slots=True)
class Linear:
    """out = activation(x @ weight.T + bias), a row's bits independent of the other rows and of its place.

    Shapes:  out (max_rows, out_features), x (max_rows, in_features),
             weight (out_features, in_features), bias (out_features,);
             num_rows (1,): so many first rows are computed, and what the others of out hold is undefined.
    Dtypes:  one floating dtype; bias in its accumulator's, f32 for 16 bits; int32 num_rows. With `to_sum`, out is what
             is added to something, and not an operand again: f32 where operands are split or tf32.

    `kernel` is what runs on a GPU: `wgmma` takes 16 bits and tf32, rows of x of whole 16 bytes, or split operands,
    in_features % 64 == 0, out_features % 8 == 0, and compute capability 9.0; `mma` 16 bits and tf32, rows of x of whole
    16 bytes, and 8.0 and later; `simt` anything but split operands; `auto` is the first of them that can, with kernels
    of its own for few rows on 9.0.
    All but `simt`, which adds in another order, give the same bits. The activation `tanh` is `simt`'s alone.
    """

    in_features: int
    out_features: int
    activation: Activation = "none"
    to_sum: bool = False
    kernel: LinearKernel = "auto"

    name: ClassVar[str] = "linear"

    def __post_init__(self) -> None:
        if self.activation == "tanh" and self.kernel not in ("auto", "simt"):
            raise ValueError(f"linear: the kernel {self.kernel} has no tanh")

    def check(self, out: Array, x: Array, weight: Array, bias: Array, num_rows: Array) -> None:
        dtype = float_dtype(self.name, "x", x)
        signature = Signature(self.name)
        signature.match("x", x, ("max_rows", self.in_features), dtype)
        signature.match("out", out, ("max_rows", self.out_features), dtype.summand if self.to_sum else dtype)
        signature.match("weight", weight, (self.out_features, self.in_features), dtype)
        signature.match("bias", bias, (self.out_features,), dtype.accumulator)
        signature.match("num_rows", num_rows, (1,), DType.I32)

    def reference(self, out: Array, x: Array, weight: Array, bias: Array, num_rows: Array) -> None:
        x, out = x[: num_rows[0]], out[: num_rows[0]]

        def compute(piece: tuple[int, int, slice]) -> None:
            start, rows, columns = piece
            inputs, outputs = x[start : start + rows], out[start : start + rows, columns]
            self._product(outputs, inputs, weight[columns], rows)
            for part in row_blocks(*outputs.shape):
                values = outputs[part] + bias[columns]
                if self.activation == "gelu":
                    gelu_(values)
                elif self.activation == "tanh":
                    np.tanh(values, out=values)
                outputs[part] = values

        for_each(compute, self._pieces(len(x)) if x.dtype == np.float32 else [(0, len(x), slice(None))])

    def plan(self, dtype: DType, arch: int) -> KernelPlan:
        sizes = (("IN_FEATURES", self.in_features), ("OUT_FEATURES", self.out_features))
        constants: tuple[tuple[str, int], ...] = (dtype_define(dtype), *sizes, ("GELU", int(self.activation == "gelu")))
        if dtype.summand is not dtype:
            constants = (*constants, ("TO_SUM", int(self.to_sum)))
        if self.activation == "tanh":
            constants = (*constants, ("TANH", 1))
        kernels = [
            (max_rows, KernelSpec(tiling.kernel, (*constants, *tiling.defines(dtype))), tiling)
            for max_rows, tiling in self._tilings(dtype, arch)
        ]
        return KernelPlan(tuple(dict.fromkeys(spec for _, spec, _ in kernels)), partial(self._launch, kernels))

    def _tilings(self, dtype: DType, arch: int) -> tuple[tuple[float, _Tiling], ...]:
        """Each with the most rows that it is used for."""
        many = _WGMMA_TF32 if dtype is DType.TF32 else _WGMMA
        row_bytes = self.in_features * dtype.itemsize
        match self._choose(dtype, arch) if self.kernel == "auto" else self.kernel:
            case "wgmma" if dtype is DType.SPLIT and self.kernel == "wgmma":
                return ((math.inf, _WGMMA_SPLIT),)
            case "wgmma" if dtype is DType.SPLIT:
                sizes = (self.in_features, self.out_features)
                few = ((rows, _few_split_tiling(*sizes, rows)) for rows in _FEW_SPLIT_ROWS)
                some = ((rows, _some_split_tiling(self.out_features, rows)) for rows in _SOME_SPLIT_ROWS)
                return (*few, *some, (math.inf, _WGMMA_SPLIT))
            case "wgmma" if self.kernel == "wgmma":
                return ((math.inf, many),)
            case "wgmma" if row_bytes % _ROW_BYTES != 0:
                return (*_MMA_FEW_ROWS, (math.inf, many))
            case "wgmma":
                few = ((rows, _few_tiling(row_bytes, self.out_features, rows)) for rows in _FEW_ROWS)
                return (*few, *(entry for entry in _MMA_FEW_ROWS if entry[0] > _FEW_ROWS[-1]), (math.inf, many))
            case "mma":
                return (*_MMA_FEW_ROWS, (math.inf, _MMA_SM100 if 100 <= arch < 120 else _MMA))
            case _:
                return ((math.inf, _SIMT),)

    def takes_split(self, arch: int) -> bool:
        """Whether there is a kernel for split operands of these sizes."""
        return arch == 90 and self.in_features % 64 == 0 and self.out_features % 8 == 0

    def _choose(self, dtype: DType, arch: int) -> LinearKernel:
        if dtype is DType.SPLIT:
            return "wgmma"
        if dtype not in (DType.F16, DType.BF16, DType.TF32) or arch < 80 or self.activation == "tanh":
            return "simt"
        if self.in_features * dtype.itemsize % 16 != 0:
            return "simt"
        return "wgmma" if arch == 90 and self.out_features % 8 == 0 else "mma"

    def _launch(
        self,
        kernels: list[tuple[float, KernelSpec, _Tiling]],
        out: Array,
        x: Array,
        weight: Array,
        bias: Array,
        num_rows: Array,
    ) -> Launch:
        spec, tiling = next((spec, tiling) for max_rows, spec, tiling in kernels if x.shape[0] <= max_rows)
        num_tiles = ceil_div(x.shape[0], tiling.block_m) * ceil_div(self.out_features, tiling.block_n)
        persistent = tiling.kernel.startswith("linear_wgmma")
        matrices: tuple[Any, ...] = (out, x, weight)
        if persistent or tiling.kernel.startswith("linear_few"):
            maps = (TensorMap(x, tiling.block_m, tiling.slices), TensorMap(weight, tiling.block_n, tiling.slices))
            out_by_map = tiling.kernel == "linear_wgmma" and dtype_of(x) is not DType.TF32
            matrices = (TensorMap(out, tiling.block_m) if out_by_map else out, *maps)
        arguments = (*matrices, bias, num_rows)
        if tiling.kernel.endswith("_split"):
            arguments = (*arguments, 1 / (scale_of(x) * scale_of(weight)), scale_of(out))
        return Launch(spec, (num_tiles, 1, 1), tiling.num_threads, arguments, tiling.smem_bytes, persistent)

    def _pieces(self, num_rows: int) -> list[tuple[int, int, slice]]:
        """(first row, rows, columns) of each product: enough for every core, of block sizes that keep the bits."""
        blocks, num_column_pieces = invariant_products(self.in_features, self.out_features)
        share = max(_SPLIT_ROWS, ceil_div(num_rows, num_cores()))
        blocks = tuple(rows for rows in blocks if rows <= share) or blocks[-1:]
        if num_rows > blocks[0]:
            num_column_pieces = 1
        width = ceil_div(self.out_features, num_column_pieces)
        columns = [slice(first, min(first + width, self.out_features)) for first in range(0, self.out_features, width)]
        pieces, start = [], 0
        while start < num_rows:
            rows = next((rows for rows in reversed(blocks) if rows >= num_rows - start), blocks[0])
            pieces += [(start, rows, piece) for piece in columns]
            start += rows
        return pieces

    def _product(self, out: Array, x: Array, weight: Array, rows: int) -> None:
        """out = x @ weight.T, as a product of exactly `rows` rows."""
        if len(x) == rows:
            np.matmul(x, weight.T, out=out)
        else:
            padded = np.zeros((rows, self.in_features), x.dtype)
            padded[: len(x)] = x
            out[:] = (padded @ weight.T)[: len(x)]


@cache
def invariant_products(in_features: int, out_features: int) -> tuple[tuple[int, ...], int]:
    """How a product may be cut so that a row gets the same bits however it is, on this machine's BLAS.

    Returns the numbers of rows of a block, largest first, and into how many pieces the columns of a block of at most
    _SPLIT_ROWS rows may go: as many as there are cores, or 1.

    A BLAS may add up a row in another order for another number of rows, or at another place among them: OpenBLAS
    does with its AVX2 kernels and does not with its AVX-512 ones. The order depends on shapes and never on values, so
    random operands show it. The largest block that is unmoved by a rotation of its rows sets the bits; the others must
    reproduce them. A single row, a matrix-vector product, always does.
    """
    rng = np.random.default_rng(0)
    x = rng.random((_BLOCK_ROWS[0], in_features), dtype=np.float32)
    weight = rng.random((out_features, in_features), dtype=np.float32)
    width = ceil_div(out_features, num_cores())
    blocks: list[int] = []
    same_by_columns: list[bool] = []

    def probe(_: None) -> None:
        for rows in _BLOCK_ROWS:
            if not blocks:
                expected = x[:rows] @ weight.T
                # 5 has no factor in common with any size, so a rotation by it links every place with every other.
                if np.array_equal(np.roll(expected, 5, axis=0), np.roll(x[:rows], 5, axis=0) @ weight.T):
                    blocks.append(rows)
            elif np.array_equal(expected[5 : 5 + rows], x[5 : 5 + rows] @ weight.T):
                blocks.append(rows)
            if blocks and rows == blocks[-1] and rows <= _SPLIT_ROWS:
                by_columns = [x[:rows] @ weight[first : first + width].T for first in range(0, out_features, width)]
                same_by_columns.append(np.array_equal(np.concatenate(by_columns, axis=1), expected[:rows]))

    for_each(probe, [None])
    return tuple(blocks) or (1,), num_cores() if same_by_columns and all(same_by_columns) else 1
