"""The queue, the lease of the weights, and /health, which shows both."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from serve.batcher import Batcher
from serve.errors import Unavailable
from serve.metrics import Metrics
from serve.queue import Answer
from tests.cpu.serve_engine import (
    DIM,
    NOT_FINITE,
    SLOW,
    TinyEngine,
    connect,
    expected_array,
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
        ("max_seq", TinyEngine.maxseq),
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


def test_a_device_that_was_lost_is_taken_again(
    client: httpx.Client, engine: TinyEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.batcher._RETRY_S", 0.1)
    engine.forward_error, engine.reload_error = RuntimeError("the device is lost"), RuntimeError("not yet")
    reply = embed(client)
    assert (reply.status_code, reply.json()) == (500, {"error": "embedding failed: the device is lost"})
    assert "Traceback" in caplog.text
    report = health(client)
    assert (report["status"], report["requests"]) == ("unhealthy", 0)
    ready = client.get("/health/ready")
    assert (ready.status_code, ready.json()) == (503, {"status": "unhealthy"})
    assert client.get("/health/live").json() == {"status": "live"}
    eventually(lambda: caplog.text.count("not yet") >= 2)

    # Nobody asks for it: a server that is not ready gets no requests.
    engine.forward_error = engine.reload_error = None
    eventually(lambda: health(client)["status"] == "healthy")
    assert client.get("/health/ready").json() == {"status": "ready"}
    assert embed(client).status_code == 200


def test_tokenizer_failure(client: httpx.Client, engine: TinyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(texts: list[str]) -> None:
        raise ValueError("no such vocabulary")

    monkeypatch.setattr(engine, "tokenize_counted", fail)
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
            "max_seq": TinyEngine.maxseq,
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


def test_what_waits_shares_a_forward(client: httpx.Client, engine: TinyEngine) -> None:
    texts = [f"text {index}" for index in range(10)]
    with ThreadPoolExecutor(16) as threads:
        slow = threads.submit(embed, client, SLOW)
        assert engine.entered.wait(30)
        replies = [threads.submit(embed, client, text) for text in texts]
        other = threads.submit(client.post, "/create_embedding", json={"text": "other", "normalize": False})
        eventually(lambda: {*texts, "other"} <= {*engine.tokenized})
        engine.released.set()
        for text, reply in zip(texts, replies, strict=True):
            assert reply.result().json()["embeddings"] == expected_vectors([text])
        assert other.result().json()["embeddings"] == expected_vectors(["other"], normalize=False)
        slow.result()
    assert sorted(map(len, engine.batches)) == [1, 1, len(texts)]


def test_a_query_passes_the_documents_that_fill_the_device(client: httpx.Client, engine: TinyEngine) -> None:
    document, query = "long " * 400, "query"
    assert 2 * len(document) < engine.max_batch_tokens < 3 * len(document)
    with ThreadPoolExecutor(16) as threads:
        slow = threads.submit(embed, client, SLOW)
        assert engine.entered.wait(30)
        documents = client.build_request("POST", "/create_embedding", json={"texts": [document] * 8})
        replies = [threads.submit(client.send, documents) for _ in range(3)]
        eventually(lambda: engine.tokenized.count(document) == 24)
        replies.append(threads.submit(embed, client, query))
        eventually(lambda: query in engine.tokenized)
        time.sleep(0.1)  # what has been tokenised is queued in the same turn of the event loop, but for this check
        engine.released.set()
        assert all(reply.result().status_code == 200 for reply in [*replies, slow])
    # Behind at most the forward that had been taken ahead when it came.
    order = [b"<query>" in batch for batch in engine.batches]
    assert order.index(True) <= 2 and len(order) == 13


def test_a_text_without_a_vector_is_its_own_request_s_error(client: httpx.Client, engine: TinyEngine) -> None:
    with ThreadPoolExecutor(8) as threads:
        slow = threads.submit(embed, client, SLOW)
        assert engine.entered.wait(30)
        bodies = [
            {"text": "fine"},
            {"texts": ["a", NOT_FINITE]},
            {"texts": ["b", NOT_FINITE, "c"], "on_error": "null"},
        ]
        replies = [threads.submit(client.post, "/create_embedding", json=body) for body in bodies]
        eventually(lambda: engine.tokenized.count(NOT_FINITE) == 2 and "fine" in engine.tokenized)
        engine.released.set()
        fine, failed, partial = [reply.result() for reply in replies]
        slow.result()
    assert fine.json()["embeddings"] == expected_vectors(["fine"])
    assert (failed.status_code, failed.json()) == (500, {"error": "embedding failed: texts[1]: not finite"})
    b, missing, c = partial.json()["embeddings"]
    assert [b, c] == expected_vectors(["b", "c"]) and missing is None
    assert partial.json()["errors"] == [{"index": 1, "error": "not finite"}]
    assert health(client)["status"] == "healthy"


def test_too_much_waiting_is_429_and_passes(engine: TinyEngine) -> None:
    with running(make_app(engine, max_queue_tokens=100)) as url, httpx.Client(base_url=url) as client:
        with ThreadPoolExecutor(8) as threads:
            slow = threads.submit(embed, client, SLOW)
            assert engine.entered.wait(30)
            waiting = threads.submit(embed, client, "waits " * 50)
            eventually(lambda: "waits " * 50 in engine.tokenized)
            for _ in range(3):
                refused = embed(client, "one more")
                assert refused.status_code == 429
                assert refused.json() == {"error": "overloaded: 302 tokens wait, 100 may; try again later"}
                assert int(refused.headers["retry-after"]) >= 1
            assert "one more" not in engine.tokenized
            engine.released.set()
            assert (slow.result().status_code, waiting.result().status_code) == (200, 200)
        assert embed(client, "one more").status_code == 200
        lines = client.get("/metrics").text.splitlines()
    assert 'embed_requests_total{route="/create_embedding",status="429"} 3.0' in lines
    assert "embed_queue_tokens 0.0" in lines


def test_a_failed_forward_fails_whose_texts_it_held(client: httpx.Client, engine: TinyEngine) -> None:
    many = [f"{index} of many" for index in range(5 * engine.max_batch_texts)]
    engine.forward_error = RuntimeError("the launch failed")
    reply = client.post("/create_embedding", json={"texts": many})
    assert (reply.status_code, reply.json()) == (500, {"error": "embedding failed: the launch failed"})
    # What is left of the request is not computed: it has no answer to go into.
    assert engine.num_forwards == 1
    engine.forward_error = None
    assert client.post("/create_embedding", json={"texts": many}).json()["embeddings"] == expected_vectors(many)


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


def make_batcher(engine: TinyEngine) -> Batcher:
    return Batcher(engine, engine, unload_after_s=0, max_queue_tokens=1 << 20, metrics=Metrics())


def test_stop_answers_what_is_queued(engine: TinyEngine) -> None:
    async def scenario() -> None:
        batcher = make_batcher(engine)
        replies = [submit(batcher, [text]) for text in ("a", "b", "c")]
        batcher.start()
        await batcher.stop(30)
        for text, reply in zip("abc", replies, strict=True):
            assert np.array_equal((await reply).vectors, expected_array([text]))
        with pytest.raises(Unavailable):
            submit(batcher, ["late"])

    def submit(batcher: Batcher, texts: list[str]) -> asyncio.Future[Answer]:
        ids, offsets, _ = engine.tokenize_counted(texts)
        return batcher.submit(ids, offsets, normalize=True)

    asyncio.run(scenario())


def test_no_thread_is_left(engine: TinyEngine) -> None:
    before = threading.stack_size()
    with running(make_app(engine, unload_after_s=60)):
        names = {thread.name for thread in threading.enumerate()}
    assert "device" in names
    assert "device" not in {thread.name for thread in threading.enumerate()}
    assert threading.stack_size() == before
