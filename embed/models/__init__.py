"""The model families, by `model_type` of config.json."""

from embed.models import bert, xlm_roberta
from embed.models.family import POOL_MODES, Family, PoolMode, Slot

FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in (bert, xlm_roberta)}

__all__ = ["FAMILIES", "POOL_MODES", "Family", "PoolMode", "Slot"]
