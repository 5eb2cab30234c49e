"""Measures the encoder on a CUDA device beside PyTorch: one process, calls in turn, accuracy beside speed.

    python -m tools.bench_embed MODEL [--workloads [NAME ...]] [--sweep] [--json FILE]

MODEL is a directory, as `python -m tools.make_model DEST --preset bge-m3` writes. PyTorch runs transformers' model of
the same weights with its fused attention, eagerly and, for single texts, as one CUDA graph; texts are sorted by length
and padded in batches of 32, as sentence-transformers does. Token ids go in and vectors come out on the host, on both
sides. For tf32 PyTorch keeps f32 and is allowed to multiply in tf32. Where texts are of one length, `library parts` is
the time of cuBLAS's products and PyTorch's fused attention alone, every layer whole: the bound of an engine made of
libraries. The figure is the median; the fastest and the slowest stand beside it. Short calls are made several at a
turn. The first of them, which finds the host's caches full of the others' work and its threads asleep, stands apart.

`--sweep` measures ours and eager PyTorch over the length and the number of texts, too, as far as the model reads;
`python -m tools.plot_bench` draws that.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import normalize, scaled_dot_product_attention
from transformers import AutoModel

from embed import Embed
from embed.config import ModelConfig, read_config
from tools.sweeps import SWEEPS

ROOT = Path(__file__).resolve().parents[1]
TORCH_BATCH = 32
# tf32 is how torch multiplies f32, if it is allowed to.
DTYPES = {"f32": torch.float32, "tf32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

# Tokens of each text.
WORKLOADS: dict[str, list[int]] = {
    "1 x 16": [16],
    "1 x 128": [128],
    "64 x 32": [32] * 64,
    "32 x 512": [512] * 32,
    "256 mixed": np.random.default_rng(3).integers(8, 513, 256).tolist(),
    "2 x 8192": [8192] * 2,
}
WORKLOAD_SECONDS, SWEEP_SECONDS = 5.0, 0.5
MIN_ROUNDS, MAX_ROUNDS = 5, 100
TURN_SECONDS = 0.02

# What ours is compared with, and how the ratio reads.
PEERS = {"torch": "x", "torch graph": "x", "library parts": "of"}

Ids = list[NDArray[np.int32]]
Vectors = NDArray[np.float32]
Encode = Callable[[Ids], Vectors]
# By name, which is an engine and a precision. What computes no vectors gives none.
Rows = dict[str, Callable[[Ids], Vectors | None]]
Result = TypeVar("Result")


class Captured(Generic[Result]):
    """A CUDA graph of the torch work that `queue` queues; it is called before, too, so that libraries are set up.

    `result` is what it returned: every replay writes there.
    """

    def __init__(self, queue: Callable[[], Result]) -> None:
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            for _ in range(3):
                queue()
        torch.cuda.synchronize()
        # The graph uses the tensors that `queue` closes over, and holds no reference to them.
        self._queue = queue
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.result = queue()

    def replay(self) -> None:
        """Queues it all once."""
        self._graph.replay()


def ours(model: Path, dtype: str) -> Encode:
    engine = Embed.open(model, dtype=dtype, pool="cls", normalize=True)

    def encode(texts: Ids) -> Vectors:
        offsets = np.cumsum([0, *map(len, texts)])
        return engine.encode_ids(np.concatenate(texts), offsets)

    return encode


def allow_tf32(dtype: str) -> None:
    """Says whether torch may round f32 operands of the products that are queued or captured from here on."""
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"


def torch_eager(module: Any, dtype: str) -> Encode:
    def encode(texts: Ids) -> Vectors:
        allow_tf32(dtype)
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        vectors = np.empty((len(texts), module.config.hidden_size), np.float32)
        for start in range(0, len(order), TORCH_BATCH):
            batch = order[start : start + TORCH_BATCH]
            ids, mask = padded([texts[index] for index in batch])
            vectors[batch] = forward(module, ids.cuda(), mask.cuda()).cpu().numpy()
        return vectors

    return encode


def torch_graph(module: Any, dtype: str, length: int) -> Encode:
    """For one text of this length."""
    allow_tf32(dtype)
    ids = torch.full((1, length), 5, dtype=torch.long, device="cuda")
    mask = torch.ones_like(ids)
    graph = Captured(lambda: forward(module, ids, mask))

    def encode(texts: Ids) -> Vectors:
        ids.copy_(torch.from_numpy(texts[0].astype(np.int64))[None])
        graph.replay()
        vectors: Vectors = graph.result.cpu().numpy()
        return vectors

    return encode


def library_parts(config: ModelConfig, dtype: str, lengths: list[int]) -> Callable[[Ids], None]:
    """The products and the attention of a forward, for texts of one length, as one CUDA graph; nothing else is done.

    Each layer has weights of its own, so that none stays in the cache; operands are random. Biases, GELU, LayerNorm,
    residuals, embedding, pooling and copies cost nothing here.
    """

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=DTYPES[dtype])

    num_tokens, hidden, inner = sum(lengths), config.hidden_size, config.intermediate_size
    weights = [
        (random(3 * hidden, hidden), random(hidden, hidden), random(inner, hidden), random(hidden, inner))
        for _ in range(config.num_layers)
    ]
    states, context, projected = (random(num_tokens, hidden) for _ in range(3))
    qkv_states, inner_states = random(num_tokens, 3 * hidden), random(num_tokens, inner)
    query, key, value = (random(len(lengths), config.num_heads, lengths[0], config.head_dim) for _ in range(3))

    def queue() -> None:
        for qkv, attention_out, up, down in weights:
            torch.mm(states, qkv.T, out=qkv_states)
            scaled_dot_product_attention(query, key, value)
            torch.mm(context, attention_out.T, out=projected)
            torch.mm(states, up.T, out=inner_states)
            torch.mm(inner_states, down.T, out=projected)

    allow_tf32(dtype)
    graph = Captured(queue)

    def run(_: Ids) -> None:
        graph.replay()
        torch.cuda.synchronize()

    return run


def load_torch(model: Path, dtype: torch.dtype) -> Any:
    module = AutoModel.from_pretrained(model, dtype=dtype, attn_implementation="sdpa")
    return module.cuda().eval()


def padded(texts: Ids) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, texts))
    ids, mask = np.ones((len(texts), longest), np.int64), np.zeros((len(texts), longest), np.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = text, 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


@torch.inference_mode()
def forward(module: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return normalize(module(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0].float())


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of a row's calls."""

    first_ms: list[float] = field(default_factory=list)
    """Of each turn."""
    next_ms: list[float] = field(default_factory=list)
    """Of those that followed one of their own kind."""

    @property
    def counted_ms(self) -> list[float]:
        """Where a call is longer than a turn, what came before it is no part of it to speak of."""
        return self.next_ms or self.first_ms


