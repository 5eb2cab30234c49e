"""The CPU backend: arrays in host memory, operators run by their NumPy references, in float32."""

import math
import platform
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gkd.call import Call
from gkd.dtype import DType
from gkd.ops import Cast, Operator
from gkd.ops.contract import Array

Result = TypeVar("Result")


class CpuBackend:
    """Runs operators on host arrays. It compiles nothing, and host memory goes when nothing refers to it any more."""

    name = "cpu"
    arch = 0
    kernel_count = 0
    graph_count = 0
    dtype: DType = DType.F32
    faulted = False
    # Tokens of one forward. Larger ones gain nothing on a CPU, whose products go by 256 rows, and cost memory.
    rows_budget = 2048
    # Weights that need no conversion are used where they lie in the file's pages.
    keeps_mapping = True

    def __init__(self) -> None:
        self.device_name = _processor_name()
        self._lock = threading.Lock()

    def call(self, function: Callable[[], Result]) -> Result:
        """Runs `function` when no other call runs."""
        return self.start(function).result()

    def start(self, function: Callable[[], Result]) -> Call[Result]:
        """The same, done when this returns: a forward keeps all processors busy."""
        call = Call(function)
        with self._lock:
            call.run()
        return call

    def begin(self) -> None:
        """There is nothing to take."""

    def acquire(self) -> None:
        """There is nothing to take."""

    def release(self) -> None:
        """There is nothing to give back."""

    def stop(self) -> None:
        """There is nothing to end."""

    def prepare(self, ops: Iterable[Operator]) -> None:
        """There is nothing to compile."""

    def finish_loading(self) -> None:
        """Nothing is on its way."""

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """Uninitialised memory; pages are taken as they are written to."""
        return np.empty(shape, dtype.storage)

    def weight(self, target: DType, shape: tuple[int, ...], parts: list[tuple[DType, NDArray[Any]]]) -> Array:
        """Host arrays, each with the type it is stored in, put one after another along axis 0.

        A single aligned array of the target's type is used as it is, without a copy.
        """
        if len(parts) == 1 and parts[0][0] is target and parts[0][1].flags.aligned:
            return parts[0][1]
        whole = self.empty(shape, target)
        rows = shape[0] // len(parts)
        for index, (stored, array) in enumerate(parts):
            self.run(Cast(stored, target), whole[index * rows : (index + 1) * rows], array)
        return whole

    def view(self, buffer: Array, shape: tuple[int, ...], start: int = 0) -> Array:
        """An array of another shape at an element of a flat one's memory."""
        return buffer[start : start + math.prod(shape)].reshape(shape)

    def upload(self, buffer: Array, array: NDArray[Any]) -> Array:
        """The array, which is where it has to be."""
        return array

    def download(self, out: NDArray[Any], array: Array) -> None:
        """Copies an array."""
        out[...] = array

    def record(self, queue: Callable[[], None]) -> None:
        """A call costs nothing to speak of: there is no gain."""

    def replay(self, recorded: None) -> None:
        """Nothing was recorded."""

    def run(self, op: Operator, *tensors: Any) -> None:
        """Checks the tensors against the operator's contract, then computes its output."""
        op.check(*tensors)
        # As on a GPU, an overflow shows in the result and not as a warning.
        with np.errstate(all="ignore"):
            op.reference(*tensors)


def _processor_name() -> str:
    """The processor as Linux names it, else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.machine()
