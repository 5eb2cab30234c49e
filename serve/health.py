"""GET /health and GET /: what the server holds and has done, without waiting for the engine."""

import time
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
