"""`embed verify`: recording, comparing, and every reference that must not be compared with."""

import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from embed import Embed, NonFiniteError, verify
from embed.main import main
from tools.make_model import ModelSpec, make_model

SMALL = ModelSpec("xlm-roberta", num_layers=1, hidden_size=32, num_heads=2, max_positions=66)
CORPUS = verify.read_corpus()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    make_model(path, SMALL)
    return path


@pytest.fixture(scope="module")
def recorded(directory: Path) -> verify.Reference:
    with Embed.open(directory) as engine:
        return verify.record_reference(engine, CORPUS)


def embed(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "embed", *map(str, arguments)],
        capture_output=True,
        timeout=60,
        encoding="utf-8",
        env={**os.environ, **environment},
    )


def altered(reference: verify.Reference, vectors: NDArray[np.float32] | None = None, **origin: str) -> verify.Reference:
    """A whole reference of other vectors, or of another origin."""
    vectors = reference.vectors if vectors is None else vectors
    digest = hashlib.sha256(vectors.tobytes()).hexdigest()
    return verify.Reference(msgspec.structs.replace(reference.origin, vectors_sha256=digest, **origin), vectors)


def test_record_then_verify(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "gkd-engines" / "references" / "small.safetensors"
    missing = embed("verify", directory, XDG_DATA_HOME=str(tmp_path))
    assert missing.returncode == 1 and missing.stdout == ""
    assert missing.stderr.endswith(
        f"embed: error: {path}: no reference is there; --record writes one, best in f32 on a machine that is trusted\n"
    )
    result = embed("verify", directory, "--record", XDG_DATA_HOME=str(tmp_path))
    assert result.returncode == 0 and result.stdout.startswith(f"{path}: {len(CORPUS)} texts, small in f32 on cpu (")
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    result = embed("verify", directory, XDG_DATA_HOME=str(tmp_path))
    assert result.returncode == 0
    header, *rows, summary = result.stdout.splitlines()
    assert [row.split()[0] for row in rows] == [text.name for text in CORPUS]
    assert all(row.split()[1:3] == ["1.00000000", "0.00e+00"] for row in rows)
    assert len({row.index("1.00000000") for row in rows}) == 1 and header.split()[:2] == ["text", "cosine"]
    assert sum(row.endswith("worst") for row in rows) == 1
    assert summary.startswith(f"PASS: {len(CORPUS)} texts; least cosine 1.00000000 (")
    assert f"embed: reference {path}: small in f32 on cpu (" in result.stderr


def test_another_place_and_other_settings(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "new" / "reference.safetensors"
    flags = ("--reference", path, "--pool", "cls", "--no-normalize", "--maxseq", "20")
    assert embed("verify", directory, "--record", *flags).returncode == 0
    assert embed("verify", directory, *flags).returncode == 0


def test_a_changed_reference_fails(directory: Path, recorded: verify.Reference, tmp_path: Path) -> None:
    vectors = recorded.vectors.copy()
    vectors[3] = -vectors[3]
    vectors[5, 0] += 0.1
    path = tmp_path / "changed"
    verify.write_reference(path, altered(recorded, vectors))
    result = embed("verify", directory, "--reference", path)
    assert result.returncode == 1
    _, *rows, summary = result.stdout.splitlines()
    marks = {row.split()[0]: row.split()[3:] for row in rows}
    assert marks.pop(CORPUS[3].name) == ["FAIL,", "worst"] and marks.pop(CORPUS[5].name) == ["FAIL"]
    assert not any(marks.values())
    assert summary.startswith(f"FAIL: 2 of {len(CORPUS)} texts; least cosine -1.00000000 ({CORPUS[3].name}), 0.99999 ")


def test_the_file_is_safetensors_and_describes_itself(recorded: verify.Reference, tmp_path: Path) -> None:
    path = tmp_path / "reference.safetensors"
    verify.write_reference(path, recorded)
    with safe_open(path, framework="numpy") as file:
        assert [*file.keys()] == ["vectors"]
        assert np.array_equal(file.get_tensor("vectors"), recorded.vectors)
        metadata = file.metadata()
    assert metadata == msgspec.structs.asdict(recorded.origin)
    assert (metadata["model"], metadata["dtype"], metadata["backend"]) == ("small", "f32", "cpu")
    assert metadata["pooling"] == "mean, normalized" and metadata["maxseq"] == "64"
    assert len(metadata["corpus_sha256"]) == 64 and metadata["recorded"].endswith("Z") and metadata["version"]
    read = verify.read_reference(path)
    assert read.origin == recorded.origin and np.array_equal(read.vectors, recorded.vectors)


@pytest.mark.parametrize(
    ("flags", "origin", "message"),
    [
        ([], {"corpus_sha256": "0" * 64, "version": "0.0.9"}, "of another corpus: recorded by version 0.0.9, this is "),
        (["--pool", "cls"], {}, "of another pooling: recorded with mean, normalized, the model has cls, normalized"),
        (["--no-normalize"], {}, "of another pooling: recorded with mean, normalized, the model has mean, not"),
        (["--maxseq", "9"], {}, "of another maxseq: recorded with 64, the model has 9"),
    ],
    ids=str,
)
def test_a_reference_of_something_else_is_refused(
    directory: Path, recorded: verify.Reference, tmp_path: Path, flags: list[str], origin: dict[str, str], message: str
) -> None:
    path = tmp_path / "reference"
    verify.write_reference(path, altered(recorded, None, **origin))
    refused(directory, path, message, flags)


def test_a_reference_of_another_dimension_is_refused(
    directory: Path, recorded: verify.Reference, tmp_path: Path
) -> None:
    path = tmp_path / "reference"
    verify.write_reference(path, altered(recorded, recorded.vectors[:, :16].copy()))
    refused(directory, path, "of another dimension: recorded with 16, the model has 32")


def test_a_reference_of_fewer_texts_is_refused(directory: Path, recorded: verify.Reference, tmp_path: Path) -> None:
    path = tmp_path / "reference"
    verify.write_reference(path, altered(recorded, recorded.vectors[:-1].copy()))
    refused(directory, path, "of another corpus")


def test_a_reference_that_is_not_finite_is_refused(directory: Path, recorded: verify.Reference, tmp_path: Path) -> None:
    path, vectors = tmp_path / "reference", recorded.vectors.copy()
    vectors[1, 1] = np.nan
    verify.write_reference(path, altered(recorded, vectors))
    refused(directory, path, "a vector is not finite")


def header_of(data: bytes) -> tuple[dict[str, dict[str, object]], bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def with_header(change: Callable[[dict[str, dict[str, object]]], object]) -> Callable[[bytes], bytes]:
    def damage(data: bytes) -> bytes:
        header, rest = header_of(data)
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + rest

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "damaged"),
        (lambda data: b"short", "damaged"),
        (lambda data: b"\xff" * 4000, "damaged"),
        (lambda data: b'{"not": "safetensors"}' * 9, "damaged"),
        (lambda data: data[:300], "damaged"),
        (lambda data: data[:-4], "damaged: 8828 bytes of vectors, expected 69 of 32 float32"),
        (lambda data: data + b"\0", "damaged"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "damaged: the vectors do not match their digest"),
        (lambda data: (60000).to_bytes(8, "little") + b"[" * 60000, "damaged"),
        (lambda data: (2).to_bytes(8, "little") + b"\xff\xfe", "damaged"),
        (with_header(lambda header: header.pop("__metadata__")), "missing required field `__metadata__`"),
        (with_header(lambda header: header["__metadata__"].pop("dtype")), "missing required field `dtype`"),
        (with_header(lambda header: header["__metadata__"].update(format="other 2")), "Invalid enum value 'other 2'"),
        (with_header(lambda header: header["__metadata__"].update(dtype="int8")), "Invalid enum value 'int8'"),
        (with_header(lambda header: header["vectors"].update(dtype="F16")), "Invalid enum value 'F16'"),
        (with_header(lambda header: header["vectors"].update(shape=[-69, -32])), "damaged"),
        (with_header(lambda header: header["vectors"].update(shape=[0, 2**70])), "damaged"),
        (with_header(lambda header: header["vectors"].update(data_offsets=[8, 8840])), "damaged"),
    ],
)
def test_a_damaged_file_is_refused(
    directory: Path, recorded: verify.Reference, tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    path = tmp_path / "reference"
    verify.write_reference(path, recorded)
    path.write_bytes(damage(path.read_bytes()))
    refused(directory, path, message)


def test_what_is_no_reference_is_refused(directory: Path, tmp_path: Path) -> None:
    refused(directory, directory / "model.safetensors", "no reference that `embed verify --record` wrote")
    refused(directory, tmp_path, "cannot be read: Is a directory")


def refused(directory: Path, path: Path, message: str, flags: list[str] | None = None) -> None:
    """In this process, where two runs take no second."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        assert main(["verify", str(directory), "--reference", str(path), *(flags or [])]) == 1
    error = errors.getvalue().splitlines()[-1]
    assert error.startswith(f"embed: error: {path}: ") and message in error, error


@pytest.mark.parametrize("place", ["/dev/null", "file/below", "."])
def test_a_place_that_cannot_be_written_is_one_line(directory: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / place
    result = embed("verify", directory, "--record", "--reference", path)
    assert result.returncode == 1 and result.stdout == ""
    assert f"embed: error: {os.path.realpath(path)}: cannot be written: " in result.stderr.splitlines()[-1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"] and not Path("/dev/null").is_file()


def test_a_new_record_replaces_the_old_one_through_a_link(
    directory: Path, recorded: verify.Reference, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for version in ("1", "2"):
        verify.write_reference(tmp_path / "link", altered(recorded, version=version))
    assert (tmp_path / "link").is_symlink() and verify.read_reference(tmp_path / "real").origin.version == "2"


def test_the_default_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    references = tmp_path / ".local" / "share" / "gkd-engines" / "references"
    for unset in ("", "relative/path"):
        monkeypatch.setenv("XDG_DATA_HOME", unset)
        assert verify.default_path("minilm") == references / "minilm.safetensors"
        # A model of a hub, whose name is never a path that leads elsewhere.
        assert verify.default_path("org/name") == references / "org" / "name.safetensors"


def vector_of(cosine: float) -> NDArray[np.float32]:
    return np.array([[cosine, np.sqrt(1 - cosine**2)]], np.float32)


@pytest.mark.parametrize(
    ("dtype", "reference_dtype", "least"),
    [
        ("f32", "f32", 0.99999),
        ("tf32", "f32", 0.999),
        ("f16", "f32", 0.999),
        ("bf16", "f32", 0.999),
        ("bf16", "bf16", 0.999),
        # What a reference lost cannot be asked for.
        ("f32", "bf16", 0.999),
        ("f32", "tf32", 0.999),
    ],
)
def test_what_is_asked_depends_on_the_precisions(
    recorded: verify.Reference, dtype: str, reference_dtype: str, least: float
) -> None:
    reference = altered(recorded, vector_of(1), dtype=reference_dtype)
    lost = 1 - least
    for cosine, passes in ((1.0, True), (1 - 0.9 * lost, True), (1 - 1.1 * lost, False), (-1.0, False), (0.0, False)):
        verdict = verify.compare(vector_of(cosine), dtype, reference, CORPUS[:1])
        assert verdict.passed is passes and verdict.least_cosine == least
        assert verdict.worst.cosine == pytest.approx(cosine, abs=1e-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 0])
def test_a_vector_that_is_none_fails(recorded: verify.Reference, bad: float) -> None:
    vectors = recorded.vectors.copy()
    vectors[7] = bad
    verdict = verify.compare(vectors, "bf16", recorded, CORPUS)
    assert not verdict.passed and verdict.worst.name == CORPUS[7].name
    assert [text.name for text in verdict.comparisons if not text.passed] == [CORPUS[7].name]
    *_, summary = verdict.lines()
    assert summary.startswith(f"FAIL: 1 of {len(CORPUS)} texts; least cosine nan")


def test_one_element_that_is_nan_fails(recorded: verify.Reference) -> None:
    vectors = recorded.vectors.copy()
    vectors[7, 0] = np.nan
    assert not verify.compare(vectors, "f32", recorded, CORPUS).passed


def test_a_vector_of_another_length_fails_though_its_cosine_is_one(recorded: verify.Reference) -> None:
    vectors = recorded.vectors.copy()
    vectors[7] *= 2
    verdict = verify.compare(vectors, "f32", recorded, CORPUS)
    assert not verdict.passed
    [line] = [line for line in verdict.lines() if "FAIL, " in line]
    assert line.startswith(CORPUS[7].name) and "FAIL, 2 times as long" in line
    vectors[7] *= 0.5 * 1.004
    assert verify.compare(vectors, "f32", recorded, CORPUS).passed


def test_a_text_without_a_finite_vector_fails_and_the_others_are_compared(
    directory: Path,
    recorded: verify.Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    encode = Embed.encode

    def failing(engine: Embed, texts: str | list[str]) -> NDArray[np.float32]:
        if CORPUS[4].text in (texts if isinstance(texts, list) else [texts]):
            raise NonFiniteError("not finite")
        return encode(engine, texts)

    path = tmp_path / "reference"
    verify.write_reference(path, recorded)
    monkeypatch.setattr(Embed, "encode", failing)
    assert main(["verify", str(directory), "--reference", str(path)]) == 1
    rows = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert [row for row in rows if "FAIL," in row] == [[CORPUS[4].name, "nan", "nan", "FAIL,", "worst"]]
    assert main(["verify", str(directory), "--reference", str(path), "--record"]) == 1
    assert verify.read_reference(path).origin == recorded.origin


def test_another_model_fails(recorded: verify.Reference, tmp_path: Path) -> None:
    make_model(tmp_path / "other", replace(SMALL, seed=1))
    verify.write_reference(tmp_path / "reference", recorded)
    result = embed("verify", tmp_path / "other", "--reference", tmp_path / "reference")
    assert result.returncode == 1 and result.stdout.splitlines()[-1].startswith("FAIL: ")


def test_a_real_model_agrees_with_sentence_transformers(models: Path, tmp_path: Path) -> None:
    """The reference need not be ours."""
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(models / "minilm"), device="cpu").encode([text.text for text in CORPUS])
    with Embed.open(models / "minilm") as engine:
        reference = altered(verify.record_reference(engine, CORPUS), np.asarray(theirs, np.float32))
    verify.write_reference(tmp_path / "reference", reference)
    result = embed("verify", models / "minilm", "--reference", tmp_path / "reference")
    assert result.returncode == 0, result.stdout


def test_the_corpus_holds_what_engines_trip_over() -> None:
    rows = [json.loads(line) for line in verify.CORPUS_PATH.read_text("utf-8").splitlines()]
    texts = [row["text"] for row in rows]
    assert len(texts) >= 60 and len(set(texts)) == len({row["name"] for row in rows}) == len(texts)
    assert len({row["script"] for row in rows} - {"Emoji", "Mixed", "Common", "None"}) >= 20
    characters = set("".join(texts))
    assert {"\u200d", "\u202e", "\0", "\x7f", "\ufeff", "🏽"} < characters and "" in texts
    assert {"R", "AL"} < {unicodedata.bidirectional(character) for character in characters}
    assert any(text != unicodedata.normalize("NFKC", text) for text in texts)
    assert any(max(map(len, text.split()), default=0) > 500 for text in texts)
    assert all(any(token in text for text in texts) for token in ("<s>", "</s>", "<mask>", "<pad>", "[CLS]", "[MASK]"))
    assert sum(len(text) > 2500 for text in texts) == 2
    # Read and compared by eye: nothing invisible is in the file itself.
    file = verify.CORPUS_PATH.read_text("utf-8").replace("\n", "")
    assert {character for character in file if unicodedata.category(character)[0] in "CZ"} == {" "}
