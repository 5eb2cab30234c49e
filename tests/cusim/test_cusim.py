"""The emulator: that right kernels are right, and that each kind of mistake shows."""

import re
from typing import Any

import numpy as np
import pytest

from gkd.dtype import DType
from gkd.kernel import KernelPlan, KernelSpec, Launch
from gkd.ops.contract import Array
from tests.cusim.harness import FORWARD, HERE, ORDERS, RANDOM, REVERSE, CusimError, build_all, run
from tests.numerics import narrowed, poisoned, widened

KERNELS = HERE / "kernels"
# As divergent.cu numbers them.
CASES = ("BARRIER_AND_WARP", "TWO_BARRIERS", "TWO_COLLECTIVES", "NOT_IN_MASK", "EARLY_EXIT")
RNG = np.random.default_rng(5)

orders = pytest.mark.parametrize("order", ORDERS, ids=["forward", "reverse", "random"])
builds = pytest.mark.parametrize("sanitize", [False, True], ids=["plain", "sanitized"])


def plan(name: str, defines: dict[str, int], **geometry: Any) -> KernelPlan:
    """For tests/cusim/kernels/<name>.cu, launched on the arguments as they are."""
    spec = KernelSpec(name, tuple(defines.items()))
    return KernelPlan(spec, lambda *arguments: Launch(arguments=arguments, **geometry))


def launch(
    name: str, *arguments: Any, order: int = FORWARD, sanitize: bool = False, defines: Any = None, **geometry: Any
) -> None:
    """Of one block of one warp, unless `geometry` says otherwise."""
    geometry = {"grid": (1, 1, 1), "num_threads": 32} | geometry
    run(plan(name, defines or {}, **geometry), *arguments, order=order, sanitize=sanitize, sources=KERNELS)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    variants: dict[str, list[dict[str, int]]] = {
        "async_copy": [{"NUM_THREADS": 64}],
        "divergent": [{}],
        "ptx_layouts": [{"BF16": 1}, {"F16": 1}],
        "reverse": [{"NUM_THREADS": 64, "STATIC": 0}, {"NUM_THREADS": 64, "STATIC": 1}],
        "unwritten": [{}],
        "warp_functions": [{}],
    }
    build_all((plan(name, defines).spec for name, items in variants.items() for defines in items), sources=KERNELS)


def line_of(name: str, text: str) -> str:
    """As reports spell it."""
    lines = (KERNELS / f"{name}.cu").read_text().splitlines()
    [number] = [number for number, line in enumerate(lines, 1) if text in line]
    return f"tests/cusim/kernels/{name}.cu:{number}"


# ---- Blocks, threads, barriers --------------------------------------------------------------------------------------


def reverse(
    order: int = FORWARD,
    sanitize: bool = False,
    static: int = 0,
    has_barrier: int = 1,
    shared_shift: int = 0,
    global_shift: int = 0,
    threads: Any = 64,
) -> bool:
    """Whether three blocks of 64 threads got it right."""
    x, out = RNG.standard_normal(192, dtype=np.float32), poisoned((192,), DType.F32)
    geometry = {"grid": (3, 1, 1), "num_threads": 64, "smem_bytes": 0 if static else 64 * 4}
    defines = {"NUM_THREADS": threads, "STATIC": static}
    mistakes = (has_barrier, shared_shift, global_shift)
    launch("reverse", out, x, *mistakes, defines=defines, order=order, sanitize=sanitize, **geometry)
    return np.array_equal(out.reshape(3, 64), x.reshape(3, 64)[:, ::-1])


@orders
@builds
@pytest.mark.parametrize("static", [0, 1])
def test_shared_memory_and_a_barrier(static: int, sanitize: bool, order: int) -> None:
    assert reverse(order, sanitize, static)


@orders
def test_a_missing_barrier_shows(order: int) -> None:
    assert not reverse(order, has_barrier=0)


