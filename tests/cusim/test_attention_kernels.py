"""attention_plain, _simt, _mma, _mma_split and _wgmma on the CPU: against the reference in float64, text by text."""

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from gkd.dtype import DType
from gkd.kernel import KernelPlan
from gkd.ops.attention import Attention, AttentionKernel, attention_work
from gkd.ops.contract import Array
from tests.cusim.harness import FORWARD, ORDERS, build_all, run
from tests.numerics import UNIT, assert_close, narrowed, poisoned, widened

# One key, a part of a block, a whole one, one more, and more queries than any block has.
LENGTHS = (17, 1, 130, 64, 2, 65)


@dataclass(frozen=True)
class Case:
    kernel: AttentionKernel
    dtype: DType
    num_heads: int
    head_dim: int
    arch: int = 80
    block_idx: int = -1
    """Which of the kernel's block sizes."""
    max_distance: int | None = None

    @property
    def op(self) -> Attention:
        return Attention(self.num_heads, self.head_dim, self.kernel, self.max_distance)

    @cached_property
    def bias(self) -> tuple[Array, ...]:
        """What the operator takes beside the tensors that it always takes."""
        if self.max_distance is None:
            return ()
        shape = (self.num_heads, 2 * self.max_distance + 1)
        return (3 * np.random.default_rng(29).standard_normal(shape, dtype=np.float32),)

    @property
    def plan(self) -> KernelPlan:
        return self.op.plan(self.dtype, self.arch)

    @property
    def block_q(self) -> int:
        return self.op.block_sizes(self.dtype, self.arch)[self.block_idx]

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    def __str__(self) -> str:
        bias = "" if self.max_distance is None else f"-bias{self.max_distance}"
        sizes = f"{self.num_heads}x{self.head_dim}-sm_{self.arch}-q{self.block_q}"
        return f"{self.kernel}-{self.dtype.value}-{sizes}{bias}"


CASES = (
    Case("plain", DType.F32, 2, 48),
    Case("plain", DType.F16, 1, 80, arch=75),
    Case("plain", DType.BF16, 1, 33, arch=75),  # rows that no vector load can read; bf16 without its instruction
    Case("simt", DType.F32, 3, 32),
    Case("simt", DType.F32, 2, 64),
    Case("simt", DType.F32, 1, 128),
    Case("simt", DType.F16, 2, 64, arch=75),  # half the queries a block: shared memory is smaller
    Case("simt", DType.BF16, 1, 128, arch=75),
    Case("plain", DType.TF32, 1, 80),
    Case("simt", DType.TF32, 2, 64),
    Case("mma", DType.F16, 3, 32),
    Case("mma", DType.BF16, 2, 64),
    Case("mma", DType.F16, 1, 64),
    Case("mma", DType.BF16, 1, 128),
    Case("mma", DType.TF32, 3, 32),
    Case("mma", DType.TF32, 2, 64),
    Case("mma", DType.TF32, 1, 128),
    Case("wgmma", DType.BF16, 2, 64, arch=90),
    Case("wgmma", DType.F16, 1, 64, arch=90),
    Case("wgmma", DType.BF16, 1, 128, arch=90),
    Case("wgmma", DType.BF16, 2, 64, arch=90, block_idx=0),
    Case("wgmma", DType.F16, 1, 128, arch=90, block_idx=0),
    Case("mma", DType.SPLIT, 3, 32, arch=90),
    Case("mma", DType.SPLIT, 2, 64, arch=90),
    Case("mma", DType.SPLIT, 1, 64),
    Case("mma", DType.SPLIT, 2, 128, arch=90),
    Case("plain", DType.SPLIT, 1, 80, arch=90),
    # The longest text goes on far beyond these distances, both ways.
    Case("plain", DType.F32, 2, 48, max_distance=20),
    Case("plain", DType.SPLIT, 1, 80, arch=90, max_distance=20),
    Case("simt", DType.F32, 3, 32, max_distance=20),
    Case("simt", DType.F16, 2, 64, arch=75, max_distance=20),
    Case("simt", DType.F32, 1, 128, max_distance=0),
    Case("mma", DType.F16, 3, 32, max_distance=20),
    Case("mma", DType.BF16, 2, 64, max_distance=20),
    Case("mma", DType.F16, 1, 64, max_distance=0),
    Case("mma", DType.BF16, 1, 128, max_distance=100),
    Case("mma", DType.TF32, 2, 64, max_distance=20),
    Case("mma", DType.SPLIT, 3, 32, arch=90, max_distance=20),
    Case("mma", DType.SPLIT, 2, 64, arch=90, max_distance=20),
    Case("mma", DType.SPLIT, 1, 128, max_distance=100),
)
cases = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    for arch in {case.arch for case in CASES}:
        build_all([spec for case in CASES if case.arch == arch for spec in case.plan.specs], arch=arch)


