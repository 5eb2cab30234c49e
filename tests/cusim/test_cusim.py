"""The emulator: that right kernels are right, and that each kind of mistake shows."""

import re
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from gkd.dtype import DType
from gkd.kernel import KernelPlan, KernelSpec, Launch, TensorMap
from gkd.ops.contract import Array
from tests.cusim.harness import FORWARD, HERE, ORDERS, RANDOM, REVERSE, CusimError, build_all, run
from tests.numerics import narrowed, poisoned, widened

KERNELS = HERE / "kernels"
BOX_ROWS, NUM_PHASES = 16, 5
RNG = np.random.default_rng(5)

orders = pytest.mark.parametrize("order", ORDERS, ids=["forward", "reverse", "random"])
builds = pytest.mark.parametrize("sanitize", [False, True], ids=["plain", "sanitized"])


def plan(name: str, defines: dict[str, int], **geometry: Any) -> KernelPlan:
    """For tests/cusim/kernels/<name>.cu, launched on the arguments as they are."""
    spec = KernelSpec(name, tuple(defines.items()))
    return KernelPlan((spec,), lambda *arguments: Launch(spec, arguments=arguments, **geometry))


def launch(
    name: str,
    *arguments: Any,
    order: int = FORWARD,
    sanitize: bool = False,
    arch: int = 80,
    defines: Any = None,
    **geometry: Any,
) -> None:
    """Of one block of one warp, unless `geometry` says otherwise."""
    geometry = {"grid": (1, 1, 1), "num_threads": 32} | geometry
    run(plan(name, defines or {}, **geometry), *arguments, order=order, sanitize=sanitize, arch=arch, sources=KERNELS)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    variants: dict[str, list[dict[str, int]]] = {
        "async_copy": [{"NUM_THREADS": 64}],
        "divergent": [{}],
        "ptx_layouts": [{"BF16": 1}, {"F16": 1}, {"TF32": 1}],
        "reverse": [{"NUM_THREADS": 64, "STATIC": 0}, {"NUM_THREADS": 64, "STATIC": 1}],
        "unwritten": [{}],
        "warp_functions": [{}],
    }
    sm90_variants: dict[str, list[dict[str, int]]] = {
        "box_copies": [{"BOX_ROWS": BOX_ROWS}],
        "mbarriers": [{"NUM_PHASES": NUM_PHASES}],
        "named_barriers": [{}],
        "plane_copies": [{"BOX_ROWS": BOX_ROWS, "BOX_PLANES": 2}],
        "wgmma_products": [{"DTYPE_BF16": 1}, {"DTYPE_F16": 1}, {"DTYPE_TF32": 1}],
    }
    for arch, group in ((80, variants), (90, sm90_variants)):
        specs = (spec for name, items in group.items() for defines in items for spec in plan(name, defines).specs)
        build_all(specs, arch=arch, sources=KERNELS)


def case_number(name: str, case: str) -> int:
    """As the kernel's `enum Case` has it."""
    enumerators = re.search(r"enum Case \{([^}]*)\}", (KERNELS / f"{name}.cu").read_text())
    assert enumerators
    return enumerators[1].replace(",", " ").split().index(case)


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
    geometry: dict[str, Any] = {"grid": (3, 1, 1), "num_threads": 64, "smem_bytes": 0 if static else 64 * 4}
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
    launch("divergent", out, case_number("divergent", "EARLY_EXIT"), num_threads=80)
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
        launch("divergent", out, case_number("divergent", case), num_threads=64, order=order, sanitize=sanitize)
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
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.TF32])
def test_matrix_instructions(dtype: DType, sanitize: bool, order: int) -> None:
    depth = 32 // dtype.itemsize
    a, b = (narrowed(RNG.integers(-8, 8, shape), dtype) for shape in ((16, depth), (depth, 8)))
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


@pytest.mark.parametrize("rounded", [True, False])
def test_an_operand_of_tf32_that_was_not_rounded_is_an_error(rounded: bool) -> None:
    a, b = (narrowed(np.ones(shape), DType.TF32) for shape in ((16, 8), (8, 8)))
    a.view(np.uint32)[3, 4] |= 1 << (13 if rounded else 12)
    outputs = (poisoned(shape, DType.F32) for shape in ((16, 8), (32, 4), (32, 4)))
    inputs = (matrix.view(np.uint16) for matrix in (a, b))
    with nullcontext() if rounded else pytest.raises(CusimError, match=r"an operand of 1\.00048828 was not rounded"):
        launch("ptx_layouts", *outputs, *inputs, defines={"TF32": 1})


