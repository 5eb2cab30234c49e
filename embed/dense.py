"""Linear layers beside the encoder: Dense modules and heads of tokens, whose weights lie in files of their own, and the
head of a cross-encoder, whose weights lie among the encoder's."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embed.checkpoint import Checkpoint, weights_path
from embed.cross_encoder import ENCODER_ADVICE
from embed.errors import WeightsError
from embed.stored import FLOAT_TYPES
from gkd.backend import Backend
from gkd.dtype import DType
from gkd.ops.contract import Array


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """Host arrays with the types that they are stored in."""

    weight: tuple[DType, Array]
    """(out_features, in_features)"""
    bias: tuple[DType, Array]
    """(out_features,), zeros where the layer has none."""


def plan_dense(directory: Path, in_features: int, out_features: int, bias: bool) -> DenseWeights:
    """Of a Dense module. WeightsError names the tensor that is missing, misshapen or not known."""
    names = ("linear.weight", "linear.bias") if bias else ("linear.weight",)
    return _read(weights_path(directory), names, (out_features, in_features))


def plan_head(path: Path, in_features: int) -> DenseWeights:
    """Of a head of tokens, which has as many outputs as its file says."""
    return _read(path, ("weight", "bias"), (None, in_features))


def plan_classifier(checkpoint: Checkpoint, name: str, in_features: int, out_features: int) -> DenseWeights:
    """Of a layer of a cross-encoder's head; WeightsError as of a Dense module's."""
    for tensor in classifier_tensors(name):
        if tensor not in checkpoint.tensors:
            raise WeightsError(
                f"{checkpoint.name}: tensor `{tensor}` is missing, of the head that config.json's `architectures` "
                f"name; {ENCODER_ADVICE}"
            )
    return _match(checkpoint, checkpoint.name, classifier_tensors(name), (out_features, in_features))


def classifier_tensors(name: str) -> tuple[str, str]:
    """Names of the tensors of a layer of a cross-encoder's head."""
    return f"{name}.weight", f"{name}.bias"


def _read(path: Path, names: tuple[str, ...], shape: tuple[int | None, int]) -> DenseWeights:
    checkpoint = Checkpoint(path, keep=False)
    shown = f"{path.parent.name}/{path.name}"
    for name in checkpoint.tensors:
        if name not in names:
            raise WeightsError(f"{shown}: tensor `{name}` is not part of a linear layer, which has {', '.join(names)}")
    return _match(checkpoint, shown, names, shape)


def _match(checkpoint: Checkpoint, shown: str, names: tuple[str, ...], shape: tuple[int | None, int]) -> DenseWeights:
    arrays: list[tuple[DType, Array]] = []
    for name in names:
        tensor = checkpoint.tensors.get(name)
        if tensor is None:
            raise WeightsError(f"{shown}: tensor `{name}` is missing")
        if tensor.dtype not in FLOAT_TYPES:
            raise WeightsError(f"{shown}: tensor `{name}` is {tensor.dtype}, expected one of {', '.join(FLOAT_TYPES)}")
        arrays.append((FLOAT_TYPES[tensor.dtype], checkpoint.view(tensor)))
    _, weight = arrays[0]
    out_features = shape[0] or (weight.shape[0] if weight.ndim == 2 else 0)
    wanted = ((out_features, shape[1]), (out_features,))
    for name, (_, array), expected in zip(names, arrays, wanted, strict=False):
        if array.shape != expected:
            raise WeightsError(f"{shown}: tensor `{name}` has shape {array.shape}, expected {expected}")
    if len(arrays) == 1:
        arrays.append((DType.F32, np.zeros(out_features, np.float32)))
    return DenseWeights(*arrays)


def load_dense(backend: Backend, layers: Mapping[str, DenseWeights]) -> dict[str, Any]:
    """The backend's tensors `<name>.weight` and `<name>.bias`, in float32; `finish_loading` waits for them."""
    weights = {}
    for name, layer in layers.items():
        for kind, part in (("weight", layer.weight), ("bias", layer.bias)):
            weights[f"{name}.{kind}"] = backend.weight(DType.F32, part[1].shape, [part])
    return weights
