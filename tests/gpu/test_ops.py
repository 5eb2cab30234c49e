"""Each operator's kernels against the NumPy reference in float64, on the device."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gkd.cuda import CudaBackend
from gkd.dtype import DType, dtype_of
from gkd.ops import (
    AddLayerNorm,
    Attention,
    Cast,
    Dense,
    EmbedLayerNorm,
    GatherRows,
    L2Normalize,
    Linear,
    Operator,
    Pool,
    RowBounds,
    Split,
)
from gkd.ops.attention import attention_work
from gkd.ops.pool import POOL_MODES, PoolMode
from gkd.tensor import Tensor
from tests.numerics import SMALLEST_NORMAL, UNIT, count, narrowed, poisoned, widened

RNG = np.random.default_rng(11)


def put(backend: CudaBackend, array: Any) -> Any:
    """A copy of an array on the device; anything else as it is."""
    if not isinstance(array, np.ndarray):
        return array
    dtype = dtype_of(array)
    assert dtype is not None
    return backend.upload(backend.empty(array.shape, dtype), array)


def assert_untouched(rows: NDArray[Any]) -> None:
    """These are as `poisoned` left them."""
    assert (rows.view(np.uint8) == 0xFF).all(), "wrote where nothing was to be computed"


def on_device(backend: CudaBackend, op: Operator, out: NDArray[Any], *inputs: Any) -> NDArray[Any]:
    """Runs an operator on copies of its tensors; the output begins as NaN, and a canary behind it must survive."""

    def run() -> NDArray[Any]:
        dtype = dtype_of(out)
        assert dtype is not None
        poison = poisoned((out.size + 64,), dtype)
        whole = backend.upload(backend.empty(poison.shape, dtype), poison)
        backend.run(op, Tensor(whole.pointer, out.shape, dtype), *(put(backend, array) for array in inputs))
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
    ok = error <= bound + UNIT[dtype] * np.maximum(np.abs(want), SMALLEST_NORMAL[dtype])
    worst = np.unravel_index(np.nanargmax(np.where(ok, 0, error)), error.shape) if not ok.all() else None
    assert ok.all(), f"{(~ok).sum()} of {ok.size} out of bounds, worst at {worst}: {error[worst]} for {want[worst]}"


def normal(*shape: int) -> NDArray[np.float32]:
    return RNG.standard_normal(shape, dtype=np.float32)


LINEARS = [(64, 48), (80, 240), (240, 500), (384, 1152), (1536, 384), (1024, 4096), (4096, 1024)]


@pytest.mark.parametrize("rows", [1, 2, 17, 60, 130, 1000])
@pytest.mark.parametrize(("in_features", "out_features"), LINEARS)
@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("kernel", ["simt", "mma", "wgmma"])
def test_linear(
    backend: CudaBackend, rows: int, in_features: int, out_features: int, activation: Any, kernel: Any
) -> None:
    dtype = backend.dtype
    need_kernel(backend, kernel)
    op = Linear(in_features, out_features, activation, kernel=kernel)
    if (kernel == "wgmma" and out_features % 8 != 0) or (dtype is DType.SPLIT and not op.takes_split(90)):
        pytest.skip("sizes that the kernel does not take")
    x, weight = narrowed(normal(rows, in_features), dtype), narrowed(normal(out_features, in_features), dtype)
    bias = normal(out_features)
    got = on_device(backend, op, np.empty((rows, out_features), dtype.storage), x, weight, bias, count(rows))
    want = expected(op, (rows, out_features), x, weight, bias, count(rows))
    size = np.abs(widened(x)) @ np.abs(widened(weight).T) + np.abs(bias)
    # fp32 sums: a chain of 64 and then one of the chunks, or one chain with the tensor core's truncation.
    chain = 64 + in_features / 64 if kernel == "simt" else 2 * in_features
    if dtype is DType.SPLIT:
        # Three chains of 64 with the tensor core's truncation, the chunks, and the product of low parts, left out.
        chain = 2 * 3 * 64 + in_features / 64 + 4
    assert_close(got, want, dtype, chain * UNIT[DType.F32] * size)


def need_kernel(backend: CudaBackend, kernel: str) -> None:
    dtype = backend.dtype
    if (dtype is DType.SPLIT and kernel in ("simt", "mma")) or (dtype is DType.F32 and kernel != "simt"):
        pytest.skip(f"{kernel} does not take {dtype.value}")
    if kernel == "wgmma" and backend.device.capability != 90:
        pytest.skip("wgmma is an instruction of sm_90")


@pytest.mark.parametrize("rows", [1, 17, 40, 100, 400, 3000])
@pytest.mark.parametrize(("in_features", "out_features"), [(128, 240), (1024, 4096), (4096, 1024)])
def test_linear_has_the_bits_of_wgmma_from_every_kernel(
    backend: CudaBackend, rows: int, in_features: int, out_features: int
) -> None:
    dtype = backend.dtype
    if dtype is DType.F32:
        pytest.skip("it has one kernel")
    need_kernel(backend, "wgmma")
    x, weight = narrowed(normal(rows, in_features), dtype), narrowed(normal(out_features, in_features), dtype)
    bias, out = normal(out_features), np.empty((rows, out_features), dtype.storage)
    kernels: tuple[Any, ...] = ("wgmma", "auto") if dtype is DType.SPLIT else ("wgmma", "mma", "auto")
    outputs = [
        on_device(backend, Linear(in_features, out_features, "gelu", kernel=kernel), out, x, weight, bias, count(rows))
        for kernel in kernels
    ]
    assert all(np.array_equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("rows", [5, 17, 30, 60, 120, 250])
@pytest.mark.parametrize(("in_features", "out_features"), [(1024, 1024), (4096, 1024), (1024, 4096)])
def test_linear_has_the_same_bits_launch_after_launch(
    backend: CudaBackend, rows: int, in_features: int, out_features: int
) -> None:
    dtype, op = backend.dtype, Linear(in_features, out_features)
    x, weight = narrowed(normal(rows, in_features), dtype), narrowed(normal(out_features, in_features), dtype)
    bias, poison = normal(out_features), poisoned((rows, out_features), dtype)

    def run() -> list[NDArray[Any]]:
        out, *inputs = (put(backend, array) for array in (poison, x, weight, bias, count(rows)))
        results = []
        for _ in range(20):
            backend.upload(out, poison)
            backend.run(op, out, *inputs)
            results.append(np.empty_like(poison))
            backend.download(results[-1], out)
        return results

    first, *others = backend.call(run)
    assert all(np.array_equal(other.view(np.uint8), first.view(np.uint8)) for other in others)


def test_linear_rows_have_the_same_bits_in_any_company(backend: CudaBackend) -> None:
    dtype = backend.dtype
    for in_features, out_features in ((384, 1152), (1024, 1024)):
        op = Linear(in_features, out_features)
        x, weight = narrowed(normal(700, in_features), dtype), narrowed(normal(out_features, in_features), dtype)
        bias = normal(out_features)

        def run(x: Any, op: Linear = op, weight: Any = weight, bias: Any = bias) -> Any:
            out = np.empty((len(x), op.out_features), dtype.storage)
            return on_device(backend, op, out, x, weight, bias, count(len(x)))

        together = run(x)
        for first, last in ((0, 1), (13, 14), (3, 20), (100, 165), (1, 300), (399, 700)):
            assert np.array_equal(run(x[first:last].copy()), together[first:last])


@pytest.mark.parametrize("num_rows", [0, 1, 13, 100, 128, 599])
@pytest.mark.parametrize("kernel", ["simt", "mma", "wgmma", "auto"])
def test_linear_computes_the_rows_that_are_counted_and_no_other_shows_in_them(
    backend: CudaBackend, num_rows: int, kernel: Any
) -> None:
    dtype, op = backend.dtype, Linear(384, 1152, "gelu", kernel=kernel)
    if kernel != "auto":
        need_kernel(backend, kernel)
    x, weight = narrowed(normal(600, 384), dtype), narrowed(normal(1152, 384), dtype)
    bias, out = normal(1152), np.empty((600, 1152), dtype.storage)
    together = on_device(backend, op, out, x, weight, bias, count(600))
    x[num_rows:] = poisoned((600 - num_rows, 384), dtype)
    got = on_device(backend, op, out, x, weight, bias, count(num_rows))
    # What is in the other rows of the result is not said.
    assert np.array_equal(got[:num_rows], together[:num_rows])


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


def attend(
    backend: CudaBackend,
    op: Attention,
    qkv: NDArray[Any],
    lengths: list[int],
    block_q: int | None = None,
    bias: tuple[NDArray[np.float32], ...] = (),
) -> NDArray[Any]:
    sizes = op.block_sizes(backend.dtype, backend.arch)
    block_q = block_q or sizes[-1]
    # Empty items do nothing.
    work = np.pad(attention_work(np.cumsum([0, *lengths]), block_q), ((0, 3), (0, 0)))
    out = np.empty((len(qkv), op.num_heads * op.head_dim), backend.dtype.storage)
    return on_device(backend, op, out, qkv, work, block_q, *bias)


@pytest.mark.parametrize(("head_dim", "kernel"), ATTENTIONS)
@pytest.mark.parametrize("lengths", [[1], [2, 17, 64, 65, 130], [512, 3, 1000]])
@pytest.mark.parametrize("scale", [1.0, 20.0])
@pytest.mark.parametrize("max_distance", [None, 128], ids=["", "bias"])
def test_attention(
    backend: CudaBackend, head_dim: int, kernel: Any, lengths: list[int], scale: float, max_distance: int | None
) -> None:
    dtype, num_heads, tokens = backend.dtype, 3, sum(lengths)
    if (kernel == "mma" and dtype is DType.F32) or (kernel == "simt" and dtype is DType.SPLIT):
        pytest.skip(f"{kernel} does not take {dtype.value}")
    qkv = narrowed(scale * normal(tokens, 3 * num_heads * head_dim), dtype)
    op = Attention(num_heads, head_dim, kernel, max_distance)
    # Of the size of a score, which the bound below has room for.
    bias = () if max_distance is None else (scale * normal(num_heads, 2 * max_distance + 1),)
    shape = (tokens, num_heads * head_dim)
    want = expected(op, shape, qkv, attention_work(np.cumsum([0, *lengths]), 256), 256, *bias)
    # A score of the size scale^2 * sqrt(head_dim) is made of fp32 sums and exponentiated: its error is a relative
    # error of a weight, to which split operands add the products of two low parts, 2^-22. With 16 bits the weights
    # themselves are rounded before the second product.
    largest = np.abs(widened(qkv)).max()
    score = scale**2 * np.sqrt(head_dim) * 8
    bound = (32 * score * UNIT[DType.F32] + (2 * UNIT[dtype] if dtype.itemsize == 2 else 0)) * largest
    outputs = [attend(backend, op, qkv, lengths, size, bias) for size in op.block_sizes(dtype, backend.arch)]
    assert_close(outputs[0], want, dtype, bound)
    assert all(np.array_equal(output, outputs[0]) for output in outputs), "the size of a block shows"


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
def test_attention_writes_what_its_items_name_and_nothing_else(backend: CudaBackend, head_dim: int) -> None:
    lengths = [2, 17, 64, 300, 65, 130]
    op, cu_seqlens = Attention(3, head_dim), np.cumsum([0, *lengths])
    qkv = narrowed(normal(sum(lengths), 9 * head_dim), backend.dtype)
    everything = attend(backend, op, qkv, lengths)
    out = np.empty(everything.shape, backend.dtype.storage)
    empty = np.array([[0, 0, 0], [19, 0, 0]], np.int32)
    for block_q in op.block_sizes(backend.dtype, backend.arch):
        assert_untouched(on_device(backend, op, out, qkv, empty, block_q))
        # Of each text the first queries alone, between empty items.
        work = attention_work(cu_seqlens, block_q)
        firsts = work[work[:, 2] == 0]
        among = np.concatenate([empty, firsts[:2], empty, firsts[2:]])
        got = on_device(backend, op, out, qkv, among, block_q)
        named = np.zeros(len(qkv), bool)
        for start, length, _ in firsts.tolist():
            named[start : start + min(length, block_q)] = True
        assert np.array_equal(got[named], everything[named])
        assert_untouched(got[~named])


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
def test_a_text_has_the_same_attention_bits_at_another_place(backend: CudaBackend, head_dim: int) -> None:
    lengths = [5, 200, 31, 140]
    op, width = Attention(2, head_dim), 2 * head_dim
    qkv = narrowed(normal(sum(lengths), 3 * width), backend.dtype)
    together = attend(backend, op, qkv, lengths)
    for block_q in op.block_sizes(backend.dtype, backend.arch):
        for start, end in pairwise(np.cumsum([0, *lengths])):
            alone = attend(backend, op, qkv[start:end].copy(), [int(end - start)], block_q)
            assert np.array_equal(alone, together[start:end])


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
def test_a_text_that_is_not_finite_leaves_its_neighbours_alone(backend: CudaBackend, head_dim: int) -> None:
    lengths = [37, 20, 150, 9]
    op, width = Attention(2, head_dim), 2 * head_dim
    values = normal(sum(lengths), 3 * width)
    for block_q in op.block_sizes(backend.dtype, backend.arch):
        outputs = []
        for broken in (0.0, np.inf, np.nan):
            values[37:57] = broken
            outputs.append(attend(backend, op, narrowed(values, backend.dtype), lengths, block_q))
        for output in outputs:
            assert np.array_equal(output[:37], outputs[0][:37]) and np.array_equal(output[57:], outputs[0][57:])
            assert np.isfinite(widened(output[:37])).all()


def normalize(
    backend: CudaBackend, op: Operator, residual: NDArray[Any], num_rows: int, *inputs: Any
) -> tuple[NDArray[Any], NDArray[Any]]:
    """What an operator leaves in the counted rows of its operand and of its residual; the others must stay."""
    dtype = backend.dtype

    def run() -> tuple[NDArray[Any], NDArray[Any]]:
        sums = put(backend, residual)
        # In float32 an operand is the residual itself.
        out = put(backend, poisoned(residual.shape, dtype)) if dtype is not DType.F32 else sums
        backend.run(op, out, sums, *(put(backend, array) for array in (*inputs, count(num_rows))))
        results = np.empty(residual.shape, dtype.storage), np.empty_like(residual)
        for result, tensor in zip(results, (out, sums), strict=True):
            backend.download(result, tensor)
        return results

    operand, sums = backend.call(run)
    assert np.array_equal(sums[num_rows:].view(np.uint8), residual[num_rows:].view(np.uint8))
    if dtype is not DType.F32:
        assert_untouched(operand[num_rows:])
    assert np.array_equal(operand[:num_rows], narrowed(sums[:num_rows], dtype)), "not the residual, rounded"
    return operand[:num_rows], sums[:num_rows]


NORM_SIZES = [(1, 32), (7, 384), (333, 1024), (5, 80)]


@pytest.mark.parametrize(("rows", "size"), NORM_SIZES)
@pytest.mark.parametrize("num_more", [0, 2, 9])
def test_add_layer_norm(backend: CudaBackend, rows: int, size: int, num_more: int) -> None:
    x, residual = normal(rows + num_more, size) + 3, normal(rows + num_more, size)
    x = narrowed(x, backend.dtype.summand)
    gamma, beta = normal(size), normal(size)
    op = AddLayerNorm(size, 1e-5)
    operand, sums = normalize(backend, op, residual, rows, x, gamma, beta)
    want = residual.astype(np.float64)
    op.reference(want, want, widened(x), gamma, beta, count(rows))
    bound = 32 * UNIT[DType.F32] * (np.abs(gamma) * 8 + np.abs(beta))
    assert_close(sums, want[:rows], DType.F32, bound)
    assert_close(operand, want[:rows], backend.dtype, 2 * bound)


@pytest.mark.parametrize(("rows", "size"), NORM_SIZES)
@pytest.mark.parametrize("num_more", [0, 2, 9])
def test_embed_layer_norm(backend: CudaBackend, rows: int, size: int, num_more: int) -> None:
    word, position, token_type = (narrowed(normal(n, size), backend.dtype.summand) for n in (1000, 130, 2))
    gamma, beta = normal(size), normal(size)
    ids, places = (RNG.integers(0, n, rows + num_more).astype(np.int32) for n in (1000, 130))
    # The last rows of the tables; and, where nothing is counted, ids that no table has.
    ids[0], places[0] = 999, 129
    ids[rows:] = places[rows:] = 1 << 30
    op = EmbedLayerNorm(size, 1e-12)
    residual = poisoned((rows + num_more, size), DType.F32)
    operand, sums = normalize(backend, op, residual, rows, ids, places, word, position, token_type, gamma, beta)
    want = np.full(residual.shape, np.nan)
    tables = [widened(table) for table in (word, position, token_type)]
    op.reference(want, want, ids, places, tables[0], tables[1], tables[2], gamma, beta, count(rows))
    bound = 32 * UNIT[DType.F32] * (np.abs(gamma) * 8 + np.abs(beta))
    assert_close(sums, want[:rows], DType.F32, bound)
    assert_close(operand, want[:rows], backend.dtype, 2 * bound)


@pytest.mark.parametrize("num_rows", [0, 1, 17, 20])
def test_gather_rows(backend: CudaBackend, num_rows: int) -> None:
    """Of what is multiplied and of what is added to, as an encoder gathers both."""
    rows = RNG.integers(0, 90, 22).astype(np.int32)
    rows[0], rows[num_rows:] = 89, 1 << 30  # the last row, and none at all where nothing is counted
    for dtype in (backend.dtype, DType.F32):
        x = narrowed(normal(90, 384), dtype)
        op = GatherRows(384, dtype)
        got = on_device(backend, op, np.empty((20, 384), dtype.storage), x, rows, count(num_rows))
        assert np.array_equal(got[:num_rows], x[rows[:num_rows]])
        assert_untouched(got[num_rows:])


@pytest.mark.parametrize("mode", POOL_MODES)
def test_pool(backend: CudaBackend, mode: PoolMode) -> None:
    lengths = [3, 64, 65, 1, 700]
    hidden = normal(sum(lengths), 80) + 1
    # Empty texts fill up a list.
    cu_seqlens = np.cumsum([0, *lengths, 0, 0, 0]).astype(np.int32)
    op, first_pooled = Pool(80, mode), np.array([2, 0, 7, 0, 99, 0, 0, 0], np.int32)
    got = on_device(backend, op, np.empty((8, 80), np.float32), hidden, cu_seqlens, first_pooled)
    want, magnitude = (expected(op, (8, 80), x, cu_seqlens, first_pooled) for x in (hidden, np.abs(hidden)))
    assert_close(got[:5], want[:5], DType.F32, 80 * UNIT[DType.F32] * np.abs(magnitude[:5]))
    assert_untouched(got[5:])


@pytest.mark.parametrize("activation", ["none", "tanh"])
def test_dense(backend: CudaBackend, activation: Any) -> None:
    op, x, weight, bias = Dense(1024, 200, activation), normal(20, 1024), normal(200, 1024), normal(200)
    inputs = (x, weight, bias, count(13))
    got = on_device(backend, op, np.empty((20, 200), np.float32), *inputs)
    size = np.abs(x) @ np.abs(weight.T) + np.abs(bias)
    bound = (64 + 1024 / 64) * UNIT[DType.F32] * size + 4 * UNIT[DType.F32]
    assert_close(got[:13], expected(op, (20, 200), *inputs)[:13], DType.F32, bound[:13])


@pytest.mark.parametrize("source", [DType.F32, DType.F16, DType.BF16])
def test_split_and_its_bounds(backend: CudaBackend, source: DType) -> None:
    values = normal(33, 384)
    values[5, 7], values[6, 8] = 6e4, 1e-6
    x = narrowed(values, source)
    got = on_device(backend, Split(source), np.empty((33, 384), DType.SPLIT.storage), x)
    assert np.array_equal(got, narrowed(widened(x).astype(np.float32), DType.SPLIT))
    norm = on_device_in_place(backend, RowBounds(384), np.zeros(1, np.float32), got)
    assert_close(norm, expected(RowBounds(384), (1,), got), DType.F32, 1e-5 * 6e4)
    got[3] = narrowed(np.full((1, 384), 1e9), DType.SPLIT)
    assert np.isposinf(on_device_in_place(backend, RowBounds(384), np.zeros(1, np.float32), got)).all()


def on_device_in_place(backend: CudaBackend, op: Operator, start: NDArray[Any], *inputs: Any) -> NDArray[Any]:
    """The output of an operator that adds to what is there."""

    def run() -> NDArray[Any]:
        tensors = [put(backend, array) for array in (start, *inputs)]
        backend.run(op, *tensors)
        result = np.empty_like(start)
        backend.download(result, tensors[0])
        return result

    return backend.call(run)


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
