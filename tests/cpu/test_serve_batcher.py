"""The queue, the lease of the weights, and /health, which shows both."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from serve.batcher import Batcher
from serve.errors import Unavailable
from tests.cpu.serve_engine import (
    DIM,
    SLOW,
    TinyEngine,
    connect,
    expected_vectors,
    make_app,
    post_bytes,
    running,
)


@pytest.fixture
def engine() -> TinyEngine:
    return TinyEngine()


@pytest.fixture
def client(engine: TinyEngine) -> Iterator[httpx.Client]:
    with running(make_app(engine)) as url, httpx.Client(base_url=url) as client:
        yield client


@pytest.fixture
def leased(engine: TinyEngine) -> Iterator[httpx.Client]:
    """A server that gives the weights back as soon as it may."""
    with running(make_app(engine, unload_after_s=0.01)) as url, httpx.Client(base_url=url) as client:
        yield client


def embed(client: httpx.Client, text: str = "a") -> httpx.Response:
    return client.post("/create_embedding", json={"text": text})


def health(client: httpx.Client) -> Any:
    return client.get("/health").json()


def eventually(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def wait_until_unloaded(client: httpx.Client) -> None:
    eventually(lambda: not health(client)["model_loaded"])


def test_health(client: httpx.Client) -> None:
    report = health(client)
    assert report == client.get("/").json()
    assert list(report.items()) == [
        ("status", "healthy"),
        ("model", "tiny-model"),
        ("model_loaded", True),
        ("unload_after_s", 0),
        ("loads", 1),
        ("unloads", 0),
        ("last_load_ms", 0),
        ("device", "cpu"),
        ("device_name", "tiny"),
        ("dimension", DIM),
        ("requests", 0),
        ("max_seq", 16),
        ("pool_blocks", 1),
        ("pool_idle_bytes", 4096),
        ("kernels", 3),
        ("weights_bytes", 1 << 20),
        ("workspace_bytes", 4096),
        ("recomputed", 5),
    ]
    head = client.head("/health")
    assert (head.status_code, head.content) == (200, b"")


def test_health_counts_successful_requests(client: httpx.Client) -> None:
    embed(client)
    client.post("/create_embedding", json={"texts": ["a", "b"]})
    client.post("/create_embedding", json={})
    assert health(client)["requests"] == 2


def test_health_answers_while_a_forward_runs(client: httpx.Client, engine: TinyEngine) -> None:
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(embed, client, SLOW)
        assert engine.entered.wait(30)
        report = health(client)
        engine.released.set()
        assert slow.result().status_code == 200
    assert (report["status"], report["requests"], report["pool_idle_bytes"]) == ("healthy", 0, 0)
    assert health(client)["pool_idle_bytes"] == 4096


def test_device_fault(client: httpx.Client, engine: TinyEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine.forward_error = RuntimeError("the device is lost")
    reply = embed(client)
    assert (reply.status_code, reply.json()) == (500, {"error": "embedding failed: the device is lost"})
    assert "Traceback" in caplog.text
    report = health(client)
    assert (report["status"], report["requests"]) == ("unhealthy", 0)

    engine.forward_error, engine.ok = None, True
    assert embed(client).status_code == 200
    assert health(client)["status"] == "healthy"


def test_tokenizer_failure(client: httpx.Client, engine: TinyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(texts: list[str]) -> None:
        raise ValueError("no such vocabulary")

    monkeypatch.setattr(engine, "tokenize_batch", fail)
    for text in ("short", "long " * 1000):
        reply = embed(client, text)
        assert (reply.status_code, reply.json()) == (500, {"error": "embedding failed: no such vocabulary"})


def test_unload_and_reload(leased: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    wait_until_unloaded(leased)
    report = health(leased)
    assert list(report)[:8] == [
        "status",
        "model",
        "model_loaded",
        "unload_after_s",
        "loads",
        "unloads",
        "last_load_ms",
        "idle_s",
    ]
    assert report["idle_s"] > 0
    assert (
        report
        | {
            "status": "healthy",
            "loads": 1,
            "unloads": 1,
            "device": "none",
            "device_name": "none (weights unloaded)",
            "dimension": DIM,
            "max_seq": 16,
            "pool_blocks": 0,
            "pool_idle_bytes": 0,
        }
        == report
    )

    assert embed(leased).json()["embeddings"] == expected_vectors(["a"])
    wait_until_unloaded(leased)
    report = health(leased)
    assert (report["loads"], report["unloads"], report["requests"]) == (2, 2, 1)
    assert "weights unloaded: idle for" in caplog.text
    assert "weights loaded:" in caplog.text


def test_weights_stay_while_a_job_is_queued(engine: TinyEngine) -> None:
    with running(make_app(engine, unload_after_s=1e-9)) as url, httpx.Client(base_url=url) as client:
        wait_until_unloaded(client)
        with ThreadPoolExecutor(2) as threads:
            slow = threads.submit(embed, client, SLOW)
            assert engine.entered.wait(30)
            # Time for some ticks to queue up before the job; without one the test shows nothing.
            assert not engine.released.wait(0.5)
            queued = threads.submit(embed, client, "queued")
            eventually(lambda: "queued" in engine.tokenized)
            engine.released.set()
            assert (slow.result().status_code, queued.result().status_code) == (200, 200)
        assert health(client)["loads"] == 2


def test_failed_reload(leased: httpx.Client, engine: TinyEngine) -> None:
    wait_until_unloaded(leased)
    engine.reload_error = MemoryError("no memory on the device")
    for _ in range(2):
        reply = embed(leased)
        assert reply.status_code == 503
        assert reply.json() == {"error": "weights not loaded: no memory on the device"}
    report = health(leased)
    assert (report["model_loaded"], report["loads"], report["requests"]) == (False, 1, 0)

    engine.reload_error = None
    assert embed(leased).status_code == 200
    assert health(leased)["loads"] == 2


def test_failed_unload(leased: httpx.Client, engine: TinyEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine.unload_error = RuntimeError("the context does not go away")
    # Loads the weights again, if they were given back before the error was set.
    assert embed(leased).status_code == 200
    unloads = health(leased)["unloads"]
    eventually(lambda: "weights not unloaded" in caplog.text)
    assert embed(leased).status_code == 200
    assert health(leased)["unloads"] == unloads


def test_departed_client_costs_no_forward(client: httpx.Client, engine: TinyEngine) -> None:
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(embed, client, SLOW)
        assert engine.entered.wait(30)
        with connect(str(client.base_url)) as departing:
            departing.sendall(post_bytes("nobody waits for this"))
            eventually(lambda: "nobody waits for this" in engine.tokenized)
        # By the answer to a later connection, the server has seen the earlier one close.
        with httpx.Client(base_url=client.base_url) as later:
            health(later)
        engine.released.set()
        assert slow.result().status_code == 200
    assert embed(client).status_code == 200
    assert engine.num_forwards == 2
    assert health(client)["requests"] == 2


def test_stop_answers_what_is_queued(engine: TinyEngine) -> None:
    async def scenario() -> None:
        batcher = Batcher(engine, engine, unload_after_s=0)
        replies = [batcher.submit(*engine.tokenize_batch([text]), normalize=True) for text in ("a", "b", "c")]
        batcher.start()
        await batcher.stop()
        vectors = [(await reply).tolist() for reply in replies]
        assert vectors == [expected.tolist() for expected in map(forward, ("a", "b", "c"))]
        with pytest.raises(Unavailable):
            batcher.submit(*engine.tokenize_batch(["late"]), normalize=True)

    def forward(text: str) -> Any:
        return engine.encode_ids(*engine.tokenize_batch([text]), normalize=True)

    asyncio.run(scenario())


def test_no_thread_is_left(engine: TinyEngine) -> None:
    before = threading.stack_size()
    with running(make_app(engine, unload_after_s=60)):
        names = {thread.name for thread in threading.enumerate()}
    assert {"device", "ticker"} <= names
    assert not {"device", "ticker"} & {thread.name for thread in threading.enumerate()}
    assert threading.stack_size() == before
