"""Bidirectional self-attention over packed texts of any lengths, without an n x n buffer."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gkd.ops.contract import Array, Signature, float_dtype

# Keys are walked in blocks of this width from position 0 of each text, in every implementation: a text's bits
# then do not depend on where it lies in the batch.
KEY_BLOCK = 128
# Queries that one pass holds scores for; any width gives the same bits per query only if it is fixed.
_QUERY_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Attention:
    """out = softmax(q @ k.T / sqrt(head_dim)) @ v within each text and head.

    Shapes:  out (num_tokens, num_heads * head_dim); qkv (num_tokens, 3 * num_heads * head_dim), a row being
             all queries, all keys, all values; cu_seqlens (num_texts + 1,), from 0 to num_tokens.
    Dtypes:  one floating dtype; int32 cu_seqlens, ascending, which the caller has checked.
    Source:  Milakov & Gimelshein 2018, the running maximum and sum; blocks as in Dao et al. 2022.
    """

    num_heads: int
    head_dim: int

    name: ClassVar[str] = "attention"

    def check(self, out: Array, qkv: Array, cu_seqlens: Array) -> None:
        dtype = float_dtype(self.name, "qkv", qkv)
        hidden_size = self.num_heads * self.head_dim
        signature = Signature(self.name)
        signature.match("qkv", qkv, ("num_tokens", 3 * hidden_size), dtype)
        signature.match("out", out, ("num_tokens", hidden_size), dtype)
        signature.match("cu_seqlens", cu_seqlens, ("num_texts + 1",), np.int32)

    def reference(self, out: Array, qkv: Array, cu_seqlens: Array) -> None:
        heads = (self.num_heads, self.head_dim)
        for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            # (3, num_heads, length, head_dim) and (num_heads, length, head_dim), both views
            query, key, value = qkv[start:end].reshape(-1, 3, *heads).transpose(1, 2, 0, 3)
            context = out[start:end].reshape(-1, *heads).transpose(1, 0, 2)
            for first in range(0, end - start, _QUERY_BLOCK):
                queries = slice(first, first + _QUERY_BLOCK)
                self._attend(context[:, queries], query[:, queries], key, value)

    def _attend(self, context: Array, query: Array, key: Array, value: Array) -> None:
        """One block of queries (num_heads, rows, head_dim) against all keys of its text."""
        dtype = query.dtype.type
        query = query * dtype(1 / math.sqrt(self.head_dim))
        running_max = np.full((*query.shape[:2], 1), -np.inf, dtype)
        running_sum = np.zeros_like(running_max)
        accumulator = np.zeros_like(query)
        for first in range(0, key.shape[1], KEY_BLOCK):
            keys = slice(first, first + KEY_BLOCK)
            scores = query @ key[:, keys].transpose(0, 2, 1)
            new_max = np.maximum(running_max, scores.max(axis=-1, keepdims=True))
            scores -= new_max
            np.exp(scores, out=scores)
            correction = np.exp(running_max - new_max)
            running_sum *= correction
            running_sum += np.add.reduce(scores, axis=-1, keepdims=True)
            accumulator *= correction
            accumulator += scores @ value[:, keys]
            running_max = new_max
        np.divide(accumulator, running_sum, out=context)
