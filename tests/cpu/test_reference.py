"""The vectors of sentence-transformers, for real models and for random ones of other geometries."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from embed import Embed
from tools.make_model import ModelSpec, make_model

REAL = ["minilm", "e5-small-bert", "e5-small-xlmr"]
RANDOM = {
    "bert-32": ModelSpec("bert", num_layers=2, hidden_size=128, num_heads=4, intermediate_size=320),
    "bert-80": ModelSpec("bert", num_layers=2, hidden_size=240, num_heads=3, intermediate_size=500, pooling="cls"),
    "bert-raw": ModelSpec("bert", num_layers=1, hidden_size=64, num_heads=1, normalize=False, dtype="bf16"),
    "xlmr-32": ModelSpec("xlm-roberta", num_layers=2, hidden_size=96, num_heads=3, prefix="roberta."),
    "xlmr-64": ModelSpec("xlm-roberta", num_layers=3, hidden_size=128, num_heads=2, pooling="cls", dtype="f16"),
    "xlmr-80": ModelSpec("xlm-roberta", num_layers=2, hidden_size=160, num_heads=2, max_positions=130),
    # Texts far longer than the distances that its bias tells apart, and a bias in 16 bits.
    "mpnet-64": ModelSpec("mpnet", hidden_size=128, num_heads=2, dtype="bf16", prefix="mpnet."),
}


@dataclass(frozen=True)
class Pair:
    """One model in both engines, and the vectors of the corpus in each."""

    directory: Path
    ours: Embed
    reference: SentenceTransformer
    vectors: NDArray[np.float32]


def open_reference(directory: Path) -> SentenceTransformer:
    """float32 whatever the checkpoint's dtype, which newer transformers would keep."""
    return SentenceTransformer(str(directory), device="cpu", model_kwargs={"dtype": torch.float32})


@pytest.fixture(scope="module", params=[*REAL, *RANDOM])
def pair(
    request: pytest.FixtureRequest, models: Path, corpus: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    directory = models / request.param
    if request.param in RANDOM:
        directory = tmp_path_factory.mktemp("random") / request.param
        make_model(directory, RANDOM[request.param])
    with Embed.open(directory) as ours:
        yield Pair(directory, ours, open_reference(directory), ours.encode(corpus))


def test_token_ids_are_the_reference_s(pair: Pair, corpus: list[str]) -> None:
    ours = [pair.ours.tokenize(text) for text in corpus]
    theirs = [
        pair.reference.tokenizer(text, truncation=True, max_length=pair.ours.maxseq)["input_ids"] for text in corpus
    ]
    assert ours == theirs
    assert max(map(len, ours)) == pair.ours.maxseq == pair.reference.max_seq_length, "no text was truncated"


def test_vectors_are_the_reference_s(pair: Pair, corpus: list[str]) -> None:
    theirs = np.asarray(pair.reference.encode(corpus), np.float64)
    ours = pair.vectors.astype(np.float64)
    cosine = (ours * theirs).sum(axis=1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    assert cosine.min() >= 0.99999, corpus[int(cosine.argmin())]
    # Cosine is blind to length, and to anything below 1e-3 of a direction. The bound is four times what the
    # worst-conditioned text of the corpus, a lone full stop in e5-small, shows between any two float32 engines.
    assert (np.linalg.norm(ours - theirs, axis=1) <= 1e-4 * np.linalg.norm(theirs, axis=1)).all()
    # Were all vectors alike, agreement would say nothing.
    assert np.median(np.corrcoef(ours)) < 0.99


def test_as_accurate_as_float32_can_be(pair: Pair, corpus: list[str]) -> None:
    """Both engines' distance from the same model in float64: ours is at most twice the reference's.

    It is the median text that is compared. A few texts pass through a cancellation that multiplies whatever rounding
    came before it by ten or more, and which engine is lucky there changes with any last bit.
    """
    texts = corpus[::10]
    in_float32 = np.asarray(pair.reference.encode(texts, batch_size=1), np.float64)
    # sentence-transformers hands its vectors out in float32 however they were computed: take them from the modules.
    wide = open_reference(pair.directory).double()
    with torch.inference_mode():
        exact = np.concatenate([embed_in_float64(wide, text) for text in texts])
    ours = pair.ours.encode(texts)
    error, reference_error = np.linalg.norm(ours - exact, axis=1), np.linalg.norm(in_float32 - exact, axis=1)
    assert 0 < np.median(error) <= 2 * np.median(reference_error)


def embed_in_float64(model: SentenceTransformer, text: str) -> NDArray[np.float64]:
    vector: torch.Tensor = model(model.preprocess([text]))["sentence_embedding"]
    assert vector.dtype == torch.float64
    return vector.numpy()


def alone(engine: Embed, texts: list[str]) -> NDArray[np.float32]:
    return np.stack([engine.encode(text) for text in texts])


def in_company(engine: Embed, texts: list[str]) -> NDArray[np.float32]:
    """Each text inside a batch of the 33 others, in eight rotations: every time at another place."""
    vectors = np.full((len(texts), engine.dim), np.nan, np.float32)
    for shift in range(0, len(texts), 5):
        rotated = np.roll(engine.encode([*texts[shift:], *texts[:shift]]), shift, axis=0)
        assert shift == 0 or np.array_equal(vectors, rotated)
        vectors = rotated
    return vectors


def backwards(engine: Embed, texts: list[str]) -> NDArray[np.float32]:
    return engine.encode(texts[::-1])[::-1]


def from_ids(engine: Embed, texts: list[str]) -> NDArray[np.float32]:
    return np.concatenate([engine.encode_ids(*engine.tokenize_batch([text])) for text in texts])


@pytest.mark.parametrize("way", [alone, in_company, backwards, from_ids])
def test_a_text_has_one_vector(
    way: Callable[[Embed, list[str]], NDArray[np.float32]], pair: Pair, corpus: list[str]
) -> None:
    texts, expected = corpus[:204:6], pair.vectors[:204:6]
    assert len(texts) == 34
    assert np.array_equal(way(pair.ours, texts), expected)


def test_both_position_rules_on_one_real_model(models: Path, corpus: list[str]) -> None:
    """e5-small with BERT's positions from 0 and, in the other form, with XLM-RoBERTa's from 2."""
    with Embed.open(models / "e5-small-bert") as bert, Embed.open(models / "e5-small-xlmr") as xlmr:
        # A literal <pad> is given the padding's own position by one rule and counted by the other.
        texts = [text for text in corpus[::4] if "<pad>" not in text]
        assert np.array_equal(bert.encode(texts), xlmr.encode(texts))
