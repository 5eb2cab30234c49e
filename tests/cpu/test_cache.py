"""The cubin cache: what its key knows, and that nothing that happens to a directory stops a run."""

import json
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gkd.build import build, build_all
from gkd.cache import CubinCache, cache_key
from gkd.compiler import Cubin, compile_options, nvrtc_build
from gkd.errors import CompileError
from gkd.kernel import KernelSpec
from gkd.sources import KernelSource, read_kernel

ARCH = "sm_80"
SPEC = KernelSpec("fill", (("VALUE", 1),))
OTHER = KernelSpec("fill", (("VALUE", 2),))


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    directory = tmp_path / "kernels"
    (directory / "include").mkdir(parents=True)
    (directory / "fill.cu").write_text(
        '#include "include/one.cuh"\nextern "C" __global__ void fill(float* out) { out[threadIdx.x] = VALUE * ONE; }\n'
    )
    (directory / "include" / "one.cuh").write_text("#define ONE 1\n")
    return directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def entry(directory: Path, kernels: Path) -> Path:
    """The entry of SPEC, stored."""
    build(SPEC, ARCH, CubinCache(directory), kernels)
    [path] = directory.iterdir()
    return path


def cached(directory: Path, kernels: Path, spec: KernelSpec = SPEC) -> Cubin:
    """What the cache holds; CompileError for what it does not hold."""
    return build(spec, ARCH, CubinCache(directory, complete=True), kernels)


# The key

SOURCE = KernelSource("fill", "text", (("include/a.cuh", "a"), ("include/b.cuh", "b")))
KEY = (SOURCE, compile_options(SPEC, ARCH), "V13.0.88 CL-1")


@pytest.mark.parametrize(
    "other",
    [
        (replace(SOURCE, name="other"), *KEY[1:]),
        (replace(SOURCE, text="text "), *KEY[1:]),
        (replace(SOURCE, headers=(("include/a.cuh", "a "), SOURCE.headers[1])), *KEY[1:]),
        (replace(SOURCE, headers=(("include/c.cuh", "a"), SOURCE.headers[1])), *KEY[1:]),
        (replace(SOURCE, headers=SOURCE.headers[:1]), *KEY[1:]),
        (SOURCE, compile_options(SPEC, "sm_86"), KEY[2]),
        (SOURCE, compile_options(OTHER, ARCH), KEY[2]),
        (SOURCE, compile_options(KernelSpec("fill", ()), ARCH), KEY[2]),
        (SOURCE, (*KEY[1], "--use_fast_math"), KEY[2]),
        (SOURCE, KEY[1], "V13.0.89 CL-1"),
        (SOURCE, KEY[1], "V13.0.88 CL-2"),
    ],
)
def test_everything_that_decides_a_cubin_is_in_its_key(other: tuple[KernelSource, tuple[str, ...], str]) -> None:
    assert cache_key(*other) != cache_key(*KEY)


def test_the_place_of_a_source_is_not_in_its_key(kernels: Path, tmp_path: Path) -> None:
    shutil.copytree(kernels, tmp_path / "elsewhere")
    here, there = (cache_key(read_kernel("fill", path), *KEY[1:]) for path in (kernels, tmp_path / "elsewhere"))
    assert here == there


# Hits and misses


def test_a_kernel_is_compiled_once(directory: Path, kernels: Path) -> None:
    compiled = build(SPEC, ARCH, CubinCache(directory), kernels)
    assert cached(directory, kernels) == compiled


@pytest.mark.parametrize("name", ["fill.cu", "include/one.cuh"])
def test_an_edit_is_a_miss(entry: Path, kernels: Path, name: str) -> None:
    (kernels / name).write_text((kernels / name).read_text() + "// edited\n")
    with pytest.raises(CompileError, match="not in the cache"):
        cached(entry.parent, kernels)


def test_a_complete_cache_compiles_nothing(directory: Path, kernels: Path) -> None:
    with pytest.raises(CompileError) as caught:
        cached(directory, kernels)
    message = str(caught.value)
    assert "kernel `fill` for sm_80" in message and "GKD_ASSERT_CACHED=1" in message and "-DVALUE=1" in message
    assert not directory.exists()


def test_no_directory_keeps_nothing(kernels: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = (build(SPEC, ARCH, CubinCache(None), kernels) for _ in range(2))
    assert first.code == second.code and first is not second
    assert not caplog.records


def test_an_entry_says_how_it_came_to_be(entry: Path, kernels: Path) -> None:
    assert (entry / "kernel.cu").read_text() == (kernels / "fill.cu").read_text()
    assert (entry / "include" / "one.cuh").read_text() == (kernels / "include" / "one.cuh").read_text()
    told = json.loads((entry / "build.json").read_text())["build"]
    assert (told["name"], told["arch"], told["nvrtc"]) == ("fill", ARCH, nvrtc_build())
    assert told["options"] == list(compile_options(SPEC, ARCH))


def test_other_users_may_read_what_one_has_compiled(entry: Path) -> None:
    """As the umask says: an image is built by root and run by another."""
    mask = os.umask(0)
    os.umask(mask)
    for path in (entry, *entry.iterdir()):
        usual = 0o777 if path.is_dir() else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == usual & ~mask


# Damage


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def replace_by_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"x")


