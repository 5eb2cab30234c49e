"""Real models, and random ones of true sizes, on the device: against sentence-transformers in float32 and float64."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from embed import Embed
from gkd.device import Device
from tools.make_model import PRESETS, make_model

# Whichever of them have been prepared: the fp16 and the Portuguese forms are the ones that travel.
REAL = ("minilm", "minilm-fp16", "e5-small-bert", "e5-small-xlmr", "e5-small-enpt-bert", "e5-small-enpt-xlmr")
# Every layer at its true width; words do not matter.
RANDOM = {f"{name}-geometry": replace(PRESETS[name], vocab_size=2000) for name in ("minilm", "bge-m3")}
MIN_COSINE = {"f32": 0.99999, "f16": 0.999, "bf16": 0.999}


@pytest.fixture(scope="module", params=[*REAL, *RANDOM])
def directory(request: pytest.FixtureRequest, device: Device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param in RANDOM:
        made: Path = tmp_path_factory.mktemp("models") / request.param
        make_model(made, RANDOM[request.param])
        return made
    path: Path = Path(__file__).resolve().parents[2] / "build" / "models" / request.param
    if not path.is_dir():
        pytest.skip(f"{request.param} is not prepared")
    return path


@pytest.fixture(scope="module")
def exact(directory: Path, corpus: list[str]) -> NDArray[np.float64]:
    """The corpus in float64."""
    return torch_vectors(directory, corpus, torch.float64)


def torch_vectors(directory: Path, texts: list[str], dtype: torch.dtype) -> NDArray[np.float64]:
    """One text at a time on the device, taken from the modules: `encode` would hand them out in float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = SentenceTransformer(str(directory), device="cuda", model_kwargs={"dtype": torch.float32}).to(dtype)
    vectors = []
    with torch.inference_mode():
        for text in texts:
            features = {
                name: tensor.cuda() for name, tensor in model.preprocess([text]).items() if hasattr(tensor, "cuda")
            }
            vectors.append(model(features)["sentence_embedding"][0].double().cpu().numpy())
    return np.stack(vectors)


@pytest.mark.parametrize("dtype", list(MIN_COSINE))
def test_vectors_are_the_reference_s(
    directory: Path, dtype: str, exact: NDArray[np.float64], corpus: list[str]
) -> None:
    with Embed.open(directory, dtype=dtype) as engine:
        vectors = engine.encode(corpus).astype(np.float64)
    cosine = (vectors * exact).sum(axis=1) / np.linalg.norm(vectors, axis=1) / np.linalg.norm(exact, axis=1)
    print(f"{directory.name} {dtype}: least cosine {cosine.min():.8f}")
    assert (cosine >= MIN_COSINE[dtype]).all(), corpus[int(cosine.argmin())]


def test_f32_is_as_accurate_as_torch(directory: Path, exact: NDArray[np.float64], corpus: list[str]) -> None:
    theirs = np.linalg.norm(torch_vectors(directory, corpus, torch.float32) - exact, axis=1)
    with Embed.open(directory) as engine:
        ours = np.linalg.norm(engine.encode(corpus) - exact, axis=1)
    ratio = np.median(ours) / np.median(theirs)
    print(f"{directory.name}: median error {np.median(ours):.2e}, torch {np.median(theirs):.2e}: {ratio:.2f} x")
    assert ratio <= 2