def test_conversions_and_powers() -> None:
    ties = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    spread = np.ldexp(RNG.standard_normal(20_000, dtype=np.float32), RNG.integers(-30, 20, 20_000, dtype=np.int32))
    with np.errstate(invalid="ignore"):  # signalling NaN
        x = np.concatenate([ties, ties * np.float32(1 + 2**-11), spread])
    f16, bf16, tf32 = (poisoned(x.shape, dtype) for dtype in (DType.F16, DType.BF16, DType.TF32))
    wide, powers = poisoned(x.shape, DType.F32), poisoned(x.shape, DType.F32)
    outputs = (f16, bf16, tf32, wide, powers)
    launch("conversions", *outputs, x, len(x), grid=(-(-len(x) // 256), 1, 1), num_threads=256)
    finite = ~np.isnan(x)
    with np.errstate(over="ignore", under="ignore"):
        assert np.array_equal(f16, x.astype(np.float16), equal_nan=True)
        assert np.array_equal(wide, x.astype(np.float16).astype(np.float32), equal_nan=True)
        exact = np.exp2(x[finite].astype(np.float64))
    assert np.array_equal(bf16[finite], narrowed(x[finite], DType.BF16))
    assert np.array_equal(tf32[finite], narrowed(x[finite], DType.TF32))
    assert all(np.isnan(widened(out[~finite])).all() for out in (bf16, tf32, powers))
    # 2^-22.5 relative, as the instruction promises; what is subnormal is zero.
    exact[exact < 2.0**-126] = 0
    exact[exact > np.finfo(np.float32).max] = np.inf
    normal = np.isfinite(exact) & (exact > 0)
    got = powers[finite].astype(np.float64)
    assert (np.abs(got[normal] - exact[normal]) <= 2.0**-22.5 * exact[normal]).all()
    assert np.array_equal(got[~normal], exact[~normal])


# ---- sm_90 ----------------------------------------------------------------------------------------------------------


def sm90(name: str, case: str, *arguments: Any, **options: Any) -> None:
    launch(name, *arguments, case_number(name, case), arch=90, **options)


def box_copies(
    case: str, order: int = FORWARD, sanitize: bool = False, dtype: DType = DType.BF16, column: int = 0, row: int = 0
) -> tuple[Array, Array, Array, Array]:
    """What came to lie in shared memory and where it should go, each followed by what that should be."""
    width = 128 // dtype.itemsize
    x = narrowed(RNG.standard_normal((20, width + 16)), dtype)
    out, seen = poisoned(x.shape, dtype), np.zeros((BOX_ROWS, 32), np.int32)
    arguments = (TensorMap(out, BOX_ROWS), TensorMap(x, BOX_ROWS), seen, column, row)
    sm90("box_copies", case, *arguments, defines={"BOX_ROWS": BOX_ROWS}, order=order, sanitize=sanitize)

    # The box within zeros on all sides, its chunks of 16 bytes exchanged; and what of it is inside.
    surrounded = np.pad(x, ((32, 32), (128, 128)))
    box = surrounded[32 + row : 32 + row + BOX_ROWS, 128 + column : 128 + column + width]
    rows, chunks = np.ogrid[:BOX_ROWS, :8]
    swizzled = np.ascontiguousarray(box).view(np.int32).reshape(BOX_ROWS, 8, 4)[rows, chunks ^ rows % 8]
    want = poisoned(x.shape, dtype)
    inside = slice(max(row, 0), max(row + BOX_ROWS, 0)), slice(max(column, 0), max(column + width, 0))
    want[inside] = x[inside]
    return seen, swizzled.reshape(BOX_ROWS, 32), out, want


@orders
@builds
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F32])
def test_boxes_come_and_go(dtype: DType, sanitize: bool, order: int) -> None:
    # Inside, over each edge, at places that are no multiple of 16 bytes, and outside.
    for column, row in ((0, 0), (8, 3), (21, 9), (-5, -3), (90, 0), (0, -32)):
        seen, swizzled, out, want = box_copies("RIGHT", order, sanitize, dtype, column, row)
        assert np.array_equal(seen, swizzled)
        assert np.array_equal(out.view(np.uint8), want.view(np.uint8))


@orders
@pytest.mark.parametrize("case", ["READ_EARLY", "PHASE_AHEAD"])
def test_a_box_that_has_not_come_is_nan(case: str, order: int) -> None:
    seen, _, out, want = box_copies(case, order)
    assert (seen == -1).all()
    assert np.array_equal(out, want)


@orders
@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "TOO_MANY_BYTES",
            r"deadlock in block \(0, 0, 0\): thread \d+ and 31 more wait for parity 0 of the mbarrier at shared memory "
            r"\+ 0x\w+, which lacks 0 of 1 arrivals and 16 bytes",
        ),
        ("TOO_FEW_BYTES", r"deadlock .* lacks 0 of 1 arrivals and -16 bytes"),
        ("NOBODY_WAITS", r"block \(0, 0, 0\) ended with 1 copies by tma_load_2d under way"),
        ("TWICE", "tma_load_2d: an earlier copy to the same place is still under way"),
        ("MISALIGNED", "tma_load_2d: the box is not aligned to 1024 bytes"),
        ("NOT_SHARED", "tma_load_2d: the box of 2048 bytes is not in shared memory"),
        ("NO_BARRIER", r"tma_load_2d: the barrier at shared memory \+ 0x\w+ is not initialised"),
        ("OVERWRITTEN", r"tma_store_2d: shared memory \+ 0x\w+ was changed before bulk_wait_read"),
        ("NO_COMMIT", "returns after a tma_store_2d without bulk_commit and bulk_wait_read"),
        ("NO_WAIT", "returns after a tma_store_2d without bulk_commit and bulk_wait_read"),
    ],
)
def test_misused_copies_end_the_launch(case: str, message: str, order: int) -> None:
    with pytest.raises(CusimError, match=message):
        box_copies(case, order)