def replace_by_dangling_link(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to("nowhere")


def fill_with(content: bytes) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        path.write_bytes(content)

    return apply


def edit(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return apply


DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "cubin truncated": ("kernel.cubin", truncate),
    "cubin empty": ("kernel.cubin", fill_with(b"")),
    "cubin with a flipped bit": ("kernel.cubin", flip_a_bit),
    "cubin missing": ("kernel.cubin", Path.unlink),
    "cubin a directory": ("kernel.cubin", replace_by_directory),
    "build.json truncated": ("build.json", truncate),
    "build.json empty": ("build.json", fill_with(b"")),
    "build.json not UTF-8": ("build.json", fill_with(b'{"key": "\xff"}')),
    "build.json missing": ("build.json", Path.unlink),
    "build.json without its digest": ("build.json", edit(lambda told: {"key": told["key"], "build": told["build"]})),
    "build.json of other types": ("build.json", edit(lambda told: {**told, "build": [1]})),
    "build.json not an object": ("build.json", edit(lambda told: [told])),
    "build.json with another number": (
        "build.json",
        edit(lambda told: {**told, "build": {**told["build"], "seconds": 1e9}}),
    ),
    "entry empty": (".", empty),
    "entry a file": (".", replace_by_file),
    "entry a dangling link": (".", replace_by_dangling_link),
}


@pytest.mark.parametrize(("name", "damage"), DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_entry_is_compiled_again(
    entry: Path, kernels: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Callable[[Path], None]
) -> None:
    intact = cached(entry.parent, kernels)
    damage(entry / name)
    assert build(SPEC, ARCH, CubinCache(entry.parent), kernels).code == intact.code
    [record] = caplog.records
    assert record.levelno == logging.WARNING and str(entry) in record.getMessage()
    caplog.clear()
    assert cached(entry.parent, kernels).code == intact.code
    assert not caplog.records and list(entry.parent.iterdir()) == [entry]


def test_the_entry_of_another_kernel_is_damage(entry: Path, kernels: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = build(OTHER, ARCH, CubinCache(entry.parent), kernels)
    [other_entry] = set(entry.parent.iterdir()) - {entry}
    shutil.rmtree(other_entry)
    shutil.copytree(entry, other_entry)
    assert build(OTHER, ARCH, CubinCache(entry.parent), kernels).code == other.code
    assert len(caplog.records) == 1


# Directories that cannot be used. Tests may run as root, whom no permission stops.


@pytest.mark.parametrize("place", ["/dev/null", "/dev/null/below", "/proc/gkd", "file", "file/below"])
def test_a_directory_that_cannot_be_written_stops_nothing(
    kernels: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    (tmp_path / "file").write_text("here first")
    cache = CubinCache(tmp_path / place)
    cubins = build_all([(SPEC, ARCH), (OTHER, ARCH)], cache, kernels)
    cubins += build_all([(SPEC, ARCH), (OTHER, ARCH)], cache, kernels)
    assert all(cubin.code.startswith(b"\x7fELF") for cubin in cubins)
    [record] = caplog.records
    assert "cannot be kept" in record.getMessage() and "GKD_CACHE_DIR" in record.getMessage()
    assert (tmp_path / "file").read_text() == "here first"


def test_a_full_disk_stops_nothing_and_leaves_nothing(
    directory: Path, kernels: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        compiled = build(SPEC, ARCH, CubinCache(directory), kernels)
    assert "No space left" in caplog.records[0].getMessage() and len(caplog.records) == 1
    assert list(directory.iterdir()) == []
    assert build(SPEC, ARCH, CubinCache(directory), kernels).code == compiled.code


def test_damage_that_cannot_be_removed_stops_nothing(
    entry: Path, kernels: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, target: Path) -> Path:
        raise OSError(30, "Read-only file system", str(path))

    intact = cached(entry.parent, kernels)
    truncate(entry / "kernel.cubin")
    monkeypatch.setattr(Path, "rename", refuse)
    cache = CubinCache(entry.parent)
    assert [build(SPEC, ARCH, cache, kernels).code for _ in range(2)] == [intact.code] * 2
    assert sum("cannot be kept" in record.getMessage() for record in caplog.records) == 1


# Company

RACER = """
import sys
from pathlib import Path
from gkd.build import build_all
from gkd.cache import CubinCache
from gkd.compiler import nvrtc_build
from gkd.kernel import KernelSpec

nvrtc_build()
print("ready", flush=True)
sys.stdin.readline()
requests = [(KernelSpec("fill", (("VALUE", value),)), "sm_80") for value in range(8)]
cubins = build_all(requests, CubinCache(Path(sys.argv[1])), Path(sys.argv[2]))
print(*(hash(cubin.code) for cubin in cubins))
"""


def test_processes_that_race_all_succeed(directory: Path, kernels: Path) -> None:
    command = [sys.executable, "-c", RACER, str(directory), str(kernels)]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    racers = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for _ in range(2)
    ]
    for racer in racers:
        assert racer.stdout and racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin
        racer.stdin.write("go\n")
        racer.stdin.flush()
    outputs = [racer.communicate(timeout=60) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0] and outputs[0] == outputs[1]
    assert outputs[0][1] == ""  # no warning
    assert len(list(directory.iterdir())) == 8
    for value in range(8):
        assert cached(directory, kernels, KernelSpec("fill", (("VALUE", value),)))
