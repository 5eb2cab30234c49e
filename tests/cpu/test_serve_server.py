"""The server as a process: where it listens and how it ends."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from serve.server import listen, serve, url_of
from tests.cpu import serve_engine
from tests.cpu.serve_engine import (
    SLOW,
    TinyEngine,
    connect,
    expected_vectors,
    make_app,
    post_bytes,
    read_replies,
)


class ServerProcess:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.url = self.next_line()

    def next_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def release(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def begin_to_stop(self, number: signal.Signals) -> None:
        """Returns when the process has taken the signal: its port is closed then."""
        self.process.send_signal(number)
        with contextlib.suppress(ConnectionError):
            while True:
                connect(self.url).close()
                time.sleep(0.01)


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with started() as server:
        yield server


@contextlib.contextmanager
def started(**settings: float) -> Iterator[ServerProcess]:
    command = [sys.executable, "-m", serve_engine.__name__, json.dumps(settings)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield ServerProcess(process)
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_an_idle_server(server: ServerProcess, number: signal.Signals) -> None:
    with connect(server.url):
        server.process.send_signal(number)
        _, log = server.process.communicate(timeout=30)
    assert (server.process.returncode, log) == (0, "")


def test_requests_are_answered_before_the_end(server: ServerProcess) -> None:
    head, body = post_bytes("a").split(b"\r\n\r\n")
    with connect(server.url) as running, connect(server.url) as queued, connect(server.url) as writing:
        running.sendall(post_bytes(SLOW))
        assert server.next_line() == "entered"
        queued.sendall(post_bytes("queued"))
        writing.sendall(head + b"\r\n\r\n" + body[:5])
        # The loop takes the bytes of all three before it gets to a connection that comes later.
        with connect(server.url) as later:
            later.sendall(b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n")
            read_replies(later)

        server.begin_to_stop(signal.SIGTERM)
        writing.sendall(body[5:])
        server.release()
        for connection, text in ((running, SLOW), (queued, "queued"), (writing, "a")):
            (reply,) = read_replies(connection)
            assert reply.status == 200
            assert str(expected_vectors([text])[0][0]) in reply.body.decode()
    _, log = server.process.communicate(timeout=30)
    assert (server.process.returncode, log) == (0, "")


def test_second_interrupt_does_not_wait(server: ServerProcess) -> None:
    with connect(server.url) as running:
        running.sendall(post_bytes(SLOW))
        assert server.next_line() == "entered"
        server.begin_to_stop(signal.SIGINT)
        server.process.send_signal(signal.SIGINT)
        server.process.communicate(timeout=30)
    assert server.process.returncode == 130


def test_readiness_ends_before_connections_are_refused() -> None:
    with started(shutdown_delay_s=1.5) as server:
        assert httpx.get(f"{server.url}/health/ready").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + 1.2
        while (reply := httpx.get(f"{server.url}/health/ready")).status_code == 200:
            assert time.monotonic() < deadline_s
        assert (reply.status_code, reply.json()) == (503, {"status": "stopping"})
        # Who has not seen it yet is answered all the same.
        assert httpx.post(f"{server.url}/create_embedding", json={"text": "a"}).status_code == 200
        assert httpx.get(f"{server.url}/health/live").status_code == 200
        _, log = server.process.communicate(timeout=30)
    assert (server.process.returncode, log) == (0, "")


def test_an_interrupt_does_not_wait_for_balancers() -> None:
    with started(shutdown_delay_s=1000) as server:
        server.begin_to_stop(signal.SIGINT)
        _, log = server.process.communicate(timeout=30)
    assert (server.process.returncode, log) == (0, "")


def test_the_drain_has_a_deadline() -> None:
    with started(drain_s=1) as server, connect(server.url) as running, connect(server.url) as queued:
        running.sendall(post_bytes(SLOW))
        assert server.next_line() == "entered"
        queued.sendall(post_bytes("queued"))
        server.begin_to_stop(signal.SIGTERM)
        start_s = time.monotonic()
        server.process.wait(timeout=30)  # `communicate` would close the pipe that the forward waits at
        assert time.monotonic() - start_s < 10 and server.process.stderr is not None
        log = server.process.stderr.read()
    assert "2 running task(s)" in log and "the device is still busy after 1 s" in log
    assert server.process.returncode == 0


def test_port_in_use() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            serve(make_app(TinyEngine()), "127.0.0.1", port, on_listening=print)


def test_unknown_host() -> None:
    with pytest.raises(OSError):
        serve(make_app(TinyEngine()), "host.invalid", 0, on_listening=print)


def test_url() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert url_of(listener, "127.0.0.1") == f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.skipif(not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"), reason="no IPv6")
def test_ipv6_url_has_brackets() -> None:
    with listen("::1", 0) as listener:
        assert url_of(listener, "::1") == f"http://[::1]:{listener.getsockname()[1]}"
