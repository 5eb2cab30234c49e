"""What is known of each request from outside: its id, its log line, its figures."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count

import orjson
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.metrics import Metrics

logger = logging.getLogger(__name__)

# A client's own id is repeated where it fits into a header and a line of a log as it is.
_MAX_ID_CHARS = 128
_VISIBLE = frozenset(range(0x21, 0x7F))

_KEY = "serve.record"


@dataclass(slots=True)
class Record:
    """What handlers say about a request."""

    request_id: str
    num_texts: int = 0
    num_tokens: int = 0
    num_truncated: int = 0
    tokenize_s: float = 0.0
    queue_s: float = 0.0
    forward_s: float = 0.0


def record_of(request: Request) -> Record:
    """The record of a request."""
    record: Record = request.scope[_KEY]
    return record


class Access:
    """ASGI middleware around everything: request ids in and out, times, the access log, the count of answers.

    `log` takes a line of JSON for each request, which holds neither the query nor any header but the id: both may carry
    secrets. `routes` are the paths that are counted by name.
    """

    def __init__(
        self, app: ASGIApp, *, metrics: Metrics, routes: frozenset[str], log: Callable[[bytes], None] | None
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes
        self._log = log
        self._prefix = os.urandom(8).hex()
        self._numbers = count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_s = time.perf_counter()
        record = Record(self._request_id(scope))
        scope[_KEY] = record
        status = 0  # the client has left before an answer

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *_headers(record)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - start_s
            path: str = scope["path"]
            self._metrics.request(path if path in self._routes else "other", status, seconds)
            if self._log is not None:
                self._log(_line(scope, record, status, seconds))

    def _request_id(self, scope: Scope) -> str:
        for name, value in scope["headers"]:
            if name == b"x-request-id" and 0 < len(value) <= _MAX_ID_CHARS and _VISIBLE.issuperset(value):
                return str(value, "ascii")
        return f"{self._prefix}-{next(self._numbers)}"


def _headers(record: Record) -> list[tuple[bytes, bytes]]:
    headers = [(b"x-request-id", record.request_id.encode())]
    if record.num_texts:
        timing = b"tokenize;dur=%.3f, queue;dur=%.3f, forward;dur=%.3f" % (
            record.tokenize_s * 1e3,
            record.queue_s * 1e3,
            record.forward_s * 1e3,
        )
        headers.append((b"server-timing", timing))
    return headers


def _line(scope: Scope, record: Record, status: int, seconds: float) -> bytes:
    line = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "id": record.request_id,
        "client": scope["client"][0] if scope.get("client") else None,
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "ms": round(seconds * 1e3, 3),
    }
    if record.num_texts:
        line |= {
            "texts": record.num_texts,
            "tokens": record.num_tokens,
            "truncated": record.num_truncated,
            "tokenize_ms": round(record.tokenize_s * 1e3, 3),
            "queue_ms": round(record.queue_s * 1e3, 3),
            "forward_ms": round(record.forward_s * 1e3, 3),
        }
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


class LogFile:
    """Appends lines, each whole, to an open file. That it cannot be written is said once, and fails no request."""

    def __init__(self, file_descriptor: int) -> None:
        self._file_descriptor = file_descriptor
        self._broken = False

    def __call__(self, line: bytes) -> None:
        try:
            os.write(self._file_descriptor, line)
            self._broken = False
        except OSError as error:
            if not self._broken:
                logger.warning("the access log cannot be written: %s", error.strerror)
            self._broken = True
