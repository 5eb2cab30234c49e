"""A model whose sums leave the range of f16 for texts with one certain word, and for no others; f32 holds them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from embed import Embed
from embed.model import _Engine
from embed.pipeline import read_pipeline
from embed.tokenizer import Tokenizer
from gkd.cpu import CpuBackend
from gkd.dtype import DType
from gkd.ops import Operator
from tools.make_model import ModelSpec, make_model

WORD = "e"
"""A token of its own, where it stands alone."""
FITTING = ["one text", "and another, a little longer one", "0"]
MIXED = [FITTING[0], f"one {WORD} more", *FITTING[1:], WORD]
"""Of these the second and the last hold the word."""

SPEC = ModelSpec("bert", num_layers=2, hidden_size=128, num_heads=4, intermediate_size=256)
# All below 64, so that on tensor cores f32 is computed with split operands: 16 * 60 * (60 * 9 - 120) is 403,200.
_WEIGHT, _THRESHOLD, _NUM_ROWS = 60.0, 120.0, 16


def make_overflowing_model(directory: Path, *, cross_encoder: bool = False) -> None:
    """Writes it to `directory`, which must not exist: a model that gives vectors, or scores.

    Coordinate 0 of a state tells the word from all others: after LayerNorm it is about 9 for the word and below 1 for
    the others. What is above 2 in it, the first layer's feed-forward half raises to more than 65,504.
    """
    make_model(directory, replace(SPEC, cross_encoder=cross_encoder))
    prefix = "bert." if cross_encoder else ""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name in ("word", "position", "token_type"):
        tensors[f"{prefix}embeddings.{name}_embeddings.weight"][:, 0] = 0
    [_, token, _], _ = Tokenizer(directory).encode_batch([WORD], 3)
    word = tensors[f"{prefix}embeddings.word_embeddings.weight"][token]
    word[:], word[0] = 0, 10
    layer = f"{prefix}encoder.layer.0"
    for norm in (f"{prefix}embeddings.LayerNorm", f"{layer}.attention.output.LayerNorm"):
        tensors[f"{norm}.weight"][0], tensors[f"{norm}.bias"][0] = 1, 0
    for name in ("weight", "bias"):
        tensors[f"{layer}.attention.output.dense.{name}"][0] = 0
    up, up_bias = (tensors[f"{layer}.intermediate.dense.{name}"][:_NUM_ROWS] for name in ("weight", "bias"))
    up[:], up[:, 0], up_bias[:] = 0, _WEIGHT, -_THRESHOLD
    tensors[f"{layer}.output.dense.weight"][0, :_NUM_ROWS] = _WEIGHT
    save_file(tensors, file)


class HalfBackend(CpuBackend):
    """Keeps operands and what is added to a sum in f16, as a device does, and computes in f32."""

    dtype = DType.F16

    def run(self, op: Operator, *tensors: Any) -> None:
        op.check(*tensors)
        wide = [x.astype(np.float32) if getattr(x, "dtype", None) == np.float16 else x for x in tensors]
        with np.errstate(all="ignore"):
            op.reference(*wide)
            for tensor, computed in zip(tensors, wide, strict=True):
                if computed is not tensor:
                    tensor[...] = computed


class HalfEngine:
    """An engine in f16 without a device, and the backends that it has made."""

    def __init__(self, directory: Path) -> None:
        self.made: list[DType] = []
        pipeline = read_pipeline(directory)
        tokenizer = Tokenizer(directory, pairs=pipeline.score_activation is not None)
        self.inner = _Engine(directory.name, self._backend(DType.F16), self._backend, pipeline, tokenizer)
        self.inner.reload()
        self.engine = Embed(self.inner)

    def _backend(self, dtype: DType) -> CpuBackend:
        self.made.append(dtype)
        return HalfBackend() if dtype is DType.F16 else CpuBackend()
