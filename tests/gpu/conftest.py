"""Tests that need a CUDA device. Without one they are skipped; with GKD_REQUIRE_GPU=1 they fail instead.

Operator tests import no torch: under a sanitizer its kernels would be instrumented, too.
"""

import os
from collections.abc import Iterator

import pytest

from gkd import driver
from gkd.cuda import CudaBackend
from gkd.device import Device, choose_device
from gkd.dtype import DType


@pytest.fixture(scope="session")
def device() -> Device:
    """The best device there is."""
    reason = driver.unavailable()
    if reason is not None:
        if os.environ.get("GKD_REQUIRE_GPU") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return choose_device(-1)


@pytest.fixture(scope="module", params=[DType.F32, DType.SPLIT, DType.F16, DType.BF16], ids=lambda dtype: dtype.value)
def backend(request: pytest.FixtureRequest, device: Device) -> Iterator[CudaBackend]:
    """A backend of each precision, with the device taken."""
    if request.param is DType.SPLIT and device.capability != 90:
        pytest.skip("split operands are for sm_90")
    backend = CudaBackend(device, request.param)
    backend.call(backend.acquire)
    yield backend
    backend.stop()
