"""The encoder, wired once over the operators: token ids in, one vector a text out."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embed.batch import Batch
from embed.config import ModelConfig
from embed.models import PoolMode
from embed.pipeline import Pooling
from embed.precision import Scales
from gkd.backend import Backend
from gkd.dtype import DType
from gkd.ops import AddLayerNorm, Attention, EmbedLayerNorm, GatherRows, L2Normalize, Linear, MeanPool, Operator
from gkd.ops.attention import attention_items, attention_work

# Forwards of few tokens take less time than their launches: for each of these capacities one is recorded, and replayed
# for what fits into it. Kernels read the true sizes on the device and compute no row that is not there.
_RECORDED_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048)
# Tokens a text, on average, for which a recorded forward has room for texts; shorter ones take a larger capacity.
_RECORDED_TEXT_TOKENS = 16


class Operators:
    """The operators of a post-norm encoder, specialised for its geometry and for the dtype of its matrices."""

    def __init__(self, config: ModelConfig, dtype: DType) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.embed = EmbedLayerNorm(hidden, config.layer_norm_eps)
        self.qkv = Linear(hidden, 3 * hidden)
        self.attention = Attention(config.num_heads, config.head_dim)
        self.attention_out = Linear(hidden, hidden, to_sum=True)
        self.up = Linear(hidden, inner, "gelu")
        self.down = Linear(inner, hidden, to_sum=True)
        self.add_norm = AddLayerNorm(hidden, config.layer_norm_eps)
        self.gather = GatherRows(hidden, dtype)
        self.gather_residual = GatherRows(hidden, dtype.accumulator)
        self.mean_pool = MeanPool(hidden)
        self.normalize = L2Normalize(hidden)

    def all(self) -> list[Operator]:
        """Every operator that a forward may run."""
        layer: list[Operator] = [self.qkv, self.attention, self.attention_out, self.up, self.down, self.add_norm]
        return [self.embed, *layer, self.gather, self.gather_residual, self.mean_pool, self.normalize]


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the inputs of a forward have room for."""

    num_tokens: int
    num_texts: int
    num_items: int
    """Items of attention's work."""
    block_q: int
    """Queries of an item."""

    @property
    def num_elements(self) -> int:
        """Of all inputs together."""
        return int(_layout(self)[-1].stop)

    def inputs(self, backend: Backend, packed: Any) -> "Inputs":
        """What `pack` has packed, as tensors of a backend."""
        tokens, texts = (self.num_tokens,), self.num_texts
        shapes = ((1,), (1,), (texts + 1,), tokens, tokens, (self.num_items, 3), (texts, 3))
        views = (backend.view(packed, shape, part.start) for shape, part in zip(shapes, _layout(self), strict=True))
        return Inputs(*views)

    def pack(self, batch: Batch) -> NDArray[np.int32]:
        """The inputs of a batch in one array: one copy to the device. Lists end in empty texts and empty items."""
        packed = np.zeros(self.num_elements, np.int32)
        parts = Inputs(*(packed[part] for part in _layout(self)))
        cu_seqlens, num_tokens, num_texts = batch.cu_seqlens, len(batch.input_ids), len(batch.cu_seqlens) - 1
        parts.num_tokens[0] = num_tokens
        parts.num_texts[0] = num_texts
        parts.cu_seqlens[: num_texts + 1] = cu_seqlens
        parts.cu_seqlens[num_texts + 1 :] = num_tokens
        parts.input_ids[:num_tokens] = batch.input_ids
        parts.position_ids[:num_tokens] = batch.position_ids
        work = attention_work(cu_seqlens, self.block_q)
        parts.work[: work.size] = work.reshape(-1)
        parts.first_work[0 : 3 * num_texts : 3] = cu_seqlens[:-1]
        parts.first_work[1 : 3 * num_texts : 3] = cu_seqlens[1:] - cu_seqlens[:-1]
        return packed


@dataclass(frozen=True, slots=True)
class Inputs:
    """Of a forward, int32, in the order in which they are packed: tensors, or flat parts of an array."""

    num_tokens: Any
    num_texts: Any
    cu_seqlens: Any
    input_ids: Any
    position_ids: Any
    work: Any
    """Of attention: every query of every text."""
    first_work: Any
    """Of attention: the first queries of every text."""


@lru_cache(maxsize=64)
def _layout(capacity: Capacity) -> tuple[slice, ...]:
    """Where the inputs lie."""
    tokens, texts = capacity.num_tokens, capacity.num_texts
    sizes = (1, 1, texts + 1, tokens, tokens, 3 * capacity.num_items, 3 * texts)
    ends = list(accumulate(sizes))
    return tuple(slice(end - size, end) for size, end in zip(sizes, ends, strict=True))


