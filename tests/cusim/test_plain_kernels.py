"""The kernels without tensor cores, run on the CPU: against the references in float64, and row by row."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest

from gkd.dtype import DType, dtype_of
from gkd.kernel import KernelPlan
from gkd.ops import AddLayerNorm, Cast, EmbedLayerNorm, GatherRows, L2Normalize, Operator, Pool, RowBounds, Split
from gkd.ops.contract import Array
from gkd.ops.pool import POOL_MODES, PoolMode
from tests.cusim.harness import ORDERS, RANDOM, build_all, run
from tests.numerics import UNIT, assert_close, count, narrowed, poisoned, widened

ARCH = 80
EPS = 1e-3  # large enough to be missed if it is left out
U = UNIT[DType.F32]
RNG = np.random.default_rng(3)

# Every type, and every way in which a row fits a warp: exactly, by one too many, by half, in many rounds.
VARIANTS = [
    (DType.F32, 33),
    (DType.F32, 384),
    (DType.F16, 33),
    (DType.F16, 80),
    (DType.BF16, 32),
    (DType.BF16, 80),
    (DType.TF32, 33),
    (DType.TF32, 80),
]
NORM_SIZES = [33, 384]
FLOATS = (DType.F32, DType.F16, DType.BF16)
CASTS = [(source, target) for source in FLOATS for target in (*FLOATS, DType.TF32) if source is not target]
# 4 rows a block: one alone, a full block, and ragged ones.
ROWS = [1, 4, 9]
POOLED = 40  # columns
LENGTHS = [1, 64, 65, 130]


class Mode(NamedTuple):
    order: int
    sanitize: bool


# A sanitizer sees the same accesses in every order.
MODES = [*(Mode(order, sanitize=False) for order in ORDERS), Mode(RANDOM, sanitize=True)]

variants = pytest.mark.parametrize(("dtype", "size"), VARIANTS, ids=lambda value: getattr(value, "value", value))
modes = pytest.mark.parametrize(
    "mode", MODES, ids=lambda mode: f"{('forward', 'reverse', 'random')[mode.order]}{'-sanitized' * mode.sanitize}"
)


def operators() -> list[tuple[Operator, DType]]:
    ops: list[tuple[Operator, DType]] = []
    for dtype, size in VARIANTS:
        ops += ((op, dtype) for op in (AddLayerNorm(size, EPS), EmbedLayerNorm(size, EPS)))
        ops += [(GatherRows(size, dtype), dtype)]
    ops += ((op, DType.F32) for size in NORM_SIZES for op in (L2Normalize(size), Pool(size)))
    ops += ((Pool(POOLED, mode, 2, 1), DType.F32) for mode in POOL_MODES)
    ops += ((Cast(source, target), target) for source, target in CASTS)
    return ops


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    on_sm90: list[Operator] = [*(Split(source) for source in FLOATS), RowBounds(80)]
    build_all((spec for op in on_sm90 for spec in op.plan(DType.SPLIT, 90).specs), arch=90)
    build_all((spec for op, dtype in operators() for spec in op.plan(dtype, ARCH).specs), arch=ARCH)


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape, dtype=np.float32)


def launcher(plan: KernelPlan, mode: Mode, shape: tuple[int, ...], dtype: DType) -> Callable[..., Array]:
    """Calls the kernel for an output of this shape, which begins as NaN."""

    def launch(*inputs: Any) -> Array:
        out = poisoned(shape, dtype)
        run(plan, out, *inputs, order=mode.order, sanitize=mode.sanitize, arch=ARCH)
        return out

    return launch


def expected(op: Operator, shape: tuple[int, ...], *inputs: Array) -> Array:
    """The reference's output in float64, from the numbers that the kernel is given."""
    out = np.full(shape, np.nan)
    op.reference(out, *(widened(array) for array in inputs))
    return out


