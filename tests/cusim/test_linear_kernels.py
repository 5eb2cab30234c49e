"""The kernels of linear layers on the CPU: against float64, in their order of sums, and row by row."""

import itertools
import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from gkd.dtype import DType
from gkd.kernel import KernelPlan, KernelSpec
from gkd.ops.contract import Array
from gkd.ops.linear import _MMA, _MMA_FEW_ROWS, Activation, Linear, LinearKernel, _mma_tiling, _wgmma_tiling
from tests.cusim.harness import FORWARD, ORDERS, build_all, run
from tests.numerics import assert_close, narrowed, poisoned, widened


@dataclass(frozen=True)
class Case:
    kernel: LinearKernel
    dtype: DType
    in_features: int
    out_features: int
    activation: Activation
    arch: int = 80
    to_sum: bool = False

    @property
    def out_dtype(self) -> DType:
        return self.dtype.summand if self.to_sum else self.dtype

    @property
    def op(self) -> Linear:
        return Linear(self.in_features, self.out_features, self.activation, kernel=self.kernel, to_sum=self.to_sum)

    @property
    def plan(self) -> KernelPlan:
        return self.op.plan(self.dtype, self.arch)

    @property
    def rows(self) -> tuple[int, ...]:
        return {"wgmma": (1, 3, 130, 300), "auto": (1, 17, 60, 130)}.get(self.kernel, (1, 3, 17, 130))

    def __str__(self) -> str:
        sizes = f"{self.in_features}-{self.out_features}"
        return f"{self.kernel}-{self.dtype.value}-{sizes}-{self.activation}-sm_{self.arch}{'-sum' * self.to_sum}"


CASES = (
    Case("simt", DType.F32, 32, 8, "none"),
    Case("simt", DType.F32, 500, 130, "gelu"),
    Case("simt", DType.F32, 81, 33, "none"),  # rows that no vector load can read
    Case("simt", DType.F16, 80, 33, "gelu", arch=75),
    Case("simt", DType.BF16, 96, 33, "gelu", arch=75),  # bf16 rounded without its instruction
    Case("simt", DType.TF32, 81, 33, "gelu"),
    Case("mma", DType.BF16, 32, 8, "none"),  # half a tile of K, and fewer tiles than stages
    Case("mma", DType.F16, 80, 33, "gelu"),
    Case("mma", DType.BF16, 96, 130, "none"),
    Case("mma", DType.F16, 328, 136, "gelu"),  # every stage is used twice
    Case("mma", DType.TF32, 16, 8, "none"),
    Case("mma", DType.TF32, 44, 33, "gelu"),
    Case("mma", DType.TF32, 164, 130, "gelu", to_sum=True),
    Case("wgmma", DType.BF16, 32, 8, "none", arch=90),
    Case("wgmma", DType.F16, 80, 136, "gelu", arch=90),
    Case("wgmma", DType.BF16, 328, 264, "none", arch=90),  # of 300 rows a block has 4 or 5 tiles
    Case("wgmma", DType.F16, 712, 136, "gelu", arch=90),  # one tile goes more than twice round the stages
    Case("wgmma", DType.TF32, 16, 8, "none", arch=90),
    Case("wgmma", DType.TF32, 164, 264, "gelu", arch=90),
    Case("wgmma", DType.TF32, 484, 136, "none", arch=90, to_sum=True),
    Case("wgmma", DType.SPLIT, 64, 8, "none", arch=90),  # one chunk
    Case("wgmma", DType.SPLIT, 192, 136, "gelu", arch=90),
    Case("wgmma", DType.SPLIT, 512, 264, "none", arch=90, to_sum=True),
    # For few rows; the last tilings of `auto` are those above.
    Case("auto", DType.BF16, 64, 8, "none", arch=90),
    Case("auto", DType.F16, 128, 136, "gelu", arch=90),
    Case("auto", DType.BF16, 320, 264, "none", arch=90),
    Case("auto", DType.F16, 768, 72, "none", arch=90),
    Case("auto", DType.TF32, 32, 8, "none", arch=90),
    Case("auto", DType.TF32, 160, 136, "gelu", arch=90),
    Case("auto", DType.TF32, 384, 72, "none", arch=90, to_sum=True),
    Case("auto", DType.SPLIT, 64, 8, "none", arch=90),
    Case("auto", DType.SPLIT, 192, 40, "gelu", arch=90),
    Case("auto", DType.SPLIT, 1216, 24, "none", arch=90, to_sum=True),  # more chunks than warps
)
WGMMA_CASES = tuple(case for case in CASES if case.kernel == "wgmma" and case.dtype is not DType.SPLIT)
FEW_CASES = tuple(case for case in CASES if case.kernel == "auto")


