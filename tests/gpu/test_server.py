"""The server on a CUDA device: the library's bits, the lease, and the device given back."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from embed import Embed
from gkd.device import Device
from tools.make_model import PRESETS, make_model


@pytest.fixture(scope="module")
def directory(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "minilm-geometry"
    make_model(path, replace(PRESETS["minilm"], vocab_size=2000))
    return path


@pytest.fixture(params=["f32", "bf16"])
def client(request: pytest.FixtureRequest, directory: Path) -> Iterator[tuple[httpx.Client, str, int]]:
    command = [sys.executable, "-m", "embed", "serve", str(directory), "--addr", "127.0.0.1:0", "--unload-after", "1"]
    with subprocess.Popen([*command, "--dtype", request.param], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+:\d+", process.stdout.readline())
        assert found, "the server did not start"
        with httpx.Client(base_url=found[0], timeout=60) as client:
            yield client, request.param, process.pid
        process.terminate()
    assert process.returncode == 0


def embed(client: httpx.Client, texts: list[str]) -> NDArray[np.float32]:
    reply = client.post("/create_embedding", json={"texts": texts}).raise_for_status().json()
    return np.array(reply["embeddings"], np.float32)


def wait(client: httpx.Client, loaded: bool) -> dict[str, Any]:
    for _ in range(300):
        report: dict[str, Any] = client.get("/health").json()
        if report["model_loaded"] is loaded:
            return report
        time.sleep(0.1)
    raise AssertionError(report)


def test_the_bits_and_the_lease(
    client: tuple[httpx.Client, str, int], directory: Path, corpus: list[str], device: Device
) -> None:
    http, dtype, pid = client
    texts = corpus[:204:6]
    with Embed.open(directory, dtype=dtype) as engine:
        expected = engine.encode(texts)
    assert np.array_equal(embed(http, texts), expected)
    with ThreadPoolExecutor(16) as pool:
        assert np.array_equal(np.concatenate(list(pool.map(lambda text: embed(http, [text]), texts))), expected)
    report = http.get("/health").json()
    assert (report["device"], report["device_name"], report["status"]) == ("cuda", device.name, "healthy")
    assert report["kernels"] > 5 and report["weights_bytes"] > 0 and report["workspace_bytes"] > 0
    assert str(pid) in device_pids()
    report = wait(http, loaded=False)
    assert (report["device"], report["kernels"], report["weights_bytes"]) == ("none", 0, 0)
    time.sleep(0.5)
    assert str(pid) not in device_pids()
    assert np.array_equal(embed(http, texts), expected)
    assert wait(http, loaded=True)["loads"] == 2


def device_pids() -> list[str]:
    query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
