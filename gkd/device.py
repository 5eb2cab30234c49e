"""CUDA devices: which there are, which one is used, and the one thread that talks to it."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from gkd import driver
from gkd.arch import arch_name
from gkd.call import Call
from gkd.deep_thread import start_deep_thread
from gkd.driver import check, cu
from gkd.env import read_env
from gkd.errors import DeviceError

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Device:
    """A CUDA device as the driver describes it."""

    ordinal: int
    """In CUDA's order: fastest first, unless CUDA_DEVICE_ORDER says otherwise; nvidia-smi's order is another."""
    name: str
    capability: int
    """Compute capability, as 90 for 9.0."""
    memory_bytes: int
    num_multiprocessors: int


def devices() -> list[Device]:
    """All devices, in CUDA's order; none where CUDA cannot be used."""
    if driver.unavailable():
        return []
    return [_describe(ordinal) for ordinal in range(check("cuDeviceGetCount", cu.cuDeviceGetCount()))]


def choose_device(gpu: int) -> Device:
    """The device of this ordinal; for -1 GKD_GPU_DEVICE's, else the one of the highest capability, then most memory.

    Raises DeviceError, never taking another device than the one that was named.
    """
    reason = driver.unavailable()
    if reason:
        raise DeviceError(reason)
    found = devices()
    named = gpu if gpu != -1 else read_env().gpu_device
    if named is None:
        device = max(found, key=lambda device: (device.capability, device.memory_bytes, -device.ordinal))
    elif 0 <= named < len(found):
        device = found[named]
    else:
        raise DeviceError(f"gpu {named}: no such CUDA device; there are {len(found)}, counted from 0 in CUDA's order")
    arch_name(device.capability)  # refuses one that is too old to compile for
    return device


def _describe(ordinal: int) -> Device:
    handle = check("cuDeviceGet", cu.cuDeviceGet(ordinal))

    def attribute(name: str) -> int:
        key = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check("cuDeviceGetAttribute", cu.cuDeviceGetAttribute(key, handle)))

    return Device(
        ordinal=ordinal,
        name=check("cuDeviceGetName", cu.cuDeviceGetName(128, handle)).split(b"\0")[0].decode(),
        capability=10 * attribute("COMPUTE_CAPABILITY_MAJOR") + attribute("COMPUTE_CAPABILITY_MINOR"),
        memory_bytes=int(check("cuDeviceTotalMem", cu.cuDeviceTotalMem(handle))),
        num_multiprocessors=attribute("MULTIPROCESSOR_COUNT"),
    )


class DeviceThread:
    """The one thread on which an engine calls CUDA: a context is current to a thread, and handles die with it."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Call[Any] | None] = queue.SimpleQueue()
        self._thread = start_deep_thread(self._work, name)

    def call(self, function: Callable[[], Result]) -> Result:
        """Runs `function` on the thread, after what was asked before, and gives or raises what it does."""
        return self.start(function).result()

    def start(self, function: Callable[[], Result]) -> Call[Result]:
        """Asks for the same, and does not wait; from the thread itself it is run at once."""
        call = Call(function)
        if threading.current_thread() is self._thread:
            call.run()
        else:
            self._calls.put(call)
        return call

    def stop(self) -> None:
        """Ends the thread after what was asked before."""
        self._calls.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            # Neither the call nor its result may live on here until the next one.
            del call
