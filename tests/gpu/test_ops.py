"""Each operator's kernels against the NumPy reference in float64, on the device."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gkd.cuda import CudaBackend
from gkd.dtype import DType, dtype_of
from gkd.ops import AddLayerNorm, Attention, Cast, EmbedLayerNorm, L2Normalize, Linear, Operator, Pool
from gkd.tensor import Tensor
from tests.numerics import UNIT, narrowed, poisoned, widened

RNG = np.random.default_rng(11)


def on_device(backend: CudaBackend, op: Operator, out: NDArray[Any], *inputs: Any) -> NDArray[Any]:
    """Runs an operator on copies of its tensors; the output begins as NaN, and a canary behind it must survive."""

    def run() -> NDArray[Any]:
        def put(array: Any) -> Any:
            if not isinstance(array, np.ndarray):
                return array
            dtype = dtype_of(array)
            assert dtype is not None
            return backend.upload(backend.empty(array.shape, dtype), array)

        dtype = dtype_of(out)
        assert dtype is not None
        poison = poisoned((out.size + 64,), dtype)
        whole = backend.upload(backend.empty(poison.shape, dtype), poison)
        backend.run(op, Tensor(whole.pointer, out.shape, dtype), *map(put, inputs))
        result = np.empty_like(poison)
        backend.download(result, whole)
        assert np.array_equal(result[out.size :].view(np.uint8), poison[out.size :].view(np.uint8)), (
            "wrote past the end"
        )
        return result[: out.size].reshape(out.shape)

    return backend.call(run)


def expected(op: Operator, shape: tuple[int, ...], *inputs: Any) -> NDArray[Any]:
    """The reference's output in float64, from the numbers that the device is given."""
    out = np.full(shape, np.nan)
    op.reference(out, *(widened(array) if isinstance(array, np.ndarray) else array for array in inputs))
    return out


def assert_close(got: NDArray[Any], want: NDArray[Any], dtype: DType, bound: NDArray[Any] | float) -> None:
    """Within `bound`, plus one rounding to the type that the output is stored in. NaN fails."""
    error = np.abs(widened(got) - want)
    ok = error <= bound + UNIT[dtype] * np.abs(want)
    worst = np.unravel_index(np.nanargmax(np.where(ok, 0, error)), error.shape) if not ok.all() else None
    assert ok.all(), f"{(~ok).sum()} of {ok.size} out of bounds, worst at {worst}: {error[worst]} for {want[worst]}"


def normal(*shape: int) -> NDArray[np.float32]:
    return RNG.standard_normal(shape, dtype=np.float32)


LINEARS = [(64, 48), (80, 240), (240, 500), (384, 1152), (1536, 384), (1024, 4096), (4096, 1024)]


@pytest.mark.parametrize("rows", [1, 2, 17, 130, 1000])
@pytest.mark.parametrize(("in_features", "out_features"), LINEARS)
@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("kernel", ["simt", "mma", "wgmma"])
def test_linear(
    backend: CudaBackend, rows: int, in_features: int, out_features: int, activation: Any, kernel: Any
) -> None:
    dtype = backend.dtype
    if kernel != "simt":
        need_tensor_cores(backend, kernel)
    if kernel == "wgmma" and out_features % 8 != 0:
        pytest.skip("rows of the results have to start at 16 bytes")
    x, weight = narrowed(normal(rows, in_features), dtype), narrowed(normal(out_features, in_features), dtype)
    bias = normal(out_features)
    op = replace(Linear(in_features, out_features, activation), kernel=kernel)
    got = on_device(backend, op, np.empty((rows, out_features), dtype.storage), x, weight, bias)
    want = expected(op, (rows, out_features), x, weight, bias)
    size = np.abs(widened(x)) @ np.abs(widened(weight).T) + np.abs(bias)
    # fp32 sums: a chain of 64 and then one of the chunks, or one chain with the tensor core's truncation.
    chain = 64 + in_features / 64 if kernel == "simt" else 2 * in_features
    assert_close(got, want, dtype, chain * UNIT[DType.F32] * size)


def need_tensor_cores(backend: CudaBackend, kernel: str) -> None:
    if backend.dtype is DType.F32:
        pytest.skip("the tensor-core kernels are for 16-bit types")
    if kernel == "wgmma" and backend.device.capability != 90:
        pytest.skip("wgmma is an instruction of sm_90")


