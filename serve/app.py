"""The application: routes, and the batcher behind them for as long as it runs."""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.types import Receive, Scope, Send

from serve.access import Access
from serve.auth import require_token
from serve.batcher import Batcher
from serve.body import BodyGuard, BodyLimits
from serve.errors import EXCEPTION_HANDLERS
from serve.health import Readiness, health, live
from serve.metrics import Metrics, counter, gauge
from serve.native import NativeFormat
from serve.protocols import EmbeddingEngine, Lease
from serve.routing import Handler, route
from serve.service import EmbeddingService, Options, TextLimits


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    model_name: str
    normalize: bool = True
    """What a request gets that does not say."""
    truncate: bool = True
    """The same."""
    token: str | None = None
    """None leaves the server open."""
    unload_after_s: float = 0
    """Idle seconds after which the weights are given back; 0 keeps them."""
    max_queue_tokens: int = 1 << 20
    """With so many waiting, a request is refused: a second of work for a fast card."""
    drain_s: float = 30
    """Time for the answers that are owed when the server is told to end."""
    body: BodyLimits = field(default_factory=BodyLimits)
    texts: TextLimits = field(default_factory=TextLimits)
    access_log: Callable[[bytes], None] | None = None
    """Gets a line for each request."""

    def __post_init__(self) -> None:
        if self.token == "":
            raise ValueError("the token is empty")


class Application:
    """An ASGI application that must be run with its lifespan: the device thread lives in it."""

    def __init__(self, engine: EmbeddingEngine, lease: Lease, config: ServeConfig) -> None:
        metrics = Metrics()
        self._batcher = Batcher(
            engine,
            lease,
            unload_after_s=config.unload_after_s,
            max_queue_tokens=config.max_queue_tokens,
            metrics=metrics,
        )
        self._readiness = Readiness(self._batcher)
        self._drain_s = config.drain_s
        metrics.watch(lambda: _gauges(self._batcher))
        service = EmbeddingService(engine, self._batcher, metrics, config.texts)
        defaults = Options(config.normalize, config.truncate, keep_going=False)
        native = NativeFormat(service, model_name=config.model_name, defaults=defaults)
        report = health(self._batcher, model_name=config.model_name, unload_after_s=config.unload_after_s)
        routes: dict[str, dict[str, Handler]] = {
            "/create_embedding": {
                "GET": require_token(config.token, native.get),
                "POST": require_token(config.token, native.post),
            },
            "/": {"GET": report},
            "/health": {"GET": report},
            "/health/live": {"GET": live},
            "/health/ready": {"GET": self._readiness.handler},
            "/metrics": {"GET": metrics.handler()},
        }
        app = Starlette(
            routes=[route(path, handlers) for path, handlers in routes.items()],
            middleware=[Middleware(BodyGuard, limits=config.body)],
            exception_handlers=EXCEPTION_HANDLERS,
            lifespan=self._lifespan,
        )
        app.router.redirect_slashes = False
        # Around Starlette, whose own outermost layer answers what nobody expected.
        self._app = Access(app, metrics=metrics, routes=frozenset(routes), log=config.access_log)

    @property
    def drain_s(self) -> float:
        return self._drain_s

    def begin_shutdown(self) -> None:
        """Says to whoever asks that no more requests should come."""
        self._readiness.begin_shutdown()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._batcher.start()
        yield
        # Not in a `finally`: a forced end cancels the lifespan and must not wait for what is queued.
        await self._batcher.stop(self._drain_s)


def _gauges(batcher: Batcher) -> Iterator[Metric]:
    status, engine, queue = batcher.status, batcher.engine, batcher.queue
    yield gauge("embed_queue_tokens", "Tokens that wait for the device.", queue.num_tokens)
    yield gauge("embed_queue_texts", "Texts that wait for the device.", queue.num_texts)
    yield gauge("embed_healthy", "0 after a device fault, until the device is back.", status.ok)
    yield gauge("embed_loaded", "1 while the weights are on the device.", status.loaded)
    yield gauge("embed_kernels", "Kernels on the device.", status.kernel_count)
    yield gauge("embed_graphs", "Recorded forwards on the device.", engine.graph_count)
    yield gauge("embed_weights_bytes", "Device memory of the weights.", status.weights_bytes)
    yield gauge("embed_workspace_bytes", "Device memory of the workspace.", status.workspace_bytes)
    yield counter("embed_loads", "Times the weights were loaded.", status.loads)
    yield counter("embed_unloads", "Times the weights were given back.", status.unloads)
    yield counter("embed_recomputed_texts", "Texts computed again in f32.", status.recomputed)
