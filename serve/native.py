"""The server's own wire format: /create_embedding."""

import asyncio
import base64
from collections.abc import Iterator, Mapping

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
from serve.service import Embedded, EmbeddingService, Options

# orjson holds the GIL for a whole call, 25 ms for 1024 vectors of 1024, and everything else stands still,
# whichever thread makes it. Blocks of this many values take 0.3 ms, and others get their turn between them.
_BLOCK_VALUES = 16_384

_BOOLEANS = {"true": True, "false": False}


class NativeFormat:
    """`defaults` are what a request gets that does not say."""

    def __init__(self, service: EmbeddingService, *, model_name: str, defaults: Options) -> None:
        self._service = service
        self._model_name = model_name
        self._defaults = defaults

    async def post(self, request: Request) -> Response:
        message = decode_native(await request.body())
        texts = message.all_texts()
        if not texts:
            raise HTTPException(400, "no text: `texts` or `text` must be a string or an array of strings")
        options = Options(
            normalize=self._defaults.normalize if message.normalize is UNSET else message.normalize,
            truncate=self._defaults.truncate if message.truncate is UNSET else message.truncate,
            keep_going=message.on_error == "null",
        )
        embedded = await self._service.embed(request, texts, options)
        return await self._reply(embedded, options, as_base64=message.encoding_format == "base64")

    async def get(self, request: Request) -> Response:
        fields = query_fields(request)
        if "text" not in fields:
            raise HTTPException(400, "no text: the query must have a `text` that is not empty")
        chosen = {}
        for name in ("normalize", "truncate"):
            if name in fields:
                if fields[name] not in _BOOLEANS:
                    raise HTTPException(400, f"{name}: expected `true` or `false`")
                chosen[name] = _BOOLEANS[fields[name]]
        options = self._defaults._replace(**chosen)
        embedded = await self._service.embed(request, [fields["text"]], options)
        return await self._reply(embedded, options, as_base64=False)

    async def _reply(self, embedded: Embedded, options: Options, *, as_base64: bool) -> Response:
        if embedded.vectors.size <= _BLOCK_VALUES:
            return JsonResponse(self._render(embedded, options, as_base64))
        return JsonResponse(await asyncio.to_thread(self._render, embedded, options, as_base64))

    def _render(self, embedded: Embedded, options: Options, as_base64: bool) -> bytes:
        vectors, failures, truncated, _ = embedded
        tail: dict[str, object] = {"model": self._model_name, "dimension": vectors.shape[1]}
        if truncated:
            tail["truncated"] = truncated
        if options.keep_going:
            tail["errors"] = [{"index": index, "error": reason} for index, reason in sorted(failures.items())]
        items = b",".join(_items(vectors, failures, as_base64))
        return b'{"embeddings":[' + items + b"]," + orjson.dumps(tail)[1:]


def _items(vectors: NDArray[np.float32], failures: Mapping[int, str], as_base64: bool) -> Iterator[bytes]:
    """The vectors, as they stand in an array: several at once, or one by one where some are missing."""
    num_texts, dim = vectors.shape
    if as_base64:
        for index in range(num_texts):
            row = b'"' + base64.b64encode(vectors[index].astype("<f4", copy=False)) + b'"'
            yield b"null" if index in failures else row
        return
    step = 1 if failures else max(1, _BLOCK_VALUES // dim)
    for start in range(0, num_texts, step):
        # float32 is written in the fewest digits that read back as the same bits.
        block = orjson.dumps(vectors[start : start + step], option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        yield b"null" if start in failures else block
