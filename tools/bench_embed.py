"""Measures the encoder on a CUDA device beside PyTorch: one process, calls in turn, accuracy beside speed.

    python -m tools.bench_embed MODEL [--workloads NAME ...] [--json FILE]

MODEL is a directory, as `python -m tools.make_model DEST --preset bge-m3` writes. PyTorch runs transformers' model of
the same weights with its fused attention, eagerly and, for single texts, as one CUDA graph; texts are sorted by length
and padded in batches of 32, as sentence-transformers does. Token ids go in and vectors come out on the host, on both
sides. The figure is the median; the fastest and the slowest stand beside it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel

from embed import Embed

ROOT = Path(__file__).resolve().parents[1]
TORCH_BATCH = 32
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

# Tokens of each text.
WORKLOADS: dict[str, list[int]] = {
    "1 x 16": [16],
    "1 x 128": [128],
    "64 x 32": [32] * 64,
    "32 x 512": [512] * 32,
    "256 mixed": np.random.default_rng(3).integers(8, 513, 256).tolist(),
    "2 x 8192": [8192] * 2,
}
GRAPHED = ("1 x 16", "1 x 128")

Ids = list[NDArray[np.int32]]


@dataclass(frozen=True)
class Row:
    """One engine in one precision."""

    name: str
    encode: Callable[[Ids], NDArray[np.float32]]


def our_row(model: Path, dtype: str) -> Row:
    engine = Embed.open(model, dtype=dtype, pool="cls", normalize=True)

    def encode(texts: Ids) -> NDArray[np.float32]:
        offsets = np.cumsum([0, *map(len, texts)])
        return engine.encode_ids(np.concatenate(texts), offsets)

    return Row(f"ours {dtype}", encode)


def torch_row(model: Path, dtype: str) -> Row:
    module = load_torch(model, dtype)

    def encode(texts: Ids) -> NDArray[np.float32]:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        vectors = np.empty((len(texts), module.config.hidden_size), np.float32)
        for start in range(0, len(order), TORCH_BATCH):
            batch = order[start : start + TORCH_BATCH]
            ids, mask = padded([texts[index] for index in batch])
            vectors[batch] = forward(module, ids.cuda(), mask.cuda()).cpu().numpy()
        return vectors

    return Row(f"torch {dtype}", encode)


def graph_row(model: Path, dtype: str, length: int) -> Row:
    module = load_torch(model, dtype)
    ids = torch.full((1, length), 5, dtype=torch.long, device="cuda")
    mask = torch.ones_like(ids)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for _ in range(3):
            forward(module, ids, mask)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        vector = forward(module, ids, mask)

    def encode(texts: Ids, module: Any = module) -> NDArray[np.float32]:
        # `module` is an argument so that it lives: the graph reads its weights, and holds no reference to them.
        ids.copy_(torch.from_numpy(texts[0].astype(np.int64))[None])
        graph.replay()
        result: NDArray[np.float32] = vector.cpu().numpy()
        return result

    return Row(f"torch graph {dtype}", encode)


def load_torch(model: Path, dtype: str) -> Any:
    module = AutoModel.from_pretrained(model, dtype=DTYPES[dtype], attn_implementation="sdpa")
    return module.cuda().eval()


def padded(texts: Ids) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, texts))
    ids, mask = np.ones((len(texts), longest), np.int64), np.zeros((len(texts), longest), np.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = text, 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


@torch.inference_mode()
def forward(module: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    hidden = module(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0].float()
    return torch.nn.functional.normalize(hidden)


def in_turn(rows: list[Row], texts: Ids, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each row, one call of each after the other, after three rounds that only warm up."""
    samples: dict[str, list[float]] = {row.name: [] for row in rows}
    end_s = time.perf_counter() + seconds
    round_idx = 0
    while round_idx < 8 or (time.perf_counter() < end_s and round_idx < 103):
        for row in rows:
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            row.encode(texts)
            if round_idx >= 3:
                samples[row.name].append(1e3 * (time.perf_counter() - start_s))
        round_idx += 1
    return samples


def bench(workload: str, rows: list[Row], vocab_size: int, seconds: float) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    lengths = WORKLOADS[workload]
    texts = [np.concatenate(([0], rng.integers(4, vocab_size, n - 2), [2])).astype(np.int32) for n in lengths]
    samples = in_turn(rows, texts, seconds)
    exact = next(row for row in rows if row.name == "torch f32").encode(texts)
    records = []
    for row in rows:
        vectors = row.encode(texts)
        median_ms = statistics.median(samples[row.name])
        records.append(
            {
                "workload": workload,
                "row": row.name,
                "median_ms": median_ms,
                "fastest_ms": min(samples[row.name]),
                "slowest_ms": max(samples[row.name]),
                "tokens_per_s": sum(lengths) / median_ms * 1e3,
                "min_cosine": float((vectors * exact).sum(axis=1).min()),
                "max_difference": float(np.abs(vectors - exact).max()),
            }
        )
    return records


def show(records: list[dict[str, Any]]) -> None:
    medians = {record["row"]: record["median_ms"] for record in records}
    for record in records:
        peer = record["row"].replace("ours", "torch")
        ratio = f"{medians[peer] / record['median_ms']:5.2f} x {peer}" if "ours" in record["row"] else ""
        print(
            f"{record['workload']:<10} {record['row']:<17} {record['median_ms']:9.3f} ms "
            f"({record['fastest_ms']:.3f} to {record['slowest_ms']:.3f})  "
            f"{record['tokens_per_s'] / 1e3:8.1f} k tokens/s  cosine {record['min_cosine']:.7f}  {ratio}",
            flush=True,
        )


def machine() -> dict[str, Any]:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,clocks.max.sm,power.limit",
        "--format=csv,noheader",
        "-i",
        "0",
    ]
    card = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return {
        "card": card,
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--seconds", type=float, default=5, help="of each workload, all rows together")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a JSON record for each row")
    arguments = parser.parse_args(argv)

    torch.backends.cuda.matmul.allow_tf32 = False
    where = machine()
    print(where)
    vocab_size = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
    rows = [torch_row(arguments.model, "f32")]
    for dtype in arguments.dtypes:
        rows += [our_row(arguments.model, dtype), *([torch_row(arguments.model, dtype)] if dtype != "f32" else [])]
    for workload in arguments.workloads:
        length = WORKLOADS[workload][0]
        graphs = (
            [graph_row(arguments.model, dtype, length) for dtype in arguments.dtypes] if workload in GRAPHED else []
        )
        records = bench(workload, [*rows, *graphs], vocab_size, arguments.seconds)
        show(records)
        if arguments.json:
            with arguments.json.open("a") as file:
                file.writelines(json.dumps(where | record) + "\n" for record in records)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
