"""RoBERTa: all-distilroberta-v1, all-roberta-large-v1, paraphrase-distilroberta and many more."""

from embed.models import bert
from embed.models.family import ClassifierLayer, Family

IGNORED = {**bert.IGNORED, "lm_head.*": "the masked-language-model head"}

FAMILY = Family(
    model_type="roberta",
    position_rule="after_padding",
    defaults={"type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu", "pad_token_id": 1},
    prefixes=("roberta.",),
    embeddings=bert.EMBEDDINGS,
    layer=bert.LAYER,
    ignored=IGNORED,
    assumed_pooling=None,
    classifier=(ClassifierLayer("classifier.dense", "tanh"), ClassifierLayer("classifier.out_proj", "none")),
)
