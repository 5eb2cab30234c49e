"""Threads with as much stack as the main thread has: NVRTC recurses as deep as its input nests."""

import threading
from collections.abc import Callable

_STACK_BYTES = 8 << 20
# One for the process, as the size is: of two starts at once, each would restore the other's.
_size_lock = threading.Lock()


def start_deep_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """A started daemon thread that may compile."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    with _size_lock:
        usual_bytes = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual_bytes)
    return thread
