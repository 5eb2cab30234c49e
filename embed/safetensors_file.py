"""The header of a safetensors file.

It is read by hand: the library's NumPy reader refuses bf16, and the raw bytes are what a device wants.
"""

import struct
from math import prod
from typing import Any

from embed.errors import WeightsError
from embed.stored import ITEM_BYTES, MappedFile, StoredTensor, fits_an_array, is_shape, parse_json_object, quoted

# The format's own bound on the header.
_MAX_HEADER_BYTES = 100_000_000


def read_tensors(file: MappedFile) -> dict[str, StoredTensor]:
    """The tensors by name, which together take every byte behind the header once; WeightsError where they do not."""
    if file.size < 8:
        raise WeightsError(f"{file.name}: {file.size} bytes are no safetensors file")
    (header_bytes,) = struct.unpack("<Q", file.bytes[:8])
    data_start = 8 + header_bytes
    if header_bytes > _MAX_HEADER_BYTES or data_start > file.size:
        raise WeightsError(f"{file.name}: the header is said to have {header_bytes} bytes, the file {file.size}")
    header = parse_json_object(file.bytes[8:data_start], f"{file.name}: the header")
    header.pop("__metadata__", None)
    tensors = {name: _read_entry(file, name, entry, data_start) for name, entry in header.items()}
    _check_places(file, tensors, data_start)
    return tensors


def _read_entry(file: MappedFile, name: str, entry: Any, data_start: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        dtype = shape = begin = end = None
    if not (isinstance(dtype, str) and is_shape(shape) and is_shape((begin, end))):
        raise WeightsError(f"{file.name}: the header entry of {quoted(name)} is malformed")
    shape = tuple(shape)
    if begin > end or data_start + end > file.size:
        raise WeightsError(
            f"{file.name}: {quoted(name)} ends at byte {data_start + end}, but the file has {file.size}: "
            "it is cut short or damaged"
        )
    expected = ITEM_BYTES[dtype] * prod(shape) if dtype in ITEM_BYTES else end - begin
    if end - begin != expected or not fits_an_array(shape):
        raise WeightsError(
            f"{file.name}: {quoted(name)} of shape {shape} and type {dtype} takes {expected} bytes, "
            f"its entry says {end - begin}"
        )
    return StoredTensor(name, file.name, dtype, shape, data_start + begin, end - begin)


def _check_places(file: MappedFile, tensors: dict[str, StoredTensor], data_start: int) -> None:
    expected = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.num_bytes)):
        if tensor.start != expected:
            raise WeightsError(
                f"{file.name}: {quoted(tensor.name)} begins at byte {tensor.start}, expected {expected}, where the "
                "tensor before it ends: the header is damaged"
            )
        expected += tensor.num_bytes
    if expected != file.size:
        raise WeightsError(
            f"{file.name}: the last tensor ends at byte {expected}, but the file has {file.size}: "
            "the header is not this file's"
        )
