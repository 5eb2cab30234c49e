"""`embed verify`: the corpus is embedded again and compared with vectors that were recorded earlier.

A reference is a safetensors file of one tensor, `vectors` (texts, dim) in float32, whose metadata says how they came to
be. It is best recorded in f32 on a machine that is trusted; every precision and device is then compared with it.
"""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import isnan, sqrt
from pathlib import Path
from typing import Literal, cast
from uuid import uuid4

import msgspec
import numpy as np
from numpy.typing import NDArray

from embed.errors import EmbedError, NonFiniteError
from embed.model import Embed

Precision = Literal["f32", "tf32", "f16", "bf16"]

CORPUS_PATH = Path(__file__).with_name("corpus.jsonl")

# By the precision of a computation. bf16 was measured to lose a tenth of what it may, f16, whose mantissa is tf32's, a
# five-hundredth.
LEAST_COSINE = {"f32": 0.99999, "tf32": 0.999, "f16": 0.999, "bf16": 0.999}

# The format's metadata are strings; ours take a kilobyte.
_MAX_HEADER_BYTES = 1 << 16


class ReferenceFileError(EmbedError):
    """The reference file is missing, damaged, or of another corpus or pipeline; or it cannot be written."""


@dataclass(frozen=True, slots=True)
class CorpusText:
    """A text that is compared, and the name that it is reported under."""

    name: str
    text: str


class Origin(msgspec.Struct, frozen=True):
    """A reference file's metadata: how its vectors came to be."""

    format: Literal["gkd-engines embed reference 1"]
    model: str
    dtype: Precision
    backend: str
    device: str
    pooling: str
    """Modes, and whether vectors are normalised: `mean, normalized`."""
    maxseq: str
    """Most tokens of a text."""
    corpus_sha256: str
    """Of the texts."""
    vectors_sha256: str
    """Of the tensor's bytes."""
    recorded: str
    """Date and time, UTC."""
    version: str
    """Of gkd-engines."""

    def describe(self) -> str:
        """The origin in a line for people."""
        return (
            f"{self.model} in {self.dtype} on {self.backend} ({self.device}), recorded {self.recorded} "
            f"by version {self.version}"
        )


@dataclass(frozen=True, slots=True)
class Reference:
    """Vectors of the corpus (texts, dim), float32 and finite, and where they come from."""

    origin: Origin
    vectors: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One text's vector beside its reference."""

    name: str
    cosine: float
    """NaN where there is none: a vector is not finite, or zero."""
    difference: float
    """Largest of an element."""
    length: float
    """Of the vector, in lengths of the reference's."""
    passed: bool


class _Tensor(msgspec.Struct):
    """A header's entry."""

    dtype: Literal["F32"]
    shape: tuple[int, int]
    data_offsets: tuple[int, int]


class _Header(msgspec.Struct):
    origin: Origin = msgspec.field(name="__metadata__")
    vectors: _Tensor


def read_corpus() -> list[CorpusText]:
    """The texts that come with the package."""
    lines = CORPUS_PATH.read_text(encoding="utf-8").splitlines()
    return [CorpusText(row["name"], row["text"]) for row in map(json.loads, lines)]


def default_path(model: str) -> Path:
    """Where the reference of a model of this name is kept: in the user's data, since a cache may be emptied."""
    data = os.environ.get("XDG_DATA_HOME", "")
    try:
        # The XDG specification: a path that is not absolute counts as unset.
        directory = Path(data) if os.path.isabs(data) else Path.home() / ".local" / "share"
    except RuntimeError:
        raise ReferenceFileError("there is no home directory to keep references in: --reference names a file") from None
    return directory / "gkd-engines" / "references" / f"{model}.safetensors"


