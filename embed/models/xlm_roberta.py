"""XLM-RoBERTa: BGE-M3, multilingual-e5-base/large, paraphrase-multilingual and many more."""

from embed.models.bert import EMBEDDINGS, IGNORED, LAYER
from embed.models.family import Family

FAMILY = Family(
    model_type="xlm-roberta",
    position_rule="after_padding",
    defaults={"type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu", "pad_token_id": 1},
    prefixes=("roberta.",),
    embeddings=EMBEDDINGS,
    layer=LAYER,
    ignored={**IGNORED, "lm_head.*": "the masked-language-model head"},
    # The original's convention, made for BGE-M3.
    assumed_pooling="cls",
)
