"""The command line, as a person runs it: real processes, what they print, and how they end."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from embed import Embed
from tools.make_model import ModelSpec, make_model

TEXTS = ["one text", "zwei, mit Umlaut: ö", ""]
QUERY = "a query"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    make_model(path, ModelSpec("xlm-roberta", num_layers=1, hidden_size=32, num_heads=2, max_positions=66))
    return path


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "ranks"
    spec = ModelSpec("bert", num_layers=1, hidden_size=32, num_heads=2, max_positions=64, cross_encoder=True)
    make_model(path, spec)
    return path


def embed(
    *arguments: object, stdin: bytes | None = None, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "embed", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        timeout=60,
        env={**os.environ, **(environment or {})},
    )


def rows(output: bytes) -> list[list[float]]:
    return [[float(number) for number in line.split(b",")] for line in output.splitlines()]


def test_text_prints_a_line_of_numbers_for_each_text(directory: Path) -> None:
    result = embed("text", directory, *TEXTS)
    assert result.returncode == 0
    with Embed.open(directory) as engine:
        # The digits are those that give back the same float32.
        assert np.array_equal(np.array(rows(result.stdout), np.float32), engine.encode(TEXTS))


def test_what_was_loaded_is_said_in_two_lines(directory: Path) -> None:
    plan, computation = embed("text", directory, "a").stderr.decode().splitlines()
    assert plan == "embed: small: xlm-roberta, 1 layers, 32 wide, mean pooling, normalized, at most 64 tokens"
    with Embed.open(directory) as engine:
        device, weights_mb, workspace_mb = engine.device_name, engine.weights_bytes / 1e6, engine.workspace_bytes / 1e6
    loaded, separator, load_s = computation.rpartition(" in ")
    assert loaded == (
        f"embed: small: plain f32 on cpu ({device}), {weights_mb:.1f} MB of weights, "
        f"{workspace_mb:.1f} MB of workspace, loaded"
    )
    assert separator and load_s.endswith(" s") and 0 < float(load_s.removesuffix(" s")) < 60


def test_prompts_of_the_model_and_of_the_user(directory: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(directory, tmp_path / "model"))
    settings = {"prompts": {"query": "find: ", "passage": "read: "}, "default_prompt_name": "query"}
    (model / "config_sentence_transformers.json").write_text(json.dumps(settings))
    with Embed.open(directory) as engine:
        expected = {prompt: engine.encode([f"{prompt}a"]) for prompt in ("find: ", "read: ", "so: ", "")}
    for flags, prompt in (
        ([], "find: "),
        (["--prompt-name", "passage"], "read: "),
        (["--prompt", "so: "], "so: "),
        (["--prompt", ""], ""),
    ):
        result = embed("text", model, "a", *flags)
        assert np.array_equal(np.array(rows(result.stdout), np.float32), expected[prompt]), flags
    unknown = embed("text", model, "a", "--prompt-name", "title")
    assert unknown.returncode == 1
    assert (
        unknown.stderr.decode().splitlines()[-1] == "embed: error: prompt_name 'title': known prompts: query, passage"
    )


def test_text_from_standard_input_keeps_one_line_a_text(directory: Path) -> None:
    expected = embed("text", directory, "a", "", " b ", "ü").stdout
    assert embed("text", directory, "-", stdin="a\n\r\n b \nü".encode()).stdout == expected
    assert embed("text", directory, "-", stdin=b"").stdout == b""
    # Only alone does a dash mean standard input.
    assert len(embed("text", directory, "-", "a").stdout.splitlines()) == 2


def test_text_as_json_lines(directory: Path) -> None:
    result = embed("text", directory, "--json", 'quote " and \n newline', "b")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [list(line) for line in lines] == [["text", "embedding"]] * 2
    assert lines[0]["text"] == 'quote " and \n newline'
    assert [line["embedding"] for line in lines] == rows(embed("text", directory, 'quote " and \n newline', "b").stdout)


def test_rerank_prints_score_index_and_text_best_first(reranker: Path) -> None:
    lines = embed("rerank", reranker, QUERY, *TEXTS).stdout.decode().splitlines()
    with Embed.open(reranker) as engine:
        scores = engine.rerank(QUERY, TEXTS)
    printed = [line.split("\t") for line in lines]
    assert [int(index) for _, index, _ in printed] == np.argsort(-scores).tolist()
    for score, index, text in printed:
        # The digits are those that give back the same float32.
        assert np.float32(score) == scores[int(index)] and text == TEXTS[int(index)]
    # Of equal ones the first is the first; a text is one line.
    equal = embed("rerank", reranker, QUERY, "a\nb", "a b", "a\nb").stdout.decode().splitlines()
    assert [line.split("\t")[1:] for line in equal] == [["0", "a b"], ["1", "a b"], ["2", "a b"]]


def test_rerank_as_json_lines_and_raw(reranker: Path) -> None:
    lines = [json.loads(line) for line in embed("rerank", reranker, QUERY, *TEXTS, "--json").stdout.splitlines()]
    raw = embed("rerank", reranker, QUERY, *TEXTS, "--json", "--raw-scores").stdout.splitlines()
    with Embed.open(reranker) as engine:
        scores, logits = engine.rerank(QUERY, TEXTS), engine.rerank(QUERY, TEXTS, raw_scores=True)
    best = np.argsort(-scores).tolist()
    assert [list(line) for line in lines] == [["index", "score", "text"]] * 3
    assert [(line["index"], np.float32(line["score"]), line["text"]) for line in lines] == [
        (index, scores[index], TEXTS[index]) for index in best
    ]
    assert [np.float32(json.loads(line)["score"]) for line in raw] == [logits[index] for index in best]


def test_rerank_of_standard_input(reranker: Path) -> None:
    expected, stdin = embed("rerank", reranker, QUERY, *TEXTS).stdout, "\n".join([*TEXTS, ""]).encode()
    assert expected and embed("rerank", reranker, QUERY, stdin=stdin).stdout == expected
    assert embed("rerank", reranker, QUERY, "-", stdin=stdin).stdout == expected
    nothing = embed("rerank", reranker, QUERY, stdin=b"")
    assert (nothing.returncode, nothing.stdout) == (0, b"")


def test_what_was_loaded_of_a_cross_encoder(reranker: Path) -> None:
    plan, computation = embed("rerank", reranker, QUERY, "a").stderr.decode().splitlines()
    assert plan == "embed: ranks: bert, 1 layers, cross-encoder, sigmoid of its logit, at most 64 tokens"
    assert computation.startswith("embed: ranks: plain f32 on cpu (")


@pytest.mark.parametrize("arguments", [["text", "RERANKER", "a"], ["serve", "RERANKER"], ["verify", "RERANKER"]])
def test_a_command_for_vectors_refuses_a_cross_encoder_in_one_line(reranker: Path, arguments: list[str]) -> None:
    result = embed(*(reranker if argument == "RERANKER" else argument for argument in arguments))
    assert (result.returncode, result.stdout) == (1, b"")
    assert result.stderr.decode() == (
        "embed: error: ranks is a cross-encoder and gives no vectors: `embed rerank` scores texts for a query\n"
    )


def test_rerank_refuses_a_model_that_gives_vectors_in_one_line(directory: Path) -> None:
    result = embed("rerank", directory, QUERY, "a")
    assert (result.returncode, result.stdout) == (1, b"")
    assert result.stderr.decode() == (
        "embed: error: small gives vectors and is no cross-encoder: `embed text` prints them\n"
    )


def test_flags_change_the_vectors_and_are_reported(directory: Path) -> None:
    plain = embed("text", directory, "some words here")
    for flags, reported in (
        (["--pool", "cls"], "cls pooling"),
        (["--no-normalize"], "not normalized"),
        (["--maxseq", "3"], "at most 3 tokens"),
    ):
        result = embed("text", directory, "some words here", *flags)
        assert result.returncode == 0 and reported in result.stderr.decode()
        assert result.stdout != plain.stdout
    clamped = embed("text", directory, "some words here", "--maxseq", "5000")
    assert clamped.stdout == plain.stdout
    assert "embed: --maxseq 5000: clamped to 64, the model's position table" in clamped.stderr.decode()


def test_assumed_pooling_is_said(directory: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "bare", ModelSpec("xlm-roberta", num_layers=1, hidden_size=32, num_heads=2))
    (tmp_path / "bare" / "modules.json").unlink()
    note = "embed: modules.json: not found; cls pooling is assumed, --pool says otherwise"
    assumed = embed("text", tmp_path / "bare", "a").stderr.decode()
    assert note in assumed and "cls pooling (assumed), normalized" in assumed
    given = embed("text", tmp_path / "bare", "a", "--pool", "cls").stderr.decode()
    assert note not in given and "cls pooling, normalized" in given


@pytest.mark.parametrize(
    "arguments",
    [
        ["text", "MODEL"],
        ["text", "MODEL", "a", "--bogus"],
        ["text", "MODEL", "a", "--maxs", "3"],
        ["text", "MODEL", "a", "--maxseq", "0"],
        ["text", "MODEL", "a", "--maxseq", "many"],
        ["text", "MODEL", "a", "--pool", "median"],
        ["text", "MODEL", "a", "--dtype", "int8"],
        ["text", "MODEL", "a", "--gpu", "first"],
        ["serve", "MODEL", "--addr", "localhost"],
        ["serve", "MODEL", "--addr", "localhost:"],
        ["serve", "MODEL", "--addr", ":80"],
        ["serve", "MODEL", "--addr", "localhost:65536"],
        ["serve", "MODEL", "--addr", "::1:80"],
        ["serve", "MODEL", "--token", "with space"],
        ["serve", "MODEL", "--token", ""],
        ["serve", "MODEL", "--token", "a", "--token-file", "f"],
        ["serve", "MODEL", "--unload-after", "-1"],
        ["serve", "MODEL", "--unload-after", "nan"],
        ["serve", "MODEL", "extra"],
        ["rerank", "MODEL"],
        ["rerank", "MODEL", "a", "b", "--pool", "cls"],
        ["explode"],
    ],
    ids=" ".join,
)
def test_a_command_line_that_cannot_be_understood_ends_with_2(directory: Path, arguments: list[str]) -> None:
    result = embed(*(directory if argument == "MODEL" else argument for argument in arguments))
    assert result.returncode == 2
    assert result.stdout == b"" and b"error: " in result.stderr and b"Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["text", "nothing-here", "a"], {}, "nothing-here: no such directory, and no model package"),
        (["text", "MODEL", "a", "--gpu", "0"], {}, "gpu 0 cannot be used"),
        (["text", "MODEL", "a"], {"GKD_GPU_DEVICE": "1"}, "gpu 1 cannot be used"),
        (["text", "MODEL", "a", "--dtype", "bf16"], {}, "dtype bf16 cannot be used"),
        (["text", "MODEL", "a", "--maxseq", "1"], {}, "maxseq 1: expected at least 2"),
        (["text", "MODEL", b"\xff".decode(errors="surrogateescape")], {}, "texts[0]: holds half of a surrogate pair"),
        (["serve", "nothing-here"], {}, "nothing-here: no such directory"),
        (["serve", "MODEL", "--token-file", "/nothing/here"], {}, "--token-file /nothing/here: cannot be read"),
        (["serve", "MODEL", "--token-file", "/dev/null"], {}, "--token-file /dev/null: a token has to be visible"),
        (["serve", "MODEL"], {"EMBED_TOKEN": "with space"}, "EMBED_TOKEN: a token has to be visible ASCII"),
        (["serve", "MODEL", "--addr", "192.0.2.1:80"], {}, "--addr 192.0.2.1:80: cannot listen"),
        (["serve", "MODEL", "--addr", "no.such.host.invalid:80"], {}, "--addr no.such.host.invalid:80: cannot listen"),
    ],
)
def test_a_failure_is_one_line_and_ends_with_1(
    directory: Path, arguments: list[str], environment: dict[str, str], message: str
) -> None:
    result = embed(*(directory if argument == "MODEL" else argument for argument in arguments), environment=environment)
    assert result.returncode == 1 and result.stdout == b""
    # The lines that say what was loaded may stand before it.
    *notes, error = result.stderr.decode().splitlines()
    assert error.startswith("embed: error: ") and message in error
    assert all(note.startswith("embed: small: ") for note in notes)


def test_input_that_is_not_utf_8_names_the_line(directory: Path) -> None:
    result = embed("text", directory, "-", stdin=b"fine\n\xff\n")
    assert result.returncode == 1
    assert result.stderr.decode().endswith("embed: error: standard input, line 2: not valid UTF-8\n")


def test_a_reader_that_leaves_is_no_traceback(directory: Path) -> None:
    script = f"{sys.executable} -m embed text {directory} - | head -n 1"
    result = subprocess.run(["bash", "-c", script], input=b"a\n" * 5000, capture_output=True, timeout=60)
    assert len(result.stdout.splitlines()) == 1
    assert b"Traceback" not in result.stderr and b"Exception" not in result.stderr


@pytest.mark.parametrize("arguments", [[], ["--help"], ["text", "--help"], ["rerank", "--help"], ["serve", "--help"]])
def test_help(arguments: list[str]) -> None:
    result = embed(*arguments)
    assert result.returncode == 0 and result.stdout.startswith(b"usage: embed")


def test_the_console_script_is_the_same_command(directory: Path) -> None:
    script = Path(sys.executable).with_name("embed")
    result = subprocess.run([script, "text", directory, "a"], capture_output=True, timeout=60)
    assert result.stdout == embed("text", directory, "a").stdout
