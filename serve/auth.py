"""The token that guards the embedding routes."""

import hashlib
import hmac

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from serve.query import query_fields
from serve.routing import Handler

_SCHEME = "Bearer "


def require_token(token: str | None, handler: Handler) -> Handler:
    """`handler` for requests that carry the token, 401 for others; `handler` itself where `token` is None.

    A request carries it as `Authorization: Bearer <token>` or, without that header, as `token` in the query.
    This is decided before a byte of the body is read.
    """
    if token is None:
        return handler
    expected = _digest(token.encode())

    async def guarded(request: Request) -> Response:
        # Digests have one length, so the time of the comparison tells neither the token nor how long it is.
        if not hmac.compare_digest(_digest(_presented(request)), expected):
            raise HTTPException(401, "missing or wrong token", {"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return guarded


def _presented(request: Request) -> bytes:
    header = request.headers.get("authorization", "")
    if header.startswith(_SCHEME):
        # Starlette reads header bytes as Latin-1, so this gives the client's own bytes back.
        return header.removeprefix(_SCHEME).encode("latin-1")
    return query_fields(request).get("token", "").encode()


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
