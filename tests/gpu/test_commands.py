"""`embed doctor` and `embed verify` on a machine with a CUDA device."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np
import pytest

from embed import verify
from gkd.arch import arch_name
from gkd.device import Device, devices
from tools.make_model import PRESETS, make_model


@pytest.fixture(scope="module")
def directory(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "minilm-geometry"
    make_model(path, replace(PRESETS["minilm"], vocab_size=2000))
    return path


@pytest.fixture(scope="module")
def reference(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recorded in f32 on the device."""
    path = tmp_path_factory.mktemp("references") / "reference.safetensors"
    result = embed("verify", directory, "--record", "--reference", path)
    assert result.returncode == 0, result.stderr
    return path


def embed(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "embed", *map(str, arguments)],
        capture_output=True,
        timeout=300,
        encoding="utf-8",
        env={**os.environ, **environment},
    )


def test_doctor_names_the_card(device: Device) -> None:
    result = embed("doctor")
    assert result.returncode == 0 and result.stderr == "", result.stderr
    found = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    capability = f"{device.capability // 10}.{device.capability % 10}"
    shown = found[f"device {device.ordinal}"]
    assert shown.startswith(f"{device.name}, compute capability {capability}, ") and shown.endswith(" free")
    assert (found["serve uses"], found["serve device"], found["ok"]) == ("cuda", device.name, "yes")
    assert found["trial kernel"].startswith(f"compiled for {arch_name(device.capability)}, loaded and run in ")
    assert "why not GPU" not in found and Path(found["NVRTC library"]).is_file()
    # The release of the driver, as 13.0; the version of its module, as 580.65.06.
    assert all(found[name].replace(".", "").isdecimal() for name in ("driver CUDA release", "driver version"))


def test_doctor_measures_memory(device: Device) -> None:
    report = json.loads(embed("doctor", "--json").stdout)
    assert len(report["devices"]) == len(devices())
    # The project itself need not be installed where these tests run, and cuda-python may be there in parts.
    assert not set(report["problems"]) - {"version", "cuda_python"}, report["problems"]
    used = report["devices"][device.ordinal]
    assert used["memory_bytes"] == device.memory_bytes and 0 < used["free_bytes"] < device.memory_bytes


def test_doctor_refuses_an_ordinal_that_is_not_there(device: Device) -> None:
    count = len(devices())
    result = embed("doctor", GKD_GPU_DEVICE=str(count))
    assert result.returncode == 1
    assert f"why not GPU: gpu {count}: no such CUDA device; there are {count}" in result.stdout
    # Hidden from CUDA, a card is not there; that is what was asked.
    assert embed("doctor", CUDA_VISIBLE_DEVICES="-1", GKD_GPU_DEVICE="").returncode == 0
    assert embed("doctor", CUDA_VISIBLE_DEVICES="-1", GKD_GPU_DEVICE="0").returncode == 1


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_every_precision_agrees_with_f32(directory: Path, reference: Path, dtype: str) -> None:
    result = embed("verify", directory, "--reference", reference, "--dtype", dtype)
    assert result.returncode == 0, result.stdout + result.stderr
    *_, summary = result.stdout.splitlines()
    assert summary.startswith("PASS: ")
    if dtype == "f32":
        # The same device and precision give the same bits.
        assert summary.endswith("largest difference 0.00e+00")


def test_the_cpu_s_reference_serves_the_device(directory: Path, reference: Path, tmp_path: Path) -> None:
    path = tmp_path / "from-the-cpu.safetensors"
    hidden = {"CUDA_VISIBLE_DEVICES": "-1", "GKD_GPU_DEVICE": ""}
    result = embed("verify", directory, "--record", "--reference", path, **hidden)
    assert result.returncode == 0 and " in f32 on cpu (" in result.stdout, result.stderr
    result = embed("verify", directory, "--reference", path)
    assert result.returncode == 0, result.stdout + result.stderr
    result = embed("verify", directory, "--reference", reference, **hidden)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_changed_reference_fails(directory: Path, reference: Path, tmp_path: Path, dtype: str) -> None:
    whole = verify.read_reference(reference)
    vectors = whole.vectors.copy()
    vectors[3] = np.roll(vectors[3], 1)
    origin = msgspec.structs.replace(whole.origin, vectors_sha256=sha256(vectors.tobytes()).hexdigest())
    path = tmp_path / "changed.safetensors"
    verify.write_reference(path, verify.Reference(origin, vectors))
    result = embed("verify", directory, "--reference", path, "--dtype", dtype)
    assert result.returncode == 1 and result.stdout.splitlines()[-1].startswith("FAIL: 1 of "), result.stdout
    [failed] = [line for line in result.stdout.splitlines() if line.endswith("  FAIL, worst")]
    assert failed.startswith(verify.read_corpus()[3].name)
