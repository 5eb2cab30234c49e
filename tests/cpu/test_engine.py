"""The engine's API: handles, threads, settings, unloading, and what a call refuses."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from embed import EM_BATCH_MAX, ClosedError, Embed, ModelError, NonFiniteError, RequestError, WeightsError
from embed.batch import Batch, batches, position_ids
from embed.config import ModelConfig, read_config
from embed.encoder import Capacity, Encoder
from embed.model import _Engine
from embed.models import FAMILIES
from embed.pipeline import Pooling, read_pipeline
from embed.tokenizer import Tokenizer
from gkd.cpu import CpuBackend
from gkd.dtype import DType
from gkd.errors import DeviceError, OutOfMemory
from gkd.ops.pool import POOL_MODES, PoolMode
from tests.overflowing import FITTING, MIXED, HalfEngine, make_overflowing_model
from tools.make_model import ModelSpec, make_model

TEXTS = ["one text", "and another, a little longer one", "", "a third"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    make_model(path, ModelSpec("xlm-roberta", num_layers=2, hidden_size=64, num_heads=2, max_positions=130))
    return path


@pytest.fixture
def engine(directory: Path) -> Iterator[Embed]:
    with Embed.open(directory) as engine:
        yield engine


def test_what_it_says_of_itself(engine: Embed) -> None:
    assert (engine.dtype, engine.uses_split, engine.exceeds_split, engine.recomputed) == ("f32", False, False, 0)
    assert (engine.name, engine.family, engine.num_layers, engine.dim) == ("small", "xlm-roberta", 2, 64)
    assert (engine.backend, engine.kernel_count, engine.ok, engine.loaded) == ("cpu", 0, True, True)
    assert engine.device_name and engine.workspace_bytes > 0 and engine.maxseq == 128


def test_one_text_many_texts_no_texts(engine: Embed) -> None:
    together = engine.encode(TEXTS)
    assert together.shape == (4, 64) and together.dtype == np.float32
    assert np.array_equal(engine.encode(TEXTS[0]), together[0])
    assert engine.encode([]).shape == (0, 64)
    assert np.array_equal(engine.encode(tuple(TEXTS)), together)


def test_normalize_by_call_and_by_setting(engine: Embed) -> None:
    raw = engine.encode(TEXTS, normalize=False)
    lengths = np.linalg.norm(raw, axis=1, keepdims=True)
    assert np.abs(lengths - 1).min() > 1e-3
    assert np.allclose(engine.encode(TEXTS), raw / lengths, atol=1e-6)
    engine.set_pooling("mean", normalize=False)
    assert np.array_equal(engine.encode(TEXTS), raw)
    assert np.allclose(engine.encode(TEXTS, normalize=True), raw / lengths, atol=1e-6)
    engine.set_pooling("cls", normalize=False)
    assert not np.allclose(engine.encode(TEXTS), raw)
    with pytest.raises(ModelError, match="pooling mode 'median' is not supported"):
        engine.set_pooling("median", normalize=True)  # type: ignore[arg-type]


def test_out_is_filled_and_returned(engine: Embed) -> None:
    ids, offsets = engine.tokenize_batch(TEXTS)
    out = np.full((4, 64), np.nan, np.float32)
    assert engine.encode_ids(ids, offsets, out) is out
    assert np.array_equal(out, engine.encode(TEXTS))
    for wrong in (np.empty((3, 64), np.float32), np.empty((4, 64)), np.empty((64, 4), np.float32).T):
        with pytest.raises(RequestError, match="out: expected a contiguous float32 array"):
            engine.encode_ids(ids, offsets, wrong)  # type: ignore[arg-type]


REFUSALS: list[tuple[list[int], list[int], str]] = [
    ([0, 5, 2], [0, 2], "offsets: expected to run from 0 to 3"),
    ([0, 5, 2], [1, 3], "offsets: expected to run from 0 to 3"),
    ([0, 5, 2], [], "offsets: expected to run from 0"),
    ([0, 5, 2], [0, 3, 3], "text 1 has 0 tokens, expected 1 to 128"),
    ([0, 5, 2], [0, 4, 3], "text 1 has -1 tokens"),
    ([0, 5, -1], [0, 3], r"ids\[2\]: -1 is not an id"),
    ([0, 1 << 30, 2], [0, 3], r"ids\[1\]: 1073741824 is not an id"),
    ([5] * 129, [0, 129], "text 0 has 129 tokens, expected 1 to 128"),
]


@pytest.mark.parametrize(("ids", "offsets", "message"), REFUSALS)
def test_ids_that_would_index_out_of_bounds_are_refused(
    engine: Embed, ids: list[int], offsets: list[int], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        engine.encode_ids(np.array(ids, np.int32), np.array(offsets, np.int64))


def test_ids_of_another_type_are_refused(engine: Embed) -> None:
    for ids, offsets in (([0.0, 2.0], [0, 2]), ([[0, 2]], [0, 2]), ([0, 2], [0.0, 2.0])):
        with pytest.raises(RequestError, match="expected one-dimensional integer arrays"):
            engine.encode_ids(np.array(ids), np.array(offsets))


@pytest.mark.parametrize("wrong", [None, 3, b"bytes", ["nested"], ("a", "pair"), "half of a pair: \ud83d"])
def test_an_item_that_is_no_text_is_named(engine: Embed, wrong: Any) -> None:
    with pytest.raises(RequestError, match=r"texts\[1\]: "):
        engine.encode(["fine", wrong, "fine"])
    assert np.isfinite(engine.encode(["fine"])).all()


def test_device_and_precision_that_cannot_be_had(directory: Path) -> None:
    with pytest.raises(DeviceError, match="gpu 0 cannot be used"):
        Embed.open(directory, gpu=0)
    for dtype in ("tf32", "f16", "bf16"):
        with pytest.raises(DeviceError, match=f"^dtype {dtype} cannot be used: the CPU backend computes in f32, and "):
            Embed.open(directory, dtype=dtype)
    with pytest.raises(DeviceError, match=r"^dtype f64: expected one of f32, tf32, f16, bf16$"):
        Embed.open(directory, dtype="f64")


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_handles_share_one_engine_until_the_last_is_closed(directory: Path, order: tuple[int, ...]) -> None:
    first = Embed.open(directory)
    second = first.share()
    handles = [first, second, second.share()]
    expected = first.encode(TEXTS)
    engine = weakref.ref(first._open_engine)
    encoder = weakref.ref(first._open_engine._encoder or first)
    handles[1].set_pooling("cls", normalize=True)
    assert handles[2].pooling == first.pooling
    handles[1].set_pooling("mean", normalize=True)
    for position, index in enumerate(order):
        assert np.array_equal(handles[index].encode(TEXTS), expected)
        handles[index].close()
        handles[index].close()
        assert not handles[index].ok
        with pytest.raises(ClosedError, match="this handle has been closed"):
            handles[index].encode(TEXTS)
        with pytest.raises(ClosedError):
            handles[index].share()
        if position < 2:
            assert engine() is not None
    gc.collect()
    assert engine() is None and encoder() is None


def test_unload_and_reload(engine: Embed) -> None:
    expected = engine.encode(TEXTS)
    encoder = weakref.ref(engine._open_engine._encoder or engine)
    for _ in range(2):
        engine.unload()
        assert not engine.loaded and engine.workspace_bytes == 0
    gc.collect()
    assert encoder() is None, "weights and workspace are still held"
    assert engine.tokenize(TEXTS[0]) and engine.dim == 64
    engine.set_maxseq(64)
    with pytest.raises(ClosedError, match="unloaded"):
        engine.encode(TEXTS)
    for _ in range(2):
        engine.reload()
        assert engine.loaded
    assert engine.maxseq == 64
    assert np.array_equal(engine.encode(TEXTS), expected)


def test_a_reload_that_fails_leaves_it_unloaded_and_the_next_may_succeed(tmp_path: Path) -> None:
    make_model(tmp_path / "model", ModelSpec(hidden_size=32, num_heads=2))
    weights = tmp_path / "model" / "model.safetensors"
    with Embed.open(tmp_path / "model") as engine:
        expected = engine.encode(TEXTS)
        engine.unload()
        weights.rename(tmp_path / "away")
        with pytest.raises(WeightsError, match="not found"):
            engine.reload()
        assert not engine.loaded
        (tmp_path / "away").rename(weights)
        engine.reload()
        assert np.array_equal(engine.encode(TEXTS), expected)


def test_many_threads_get_the_serial_answers(engine: Embed, corpus: list[str]) -> None:
    calls = [corpus[start : start + 5] for start in range(0, 160, 5)]
    serial = [engine.encode(texts) for texts in calls]
    with ThreadPoolExecutor(16) as pool:
        for expected, got in zip(serial, pool.map(engine.encode, calls), strict=True):
            assert np.array_equal(got, expected)


@pytest.fixture
def held_forward(engine: Embed, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Every forward says that it has begun and then waits to be let go."""
    begun, let_go = threading.Event(), threading.Event()
    forward = Encoder.forward

    def hold(self: Encoder, *arguments: Any) -> None:
        begun.set()
        assert let_go.wait(timeout=30)
        forward(self, *arguments)

    monkeypatch.setattr(Encoder, "forward", hold)
    yield begun, let_go
    let_go.set()


