"""Writes what a sentence-transformers directory holds besides its weights."""

import base64
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHARSMAP = Path(__file__).parent / "data" / "nmt_nfkc.charsmap"

# The first ids of every XLM-RoBERTa vocabulary, in order; `<mask>` has the last id.
XLMR_SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
XLMR_MASK_TOKEN = "<mask>"


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A scratch directory that takes the place of `path` when the block ends without an exception.

    It lies beside `path`, so the last step is one rename: `path` is never seen half written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".partial-") as scratch:
        directory = Path(scratch) / path.name
        directory.mkdir()
        yield directory
        if path.exists():
            shutil.rmtree(path)
        os.rename(directory, path)


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def write_modules(directory: Path, *, hidden_size: int, max_seqlen: int, pooling: str, normalize: bool = True) -> None:
    """Writes the files that make a transformers checkpoint a sentence-transformers model.

    max_seqlen counts tokens, special ones included; pooling is "cls" or "mean".
    """
    names = ["Transformer", "Pooling", "Normalize"] if normalize else ["Transformer", "Pooling"]
    paths = ["", "1_Pooling", "2_Normalize"]
    write_json(
        directory / "modules.json",
        [
            {"idx": idx, "name": str(idx), "path": path, "type": f"sentence_transformers.models.{name}"}
            for idx, (name, path) in enumerate(zip(names, paths, strict=False))
        ],
    )
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": max_seqlen, "do_lower_case": False})
    write_json(
        directory / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": hidden_size,
            "pooling_mode_cls_token": pooling == "cls",
            "pooling_mode_mean_tokens": pooling == "mean",
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
        },
    )


def write_xlmr_tokenizer(directory: Path, vocab: Sequence[tuple[str, float]], *, max_seqlen: int) -> None:
    """Writes XLM-RoBERTa's tokenizer over `vocab`, the pieces and their log probabilities in id order."""
    pieces = [piece for piece, _ in vocab]
    if tuple(pieces[:4]) != XLMR_SPECIAL_TOKENS or pieces[-1] != XLMR_MASK_TOKEN:
        raise ValueError(f"not an XLM-RoBERTa vocabulary: it begins {pieces[:4]} and ends {pieces[-1:]}")
    # Not indented: that would double the file.
    tokenizer = json.dumps(_xlmr_tokenizer(vocab), ensure_ascii=False, separators=(",", ":"))
    (directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "XLMRobertaTokenizer",
            "bos_token": "<s>",
            "cls_token": "<s>",
            "eos_token": "</s>",
            "sep_token": "</s>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "mask_token": XLMR_MASK_TOKEN,
            "model_max_length": max_seqlen,
        },
    )


def _xlmr_tokenizer(vocab: Sequence[tuple[str, float]]) -> dict[str, Any]:
    special = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    eos = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            *({"id": idx, "content": token} | special for idx, token in enumerate(XLMR_SPECIAL_TOKENS)),
            {"id": len(vocab) - 1, "content": XLMR_MASK_TOKEN} | special | {"lstrip": True},
        ],
        # transformers 5 rebuilds this tokenizer from its parts and keeps a normaliser of no other type.
        "normalizer": {
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(CHARSMAP.read_bytes()).decode("ascii"),
        },
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, first, eos],
            "pair": [bos, first, eos, eos, second, eos],
            "special_tokens": {
                token: {"id": token, "ids": [XLMR_SPECIAL_TOKENS.index(token)], "tokens": [token]}
                for token in ("<s>", "</s>")
            },
        },
        "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": 3, "vocab": list(vocab), "byte_fallback": False},
    }