def peer_of(case: Case) -> Case:
    """Another kernel, which has the same bits."""
    if case.dtype is DType.SPLIT:
        return replace(case, kernel="wgmma")
    return replace(case, kernel="mma", arch=80)


cases = pytest.mark.parametrize("case", CASES, ids=str)
cases_of_few = pytest.mark.parametrize("case", FEW_CASES, ids=str)
cases_and_rows = pytest.mark.parametrize(
    ("case", "num_rows"), [pytest.param(case, rows, id=f"{case}-{rows}") for case in CASES for rows in case.rows]
)


def specs(case: Case) -> set[KernelSpec]:
    """Of the launches of this module: for few rows there are kernels of their own."""
    weight, bias = np.empty((case.out_features, case.in_features), case.dtype.storage), np.empty(case.out_features)
    tensors = ((np.empty((n, case.out_features)), np.empty((n, case.in_features))) for n in case.rows)
    return {case.plan.launch(out, x, weight, bias, np.array([1])).spec for out, x in tensors}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    for arch in {case.arch for case in CASES}:
        build_all([spec for case in CASES if case.arch == arch for spec in specs(case)], arch=arch)
    peers = [peer_of(case) for case in (*WGMMA_CASES, *FEW_CASES)]
    for arch in (80, 90):
        build_all([spec for peer in peers if peer.arch == arch for spec in specs(peer)], arch=arch, sanitize=[False])


@cache
def operands(case: Case) -> tuple[Array, Array, Array]:
    """x of the most rows, weight, bias."""
    rng = np.random.default_rng(11)
    x, weight = (
        rng.standard_normal((case.rows[-1], case.in_features)),
        rng.standard_normal((case.out_features, case.in_features)),
    )
    return (
        narrowed(x, case.dtype),
        narrowed(weight, case.dtype),
        rng.standard_normal(case.out_features).astype(np.float32),
    )


def launch(
    case: Case,
    x: Array,
    weight: Array,
    bias: Array,
    order: int = FORWARD,
    sanitize: bool = False,
    num_sms: int = 2,
) -> Array:
    """The output, over memory in which an element left unwritten is a NaN; the rows after it stay as they were."""
    memory = poisoned((len(x) + 2, case.out_features), case.out_dtype)
    arguments = (memory[: len(x)], x, weight, bias, np.array([len(x)], np.int32))
    case.op.check(*arguments)
    run(case.plan, *arguments, order=order, sanitize=sanitize, arch=case.arch, num_sms=num_sms)
    assert (memory[len(x) :].view(np.uint8) == 0xFF).all(), "rows past the end were written"
    return memory[: len(x)]


def assert_exact_enough(case: Case, out: Array, x: Array, weight: Array, bias: Array) -> None:
    x, weight, bias = widened(x), widened(weight), bias.astype(np.float64)
    expected = np.empty(out.shape)
    case.op.reference(expected, x, weight, bias, np.array([len(x)]))
    magnitude = np.abs(x) @ np.abs(weight.T) + np.abs(bias)
    # in_features products and the bias are added one after another, in any order and with 1 ulp of fp32 an addition.
    bound = (case.in_features + 1) * 2.0**-23 * magnitude
    if case.dtype is DType.SPLIT:
        # Three products for one, and the fourth, of the low parts, is left out: 2^-11 of each factor.
        bound = 3 * bound + 2.0**-22 * magnitude
    if case.activation == "gelu":
        # Its slope is 1.13 at most; its own error is that of test_gelu_over_its_range.
        bound = 1.13 * bound + 2.0**-22 * np.abs(x @ weight.T + bias)
    assert_close(out, expected, bound)


