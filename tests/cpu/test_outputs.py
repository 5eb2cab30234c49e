"""Dense, sparse and ColBERT vectors of one forward, against FlagEmbedding's definitions computed by PyTorch."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

from embed import Embed, RequestError, WeightsError, colbert_score, hybrid_scores, lexical_score
from embed.lexical import OUTPUTS
from tools.make_model import ModelSpec, make_model

SPEC = ModelSpec("xlm-roberta", num_layers=2, hidden_size=32, num_heads=2, max_positions=66, pooling="cls")
TEXTS = ["one text", "and another, a little longer one; one text", "", "\u20ac \u4e2d\u6587 one", "a text " * 60]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("outputs") / "m3"
    make_model(path, SPEC)
    generator = torch.Generator().manual_seed(5)
    for name, width in (("sparse", 1), ("colbert", 24)):
        weight, bias = torch.randn(width, 32, generator=generator) / 4, torch.randn(width, generator=generator) / 8
        save_file({"weight": weight, "bias": bias}, path / f"{name}_linear.safetensors")
    return path


def test_heads_as_flag_embedding_saves_them(directory: Path, tmp_path: Path) -> None:
    pickled = Path(shutil.copytree(directory, tmp_path / "m3"))
    for name in ("sparse", "colbert"):
        file = pickled / f"{name}_linear.safetensors"
        torch.save(load_file(file), file.with_suffix(".pt"))
        file.unlink()
    with Embed.open(directory) as saved, Embed.open(pickled) as engine:
        want, got = saved.encode(TEXTS, outputs=OUTPUTS), engine.encode(TEXTS, outputs=OUTPUTS)
        assert got.sparse == want.sparse and got.colbert is not None and want.colbert is not None
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(got.colbert, want.colbert, strict=True))


def theirs(directory: Path, text: str, maxseq: int) -> tuple[Any, dict[int, float], Any]:
    """FlagEmbedding's M3 model, in float64."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModel.from_pretrained(directory, dtype=torch.float64).eval()
    heads = {name: load_file(directory / f"{name}_linear.safetensors") for name in ("sparse", "colbert")}
    linear = {
        name: lambda x, head=head: x @ head["weight"].double().T + head["bias"].double() for name, head in heads.items()
    }
    encoded = tokenizer(text, truncation=True, max_length=maxseq, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**encoded).last_hidden_state[0]
    ids = encoded["input_ids"][0].tolist()
    dense = torch.nn.functional.normalize(hidden[0], dim=-1).numpy()
    weights = torch.relu(linear["sparse"](hidden))[:, 0].tolist()
    unused = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    sparse: dict[int, float] = {}
    for token, weight in zip(ids, weights, strict=True):
        if token not in unused and weight > sparse.get(token, 0):
            sparse[token] = weight
    colbert = torch.nn.functional.normalize(linear["colbert"](hidden[1:]), dim=-1).numpy()
    return dense, sparse, colbert


def test_outputs_are_those_of_flag_embedding(directory: Path) -> None:
    with Embed.open(directory) as engine:
        got = engine.encode(TEXTS, outputs=OUTPUTS)
        assert got.dense is not None and got.sparse is not None and got.colbert is not None
        for index, text in enumerate(TEXTS):
            dense, sparse, colbert = theirs(directory, text, engine.maxseq)
            assert np.abs(got.dense[index] - dense).max() <= 1e-4
            assert got.sparse[index].keys() == sparse.keys()
            assert all(abs(got.sparse[index][token] - weight) <= 1e-4 for token, weight in sparse.items())
            assert got.colbert[index].shape == colbert.shape and np.abs(got.colbert[index] - colbert).max() <= 1e-4
        assert any(got.sparse) and got.sparse[2] == {}


