"""The CUDA backend: tensors on one device, operators run by their kernels.

Everything that lives in the device's context (stream, arena, kernels) is one object, taken to load a model and closed
to give the device back; every call on it comes on the device thread.
"""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from numpy.typing import NDArray

from gkd.arch import arch_name
from gkd.build import build_all
from gkd.cache import CubinCache
from gkd.call import Call
from gkd.compiler import Cubin
from gkd.device import Device, DeviceThread
from gkd.driver import check, cu
from gkd.dtype import DType
from gkd.env import read_env
from gkd.errors import DriverError, OutOfMemory
from gkd.graph import Graph
from gkd.kernel import KernelPlan, KernelSpec
from gkd.memory import Arena, Staging
from gkd.module import Kernel
from gkd.ops import Operator
from gkd.stream import Stream
from gkd.tensor import Tensor

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Of split weights. They may be up to 63 then; all digits are kept of those above 2^-13, and the error below is 2^-35.
WEIGHT_SCALE = 2.0**10


class CudaBackend:
    """Runs operators on one device, in one precision."""

    name = "cuda"
    # Tokens of one forward: enough to fill any card, and the workspace stays below a gigabyte.
    rows_budget = 16384
    # Weights are copied to the device, so the file's pages need not stay.
    keeps_mapping = False

    def __init__(self, device: Device, dtype: DType) -> None:
        self.device = device
        self.device_name = device.name
        self.arch = device.capability
        self.dtype = dtype
        self.faulted = False
        self._thread = DeviceThread(f"cuda:{device.ordinal}")
        self._held: _Held | None = None

    @property
    def kernel_count(self) -> int:
        """Kernels loaded on the device now."""
        held = self._held
        return len(held.kernels) if held is not None else 0

    @property
    def graph_count(self) -> int:
        """Graphs on the device now."""
        held = self._held
        return len(held.graphs) if held is not None else 0

    @property
    def memory_bytes(self) -> int:
        """Device memory held for weights and workspace."""
        held = self._held
        return held.arena.num_bytes if held is not None else 0

    def call(self, function: Callable[[], Result]) -> Result:
        """Runs `function` on the device thread, after what was asked before.

        A DriverError other than OutOfMemory is a fault: the context is lost, and given back at once.
        """
        return self.start(function).result()

    def start(self, function: Callable[[], Result]) -> Call[Result]:
        """As `call`, without waiting for the end."""

        def watched() -> Result:
            try:
                return function()
            except OutOfMemory:
                raise
            except DriverError:
                self.faulted = True
                self.release()
                raise

        return self._thread.start(watched)

    def begin(self) -> None:
        """Begins to take the device's context, which takes a tenth of a second; `acquire` raises what goes wrong."""
        self._thread.start(self.acquire)

    def stop(self) -> None:
        """Gives the device back and ends the thread."""
        self.call(self.release)
        self._thread.stop()

    # From here on: only on the device thread.

    def acquire(self) -> None:
        """Takes the device's context; nothing is done where it is held."""
        if self._held is None:
            self._held = _Held(self.device)
        self.faulted = False

    def release(self) -> None:
        """Gives memory, kernels and context back; nothing is done where nothing is held."""
        held, self._held = self._held, None
        if held is not None:
            held.close(faulted=self.faulted)

    def prepare(self, ops: Iterable[Operator]) -> None:
        """Begins to compile the operators' kernels on other threads, or to fetch them from the cache."""
        self._open.prepare(ops, self.dtype)

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """An uninitialised tensor that lives until `release`; raises OutOfMemory."""
        return self._open.arena.tensor(shape, dtype)

    def weight(self, target: DType, shape: tuple[int, ...], parts: list[tuple[DType, NDArray[Any]]]) -> Tensor:
        """A tensor of host arrays, each with the type it is stored in, put one after another along axis 0."""
        held = self._open
        tensor = self.empty(shape, target)
        if target is DType.SPLIT:
            tensor = tensor.scaled(WEIGHT_SCALE)
        rows = shape[0] // len(parts)
        for index, (stored, array) in enumerate(parts):
            part = tensor.rows(index * rows, (index + 1) * rows)
            if stored is target:
                held.staging.upload(part.pointer, array)
            else:
                held.staging.upload_cast(part, stored, array, self.run)
        return tensor

    def finish_loading(self) -> None:
        """Waits for the copies of weights and for the prepared kernels, and gives the staging memory back."""
        self._open.finish_loading()

    def view(self, tensor: Tensor, shape: tuple[int, ...], start: int = 0) -> Tensor:
        """A tensor of another shape at an element of a flat one's memory."""
        return tensor.view(shape, start)

    def upload(self, tensor: Tensor, array: NDArray[Any]) -> Tensor:
        """Queues a copy of an array to the head of `tensor`; the array may be changed once this returns."""
        target = tensor.view(array.shape)
        stream = self._open.stream
        check("cuMemcpyHtoD", cu.cuMemcpyHtoDAsync(target.pointer, array.ctypes.data, array.nbytes, stream.handle))
        return target

    def download(self, out: NDArray[Any], tensor: Tensor) -> None:
        """Waits for everything queued and copies a tensor into a contiguous array."""
        stream = self._open.stream
        check("cuMemcpyDtoH", cu.cuMemcpyDtoHAsync(out.ctypes.data, tensor.pointer, out.nbytes, stream.handle))
        stream.synchronize()

    def record(self, queue: Callable[[], None]) -> Graph:
        """What `queue` runs, as one graph of launches, whose kernels have been loaded."""
        return self._open.record(queue)

    def replay(self, recorded: Graph) -> None:
        """Queues a graph."""
        recorded.replay(self._open.stream)

    def run(self, op: Operator, *tensors: Any) -> None:
        """Checks the tensors against the operator's contract, then queues its kernel."""
        op.check(*tensors)
        self._open.run(op, self.dtype, tensors)

    @property
    def _open(self) -> "_Held":
        assert self._held is not None, "the device has not been acquired"
        return self._held