@builds
def test_shared_memory_is_poisoned_before_each_block(sanitize: bool) -> None:
    out = np.zeros((2, 64), np.float32)
    launch("unwritten", out, grid=(2, 1, 1), smem_bytes=32 * 4, sanitize=sanitize)
    assert (out[0] == 1).all()
    assert np.isnan(out[1]).all()


def schedule(order: int) -> list[int]:
    """The threads of 2 x 2 blocks of 40 in the order in which they ran; each twice, with a barrier between."""
    out, counter = np.full(320, -1, np.int32), np.zeros(1, np.int32)
    launch("schedule", out, counter, grid=(2, 2, 1), num_threads=40, order=order)
    return [int(thread) for thread in out]


def test_orders() -> None:
    blocks = [[*range(first, first + 40)] for first in range(0, 160, 40)]
    assert schedule(FORWARD) == [thread for block in blocks for thread in block * 2]
    assert schedule(REVERSE) == [159 - thread for thread in schedule(FORWARD)]
    shuffled = schedule(RANDOM)
    assert shuffled == schedule(RANDOM)
    assert shuffled not in (schedule(FORWARD), schedule(REVERSE))
    # Each block by itself, and each thread once before the barrier and once after it.
    for start in range(0, 320, 40):
        assert sorted(shuffled[start : start + 40]) in blocks


def test_threads_that_have_returned_are_not_waited_for() -> None:
    out = np.full(80, -1, np.int32)
    launch("divergent", out, CASES.index("EARLY_EXIT"), num_threads=80)
    assert [int(value) for value in out] == ([20] * 20 + [-1] * 12) * 2 + [-1] * 16


@orders
@builds
@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "BARRIER_AND_WARP",
            r"deadlock in block \(0, 0, 0\): 62 of 64 threads wait in __syncthreads at line 10; "
            r"warp 0: lanes 0x8 wait in __syncwarp for lanes 0xfffffff7; warp 1: .*",
        ),
        ("TWO_BARRIERS", r".*__syncthreads at \S+:\d+ while other threads of the block wait at \S+:\d+"),
        ("TWO_COLLECTIVES", r".*__\w+ with mask 0xffffffff while other lanes of the warp are in __\w+ with mask .*"),
        ("NOT_IN_MASK", r".*__shfl_xor_sync: the mask 0xffff does not name the calling lane \d+"),
    ],
)
def test_threads_that_miss_each_other_end_the_launch(case: str, message: str, sanitize: bool, order: int) -> None:
    out = np.zeros(64, np.int32)
    with pytest.raises(CusimError) as error:
        launch("divergent", out, CASES.index(case), num_threads=64, order=order, sanitize=sanitize)
    assert re.fullmatch("divergent: " + message, str(error.value))


def test_a_launch_after_a_failed_one_is_whole() -> None:
    for _ in range(2):
        test_threads_that_miss_each_other_end_the_launch("TWO_BARRIERS", ".*", False, RANDOM)
        assert reverse(static=1)


# ---- Warp functions -------------------------------------------------------------------------------------------------


@orders
@builds
def test_shuffles_and_ballots(sanitize: bool, order: int) -> None:
    out = np.full((10, 32), -1, np.int32)
    launch("warp_functions", out, order=order, sanitize=sanitize)
    lane = np.arange(32)
    segment = lane // 8 * 8
    sources = [
        np.full(32, 5),
        segment + (lane + 1) % 8,
        lane ^ 3,
        np.where(lane < 16, lane, lane - 16),  # a later segment's lane is out of reach, an earlier one's is not
        np.where(lane >= 2, lane - 2, lane),
        np.where(lane % 8 >= 2, lane - 2, lane),
        np.where(lane < 30, lane + 2, lane),
        np.where(lane % 8 < 6, lane + 2, lane),
    ]
    assert np.array_equal(out[:8], 10 * np.stack(sources))
    assert {int(value) for value in out[8].view(np.uint32)} == {sum(1 << i for i in range(0, 32, 3))}
    assert np.array_equal(out[9], 10 * (lane ^ 1))


