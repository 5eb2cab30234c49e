"""What serve asks of an engine. Any object with these members can be served; serve imports no engine."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class EmbeddingEngine(Protocol):
    """Text to vectors. Every member may be used from any thread; only `encode_ids` waits for the device."""

    @property
    def ok(self) -> bool:
        """False after a device fault, until a reload has succeeded."""

    @property
    def dim(self) -> int:
        """Width of a vector."""

    @property
    def maxseq(self) -> int:
        """Most tokens of one text, special tokens included; longer texts keep their head."""

    @property
    def backend(self) -> str:
        """`cuda` or `cpu`."""

    @property
    def device_name(self) -> str:
        """The device as its driver or operating system names it."""

    @property
    def kernel_count(self) -> int:
        """Kernels compiled or loaded so far; 0 on the CPU."""

    @property
    def weights_bytes(self) -> int:
        """Memory of the weights on the device; 0 while unloaded."""

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory that is planned at load; 0 while unloaded."""

    @property
    def recomputed(self) -> int:
        """Texts so far that were computed again in a wider precision, because their vector was not finite."""

    def tokenize_batch(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Packed token ids and the offsets of each text in them, special tokens included.

        Shapes: ids (num_tokens,), offsets (num_texts + 1,) from 0 to num_tokens. Works while unloaded.
        """

    def encode_ids(
        self, ids: NDArray[np.int32], offsets: NDArray[np.int64], *, normalize: bool | None = None
    ) -> NDArray[np.float32]:
        """Vectors (num_texts, dim) of packed token ids; `normalize=None` is the engine's own setting.

        Raises rather than give a vector that is not finite: JSON has no such numbers.
        """


class Lease(Protocol):
    """The right to hold the device. `unload` and `reload` do nothing where there is nothing to do."""

    @property
    def loaded(self) -> bool:
        """The weights are on the device now."""

    def unload(self) -> None:
        """Gives weights, workspace and device context back."""

    def reload(self) -> None:
        """Takes them again; raises with the reason where that fails, and stays unloaded."""
