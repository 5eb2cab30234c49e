"""LayerNorm(word[id] + token_type[t] + position[p]): the start of an encoder."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from gkd.dtype import DType, scale_of
from gkd.errors import ShapeError
from gkd.kernel import KernelPlan, KernelSpec, Launch, ceil_div, dtype_define
from gkd.ops.blocks import row_blocks
from gkd.ops.contract import Array, Signature, float_dtype
from gkd.ops.layer_norm import layer_norm_

_NUM_THREADS = 128


@dataclass(frozen=True, slots=True)
class EmbedLayerNorm:
    """residual = LayerNorm(word[input_ids] + token_type[token_type_ids] + position[position_ids]) * gamma + beta, and
    out the same, rounded to what a product takes.

    Shapes:  out, residual (max_rows, hidden_size); input_ids, position_ids, token_type_ids (max_rows,);
             word (vocab_size, hidden_size), position (num_positions, hidden_size),
             token_type (num_types, hidden_size); gamma, beta (hidden_size,);
             num_rows (1,): so many first rows are computed.
    Dtypes:  int32 ids in range, which the caller has checked, and num_rows; one floating dtype for the tables and out,
             but f32 for the tables where out is split or tf32; residual, gamma and beta in its accumulator's, f32 for
             16 bits. Where out's and residual's are one, out is residual itself.
    Source:  the order of the sum is transformers' BertEmbeddings.
    """

    hidden_size: int
    eps: float

    name: ClassVar[str] = "embed_layer_norm"

    def check(
        self,
        out: Array,
        residual: Array,
        input_ids: Array,
        position_ids: Array,
        token_type_ids: Array,
        word: Array,
        position: Array,
        token_type: Array,
        gamma: Array,
        beta: Array,
        num_rows: Array,
    ) -> None:
        dtype = float_dtype(self.name, "out", out)
        signature = Signature(self.name)
        signature.match("input_ids", input_ids, ("max_rows",), DType.I32)
        signature.match("position_ids", position_ids, ("max_rows",), DType.I32)
        signature.match("token_type_ids", token_type_ids, ("max_rows",), DType.I32)
        signature.match("out", out, ("max_rows", self.hidden_size), dtype)
        signature.match("residual", residual, ("max_rows", self.hidden_size), dtype.accumulator)
        signature.match("word", word, ("vocab_size", self.hidden_size), dtype.summand)
        signature.match("position", position, ("num_positions", self.hidden_size), dtype.summand)
        signature.match("token_type", token_type, ("num_types", self.hidden_size), dtype.summand)
        for name, tensor in (("gamma", gamma), ("beta", beta)):
            signature.match(name, tensor, (self.hidden_size,), dtype.accumulator)
        signature.match("num_rows", num_rows, (1,), DType.I32)
        if dtype is dtype.accumulator and out is not residual:
            raise ShapeError(f"{self.name}: `out` is {dtype.value} as `residual` is, expected the same tensor")

    def reference(
        self,
        out: Array,
        residual: Array,
        input_ids: Array,
        position_ids: Array,
        token_type_ids: Array,
        word: Array,
        position: Array,
        token_type: Array,
        gamma: Array,
        beta: Array,
        num_rows: Array,
    ) -> None:
        for rows in row_blocks(num_rows[0], self.hidden_size):
            residual[rows] = word[input_ids[rows]]
            residual[rows] += token_type[token_type_ids[rows]]
            residual[rows] += position[position_ids[rows]]
            layer_norm_(residual[rows], gamma, beta, self.eps)
            if out is not residual:
                out[rows] = residual[rows]

    def plan(self, dtype: DType, arch: int) -> KernelPlan:
        defines = (dtype_define(dtype), ("HIDDEN_SIZE", self.hidden_size), ("NUM_THREADS", _NUM_THREADS))
        spec = KernelSpec(self.name, defines)
        return KernelPlan((spec,), partial(self._launch, spec))

    def _launch(self, spec: KernelSpec, out: Array, *inputs: Array) -> Launch:
        grid = (ceil_div(out.shape[0], _NUM_THREADS // 32), 1, 1)
        return Launch(spec, grid, _NUM_THREADS, (out, *inputs, float(self.eps), scale_of(out)))
