"""Weights of a safetensors file, matched strictly against what the configuration asks for.

The header is read by hand: the library's NumPy reader refuses bf16, and the raw bytes are what a device wants.
"""

import json
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from embed.config import ModelConfig
from embed.errors import WeightsError
from embed.models import Slot
from gkd.backend import Backend
from gkd.dtype import DType
from gkd.ops.contract import Array

FILE_NAME = "model.safetensors"

_FLOAT_TYPES = {"F32": DType.F32, "F16": DType.F16, "BF16": DType.BF16}

# The format's own bound on the header.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the file's header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the beginning of the file."""
    end: int


@dataclass(frozen=True, slots=True)
class PlannedWeight:
    """One weight of the encoder and the tensors, concatenated along axis 0, that it is made of."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[StoredTensor, ...]
    multiplied: bool
    """It is an operand of products: a matrix, and no table."""


class Checkpoint:
    """A safetensors file: its checked header, and its bytes mapped into memory."""

    def __init__(self, path: Path, *, keep: bool) -> None:
        """`keep` says that the mapping will be computed from: all its pages are read now, so that no request waits
        for the disk."""
        try:
            with path.open("rb") as file:
                self._size = path.stat().st_size
                self.tensors = self._read_header(file.read(8), file.read)
                flags = mmap.MAP_PRIVATE | (getattr(mmap, "MAP_POPULATE", 0) if keep else 0)
                self._bytes = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
        except FileNotFoundError:
            raise WeightsError(_explain_missing(path)) from None
        except OSError as error:
            raise WeightsError(f"{path.name}: cannot be read: {error.strerror}") from None

    def view(self, tensor: StoredTensor) -> Array:
        """The tensor's values in their stored type (bf16 as uint16), read-only and without a copy."""
        dtype = _FLOAT_TYPES[tensor.dtype].storage.newbyteorder("<")
        count = (tensor.end - tensor.start) // dtype.itemsize
        return np.frombuffer(self._bytes, dtype, count, tensor.start).reshape(tensor.shape)

    def _read_header(self, prefix: bytes, read: Callable[[int], bytes]) -> dict[str, StoredTensor]:
        if len(prefix) < 8:
            raise WeightsError(f"{FILE_NAME}: {len(prefix)} bytes are no safetensors file")
        (header_bytes,) = struct.unpack("<Q", prefix)
        data_start = 8 + header_bytes
        if header_bytes > _MAX_HEADER_BYTES or data_start > self._size:
            raise WeightsError(f"{FILE_NAME}: the header is said to have {header_bytes} bytes, the file {self._size}")
        try:
            header = json.loads(read(header_bytes))
        except (ValueError, RecursionError):
            raise WeightsError(f"{FILE_NAME}: the header is not valid JSON") from None
        if not isinstance(header, dict):
            raise WeightsError(f"{FILE_NAME}: the header is no JSON object")
        return {
            name: self._read_entry(name, entry, data_start) for name, entry in header.items() if name != "__metadata__"
        }

    def _read_entry(self, name: str, entry: Any, data_start: int) -> StoredTensor:
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            well_formed = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        except (TypeError, KeyError, ValueError):
            well_formed = False
        if not well_formed:
            raise WeightsError(f"{FILE_NAME}: the header entry of `{name}` is malformed")
        tensor = StoredTensor(name, dtype, tuple(shape), data_start + begin, data_start + end)
        if begin > end or tensor.end > self._size:
            raise WeightsError(
                f"{FILE_NAME}: `{name}` ends at byte {tensor.end}, but the file has {self._size}: "
                "it is cut short or damaged"
            )
        if dtype in _FLOAT_TYPES:
            expected = _FLOAT_TYPES[dtype].itemsize * _product(tensor.shape)
            if end - begin != expected:
                raise WeightsError(
                    f"{FILE_NAME}: `{name}` of shape {tensor.shape} and type {dtype} takes {expected} bytes, "
                    f"its entry says {end - begin}"
                )
        return tensor


