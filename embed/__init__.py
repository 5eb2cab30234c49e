"""embed: text to vectors."""

from embed.errors import ClosedError, EmbedError, ModelError, NonFiniteError, RequestError, TokenizerError, WeightsError
from embed.lexical import Embeddings, colbert_score, hybrid_scores, lexical_score
from embed.model import EM_BATCH_MAX, EM_POOL_CLS, EM_POOL_MEAN, EM_ROWS_BUDGET, Embed
from embed.pipeline import Pooling
from embed.similarity import similarity

__all__ = [
    "EM_BATCH_MAX",
    "EM_POOL_CLS",
    "EM_POOL_MEAN",
    "EM_ROWS_BUDGET",
    "ClosedError",
    "Embed",
    "EmbedError",
    "Embeddings",
    "ModelError",
    "NonFiniteError",
    "Pooling",
    "RequestError",
    "TokenizerError",
    "WeightsError",
    "colbert_score",
    "hybrid_scores",
    "lexical_score",
    "similarity",
]
