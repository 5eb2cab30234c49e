"""A small model of each family, written by transformers: the engine's token ids and vectors are transformers' own."""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoTokenizer

from embed import Embed, ModelError, WeightsError
from embed.config import read_config
from embed.models import BLOCK_PLAN, FAMILIES
from tools.make_model import Family, ModelSpec, make_model, model_config, tensor_shapes, tokenizer_size, write_tokenizer

MAX_POSITIONS = 130
_BERT_SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 80}
_ROBERTA = {**_BERT_SIZES, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
# Under the names of each family's own configuration class.
SIZES: dict[Family, dict[str, Any]] = {
    "bert": {**_BERT_SIZES, "type_vocab_size": 2, "layer_norm_eps": 1e-12},
    "camembert": {**_ROBERTA, "bos_token_id": 5, "eos_token_id": 6},
    "distilbert": {"dim": 48, "n_layers": 2, "n_heads": 3, "hidden_dim": 80},
    "mpnet": {**_BERT_SIZES, "layer_norm_eps": 1e-5},
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
}


@dataclass(frozen=True)
class Written:
    """One model, as an encoder alone and as what it was trained as."""

    family: Family
    bare: Path
    task: Path
    prefix: str
    """Of the encoder's tensors in `task`."""
    max_tokens: int
    """Of a text, by transformers' table of positions."""


def from_config(auto_class: Any, config: Any) -> Any:
    """A model of random weights; transformers does not type this method."""
    return auto_class.from_config(config)


def fill(model: Any) -> None:
    """Everything is random, a padding token's embedding too: nothing that is left out may be hidden by a 0 or a 1."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim == 1:
                value.normal_(float(name.lower().replace("_", "").endswith("norm.weight")), 0.1)
            else:
                value.normal_(0, 0.05 if "embeddings" in name else value.shape[1] ** -0.5)


def write(directory: Path, family: Family) -> Written:
    """Random weights and a tokenizer of the family's kind; transformers writes every file."""
    scratch = directory / "tokenizer"
    scratch.mkdir()
    write_tokenizer(scratch, ModelSpec(family, max_positions=MAX_POSITIONS))
    config = AutoConfig.for_model(
        family, vocab_size=tokenizer_size(scratch), max_position_embeddings=MAX_POSITIONS, **SIZES[family]
    )
    torch.manual_seed(0)
    model = from_config(AutoModelForMaskedLM, config)
    fill(model)
    padding = model.base_model.embeddings.position_embeddings.padding_idx
    max_tokens = MAX_POSITIONS - (0 if padding is None else padding + 1)
    written = Written(family, directory / "bare", directory / "task", f"{model.base_model_prefix}.", max_tokens)
    model.save_pretrained(written.task)
    model.base_model.save_pretrained(written.bare)
    tokenizer = AutoTokenizer.from_pretrained(scratch)
    assert tokenizer.model_max_length == max_tokens
    for path in (written.bare, written.task):
        tokenizer.save_pretrained(path)
    return written


@pytest.fixture(scope="module", params=list(SIZES))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def engine(written: Written) -> Iterator[Embed]:
    with Embed.open(written.bare, pool="mean", normalize=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("original"), "distilbert").bare


@pytest.fixture
def distilbert(original: Path, tmp_path: Path) -> Path:
    """A model to be changed."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def reference(directory: Path, texts: list[str], maxseq: int) -> tuple[list[list[int]], NDArray[np.float64]]:
    """Token ids, and the mean of the last states in float64, of transformers on each text alone."""
    model = AutoModel.from_pretrained(directory, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = [tokenizer(text, truncation=True, max_length=maxseq)["input_ids"] for text in texts]
    with torch.inference_mode():
        states = [model(input_ids=torch.tensor([row])).last_hidden_state for row in ids]
    assert all(state.dtype == torch.float64 for state in states)
    return ids, np.stack([state[0].mean(0).numpy() for state in states])


def edit(path: Path, **changes: Any) -> None:
    """Sets keys of a JSON object; None for a value removes the key."""
    config = json.loads(path.read_text())
    config = {key: value for key, value in (config | changes).items() if value is not None}
    path.write_text(json.dumps(config))


def vectors(
    directory: Path, texts: Sequence[str] = ("one text", "and another, a little longer one", "")
) -> NDArray[np.float32]:
    with Embed.open(directory, pool="mean") as engine:
        return engine.encode([*texts])


def test_every_family_is_here() -> None:
    assert set(SIZES) == set(FAMILIES)


def test_token_ids_and_vectors_are_transformers_own(written: Written, engine: Embed, corpus: list[str]) -> None:
    theirs, expected = reference(written.bare, corpus, engine.maxseq)
    ours = [engine.tokenize(text) for text in corpus]
    assert ours == theirs
    assert max(map(len, ours)) == engine.maxseq == written.max_tokens, "no text was truncated"

    actual = engine.encode(corpus).astype(np.float64)
    lengths = np.linalg.norm(actual, axis=1) * np.linalg.norm(expected, axis=1)
    cosine = (actual * expected).sum(axis=1) / lengths
    assert cosine.min() >= 0.99999, corpus[int(cosine.argmin())]
    # Cosine is blind to length, and to anything below 1e-3 of a direction; the bound is test_reference's.
    assert (np.linalg.norm(actual - expected, axis=1) <= 1e-4 * np.linalg.norm(expected, axis=1)).all()
    # Were all vectors alike, agreement would say nothing.
    assert np.median(np.corrcoef(actual)) < 0.99


def test_a_text_has_one_vector(engine: Embed, corpus: list[str]) -> None:
    texts = corpus[::7]
    assert np.array_equal(np.stack([engine.encode(text) for text in texts]), engine.encode(texts))


def test_a_checkpoint_of_the_training_task_gives_the_same_bits(
    written: Written, engine: Embed, corpus: list[str]
) -> None:
    """Its tensors carry a prefix, and there are those of a head."""
    names = load_file(written.task / "model.safetensors").keys()
    prefixed = [name for name in names if name.startswith(written.prefix)]
    assert 0 < len(prefixed) < len(names)
    with Embed.open(written.task, pool="mean", normalize=False) as task:
        assert np.array_equal(task.encode(corpus[::10]), engine.encode(corpus[::10]))


def test_tensors_of_another_task_are_refused(written: Written, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(written.bare, tmp_path / "model"))
    weights = load_file(directory / "model.safetensors")
    save_file(weights | {"classifier.weight": np.zeros((2, 48), np.float32)}, directory / "model.safetensors")
    with pytest.raises(WeightsError, match=f"`classifier.weight` is not part of a {written.family} model"):
        Embed.open(directory, pool="mean")


# Configuration


@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh", "gelu_fast", "relu", "silu", ["gelu"], None])
def test_an_activation_that_is_not_the_exact_gelu_is_refused(written: Written, tmp_path: Path, activation: Any) -> None:
    key = "activation" if written.family == "distilbert" else "hidden_act"
    config = json.loads((written.bare / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: activation}))
    with pytest.raises(ModelError) as caught:
        read_config(tmp_path)
    assert str(caught.value) == (f"config.json: `{key}` is {activation!r}, only 'gelu' and 'gelu_python' are supported")


def test_the_exact_gelu_has_two_names(distilbert: Path) -> None:
    expected = vectors(distilbert)
    edit(distilbert / "config.json", activation="gelu_python")
    assert np.array_equal(vectors(distilbert), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": None}, "`dim` is None, expected an integer of at least 1"),
        ({"n_layers": 0}, "`n_layers` is 0"),
        ({"hidden_dim": "80"}, "`hidden_dim` is '80'"),
        ({"n_heads": 5}, "`dim` 48 is not a multiple of `n_heads` 5"),
        ({"hidden_size": 96}, "`hidden_size` is 96 and `dim` is 48; a distilbert model has `dim` alone"),
        ({"hidden_act": "relu"}, "`hidden_act` is 'relu' and `activation` is 'gelu'"),
    ],
)
def test_distilbert_s_keys_are_asked_for_by_its_own_names(
    distilbert: Path, changes: dict[str, Any], message: str
) -> None:
    edit(distilbert / "config.json", **changes)
    with pytest.raises(ModelError, match=f"config.json: {message}"):
        Embed.open(distilbert)


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": None, "pad_token_id": None},  # transformers fills them in
        {"hidden_size": 48, "num_hidden_layers": 2},  # the same once more
        {"layer_norm_eps": 1e-2, "type_vocab_size": 9},  # which DistilBERT's code does not read
        {"sinusoidal_pos_embds": True},  # of a table that is in the file
    ],
)
def test_keys_that_change_nothing_in_distilbert(distilbert: Path, corpus: list[str], changes: dict[str, Any]) -> None:
    texts, expected = corpus[::40], vectors(distilbert)
    _, before = reference(distilbert, texts, 128)
    edit(distilbert / "config.json", **changes)
    _, after = reference(distilbert, texts, 128)
    assert np.array_equal(before, after), "it changes something in transformers"
    assert np.array_equal(vectors(distilbert), expected)


@pytest.mark.parametrize("written", ["mpnet"], indirect=True)
def test_mpnet_s_padding_id_is_1_whatever_its_config_says(written: Written, tmp_path: Path, corpus: list[str]) -> None:
    texts = [text for text in corpus if "<pad>" in text]
    before, expected = reference(written.bare, texts, 128), vectors(written.bare, texts)
    directory = Path(shutil.copytree(written.bare, tmp_path / "model"))
    edit(directory / "config.json", pad_token_id=0, relative_attention_num_buckets=None)
    after = reference(directory, texts, 128)
    assert before[0] == after[0] and np.array_equal(before[1], after[1]), "it changes something in transformers"
    assert np.array_equal(vectors(directory, texts), expected)


@pytest.mark.parametrize("field", BLOCK_PLAN)
def test_a_block_plan_that_is_not_implemented_is_refused_by_name(
    written: Written, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    changes: dict[str, Any] = {field: "rotary"}
    monkeypatch.setitem(FAMILIES, written.family, replace(FAMILIES[written.family], **changes))
    with pytest.raises(ModelError, match=f"a {written.family} model has `{field}` 'rotary', which is not implemented"):
        read_config(written.bare)


# The models that tools/make_model.py writes


@pytest.mark.parametrize("family", SIZES)
def test_made_models_have_transformers_names_and_shapes(family: Family) -> None:
    spec = ModelSpec(family, hidden_size=32, intermediate_size=48, vocab_size=99)
    with torch.device("meta"):
        model = from_config(AutoModel, AutoConfig.for_model(**model_config(spec)))
    assert tensor_shapes(spec) == {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert type(model).__name__ == model_config(spec)["architectures"][0]


@pytest.mark.parametrize("family", ["camembert", "distilbert", "mpnet", "roberta"])
def test_made_models_open_in_sentence_transformers(family: Family, corpus: list[str], tmp_path: Path) -> None:
    spec = ModelSpec(family, hidden_size=32, num_heads=2, intermediate_size=48, max_positions=MAX_POSITIONS)
    make_model(tmp_path / "model", spec)
    make_model(tmp_path / "again", spec)
    for path in (tmp_path / "model").iterdir():
        assert path.is_dir() or path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path
    model = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert model.max_seq_length == spec.max_seqlen
    texts = corpus[::5]
    with Embed.open(tmp_path / "model") as engine:
        assert [engine.tokenize(text) for text in texts] == [
            model.tokenizer(text, truncation=True, max_length=engine.maxseq)["input_ids"] for text in texts
        ]
        assert (engine.encode(texts) * model.encode(texts)).sum(axis=1).min() >= 0.99999
