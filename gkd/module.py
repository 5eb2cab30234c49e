"""A compiled kernel on the device, and its launch. Device thread only."""

import ctypes
from typing import Any

from gkd.compiler import Cubin
from gkd.driver import check, cu
from gkd.errors import DriverError
from gkd.kernel import KernelSpec, Launch
from gkd.stream import Stream
from gkd.tensor import Tensor

# What a block may have without asking.
_DEFAULT_SMEM_BYTES = 48 << 10


class Kernel:
    """A loaded kernel. It dies with the context that it was loaded into."""

    def __init__(self, spec: KernelSpec, cubin: Cubin) -> None:
        self._spec = spec
        self._module = check("cuModuleLoadData", cu.cuModuleLoadData(cubin.code))
        self._function = check("cuModuleGetFunction", cu.cuModuleGetFunction(self._module, spec.name.encode()))
        self._smem_bytes = _DEFAULT_SMEM_BYTES

    def launch(self, stream: Stream, launch: Launch) -> None:
        """Queues one launch; the DriverError names kernel and geometry. A fault inside shows at a later wait."""
        if launch.smem_bytes > self._smem_bytes:
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check("cuFuncSetAttribute", cu.cuFuncSetAttribute(self._function, attribute, launch.smem_bytes))
            self._smem_bytes = launch.smem_bytes
        values, types = zip(*map(_argument, launch.arguments), strict=True)
        try:
            check(
                "cuLaunchKernel",
                cu.cuLaunchKernel(
                    self._function,
                    *launch.grid,
                    *(launch.num_threads, 1, 1),
                    launch.smem_bytes,
                    stream.handle,
                    (values, types),
                    0,
                ),
            )
        except DriverError as error:
            raise type(error)(f"{error}; kernel {self.describe(launch)}") from None

    def describe(self, launch: Launch) -> str:
        """The kernel, its constants and a launch's geometry."""
        defines = " ".join(f"{name}={value}" for name, value in self._spec.defines)
        return (
            f"{self._spec.name} [{defines}], grid {launch.grid}, {launch.num_threads} threads, "
            f"{launch.smem_bytes} bytes of shared memory"
        )

    def close(self) -> None:
        """Unloads it."""
        check("cuModuleUnload", cu.cuModuleUnload(self._module))


def _argument(value: Any) -> tuple[Any, Any]:
    if isinstance(value, Tensor):
        return value.pointer, ctypes.c_void_p
    if isinstance(value, float):
        return value, ctypes.c_float
    return value, ctypes.c_int
