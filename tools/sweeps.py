"""What `bench_embed --sweep` measures point by point, and `plot_bench` draws as curves."""

from dataclasses import dataclass

SWEEP_TOKENS = 16_384
"""In every call of the throughput sweep."""
SWEEP_LENGTH = 32
"""Tokens of every text of the latency sweep."""


@dataclass(frozen=True)
class Sweep:
    """One quantity, y, over another, x."""

    title: str
    x_label: str
    y_label: str
    points: dict[int, list[int]]
    """By x: the tokens of each text of a call."""


SWEEPS = {
    "throughput": Sweep(
        title=f"Throughput by text length, {SWEEP_TOKENS:,} tokens a call",
        x_label="length of each text (tokens)",
        y_label="throughput (tokens/s)",
        points={2**exponent: [2**exponent] * (SWEEP_TOKENS >> exponent) for exponent in range(4, 14)},
    ),
    "latency": Sweep(
        title=f"Latency by batch size, {SWEEP_LENGTH} tokens a text",
        x_label="batch size (texts)",
        y_label="latency (ms)",
        points={2**exponent: [SWEEP_LENGTH] * 2**exponent for exponent in range(9)},
    ),
}
