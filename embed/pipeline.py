"""The sentence-transformers files of a model directory: pooling, what comes after it, prompts and limits; and what a
cross-encoder has, with such files or without.

What is not implemented is refused by name: a module that is skipped gives a wrong vector.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from embed.config import ModelConfig, read_config, read_json, read_json_object
from embed.cross_encoder import ENCODER_ADVICE, ScoreActivation, check_labels, is_classifier, read_activation
from embed.errors import ModelError
from embed.models import FAMILIES
from gkd.ops.dense import DenseActivation
from gkd.ops.pool import POOL_MODES, PoolMode

# In the order in which sentence-transformers puts their vectors side by side.
_LEGACY_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_POOL_MODES: dict[str, PoolMode] = {mode: mode for mode in POOL_MODES}

Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
SIMILARITIES: tuple[Similarity, ...] = get_args(Similarity)
_SIMILARITIES: dict[str, Similarity] = {name: name for name in SIMILARITIES}

# By the last name of the dotted path; a Dense module without one has sentence-transformers' default.
_ACTIVATIONS: dict[str, DenseActivation] = {"Identity": "none", "Tanh": "tanh"}
_DEFAULT_ACTIVATION = "torch.nn.modules.activation.Tanh"

# transformers writes 1e30 where a tokenizer has no limit.
_NO_LIMIT = 1_000_000

_LIBRARY_CONFIG = "config_sentence_transformers.json"
# Names of the Transformer module's own file, in the order in which sentence-transformers looks for them.
_TRANSFORMER_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


@dataclass(frozen=True, slots=True)
class Pooling:
    """How token vectors become a text's vector."""

    modes: tuple[PoolMode, ...]
    """Their vectors stand side by side."""
    normalize: bool
    """The vector is scaled to length 1 at the end."""


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A linear layer behind the pooling."""

    directory: Path
    """Where its weights lie."""
    in_features: int
    out_features: int
    activation: DenseActivation
    bias: bool
    name: str = "linear"
    """Of its tensors. Those of a cross-encoder's head lie in the encoder's file."""


@dataclass(frozen=True, slots=True)
class NormalizeModule:
    """Scaling to length 1, with something behind it."""


Step = DenseModule | NormalizeModule


@dataclass(frozen=True, slots=True)
class Prompts:
    """Texts that stand before a text, by name."""

    texts: Mapping[str, str]
    default: str | None
    """Name of the one that a text gets where the caller says nothing."""
    pooled: bool
    """The prompt's tokens take part in the pooling."""


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
    lowercase: bool
    """Texts are put into lower case before the tokenizer sees them."""
    steps: tuple[Step, ...]
    """What comes between pooling and the last normalisation."""
    prompts: Prompts
    truncate_dim: int | None
    """So many first elements of a vector are kept."""
    similarity: Similarity
    """How the model's authors compare vectors."""
    heads: Mapping[str, Path]
    """Files of the heads of tokens that there are, `sparse` and `colbert`, as BGE-M3 has them."""
    score_activation: ScoreActivation | None = None
    """Of a cross-encoder, whose steps are its head; None: a model that gives vectors."""

    def dim(self, modes: tuple[PoolMode, ...]) -> int:
        """Elements of a vector before it is truncated. ModelError where the steps do not take what is pooled."""
        dim = len(modes) * self.config.hidden_size
        for step in self.steps:
            if isinstance(step, DenseModule):
                if step.in_features != dim:
                    raise ModelError(
                        f"{step.directory.name}/config.json: `in_features` is {step.in_features}, what comes before "
                        f"gives {dim}"
                    )
                dim = step.out_features
        return dim


