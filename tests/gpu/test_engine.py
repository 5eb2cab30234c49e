"""The engine on a CUDA device: vectors, bits, memory, unloading."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from embed import Embed, NonFiniteError
from gkd.backend import Backend
from gkd.cuda import CudaBackend
from gkd.device import Device
from gkd.driver import cu
from gkd.dtype import DType
from gkd.errors import DriverError, OutOfMemory
from gkd.memory import CHUNK_BYTES
from tests.overflowing import FITTING, MIXED, make_overflowing_model
from tools.make_model import PRESETS, ModelSpec, make_model

MODELS = {
    "bert-32": ModelSpec("bert", num_layers=2, hidden_size=128, num_heads=4, intermediate_size=320),
    "bert-80": ModelSpec("bert", num_layers=2, hidden_size=240, num_heads=3, intermediate_size=500, pooling="cls"),
    "xlmr-64": ModelSpec("xlm-roberta", num_layers=3, hidden_size=128, num_heads=2, pooling="cls", dtype="f16"),
    "mpnet-64": ModelSpec("mpnet", num_layers=2, hidden_size=128, num_heads=2, intermediate_size=320, dtype="bf16"),
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


def test_nothing_is_allocated_after_warm_up(engine: Embed, corpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    inner = engine._open_engine
    backend, encoder, config = inner.backend, inner._encoder, inner.pipeline.config
    assert isinstance(backend, CudaBackend) and backend._held is not None and encoder is not None
    rng = np.random.default_rng(5)
    tokens = rng.integers(4, config.vocab_size, 1 << 16).astype(np.int32)

    def encode(num_texts: int) -> None:
        lengths = rng.integers(1, 201, num_texts)
        offsets, start = np.cumsum([0, *lengths]), rng.integers(0, len(tokens) - 200 * num_texts)
        engine.encode_ids(tokens[start : start + offsets[-1]], offsets, normalize=bool(rng.integers(2)))

    def held() -> tuple[Any, ...]:
        assert backend._held is not None
        graphs = list(encoder._recorded), len(backend._held.graphs)
        return engine.kernel_count, graphs, backend.memory_bytes, process_memory()

    engine.encode(corpus)
    for num_texts in (*range(1, 41), *[2] * 100):
        encode(num_texts)
    expected = held()
    allocations = count_calls(monkeypatch, "cuMemAlloc", "cuMemHostAlloc", "cuGraphInstantiate", "cuModuleLoadData")
    for _ in range(10_000 if engine.name == "minilm-geometry" else 300):
        # Mostly recorded forwards, and some of more than 2,048 tokens.
        encode(int(rng.integers(1, 5) if rng.random() < 0.98 else rng.integers(5, 41)))
    assert not allocations
    assert held() == expected
    engine.unload()
    engine.reload()
    assert len(allocations) == 4, "calls are not counted"


def count_calls(monkeypatch: pytest.MonkeyPatch, *names: str) -> Counter[str]:
    """Calls of these functions of the driver from now on, by name."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        function = getattr(cu, name)

        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return function(*arguments)

        return call

    for name in names:
        monkeypatch.setattr(cu, name, counted(name))
    return calls


def test_unloading_gives_the_device_back(directory: Path) -> None:
    check_given_back(directory, "f32", ["a"])


def check_given_back(directory: Path, dtype: str, texts: list[str]) -> None:
    """In a process of its own, without torch, whose context would stay: nvidia-smi knows it no longer."""
    code = (
        "import sys, os; from embed import Embed; directory, dtype, *texts = sys.argv[1:];"
        "e = Embed.open(directory, dtype=dtype); e.encode(texts); print(os.getpid());"
        "sys.stdout.flush(); sys.stdin.readline(); e.unload(); print('unloaded'); sys.stdout.flush();"
        "sys.stdin.readline(); e.reload(); print(e.encode(texts).shape)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, directory, dtype, *texts], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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
    return [pid for pid, _ in compute_apps()]


def process_memory() -> str:
    """Device memory of this process, as nvidia-smi says it."""
    [used_mib] = (used_mib for pid, used_mib in compute_apps() if pid == str(os.getpid()))
    return used_mib


def compute_apps() -> list[list[str]]:
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split(", ") for line in lines]


def test_a_model_that_split_operands_cannot_hold_is_computed_without(device: Device, tmp_path: Path) -> None:
    make_model(tmp_path / "model", replace(MODELS["minilm-geometry"], num_layers=2))
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["encoder.layer.0.output.LayerNorm.weight"] *= np.float32(1e5)
    save_file(tensors, file)
    with Embed.open(tmp_path / "model") as engine:
        backend = engine._open_engine.backend
        assert backend.dtype is DType.F32 and not engine.uses_split
        assert engine.exceeds_split is (device.capability == 90)
        vectors = engine.encode(["a text", "another"])
        assert np.isfinite(vectors).all()
        engine.unload()
        engine.reload()
        assert np.array_equal(engine.encode(["a text", "another"]), vectors)


# Texts that f16 does not hold


