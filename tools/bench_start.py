"""Measures how soon a server answers on a CUDA device, how long a reload takes, and what memory it holds.

    python -m tools.bench_start MODEL [--dtypes f32 ...]

The first start of a precision finds an empty kernel cache, the others a full one; the weights are in the page cache
after the first. Memory is what nvidia-smi says of the process, and /health's parts beside it.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx


def start(model: Path, dtype: str, cache: Path) -> tuple[subprocess.Popen[str], str, float]:
    command = [sys.executable, "-m", "embed", "serve", str(model), "--addr", "127.0.0.1:0", "--unload-after", "1"]
    environment = {**os.environ, "GKD_CACHE_DIR": str(cache)}
    start_s = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--dtype", dtype], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    assert process.stdout is not None
    found = re.search(r"http://\S+:\d+", process.stdout.readline())
    assert found, "the server did not start"
    return process, found[0], time.perf_counter() - start_s


def device_mib(pid: int) -> int:
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    return sum(int(line.split(",")[1]) for line in lines if int(line.split(",")[0]) == pid)


def bench(model: Path, dtype: str, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as cache:
        starts_s, reloads_ms, answers_ms = [], [], []
        report: dict[str, Any] = {}
        for _ in range(repeats + 1):
            process, url, ready_s = start(model, dtype, Path(cache))
            starts_s.append(ready_s)
            with httpx.Client(base_url=url, timeout=60) as client:
                client.post("/create_embedding", json={"text": "warm up"}).raise_for_status()
                report = client.get("/health").json()
                used_mib = device_mib(process.pid)
                while client.get("/health").json()["model_loaded"]:
                    time.sleep(0.05)
                idle_mib = device_mib(process.pid)
                start_s = time.perf_counter()
                client.post("/create_embedding", json={"text": "wake up"}).raise_for_status()
                answers_ms.append(1e3 * (time.perf_counter() - start_s))
                reloads_ms.append(client.get("/health").json()["last_load_ms"])
            process.terminate()
            process.wait()
    weights_mib, workspace_mib = report["weights_bytes"] >> 20, report["workspace_bytes"] >> 20
    first_s, *others_s = starts_s
    print(
        f"{dtype}: start to port {first_s:.2f} s with an empty kernel cache, "
        f"{statistics.median(others_s):.2f} s ({min(others_s):.2f} to {max(others_s):.2f}) with a full one; "
        f"reload {statistics.median(reloads_ms):.0f} ms, "
        f"first answer after sleep {statistics.median(answers_ms):.0f} ms; "
        f"device memory {used_mib} MiB = weights {weights_mib} + workspace {workspace_mib} + the rest "
        f"{used_mib - weights_mib - workspace_mib}, unloaded {idle_mib} MiB; {report['kernels']} kernels",
        flush=True,
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtypes", nargs="+", default=["f32", "bf16"])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args(argv)
    for dtype in arguments.dtypes:
        bench(arguments.model, dtype, arguments.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