def layer_norm_bound(total: Array, magnitude: Array, gamma: Array, beta: Array) -> Array:
    """The error of a LayerNorm in fp32 of `total`, a sum of terms whose absolute values add up to `magnitude`."""
    size = total.shape[-1]
    # A lane's chain of additions, five across the warp, and a few operations on the sum.
    steps = -(-size // 32) + 8
    centred = total - total.mean(axis=-1, keepdims=True)
    scale = 1 / np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + EPS)
    centred_error = U * (2 * magnitude + steps * np.abs(total).mean(axis=-1, keepdims=True) + np.abs(centred))
    # The variance's relative error is twice that of its terms, and the root halves it.
    scale_error = np.sqrt(np.square(centred_error).mean(axis=-1, keepdims=True)) * scale + steps * U
    normalized = np.abs(centred) * scale
    error = centred_error * scale + normalized * (scale_error + 4 * U)
    return np.asarray(np.abs(gamma) * error + 2 * U * (np.abs(gamma) * normalized + np.abs(beta)))


def normalize(op: Operator, dtype: DType, mode: Mode, residual: Array, *inputs: Any) -> tuple[Array, Array]:
    """out and residual, with two rows more than are computed, which must stay as they are."""
    rows, size = residual.shape
    sums = np.concatenate([residual, poisoned((2, size), DType.F32)])
    out = sums if dtype is DType.F32 else poisoned(sums.shape, dtype)
    run(op.plan(dtype, ARCH), out, sums, *inputs, order=mode.order, sanitize=mode.sanitize, arch=ARCH)
    for tensor in (out, sums):
        assert (tensor[rows:].view(np.uint8) == 0xFF).all(), "rows past the count were written"
    return out[:rows], sums[:rows]


def padded(x: Array) -> Array:
    """With two rows of NaN that nothing may come of."""
    filler = np.zeros((2, *x.shape[1:]), x.dtype) if x.dtype == np.int32 else poisoned((2, *x.shape[1:]), kind(x))
    return np.concatenate([x, filler])


def kind(x: Array) -> DType:
    dtype = dtype_of(x)
    assert dtype is not None
    return dtype


@modes
@variants
@pytest.mark.parametrize("rows", ROWS)
def test_add_layer_norm(dtype: DType, size: int, rows: int, mode: Mode) -> None:
    op = AddLayerNorm(size, EPS)
    x, residual = narrowed(3 + normal(rows, size), dtype.summand), normal(rows, size)
    gamma, beta = normal(size), normal(size)
    out, sums = normalize(op, dtype, mode, residual, padded(x), gamma, beta, count(rows))
    wide_x, want = widened(x), residual.astype(np.float64)
    bound = layer_norm_bound(wide_x + want, np.abs(wide_x) + np.abs(want), gamma, beta)
    op.reference(want, want, wide_x, gamma, beta, count(rows))
    assert_close(sums, want, bound)
    # The operand is the residual, rounded once.
    assert np.array_equal(out, narrowed(sums, dtype))

    last = slice(rows - 1, rows)
    alone, _ = normalize(op, dtype, mode, residual[last], padded(x[last]), gamma, beta, count(1))
    assert np.array_equal(alone, out[last])


@modes
@variants
@pytest.mark.parametrize("rows", ROWS)
def test_embed_layer_norm(dtype: DType, size: int, rows: int, mode: Mode) -> None:
    # Of the words, of the positions and of the token types.
    op, num_rows_of_tables = EmbedLayerNorm(size, EPS), (7, 5, 2)
    ids = [RNG.integers(0, num_rows, rows, dtype=np.int32) for num_rows in num_rows_of_tables]
    for of_table, num_rows in zip(ids, num_rows_of_tables, strict=True):
        of_table[-1] = num_rows - 1  # the sanitized build knows where the tables end
    tables = [narrowed(normal(num_rows, size), dtype.summand) for num_rows in num_rows_of_tables]
    gamma, beta = normal(size), normal(size)
    residual = poisoned((rows, size), DType.F32)
    out, sums = normalize(op, dtype, mode, residual, *map(padded, ids), *tables, gamma, beta, count(rows))
    wide = [widened(table) for table in tables]
    terms = np.stack([table[of_table] for table, of_table in zip(wide, ids, strict=True)])
    bound = layer_norm_bound(terms.sum(axis=0), np.abs(terms).sum(axis=0), gamma, beta)
    want = np.full((rows, size), np.nan)
    inputs = [*ids, *wide, widened(gamma), widened(beta), count(rows)]
    op.reference(want, want, *inputs)
    assert_close(sums, want, bound)
    assert np.array_equal(out, narrowed(sums, dtype))

    last = [padded(of_table[-1:]) for of_table in ids]
    alone, _ = normalize(op, dtype, mode, residual[:1], *last, *tables, gamma, beta, count(1))
    assert np.array_equal(alone, out[-1:])


