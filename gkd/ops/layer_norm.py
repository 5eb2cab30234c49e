"""The LayerNorm that ends two fused operators: biased variance in two passes, eps inside the root."""

from collections.abc import Iterator

import numpy as np

from gkd.ops.contract import Array

# Elements of the rows worked on at once: input, output and squares stay in a core's L2 cache.
_BLOCK = 32768


def row_blocks(num_rows: int, row_size: int) -> Iterator[slice]:
    """Slices of whole rows whose elements fit the cache."""
    rows = max(1, _BLOCK // row_size)
    for start in range(0, num_rows, rows):
        yield slice(start, min(start + rows, num_rows))


def layer_norm_(x: Array, gamma: Array, beta: Array, eps: float) -> None:
    """x = (x - mean) / sqrt(var + eps) * gamma + beta in place, each row by itself."""
    size = x.dtype.type(x.shape[-1])
    x -= np.add.reduce(x, axis=-1, keepdims=True) / size
    variance = np.add.reduce(np.square(x), axis=-1, keepdims=True) / size
    x /= np.sqrt(variance + x.dtype.type(eps))
    x *= gamma
    x += beta
