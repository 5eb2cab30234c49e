"""out = activation(x @ weight.T + bias)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal

import numpy as np

from gkd.ops.contract import Array, Signature, float_dtype
from gkd.ops.gelu import gelu_

Activation = Literal["none", "gelu"]

# Rows of one BLAS call, largest first. Short inputs take a small block, long ones a block that BLAS is fast at.
_BLOCK_ROWS = (256, 128, 64, 32, 16, 8, 4)


@dataclass(frozen=True, slots=True)
class Linear:
    """out = activation(x @ weight.T + bias), a row's bits independent of the other rows and of its place.

    Shapes:  out (num_tokens, out_features), x (num_tokens, in_features),
             weight (out_features, in_features), bias (out_features,).
    Dtypes:  one floating dtype throughout.
    """

    in_features: int
    out_features: int
    activation: Activation = "none"

    name: ClassVar[str] = "linear"

    def check(self, out: Array, x: Array, weight: Array, bias: Array) -> None:
        dtype = float_dtype(self.name, "x", x)
        signature = Signature(self.name)
        signature.match("x", x, ("num_tokens", self.in_features), dtype)
        signature.match("out", out, ("num_tokens", self.out_features), dtype)
        signature.match("weight", weight, (self.out_features, self.in_features), dtype)
        signature.match("bias", bias, (self.out_features,), dtype)

    def reference(self, out: Array, x: Array, weight: Array, bias: Array) -> None:
        blocks = invariant_block_rows(self.in_features, self.out_features) if x.dtype == np.float32 else (256,)
        for start, end, rows in _row_blocks(len(x), blocks):
            if end - start == rows:
                np.matmul(x[start:end], weight.T, out=out[start:end])
            else:
                padded = np.zeros((rows, self.in_features), x.dtype)
                padded[: end - start] = x[start:end]
                out[start:end] = (padded @ weight.T)[: end - start]
            out[start:end] += bias
            if self.activation == "gelu":
                gelu_(out[start:end])


def _row_blocks(num_rows: int, block_rows: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """(start, end, rows of the product): the largest blocks that fill, then the smallest that holds the rest."""
    start = 0
    while start < num_rows:
        left = num_rows - start
        rows = next((rows for rows in reversed(block_rows) if rows >= left), block_rows[0])
        yield start, min(start + rows, num_rows), rows
        start += rows


@cache
def invariant_block_rows(in_features: int, out_features: int) -> tuple[int, ...]:
    """Block sizes, largest first, in which a row gets the same bits wherever it stands, on this machine's BLAS.

    A BLAS may add up a row in another order for another number of rows, or at another place among them:
    OpenBLAS does with its AVX2 kernels (from 32 rows on) and does not with its AVX-512 ones. The order depends
    on shapes and never on values, so random operands show it. The largest size that is unmoved by a rotation of
    its rows sets the bits; smaller ones must reproduce them. A single row, a matrix-vector product, always does.
    """
    rng = np.random.default_rng(0)
    x = rng.random((_BLOCK_ROWS[0], in_features), dtype=np.float32)
    weight = rng.random((out_features, in_features), dtype=np.float32)
    invariant: list[int] = []
    for rows in _BLOCK_ROWS:
        if not invariant:
            product = x[:rows] @ weight.T
            # 5 has no factor in common with any block size, so a rotation by it links every place with every other.
            if np.array_equal(np.roll(product, 5, axis=0), np.roll(x[:rows], 5, axis=0) @ weight.T):
                invariant.append(rows)
        elif np.array_equal(product[5 : 5 + rows], x[5 : 5 + rows] @ weight.T):
            invariant.append(rows)
    return tuple(invariant) or (1,)
