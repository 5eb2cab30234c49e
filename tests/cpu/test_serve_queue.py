"""Which texts a forward takes: the budget, whose turn it is, and that none is lost or taken twice."""

import asyncio
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.errors import Overloaded, Unavailable
from serve.queue import Answer, Job, Piece, TextQueue

BUDGET, MOST_TEXTS = 1000, 16


@pytest.fixture(scope="module", autouse=True)
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def queue() -> TextQueue:
    return TextQueue(max_batch_tokens=BUDGET, max_batch_texts=MOST_TEXTS, max_tokens=100_000)


@pytest.fixture
def make(loop: asyncio.AbstractEventLoop) -> "Maker":
    return Maker(loop)


class Maker:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(self, *lengths: int, arrival_s: float = 0.0, normalize: bool = True) -> Job:
        offsets = np.cumsum([0, *lengths], dtype=np.int64)
        reply: asyncio.Future[Answer] = self._loop.create_future()
        return Job(np.zeros(offsets[-1], np.int32), offsets, normalize, reply, arrival_s)


def taken(queue: TextQueue) -> list[Piece]:
    pieces = queue.take(0)
    assert pieces is not None
    return pieces


def test_texts_of_many_requests_share_a_forward(queue: TextQueue, make: Maker) -> None:
    jobs = [make(10), make(20, 30), make(5)]
    for job in jobs:
        queue.add(job)
    assert (queue.num_texts, queue.num_tokens) == (4, 65)
    assert taken(queue) == [(jobs[2], 0, 1), (jobs[0], 0, 1), (jobs[1], 0, 2)]
    assert (queue.num_texts, queue.num_tokens) == (0, 0)
    assert taken(queue) == []


def test_a_large_request_is_taken_in_pieces(queue: TextQueue, make: Maker) -> None:
    by_tokens, by_texts = make(*[300] * 7), make(*[1] * 40, arrival_s=10)
    queue.add(by_tokens)
    queue.add(by_texts)
    # What is left of the budget goes to whoever fits into it.
    assert taken(queue) == [(by_tokens, 0, 3), (by_texts, 0, 13)]
    assert taken(queue) == [(by_tokens, 3, 6), (by_texts, 13, 26)]
    assert taken(queue) == [(by_tokens, 6, 7), (by_texts, 26, 40)]


def test_what_does_not_fit_lets_others_pass_and_keeps_its_turn(queue: TextQueue, make: Maker) -> None:
    first, large, small = make(600), make(500, arrival_s=0.1), make(400, arrival_s=0.7)
    for job in (first, large, small):
        queue.add(job)
    assert taken(queue) == [(first, 0, 1), (small, 0, 1)]
    assert taken(queue) == [(large, 0, 1)]


def test_a_text_beyond_the_budget_is_taken_alone(queue: TextQueue, make: Maker) -> None:
    jobs = make(BUDGET + 1), make(1, arrival_s=100)
    for job in jobs:
        queue.add(job)
    assert [taken(queue), taken(queue)] == [[(jobs[0], 0, 1)], [(jobs[1], 0, 1)]]


def test_short_requests_pass_long_ones_for_a_while(queue: TextQueue, make: Maker) -> None:
    document, query = make(900), make(16, arrival_s=1.9)
    late = make(900, arrival_s=1.9)
    for job in (document, late, query):
        queue.add(job)
    assert taken(queue) == [(query, 0, 1), (document, 0, 1)]
    # A document is passed for two seconds at most.
    queries = [make(100, arrival_s=3.9 + number) for number in range(20)]
    for job in queries:
        queue.add(job)
    assert taken(queue)[0] == (late, 0, 1)


def test_requests_that_are_computed_otherwise_wait_for_their_own_forward(queue: TextQueue, make: Maker) -> None:
    jobs = [make(10, arrival_s=number, normalize=number % 2 == 0) for number in range(5)]
    for job in jobs:
        queue.add(job)
    assert [piece.job for piece in taken(queue)] == jobs[::2]
    assert [piece.job for piece in taken(queue)] == jobs[1::2]


def test_departed_requests_leave_nothing(queue: TextQueue, make: Maker) -> None:
    departed, halfway, other = make(*[100] * 5), make(*[300] * 5), make(7, arrival_s=10)
    for job in (departed, halfway, other):
        queue.add(job)
    queue.discard(departed)
    queue.discard(departed)
    assert taken(queue) == [(halfway, 0, 3), (other, 0, 1)]
    queue.discard(halfway)
    assert (queue.num_texts, queue.num_tokens, taken(queue)) == (0, 0, [])