@pytest.mark.parametrize("rows", [1, 130, 3000])
@pytest.mark.parametrize(("in_features", "out_features"), [(80, 240), (1024, 4096), (4096, 1024)])
def test_linear_wgmma_has_the_bits_of_mma(backend: CudaBackend, rows: int, in_features: int, out_features: int) -> None:
    need_tensor_cores(backend, "wgmma")
    dtype = backend.dtype
    x, weight = narrowed(normal(rows, in_features), dtype), narrowed(normal(out_features, in_features), dtype)
    bias, out = normal(out_features), np.empty((rows, out_features), dtype.storage)
    by_wgmma, by_mma = (
        on_device(backend, Linear(in_features, out_features, "gelu", kernel), out, x, weight, bias)
        for kernel in ("wgmma", "mma")
    )
    assert np.array_equal(by_wgmma, by_mma)


def test_linear_rows_have_the_same_bits_in_any_company(backend: CudaBackend) -> None:
    dtype = backend.dtype
    for in_features, out_features in ((384, 1152), (1024, 1024)):
        op = Linear(in_features, out_features)
        x, weight = narrowed(normal(700, in_features), dtype), narrowed(normal(out_features, in_features), dtype)
        bias = normal(out_features)
        together = on_device(backend, op, np.empty((700, out_features), dtype.storage), x, weight, bias)
        for first, last in ((0, 1), (13, 14), (3, 20), (100, 165), (1, 300), (399, 700)):
            apart = on_device(
                backend, op, np.empty((last - first, out_features), dtype.storage), x[first:last].copy(), weight, bias
            )
            assert np.array_equal(apart, together[first:last])


ATTENTIONS = [
    (32, "auto"),
    (32, "plain"),
    (64, "auto"),
    (64, "simt"),
    (64, "mma"),
    (128, "auto"),
    (128, "mma"),
    (80, "plain"),
    (256, "plain"),
]


@pytest.mark.parametrize(("head_dim", "kernel"), ATTENTIONS)
@pytest.mark.parametrize("lengths", [[1], [2, 17, 64, 65, 130], [512, 3, 1000]])
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_attention(backend: CudaBackend, head_dim: int, kernel: Any, lengths: list[int], scale: float) -> None:
    if kernel == "mma":
        need_tensor_cores(backend, kernel)
    dtype, num_heads, tokens = backend.dtype, 3, sum(lengths)
    qkv = narrowed(scale * normal(tokens, 3 * num_heads * head_dim), dtype)
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    op = replace(Attention(num_heads, head_dim), kernel=kernel)
    shape = (tokens, num_heads * head_dim)
    got = on_device(backend, op, np.empty(shape, dtype.storage), qkv, cu_seqlens, max(lengths))
    want = expected(op, shape, qkv, cu_seqlens, max(lengths))
    # A score of the size scale^2 * sqrt(head_dim) is made of fp32 sums and exponentiated: its error is a relative
    # error of a weight. With 16 bits the weights themselves are rounded before the second product.
    largest = np.abs(widened(qkv)).max()
    score = scale**2 * np.sqrt(head_dim) * 8
    bound = (32 * score * UNIT[DType.F32] + (2 * UNIT[dtype] if dtype is not DType.F32 else 0)) * largest
    assert_close(got, want, dtype, bound)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
