"""Runs an application on a port until a signal ends it."""

import contextlib
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from serve.app import Application
from serve.connection import Connection

_KEEP_ALIVE_S = 30

# The device thread holds the GIL for milliseconds of Python at a time, and the event loop gets it back only
# after this interval. With 5 ms of such work per batch and 64 clients: 990 requests/s at the default of 5 ms,
# 4390 at 0.1 ms.
_SWITCH_INTERVAL_S = 1e-4


def serve(
    app: Application, host: str, port: int, *, on_listening: Callable[[str], None], shutdown_delay_s: float = 0
) -> None:
    """Answers until SIGTERM or SIGINT, then what has been asked already, and returns.

    After SIGTERM the server is not ready at once, and listens on for `shutdown_delay_s`, so that balancers have seen it
    before connections are refused. `on_listening` gets the URL once the port accepts connections and signals are
    handled; port 0 picks a free one. A port that cannot be had raises OSError. A second SIGINT waits for nothing:
    KeyboardInterrupt.
    """
    with listen(host, port) as listener:
        server = Server(app, on_started=lambda: on_listening(url_of(listener, host)), shutdown_delay_s=shutdown_delay_s)
        server.run([listener])
    if server.force_exit:
        raise KeyboardInterrupt


def listen(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address, family=family)


def url_of(listener: socket.socket, host: str) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's server that says when it has started, and ends with status 0 after a signal."""

    def __init__(self, app: Application, *, on_started: Callable[[], None], shutdown_delay_s: float = 0) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                loop="uvloop",
                ws="none",
                lifespan="on",
                interface="asgi3",
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(app.drain_s),
                log_config=None,
                log_level="warning",
                # It would print query strings, and with them tokens.
                access_log=False,
                server_header=False,
                proxy_headers=False,
            )
        )
        self._app = app
        self._on_started = on_started
        self._shutdown_delay_s = shutdown_delay_s
        self._exit_at_s = math.inf

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        await super().startup(sockets)
        self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._app.begin_shutdown()
        if sig == signal.SIGTERM and self._shutdown_delay_s > 0 and self._exit_at_s == math.inf:
            self._exit_at_s = time.monotonic() + self._shutdown_delay_s
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        self.should_exit |= time.monotonic() >= self._exit_at_s
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own raises the signal again at the end, so a clean stop would show as a death by signal.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
