"""Device memory, planned and not pooled: an arena for weights, pinned staging for what travels. Device thread only."""

import ctypes
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gkd.driver import check, cu
from gkd.dtype import DType
from gkd.kernel import ceil_div
from gkd.ops.cast import Cast
from gkd.ops.split import Split
from gkd.stream import Event, Stream
from gkd.tensor import Tensor

# A chunk of the arena: large enough that a model takes a handful, small enough that the last one wastes little.
CHUNK_BYTES = 128 << 20
# Any vector load, and any tensor map, may start at a tensor's first byte.
ALIGNMENT_BYTES = 256
# A piece of staging: long enough for the bus's full rate, short enough that the first one is soon on its way.
PIECE_BYTES = 32 << 20


class Arena:
    """Tensors carved one after another from chunks; given back all at once."""

    def __init__(self) -> None:
        self._chunks: list[int] = []
        self._next = 0
        self._end = 0
        self.num_bytes = 0
        """Device memory held."""

    def tensor(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """An uninitialised tensor; raises OutOfMemory."""
        num_bytes = ceil_div(prod(shape) * dtype.itemsize, ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if num_bytes > CHUNK_BYTES:
            return Tensor(self._allocate(num_bytes), shape, dtype)
        if self._next + num_bytes > self._end:
            self._next = self._allocate(CHUNK_BYTES)
            self._end = self._next + CHUNK_BYTES
        pointer = self._next
        self._next += num_bytes
        return Tensor(pointer, shape, dtype)

    def close(self) -> None:
        """Gives all chunks back."""
        for pointer in self._chunks:
            check("cuMemFree", cu.cuMemFree(pointer))
        self._chunks.clear()
        self._next = self._end = self.num_bytes = 0

    def _allocate(self, num_bytes: int) -> int:
        pointer = int(check("cuMemAlloc", cu.cuMemAlloc(num_bytes)))
        self._chunks.append(pointer)
        self.num_bytes += num_bytes
        return pointer


class PinnedBuffer:
    """Host memory that the device reads by itself, while the host goes on."""

    def __init__(self, num_bytes: int) -> None:
        self.pointer = int(check("cuMemHostAlloc", cu.cuMemHostAlloc(num_bytes, 0)))
        self.bytes: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(self.pointer))

    def close(self) -> None:
        """Gives the memory back; `bytes` must not be used any more."""
        check("cuMemFreeHost", cu.cuMemFreeHost(self.pointer))


class Staging:
    """Carries host arrays of any size to the device: one piece is filled while the one before it travels."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._pinned: list[PinnedBuffer] = []
        self._sent: list[Event] = []
        self._scratch: int | None = None
        self._piece_idx = 0

    def upload(self, pointer: int, array: NDArray[Any]) -> None:
        """Queues copies of an array's bytes to a device address; the array may be dropped once this returns."""
        source = array.reshape(-1).view(np.uint8)
        for start in range(0, source.nbytes, PIECE_BYTES):
            self._send(pointer + start, source[start : start + PIECE_BYTES])

    def upload_cast(self, target: Tensor, stored: DType, array: NDArray[Any], run: Callable[..., None]) -> None:
        """The same into another type: rows go to scratch memory, and `run` queues their Cast or Split from there."""
        if self._scratch is None:
            self._scratch = int(check("cuMemAlloc", cu.cuMemAlloc(PIECE_BYTES)))
        op = Split(stored) if target.dtype is DType.SPLIT else Cast(stored, target.dtype)
        source = array.reshape(-1, array.shape[-1])
        matrix = target.view(source.shape)
        step = PIECE_BYTES // (source.shape[1] * stored.itemsize)
        for start in range(0, len(source), step):
            piece = source[start : start + step]
            self._send(self._scratch, piece.reshape(-1).view(np.uint8))
            # The stream's order keeps the scratch memory until it has been read.
            staged = Tensor(self._scratch, piece.shape, stored)
            run(op, matrix.rows(start, start + len(piece)), staged)

    def close(self) -> None:
        """Gives the staging memory back, once the stream has been waited for; the next upload takes it again."""
        for event in self._sent:
            event.close()
        for pinned in self._pinned:
            pinned.close()
        if self._scratch is not None:
            check("cuMemFree", cu.cuMemFree(self._scratch))
        self._sent, self._pinned, self._scratch = [], [], None

    def _send(self, pointer: int, source: NDArray[np.uint8]) -> None:
        if not self._pinned:
            self._pinned = [PinnedBuffer(PIECE_BYTES), PinnedBuffer(PIECE_BYTES)]
            self._sent = [Event(), Event()]
        self._piece_idx = 1 - self._piece_idx
        pinned, sent = self._pinned[self._piece_idx], self._sent[self._piece_idx]
        sent.wait()
        np.copyto(pinned.bytes[: source.nbytes], source)
        handle = self._stream.handle
        check("cuMemcpyHtoDAsync", cu.cuMemcpyHtoDAsync(pointer, pinned.pointer, source.nbytes, handle))
        sent.record(self._stream)
