"""The tensors of a file that torch.save wrote, as a zip (PyTorch 1.6 and later), without torch.

<root>/data.pkl     tensors as windows of storages; embed/torch_pickle.py
<root>/data/<key>   a storage: its bytes, not compressed
<root>/byteorder    `little` or `big`, where PyTorch was new enough
"""

import re
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import IO, cast

from embed.errors import WeightsError
from embed.stored import ITEM_BYTES, MappedFile, StoredTensor, fits_an_array, is_shape, quoted
from embed.torch_pickle import PickledTensor, read_pickle

# Many times what a file of tensors has: both are turned into objects, which take many times their bytes.
_MAX_PICKLE_BYTES = 1 << 20
_MAX_DIRECTORY_BYTES = 1 << 22

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ENCRYPTED = 0x2041
_KEY = re.compile("[0-9]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    header_start: int
    start: int
    end: int


def read_tensors(file: MappedFile) -> dict[str, StoredTensor]:
    """The tensors by name, each within the entry that holds its storage; WeightsError for anything else in the file."""
    entries = _read_directory(file)
    roots = [name.removesuffix("/data.pkl") for name in entries if name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise WeightsError(
            f"{file.name}: a zip with {len(roots)} entries `data.pkl`, expected one, as torch.save writes it"
        )
    [root] = roots
    order = entries.get(f"{root}/byteorder")
    if order is not None and file.bytes[order.start : min(order.end, order.start + 16)] != b"little":
        raise WeightsError(f"{file.name}: `byteorder` is not `little`: save it again on a little-endian machine")
    pickled = entries[f"{root}/data.pkl"]
    if pickled.end - pickled.start > _MAX_PICKLE_BYTES:
        raise WeightsError(
            f"{file.name}: `data.pkl` has {pickled.end - pickled.start} bytes, expected at most {_MAX_PICKLE_BYTES}: "
            "it holds more than tensors; save the state_dict alone"
        )
    tensors = read_pickle(file.bytes[pickled.start : pickled.end], file.name)
    return {name: _place(file, name, tensor, root, entries) for name, tensor in tensors.items()}


def _place(
    file: MappedFile, name: str, tensor: PickledTensor, root: str, entries: Mapping[str, _Entry]
) -> StoredTensor:
    storage = tensor.storage
    entry = entries.get(f"{root}/data/{storage.key}") if _KEY.fullmatch(storage.key) else None
    if entry is None:
        raise WeightsError(f"{file.name}: {quoted(name)} lies in storage {quoted(storage.key)}, which the file lacks")
    item_bytes = ITEM_BYTES[storage.dtype]
    if entry.end - entry.start != storage.num_elements * item_bytes:
        raise WeightsError(
            f"{file.name}: storage {quoted(storage.key)} of {quoted(name)} has {entry.end - entry.start} bytes, "
            f"expected {storage.num_elements} times {item_bytes}"
        )
    shape, strides = tensor.shape, tensor.strides
    if not (is_shape(shape) and is_shape(strides) and len(shape) == len(strides) and tensor.offset >= 0):
        raise WeightsError(
            f"{file.name}: {quoted(name)} is malformed: shape {shape}, strides {strides}, offset {tensor.offset}"
        )
    count = prod(shape)
    last = tensor.offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    end = last + 1 if count else tensor.offset
    # Values that stand for several elements would make a small file as large as it likes.
    if end > storage.num_elements or count > storage.num_elements or not fits_an_array(shape):
        raise WeightsError(
            f"{file.name}: {quoted(name)} with shape {shape}, strides {strides} and offset {tensor.offset} is no part "
            f"of its storage, which has {storage.num_elements} elements"
        )
    start = entry.start + tensor.offset * item_bytes
    gaps = None if count == 0 or _is_row_major(shape, strides) else strides
    return StoredTensor(name, file.name, storage.dtype, shape, start, count * item_bytes, gaps)


def _is_row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        # The stride of a single element is never used, and may be anything.
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


# The zip


class _Reader:
    """What zipfile reads the directory with. It believes the sizes that the file states, so a read has a bound."""

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self._position = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        position = offset + (self._file.size if whence == 2 else 0)
        if position < 0:
            raise OSError("before the beginning")
        self._position = position
        return position

    def tell(self) -> int:
        return self._position

    def read(self, num_bytes: int = -1) -> bytes:
        left = max(self._file.size - self._position, 0)
        num_bytes = left if num_bytes < 0 else min(num_bytes, left)
        if num_bytes > _MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"a directory of {num_bytes} bytes")
        start, self._position = self._position, self._position + num_bytes
        return self._file.bytes[start : self._position]


def _read_directory(file: MappedFile) -> dict[str, _Entry]:
    """The entries by name: stored plainly, each within the file and apart from the others."""
    if file.bytes[:4] != b"PK\3\4":
        raise WeightsError(f"{file.name}: {_explain_no_zip(file.bytes[:512])}")
    try:
        with zipfile.ZipFile(cast(IO[bytes], _Reader(file))) as archive:
            entries = [_read_entry(file, info) for info in archive.infolist()]
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, OverflowError, struct.error):
        raise WeightsError(f"{file.name}: a zip without a whole directory: it is cut short or damaged") from None
    entries.sort(key=lambda entry: (entry.header_start, entry.end))
    for before, after in pairwise(entries):
        if before.end > after.header_start:
            raise WeightsError(f"{file.name}: the entries {quoted(before.name)} and {quoted(after.name)} overlap")
    by_name = {entry.name: entry for entry in entries}
    if len(by_name) != len(entries):
        raise WeightsError(f"{file.name}: a zip with two entries of the same name")
    return by_name


def _read_entry(file: MappedFile, info: zipfile.ZipInfo) -> _Entry:
    shown = f"{file.name}: the entry {quoted(info.filename)}"
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED:
        raise WeightsError(f"{shown} is compressed or encrypted, which torch.save does not do")
    header = (
        file.bytes[info.header_offset : info.header_offset + _LOCAL_HEADER.size] if info.header_offset >= 0 else b""
    )
    if len(header) < _LOCAL_HEADER.size or not header.startswith(b"PK\3\4"):
        raise WeightsError(
            f"{shown} is said to begin at byte {info.header_offset}, where none does: the file is damaged"
        )
    _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    start = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    if info.file_size != info.compress_size or start + info.file_size > file.size:
        raise WeightsError(
            f"{shown} ends at byte {start + info.file_size}, but the file has {file.size}: it is cut short or damaged"
        )
    return _Entry(info.filename, info.header_offset, start, start + info.file_size)


def _explain_no_zip(head: bytes) -> str:
    if head.startswith(b"\x80") or head[257:262] == b"ustar":
        return (
            "in the form of PyTorch before 1.6, which is not read: with torch, "
            "`torch.save(torch.load(path, weights_only=True), path)` brings it into the present one"
        )
    return "neither a zip nor a pickle: no file that torch.save wrote, or not its beginning"
