"""Measures the HTTP server around an engine, beside the engine itself, in one process.

    python -m tools.bench_serve MODEL [--dtype T] [--seconds S] [--processes N] [--front-end]

The workloads of `tools/load_embed.py`, each beside what the engine does with such texts when it is called directly; and
a query now and then while documents fill the device, beside the longest forward. `--front-end` is the server's own part
alone: the model is a constant, everything else as it is, the access log too; beside it, a bare handler that gives a
constant after the same hop to a thread and back.
"""

import argparse
import asyncio
import contextlib
import json
import os
import queue
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from embed import Embed
from serve.access import LogFile
from serve.app import Application, ServeConfig
from serve.metrics import Metrics
from serve.server import Server, listen, url_of
from tools.load_embed import WORKLOADS, Report, Workload, run_load

DIM = 1024


@contextlib.contextmanager
def running(app: Any) -> Iterator[str]:
    """The URL of an application that is served from a thread of this process."""
    started = threading.Event()
    with listen("127.0.0.1", 0) as listener:
        server = Server(app, on_started=started.set)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            assert started.wait(60), "the server did not start"
            yield url_of(listener, "127.0.0.1")
        finally:
            server.should_exit = True
            thread.join()


class BareApplication:
    """Reads a body, hops to a thread and back, answers with a constant: what any such server must do."""

    drain_s = 5.0

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._hops: queue.SimpleQueue[asyncio.Future[None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()
        routes = [
            Route("/create_embedding", self._answer, methods=["POST"]),
            Route("/metrics", Metrics().handler()),
        ]
        self._app = Starlette(routes=routes)

    def begin_shutdown(self) -> None:
        """Nobody asks."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        await request.body()
        hop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._hops.put(hop)
        await hop
        return Response(self._body, media_type="application/json")

    def _work(self) -> None:
        while True:
            hop = self._hops.get()
            hop.get_loop().call_soon_threadsafe(hop.set_result, None)


class ConstantEngine:
    """An engine and its lease, whose model is a constant; tokenising is a real model's."""

    ok = loaded = True
    dim = DIM
    backend, device_name = "cpu", "a constant"
    max_batch_tokens, max_batch_texts = 16_384, 1024
    kernel_count = graph_count = weights_bytes = workspace_bytes = recomputed = 0

    def __init__(self, engine: Embed) -> None:
        self._engine = engine
        self._vectors = np.random.default_rng(0).standard_normal((self.max_batch_texts, DIM)).astype(np.float32)

    @property
    def maxseq(self) -> int:
        return self._engine.maxseq

    def tokenize_counted(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64], Sequence[int]]:
        return self._engine.tokenize_counted(texts)

    def prepare_ids(self, ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> int:
        return len(offsets) - 1

    def start_encode(self, prepared: int, normalize: bool | None = None) -> "_Done":
        return _Done(self._vectors[:prepared])

    def unload(self) -> None:
        """There is nothing to give back."""

    def reload(self) -> None:
        """There is nothing to load."""


class _Done:
    def __init__(self, vectors: NDArray[np.float32]) -> None:
        self._vectors = vectors

    def result(self) -> tuple[NDArray[np.float32], Mapping[int, Exception]]:
        return self._vectors, {}


def show(report: Report, remark: str = "") -> None:
    print(*report.lines(), sep="\n")
    if remark:
        print(f"    {remark}")
    sys.stdout.flush()


def bench_front_end(model: Path, seconds: float, processes: int) -> None:
    log = os.open(os.devnull, os.O_WRONLY)
    with Embed.open(model) as tokenizer:
        engine = ConstantEngine(tokenizer)
        for name in ("one", "64 clients"):
            workload = WORKLOADS[name]
            config = ServeConfig(model_name="constant", access_log=LogFile(log))
            costs: dict[str, list[float]] = {"bare": [], "ours": []}
            for _ in range(3):
                with running(BareApplication(b"x" * 5500)) as url:
                    bare = run_load(url, workload, seconds=seconds, processes=processes)
                with running(Application(engine, engine, config)) as url:
                    ours = run_load(url, workload, seconds=seconds, processes=processes)
                costs["bare"].append(bare.server_cpu_us)
                costs["ours"].append(ours.server_cpu_us)
            show(bare, "a bare handler")
            show(ours, "everything but the model")
            medians = {of: statistics.median(values) for of, values in costs.items()}
            print(
                f"{name}: {medians['ours']:.0f} us of CPU a request, the bare handler {medians['bare']:.0f} us: "
                f"{medians['ours'] / medians['bare']:.2f} x; of three runs each: "
                + "; ".join(f"{of} {', '.join(f'{value:.0f}' for value in values)}" for of, values in costs.items()),
                flush=True,
            )


def direct_ms(engine: Embed, workload: Workload, seconds: float) -> list[float]:
    """Times of `encode` with the texts of one request after another."""
    requests = [json.loads(body)["texts"] for body in workload.bodies(seed=0)]
    engine.encode(requests[0])
    times_ms: list[float] = []
    end_s = time.perf_counter() + seconds
    while not times_ms or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        engine.encode(requests[len(times_ms) % len(requests)])
        times_ms.append(1e3 * (time.perf_counter() - start_s))
    return times_ms


def bench_engine(model: Path, dtype: str, seconds: float, processes: int) -> None:
    with Embed.open(model, dtype=dtype) as engine:
        print(f"{engine.name}: {engine.dtype} on {engine.device_name}", flush=True)
        direct = {name: direct_ms(engine, WORKLOADS[name], min(seconds, 3)) for name in WORKLOADS}
        with running(Application(engine, engine, ServeConfig(model_name=engine.name))) as url:
            for name, workload in WORKLOADS.items():
                report = run_load(url, workload, seconds=seconds, processes=processes)
                median_ms = statistics.median(direct[name])
                rate = workload.num_texts / median_ms * 1e3
                show(
                    report,
                    f"encode directly: {median_ms:.2f} ms; the server's p50 is "
                    f"{report.latency_ms['p50'] - median_ms:+.2f} ms, its texts/s are "
                    f"{report.texts_per_s / rate:.2f} of the {rate:,.0f} of direct calls",
                )
            # Of the largest forward there is.
            full = Workload("full", 1, engine.max_batch_tokens // 512, 500, 500)
            forward_ms = statistics.median(direct_ms(engine, full, 2))
            reports: list[Report] = []

            def query() -> None:
                reports.append(run_load(url, WORKLOADS["one"], seconds=seconds, processes=2, rate=50, warm_up_s=0))

            documents = run_load(
                url, WORKLOADS["documents"], seconds=seconds + 4, processes=processes, warm_up_s=0.1, beside=query
            )
            show(documents)
            show(
                reports[-1],
                f"among documents; the largest forward takes {forward_ms:.1f} ms: p99 is "
                f"{reports[-1].latency_ms['p99'] / forward_ms:.2f} of it",
            )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--front-end", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.front_end:
        bench_front_end(arguments.model, arguments.seconds, arguments.processes)
    else:
        bench_engine(arguments.model, arguments.dtype, arguments.seconds, arguments.processes)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
