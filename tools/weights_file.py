"""Writes safetensors files of any size in bounded memory, BF16 included, with NumPy alone."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8}
ARRAY_DTYPES = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(np.int64): "I64"}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file.

    `pieces` gives its values in row-major order, cut anywhere; those of BF16 are uint16.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[NDArray[Any]]]

    @classmethod
    def of_array(cls, name: str, array: NDArray[Any]) -> "Tensor":
        return cls(name, ARRAY_DTYPES[array.dtype], array.shape, lambda: [array])

    @property
    def num_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * prod(self.shape)


def write_weights(path: Path, tensors: Sequence[Tensor]) -> None:
    """Writes the tensors in the order given; ValueError if one yields more or fewer bytes than its shape."""
    with path.open("wb") as file:
        file.write(_header(tensors))
        for tensor in tensors:
            num_bytes = sum(file.write(np.ascontiguousarray(piece).data) for piece in tensor.pieces())
            if num_bytes != tensor.num_bytes:
                raise ValueError(f"{tensor.name}: expected {tensor.num_bytes} bytes, got {num_bytes}")


def _header(tensors: Sequence[Tensor]) -> bytes:
    # transformers refuses a file without this entry.
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)  # the format wants the values aligned
    return len(text).to_bytes(8, "little") + text
