"""The real server, as a process, with a real engine: every route, the lease, and how it ends."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from embed import Embed
from serve.app import Application, ServeConfig
from tests.cpu.serve_engine import running
from tests.overflowing import FITTING, MIXED, HalfEngine, make_overflowing_model
from tools.make_model import ModelSpec, make_model

TOKEN = "a-token-that-no-log-may-hold"
AUTHORIZATION = {"Authorization": f"Bearer {TOKEN}"}


@dataclass(frozen=True)
class Server:
    """A running `embed serve` and what it has printed so far."""

    process: subprocess.Popen[str]
    url: str
    errors: list[str]
    reader: threading.Thread
    client: httpx.Client

    def health(self) -> dict[str, Any]:
        report: dict[str, Any] = self.client.get("/health").raise_for_status().json()
        return report

    def embed(self, texts: list[str], **body: Any) -> NDArray[np.float32]:
        response = self.client.post("/create_embedding", json={"texts": texts, **body}, headers=AUTHORIZATION)
        return np.array(response.raise_for_status().json()["embeddings"], np.float32)

    def wait(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first health report that meets the condition."""
        for _ in range(300):
            if condition(report := self.health()):
                return report
            time.sleep(0.1)
        raise AssertionError(f"still not after 30 s: {report}")

    def stop(self) -> tuple[int, str]:
        """Ends it as a supervisor does: exit code, and everything it printed to standard error."""
        self.process.send_signal(signal.SIGTERM)
        with self.process:  # closes the pipes
            code = self.process.wait(timeout=60)
            self.reader.join()
            self.client.close()
        return code, "".join(self.errors)


def start(*arguments: object, environment: dict[str, str] | None = None) -> Server:
    process = subprocess.Popen(
        [sys.executable, "-m", "embed", "serve", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    errors: list[str] = []
    assert process.stdout is not None and process.stderr is not None
    reader = threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True)
    reader.start()
    line = process.stdout.readline()
    found = re.search(r"http://\S+:\d+", line)
    assert found, f"it did not start: {line} {''.join(errors)}"
    return Server(process, found[0], errors, reader, httpx.Client(base_url=found[0], timeout=60))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    make_model(path, ModelSpec("xlm-roberta", num_layers=1, hidden_size=32, num_heads=2, max_positions=66))
    return path


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """all-MiniLM-L6-v2 behind a token."""
    token_file = tmp_path_factory.mktemp("secrets") / "token"
    token_file.write_text(f"{TOKEN}\n")
    server = start(models / "minilm", "--addr", "127.0.0.1:0", "--token-file", token_file)
    yield server
    code, errors = server.stop()
    assert code == 0
    assert TOKEN not in errors and "Traceback" not in errors


def test_the_bits_are_the_library_s(server: Server, minilm: Embed, corpus: list[str]) -> None:
    texts = corpus[:204:6]
    expected = minilm.encode(texts)
    assert np.array_equal(server.embed(texts), expected)
    assert np.array_equal(server.embed(texts, normalize=False), minilm.encode(texts, normalize=False))
    for index in (0, 7, 33):
        assert np.array_equal(server.embed([texts[index]])[0], expected[index])


def test_both_keys_and_the_shape_of_the_reply(server: Server, minilm: Embed) -> None:
    body = {"text": "third", "texts": ["first", "second"]}
    response = server.client.post("/create_embedding", json=body, headers=AUTHORIZATION)
    assert response.headers["content-type"] == "application/json; charset=utf-8"
    reply = response.json()
    assert list(reply) == ["embeddings", "model", "dimension"]
    assert (reply["model"], reply["dimension"]) == ("minilm", 384)
    assert np.array_equal(np.array(reply["embeddings"], np.float32), minilm.encode(["first", "second", "third"]))


def test_get(server: Server, minilm: Embed) -> None:
    for text in ("one text", "zwei: ö & +", "\0 三"):
        response = server.client.get("/create_embedding", params={"text": text, "token": TOKEN})
        assert np.array_equal(np.array(response.json()["embeddings"], np.float32), minilm.encode([text]))


def test_sixteen_clients_get_the_serial_answers(server: Server, minilm: Embed, corpus: list[str]) -> None:
    texts = [text for text in corpus if len(text) < 200][:64]
    expected = minilm.encode(texts)
    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(lambda text: server.embed([text])[0], texts))
    assert np.array_equal(np.stack(got), expected)


