"""linear_simt, linear_mma and linear_wgmma on the CPU: against float64, in their order of sums, and row by row."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from gkd.dtype import DType
from gkd.kernel import KernelPlan
from gkd.ops.cast import Cast
from gkd.ops.contract import Array
from gkd.ops.linear import Activation, Linear, LinearKernel, _mma_tiling, _wgmma_tiling
from tests.cusim.harness import FORWARD, ORDERS, build_all, run

UNIT_ROUNDOFF = {DType.F32: 2.0**-24, DType.F16: 2.0**-11, DType.BF16: 2.0**-8}
SMALLEST_NORMAL = {DType.F32: 2.0**-126, DType.F16: 2.0**-14, DType.BF16: 2.0**-126}


@dataclass(frozen=True)
class Case:
    kernel: LinearKernel
    dtype: DType
    in_features: int
    out_features: int
    activation: Activation
    arch: int = 80

    @property
    def op(self) -> Linear:
        return Linear(self.in_features, self.out_features, self.activation, self.kernel)

    @property
    def plan(self) -> KernelPlan:
        return self.op.plan(self.dtype, self.arch)

    @property
    def rows(self) -> tuple[int, ...]:
        return (1, 3, 130, 300) if self.kernel == "wgmma" else (1, 3, 17, 130)

    def __str__(self) -> str:
        sizes = f"{self.in_features}-{self.out_features}"
        return f"{self.kernel}-{self.dtype.value}-{sizes}-{self.activation}-sm_{self.arch}"


CASES = (
    Case("simt", DType.F32, 32, 8, "none"),
    Case("simt", DType.F32, 500, 130, "gelu"),
    Case("simt", DType.F32, 81, 33, "none"),  # rows that no vector load can read
    Case("simt", DType.F16, 80, 33, "gelu", arch=75),
    Case("simt", DType.BF16, 96, 33, "gelu", arch=75),  # bf16 rounded without its instruction
    Case("mma", DType.BF16, 32, 8, "none"),  # half a tile of K, and fewer tiles than stages
    Case("mma", DType.F16, 80, 33, "gelu"),
    Case("mma", DType.BF16, 96, 130, "none"),
    Case("mma", DType.F16, 328, 136, "gelu"),  # every stage is used twice
    Case("wgmma", DType.BF16, 32, 8, "none", arch=90),
    Case("wgmma", DType.F16, 80, 136, "gelu", arch=90),
    Case("wgmma", DType.BF16, 328, 264, "none", arch=90),  # of 300 rows a block has 4 or 5 tiles
    Case("wgmma", DType.F16, 712, 136, "gelu", arch=90),  # one tile goes more than twice round the stages
)
WGMMA_CASES = tuple(case for case in CASES if case.kernel == "wgmma")


def mma_of(case: Case) -> Case:
    """Which has the same bits."""
    return replace(case, kernel="mma", arch=80)


cases = pytest.mark.parametrize("case", CASES, ids=str)
cases_and_rows = pytest.mark.parametrize(
    ("case", "num_rows"), [pytest.param(case, rows, id=f"{case}-{rows}") for case in CASES for rows in case.rows]
)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    for arch in {case.arch for case in CASES}:
        build_all([case.plan.spec for case in CASES if case.arch == arch], arch=arch)
    build_all([mma_of(case).plan.spec for case in WGMMA_CASES], sanitize=[False])


def to_dtype(x: Array, dtype: DType) -> Array:
    out = np.empty(x.shape, dtype.storage)
    Cast(DType.F32, dtype).reference(out, x.astype(np.float32))
    return out


def to_float64(x: Array, dtype: DType) -> Array:
    out = np.empty(x.shape, np.float32)
    Cast(dtype, DType.F32).reference(out, x)
    return out.astype(np.float64)


@cache
def operands(case: Case) -> tuple[Array, Array, Array]:
    """x of the most rows, weight, bias."""
    rng = np.random.default_rng(11)
    x, weight = (
        rng.standard_normal((case.rows[-1], case.in_features)),
        rng.standard_normal((case.out_features, case.in_features)),
    )
    return (
        to_dtype(x, case.dtype),
        to_dtype(weight, case.dtype),
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
    poisoned = np.full((len(x) + 2, case.out_features), -1, np.dtype(f"i{case.dtype.itemsize}")).view(
        case.dtype.storage
    )
    out = poisoned[: len(x)]
    case.op.check(out, x, weight, bias)
    run(case.plan, out, x, weight, bias, order=order, sanitize=sanitize, arch=case.arch, num_sms=num_sms)
    assert (poisoned[len(x) :].view(np.uint8) == 0xFF).all(), "rows past the end were written"
    return out


def assert_exact_enough(case: Case, out: Array, x: Array, weight: Array, bias: Array) -> None:
    x, weight, bias = to_float64(x, case.dtype), to_float64(weight, case.dtype), bias.astype(np.float64)
    expected = np.empty(out.shape)
    case.op.reference(expected, x, weight, bias)
    # in_features products and the bias are added one after another, in any order and with 1 ulp of fp32 an addition.
    bound = (case.in_features + 1) * 2.0**-23 * (np.abs(x) @ np.abs(weight.T) + np.abs(bias))
    if case.activation == "gelu":
        # Its slope is 1.13 at most; its own error is that of test_gelu_over_its_range.
        bound = 1.13 * bound + 2.0**-22 * np.abs(x @ weight.T + bias)
    # The one rounding to T.
    bound += UNIT_ROUNDOFF[case.dtype] * np.maximum(np.abs(expected) + bound, SMALLEST_NORMAL[case.dtype])
    error = np.abs(to_float64(out, case.dtype) - expected)
    assert (error <= bound).all(), f"{np.where(np.isnan(error), np.inf, error / bound).max()} times the bound"


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
    out = np.zeros((num_rows, case.out_features), case.dtype.storage)
    run(case.plan, out, x, weight, bias, sanitize=True, arch=case.arch)
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
            company = to_dtype(np.full((101, case.in_features), np.nan), case.dtype)
            company[place] = x[row]
            assert np.array_equal(launch(case, company, weight, bias)[place], together[row])


@cases
def test_a_column_has_its_bits_in_any_place(case: Case) -> None:
    x, weight, bias = operands(case)
    x = x[:17].copy()
    turn = case.out_features // 2 + 1
    turned = launch(case, x, np.roll(weight, turn, axis=0), np.roll(bias, turn))
    assert np.array_equal(turned, np.roll(launch(case, x, weight, bias), turn, axis=1))


def test_the_shape_of_tiles_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case.kernel == "mma" and case.in_features == 328)
    x, weight, bias = operands(case)
    expected = launch(case, x, weight, bias)
    monkeypatch.setattr("gkd.ops.linear._MMA", _mma_tiling(64, 128, num_stages=2))
    assert np.array_equal(launch(case, x, weight, bias), expected)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_the_number_of_stages_does_not_show(num_stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in WGMMA_CASES if case.in_features == 328)
    x, weight, bias = operands(case)
    expected = launch(case, x, weight, bias)
    monkeypatch.setattr("gkd.ops.linear._WGMMA", _wgmma_tiling(num_stages))
    assert all(np.array_equal(launch(case, x, weight, bias, order), expected) for order in ORDERS)


@pytest.mark.parametrize("case", WGMMA_CASES, ids=str)
def test_wgmma_has_the_bits_of_mma_on_any_number_of_blocks(case: Case) -> None:
    x, weight, bias = operands(case)
    expected = launch(mma_of(case), x, weight, bias)
    assert all(np.array_equal(launch(case, x, weight, bias, num_sms=num_sms), expected) for num_sms in (1, 2, 3, 99))


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
    case.op.reference(expected, finite, np.ones((1, 1)), np.zeros(1))
    assert (np.abs(out[:-2] - expected) <= 2.0**-22 * np.maximum(np.abs(finite), 2.0**-126)).all()


def test_auto_takes_tensor_cores_where_it_can() -> None:
    def name(in_features: int, dtype: DType, arch: int) -> str:
        return Linear(in_features, 33).plan(dtype, arch).spec.name

    assert name(80, DType.BF16, 80) == name(80, DType.F16, 120) == "linear_mma"
    assert name(80, DType.F32, 90) == name(80, DType.F16, 75) == name(500, DType.F16, 90) == "linear_simt"