def plane_copies(
    x: Array, slices: int, case: str = "RIGHT", order: int = FORWARD, sanitize: bool = False, place: Any = (0, 0, 0)
) -> Array:
    """What came to lie in shared memory, two planes one after another: 16-bit halves, (planes, rows, 64)."""
    seen = np.zeros((2, BOX_ROWS, 32), np.int32)
    defines = {"BOX_ROWS": BOX_ROWS, "BOX_PLANES": 2}
    arguments = (TensorMap(x, BOX_ROWS, slices), seen, *place)
    sm90("plane_copies", case, *arguments, defines=defines, order=order, sanitize=sanitize)
    rows, chunks = np.ogrid[:BOX_ROWS, :8]
    # The swizzle is its own inverse.
    return seen.view(np.uint16).reshape(2, BOX_ROWS, 8, 8)[:, rows, chunks ^ rows % 8].reshape(2, BOX_ROWS, 64)


@orders
@builds
@pytest.mark.parametrize("dtype", [DType.BF16, DType.SPLIT])
def test_boxes_of_planes_come(dtype: DType, sanitize: bool, order: int) -> None:
    # Four slices of 64 columns, of which a box has two; or the high and the low parts of 80 numbers.
    is_split = dtype is DType.SPLIT
    x = narrowed(RNG.standard_normal((20, 80 if is_split else 256)), dtype)
    planes = x.view(np.uint16).reshape(20, 2 if is_split else 4, -1).transpose(1, 0, 2)
    surrounded = np.pad(planes, ((4, 4), (32, 32), (128, 128)))
    for column, row, plane in ((0, 0, 0), (8, 3, 0), (24, 15, 1), (-5, -3, -1), (0, 0, 3), (0, 30, 0)):
        seen = plane_copies(x, 0 if is_split else 2, "RIGHT", order, sanitize, (column, row, plane))
        planes_of_box = slice(4 + plane, 6 + plane)
        box = surrounded[planes_of_box, 32 + row : 32 + row + BOX_ROWS, 128 + column : 128 + column + 64]
        assert np.array_equal(seen, box)


def test_a_copy_has_the_dimensions_of_its_map() -> None:
    with pytest.raises(CusimError, match="tma_load_2d: the tensor map has 3 dimensions"):
        plane_copies(np.zeros((8, 128), np.uint16), 2, "IN_TWO_DIMENSIONS")
    with pytest.raises(CusimError, match="tma_load_3d: the tensor map has 2 dimensions"):
        plane_copies(np.zeros((8, 128), np.uint16), 0)


@pytest.mark.parametrize(("columns", "slices", "message"), [(72, 1, "whole slices"), (128, 257, "at most 256 slices")])
def test_slices_that_a_driver_would_not_take(columns: int, slices: int, message: str) -> None:
    with pytest.raises(CusimError, match=message):
        plane_copies(np.zeros((8, columns), np.uint16), slices)


