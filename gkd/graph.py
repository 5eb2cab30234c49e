"""A sequence of launches and copies, captured once and replayed with one call. Device thread only.

A launch costs the host about 5 us; a forward of a few tokens is shorter than its launches. Sizes that vary are read
from device memory by the kernels, since a graph's arguments are fixed. Kernels have to be loaded before the capture.
"""

from collections.abc import Callable

from gkd.driver import check, cu
from gkd.stream import Stream


class Graph:
    """What `record` queued on the stream, to be queued again as a whole."""

    def __init__(self, stream: Stream, record: Callable[[], None]) -> None:
        # Thread-local: another thread's allocation or wait does not spoil the capture.
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check("cuStreamBeginCapture", cu.cuStreamBeginCapture(stream.handle, mode))
        try:
            record()
        finally:
            # Ends the capture also when `record` has failed: a stream that is left capturing takes no other work.
            graph = check("cuStreamEndCapture", cu.cuStreamEndCapture(stream.handle))
        try:
            self._handle = check("cuGraphInstantiate", cu.cuGraphInstantiate(graph, 0))
        finally:
            check("cuGraphDestroy", cu.cuGraphDestroy(graph))

    def replay(self, stream: Stream) -> None:
        """Queues all of it once more."""
        check("cuGraphLaunch", cu.cuGraphLaunch(self._handle, stream.handle))

    def close(self) -> None:
        """Destroys it."""
        check("cuGraphExecDestroy", cu.cuGraphExecDestroy(self._handle))
