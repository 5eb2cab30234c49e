"""Cross-encoders: pairs of texts, scores and refusals, beside transformers and sentence-transformers' CrossEncoder."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from sentence_transformers import CrossEncoder
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from embed import Embed, ModelError, NonFiniteError, RequestError, WeightsError
from embed.cross_encoder import ScoreActivation
from embed.models import FAMILIES
from embed.tokenizer import Tokenizer
from tests.cpu.test_families import MAX_POSITIONS, SIZES, edit, fill, from_config
from tests.overflowing import FITTING, MIXED, HalfEngine, make_overflowing_model
from tools.make_model import (
    CLASSIFIERS,
    Family,
    ModelSpec,
    make_model,
    model_config,
    tensor_shapes,
    tokenizer_size,
    write_tokenizer,
)

HIDDEN = 48
QUERIES = ["what is it?", "", "wo liegt \u6771\u4eac? " * 20]


@dataclass(frozen=True)
class Written:
    """One model, as transformers saves it and as CrossEncoder does."""

    family: Family
    bare: Path
    library: Path

    @cached_property
    def theirs(self) -> CrossEncoder:
        """In float64."""
        return open_theirs(self.library)


def open_theirs(directory: Path) -> CrossEncoder:
    model: CrossEncoder = CrossEncoder(str(directory), device="cpu", model_kwargs={"dtype": torch.float64})
    return model


def write(directory: Path, family: Family) -> Written:
    """Random weights and a tokenizer of the family's kind; transformers and sentence-transformers write every file."""
    scratch, written = directory / "tokenizer", Written(family, directory / "bare", directory / "library")
    scratch.mkdir()
    write_tokenizer(scratch, ModelSpec(family, max_positions=MAX_POSITIONS))
    sizes = {"vocab_size": tokenizer_size(scratch), "max_position_embeddings": MAX_POSITIONS, **SIZES[family]}
    torch.manual_seed(0)
    model = from_config(AutoModelForSequenceClassification, AutoConfig.for_model(family, num_labels=1, **sizes))
    fill(model)
    model.save_pretrained(written.bare)
    AutoTokenizer.from_pretrained(scratch).save_pretrained(written.bare)
    CrossEncoder(str(written.bare), device="cpu").save_pretrained(str(written.library), create_model_card=False)
    return written


@pytest.fixture(scope="module", params=list(CLASSIFIERS))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def engine(written: Written) -> Iterator[Embed]:
    with Embed.open(written.library) as engine:
        yield engine


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write(tmp_path_factory.mktemp("original"), "bert")


@pytest.fixture
def bare(original: Written, tmp_path: Path) -> Path:
    """A model as transformers saves it, to be changed."""
    return Path(shutil.copytree(original.bare, tmp_path / "bare"))


@pytest.fixture
def library(original: Written, tmp_path: Path) -> Path:
    """A model as CrossEncoder saves it, to be changed."""
    return Path(shutil.copytree(original.library, tmp_path / "library"))


