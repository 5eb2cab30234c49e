"""Spreads a reference's independent pieces over the cores.

NumPy lets go of the GIL while it works on a piece, so plain threads do. BLAS is held to one thread meanwhile: its own
threads would share out a product by its size, spin for tens of milliseconds after each one on cores that the next
pieces need, and leave everything between two products on one core.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import numpy as np
from threadpoolctl import ThreadpoolController

Item = TypeVar("Item")


def for_each(work: Callable[[Item], None], items: Sequence[Item]) -> None:
    """Calls `work` on every item, several at a time where there are several; raises what it raises."""
    # next() of a list's iterator is atomic: each item is taken once.
    remaining = iter([*items])

    def drain() -> None:
        # The error state belongs to a thread: see CpuBackend.run.
        with np.errstate(all="ignore"):
            for item in remaining:
                work(item)

    with _blas().single_threaded():
        # The caller works, too: a short call has ended before another thread is awake.
        helpers = [_helpers().submit(drain) for _ in range(min(len(items), num_cores()) - 1)]
        try:
            drain()
        finally:
            wait(helpers)
        for helper in helpers:
            helper.result()


class _Blas:
    """BLAS's number of threads, which is one setting for the whole process."""

    def __init__(self) -> None:
        self._controller = ThreadpoolController()
        self._lock = threading.Lock()
        self._num_users = 0

    @contextmanager
    def single_threaded(self) -> Iterator[None]:
        """The first to come sets one thread, the last to go sets what there was: engines may overlap."""
        with self._lock:
            if self._num_users == 0:
                self._limit = self._controller.limit(limits=1, user_api="blas")
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                if self._num_users == 0:
                    self._limit.restore_original_limits()


@cache
def _blas() -> _Blas:
    return _Blas()


@cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_cores(), thread_name_prefix="gkd-cpu")


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))
