"""A tiny engine, so that the server is tested without a model; run as a script, it is served in a process."""

import contextlib
import hashlib
import itertools
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve.app import Application, ServeConfig
from serve.server import Server, listen, serve, url_of

DIM = 8
SLOW = "a text whose forward waits for `released`"
NOT_FINITE = "a text that has no vector"


class TinyEngine:
    """Engine and lease in one. A token is a byte. A vector is drawn from the hash of its text's ids, so it tells texts
    apart."""

    dim = DIM
    maxseq = 8192
    max_batch_tokens = 4096
    max_batch_texts = 64
    backend = "cpu"
    device_name = "tiny"
    graph_count = 2
    kernel_count = 3
    weights_bytes = 1 << 20
    workspace_bytes = 4096
    recomputed = 5

    def __init__(self) -> None:
        self.ok = True
        self.loaded = True
        self.batches: list[list[bytes]] = []
        self.tokenized: list[str] = []
        self.entered = threading.Event()
        self.released = threading.Event()
        self.forward_error: Exception | None = None
        self.unload_error: Exception | None = None
        self.reload_error: Exception | None = None

    def tokenize_counted(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64], list[int]]:
        self.tokenized += texts
        encoded = [_encoded(text) for text in texts]
        kept = [_cut(text, self.maxseq) for text in encoded]
        offsets = np.cumsum([0, *map(len, kept)], dtype=np.int64)
        return np.frombuffer(b"".join(kept), np.uint8).astype(np.int32), offsets, [*map(len, encoded)]

    def prepare_ids(self, ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> list[bytes]:
        return [bytes(ids[start:end].astype(np.uint8)) for start, end in itertools.pairwise(offsets)]

    def start_encode(self, prepared: list[bytes], normalize: bool | None = None) -> "_Forward":
        assert self.loaded
        self.batches.append(prepared)
        return _Forward(self, prepared, bool(normalize))

    @property
    def num_forwards(self) -> int:
        return len(self.batches)

    def wait_for_release(self) -> None:
        assert self.released.wait(30)

    def unload(self) -> None:
        if self.unload_error is not None:
            raise self.unload_error
        self.loaded = False

    def reload(self) -> None:
        if self.reload_error is not None:
            raise self.reload_error
        self.loaded = self.ok = True


class _Forward:
    """Done when it is asked for, as a device works meanwhile."""

    def __init__(self, engine: TinyEngine, texts: list[bytes], normalize: bool) -> None:
        self._engine = engine
        self._texts = texts
        self._normalize = normalize

    def result(self) -> tuple[NDArray[np.float32], dict[int, Exception]]:
        if self._engine.forward_error is not None:
            self._engine.ok = self._engine.loaded = False
            raise self._engine.forward_error
        if _encoded(SLOW) in self._texts:
            self._engine.entered.set()
            self._engine.wait_for_release()
        failures = {i: ValueError("not finite") for i, text in enumerate(self._texts) if text == _encoded(NOT_FINITE)}
        return np.stack([_vector(text, self._normalize) for text in self._texts]), dict(failures)


def expected_array(texts: Sequence[str], *, normalize: bool = True) -> NDArray[np.float32]:
    return np.stack([_vector(_cut(_encoded(text), TinyEngine.maxseq), normalize) for text in texts])


def expected_vectors(texts: Sequence[str], *, normalize: bool = True) -> list[list[float]]:
    """As a client reads them: decimal text of a float32, parsed as a double."""
    return [[float(str(value)) for value in vector] for vector in expected_array(texts, normalize=normalize)]


def _encoded(text: str) -> bytes:
    return b"<" + text.encode() + b">"


def _cut(text: bytes, maxseq: int) -> bytes:
    return text if len(text) <= maxseq else text[: maxseq - 1] + text[-1:]


def _vector(text: bytes, normalize: bool) -> NDArray[np.float32]:
    seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
    vector = np.random.default_rng(seed).standard_normal(DIM, np.float32)
    return vector / np.linalg.norm(vector) if normalize else vector


def make_app(engine: TinyEngine, **config: Any) -> Application:
    return Application(engine, engine, ServeConfig(model_name="tiny-model", **config))


@contextlib.contextmanager
def running(app: Application) -> Iterator[str]:
    """The URL of `app` on a free port, served from a thread."""
    started = threading.Event()
    with listen("127.0.0.1", 0) as listener:
        url = url_of(listener, "127.0.0.1")
        server = Server(app, on_started=started.set)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            assert started.wait(30)
            yield url
        finally:
            server.should_exit = True
            thread.join()


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        message = json.loads(self.body)
        assert list(message) == ["error"]
        assert self.headers["content-type"] == "application/json; charset=utf-8"
        error: str = message["error"]
        return error


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").rsplit(":", 1)
    return socket.create_connection((host.strip("[]"), int(port)), timeout=30)


def read_replies(connection: socket.socket) -> list[Reply]:
    """Every reply until the server closes the connection."""
    received = b""
    while chunk := connection.recv(65536):
        received += chunk
    replies = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        status_line, *lines = head.decode("latin-1").split("\r\n")
        headers = {name: value for name, _, value in (line.partition(": ") for line in lines)}
        length = int(headers.get("content-length", 0))
        replies.append(Reply(int(status_line.split()[1]), headers, received[:length]))
        received = received[length:]
    return replies


def post_bytes(text: str, *, close: bool = False) -> bytes:
    """A whole POST /create_embedding."""
    body = json.dumps({"text": text}).encode()
    connection = b"connection: close\r\n" if close else b""
    head = b"POST /create_embedding HTTP/1.1\r\nhost: test\r\n%bcontent-length: %d\r\n\r\n"
    return head % (connection, len(body)) + body


class _PipedEngine(TinyEngine):
    """Says on stdout that a slow forward has begun, and ends it when stdin gives a byte."""

    @property
    def num_forwards(self) -> int:
        return len(self.batches)

    def wait_for_release(self) -> None:
        print("entered", flush=True)
        os.read(0, 1)


def main() -> int:
    """The argument is JSON: seconds of `shutdown_delay_s`, and settings of ServeConfig."""
    settings = json.loads(sys.argv[1])
    delay_s = settings.pop("shutdown_delay_s", 0)
    try:
        app = make_app(_PipedEngine(), **settings)
        serve(app, "127.0.0.1", 0, on_listening=lambda url: print(url, flush=True), shutdown_delay_s=delay_s)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
