"""Bytes on the wire: slow, large, malformed and pipelined requests, and answers to clients that still write."""

import json
import socket
from collections.abc import Callable, Iterator

import pytest

from serve.body import BodyLimits
from serve.connection import Connection
from tests.cpu.serve_engine import (
    SLOW,
    Reply,
    TinyEngine,
    connect,
    expected_vectors,
    make_app,
    post_bytes,
    read_replies,
    running,
)

MAX_BODY_BYTES = 100_000
TOKEN = "s3cret"
HEALTH = b"GET /health HTTP/1.1\r\nhost: test\r\n\r\n"


@pytest.fixture
def engine() -> TinyEngine:
    return TinyEngine()


@pytest.fixture
def url(engine: TinyEngine) -> Iterator[str]:
    with running(make_app(engine, body=BodyLimits(max_bytes=MAX_BODY_BYTES))) as url:
        yield url


def talk(url: str, *parts: bytes) -> list[Reply]:
    with connect(url) as connection:
        for part in parts:
            connection.sendall(part)
        return read_replies(connection)


def only(replies: list[Reply]) -> Reply:
    assert len(replies) == 1, replies
    return replies[0]


def post_head(*lines: bytes) -> bytes:
    return b"".join(b"%b\r\n" % line for line in (b"POST /create_embedding HTTP/1.1", b"host: test", *lines, b""))


def vectors(reply: Reply) -> list[list[float]]:
    assert reply.status == 200, reply
    embeddings: list[list[float]] = json.loads(reply.body)["embeddings"]
    return embeddings


def test_pipelined_requests_are_answered_in_order(url: str) -> None:
    texts = ["a", "b", "c", "d"]
    requests = [post_bytes(text) for text in texts[:-1]] + [post_bytes(texts[-1], close=True)]
    replies = talk(url, b"".join(requests))
    assert [vectors(reply) for reply in replies] == [expected_vectors([text]) for text in texts]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"rubbish\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nbad header: x\r\n\r\n",
        b"GET /h\xc3\xa4lth HTTP/1.1\r\nhost: test\r\n\r\n",
        b"CONNECT test:80 HTTP/1.1\r\nhost: test\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        post_head(b"content-length: 4", b"transfer-encoding: chunked") + b"0\r\n\r\n",
        post_head(b"transfer-encoding: chunked", b"content-length: 4") + b"0\r\n\r\n",
        post_head(b"content-length: 4", b"content-length: 5") + b"abcd",
        post_head(b"content-length: 4", b"content-length: 4") + b"abcd",
        post_head(b"content-length: -1"),
        post_head(b"content-length: 99999999999999999999999"),
        post_head(b"transfer-encoding: chunked") + b"zz\r\n",
    ],
)
def test_malformed_request(url: str, engine: TinyEngine, request_bytes: bytes) -> None:
    reply = only(talk(url, request_bytes))
    assert (reply.status, reply.error) == (400, "malformed HTTP request")
    assert reply.headers["connection"] == "close"
    assert engine.num_forwards == 0


@pytest.mark.parametrize(
    "tail",
    [
        b"rubbish\r\n\r\n",
        post_head(b"transfer-encoding: chunked") + b"zz\r\n",
    ],
)
def test_malformed_request_waits_for_its_turn(url: str, tail: bytes) -> None:
    first, second, third = talk(url, post_bytes("a") + post_bytes("b") + tail)
    assert vectors(first) == expected_vectors(["a"])
    assert vectors(second) == expected_vectors(["b"])
    assert (third.status, third.error) == (400, "malformed HTTP request")


def test_malformed_request_on_a_kept_connection(url: str) -> None:
    with connect(url) as connection:
        connection.sendall(HEALTH)
        connection.recv(1)
        connection.sendall(b"rubbish\r\n\r\n")
        replies = read_replies(connection)
    assert replies[-1].status == 400


def test_slow_head(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "head_s", 0.3)
    reply = only(talk(url, b"GET /health HTTP/1.1\r\nx-sl"))
    assert (reply.status, reply.error) == (408, "the request head did not arrive within 0.3 s")
    assert reply.headers["connection"] == "close"


def test_slow_head_on_a_kept_connection(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "head_s", 0.3)
    with connect(url) as connection:
        connection.sendall(HEALTH)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"GET /heal")
        assert only(read_replies(connection)).status == 408


def test_silent_connection_is_closed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "head_s", 0.3)
    assert talk(url) == []


def test_head_deadline_ends_with_the_head(url: str, engine: TinyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "head_s", 0.3)
    with connect(url) as connection:
        connection.sendall(post_bytes(SLOW, close=True))
        assert engine.entered.wait(30)
        assert not engine.released.wait(0.5)
        engine.released.set()
        assert only(read_replies(connection)).status == 200


def test_large_head(url: str) -> None:
    fields = b"".join(b"x-%d: %b\r\n" % (index, b"v" * 1000) for index in range(400))
    reply = only(talk(url, b"GET /health HTTP/1.1\r\n", fields))
    assert (reply.status, reply.error) == (431, "the request head is too large")


