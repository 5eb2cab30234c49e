"""Request bodies: how large, how slow, and how to answer a client that is still sending one."""

import asyncio
import contextlib
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass(frozen=True, kw_only=True)
class BodyLimits:
    max_bytes: int = 16 * 1024 * 1024
    read_s: float = 30.0
    drain_s: float = 2.0


class BodyGuard:
    """ASGI middleware: 413 and 408 come out of `receive`, and an early answer reaches its client.

    An answer is early when the body has not arrived whole. A connection closed under a client that still
    writes is reset, and the reset destroys the answer on its way. So the answer goes out, what the client
    writes is read and dropped for a while, and then the connection is closed.
    """

    def __init__(self, app: ASGIApp, *, limits: BodyLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            declared_bytes = int(headers.get(b"content-length", b"0"))
            if declared_bytes or b"transfer-encoding" in headers:
                held_back = headers.get(b"expect", b"").lower() == b"100-continue"
                body = _Body(self._limits, receive, send, declared_bytes, held_back)
                receive, send = body.receive, body.send
        await self._app(scope, receive, send)


class _Body:
    """`receive` and `send` of one request that has a body."""

    def __init__(self, limits: BodyLimits, receive: Receive, send: Send, declared_bytes: int, held_back: bool) -> None:
        self._limits = limits
        self._receive = receive
        self._send = send
        self._declared_bytes = declared_bytes
        # The client sends nothing before a 100 Continue, which the server writes at the first `receive`.
        self._held_back = held_back
        self._deadline_s = asyncio.get_running_loop().time() + limits.read_s
        self._arrived_bytes = 0
        self._complete = False
        self._answered_early = False

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()
        self._check_size(self._declared_bytes)
        self._held_back = False
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await self._next()
        except TimeoutError:
            raise HTTPException(408, f"the body did not arrive within {self._limits.read_s:g} s") from None
        self._check_size(self._arrived_bytes)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and not self._complete:
            self._answered_early = True
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        elif self._answered_early and not message.get("more_body", False):
            # The server closes at the last message of an answer, so that one waits.
            await self._send({**message, "more_body": True})
            await self._drain()
            message = {"type": "http.response.body"}
        await self._send(message)

    async def _next(self) -> Message:
        message = await self._receive()
        self._arrived_bytes += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        return message

    async def _drain(self) -> None:
        if self._held_back:
            return
        limit_bytes = self._arrived_bytes + 2 * self._limits.max_bytes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.drain_s):
                while not self._complete and self._arrived_bytes < limit_bytes:
                    await self._next()

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._limits.max_bytes:
            raise HTTPException(413, f"the body is too large: at most {self._limits.max_bytes} bytes")
