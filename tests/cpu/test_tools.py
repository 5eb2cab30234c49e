"""The programs that make models, against transformers and sentence-transformers; those that show speed; the corpus."""

import json
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch_file
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, XLMRobertaConfig, XLMRobertaModel

from tools import bench_embed, e5_file, make_model, models, plot_bench
from tools.make_model import PRESETS, ModelSpec, model_config, tensor_shapes
from tools.sweeps import SWEEPS

ROOT = Path(__file__).parents[2]
PREPARED = ROOT / "build" / "models"  # by `make models`
CORPUS = [json.loads(line) for line in (ROOT / "tests/corpus/corpus.jsonl").read_text("utf-8").splitlines()]
TEXTS = [entry["text"] for entry in CORPUS]

REFERENCES = {"bert": (BertConfig, BertModel), "xlm-roberta": (XLMRobertaConfig, XLMRobertaModel)}
SPECS = {
    "bert": ModelSpec("bert", hidden_size=32, intermediate_size=48),
    "xlm-roberta": ModelSpec("xlm-roberta", hidden_size=32, intermediate_size=48, seed=1),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small model of each family, by family."""
    paths = {family: tmp_path_factory.mktemp("made") / family for family in SPECS}
    for family, spec in SPECS.items():
        make_model.make_model(paths[family], spec)
    return paths


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a local directory must not need the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def plain_tokenizer(model: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


# make_model


@pytest.mark.parametrize("spec", [replace(SPECS["bert"], vocab_size=99), *PRESETS.values()], ids=["small", *PRESETS])
def test_names_and_shapes_are_those_of_transformers(spec: ModelSpec) -> None:
    config_class, model_class = REFERENCES[spec.family]
    with torch.device("meta"):
        reference = model_class(config_class(**model_config(spec)))
    assert tensor_shapes(spec) == {name: tuple(value.shape) for name, value in reference.state_dict().items()}


@pytest.mark.parametrize(("family", "prefix"), [("bert", ""), ("bert", "bert."), ("xlm-roberta", "roberta.")])
def test_transformers_finds_every_tensor(tmp_path: Path, family: str, prefix: str) -> None:
    spec = replace(SPECS[family], prefix=prefix)
    make_model.make_model(tmp_path / "model", spec)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert all(name.startswith(prefix) for name in weights)
    model, loading = AutoModel.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), weights[prefix + name], err_msg=name)


@pytest.mark.parametrize("family", SPECS)
def test_every_tensor_is_random(made: dict[str, Path], family: str) -> None:
    for name, values in load_file(made[family] / "model.safetensors").items():
        assert np.unique(values).size > 0.9 * min(values.size, 1000), name
        assert (abs(values.mean() - 1) < 0.1) == name.endswith("LayerNorm.weight"), name


def test_equal_specs_give_equal_files_and_seeds_differ(tmp_path: Path, made: dict[str, Path]) -> None:
    make_model.make_model(tmp_path / "again", SPECS["xlm-roberta"])
    make_model.make_model(tmp_path / "other", replace(SPECS["xlm-roberta"], seed=2))
    files = [path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("*") if path.is_file()]
    assert len(files) == 7
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (made["xlm-roberta"] / file).read_bytes(), file
    again, other = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "other"))
    assert not any(np.array_equal(again[name], other[name]) for name in again)


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_smaller_dtypes_are_the_rounded_f32(
    tmp_path: Path, made: dict[str, Path], dtype: make_model.DType, torch_dtype: torch.dtype
) -> None:
    make_model.make_model(tmp_path / "model", replace(SPECS["bert"], dtype=dtype))
    exact = load_torch_file(made["bert"] / "model.safetensors")
    for name, values in load_torch_file(tmp_path / "model" / "model.safetensors").items():
        assert values.dtype == torch_dtype
        assert torch.equal(values, exact[name].to(torch_dtype)), name


def test_values_do_not_depend_on_how_many_are_drawn_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def values() -> np.ndarray[Any, Any]:
        return np.concatenate(list(make_model.random_pieces(SPECS["bert"], "pooler.dense.weight", (32, 32))))

    whole = values()
    monkeypatch.setattr(make_model, "PIECE_VALUES", 100)
    np.testing.assert_array_equal(values(), whole)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("family", SPECS)
def test_sentence_transformers_loads_what_was_made(made: dict[str, Path], family: str) -> None:
    model = SentenceTransformer(str(made[family]), device="cpu")
    assert model.max_seq_length == SPECS[family].max_seqlen
    assert [type(module).__name__ for module in model] == ["Transformer", "Pooling", "Normalize"]

    plain = plain_tokenizer(made[family])
    plain.enable_truncation(model.max_seq_length)
    features = model.tokenize(TEXTS)
    lengths = features["attention_mask"].sum(1).tolist()
    ids = [row[:length] for row, length in zip(features["input_ids"].tolist(), lengths, strict=True)]
    assert ids == [encoding.ids for encoding in plain.encode_batch(TEXTS)]
    assert max(lengths) == model.max_seq_length

    names = ("english-weather", "german", "russian", "hindi", "emoji-flags", "python-code", "korean", "nan-light")
    vectors = model.encode([entry["text"] for entry in CORPUS if entry["name"] in names])
    similarities = (vectors @ vectors.T)[np.triu_indices(len(names), 1)]
    assert np.all(similarities < 0.97)


def test_pooling_and_normalisation_are_as_asked(tmp_path: Path) -> None:
    make_model.make_model(tmp_path / "model", replace(SPECS["bert"], pooling="cls", normalize=False))
    assert read_json(tmp_path / "model" / "1_Pooling" / "config.json")["pooling_mode_cls_token"] is True
    assert [module["path"] for module in read_json(tmp_path / "model" / "modules.json")] == ["", "1_Pooling"]


def test_a_tokenizer_is_copied_and_decides_the_vocabulary(tmp_path: Path, made: dict[str, Path]) -> None:
    make_model.make_model(tmp_path / "model", replace(SPECS["bert"], tokenizer=made["xlm-roberta"]))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "model" / name).read_bytes() == (made["xlm-roberta"] / name).read_bytes()
    config = read_json(tmp_path / "model" / "config.json")
    assert config["vocab_size"] == plain_tokenizer(made["xlm-roberta"]).get_vocab_size()


@pytest.mark.parametrize("spec", [ModelSpec(hidden_size=30), ModelSpec(vocab_size=500, tokenizer=Path("made"))])
def test_an_impossible_model_is_refused_and_leaves_nothing(
    tmp_path: Path, made: dict[str, Path], spec: ModelSpec
) -> None:
    spec = replace(spec, tokenizer=spec.tokenizer and made["bert"])
    with pytest.raises(ValueError, match=r"hidden size 30|vocabulary of 500"):
        make_model.make_model(tmp_path / "model", spec)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert make_model.main([str(tmp_path)]) == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_options_change_a_preset() -> None:
    dest, spec = make_model.parse_spec(
        ["out", "--preset", "bge-m3", "--layers", "2", "--no-normalize", "--dtype", "f16"]
    )
    assert dest == Path("out")
    assert spec == replace(PRESETS["bge-m3"], num_layers=2, normalize=False, dtype="f16")


# models


@pytest.fixture
def prepared() -> Path:
    names = ("minilm", "e5-small-bert", "e5-small-xlmr")
    if not all((PREPARED / name / models.MANIFEST).exists() for name in names):
        pytest.fail(f"run `make models`: not all of {', '.join(names)} are in {PREPARED}")
    return PREPARED


def test_prepared_models_are_recognised(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}
    assert models.main([str(prepared)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        str(prepared / name) for name in ("minilm", "e5-small-bert", "e5-small-xlmr")
    ]
    assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*")} == before


def test_transformers_tokenises_as_the_tokenizer_file_says(prepared: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(prepared / "minilm", model_max_length=10**6)
    expected = plain_tokenizer(prepared / "minilm").encode_batch(TEXTS)
    assert tokenizer(TEXTS)["input_ids"] == [encoding.ids for encoding in expected]


def directory_model(name: str, write: Callable[[Path], None], source: str = "here") -> models.Model:
    return models.Model(name, source, "a model", write)


def write_marker(directory: Path) -> None:
    (directory / "config.json").write_text(directory.name)


def write_half(directory: Path) -> None:
    write_marker(directory)
    raise KeyboardInterrupt


def test_an_interrupted_model_leaves_nothing_and_is_then_written(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        models.prepare(tmp_path, directory_model("m", write_half))
    assert not list(tmp_path.iterdir())
    assert models.prepare(tmp_path, directory_model("m", write_marker)) == tmp_path / "m"
    assert sorted(os.listdir(tmp_path / "m")) == ["config.json", "manifest.json"]
    models.prepare(tmp_path, directory_model("m", write_half))  # finished: not written again


def test_a_model_from_another_source_replaces_the_old_one_only_when_whole(tmp_path: Path) -> None:
    path = models.prepare(tmp_path, directory_model("m", write_marker))
    with pytest.raises(KeyboardInterrupt):
        models.prepare(tmp_path, directory_model("m", write_half, source="elsewhere"))
    assert read_json(path / models.MANIFEST)["source"] == "here"
    models.prepare(tmp_path, directory_model("m", write_marker, source="elsewhere"))
    assert read_json(path / models.MANIFEST)["source"] == "elsewhere"


E5_PIECES = ["<s>", "<pad>", "</s>", "<unk>", "\u2581", *"abcdefghij", "<mask>"]
E5_ROWS, E5_HIDDEN, E5_FFN, E5_POSITIONS = len(E5_PIECES) + 2, 32, 64, 16


def e5_shapes() -> dict[str, tuple[int, ...]]:
    """Of a quantised E5 file with one layer."""
    linears = dict.fromkeys(["q", "k", "v", "ao"], (E5_HIDDEN, E5_HIDDEN))
    linears |= {"fi": (E5_FFN, E5_HIDDEN), "fo": (E5_HIDDEN, E5_FFN)}
    norms = ["emb.ln", "l0.aln", "l0.oln"]
    return {
        "emb.word": (E5_ROWS, E5_HIDDEN),
        **{f"l0.{name}.w": shape for name, shape in linears.items()},
        **{f"l0.{name}.b": shape[:1] for name, shape in linears.items()},
        **{f"{name}.{part}": (E5_HIDDEN,) for name in norms for part in "wb"},
        "emb.pos": (E5_POSITIONS, E5_HIDDEN),
        "emb.type": (2, E5_HIDDEN),
    }


def e5_values() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    values = {}
    for name, shape in e5_shapes().items():
        count = int(np.prod(shape))
        if len(shape) == 2 and name not in ("emb.pos", "emb.type"):
            blocks = np.zeros(count // e5_file.Q4_BLOCK, e5_file.Q4_DTYPE)
            blocks["scale"] = rng.uniform(0.01, 0.1, len(blocks))
            blocks["halves"] = rng.integers(0, 256, (len(blocks), 16))
            values[name] = blocks.tobytes()
        else:
            values[name] = rng.normal(0.1, 0.1, count).astype("<f4").tobytes()
    return values


def e5_content() -> bytes:
    """A small file in the format that E5Checkpoint describes, with random values."""
    pieces = [piece.encode() for piece in E5_PIECES]
    sizes = (E5_HIDDEN, 1, 4, E5_FFN, E5_ROWS, E5_POSITIONS, 2)
    special_ids = (0, 2, 1, 3)
    values = e5_values()
    head = e5_file.E5_HEADER.pack(
        e5_file.E5_MAGIC, 1, *sizes, 1e-12, 32, len(pieces), *special_ids, len(b"".join(pieces))
    )
    head += np.cumsum([0, *map(len, pieces)]).astype("<u4").tobytes()
    head += np.linspace(-1, -9, len(pieces), dtype="<f4").tobytes()
    head += b"".join(pieces)
    head += struct.pack("<iI5s", 1, 5, b"norm.")
    head += struct.pack("<i", len(values))
    begin = len(head) + sum(2 + len(name) + e5_file.E5_TENSOR.size for name in values)
    for name, stored in values.items():
        head += struct.pack("<H", len(name)) + name.encode()
        head += e5_file.E5_TENSOR.pack(0, 0, begin, len(stored))
        begin += len(stored)
    return head + b"".join(values.values())


@pytest.fixture(scope="module")
def tiny_e5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with both forms of a small quantised file."""
    dest = tmp_path_factory.mktemp("e5")
    (dest / "tiny-q4.bin").write_bytes(e5_content())
    assert models.main([str(dest), "--from-file", str(dest / "tiny-q4.bin")]) == 0
    return dest


def test_q4_values_are_what_the_format_says() -> None:
    e5 = e5_file.E5Checkpoint.parse(e5_content())
    block = np.frombuffer(e5.content, np.uint8, 18, e5.offsets["l0.q.w"])
    scale = float(block[:2].view(np.float16)[0])
    expected = [(byte % 16 - 8) * scale for byte in block[2:].tolist()]
    expected += [(byte // 16 - 8) * scale for byte in block[2:].tolist()]
    np.testing.assert_array_equal(e5.q4("l0.q.w", 32, 32)[0], np.array(expected, np.float16))


@pytest.mark.usefixtures("no_network")
def test_both_forms_of_an_e5_file_are_one_function(tiny_e5: Path) -> None:
    names = ("tiny-bert", "tiny-xlmr")
    forms = [SentenceTransformer(str(tiny_e5 / name), device="cpu") for name in names]
    assert [read_json(tiny_e5 / name / "config.json")["model_type"] for name in names] == ["bert", "xlm-roberta"]
    assert [form.max_seq_length for form in forms] == [16, 16]
    texts = ["abc", "j", "", "a b c d e f g h i j", "abcdefghij" * 3, "<mask> x"]
    bert, xlmr = (form.float().encode(texts) for form in forms)
    np.testing.assert_array_equal(bert, xlmr)
    assert np.all((bert @ bert.T)[np.triu_indices(len(texts), 1)] < 0.999)


@pytest.mark.parametrize("content", [b"", b"E5S1", b"GGUF" + bytes(100)])
def test_another_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    (tmp_path / "other-q4.bin").write_bytes(content)
    assert models.main([str(tmp_path / "models"), "--from-file", str(tmp_path / "other-q4.bin")]) == 1
    assert "not a quantised E5 file" in capsys.readouterr().err
    assert not list((tmp_path / "models").iterdir())


# bench_embed and plot_bench


def test_every_point_of_a_sweep_is_texts_of_one_length() -> None:
    throughput, latency = SWEEPS["throughput"].points, SWEEPS["latency"].points
    assert list(throughput) == [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
    assert all(set(lengths) == {length} and sum(lengths) == 16_384 for length, lengths in throughput.items())
    assert list(latency) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert all(lengths == [32] * num_texts for num_texts, lengths in latency.items())


def test_ours_is_shown_as_a_ratio_of_each_peer_of_its_precision(capsys: pytest.CaptureFixture[str]) -> None:
    medians_ms = {"ours f32": 4.0, "ours f16": 2.0, "torch f32": 8.0, "torch f16": 3.0, "library parts f16": 1.5}
    records: list[dict[str, Any]] = [
        {"row": row, "median_ms": ms, "fastest_ms": ms, "slowest_ms": ms, "first_ms": ms, "tokens_per_s": 1.0}
        for row, ms in medians_ms.items()
    ]
    bench_embed.show("64 x 32", [records[0] | {"min_cosine": 0.5}, *records[1:]])
    exact, half, *peers = capsys.readouterr().out.splitlines()
    assert exact.endswith("cosine 0.5000000  2.00 x torch")
    assert half.endswith("1.50 x torch, 0.75 of library parts")
    assert all(" x " not in line.removeprefix("64 x 32") and "cosine" not in line for line in peers)


ROWS = [f"{engine} {dtype}" for dtype in ("f32", "tf32", "f16", "bf16") for engine in ("ours", "torch")]


def sweep_records() -> list[dict[str, Any]]:
    """What a run writes: a record of the table, and all rows of both sweeps, a little slower from row to row."""
    run = {"card": "A card, 1.2.3, 700 W", "date": "2026-12-01", "torch": "2.13.0", "commit": "0", "model": "a_$model$"}
    records: list[dict[str, Any]] = [{"workload": "1 x 16", "row": "library parts f16", "median_ms": 1.0}]
    for name, sweep in SWEEPS.items():
        for x, lengths in sweep.points.items():
            for row_idx, row in enumerate(ROWS):
                ms = (1 + 1e-3 * sum(lengths)) * 1.3**row_idx
                times = {"median_ms": ms, "fastest_ms": 0.9 * ms, "slowest_ms": 1.2 * ms}
                records.append({"sweep": name, "x": x, "row": row, "tokens_per_s": 1e3 * sum(lengths) / ms} | times)
    return [run | record for record in records]


def write_records(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def plots(tmp_path: Path) -> Path:
    """The directory of the plots of `sweep_records`."""
    assert (
        plot_bench.main([str(write_records(tmp_path / "records.jsonl", sweep_records())), str(tmp_path / "a/b")]) == 0
    )
    return tmp_path / "a/b"


def test_plots_name_every_row_the_units_and_the_machine(plots: Path) -> None:
    assert sorted(path.name for path in plots.iterdir()) == ["latency.svg", "throughput.svg"]
    for name, unit, x in (("throughput", "(tokens/s)", "8,192"), ("latency", "(ms)", "256")):
        texts = [text.strip() for text in ElementTree.parse(plots / f"{name}.svg").getroot().itertext()]
        assert [text for text in texts if text in ROWS] == ROWS
        assert {SWEEPS[name].title, SWEEPS[name].x_label, SWEEPS[name].y_label, x} <= set(texts)
        assert unit in SWEEPS[name].y_label
        assert "a_$model$ on A card, 1.2.3, 700 W · 2026-12-01" in texts


def test_equal_records_give_equal_plots(plots: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.plot_bench", str(tmp_path / "records.jsonl"), str(tmp_path / "again")]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "1"}, check=True, capture_output=True)
    for path in plots.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_a_band_is_in_the_unit_of_its_median() -> None:
    run = {"row": "ours f32", "model": "a", "card": "b", "date": "c", "x": 16}
    times = {"median_ms": 2.0, "fastest_ms": 1.0, "slowest_ms": 4.0, "tokens_per_s": 100.0}
    assert plot_bench.Record(sweep="latency", **run, **times).y == (2, 1, 4)  # type: ignore[arg-type]
    assert plot_bench.Record(sweep="throughput", **run, **times).y == (100, 200, 50)  # type: ignore[arg-type]


def luminance(color: str) -> float:
    """Relative luminance, as WCAG 2 defines it, of `#rrggbb`."""
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("background", ["#ffffff", "#0d1117"], ids=["light", "dark"])
def test_plots_stand_out_from_a_page_of_either_theme(background: str) -> None:
    # WCAG 2 asks graphics for a contrast of 3; 4.35 is the most that one gray has with both pages.
    least = {plot_bench.TEXT_COLOR: 4.3} | dict.fromkeys(plot_bench.COLORS.values(), 3.0)
    for color, contrast in least.items():
        darker, lighter = sorted([luminance(color), luminance(background)])
        assert (lighter + 0.05) / (darker + 0.05) >= contrast, color


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sweep": "memory"}, r":2: not a record of bench_embed: .*`\$.sweep`"),
        ({"row": "vllm f32"}, r":2: not a record of bench_embed: .*`\$.row`"),
        ({"x": 0}, r":2: not a record of bench_embed: .*`\$.x`"),
        ({"median_ms": "fast"}, r":2: not a record of bench_embed: .*`\$.median_ms`"),
        ({"slowest_ms": float("nan")}, ":2: not a record of bench_embed: JSON is malformed"),
        ({"card": "another"}, ":3: expected one run, of `a_.* on another .*`, got `a_.*`"),
        ({"x": 32}, ":10: `ours f32` is there twice at 32 of `throughput`"),
    ],
)
def test_a_record_that_does_not_fit_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    records = sweep_records()
    records[1] |= change
    path = write_records(tmp_path / "records.jsonl", records)
    assert plot_bench.main([str(path), str(tmp_path / "plots")]) == 1
    assert re.fullmatch(f"error: {re.escape(str(path))}{message}.*\n", capsys.readouterr().err)
    assert not (tmp_path / "plots").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no record of a sweep"),
        (b'{"workload": "1 x 16", "row": "ours f32"}\n', "no record of a sweep"),
        (b"[1]\n", ":1: not a record of bench_embed"),
        (b'{"sweep": "latency", "x": 1}\n', ":1: not a record of bench_embed: .*missing required field"),
        (b'{"sweep": "\xff"}\n', ":1: not a record of bench_embed"),
        (None, "No such file"),
    ],
)
def test_a_file_without_sweeps_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "records.jsonl").write_bytes(content)
    assert plot_bench.main([str(tmp_path / "records.jsonl"), str(tmp_path / "plots")]) == 1
    assert re.fullmatch(f"error: .*{message}.*\n", capsys.readouterr().err)


# The corpus


def test_corpus_has_enough_texts_and_scripts() -> None:
    assert len(set(TEXTS)) == len(CORPUS) >= 120
    assert len({entry["name"] for entry in CORPUS}) == len(CORPUS)
    assert len({entry["script"] for entry in CORPUS} - {"Common", "Mixed", "Emoji", "None"}) >= 20


def test_corpus_holds_the_cases_that_engines_trip_over() -> None:
    assert {"", " ", "\n"} <= set(TEXTS)
    everything = "".join(TEXTS)
    for part in (
        "\0",
        "\t",
        "\u200d",
        "\u202b",
        "</s>",
        "<s>",
        " <mask> ",
        "<pad>",
        "<unk>",
        "[CLS]",
        "[SEP]",
        "[MASK]",
    ):
        assert part in everything, part
    assert any(len(word) == 2000 for text in TEXTS for word in text.split())
