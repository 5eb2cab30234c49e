"""One HTTP/1.1 connection: uvicorn's, with what that lacks."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Connection(HttpToolsProtocol):
    """Bounds the time and the size of a request's head, and refuses in JSON what has no request yet.

    uvicorn has no deadline for a head, keeps an endless one in memory, and answers a malformed request at once, even
    before the answers that it still owes on the connection.

    `scope["serve.departure"]` is a future that is done when the client has left: a callback there costs a handler less
    than a task that waits for `http.disconnect`.
    """

    head_s = 10.0
    head_bytes = 64 * 1024
    drain_s = 2.0

    _timer: asyncio.TimerHandle | None = None
    _received_any = False
    _in_head = False
    _arrived_head_bytes = 0
    _refusal: bytes | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._departure: asyncio.Future[None] = self.loop.create_future()
        self._start_timer(self.head_s, self._head_overdue)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self._departure.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._received_any = True
        if self._timer is None and self._is_idle():
            self._start_timer(self.head_s, self._head_overdue)
        if self._in_head:
            self._arrived_head_bytes += len(data)
            if self._arrived_head_bytes > self.head_bytes:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request head is too large")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["serve.departure"] = self._departure  # type: ignore[typeddict-unknown-key]
        self._in_head = True
        self._arrived_head_bytes = 0

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_head = False
        self._stop_timer()

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, "malformed HTTP request")

    def on_response_complete(self) -> None:
        was_last = not self.pipeline
        super().on_response_complete()
        if was_last and self._refusal is not None and not self.transport.is_closing():
            self._write_refusal()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _head_overdue(self) -> None:
        if self._received_any:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"the request head did not arrive within {self.head_s:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answers what cannot become a request and closes, once the requests before it have their answers."""
        body = orjson.dumps({"error": message})
        self._refusal = (
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json; charset=utf-8\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (status, status.phrase.encode(), len(body), body)
        )
        if self._is_idle():
            self._write_refusal()
        elif self.cycle.more_body and self.pipeline:
            # The newest request is the broken one, and it waits for its turn behind others.
            self.pipeline.popleft()
        elif self.cycle.more_body:
            # The broken request is being answered: for its handler, the client has left.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.close()
            else:
                self._write_refusal()

    def _write_refusal(self) -> None:
        assert self._refusal is not None
        self.transport.write(self._refusal)
        # Closed at once, a client that still writes would lose the answer to a reset: see serve.body.
        self.transport.write_eof()
        self._start_timer(self.drain_s, self.transport.close)

    def _start_timer(self, delay_s: float, then: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(delay_s, then)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
