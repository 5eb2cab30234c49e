"""What comes before and behind the encoder, against sentence-transformers: poolings, Dense, prompts, truncation."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules.dense import Dense
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from torch import nn

from embed import Embed, ModelError, RequestError, similarity
from gkd.ops.pool import POOL_MODES, PoolMode
from tools.make_model import ModelSpec, make_model

WIDTH = 32
SPEC = ModelSpec("bert", num_layers=2, hidden_size=WIDTH, num_heads=2, intermediate_size=48, max_positions=40)
TEXTS = ["one text", "And ANOTHER, a little longer one", "", "x", "a text " * 40]
PROMPTS = {"query": "find what answers: ", "document": "", "passage": "read: "}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("pipeline") / "encoder"
    make_model(path, SPEC)
    return path


def saved(encoder: Path, path: Path, modules: list[Any], **settings: Any) -> SentenceTransformer:
    model = SentenceTransformer(modules=[Transformer(str(encoder)), *modules], device="cpu", **settings)
    model.save(str(path))
    return SentenceTransformer(str(path), device="cpu")


def assert_same(got: NDArray[Any], want: NDArray[Any]) -> None:
    """Not by cosine alone: lengths count where nothing is normalised."""
    assert got.shape == want.shape and got.dtype == np.float32
    error = np.linalg.norm(got.astype(np.float64) - want, axis=1) / np.linalg.norm(want, axis=1)
    assert (error <= 1e-5).all(), error


@pytest.mark.parametrize("modes", [*((mode,) for mode in POOL_MODES), ("mean", "max", "cls"), POOL_MODES])
def test_poolings(encoder: Path, tmp_path: Path, modes: tuple[PoolMode, ...]) -> None:
    theirs = saved(encoder, tmp_path / "model", [Pooling(WIDTH, pooling_mode=modes)])
    with Embed.open(tmp_path / "model") as ours:
        assert ours.pooling.modes == modes and ours.dim == WIDTH * len(modes)
        assert_same(ours.encode(TEXTS), theirs.encode(TEXTS))
        together = ours.encode(TEXTS)
        assert all(np.array_equal(ours.encode(text), vector) for text, vector in zip(TEXTS, together, strict=True))


@pytest.mark.parametrize("modes", [*((mode,) for mode in POOL_MODES), ("mean", "lasttoken")])
def test_a_prompt_that_is_left_out_of_the_pooling(encoder: Path, tmp_path: Path, modes: tuple[PoolMode, ...]) -> None:
    pooling = Pooling(WIDTH, pooling_mode=modes, include_prompt=False)
    theirs = saved(encoder, tmp_path / "model", [pooling, Normalize()], prompts=PROMPTS, default_prompt_name="query")
    with Embed.open(tmp_path / "model") as ours:
        want = theirs.encode(TEXTS)
        assert_same(ours.encode(TEXTS), want)
        # What a server does, in two steps.
        assert np.array_equal(ours.encode_ids(*ours.tokenize_batch(TEXTS)), ours.encode(TEXTS))
        assert_same(ours.encode(TEXTS, prompt_name="passage"), theirs.encode(TEXTS, prompt_name="passage"))
        assert_same(ours.encode(TEXTS, prompt=""), theirs.encode(TEXTS, prompt=""))
        without, _ = ours.tokenize_batch(TEXTS, prompt="")
        assert_same(
            ours.encode_ids(without, ours.tokenize_batch(TEXTS, "")[1], num_prompt_tokens=0),
            theirs.encode(TEXTS, prompt=""),
        )


def test_prompts(encoder: Path, tmp_path: Path) -> None:
    theirs = saved(encoder, tmp_path / "model", [Pooling(WIDTH, "mean"), Normalize()], prompts=PROMPTS)
    with Embed.open(tmp_path / "model") as ours:
        assert dict(ours.prompts) == PROMPTS and ours.default_prompt_name is None
        assert_same(ours.encode(TEXTS), theirs.encode(TEXTS))
        for name in PROMPTS:
            assert_same(ours.encode(TEXTS, prompt_name=name), theirs.encode(TEXTS, prompt_name=name))
        assert_same(ours.encode(TEXTS, prompt="so: "), theirs.encode(TEXTS, prompt="so: "))
        assert np.array_equal(ours.encode("x", prompt="so: "), ours.encode("so: x"))
        with pytest.raises(RequestError, match="prompt_name 'title': known prompts: document, passage, query"):
            ours.encode("x", prompt_name="title")


DENSE: list[tuple[str, list[Any]]] = [
    ("tanh", [Dense(WIDTH, 24)]),
    ("identity without bias", [Dense(WIDTH, 48, bias=False, activation_function=nn.Identity())]),
    ("two, normalized between", [Dense(WIDTH, 24), Normalize(), Dense(24, 40, activation_function=nn.Identity())]),
]


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("name", "dense"), DENSE, ids=[name for name, _ in DENSE])
def test_dense_modules(encoder: Path, tmp_path: Path, name: str, dense: list[Any], normalized: bool) -> None:
    modules = [Pooling(WIDTH, "mean"), *dense, *([Normalize()] if normalized else [])]
    theirs = saved(encoder, tmp_path / "model", modules)
    with Embed.open(tmp_path / "model") as ours:
        assert ours.dim == dense[-1].out_features and ours.pooling.normalize is normalized
        assert_same(ours.encode(TEXTS), theirs.encode(TEXTS))
        assert_same(ours.encode(TEXTS, normalize=True), theirs.encode(TEXTS, normalize_embeddings=True))
        together = ours.encode(TEXTS)
        assert all(np.array_equal(ours.encode(text), vector) for text, vector in zip(TEXTS, together, strict=True))
        ours.unload()
        ours.reload()
        assert np.array_equal(ours.encode(TEXTS), together)
        for file in (tmp_path / "model").glob("*_Dense/model.safetensors"):
            torch.save(load_file(file), file.with_name("pytorch_model.bin"))
            file.unlink()
        ours.unload()
        ours.reload()
        assert np.array_equal(ours.encode(TEXTS), together)
        with pytest.raises(ModelError, match="pooling mode 'median'"):
            ours.set_pooling("median", normalize=True)  # type: ignore[arg-type]


def test_a_dense_module_that_does_not_fit_is_refused(encoder: Path, tmp_path: Path) -> None:
    saved(encoder, tmp_path / "model", [Pooling(WIDTH, "mean"), Dense(WIDTH, 24)])
    config = tmp_path / "model" / "2_Dense" / "config.json"
    good = json.loads(config.read_text())
    for changes, message in (
        ({"in_features": 31}, "2_Dense/config.json: `in_features` is 31, what comes before gives 32"),
        ({"out_features": 23}, "2_Dense/model.safetensors: tensor `linear.weight` has shape .*expected .23, 32."),
        ({"out_features": "24"}, "expected positive integers"),
        ({"bias": False}, "tensor `linear.bias` is not part of a linear layer"),
        (
            {"activation_function": "torch.nn.modules.activation.SiLU"},
            "`activation_function` is .*SiLU.*Identity, Tanh",
        ),
        ({"use_residual": True}, "`use_residual` is not supported"),
        ({"module_input_name": "token_embeddings"}, "`module_input_name` is 'token_embeddings'"),
    ):
        config.write_text(json.dumps(good | changes))
        with pytest.raises(ModelError, match=message):
            Embed.open(tmp_path / "model")


@pytest.mark.parametrize("normalized", [True, False])
def test_truncated_vectors(encoder: Path, tmp_path: Path, normalized: bool) -> None:
    modules = [Pooling(WIDTH, "mean"), *([Normalize()] if normalized else [])]
    theirs = saved(encoder, tmp_path / "model", modules, truncate_dim=20)
    with Embed.open(tmp_path / "model") as ours:
        assert ours.dim == 20
        # What the model normalises it does before the vector is cut.
        assert_same(ours.encode(TEXTS), theirs.encode(TEXTS))
        assert_same(ours.encode(TEXTS, normalize=True), theirs.encode(TEXTS, normalize_embeddings=True))


def test_lower_case(encoder: Path, tmp_path: Path) -> None:
    model = saved(encoder, tmp_path / "model", [Pooling(WIDTH, "mean")])
    path = tmp_path / "model" / "sentence_bert_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    with Embed.open(tmp_path / "model") as ours:
        lower = ours.encode([text.lower() for text in TEXTS])
    path.write_text(json.dumps(settings | {"do_lower_case": True}))
    with Embed.open(tmp_path / "model") as ours:
        assert np.array_equal(ours.encode(TEXTS), lower)
    assert_same(lower, model.encode([text.lower() for text in TEXTS]))


@pytest.mark.parametrize("kind", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarity(encoder: Path, tmp_path: Path, kind: Any) -> None:
    theirs = saved(encoder, tmp_path / "model", [Pooling(WIDTH, "mean")], similarity_fn_name=kind)
    with Embed.open(tmp_path / "model") as ours:
        assert ours.similarity == kind
        vectors = ours.encode(TEXTS)
        want = theirs.similarity(vectors, vectors[:2]).numpy()
        assert np.allclose(similarity(vectors, vectors[:2], ours.similarity), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"similarity_fn_name": "jaccard"}, "`similarity_fn_name` is 'jaccard'"),
        ({"truncate_dim": 33}, "`truncate_dim` is 33, the vectors have 32 elements"),
        ({"truncate_dim": -1}, "`truncate_dim` is -1"),
        ({"prompts": ["query: "]}, "`prompts` is"),
        ({"default_prompt_name": "title"}, "`default_prompt_name` is 'title'; known prompts: document, query"),
        ({"model_type": "SparseEncoder"}, "`model_type` is 'SparseEncoder'"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(
    encoder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    saved(encoder, tmp_path / "model", [Pooling(WIDTH, "mean")])
    path = tmp_path / "model" / "config_sentence_transformers.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=message):
        Embed.open(tmp_path / "model")
