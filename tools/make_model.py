"""Writes a model with random weights, at any geometry, as a complete sentence-transformers directory, or as the
directory of a cross-encoder.

    python tools/make_model.py DEST --preset bge-m3 --dtype f16 --tokenizer build/models/e5-small-xlmr
    python tools/make_model.py DEST --family xlm-roberta --layers 2 --hidden 64 --heads 4 --ffn 256
    python tools/make_model.py DEST --preset minilm --cross-encoder

Tensors have the names and shapes of transformers' model of the family. Every one is random, biases and
LayerNorms too, so that a term left out of a forward pass shows; scales are such that different texts get
clearly different vectors. A tensor's values depend on the seed, its name and its shape alone: not on the
prefix nor, but for rounding, on the dtype. Without --tokenizer, a small one of the family's kind is built
from tests/corpus.
"""

import argparse
import json
import shutil
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log, prod
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tools.model_directory import (
    CHARSMAP,
    XLMR_MASK_TOKEN,
    XLMR_SPECIAL_TOKENS,
    new_directory,
    write_json,
    write_modules,
    write_xlmr_tokenizer,
)
from tools.weights_file import Tensor, write_weights

Family = Literal["bert", "camembert", "distilbert", "mpnet", "roberta", "xlm-roberta"]
DType = Literal["f32", "f16", "bf16"]
Pooling = Literal["cls", "mean"]

CORPUS = Path(__file__).parents[1] / "tests" / "corpus" / "corpus.jsonl"
BUILT_VOCAB_SIZE = 2000
MAX_PIECE_CHARS = 8
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "sentencepiece.bpe.model",
)
BERT_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# The first ids of CamemBERT's vocabularies; those with NOTUSED are what is left of fairseq's own.
CAMEMBERT_SPECIAL_TOKENS = ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>")
# RoBERTa's before BERT's vocabulary, whose own unknown token is the one in use.
MPNET_SPECIAL_TOKENS = (*XLMR_SPECIAL_TOKENS, "[UNK]")
MPNET_NUM_BUCKETS = 32
CONFIG_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
PIECE_VALUES = 1 << 22  # values drawn at a time: bounds the memory that a model of any size takes


@dataclass(frozen=True)
class ModelSpec:
    """Everything that decides what `make_model` writes.

    max_positions counts rows of the position table; the positions of RoBERTa and its kin begin at 2, so that their
    texts have up to max_positions - 2 tokens. vocab_size is the number of embedding rows, at least the tokenizer's and
    by default equal to it. tokenizer is a model directory to copy one from. A cross-encoder is a classifier of one
    label as transformers saves it: its tensors have their prefixes by themselves, and there is no pooling.
    """

    family: Family = "bert"
    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 4
    intermediate_size: int = 256
    max_positions: int = 514
    vocab_size: int | None = None
    pooling: Pooling = "mean"
    normalize: bool = True
    dtype: DType = "f32"
    prefix: str = ""
    seed: int = 0
    tokenizer: Path | None = None
    cross_encoder: bool = False

    @property
    def max_seqlen(self) -> int:
        return self.max_positions - (0 if self.family in ("bert", "distilbert") else 2)


PRESETS = {
    "bge-m3": ModelSpec("xlm-roberta", 24, 1024, 16, 4096, 8194, vocab_size=250002, pooling="cls"),
    "minilm": ModelSpec("bert", 6, 384, 12, 1536, 512, vocab_size=30522),
    "e5-small": ModelSpec("bert", 12, 384, 12, 1536, 512, vocab_size=250037),
}


