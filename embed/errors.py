"""What embed raises.

EmbedError
├── ModelError        the model directory, its configuration or its pipeline cannot be used
│   ├── WeightsError      the weights file, or a tensor in it
│   └── TokenizerError    the tokenizer file
├── RequestError      the texts or token ids of one call
├── NonFiniteError    the model gives no finite vector for a text
└── ClosedError       the handle has been closed, or the weights are unloaded

Messages about a model name files as they lie in its directory; who opened the directory adds its path.
"""


class EmbedError(Exception):
    """Base of everything that embed raises on purpose."""


class ModelError(EmbedError):
    """The model directory, its configuration or its pipeline cannot be used."""


class WeightsError(ModelError):
    """The weights file, or a tensor in it, cannot be used."""


class TokenizerError(ModelError):
    """The tokenizer file cannot be used."""


class RequestError(EmbedError):
    """The texts or token ids of one call cannot be embedded; the engine goes on as before."""


class NonFiniteError(EmbedError):
    """The model gives a vector that is not finite for a text, also in f32 where that could be tried."""


class ClosedError(EmbedError):
    """The handle has been closed, or the weights are unloaded."""
