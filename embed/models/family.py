"""What a model family is: data, from which configuration, weights and positions follow."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

# from_zero: 0, 1, 2, ...
# after_padding: pad_token_id + the running count of tokens that are not padding; a padding token keeps pad_token_id.
PositionRule = Literal["from_zero", "after_padding"]


PoolMode = Literal["cls", "mean"]
POOL_MODES: tuple[PoolMode, ...] = get_args(PoolMode)


@dataclass(frozen=True, slots=True)
class Slot:
    """One weight of the encoder: the tensors that are concatenated along axis 0 to give it."""

    name: str
    tensors: tuple[str, ...]
    """Names in the file; `{layer}` stands for the layer's index."""
    shape: tuple[str, ...]
    """Shape of each tensor, in names of ModelConfig's sizes."""


@dataclass(frozen=True, slots=True)
class Family:
    """A post-norm encoder of the BERT kind."""

    model_type: str
    """`model_type` in config.json."""
    position_rule: PositionRule
    defaults: Mapping[str, Any]
    """Values of the keys that config.json may leave out: transformers' own class defaults."""
    prefixes: tuple[str, ...]
    """Prefixes that every tensor name may carry, in files of task models."""
    embeddings: tuple[Slot, ...]
    layer: tuple[Slot, ...]
    ignored: Mapping[str, str]
    """Patterns of tensor names (fnmatch) that take no part in an embedding, with the reason."""
    assumed_pooling: PoolMode | None
    """Pooling of a directory without modules.json; None: the user has to say it."""