@pytest.mark.parametrize("path", ["/health", "/"])
def test_health_is_open_and_names_no_path(server: Server, path: str) -> None:
    report = server.client.get(path).json()
    assert list(report) == [
        "status",
        "model",
        "model_loaded",
        "unload_after_s",
        "loads",
        "unloads",
        "last_load_ms",
        "device",
        "device_name",
        "dimension",
        "requests",
        "max_seq",
        "pool_blocks",
        "pool_idle_bytes",
        "kernels",
        "weights_bytes",
        "workspace_bytes",
        "recomputed",
    ]
    assert report["status"] == "healthy" and report["model"] == "minilm" and report["device"] == "cpu"
    assert report["max_seq"] == 256 and report["kernels"] == 0 and report["pool_idle_bytes"] > 0
    assert report["recomputed"] == 0
    # 22.7 million parameters in float32, without the pooler that no vector needs.
    assert report["weights_bytes"] == 90_261_504 and report["workspace_bytes"] == report["pool_idle_bytes"]
    assert "/" not in report["model"]


@pytest.mark.parametrize(
    ("method", "path", "body", "token", "status"),
    [
        ("POST", "/create_embedding", b'{"text":"a"}', False, 401),
        ("GET", "/create_embedding?text=a&token=wrong", None, False, 401),
        ("POST", "/create_embedding", b"{", True, 400),
        ("POST", "/create_embedding", b'{"texts":["a",3]}', True, 400),
        ("GET", "/create_embedding", None, True, 400),
        ("GET", "/nothing", None, True, 404),
        ("POST", "/health/", b"", True, 404),
        ("DELETE", "/create_embedding", None, True, 405),
        ("POST", "/create_embedding", b'"' + b"a" * (16 * 1024 * 1024) + b'"', True, 413),
    ],
)
def test_errors_are_json(server: Server, method: str, path: str, body: bytes | None, token: bool, status: int) -> None:
    response = server.client.request(method, path, content=body, headers=AUTHORIZATION if token else {})
    assert response.status_code == status
    assert list(response.json()) == ["error"]
    assert ("allow" in response.headers) == (status == 405)


def test_the_lease(small: Path) -> None:
    server = start(small, "--addr", "127.0.0.1:0", "--unload-after", "0.3")
    expected = server.embed(["a text"])
    unloaded = server.wait(lambda report: not report["model_loaded"])
    assert unloaded["status"] == "healthy" and unloaded["idle_s"] >= 0.3
    assert (unloaded["loads"], unloaded["unloads"]) == (1, 1)
    assert (unloaded["device"], unloaded["pool_blocks"], unloaded["pool_idle_bytes"]) == ("none", 0, 0)
    assert np.array_equal(server.embed(["a text"]), expected)
    again = server.wait(lambda report: report["loads"] == 2)
    assert again["last_load_ms"] >= 0 and again["requests"] == 2
    code, errors = server.stop()
    assert code == 0 and "Traceback" not in errors
    assert errors.startswith("embed: small: xlm-roberta, 1 layers, ") and "embed: small: plain f32 on cpu (" in errors
    assert "weights unloaded" in errors and "weights loaded" in errors


def test_a_failed_reload_is_503_and_the_next_request_tries_again(small: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(small, tmp_path / "model"))
    server = start(model, "--addr", "127.0.0.1:0", "--unload-after", "0.1")
    expected = server.embed(["a text"])
    server.wait(lambda report: not report["model_loaded"])
    (model / "model.safetensors").rename(tmp_path / "away")
    for _ in range(2):
        response = server.client.post("/create_embedding", json={"text": "a text"})
        assert response.status_code == 503
        assert response.json() == {"error": "weights not loaded: model.safetensors: not found"}
    assert server.health()["loads"] == 1
    (tmp_path / "away").rename(model / "model.safetensors")
    assert np.array_equal(server.embed(["a text"]), expected)
    assert server.stop()[0] == 0


