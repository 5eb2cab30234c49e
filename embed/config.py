"""config.json of a model directory, checked: every key that changes the output is honoured or refused."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embed.errors import ModelError
from embed.models import BLOCK_PLAN, FAMILIES, Family
from embed.relative_bias import MAX_DISTANCE

MAX_HEAD_DIM = 256

# What the encoder computes; another value means another computation. An absent key means the only value there was
# before the key existed.
_REQUIRED_VALUES = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "quantization_config": None,
    # MPNet's code puts distances into 32 buckets, of however many its table has room for.
    "relative_attention_num_buckets": 32,
}

# transformers' names of an activation. `gelu_python` is the same function, written out; every other gelu_* is not.
_ACTIVATIONS = {"gelu": "gelu", "gelu_python": "gelu"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The geometry of an encoder."""

    family: Family
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    type_vocab_size: int
    pad_token_id: int
    layer_norm_eps: float
    num_buckets: int = 0
    """Of a relative bias, where the family has one."""

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def max_distance(self) -> int | None:
        """What attention's bias reaches to; None without one."""
        return MAX_DISTANCE if self.num_buckets else None

    @property
    def max_tokens(self) -> int:
        """Most tokens whose positions the table holds."""
        reserved = self.pad_token_id + 1 if self.family.position_rule == "after_padding" else 0
        return self.max_position_embeddings - reserved


def read_json(path: Path) -> Any:
    """The parsed file; ModelError names it where it is missing or broken."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path.name}: not found") from None
    except OSError as error:
        raise ModelError(f"{path.name}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path.name}: not valid JSON: {error}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The parsed file, which has to hold a JSON object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ModelError(f"{path.name}: expected a JSON object, got {type(value).__name__}")
    return value


def read_config(directory: Path) -> ModelConfig:
    """The checked configuration of the encoder in `directory`; ModelError names the key that cannot be used."""
    config = read_json_object(directory / "config.json")
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(f"config.json: `model_type` is {model_type!r}, which is not supported; known: {known}")
    _check_block_plan(family)
    keys = _Keys(family, config)
    for key, required in _REQUIRED_VALUES.items():
        if config.get(key, required) != required:
            raise ModelError(f"config.json: `{key}` is {config[key]!r}, only {required!r} is supported")
    keys.check_activation()

    has_relative_bias = family.position_kind == "table_and_relative_bias"
    result = ModelConfig(
        family=family,
        hidden_size=keys.integer("hidden_size"),
        num_layers=keys.integer("num_hidden_layers"),
        num_heads=keys.integer("num_attention_heads"),
        intermediate_size=keys.integer("intermediate_size"),
        vocab_size=keys.integer("vocab_size"),
        max_position_embeddings=keys.integer("max_position_embeddings"),
        type_vocab_size=keys.integer("type_vocab_size"),
        pad_token_id=keys.integer("pad_token_id", minimum=0),
        layer_norm_eps=keys.positive("layer_norm_eps"),
        num_buckets=keys.integer("relative_attention_num_buckets") if has_relative_bias else 0,
    )
    if result.hidden_size % result.num_heads:
        raise ModelError(
            f"config.json: `{keys.name('hidden_size')}` {result.hidden_size} is not a multiple of "
            f"`{keys.name('num_attention_heads')}` {result.num_heads}"
        )
    if result.head_dim > MAX_HEAD_DIM:
        raise ModelError(f"config.json: head width {result.head_dim} is not supported; at most {MAX_HEAD_DIM}")
    if result.max_tokens < 1:
        raise ModelError(f"config.json: `max_position_embeddings` {result.max_position_embeddings} leaves no position")
    return result


class _Keys:
    """The keys of one config.json, asked for by BERT's name and read, and shown, by the family's."""

    def __init__(self, family: Family, config: dict[str, Any]) -> None:
        self._family = family
        self._config = {**family.defaults, **config, **family.fixed}
        for key, own in family.keys.items():
            # transformers takes some of these for the family's own key and passes over others.
            if key in config and config[key] != self._config.get(own):
                raise ModelError(
                    f"config.json: `{key}` is {config[key]!r} and `{own}` is {self._config.get(own)!r}; "
                    f"a {family.model_type} model has `{own}` alone"
                )

    def name(self, key: str) -> str:
        return self._family.keys.get(key, key)

    def integer(self, key: str, minimum: int = 1) -> int:
        value = self._config.get(self.name(key))
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ModelError(f"config.json: `{self.name(key)}` is {value!r}, expected an integer of at least {minimum}")
        return value

    def positive(self, key: str) -> float:
        value = self._config.get(self.name(key))
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
            raise ModelError(f"config.json: `{self.name(key)}` is {value!r}, expected a number between 0 and 1")
        return float(value)

    def check_activation(self) -> None:
        value = self._config.get(self.name("hidden_act"))
        accepted = [name for name, activation in _ACTIVATIONS.items() if activation == self._family.activation]
        if value not in accepted:
            names = " and ".join(repr(name) for name in accepted)
            raise ModelError(f"config.json: `{self.name('hidden_act')}` is {value!r}, only {names} are supported")


def _check_block_plan(family: Family) -> None:
    for name, implemented in BLOCK_PLAN.items():
        value = getattr(family, name)
        if value not in implemented:
            raise ModelError(
                f"config.json: a {family.model_type} model has `{name}` {value!r}, which is not implemented; "
                f"known: {', '.join(implemented)}"
            )