@cache
def packed(case: Case, scale: float = 1.0) -> Array:
    """qkv of all texts."""
    rng = np.random.default_rng(17)
    return narrowed(scale * rng.standard_normal((sum(LENGTHS), 3 * case.width), dtype=np.float32), case.dtype)


def attend(
    case: Case, qkv: Array, lengths: tuple[int, ...], order: int = FORWARD, sanitize: bool = False, num_empty: int = 0
) -> Array:
    """The output, over memory in which an element left unwritten is a NaN; the rows after it stay as they were."""
    memory = poisoned((len(qkv) + 2, case.width), case.dtype)
    out = memory[: len(qkv)]
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    work = np.pad(attention_work(cu_seqlens, case.block_q), ((0, num_empty), (0, 0)))
    arguments: tuple[Any, ...] = (out, qkv, work, case.block_q, *case.bias)
    case.op.check(*arguments)
    run(case.plan, *arguments, order=order, sanitize=sanitize, arch=case.arch)
    assert (memory[len(qkv) :].view(np.uint8) == 0xFF).all(), "rows past the end were written"
    return out


def same_bits(a: Array, b: Array) -> bool:
    return np.array_equal(a.view(np.uint8), b.view(np.uint8))


def reference(case: Case, qkv: Array, lengths: tuple[int, ...]) -> Array:
    out = np.full((len(qkv), case.width), np.nan)
    case.op.reference(out, qkv, attention_work(np.cumsum([0, *lengths]), 256), 256, *case.bias)
    return out


def bound(case: Case, qkv: Array, lengths: tuple[int, ...]) -> Array:
    """The error of the computation before its one rounding to the type of `out`, for each element.

    Relative to the mean of the values' magnitudes under the same weights: a score's error is the relative error of its
    weight, once above and once below the fraction; then the weights and their products are summed over the keys.
    """
    step = 2 * UNIT[DType.F32]  # of one operation; a tensor core may cut off where it does not round
    score_magnitude = np.empty((len(qkv), case.width))
    for start, end in pairwise(np.cumsum([0, *lengths])):
        query, key, _ = np.abs(qkv[start:end]).reshape(end - start, 3, case.num_heads, case.head_dim).swapaxes(0, 1)
        largest = np.einsum("qhd,khd->qhk", query, key).max(axis=-1) / np.sqrt(case.head_dim)
        score_magnitude[start:end] = np.repeat(largest, case.head_dim, axis=1)
    # A bias is scaled, added, and takes part in what is done with a score.
    bias_magnitude = max((float(np.abs(bias).max()) for bias in case.bias), default=0.0)
    relative = 2 * step * ((case.head_dim + 8) * score_magnitude + 8 * bias_magnitude + max(lengths) + 16)
    least = 0.0
    if case.kernel == "mma" and case.dtype is DType.SPLIT:
        # The product of two low parts is left out, of scores and of the context, and a weight is rounded. The largest
        # is 2^14 then, and the error of those that end among the smallest f16 2^-25.
        relative += 2 * UNIT[case.dtype] * (score_magnitude + 1)
        least = max(lengths) * 2.0**-39 * np.abs(qkv).max()
    elif case.kernel in ("mma", "wgmma"):
        relative += UNIT[case.dtype]
        if case.dtype is DType.F16:
            # A weight below 2^-14 has a rounding error of its own size; the largest weight is 1, and so is their sum.
            least = max(lengths) * 2.0**-25 * np.abs(qkv).max()
    magnitudes = qkv.copy()
    magnitudes[:, 2 * case.width :] = np.abs(magnitudes[:, 2 * case.width :])
    return np.asarray(np.expm1(relative) * reference(case, magnitudes, lengths) + least)


@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["", "large-scores"])
@cases
def test_matches_float64_in_any_schedule(case: Case, scale: float) -> None:
    qkv = packed(case, scale)
    outputs = [attend(case, qkv, LENGTHS, order) for order in ORDERS]
    wide = widened(qkv)
    assert_close(outputs[0], reference(case, wide, LENGTHS), bound(case, wide, LENGTHS))
    assert all(same_bits(out, outputs[0]) for out in outputs)


