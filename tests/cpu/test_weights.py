"""The same weights in every form that they are distributed in give the same vectors, to the last bit."""

import json
import shutil
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from embed import Embed, WeightsError
from embed.checkpoint import Checkpoint, weights_path
from embed.stored import StoredTensor
from gkd.cpu import CpuBackend
from tools.make_model import ModelSpec, make_model

BERT = ModelSpec("bert", num_layers=2, hidden_size=32, num_heads=2, intermediate_size=48, max_positions=40)
TEXTS = ["one text", "and another, a little longer one", ""]

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("original") / "bert"
    make_model(directory, BERT)
    return directory


@pytest.fixture(scope="module")
def expected(original: Path) -> Any:
    return vectors(original)


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    """A copy without weights."""
    directory = Path(shutil.copytree(original, tmp_path / "bert"))
    (directory / "model.safetensors").unlink()
    return directory


@pytest.fixture
def state(original: Path) -> State:
    return load_file(original / "model.safetensors")


def vectors(directory: Path) -> Any:
    with Embed.open(directory) as engine:
        return engine.encode(TEXTS)


def write(path: Path, state: State, **options: Any) -> None:
    if path.suffix == ".safetensors":
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    else:
        torch.save(state, path, **options)


def write_shards(directory: Path, stem: str, suffix: str, state: State, num_shards: int = 3) -> dict[str, str]:
    names = sorted(state)
    weight_map: dict[str, str] = {}
    for idx in range(num_shards):
        shard = f"{stem}-{idx + 1:05}-of-{num_shards:05}.{suffix}"
        own = names[idx::num_shards]
        write(directory / shard, {name: state[name] for name in own})
        weight_map |= dict.fromkeys(own, shard)
    write_index(directory / f"{stem}.{suffix}.index.json", weight_map)
    return weight_map