def make_model(dest: Path, spec: ModelSpec) -> None:
    """Writes the model to `dest`, which must not exist; ValueError for a geometry that no model can have."""
    if dest.exists():
        raise FileExistsError(f"already there: `{dest}`")
    if spec.hidden_size % spec.num_heads:
        raise ValueError(f"hidden size {spec.hidden_size} is no multiple of {spec.num_heads} heads")
    if spec.cross_encoder and spec.family not in CLASSIFIERS:
        raise ValueError(f"no cross-encoder of the family {spec.family}; known: {', '.join(CLASSIFIERS)}")
    with new_directory(dest) as directory:
        write_tokenizer(directory, spec)
        num_ids = tokenizer_size(directory)
        if spec.vocab_size is None:
            spec = replace(spec, vocab_size=num_ids)
        elif spec.vocab_size < num_ids:
            raise ValueError(f"vocabulary of {spec.vocab_size} for a tokenizer with {num_ids} ids")
        write_json(directory / "config.json", model_config(spec))
        if not spec.cross_encoder:
            write_modules(
                directory,
                hidden_size=spec.hidden_size,
                max_seqlen=spec.max_seqlen,
                pooling=spec.pooling,
                normalize=spec.normalize,
            )
        write_weights(directory / "model.safetensors", random_tensors(spec))


# Configuration and weights


@dataclass(frozen=True)
class LayerNames:
    """What transformers calls the parts of a layer."""

    prefix: str
    qkv: tuple[str, str, str]
    attention_out: str
    attention_norm: str
    up: str
    down: str
    down_norm: str


BERT_LAYER = LayerNames(
    prefix="encoder.layer",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    attention_out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    down_norm="output.LayerNorm",
)
MPNET_LAYER = replace(
    BERT_LAYER,
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    attention_out="attention.attn.o",
    attention_norm="attention.LayerNorm",
)
DISTILBERT_LAYER = LayerNames(
    prefix="transformer.layer",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    attention_out="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    down_norm="output_layer_norm",
)

ARCHITECTURES: dict[Family, str] = {
    "bert": "BertModel",
    "camembert": "CamembertModel",
    "distilbert": "DistilBertModel",
    "mpnet": "MPNetModel",
    "roberta": "RobertaModel",
    "xlm-roberta": "XLMRobertaModel",
}


@dataclass(frozen=True)
class Classifier:
    """What transformers calls the parts of a family's model for sequence classification."""

    architecture: str
    encoder_prefix: str
    inner: str
    last: str


ROBERTA_CLASSIFIER = Classifier(
    "RobertaForSequenceClassification", "roberta.", "classifier.dense", "classifier.out_proj"
)
CLASSIFIERS: dict[Family, Classifier] = {
    "bert": Classifier("BertForSequenceClassification", "bert.", "bert.pooler.dense", "classifier"),
    "camembert": replace(ROBERTA_CLASSIFIER, architecture="CamembertForSequenceClassification"),
    "roberta": ROBERTA_CLASSIFIER,
    "xlm-roberta": replace(ROBERTA_CLASSIFIER, architecture="XLMRobertaForSequenceClassification"),
}


