"""XLM-RoBERTa: BGE-M3, multilingual-e5-base/large, paraphrase-multilingual, bge-reranker and many more."""

from dataclasses import replace

from embed.models import roberta

# BGE-M3 without modules.json is pooled as the original engine pools it.
FAMILY = replace(roberta.FAMILY, model_type="xlm-roberta", assumed_pooling="cls")
