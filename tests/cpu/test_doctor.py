"""`embed doctor`, as a person runs it: without a driver, with one that is broken, and with a fake one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from embed import doctor
from gkd import env
from gkd.cache import cache_usage

NO_DRIVER = "no CUDA driver is installed (libcuda.so.1 was not found)"


def run(
    *arguments: str, environment: dict[str, str] | None = None, before: str = "", command: str = "doctor"
) -> subprocess.CompletedProcess[bytes]:
    """The command in a process of its own, after the Python statements `before`."""
    # Whoever runs the tests may have set some.
    variables = {name: value for name, value in os.environ.items() if name not in doctor.KNOWN_VARIABLES}
    code = f"import sys\n{before}\nfrom embed.main import main\nsys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, command, *arguments],
        capture_output=True,
        timeout=60,
        env={**variables, **(environment or {})},
    )


def lines(result: subprocess.CompletedProcess[bytes]) -> dict[str, str]:
    assert result.stderr == b""
    return dict(line.split(": ", 1) for line in result.stdout.decode().splitlines())


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which a process finds the driver of fake_cuda.c."""
    directory = tmp_path_factory.mktemp("fake-cuda")
    source = Path(__file__).with_name("fake_cuda.c")
    command = ["gcc", "-shared", "-fPIC", "-o", str(directory / "libcuda.so.1"), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return {"LD_LIBRARY_PATH": str(directory)}


def test_a_machine_without_a_gpu(tmp_path: Path) -> None:
    result = run(environment={"GKD_CACHE_DIR": str(tmp_path / "not" / "made")})
    found = lines(result)
    assert result.returncode == 0
    assert found["serve uses"] == "cpu" and found["serve device"] == found["CPU"] and found["ok"] == "yes"
    assert found["serve dtypes"] == "f32"
    assert found["why not GPU"] == NO_DRIVER and found["driver CUDA release"] == f"not available: {NO_DRIVER}"
    assert found["driver version"].startswith("not available: libnvidia-ml.so.1")
    assert found["NVRTC version"].startswith("V") and Path(found["NVRTC library"]).name.startswith("libnvrtc.so")
    assert re.match(r"\d+\.\d+", found["CUDA python"]) and int(found["cores"]) > 0 and "threads" in found["BLAS"]
    assert found["GKD_CACHE_DIR"] == found["cache directory"] == str(tmp_path / "not" / "made")
    assert (found["cache kernels"], found["cache size"], found["cache writable"]) == ("0", "0.0 MB", "yes")
    # It was asked, and not made.
    assert not any(tmp_path.iterdir())


def test_json_has_the_same_for_machines() -> None:
    result = run("--json")
    report = json.loads(result.stdout)
    assert result.returncode == 0 and result.stdout.count(b"\n") == 1
    assert report["ok"] is True and report["serve_uses"] == "cpu" and report["why_not_gpu"] == NO_DRIVER
    assert report["driver_version"] is None and "driver_version" in report["problems"]
    assert type(report["cache_size_bytes"]) is int and report["devices"] == [] and report["environment"] == {}


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"GKD_GPU_DEVICE": "0"}, "GKD_GPU_DEVICE=0 asks for a GPU, and none can be used"),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, "CUDA_VISIBLE_DEVICES=2,3 asks for a GPU, and none can be used"),
        ({"GKD_GPU_DEVICE": "first"}, "GKD_GPU_DEVICE: expected the ordinal of a GPU"),
        ({"GKD_SYNC": "yes"}, "GKD_SYNC: expected 0 or 1, got `yes`"),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, None),
        ({"GKD_GPU_DEVICE": "", "GKD_ASSERT_CACHED": "1"}, None),
    ],
    ids=str,
)
def test_what_the_environment_asks_for_and_is_not_there(environment: dict[str, str], complaint: str | None) -> None:
    result = run(environment=environment)
    found = lines(result)
    assert result.returncode == (0 if complaint is None else 1)
    assert found["serve uses"] == "cpu" and found["ok"] == ("yes" if complaint is None else "no")
    assert complaint in found["complaint"] if complaint is not None else "complaint" not in found
    assert {name: found[name].strip() for name in environment} == environment