def test_what_was_taken_ahead_is_reconsidered(queue: TextQueue, make: Maker) -> None:
    documents = [make(*[500] * 2, arrival_s=number) for number in range(3)]
    queue.add(documents[0])
    assert queue.take_ahead() == [(documents[0], 0, 2)]
    queue.add(documents[1])
    ahead = queue.take_ahead()
    assert ahead == [(documents[1], 0, 2)]
    queue.add(documents[2])
    assert not queue.reconsider(ahead)
    query = make(16, arrival_s=1.5)
    queue.add(query)
    assert queue.reconsider(ahead)
    assert queue.num_tokens == 2016
    assert taken(queue) == [(query, 0, 1), (documents[1], 0, 1)]
    assert taken(queue) == [(documents[1], 1, 2), (documents[2], 0, 1)]


def test_a_caller_that_has_left_is_reconsidered(queue: TextQueue, make: Maker) -> None:
    leaving, staying = make(*[400] * 3), make(*[300] * 2, arrival_s=1)
    queue.add(leaving)
    queue.add(staying)
    ahead = queue.take_ahead()
    assert ahead == [(leaving, 0, 2)]
    leaving.reply.cancel()
    queue.discard(leaving)
    assert queue.reconsider(ahead)
    assert taken(queue) == [(staying, 0, 2)] and queue.num_tokens == 0


def test_nothing_is_taken_ahead_that_does_not_fill_a_forward(queue: TextQueue, make: Maker) -> None:
    queue.add(make(BUDGET - 1))
    assert queue.take_ahead() == []


def test_the_bound_is_of_tokens(queue: TextQueue, make: Maker) -> None:
    with queue.reservation(99_000, retry_after_s=3.2):
        queue.add(make(*[1000] * 50))  # more than there is room for, when there is room at all
        with pytest.raises(Overloaded, match=r"149000 tokens wait, 100000 may") as refused:
            with queue.reservation(1, retry_after_s=3.2):
                pass
        assert refused.value.headers == {"Retry-After": "4"}
    with queue.reservation(1, retry_after_s=0.1):
        pass


def test_the_end(queue: TextQueue, make: Maker) -> None:
    job = make(1)
    queue.add(job)
    queue.close()
    with pytest.raises(Unavailable):
        queue.add(make(1))
    with pytest.raises(Unavailable):
        with queue.reservation(1, 0):
            pass
    assert queue.take(None) == [(job, 0, 1)]
    assert queue.take(None) is None


def test_take_waits_for_texts(queue: TextQueue, make: Maker) -> None:
    job = make(1)
    threading.Timer(0.05, queue.add, [job]).start()
    assert queue.take(30) == [(job, 0, 1)]
    start_s = time.monotonic()
    assert queue.take(0.05) == []
    assert time.monotonic() - start_s >= 0.05


Steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"), st.lists(st.integers(1, 1200), min_size=1, max_size=30), st.floats(0, 5), st.booleans()
        ),
        st.tuples(st.just("discard"), st.integers(0, 30)),
        st.tuples(st.just("take")),
        st.tuples(st.just("ahead"), st.booleans()),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(steps=Steps)
def test_every_text_is_taken_once(loop: asyncio.AbstractEventLoop, steps: list[tuple[object, ...]]) -> None:
    queue = TextQueue(max_batch_tokens=BUDGET, max_batch_texts=MOST_TEXTS, max_tokens=1)
    make, jobs = Maker(loop), list[Job]()
    seen: dict[Job, list[int]] = {}

    def note(pieces: list[Piece]) -> None:
        assert sum(piece.last - piece.first for piece in pieces) <= MOST_TEXTS
        num_tokens = sum(piece.num_tokens for piece in pieces)
        assert num_tokens <= BUDGET or sum(piece.last - piece.first for piece in pieces) == 1
        assert len({piece.job.normalize for piece in pieces}) <= 1
        for job, first, last in pieces:
            seen[job] += range(first, last)

    for kind, *arguments in steps:
        match kind, arguments:
            case "add", [list(lengths), float(arrival_s), bool(normalize)]:
                jobs.append(make(*lengths, arrival_s=arrival_s, normalize=normalize))
                seen[jobs[-1]] = []
                queue.add(jobs[-1])
            case "discard", [int(index)] if index < len(jobs):
                jobs[index].reply.cancel()
                queue.discard(jobs[index])
            case "take", []:
                note(taken(queue))
            case "ahead", [bool(departs)]:
                ahead = queue.take_ahead()
                if ahead and departs:
                    ahead[0].job.reply.cancel()
                    queue.discard(ahead[0].job)
                if ahead and not queue.reconsider(ahead):
                    note(ahead)
    while pieces := taken(queue):
        note(pieces)
    assert (queue.num_tokens, queue.num_texts) == (0, 0)
    for job, texts in seen.items():
        expected = list(range(job.num_texts))
        assert texts == (expected if not job.reply.done() else expected[: len(texts)])