def change_weights(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


# Pairs


def their_pairs(tokenizer: Any, query: str, texts: list[str], maxseq: int) -> list[tuple[list[int], list[int]]]:
    """Ids and token types; where transformers gives none the model takes zeros."""
    encoded = tokenizer([[query, text] for text in texts], truncation="longest_first", max_length=maxseq)
    ids = encoded["input_ids"]
    return list(zip(ids, encoded.get("token_type_ids") or [[0] * len(row) for row in ids], strict=True))


def our_pairs(tokenizer: Tokenizer, query: str, texts: list[str], maxseq: int) -> list[tuple[list[int], list[int]]]:
    ids, types, offsets = tokenizer.encode_pairs(query, texts, maxseq)
    assert ids.dtype == types.dtype == np.int32 and len(ids) == len(types) == offsets[-1]
    parts = np.split(np.stack([ids, types]), offsets[1:-1], axis=1)
    return [(part[0].tolist(), part[1].tolist()) for part in parts]


@pytest.mark.parametrize("query", QUERIES, ids=["short", "empty", "long"])
def test_pairs_are_transformers_own(written: Written, corpus: list[str], query: str) -> None:
    tokenizer, theirs = Tokenizer(written.bare, pairs=True), AutoTokenizer.from_pretrained(written.bare)
    # The model's limit; an even and an odd room for the texts, of which one, the other or both are cut off; no room.
    for maxseq in (128, 25, 24, tokenizer.min_tokens):
        ours = our_pairs(tokenizer, query, corpus, maxseq)
        assert ours == their_pairs(theirs, query, corpus, maxseq)
        assert max(len(ids) for ids, _ in ours) == maxseq
    assert (max(max(types) for _, types in ours) == 1) is (written.family == "bert")


def test_every_text_of_the_corpus_as_a_query(written: Written, corpus: list[str]) -> None:
    tokenizer, theirs = Tokenizer(written.bare, pairs=True), AutoTokenizer.from_pretrained(written.bare)
    for query, text in pairwise(corpus):
        assert our_pairs(tokenizer, query, [text], 40) == their_pairs(theirs, query, [text], 40)


@pytest.mark.parametrize("inputs", [None, ["input_ids", "attention_mask"], ["input_ids", "token_type_ids"]])
@pytest.mark.parametrize("name", ["BertTokenizer", "BertTokenizerFast", "PreTrainedTokenizerFast", None])
def test_whether_there_are_token_types_is_what_transformers_says(
    bare: Path, name: str | None, inputs: list[str] | None
) -> None:
    edit(bare / "tokenizer_config.json", tokenizer_class=name, model_input_names=inputs)
    ours = our_pairs(Tokenizer(bare, pairs=True), "a", ["b", ""], 128)
    assert ours == their_pairs(AutoTokenizer.from_pretrained(bare), "a", ["b", ""], 128)


def test_a_tokenizer_without_a_template_for_pairs_is_refused(bare: Path) -> None:
    tokenizer = json.loads((bare / "tokenizer.json").read_text())
    tokenizer["post_processor"]["pair"].pop()
    (bare / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=r"^tokenizer\.json: expected special tokens before, between and after a pair"):
        Embed.open(bare)


# Scores


def logit_bound(directory: Path, family: Family) -> float:
    """Of the error of a logit in f32.

    A product of K terms in f32 is off by at most K units of rounding of its terms' magnitudes: the last state, after
    two layers of four products of up to 80 terms, by 640 of its length, which LayerNorm bounds. The head stretches that
    by no more than the norms of its matrices, and tanh by nothing.
    """
    weights, head = load_file(directory / "model.safetensors"), CLASSIFIERS[family]
    norm = f"{head.encoder_prefix}encoder.layer.1.output.LayerNorm"
    gamma, beta = weights[f"{norm}.weight"], weights[f"{norm}.bias"]
    length = HIDDEN**0.5 * np.abs(gamma).max() + np.linalg.norm(beta)
    stretch = np.linalg.norm(weights[f"{head.inner}.weight"], 2) * np.linalg.norm(weights[f"{head.last}.weight"])
    return float(2.0**-24 * 2 * 4 * 80 * length * stretch)


@pytest.mark.parametrize("query", QUERIES, ids=["short", "empty", "long"])
def test_logits_and_scores_are_cross_encoder_s(written: Written, engine: Embed, corpus: list[str], query: str) -> None:
    theirs, texts = written.theirs, corpus[::4]
    assert engine.maxseq == theirs.max_seq_length == 128 + 2 * (written.family == "bert")
    pairs = [(query, text) for text in texts]
    expected = theirs.predict(pairs, activation_fn=torch.nn.Identity(), convert_to_tensor=True)
    assert expected.dtype == torch.float64
    logits, scores = engine.rerank(query, texts, raw_scores=True), engine.rerank(query, texts)
    assert logits.dtype == scores.dtype == np.float32 and logits.shape == scores.shape == (len(texts),)
    bound = logit_bound(written.library, written.family)
    assert (np.abs(logits - expected.numpy()) <= bound).all()
    # The sigmoid rises by at most a quarter, and its result is rounded.
    assert (np.abs(scores - torch.sigmoid(expected).numpy()) <= bound / 4 + 2.0**-24).all()
    assert (np.abs(scores[:20] - theirs.predict(pairs[:20])) <= bound / 4 + 2.0**-23).all()
    # Were all scores alike, agreement would say nothing.
    assert bound < 0.1 * logits.std()


def test_the_score_of_a_text_has_the_same_bits_in_any_company(engine: Embed, corpus: list[str]) -> None:
    query = QUERIES[2]
    inner = engine._open_engine
    _, _, offsets = inner.tokenizer.encode_pairs(query, corpus, engine.maxseq)
    assert offsets[-1] > inner.max_tokens, "they are one forward"
    together = engine.rerank(query, corpus)
    assert np.array_equal(engine.rerank(query, corpus[::-1])[::-1], together)
    for index in range(0, len(corpus), 11):
        assert engine.rerank(query, [corpus[index]])[0] == together[index]
    assert engine.rerank(query, []).shape == (0,)


def test_both_kinds_of_directories_give_the_same_scores(written: Written, engine: Embed, corpus: list[str]) -> None:
    assert not (written.bare / "modules.json").exists() and (written.library / "modules.json").exists()
    with Embed.open(written.bare) as bare:
        assert np.array_equal(bare.rerank("a query", corpus[::5]), engine.rerank("a query", corpus[::5]))
        assert bare.maxseq == engine.maxseq and bare.score_activation == engine.score_activation == "sigmoid"


def test_the_limit_is_of_a_pair(bare: Path) -> None:
    texts = ["many words " * 40, "few"]
    edit(bare / "tokenizer_config.json", model_max_length=20)
    with Embed.open(bare) as engine:
        assert engine.maxseq == open_theirs(bare).max_seq_length == 20
        short = engine.rerank("a query", texts)
        assert engine.set_maxseq(9999) == MAX_POSITIONS
        assert (engine.rerank("a query", texts) != short).tolist() == [True, False]
        with pytest.raises(ModelError, match=r"^maxseq 2: expected at least 3, the special tokens$"):
            engine.set_maxseq(2)


def test_the_default_prompt_stands_before_the_query(library: Path) -> None:
    edit(library / "config_sentence_transformers.json", prompts={"web": "search: "}, default_prompt_name="web")
    with Embed.open(library) as engine:
        scores = engine.rerank("a query", ["one text"])
        assert scores == pytest.approx(open_theirs(library).predict([("a query", "one text")]), abs=1e-6)
    edit(library / "config_sentence_transformers.json", default_prompt_name=None)
    with Embed.open(library) as engine:
        assert engine.rerank("search: a query", ["one text"]) == scores != engine.rerank("a query", ["one text"])


# Activations

SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("library_config", "config"),
    [
        ({"activation_fn": IDENTITY}, {}),
        ({"activation_fn": "torch.nn.Sigmoid"}, {"sentence_transformers": {"activation_fn": IDENTITY}}),
        ({"activation_fn": None}, {"sentence_transformers": {"activation_fn": IDENTITY}}),
        ({"activation_fn": None}, {"sbert_ce_default_activation_function": IDENTITY}),
        ({"activation_fn": None}, {"sbert_ce_default_activation_function": SIGMOID}),
        ({"activation_fn": None}, {"sentence_transformers": {"version": "4.0.0"}}),
        (
            {"activation_fn": None},
            {"sentence_transformers": {"activation_fn": None}, "sbert_ce_default_activation_function": IDENTITY},
        ),
    ],
)
@pytest.mark.parametrize("with_modules", [True, False])
def test_the_activation_is_cross_encoder_s(
    library: Path, library_config: dict[str, Any], config: dict[str, Any], with_modules: bool
) -> None:
    edit(library / "config_sentence_transformers.json", **library_config)
    edit(library / "config.json", **config)
    if not with_modules:
        (library / "modules.json").unlink()
    with Embed.open(library) as engine:
        assert engine.score_activation == type(open_theirs(library).activation_fn).__name__.lower()
        scores, logits = (engine.rerank("a query", ["one text"], raw_scores=raw) for raw in (False, True))
        assert (scores[0] == logits[0]) is np.bool(engine.score_activation == "identity")


