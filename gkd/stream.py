"""Work that the device does in order. Device thread only."""

from gkd.driver import check, cu


class Stream:
    """A queue of copies and launches."""

    def __init__(self) -> None:
        # Non-blocking: it takes no part in the legacy default stream's implicit order.
        self.handle = check("cuStreamCreate", cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def synchronize(self) -> None:
        """Waits until all that was queued is done; raises what went wrong in it."""
        check("cuStreamSynchronize", cu.cuStreamSynchronize(self.handle))

    def close(self) -> None:
        """Destroys the queue."""
        check("cuStreamDestroy", cu.cuStreamDestroy(self.handle))


class Event:
    """A point in a stream that the host can wait for."""

    def __init__(self) -> None:
        self.handle = check("cuEventCreate", cu.cuEventCreate(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def record(self, stream: Stream) -> None:
        """Marks what has been queued so far."""
        check("cuEventRecord", cu.cuEventRecord(self.handle, stream.handle))

    def wait(self) -> None:
        """Waits until what was marked is done; at once where nothing was."""
        check("cuEventSynchronize", cu.cuEventSynchronize(self.handle))

    def close(self) -> None:
        """Destroys the event."""
        check("cuEventDestroy", cu.cuEventDestroy(self.handle))
