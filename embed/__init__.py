"""embed: text to vectors."""

from embed.errors import ClosedError, EmbedError, ModelError, NonFiniteError, RequestError, TokenizerError, WeightsError
from embed.model import EM_BATCH_MAX, EM_POOL_CLS, EM_POOL_MEAN, EM_ROWS_BUDGET, Embed
from embed.pipeline import Pooling

__all__ = [
    "EM_BATCH_MAX",
    "EM_POOL_CLS",
    "EM_POOL_MEAN",
    "EM_ROWS_BUDGET",
    "ClosedError",
    "Embed",
    "EmbedError",
    "ModelError",
    "NonFiniteError",
    "Pooling",
    "RequestError",
    "TokenizerError",
    "WeightsError",
]
