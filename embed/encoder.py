"""The encoder, wired once over the operators: token ids in, one vector a text out."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from embed.batch import Batch
from embed.config import ModelConfig
from embed.pipeline import Pooling
from gkd.cpu import CpuBackend
from gkd.ops import AddLayerNorm, Attention, EmbedLayerNorm, L2Normalize, Linear, Pool
from gkd.ops.contract import Array


class Encoder:
    """A post-norm encoder with its weights and its workspace, for one forward at a time."""

    def __init__(self, backend: CpuBackend, config: ModelConfig, weights: Mapping[str, Array], max_tokens: int) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self._run = backend.run
        self._config = config
        self._weights = weights
        self._workspace = Workspace(backend, config, max_tokens)
        self._embed = EmbedLayerNorm(hidden, config.layer_norm_eps)
        self._qkv = Linear(hidden, 3 * hidden)
        self._attention = Attention(config.num_heads, config.head_dim)
        self._attention_out = Linear(hidden, hidden)
        self._up = Linear(hidden, inner, "gelu")
        self._down = Linear(inner, hidden)
        self._add_norm = AddLayerNorm(hidden, config.layer_norm_eps)
        self._normalize = L2Normalize(hidden)

    @property
    def workspace_bytes(self) -> int:
        """Size of the scratch memory planned at load."""
        return self._workspace.num_bytes

    def forward(self, out: NDArray[np.float32], batch: Batch, pooling: Pooling) -> None:
        """Writes the vectors (num_texts, hidden_size) of one batch of at most the workspace's tokens."""
        hidden = self._hidden_states(batch)
        self._run(Pool(self._config.hidden_size, pooling.mode), out, hidden, batch.cu_seqlens)
        if pooling.normalize:
            self._run(self._normalize, out, out)

    def _hidden_states(self, batch: Batch) -> Array:
        """The last layer's states (num_tokens, hidden_size), in the workspace."""
        run, weights = self._run, self._weights
        hidden, projected, context, qkv, inner = self._workspace.views(len(batch.input_ids))
        run(
            self._embed,
            hidden,
            batch.input_ids,
            batch.position_ids,
            weights["word"],
            weights["position"],
            weights["token_type"],
            weights["embeddings_gamma"],
            weights["embeddings_beta"],
        )
        for layer in range(self._config.num_layers):
            w = {slot.name: weights[f"layer.{layer}.{slot.name}"] for slot in self._config.family.layer}
            run(self._qkv, qkv, hidden, w["qkv_weight"], w["qkv_bias"])
            run(self._attention, context, qkv, batch.cu_seqlens)
            run(self._attention_out, projected, context, w["attention_out_weight"], w["attention_out_bias"])
            run(self._add_norm, hidden, projected, hidden, w["attention_gamma"], w["attention_beta"])
            run(self._up, inner, hidden, w["up_weight"], w["up_bias"])
            run(self._down, projected, inner, w["down_weight"], w["down_bias"])
            run(self._add_norm, hidden, projected, hidden, w["down_gamma"], w["down_beta"])
        return hidden


class Workspace:
    """Scratch memory of a forward, planned at load for the largest one; smaller ones use the head of each buffer."""

    def __init__(self, backend: CpuBackend, config: ModelConfig, max_tokens: int) -> None:
        hidden = config.hidden_size
        # qkv and the inner states of the feed-forward half never live at the same time: they share the last buffer.
        widths = (hidden, hidden, hidden, max(3 * hidden, config.intermediate_size))
        self._buffers = [backend.empty((max_tokens * width,), np.float32) for width in widths]
        self._widths = (hidden, hidden, hidden, 3 * hidden, config.intermediate_size)

    @property
    def num_bytes(self) -> int:
        """Size of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def views(self, num_tokens: int) -> list[Array]:
        """hidden, projected, context, qkv and inner states of a forward, each (num_tokens, width) and contiguous."""
        buffers = [*self._buffers, self._buffers[-1]]
        return [
            buffer[: num_tokens * width].reshape(num_tokens, width)
            for buffer, width in zip(buffers, self._widths, strict=True)
        ]