def read_pipeline(directory: Path, pool: PoolMode | None = None, normalize: bool | None = None) -> Pipeline:
    """The pipeline of a model directory; `pool` and `normalize` overrule its files.

    Without modules.json a family's convention is assumed and normalised; a family that has none is refused until
    `pool` is given. A classifier without modules.json is a cross-encoder, unless `pool` is given.
    """
    library_config = _read_library_config(directory)
    if (directory / "modules.json").exists():
        is_cross_encoder = library_config.get("model_type") == "CrossEncoder"
    else:
        is_cross_encoder = pool is None and is_classifier(read_json_object(directory / "config.json"))
    if is_cross_encoder:
        if pool is not None or normalize is not None:
            raise ModelError("a cross-encoder scores texts for a query: it has no pooling and no normalisation to set")
        return _read_cross_encoder(directory, library_config)

    steps: list[Step] = []
    pooled = True
    modules_path = directory / "modules.json"
    if modules_path.exists():
        modules = _read_modules(modules_path)
        _check_types(modules)
        transformer = _inside(directory, modules[0][1])
        modes, pooled = _read_pooling(_inside(directory, modules[1][1]) / "config.json")
        steps = [_read_step(name, _inside(directory, path)) for name, path in modules[2:] if name != "Dropout"]
        normalized = bool(steps) and isinstance(steps[-1], NormalizeModule)
        if normalized:
            steps.pop()
        config = read_config(transformer)
        assumed = False
        if pool is not None:
            modes = (pool,)
    else:
        transformer = directory
        config = read_config(directory)
        assumed_mode = pool or config.family.assumed_pooling
        if assumed_mode is None:
            raise ModelError(
                f"modules.json: not found, and a {config.family.model_type} model has no pooling of its own: "
                "say which one its authors meant, with --pool cls or --pool mean"
            )
        modes, normalized = (assumed_mode,), True
        assumed = pool is None
    if normalize is not None:
        normalized = normalize
    prompts, truncate_dim, similarity = _read_vector_settings(library_config, pooled)
    maxseq, lowercase = _read_limits(transformer, config)
    pooling = Pooling(modes, normalized)
    pipeline = Pipeline(
        transformer,
        config,
        pooling,
        assumed,
        maxseq,
        lowercase,
        tuple(steps),
        prompts,
        truncate_dim,
        similarity,
        _find_heads(directory),
    )
    dim = pipeline.dim(modes)
    if truncate_dim is not None and truncate_dim > dim:
        raise ModelError(f"{_LIBRARY_CONFIG}: `truncate_dim` is {truncate_dim}, the vectors have {dim} elements")
    return pipeline


def _read_cross_encoder(directory: Path, library_config: dict[str, Any]) -> Pipeline:
    """Of a directory that transformers has written, or sentence-transformers' CrossEncoder, which adds modules.json."""
    transformer = directory
    modules_path = directory / "modules.json"
    if modules_path.exists():
        modules = _read_modules(modules_path)
        if [name for name, _ in modules] != ["Transformer"]:
            raise ModelError(
                f"{modules_path.name}: the modules {_enumerate_types(modules)} are not supported; "
                "expected of a cross-encoder a Transformer alone"
            )
        transformer = _inside(directory, modules[0][1])
        _check_classification(transformer)
    else:
        library_config = {}  # sentence-transformers does not read it then
    config = read_config(transformer)
    own = read_json_object(transformer / "config.json")
    if not is_classifier(own) or not config.family.classifier:
        raise ModelError(
            f"config.json: `architectures` is {own.get('architectures')!r}, which is not a cross-encoder that is "
            f"supported; expected one that ends in ForSequenceClassification, of {_enumerate_classifiers()}; "
            f"{ENCODER_ADVICE}"
        )
    check_labels(own)
    *inner, last = config.family.classifier
    width = config.hidden_size
    steps = (
        *(DenseModule(transformer, width, width, layer.activation, bias=True, name=layer.name) for layer in inner),
        DenseModule(transformer, width, 1, last.activation, bias=True, name=last.name),
    )
    maxseq, lowercase = _read_limits(transformer, config)
    return Pipeline(
        transformer,
        config,
        Pooling(("cls",), normalize=False),
        assumed=False,
        maxseq=maxseq,
        lowercase=lowercase,
        steps=steps,
        prompts=_read_prompts(library_config, pooled=True),
        truncate_dim=None,
        similarity="cosine",
        heads={},
        score_activation=read_activation(own, library_config),
    )