def model_config(spec: ModelSpec) -> dict[str, Any]:
    if spec.cross_encoder:
        labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        architecture = CLASSIFIERS[spec.family].architecture
        return model_config(replace(spec, cross_encoder=False)) | {"architectures": [architecture]} | labels
    common: dict[str, Any] = {
        "model_type": spec.family,
        "architectures": [ARCHITECTURES[spec.family]],
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "dtype": CONFIG_DTYPES[spec.dtype],
    }
    if spec.family == "distilbert":
        return common | {
            "dim": spec.hidden_size,
            "n_layers": spec.num_layers,
            "n_heads": spec.num_heads,
            "hidden_dim": spec.intermediate_size,
            "activation": "gelu",
            "sinusoidal_pos_embds": False,
            "dropout": 0.1,
            "attention_dropout": 0.1,
            "pad_token_id": 0,
        }
    common |= {
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "intermediate_size": spec.intermediate_size,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    }
    if spec.family == "bert":
        return common | {"type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0}
    if spec.family == "mpnet":
        own = {"layer_norm_eps": 1e-5, "relative_attention_num_buckets": MPNET_NUM_BUCKETS}
        return common | own | {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    bos, eos = (CAMEMBERT_SPECIAL_TOKENS.index(t) for t in ("<s>", "</s>")) if spec.family == "camembert" else (0, 2)
    return common | {
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "bos_token_id": bos,
        "pad_token_id": 1,
        "eos_token_id": eos,
    }


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes by transformers' names, those of an encoder without the prefix."""
    config = model_config(spec)
    hidden, ffn = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], hidden),
        "embeddings.position_embeddings.weight": (spec.max_positions, hidden),
    }
    if spec.family not in ("distilbert", "mpnet"):
        shapes["embeddings.token_type_embeddings.weight"] = (config["type_vocab_size"], hidden)
    if spec.family == "mpnet":
        shapes["encoder.relative_attention_bias.weight"] = (MPNET_NUM_BUCKETS, spec.num_heads)

    def add_linear(name: str, num_out: int, num_in: int) -> None:
        shapes[f"{name}.weight"] = (num_out, num_in)
        shapes[f"{name}.bias"] = (num_out,)

    def add_layer_norm(name: str) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (hidden,)

    add_layer_norm("embeddings.LayerNorm")
    names = {"distilbert": DISTILBERT_LAYER, "mpnet": MPNET_LAYER}.get(spec.family, BERT_LAYER)
    for layer_idx in range(spec.num_layers):
        layer = f"{names.prefix}.{layer_idx}"
        for projection in names.qkv:
            add_linear(f"{layer}.{projection}", hidden, hidden)
        add_linear(f"{layer}.{names.attention_out}", hidden, hidden)
        add_layer_norm(f"{layer}.{names.attention_norm}")
        add_linear(f"{layer}.{names.up}", ffn, hidden)
        add_linear(f"{layer}.{names.down}", hidden, ffn)
        add_layer_norm(f"{layer}.{names.down_norm}")
    if spec.cross_encoder:
        classifier = CLASSIFIERS[spec.family]
        shapes = {classifier.encoder_prefix + name: shape for name, shape in shapes.items()}
        add_linear(classifier.inner, hidden, hidden)
        add_linear(classifier.last, 1, hidden)
    elif spec.family != "distilbert":
        add_linear("pooler.dense", hidden, hidden)
    return shapes


def random_tensors(spec: ModelSpec) -> list[Tensor]:
    def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
        return Tensor(spec.prefix + name, spec.dtype.upper(), shape, lambda: random_pieces(spec, name, shape))

    return [tensor(name, shape) for name, shape in tensor_shapes(spec).items()]


def random_pieces(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> Iterator[NDArray[Any]]:
    rng = np.random.default_rng([spec.seed, zlib.crc32(name.encode("ascii"))])
    mean, deviation = distribution(name, shape)
    count = prod(shape)
    for begin in range(0, count, PIECE_VALUES):
        values = rng.standard_normal(min(PIECE_VALUES, count - begin), np.float32)
        values *= np.float32(deviation)
        values += np.float32(mean)
        yield rounded(values, spec.dtype)


def distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a tensor's values."""
    if name.lower().replace("_", "").endswith("layernorm.weight"):
        return 1.0, 0.1
    if name.endswith(".bias"):
        return 0.0, 0.1
    if "word_embeddings" in name:
        return 0.0, 0.05
    if "embeddings" in name:
        return 0.0, 0.02
    if "relative_attention_bias" in name:
        return 0.0, 1.0  # as large as scores are
    return 0.0, shape[1] ** -0.5  # a linear map keeps the variance of what goes in


def rounded(values: NDArray[np.float32], dtype: DType) -> NDArray[Any]:
    """`values` to nearest even in `dtype`; bf16, which NumPy lacks, as its bits."""
    if dtype == "f32":
        return values
    if dtype == "f16":
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


# Tokenizers


def write_tokenizer(directory: Path, spec: ModelSpec) -> None:
    if spec.tokenizer is not None:
        for name in TOKENIZER_FILES:
            if (spec.tokenizer / name).exists():
                shutil.copyfile(spec.tokenizer / name, directory / name)
        return
    num_ids = min(BUILT_VOCAB_SIZE, spec.vocab_size or BUILT_VOCAB_SIZE)
    BUILDERS[spec.family](directory, num_ids, spec.max_seqlen)


def tokenizer_size(directory: Path) -> int:
    """One more than the largest id."""
    vocab = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab(with_added_tokens=True)
    return 1 + max(vocab.values())


def corpus_pieces(
    normalizer: normalizers.Normalizer, splitter: pre_tokenizers.PreTokenizer, continuation: str = ""
) -> list[tuple[str, int]]:
    """Pieces of the corpus' words with their counts: first the characters, then what saves most tokens.

    `continuation` is put before a piece that does not begin its word. A character that occurs only once is
    left out: it is what the unknown token is for.
    """
    # The tokenizers library has trainers, but their result changes from run to run.
    characters: Counter[str] = Counter()
    substrings: Counter[str] = Counter()
    for line in CORPUS.read_text(encoding="utf-8").splitlines():
        for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(json.loads(line)["text"])):
            for begin in range(len(word)):
                mark = continuation if begin else ""
                characters[mark + word[begin]] += 1
                ends = range(begin + 2, min(begin + MAX_PIECE_CHARS, len(word)) + 1)
                substrings.update(mark + word[begin:end] for end in ends)

    def rank(item: tuple[str, int]) -> tuple[int, str]:
        piece, count = item
        return -count * (len(piece.removeprefix(continuation)) - 1), piece

    return [
        *((piece, count) for piece, count in sorted(characters.items()) if count > 1),
        *sorted(substrings.items(), key=rank),
    ]


