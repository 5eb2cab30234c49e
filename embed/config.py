"""config.json of a model directory, checked: every key that changes the output is honoured or refused."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embed.errors import ModelError
from embed.models import FAMILIES, Family

MAX_HEAD_DIM = 256

# What the encoder computes; another value means another computation. An absent key means the only value there was
# before the key existed.
_REQUIRED_VALUES = {
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "quantization_config": None,
}


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

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

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
    config = {**family.defaults, **config}
    for key, required in _REQUIRED_VALUES.items():
        if config.get(key, required) != required:
            raise ModelError(f"config.json: `{key}` is {config[key]!r}, only {required!r} is supported")

    result = ModelConfig(
        family=family,
        hidden_size=_integer(config, "hidden_size"),
        num_layers=_integer(config, "num_hidden_layers"),
        num_heads=_integer(config, "num_attention_heads"),
        intermediate_size=_integer(config, "intermediate_size"),
        vocab_size=_integer(config, "vocab_size"),
        max_position_embeddings=_integer(config, "max_position_embeddings"),
        type_vocab_size=_integer(config, "type_vocab_size"),
        pad_token_id=_integer(config, "pad_token_id", minimum=0),
        layer_norm_eps=_positive(config, "layer_norm_eps"),
    )
    if result.hidden_size % result.num_heads:
        raise ModelError(
            f"config.json: `hidden_size` {result.hidden_size} is not a multiple of "
            f"`num_attention_heads` {result.num_heads}"
        )
    if result.head_dim > MAX_HEAD_DIM:
        raise ModelError(f"config.json: head width {result.head_dim} is not supported; at most {MAX_HEAD_DIM}")
    if result.max_tokens < 1:
        raise ModelError(f"config.json: `max_position_embeddings` {result.max_position_embeddings} leaves no position")
    return result


def _integer(config: dict[str, Any], key: str, minimum: int = 1) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ModelError(f"config.json: `{key}` is {value!r}, expected an integer of at least {minimum}")
    return value


def _positive(config: dict[str, Any], key: str) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ModelError(f"config.json: `{key}` is {value!r}, expected a number between 0 and 1")
    return float(value)
