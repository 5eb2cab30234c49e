"""What is known of requests from outside: ids, the access log, /metrics, readiness."""

import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve.access import LogFile
from tests.cpu.serve_engine import NOT_FINITE, TinyEngine, make_app, running

TOKEN = "a-token-that-no-log-may-hold"


@pytest.fixture
def lines() -> list[bytes]:
    return []


@pytest.fixture
def client(lines: list[bytes]) -> Iterator[httpx.Client]:
    app = make_app(TinyEngine(), token=TOKEN, access_log=lines.append)
    with running(app) as url, httpx.Client(base_url=url, headers={"authorization": f"Bearer {TOKEN}"}) as client:
        yield client


def metrics(client: httpx.Client) -> dict[tuple[str, ...], float]:
    """The value of each sample, by its name and the values of its labels."""
    reply = client.get("/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = text_string_to_metric_families(reply.text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


@pytest.mark.parametrize("path", ["/create_embedding?text=a", "/health", "/nothing"])
def test_a_client_s_request_id_comes_back(client: httpx.Client, path: str) -> None:
    assert client.get(path, headers={"x-request-id": "Mine-1/2=3"}).headers["x-request-id"] == "Mine-1/2=3"


@pytest.mark.parametrize("bad", ["", "a b", "x" * 129, "a\tb", "ä"])
def test_an_id_that_a_log_could_not_hold_is_replaced(client: httpx.Client, bad: str) -> None:
    ids = {client.get("/health", headers=[(b"x-request-id", bad.encode())]).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3 and bad not in ids
    assert all(re.fullmatch(r"[0-9a-f]{16}-\d+", request_id) for request_id in ids)


def test_an_answer_tells_where_its_time_went(client: httpx.Client) -> None:
    timing = client.get("/create_embedding?text=a").headers["server-timing"]
    assert re.fullmatch(r"tokenize;dur=[\d.]+, queue;dur=[\d.]+, forward;dur=[\d.]+", timing)
    assert "server-timing" not in client.get("/health").headers


def test_the_access_log(client: httpx.Client, lines: list[bytes]) -> None:
    client.post(
        f"/create_embedding?token={TOKEN}",
        json={"texts": ["one", "x" * 9000]},
        headers={"x-request-id": "the-id", "x-secret": TOKEN},
    )
    client.get("/create_embedding", params={"text": "secret words"}, headers={"authorization": "Bearer wrong"})
    client.get("/nothing")
    entries = [json.loads(line) for line in lines]
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    assert TOKEN.encode() not in b"".join(lines) and b"secret" not in b"".join(lines)
    assert [(entry["method"], entry["path"], entry["status"]) for entry in entries] == [
        ("POST", "/create_embedding", 200),
        ("GET", "/create_embedding", 401),
        ("GET", "/nothing", 404),
    ]
    first = entries[0]
    assert (first["id"], first["client"]) == ("the-id", "127.0.0.1")
    assert (first["texts"], first["tokens"], first["truncated"]) == (2, 5 + 8192, 1)
    assert first["ms"] >= first["queue_ms"] + first["forward_ms"] > 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first["time"])


def test_a_log_that_cannot_be_written_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with running(make_app(TinyEngine(), access_log=LogFile(full))) as url, httpx.Client(base_url=url) as client:
            assert [client.get("/create_embedding?text=a").status_code for _ in range(3)] == [200] * 3
    finally:
        os.close(full)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["the access log cannot be written: No space left on device"]


def test_lines_of_the_log_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"before\n")
    with open(path, "ab", buffering=0) as file:
        LogFile(file.fileno())(b"after\n")
    assert path.read_bytes() == b"before\nafter\n"


def test_metrics_count_what_happened(client: httpx.Client) -> None:
    before = metrics(client)
    texts: dict[str, Any] = {"texts": ["one", "x" * 9000, NOT_FINITE], "on_error": "null"}
    assert client.post("/create_embedding", json=texts).status_code == 200
    assert client.post("/create_embedding", json={"text": NOT_FINITE}).status_code == 500
    assert client.post("/create_embedding", json={}).status_code == 400
    client.get("/nothing")
    client.get("/nothing/else")
    after = metrics(client)
    changes = {key: value - before.get(key, 0) for key, value in after.items()}
    num_tokens = 5 + 8192 + 2 * (len(NOT_FINITE) + 2)
    expected: dict[tuple[str, ...], float] = {
        ("embed_requests_total", "/create_embedding", "200"): 1,
        ("embed_requests_total", "/create_embedding", "500"): 1,
        ("embed_requests_total", "/create_embedding", "400"): 1,
        ("embed_requests_total", "other", "404"): 2,
        ("embed_texts_total",): 4,
        ("embed_tokens_total",): num_tokens,
        ("embed_truncated_texts_total",): 1,
        ("embed_failed_texts_total",): 2,
        ("embed_batch_tokens_sum",): num_tokens,
        ("embed_batch_texts_sum",): 4,
        ("embed_request_seconds_count", "queue"): 2,
        ("embed_request_seconds_count", "total"): 6,  # and the one that read them before
    }
    assert {key: changes[key] for key in expected} == expected
    assert changes["embed_forward_seconds_count",] == changes["embed_batch_texts_count",] > 0
    assert (after["embed_queue_tokens",], after["embed_healthy",], after["embed_loaded",]) == (0, 1, 1)
    assert (after["embed_kernels",], after["embed_graphs",], after["embed_weights_bytes",]) == (3, 2, 1 << 20)
    assert after["process_resident_memory_bytes",] > 1e6


def test_what_is_open_needs_no_token(client: httpx.Client) -> None:
    for path in ("/metrics", "/health", "/health/live", "/health/ready"):
        assert httpx.get(client.base_url.join(path)).status_code == 200