@pytest.mark.parametrize("logit", [0.0, 1.5, -30.0, 88.0, -103.0, 1e4, -1e4])
def test_the_sigmoid_is_exact_in_all_of_f32(logit: float, bare: Path) -> None:
    def make_constant(tensors: dict[str, Any]) -> None:
        tensors["classifier.weight"][:], tensors["classifier.bias"][:] = 0, logit

    change_weights(bare, make_constant)
    with Embed.open(bare) as engine:
        assert engine.rerank("a query", ["one text"], raw_scores=True) == np.float32(logit)
        expected = torch.sigmoid(torch.tensor(logit, dtype=torch.float64)).numpy().astype(np.float32)
        assert engine.rerank("a query", ["one text"]) == expected


# Refusals


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"id2label": {"0": "no", "1": "yes"}}, r"config\.json: the classifier has 2 labels"),
        ("config.json", {"id2label": None}, "the classifier has 2 labels"),  # transformers' default
        ("config.json", {"architectures": ["BertModel"]}, r"`architectures` is \['BertModel'\], which is not a cross"),
        ("config.json", {"hidden_act": "relu"}, "`hidden_act` is 'relu'"),
        (
            "config_sentence_transformers.json",
            {"activation_fn": "torch.nn.modules.activation.Tanh"},
            "`activation_fn` is 'torch.nn.modules.activation.Tanh', which is not supported; known: torch's Sigmoid, ",
        ),
        ("config_sentence_transformers.json", {"activation_fn": "mine.Sigmoid"}, "`activation_fn` is 'mine.Sigmoid'"),
        (
            "config_sentence_transformers.json",
            {"default_prompt_name": "web"},
            "`default_prompt_name` is 'web'; known prompts: none",
        ),
        ("sentence_bert_config.json", {"transformer_task": None}, "`transformer_task` is 'feature-extraction'"),
        ("sentence_bert_config.json", {"modality_config": {"message": {}}}, "`modality_config` is {'message': {}}"),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {}}}, "`processing_kwargs` is {'text': {}}"),
        ("tokenizer_config.json", {"truncation_side": "left"}, "`truncation_side`"),
    ],
)
def test_settings_that_are_not_supported_are_refused_by_name(
    library: Path, file: str, changes: dict[str, Any], message: str
) -> None:
    edit(library / file, **changes)
    with pytest.raises(ModelError, match=message):
        Embed.open(library)