def test_no_secret_is_shown() -> None:
    result = run(environment={"EMBED_TOKEN": "hunter2", "GKD_TOKEN": "hunter2", "GKD_CACHE_DIR": "off"})
    assert b"hunter2" not in result.stdout
    found = lines(result)
    assert found["GKD_TOKEN"] == "set, and not known" and found["cache directory"] == "off"
    assert "cache writable" not in found


def test_every_variable_that_is_read_is_known() -> None:
    read = set(re.findall(r'"(GKD_[A-Z_]+)"', Path(env.__file__).read_text()))
    assert read and read == {name for name in doctor.KNOWN_VARIABLES if name.startswith("GKD_")}


def test_values_that_no_terminal_takes_stay_one_line_each() -> None:
    directory = b"/tmp/a\nb\xff\x1b[31m\xc3\xa4".decode(errors="surrogateescape")
    for locale in ({"LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}):
        environment = {"GKD_CACHE_DIR": directory, "PYTHONUTF8": "0", **locale}
        found = lines(run(environment=environment))
        assert found["cache directory"].startswith("/tmp/a\\nb\\") and "\\x1b[31m" in found["cache directory"]
        assert json.loads(run("--json", environment=environment).stdout)["ok"] is True


def test_the_cache_is_counted(tmp_path: Path) -> None:
    for name in ("one", "two", ".aside"):
        (tmp_path / name / "include").mkdir(parents=True)
        (tmp_path / name / "kernel.cubin").write_bytes(b"x" * 1000)
    (tmp_path / "one" / "include" / "types.cuh").write_bytes(b"x" * 500)
    assert cache_usage(tmp_path) == (2, 3500) and cache_usage(tmp_path / "none") == (0, 0)
    found = lines(run(environment={"GKD_CACHE_DIR": str(tmp_path)}))
    assert found["cache kernels"] == "2"


def test_a_cache_that_cannot_be_written_says_why_and_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run(environment={"GKD_CACHE_DIR": str(tmp_path / "file" / "cache")})
    found = lines(result)
    assert found["cache writable"] == f"no: {tmp_path / 'file'}: Not a directory" and result.returncode == 0
    assert "cache kernels" in found


def test_a_driver_and_a_device(fake_driver: dict[str, str]) -> None:
    result = run(environment={**fake_driver, "CUDA_VISIBLE_DEVICES": "0", "FAKE_CUDA_DEVICES": "2"})
    found = lines(result)
    assert result.returncode == 0 and found["ok"] == "yes"
    assert found["device 0"] == "Fake GPU, compute capability 9.0, 16.0 GB, 15.0 GB free"
    assert found["device 1"] == "Fake GPU, compute capability 9.0, 16.0 GB"
    assert found["trial kernel"].startswith("compiled for sm_90a, loaded and run in ")
    assert (found["serve uses"], found["serve device"]) == ("cuda", "Fake GPU") and "why not GPU" not in found
    assert found["driver CUDA release"] == "13.0" and found["serve dtypes"] == "f32, tf32, f16, bf16"


def test_a_device_without_tf32(fake_driver: dict[str, str]) -> None:
    found = lines(run(environment={**fake_driver, "FAKE_CUDA_CAPABILITY": "75"}))
    assert found["serve uses"] == "cuda" and found["serve dtypes"] == "f32, f16, bf16"


def test_tf32_is_refused_on_a_device_without_it(fake_driver: dict[str, str]) -> None:
    environment = {**fake_driver, "FAKE_CUDA_CAPABILITY": "75"}
    result = run("a model", "a text", "--dtype", "tf32", environment=environment, command="text")
    assert result.returncode == 1 and result.stdout == b""
    assert result.stderr.decode() == (
        "embed: error: a model: dtype tf32 cannot be used: Fake GPU has compute capability 7.5, expected 8.0 or later; "
        "use another GPU, or f32, f16, bf16\n"
    )


# Statements that make a process look like one in which a package is not installed.
NO_BINDINGS = "sys.modules['cuda.bindings'] = None"
NO_NVRTC = "sys.modules['cuda.bindings.nvrtc'] = None"


@pytest.mark.parametrize(
    ("environment", "before", "reason"),
    [
        ({"FAKE_CUDA_CAPABILITY": "70"}, "", "compute capability 7.0: expected 7.5 or later"),
        ({"GKD_GPU_DEVICE": "3"}, "", "gpu 3: no such CUDA device; there are 1"),
        ({"GKD_SYNC": "2"}, "", "GKD_SYNC: expected 0 or 1, got `2`"),
        (
            {"FAKE_CUDA_RELEASE": "12040", "FAKE_CUDA_LOAD": "200"},
            "",
            "the driver only of 12.4: install 'gkd-engines[cu12]'",
        ),
        ({"FAKE_CUDA_LOAD": "2"}, "", "CUDA_ERROR_OUT_OF_MEMORY in cuModuleLoadData: an error of the fake"),
        ({}, NO_NVRTC, "NVRTC, which compiles the kernels, is not installed"),
    ],
    ids=str,
)
def test_a_device_that_cannot_be_used(
    fake_driver: dict[str, str], environment: dict[str, str], before: str, reason: str
) -> None:
    result = run(environment={**fake_driver, **environment}, before=before)
    found = lines(result)
    # As in `embed serve`: a GPU that is there and fails is an error, and the CPU does not stand in for it.
    assert result.returncode == 1 and found["serve uses"] == "nothing" and found["ok"] == "no"
    assert reason in found["why not GPU"] and "device 0" in found and "serve dtypes" not in found


@pytest.mark.parametrize(
    ("environment", "before", "reason"),
    [
        ({"FAKE_CUDA_DEVICES": "0"}, "", "the CUDA driver finds no device"),
        ({}, NO_BINDINGS, "a CUDA driver is installed, but cuda-python is not"),
    ],
    ids=str,
)
def test_a_driver_without_use(
    fake_driver: dict[str, str], environment: dict[str, str], before: str, reason: str
) -> None:
    result = run(environment={**fake_driver, **environment}, before=before)
    found = lines(result)
    assert result.returncode == 0 and found["serve uses"] == "cpu" and reason in found["why not GPU"]
    assert run(environment={**fake_driver, **environment, "GKD_GPU_DEVICE": "0"}, before=before).returncode == 1


def test_a_broken_driver(tmp_path: Path) -> None:
    subprocess.run(["gcc", "-shared", "-o", tmp_path / "libcuda.so.1", "-x", "c", "/dev/null"], check=True)
    found = lines(run(environment={"LD_LIBRARY_PATH": str(tmp_path)}))
    assert found["serve uses"] == "cpu" and found["why not GPU"].startswith("the CUDA driver does not start")


def test_nothing_that_fails_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("first line\nsecond line")

    probes = [name for name in vars(doctor) if name in {"_cpu", "_cores", "_blas", "_devices", "_environment"}]
    probes += [name for name in vars(doctor) if name.startswith(("_cache_", "_cuda_", "_driver_", "_nvrtc_"))]
    assert len(probes) == 13
    for name in probes:
        monkeypatch.setattr(doctor, name, fail)
    monkeypatch.setattr("gkd.driver.unavailable", fail)
    found = doctor.diagnose()
    assert {text for name, text in found.problems.items() if name != "version"} == {"first line"}
    assert found.values["why_not_gpu"] == "first line" and len(found.lines()) > 15
    json.dumps(found.as_json())


def test_other_commands_do_not_load_it() -> None:
    code = "import sys, embed.main; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"embed.doctor", "embed.verify"} & set(loaded)
