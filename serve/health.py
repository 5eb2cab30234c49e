"""GET /health and GET /: what the server holds and has done, without waiting for the engine.

For supervisors, /health/live answers as long as the event loop runs, and /health/ready says whether to send requests.
"""

import time
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serve.batcher import Batcher, Status
from serve.responses import JsonResponse
from serve.routing import Handler


def health(batcher: Batcher, *, model_name: str, unload_after_s: float) -> Handler:
    async def answer(_: Request) -> Response:
        return JsonResponse(_report(batcher.status, model_name, unload_after_s))

    return answer


async def live(_: Request) -> Response:
    """GET /health/live."""
    return JsonResponse({"status": "live"})


class Readiness:
    """GET /health/ready: 503 from the begin of a shutdown, and while a device that was lost is not back.

    A server whose weights are unloaded is ready: the next request loads them.
    """

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._stopping = False

    def begin_shutdown(self) -> None:
        self._stopping = True

    async def handler(self, _: Request) -> Response:
        if self._stopping:
            return JsonResponse({"status": "stopping"}, HTTPStatus.SERVICE_UNAVAILABLE)
        if not self._batcher.status.ok:
            return JsonResponse({"status": "unhealthy"}, HTTPStatus.SERVICE_UNAVAILABLE)
        return JsonResponse({"status": "ready"})


def _report(status: Status, model_name: str, unload_after_s: float) -> dict[str, Any]:
    report: dict[str, Any] = {
        "status": "healthy" if status.ok else "unhealthy",
        "model": model_name,
        "model_loaded": status.loaded,
        "unload_after_s": unload_after_s,
        "loads": status.loads,
        "unloads": status.unloads,
        "last_load_ms": status.last_load_ms,
    }
    if not status.loaded:
        report["idle_s"] = round(time.monotonic() - status.idle_since_s, 3)
    return report | {
        "device": status.backend if status.loaded else "none",
        "device_name": status.device_name if status.loaded else "none (weights unloaded)",
        "dimension": status.dim,
        "requests": status.requests,
        "max_seq": status.maxseq,
        "pool_blocks": int(status.loaded),
        "pool_idle_bytes": status.workspace_bytes if status.loaded and not status.busy else 0,
        "kernels": status.kernel_count,
        "weights_bytes": status.weights_bytes if status.loaded else 0,
        "workspace_bytes": status.workspace_bytes if status.loaded else 0,
        "recomputed": status.recomputed,
    }