def test_modules_behind_the_transformer_are_refused(library: Path) -> None:
    modules = json.loads((library / "modules.json").read_text())
    modules.append({"idx": 1, "name": "1", "path": "1_Dense", "type": "sentence_transformers.base.modules.dense.Dense"})
    (library / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(
        ModelError, match=r"^modules\.json: the modules Transformer, Dense are not supported; expected of"
    ):
        Embed.open(library)


def test_a_family_without_a_head_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "model", ModelSpec("distilbert", num_layers=1, hidden_size=32, num_heads=2))
    (tmp_path / "model" / "modules.json").unlink()
    edit(tmp_path / "model" / "config.json", architectures=["DistilBertForSequenceClassification"])
    message = (
        r"`architectures` is \['DistilBertForSequenceClassification'\], .* of bert, camembert, roberta, xlm-roberta; "
    )
    with pytest.raises(ModelError, match=message):
        Embed.open(tmp_path / "model")
    with Embed.open(tmp_path / "model", pool="mean") as engine:
        assert engine.score_activation is None


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "weight",
            None,
            "is missing, of the head that config.json's `architectures` name; an encoder that gives vectors",
        ),
        ("bias", None, "is missing"),
        ("weight", np.zeros((2, HIDDEN), np.float32), r"has shape \(2, 48\), expected \(1, 48\)"),
        ("bias", np.zeros(2, np.float32), r"has shape \(2,\), expected \(1,\)"),
        ("weight", np.zeros((1, HIDDEN), np.int32), "is I32, expected one of F32, F16, BF16"),
    ],
)
def test_a_head_that_is_missing_or_misshapen_is_refused(
    written: Written, tmp_path: Path, name: str, tensor: NDArray[Any] | None, message: str
) -> None:
    directory, last = Path(shutil.copytree(written.bare, tmp_path / "model")), CLASSIFIERS[written.family].last

    def change(tensors: dict[str, Any]) -> None:
        del tensors[f"{last}.{name}"]
        if tensor is not None:
            tensors[f"{last}.{name}"] = tensor

    change_weights(directory, change)
    with pytest.raises(WeightsError, match=rf"^model\.safetensors: tensor `{last}\.{name}` {message}"):
        Embed.open(directory)