def test_health_counts_the_texts_that_were_computed_again(tmp_path: Path) -> None:
    make_overflowing_model(tmp_path / "model")
    with HalfEngine(tmp_path / "model").engine as engine:
        app = Application(engine, engine, ServeConfig(model_name="model", unload_after_s=1))
        with running(app) as url, httpx.Client(base_url=url, timeout=60) as client:

            def health() -> dict[str, Any]:
                report: dict[str, Any] = client.get("/health").json()
                return report

            def post(texts: list[str]) -> None:
                client.post("/create_embedding", json={"texts": texts}).raise_for_status()

            before = health()
            post(FITTING)
            fitting = health()
            post(MIXED)
            mixed = health()
            assert [report["recomputed"] for report in (before, fitting, mixed)] == [0, 0, 2]
            assert fitting["weights_bytes"] == before["weights_bytes"] < mixed["weights_bytes"]
            assert fitting["workspace_bytes"] == before["workspace_bytes"] < mixed["workspace_bytes"]
            for _ in range(300):
                if not (unloaded := health())["model_loaded"]:
                    break
                time.sleep(0.1)
            assert (unloaded["weights_bytes"], unloaded["workspace_bytes"], unloaded["recomputed"]) == (0, 0, 2)


def test_sigterm_answers_what_was_asked(models: Path) -> None:
    server = start(models / "minilm", "--addr", "127.0.0.1:0")
    texts = ["many words " * 100] * 12
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(server.embed, texts) for _ in range(4)]
        server.wait(lambda report: report["pool_idle_bytes"] == 0)
        # All four heads have been read once the first forward runs and the event loop has had a moment.
        time.sleep(0.5)
        code, errors = server.stop()
        assert [len(future.result()) for future in running] == [12] * 4
    assert code == 0 and "Traceback" not in errors
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)


def test_the_token_may_come_from_the_environment(small: Path) -> None:
    server = start(small, "--addr", "127.0.0.1:0", environment={"EMBED_TOKEN": TOKEN})
    assert server.client.post("/create_embedding", json={"text": "a"}).status_code == 401
    assert server.embed(["a"]).shape == (1, 32)
    code, errors = server.stop()
    assert code == 0 and TOKEN not in errors


def test_an_open_server_on_all_addresses_is_warned_about(small: Path) -> None:
    server = start(small, "--addr", "0.0.0.0:0")
    warning = "embed: no token is set"
    assert warning in server.stop()[1]
    for arguments in (["--addr", "127.0.0.1:0"], ["--addr", "0.0.0.0:0", "--token", TOKEN]):
        server = start(small, *arguments)
        assert warning not in server.stop()[1]


def test_ipv6_in_brackets(small: Path) -> None:
    server = start(small, "--addr", "[::1]:0")
    assert server.url.startswith("http://[::1]:")
    assert server.embed(["a"]).shape == (1, 32)
    assert server.stop()[0] == 0


def test_flags_set_the_server_s_defaults(small: Path) -> None:
    server = start(small, "--addr", "127.0.0.1:0", "--no-normalize", "--pool", "cls", "--maxseq", "3")
    with Embed.open(small, pool="cls", maxseq=3) as engine:
        assert np.array_equal(server.embed(["some words"]), engine.encode(["some words"], normalize=False))
        assert np.array_equal(server.embed(["some words"], normalize=True), engine.encode(["some words"]))
    assert server.health()["max_seq"] == 3
    assert server.stop()[0] == 0


def test_a_port_that_is_taken_is_one_line(small: Path, server: Server) -> None:
    address = server.url.removeprefix("http://")
    result = subprocess.run(
        [sys.executable, "-m", "embed", "serve", str(small), "--addr", address],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    error = result.stderr.splitlines()[-1]
    assert error.startswith(f"embed: error: --addr {address}: cannot listen: Address already in use")
    assert server.health()["status"] == "healthy"