@modes
@variants
def test_gather_rows(dtype: DType, size: int, mode: Mode) -> None:
    x, rows = narrowed(normal(9, size), dtype), np.array([8, 0, 3, 8, 5, 99, 99], np.int32)
    op = GatherRows(size, dtype)
    # Rows that are not counted, past the end of x, are not looked at; none are, of a forward without texts.
    for num_rows in (5, 0):
        out = poisoned((7, size), dtype)
        run(op.plan(dtype, ARCH), out, x, rows, count(num_rows), order=mode.order, sanitize=mode.sanitize, arch=ARCH)
        assert np.array_equal(out[:num_rows], x[rows[:num_rows]])
        assert (out[num_rows:].view(np.uint8) == 0xFF).all()


@modes
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.value)
def test_no_row_is_normalized_where_none_is_counted(dtype: DType, mode: Mode) -> None:
    size, vector, nothing = 80, normal(80), count(0)
    residual = normal(0, size)
    normalize(
        AddLayerNorm(size, EPS), dtype, mode, residual, padded(narrowed(residual, dtype)), vector, vector, nothing
    )
    ids, table = padded(np.zeros(0, np.int32)), narrowed(normal(1, size), dtype)
    tables = (table, table, table, vector, vector)
    normalize(EmbedLayerNorm(size, EPS), dtype, mode, residual, ids, ids, ids, *tables, nothing)


@modes
@pytest.mark.parametrize("size", NORM_SIZES)
def test_mean_pool(size: int, mode: Mode) -> None:
    op = Pool(size)
    plan, shape = op.plan(DType.F32, ARCH), (len(LENGTHS), size)
    cu_seqlens, first_pooled = np.cumsum([0, *LENGTHS]).astype(np.int32), np.zeros(len(LENGTHS), np.int32)
    hidden = normal(sum(LENGTHS), size)
    got = launcher(plan, mode, shape, DType.F32)(hidden, cu_seqlens, first_pooled)
    # A mean: 64 additions, then one for each 64, and a division; of the absolute values' mean each.
    additions = np.array([[64 + length / 64 + 2] for length in LENGTHS])
    magnitude = expected(op, shape, np.abs(widened(hidden)), cu_seqlens, first_pooled)
    assert_close(got, expected(op, shape, hidden, cu_seqlens, first_pooled), U * additions * magnitude)

    alone = launcher(plan, mode, (3, size), DType.F32)
    for text, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        # Beside two empty texts, which fill up a list.
        with_empty = alone(hidden[start:end], np.array([0, *[end - start] * 3], np.int32), np.zeros(3, np.int32))
        assert np.array_equal(with_empty[0], got[text])
        assert (with_empty[1:].view(np.uint8) == 0xFF).all()


@modes
@pytest.mark.parametrize("pooling", POOL_MODES)
def test_every_pooling_in_its_block_and_without_first_tokens(pooling: PoolMode, mode: Mode) -> None:
    op, shape = Pool(POOLED, pooling, 2, 1), (len(LENGTHS), 2 * POOLED)
    cu_seqlens = np.cumsum([0, *LENGTHS]).astype(np.int32)
    first_pooled = np.array([min(3, length - 1) for length in LENGTHS], np.int32)
    hidden = normal(sum(LENGTHS), POOLED)
    for start, first in zip(cu_seqlens, first_pooled, strict=False):
        hidden[start : start + first] = np.nan
    got = launcher(op.plan(DType.F32, ARCH), mode, shape, DType.F32)(hidden, cu_seqlens, first_pooled)
    want = expected(op, shape, hidden, cu_seqlens, first_pooled)
    # Products, sums, and the division: of at most the sum of the absolute values each.
    largest = expected(op, shape, np.abs(widened(hidden)), cu_seqlens, first_pooled)[:, POOLED:]
    additions = np.array([[64 + length / 64 + 4] for length in LENGTHS])
    assert_close(got[:, POOLED:], want[:, POOLED:], 2 * U * additions * np.abs(largest))
    assert (got[:, :POOLED].view(np.uint8) == 0xFF).all()