def wordpiece(special_tokens: Sequence[str], num_ids: int, last: Sequence[str] = ()) -> Tokenizer:
    """Of num_ids pieces in lower case: first `special_tokens`, one of which is [UNK], and at the end `last`."""
    normalizer = normalizers.BertNormalizer(lowercase=True)
    splitter = pre_tokenizers.BertPreTokenizer()
    pieces = [piece for piece, _ in corpus_pieces(normalizer, splitter, continuation="##")]
    tokens = [*[*special_tokens, *pieces][: num_ids - len(last)], *last]
    tokenizer = Tokenizer(models.WordPiece({token: idx for idx, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def build_wordpiece(directory: Path, num_ids: int, max_seqlen: int) -> None:
    tokenizer = wordpiece(BERT_SPECIAL_TOKENS, num_ids)
    tokenizer.add_special_tokens(list(BERT_SPECIAL_TOKENS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, BERT_SPECIAL_TOKENS.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": True,
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "mask_token": "[MASK]",
            "model_max_length": max_seqlen,
        },
    )


def build_mpnet(directory: Path, num_ids: int, max_seqlen: int) -> None:
    tokenizer = wordpiece(MPNET_SPECIAL_TOKENS, num_ids, [XLMR_MASK_TOKEN])
    write_roberta_kind(directory, tokenizer, MPNET_SPECIAL_TOKENS, "MPNetTokenizer", max_seqlen)


def build_unigram(directory: Path, num_ids: int, max_seqlen: int) -> None:
    write_xlmr_tokenizer(directory, unigram_vocab(XLMR_SPECIAL_TOKENS, num_ids), max_seqlen=max_seqlen)


def build_camembert(directory: Path, num_ids: int, max_seqlen: int) -> None:
    vocab = unigram_vocab(CAMEMBERT_SPECIAL_TOKENS, num_ids)
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=CAMEMBERT_SPECIAL_TOKENS.index("<unk>"), byte_fallback=False))
    tokenizer.normalizer, tokenizer.pre_tokenizer = unigram_normalizer(), unigram_splitter()
    tokenizer.decoder = decoders.Metaspace()
    write_roberta_kind(directory, tokenizer, CAMEMBERT_SPECIAL_TOKENS, "CamembertTokenizer", max_seqlen)


def unigram_normalizer() -> normalizers.Normalizer:
    return normalizers.Precompiled(CHARSMAP.read_bytes())


def unigram_splitter() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])


def unigram_vocab(special_tokens: Sequence[str], num_ids: int) -> list[tuple[str, float]]:
    """Pieces and their log probabilities, between the special tokens and the mask."""
    pieces = corpus_pieces(unigram_normalizer(), unigram_splitter())[: num_ids - len(special_tokens) - 1]
    total = sum(count for _, count in pieces)
    # Multiples of 1/1024 survive every JSON reader: one last bit decides between segmentations that are equal.
    return [
        *((token, 0.0) for token in special_tokens),
        *((piece, round(1024 * log(count / total)) / 1024) for piece, count in pieces),
        (XLMR_MASK_TOKEN, 0.0),
    ]