@cases_and_rows
def test_matches_float64_in_any_schedule(case: Case, num_rows: int) -> None:
    x, weight, bias = operands(case)
    x = x[:num_rows].copy()
    outputs = [launch(case, x, weight, bias, order) for order in ORDERS]
    assert_exact_enough(case, outputs[0], x, weight, bias)
    assert all(np.array_equal(out.view(np.uint8), outputs[0].view(np.uint8)) for out in outputs)


@cases_and_rows
def test_reads_and_writes_inside_its_arrays(case: Case, num_rows: int) -> None:
    x, weight, bias = operands(case)
    x = x[:num_rows].copy()
    out = np.zeros((num_rows, case.out_features), case.out_dtype.storage)
    run(case.plan, out, x, weight, bias, np.array([num_rows], np.int32), sanitize=True, arch=case.arch)
    assert np.array_equal(out, launch(case, x, weight, bias))


@cases
def test_a_row_has_its_bits_alone_and_in_any_company(case: Case) -> None:
    x, weight, bias = operands(case)
    together = launch(case, x, weight, bias)
    for row in (0, 5, 127, 129):
        alone = launch(case, x[row : row + 1].copy(), weight, bias)
        assert np.array_equal(alone[0], together[row])
        # In another place, among rows that spoil whatever they touch.
        for place in (2, 70):
            company = narrowed(np.full((101, case.in_features), np.nan), case.dtype)
            company[place] = x[row]
            assert np.array_equal(launch(case, company, weight, bias)[place], together[row])


@cases
def test_a_column_has_its_bits_in_any_place(case: Case) -> None:
    x, weight, bias = operands(case)
    x = x[:17].copy()
    turn = case.out_features // 2 + 1
    turned = widened(launch(case, x, np.roll(weight, turn, axis=0), np.roll(bias, turn)))
    assert np.array_equal(turned, np.roll(widened(launch(case, x, weight, bias)), turn, axis=1))


