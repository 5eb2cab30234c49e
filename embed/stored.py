"""What every format of weights comes down to: where in a mapped file each tensor lies."""

import json
import mmap
import os
import stat
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from embed.errors import WeightsError
from gkd.dtype import DType
from gkd.ops.contract import Array

FLOAT_TYPES = {"F32": DType.F32, "F16": DType.F16, "BF16": DType.BF16}
"""The types that a weight may have, by safetensors' names."""

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}

# What NumPy can describe, also where one of the dimensions is 0.
MAX_DIMENSIONS = 32
_MAX_ELEMENTS = 1 << 59

_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as its file describes it; the file holds all of it."""

    name: str
    file: str
    """Name of the file that it lies in."""
    dtype: str
    """As safetensors names it. Types that no weight can have occur, too."""
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the beginning of the file."""
    num_bytes: int
    """Of its values."""
    strides: tuple[int, ...] | None = None
    """In elements, where they do not lie in row-major order without gaps."""


class MappedFile:
    """A file's bytes, mapped into memory for reading."""

    def __init__(self, path: Path, *, keep: bool) -> None:
        """`keep` says that the mapping will be computed from: all its pages are read now, so that no request waits
        for the disk. WeightsError where there is no such file, or it cannot be read."""
        self.name = path.name
        self.bytes: mmap.mmap | bytes = b""
        try:
            # Before it is opened, which for a pipe would wait for somebody to write.
            if not stat.S_ISREG(path.stat().st_mode):
                raise WeightsError(f"{path.name}: not a file that holds bytes")
            with path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size:
                    flags = mmap.MAP_PRIVATE | (getattr(mmap, "MAP_POPULATE", 0) if keep else 0)
                    self.bytes = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
        except FileNotFoundError:
            raise WeightsError(f"{path.name}: not found") from None
        except OSError as error:
            raise WeightsError(f"{path.name}: cannot be read: {error.strerror}") from None
        if self.bytes[: len(_LFS_POINTER)] == _LFS_POINTER:
            raise WeightsError(f"{path.name}: a Git LFS pointer instead of the file: `git lfs pull` fetches it")

    def view(self, tensor: StoredTensor) -> Array:
        """The tensor's values in their stored type (bf16 as uint16), contiguous and not to be written.

        Only a tensor with strides is copied.
        """
        dtype = FLOAT_TYPES[tensor.dtype].storage.newbyteorder("<")
        if tensor.strides is None:
            count = tensor.num_bytes // dtype.itemsize
            return np.frombuffer(self.bytes, dtype, count, tensor.start).reshape(tensor.shape)
        strides = tuple(stride * dtype.itemsize for stride in tensor.strides)
        return np.asarray(np.ndarray(tensor.shape, dtype, self.bytes, tensor.start, strides), order="C")


def parse_json_object(content: bytes, where: str) -> dict[str, Any]:
    """The JSON object, and its inner ones, with each key once; WeightsError says `where` it is not."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise WeightsError(f"{where} has {quoted(key)} twice")
            result[key] = value
        return result

    try:
        value = json.loads(content, object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise WeightsError(f"{where} is not valid JSON") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{where} is no JSON object")
    return value


def is_shape(value: Any) -> bool:
    """A list or tuple of sizes that an array can have."""
    if not isinstance(value, list | tuple) or len(value) > MAX_DIMENSIONS:
        return False
    return all(type(size) is int and 0 <= size < 1 << 63 for size in value)


def fits_an_array(shape: tuple[int, ...]) -> bool:
    """NumPy can describe it: a shape with a 0 takes no bytes whatever its other sizes are."""
    return prod(max(size, 1) for size in shape) <= _MAX_ELEMENTS


def quoted(name: str) -> str:
    """A name from a file as part of a message of one line."""
    if not name.isprintable():
        name = ascii(name)[1:-1]
    return f"`{name}`" if len(name) <= 200 else f"`{name[:200]}...`"
