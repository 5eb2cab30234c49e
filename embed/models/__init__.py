"""The model families, by `model_type` of config.json."""

from embed.models import bert, camembert, distilbert, mpnet, roberta, xlm_roberta
from embed.models.family import BLOCK_PLAN, ClassifierLayer, Family, Slot

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY for module in (bert, camembert, distilbert, mpnet, roberta, xlm_roberta)
}

__all__ = ["BLOCK_PLAN", "FAMILIES", "ClassifierLayer", "Family", "Slot"]
