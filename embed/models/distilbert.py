"""DistilBERT: multi-qa-distilbert, msmarco-distilbert, distiluse-base-multilingual and many more."""

from embed.models.bert import IGNORED
from embed.models.family import Family, Slot

EMBEDDINGS = (
    Slot("word", ("embeddings.word_embeddings.weight",), ("vocab_size", "hidden_size")),
    # A table in the file where `sinusoidal_pos_embds` is true, too: the key says only how training began.
    Slot("position", ("embeddings.position_embeddings.weight",), ("max_position_embeddings", "hidden_size")),
    Slot("token_type", (), ("type_vocab_size", "hidden_size")),
    Slot("embeddings_gamma", ("embeddings.LayerNorm.weight",), ("hidden_size",)),
    Slot("embeddings_beta", ("embeddings.LayerNorm.bias",), ("hidden_size",)),
)

_LAYER = "transformer.layer.{layer}."
_QKV = ("q_lin", "k_lin", "v_lin")

LAYER = (
    Slot("qkv_weight", tuple(f"{_LAYER}attention.{name}.weight" for name in _QKV), ("hidden_size", "hidden_size")),
    Slot("qkv_bias", tuple(f"{_LAYER}attention.{name}.bias" for name in _QKV), ("hidden_size",)),
    Slot("attention_out_weight", (f"{_LAYER}attention.out_lin.weight",), ("hidden_size", "hidden_size")),
    Slot("attention_out_bias", (f"{_LAYER}attention.out_lin.bias",), ("hidden_size",)),
    Slot("attention_gamma", (f"{_LAYER}sa_layer_norm.weight",), ("hidden_size",)),
    Slot("attention_beta", (f"{_LAYER}sa_layer_norm.bias",), ("hidden_size",)),
    Slot("up_weight", (f"{_LAYER}ffn.lin1.weight",), ("intermediate_size", "hidden_size")),
    Slot("up_bias", (f"{_LAYER}ffn.lin1.bias",), ("intermediate_size",)),
    Slot("down_weight", (f"{_LAYER}ffn.lin2.weight",), ("hidden_size", "intermediate_size")),
    Slot("down_bias", (f"{_LAYER}ffn.lin2.bias",), ("hidden_size",)),
    Slot("down_gamma", (f"{_LAYER}output_layer_norm.weight",), ("hidden_size",)),
    Slot("down_beta", (f"{_LAYER}output_layer_norm.bias",), ("hidden_size",)),
)

FAMILY = Family(
    model_type="distilbert",
    position_rule="from_zero",
    defaults={"activation": "gelu", "pad_token_id": 0},
    prefixes=("distilbert.",),
    embeddings=EMBEDDINGS,
    layer=LAYER,
    ignored={**IGNORED, "vocab_*": "the masked-language-model head"},
    assumed_pooling=None,
    keys={
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
    },
    fixed={"layer_norm_eps": 1e-12, "type_vocab_size": 1},
)