def in_turn(rows: Rows, texts: Ids, seconds: float) -> dict[str, Times]:
    """Each row's calls, a turn of each after the other, after a round that only warms up.

    A turn lasts TURN_SECONDS, and at least a call. It all ends after `seconds`, but not before MIN_ROUNDS nor later
    than after MAX_ROUNDS.
    """

    def take_turn(run: Callable[[Ids], Any]) -> list[float]:
        torch.cuda.synchronize()
        times_s = [time.perf_counter()]
        while len(times_s) == 1 or times_s[-1] - times_s[0] < TURN_SECONDS:
            run(texts)
            times_s.append(time.perf_counter())
        return [1e3 * (end_s - start_s) for start_s, end_s in pairwise(times_s)]

    for run in rows.values():
        take_turn(run)
    times = {name: Times() for name in rows}
    end_s = time.perf_counter() + seconds
    num_rounds = 0
    while num_rounds < MIN_ROUNDS or (time.perf_counter() < end_s and num_rounds < MAX_ROUNDS):
        for name, run in rows.items():
            first_ms, *next_ms = take_turn(run)
            times[name].first_ms.append(first_ms)
            times[name].next_ms.extend(next_ms)
        num_rounds += 1
    return times


def bench(rows: Rows, exact: Encode, lengths: list[int], vocab_size: int, seconds: float) -> list[dict[str, Any]]:
    """A record for each row, with accuracy against `exact` where it has vectors, for random texts of these lengths."""
    rng = np.random.default_rng(1)
    texts = [np.concatenate(([0], rng.integers(4, vocab_size, n - 2), [2])).astype(np.int32) for n in lengths]
    expected = exact(texts)
    accuracy: dict[str, dict[str, float]] = {}
    for name, run in rows.items():
        vectors = run(texts)
        if vectors is not None:
            accuracy[name] = {
                "min_cosine": float((vectors * expected).sum(axis=1).min()),
                "max_difference": float(np.abs(vectors - expected).max()),
            }
    records = []
    for name, times in in_turn(rows, texts, seconds).items():
        median_ms = statistics.median(times.counted_ms)
        record = {
            "row": name,
            "median_ms": median_ms,
            "fastest_ms": min(times.counted_ms),
            "slowest_ms": max(times.counted_ms),
            "first_ms": statistics.median(times.first_ms),
            "tokens_per_s": sum(lengths) / median_ms * 1e3,
        }
        records.append(record | accuracy.get(name, {}))
    return records


