"""out = activation(x @ weight.T + bias) of pooled vectors, in fp32 whatever the precision of the encoder."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from gkd.dtype import DType
from gkd.kernel import KernelPlan
from gkd.ops.contract import Array, Signature, float_dtype
from gkd.ops.linear import Linear

DenseActivation = Literal["none", "tanh"]


@dataclass(frozen=True, slots=True)
class Dense:
    """A `Linear` of few rows that are no operands of the encoder; a row's bits do not depend on the other rows.

    Shapes:  as Linear's.
    Dtypes:  float32 (float64 as an oracle); int32 num_rows.
    """

    in_features: int
    out_features: int
    activation: DenseActivation = "none"

    name: ClassVar[str] = "dense"

    @property
    def _linear(self) -> Linear:
        return Linear(self.in_features, self.out_features, self.activation, kernel="simt")

    def check(self, out: Array, x: Array, weight: Array, bias: Array, num_rows: Array) -> None:
        dtype = float_dtype(self.name, "x", x)
        signature = Signature(self.name)
        signature.match("x", x, ("max_rows", self.in_features), dtype)
        signature.match("out", out, ("max_rows", self.out_features), dtype)
        signature.match("weight", weight, (self.out_features, self.in_features), dtype)
        signature.match("bias", bias, (self.out_features,), dtype)
        signature.match("num_rows", num_rows, (1,), DType.I32)

    def reference(self, out: Array, x: Array, weight: Array, bias: Array, num_rows: Array) -> None:
        self._linear.reference(out, x, weight, bias, num_rows)

    def plan(self, dtype: DType, arch: int) -> KernelPlan:
        return self._linear.plan(DType.F32, arch)
