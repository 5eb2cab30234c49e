"""A cross-encoder: a classifier of one label behind an encoder, which scores a text for a query and gives no vectors.

What makes a directory one, and which scores it gives, follow CrossEncoder of sentence-transformers.
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from embed.errors import ModelError

# Where a directory that is taken for a cross-encoder lacks what makes it one.
ENCODER_ADVICE = "an encoder that gives vectors has modules.json, or is opened with --pool"

# Of a logit: what becomes a score.
ScoreActivation = Literal["sigmoid", "identity"]
# By the last name of the dotted path.
_ACTIVATIONS: dict[str, ScoreActivation] = {"Sigmoid": "sigmoid", "Identity": "identity"}


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of one of transformers' `...ForSequenceClassification`."""
    names = config.get("architectures")
    return isinstance(names, list) and any(str(name).endswith("ForSequenceClassification") for name in names)


def check_labels(config: Mapping[str, Any]) -> None:
    """ModelError unless the classifier that a config.json describes has one label: a score."""
    labels = config.get("id2label")
    # transformers' default is two labels, which it does not write.
    num_labels = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    if num_labels != 1:
        raise ModelError(
            f"config.json: the classifier has {num_labels} labels (`id2label`), expected 1, a cross-encoder's score; "
            f"{ENCODER_ADVICE}"
        )


def read_activation(config: Mapping[str, Any], library_config: Mapping[str, Any]) -> ScoreActivation:
    """The activation that config.json or, before it, config_sentence_transformers.json names; sigmoid where none does.

    ModelError for one that is not known.
    """
    own = config.get("sentence_transformers")
    if isinstance(own, dict) and "activation_fn" in own:
        key, value = "sentence_transformers.activation_fn", own["activation_fn"]
    else:  # before version 4
        key = "sbert_ce_default_activation_function"
        value = config.get(key)
    for shown, named in (
        ("config_sentence_transformers.json: `activation_fn`", library_config.get("activation_fn")),
        (f"config.json: `{key}`", value),
    ):
        if named is None:
            continue
        name = str(named).rpartition(".")[2]
        # sentence-transformers passes over a path that is not torch's: another score than the model's authors meant.
        if not str(named).startswith("torch.") or name not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            raise ModelError(f"{shown} is {named!r}, which is not supported; known: torch's {known}")
        return _ACTIVATIONS[name]
    return "sigmoid"


def scores_of(logits: NDArray[np.float32], activation: ScoreActivation) -> NDArray[np.float32]:
    """The scores of finite logits, of any shape."""
    if activation == "identity":
        return logits
    small = np.exp(-np.abs(logits.astype(np.float64)))  # at most 1: nothing overflows
    return np.asarray(np.where(logits < 0, small, 1) / (1 + small), np.float32)