@pytest.mark.parametrize("order", ORDERS, ids=["forward", "reverse", "random"])
@pytest.mark.parametrize("case", [case for case in CASES if case.kernel == "wgmma"], ids=str)
def test_a_long_text_goes_round_the_stages(case: Case, order: int) -> None:
    lengths = (3, 1100)
    rng = np.random.default_rng(19)
    qkv = narrowed(rng.standard_normal((sum(lengths), 3 * case.width), dtype=np.float32), case.dtype)
    wide = widened(qkv)
    assert_close(attend(case, qkv, lengths, order), reference(case, wide, lengths), bound(case, wide, lengths))


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype in (DType.F32, DType.SPLIT)], ids=str)
def test_fp32_is_as_exact_as_numpy(case: Case) -> None:
    qkv = packed(case)
    wide = widened(qkv)
    want, by_numpy = reference(case, wide, LENGTHS), poisoned((len(qkv), case.width), DType.F32)
    case.op.reference(by_numpy, wide.astype(np.float32), attention_work(np.cumsum([0, *LENGTHS]), 256), 256, *case.bias)
    outputs = widened(attend(case, qkv, LENGTHS)), by_numpy
    error, error_of_numpy = (np.sqrt(np.square(out - want).mean()) for out in outputs)
    assert error <= 1.5 * error_of_numpy


@pytest.mark.parametrize("order", ORDERS, ids=["forward", "reverse", "random"])
@cases
def test_reads_and_writes_inside_its_arrays(case: Case, order: int) -> None:
    qkv = packed(case)
    assert same_bits(attend(case, qkv, LENGTHS, order, sanitize=True), attend(case, qkv, LENGTHS))


@cases
def test_a_text_has_its_bits_alone_and_in_any_company(case: Case) -> None:
    qkv = packed(case)
    together = attend(case, qkv, LENGTHS)
    for length, (start, end) in zip(LENGTHS, pairwise(np.cumsum([0, *LENGTHS])), strict=True):
        alone = attend(case, qkv[start:end].copy(), (length,), num_empty=3)
        assert same_bits(alone, together[start:end])
        # In another place, among texts that spoil whatever they touch.
        company = narrowed(np.full((length + 8, 3 * case.width), np.nan), case.dtype)
        company[5:-3] = qkv[start:end]
        assert same_bits(attend(case, company, (5, length, 3))[5:-3], together[start:end])


@pytest.mark.parametrize("case", [case for case in CASES if not case.max_distance], ids=str)
def test_a_query_has_its_bits_in_any_row(case: Case) -> None:
    values = widened(packed(case)[:130]).astype(np.float32)
    values[:, : case.width] = values[7, : case.width]
    out = attend(case, narrowed(values, case.dtype), (130,))
    assert same_bits(out, np.tile(out[:1], (130, 1)))


@cases
def test_a_nan_stays_in_its_text(case: Case) -> None:
    qkv = packed(case).copy()
    clean = attend(case, qkv, LENGTHS)
    start, end = 18, 148
    last = widened(qkv[end - 1]).astype(np.float32)
    last[case.width] = np.nan  # the first head's last key
    qkv[end - 1] = narrowed(last, case.dtype)
    out, clean = widened(attend(case, qkv, LENGTHS)), widened(clean)
    assert np.isnan(out[start:end, : case.head_dim]).all()
    out[start:end, : case.head_dim] = clean[start:end, : case.head_dim]
    assert same_bits(out, clean)


def test_auto_takes_tensor_cores_where_it_can() -> None:
    def name(head_dim: int, dtype: DType, arch: int, max_distance: int | None = None) -> str:
        [name] = {spec.name for spec in Attention(3, head_dim, max_distance=max_distance).plan(dtype, arch).specs}
        return name

    assert {name(dim, dtype, 80) for dim in (32, 64, 128) for dtype in (DType.F16, DType.BF16)} == {"attention_mma"}
    assert {name(dim, DType.TF32, arch) for dim in (32, 64, 128) for arch in (80, 90, 120)} == {"attention_mma"}
    assert {name(dim, DType.SPLIT, arch) for dim in (32, 64, 128) for arch in (80, 90)} == {"attention_mma_split"}
    assert {name(48, DType.SPLIT, 90), name(64, DType.SPLIT, 75)} == {"attention_plain"}
    assert {name(64, DType.F32, 90), name(32, DType.F16, 75), name(128, DType.BF16, 75)} == {"attention_simt"}
    assert {name(48, DType.F32, 90), name(80, DType.F16, 120), name(256, DType.BF16, 75)} == {"attention_plain"}
    assert {name(dim, dtype, 90) for dim in (64, 128) for dtype in (DType.F16, DType.BF16)} == {"attention_wgmma"}
    assert {name(dim, dtype, 90, 8) for dim in (64, 128) for dtype in (DType.F16, DType.BF16)} == {"attention_mma"}