@pytest.fixture(scope="module")
def overflowing(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "overflowing"
    make_overflowing_model(path)
    return path


def test_a_text_that_f16_does_not_hold_is_computed_in_f32_and_no_other(overflowing: Path, device: Device) -> None:
    with Embed.open(overflowing) as f32:
        assert f32.uses_split is (device.capability == 90)
        expected, kernels, weights_bytes = f32.encode(MIXED), f32.kernel_count, f32.weights_bytes
    with Embed.open(overflowing, dtype="f16") as f16:
        alone, before = f16.encode(FITTING), (f16.kernel_count, f16.weights_bytes)
        expected[[0, 2, 3]] = alone
        assert f16.recomputed == 0
        assert np.array_equal(f16.encode(MIXED), expected)
        assert (f16.kernel_count, f16.weights_bytes) == (before[0] + kernels, before[1] + weights_bytes)
        with ThreadPoolExecutor(8) as pool:
            assert all(np.array_equal(got, expected) for got in pool.map(lambda _: f16.encode(MIXED), range(8)))
        # Between texts of a forward that is not recorded.
        many = np.concatenate([expected, f16.encode(["many words " * 200] * 8), expected])
        assert np.array_equal(f16.encode([*MIXED, *["many words " * 200] * 8, *MIXED]), many)
        assert f16.recomputed == 2 * (1 + 8 + 2)

        inner, exact = f16._open_engine, f16._open_engine._exact
        assert exact is not None
        f16.unload()
        assert inner._exact is None and (f16.kernel_count, f16.weights_bytes, f16.workspace_bytes) == (0, 0, 0)
        assert held_bytes(inner.backend) == held_bytes(exact.backend) == 0
        f16.reload()
        assert inner._exact is None and f16.weights_bytes == before[1]
        assert np.array_equal(f16.encode(MIXED), expected)


def held_bytes(backend: Backend) -> int:
    assert isinstance(backend, CudaBackend)
    return backend.memory_bytes


def test_bf16_holds_what_f16_does_not(overflowing: Path) -> None:
    with Embed.open(overflowing, dtype="bf16") as engine:
        assert np.isfinite(engine.encode(MIXED)).all() and engine.recomputed == 0


def test_unloading_gives_the_device_back_after_a_text_was_computed_again(overflowing: Path) -> None:
    check_given_back(overflowing, "f16", MIXED)


@pytest.mark.parametrize("faulty", ["f16", "f32"])
def test_after_a_fault_both_precisions_are_given_back(
    overflowing: Path, faulty: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise DriverError("CUDA_ERROR_LAUNCH_FAILED in cuMemcpyDtoH")

    with Embed.open(overflowing, dtype="f16") as engine:
        expected, inner = engine.encode(MIXED), engine._open_engine
        exact = inner._exact
        assert exact is not None
        caplog.clear()
        monkeypatch.setattr(inner.backend if faulty == "f16" else exact.backend, "download", fail)
        with pytest.raises(DriverError, match="CUDA_ERROR_LAUNCH_FAILED"):
            engine.encode(MIXED)
        monkeypatch.undo()
        assert not engine.ok and inner._exact is None and not caplog.records
        assert held_bytes(inner.backend) == held_bytes(exact.backend) == 0
        engine.reload()
        assert engine.ok and np.array_equal(engine.encode(MIXED), expected)


def test_without_memory_for_f32_the_error_says_so(overflowing: Path, device: Device) -> None:
    hog = CudaBackend(device, DType.F32)

    def take_all() -> None:
        hog.acquire()
        for num_bytes in (1 << 30, CHUNK_BYTES):
            with suppress(OutOfMemory):
                while True:
                    hog.empty((num_bytes // 4,), DType.F32)

    with Embed.open(overflowing, dtype="f16") as engine:
        fitting = engine.encode(FITTING)
        try:
            hog.call(take_all)
            message = r"^texts\[1\]: .* not finite in f16, and cannot be loaded in f32: CUDA_ERROR_OUT_OF_MEMORY"
            with pytest.raises(NonFiniteError, match=message):
                engine.encode(MIXED)
            assert engine.ok and np.array_equal(engine.encode(FITTING), fitting)
        finally:
            hog.stop()
        assert np.isfinite(engine.encode(MIXED)).all() and engine.recomputed == 2


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_the_command_says_how_it_computes_and_once_that_f16_does_not_do(
    overflowing: Path, device: Device, dtype: str
) -> None:
    command = [sys.executable, "-m", "embed", "text", str(overflowing), "--dtype", dtype, "--", *MIXED]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert len(result.stdout.splitlines()) == len(MIXED)
    _, computation, *warnings = result.stderr.splitlines()
    how = "f32 by split operands on tensor cores" if device.capability == 90 else "plain f32"
    assert computation.startswith(f"embed: overflowing: {how if dtype == 'f32' else dtype} on cuda ({device.name}), ")
    starts = [f"embed: overflowing: the range of {dtype} is too small for this model: "] if dtype == "f16" else []
    assert [warning[: len(start)] for warning, start in zip(warnings, starts, strict=True)] == starts
