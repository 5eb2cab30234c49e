"""Weights of a checkpoint, matched strictly against what the configuration asks for."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from embed.checkpoint import Checkpoint
from embed.config import ModelConfig
from embed.errors import WeightsError
from embed.models import Slot
from embed.relative_bias import bias_table
from embed.stored import FLOAT_TYPES, StoredTensor, quoted
from gkd.backend import Backend
from gkd.dtype import DType
from gkd.ops import Cast
from gkd.ops.contract import Array

# What a LayerNorm's two tensors are called in files that were converted from TensorFlow's BERT.
_LEGACY_ENDINGS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


@dataclass(frozen=True, slots=True)
class PlannedWeight:
    """One weight of the encoder and the tensors, concatenated along axis 0, that it is made of."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[StoredTensor, ...]
    multiplied: bool
    """It is an operand of products: a matrix, and no table."""


def plan_weights(config: ModelConfig, checkpoint: Checkpoint, head: Collection[str] = ()) -> list[PlannedWeight]:
    """Matches every weight of the encoder with tensors of the checkpoint, by name, shape and type.

    Each tensor is used once, is one of those that the family is known not to use, or is one that `head` names: those of
    a head are planned elsewhere. Raises WeightsError for one that is missing, misshapen, of no floating type, there
    under two names, or not known.
    """
    family = config.family
    tensors = _by_present_name(checkpoint.tensors)
    first = family.embeddings[0].tensors[0]
    prefix = next((prefix for prefix in ("", *family.prefixes) if prefix + first in tensors), None)
    if prefix is None:
        names = ", ".join(f"`{prefix}{first}`" for prefix in ("", *family.prefixes))
        raise WeightsError(
            f"{checkpoint.name}: no tensor {names}: these are not the weights of a {family.model_type} model"
        )

    slots = [(slot.name, slot, 0) for slot in family.embeddings]
    for layer in range(config.num_layers):
        slots += [(f"layer.{layer}.{slot.name}", slot, layer) for slot in family.layer]
    plan = [_plan_weight(name, slot, layer, prefix, config, checkpoint.name, tensors) for name, slot, layer in slots]

    used = {*head, *(source.name for weight in plan for source in weight.sources)}
    for name, tensor in tensors.items():
        if tensor.name in used or any(fnmatchcase(name.removeprefix(prefix), known) for known in family.ignored):
            continue
        raise WeightsError(
            f"{tensor.file}: tensor {quoted(tensor.name)} is not part of a {family.model_type} model as configured"
        )
    return plan


def _by_present_name(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    result: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        for legacy, present in _LEGACY_ENDINGS.items():
            if name.endswith(legacy):
                name = name.removesuffix(legacy) + present
        other = result.setdefault(name, tensor)
        if other is not tensor:
            raise WeightsError(
                f"{tensor.file}: tensors {quoted(other.name)} and {quoted(tensor.name)} are the same weight"
            )
    return result


def _plan_weight(
    name: str,
    slot: Slot,
    layer: int,
    prefix: str,
    config: ModelConfig,
    checkpoint_name: str,
    tensors: Mapping[str, StoredTensor],
) -> PlannedWeight:
    shape = tuple(int(getattr(config, size)) for size in slot.shape)
    sources = []
    for template in slot.tensors:
        tensor_name = prefix + template.format(layer=layer)
        tensor = tensors.get(tensor_name)
        if tensor is None:
            raise WeightsError(f"{checkpoint_name}: tensor `{tensor_name}` is missing")
        if tensor.shape != shape:
            raise WeightsError(
                f"{tensor.file}: tensor {quoted(tensor.name)} has shape {tensor.shape}, config.json asks for {shape}"
            )
        if tensor.dtype not in FLOAT_TYPES:
            known = ", ".join(FLOAT_TYPES)
            raise WeightsError(
                f"{tensor.file}: tensor {quoted(tensor.name)} is {tensor.dtype}, expected one of {known}"
            )
        sources.append(tensor)
    multiplied = len(shape) > 1 and slot in config.family.layer
    return PlannedWeight(name, (shape[0] * max(len(sources), 1), *shape[1:]), tuple(sources), multiplied)


def load_weights(
    backend: Backend, checkpoint: Checkpoint, plan: list[PlannedWeight], advance: Callable[[int], None]
) -> dict[str, Any]:
    """The backend's tensors by name: matrices in the precision of the computation, vectors in its accumulators'.

    A relative bias is made what attention adds to its scores: float32, for each distance.
    `advance` is told the bytes of each weight in the file as it is done.
    """
    weights: dict[str, Any] = {}
    for weight in plan:
        target = backend.dtype.summand if len(weight.shape) > 1 else backend.dtype.accumulator
        if weight.multiplied:
            target = backend.dtype
        parts = [(FLOAT_TYPES[source.dtype], checkpoint.view(source)) for source in weight.sources]
        if not parts:  # of a slot without tensors
            parts = [(DType.F32, np.zeros(weight.shape, np.float32))]
        shape = weight.shape
        if weight.name == "relative_bias":
            table = bias_table(_widened(*parts[0]))
            target, shape, parts = backend.dtype.accumulator, table.shape, [(DType.F32, table)]
        weights[weight.name] = backend.weight(target, shape, parts)
        advance(sum(source.num_bytes for source in weight.sources))
    backend.finish_loading()
    return weights


def _widened(stored: DType, values: Array) -> Array:
    out = np.empty(values.shape, np.float32)
    Cast(stored, DType.F32).reference(out, values)
    return out