@pytest.mark.parametrize("arch", [75, 80, 86, 90, 120])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16, DType.TF32, DType.SPLIT])
def test_shared_memory_fits_a_block(dtype: DType, head_dim: int, arch: int) -> None:
    op = Attention(1, head_dim)
    out, qkv = (np.empty(shape, dtype.storage) for shape in ((1, head_dim), (1, 3 * head_dim)))
    for block_q in op.block_sizes(dtype, arch):
        launch = op.plan(dtype, arch).launch(out, qkv, np.array([[0, 1, 0]], np.int32), block_q)
        assert launch.smem_bytes <= {75: 64, 90: 227}.get(arch, 99) << 10


@pytest.mark.parametrize(
    ("kernel", "dtype", "head_dim"),
    [
        ("wgmma", DType.BF16, 64),
        ("wgmma", DType.BF16, 128),
        ("mma", DType.SPLIT, 32),
        ("mma", DType.SPLIT, 64),
    ],
)
def test_the_number_of_queries_of_a_block_does_not_show(kernel: AttentionKernel, dtype: DType, head_dim: int) -> None:
    small, large = (Case(kernel, dtype, 1, head_dim, arch=90, block_idx=index) for index in (0, -1))
    qkv = packed(small)
    assert small.block_q < large.block_q
    assert same_bits(attend(small, qkv, LENGTHS), attend(large, qkv, LENGTHS))


class Scaled(np.ndarray[Any, Any]):
    """An array that holds its numbers times a scale, as a split tensor of a device does."""

    scale = 1.0


def scaled(array: Array, scale: float) -> Scaled:
    view = array.view(Scaled)
    view.scale = scale
    return view


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype is DType.SPLIT], ids=str)
def test_scales_of_split_tensors_do_not_show(case: Case) -> None:
    # Both parts of these are exact with any scale, which is then a matter of exponents alone.
    values = np.float32(2.0**-20) * np.random.default_rng(23).integers(-(2**21), 2**21, (65, 3 * case.width))
    work = attention_work(np.array([0, 65]), case.block_q)
    outputs = []
    for qkv_scale, out_scale in ((1.0, 1.0), (2.0**9, 2.0**11)):
        qkv, out = narrowed(values * qkv_scale, case.dtype), poisoned((65, case.width), case.dtype)
        run(case.plan, scaled(out, out_scale), scaled(qkv, qkv_scale), work, case.block_q, *case.bias, arch=case.arch)
        outputs.append(out)
    # The second is what was computed. With a scale of 1 it ends among the smallest f16; `assert_close` allows for it.
    assert_close(outputs[0], widened(outputs[1]) / 2.0**11, UNIT[DType.SPLIT] * np.abs(values).max())


@pytest.mark.parametrize("sanitize", [False, True], ids=["", "sanitized"])
@cases
def test_an_item_of_length_0_does_nothing(case: Case, sanitize: bool) -> None:
    qkv = packed(case)
    # As they fill up a list, and where they would write first if they wrote.
    empty = np.array([[0, 0, 0], [17, 0, 0]], np.int32)
    out = poisoned((len(qkv), case.width), case.dtype)
    run(case.plan, out, qkv, empty, case.block_q, *case.bias, sanitize=sanitize, arch=case.arch)
    assert (out.view(np.uint8) == 0xFF).all()

    items = attention_work(np.cumsum([0, *LENGTHS]), case.block_q)
    among = np.concatenate([empty, items[:2], empty, items[2:]])
    run(case.plan, out, qkv, among, case.block_q, *case.bias, sanitize=sanitize, arch=case.arch)
    assert same_bits(out, attend(case, qkv, LENGTHS))


def test_only_what_an_item_names_is_computed() -> None:
    case = CASES[3]
    qkv = packed(case)
    cu_seqlens = np.cumsum([0, *LENGTHS])
    work = attention_work(cu_seqlens, case.block_q)
    firsts = work[work[:, 2] == 0]
    out = poisoned((len(qkv), case.width), case.dtype)
    run(case.plan, out, qkv, firsts, case.block_q, *case.bias, arch=case.arch)
    everything = attend(case, qkv, LENGTHS)
    for start, length, _ in firsts.tolist():
        end = start + min(length, case.block_q)
        assert same_bits(out[start:end], everything[start:end])
        assert np.isnan(out[end : start + length]).all()