def test_settings_during_a_forward_take_effect_after_it(
    engine: Embed, held_forward: tuple[threading.Event, threading.Event]
) -> None:
    begun, let_go = held_forward
    with ThreadPoolExecutor() as pool:
        running = pool.submit(engine.encode, TEXTS)
        assert begun.wait(timeout=30)
        engine.set_pooling("cls", normalize=False)
        assert engine.tokenize("tokenizing goes on")
        let_go.set()
        during, after = running.result(), engine.encode(TEXTS)
        engine.set_pooling("mean", normalize=True)
        assert np.array_equal(during, engine.encode(TEXTS))
        assert not np.allclose(during, after)


def test_closing_waits_for_a_forward(engine: Embed, held_forward: tuple[threading.Event, threading.Event]) -> None:
    begun, let_go = held_forward
    with ThreadPoolExecutor() as pool:
        running = pool.submit(engine.encode, TEXTS)
        assert begun.wait(timeout=30)
        closing = pool.submit(engine.close)
        let_go.set()
        closing.result(timeout=30)
        assert np.isfinite(running.result()).all()


def test_a_vector_that_is_not_finite_is_not_returned(tmp_path: Path) -> None:
    make_model(tmp_path / "model", ModelSpec(hidden_size=32, num_heads=2, num_layers=1))
    with Embed.open(tmp_path / "model") as engine:
        weights = dict(engine._open_engine._encoder._weights)  # type: ignore[union-attr]
        weights["word"] = weights["word"].copy()
        weights["word"][engine.tokenize("e")[1]] = np.inf
        engine._open_engine._encoder._weights = weights  # type: ignore[union-attr]
        assert np.isfinite(engine.encode(["0", "1"])).all()
        with pytest.raises(NonFiniteError, match=r"^texts\[1\]: the model gives a vector that is not finite$"):
            engine.encode(["0", "e", "1"])
        assert engine.recomputed == 0


