"""What a model family is: data, from which configuration, weights and positions follow."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from gkd.ops.dense import DenseActivation
from gkd.ops.pool import PoolMode

# from_zero: 0, 1, 2, ...
# after_padding: pad_token_id + the running count of tokens that are not padding; a padding token keeps pad_token_id.
PositionRule = Literal["from_zero", "after_padding"]

# The block plan: what a layer is made of. Each type lists what the encoder computes.
# post: attention's and the feed-forward's results are added to what went in, and the sum is normalised.
NormPlace = Literal["post"]
# gelu: the exact one, x * Phi(x).
Activation = Literal["gelu"]
# table: a row of a table is added to each token's embedding.
# table_and_relative_bias: that, and in every layer attention adds to a score a bias for its head and the distance from
# query to key, which the weight `relative_bias` holds in T5's buckets.
PositionKind = Literal["table", "table_and_relative_bias"]
# text: every token attends to every token of its text.
AttentionWindow = Literal["text"]

BLOCK_PLAN: dict[str, tuple[str, ...]] = {
    "norm_place": get_args(NormPlace),
    "activation": get_args(Activation),
    "position_kind": get_args(PositionKind),
    "attention_window": get_args(AttentionWindow),
}
"""What is implemented, by field of Family."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One weight of the encoder: the tensors that are concatenated along axis 0 to give it."""

    name: str
    tensors: tuple[str, ...]
    """Names in the file; `{layer}` stands for the layer's index. None at all: the family has no such weight, and an
    operator that adds it is given zeros."""
    shape: tuple[str, ...]
    """Shape of each tensor, in names of ModelConfig's sizes."""


@dataclass(frozen=True, slots=True)
class ClassifierLayer:
    """A linear layer of a cross-encoder's head, over the first token: as wide as the encoder, the last one of a single
    output."""

    name: str
    """Of its tensors in the file, `<name>.weight` and `<name>.bias`."""
    activation: DenseActivation


@dataclass(frozen=True, slots=True)
class Family:
    """An encoder of the BERT kind."""

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
    classifier: tuple[ClassifierLayer, ...] = ()
    """Head of the family's `...ForSequenceClassification`; none: its cross-encoders are refused."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """The family's own name of a key of config.json, by BERT's, where the two differ."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values, by BERT's key, that transformers' code of the family sets: config.json has no say in them."""
    norm_place: NormPlace = "post"
    activation: Activation = "gelu"
    """Of the feed-forward half. config.json names it, too, and has to agree."""
    position_kind: PositionKind = "table"
    attention_window: AttentionWindow = "text"
