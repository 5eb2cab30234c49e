"""What an engine asks of a device. `gkd.cpu` and `gkd.cuda` are the two that there are."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray

from gkd.call import Call
from gkd.dtype import DType
from gkd.ops import Operator

Result = TypeVar("Result")


class Backend(Protocol):
    """Tensors on one device, and operators that run on them.

    `call`, `start` and `begin` may come from any thread; every other method, inside a function that these run. A tensor
    is whatever the backend takes for one: an engine only passes it on.
    """

    @property
    def name(self) -> str:
        """`cuda` or `cpu`."""

    @property
    def device_name(self) -> str:
        """The device as its driver or operating system names it."""

    dtype: DType
    """The type of what is multiplied; it may be changed while nothing is loaded."""

    @property
    def arch(self) -> int:
        """The device's compute capability, as 90 for 9.0; 0 for the CPU."""

    @property
    def rows_budget(self) -> int:
        """Most tokens of one forward."""

    @property
    def keeps_mapping(self) -> bool:
        """A weights file stays mapped, since weights are used where they lie in it."""

    @property
    def faulted(self) -> bool:
        """The device has failed since it was acquired, and what it holds is lost."""

    @property
    def kernel_count(self) -> int:
        """Kernels loaded on the device now."""

    @property
    def graph_count(self) -> int:
        """What has been recorded and is kept now."""

    def call(self, function: Callable[[], Result]) -> Result:
        """Runs `function` on the device's thread, or when no other call runs, and gives or raises what it does."""

    def start(self, function: Callable[[], Result]) -> Call[Result]:
        """As `call`, without waiting for the end where that is the device's: its `result` waits."""

    def stop(self) -> None:
        """Gives the device back for good."""

    def begin(self) -> None:
        """Begins to take the device, and does not wait: what goes wrong is raised by `acquire`."""

    def acquire(self) -> None:
        """Takes the device; nothing is done where it is held."""

    def release(self) -> None:
        """Gives everything on the device back; nothing is done where nothing is held."""

    def prepare(self, ops: Iterable[Operator]) -> None:
        """Begins to get the operators' kernels ready."""

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Any:
        """An uninitialised tensor, held until `release`."""

    def weight(self, target: DType, shape: tuple[int, ...], parts: list[tuple[DType, NDArray[Any]]]) -> Any:
        """A tensor of host arrays, each with the type it is stored in, put one after another along axis 0."""

    def finish_loading(self) -> None:
        """Waits until the weights have arrived and the prepared kernels are loaded; only then may the arrays go."""

    def view(self, tensor: Any, shape: tuple[int, ...], start: int = 0) -> Any:
        """A tensor of another shape at an element of a flat one's memory."""

    def upload(self, tensor: Any, array: NDArray[Any]) -> Any:
        """The array on the device, at the head of `tensor`."""

    def download(self, out: NDArray[Any], tensor: Any) -> None:
        """Waits for everything queued and copies a tensor into a contiguous array."""

    def record(self, queue: Callable[[], None]) -> Any:
        """What `queue` runs, for `replay`; None where that is no gain. It is kept until `release`."""

    def replay(self, recorded: Any) -> None:
        """Queues what was recorded once more, on the same tensors."""

    def run(self, op: Operator, *tensors: Any) -> None:
        """Checks the tensors against the operator's contract, then computes or queues it."""