def show(workload: str, records: list[dict[str, Any]]) -> None:
    """Prints a line for each record, ours with its ratio to each peer of the same precision."""
    medians_ms = {record["row"]: record["median_ms"] for record in records}
    for record in records:
        engine, _, dtype = record["row"].rpartition(" ")
        ratios = [
            f"{medians_ms[f'{peer} {dtype}'] / record['median_ms']:.2f} {relation} {peer}"
            for peer, relation in PEERS.items()
            if engine == "ours" and f"{peer} {dtype}" in medians_ms
        ]
        cosine = f"cosine {record['min_cosine']:.7f}" if "min_cosine" in record else ""
        print(
            f"{workload:<10} {record['row']:<18} {record['median_ms']:9.3f} ms "
            f"({record['fastest_ms']:.3f} to {record['slowest_ms']:.3f}, first {record['first_ms']:.3f})  "
            f"{record['tokens_per_s'] / 1e3:8.1f} k tokens/s  {cosine:<16}  {', '.join(ratios)}".rstrip(),
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
    parser.add_argument("--workloads", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--sweep", action="store_true", help="measure the sweeps that plot_bench draws, too")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"of each workload ({WORKLOAD_SECONDS:g}) and each point of a sweep ({SWEEP_SECONDS:g}), all rows "
        f"together; {MIN_ROUNDS} rounds are timed in any case",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a JSON record for each row")
    arguments = parser.parse_args(argv)

    where = machine() | {"model": arguments.model.name}
    print(where)
    config = read_config(arguments.model)
    loaded: dict[torch.dtype, Any] = {}
    for kind in (DTYPES[dtype] for dtype in ("f32", *arguments.dtypes)):
        loaded[kind] = loaded.get(kind) or load_torch(arguments.model, kind)
    modules = {dtype: loaded[DTYPES[dtype]] for dtype in ("f32", *arguments.dtypes)}
    exact = torch_eager(modules["f32"], "f32")
    rows: Rows = {}
    for dtype in arguments.dtypes:
        rows |= {f"ours {dtype}": ours(arguments.model, dtype), f"torch {dtype}": torch_eager(modules[dtype], dtype)}

    def measure(rows: Rows, lengths: list[int], default_s: float, what: dict[str, Any]) -> None:
        seconds = default_s if arguments.seconds is None else arguments.seconds
        records = bench(rows, exact, lengths, config.vocab_size, seconds)
        show(what["workload"], records)
        if arguments.json:
            with arguments.json.open("a") as file:
                file.writelines(json.dumps(where | what | record) + "\n" for record in records)

    for workload in arguments.workloads:
        lengths = WORKLOADS[workload]
        peers: Rows = {}
        for dtype in arguments.dtypes:
            if len(lengths) == 1:
                peers[f"torch graph {dtype}"] = torch_graph(modules[dtype], dtype, lengths[0])
            if len(set(lengths)) == 1:
                peers[f"library parts {dtype}"] = library_parts(config, dtype, lengths)
        measure(rows | peers, lengths, WORKLOAD_SECONDS, {"workload": workload})
    for name, sweep in SWEEPS.items() if arguments.sweep else ():
        for x, lengths in sweep.points.items():
            if max(lengths) <= config.max_tokens:
                what = {"workload": f"{len(lengths)} x {lengths[0]}", "sweep": name, "x": x}
                measure(rows, lengths, SWEEP_SECONDS, what)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
