"""Texts packed into forwards: no padding, `cu_seqlens` says where each text begins."""

from collections.abc import Iterator
from dataclasses import dataclass

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
    cu_seqlens: NDArray[np.int32]
    """(last - first + 1,), from 0 to num_tokens."""

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest text."""
        return int(np.diff(self.cu_seqlens).max())


def check_ids(ids: NDArray[np.int32], offsets: NDArray[np.int64], config: ModelConfig) -> None:
    """Raises RequestError unless the packed ids can be embedded: the device indexes tables with them."""
    if ids.ndim != 1 or offsets.ndim != 1 or ids.dtype.kind != "i" or offsets.dtype.kind != "i":
        raise RequestError("ids and offsets: expected one-dimensional integer arrays")
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(ids):
        raise RequestError(f"offsets: expected to run from 0 to {len(ids)}, the number of ids")
    lengths = np.diff(offsets)
    for wrong in np.flatnonzero((lengths < 1) | (lengths > config.max_tokens)):
        raise RequestError(
            f"offsets: text {wrong} has {lengths[wrong]} tokens, expected 1 to {config.max_tokens}, the position table"
        )
    for wrong in np.flatnonzero((ids < 0) | (ids >= config.vocab_size)):
        raise RequestError(f"ids[{wrong}]: {ids[wrong]} is not an id of a vocabulary of {config.vocab_size}")


def batches(
    ids: NDArray[np.int32], offsets: NDArray[np.int64], config: ModelConfig, max_tokens: int, max_texts: int
) -> Iterator[Batch]:
    """Splits checked texts, in order, into forwards of at most `max_tokens` tokens and `max_texts` texts.

    A text of more than `max_tokens` tokens is a forward by itself.
    """
    first = 0
    while first < len(offsets) - 1:
        fitting = int(np.searchsorted(offsets, offsets[first] + max_tokens, side="right")) - 1
        last = max(first + 1, min(fitting, first + max_texts))
        start, end = offsets[first], offsets[last]
        input_ids = np.ascontiguousarray(ids[start:end], np.int32)
        cu_seqlens = (offsets[first : last + 1] - start).astype(np.int32)
        yield Batch(first, last, input_ids, position_ids(input_ids, cu_seqlens, config), cu_seqlens)
        first = last


def position_ids(input_ids: NDArray[np.int32], cu_seqlens: NDArray[np.int32], config: ModelConfig) -> NDArray[np.int32]:
    """Row of the position table for each token, by the family's rule."""
    lengths = np.diff(cu_seqlens)
    from_zero = config.family.position_rule == "from_zero"
    if from_zero or (counted := input_ids != config.pad_token_id).all():
        first = 0 if from_zero else config.pad_token_id + 1
        return np.arange(first, first + len(input_ids), dtype=np.int32) - np.repeat(cu_seqlens[:-1], lengths)
    running = np.cumsum(counted, dtype=np.int32)
    before_text = np.concatenate(([np.int32(0)], running))[cu_seqlens[:-1]]
    return np.where(counted, running - np.repeat(before_text, lengths), 0).astype(np.int32) + np.int32(
        config.pad_token_id
    )
