"""The scales of split operands: what a model can compute stays in f16's range, whatever it is asked."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embed import Embed
from embed.precision import Scales, _scale, split_scales, takes_split
from gkd.cpu import CpuBackend
from gkd.ops import AddLayerNorm, Attention, EmbedLayerNorm, Linear, Operator, RowBounds
from tools.compile_all import GEOMETRIES
from tools.make_model import ModelSpec, make_model

RANGE = 2.0**15


class HostBackend(CpuBackend):
    """The host holds the numbers themselves where a device holds them split, which RowBounds' contract asks for."""

    def run(self, op: Operator, *tensors: Any) -> None:
        if isinstance(op, RowBounds):
            op.reference(*tensors)
        else:
            super().run(op, *tensors)


@pytest.fixture(scope="module", params=["bert", "xlm-roberta"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embed]:
    directory: Path = tmp_path_factory.mktemp("model")
    make_model(directory / "model", ModelSpec(request.param, 3, 64, 2, 192, pooling="mean"))
    with Embed.open(directory / "model") as engine:
        yield engine


def scales_of(engine: Embed, **changed: Any) -> Scales | None:
    inner = engine._open_engine
    assert inner._encoder is not None
    return split_scales(HostBackend(), inner.pipeline.config, {**inner._encoder._weights, **changed})


def test_no_state_leaves_the_range(engine: Embed, corpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    largest = dict.fromkeys(("hidden", "qkv", "inner"), 0.0)
    run = CpuBackend.run

    def record(backend: CpuBackend, op: Operator, *tensors: Any) -> None:
        run(backend, op, *tensors)
        name = None
        if isinstance(op, AddLayerNorm | EmbedLayerNorm):
            name = "hidden"
        elif isinstance(op, Attention):
            name = "qkv"
        elif isinstance(op, Linear) and not op.to_sum:
            name = "inner" if op.activation == "gelu" else "qkv"
        if name is not None:
            largest[name] = max(largest[name], float(np.abs(tensors[0]).max()))

    monkeypatch.setattr(CpuBackend, "run", record)
    engine.encode(corpus)
    scales = scales_of(engine)
    assert scales is not None
    for name, value in largest.items():
        scale = getattr(scales, name)
        assert 0 < value * scale <= RANGE
        # Nor are they wasted: a bound for every input is some powers of two above what the corpus gives.
        assert value * scale >= RANGE * 2.0**-12 or scale == 2.0**12


def test_a_model_that_needs_more_is_refused(engine: Embed) -> None:
    inner = engine._open_engine
    assert inner._encoder is not None
    weights = inner._encoder._weights
    gamma, qkv = weights["layer.1.attention_gamma"], weights["layer.2.qkv_weight"].copy()
    assert scales_of(engine, **{"layer.1.attention_gamma": gamma * np.float32(1e5)}) is None
    qkv[3, 5] = np.inf  # what a weight out of range becomes when it is split
    assert scales_of(engine, **{"layer.2.qkv_weight": qkv}) is None


@pytest.mark.parametrize("bound", [0.0, 1e-9, 1.0, 7.9, 8.0, 8.1, 32767.0, 32768.0, 32769.0, 1e20])
def test_a_scale_is_the_largest_power_of_two_that_fits(bound: float) -> None:
    scale = _scale(bound)
    assert np.frexp(scale)[0] == 0.5
    assert bound * scale <= RANGE
    assert scale == 2.0**12 or bound * scale * 2 > RANGE


@pytest.mark.parametrize("bound", [np.inf, np.nan])
def test_what_is_not_finite_has_no_scale(bound: float) -> None:
    assert _scale(bound) == 0


def test_sizes_and_capabilities_that_take_split_operands() -> None:
    for geometry in GEOMETRIES:
        assert takes_split(geometry.config, 90)
        assert not any(takes_split(geometry.config, arch) for arch in (0, 75, 80, 100, 120))