# Texts that 16 bits do not hold


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "overflowing"
    make_overflowing_model(path)
    return path


@pytest.fixture
def half(overflowing: Path) -> Iterator[HalfEngine]:
    half = HalfEngine(overflowing)
    with half.engine:
        yield half


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("mode", POOL_MODES)
def test_a_text_that_f16_does_not_hold_is_computed_in_f32_and_no_other(
    half: HalfEngine, overflowing: Path, mode: PoolMode, normalize: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = half.engine
    engine.set_pooling(mode, normalize)
    alone = engine.encode(FITTING)
    assert engine.recomputed == 0 and half.made == [DType.F16] and not caplog.records
    mixed = engine.encode(MIXED)
    assert np.array_equal(mixed[[0, 2, 3]], alone)
    with Embed.open(overflowing, pool=mode, normalize=normalize) as f32:
        assert np.array_equal(mixed[[1, 4]], f32.encode([MIXED[1], MIXED[4]]))
        assert not np.array_equal(alone, f32.encode(FITTING))
    assert engine.recomputed == 2
    engine.encode(MIXED, normalize=not normalize)
    assert engine.recomputed == 4 and half.made == [DType.F16, DType.F32]
    [record] = caplog.records
    assert record.levelname == "WARNING" and record.getMessage() == (
        "overflowing: the range of f16 is too small for this model: a text whose vector is not finite is computed "
        "again in f32, by itself, with a second copy of the weights; --dtype bf16 or f32 avoids it"
    )


def test_the_model_in_f32_is_counted_while_it_is_there(half: HalfEngine) -> None:
    engine, config = half.engine, half.inner.pipeline.config
    engine.encode(FITTING)
    weights_bytes, workspace_bytes = engine.weights_bytes, engine.workspace_bytes
    expected = engine.encode(MIXED)
    assert half.inner._exact is not None and half.inner._exact.max_tokens == config.max_tokens
    # Matrices in 4 bytes instead of 2, vectors in 4 either way.
    assert 2.9 * weights_bytes < engine.weights_bytes <= 3 * weights_bytes
    assert workspace_bytes < engine.workspace_bytes < 2 * workspace_bytes
    engine.unload()
    assert half.inner._exact is None and engine.weights_bytes == engine.workspace_bytes == 0
    engine.reload()
    assert (engine.weights_bytes, engine.workspace_bytes) == (weights_bytes, workspace_bytes)
    assert engine.recomputed == 2 and len(half.made) == 2
    assert np.array_equal(engine.encode(MIXED), expected)
    assert engine.recomputed == 4 and len(half.made) == 3


def test_threads_that_need_it_at_once_load_it_once(half: HalfEngine) -> None:
    with ThreadPoolExecutor(8) as pool:
        vectors = list(pool.map(lambda _: half.engine.encode(MIXED), range(8)))
    assert all(np.array_equal(other, vectors[0]) for other in vectors)
    assert half.made == [DType.F16, DType.F32] and half.engine.recomputed == 16


def test_a_model_that_cannot_be_loaded_in_f32_is_tried_again(tmp_path: Path) -> None:
    make_overflowing_model(tmp_path / "model")
    weights, half = tmp_path / "model" / "model.safetensors", HalfEngine(tmp_path / "model")
    with half.engine as engine:
        weights.rename(tmp_path / "away")
        message = (
            r"^texts\[1\]: the model gives a vector that is not finite in f16, and cannot be loaded in f32: "
            r"model.safetensors: not found"
        )
        with pytest.raises(NonFiniteError, match=message):
            engine.encode(MIXED)
        assert np.isfinite(engine.encode(FITTING)).all() and engine.recomputed == 0
        (tmp_path / "away").rename(weights)
        assert np.isfinite(engine.encode(MIXED)).all() and engine.recomputed == 2


def test_a_vector_that_f32_does_not_hold_either_is_not_returned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model(tmp_path / "model", ModelSpec(hidden_size=32, num_heads=2, num_layers=1))
    file = tmp_path / "model" / "model.safetensors"
    tensors, half = load_file(file), HalfEngine(tmp_path / "model")
    tensors["embeddings.word_embeddings.weight"][half.engine.tokenize("e")[1]] = np.inf
    save_file(tensors, file)
    with half.engine as engine:
        engine.unload()
        engine.reload()
        message = r"^texts\[2\]: the model gives a vector that is not finite, neither in f16 nor in f32$"
        with pytest.raises(NonFiniteError, match=message):
            engine.encode(["0", "1", "e"])
        assert np.isfinite(engine.encode(["0", "1"])).all()
        assert engine.recomputed == 0 and not caplog.records


# Batches


def test_texts_are_split_by_tokens_and_by_number(directory: Path) -> None:
    config = read_config(directory)
    lengths = [3, 4, 3, 20, 1, *[2] * 7]
    offsets = np.cumsum([0, *lengths])
    ids = np.arange(offsets[-1], dtype=np.int32) + 4
    split = list(batches(ids, offsets, config, max_tokens=10, max_texts=4))
    assert [(batch.first, batch.last) for batch in split] == [(0, 3), (3, 4), (4, 8), (8, 12)]
    assert np.array_equal(np.concatenate([batch.input_ids for batch in split]), ids)
    for batch in split:
        assert np.array_equal(np.diff(batch.cu_seqlens), lengths[batch.first : batch.last])
        assert batch.cu_seqlens[0] == 0 and batch.cu_seqlens[-1] == len(batch.input_ids)


def test_position_rules() -> None:
    xlmr = ModelConfig(FAMILIES["xlm-roberta"], 8, 1, 1, 8, 100, 40, 1, 1, 1e-5)
    bert = replace(xlmr, family=FAMILIES["bert"], pad_token_id=0)
    ids, cu_seqlens = np.array([0, 7, 1, 8, 2, 0, 1, 1, 2], np.int32), np.array([0, 5, 9], np.int32)
    # A padding token inside a text keeps position 1 and is not counted, as transformers has it.
    assert position_ids(ids, cu_seqlens, xlmr).tolist() == [2, 3, 1, 4, 5, 2, 1, 1, 3]
    assert position_ids(ids, cu_seqlens, bert).tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]


