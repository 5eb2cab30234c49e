"""A compiled kernel on the device, and its launch. Device thread only."""

import ctypes
from functools import cache, lru_cache
from typing import Any

from gkd.compiler import Cubin
from gkd.device import Device
from gkd.driver import check, cu
from gkd.dtype import DType
from gkd.errors import DriverError
from gkd.kernel import KernelSpec, Launch, TensorMap
from gkd.stream import Stream
from gkd.tensor import Tensor

_FIRST_OVERLAPPING = 90
# What a block may have without asking.
_DEFAULT_SMEM_BYTES = 48 << 10


class Kernel:
    """A loaded kernel. It dies with the context that it was loaded into."""

    def __init__(self, spec: KernelSpec, cubin: Cubin, device: Device) -> None:
        self._spec = spec
        self._num_sms = device.num_multiprocessors
        self._overlaps = device.capability >= _FIRST_OVERLAPPING
        self._module = check("cuModuleLoadData", cu.cuModuleLoadData(cubin.code))
        self._function = check("cuModuleGetFunction", cu.cuModuleGetFunction(self._module, spec.name.encode()))
        self._smem_bytes = _DEFAULT_SMEM_BYTES

    def launch(self, stream: Stream, launch: Launch, *, overlap: bool) -> None:
        """Queues one launch; the DriverError names kernel and geometry. A fault inside shows at a later wait.

        With `overlap`, which compute capabilities from 9.0 on know, it may start while the launch before it ends: every
        kernel waits itself for what it needs (`grid_wait` in kernels/include/ptx.cuh).
        """
        if launch.smem_bytes > self._smem_bytes:
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check("cuFuncSetAttribute", cu.cuFuncSetAttribute(self._function, attribute, launch.smem_bytes))
            self._smem_bytes = launch.smem_bytes
        grid_x, grid_y, grid_z = launch.grid
        if launch.persistent:
            grid_x = min(grid_x, self._num_sms)
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid_x, grid_y, grid_z
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.num_threads, 1, 1
        config.sharedMemBytes = launch.smem_bytes
        config.hStream = stream.handle
        if overlap and self._overlaps:
            config.attrs, config.numAttrs = [_overlap()], 1
        values, types = zip(*map(_argument, launch.arguments), strict=True)
        try:
            check("cuLaunchKernelEx", cu.cuLaunchKernelEx(config, self._function, (values, types), 0))
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


@cache
def _overlap() -> Any:
    attribute = cu.CUlaunchAttribute()
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def _argument(value: Any) -> tuple[Any, Any]:
    if isinstance(value, Tensor):
        return value.pointer, ctypes.c_void_p
    if isinstance(value, TensorMap):
        return _encode_tensor_map(value), None
    if isinstance(value, float):
        return value, ctypes.c_float
    return value, ctypes.c_int


# Some times as many as a forward has weights and states. A map is a function of its numbers alone: it is never out of
# date, whatever has come to lie at the address.
@lru_cache(maxsize=4096)
def _encode_tensor_map(value: TensorMap) -> Any:
    kinds = cu.CUtensorMapDataType
    kind, element_bytes = {
        DType.F32: (kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4),
        DType.F16: (kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2),
        DType.BF16: (kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2),
        DType.TF32: (kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4),
        DType.SPLIT: (kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2),
    }[value.tensor.dtype]
    num_rows, num_columns = value.tensor.shape
    row_bytes = num_columns * value.tensor.dtype.itemsize
    width, box_planes = value.planes(row_bytes // element_bytes, element_bytes)
    # What `tma_load_2d` takes has two dimensions, what `tma_load_3d` takes the planes for a third.
    num_dimensions = 2 if box_planes == 1 and not value.slices else 3
    sizes = (width, num_rows, row_bytes // (width * element_bytes))
    strides_bytes = (row_bytes, width * element_bytes)
    box = (128 // element_bytes, value.box_rows, box_planes)
    return check(
        "cuTensorMapEncodeTiled",
        cu.cuTensorMapEncodeTiled(
            kind,
            num_dimensions,
            value.tensor.pointer,
            [cu.cuuint64_t(size) for size in sizes[:num_dimensions]],
            [cu.cuuint64_t(stride) for stride in strides_bytes[: num_dimensions - 1]],
            [cu.cuuint32_t(size) for size in box[:num_dimensions]],
            [cu.cuuint32_t(1)] * num_dimensions,
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
    )