def record_reference(engine: Embed, corpus: Sequence[CorpusText]) -> Reference:
    """The corpus as the engine embeds it now. Raises NonFiniteError: such vectors are no reference."""
    vectors = engine.encode([text.text for text in corpus])
    origin = Origin(
        format="gkd-engines embed reference 1",
        model=engine.name,
        dtype=cast("Precision", engine.dtype),
        backend=engine.backend,
        device=engine.device_name,
        pooling=_describe_pooling(engine),
        maxseq=str(engine.maxseq),
        corpus_sha256=_digest_of_texts(corpus),
        vectors_sha256=hashlib.sha256(_little_endian(vectors)).hexdigest(),
        recorded=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        version=_version(),
    )
    return Reference(origin, vectors)


def write_reference(path: Path, reference: Reference) -> None:
    """Writes the file, whole or not at all, and the directories above it. Raises ReferenceFileError."""
    data = _little_endian(reference.vectors)
    num_texts, dim = reference.vectors.shape
    header = msgspec.json.encode(_Header(reference.origin, _Tensor("F32", (num_texts, dim), (0, len(data)))))
    header += b" " * (-len(header) % 8)  # the data are aligned then
    path = Path(os.path.realpath(path))  # a link stays one
    aside = path.with_name(f".{uuid4().hex}")
    try:
        # A rename would put a file in the place of /dev/null.
        if path.exists() and not path.is_file():
            raise ReferenceFileError(f"{path}: cannot be written: it is no regular file")
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(len(header).to_bytes(8, "little") + header + data)
        aside.replace(path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        raise ReferenceFileError(f"{path}: cannot be written: {error.strerror}") from None


def read_reference(path: Path) -> Reference:
    """The file's contents, checked to be whole. Raises ReferenceFileError, which names it and says what is wrong."""
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or header_bytes > _MAX_HEADER_BYTES:
                raise ReferenceFileError(f"{path}: damaged, or no reference that `embed verify --record` wrote")
            header = msgspec.json.decode(file.read(header_bytes), type=_Header)
            (num_texts, dim), (start, end) = header.vectors.shape, header.vectors.data_offsets
            data = file.read()
    except FileNotFoundError:
        raise ReferenceFileError(
            f"{path}: no reference is there; --record writes one, best in f32 on a machine that is trusted"
        ) from None
    except OSError as error:
        raise ReferenceFileError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReferenceFileError(
            f"{path}: damaged, or no reference that `embed verify --record` wrote: {error}"
        ) from None
    if min(num_texts, dim) < 1 or (start, end) != (0, len(data)) or end != 4 * num_texts * dim:
        raise ReferenceFileError(
            f"{path}: damaged: {len(data)} bytes of vectors, expected {num_texts} of {dim} float32"
        )
    if hashlib.sha256(data).hexdigest() != header.origin.vectors_sha256:
        raise ReferenceFileError(f"{path}: damaged: the vectors do not match their digest; record it anew")
    vectors = np.frombuffer(data, "<f4").reshape(num_texts, dim).astype(np.float32)
    if not np.isfinite(vectors).all():
        raise ReferenceFileError(f"{path}: a vector is not finite, and nothing can be compared with it")
    return Reference(header.origin, vectors)


def check_comparable(reference: Reference, path: Path, engine: Embed, corpus: Sequence[CorpusText]) -> None:
    """Raises ReferenceFileError where the engine, as it is set, does not compute what was recorded."""
    origin = reference.origin
    if origin.corpus_sha256 != _digest_of_texts(corpus) or len(reference.vectors) != len(corpus):
        raise ReferenceFileError(
            f"{path}: of another corpus: recorded by version {origin.version}, this is {_version()}; record it anew"
        )
    for name, recorded, present in (
        ("dimension", str(reference.vectors.shape[1]), str(engine.dim)),
        ("pooling", origin.pooling, _describe_pooling(engine)),
        ("maxseq", origin.maxseq, str(engine.maxseq)),
    ):
        if recorded != present:
            raise ReferenceFileError(f"{path}: of another {name}: recorded with {recorded}, the model has {present}")


def embed_corpus(engine: Embed, corpus: Sequence[CorpusText]) -> NDArray[np.float32]:
    """Vectors of the corpus; NaN where the engine has no finite one, which fails when it is compared."""
    texts = [text.text for text in corpus]
    try:
        return engine.encode(texts)
    except NonFiniteError:
        vectors = np.full((len(texts), engine.dim), np.nan, np.float32)
    # A text's vector is the same bits alone.
    for vector, text in zip(vectors, texts, strict=True):
        try:
            vector[:] = engine.encode(text)
        except NonFiniteError:
            continue
    return vectors


@dataclass(frozen=True)
class Verdict:
    """A whole comparison."""

    comparisons: list[Comparison]
    least_cosine: float
    """What was asked of each."""

    @cached_property
    def worst(self) -> Comparison:
        """The text that is furthest from its reference."""
        return min(
            self.comparisons, key=lambda text: (not isnan(text.cosine), round(text.cosine, 12), -text.difference)
        )

    @property
    def passed(self) -> bool:
        """Every text did."""
        return all(text.passed for text in self.comparisons)

    def lines(self) -> list[str]:
        """A table of the texts, and a summary in its last line."""
        width = max(len(text.name) for text in self.comparisons)
        table = [f"{'text':<{width}}  {'cosine':>10}  largest difference"]
        for text in self.comparisons:
            marks = []
            if not text.passed:
                marks.append("FAIL")
                if text.cosine >= self.least_cosine:
                    marks.append(f"{text.length:.3g} times as long")
            if text is self.worst:
                marks.append("worst")
            line = f"{text.name:<{width}}  {text.cosine:>10.8f}  {text.difference:>18.2e}  {', '.join(marks)}"
            table.append(line.rstrip())
        num_failed = sum(not text.passed for text in self.comparisons)
        num_texts = len(self.comparisons)
        result = f"FAIL: {num_failed} of {num_texts} texts" if num_failed else f"PASS: {num_texts} texts"
        differences = [text.difference for text in self.comparisons]
        return [
            *table,
            f"{result}; least cosine {self.worst.cosine:.8f} ({self.worst.name}), {self.least_cosine} is asked for; "
            f"largest difference {np.max(differences):.2e}",
        ]


def compare(vectors: NDArray[np.float32], dtype: str, reference: Reference, corpus: Sequence[CorpusText]) -> Verdict:
    """Compares vectors (texts, dim), computed in `dtype`, with the reference, in float64.

    The coarser of both precisions decides what is asked for: a reference in bf16 is itself no closer to f32.
    """
    least = min(LEAST_COSINE[dtype], LEAST_COSINE[reference.origin.dtype])
    # Of the length, as much as of the direction: a relative error of d leaves a cosine of 1 - d*d / 2.
    length_tolerance = sqrt(2 * (1 - least))
    ours, theirs = vectors.astype(np.float64), reference.vectors.astype(np.float64)
    with np.errstate(all="ignore"):
        norms, reference_norms = np.linalg.norm(ours, axis=1), np.linalg.norm(theirs, axis=1)
        cosines = (ours * theirs).sum(axis=1) / (norms * reference_norms)
        lengths = norms / reference_norms
        differences = np.abs(ours - theirs).max(axis=1)
        passed = (cosines >= least) & (np.abs(lengths - 1) <= length_tolerance)  # NaN is neither
    return Verdict(
        [
            Comparison(text.name, float(cosine), float(difference), float(length), bool(ok))
            for text, cosine, difference, length, ok in zip(corpus, cosines, differences, lengths, passed, strict=True)
        ],
        least,
    )


def _describe_pooling(engine: Embed) -> str:
    pooling = engine.pooling
    return f"{'+'.join(pooling.modes)}, {'normalized' if pooling.normalize else 'not normalized'}"


def _digest_of_texts(corpus: Sequence[CorpusText]) -> str:
    return hashlib.sha256(msgspec.json.encode([text.text for text in corpus])).hexdigest()


def _little_endian(vectors: NDArray[np.float32]) -> bytes:
    return vectors.astype("<f4").tobytes()


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("gkd-engines")
    except PackageNotFoundError:  # a checkout on the path, not installed
        return "unknown"
