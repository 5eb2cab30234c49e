"""The device layer: choice, errors, memory, staging, graphs."""

from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from gkd.cuda import CudaBackend
from gkd.device import Device, choose_device, devices
from gkd.driver import check, cu
from gkd.dtype import DType
from gkd.errors import DeviceError, DriverError, OutOfMemory
from gkd.graph import Graph
from gkd.memory import CHUNK_BYTES, PIECE_BYTES, Arena, Staging
from gkd.ops import GatherRows, L2Normalize
from gkd.stream import Stream


def test_an_ordinal_that_is_no_device_is_refused(device: Device) -> None:
    for ordinal in (len(devices()), 99, -2):
        with pytest.raises(DeviceError, match=f"gpu {ordinal}: no such CUDA device"):
            choose_device(ordinal)


def test_the_environment_chooses_where_the_caller_does_not(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GKD_GPU_DEVICE", "0")
    assert choose_device(-1).ordinal == 0
    monkeypatch.setenv("GKD_GPU_DEVICE", "99")
    with pytest.raises(DeviceError, match="gpu 99"):
        choose_device(-1)
    assert choose_device(0).ordinal == 0


def test_arena_tensors_are_aligned_and_apart(backend: CudaBackend) -> None:
    def carve() -> None:
        arena = Arena()
        tensors = [arena.tensor((size,), DType.F32) for size in (1, 1000, CHUNK_BYTES // 4 - 100, 5, CHUNK_BYTES)]
        spans = sorted((tensor.pointer, tensor.pointer + tensor.nbytes) for tensor in tensors)
        assert all(start % 256 == 0 for start, _ in spans)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert arena.num_bytes == 2 * CHUNK_BYTES + 4 * CHUNK_BYTES
        arena.close()

    backend.call(carve)


def test_staging_carries_more_than_a_piece(backend: CudaBackend) -> None:
    host = np.random.default_rng(1).integers(0, 1 << 30, (3 * PIECE_BYTES + 4000) // 4, np.int32)

    def carry() -> None:
        stream, arena = Stream(), Arena()
        staging, tensor = Staging(stream), arena.tensor(host.shape, DType.I32)
        staging.upload(tensor.pointer, host)
        back = np.empty_like(host)
        check("cuMemcpyDtoH", cu.cuMemcpyDtoHAsync(back.ctypes.data, tensor.pointer, back.nbytes, stream.handle))
        stream.synchronize()
        assert np.array_equal(back, host)
        staging.close()
        arena.close()
        stream.close()

    backend.call(carry)


def test_a_device_that_was_begun_is_taken_once_and_given_back(device: Device) -> None:
    backend = CudaBackend(device, DType.F16)
    backend.begin()
    begun = backend.call(lambda: backend._held)
    assert begun is not None
    backend.call(backend.acquire)
    assert backend._held is begun
    backend.stop()
    assert backend._held is None


def test_out_of_memory_is_no_fault(backend: CudaBackend) -> None:
    with pytest.raises(OutOfMemory, match="CUDA_ERROR_OUT_OF_MEMORY in cuMemAlloc"):
        backend.call(lambda: backend.empty((1 << 45,), DType.F32))
    assert not backend.faulted


def test_a_graph_replays_what_was_recorded(backend: CudaBackend) -> None:
    op = L2Normalize(64)
    host = np.random.default_rng(2).standard_normal((5, 64), np.float32)

    def record_and_replay() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        x, out = backend.empty((5, 64), DType.F32), backend.empty((5, 64), DType.F32)
        backend.upload(x, host)
        backend.run(op, out, x)  # loads the kernel
        stream = backend._open.stream
        graph = Graph(stream, lambda: backend.run(op, out, x))
        backend.upload(x, 2 * host[::-1].copy())
        graph.replay(stream)
        result = np.empty_like(host)
        backend.download(result, out)
        graph.close()
        return result

    want = np.empty_like(host)
    op.reference(want, host[::-1].copy())
    assert np.allclose(backend.call(record_and_replay), want, atol=1e-6)


def test_a_view_of_a_tensor_is_a_part_of_its_memory(backend: CudaBackend) -> None:
    host = np.random.default_rng(3).standard_normal(1000, np.float32)

    def take() -> tuple[NDArray[np.float32], ...]:
        whole = backend.empty((1000,), DType.F32)
        assert backend.upload(whole, host[:900]) == whole.view((900,))
        # Inputs travel together and are read where they lie: at any element, not only at an aligned one.
        parts = backend.view(whole, (4, 5), 301), backend.view(whole, (900,), 0)
        results = np.empty((4, 5), np.float32), np.empty(900, np.float32)
        for result, part in zip(results, parts, strict=True):
            backend.download(result, part)
        return results

    part, head = backend.call(take)
    assert np.array_equal(part.reshape(-1), host[301:321]) and np.array_equal(head, host[:900])


def test_what_was_recorded_reads_its_sizes_when_it_is_replayed(backend: CudaBackend) -> None:
    """A recorded forward serves batches of every size up to its capacity."""
    op, host = GatherRows(64, DType.F32), np.random.default_rng(4).standard_normal((9, 64), np.float32)
    rows = np.array([8, 2, 2, 5, 0, 7], np.int32)

    def record_and_replay() -> list[NDArray[np.float32]]:
        x = backend.upload(backend.empty((9, 64), DType.F32), host)
        out = backend.empty((6, 64), DType.F32)
        inputs = backend.empty((7,), DType.I32)
        num_rows, places = backend.view(inputs, (1,)), backend.view(inputs, (6,), 1)
        backend.upload(inputs, np.zeros(7, np.int32))
        backend.run(op, out, x, places, num_rows)  # loads the kernel
        recorded = backend.record(lambda: backend.run(op, out, x, places, num_rows))
        results = []
        for number in (6, 0, 1, 4):
            backend.upload(out, np.full((6, 64), np.nan, np.float32))
            backend.upload(inputs, np.concatenate([[np.int32(number)], rows]).astype(np.int32))
            backend.replay(recorded)
            results.append(np.empty((6, 64), np.float32))
            backend.download(results[-1], out)
        return results

    for number, result in zip((6, 0, 1, 4), backend.call(record_and_replay), strict=True):
        assert np.array_equal(result[:number], host[rows[:number]])
        assert np.isnan(result[number:]).all()


def test_a_fault_names_its_kernel_and_the_backend_recovers(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GKD_SYNC", "1")
    backend = CudaBackend(device, DType.F32)
    backend.call(backend.acquire)

    def fault() -> None:
        x = backend.empty((1, 64), DType.F32)
        # The launch itself is refused: more threads than a block can have.
        monkeypatch.setattr("gkd.ops.l2_normalize._NUM_THREADS", 4096)
        backend.run(L2Normalize(64), x, x)

    with pytest.raises(DriverError, match=r"CUDA_ERROR_INVALID_VALUE in cuLaunchKernel.*kernel l2_normalize"):
        backend.call(fault)
    assert backend.faulted and backend.memory_bytes == 0
    monkeypatch.undo()
    backend.call(backend.acquire)
    assert not backend.faulted
    backend.stop()
