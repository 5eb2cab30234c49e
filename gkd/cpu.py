"""The CPU backend: arrays in host memory, operators run by their NumPy references, in float32."""

import platform
from pathlib import Path
from typing import Any

import numpy as np

from gkd.ops.contract import Array, Operator


class CpuBackend:
    """Runs operators on host arrays. It compiles nothing and holds nothing that would have to be given back."""

    name = "cpu"
    kernel_count = 0
    # Tokens of one forward. Larger ones gain nothing on a CPU, whose products go by 256 rows, and cost memory.
    rows_budget = 2048

    def __init__(self) -> None:
        self.device_name = _processor_name()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Uninitialised memory; pages are taken as they are written to."""
        return np.empty(shape, dtype)

    def run(self, op: Operator, *tensors: Array) -> None:
        """Checks the tensors against the operator's contract, then computes its output."""
        op.check(*tensors)
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