def build_byte_level(directory: Path, num_ids: int, max_seqlen: int) -> None:
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    counts = {piece: count for piece, count in corpus_pieces(normalizers.Sequence([]), splitter) if len(piece) > 1}
    # A piece grows by one character at its end. It occurs no more often than the piece that it grows from, which
    # therefore stands before it.
    merged = sorted(counts, key=lambda piece: (-counts[piece], len(piece), piece))
    merged = merged[: num_ids - len(XLMR_SPECIAL_TOKENS) - len(alphabet) - 1]
    tokens = [*XLMR_SPECIAL_TOKENS, *alphabet, *merged, XLMR_MASK_TOKEN]
    merges = [(piece[:-1], piece[-1]) for piece in merged]
    tokenizer = Tokenizer(models.BPE({token: idx for idx, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    write_roberta_kind(directory, tokenizer, XLMR_SPECIAL_TOKENS, "RobertaTokenizer", max_seqlen)


def write_roberta_kind(
    directory: Path, tokenizer: Tokenizer, special_tokens: Sequence[str], tokenizer_class: str, max_seqlen: int
) -> None:
    """Adds what RoBERTa's tokenizers have in common, and writes one."""
    tokenizer.add_special_tokens(list(special_tokens))
    tokenizer.add_special_tokens([AddedToken(XLMR_MASK_TOKEN, lstrip=True)])
    bos, eos = ((token, special_tokens.index(token)) for token in ("<s>", "</s>"))
    if tokenizer_class in ("RobertaTokenizer", "MPNetTokenizer"):
        tokenizer.post_processor = processors.RobertaProcessing(eos, bos, add_prefix_space=False)
    else:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[bos, eos]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": tokenizer_class,
            "bos_token": "<s>",
            "cls_token": "<s>",
            "eos_token": "</s>",
            "sep_token": "</s>",
            "pad_token": "<pad>",
            "unk_token": "[UNK]" if "[UNK]" in special_tokens else "<unk>",
            "mask_token": XLMR_MASK_TOKEN,
            "model_max_length": max_seqlen,
        },
    )


BUILDERS: dict[Family, Callable[[Path, int, int], None]] = {
    "bert": build_wordpiece,
    "camembert": build_camembert,
    "distilbert": build_wordpiece,
    "mpnet": build_mpnet,
    "roberta": build_byte_level,
    "xlm-roberta": build_unigram,
}


# Command line


def parse_spec(argv: list[str]) -> tuple[Path, ModelSpec]:
    description, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("dest", type=Path, metavar="DEST", help="directory to write; it must not exist")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="a geometry that the other options then change")
    parser.add_argument("--family", choices=get_args(Family))
    parser.add_argument("--layers", type=int, dest="num_layers", metavar="N")
    parser.add_argument("--hidden", type=int, dest="hidden_size", metavar="N")
    parser.add_argument("--heads", type=int, dest="num_heads", metavar="N")
    parser.add_argument("--ffn", type=int, dest="intermediate_size", metavar="N")
    parser.add_argument("--max-positions", type=int, metavar="N", help="rows of the position table")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="embedding rows (the tokenizer's size)")
    parser.add_argument("--pooling", choices=["cls", "mean"])
    parser.add_argument("--no-normalize", action="store_false", dest="normalize")
    parser.add_argument("--cross-encoder", action="store_true", help="a classifier of one label instead")
    parser.add_argument("--dtype", choices=sorted(CONFIG_DTYPES))
    parser.add_argument("--prefix", help="put before every tensor's name, as in `roberta.`")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="model directory to copy a tokenizer from")
    options = vars(parser.parse_args(argv))
    dest = options.pop("dest")
    preset = PRESETS[options.pop("preset")] if "preset" in options else ModelSpec()
    return dest, replace(preset, **options)


def main(argv: list[str]) -> int:
    dest, spec = parse_spec(argv)
    try:
        make_model(dest, spec)
    except (FileExistsError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    num_bytes = (dest / "model.safetensors").stat().st_size
    print(f"{dest}  {num_bytes / 1e6:.1f} MB of weights  {spec.family} {spec.num_layers} x {spec.hidden_size}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