def batch_of(lengths: list[int]) -> Batch:
    num_tokens = sum(lengths)
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    ids = np.arange(num_tokens, dtype=np.int32)
    return Batch(0, len(lengths), ids + 100, ids + 1000, ids + 2000, cu_seqlens)


def test_a_batch_is_packed_with_empty_texts_and_items_to_fill_its_capacity() -> None:
    capacity, batch = Capacity(num_tokens=16, num_texts=5, num_items=7, block_q=4), batch_of([3, 6, 1])
    packed = capacity.pack(batch)
    assert packed.shape == (capacity.num_elements,) and packed.dtype == np.int32
    parts = np.split(packed, np.cumsum([1, 1, 5 + 1, 16, 16, 16, 7 * 3, 5 * 3, 5]))
    num_tokens, num_texts, cu_seqlens, *ids, work, first_work, first_pooled, rest = (x.tolist() for x in parts)
    # No first token is left out of the pooling.
    assert (num_tokens, num_texts, first_pooled, rest) == ([10], [3], [0] * 5, [])
    # Offsets that do not grow: texts of no tokens, at the end.
    assert cu_seqlens == [0, 3, 9, 10, 10, 10]
    assert ids == [[*range(first, first + 10), *[0] * 6] for first in (100, 1000, 2000)]
    # First token, length and first query of an item; where there is none, of length 0.
    assert work == [0, 3, 0, 3, 6, 0, 3, 6, 4, 9, 1, 0, *[0] * 9]
    # The items of first tokens, one a text, whatever else is in it.
    assert first_work == [0, 3, 0, 3, 6, 0, 9, 1, 0, *[0] * 6]


