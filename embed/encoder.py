"""The encoder, wired once over the operators: token ids in, one vector a text out."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embed.batch import Batch
from embed.config import ModelConfig
from embed.pipeline import Pooling
from gkd.backend import Backend
from gkd.dtype import DType
from gkd.ops import AddLayerNorm, Attention, EmbedLayerNorm, L2Normalize, Linear, Operator, Pool
from gkd.ops.pool import POOL_MODES, PoolMode


class Operators:
    """The operators of a post-norm encoder, specialised for its geometry."""

    def __init__(self, config: ModelConfig) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.embed = EmbedLayerNorm(hidden, config.layer_norm_eps)
        self.qkv = Linear(hidden, 3 * hidden)
        self.attention = Attention(config.num_heads, config.head_dim)
        self.attention_out = Linear(hidden, hidden)
        self.up = Linear(hidden, inner, "gelu")
        self.down = Linear(inner, hidden)
        self.add_norm = AddLayerNorm(hidden, config.layer_norm_eps)
        self.pool: dict[PoolMode, Pool] = {mode: Pool(hidden, mode) for mode in POOL_MODES}
        self.normalize = L2Normalize(hidden)

    def all(self) -> list[Operator]:
        """Every operator that a forward may run."""
        layer: list[Operator] = [self.qkv, self.attention, self.attention_out, self.up, self.down, self.add_norm]
        return [self.embed, *layer, *self.pool.values(), self.normalize]


class Encoder:
    """A post-norm encoder with its weights and its workspace, for one forward at a time."""

    def __init__(
        self, backend: Backend, config: ModelConfig, weights: Mapping[str, Any], max_tokens: int, max_texts: int
    ) -> None:
        self._backend = backend
        self._config = config
        self._weights = weights
        self._layers = [
            {slot.name: weights[f"layer.{layer}.{slot.name}"] for slot in config.family.layer}
            for layer in range(config.num_layers)
        ]
        self.weights_bytes = sum(int(weight.nbytes) for weight in weights.values())
        """Size of the weights."""
        self._ops = Operators(config)
        self._workspace = Workspace(backend, config, max_tokens, max_texts)

    @property
    def workspace_bytes(self) -> int:
        """Size of the scratch memory planned at load."""
        return self._workspace.num_bytes

    def forward(self, out: NDArray[np.float32], batch: Batch, pooling: Pooling) -> None:
        """Writes the vectors (num_texts, hidden_size) of one batch of at most the workspace's tokens and texts."""
        backend, workspace = self._backend, self._workspace
        cu_seqlens = backend.upload(workspace.cu_seqlens, batch.cu_seqlens)
        hidden = self._hidden_states(batch, cu_seqlens)
        pooled = backend.head(workspace.pooled, out.shape)
        backend.run(self._ops.pool[pooling.mode], pooled, hidden, cu_seqlens)
        if pooling.normalize:
            backend.run(self._ops.normalize, pooled, pooled)
        backend.download(out, pooled)

    def _hidden_states(self, batch: Batch, cu_seqlens: Any) -> Any:
        """The last layer's states (num_tokens, hidden_size), in the workspace."""
        ops, run, weights, workspace = self._ops, self._backend.run, self._weights, self._workspace
        input_ids = self._backend.upload(workspace.input_ids, batch.input_ids)
        position_ids = self._backend.upload(workspace.position_ids, batch.position_ids)
        hidden, projected, context, qkv, inner = workspace.states(len(batch.input_ids))
        tables = (weights[name] for name in ("word", "position", "token_type", "embeddings_gamma", "embeddings_beta"))
        run(ops.embed, hidden, input_ids, position_ids, *tables)
        max_seqlen = batch.max_seqlen
        for w in self._layers:
            run(ops.qkv, qkv, hidden, w["qkv_weight"], w["qkv_bias"])
            run(ops.attention, context, qkv, cu_seqlens, max_seqlen)
            run(ops.attention_out, projected, context, w["attention_out_weight"], w["attention_out_bias"])
            run(ops.add_norm, hidden, projected, hidden, w["attention_gamma"], w["attention_beta"])
            run(ops.up, inner, hidden, w["up_weight"], w["up_bias"])
            run(ops.down, projected, inner, w["down_weight"], w["down_bias"])
            run(ops.add_norm, hidden, projected, hidden, w["down_gamma"], w["down_beta"])
        return hidden


class Workspace:
    """Scratch memory of a forward, planned at load for the largest one; smaller ones use the head of each buffer."""

    def __init__(self, backend: Backend, config: ModelConfig, max_tokens: int, max_texts: int) -> None:
        hidden = config.hidden_size
        self._backend = backend
        # qkv and the feed-forward half's inner states never live at the same time: they share the last buffer.
        sizes = [max_tokens * width for width in (hidden, hidden, hidden, max(3 * hidden, config.intermediate_size))]
        self._states = [backend.empty((size,), backend.dtype) for size in sizes]
        self._widths = (hidden, hidden, hidden, 3 * hidden, config.intermediate_size)
        self.input_ids = backend.empty((max_tokens,), DType.I32)
        self.position_ids = backend.empty((max_tokens,), DType.I32)
        self.cu_seqlens = backend.empty((max_texts + 1,), DType.I32)
        self.pooled = backend.empty((max_texts * hidden,), DType.F32)
        integers = 2 * max_tokens + max_texts + 1
        self.num_bytes = sum(sizes) * backend.dtype.itemsize + 4 * (integers + max_texts * hidden)
        """Size of all buffers."""

    def states(self, num_tokens: int) -> list[Any]:
        """hidden, projected, context, qkv and inner states of a forward, each (num_tokens, width) and contiguous."""
        buffers = [*self._states, self._states[-1]]
        return [
            self._backend.head(buffer, (num_tokens, width)) for buffer, width in zip(buffers, self._widths, strict=True)
        ]