@pytest.mark.parametrize(
    ("matrix", "box_rows", "message"),
    [
        (np.zeros(64, np.uint16), 8, r"of a matrix, not of shape \(64,\)"),
        (np.zeros((0, 64), np.uint16), 8, r"of a matrix, not of shape \(0, 64\)"),
        (np.zeros((8, 64), np.uint16), 0, "1 to 256 rows, not 0"),
        (np.zeros((8, 64), np.uint16), 257, "1 to 256 rows, not 257"),
        (np.zeros((8, 68), np.uint16), 8, "rows are of whole 16 bytes, not 68 of 2"),
        (np.zeros(68, np.uint16)[4:].reshape(1, 64), 8, "does not lie at 16 bytes"),
        (np.zeros((8, 128), np.uint16)[:, :64], 8, "not contiguous"),
        ("x", 8, "not str"),
    ],
)
def test_tensor_maps_that_a_driver_would_not_make(matrix: Any, box_rows: int, message: str) -> None:
    with pytest.raises(CusimError, match=message):
        launch("box_copies", TensorMap(matrix, box_rows), arch=90, defines={"BOX_ROWS": BOX_ROWS})


@builds
def test_a_tensor_map_is_no_pointer(sanitize: bool) -> None:
    x = np.zeros((8, 64), np.uint16)
    with pytest.raises(CusimError, match=r"the launch passes `2miii`, the kernel takes `mm4iii`"):
        arguments = (x, TensorMap(x, 8), 0, 0, 0)
        launch("box_copies", *arguments, arch=90, defines={"BOX_ROWS": BOX_ROWS}, sanitize=sanitize)


def mbarriers(case: str, order: int = FORWARD, sanitize: bool = False) -> Array:
    """What the second warp was handed in each phase, and then what each thread was told that asked once."""
    out, gmem = np.full((NUM_PHASES + 2, 32), -1, np.int32), np.zeros(2, np.int64)
    defines = {"NUM_PHASES": NUM_PHASES}
    sm90("mbarriers", case, out, gmem, defines=defines, num_threads=64, order=order, sanitize=sanitize)
    return out


@orders
@builds
def test_phases_of_a_barrier(sanitize: bool, order: int) -> None:
    want = np.arange(NUM_PHASES * 32).reshape(NUM_PHASES, 32)[:, ::-1]
    assert np.array_equal(mbarriers("RIGHT", order, sanitize)[:-2], want)


@orders
def test_a_barrier_that_is_asked_once_says_no(order: int) -> None:
    assert (mbarriers("ASKED_ONCE", order)[-2:] == 0).all()


@orders
@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "MISSING_ARRIVAL",
            r"deadlock .*: thread \d+ and 31 more wait for parity 0 of .*, which lacks 32 of 32 arrivals and 0 bytes; "
            r"thread \d+ and 31 more wait for parity 0 of .*, which lacks 1 of 32 arrivals and 0 bytes",
        ),
        (
            "TOO_MANY_ARRIVALS",
            r"mbarrier.arrive: all 1 arrivals of the phase have come at shared memory \+ 0x\w+, but not 16 bytes",
        ),
        ("NO_ARRIVALS", "mbarrier.init: 0 arrivals"),
        ("NOT_SHARED", "mbarrier.init: the barrier is not in shared memory"),
        ("MISALIGNED", "mbarrier.init: the barrier is not aligned to 8 bytes"),
        ("NOT_INITIALISED", r"mbarrier.arrive: the barrier at shared memory \+ 0x\w+ is not initialised"),
        ("INITIALISED_TWICE", r"mbarrier.init: the barrier at shared memory \+ 0x\w+ is in use"),
        ("OVERWRITTEN", r"the barrier at shared memory \+ 0x\w+ was overwritten"),
        ("NO_PARITY", "mbarrier.try_wait: parity 2"),
    ],
)
def test_misused_mbarriers_end_the_launch(case: str, message: str, order: int) -> None:
    with pytest.raises(CusimError, match=message):
        mbarriers(case, order)


def named_barriers(case: str, order: int, sanitize: bool = False) -> Array:
    out = np.full(128, -1, np.int32)
    sm90("named_barriers", case, out, num_threads=128, order=order, sanitize=sanitize)
    return out


@orders
@builds
def test_named_barriers(sanitize: bool, order: int) -> None:
    assert np.array_equal(named_barriers("RIGHT", order, sanitize), np.arange(128) ^ 63)


@orders
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("SYNCTHREADS", "bar.sync: barrier 0; there are 1 to 15, and 0 is __syncthreads'"),
        ("TOO_MANY", "bar.sync: 160 threads, which is not a number of whole warps of the block"),
        ("PART_OF_WARP", "bar.sync: 48 threads, which is not a number of whole warps of the block"),
        ("TWO_NUMBERS", r"bar.sync: barrier 1 for \d+ threads, while others wait there for \d+"),
        (
            "MISSING_WARP",
            r"deadlock in block \(0, 0, 0\): thread \d+ and 31 more wait at barrier 2 for 64 threads in all, at \S+:19",
        ),
        ("HALVES_OF_WARPS", r"bar.sync: barrier \d has \d+ lanes of warp \d"),
    ],
)
def test_misused_named_barriers_end_the_launch(case: str, message: str, order: int) -> None:
    with pytest.raises(CusimError, match=message):
        named_barriers(case, order)


