"""The server's own wire format: /create_embedding."""

import asyncio

import numpy as np
import orjson
from msgspec import UNSET
from numpy.typing import NDArray
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from serve.query import query_fields
from serve.responses import JsonResponse
from serve.schemas import decode_native
from serve.service import EmbeddingService

# orjson holds the GIL for a whole call, 25 ms for 1024 vectors of 1024, and everything else stands still,
# whichever thread makes it. Blocks of this many values take 0.3 ms, and others get their turn between them.
_BLOCK_VALUES = 16_384

_BOOLEANS = {"true": True, "false": False}


class NativeFormat:
    def __init__(self, service: EmbeddingService, *, model_name: str, normalize: bool) -> None:
        self._service = service
        self._model_name = model_name
        self._normalize = normalize

    async def post(self, request: Request) -> Response:
        message = decode_native(await request.body())
        texts = message.all_texts()
        if not texts:
            raise HTTPException(400, "no text: `texts` or `text` must be a string or an array of strings")
        normalize = self._normalize if message.normalize is UNSET else message.normalize
        return await self._embed(request, texts, normalize)

    async def get(self, request: Request) -> Response:
        fields = query_fields(request)
        if "text" not in fields:
            raise HTTPException(400, "no text: the query must have a `text` that is not empty")
        try:
            normalize = _BOOLEANS[fields["normalize"]] if "normalize" in fields else self._normalize
        except KeyError:
            raise HTTPException(400, "normalize: expected `true` or `false`") from None
        return await self._embed(request, [fields["text"]], normalize)

    async def _embed(self, request: Request, texts: list[str], normalize: bool) -> Response:
        vectors = await self._service.embed(request, texts, normalize=normalize)
        if vectors.size <= _BLOCK_VALUES:
            return JsonResponse(self._render(vectors))
        return JsonResponse(await asyncio.to_thread(self._render, vectors))

    def _render(self, vectors: NDArray[np.float32]) -> bytes:
        """The reply. float32 is written in the fewest digits that read back as the same bits."""
        num_texts, dim = vectors.shape
        step = max(1, _BLOCK_VALUES // dim)
        blocks = [
            orjson.dumps(vectors[start : start + step], option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
            for start in range(0, num_texts, step)
        ]
        blocks[0] = b'{"embeddings":[' + blocks[0]
        blocks[-1] += b"]," + orjson.dumps({"model": self._model_name, "dimension": dim})[1:]
        return b",".join(blocks)