class Encoder:
    """A post-norm encoder with its weights and its workspace, for one forward at a time."""

    def __init__(
        self,
        backend: Backend,
        config: ModelConfig,
        weights: Mapping[str, Any],
        max_tokens: int,
        max_texts: int,
        scales: Scales | None = None,
    ) -> None:
        """`scales` are those of split operands."""
        self._backend = backend
        self._weights = weights
        self._layers = [
            {slot.name: weights[f"layer.{layer}.{slot.name}"] for slot in config.family.layer}
            for layer in range(config.num_layers)
        ]
        self.weights_bytes = sum(int(weight.nbytes) for weight in weights.values())
        """Size of the weights."""
        self._ops = Operators(config, backend.dtype)
        self._block_sizes = self._ops.attention.block_sizes(backend.dtype, backend.arch)
        block_q = self._block_sizes[0]
        self._workspace = Workspace(
            backend, config, Capacity(max_tokens, max_texts, max_texts + max_tokens // block_q, block_q), scales
        )
        self._capacities = [
            Capacity(tokens, texts, texts + tokens // block_q, block_q)
            for tokens in _RECORDED_TOKENS
            if tokens <= max_tokens and (texts := tokens // _RECORDED_TEXT_TOKENS) <= max_texts
        ]
        self._recorded: dict[tuple[Capacity, PoolMode], Any] = {}

    @property
    def workspace_bytes(self) -> int:
        """Size of the scratch memory planned at load."""
        return self._workspace.num_bytes

    def record(self, mode: PoolMode) -> None:
        """Records the forwards of few tokens for a pooling mode, so that no request has to."""
        for capacity in self._capacities:
            self._record(capacity, mode)

    def forward(self, out: NDArray[np.float32], batch: Batch, pooling: Pooling) -> None:
        """Writes the vectors (num_texts, hidden_size) of one batch of at most the workspace's tokens and texts."""
        backend, workspace = self._backend, self._workspace
        num_tokens, num_texts = len(batch.input_ids), len(batch.cu_seqlens) - 1
        fitting = (c for c in self._capacities if num_tokens <= c.num_tokens and num_texts <= c.num_texts)
        capacity = next(fitting, None)
        recorded = self._record(capacity, pooling.mode) if capacity is not None else None
        if capacity is not None and recorded is not None:
            backend.upload(workspace.inputs, capacity.pack(batch))
            backend.replay(recorded)
        else:
            block_q = next((size for size in self._block_sizes if size >= batch.max_seqlen), self._block_sizes[-1])
            num_items = int(attention_items(batch.cu_seqlens, block_q).sum())
            capacity = Capacity(num_tokens, num_texts, num_items, block_q)
            self._queue(capacity, pooling.mode, backend.upload(workspace.inputs, capacity.pack(batch)))
        vectors = workspace.normalized if pooling.normalize else workspace.pooled
        backend.download(out, backend.view(vectors, out.shape))

    def _record(self, capacity: Capacity, mode: PoolMode) -> Any:
        if (capacity, mode) not in self._recorded:

            def queue() -> None:
                self._queue(capacity, mode, self._workspace.inputs)

            self._recorded[capacity, mode] = self._backend.record(queue)
        return self._recorded[capacity, mode]

    def _queue(self, capacity: Capacity, mode: PoolMode, packed: Any) -> None:
        """A forward of at most this many tokens and texts: vectors and normalized vectors, in the workspace."""
        ops, run, view, workspace = self._ops, self._backend.run, self._backend.view, self._workspace
        inputs = capacity.inputs(self._backend, packed)
        states = workspace.states(capacity.num_tokens)
        shape = (capacity.num_texts, ops.normalize.hidden_size)
        pooled, normalized = view(workspace.pooled, shape), view(workspace.normalized, shape)
        tables = (self._weights[name] for name in ("word", "position", "token_type"))
        norm = (self._weights["embeddings_gamma"], self._weights["embeddings_beta"])
        num_tokens = inputs.num_tokens
        run(
            ops.embed,
            states.hidden,
            states.residual,
            inputs.input_ids,
            inputs.position_ids,
            *tables,
            *norm,
            num_tokens,
        )

        *layers, last = self._layers
        for w in layers:
            self._attend(states, w, inputs.work, capacity.block_q, num_tokens)
            self._feed_forward(states, w, num_tokens)
        if mode == "cls":
            # Of the last layer only the first token's states are read: nothing else is computed.
            self._attend(states, last, inputs.first_work, self._block_sizes[0], num_tokens)
            firsts = workspace.first_states(capacity.num_texts)
            run(ops.gather_residual, firsts.residual, states.residual, inputs.cu_seqlens, inputs.num_texts)
            run(ops.gather, firsts.context, states.context, inputs.cu_seqlens, inputs.num_texts)
            self._feed_forward(firsts, last, inputs.num_texts)
        else:
            self._attend(states, last, inputs.work, capacity.block_q, num_tokens)
            self._feed_forward(states, last, num_tokens)
            run(ops.mean_pool, pooled, states.residual, inputs.cu_seqlens)
        run(ops.normalize, normalized, pooled)

    def _attend(self, states: "States", w: Mapping[str, Any], work: Any, block_q: int, num_rows: Any) -> None:
        ops, run = self._ops, self._backend.run
        run(ops.qkv, states.qkv, states.hidden, w["qkv_weight"], w["qkv_bias"], num_rows)
        run(ops.attention, states.context, states.qkv, work, block_q)

    def _feed_forward(self, states: "States", w: Mapping[str, Any], num_rows: Any) -> None:
        """From attention's context to the end of the layer."""
        ops, run, hidden, residual, projected = (
            self._ops,
            self._backend.run,
            states.hidden,
            states.residual,
            states.projected,
        )
        run(ops.attention_out, projected, states.context, w["attention_out_weight"], w["attention_out_bias"], num_rows)
        run(ops.add_norm, hidden, residual, projected, w["attention_gamma"], w["attention_beta"], num_rows)
        run(ops.up, states.inner, hidden, w["up_weight"], w["up_bias"], num_rows)
        run(ops.down, projected, states.inner, w["down_weight"], w["down_bias"], num_rows)
        run(ops.add_norm, hidden, residual, projected, w["down_gamma"], w["down_beta"], num_rows)


@dataclass(frozen=True, slots=True)
class States:
    """The tensors of a layer, (num_rows, width) each."""

    hidden: Any
    """What products take."""
    residual: Any
    """The same in the accumulator's type: what layers add to. Where the types are one, the two are one tensor."""
    context: Any
    projected: Any
    qkv: Any
    inner: Any


class Workspace:
    """Scratch memory of a forward, planned at load for the largest one; smaller ones use the head of each buffer."""

    def __init__(self, backend: Backend, config: ModelConfig, capacity: Capacity, scales: Scales | None) -> None:
        self._scales = scales
        self._view, self._width, self._inner_width = backend.view, config.hidden_size, config.intermediate_size
        self.num_bytes = 0
        """Size of all buffers."""

        def buffer(num_elements: int, dtype: DType) -> Any:
            self.num_bytes += num_elements * dtype.itemsize
            return backend.empty((num_elements,), dtype)

        dtype, num_elements = backend.dtype, capacity.num_tokens * self._width
        self._hidden, self._context = (buffer(num_elements, dtype) for _ in range(2))
        self._projected = buffer(num_elements, dtype.summand)
        same = dtype is dtype.accumulator
        self._residual = self._hidden if same else buffer(num_elements, dtype.accumulator)
        # qkv and the feed-forward half's inner states never live at the same time.
        self._wide = buffer(capacity.num_tokens * max(3 * self._width, self._inner_width), dtype)
        self.inputs = buffer(capacity.num_elements, DType.I32)
        self.pooled, self.normalized = (buffer(capacity.num_texts * self._width, DType.F32) for _ in range(2))

    def states(self, num_tokens: int) -> States:
        """Those of a forward of this many tokens."""
        shape = (num_tokens, self._width)
        hidden, context, inner = self._operands(self._hidden, self._context, num_tokens)
        qkv = self._view(self._wide, (num_tokens, 3 * self._width))
        return States(
            hidden=hidden,
            residual=hidden if self._residual is self._hidden else self._view(self._residual, shape),
            context=context,
            projected=self._view(self._projected, shape),
            qkv=qkv if self._scales is None else qkv.scaled(self._scales.qkv),
            inner=inner,
        )

    def first_states(self, num_texts: int) -> States:
        """Those of the first tokens alone, from the last layer's context on. Their residual is what is pooled.

        They lie where nothing is read any more: the context where all tokens' hidden states were, and the hidden states
        where all tokens' context was; so the residual is gathered first, and then the context.
        """
        shape = (num_texts, self._width)
        pooled = self._view(self.pooled, shape)
        hidden, context, inner = self._operands(self._context, self._hidden, num_texts)
        return States(
            hidden=pooled if self._residual is self._hidden else hidden,
            residual=pooled,
            context=context,
            projected=self._view(self._projected, shape),
            qkv=None,
            inner=inner,
        )

    def _operands(self, hidden: Any, context: Any, num_rows: int) -> tuple[Any, Any, Any]:
        """Hidden, context and inner states of so many rows, in these two buffers and the wide one."""
        hidden, context = (self._view(buffer, (num_rows, self._width)) for buffer in (hidden, context))
        inner = self._view(self._wide, (num_rows, self._inner_width))
        if self._scales is None:
            return hidden, context, inner
        return (
            hidden.scaled(self._scales.hidden),
            context.scaled(self._scales.qkv),
            inner.scaled(self._scales.inner),
        )