def test_a_first_layer_of_the_head_that_is_missing_is_refused(written: Written, tmp_path: Path) -> None:
    directory, inner = Path(shutil.copytree(written.bare, tmp_path / "model")), CLASSIFIERS[written.family].inner
    change_weights(directory, lambda tensors: tensors.pop(f"{inner}.weight"))
    with pytest.raises(WeightsError, match=rf"tensor `{inner}\.weight` is missing"):
        Embed.open(directory)


def test_a_cross_encoder_gives_no_vectors(engine: Embed) -> None:
    message = f"^{engine.name} is a cross-encoder and gives no vectors: rerank"
    ids, offsets = engine.tokenize_batch(["one text"])
    calls: list[Callable[[], object]] = [
        lambda: engine.encode("one text"),
        lambda: engine.encode(["one text"], outputs={"dense"}),
        lambda: engine.encode_ids(ids, offsets),
    ]
    for call in calls:
        with pytest.raises(RequestError, match=message):
            call()
    with pytest.raises(ModelError, match="is a cross-encoder: it has no pooling to set"):
        engine.set_pooling("mean", True)


def test_a_model_that_gives_vectors_gives_no_scores(minilm: Embed) -> None:
    assert minilm.score_activation is None
    with pytest.raises(RequestError, match=r"^minilm gives vectors and is no cross-encoder: encode\(texts\)"):
        minilm.rerank("a query", ["one text"])


@pytest.mark.parametrize("flags", [{"pool": "mean"}, {"normalize": True}, {"normalize": False}])
def test_pooling_of_a_cross_encoder_cannot_be_set(library: Path, flags: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="a cross-encoder scores texts for a query: it has no pooling"):
        Embed.open(library, **flags)


@pytest.mark.parametrize(
    ("query", "texts", "message"),
    [
        (7, ["a"], "^query: expected a string, got int$"),
        ("a", ["a", None], r"^texts\[1\]: expected a string, got NoneType$"),
        ("a", ["a", ("b", "c")], r"^texts\[1\]: expected a string, got tuple$"),
        ("a", "one string", "^texts: expected a list of strings, got one string$"),
        ("\ud800", ["a"], "^query: holds half of a surrogate pair"),
        ("a", ["a", "\udfff"], r"^texts\[1\]: holds half of a surrogate pair"),
    ],
)
def test_a_request_that_is_no_query_and_texts_is_refused(engine: Embed, query: Any, texts: Any, message: str) -> None:
    expected = engine.rerank("a", ["a"])
    with pytest.raises(RequestError, match=message):
        engine.rerank(query, texts)
    assert engine.rerank("a", ["a"]) == expected


def test_a_token_type_that_the_model_has_not_is_refused(bare: Path) -> None:
    name = "bert.embeddings.token_type_embeddings.weight"
    change_weights(bare, lambda tensors: tensors.update({name: tensors[name][:1].copy()}))
    edit(bare / "config.json", type_vocab_size=1)
    with Embed.open(bare) as engine:
        pair = our_pairs(engine._open_engine.tokenizer, "a", ["b"], 128)[0]
        assert pair[1] == [0, 0, 0, 1, 1]
        with pytest.raises(RequestError, match=r"^token_type_ids\[3\]: 1 is not one of the model's 1 types$"):
            engine.rerank("a", ["b"])


