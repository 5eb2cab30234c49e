"""Measures each operator of a forward on a CUDA device: beside its own roofline, and beside the library's best.

    python -m tools.bench_ops [--dtypes NAME ...] [--workloads NAME ...]

Several weights take turns, as the layers of a model do, so that none stays in the cache. Every figure is the median of
replays of a graph of launches, ours and the library's in turn; the library is cuBLAS and PyTorch's fused attention. The
roofline is the larger of operations / PEAK_FLOPS and bytes / BANDWIDTH.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from embed.config import ModelConfig
from embed.encoder import Operators
from gkd.cuda import CudaBackend
from gkd.device import choose_device
from gkd.dtype import DType
from gkd.graph import Graph
from gkd.ops import Attention, Linear
from gkd.ops.attention import attention_work
from gkd.tensor import Tensor
from tools.bench_embed import WORKLOADS, Captured, allow_tf32
from tools.compile_all import GEOMETRIES

# The highest rates measured on an H200: cuBLAS at 8192^3 and a copy; fp32 without tensor cores for f32, three
# products for one where operands are split; for tf32 half of the rate in 16 bits, as the hardware is rated.
PEAK_FLOPS = {
    DType.SPLIT: 790e12 / 3,
    DType.F32: 50e12,
    DType.TF32: 790e12 / 2,
    DType.F16: 790e12,
    DType.BF16: 790e12,
}
BANDWIDTH = 4.24e12

TORCH = {
    DType.SPLIT: torch.float32,
    DType.F32: torch.float32,
    DType.TF32: torch.float32,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
}
# More than fit into the cache.
NUM_WEIGHTS = 32
ROUNDS = 7


@dataclass(frozen=True)
class Measured:
    """One operator at one size."""

    name: str
    flops: float
    num_bytes: float
    ours: Callable[[int], None]
    """Queues it once, with the weights of this number."""
    library: Callable[[int], object] | None


def seconds_each(replay: Callable[[], None], launches: int) -> float:
    start_s = time.perf_counter()
    replay()
    return (time.perf_counter() - start_s) / launches


class Bench:
    """Tensors of one workload and precision, ours and torch's at the same addresses."""

    def __init__(self, backend: CudaBackend, config: ModelConfig, lengths: list[int]) -> None:
        self._backend, self._lengths, self._ops = backend, lengths, Operators(config, backend.dtype)
        self._keep: list[torch.Tensor] = []
        tokens = sum(lengths)
        self._num_tokens = self.integers([tokens])
        self.rows = list(self._measured(config, tokens))

    def tensor(self, *shape: int, dtype: DType | None = None) -> tuple[Tensor, torch.Tensor]:
        dtype = dtype or self._backend.dtype
        theirs = torch.randn(shape, device="cuda", dtype=torch.float32).to(TORCH[dtype])
        ours = theirs
        if dtype is DType.SPLIT:
            ours = torch.cat([theirs.half(), (theirs - theirs.half()).half()], dim=-1)
        self._keep += [theirs, ours]
        return Tensor(ours.data_ptr(), shape, dtype), theirs

    def integers(self, values: Any) -> Tensor:
        array = torch.tensor(np.asarray(values), dtype=torch.int32, device="cuda")
        self._keep.append(array)
        return Tensor(array.data_ptr(), tuple(array.shape), DType.I32)

    def _measured(self, config: ModelConfig, tokens: int) -> list[Measured]:
        hidden, ops = config.hidden_size, self._ops
        item = self._backend.dtype.itemsize
        rows = []
        for name, op in (("qkv", ops.qkv), ("out", ops.attention_out), ("up", ops.up), ("down", ops.down)):
            rows.append(self._linear(name, op, tokens))
        rows.append(self._attention(ops.attention, tokens))
        x, _ = self.tensor(tokens, hidden, dtype=self._backend.dtype.summand)
        residual, _ = self.tensor(tokens, hidden, dtype=DType.F32)
        out = self.tensor(tokens, hidden)[0] if self._backend.dtype is not DType.F32 else residual
        gamma, beta = (self.tensor(hidden, dtype=DType.F32)[0] for _ in range(2))
        norm = lambda _: self._backend.run(ops.add_norm, out, residual, x, gamma, beta, self._num_tokens)  # noqa: E731
        num_bytes = tokens * hidden * (8 + 2 * item if out is not residual else 12)
        rows.append(Measured("add_norm", 0, num_bytes, norm, None))
        return rows

    def _linear(self, name: str, op: Linear, tokens: int) -> Measured:
        item = self._backend.dtype.itemsize
        x, their_x = self.tensor(tokens, op.in_features)
        dtype = self._backend.dtype
        out, their_out = self.tensor(tokens, op.out_features, dtype=dtype.summand if op.to_sum else dtype)
        weights = [self.tensor(op.out_features, op.in_features) for _ in range(NUM_WEIGHTS)]
        bias, _ = self.tensor(op.out_features, dtype=DType.F32)
        sizes = tokens * (op.in_features + op.out_features) + op.in_features * op.out_features
        return Measured(
            name,
            2 * tokens * op.in_features * op.out_features,
            sizes * item,
            lambda index: self._backend.run(op, out, x, weights[index % NUM_WEIGHTS][0], bias, self._num_tokens),
            lambda index: torch.mm(their_x, weights[index % NUM_WEIGHTS][1].T, out=their_out),
        )

    def _attention(self, op: Attention, tokens: int) -> Measured:
        hidden, item = op.num_heads * op.head_dim, self._backend.dtype.itemsize
        qkv, _ = self.tensor(tokens, 3 * hidden)
        out, _ = self.tensor(tokens, hidden)
        cu_seqlens = np.cumsum([0, *self._lengths])
        sizes = op.block_sizes(self._backend.dtype, self._backend.arch)
        block_q = next((size for size in sizes if size >= max(self._lengths)), sizes[-1])
        work = self.integers(attention_work(cu_seqlens, block_q))
        library = None
        if len(set(self._lengths)) == 1:
            shape = (len(self._lengths), op.num_heads, self._lengths[0], op.head_dim)
            q, k, v = (self.tensor(*shape)[1] for _ in range(3))
            library = lambda _: torch.nn.functional.scaled_dot_product_attention(q, k, v)  # noqa: E731
        return Measured(
            "attention",
            4 * hidden * sum(length**2 for length in self._lengths),
            4 * tokens * hidden * item,
            lambda _: self._backend.run(op, out, qkv, work, block_q),
            library,
        )


