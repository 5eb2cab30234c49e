"""The application: routes, and the batcher behind them for as long as it runs."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.middleware import Middleware

from serve.auth import require_token
from serve.batcher import Batcher
from serve.body import BodyGuard, BodyLimits
from serve.errors import EXCEPTION_HANDLERS
from serve.health import health
from serve.native import NativeFormat
from serve.protocols import EmbeddingEngine, Lease
from serve.routing import route
from serve.service import EmbeddingService


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    model_name: str
    normalize: bool = True
    """What a request gets that does not say."""
    token: str | None = None
    """None leaves the server open."""
    unload_after_s: float = 0
    """Idle seconds after which the weights are given back; 0 keeps them."""
    body: BodyLimits = field(default_factory=BodyLimits)

    def __post_init__(self) -> None:
        if self.token == "":
            raise ValueError("the token is empty")


def create_app(engine: EmbeddingEngine, lease: Lease, config: ServeConfig) -> Starlette:
    """An ASGI application that must be run with its lifespan: the device thread lives in it."""
    batcher = Batcher(engine, lease, unload_after_s=config.unload_after_s)
    service = EmbeddingService(engine, batcher)
    native = NativeFormat(service, model_name=config.model_name, normalize=config.normalize)
    report = health(batcher, model_name=config.model_name, unload_after_s=config.unload_after_s)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        batcher.start()
        yield
        # Not in a `finally`: a forced end cancels the lifespan and must not wait for what is queued.
        await batcher.stop()

    app = Starlette(
        routes=[
            route(
                "/create_embedding",
                {
                    "GET": require_token(config.token, native.get),
                    "POST": require_token(config.token, native.post),
                },
            ),
            route("/", {"GET": report}),
            route("/health", {"GET": report}),
        ],
        middleware=[Middleware(BodyGuard, limits=config.body)],
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app
