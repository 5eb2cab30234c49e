"""The engine on a CUDA device: vectors, bits, memory, unloading."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from embed import Embed
from gkd.device import Device
from gkd.dtype import DType
from tools.make_model import PRESETS, ModelSpec, make_model

MODELS = {
    "bert-32": ModelSpec("bert", num_layers=2, hidden_size=128, num_heads=4, intermediate_size=320),
    "bert-80": ModelSpec("bert", num_layers=2, hidden_size=240, num_heads=3, intermediate_size=500, pooling="cls"),
    "xlmr-64": ModelSpec("xlm-roberta", num_layers=3, hidden_size=128, num_heads=2, pooling="cls", dtype="f16"),
    "minilm-geometry": replace(PRESETS["minilm"], vocab_size=2000),
    "bge-m3-geometry": replace(PRESETS["bge-m3"], vocab_size=2000, num_layers=4),
}
# Least cosine with the float32 CPU backend, which is itself tested against sentence-transformers.
# Precisely computed float32 is split or plain, as sizes allow.
MIN_COSINE = {"split": 0.99999, "f32": 0.99999, "f16": 0.999, "bf16": 0.999}


@pytest.fixture(scope="module", params=list(MODELS))
def directory(request: pytest.FixtureRequest, device: Device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("models") / request.param
    make_model(path, MODELS[request.param])
    return path


@pytest.fixture(scope="module", params=["f32", "f16", "bf16"])
def engine(request: pytest.FixtureRequest, directory: Path) -> Iterator[Embed]:
    with Embed.open(directory, dtype=request.param) as engine:
        assert engine.backend == "cuda"
        yield engine


@pytest.fixture(scope="module")
def cpu_vectors(directory: Path, corpus: list[str]) -> NDArray[np.float32]:
    """The corpus on the CPU backend, in a process that sees no device."""
    code = (
        "import sys, json, numpy as np; from embed import Embed;"
        "texts = json.load(open(sys.argv[2])); np.save(sys.argv[3], Embed.open(sys.argv[1]).encode(texts))"
    )
    texts, out = directory / "texts.json", directory / "cpu.npy"
    texts.write_text(json.dumps(corpus))
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    subprocess.run([sys.executable, "-c", code, directory, texts, out], check=True, env=hidden)
    vectors: NDArray[np.float32] = np.load(out)
    return vectors


def test_vectors_are_the_cpu_s(engine: Embed, cpu_vectors: NDArray[np.float32], corpus: list[str]) -> None:
    dtype = engine._open_engine.backend.dtype.value
    got, want = engine.encode(corpus).astype(np.float64), cpu_vectors.astype(np.float64)
    cosine = (got * want).sum(axis=1) / np.linalg.norm(got, axis=1) / np.linalg.norm(want, axis=1)
    print(f"{dtype}: least cosine {cosine.min():.8f}")
    assert (cosine >= MIN_COSINE[dtype]).all(), corpus[int(cosine.argmin())]


def test_a_text_has_one_vector(engine: Embed, corpus: list[str]) -> None:
    texts = corpus[:204:6]
    together = engine.encode(texts)
    assert np.array_equal(engine.encode(texts), together)
    assert np.array_equal(np.stack([engine.encode(text) for text in texts]), together)
    for shift in (1, 7, 20):
        assert np.array_equal(np.roll(engine.encode([*texts[shift:], *texts[:shift]]), shift, axis=0), together)
    with ThreadPoolExecutor(16) as pool:
        assert np.array_equal(np.stack(list(pool.map(engine.encode, texts))), together)


def test_unload_and_reload(engine: Embed, corpus: list[str]) -> None:
    expected, kernels = engine.encode(corpus[:20]), engine.kernel_count
    engine.unload()
    assert not engine.loaded and engine.kernel_count == 0
    engine.reload()
    assert np.array_equal(engine.encode(corpus[:20]), expected)
    assert engine.kernel_count == kernels


def test_nothing_grows_after_warm_up(engine: Embed, corpus: list[str]) -> None:
    rng = np.random.default_rng(5)
    backend = engine._open_engine.backend
    engine.encode(corpus)
    engine.encode(corpus[0])
    engine.encode(corpus[0], normalize=False)
    kernels, memory_bytes = engine.kernel_count, backend.memory_bytes  # type: ignore[attr-defined]
    for _ in range(2000 if engine.name == "minilm-geometry" else 100):
        engine.encode([corpus[index] for index in rng.integers(0, len(corpus), rng.integers(1, 3))])
    assert (engine.kernel_count, backend.memory_bytes) == (kernels, memory_bytes)  # type: ignore[attr-defined]


def test_unloading_gives_the_device_back(directory: Path) -> None:
    """In a process of its own, without torch, whose context would stay: nvidia-smi knows it no longer."""
    code = (
        "import sys, os; from embed import Embed; e = Embed.open(sys.argv[1]); e.encode('a'); print(os.getpid());"
        "sys.stdout.flush(); sys.stdin.readline(); e.unload(); print('unloaded'); sys.stdout.flush();"
        "sys.stdin.readline(); e.reload(); print(e.encode('a').shape)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        pid = process.stdout.readline().strip()
        assert pid in device_pids()
        print("go", file=process.stdin, flush=True)
        assert process.stdout.readline() == "unloaded\n"
        time.sleep(0.5)
        assert pid not in device_pids()
        print("go", file=process.stdin, flush=True)
        assert process.stdout.readline().startswith("(")


def device_pids() -> list[str]:
    query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()


def test_a_model_that_split_operands_cannot_hold_is_computed_without(device: Device, tmp_path: Path) -> None:
    make_model(tmp_path / "model", replace(MODELS["minilm-geometry"], num_layers=2))
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["encoder.layer.0.output.LayerNorm.weight"] *= np.float32(1e5)
    save_file(tensors, file)
    with Embed.open(tmp_path / "model") as engine:
        backend = engine._open_engine.backend
        assert backend.dtype is DType.F32
        vectors = engine.encode(["a text", "another"])
        assert np.isfinite(vectors).all()
        engine.unload()
        engine.reload()
        assert np.array_equal(engine.encode(["a text", "another"]), vectors)