# ---- What the sanitizers see ----------------------------------------------------------------------------------------


def test_a_write_past_a_tensor_shows_without_a_sanitizer() -> None:
    for shift in (1, -1):
        with pytest.raises(CusimError, match="wrote outside tensor 0"):
            reverse(global_shift=shift)


@pytest.mark.parametrize("static", [0, 1])
def test_a_write_past_shared_memory_is_reported_with_its_line(static: int) -> None:
    with pytest.raises(CusimError, match=r"heap-buffer-overflow|global-buffer-overflow|insufficient space") as error:
        reverse(sanitize=True, static=static, shared_shift=1)
    assert line_of("reverse", "smem[i + shared_shift]") in str(error.value)


def test_a_write_past_a_tensor_is_reported_with_its_line() -> None:
    with pytest.raises(CusimError, match="AddressSanitizer: heap-buffer-overflow") as error:
        reverse(sanitize=True, global_shift=1)
    assert line_of("reverse", "out[first + i + global_shift]") in str(error.value)


def test_a_misaligned_vector_is_reported_with_its_line() -> None:
    with pytest.raises(CusimError, match="misaligned address") as error:
        launch("misaligned", np.zeros(4, np.float32), np.zeros(16, np.float32), num_threads=4, sanitize=True)
    assert line_of("misaligned", "float4 values") in str(error.value)


# ---- Arguments ------------------------------------------------------------------------------------------------------


@builds
def test_arguments_of_the_wrong_kind_are_refused(sanitize: bool) -> None:
    out, counter = np.zeros(8, np.int32), np.zeros(1, np.int32)
    for arguments in ((out,), (out, counter, 1), (out, 1), (out, 1.0), (out, counter.astype(np.int64))):
        with pytest.raises(CusimError, match=r"the launch passes `4.*`, the kernel takes `44`"):
            launch("schedule", *arguments, sanitize=sanitize)
    with pytest.raises(CusimError, match="not contiguous"):
        launch("schedule", np.zeros((4, 4), np.int32)[:, 1:], counter, sanitize=sanitize)
    with pytest.raises(CusimError, match="not str"):
        launch("schedule", "out", counter, sanitize=sanitize)


@builds
def test_a_read_only_tensor_is_left_alone(sanitize: bool) -> None:
    out, counter = np.zeros(64, np.int32), np.zeros(1, np.int32)
    counter.flags.writeable = False
    with pytest.raises(CusimError, match="wrote to a read-only tensor"):
        launch("schedule", out, counter, sanitize=sanitize)


def test_a_kernel_that_does_not_compile_says_why() -> None:
    with pytest.raises(CusimError, match=r"many.* was not declared"):
        reverse(threads="many")


# ---- PTX ------------------------------------------------------------------------------------------------------------


def async_copy(
    order: int, sanitize: bool = False, num_valid: int = 512, num_pending: int = 0, has_barrier: int = 1
) -> tuple[Array, Array]:
    """What 64 threads copied, and what they should have."""
    x, out = RNG.standard_normal(num_valid, dtype=np.float32), poisoned((512,), DType.F32)
    arguments = (out, x, num_valid, num_pending, has_barrier)
    launch("async_copy", *arguments, defines={"NUM_THREADS": 64}, num_threads=64, order=order, sanitize=sanitize)
    return out, np.concatenate([x, np.zeros(512 - num_valid, np.float32)])


@orders
@builds
def test_asynchronous_copies(sanitize: bool, order: int) -> None:
    for num_valid in (512, 300):
        out, want = async_copy(order, sanitize, num_valid)
        assert np.array_equal(out, want)


@orders
def test_a_missing_or_short_wait_shows(order: int) -> None:
    out, _ = async_copy(order, num_pending=2)
    assert np.isnan(out).all()
    out, want = async_copy(order, num_pending=1)
    assert np.array_equal(out[:256], want[:256])
    assert np.isnan(out[256:]).all()
    out, _ = async_copy(order, has_barrier=0)
    assert np.isnan(out).any()