def test_a_text_has_the_same_attention_bits_at_another_place(backend: CudaBackend, head_dim: int) -> None:
    dtype, lengths = backend.dtype, [5, 200, 31, 140]
    op, width = Attention(2, head_dim), 2 * head_dim
    qkv, cu_seqlens = narrowed(normal(sum(lengths), 3 * width), dtype), np.cumsum([0, *lengths]).astype(np.int32)
    together = on_device(backend, op, np.empty((sum(lengths), width), dtype.storage), qkv, cu_seqlens, max(lengths))
    for start, end in pairwise(cu_seqlens):
        length = int(end - start)
        alone = on_device(
            backend,
            op,
            np.empty((length, width), dtype.storage),
            qkv[start:end].copy(),
            np.array([0, length], np.int32),
            length,
        )
        assert np.array_equal(alone, together[start:end])


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
def test_a_text_that_is_not_finite_leaves_its_neighbours_alone(backend: CudaBackend, head_dim: int) -> None:
    dtype, lengths = backend.dtype, [37, 20, 150, 9]
    op, width = Attention(2, head_dim), 2 * head_dim
    values, cu_seqlens = normal(sum(lengths), 3 * width), np.cumsum([0, *lengths]).astype(np.int32)
    outputs = []
    for broken in (0.0, np.inf, np.nan):
        values[37:57] = broken
        qkv = narrowed(values, dtype)
        outputs.append(
            on_device(backend, op, np.empty((len(qkv), width), dtype.storage), qkv, cu_seqlens, max(lengths))
        )
    for output in outputs:
        assert np.array_equal(output[:37], outputs[0][:37]) and np.array_equal(output[57:], outputs[0][57:])
        assert np.isfinite(widened(output[:37])).all()


@pytest.mark.parametrize(("rows", "size"), [(1, 32), (7, 384), (333, 1024), (5, 80)])
def test_add_layer_norm(backend: CudaBackend, rows: int, size: int) -> None:
    dtype = backend.dtype
    x, residual = narrowed(normal(rows, size) + 3, dtype), narrowed(normal(rows, size), dtype)
    gamma, beta = normal(size), normal(size)
    op = AddLayerNorm(size, 1e-5)
    got = on_device(backend, op, np.empty((rows, size), dtype.storage), x, residual, gamma, beta)
    want = expected(op, (rows, size), x, residual, gamma, beta)
    assert_close(got, want, dtype, 32 * UNIT[DType.F32] * (np.abs(gamma) * 8 + np.abs(beta)))


def test_embed_layer_norm(backend: CudaBackend) -> None:
    dtype, size = backend.dtype, 384
    word, position, token_type = (narrowed(normal(n, size), dtype) for n in (1000, 130, 2))
    gamma, beta = normal(size), normal(size)
    ids, places = RNG.integers(0, 1000, 77).astype(np.int32), RNG.integers(0, 130, 77).astype(np.int32)
    op = EmbedLayerNorm(size, 1e-12)
    inputs = (ids, places, word, position, token_type, gamma, beta)
    got = on_device(backend, op, np.empty((77, size), dtype.storage), *inputs)
    want = expected(op, (77, size), *inputs)
    assert_close(got, want, dtype, 32 * UNIT[DType.F32] * (np.abs(gamma) * 8 + np.abs(beta)))


@pytest.mark.parametrize("mode", ["cls", "mean"])
def test_pool(backend: CudaBackend, mode: Any) -> None:
    dtype, lengths = backend.dtype, [3, 64, 65, 1, 700]
    hidden = narrowed(normal(sum(lengths), 80) + 1, dtype)
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    op = Pool(80, mode)
    got = on_device(backend, op, np.empty((5, 80), np.float32), hidden, cu_seqlens)
    assert_close(got, expected(op, (5, 80), hidden, cu_seqlens), DType.F32, 80 * UNIT[DType.F32] * 3)


def test_l2_normalize(backend: CudaBackend) -> None:
    x = normal(6, 1024)
    x[2] = 0
    op = L2Normalize(1024)
    got = on_device(backend, op, np.empty_like(x), x)
    assert_close(got, expected(op, x.shape, x), DType.F32, 32 * UNIT[DType.F32])
    assert not got[2].any()


@pytest.mark.parametrize("source", [DType.F32, DType.F16, DType.BF16])
@pytest.mark.parametrize("target", [DType.F32, DType.F16, DType.BF16])
def test_cast_is_the_reference_to_the_bit(backend: CudaBackend, source: DType, target: DType) -> None:
    values = np.concatenate([normal(5001), [0.0, -0.0, 1e-8, 65504.0, 1e30, np.inf, -np.inf]])
    with np.errstate(over="ignore"):
        x = narrowed(values, source)
        want = np.empty(x.shape, target.storage)
        Cast(source, target).reference(want, x)
    got = on_device(backend, Cast(source, target), np.empty(x.shape, target.storage), x)
    assert np.array_equal(got.view(f"u{got.itemsize}"), want.view(f"u{want.itemsize}"))