def _product(sizes: tuple[int, ...]) -> int:
    # Not np.prod: a hostile shape overflows int64.
    result = 1
    for size in sizes:
        result *= size
    return result


def _explain_missing(path: Path) -> str:
    if path.with_name(f"{FILE_NAME}.index.json").exists():
        return f"{FILE_NAME}: not found; the weights are in several files, which is not supported yet"
    if path.with_name("pytorch_model.bin").exists():
        return f"{FILE_NAME}: not found; pytorch_model.bin is not supported yet: save the model as safetensors"
    return f"{FILE_NAME}: not found"


def plan_weights(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> list[PlannedWeight]:
    """Matches every weight of the encoder with tensors of the file, by name, shape and type.

    Raises WeightsError for a tensor that is missing, misshapen, of no floating type, or not known to be unused.
    """
    family = config.family
    first = family.embeddings[0].tensors[0]
    prefix = next((prefix for prefix in ("", *family.prefixes) if prefix + first in tensors), None)
    if prefix is None:
        names = ", ".join(f"`{prefix}{first}`" for prefix in ("", *family.prefixes))
        raise WeightsError(f"{FILE_NAME}: no tensor {names}: these are not the weights of a {family.model_type} model")

    slots = [(slot.name, slot, 0) for slot in family.embeddings]
    for layer in range(config.num_layers):
        slots += [(f"layer.{layer}.{slot.name}", slot, layer) for slot in family.layer]
    plan = [_plan_weight(name, slot, layer, prefix, config, tensors) for name, slot, layer in slots]

    used = {source.name for weight in plan for source in weight.sources}
    for name in tensors:
        if name not in used and not any(fnmatchcase(name.removeprefix(prefix), known) for known in family.ignored):
            raise WeightsError(f"{FILE_NAME}: tensor `{name}` is not part of a {family.model_type} model as configured")
    return plan


def _plan_weight(
    name: str, slot: Slot, layer: int, prefix: str, config: ModelConfig, tensors: Mapping[str, StoredTensor]
) -> PlannedWeight:
    shape = tuple(int(getattr(config, size)) for size in slot.shape)
    sources = []
    for template in slot.tensors:
        tensor_name = prefix + template.format(layer=layer)
        tensor = tensors.get(tensor_name)
        if tensor is None:
            raise WeightsError(f"{FILE_NAME}: tensor `{tensor_name}` is missing")
        if tensor.shape != shape:
            raise WeightsError(
                f"{FILE_NAME}: tensor `{tensor_name}` has shape {tensor.shape}, config.json asks for {shape}"
            )
        if tensor.dtype not in _FLOAT_TYPES:
            known = ", ".join(_FLOAT_TYPES)
            raise WeightsError(f"{FILE_NAME}: tensor `{tensor_name}` is {tensor.dtype}, expected one of {known}")
        sources.append(tensor)
    multiplied = len(shape) > 1 and slot in config.family.layer
    return PlannedWeight(name, (shape[0] * len(sources), *shape[1:]), tuple(sources), multiplied)


def load_weights(
    backend: Backend, checkpoint: Checkpoint, plan: list[PlannedWeight], advance: Callable[[int], None]
) -> dict[str, Any]:
    """The backend's tensors by name: matrices in the precision of the computation, vectors in its accumulators'.

    `advance` is told the bytes of each weight in the file as it is done.
    """
    weights: dict[str, Any] = {}
    for weight in plan:
        target = backend.dtype.summand if len(weight.shape) > 1 else backend.dtype.accumulator
        if weight.multiplied:
            target = backend.dtype
        parts = [(_FLOAT_TYPES[source.dtype], checkpoint.view(source)) for source in weight.sources]
        weights[weight.name] = backend.weight(target, weight.shape, parts)
        advance(sum(source.end - source.start for source in weight.sources))
    backend.finish_loading()
    return weights
