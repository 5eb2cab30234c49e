"""What stands in a model directory is honoured or refused by name: configuration, pipeline, weights, tokenizer."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from embed import Embed, ModelError, TokenizerError, WeightsError
from gkd.ops.pool import POOL_MODES, PoolMode
from tools.make_model import ModelSpec, make_model

BERT = ModelSpec("bert", num_layers=2, hidden_size=32, num_heads=2, intermediate_size=48, max_positions=40)
XLMR = ModelSpec("xlm-roberta", num_layers=1, hidden_size=32, num_heads=2, intermediate_size=48, max_positions=40)

TEXTS = ["one text", "and another, a little longer one", ""]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("originals")
    make_model(directory / "bert", BERT)
    make_model(directory / "xlmr", XLMR)
    return directory


@pytest.fixture
def bert(originals: Path, tmp_path: Path) -> Path:
    """A copy of a small BERT model, to be changed."""
    return Path(shutil.copytree(originals / "bert", tmp_path / "bert"))


@pytest.fixture
def xlmr(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "xlmr", tmp_path / "xlmr"))


def edit(path: Path, **changes: Any) -> None:
    """Sets keys of a JSON object; None for a value removes the key."""
    config = json.loads(path.read_text())
    for key, value in changes.items():
        config[key] = value
        if value is None:
            del config[key]
    path.write_text(json.dumps(config))


def vectors(directory: Path, **options: Any) -> Any:
    with Embed.open(directory, **options) as engine:
        return engine.encode(TEXTS)


CONFIG_REFUSALS: list[tuple[dict[str, Any], str]] = [
    (
        {"model_type": "gpt2"},
        "config.json: `model_type` is 'gpt2'.*known: bert, camembert, distilbert, mpnet, roberta, xlm-roberta",
    ),
    ({"model_type": 3}, "`model_type` is 3"),
    ({"hidden_act": "gelu_new"}, "`hidden_act` is 'gelu_new', only 'gelu'"),
    ({"position_embedding_type": "relative_key"}, "`position_embedding_type`"),
    ({"is_decoder": True}, "`is_decoder`"),
    ({"quantization_config": {"bits": 4}}, "`quantization_config`"),
    ({"relative_attention_num_buckets": 64}, "`relative_attention_num_buckets` is 64, only 32 is supported"),
    ({"num_hidden_layers": None}, "`num_hidden_layers` is None, expected an integer"),
    ({"hidden_size": "32"}, "`hidden_size` is '32'"),
    ({"num_attention_heads": True}, "`num_attention_heads` is True"),
    ({"num_attention_heads": 5}, "`hidden_size` 32 is not a multiple of `num_attention_heads` 5"),
    ({"hidden_size": 1024, "num_attention_heads": 2}, "head width 512 is not supported; at most 256"),
    ({"layer_norm_eps": 0}, "`layer_norm_eps`"),
    ({"layer_norm_eps": float("nan")}, "`layer_norm_eps`"),
    ({"vocab_size": -1}, "`vocab_size`"),
]


@pytest.mark.parametrize(("changes", "message"), CONFIG_REFUSALS, ids=[message for _, message in CONFIG_REFUSALS])
def test_a_configuration_that_means_something_else_is_refused(
    bert: Path, changes: dict[str, Any], message: str
) -> None:
    edit(bert / "config.json", **changes)
    with pytest.raises(ModelError, match=message):
        Embed.open(bert)


def test_positions_that_the_padding_uses_up(xlmr: Path) -> None:
    edit(xlmr / "config.json", max_position_embeddings=2)
    with pytest.raises(ModelError, match="`max_position_embeddings` 2 leaves no position"):
        Embed.open(xlmr)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "1_Pooling/config.json"])
def test_a_missing_file_is_named(bert: Path, name: str) -> None:
    (bert / name).unlink()
    with pytest.raises(ModelError, match=rf"{Path(name).name}: not found"):
        Embed.open(bert)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b"[]"])
@pytest.mark.parametrize("name", ["config.json", "sentence_bert_config.json", "tokenizer.json"])
def test_a_broken_json_file_is_named(bert: Path, name: str, content: bytes) -> None:
    (bert / name).write_bytes(content)
    with pytest.raises(ModelError, match=f"{name}: "):
        Embed.open(bert)


def test_keys_that_transformers_would_fill_in_may_be_missing(bert: Path) -> None:
    expected = vectors(bert)
    for key in ("type_vocab_size", "layer_norm_eps", "hidden_act", "pad_token_id"):
        edit(bert / "config.json", **{key: None})
    assert np.array_equal(vectors(bert), expected)


# Pipeline


def test_no_modules_file_is_a_convention_for_xlm_roberta(xlmr: Path) -> None:
    (xlmr / "modules.json").unlink()
    with Embed.open(xlmr) as engine:
        assert (engine.pooling.modes, engine.pooling.normalize, engine.pooling_assumed) == (("cls",), True, True)
    with Embed.open(xlmr, pool="mean", normalize=False) as engine:
        assert (engine.pooling.modes, engine.pooling.normalize, engine.pooling_assumed) == (("mean",), False, False)


def test_no_modules_file_is_refused_for_other_families(bert: Path) -> None:
    (bert / "modules.json").unlink()
    with pytest.raises(ModelError, match=r"modules.json: not found.*--pool"):
        Embed.open(bert)
    with Embed.open(bert, pool="cls") as engine:
        assert engine.pooling.normalize


def test_pooling_of_the_files_and_over_the_files(bert: Path) -> None:
    mean = vectors(bert, normalize=False)
    edit(bert / "1_Pooling" / "config.json", pooling_mode_cls_token=True, pooling_mode_mean_tokens=False)
    cls = vectors(bert, normalize=False)
    assert not np.allclose(cls, mean)
    assert np.array_equal(vectors(bert, pool="mean", normalize=False), mean)
    (bert / "1_Pooling" / "config.json").write_text('{"embedding_dimension": 32, "pooling_mode": "cls"}')
    assert np.array_equal(vectors(bert, normalize=False), cls)
    (bert / "1_Pooling" / "config.json").write_text('{"pooling_mode": ["mean"]}')
    assert np.array_equal(vectors(bert, normalize=False), mean)


POOLING_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"pooling_mode": "min"}, "1_Pooling/config.json: pooling mode 'min' is not supported; known: cls, max, mean"),
    ({"pooling_mode": ["cls", "min"]}, r"pooling mode \['cls', 'min'\]"),
    ({"pooling_mode": 3}, "pooling mode 3"),
    ({"pooling_mode": []}, r"pooling mode \[\]"),
]


@pytest.mark.parametrize("mode", POOL_MODES)
def test_both_spellings_of_the_pooling(bert: Path, mode: PoolMode) -> None:
    keys = {"cls": "cls_token", "lasttoken": "lasttoken"}
    legacy = f"pooling_mode_{keys.get(mode, mode if mode.endswith('tokens') else mode + '_tokens')}"
    config = bert / "1_Pooling" / "config.json"
    config.write_text(json.dumps({"pooling_mode": mode, "embedding_dimension": 32}))
    expected = vectors(bert)
    config.write_text(json.dumps({"pooling_mode_mean_tokens": False, legacy: True, "word_embedding_dimension": 32}))
    assert np.array_equal(vectors(bert), expected)
    # Of several, in sentence-transformers' order.
    config.write_text(json.dumps({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}))
    with Embed.open(bert) as engine:
        assert engine.pooling.modes == ("cls", "mean") and engine.dim == 64


@pytest.mark.parametrize(("config", "message"), POOLING_REFUSALS, ids=[message for _, message in POOLING_REFUSALS])
def test_pooling_that_is_not_implemented_is_refused(bert: Path, config: dict[str, Any], message: str) -> None:
    (bert / "1_Pooling" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        Embed.open(bert)


@pytest.mark.parametrize(
    "types",
    [
        ["models.Transformer", "models.Pooling", "models.LayerNorm", "models.Normalize"],
        ["models.Transformer", "models.Normalize"],
        ["models.Pooling", "models.Transformer"],
        ["models.CLIPModel"],
        [],
    ],
)
def test_modules_that_are_not_implemented_are_refused(bert: Path, types: list[str]) -> None:
    modules = [{"idx": i, "path": "", "type": f"sentence_transformers.{name}"} for i, name in enumerate(types)]
    (bert / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=r"modules.json: the modules .* are not supported"):
        Embed.open(bert)


def test_both_spellings_of_the_module_types(bert: Path) -> None:
    expected = vectors(bert)
    packages = ["base.modules.transformer", "sentence_transformer.modules.pooling", "base.modules.normalize"]
    modules = json.loads((bert / "modules.json").read_text())
    for module, package in zip(modules, packages, strict=True):
        module["type"] = f"sentence_transformers.{package}.{module['type'].rpartition('.')[2]}"
    (bert / "modules.json").write_text(json.dumps(modules))
    assert np.array_equal(vectors(bert), expected)


def test_no_normalize_module_means_no_normalisation(bert: Path) -> None:
    modules = json.loads((bert / "modules.json").read_text())
    (bert / "modules.json").write_text(json.dumps(modules[:2]))
    lengths = np.linalg.norm(vectors(bert), axis=1)
    assert np.abs(lengths - 1).min() > 1e-3
    assert np.allclose(np.linalg.norm(vectors(bert, normalize=True), axis=1), 1)


def test_the_transformer_may_lie_in_a_directory_of_its_own(bert: Path) -> None:
    expected = vectors(bert)
    (bert / "0_Transformer").mkdir()
    for name in (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
        "sentence_bert_config.json",
    ):
        (bert / name).rename(bert / "0_Transformer" / name)
    modules = json.loads((bert / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (bert / "modules.json").write_text(json.dumps(modules))
    assert np.array_equal(vectors(bert), expected)


def test_a_module_path_may_not_leave_the_directory(bert: Path) -> None:
    modules = json.loads((bert / "modules.json").read_text())
    modules[1]["path"] = "../1_Pooling"
    (bert / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match="leaves the model directory"):
        Embed.open(bert)


@pytest.mark.parametrize(
    ("file", "config", "message"),
    [
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "`default_prompt_name` is 'query'"),
        ("config_sentence_transformers.json", {"truncate_dim": "8"}, "`truncate_dim` is '8'"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "`model_type` is 'SparseEncoder'"),
        ("sentence_bert_config.json", {"max_seq_length": "many"}, "maximum length of a text is 'many'"),
        ("tokenizer_config.json", {"truncation_side": "left"}, "`truncation_side`"),
    ],
)
def test_settings_that_would_change_a_vector_are_refused(
    bert: Path, file: str, config: dict[str, Any], message: str
) -> None:
    (bert / file).write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        Embed.open(bert)


@pytest.mark.parametrize(
    ("sentence_bert", "tokenizer", "maxseq"),
    [
        ({"max_seq_length": 20}, {"model_max_length": 30}, 20),
        ({"max_seq_length": None}, {"model_max_length": 30}, 30),
        ({}, {"model_max_length": 1e30}, 38),
        ({"max_seq_length": 4000}, {}, 38),
        (None, None, 38),
    ],
)
def test_the_length_limit(
    xlmr: Path, sentence_bert: dict[str, Any] | None, tokenizer: dict[str, Any] | None, maxseq: int
) -> None:
    for name, config in (("sentence_bert_config.json", sentence_bert), ("tokenizer_config.json", tokenizer)):
        (xlmr / name).unlink()
        if config is not None:
            (xlmr / name).write_text(json.dumps(config))
    with Embed.open(xlmr) as engine:
        assert engine.maxseq == maxseq
        assert engine.set_maxseq(1000) == 38
        assert engine.encode(["word " * 100]).shape == (1, 32)


# Weights


def change_weights(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("encoder.layer.1.output.dense.bias"), "tensor `encoder.layer.1.output.dense.bias` is missing"),
        (
            lambda w: w.update({"encoder.layer.0.intermediate.dense.weight": np.zeros((48, 31), np.float32)}),
            r"`encoder.layer.0.intermediate.dense.weight` has shape \(48, 31\), config.json asks for \(48, 32\)",
        ),
        (
            lambda w: w.update({"embeddings.LayerNorm.bias": np.zeros(32, np.int32)}),
            "`embeddings.LayerNorm.bias` is I32, expected one of F32, F16, BF16",
        ),
        (
            lambda w: w.update({"classifier.weight": np.zeros(2, np.float32)}),
            "tensor `classifier.weight` is not part of",
        ),
        (
            lambda w: w.update({"encoder.layer.2.output.dense.bias": np.zeros(32, np.float32)}),
            "`encoder.layer.2.output.dense.bias` is not part of a bert model as configured",
        ),
        (lambda w: w.clear(), "no tensor `embeddings.word_embeddings.weight`, `bert.embeddings"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    bert: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    change_weights(bert, change)
    with pytest.raises(WeightsError, match=f"model.safetensors: .*{message}"):
        Embed.open(bert)


def test_tensors_that_an_embedding_does_not_read_may_be_there_or_not(bert: Path) -> None:
    expected = vectors(bert)
    change_weights(bert, lambda w: (w.pop("pooler.dense.weight"), w.pop("pooler.dense.bias"))[0])
    assert np.array_equal(vectors(bert), expected)
    change_weights(bert, lambda w: w.update({"embeddings.position_ids": np.arange(40)[None]}))
    assert np.array_equal(vectors(bert), expected)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("prefix", ["", "roberta."])
def test_16_bit_weights_are_widened_exactly(tmp_path: Path, dtype: Any, prefix: str) -> None:
    spec = ModelSpec("xlm-roberta", 1, 32, 2, 48, 40, dtype=dtype, prefix=prefix)
    make_model(tmp_path / "narrow", spec)
    shutil.copytree(tmp_path / "narrow", tmp_path / "wide")
    torch_load = pytest.importorskip("safetensors.torch")
    tensors = {
        name: tensor.float() for name, tensor in torch_load.load_file(tmp_path / "narrow/model.safetensors").items()
    }
    torch_load.save_file(tensors, tmp_path / "wide" / "model.safetensors")
    assert np.array_equal(vectors(tmp_path / "narrow"), vectors(tmp_path / "wide"))


def test_unaligned_tensors_are_read_right(bert: Path) -> None:
    """The format asks for no alignment: a header of odd length moves every tensor off its boundary."""
    expected, path = vectors(bert), bert / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    path.write_bytes(struct.pack("<Q", length + 1) + content[8 : 8 + length] + b" " + content[8 + length :])
    assert np.array_equal(vectors(bert), expected)


def damage_header(content: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    change(header["embeddings.LayerNorm.bias"])
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + content[8 + length :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: b"", "0 bytes are no safetensors file"),
        (lambda content: content[:6], "6 bytes are no safetensors file"),
        (lambda content: content[:-10], "cut short or damaged"),
        (lambda content: b"\xff" * 8 + content[8:], "the header is said to have"),
        (lambda content: content[:8] + b"x" + content[9:], "the header is not valid JSON"),
        (lambda content: struct.pack("<Q", 2) + b"[]" + content, "no JSON object"),
        (lambda content: damage_header(content, lambda entry: entry.pop("dtype")), "LayerNorm.bias` is malformed"),
        (lambda content: damage_header(content, lambda entry: entry.update(shape=7)), "LayerNorm.bias` is malformed"),
        (
            lambda content: damage_header(content, lambda entry: entry.update(shape=[-32])),
            "LayerNorm.bias` is malformed",
        ),
        (lambda content: damage_header(content, lambda entry: entry.update(data_offsets=[5])), "is malformed"),
        (
            lambda content: damage_header(content, lambda entry: entry.update(data_offsets=[128, 0])),
            "cut short or damaged",
        ),
        (lambda content: damage_header(content, lambda entry: entry.update(data_offsets=[0, 1 << 60])), "cut short"),
        (
            lambda content: damage_header(content, lambda entry: entry.update(shape=[1 << 40, 1 << 40])),
            "takes .* bytes",
        ),
    ],
)
def test_a_damaged_weights_file_is_refused(bert: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    path = bert / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(WeightsError, match=f"model.safetensors: .*{message}"):
        Embed.open(bert)


# Tokenizer


def test_presets_of_the_tokenizer_file_are_ignored(bert: Path) -> None:
    expected = vectors(bert)
    edit(
        bert / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 30},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "[PAD]",
        },
    )
    assert np.array_equal(vectors(bert), expected)


def test_a_tokenizer_without_special_tokens_around_a_text_is_refused(bert: Path) -> None:
    path = bert / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["post_processor"] = None
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(TokenizerError, match="expected one special token before a text and one after it"):
        Embed.open(bert)


def test_truncation_keeps_the_head_and_the_last_special_token(bert: Path) -> None:
    with Embed.open(bert) as engine:
        whole = engine.tokenize("several words that are not many")
        engine.set_maxseq(6)
        assert engine.tokenize("several words that are not many") == [*whole[:5], whole[-1]]
        engine.set_maxseq(2)
        assert engine.tokenize("several words that are not many") == [whole[0], whole[-1]]
        with pytest.raises(ModelError, match="maxseq 1: expected at least 2"):
            engine.set_maxseq(1)


# Names


def test_models_by_name(minilm: Embed) -> None:
    with Embed.open("minilm") as engine:
        assert engine.name == "minilm"
        assert np.array_equal(engine.encode(TEXTS), minilm.encode(TEXTS))


def test_a_name_that_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory, and no model package; known packages: minilm"):
        Embed.open(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="a file, expected a model directory"):
        Embed.open(tmp_path / "file")