@modes
@pytest.mark.parametrize("source", FLOATS, ids=lambda dtype: dtype.value)
def test_split(source: DType, mode: Mode) -> None:
    values = 100 * normal(7, 80)
    values[2, :5] = 0, 1e-9, 65504, -65519, 2.0**-25
    x, out = narrowed(values, source), poisoned((7, 80), DType.SPLIT)
    run(Split(source).plan(DType.SPLIT, 90), out, x, order=mode.order, sanitize=mode.sanitize, arch=90)
    assert np.array_equal(out, narrowed(widened(x).astype(np.float32), DType.SPLIT))


@modes
@pytest.mark.parametrize("rows", ROWS)
def test_row_bounds(rows: int, mode: Mode) -> None:
    values = normal(rows, 80)
    values[-1] *= 50
    x, bound, op = narrowed(values, DType.SPLIT), np.zeros(1, np.float32), RowBounds(80)
    run(op.plan(DType.SPLIT, 90), bound, x, order=mode.order, sanitize=mode.sanitize, arch=90)
    want = expected(op, (1,), x)
    assert_close(bound, want, 16 * U * want)
    x[0] = narrowed(np.full((1, 80), 1e6, np.float32), DType.SPLIT)
    run(op.plan(DType.SPLIT, 90), bound, x, order=mode.order, sanitize=mode.sanitize, arch=90)
    assert np.isposinf(bound).all(), "a weight out of range"


@modes
@pytest.mark.parametrize("size", NORM_SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_l2_normalize(size: int, rows: int, mode: Mode) -> None:
    op = L2Normalize(size)
    x = normal(rows, size)
    x[rows // 2] *= np.float32(1e-15)  # shorter than eps
    x[rows // 3] = 0
    got = launcher(op.plan(DType.F32, ARCH), mode, (rows, size), DType.F32)(x)
    want = expected(op, (rows, size), x)
    assert_close(got, want, (-(-size // 32) + 8) * U * np.abs(want))
    assert not got[rows // 3].any()

    alone = launcher(op.plan(DType.F32, ARCH), mode, (1, size), DType.F32)
    assert np.array_equal(alone(x[-1:]), got[-1:])
    run(op.plan(DType.F32, ARCH), x, x, order=mode.order, sanitize=mode.sanitize, arch=ARCH)
    assert np.array_equal(x, got)


@modes
@pytest.mark.parametrize(("source", "target"), CASTS, ids=lambda dtype: dtype.value)
def test_cast_of_every_16_bit_value(source: DType, target: DType, mode: Mode) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    if source is DType.F32:
        # bf16's values, what lies half-way to the next one, and f16's ties, which are tf32's.
        values = bits.astype(np.uint32) << 16
        f16 = bits.view(np.float16)[np.isfinite(bits.view(np.float16))].astype(np.float32).view(np.uint32)
        x = np.concatenate([values, values | 0x8000, f16, f16 | 0x1000, f16 | 0x1001, f16 | 0x0FFF]).view(np.float32)
    else:
        x = bits.view(source.storage)
    x = x[: len(x) - 3]  # no whole number of blocks
    if mode.sanitize or mode.order != RANDOM:
        x = x[5::17].copy()
    op = Cast(source, target)
    got = launcher(op.plan(target, ARCH), mode, x.shape, target)(x)
    want = poisoned(x.shape, target)
    with np.errstate(all="ignore"):
        op.reference(want, x)
    is_nan = np.isnan(widened(want))
    assert np.array_equal(np.isnan(widened(got)), is_nan)
    assert np.array_equal(
        got.view(np.uint8).reshape(len(x), -1)[~is_nan], want.view(np.uint8).reshape(len(x), -1)[~is_nan]
    )


def test_cast_to_bf16_before_sm_80_rounds_on_the_bits() -> None:
    x = (np.arange(1 << 16, dtype=np.uint32) << 16 | RNG.integers(0, 1 << 16, 1 << 16, dtype=np.uint32)).view(
        np.float32
    )
    out, want = poisoned(x.shape, DType.BF16), poisoned(x.shape, DType.BF16)
    op = Cast(DType.F32, DType.BF16)
    run(op.plan(DType.BF16, 75), out, x, arch=75)
    op.reference(want, x)
    is_nan = np.isnan(x)
    assert np.array_equal(out[~is_nan], want[~is_nan])
    assert np.isnan(widened(out[is_nan])).all()
