"""Sources to cubins, without a GPU: what reaches the compiler, what it tells, and how it fails."""

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gkd.arch import SHIPPED_ARCHS, arch_name
from gkd.build import build, build_all
from gkd.cache import CubinCache
from gkd.compiler import Cubin, nvrtc_build
from gkd.errors import CompileError, DeviceError, GkdError
from gkd.kernel import KernelSpec
from gkd.sources import kernels_directory, read_kernel

ARCH = "sm_80"
FILL = 'extern "C" __global__ void fill(float* out) { out[threadIdx.x] = VALUE; }\n'


def write(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def compiled(directory: Path, name: str, *defines: tuple[str, int | str], arch: str = ARCH) -> Cubin:
    return build(KernelSpec(name, defines), arch, CubinCache(None), directory)


@pytest.mark.parametrize("capability", SHIPPED_ARCHS)
def test_every_shipped_architecture_compiles(tmp_path: Path, capability: int) -> None:
    write(tmp_path, {"fill.cu": FILL})
    cubin = compiled(tmp_path, "fill", ("VALUE", 1), arch=arch_name(capability))
    assert cubin.code.startswith(b"\x7fELF")
    assert cubin.info.arch == arch_name(capability) and cubin.info.nvrtc == nvrtc_build()


def test_architectures_have_the_names_of_the_compiler() -> None:
    assert [arch_name(arch) for arch in SHIPPED_ARCHS] == [
        "sm_75",
        "sm_80",
        "sm_86",
        "sm_89",
        "sm_90a",
        "sm_100a",
        "sm_120a",
    ]
    with pytest.raises(DeviceError, match=r"7\.0: expected 7\.5 or later"):
        arch_name(70)


def test_a_define_is_compiled_in(tmp_path: Path) -> None:
    write(tmp_path, {"fill.cu": FILL})
    codes = {compiled(tmp_path, "fill", ("VALUE", value)).code for value in (1, 2, "1")}
    assert len(codes) == 2


def test_comments_leave_the_cubin_as_it_is(tmp_path: Path) -> None:
    write(tmp_path / "before", {"fill.cu": FILL})
    write(tmp_path / "after", {"fill.cu": "// A comment,\n// of two lines.\n" + FILL})
    before, after = (compiled(tmp_path / name, "fill", ("VALUE", 1)).code for name in ("before", "after"))
    assert before == after


# Headers


def test_exactly_the_reachable_headers_are_read(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "sum.cu": '#include "include/a.cuh"\n  #  include "include/b.cuh"\n// #include "include/unused.cuh"\n',
            "include/a.cuh": '#pragma once\n#include "include/deep/c.cuh"\n#include <cusim_ptx.h>\n',
            "include/b.cuh": '#pragma once\n#include "include/a.cuh"\n',
            "include/deep/c.cuh": '#pragma once\n#include "include/b.cuh"\n',
            "include/unused.cuh": "",
        },
    )
    names = [name for name, _ in read_kernel("sum", tmp_path).headers]
    assert names == ["include/a.cuh", "include/b.cuh", "include/deep/c.cuh"]


def test_headers_are_compiled_from_memory(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "fill.cu": '#include "include/value.cuh"\n' + FILL,
            "include/value.cuh": '#pragma once\n#include "include/number.cuh"\n#define VALUE NUMBER\n',
            "include/number.cuh": "#pragma once\n#define NUMBER 3\n",
        },
    )
    assert compiled(tmp_path, "fill").code


def test_a_header_that_no_key_knows_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies where a compiler would look: in the working directory, which is also the kernels' directory."""
    write(
        tmp_path,
        {
            "fill.cu": '#define HEADER "include/value.cuh"\n#include HEADER\n' + FILL,
            "include/value.cuh": "#define VALUE 3\n",
        },
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompileError, match=r'could not open source file "include/value.cuh"'):
        compiled(tmp_path, "fill")


def test_the_kernels_of_this_installation_are_found() -> None:
    assert read_kernel("cast", kernels_directory()).headers


# What a cubin takes


def test_resources_are_told(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "shared.cu": 'extern "C" __global__ void shared(float* out) {\n'
            "    __shared__ float tile[100];\n"
            "    tile[threadIdx.x] = out[threadIdx.x];\n"
            "    __syncthreads();\n"
            "    out[threadIdx.x] = tile[99 - threadIdx.x];\n"
            "}\n",
            "local.cu": 'extern "C" __global__ void local(float* out, int i) {\n'
            "    float values[250];\n"
            "    for (int k = 0; k < 250; ++k) values[k] = out[k * k];\n"
            "    out[0] = values[i];\n"
            "}\n",
            "spill.cu": 'extern "C" __global__ __launch_bounds__(1024, 2) void spill(float* out) {\n'
            "    float values[64];\n"
            "#pragma unroll\n"
            "    for (int k = 0; k < 64; ++k) values[k] = out[k];\n"
            "    __syncthreads();\n"
            "#pragma unroll\n"
            "    for (int k = 0; k < 64; ++k) out[k * 7] = values[63 - k];\n"
            "}\n",
        },
    )
    shared, local, spill = (compiled(tmp_path, name).info.resources for name in ("shared", "local", "spill"))
    assert shared and local and spill
    assert (shared.static_smem_bytes, shared.stack_bytes, shared.spill_bytes) == (400, 0, 0)
    assert 0 < shared.registers < 32
    assert (local.static_smem_bytes, local.stack_bytes, local.spill_bytes) == (0, 1000, 0)
    assert spill.registers == 32 and spill.spill_bytes > 0 and spill.stack_bytes > 0