def measure(backend: CudaBackend, row: Measured) -> tuple[float, float | None]:
    """Seconds of one launch, ours and the library's."""
    stream = backend._open.stream
    row.ours(0)
    stream.synchronize()
    start_s = time.perf_counter()
    row.ours(1)
    stream.synchronize()
    launches = max(NUM_WEIGHTS, min(200, int(0.02 / (time.perf_counter() - start_s))))

    def queue_all() -> None:
        for index in range(launches):
            row.ours(index)

    graph = Graph(stream, queue_all)

    def replay() -> None:
        graph.replay(stream)
        stream.synchronize()

    theirs = None
    if row.library is not None:
        library = row.library

        def queue_theirs() -> None:
            for index in range(launches):
                library(index)

        theirs = Captured(queue_theirs)

    def replay_theirs() -> None:
        assert theirs is not None
        theirs.replay()
        torch.cuda.synchronize()

    ours_s, theirs_s = [], []
    for round_idx in range(ROUNDS + 2):
        ours_s.append(seconds_each(replay, launches))
        if theirs is not None:
            theirs_s.append(seconds_each(replay_theirs, launches))
        if round_idx == 1:
            ours_s, theirs_s = [], []
    graph.close()
    return statistics.median(ours_s), statistics.median(theirs_s) if theirs_s else None


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument(
        "--dtypes", nargs="+", choices=["split", "f32", "tf32", "f16", "bf16"], default=["split", "bf16"]
    )
    arguments = parser.parse_args(argv)
    torch.zeros(1, device="cuda")
    for name in arguments.dtypes:
        allow_tf32(name)
        backend = CudaBackend(choose_device(-1), DType(name))

        def run(backend: CudaBackend = backend, name: str = name) -> None:
            backend.acquire()
            for workload in arguments.workloads:
                for row in Bench(backend, GEOMETRIES[0].config, WORKLOADS[workload]).rows:
                    ours_s, library_s = measure(backend, row)
                    bound_s = max(row.flops / PEAK_FLOPS[backend.dtype], row.num_bytes / BANDWIDTH)
                    library = f"library {1e6 * library_s:8.1f} us" if library_s else ""
                    print(
                        f"{name:<4} {workload:<10} {row.name:<10} {1e6 * ours_s:8.1f} us "
                        f"{row.flops / ours_s / 1e12:6.1f} TFLOP/s {row.num_bytes / ours_s / 1e9:7.0f} GB/s "
                        f"{bound_s / ours_s:5.2f} of its roofline  {library}",
                        flush=True,
                    )

        backend.call(run)
        backend.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
