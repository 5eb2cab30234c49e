"""The queue in front of the engine, and the lease of its weights.

One thread calls the engine and the lease, in the order of one queue: jobs, ticks of the idle clock, the stop.
"""

import asyncio
import contextlib
import enum
import logging
import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from serve.errors import EngineError, Unavailable, embedding_failed
from serve.protocols import EmbeddingEngine, Lease

logger = logging.getLogger(__name__)

_TICK_S = 0.2


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about the engine, as of the last time the device thread looked. Replaced whole, so that a
    reader on any thread sees one moment and waits for nothing."""

    ok: bool
    loaded: bool
    busy: bool
    loads: int
    unloads: int
    last_load_ms: int
    idle_since_s: float  # on the monotonic clock
    requests: int
    backend: str
    device_name: str
    dim: int
    maxseq: int
    kernel_count: int
    weights_bytes: int
    workspace_bytes: int
    recomputed: int


@dataclass(eq=False, slots=True)
class _Job:
    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    normalize: bool
    reply: asyncio.Future[NDArray[np.float32]]


class _Signal(enum.Enum):
    TICK = enum.auto()
    STOP = enum.auto()


class Batcher:
    """Answers jobs one after another; gives the weights back after `unload_after_s` idle seconds (0: never).

    `submit` and `stop` belong to the event loop, `status` to anybody.
    """

    def __init__(self, engine: EmbeddingEngine, lease: Lease, *, unload_after_s: float) -> None:
        self._engine = engine
        self._lease = lease
        self._unload_after_s = unload_after_s
        self._queue: SimpleQueue[_Job | _Signal] = SimpleQueue()
        self._stopping = threading.Event()
        # Daemons: a forced end of the process must not wait for a forward.
        self._threads = [threading.Thread(target=self._work, name="device", daemon=True)]
        if unload_after_s > 0:
            self._threads.append(threading.Thread(target=self._tick, name="ticker", daemon=True))
        self.status = Status(
            ok=engine.ok,
            loaded=lease.loaded,
            busy=False,
            loads=1,
            unloads=0,
            last_load_ms=0,
            idle_since_s=time.monotonic(),
            requests=0,
            backend=engine.backend,
            device_name=engine.device_name,
            dim=engine.dim,
            maxseq=engine.maxseq,
            kernel_count=engine.kernel_count,
            weights_bytes=engine.weights_bytes,
            workspace_bytes=engine.workspace_bytes,
            recomputed=engine.recomputed,
        )

    def start(self) -> None:
        self.status = replace(self.status, idle_since_s=time.monotonic())
        for thread in self._threads:
            thread.start()

    def submit(
        self, ids: NDArray[np.int32], offsets: NDArray[np.int64], *, normalize: bool
    ) -> asyncio.Future[NDArray[np.float32]]:
        """The vectors, or an EngineError. A future that is done before its turn comes costs no forward."""
        if self._stopping.is_set():
            raise Unavailable("the server is stopping")
        reply: asyncio.Future[NDArray[np.float32]] = asyncio.get_running_loop().create_future()
        self._queue.put(_Job(ids, offsets, normalize, reply))
        return reply

    async def stop(self) -> None:
        """Answers what is queued and ends the threads."""
        self._stopping.set()
        self._queue.put(_Signal.STOP)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _tick(self) -> None:
        while not self._stopping.wait(_TICK_S):
            self._queue.put(_Signal.TICK)

    def _work(self) -> None:
        while (item := self._queue.get()) is not _Signal.STOP:
            if item is _Signal.TICK:
                self._unload_if_idle()
            elif not item.reply.done():
                self._answer(item)

    def _answer(self, job: _Job) -> None:
        answer: NDArray[np.float32] | EngineError
        requests = self.status.requests
        try:
            answer = self._forward(job)
            requests += 1
        except EngineError as error:
            answer = error
        self._observe(busy=False, requests=requests, idle_since_s=time.monotonic())
        _deliver(job.reply, answer)

    def _forward(self, job: _Job) -> NDArray[np.float32]:
        if not self._lease.loaded:
            self._reload()
        self._observe(busy=True)
        try:
            return self._engine.encode_ids(job.ids, job.offsets, normalize=job.normalize)
        except Exception as error:
            raise embedding_failed(error) from error

    def _reload(self) -> None:
        start_s = time.monotonic()
        try:
            self._lease.reload()
        except Exception as error:
            logger.error("weights not loaded", exc_info=error)
            raise Unavailable(f"weights not loaded: {str(error) or type(error).__name__}") from error
        load_ms = round((time.monotonic() - start_s) * 1e3)
        self._observe(loads=self.status.loads + 1, last_load_ms=load_ms)
        logger.info("weights loaded: %d ms", load_ms)

    def _unload_if_idle(self) -> None:
        idle_s = time.monotonic() - self.status.idle_since_s
        if idle_s < self._unload_after_s or not self._lease.loaded or not self._queue.empty():
            return
        try:
            self._lease.unload()
        except Exception as error:
            logger.error("weights not unloaded", exc_info=error)
            # The next attempt is another idle time away, not another tick.
            self._observe(idle_since_s=time.monotonic())
        else:
            self._observe(unloads=self.status.unloads + 1)
            logger.info("weights unloaded: idle for %.1f s", idle_s)

    def _observe(self, **changes: bool | int | float) -> None:
        engine = self._engine
        self.status = replace(
            self.status,
            ok=engine.ok,
            loaded=self._lease.loaded,
            device_name=engine.device_name,
            kernel_count=engine.kernel_count,
            weights_bytes=engine.weights_bytes,
            workspace_bytes=engine.workspace_bytes,
            recomputed=engine.recomputed,
            **changes,
        )


def _deliver(reply: asyncio.Future[NDArray[np.float32]], answer: NDArray[np.float32] | EngineError) -> None:
    def settle() -> None:
        if reply.done():
            return
        if isinstance(answer, EngineError):
            reply.set_exception(answer)
        else:
            reply.set_result(answer)

    # A forced end closes the loop under a running forward.
    with contextlib.suppress(RuntimeError):
        reply.get_loop().call_soon_threadsafe(settle)