@orders
@builds
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16])
def test_matrix_instructions(dtype: DType, sanitize: bool, order: int) -> None:
    a, b = narrowed(RNG.integers(-8, 8, (16, 16)), dtype), narrowed(RNG.integers(-8, 8, (16, 8)), dtype)
    d, plain, transposed = (poisoned(shape, DType.F32) for shape in ((16, 8), (32, 4), (32, 4)))
    inputs = (matrix.view(np.uint16) for matrix in (a, b))
    defines = {dtype.name: 1}
    launch("ptx_layouts", d, plain, transposed, *inputs, defines=defines, order=order, sanitize=sanitize)
    # Small whole numbers: exact in any order. The accumulator began as 1, 2 in a lane's first row, 3, 4 in its second.
    start = np.tile(np.repeat([[1.0, 2.0], [3.0, 4.0]], 8, axis=0), 4)
    assert np.array_equal(d, start + widened(a) @ widened(b))

    # Matrix i of four: rows 0-7 or 8-15, columns 0-7 or 8-15.
    bits = a.view(np.uint16).reshape(2, 8, 2, 8).transpose(2, 0, 1, 3).reshape(4, 8, 8)
    lane = np.arange(32)
    for got, matrices in ((plain, bits), (transposed, bits.transpose(0, 2, 1))):
        pairs = got.view(np.uint16).reshape(32, 4, 2)
        for half in range(2):
            assert np.array_equal(pairs[:, :, half], matrices[:, lane // 4, lane % 4 * 2 + half].T)


def test_matrix_instructions_need_a_whole_warp() -> None:
    d, plain, transposed = (np.zeros(shape, np.float32) for shape in ((16, 8), (32, 4), (32, 4)))
    inputs = (np.zeros(shape, np.uint16) for shape in ((16, 16), (16, 8)))
    with pytest.raises(CusimError, match="ldmatrix: needs all 32 lanes of the warp, has 0xffff"):
        launch("ptx_layouts", d, plain, transposed, *inputs, defines={"BF16": 1}, num_threads=16)


def test_conversions_and_powers() -> None:
    ties = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    spread = np.ldexp(RNG.standard_normal(20_000, dtype=np.float32), RNG.integers(-30, 20, 20_000, dtype=np.int32))
    with np.errstate(invalid="ignore"):  # signalling NaN
        x = np.concatenate([ties, ties * np.float32(1 + 2**-11), spread])
    f16, bf16 = poisoned(x.shape, DType.F16), poisoned(x.shape, DType.BF16)
    wide, powers = poisoned(x.shape, DType.F32), poisoned(x.shape, DType.F32)
    launch("conversions", f16, bf16, wide, powers, x, len(x), grid=(-(-len(x) // 256), 1, 1), num_threads=256)
    finite = ~np.isnan(x)
    with np.errstate(over="ignore", under="ignore"):
        assert np.array_equal(f16, x.astype(np.float16), equal_nan=True)
        assert np.array_equal(wide, x.astype(np.float16).astype(np.float32), equal_nan=True)
        exact = np.exp2(x[finite].astype(np.float64))
    assert np.array_equal(bf16[finite], narrowed(x[finite], DType.BF16))
    assert np.isnan(widened(bf16[~finite])).all() and np.isnan(powers[~finite]).all()
    # 2^-22.5 relative, as the instruction promises; what is subnormal is zero.
    exact[exact < 2.0**-126] = 0
    exact[exact > np.finfo(np.float32).max] = np.inf
    normal = np.isfinite(exact) & (exact > 0)
    got = powers[finite].astype(np.float64)
    assert (np.abs(got[normal] - exact[normal]) <= 2.0**-22.5 * exact[normal]).all()
    assert np.array_equal(got[~normal], exact[~normal])
