"""From texts to vectors, as every wire format asks for it."""

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from starlette.requests import ClientDisconnect, Request

from serve.batcher import Batcher
from serve.errors import embedding_failed
from serve.protocols import EmbeddingEngine

# Below this many characters tokenising costs less than the way to another thread and back.
_TOKENIZE_IN_PLACE_CHARS = 2000


class EmbeddingService:
    def __init__(self, engine: EmbeddingEngine, batcher: Batcher) -> None:
        self._engine = engine
        self._batcher = batcher

    async def embed(self, request: Request, texts: Sequence[str], *, normalize: bool) -> NDArray[np.float32]:
        """Vectors (num_texts, dim). A client that leaves meanwhile is ClientDisconnect."""
        ids, offsets = await self._tokenize(texts)
        reply = self._batcher.submit(ids, offsets, normalize=normalize)

        def on_departure(departure: asyncio.Task[None]) -> None:
            if not reply.done() and not departure.cancelled():
                reply.set_exception(departure.exception() or ClientDisconnect())

        departure = asyncio.create_task(_departure(request))
        departure.add_done_callback(on_departure)
        try:
            return await reply
        finally:
            departure.cancel()

    async def _tokenize(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        try:
            if sum(map(len, texts)) < _TOKENIZE_IN_PLACE_CHARS:
                return self._engine.tokenize_batch(texts)
            return await asyncio.to_thread(self._engine.tokenize_batch, texts)
        except Exception as error:
            raise embedding_failed(error) from error


async def _departure(request: Request) -> None:
    """Returns when the client has left; a body that nobody asked for is dropped on the way."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