# Models that give vectors


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_a_model_that_gives_vectors_may_have_a_classifier_s_architecture(family: Family, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    make_model(
        directory, ModelSpec(family, num_layers=1, hidden_size=32, num_heads=2, prefix=FAMILIES[family].prefixes[0])
    )

    def vectors(**flags: Any) -> NDArray[np.float32]:
        with Embed.open(directory, **flags) as engine:
            return engine.encode(["one text"])

    expected = vectors()
    edit(directory / "config.json", architectures=[CLASSIFIERS[family].architecture])
    assert np.array_equal(vectors(), expected)
    (directory / "modules.json").unlink()
    assert np.array_equal(vectors(pool="mean"), expected)
    advice = r"; an encoder that gives vectors has modules\.json, or is opened with --pool$"
    with pytest.raises(ModelError, match=rf"^config\.json: the classifier has 2 labels .*{advice}"):
        vectors()
    edit(directory / "config.json", id2label={"0": "score"})
    with pytest.raises(WeightsError, match=rf"is missing, .*{advice}"):
        vectors()


# Numbers that are not finite


def test_a_score_that_f16_does_not_hold_is_computed_in_f32_and_no_other(tmp_path: Path) -> None:
    make_overflowing_model(tmp_path / "model", cross_encoder=True)
    half = HalfEngine(tmp_path / "model")
    with half.engine as engine, Embed.open(tmp_path / "model") as f32:
        expected = f32.rerank(FITTING[0], MIXED)
        expected[[0, 2, 3]] = engine.rerank(FITTING[0], FITTING)
        assert engine.recomputed == 0
        assert np.array_equal(engine.rerank(FITTING[0], MIXED), expected)
        assert engine.recomputed == 2


def test_a_score_that_f32_does_not_hold_is_an_error_that_names_the_text(bare: Path) -> None:
    [_, token, *_], _ = Tokenizer(bare).encode_batch(["e"], 9)
    name = "bert.embeddings.word_embeddings.weight"
    change_weights(bare, lambda tensors: tensors[name][token].fill(np.inf))
    with Embed.open(bare) as engine:
        # Another place than that of its length.
        with pytest.raises(NonFiniteError, match=r"^texts\[1\]: the model gives a score that is not finite$"):
            engine.rerank("0", ["0", "e", "0 0 0 0"])
        assert np.isfinite(engine.rerank("0", ["0", "0 0 0 0"])).all()


# The models that tools/make_model.py writes


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_made_cross_encoders_have_transformers_names_and_shapes(family: Family) -> None:
    spec = ModelSpec(family, hidden_size=32, intermediate_size=48, vocab_size=99, cross_encoder=True)
    with torch.device("meta"):
        config = AutoConfig.for_model(**model_config(spec))
        model = from_config(AutoModelForSequenceClassification, config)
    assert tensor_shapes(spec) == {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert type(model).__name__ == model_config(spec)["architectures"][0]


def test_a_made_cross_encoder_opens_in_sentence_transformers(tmp_path: Path, corpus: list[str]) -> None:
    spec = ModelSpec("xlm-roberta", hidden_size=HIDDEN, intermediate_size=80, max_positions=130, cross_encoder=True)
    make_model(tmp_path / "model", spec)
    theirs = open_theirs(tmp_path / "model")
    with Embed.open(tmp_path / "model") as engine:
        pairs = [("a query", text) for text in corpus[::9]]
        difference = np.abs(engine.rerank("a query", corpus[::9]) - theirs.predict(pairs))
        assert (difference <= logit_bound(tmp_path / "model", "xlm-roberta") / 4 + 2.0**-23).all()
        assert engine.score_activation in get_args(ScoreActivation)
    with pytest.raises(ValueError, match="no cross-encoder of the family distilbert"):
        make_model(tmp_path / "other", ModelSpec("distilbert", cross_encoder=True))
