"""The sentence-transformers files of a model directory: pooling, normalisation and the length limit.

What is not implemented is refused by name: a module that is skipped gives a wrong vector.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embed.config import ModelConfig, read_config, read_json, read_json_object
from embed.errors import ModelError
from embed.models import POOL_MODES, PoolMode

_LEGACY_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_POOL_MODES: dict[str, PoolMode] = {mode: mode for mode in POOL_MODES}

# transformers writes 1e30 where a tokenizer has no limit.
_NO_LIMIT = 1_000_000

# Names of the Transformer module's own file, in the order in which sentence-transformers looks for them.
_TRANSFORMER_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


@dataclass(frozen=True, slots=True)
class Pooling:
    """How token vectors become a text's vector."""

    mode: PoolMode
    normalize: bool


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Everything that turns a text into a vector, except weights and tokenizer files."""

    directory: Path
    """Where config.json, the tokenizer and the weights lie: the Transformer module's own directory."""
    config: ModelConfig
    pooling: Pooling
    assumed: bool
    """Pooling and normalisation are a convention: neither the directory nor the user says them."""
    maxseq: int
    """Most tokens of a text, special tokens included, as the model's files set it."""


def read_pipeline(directory: Path, pool: PoolMode | None = None, normalize: bool | None = None) -> Pipeline:
    """The pipeline of a model directory; `pool` and `normalize` overrule its files.

    Without modules.json a family's convention is assumed and normalised; a family that has none is refused until
    `pool` is given.
    """
    _read_library_config(directory / "config_sentence_transformers.json")
    modules_path = directory / "modules.json"
    if modules_path.exists():
        modules = _read_modules(modules_path)
        transformer = _inside(directory, modules[0][1])
        mode = pool or _read_pool_mode(_inside(directory, modules[1][1]) / "config.json")
        normalized = len(modules) == 3
        config = read_config(transformer)
        assumed = False
    else:
        transformer = directory
        config = read_config(directory)
        assumed_mode = pool or config.family.assumed_pooling
        if assumed_mode is None:
            raise ModelError(
                f"modules.json: not found, and a {config.family.model_type} model has no pooling of its own: "
                "say which one its authors meant, with --pool cls or --pool mean"
            )
        mode, normalized = assumed_mode, True
        assumed = pool is None
    if normalize is not None:
        normalized = normalize
    return Pipeline(transformer, config, Pooling(mode, normalized), assumed, _read_maxseq(transformer, config))


def _read_library_config(path: Path) -> None:
    """Refuses settings of sentence-transformers that would change a vector."""
    if not path.exists():
        return
    config = read_json_object(path)
    for key, supported in (
        ("default_prompt_name", None),
        ("truncate_dim", None),
        ("model_type", "SentenceTransformer"),
    ):
        if config.get(key, supported) != supported:
            raise ModelError(f"{path.name}: `{key}` is {config[key]!r}, which is not supported yet")


def _read_modules(path: Path) -> list[tuple[str, str]]:
    """(type, path) of each module: Transformer, Pooling and perhaps Normalize."""
    modules = read_json(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{path.name}: expected a list of JSON objects")
    # The package path of a type changed in sentence-transformers 5.4; its last name did not.
    listed = [(str(module.get("type")).rpartition(".")[2], str(module.get("path", ""))) for module in modules]
    types = [name for name, _ in listed]
    if types not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelError(
            f"{path.name}: the modules {', '.join(types) or '(none)'} are not supported; "
            "expected Transformer, Pooling and at most Normalize"
        )
    return listed


def _inside(directory: Path, path: str) -> Path:
    inner = directory / path
    if not inner.resolve().is_relative_to(directory.resolve()):
        raise ModelError(f"modules.json: the path {path!r} leaves the model directory")
    return inner


def _read_pool_mode(path: Path) -> PoolMode:
    config = read_json_object(path)
    shown = f"{path.parent.name}/{path.name}"
    modes: Any = config.get("pooling_mode")
    if modes is None:
        # sentence-transformers takes the mean where no mode is set.
        modes = [mode for key, mode in _LEGACY_MODES.items() if config.get(key)] or "mean"
    mode = modes[0] if isinstance(modes, list) and len(modes) == 1 else modes
    if not isinstance(mode, str) or mode not in _POOL_MODES:
        raise ModelError(f"{shown}: pooling mode {mode!r} is not supported; known: {', '.join(_POOL_MODES)}")
    return _POOL_MODES[mode]


def _read_maxseq(directory: Path, config: ModelConfig) -> int:
    """max_seq_length, else the tokenizer's limit, else the position table's; never more than the last."""
    limit: Any = None
    path = next((directory / name for name in _TRANSFORMER_CONFIGS if (directory / name).exists()), None)
    if path is not None:
        settings = read_json_object(path)
        if settings.get("do_lower_case"):
            raise ModelError(f"{path.name}: `do_lower_case` is not supported yet")
        limit = settings.get("max_seq_length")
    tokenizer_path = directory / "tokenizer_config.json"
    if tokenizer_path.exists():
        tokenizer = read_json_object(tokenizer_path)
        if tokenizer.get("truncation_side", "right") != "right":
            raise ModelError(f"{tokenizer_path.name}: `truncation_side` is not `right`, which is not supported yet")
        if limit is None:
            limit = tokenizer.get("model_max_length")
    if limit is None or (isinstance(limit, float | int) and limit > _NO_LIMIT):
        return config.max_tokens
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ModelError(f"the maximum length of a text is {limit!r}, expected a positive integer")
    return min(limit, config.max_tokens)
