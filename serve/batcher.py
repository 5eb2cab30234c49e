"""Forwards over the texts of many requests, and the lease of the weights.

One thread calls the engine and the lease: it takes what the queue holds, forward by forward, and gives the weights back
when nothing has come for a while.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from serve.errors import EngineError, Unavailable, embedding_failed
from serve.metrics import Metrics
from serve.protocols import EmbeddingEngine, Forward, Lease
from serve.queue import Answer, Job, Piece, TextQueue

logger = logging.getLogger(__name__)

# When a device that was lost is taken again: at first at once, for most faults are of one forward.
_FIRST_RETRY_S = 0.1
_RETRY_S = 10.0

_ZERO = np.zeros(1, np.int64)

# How fast the measured speed of forwards follows new ones.
_SPEED_WEIGHT = 0.2


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


Outcome = tuple[NDArray[np.float32], Mapping[int, Exception]]


@dataclass(slots=True)
class _Batch:
    """What one forward computes: packed for the engine, then begun, or why not."""

    pieces: list[Piece]
    prepared: Any = None
    forward: Forward | None = None
    error: EngineError | None = None
    start_s: float = 0.0

    @property
    def num_texts(self) -> int:
        return sum(piece.last - piece.first for piece in self.pieces)

    @property
    def num_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.pieces)


class Batcher:
    """Answers requests; gives the weights back after `unload_after_s` idle seconds (0: never).

    `submit` and `stop` belong to the event loop, `status` to anybody.
    """

    def __init__(
        self,
        engine: EmbeddingEngine,
        lease: Lease,
        *,
        unload_after_s: float,
        max_queue_tokens: int,
        metrics: Metrics,
    ) -> None:
        self.engine = engine
        self._lease = lease
        self._unload_after_s = unload_after_s
        self._metrics = metrics
        self.queue = TextQueue(
            max_batch_tokens=engine.max_batch_tokens,
            max_batch_texts=engine.max_batch_texts,
            max_tokens=max_queue_tokens,
        )
        self._tokens_per_s: float | None = None
        self._retry_load_s = 0.0
        # A daemon: a forced end of the process must not wait for a forward.
        self._thread = threading.Thread(target=self._work, name="device", daemon=True)
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
        self._thread.start()

    def reservation(self, num_tokens: int) -> contextlib.AbstractContextManager[None]:
        """Room in the queue for a request of about so many tokens, while they are counted; Overloaded without it."""
        speed = self._tokens_per_s
        return self.queue.reservation(num_tokens, self.queue.num_tokens / speed if speed else 1.0)

    def submit(self, ids: NDArray[np.int32], offsets: NDArray[np.int64], *, normalize: bool) -> asyncio.Future[Answer]:
        """The vectors of at least one text, or an EngineError. What is done before its turn comes costs no forward."""
        reply: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        job = Job(ids, offsets, normalize, reply)
        self.queue.add(job)
        reply.add_done_callback(lambda _: self.queue.discard(job))
        return reply

    async def stop(self, timeout_s: float) -> None:
        """Answers what is queued and ends the thread, but waits no longer than this for a device that is stuck."""
        self.queue.close()
        await asyncio.to_thread(self._thread.join, timeout_s)
        if self._thread.is_alive():
            logger.error("the device is still busy after %g s, and left so", timeout_s)

    def _work(self) -> None:
        running: _Batch | None = None
        while running is not None or (running := self._next()) is not None:
            running = self._finish(running)

    def _next(self) -> _Batch | None:
        """The next forward, begun, once there are texts for it; None at the end."""
        while (pieces := self.queue.take(self._patience_s())) is not None:
            if pieces:
                return self._start(self._prepare(pieces))
            self._look_after_lease()
        return None

    def _finish(self, running: _Batch) -> _Batch | None:
        """Answers what a forward computes. The one after it, begun, if it was clear what that would be."""
        ahead = self.queue.take_ahead()
        following = self._prepare(ahead) if ahead else None  # while the device works
        outcome = self._wait(running)
        if following is not None:
            following = None if self.queue.reconsider(ahead) else self._start(following)
        answers = self._answers(running, outcome)
        failed = isinstance(outcome, EngineError)
        self._observe(
            busy=following is not None,
            requests=self.status.requests + (0 if failed else len(answers)),
            idle_since_s=time.monotonic(),
        )
        _deliver(answers)
        return following

    def _prepare(self, pieces: list[Piece]) -> _Batch:
        batch = _Batch(pieces)
        offsets = [job.offsets[first : last + 1] for job, first, last in pieces]
        ids = [job.ids[part[0] : part[-1]] for (job, _, _), part in zip(pieces, offsets, strict=True)]
        ends = list(accumulate(map(len, ids)))
        # Each piece's offsets, from where it begins among the ids of all.
        shifted = [part[1:] + (end - part[-1]) for part, end in zip(offsets, ends, strict=True)]
        try:
            batch.prepared = self.engine.prepare_ids(np.concatenate(ids), np.concatenate([_ZERO, *shifted]))
        except Exception as error:
            batch.error = embedding_failed(error)
        return batch

    def _start(self, batch: _Batch) -> _Batch:
        now_s = time.monotonic()
        for piece in batch.pieces:
            piece.job.taken_s = piece.job.taken_s or now_s
        if batch.error is not None:
            return batch
        try:
            if not self._lease.loaded:
                self._reload()
            self.status = replace(self.status, busy=True)
            batch.start_s = time.monotonic()
            batch.forward = self.engine.start_encode(batch.prepared, normalize=batch.pieces[0].job.normalize)
        except EngineError as error:
            batch.error = error
        except Exception as error:
            batch.error = self._failed(error)
        return batch

    def _wait(self, batch: _Batch) -> Outcome | EngineError:
        if batch.error is not None:
            return batch.error
        assert batch.forward is not None
        try:
            outcome = batch.forward.result()
        except Exception as error:
            return self._failed(error)
        seconds = time.monotonic() - batch.start_s
        self._metrics.forward(batch.num_tokens, batch.num_texts, seconds)
        speed = batch.num_tokens / max(seconds, 1e-6)
        before = self._tokens_per_s or speed
        self._tokens_per_s = before + _SPEED_WEIGHT * (speed - before)
        return outcome

    def _failed(self, error: Exception) -> EngineError:
        self._retry_load_s = time.monotonic() + _FIRST_RETRY_S
        return embedding_failed(error)

    def _answers(self, batch: _Batch, outcome: Outcome | EngineError) -> list[tuple[Job, Answer | EngineError]]:
        """Of the requests that have their last text by it, or have failed with it."""
        if isinstance(outcome, EngineError):
            for piece in batch.pieces:
                piece.job.failed = True
                self.queue.discard(piece.job)
            # An exception keeps the traceback of whoever raises it: each request gets its own.
            return [(piece.job, copy(outcome)) for piece in batch.pieces]
        now_s, row = time.monotonic(), 0
        vectors, failures = outcome
        answers: list[tuple[Job, Answer | EngineError]] = []
        for job, first, last in batch.pieces:
            rows = vectors[row : row + last - first]
            for index in range(row, row + len(rows)) if failures else ():
                if index in failures:
                    job.failures[first + index - row] = str(failures[index])
            row += len(rows)
            if len(rows) == job.num_texts:
                job.vectors = rows
            else:
                if job.vectors is None:
                    job.vectors = np.empty((job.num_texts, vectors.shape[1]), np.float32)
                job.vectors[first:last] = rows
            if last == job.num_texts and not job.failed:
                queue_s, forward_s = job.taken_s - job.arrival_s, now_s - job.taken_s
                answers.append((job, Answer(job.vectors, job.failures, queue_s, forward_s)))
        return answers

    def _patience_s(self) -> float | None:
        """How long to wait for texts before the lease is looked after."""
        if not self.engine.ok:
            return max(0.0, self._retry_load_s - time.monotonic())
        if self._unload_after_s == 0 or not self._lease.loaded:
            return None
        return max(0.0, self.status.idle_since_s + self._unload_after_s - time.monotonic())

    def _look_after_lease(self) -> None:
        if not self.engine.ok:
            if time.monotonic() >= self._retry_load_s:
                with contextlib.suppress(EngineError):
                    self._reload()
        elif self._lease.loaded and time.monotonic() >= self.status.idle_since_s + self._unload_after_s:
            self._unload()

    def _reload(self) -> None:
        start_s = time.monotonic()
        try:
            self._lease.reload()
        except Exception as error:
            # A device that is lost is taken again without a request that asks for it: nobody sends one to a server
            # that is not ready.
            self._retry_load_s = time.monotonic() + _RETRY_S
            logger.error("weights not loaded", exc_info=error)
            raise Unavailable(f"weights not loaded: {str(error) or type(error).__name__}") from error
        load_ms = round((time.monotonic() - start_s) * 1e3)
        self._observe(loads=self.status.loads + 1, last_load_ms=load_ms, idle_since_s=time.monotonic())
        logger.info("weights loaded: %d ms", load_ms)

    def _unload(self) -> None:
        idle_s = time.monotonic() - self.status.idle_since_s
        try:
            self._lease.unload()
        except Exception as error:
            logger.error("weights not unloaded", exc_info=error)
            # The next attempt is another idle time away.
            self._observe(idle_since_s=time.monotonic())
        else:
            self._observe(unloads=self.status.unloads + 1)
            logger.info("weights unloaded: idle for %.1f s", idle_s)

    def _observe(self, **changes: bool | int | float) -> None:
        engine = self.engine
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


def _deliver(answers: list[tuple[Job, Answer | EngineError]]) -> None:
    """Gives the event loop the answers, all at once."""
    if not answers:
        return

    def settle() -> None:
        for job, answer in answers:
            if job.reply.done():
                continue
            if isinstance(answer, EngineError):
                job.reply.set_exception(answer)
            else:
                job.reply.set_result(answer)

    # A forced end closes the loop under a running forward.
    with contextlib.suppress(RuntimeError):
        answers[0][0].reply.get_loop().call_soon_threadsafe(settle)
