"""What serve asks of an engine. Any object with these members can be served; serve imports no engine."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Forward(Protocol):
    """A forward that has begun."""

    def result(self) -> tuple[NDArray[np.float32], Mapping[int, Exception]]:
        """Waits for the vectors (num_texts, dim), and gives them with the reasons of texts that have none, by index.

        Their rows mean nothing; every other row is finite, since JSON has no other numbers. Raises what goes wrong with
        all of them. To be asked once.
        """


class EmbeddingEngine(Protocol):
    """Text to vectors. Every member may be used from any thread; only a Forward's `result` waits for the device."""

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

    @property
    def max_batch_tokens(self) -> int:
        """Most tokens of one forward."""

    @property
    def max_batch_texts(self) -> int:
        """Most texts of one forward."""

    @property
    def graph_count(self) -> int:
        """Recorded forwards on the device now; 0 on the CPU."""

    def tokenize_counted(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64], Sequence[int]]:
        """Packed token ids, the offsets of each text in them, and the tokens of each before it was cut to `maxseq`.

        Shapes: ids (num_tokens,), offsets (num_texts + 1,) from 0 to num_tokens. Special tokens are included and
        counted. Works while unloaded.
        """

    def prepare_ids(self, ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> Any:
        """What can be done for `start_encode` before its turn comes. Works while unloaded, and waits for nothing."""

    def start_encode(self, prepared: Any, normalize: bool | None = None) -> Forward:
        """Begins a forward over what `prepare_ids` gave; `normalize=None` is the engine's own setting."""


class Lease(Protocol):
    """The right to hold the device. `unload` and `reload` do nothing where there is nothing to do."""

    @property
    def loaded(self) -> bool:
        """The weights are on the device now."""

    def unload(self) -> None:
        """Gives weights, workspace and device context back."""

    def reload(self) -> None:
        """Takes them again; raises with the reason where that fails, and stays unloaded."""