def test_a_batch_of_just_its_capacity_is_packed_without_filling() -> None:
    packed = Capacity(num_tokens=10, num_texts=3, num_items=4, block_q=4).pack(batch_of([3, 6, 1]))
    items, firsts = [0, 3, 0, 3, 6, 0, 3, 6, 4, 9, 1, 0], [0, 3, 0, 3, 6, 0, 9, 1, 0]
    ids = [token for first in (100, 1000, 2000) for token in range(first, first + 10)]
    assert packed.tolist() == [10, 3, 0, 3, 9, 10, *ids, *items, *firsts, 0, 0, 0]


def test_of_a_prompt_that_is_left_out_each_text_keeps_its_last_token() -> None:
    capacity = Capacity(num_tokens=16, num_texts=4, num_items=7, block_q=4)
    packed = capacity.pack(replace(batch_of([3, 6, 1]), num_prompt_tokens=4))
    assert packed[-4:].tolist() == [2, 4, 0, 0]


class PaddingBackend(CpuBackend):
    """Keeps forwards as a device does: they run at their capacity, on what was uploaded."""

    def __init__(self) -> None:
        super().__init__()
        self.replayed: list[Callable[[], None]] = []

    def empty(self, shape: tuple[int, ...], dtype: DType) -> NDArray[Any]:
        # Integers that are no ids and numbers that are none: what is read of a tensor's unused part shows.
        return np.full(shape, -(1 << 30) if dtype is DType.I32 else np.nan, dtype.storage)

    def upload(self, buffer: NDArray[Any], array: NDArray[Any]) -> NDArray[Any]:
        buffer[: array.size] = array.reshape(-1)
        return self.view(buffer, array.shape)

    def record(self, queue: Callable[[], None]) -> Any:
        return queue

    def replay(self, recorded: Any) -> None:
        self.replayed.append(recorded)
        recorded()


@pytest.mark.parametrize("mode", POOL_MODES)
def test_a_forward_at_a_capacity_gives_the_bits_of_one_at_its_own_size(engine: Embed, mode: PoolMode) -> None:
    plain = engine._open_engine._encoder
    assert plain is not None
    config, backend = read_config(engine._open_engine.pipeline.directory), PaddingBackend()
    padding = Encoder(backend, config, plain._weights, max_tokens=2048, max_texts=200)
    padding.record((mode,))
    rng = np.random.default_rng(4)
    # One token; texts so short that a larger capacity has to have room for them; capacities that are just filled, in
    # tokens and in items; little after much; and more texts than any capacity has room for.
    cases = [[1], [2] * 30, [64], [100, 3, 7], [1, 120, 128, 2, 90, 100], [128] * 16, [3, 4], [1] * 129]
    for lengths in cases:
        offsets = np.cumsum([0, *lengths])
        ids = rng.integers(4, config.vocab_size, offsets[-1]).astype(np.int32)
        [batch] = batches(ids, offsets, config, max_tokens=2048, max_texts=200)
        for normalize in (True, False):
            want, got = np.full((2, len(lengths), config.hidden_size), np.nan, np.float32)
            plain.forward(want, batch, Pooling((mode,), normalize))
            padding.forward(got, batch, Pooling((mode,), normalize))
            assert np.isfinite(got).all() and np.array_equal(got, want), lengths
    assert len(backend.replayed) == 2 * (len(cases) - 1)


