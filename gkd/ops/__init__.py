"""The operators: one module each, holding contract, launch geometry and NumPy reference.

An operator is a frozen dataclass of what is fixed at load (widths, activation, eps). `check` raises before
anything is computed, `reference` is its meaning in NumPy: the specification, the oracle when the tensors are
float64, and the CPU backend when they are float32. Arguments go outputs first, then inputs, then weights.
"""

from gkd.ops.add_layer_norm import AddLayerNorm
from gkd.ops.attention import Attention
from gkd.ops.cast import Cast
from gkd.ops.contract import Operator
from gkd.ops.dense import Dense
from gkd.ops.embed_layer_norm import EmbedLayerNorm
from gkd.ops.gather_rows import GatherRows
from gkd.ops.l2_normalize import L2Normalize
from gkd.ops.linear import Linear
from gkd.ops.pool import Pool
from gkd.ops.row_bounds import RowBounds
from gkd.ops.split import Split

__all__ = [
    "AddLayerNorm",
    "Attention",
    "Cast",
    "Dense",
    "EmbedLayerNorm",
    "GatherRows",
    "L2Normalize",
    "Linear",
    "Operator",
    "Pool",
    "RowBounds",
    "Split",
]
