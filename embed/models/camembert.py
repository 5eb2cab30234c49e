"""CamemBERT: sentence-camembert-base/large and other French models."""

from dataclasses import replace

from embed.models import roberta

# Its task models call the encoder `roberta`, too; `camembert` is what TensorFlow's called it.
FAMILY = replace(roberta.FAMILY, model_type="camembert", prefixes=("roberta.", "camembert."))