def _enumerate_classifiers() -> str:
    return ", ".join(sorted(name for name, family in FAMILIES.items() if family.classifier))


def _check_classification(directory: Path) -> None:
    """The settings of a cross-encoder's Transformer: it takes two texts, untouched, and gives its logits."""
    path = _transformer_config(directory)
    settings = read_json_object(path) if path is not None else {}
    logits = {"text": {"method": "forward", "method_output_name": "logits"}}
    for key, default, expected in (
        ("transformer_task", "feature-extraction", "sequence-classification"),
        ("modality_config", logits, logits),
        ("processing_kwargs", {}, {}),
    ):
        value = settings.get(key, default)
        if value != expected:
            shown = path.name if path is not None else _TRANSFORMER_CONFIGS[0]
            raise ModelError(f"{shown}: `{key}` is {value!r}, only {expected!r} is supported in a cross-encoder")


def _find_heads(directory: Path) -> dict[str, Path]:
    found = {}
    for name in ("sparse", "colbert"):
        paths = (directory / f"{name}_linear.{ending}" for ending in ("safetensors", "pt"))
        path = next((path for path in paths if path.exists()), None)
        if path is not None:
            found[name] = path
    return found


def _read_library_config(directory: Path) -> dict[str, Any]:
    path = directory / _LIBRARY_CONFIG
    return read_json_object(path) if path.exists() else {}


def _read_vector_settings(config: dict[str, Any], pooled: bool) -> tuple[Prompts, int | None, Similarity]:
    """Prompts, truncation and similarity."""
    kind = config.get("model_type", "SentenceTransformer")
    if kind != "SentenceTransformer":
        raise ModelError(f"{_LIBRARY_CONFIG}: `model_type` is {kind!r}, which is not supported yet")
    prompts = _read_prompts(config, pooled)
    truncate_dim = config.get("truncate_dim")
    if truncate_dim is not None and (type(truncate_dim) is not int or truncate_dim < 1):
        raise ModelError(f"{_LIBRARY_CONFIG}: `truncate_dim` is {truncate_dim!r}, expected a positive integer")
    similarity = config.get("similarity_fn_name") or "cosine"
    if similarity not in _SIMILARITIES:
        raise ModelError(
            f"{_LIBRARY_CONFIG}: `similarity_fn_name` is {similarity!r}, expected one of {', '.join(SIMILARITIES)}"
        )
    return prompts, truncate_dim, _SIMILARITIES[similarity]


def _read_prompts(config: dict[str, Any], pooled: bool) -> Prompts:
    texts = config.get("prompts") or {}
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ModelError(f"{_LIBRARY_CONFIG}: `prompts` is {texts!r}, expected texts by name")
    default = config.get("default_prompt_name")
    if default is not None and default not in texts:
        known = ", ".join(texts) or "none"
        raise ModelError(f"{_LIBRARY_CONFIG}: `default_prompt_name` is {default!r}; known prompts: {known}")
    return Prompts(texts, default, pooled)


