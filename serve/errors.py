"""What can go wrong beside the request itself, and the JSON that tells the client.

    EngineError
    ├── EmbeddingFailed   500: the engine raised
    ├── Overloaded        429: too much waits already
    └── Unavailable       503: no forward was tried, since the weights did not load or the server stops

What is wrong with a request is Starlette's HTTPException.
"""

import logging
import math
from collections.abc import Mapping
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

from serve.responses import JsonResponse

logger = logging.getLogger(__name__)


class EngineError(Exception):
    """A valid request has no vectors."""

    status: HTTPStatus
    headers: Mapping[str, str] | None = None


class EmbeddingFailed(EngineError):
    status = HTTPStatus.INTERNAL_SERVER_ERROR


class Overloaded(EngineError):
    status = HTTPStatus.TOO_MANY_REQUESTS

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.headers = {"Retry-After": str(max(1, math.ceil(retry_after_s)))}


class Unavailable(EngineError):
    status = HTTPStatus.SERVICE_UNAVAILABLE


def embedding_failed(cause: Exception) -> EmbeddingFailed:
    """The client is told what `cause` says; its traceback goes to the log only."""
    logger.error("embedding failed", exc_info=cause)
    return EmbeddingFailed(f"embedding failed: {str(cause) or type(cause).__name__}")


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return JsonResponse({"error": message}, status, headers)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(error.status_code, error.detail, error.headers)


async def _engine_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, EngineError)
    return error_response(error.status, str(error), error.headers)


async def _departed(_: Request, error: Exception) -> Response:
    # Starlette wants a response; the server drops it, since nobody is there to read it.
    return Response(status_code=HTTPStatus.BAD_REQUEST)


async def _unexpected(_: Request, error: Exception) -> Response:
    # Starlette raises the error again once this is sent, and uvicorn logs its traceback.
    return error_response(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error")


EXCEPTION_HANDLERS: Mapping[type[Exception], ExceptionHandler] = {
    HTTPException: _http_error,
    EngineError: _engine_error,
    ClientDisconnect: _departed,
    Exception: _unexpected,
}
