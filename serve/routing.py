"""One path and the methods it has."""

from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

Handler = Callable[[Request], Awaitable[Response]]


class Resource:
    """ASGI endpoint: HEAD is GET, whose body the server strips; OPTIONS lists the methods; others are 405."""

    def __init__(self, handlers: dict[str, Handler]) -> None:
        methods = {*handlers, "OPTIONS"}
        if "GET" in handlers:
            handlers = {**handlers, "HEAD": handlers["GET"]}
            methods.add("HEAD")
        self._handlers = handlers
        self._allow = {"Allow": ", ".join(sorted(methods))}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method: str = scope["method"]
        if method == "OPTIONS":
            response = Response(status_code=204, headers=self._allow)
        elif handler := self._handlers.get(method):
            response = await handler(Request(scope, receive, send))
        else:
            raise HTTPException(405, f"method not allowed: `{method}`", self._allow)
        await response(scope, receive, send)


def route(path: str, handlers: dict[str, Handler]) -> Route:
    return Route(path, Resource(handlers))
