"""tools/compile_all.py: that it compiles what ships, and what it finds. `make compile` runs it over all kernels."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import gkd.ops
from embed import Embed
from gkd.arch import SHIPPED_ARCHS
from gkd.build import build
from gkd.cache import CubinCache
from gkd.compiler import Cubin, Resources
from gkd.cpu import CpuBackend
from gkd.dtype import DType
from gkd.kernel import KernelSpec
from gkd.ops import Cast, Operator
from gkd.sources import kernels_directory
from tools import compile_all

FILL = 'extern "C" __global__ void fill(float* out) { out[threadIdx.x] = 1.0f; }\n'


@pytest.fixture(scope="module")
def fill(tmp_path_factory: pytest.TempPathFactory) -> Cubin:
    """A cubin without a fault."""
    directory = tmp_path_factory.mktemp("kernels")
    (directory / "fill.cu").write_text(FILL)
    return build(KernelSpec("fill", ()), "sm_80", CubinCache(None), directory)


def with_resources(cubin: Cubin, resources: Resources | None) -> Cubin:
    return replace(cubin, info=replace(cubin.info, resources=resources))


def with_log(cubin: Cubin, change: Callable[[str], str]) -> Cubin:
    return replace(cubin, info=replace(cubin.info, log=change(cubin.info.log)))


# What is compiled


def test_every_shipped_architecture_is_compiled_and_two_in_every_precision() -> None:
    assert tuple(compile_all.MATRIX) == SHIPPED_ARCHS
    assert all(compile_all.MATRIX.values())
    assert compile_all.MATRIX[80] == (DType.F32, DType.F16, DType.BF16, DType.TF32)
    assert compile_all.MATRIX[90] == (*compile_all.MATRIX[80], DType.SPLIT)


def test_every_operator_and_every_kernel_is_compiled() -> None:
    assert list(compile_all.omissions(compile_all.shipped(), kernels_directory())) == []


def test_what_an_engine_runs_is_compiled(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Operator] = []
    run = CpuBackend.run

    def record(backend: CpuBackend, op: Operator, *tensors: object) -> None:
        # A cast to the same type is a copy, which takes no kernel on a GPU.
        if not (isinstance(op, Cast) and op.source is op.target):
            ran.append(op)
        run(backend, op, *tensors)

    monkeypatch.setattr(CpuBackend, "run", record)
    with Embed.open(models / "minilm") as engine:
        for mode in ("cls", "mean"):
            engine.set_pooling(mode, True)
            engine.encode("a text")
    assert {type(op).__name__ for op in ran} >= {"Attention", "Linear", "Pool", "GatherRows", "L2Normalize"}
    shipped = compile_all.shipped()
    for dtype in compile_all.DTYPES:
        assert {(spec, "sm_90a") for op in ran for spec in op.plan(dtype, 90).specs} <= set(shipped)


def test_a_forgotten_operator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gkd.ops, "__all__", [*gkd.ops.__all__, "GeluMul"])
    [omission] = compile_all.omissions(compile_all.shipped(), kernels_directory())
    assert "operator GeluMul is not compiled" in omission


def test_a_kernel_without_an_operator_is_named(tmp_path: Path) -> None:
    (tmp_path / "gelu_mul.cu").write_text("")
    [omission] = compile_all.omissions(compile_all.shipped(), tmp_path)
    assert "kernel gelu_mul.cu is not compiled" in omission


# What is a fault


def test_a_good_cubin_has_no_fault(fill: Cubin) -> None:
    assert list(compile_all.faults(fill, FILL)) == []


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        (Resources(32, 0, 8, 0), "spills 8 bytes"),
        (Resources(32, 16, 0, 0), "uses 16 bytes of stack, its header comment declares 0"),
        (None, "does not tell its registers"),
    ],
)
def test_spills_and_stack_are_faults(fill: Cubin, resources: Resources | None, expected: str) -> None:
    [fault] = compile_all.faults(with_resources(fill, resources), FILL)
    assert expected in fault


@pytest.mark.parametrize(("stack_bytes", "num_faults"), [(8, 0), (16, 0), (17, 1)])
def test_a_declared_stack_is_a_limit(fill: Cubin, stack_bytes: int, num_faults: int) -> None:
    text = f"// fill: out = 1\n// stack   16 bytes, indexed by the row\n{FILL}"
    cubin = with_resources(fill, Resources(32, stack_bytes, 0, 0))
    assert len(list(compile_all.faults(cubin, text))) == num_faults


def test_a_warning_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "fill.cu").write_text(FILL.replace("{", "{ int unused;"))
    cubin = build(KernelSpec("fill", ()), "sm_80", CubinCache(None), tmp_path)
    assert "draws a warning: fill.cu(1): warning #177-D" in next(compile_all.faults(cubin, FILL))


def test_another_entry_than_the_kernel_is_a_fault(fill: Cubin) -> None:
    renamed = with_log(fill, lambda log: log.replace("'fill'", "'_Z4fillPf'"))
    doubled = with_log(fill, lambda log: f"{log}\n{log}")
    for cubin in (renamed, doubled):
        [fault] = compile_all.faults(cubin, FILL)
        assert "expected `fill` alone" in fault


# The program


def test_one_kernel_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert compile_all.main(["--kernel", "l2_normalize"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert {line.split("  ")[-1].split()[1] for line in lines} == {
        "sm_75",
        "sm_80",
        "sm_86",
        "sm_89",
        "sm_90a",
        "sm_100a",
        "sm_120a",
    }
    assert all(re.match(r" *\d+ registers, 0 bytes stack, 0 bytes spills, 0 bytes static smem", line) for line in lines)
    assert f"{len(lines)} cubins, 0 problems" in printed.err


def test_digests_are_the_same_in_every_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_all, "MATRIX", {75: (DType.F16,), 90: (DType.BF16,)})
    outputs = []
    for _ in range(2):
        assert compile_all.main(["--digest", "--kernel", "l2_normalize"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert all(re.fullmatch(r"[0-9a-f]{16} l2_normalize sm_\w+ .*", line) for line in outputs[0].splitlines())


def test_an_unknown_kernel_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert compile_all.main(["--kernel", "gelu_mul"]) == 1
    assert "no operator's plan names a kernel `gelu_mul`" in capsys.readouterr().err


def test_a_kernel_that_does_not_compile_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "l2_normalize.cu").write_text("#error broken\n")
    monkeypatch.setattr(compile_all, "kernels_directory", lambda: tmp_path)
    assert compile_all.main(["--kernel", "l2_normalize"]) == 1
    assert "kernel `l2_normalize` does not compile" in capsys.readouterr().err
