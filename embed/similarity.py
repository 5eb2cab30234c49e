"""How alike vectors are, by the measures that model directories name."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from embed.pipeline import SIMILARITIES, Similarity


def similarity(left: ArrayLike, right: ArrayLike, kind: Similarity = "cosine") -> NDArray[np.float32]:
    """Of each vector of `left` with each of `right`, (num_left, num_right); larger is more alike.

    Shapes:  left (num_left, dim), right (num_right, dim), or (dim,) for a single one.
    Source:  sentence-transformers: distances, euclidean and manhattan, are negative.
    """
    a, b = (np.atleast_2d(np.asarray(vectors, np.float32)) for vectors in (left, right))
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"vectors of shapes {a.shape} and {b.shape} cannot be compared")
    match kind:
        case "cosine":
            return _unit(a) @ _unit(b).T
        case "dot":
            return a @ b.T
        case "euclidean":
            return np.stack([-np.linalg.norm(row - b, axis=1) for row in a])
        case "manhattan":
            return np.stack([-np.abs(row - b).sum(axis=1) for row in a])
    raise ValueError(f"similarity {kind!r}: expected one of {', '.join(SIMILARITIES)}")


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12)))
