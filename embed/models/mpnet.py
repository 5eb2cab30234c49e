"""MPNet: all-mpnet-base-v2, multi-qa-mpnet-base, paraphrase-mpnet-base and many more."""

from embed.models import roberta
from embed.models.family import Family, Slot

EMBEDDINGS = (
    Slot("word", ("embeddings.word_embeddings.weight",), ("vocab_size", "hidden_size")),
    Slot("position", ("embeddings.position_embeddings.weight",), ("max_position_embeddings", "hidden_size")),
    Slot("token_type", (), ("type_vocab_size", "hidden_size")),
    Slot("embeddings_gamma", ("embeddings.LayerNorm.weight",), ("hidden_size",)),
    Slot("embeddings_beta", ("embeddings.LayerNorm.bias",), ("hidden_size",)),
    # One for all layers.
    Slot("relative_bias", ("encoder.relative_attention_bias.weight",), ("num_buckets", "num_heads")),
)

_LAYER = "encoder.layer.{layer}."
_QKV = ("q", "k", "v")

LAYER = (
    Slot("qkv_weight", tuple(f"{_LAYER}attention.attn.{name}.weight" for name in _QKV), ("hidden_size", "hidden_size")),
    Slot("qkv_bias", tuple(f"{_LAYER}attention.attn.{name}.bias" for name in _QKV), ("hidden_size",)),
    Slot("attention_out_weight", (f"{_LAYER}attention.attn.o.weight",), ("hidden_size", "hidden_size")),
    Slot("attention_out_bias", (f"{_LAYER}attention.attn.o.bias",), ("hidden_size",)),
    Slot("attention_gamma", (f"{_LAYER}attention.LayerNorm.weight",), ("hidden_size",)),
    Slot("attention_beta", (f"{_LAYER}attention.LayerNorm.bias",), ("hidden_size",)),
    Slot("up_weight", (f"{_LAYER}intermediate.dense.weight",), ("intermediate_size", "hidden_size")),
    Slot("up_bias", (f"{_LAYER}intermediate.dense.bias",), ("intermediate_size",)),
    Slot("down_weight", (f"{_LAYER}output.dense.weight",), ("hidden_size", "intermediate_size")),
    Slot("down_bias", (f"{_LAYER}output.dense.bias",), ("hidden_size",)),
    Slot("down_gamma", (f"{_LAYER}output.LayerNorm.weight",), ("hidden_size",)),
    Slot("down_beta", (f"{_LAYER}output.LayerNorm.bias",), ("hidden_size",)),
)

FAMILY = Family(
    model_type="mpnet",
    position_rule="after_padding",
    defaults={"layer_norm_eps": 1e-12, "hidden_act": "gelu", "relative_attention_num_buckets": 32},
    prefixes=("mpnet.",),
    embeddings=EMBEDDINGS,
    layer=LAYER,
    ignored=roberta.IGNORED,
    assumed_pooling=None,
    # Its positions begin after the padding id 1, whatever `pad_token_id` is.
    fixed={"pad_token_id": 1, "type_vocab_size": 1},
    position_kind="table_and_relative_bias",
)
