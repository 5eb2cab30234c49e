"""Measures the engine and the server on the CPU, beside sentence-transformers where it can do the same.

    python tools/bench_cpu.py [--models DIR] [--requests N] [--json FILE]

Four lines: the first vector of a new process, 64 texts of mixed lengths, one short text, and the server's resident
memory over many requests. Ours and theirs are timed in turn, in one process; the figure is the median, with the
fastest and the slowest beside it, and accuracy stands beside speed. `--json` appends a record for each line.
"""

import argparse
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
from sentence_transformers import SentenceTransformer

from embed import Embed

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
SPIN_S = 0.3
SHORT = "A short text of about a dozen tokens."


@dataclass(frozen=True)
class Timing:
    """Milliseconds."""

    median_ms: float
    fastest_ms: float
    slowest_ms: float

    @classmethod
    def of(cls, samples_s: Sequence[float]) -> "Timing":
        return cls(1e3 * statistics.median(samples_s), 1e3 * min(samples_s), 1e3 * max(samples_s))

    def __str__(self) -> str:
        return f"{self.median_ms:.1f} ms ({self.fastest_ms:.1f} to {self.slowest_ms:.1f})"


def in_turn(repeats: int, *functions: Callable[[], object]) -> list[Timing]:
    """Timings of each function, one call of each after the other; the first round only warms up.

    The threads of one's BLAS spin for a while after a call and would take the other's cores: each call waits for that.
    """
    samples: list[list[float]] = [[] for _ in functions]
    for round_idx in range(repeats + 1):
        for function, times in zip(functions, samples, strict=True):
            time.sleep(SPIN_S)
            start_s = time.perf_counter()
            function()
            if round_idx:
                times.append(time.perf_counter() - start_s)
    return [Timing.of(times) for times in samples]


def mixed_texts(engine: Embed, count: int, seed: int = 0) -> list[str]:
    """Texts of 12 to 267 tokens, log-normal, most of them short: 64 tokens on average."""
    lines = (ROOT / "tests" / "corpus" / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    latin = (json.loads(line) for line in lines if '"Latin"' in line)
    words = sorted({word for line in latin for word in re.findall(r"[a-z]{2,9}", line["text"])})
    single = [word for word in words if len(engine.tokenize(word)) == 3]  # one token between the two special ones
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(3.85, 0.8, count), 10, 265).astype(int)
    return [" ".join(rng.choice(single, length)) for length in lengths]


def bench_first_vector(model: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "embed", "text", str(model), SHORT]
    [timing] = in_turn(7, lambda: subprocess.run(command, check=True, capture_output=True))
    print(f"first vector of a new process   {timing}; at most 1500 ms")
    return {"line": "first_vector", "ours": asdict(timing)}


def bench_encode(ours: Embed, theirs: SentenceTransformer, name: str, texts: list[str], repeats: int) -> dict[str, Any]:
    our_timing, their_timing = in_turn(repeats, lambda: ours.encode(texts), lambda: theirs.encode(texts))
    ratio = their_timing.median_ms / our_timing.median_ms
    cosine = float((ours.encode(texts) * theirs.encode(texts)).sum(axis=1).min())
    num_tokens = len(ours.tokenize_batch(texts)[0])
    print(
        f"{name:<31} {our_timing}, sentence-transformers {their_timing}: {ratio:.2f} x; "
        f"{num_tokens} tokens, cosine {cosine:.7f}"
    )
    record = {"line": name, "ours": asdict(our_timing), "theirs": asdict(their_timing)}
    return record | {"ratio": ratio, "num_tokens": num_tokens, "min_cosine": cosine}


def bench_memory(model: Path, mixed: list[str], num_requests: int) -> dict[str, Any]:
    """Resident memory of the server after the first and after the last tenth of the requests."""
    command = [sys.executable, "-m", "embed", "serve", str(model), "--addr", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"http://\S+:\d+", server.stdout.readline())
        assert found, "the server did not start"
        clients = threading.local()

        def request(seed: int) -> None:
            if not hasattr(clients, "http"):
                clients.http = httpx.Client(base_url=found[0], timeout=60)
            rng = np.random.default_rng(seed)
            texts = mixed[rng.integers(len(mixed))].split()[: rng.integers(1, 30)]
            clients.http.post("/create_embedding", json={"text": " ".join(texts)}).raise_for_status()

        start_s = time.perf_counter()
        resident_bytes = []
        with ThreadPoolExecutor(8) as pool:
            for tenth in range(10):
                list(pool.map(request, range(tenth * num_requests // 10, (tenth + 1) * num_requests // 10)))
                resident_bytes.append(resident_bytes_of(server.pid))
        rate = num_requests / (time.perf_counter() - start_s)
        server.terminate()
    grown_bytes, bound_bytes = resident_bytes[-1] - resident_bytes[0], max(8 * MIB, resident_bytes[0] // 50)
    print(
        f"resident memory, {num_requests} requests   {resident_bytes[0] / MIB:.1f} MiB after the first tenth, "
        f"{grown_bytes / MIB:+.1f} MiB after the last; at most {bound_bytes / MIB:+.1f}; {rate:.0f} requests/s"
    )
    return {"line": "resident_memory", "resident_bytes": resident_bytes, "requests_per_s": rate}


def resident_bytes_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def machine() -> dict[str, Any]:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    with Embed.open("minilm") as engine:
        processor = engine.device_name
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", type=Path, default=ROOT / "build" / "models", metavar="DIR")
    parser.add_argument("--requests", type=int, default=10_000, metavar="N", help="requests of the memory line")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a JSON record for each line")
    arguments = parser.parse_args(argv)
    model = arguments.models / "minilm"

    where = machine()
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    records = [bench_first_vector(model)]
    theirs = SentenceTransformer(str(model), device="cpu", model_kwargs={"dtype": torch.float32})
    with Embed.open(model) as ours:
        records.append(bench_encode(ours, theirs, "64 mixed texts", mixed_texts(ours, 64), repeats=9))
        records.append(bench_encode(ours, theirs, "one short text", [SHORT], repeats=30))
        mixed = mixed_texts(ours, 1000, seed=1)
    records.append(bench_memory(model, mixed, arguments.requests))
    if arguments.json:
        with arguments.json.open("a") as file:
            file.writelines(json.dumps(where | record) + "\n" for record in records)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
