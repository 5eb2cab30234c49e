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
from embed.pipeline import DenseModule, Pooling, Step
from embed.precision import Scales
from gkd.backend import Backend
from gkd.dtype import DType
from gkd.ops import (
    AddLayerNorm,
    Attention,
    Dense,
    EmbedLayerNorm,
    GatherRows,
    L2Normalize,
    Linear,
    Operator,
    Pool,
)
from gkd.ops.attention import attention_items, attention_work
from gkd.ops.pool import PoolMode

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
        self.attention = Attention(config.num_heads, config.head_dim, max_distance=config.max_distance)
        self.attention_out = Linear(hidden, hidden, to_sum=True)
        self.up = Linear(hidden, inner, config.family.activation)
        self.down = Linear(inner, hidden, to_sum=True)
        self.add_norm = AddLayerNorm(hidden, config.layer_norm_eps)
        self.gather = GatherRows(hidden, dtype)
        self.gather_residual = GatherRows(hidden, dtype.accumulator)

    def all(self) -> list[Operator]:
        """Every operator that a forward may run."""
        layer: list[Operator] = [self.qkv, self.attention, self.attention_out, self.up, self.down, self.add_norm]
        return [self.embed, *layer, self.gather, self.gather_residual]


def head_widths(pooled_width: int, steps: tuple[Step, ...]) -> list[int]:
    """Of a vector as it is pooled, and after each step."""
    widths = [pooled_width]
    for step in steps:
        widths.append(step.out_features if isinstance(step, DenseModule) else widths[-1])
    return widths


class Head:
    """The operators from the last layer's states to a text's vector."""

    def __init__(self, hidden_size: int, modes: tuple[PoolMode, ...], steps: tuple[Step, ...]) -> None:
        self.pools = [Pool(hidden_size, mode, len(modes), index) for index, mode in enumerate(modes)]
        self.widths = head_widths(len(modes) * hidden_size, steps)
        """Of a vector as it is pooled, and after each step."""
        self.steps = [
            Dense(step.in_features, step.out_features, step.activation)
            if isinstance(step, DenseModule)
            else L2Normalize(width)
            for step, width in zip(steps, self.widths[1:], strict=True)
        ]
        self.normalize = L2Normalize(self.widths[-1])

    def all(self) -> list[Operator]:
        """Every operator that may run."""
        return [*self.pools, *self.steps, self.normalize]


def token_operators(out_features: int, in_features: int) -> tuple[Dense, L2Normalize]:
    """Of a head of tokens, such as BGE-M3's: its layer, and what normalises vectors of more than a number."""
    return Dense(in_features, out_features), L2Normalize(out_features)


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
        shapes = ((1,), (1,), (texts + 1,), *[tokens] * 3, (self.num_items, 3), (texts, 3), (texts,))
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
        parts.token_type_ids[:num_tokens] = batch.token_type_ids
        work = attention_work(cu_seqlens, self.block_q)
        parts.work[: work.size] = work.reshape(-1)
        parts.first_work[0 : 3 * num_texts : 3] = cu_seqlens[:-1]
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        parts.first_work[1 : 3 * num_texts : 3] = lengths
        if batch.num_prompt_tokens:
            parts.first_pooled[:num_texts] = np.minimum(batch.num_prompt_tokens, lengths - 1)
        return packed


@dataclass(frozen=True, slots=True)
class Inputs:
    """Of a forward, int32, in the order in which they are packed: tensors, or flat parts of an array."""

    num_tokens: Any
    num_texts: Any
    cu_seqlens: Any
    input_ids: Any
    position_ids: Any
    token_type_ids: Any
    work: Any
    """Of attention: every query of every text."""
    first_work: Any
    """Of attention: the first queries of every text."""
    first_pooled: Any
    """Place in each text of the first token that takes part in the pooling."""


