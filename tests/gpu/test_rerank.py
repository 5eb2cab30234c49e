"""Cross-encoders on a CUDA device: logits beside those of the CPU backend, bits, and what f16 does not hold."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from embed import Embed
from gkd.device import Device
from tests.overflowing import FITTING, MIXED, make_overflowing_model
from tools.make_model import CLASSIFIERS, PRESETS, ModelSpec, make_model

MODELS = {
    "bert-32": ModelSpec("bert", num_layers=2, hidden_size=128, num_heads=4, intermediate_size=320, cross_encoder=True),
    "bert-80": ModelSpec("bert", num_layers=2, hidden_size=240, num_heads=3, intermediate_size=500, cross_encoder=True),
    "bge-reranker-geometry": replace(PRESETS["bge-m3"], vocab_size=2000, num_layers=4, cross_encoder=True),
}
QUERIES = ["what is it?", "many words " * 30]
# Of what is rounded, relative to it. f32's is that of its sums: chains of 64 products, some of which are added up.
UNIT = {"f32": 2.0**-20, "f16": 2.0**-11, "bf16": 2.0**-8}


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
def cpu_logits(directory: Path, corpus: list[str]) -> NDArray[np.float32]:
    """Of the queries with the corpus, on the CPU backend, which is itself tested against sentence-transformers: in a
    process that sees no device."""
    code = (
        "import sys, json, numpy as np; from embed import Embed;"
        "queries, texts = json.load(open(sys.argv[2])); engine = Embed.open(sys.argv[1]);"
        "np.save(sys.argv[3], [engine.rerank(query, texts, raw_scores=True) for query in queries])"
    )
    request, out = directory / "request.json", directory / "cpu.npy"
    request.write_text(json.dumps([QUERIES, corpus]))
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    subprocess.run([sys.executable, "-c", code, directory, request, out], check=True, env=hidden)
    logits: NDArray[np.float32] = np.load(out)
    return logits


def logit_error(directory: Path, dtype: str) -> float:
    """Standard deviation of the error of a logit.

    A layer rounds six states and as many times weights, each by an error without a direction of a unit of the state's
    length, so that the states after L layers are off by sqrt(12 L) units. Of a state of H numbers of size 1 the head
    sees one direction, stretched by no more than the norms of its matrices.
    """
    spec = MODELS[directory.name]
    weights, head = load_file(directory / "model.safetensors"), CLASSIFIERS[spec.family]
    stretch = np.linalg.norm(weights[f"{head.inner}.weight"], 2) * np.linalg.norm(weights[f"{head.last}.weight"])
    return float(np.sqrt(12 * spec.num_layers) * UNIT[dtype] * stretch)


def test_logits_are_the_cpu_s(
    engine: Embed, directory: Path, cpu_logits: NDArray[np.float32], corpus: list[str]
) -> None:
    allowed = logit_error(directory, engine.dtype)
    got = np.stack([engine.rerank(query, corpus, raw_scores=True) for query in QUERIES])
    error = got.astype(np.float64) - cpu_logits
    rms = float(np.sqrt(np.square(error).mean()))
    print(f"{engine.dtype}: error {rms:.2g}, at most {np.abs(error).max():.2g}, allowed {allowed:.2g}")
    assert rms <= allowed and np.abs(error).max() <= 6 * allowed
    # Were all alike, agreement would say nothing.
    assert allowed < cpu_logits.std()
    scores = np.stack([engine.rerank(query, corpus) for query in QUERIES])
    assert np.allclose(scores, 1 / (1 + np.exp(-got.astype(np.float64))), rtol=0, atol=2.0**-23)


def test_a_text_has_one_score(engine: Embed, corpus: list[str]) -> None:
    # So long that the pairs of the whole corpus are several forwards, and those of a few are recorded ones.
    query = QUERIES[1]
    together = engine.rerank(query, corpus)
    assert np.array_equal(engine.rerank(query, corpus[::-1])[::-1], together)
    assert np.array_equal(engine.rerank(query, corpus[:7]), together[:7])
    for index in range(0, len(corpus), 20):
        assert engine.rerank(query, [corpus[index]])[0] == together[index]
    engine.unload()
    engine.reload()
    assert np.array_equal(engine.rerank(query, corpus), together)


def test_a_score_that_f16_does_not_hold_is_computed_in_f32_and_no_other(device: Device, tmp_path: Path) -> None:
    make_overflowing_model(tmp_path / "model", cross_encoder=True)
    with Embed.open(tmp_path / "model") as f32, Embed.open(tmp_path / "model", dtype="f16") as f16:
        expected = f32.rerank(FITTING[0], MIXED)
        expected[[0, 2, 3]] = f16.rerank(FITTING[0], FITTING)
        assert f16.recomputed == 0
        assert np.array_equal(f16.rerank(FITTING[0], MIXED), expected)
        assert f16.recomputed == 2