def test_a_text_has_its_outputs_in_any_company_and_in_any_selection(directory: Path) -> None:
    with Embed.open(directory) as engine:
        together = engine.encode(TEXTS, outputs=OUTPUTS)
        assert together.dense is not None and together.sparse is not None and together.colbert is not None
        assert np.array_equal(engine.encode(TEXTS), together.dense)
        for index, text in enumerate(TEXTS):
            alone = engine.encode(text, outputs={"sparse", "colbert"})
            assert alone.dense is None and alone.sparse == [together.sparse[index]]
            assert alone.colbert is not None and np.array_equal(alone.colbert[0], together.colbert[index])
        assert engine.encode([], outputs=OUTPUTS).sparse == []


def test_scores(directory: Path) -> None:
    with Embed.open(directory) as engine:
        query, passages = engine.encode(TEXTS[0], outputs=OUTPUTS), engine.encode(TEXTS, outputs=OUTPUTS)
    assert query.sparse and passages.sparse and query.colbert and passages.colbert
    assert query.dense is not None and passages.dense is not None
    dense = query.dense @ passages.dense.T
    sparse = [lexical_score(query.sparse[0], passage) for passage in passages.sparse]
    colbert = [colbert_score(query.colbert[0], passage) for passage in passages.colbert]
    by_hand = sum(weight * passages.sparse[1][token] for token, weight in query.sparse[0].items())
    assert sparse[1] == pytest.approx(by_hand) and sparse[2] == 0
    assert colbert[0] == pytest.approx(1, abs=1e-6)
    assert np.allclose(hybrid_scores(query, passages), [(dense[0] + sparse + colbert) / 3], atol=1e-6)
    weighted = (0.4 * dense[0] + 0.2 * np.array(sparse) + 0.4 * np.array(colbert)) / 1.0
    assert np.allclose(hybrid_scores(query, passages, (0.4, 0.2, 0.4)), [weighted], atol=1e-6)


def test_a_missing_head_is_an_error(directory: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    make_model(plain, SPEC)
    with Embed.open(plain) as engine:
        assert engine.encode("x", outputs=["dense"]).dense is not None
        with pytest.raises(RequestError, match=r"outputs: the model has no sparse head: no sparse_linear\.pt"):
            engine.encode("x", outputs=["dense", "sparse"])
        with pytest.raises(RequestError, match="outputs: 'lexical' is not one of dense, sparse, colbert"):
            engine.encode("x", outputs=["lexical"])  # type: ignore[list-item]
    for weight, bias, message in (
        (torch.zeros(1, 31), torch.zeros(1), r"`weight` has shape \(1, 31\), expected \(1, 32\)"),
        (torch.zeros(1, 32), torch.zeros(2), r"`bias` has shape \(2,\), expected \(1,\)"),
        (torch.zeros(1, 32, dtype=torch.int32), torch.zeros(1), "`weight` is I32, expected one of F32, F16, BF16"),
    ):
        save_file({"weight": weight, "bias": bias}, plain / "sparse_linear.safetensors")
        with pytest.raises(WeightsError, match=message):
            Embed.open(plain)


def test_the_command_line_prints_outputs_as_json(directory: Path) -> None:
    command = [sys.executable, "-m", "embed", "text", str(directory), *TEXTS[:2], "--outputs", "dense,sparse,colbert"]
    lines = [json.loads(line) for line in subprocess.run(command, capture_output=True, check=True).stdout.splitlines()]
    with Embed.open(directory) as engine:
        want = engine.encode(TEXTS[:2], outputs=OUTPUTS)
    assert want.dense is not None and want.sparse is not None and want.colbert is not None
    for index, line in enumerate(lines):
        assert list(line) == ["text", "dense", "sparse", "colbert"] and line["text"] == TEXTS[index]
        assert np.array_equal(np.array(line["dense"], np.float32), want.dense[index])
        assert {int(token): weight for token, weight in line["sparse"].items()} == pytest.approx(want.sparse[index])
        assert np.array_equal(np.array(line["colbert"], np.float32), want.colbert[index])
    refused = subprocess.run([*command[:-1], "dense,lexical"], capture_output=True, text=True)
    assert refused.returncode == 2 and "expected some of dense,sparse,colbert, got dense,lexical" in refused.stderr