@pytest.mark.parametrize("dtype", [DType.F16, DType.TF32])
def test_the_shape_of_tiles_does_not_show(dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, case = (case for case in CASES if case.kernel == "mma" and case.dtype is dtype)
    x, weight, bias = operands(case)
    tilings = [_MMA, _mma_tiling((64, 128), (64, 64), num_stages=2), *(tiling for _, tiling in _MMA_FEW_ROWS)]
    outputs = []
    for tiling in tilings:
        monkeypatch.setattr("gkd.ops.linear._MMA_FEW_ROWS", ((math.inf, tiling),))
        outputs.append(launch(case, x, weight, bias))
    assert all(np.array_equal(out, outputs[0]) for out in outputs)


@pytest.mark.parametrize("num_rows", [0, 1, 3, 40])
@cases
def test_rows_past_the_count_cost_and_change_nothing(case: Case, num_rows: int) -> None:
    x, weight, bias = operands(case)
    x = x[:100].copy()
    together = launch(case, x, weight, bias)
    x[num_rows:] = poisoned((100 - num_rows, case.in_features), case.dtype)
    out = poisoned((100, case.out_features), case.out_dtype)
    run(case.plan, out, x, weight, bias, np.array([num_rows], np.int32), arch=case.arch)
    assert np.array_equal(out[:num_rows], together[:num_rows])


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize(("in_features", "tiling", "result_bytes"), [(328, "_WGMMA", 2), (164, "_WGMMA_TF32", 0)])
def test_the_number_of_stages_does_not_show(
    in_features: int, tiling: str, result_bytes: int, num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in WGMMA_CASES if case.in_features == in_features)
    x, weight, bias = operands(case)
    expected = launch(case, x, weight, bias)
    monkeypatch.setattr(f"gkd.ops.linear.{tiling}", _wgmma_tiling(num_stages, result_bytes))
    assert all(np.array_equal(launch(case, x, weight, bias, order), expected) for order in ORDERS)


@pytest.mark.parametrize("case", WGMMA_CASES, ids=str)
def test_wgmma_has_the_bits_of_mma_on_any_number_of_blocks(case: Case) -> None:
    x, weight, bias = operands(case)
    expected = launch(peer_of(case), x, weight, bias)
    assert all(np.array_equal(launch(case, x, weight, bias, num_sms=num_sms), expected) for num_sms in (1, 2, 3, 99))


@cases_of_few
def test_few_rows_have_the_bits_of_many(case: Case) -> None:
    x, weight, bias = operands(case)
    expected = launch(peer_of(case), x, weight, bias)
    for num_rows in case.rows:
        assert np.array_equal(launch(case, x[:num_rows].copy(), weight, bias), expected[:num_rows])


@pytest.mark.parametrize(("num_blocks", "smem_kib"), [(1, 68), (1000, 40)])
@cases_of_few
def test_how_few_rows_are_cut_does_not_show(
    case: Case, num_blocks: int, smem_kib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wide and narrow tiles, from as few stages as there can be."""
    x, weight, bias = operands(case)
    expected = launch(peer_of(case), x, weight, bias)
    monkeypatch.setattr("gkd.ops.linear._FEW_BLOCKS", num_blocks)
    monkeypatch.setattr("gkd.ops.linear._FEW_SMEM_BYTES", smem_kib << 10)
    for num_rows, order in zip(case.rows, itertools.cycle(ORDERS)):
        assert np.array_equal(launch(case, x[:num_rows].copy(), weight, bias, order), expected[:num_rows])


@pytest.mark.parametrize("in_features", [81, 500])
def test_simt_adds_chains_of_64(in_features: int) -> None:
    case = next(case for case in CASES if case.dtype is DType.F32 and case.in_features == in_features)
    rng = np.random.default_rng(3)

    def short(*shape: int) -> Array:
        """Of 8 bits and like exponents: in float64 a product and its sum with a chain are exact before the rounding."""
        values = rng.integers(-255, 256, shape) * np.exp2(rng.integers(-4, 4, shape))
        return values.astype(np.float32)

    x, weight, bias = short(5, in_features), short(case.out_features, in_features), short(case.out_features)
    total = np.zeros((5, case.out_features), np.float32)
    for first in range(0, in_features, 64):
        chain = np.zeros_like(total)
        for k in range(first, min(first + 64, in_features)):
            chain = (chain.astype(np.float64) + np.outer(x[:, k], weight[:, k]).astype(np.float64)).astype(np.float32)
        total += chain
    plain = Case("simt", DType.F32, in_features, case.out_features, "none")
    assert np.array_equal(launch(plain, x, weight, bias), total + bias)


def test_gelu_over_its_range() -> None:
    """The one product of in_features = 1 is exact, so what is seen is gelu alone."""
    case = Case("simt", DType.F32, 1, 1, "gelu")
    edges = [0.0, -0.0, 1e-38, -1e-38, 3e38, -3e38, np.inf, np.nan]
    x = np.concatenate([np.linspace(-20, 20, 20_001), np.geomspace(1e-30, 1, 100), edges]).astype(np.float32)[:, None]
    out = launch(case, x, np.ones((1, 1), np.float32), np.zeros(1, np.float32))
    assert np.isnan(out[-1, 0]) and np.isposinf(out[-2, 0])
    finite, expected = x[:-2].astype(np.float64), np.empty((len(x) - 2, 1))
    case.op.reference(expected, finite, np.ones((1, 1)), np.zeros(1), np.array([len(finite)]))
    assert (np.abs(out[:-2] - expected) <= 2.0**-22 * np.maximum(np.abs(finite), 2.0**-126)).all()


def test_auto_takes_tensor_cores_where_it_can() -> None:
    def name(in_features: int, dtype: DType, arch: int) -> str:
        [name] = {spec.name for spec in Linear(in_features, 33).plan(dtype, arch).specs}
        return name

    assert name(80, DType.BF16, 80) == name(80, DType.F16, 120) == name(84, DType.TF32, 80) == "linear_mma"
    assert name(80, DType.F32, 90) == name(80, DType.F16, 75) == name(500, DType.F16, 90) == "linear_simt"
    assert name(82, DType.TF32, 90) == "linear_simt"