def test_slow_body(engine: TinyEngine) -> None:
    with running(make_app(engine, body=BodyLimits(read_s=0.1, drain_s=0.1))) as url:
        reply = only(talk(url, post_head(b"content-length: 100") + b'{"te'))
    assert (reply.status, reply.error) == (408, "the body did not arrive within 0.1 s")
    assert reply.headers["connection"] == "close"


def test_body_may_fill_the_limit(url: str) -> None:
    body = b'{"text":"a"}'.ljust(MAX_BODY_BYTES)
    head = post_head(b"connection: close", b"content-length: %d" % len(body))
    assert vectors(only(talk(url, head + body))) == expected_vectors(["a"])


def declared_body(connection: socket.socket) -> None:
    connection.sendall(post_head(b"connection: close", b"content-length: 190000"))
    connection.sendall(b" " * 190_000)


def chunked_body(connection: socket.socket) -> None:
    connection.sendall(post_head(b"connection: close", b"transfer-encoding: chunked"))
    for _ in range(19):
        connection.sendall(b"2710\r\n" + b" " * 10_000 + b"\r\n")
    connection.sendall(b"0\r\n\r\n")


@pytest.mark.parametrize("write_body", [declared_body, chunked_body])
def test_large_body_is_refused_while_the_client_writes(
    url: str, engine: TinyEngine, write_body: Callable[[socket.socket], None]
) -> None:
    with connect(url) as connection:
        write_body(connection)
        reply = only(read_replies(connection))
    assert (reply.status, reply.error) == (413, "the body is too large: at most 100000 bytes")
    assert engine.num_forwards == 0


def test_body_declared_too_large_is_refused_before_it_comes(url: str) -> None:
    with connect(url) as connection:
        connection.sendall(post_head(b"content-length: 190000"))
        answered = connection.recv(65536)
    assert answered.startswith(b"HTTP/1.1 413 ")
    assert b"\r\nconnection: close\r\n" in answered


def test_endless_body_is_cut(engine: TinyEngine) -> None:
    with running(make_app(engine, body=BodyLimits(max_bytes=1000, drain_s=30))) as url:
        with connect(url) as connection, pytest.raises(ConnectionError):
            connection.sendall(post_head(b"content-length: 1000000000"))
            for _ in range(10_000):
                connection.sendall(b" " * 100_000)


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"POST /create_embedding HTTP/1.1", 401),
        (b"POST /nothing HTTP/1.1", 404),
        (b"POST /health HTTP/1.1", 405),
    ],
)
def test_early_answers_arrive_while_the_client_writes(engine: TinyEngine, request_line: bytes, status: int) -> None:
    with running(make_app(engine, token=TOKEN)) as url, connect(url) as connection:
        connection.sendall(request_line + b"\r\nhost: test\r\ncontent-length: 4000000\r\n\r\n")
        answered = connection.recv(65536)
        for _ in range(40):
            connection.sendall(b" " * 100_000)
        assert connection.recv(65536) == b""
    assert answered.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nconnection: close\r\n" in answered


def test_expect_continue(url: str) -> None:
    body = b'{"text":"a"}'
    with connect(url) as connection:
        connection.sendall(post_head(b"expect: 100-continue", b"connection: close", b"content-length: 12"))
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert vectors(only(read_replies(connection))) == expected_vectors(["a"])


def test_refused_client_that_expects_continue_is_not_waited_for(engine: TinyEngine) -> None:
    with running(make_app(engine, token=TOKEN, body=BodyLimits(drain_s=1000))) as url:
        reply = only(talk(url, post_head(b"expect: 100-continue", b"content-length: 12")))
    assert reply.status == 401


def test_get_with_a_body(url: str) -> None:
    lines = b"host: test\r\nconnection: close\r\ncontent-length: 3\r\n\r\n"
    reply = only(talk(url, b"GET /create_embedding?text=a HTTP/1.1\r\n", lines, b"abc"))
    assert vectors(reply) == expected_vectors(["a"])


def test_upgrade_is_ignored(url: str) -> None:
    upgrade = b"host: test\r\nconnection: upgrade, close\r\nupgrade: h2c\r\n\r\n"
    assert only(talk(url, b"GET /health HTTP/1.1\r\n" + upgrade)).status == 200


def test_log_has_neither_query_nor_token(
    engine: TinyEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(0)
    engine.forward_error = RuntimeError("logged")
    with running(make_app(engine, token=TOKEN)) as url:
        target = b"/create_embedding?token=" + TOKEN.encode() + b"&text=from-the-query"
        authorization = b"authorization: Bearer " + TOKEN.encode()
        assert only(talk(url, b"GET %b HTTP/1.1\r\nconnection: close\r\n\r\n" % target)).status == 500
        assert only(talk(url, b"GET %b HTTP/1.1\r\nbad header\r\n\r\n" % target)).status == 400
        body = post_head(authorization, b"connection: close", b"content-length: 1") + b"{"
        assert only(talk(url, body)).status == 400
    assert "logged" in caplog.text
    assert TOKEN not in caplog.text
    assert "from-the-query" not in caplog.text
