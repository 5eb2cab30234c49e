"""out = LayerNorm(word[id] + token_type[0] + position[p]): the start of an encoder."""

from dataclasses import dataclass
from typing import ClassVar

from gkd.dtype import DType
from gkd.kernel import KernelPlan, KernelSpec, Launch, ceil_div, dtype_define
from gkd.ops.blocks import row_blocks
from gkd.ops.contract import Array, Signature, float_dtype
from gkd.ops.layer_norm import layer_norm_

_NUM_THREADS = 128


@dataclass(frozen=True, slots=True)
class EmbedLayerNorm:
    """out = LayerNorm(word[input_ids] + token_type[0] + position[position_ids]) * gamma + beta.

    Shapes:  out (num_tokens, hidden_size); input_ids, position_ids (num_tokens,);
             word (vocab_size, hidden_size), position (num_positions, hidden_size),
             token_type (num_types, hidden_size), of which row 0 is used; gamma, beta (hidden_size,).
    Dtypes:  int32 ids in range, which the caller has checked; one floating dtype for the tables and out; gamma and
             beta in its accumulator's, f32 for 16 bits.
    Source:  the order of the sum is transformers' BertEmbeddings.
    """

    hidden_size: int
    eps: float

    name: ClassVar[str] = "embed_layer_norm"

    def check(
        self,
        out: Array,
        input_ids: Array,
        position_ids: Array,
        word: Array,
        position: Array,
        token_type: Array,
        gamma: Array,
        beta: Array,
    ) -> None:
        dtype = float_dtype(self.name, "word", word)
        signature = Signature(self.name)
        signature.match("input_ids", input_ids, ("num_tokens",), DType.I32)
        signature.match("position_ids", position_ids, ("num_tokens",), DType.I32)
        signature.match("out", out, ("num_tokens", self.hidden_size), dtype)
        signature.match("word", word, ("vocab_size", self.hidden_size), dtype)
        signature.match("position", position, ("num_positions", self.hidden_size), dtype)
        signature.match("token_type", token_type, ("num_types", self.hidden_size), dtype)
        for name, tensor in (("gamma", gamma), ("beta", beta)):
            signature.match(name, tensor, (self.hidden_size,), dtype.accumulator)

    def reference(
        self,
        out: Array,
        input_ids: Array,
        position_ids: Array,
        word: Array,
        position: Array,
        token_type: Array,
        gamma: Array,
        beta: Array,
    ) -> None:
        for rows in row_blocks(len(input_ids), self.hidden_size):
            out[rows] = word[input_ids[rows]]
            out[rows] += token_type[0]
            out[rows] += position[position_ids[rows]]
            layer_norm_(out[rows], gamma, beta, self.eps)

    def plan(self, dtype: DType, arch: int) -> KernelPlan:
        defines = (dtype_define(dtype), ("HIDDEN_SIZE", self.hidden_size), ("NUM_THREADS", _NUM_THREADS))
        return KernelPlan(KernelSpec(self.name, defines), self._launch)

    def _launch(self, out: Array, input_ids: Array, position_ids: Array, *tables: Array) -> Launch:
        num_rows = input_ids.shape[0]
        arguments = (out, input_ids, position_ids, *tables, num_rows, float(self.eps))
        return Launch((ceil_div(num_rows, _NUM_THREADS // 32), 1, 1), _NUM_THREADS, arguments)