def _read_modules(path: Path) -> list[tuple[str, str]]:
    """(type, path) of each module."""
    modules = read_json(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{path.name}: expected a list of JSON objects")
    # The package path of a type changed in sentence-transformers 5.4; its last name did not.
    return [(str(module.get("type")).rpartition(".")[2], str(module.get("path", ""))) for module in modules]


def _check_types(modules: list[tuple[str, str]]) -> None:
    types = [name for name, _ in modules]
    if types[:2] != ["Transformer", "Pooling"] or not {*types[2:]} <= {"Dense", "Normalize", "Dropout"}:
        raise ModelError(
            f"modules.json: the modules {_enumerate_types(modules)} are not supported; "
            "expected Transformer and Pooling, and then only Dense, Normalize and Dropout"
        )


def _enumerate_types(modules: list[tuple[str, str]]) -> str:
    return ", ".join(name for name, _ in modules) or "(none)"


def _read_step(name: str, directory: Path) -> Step:
    path = directory / "config.json"
    config = read_json_object(path) if name == "Dense" or path.exists() else {}
    shown = f"{directory.name}/{path.name}"
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise ModelError(f"{shown}: `{key}` is {config[key]!r}, only 'sentence_embedding' is supported")
    if name == "Normalize":
        return NormalizeModule()
    sizes: list[Any] = [config.get(key) for key in ("in_features", "out_features")]
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ModelError(f"{shown}: `in_features` and `out_features` are {sizes}, expected positive integers")
    if config.get("use_residual"):
        raise ModelError(f"{shown}: `use_residual` is not supported")
    activation = config.get("activation_function", _DEFAULT_ACTIVATION)
    last_name = str(activation).rpartition(".")[2]
    if last_name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ModelError(f"{shown}: `activation_function` is {activation!r}, which is not supported; known: {known}")
    bias = config.get("bias", True)
    if not isinstance(bias, bool):
        raise ModelError(f"{shown}: `bias` is {bias!r}, expected true or false")
    return DenseModule(directory, sizes[0], sizes[1], _ACTIVATIONS[last_name], bias)


def _inside(directory: Path, path: str) -> Path:
    inner = directory / path
    if not inner.resolve().is_relative_to(directory.resolve()):
        raise ModelError(f"modules.json: the path {path!r} leaves the model directory")
    return inner


def _read_pooling(path: Path) -> tuple[tuple[PoolMode, ...], bool]:
    """The modes, and whether a prompt's tokens take part."""
    config = read_json_object(path)
    shown = f"{path.parent.name}/{path.name}"
    named: Any = config.get("pooling_mode")
    if named is None:
        # sentence-transformers takes the mean where no mode is set.
        named = [mode for key, mode in _LEGACY_MODES.items() if config.get(key)] or "mean"
    listed = named if isinstance(named, list) else [named]
    modes = tuple(_POOL_MODES[mode] for mode in listed if isinstance(mode, str) and mode in _POOL_MODES)
    if not modes or len(modes) != len(listed):
        raise ModelError(f"{shown}: pooling mode {named!r} is not supported; known: {', '.join(_POOL_MODES)}")
    return modes, bool(config.get("include_prompt", True))


def _transformer_config(directory: Path) -> Path | None:
    return next((directory / name for name in _TRANSFORMER_CONFIGS if (directory / name).exists()), None)


def _read_limits(directory: Path, config: ModelConfig) -> tuple[int, bool]:
    """Most tokens of a text, and whether it is put into lower case.

    The first is max_seq_length, else the tokenizer's limit, else the position table's; never more than the last.
    """
    limit: Any = None
    lowercase = False
    path = _transformer_config(directory)
    if path is not None:
        settings = read_json_object(path)
        lowercase = bool(settings.get("do_lower_case"))
        limit = settings.get("max_seq_length")
    tokenizer_path = directory / "tokenizer_config.json"
    if tokenizer_path.exists():
        tokenizer = read_json_object(tokenizer_path)
        if tokenizer.get("truncation_side", "right") != "right":
            raise ModelError(f"{tokenizer_path.name}: `truncation_side` is not `right`, which is not supported yet")
        if limit is None:
            limit = tokenizer.get("model_max_length")
    if limit is None or (isinstance(limit, float | int) and limit > _NO_LIMIT):
        return config.max_tokens, lowercase
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ModelError(f"the maximum length of a text is {limit!r}, expected a positive integer")
    return min(limit, config.max_tokens), lowercase