def wgmma_products(
    case: str, order: int, sanitize: bool = False, dtype: DType = DType.BF16, num_threads: int = 128
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """The products, and what they should be: exact in any order, as they are of small whole numbers."""
    row = 128 // dtype.itemsize
    a, b, c = (narrowed(RNG.integers(-8, 8, shape), dtype) for shape in ((64, row), (128, row), (64, 128)))
    outputs = tuple(poisoned(shape, DType.F32) for shape in ((64, 128), (64, 128), (64, 64)))
    maps = (TensorMap(a, 64), TensorMap(b, 128), TensorMap(c, 64))
    geometry = {"num_threads": num_threads, "smem_bytes": 40 << 10}
    defines = {f"DTYPE_{dtype.name}": 1}
    sm90("wgmma_products", case, *outputs, *maps, defines=defines, order=order, sanitize=sanitize, **geometry)
    a, b, c = widened(a), widened(b), widened(c)
    if dtype is DType.TF32:  # which has no operand in columns
        return outputs[:1], (1 + a @ b.T,)
    return outputs, (1 + a @ b.T, a @ c, a @ c[:, :64])


@orders
@builds
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.TF32])
def test_products_of_a_warpgroup(dtype: DType, sanitize: bool, order: int) -> None:
    outputs, wants = wgmma_products("RIGHT", order, sanitize, dtype)
    assert all(np.array_equal(out, want) for out, want in zip(outputs, wants, strict=True))


@orders
@pytest.mark.parametrize("case", ["NO_COMMIT", "NO_WAIT", "ONE_PENDING"])
def test_products_that_are_not_waited_for_are_nan(case: str, order: int) -> None:
    outputs, _ = wgmma_products(case, order)
    assert np.isnan(outputs[0]).all()


@orders
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("NO_FENCE", "wgmma: no wgmma_fence since the accumulator was last the thread's own"),
        ("OPERAND_CHANGED", "wgmma: operand b was changed before wgmma_wait"),
        ("ACCUMULATOR_CHANGED", "wgmma: an accumulator was written before wgmma_wait"),
        ("OTHER_OPERAND", "wgmma: not the product, of the same operands, that other threads"),
        ("OTHER_ACCUMULATOR", "wgmma: not the product, of the same operands, that other threads"),
        ("MISSING_THREAD", "wgmma_wait: not all threads of the warpgroup have issued the same products and commits"),
        ("OTHER_WAIT", r"wgmma_wait: \d groups may be pending, but \d for other threads of the warpgroup"),
        (
            "ABSENT_FROM_WAIT",
            r"deadlock in block \(0, 0, 0\): thread \d+ and 126 more wait in wgmma_wait for all of warpgroup 0",
        ),
        (
            "NO_SWIZZLE",
            "wgmma: descriptor a has swizzle mode 0, stride 1024, base offset 0, which are to be 1, 1024, 0",
        ),
        ("BITS_LEFT", r"wgmma: descriptor a is 0x\w+, whose unused bits are not zero"),
        ("PAST_ROW", "wgmma: descriptor a points to byte 112 of a swizzle's 1024; 32 bytes from there are not"),
        ("SECOND_ROW", "wgmma: descriptor a points to byte 128 of a swizzle's 1024"),
        ("MISALIGNED", r"smem_address: 0x\w+ is not aligned to 16 bytes"),
        ("NOT_SHARED", "smem_address: not in shared memory"),
        ("PAST_SHARED", r"wgmma: operand a at 0x\w+ is not in shared memory"),
    ],
)
def test_misused_products_end_the_launch(case: str, message: str, order: int) -> None:
    with pytest.raises(CusimError, match=message):
        wgmma_products(case, order)


def test_products_need_a_warpgroup() -> None:
    with pytest.raises(CusimError, match="needs a warpgroup, 128 threads from a multiple of 128 on"):
        wgmma_products("RIGHT", FORWARD, num_threads=96)


def test_sm90_has_its_own_instructions() -> None:
    with pytest.raises(CusimError, match=r"barrier_sync.* was not declared"):
        launch("named_barriers", np.zeros(128, np.int32), 0, num_threads=128)