def test_more_texts_than_one_forward_takes(engine: Embed) -> None:
    texts = [str(number) for number in range(EM_BATCH_MAX + 10)]
    vectors = engine.encode(texts)
    assert np.array_equal(vectors[EM_BATCH_MAX + 3], engine.encode(texts[EM_BATCH_MAX + 3]))


# Forwards in two steps, as a server asks for them


def test_a_forward_in_two_steps_gives_the_same_bits(minilm: Embed, corpus: list[str]) -> None:
    ids, offsets = minilm.tokenize_batch(corpus[:40])
    prepared = minilm.prepare_ids(ids, offsets)
    for normalize in (None, False):
        vectors, failures = minilm.start_encode(prepared, normalize).result()
        assert np.array_equal(vectors, minilm.encode_ids(ids, offsets, normalize=normalize)) and not failures
    with pytest.raises(RequestError, match="is not an id of a vocabulary"):
        minilm.prepare_ids(ids + 10**6, offsets)


def test_it_is_prepared_while_unloaded(engine: Embed) -> None:
    expected = engine.encode(["a text"])
    engine.unload()
    prepared = engine.prepare_ids(*engine.tokenize_batch(["a text"]))
    with pytest.raises(ClosedError):
        engine.start_encode(prepared).result()
    engine.reload()
    assert np.array_equal(engine.start_encode(prepared).result()[0], expected)


def test_texts_without_a_vector_do_not_lose_the_others(tmp_path: Path) -> None:
    make_overflowing_model(tmp_path / "model")
    weights, half = tmp_path / "model" / "model.safetensors", HalfEngine(tmp_path / "model")
    with half.engine as engine:
        weights.rename(tmp_path / "away")
        prepared = engine.prepare_ids(*engine.tokenize_batch(MIXED))
        vectors, failures = engine.start_encode(prepared).result()
        assert sorted(failures) == [1, 4]
        assert all("cannot be loaded in f32: model.safetensors: not found" in str(e) for e in failures.values())
        assert np.array_equal(vectors[[0, 2, 3]], engine.encode(FITTING))
        (tmp_path / "away").rename(weights)
        vectors, failures = engine.start_encode(prepared).result()
        assert np.array_equal(vectors, engine.encode(MIXED)) and not failures


class SmallDevice(CpuBackend):
    """Has memory for so many bytes beside the weights."""

    room_bytes = 1 << 62

    _held_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Any:
        tensor = super().empty(shape, dtype)
        self._held_bytes += tensor.nbytes
        if self._held_bytes > self.room_bytes:
            raise OutOfMemory(f"cuMemAlloc: out of memory: {tensor.nbytes} bytes")
        return tensor

    def release(self) -> None:
        self._held_bytes = 0


def test_a_load_without_memory_is_tried_with_smaller_forwards(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, corpus: list[str]
) -> None:
    make_model(
        tmp_path / "model", ModelSpec("xlm-roberta", num_layers=1, hidden_size=32, num_heads=2, max_positions=66)
    )
    backend = SmallDevice()
    pipeline = read_pipeline(tmp_path / "model")
    engine = _Engine("model", backend, lambda _: SmallDevice(), pipeline, Tokenizer(tmp_path / "model"))
    with Embed(engine) as handle:
        handle.reload()
        whole_bytes = handle.workspace_bytes
        assert handle.max_batch_tokens == 2048
        expected = handle.encode(corpus)
        prepared = handle.prepare_ids(*handle.tokenize_batch(corpus))

        handle.unload()
        backend.room_bytes = whole_bytes // 3
        handle.reload()
        assert handle.max_batch_tokens == 512 and handle.workspace_bytes < whole_bytes // 3
        assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [
            "trying with forwards of 1024 tokens",
            "trying with forwards of 512 tokens",
        ]
        assert np.array_equal(handle.encode(corpus), expected)
        # What was prepared for larger forwards is cut anew.
        assert np.array_equal(handle.start_encode(prepared).result()[0], expected)

        handle.unload()
        backend.room_bytes = 1000
        with pytest.raises(OutOfMemory):
            handle.reload()
        assert not handle.loaded and handle.ok
        backend.room_bytes = 1 << 62
        handle.reload()
        assert handle.max_batch_tokens == 2048 and np.array_equal(handle.encode(corpus), expected)