class _Held:
    """Everything that dies with the device's context."""

    def __init__(self, device: Device) -> None:
        environment = read_env()  # before anything is held: a bad value raises
        self._handle = check("cuDeviceGet", cu.cuDeviceGet(device.ordinal))
        self._device = device
        context = check("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(self._handle))
        try:
            check("cuCtxSetCurrent", cu.cuCtxSetCurrent(context))
            self.stream = Stream()
        except DriverError:
            check("cuDevicePrimaryCtxRelease", cu.cuDevicePrimaryCtxRelease(self._handle))
            raise
        self._synchronous = environment.sync
        self._recording = False  # a stream that is recorded cannot be waited for
        self._cache = CubinCache(environment.cache_dir, complete=environment.assert_cached)
        self._builds = ThreadPoolExecutor(1, thread_name_prefix="gkd-build")
        self._building: Future[list[Cubin]] | None = None
        self._prepared: list[KernelSpec] = []
        self._plans: dict[tuple[Operator, DType], KernelPlan] = {}
        self.graphs: list[Graph] = []
        self.kernels: dict[KernelSpec, Kernel] = {}
        self.arena = Arena()
        self.staging = Staging(self.stream)

    def prepare(self, ops: Iterable[Operator], dtype: DType) -> None:
        """Begins to build kernels, which `finish_loading` waits for."""
        self._prepared = list(dict.fromkeys(spec for op in ops for spec in self._plan(op, dtype).specs))
        self._building = self._builds.submit(self._build, self._prepared)

    def run(self, op: Operator, dtype: DType, tensors: tuple[Any, ...]) -> None:
        launch = self._plan(op, dtype).launch(*tensors)
        kernel = self.kernels.get(launch.spec)
        if kernel is None:
            [cubin] = self._build([launch.spec])
            kernel = self.kernels[launch.spec] = Kernel(launch.spec, cubin, self._device)
        # What is recorded is short: there the next launch's start counts. Long launches are slower for it.
        kernel.launch(self.stream, launch, overlap=self._recording)
        if self._synchronous and not self._recording:
            try:
                self.stream.synchronize()
            except DriverError as error:
                raise type(error)(f"{error}; kernel {kernel.describe(launch)}") from None

    def record(self, queue: Callable[[], None]) -> Graph:
        self._recording = True
        try:
            graph = Graph(self.stream, queue)
        finally:
            self._recording = False
        self.graphs.append(graph)
        return graph

    def finish_loading(self) -> None:
        if self._building is not None:
            cubins, self._building = self._building.result(), None
            self.kernels |= {
                spec: Kernel(spec, cubin, self._device) for spec, cubin in zip(self._prepared, cubins, strict=True)
            }
        self.stream.synchronize()
        self.staging.close()

    def _build(self, specs: list[KernelSpec]) -> list[Cubin]:
        return build_all([(spec, arch_name(self._device.capability)) for spec in specs], self._cache)

    def close(self, *, faulted: bool) -> None:
        """Gives everything back, handles first and the context last. After a fault the context takes all with it."""
        self._builds.shutdown()
        steps = [
            self.stream.synchronize,
            self.staging.close,
            *(graph.close for graph in self.graphs),
            *(kernel.close for kernel in self.kernels.values()),
            self.arena.close,
            self.stream.close,
        ]
        for step in steps:
            try:
                step()
            except DriverError as error:
                if not faulted:
                    logger.error("giving the device back: %s", error)
        check("cuCtxSetCurrent", cu.cuCtxSetCurrent(None))
        check("cuDevicePrimaryCtxRelease", cu.cuDevicePrimaryCtxRelease(self._handle))

    def _plan(self, op: Operator, dtype: DType) -> KernelPlan:
        plan = self._plans.get((op, dtype))
        if plan is None:
            plan = self._plans[op, dtype] = op.plan(dtype, self._device.capability)
        return plan
