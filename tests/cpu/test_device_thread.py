"""The thread that calls CUDA, without CUDA: order, errors, and what it keeps."""

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from gkd.device import DeviceThread


@pytest.fixture
def thread() -> Iterator[DeviceThread]:
    thread = DeviceThread("test")
    yield thread
    thread.stop()


def test_calls_run_on_one_thread_in_order(thread: DeviceThread) -> None:
    seen: list[int] = []

    def note(number: int) -> int:
        seen.append(number)
        return threading.get_ident()

    with ThreadPoolExecutor(8) as pool:
        threads = set(pool.map(lambda number: thread.call(partial(note, number)), range(200)))
    assert len(threads) == 1 and threads != {threading.get_ident()}
    assert sorted(seen) == list(range(200))
    for number in range(5):
        thread.start(partial(note, number))
    assert thread.call(lambda: seen[-5:]) == [0, 1, 2, 3, 4]


def test_a_call_from_the_thread_itself_runs_at_once(thread: DeviceThread) -> None:
    assert thread.call(lambda: thread.call(lambda: 7)) == 7


def test_an_error_reaches_its_caller_and_nobody_else(thread: DeviceThread) -> None:
    def fail() -> None:
        raise ValueError("the reason")

    thread.start(fail)
    with pytest.raises(ValueError, match="the reason") as caught:
        thread.call(fail)
    # It says where in the function it was raised.
    assert caught.traceback[-1].name == "fail"
    assert thread.call(lambda: 1) == 1


def test_nothing_of_a_call_is_kept(thread: DeviceThread) -> None:
    class Large:
        pass

    result = thread.call(Large)
    alive = weakref.ref(result)
    del result
    thread.call(lambda: None)
    assert alive() is None


def test_what_was_asked_before_the_stop_is_done() -> None:
    thread, done = DeviceThread("test"), threading.Event()
    thread.start(done.set)
    thread.stop()
    assert done.is_set()