@lru_cache(maxsize=64)
def _layout(capacity: Capacity) -> tuple[slice, ...]:
    """Where the inputs lie."""
    tokens, texts = capacity.num_tokens, capacity.num_texts
    sizes = (1, 1, texts + 1, *[tokens] * 3, 3 * capacity.num_items, 3 * texts, texts)
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
        num_modes: int = 1,
        steps: tuple[Step, ...] = (),
        heads: frozenset[str] = frozenset(),
        scales: Scales | None = None,
    ) -> None:
        """Pooling may have up to `num_modes` modes, and `steps` come behind it.

        `heads`, sparse and colbert, are those of tokens that there are weights for; `scales` are of split operands.
        """
        self._backend = backend
        self._weights = weights
        self._layers = [
            {slot.name: weights[f"layer.{layer}.{slot.name}"] for slot in config.family.layer}
            for layer in range(config.num_layers)
        ]
        self.weights_bytes = sum(int(weight.nbytes) for weight in weights.values())
        """Size of the weights."""
        self._relative_bias = (weights["relative_bias"],) if config.max_distance is not None else ()
        self._ops = Operators(config, backend.dtype)
        self._steps = steps
        self._heads: dict[tuple[PoolMode, ...], Head] = {}
        self._block_sizes = self._ops.attention.block_sizes(backend.dtype, backend.arch)
        block_q = self._block_sizes[0]
        widths = head_widths(num_modes * config.hidden_size, steps)
        token_width = max((weights[f"{name}.weight"].shape[0] for name in heads), default=0)
        largest = Capacity(max_tokens, max_texts, max_texts + max_tokens // block_q, block_q)
        self._workspace = Workspace(backend, config, largest, widths, token_width, scales)
        self._capacities = [
            Capacity(tokens, texts, texts + tokens // block_q, block_q)
            for tokens in _RECORDED_TOKENS
            if tokens <= max_tokens and (texts := tokens // _RECORDED_TEXT_TOKENS) <= max_texts
        ]
        self._recorded: dict[tuple[Capacity, tuple[PoolMode, ...], bool], Any] = {}

    @property
    def colbert_dim(self) -> int:
        """Width of a token's vector; there has to be a head for it."""
        return int(self._weights["colbert.weight"].shape[0])

    @property
    def workspace_bytes(self) -> int:
        """Size of the scratch memory planned at load."""
        return self._workspace.num_bytes

    def record(self, modes: tuple[PoolMode, ...]) -> None:
        """Records the forwards of few tokens for pooling modes, so that no request has to."""
        for capacity in self._capacities:
            self._record(capacity, modes, modes == ("cls",))

    def forward(self, out: NDArray[np.float32], batch: Batch, pooling: Pooling) -> None:
        """Writes the vectors (num_texts, width) of one batch of at most the workspace's tokens and texts."""
        backend, workspace = self._backend, self._workspace
        num_tokens, num_texts = len(batch.input_ids), len(batch.cu_seqlens) - 1
        fitting = (c for c in self._capacities if num_tokens <= c.num_tokens and num_texts <= c.num_texts)
        capacity = next(fitting, None)
        # The first token is all that is read, unless it is a prompt's that is left out.
        only_first = pooling.modes == ("cls",) and batch.num_prompt_tokens == 0
        recorded = self._record(capacity, pooling.modes, only_first) if capacity is not None else None
        if capacity is not None and recorded is not None:
            backend.upload(workspace.inputs, capacity.pack(batch))
            backend.replay(recorded)
        else:
            self._queue_batch(batch, pooling, only_first)
        self._download_vectors(out, pooling)

    def forward_tokens(
        self,
        batch: Batch,
        pooling: Pooling,
        dense: NDArray[np.float32],
        sparse: NDArray[np.float32] | None,
        colbert: NDArray[np.float32] | None,
    ) -> None:
        """Writes from one forward the vectors (num_texts, width), and of each token what there is an array for:

        sparse (num_tokens,), before the negative ones are cut off, and colbert (num_tokens, colbert_dim), normalized.
        """
        backend, run, workspace = self._backend, self._backend.run, self._workspace
        num_tokens = len(batch.input_ids)
        inputs = self._queue_batch(batch, pooling, only_first=False)
        residual = workspace.states(num_tokens).residual
        for name, out in (("sparse", sparse), ("colbert", colbert)):
            if out is None:
                continue
            weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
            layer, normalize = token_operators(*weight.shape)
            of_tokens = backend.view(workspace.of_tokens, (num_tokens, weight.shape[0]))
            run(layer, of_tokens, residual, weight, bias, inputs.num_tokens)
            if name == "colbert":
                run(normalize, of_tokens, of_tokens)
            backend.download(out.reshape(num_tokens, -1), of_tokens)
        self._download_vectors(dense, pooling)

    def _queue_batch(self, batch: Batch, pooling: Pooling, only_first: bool) -> Inputs:
        """A forward of just this batch's size."""
        block_q = next((size for size in self._block_sizes if size >= batch.max_seqlen), self._block_sizes[-1])
        num_items = int(attention_items(batch.cu_seqlens, block_q).sum())
        capacity = Capacity(len(batch.input_ids), len(batch.cu_seqlens) - 1, num_items, block_q)
        packed = self._backend.upload(self._workspace.inputs, capacity.pack(batch))
        self._queue(capacity, pooling.modes, only_first, packed)
        return capacity.inputs(self._backend, packed)

    def _download_vectors(self, out: NDArray[np.float32], pooling: Pooling) -> None:
        vectors = self._workspace.normalized if pooling.normalize else self._workspace.vectors[-1]
        self._backend.download(out, self._backend.view(vectors, out.shape))

    def _record(self, capacity: Capacity, modes: tuple[PoolMode, ...], only_first: bool) -> Any:
        key = (capacity, modes, only_first)
        if key not in self._recorded:
            self._recorded[key] = self._backend.record(lambda: self._queue(*key, self._workspace.inputs))
        return self._recorded[key]

    def _queue(self, capacity: Capacity, modes: tuple[PoolMode, ...], only_first: bool, packed: Any) -> None:
        """A forward of at most this many tokens and texts: vectors and normalized vectors, in the workspace."""
        ops, run, workspace = self._ops, self._backend.run, self._workspace
        inputs = capacity.inputs(self._backend, packed)
        states = workspace.states(capacity.num_tokens)
        tables = (self._weights[name] for name in ("word", "position", "token_type"))
        norm = (self._weights["embeddings_gamma"], self._weights["embeddings_beta"])
        num_tokens = inputs.num_tokens
        run(
            ops.embed,
            states.hidden,
            states.residual,
            inputs.input_ids,
            inputs.position_ids,
            inputs.token_type_ids,
            *tables,
            *norm,
            num_tokens,
        )

        *layers, last = self._layers
        for w in layers:
            self._attend(states, w, inputs.work, capacity.block_q, num_tokens)
            self._feed_forward(states, w, num_tokens)
        if only_first:
            # Of the last layer only the first token's states are read: nothing else is computed.
            self._attend(states, last, inputs.first_work, self._block_sizes[0], num_tokens)
            firsts = workspace.first_states(capacity.num_texts)
            run(ops.gather_residual, firsts.residual, states.residual, inputs.cu_seqlens, inputs.num_texts)
            run(ops.gather, firsts.context, states.context, inputs.cu_seqlens, inputs.num_texts)
            self._feed_forward(firsts, last, inputs.num_texts)
        else:
            self._attend(states, last, inputs.work, capacity.block_q, num_tokens)
            self._feed_forward(states, last, num_tokens)
        self._finish(capacity.num_texts, modes, only_first, states, inputs)

    def _finish(
        self, num_texts: int, modes: tuple[PoolMode, ...], only_first: bool, states: "States", inputs: Inputs
    ) -> None:
        """From the last layer's states, or from first tokens that lie where vectors are pooled to, to vectors."""
        if modes not in self._heads:
            self._heads[modes] = Head(self._ops.embed.hidden_size, modes, self._steps)
        head, run, view, workspace = self._heads[modes], self._backend.run, self._backend.view, self._workspace
        buffers = zip(workspace.vectors, head.widths, strict=True)
        vectors = [view(buffer, (num_texts, width)) for buffer, width in buffers]
        if not only_first:
            for op in head.pools:
                run(op, vectors[0], states.residual, inputs.cu_seqlens, inputs.first_pooled)
        num_dense = 0
        for step, x, out in zip(head.steps, vectors[:-1], vectors[1:], strict=True):
            if isinstance(step, Dense):
                weight, bias = (self._weights[f"dense.{num_dense}.{name}"] for name in ("weight", "bias"))
                run(step, out, x, weight, bias, inputs.num_texts)
                num_dense += 1
            else:
                run(step, out, x)
        run(head.normalize, view(workspace.normalized, (num_texts, head.widths[-1])), vectors[-1])

    def _attend(self, states: "States", w: Mapping[str, Any], work: Any, block_q: int, num_rows: Any) -> None:
        ops, run = self._ops, self._backend.run
        run(ops.qkv, states.qkv, states.hidden, w["qkv_weight"], w["qkv_bias"], num_rows)
        run(ops.attention, states.context, states.qkv, work, block_q, *self._relative_bias)

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

    def __init__(
        self,
        backend: Backend,
        config: ModelConfig,
        capacity: Capacity,
        widths: list[int],
        token_width: int,
        scales: Scales | None,
    ) -> None:
        """`widths` are those of a vector as it is pooled, and after each step; `token_width` of what a head gives."""
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
        self.vectors = [buffer(capacity.num_texts * width, DType.F32) for width in widths]
        self.normalized = buffer(capacity.num_texts * widths[-1], DType.F32)
        self.of_tokens = buffer(capacity.num_tokens * token_width, DType.F32) if token_width else None

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
        pooled = self._view(self.vectors[0], shape)
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
