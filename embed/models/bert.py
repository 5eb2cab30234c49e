"""BERT: all-MiniLM, multilingual-e5-small, bge-small/base/large-en, gte, ms-marco-MiniLM and many more."""

from embed.models.family import ClassifierLayer, Family, Slot

EMBEDDINGS = (
    Slot("word", ("embeddings.word_embeddings.weight",), ("vocab_size", "hidden_size")),
    Slot("position", ("embeddings.position_embeddings.weight",), ("max_position_embeddings", "hidden_size")),
    Slot("token_type", ("embeddings.token_type_embeddings.weight",), ("type_vocab_size", "hidden_size")),
    Slot("embeddings_gamma", ("embeddings.LayerNorm.weight",), ("hidden_size",)),
    Slot("embeddings_beta", ("embeddings.LayerNorm.bias",), ("hidden_size",)),
)

_ATTENTION = "encoder.layer.{layer}.attention."
_QKV = ("self.query", "self.key", "self.value")

LAYER = (
    Slot("qkv_weight", tuple(f"{_ATTENTION}{name}.weight" for name in _QKV), ("hidden_size", "hidden_size")),
    Slot("qkv_bias", tuple(f"{_ATTENTION}{name}.bias" for name in _QKV), ("hidden_size",)),
    Slot("attention_out_weight", (f"{_ATTENTION}output.dense.weight",), ("hidden_size", "hidden_size")),
    Slot("attention_out_bias", (f"{_ATTENTION}output.dense.bias",), ("hidden_size",)),
    Slot("attention_gamma", (f"{_ATTENTION}output.LayerNorm.weight",), ("hidden_size",)),
    Slot("attention_beta", (f"{_ATTENTION}output.LayerNorm.bias",), ("hidden_size",)),
    Slot(
        "up_weight",
        ("encoder.layer.{layer}.intermediate.dense.weight",),
        ("intermediate_size", "hidden_size"),
    ),
    Slot("up_bias", ("encoder.layer.{layer}.intermediate.dense.bias",), ("intermediate_size",)),
    Slot("down_weight", ("encoder.layer.{layer}.output.dense.weight",), ("hidden_size", "intermediate_size")),
    Slot("down_bias", ("encoder.layer.{layer}.output.dense.bias",), ("hidden_size",)),
    Slot("down_gamma", ("encoder.layer.{layer}.output.LayerNorm.weight",), ("hidden_size",)),
    Slot("down_beta", ("encoder.layer.{layer}.output.LayerNorm.bias",), ("hidden_size",)),
)

IGNORED = {
    "embeddings.position_ids": "a buffer of older transformers: 0, 1, 2, ...",
    "pooler.dense.*": "the next-sentence head, which sentence embeddings do not read",
}

FAMILY = Family(
    model_type="bert",
    position_rule="from_zero",
    defaults={"type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu", "pad_token_id": 0},
    prefixes=("bert.",),
    embeddings=EMBEDDINGS,
    layer=LAYER,
    ignored={**IGNORED, "cls.*": "the masked-language-model head"},
    assumed_pooling=None,
    classifier=(ClassifierLayer("bert.pooler.dense", "tanh"), ClassifierLayer("classifier", "none")),
)
