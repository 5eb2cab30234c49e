"""Which precisions there are, and how matrices are multiplied in them.

float32 is computed with split numbers on tensor cores, where sizes allow. A split number keeps 22 bits above a smallest
magnitude, which its tensor's scale sets, and stays in f16's range. So the scales come from bounds on what a model can
compute, whatever is asked of it: an element that LayerNorm gives is at most
sqrt(hidden_size) * max |gamma| + max |beta|, and a product with a row of weights at most the product of the norms.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import floor, inf, log2, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embed.config import ModelConfig
from gkd.backend import Backend
from gkd.dtype import DType
from gkd.ops import Linear, RowBounds

# Half of f16's range: what a bound leaves out, the rounding of the sums, is far less.
_RANGE = 2.0**15
# With a scale of 1 the error of the smallest numbers is 2^-25: what fp32 makes of sums of numbers around 1. A model
# that needs a smaller one is computed without tensor cores. A larger one than this gains nothing.
_LEAST_SCALE, _MOST_SCALE = 1.0, 2.0**12

PRECISIONS = (DType.F32, DType.TF32, DType.F16, DType.BF16)
"""What an engine may be asked to compute in."""

_FIRST_WITH_TF32 = 80

_MATRICES = ("qkv", "up", "attention_out", "down")


@dataclass(frozen=True, slots=True)
class Scales:
    """Of split states: by what the numbers are multiplied, powers of two."""

    hidden: float
    qkv: float
    """Of queries, keys and values, and of the context, which is a mean of values and no larger."""
    inner: float


def precisions(arch: int) -> tuple[DType, ...]:
    """Those that a device of this compute capability computes in; 0 is the CPU."""
    if arch == 0:
        return (DType.F32,)
    return tuple(dtype for dtype in PRECISIONS if dtype is not DType.TF32 or arch >= _FIRST_WITH_TF32)


def takes_split(config: ModelConfig, arch: int) -> bool:
    """Whether a model's products can be computed with split operands on this compute capability."""
    hidden, inner = config.hidden_size, config.intermediate_size
    sizes = ((hidden, 3 * hidden), (hidden, hidden), (hidden, inner), (inner, hidden))
    return all(Linear(*size).takes_split(arch) for size in sizes)


def split_scales(backend: Backend, config: ModelConfig, weights: Mapping[str, Any]) -> Scales | None:
    """The scales for a model whose split weights have been loaded; None if it needs a wider range than they have."""
    bounds = _weight_bounds(backend, config, weights)
    if not (bounds < inf).all():
        return None

    def vector(name: str) -> NDArray[np.float32]:
        values = np.empty(weights[name].shape, np.float32)
        backend.download(values, weights[name])
        return values

    hidden = qkv = inner = norm = 0.0

    def pass_layer_norm(name: str) -> None:
        nonlocal hidden, norm
        largest_gamma, beta = float(np.abs(vector(f"{name}_gamma")).max()), vector(f"{name}_beta")
        hidden = max(hidden, sqrt(config.hidden_size) * largest_gamma + float(np.abs(beta).max()))
        norm = sqrt(config.hidden_size) * largest_gamma + float(np.linalg.norm(beta))

    pass_layer_norm("embeddings")
    for layer in range(config.num_layers):
        qkv_bound, up_bound = bounds[layer, :2]
        qkv = max(qkv, norm * qkv_bound + float(np.abs(vector(f"layer.{layer}.qkv_bias")).max()))
        pass_layer_norm(f"layer.{layer}.attention")
        inner = max(inner, norm * up_bound + float(np.abs(vector(f"layer.{layer}.up_bias")).max()))
        pass_layer_norm(f"layer.{layer}.down")
    scales = [_scale(bound) for bound in (hidden, qkv, inner)]
    return Scales(*scales) if min(scales) >= _LEAST_SCALE else None


def _weight_bounds(backend: Backend, config: ModelConfig, weights: Mapping[str, Any]) -> NDArray[np.float32]:
    """The largest norm of a row of each matrix, (num_layers, len(_MATRICES)); infinity for one out of range."""
    bounds = np.zeros(config.num_layers * len(_MATRICES), np.float32)
    on_device = backend.upload(backend.empty(bounds.shape, DType.F32), bounds)
    for index, (layer, name) in enumerate(product(range(config.num_layers), _MATRICES)):
        weight = weights[f"layer.{layer}.{name}_weight"]
        backend.run(RowBounds(weight.shape[1]), backend.view(on_device, (1,), index), weight)
    backend.download(bounds, on_device)
    return bounds.reshape(config.num_layers, len(_MATRICES))


def _scale(bound: float) -> float:
    """The largest power of two that keeps numbers up to `bound` in range."""
    if not 0 < bound < inf:
        return 0.0 if bound else _MOST_SCALE
    return float(min(2.0 ** floor(log2(_RANGE / bound)), _MOST_SCALE))
