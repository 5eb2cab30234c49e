"""From texts to vectors, as every wire format asks for it."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from serve.access import record_of
from serve.batcher import Batcher
from serve.errors import EmbeddingFailed, embedding_failed
from serve.metrics import Metrics
from serve.protocols import EmbeddingEngine
from serve.queue import Answer
from serve.schemas import json_type

# Below this many characters tokenising costs less than the way to another thread and back.
_TOKENIZE_IN_PLACE_CHARS = 2000
# How many characters make a token, about, while nobody has counted.
_CHARS_PER_TOKEN = 4


@dataclass(frozen=True, kw_only=True)
class TextLimits:
    """Of one request."""

    max_texts: int = 16_384
    max_chars: int = 1_000_000
    """Of one text."""


class Options(NamedTuple):
    """What a request asks for."""

    normalize: bool
    truncate: bool
    """Cut a text of too many tokens; else it is an error."""
    keep_going: bool
    """Texts that cannot be embedded are reported one by one; else the first is the request's error."""


class Embedded(NamedTuple):
    """What a request gets."""

    vectors: NDArray[np.float32]
    """(num_texts, dim); the rows of `failures` mean nothing."""
    failures: Mapping[int, str]
    """Why texts have no vector, by index."""
    truncated: Sequence[int]
    """Texts that lost their end."""
    num_tokens: int


class EmbeddingService:
    def __init__(self, engine: EmbeddingEngine, batcher: Batcher, metrics: Metrics, limits: TextLimits) -> None:
        self._engine = engine
        self._batcher = batcher
        self._metrics = metrics
        self._limits = limits

    async def embed(self, request: Request, texts: Sequence[object], options: Options) -> Embedded:
        """The vectors of at least one text. A client that leaves meanwhile is ClientDisconnect.

        Raises HTTPException for what is wrong with the request, and for a text that has no vector unless `keep_going`.
        """
        if len(texts) > self._limits.max_texts:
            raise HTTPException(400, f"texts: {len(texts)} of them, at most {self._limits.max_texts} are accepted")
        failures = self._unacceptable(texts)
        _refuse(failures, options)
        # What has failed keeps its place as an empty text.
        sound = [text if isinstance(text, str) and index not in failures else "" for index, text in enumerate(texts)]
        ids, offsets, truncated = await self._tokenize(request, sound)
        if truncated and not options.truncate:
            most = self._engine.maxseq
            too_long = {
                index: f"{num_tokens} tokens; at most {most} are accepted, unless `truncate` is true"
                for index, num_tokens in truncated.items()
            }
            _refuse(too_long, options)
            failures |= too_long
        answer = await self._answer(request, ids, offsets, options.normalize)
        failures |= answer.failures
        self._metrics.failed(len(failures))
        if answer.failures and not options.keep_going:
            index, reason = next(iter(answer.failures.items()))
            raise embedding_failed(EmbeddingFailed(f"texts[{index}]: {reason}"))
        return Embedded(answer.vectors, failures, list(truncated), int(offsets[-1]))

    def _unacceptable(self, texts: Sequence[object]) -> dict[int, str]:
        failures: dict[int, str] = {}
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                failures[index] = f"expected a string, got {json_type(text)}"
            elif len(text) > self._limits.max_chars:
                failures[index] = f"{len(text)} characters, at most {self._limits.max_chars} are accepted"
        return failures

    async def _tokenize(
        self, request: Request, texts: Sequence[str]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], dict[int, int]]:
        """Packed ids and offsets, and of texts that have lost their end, how many tokens they had."""
        start_s = time.perf_counter()
        num_chars = sum(map(len, texts))
        with self._batcher.reservation(num_chars // _CHARS_PER_TOKEN):
            try:
                if num_chars < _TOKENIZE_IN_PLACE_CHARS:
                    ids, offsets, lengths = self._engine.tokenize_counted(texts)
                else:
                    ids, offsets, lengths = await asyncio.to_thread(self._engine.tokenize_counted, texts)
            except Exception as error:
                raise embedding_failed(error) from error
        most = self._engine.maxseq
        truncated = {index: length for index, length in enumerate(lengths) if length > most}
        record = record_of(request)
        record.num_texts, record.num_tokens, record.num_truncated = len(texts), int(offsets[-1]), len(truncated)
        record.tokenize_s = time.perf_counter() - start_s
        self._metrics.texts(record.num_texts, record.num_tokens, record.num_truncated, record.tokenize_s)
        return ids, offsets, truncated

    async def _answer(
        self, request: Request, ids: NDArray[np.int32], offsets: NDArray[np.int64], normalize: bool
    ) -> Answer:
        reply = self._batcher.submit(ids, offsets, normalize=normalize)
        departure: asyncio.Future[None] = request.scope["serve.departure"]

        def on_departure(_: asyncio.Future[None]) -> None:
            if not reply.done():
                reply.set_exception(ClientDisconnect())

        departure.add_done_callback(on_departure)
        try:
            answer = await reply
        finally:
            departure.remove_done_callback(on_departure)
        record = record_of(request)
        record.queue_s, record.forward_s = answer.queue_s, answer.forward_s
        self._metrics.answer(answer.queue_s, answer.forward_s)
        return answer


def _refuse(failures: Mapping[int, str], options: Options) -> None:
    """Raises the first of them, unless the others are to be embedded all the same."""
    if failures and not options.keep_going:
        index, reason = next(iter(failures.items()))
        raise HTTPException(400, f"texts[{index}]: {reason}")