def write_index(path: Path, weight_map: Any) -> None:
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def as_array(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    tensor = checkpoint.tensors[name]
    values = torch.from_numpy(checkpoint.view(tensor).copy())
    return values.view(torch.bfloat16) if tensor.dtype == "BF16" else values


# Forms


@pytest.mark.parametrize("form", ["safetensors shards", "bin", "bin shards", "bin of protocol 4", "bin of a module"])
def test_every_form_gives_the_same_bits(original: Path, model: Path, state: State, expected: Any, form: str) -> None:
    match form:
        case "safetensors shards":
            write_shards(model, "model", "safetensors", state)
        case "bin":
            write(model / "pytorch_model.bin", state)
        case "bin shards":
            write_shards(model, "pytorch_model", "bin", state)
        case "bin of protocol 4":
            write(model / "pytorch_model.bin", OrderedDict(state), pickle_protocol=4)
        case "bin of a module":  # with its `_metadata`, and a buffer of integers
            own = AutoModel.from_pretrained(original).state_dict()
            own["embeddings.position_ids"] = torch.arange(40)[None]
            assert hasattr(own, "_metadata")
            write(model / "pytorch_model.bin", own)
    assert np.array_equal(vectors(model), expected)


def test_shards_as_transformers_writes_them(original: Path, model: Path, expected: Any) -> None:
    AutoModel.from_pretrained(original).save_pretrained(model, max_shard_size="40KB")
    assert len(list(model.glob("model-*.safetensors"))) > 2 and not (model / "model.safetensors").exists()
    assert np.array_equal(vectors(model), expected)


def test_which_of_several_forms_is_read(model: Path, state: State, expected: Any) -> None:
    other = {name: tensor * 2 for name, tensor in state.items()}
    write_shards(model, "pytorch_model", "bin", state)
    assert weights_path(model).name == "pytorch_model.bin.index.json"
    assert np.array_equal(vectors(model), expected)
    for path in (model / "pytorch_model.bin", None, model / "model.safetensors"):
        if path is None:
            write_shards(model, "model", "safetensors", state)
        else:
            write(path, other)
        assert np.array_equal(vectors(model), expected) == (path is None)


def test_a_link_to_nothing_is_not_passed_over(model: Path, state: State) -> None:
    write(model / "pytorch_model.bin", state)
    (model / "model.safetensors").symlink_to("away")
    with pytest.raises(WeightsError, match=r"^model.safetensors: not found$"):
        Embed.open(model)


def test_files_may_be_links(model: Path, state: State, expected: Any, tmp_path: Path) -> None:
    """As in the cache of a model hub, where each file lies elsewhere under another name."""
    for idx, shard in enumerate(sorted({*write_shards(model, "pytorch_model", "bin", state).values()})):
        (model / shard).rename(tmp_path / f"blob{idx}")
        (model / shard).symlink_to(tmp_path / f"blob{idx}")
    assert np.array_equal(vectors(model), expected)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_mixed_types(model: Path, original: Path, state: State, suffix: str) -> None:
    types = (torch.float32, torch.float16, torch.bfloat16)
    mixed = {name: state[name].to(types[idx % 3]) for idx, name in enumerate(sorted(state))}
    write(model / ("model.safetensors" if suffix == "safetensors" else "pytorch_model.bin"), mixed)
    narrow = vectors(model)
    shutil.copytree(model, wide := model.with_name("wide"))
    (wide / "pytorch_model.bin").unlink(missing_ok=True)
    write(wide / "model.safetensors", {name: tensor.float() for name, tensor in mixed.items()})
    assert np.array_equal(narrow, vectors(wide))


@pytest.mark.parametrize("prefix", ["", "bert."])
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_legacy_names_of_layer_norms(model: Path, state: State, expected: Any, prefix: str, suffix: str) -> None:
    def legacy(name: str) -> str:
        return prefix + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    renamed = {legacy(name): tensor for name, tensor in state.items()}
    assert sum(name.endswith((".gamma", ".beta")) for name in renamed) == 10
    write(path := model / ("model.safetensors" if suffix == "safetensors" else "pytorch_model.bin"), renamed)
    assert np.array_equal(vectors(model), expected)
    write(path, renamed | {f"{prefix}embeddings.LayerNorm.weight": torch.ones(32)})
    with pytest.raises(WeightsError, match=f"{path.name}: tensors .*LayerNorm.(gamma|weight)`.* are the same weight"):
        Embed.open(model)
    write(path, renamed | {f"{prefix}embeddings.LayerNorm.beta": torch.zeros(31)})
    with pytest.raises(WeightsError, match=rf"`{prefix}embeddings.LayerNorm.beta` has shape \(31,\)"):
        Embed.open(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder.layer.1.output.dense.bias": None}, "tensor `encoder.layer.1.output.dense.bias` is missing"),
        (
            {"encoder.layer.0.intermediate.dense.weight": torch.zeros(32, 48).T[:, :31]},
            r"`encoder.layer.0.intermediate.dense.weight` has shape \(48, 31\), config.json asks for \(48, 32\)",
        ),
        ({"embeddings.LayerNorm.bias": torch.zeros(32, dtype=torch.int32)}, "is I32, expected one of F32, F16, BF16"),
        ({"embeddings.LayerNorm.bias": torch.zeros(32, dtype=torch.float64)}, "is F64, expected one of"),
        ({"classifier.weight": torch.zeros(2)}, "tensor `classifier.weight` is not part of a bert model"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(model: Path, state: State, change: Any, message: str) -> None:
    state |= change
    write(model / "pytorch_model.bin", {name: tensor for name, tensor in state.items() if tensor is not None})
    with pytest.raises(WeightsError, match=f"^pytorch_model.bin: .*{message}"):
        Embed.open(model)


def test_nothing_is_taken_from_the_device_before_all_weights_are_known_to_fit(
    model: Path, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    monkeypatch.setattr(CpuBackend, "acquire", lambda _: taken.append("device"))
    monkeypatch.setattr(CpuBackend, "weight", lambda *_: taken.append("weight"))
    last = "encoder.layer.1.output.LayerNorm.bias"
    for change in ({last: torch.zeros(31)}, {last: torch.zeros(32).int()}, {"z": torch.zeros(1)}, {}):
        write(model / "pytorch_model.bin", state | change if change else {k: v for k, v in state.items() if k != last})
        with pytest.raises(WeightsError, match=f"`({last}|z)`"):
            Embed.open(model)
    write_shards(model, "model", "safetensors", state)
    (model / "model-00003-of-00003.safetensors").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"model-00003-of-00003.safetensors: 0 bytes"):
        Embed.open(model)
    assert not taken


# Shards and their index


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_index_and_shards_agree(model: Path, state: State, suffix: str) -> None:
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    weight_map = write_shards(model, stem, suffix, state)
    index = model / f"{stem}.{suffix}.index.json"
    first, second, third = sorted({*weight_map.values()})
    own = {name: state[name] for name, shard in weight_map.items() if shard == first}
    name = next(iter(own))

    def refused(message: str) -> None:
        with pytest.raises(WeightsError, match=message) as refusal:
            Embed.open(model)
        assert "\n" not in str(refusal.value)

    for shard, message in (
        (second, f"{first}: has tensor `{name}`, which {index.name} places `{second}`"),
        ("none", f"none: not found, but {index.name} names it"),
        (f"../{model.name}/{first}", "expected the name of a file beside the index"),
        (str(model / first), "expected the name of a file beside the index"),
        ("..", "expected the name of a file"),
        ("", "expected the name of a file"),
        ("a\\b", "expected the name of a file"),
        ("a\0b", r"`a\\x00b`, expected the name of a file"),
        ("a\nb", r"`a\\nb`, expected the name of a file"),
        ("\ud800", r"`\\ud800`, expected the name of a file"),
        ("a" * 1000, "a+: not found"),
        (7, f"`{name}` is in int"),
        (None, f"`{name}` is in NoneType"),
        (index.name, f"{index.name}: neither a zip"),
    ):
        write_index(index, weight_map | {name: shard})
        refused(message)
    write_index(index, {key: shard for key, shard in weight_map.items() if key != name})
    refused(f"{first}: has tensor `{name}`, which {index.name} places in no file")
    write_index(index, weight_map | {"pooler.extra": third})
    refused(f"{third}: tensor `pooler.extra` is missing, which {index.name} places there")
    for content, message in (
        (b"", "is not valid JSON"),
        (b"[]", "is no JSON object"),
        (b"{}", "no `weight_map`"),
        (b'{"weight_map": {}}', "no `weight_map`"),
        (b'{"weight_map": ["a"]}', "no `weight_map`"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "has `a` twice"),
        (b'{"weight_map": ' + b"[" * 100_000, "is not valid JSON"),
    ):
        index.write_bytes(content)
        refused(f"{index.name}: (the index )?{message}")
    write_index(index, weight_map)
    write(model / second, {key: state[key] for key, shard in weight_map.items() if shard == second} | {name: own[name]})
    refused(f"{first} and {second}: tensor `{name}` is in both")
    (model / second).unlink()
    refused(f"{second}: not found, but {index.name} names it")


# What torch.save writes


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_torch_saves_is_read(tmp_path: Path, dtype: torch.dtype, protocol: int) -> None:
    base = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5).to(dtype)
    tied = torch.randn(4, 3).to(dtype)
    state = OrderedDict(
        whole=base,
        strided=base.transpose(0, 2),
        window=base[1:, 1:3, ::2],
        column=base[:, 0, 0],
        row=base[1],
        scalar=base[1, 2, 3],
        none=base[:0],
        odd_strides=torch.as_strided(base, (1, 5), (99, 1)),
        parameter=torch.nn.Parameter(tied),
        tied=tied,
        transposed=tied.T,
    )
    torch.save(state, tmp_path / "x.bin", pickle_protocol=protocol)
    checkpoint = Checkpoint(tmp_path / "x.bin", keep=protocol == 2)
    assert checkpoint.tensors.keys() == state.keys()
    for name, tensor in state.items():
        values = checkpoint.view(checkpoint.tensors[name])
        assert values.flags.c_contiguous and values.shape == tensor.shape
        assert torch.equal(as_array(checkpoint, name), tensor.detach()), name
        assert checkpoint.tensors[name].num_bytes == tensor.numel() * dtype.itemsize
    # Two names of one storage are two views of the same bytes, none of them a copy.
    assert checkpoint.tensors["tied"].start == checkpoint.tensors["parameter"].start
    assert not checkpoint.view(checkpoint.tensors["tied"]).flags.owndata
    assert checkpoint.view(checkpoint.tensors["whole"]).flags.aligned
    assert checkpoint.tensors["odd_strides"].strides is None and checkpoint.tensors["strided"].strides == (1, 5, 20)


def test_types_of_buffers_are_told_apart(tmp_path: Path) -> None:
    types = {
        "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
        "BOOL": torch.bool, "F64": torch.float64,
    }  # fmt: skip
    torch.save({name: torch.zeros(3, dtype=dtype) for name, dtype in types.items()}, tmp_path / "x.bin")
    tensors = Checkpoint(tmp_path / "x.bin", keep=False).tensors
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {name: name for name in types}


def test_a_head_of_bge_m3(tmp_path: Path) -> None:
    layer = torch.nn.Linear(8, 3)
    torch.save(layer.state_dict(), tmp_path / "colbert_linear.pt")
    checkpoint = Checkpoint(tmp_path / "colbert_linear.pt", keep=False)
    assert sorted(checkpoint.tensors) == ["bias", "weight"]
    assert torch.equal(as_array(checkpoint, "weight"), layer.weight.detach())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.zeros(3), "holds tensor, expected tensors by name"),
        ({"epoch": 3, "state_dict": {}}, "`epoch` is int, expected a tensor"),
        ({"state_dict": {"a": torch.zeros(3)}}, "`state_dict` is dict, expected a tensor: save the state_dict alone"),
        ({0: torch.zeros(3)}, "a mapping that is not from names"),
        ({"a": torch.zeros(3)[:, None].expand(3, 9)}, "`a` with shape .3, 9., strides .1, 0. .* is no part"),
        ({"a": torch.zeros(3, dtype=torch.complex64)}, "names `torch.ComplexFloatStorage`"),
        ({"a": torch.zeros(3, 3).to_sparse()}, "names `torch._utils._rebuild_sparse_tensor`"),
        ({"a": torch.zeros(3, dtype=torch.uint16)}, "names `torch._utils._rebuild_tensor_v3`"),
        ({"a": torch.nn.Linear(2, 2)}, "names `torch.nn.modules.linear.Linear`"),
        ({"a": np.zeros(3)}, "names `numpy._core.multiarray._reconstruct`"),
        ({"a": [1]}, "has the instruction EMPTY_LIST"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_file_of_tensors_is_refused_by_name(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "x.bin")
    with pytest.raises(WeightsError, match=f"^x.bin: .*{message}"):
        Checkpoint(tmp_path / "x.bin", keep=False)


def test_files_of_an_old_torch_say_how_to_convert_them(model: Path, state: State, expected: Any) -> None:
    path = model / "pytorch_model.bin"
    torch.save(state, path, _use_new_zipfile_serialization=False)
    with pytest.raises(WeightsError, match=r"pytorch_model.bin: in the form of PyTorch before 1.6.*`torch.save"):
        Embed.open(model)
    torch.save(torch.load(path, weights_only=True), path)  # what it says
    assert np.array_equal(vectors(model), expected)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"])
def test_a_git_lfs_pointer_is_recognised(model: Path, name: str) -> None:
    (model / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    with pytest.raises(WeightsError, match=f"{name}: a Git LFS pointer"):
        Embed.open(model)


@pytest.mark.parametrize(
    ("name", "message"),
    [("onnx", "an exported graph"), ("adapter_model.safetensors", "an adapter"), ("tf_model.h5", "TensorFlow's")],
)
def test_weights_in_another_form_are_explained(model: Path, name: str, message: str) -> None:
    (model / name).mkdir()
    with pytest.raises(WeightsError, match=f"model.safetensors: not found; {name} is {message}"):
        Embed.open(model)


def test_torch_is_not_imported(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "x.bin")
    code = (
        "import sys; from pathlib import Path; from embed.checkpoint import Checkpoint; import embed.model\n"
        f"checkpoint = Checkpoint(Path({str(tmp_path / 'x.bin')!r}), keep=True)\n"
        "assert checkpoint.view(checkpoint.tensors['a']).sum() == 3 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_stored_tensor_names_its_file(model: Path, state: State) -> None:
    weight_map = write_shards(model, "model", "safetensors", state)
    tensors: dict[str, StoredTensor] = Checkpoint(weights_path(model), keep=False).tensors
    assert {name: tensor.file for name, tensor in tensors.items()} == weight_map
