"""What waits for the device: the texts of many requests, taken by token budget, the urgent ones first."""

import asyncio
import heapq
import itertools
import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from serve.errors import Overloaded, Unavailable

# How long a request lets later ones pass: in proportion to its tokens, since who asks for much waits for it anyway, and
# at most so long that it is never forgotten. A query of 16 tokens passes what came up to two seconds before it.
_PATIENCE_S_PER_TOKEN = 4e-3
_MAX_PATIENCE_S = 2.0
# Requests that are looked at, beyond those taken, for texts that still fit into a forward.
_LOOK_AHEAD = 64


class Answer(NamedTuple):
    """What came of a request's texts."""

    vectors: NDArray[np.float32]
    """(num_texts, dim)"""
    failures: Mapping[int, str]
    """Of texts that have no vector, why not."""
    queue_s: float
    """Until the first of its texts was taken."""
    forward_s: float
    """From then on."""


@dataclass(eq=False, slots=True)
class Job:
    """The texts of one request, and what has come of them so far."""

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    normalize: bool
    reply: asyncio.Future[Answer]
    arrival_s: float = field(default_factory=time.monotonic)
    # Of the queue, under its lock.
    sequence: int = 0
    next_text: int = 0
    """The first that has not been taken."""
    # Of the device thread.
    taken_s: float = 0.0
    """When the first text was taken."""
    vectors: NDArray[np.float32] | None = None
    failures: dict[int, str] = field(default_factory=dict)
    failed: bool = False
    """One of its forwards has, and with it the request."""

    @property
    def num_texts(self) -> int:
        return len(self.offsets) - 1

    @property
    def due_s(self) -> float:
        """When it is done, if a request's size were all that it waits for: the order in which requests are taken."""
        return self.arrival_s + min(int(self.offsets[-1]) * _PATIENCE_S_PER_TOKEN, _MAX_PATIENCE_S)

    def num_tokens(self, first: int, last: int) -> int:
        """Of texts [first, last)."""
        return int(self.offsets[last] - self.offsets[first])

    def last_fitting(self, max_tokens: int, max_texts: int) -> int:
        """Where the next texts end of which so much fits."""
        first = self.next_text
        if self.num_tokens(first, self.num_texts) <= max_tokens and self.num_texts - first <= max_texts:
            return self.num_texts
        fitting = int(np.searchsorted(self.offsets, self.offsets[first] + max_tokens, side="right")) - 1
        return min(fitting, first + max_texts)


class Piece(NamedTuple):
    """Texts [first, last) of a job, taken for one forward."""

    job: Job
    first: int
    last: int

    @property
    def num_tokens(self) -> int:
        return self.job.num_tokens(self.first, self.last)


class TextQueue:
    """Jobs in the order of `due_s`, bounded by their tokens.

    The event loop reserves, adds and discards; the device thread takes.
    """

    def __init__(self, *, max_batch_tokens: int, max_batch_texts: int, max_tokens: int) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._max_batch_texts = max_batch_texts
        self._max_tokens = max_tokens
        self._changed = threading.Condition()
        self._jobs: list[tuple[float, int, Job]] = []  # a heap; of one due time, the first that came
        self._sequence = itertools.count()
        self._num_tokens = 0
        self._num_texts = 0
        self._reserved_tokens = 0
        self._most_urgent_added_s = math.inf
        self._closed = False

    @property
    def num_tokens(self) -> int:
        """Of the texts that wait."""
        return self._num_tokens

    @property
    def num_texts(self) -> int:
        """Texts that wait."""
        return self._num_texts

    @contextmanager
    def reservation(self, num_tokens: int, retry_after_s: float) -> Iterator[None]:
        """Room for a request that is yet to be counted, of about so many tokens.

        Raises Overloaded where the queue has reached its bound. Below it a request is taken whatever its size, so that
        a large one does not wait for a moment when nobody else does.
        """
        with self._changed:
            if self._closed:
                raise Unavailable("the server is stopping")
            waiting = self._num_tokens + self._reserved_tokens
            if waiting >= self._max_tokens:
                raise Overloaded(
                    f"overloaded: {waiting} tokens wait, {self._max_tokens} may; try again later", retry_after_s
                )
            self._reserved_tokens += num_tokens
        try:
            yield
        finally:
            with self._changed:
                self._reserved_tokens -= num_tokens

    def add(self, job: Job) -> None:
        """Queues it; Unavailable once the queue is closed."""
        with self._changed:
            if self._closed:
                raise Unavailable("the server is stopping")
            job.sequence = next(self._sequence)
            self._push(job)
            self._most_urgent_added_s = min(self._most_urgent_added_s, job.due_s)
            self._count(job, 0, job.num_texts)
            self._changed.notify()

    def discard(self, job: Job) -> None:
        """Forgets the texts of a job that have not been taken."""
        with self._changed:
            if job.next_text < job.num_texts:
                self._count(job, job.next_text, job.num_texts, -1)
                job.next_text = job.num_texts
                self._jobs = [entry for entry in self._jobs if entry[2] is not job]
                heapq.heapify(self._jobs)

    def close(self) -> None:
        """Takes no more jobs; those that wait are taken still."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self, timeout_s: float | None) -> list[Piece] | None:
        """Waits for texts and takes those of one forward; none after `timeout_s`, and None once the queue has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_texts or self._closed, timeout_s)
            if self._closed and not self._num_texts:
                return None
            return self._pack()

    def take_ahead(self) -> list[Piece]:
        """Texts of the forward after the one that runs, if what waits fills it: nothing is lost by deciding now."""
        with self._changed:
            if self._num_tokens < self._max_batch_tokens:
                return []
            return self._pack()

    def reconsider(self, pieces: list[Piece]) -> bool:
        """Takes pieces back that were taken ahead, if others should go first by now, or somebody no longer waits."""
        with self._changed:
            overtaken = self._most_urgent_added_s < max(piece.job.due_s for piece in pieces)
            if not overtaken and not any(piece.job.reply.done() for piece in pieces):
                return False
            for job, first, last in pieces:
                if job.next_text != last or job.reply.done():
                    continue  # discarded
                if last == job.num_texts:
                    self._push(job)
                job.next_text = first
                self._count(job, first, last)
            return True

    def _pack(self) -> list[Piece]:
        """What is due first, and then what still fits and is computed alike."""
        pieces: list[Piece] = []
        passed: list[Job] = []
        room_tokens, room_texts = self._max_batch_tokens, self._max_batch_texts
        while self._jobs and room_tokens > 0 and room_texts > 0 and len(passed) < _LOOK_AHEAD:
            _, _, job = heapq.heappop(self._jobs)
            first, last = job.next_text, job.next_text
            if not pieces or job.normalize is pieces[0].job.normalize:
                last = job.last_fitting(room_tokens, room_texts)
                if not pieces and last == first:
                    last += 1  # alone, a text of more than the budget is for the engine to refuse
            if last > first:
                piece = Piece(job, first, last)
                pieces.append(piece)
                job.next_text = last
                room_tokens -= piece.num_tokens
                room_texts -= last - first
                self._count(job, first, last, -1)
            if last < job.num_texts:
                passed.append(job)
        for job in passed:
            self._push(job)
        self._most_urgent_added_s = math.inf
        return pieces

    def _push(self, job: Job) -> None:
        heapq.heappush(self._jobs, (job.due_s, job.sequence, job))

    def _count(self, job: Job, first: int, last: int, sign: int = 1) -> None:
        self._num_texts += sign * (last - first)
        self._num_tokens += sign * job.num_tokens(first, last)
