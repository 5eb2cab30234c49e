"""Texts packed into forwards: no padding, `cu_seqlens` says where each text begins."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embed.config import ModelConfig
from embed.errors import RequestError


@dataclass(frozen=True, slots=True)
class Batch:
    """The device inputs of one forward over texts [first, last) of a call."""

    first: int
    last: int
    input_ids: NDArray[np.int32]
    """(num_tokens,)"""
    position_ids: NDArray[np.int32]
    """(num_tokens,)"""
    token_type_ids: NDArray[np.int32]
    """(num_tokens,)"""
    cu_seqlens: NDArray[np.int32]
    """(last - first + 1,), from 0 to num_tokens."""
    num_prompt_tokens: int = 0
    """First tokens of each text that take no part in the pooling, of which its last one always does."""

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest text."""
        return int(np.diff(self.cu_seqlens).max())


def check_ids(
    ids: NDArray[np.int32],
    offsets: NDArray[np.int64],
    config: ModelConfig,
    token_type_ids: NDArray[np.int32] | None = None,
) -> None:
    """Raises RequestError unless the packed ids can be embedded: the device indexes tables with them."""
    if ids.ndim != 1 or offsets.ndim != 1 or ids.dtype.kind != "i" or offsets.dtype.kind != "i":
        raise RequestError("ids and offsets: expected one-dimensional integer arrays")
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(ids):
        raise RequestError(f"offsets: expected to run from 0 to {len(ids)}, the number of ids")
    lengths = offsets[1:] - offsets[:-1]
    if not _within(lengths, 1, config.max_tokens):
        wrong = int(np.flatnonzero((lengths < 1) | (lengths > config.max_tokens))[0])
        raise RequestError(
            f"offsets: text {wrong} has {lengths[wrong]} tokens, expected 1 to {config.max_tokens}, the position table"
        )
    if not _within(ids, 0, config.vocab_size - 1):
        wrong = int(np.flatnonzero((ids < 0) | (ids >= config.vocab_size))[0])
        raise RequestError(f"ids[{wrong}]: {ids[wrong]} is not an id of a vocabulary of {config.vocab_size}")
    if token_type_ids is not None and not _within(token_type_ids, 0, config.type_vocab_size - 1):
        wrong = int(np.flatnonzero((token_type_ids < 0) | (token_type_ids >= config.type_vocab_size))[0])
        raise RequestError(
            f"token_type_ids[{wrong}]: {token_type_ids[wrong]} is not one of the model's {config.type_vocab_size} types"
        )


def _within(values: NDArray[Any], least: int, most: int) -> bool:
    return len(values) == 0 or bool(np.minimum.reduce(values) >= least and np.maximum.reduce(values) <= most)


def batches(
    ids: NDArray[np.int32],
    offsets: NDArray[np.int64],
    config: ModelConfig,
    max_tokens: int,
    max_texts: int,
    num_prompt_tokens: int = 0,
    token_type_ids: NDArray[np.int32] | None = None,
) -> Iterator[Batch]:
    """Splits checked texts, in order, into forwards of at most `max_tokens` tokens and `max_texts` texts.

    A text of more than `max_tokens` tokens is a forward by itself. Without `token_type_ids` every token has type 0.
    """
    if token_type_ids is None:
        token_type_ids = np.zeros(len(ids), np.int32)
    num_texts = len(offsets) - 1
    if num_texts > 0 and offsets[-1] <= max_tokens and num_texts <= max_texts:
        yield _batch(ids, offsets, config, 0, num_texts, num_prompt_tokens, token_type_ids)
        return
    first = 0
    while first < num_texts:
        fitting = int(np.searchsorted(offsets, offsets[first] + max_tokens, side="right")) - 1
        last = max(first + 1, min(fitting, first + max_texts))
        yield _batch(ids, offsets, config, first, last, num_prompt_tokens, token_type_ids)
        first = last


def _batch(
    ids: NDArray[np.int32],
    offsets: NDArray[np.int64],
    config: ModelConfig,
    first: int,
    last: int,
    num_prompt_tokens: int,
    token_type_ids: NDArray[np.int32],
) -> Batch:
    start, end = offsets[first], offsets[last]
    input_ids = np.ascontiguousarray(ids[start:end], np.int32)
    cu_seqlens = (offsets[first : last + 1] - start).astype(np.int32)
    return Batch(
        first,
        last,
        input_ids,
        position_ids(input_ids, cu_seqlens, config),
        token_type_ids[start:end],
        cu_seqlens,
        num_prompt_tokens,
    )


def position_ids(input_ids: NDArray[np.int32], cu_seqlens: NDArray[np.int32], config: ModelConfig) -> NDArray[np.int32]:
    """Row of the position table for each token, by the family's rule."""
    from_zero = config.family.position_rule == "from_zero"
    if from_zero or np.count_nonzero(counted := input_ids != config.pad_token_id) == len(input_ids):
        first = 0 if from_zero else config.pad_token_id + 1
        positions = np.arange(first, first + len(input_ids), dtype=np.int32)
        return positions if len(cu_seqlens) == 2 else positions - _of_each_token(cu_seqlens[:-1], cu_seqlens)
    running = np.cumsum(counted, dtype=np.int32)
    before_text = np.concatenate(([np.int32(0)], running))[cu_seqlens[:-1]]
    positions = np.where(counted, running - _of_each_token(before_text, cu_seqlens), 0)
    return positions.astype(np.int32) + np.int32(config.pad_token_id)


def _of_each_token(of_each_text: NDArray[np.int32], cu_seqlens: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.repeat(of_each_text, cu_seqlens[1:] - cu_seqlens[:-1])
