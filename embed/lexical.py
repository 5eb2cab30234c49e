"""Sparse and late-interaction vectors, as BGE-M3 has them, and how texts are compared by them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Output = Literal["dense", "sparse", "colbert"]
OUTPUTS: tuple[Output, ...] = get_args(Output)

Lexical = Mapping[int, float]
"""Weight of each token id that a text holds."""


@dataclass(frozen=True, slots=True)
class Embeddings:
    """What was asked for of a list of texts, from one forward; None for what was not."""

    dense: NDArray[np.float32] | None
    """(num_texts, dim)"""
    sparse: list[dict[int, float]] | None
    """Of each text the weights above 0 of its token ids, special tokens left out."""
    colbert: list[NDArray[np.float32]] | None
    """Of each text one vector of length 1 for each token but the first, (num_tokens - 1, colbert_dim)."""


def lexical_weights(ids: NDArray[np.int32], weights: NDArray[np.float32], left_out: frozenset[int]) -> dict[int, float]:
    """The largest weight of each token id, (num_tokens,) both, without those that are 0 and those `left_out`."""
    unique, places = np.unique(ids, return_inverse=True)
    largest = np.zeros(len(unique), np.float32)
    np.maximum.at(largest, places, weights)
    return {
        int(token): float(weight)
        for token, weight in zip(unique, largest, strict=True)
        if weight > 0 and int(token) not in left_out
    }


def lexical_score(query: Lexical, passage: Lexical) -> float:
    """The sum of products of weights over common token ids."""
    return float(sum(weight * passage[token] for token, weight in query.items() if token in passage))


def colbert_score(query: NDArray[np.float32], passage: NDArray[np.float32]) -> float:
    """The mean, over the query's tokens, of the largest product with a token of the passage; 0 where one has none."""
    if len(query) == 0 or len(passage) == 0:
        return 0.0
    return float((query @ passage.T).max(axis=1).mean())


def hybrid_scores(
    query: Embeddings, passages: Embeddings, weights: tuple[float, float, float] = (1.0, 1.0, 1.0)
) -> NDArray[np.float32]:
    """Of each query with each passage, (num_queries, num_passages): the weighted mean of what both have.

    `weights` are of dense, sparse and colbert scores, as FlagEmbedding's `weights_for_different_modes`. Raises
    ValueError where nothing that counts is in both.
    """
    parts: list[tuple[float, NDArray[np.float32]]] = []
    if query.dense is not None and passages.dense is not None:
        parts.append((weights[0], query.dense @ passages.dense.T))
    if query.sparse is not None and passages.sparse is not None:
        scores = [[lexical_score(q, p) for p in passages.sparse] for q in query.sparse]
        parts.append((weights[1], np.array(scores, np.float32)))
    if query.colbert is not None and passages.colbert is not None:
        scores = [[colbert_score(q, p) for p in passages.colbert] for q in query.colbert]
        parts.append((weights[2], np.array(scores, np.float32)))
    total = sum(weight for weight, _ in parts)
    if total <= 0:
        raise ValueError("there is no score: queries and passages have no output in common whose weight is above 0")
    return np.asarray(sum(weight * scores for weight, scores in parts) / total, np.float32)