# Failures


def test_a_failure_shows_log_options_and_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    write(
        tmp_path / "kernels",
        {
            "broken.cu": '#include "include/value.cuh"\nextern "C" __global__ void broken() { undeclared(); }\n',
            "include/value.cuh": "// é\n",
        },
    )
    with pytest.raises(CompileError) as caught:
        compiled(tmp_path / "kernels", "broken", ("HEAD_DIM", 64), arch="sm_90a")
    message = str(caught.value)
    assert message.startswith("kernel `broken` does not compile for sm_90a: NVRTC_ERROR_COMPILATION of NVRTC V")
    assert 'broken.cu(2): error: identifier "undeclared" is undefined' in message
    assert "--gpu-architecture=sm_90a" in message and "-DHEAD_DIM=64" in message
    found = re.search(r"^source:  (.+)$", message, re.MULTILINE)
    assert found
    dumped = Path(found[1])
    assert dumped.read_text() == (tmp_path / "kernels" / "broken.cu").read_text()
    assert (dumped.parent / "include" / "value.cuh").read_text() == "// é\n"


def test_a_failure_is_told_where_no_source_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    write(tmp_path, {"broken.cu": "#error no\n"})
    with pytest.raises(CompileError, match=r"source:  could not be written: .*\n.*#error directive: no"):
        compiled(tmp_path, "broken")


def test_inline_ptx_is_checked(tmp_path: Path) -> None:
    write(tmp_path, {"bad.cu": 'extern "C" __global__ void bad() { asm volatile("cp.async.commit_group;"); }\n'})
    assert compiled(tmp_path, "bad", arch="sm_80").code
    with pytest.raises(CompileError, match=r"requires \.target sm_80 or higher"):
        compiled(tmp_path, "bad", arch="sm_75")


@pytest.mark.parametrize(
    "files", [{}, {"fill.cu/kernel": ""}, {"fill.cu": '#include "include/a.cuh"', "include/a.cuh": "\udcff"}]
)
def test_a_source_that_cannot_be_read_is_named(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CompileError, match=r"kernel `fill`: its source cannot be read: .*; install gkd-engines anew"):
        compiled(tmp_path, "fill")


def test_the_first_request_that_fails_is_the_error(tmp_path: Path) -> None:
    write(tmp_path, {"fill.cu": FILL, "first.cu": "#error first\n", "second.cu": "#error second\n"})
    requests = [(KernelSpec(name, (("VALUE", 1),)), ARCH) for name in ("fill", "first", "second")]
    for order in (requests, requests[::-1]):
        failing = next(spec.name for spec, _ in order if spec.name != "fill")
        with pytest.raises(CompileError, match=f"kernel `{failing}`"):
            build_all(order, CubinCache(None), tmp_path)


def test_no_compiler_is_an_error_that_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"fill.cu": FILL})
    nvrtc_build.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(GkdError, match=r"pip install 'gkd-engines\[cu13\]'"):
        compiled(tmp_path, "fill", ("VALUE", 1))


def test_bindings_without_the_library_are_the_same_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found() -> None:
        raise RuntimeError('Failure finding "libnvrtc.so"\nmore lines')

    write(tmp_path, {"fill.cu": FILL})
    nvrtc_build.cache_clear()
    monkeypatch.setattr("cuda.bindings.nvrtc.nvrtcVersion", not_found)
    with pytest.raises(GkdError, match=r"pip install 'gkd-engines\[cu13\]'.*Failure finding \"libnvrtc.so\"\)$"):
        compiled(tmp_path, "fill", ("VALUE", 1))


# Threads


def test_results_come_in_the_order_of_the_requests_and_equal_ones_are_one(tmp_path: Path) -> None:
    write(tmp_path, {"fill.cu": FILL})
    requests = [(KernelSpec("fill", (("VALUE", value),)), ARCH) for value in (1, 2, 3, 4, 5, 6, 2)]
    cubins = build_all(requests, CubinCache(None), tmp_path)
    assert [cubin.info.options[-1] for cubin in cubins] == [f"-DVALUE={value}" for value in (1, 2, 3, 4, 5, 6, 2)]
    assert cubins[1] is cubins[6]
    assert build_all([], CubinCache(None), tmp_path) == []


def test_deep_nesting_does_not_overflow_the_stack_of_the_caller(tmp_path: Path) -> None:
    """In a process of its own: an overflow would end it without a word."""
    nested = "(" * 500 + "VALUE" + ")" * 500
    write(tmp_path, {"fill.cu": FILL.replace("VALUE", nested)})
    code = f"""
import threading
from pathlib import Path
from gkd.build import build
from gkd.cache import CubinCache
from gkd.kernel import KernelSpec

def work():
    spec = KernelSpec("fill", (("VALUE", 1),))
    print(len(build(spec, "{ARCH}", CubinCache(None), Path({str(tmp_path)!r})).code))

threading.stack_size(256 * 1024)
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(threading.stack_size())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    code_bytes, stack_bytes = map(int, result.stdout.split())
    assert code_bytes > 0 and stack_bytes == 256 * 1024


def test_compiling_leaves_the_stacks_of_other_threads_alone(tmp_path: Path) -> None:
    write(tmp_path, {"fill.cu": FILL})
    usual = threading.stack_size()
    compiled(tmp_path, "fill", ("VALUE", 1))
    assert threading.stack_size() == usual
