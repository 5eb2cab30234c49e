"""Each operator's float32 reference against float64, or against an independent computation; and its contract."""

import math
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

from gkd.cpu import CpuBackend
from gkd.dtype import DType
from gkd.errors import DtypeError, ShapeError
from gkd.ops import (
    AddLayerNorm,
    Attention,
    Cast,
    Dense,
    EmbedLayerNorm,
    GatherRows,
    L2Normalize,
    Linear,
    Operator,
    Pool,
    RowBounds,
    Split,
)
from gkd.ops.attention import attention_work
from gkd.ops.contract import Array
from gkd.ops.dense import DenseActivation
from gkd.ops.gelu import gelu_
from gkd.ops.linear import invariant_products
from gkd.ops.pool import POOL_MODES, PoolMode
from gkd.ops.threads import for_each, num_cores
from gkd.tensor import Tensor
from tests.numerics import count, narrowed, widened

EPS32 = float(np.finfo(np.float32).eps)
RNG = np.random.default_rng(7)


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape, dtype=np.float32)


def assert_close(got: Array, expected: Array, bound: Array | float) -> None:
    """|got - expected| <= bound everywhere; a NaN fails, since it is not <= anything."""
    error = np.abs(got.astype(np.float64) - expected)
    ok = error <= bound
    assert ok.all(), f"{(~ok).sum()} of {ok.size} out of bounds, worst {np.nanmax(error / bound)} times the bound"


def run(op: Operator, out: Array, *inputs: Any) -> Array:
    """The output of one call, over memory in which an element left unwritten shows as NaN."""
    out.fill(np.nan)
    CpuBackend().run(op, out, *inputs)
    return out


def both(op: Operator, shape: tuple[int, ...], *inputs: Any) -> tuple[Array, Array]:
    """The output in float32 and, from the same numbers, in float64."""
    wide = [x.astype(np.float64) if getattr(x, "dtype", None) == np.float32 else x for x in inputs]
    return run(op, np.empty(shape, np.float32), *inputs), run(op, np.empty(shape, np.float64), *wide)


@pytest.mark.parametrize("rows", [1, 3, 16, 257])
@pytest.mark.parametrize(("in_features", "out_features"), [(32, 48), (80, 33), (384, 1152)])
def test_linear_matches_float64(rows: int, in_features: int, out_features: int) -> None:
    x, weight, bias = normal(rows, in_features), normal(out_features, in_features), normal(out_features)
    got, expected = both(Linear(in_features, out_features), (rows, out_features), x, weight, bias, count(rows))
    # in_features products are rounded and added one after another, in whatever order; then the bias.
    terms = np.abs(x).astype(np.float64) @ np.abs(weight.T) + np.abs(bias)
    assert_close(got, expected, (in_features + 1) * EPS32 * terms)


def test_linear_gelu_is_the_exact_gelu() -> None:
    x, weight, bias = normal(5, 64), normal(96, 64), normal(96)
    _, plain = both(Linear(64, 96), (5, 96), x, weight, bias, count(5))
    _, got = both(Linear(64, 96, "gelu"), (5, 96), x, weight, bias, count(5))
    expected = torch.nn.functional.gelu(torch.from_numpy(plain)).numpy()
    assert_close(got, expected, 1e-14 * (1 + np.abs(plain)))


def test_gelu_float32_over_its_whole_range() -> None:
    x = np.concatenate([np.linspace(-20, 20, 400_001), np.geomspace(1e-38, 1, 1000), [0.0, -0.0]]).astype(np.float32)
    got = x.copy()
    gelu_(got)
    expected = np.array([0.5 * v * math.erfc(-v * math.sqrt(0.5)) for v in x.astype(np.float64)])
    # Rounding of x itself, and of the small correction that is taken from it: 2.7e-7 up to |x| = 4.
    assert_close(got, expected, 2 * EPS32 * np.maximum(np.abs(x), 1e-38))


def test_gelu_of_values_that_are_huge_or_not_finite() -> None:
    x = np.array([1e30, -1e30, np.inf, -np.inf, np.nan], np.float32)
    with np.errstate(all="ignore"):
        gelu_(x)
    assert x[0] == np.float32(1e30) and x[1] == 0
    assert not np.isfinite(x[2:]).any()


@pytest.mark.parametrize("shape", [(384, 384), (1536, 384)])
def test_a_row_of_linear_has_the_same_bits_in_any_company(shape: tuple[int, int]) -> None:
    in_features, out_features = shape
    op = Linear(in_features, out_features)
    x, weight, bias = normal(1700, in_features), normal(out_features, in_features), normal(out_features)
    together = run(op, np.empty((1700, out_features), np.float32), x, weight, bias, count(1700))
    for first, last in ((0, 1), (13, 14), (5, 9), (3, 20), (100, 165), (1, 300), (399, 700), (9, 1500)):
        rows = last - first
        apart = run(op, np.empty((rows, out_features), np.float32), x[first:last], weight, bias, count(rows))
        assert np.array_equal(apart, together[first:last]), f"rows {first} to {last}"


@pytest.mark.parametrize("rows", [0, 1, 20, 65, 300])
def test_linear_computes_the_rows_that_are_counted_and_no_other_shows_in_them(rows: int) -> None:
    op = Linear(64, 33, "gelu")
    x, weight, bias = normal(300, 64), normal(33, 64), normal(33)
    exact = run(op, np.empty((rows, 33), np.float32), x[:rows], weight, bias, count(rows))
    x[rows:] = np.nan
    got = run(op, np.empty((300, 33), np.float32), x, weight, bias, count(rows))
    assert np.array_equal(got[:rows], exact)


@pytest.mark.parametrize("products", [((16, 8), 1), ((64,), 3), ((256, 4), 16), ((256, 128), 1), ((1,), 2)])
@pytest.mark.parametrize("rows", [1, 20, 77, 300])
def test_linear_on_another_blas_and_other_cores(
    products: tuple[tuple[int, ...], int], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gkd.ops.linear.invariant_products", lambda *_: products)
    x, weight, bias = normal(rows, 64), normal(33, 64), normal(33)
    got, expected = both(Linear(64, 33), (rows, 33), x, weight, bias, count(rows))
    assert_close(got, expected, 65 * EPS32 * (np.abs(x).astype(np.float64) @ np.abs(weight.T) + np.abs(bias)))


def test_a_block_size_that_moves_a_bit_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Matrix(np.ndarray[Any, Any]):
        """A BLAS whose sums depend on the number of rows below 64, and on a row's place above 128."""

        def __matmul__(self, other: Any) -> Any:
            product = np.asarray(self) @ np.asarray(other)
            if len(self) > 128:
                product[0] += np.float32(1)
            return product + np.float32(len(self) < 64)

    class Generator:
        def random(self, shape: tuple[int, ...], dtype: Any) -> Any:
            return RNG.integers(0, 8, shape).astype(dtype).view(Matrix)

    monkeypatch.setattr(np.random, "default_rng", lambda _: Generator())
    assert invariant_products.__wrapped__(24, 40) == ((128, 64), num_cores())


@pytest.mark.parametrize("num_items", [0, 1, 2, 100])
def test_every_piece_is_worked_on_once_with_blas_on_one_thread(num_items: int) -> None:
    blas_threads = {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}
    seen: list[int] = []

    def work(item: int) -> None:
        assert {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"} == {1}
        seen.append(item)

    for_each(work, range(num_items))
    assert sorted(seen) == list(range(num_items))
    assert {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"} == blas_threads


def test_a_piece_that_fails_fails_the_call() -> None:
    def work(item: int) -> None:
        if item == 7:
            raise ValueError("seven")

    with pytest.raises(ValueError, match="seven"):
        for_each(work, range(20))


@pytest.mark.parametrize("head_dim", [32, 64, 80])
@pytest.mark.parametrize("lengths", [[1], [2, 1, 7], [256, 257, 600], [800]])
def test_attention_matches_torch_in_float64(head_dim: int, lengths: list[int]) -> None:
    num_heads, tokens = 3, sum(lengths)
    qkv = 2 * normal(tokens, 3 * num_heads * head_dim)
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    got, wide = both(
        Attention(num_heads, head_dim), (tokens, num_heads * head_dim), qkv, attention_work(cu_seqlens, 256), 256
    )
    for start, end in pairwise(cu_seqlens):
        q, k, v = (
            torch.from_numpy(qkv[start:end].astype(np.float64)).reshape(-1, 3, num_heads, head_dim).permute(1, 2, 0, 3)
        )
        context = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        expected = context.transpose(0, 1).flatten(1).numpy()
        assert_close(wide[start:end], expected, 1e-12)
        # Scores are of the order of 4 * sqrt(head_dim); their rounding moves the weights by that many ulps.
        assert_close(got[start:end], expected, 100 * EPS32 * np.abs(v.numpy()).max())


def test_attention_survives_large_scores() -> None:
    qkv = 60 * normal(40, 3 * 64)
    got, expected = both(Attention(2, 32), (40, 64), qkv, attention_work(np.array([0, 40]), 256), 256)
    assert_close(got, expected, 0.02 * np.abs(qkv).max())


def biased_attention(qkv: Array, bias: Array, num_heads: int) -> Array:
    """Of one text, in float64, with a score for each pair of tokens."""
    length, max_distance = len(qkv), bias.shape[1] // 2
    query, key, value = qkv.astype(np.float64).reshape(length, 3, num_heads, -1).transpose(1, 2, 0, 3)
    scores = np.einsum("hqd,hkd->hqk", query, key) / math.sqrt(query.shape[-1])
    for q, k in product(range(length), repeat=2):
        scores[:, q, k] += bias[:, max(-max_distance, min(k - q, max_distance)) + max_distance]
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    context = np.einsum("hqk,hkd->qhd", weights / weights.sum(axis=-1, keepdims=True), value)
    return np.asarray(context.reshape(length, -1))


@pytest.mark.parametrize("max_distance", [0, 5, 128])
@pytest.mark.parametrize("lengths", [[1], [2, 1, 7], [131, 257, 300]])
def test_attention_adds_the_bias_of_the_distance_from_query_to_key(lengths: list[int], max_distance: int) -> None:
    num_heads, head_dim, tokens = 3, 8, sum(lengths)
    qkv, bias = 2 * normal(tokens, 3 * num_heads * head_dim), 3 * normal(num_heads, 2 * max_distance + 1)
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    got, wide = both(
        Attention(num_heads, head_dim, max_distance=max_distance),
        (tokens, num_heads * head_dim),
        qkv,
        attention_work(cu_seqlens, 256),
        256,
        bias,
    )
    for start, end in pairwise(cu_seqlens):
        expected = biased_attention(qkv[start:end], bias, num_heads)
        assert_close(wide[start:end], expected, 1e-12)
        # As without a bias: scores of the order of 4 * sqrt(head_dim), and biases no larger.
        assert_close(got[start:end], expected, 100 * EPS32 * np.abs(qkv[start:end]).max())


@pytest.mark.parametrize("max_distance", [None, 100])
def test_a_text_has_the_same_attention_bits_at_another_place(max_distance: int | None) -> None:
    op, lengths = Attention(4, 32, max_distance=max_distance), [5, 200, 31, 140]
    bias = () if max_distance is None else (normal(4, 2 * max_distance + 1),)
    qkv, cu_seqlens = normal(sum(lengths), 3 * 128), np.cumsum([0, *lengths]).astype(np.int32)
    together = run(op, np.empty((sum(lengths), 128), np.float32), qkv, attention_work(cu_seqlens, 256), 256, *bias)
    for start, end in pairwise(cu_seqlens):
        alone = np.ascontiguousarray(qkv[start:end])
        work = attention_work(np.array([0, end - start]), 256)
        got = run(op, np.empty((end - start, 128), np.float32), alone, work, 256, *bias)
        assert np.array_equal(got, together[start:end])


@pytest.mark.parametrize("block_q", [1, 64, 256])
def test_attention_work_names_every_query_once(block_q: int) -> None:
    lengths = [1, 300, 64, 65, 7]
    cu_seqlens = np.cumsum([0, *lengths])
    work = attention_work(cu_seqlens, block_q)
    assert work.dtype == np.int32 and work.shape == (sum(-(-n // block_q) for n in lengths), 3)
    queries = [
        start + query for start, length, first in work.tolist() for query in range(first, min(first + block_q, length))
    ]
    assert queries == list(range(sum(lengths)))


def test_attention_work_goes_text_by_text_and_names_nothing_of_an_empty_one() -> None:
    cu_seqlens = np.array([0, 3, 3, 8, 12, 12, 12], np.int32)
    # First token, length, first query; texts and queries ascending.
    cases = {
        2: [[0, 3, 0], [0, 3, 2], [3, 5, 0], [3, 5, 2], [3, 5, 4], [8, 4, 0], [8, 4, 2]],
        4: [[0, 3, 0], [3, 5, 0], [3, 5, 4], [8, 4, 0]],
        5: [[0, 3, 0], [3, 5, 0], [8, 4, 0]],
    }
    for block_q, want in cases.items():
        work = attention_work(cu_seqlens, block_q)
        assert work.dtype == np.int32 and work.shape[1:] == (3,)
        # An empty text has no item, or one of length 0, which does nothing.
        assert work[work[:, 1] > 0].tolist() == want
    assert not attention_work(np.zeros(3, np.int32), 4)[:, 1].any()


def test_empty_items_do_nothing_wherever_they_stand_in_the_list() -> None:
    op, qkv = Attention(2, 32), normal(20, 3 * 64)
    items = attention_work(np.array([0, 13, 20]), 8)
    want = run(op, np.empty((20, 64), np.float32), qkv, items, 8)
    empty = np.array([[0, 0, 0], [7, 0, 0]], np.int32)
    among = np.concatenate([empty, items[:1], empty, items[1:], empty])
    assert np.array_equal(run(op, np.empty((20, 64), np.float32), qkv, among, 8), want)
    assert np.isnan(run(op, np.empty((20, 64), np.float32), qkv, empty, 8)).all()


@pytest.mark.parametrize("block_q", [8, 256, 300])
def test_attention_is_the_same_whatever_the_number_of_queries_of_an_item(block_q: int) -> None:
    op, lengths = Attention(2, 32), [5, 600, 31]
    qkv, cu_seqlens = normal(sum(lengths), 3 * 64).astype(np.float64), np.cumsum([0, *lengths])
    want, got = (
        run(op, np.empty((len(qkv), 64)), qkv, attention_work(cu_seqlens, size), size) for size in (1024, block_q)
    )
    # BLAS may add in another order for another number of rows.
    assert_close(got, want, 1e-13)


def test_attention_refuses_a_bias_that_does_not_fit() -> None:
    out, qkv, work = np.zeros((3, 8), np.float32), np.zeros((3, 24), np.float32), np.zeros((1, 3), np.int32)
    plain, biased, bias = Attention(2, 4), Attention(2, 4, max_distance=5), np.zeros((2, 11), np.float32)
    biased.check(out, qkv, work, 256, bias)
    # float32 in every precision.
    biased.check(out.astype(np.float16), qkv.astype(np.float16), work, 256, bias)
    with pytest.raises(DtypeError, match="`bias` is f16, expected f32"):
        biased.check(out, qkv, work, 256, bias.astype(np.float16))
    with pytest.raises(ShapeError, match=r"`bias` has shape \(2, 9\), expected \(2, 11\)"):
        biased.check(out, qkv, work, 256, bias[:, 1:-1])
    with pytest.raises(ShapeError, match=r"`bias` is missing, expected \(2, 11\)"):
        biased.check(out, qkv, work, 256)
    with pytest.raises(ShapeError, match=r"`bias` has shape \(2, 11\), expected none without max_distance"):
        plain.check(out, qkv, work, 256, bias)
    with pytest.raises(ValueError, match="`wgmma` takes no bias"):
        Attention(2, 64, "wgmma", max_distance=5)


def test_attention_leaves_alone_what_no_item_names() -> None:
    op, qkv = Attention(2, 32), normal(365, 3 * 64)
    work = attention_work(np.array([0, 300, 365]), 256)
    everything = run(op, np.empty((365, 64), np.float32), qkv, work, 256)
    firsts = np.pad(work[work[:, 2] == 0], ((0, 2), (0, 0)))  # and two empty items
    got = run(op, np.empty((365, 64), np.float32), qkv, firsts, 1)
    computed = np.zeros(365, bool)
    computed[[0, 300]] = True
    assert np.isnan(got[~computed]).all()
    # One query is a product of another shape for BLAS than 256 are: other bits.
    assert_close(got[computed], everything[computed].astype(np.float64), 100 * EPS32 * np.abs(qkv).max())


def normalize(size: int, x: Array, residual: Array, *weights: Array) -> Array:
    """The residual that AddLayerNorm leaves, which is its output as well."""
    sums = residual.copy()
    CpuBackend().run(AddLayerNorm(size, 1e-5), sums, sums, x, *weights, count(len(x)))
    return sums


@pytest.mark.parametrize(("rows", "size"), [(1, 32), (7, 384), (100, 1024)])
def test_add_layer_norm_matches_float64_and_torch(rows: int, size: int) -> None:
    x, residual, gamma, beta = normal(rows, size) + 3, normal(rows, size), normal(size), normal(size)
    got = normalize(size, x, residual, gamma, beta)
    wide = normalize(size, *(array.astype(np.float64) for array in (x, residual, gamma, beta)))
    total = torch.from_numpy(x.astype(np.float64) + residual.astype(np.float64))
    scale, shift = (torch.from_numpy(w.astype(np.float64)) for w in (gamma, beta))
    assert_close(wide, torch.nn.functional.layer_norm(total, (size,), scale, shift, 1e-5).numpy(), 1e-12)
    # The mean is at most 3 deviations here, and is subtracted after rounding: a few ulps of it, times gamma.
    assert_close(got, wide, 16 * EPS32 * (np.abs(gamma) * 8 + np.abs(beta)))


def test_add_layer_norm_row_by_row_and_no_further_than_the_count() -> None:
    (x, residual), (gamma, beta) = normal(2, 50, 96), normal(2, 96)
    together = normalize(96, x, residual, gamma, beta)
    for row in (0, 17, 49):
        alone = normalize(96, x[row : row + 1], residual[row : row + 1], gamma, beta)
        assert np.array_equal(alone[0], together[row])
    sums = residual.copy()
    CpuBackend().run(AddLayerNorm(96, 1e-5), sums, sums, x, gamma, beta, count(20))
    assert np.array_equal(sums[:20], together[:20]) and np.array_equal(sums[20:], residual[20:])


def test_a_layer_norm_s_operand_is_its_residual_rounded() -> None:
    (x, residual), (gamma, beta) = normal(2, 9, 96), normal(2, 96)
    ids, places = np.array([3, 29, 0, 3, 1, 7, 7, 0, 99], np.int32), np.array([0, 11, 5, 2, 1, 3, 4, 9, 99], np.int32)
    types = np.array([0, 1, 1, 0, 0, 0, 1, 0, 99], np.int32)
    tables = [normal(rows, 96).astype(np.float16) for rows in (30, 12, 2)]
    calls: list[tuple[Operator, tuple[Array, ...]]] = [
        (AddLayerNorm(96, 1e-5), (x.astype(np.float16), gamma, beta)),
        (EmbedLayerNorm(96, 1e-5), (ids, places, types, *tables, gamma, beta)),
    ]
    for op, inputs in calls:
        exact = residual.astype(np.float64)
        wide = [array if array.dtype == np.int32 else array.astype(np.float64) for array in inputs]
        CpuBackend().run(op, exact, exact, *wide, count(8))
        sums = residual.copy()
        out = run(op, np.empty((9, 96), np.float16), sums, *inputs, count(8))
        assert sums.dtype == np.float32
        assert_close(sums[:8], exact[:8], 16 * EPS32 * (np.abs(gamma) * 8 + np.abs(beta)))
        assert np.array_equal(out[:8], sums[:8].astype(np.float16))
        # The last row is not counted: not even its ids, which are in no table, are looked at.
        assert np.array_equal(sums[8], residual[8]) and np.isnan(out[8]).all()


def test_embed_layer_norm_takes_the_right_rows() -> None:
    word, position, token_type = normal(30, 64), normal(12, 64), normal(2, 64)
    gamma, beta = normal(2, 64)
    ids, places, types = (np.array(rows, np.int32) for rows in ([3, 29, 0, 3], [0, 11, 5, 2], [0, 1, 1, 0]))
    outputs = []
    for dtype in (np.float32, np.float64):
        out = np.full((4, 64), np.nan, dtype)
        weights = (array.astype(dtype) for array in (word, position, token_type, gamma, beta))
        CpuBackend().run(EmbedLayerNorm(64, 1e-12), out, out, ids, places, types, *weights, count(4))
        outputs.append(out)
    rows = (word[ids].astype(np.float64) + token_type[types]) + position[places]
    centered = rows - rows.mean(1, keepdims=True)
    expected = centered / np.sqrt(centered.var(1, keepdims=True) + 1e-12) * gamma + beta
    assert_close(outputs[1], expected, 1e-12)
    assert_close(outputs[0], expected, 16 * EPS32 * (np.abs(gamma) * 8 + np.abs(beta)))


def pooled(rows: Array, mode: PoolMode) -> Array:
    """sentence-transformers' definitions, all tokens taking part."""
    rows = rows.astype(np.float64)
    places = np.arange(1, len(rows) + 1)[:, None]
    vectors: dict[PoolMode, Array] = {
        "cls": rows[0],
        "max": rows.max(axis=0),
        "mean": rows.mean(axis=0),
        "mean_sqrt_len_tokens": rows.sum(axis=0) / np.sqrt(len(rows)),
        "weightedmean": (rows * places).sum(axis=0) / places.sum(),
        "lasttoken": rows[-1],
    }
    return vectors[mode]


@pytest.mark.parametrize("mode", POOL_MODES)
@pytest.mark.parametrize("lengths", [[1], [3, 64, 65, 1], [700]])
def test_pool(lengths: list[int], mode: PoolMode) -> None:
    tokens, num_texts = sum(lengths), len(lengths)
    hidden, cu_seqlens = normal(tokens, 48) + 1, np.cumsum([0, *lengths, 0, 0]).astype(np.int32)
    texts = [hidden[start:end] for start, end in pairwise(cu_seqlens[: num_texts + 1])]
    got, _ = both(Pool(48, mode), (num_texts + 2, 48), hidden, cu_seqlens, np.zeros(num_texts + 2, np.int32))
    # A product, 64 additions in a block, then one for each block, then the division.
    bound = [(64 + len(text) // 64 + 3) * EPS32 * pooled(np.abs(text), mode) for text in texts]
    assert_close(got[:num_texts], np.stack([pooled(text, mode) for text in texts]), np.stack(bound))
    assert np.isnan(got[num_texts:]).all(), "an empty text was written"


@pytest.mark.parametrize("mode", POOL_MODES)
def test_pool_leaves_first_tokens_out_and_fills_its_block(mode: PoolMode) -> None:
    hidden, cu_seqlens = normal(11, 8), np.array([0, 7, 11], np.int32)
    spoiled = hidden.copy()
    spoiled[[0, 1, 2, 7]] = np.nan
    first_pooled = np.array([3, 1], np.int32)
    out = run(Pool(8, mode, 3, 1), np.empty((2, 24), np.float32), spoiled, cu_seqlens, first_pooled)
    assert np.isnan(out[:, :8]).all() and np.isnan(out[:, 16:]).all()
    for row, first, end in ((0, 3, 7), (1, 8, 11)):
        rows = hidden[first:end].astype(np.float64)
        want = pooled(rows, mode)
        if mode == "weightedmean":  # by places in the whole text
            places = np.arange(first - cu_seqlens[row], end - cu_seqlens[row])[:, None] + 1
            want = (rows * places).sum(axis=0) / places.sum()
        assert_close(out[row, 8:16], want, 8 * EPS32 * np.abs(rows).sum(axis=0))


@pytest.mark.parametrize("activation", ["none", "tanh"])
def test_dense(activation: DenseActivation) -> None:
    x, weight, bias = normal(7, 40), normal(24, 40), normal(24)
    got, _ = both(Dense(40, 24, activation), (9, 24), np.pad(x, ((0, 2), (0, 0))), weight, bias, count(7))
    exact = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
    bound = 42 * EPS32 * (np.abs(x) @ np.abs(weight.T) + np.abs(bias))
    assert_close(got[:7], np.tanh(exact) if activation == "tanh" else exact, bound + 2 * EPS32)


def test_gather_rows() -> None:
    x, rows = normal(9, 48), np.array([8, 0, 3, 8, 99], np.int32)
    got = run(GatherRows(48, DType.F32), np.empty((5, 48), np.float32), x, rows, count(4))
    assert np.array_equal(got[:4], x[rows[:4]]) and np.isnan(got[4]).all()


def test_gather_rows_of_no_text_copies_nothing() -> None:
    got = run(GatherRows(48, DType.F32), np.empty((3, 48), np.float32), normal(9, 48), np.zeros(4, np.int32), count(0))
    assert np.isnan(got).all()


def test_l2_normalize() -> None:
    x = normal(6, 100)
    x[2] = 0
    x[3] *= np.float32(1e-15)
    got, wide = both(L2Normalize(100), (6, 100), x)
    assert_close(wide, torch.nn.functional.normalize(torch.from_numpy(x.astype(np.float64))).numpy(), 1e-15)
    assert_close(got, wide, 16 * EPS32)
    assert not got[2].any()


def test_cast_agrees_with_torch_on_every_16_bit_value() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    as_bf16 = run(Cast(DType.BF16, DType.F32), np.empty(bits.shape, np.float32), bits)
    assert np.array_equal(as_bf16, torch.from_numpy(bits).view(torch.bfloat16).float().numpy(), equal_nan=True)
    as_f16 = run(Cast(DType.F16, DType.F32), np.empty(bits.shape, np.float32), bits.view(np.float16))
    assert np.array_equal(as_f16, torch.from_numpy(bits).view(torch.float16).float().numpy(), equal_nan=True)


def test_cast_rounds_to_nearest_even() -> None:
    halves = (np.arange(1 << 16, dtype=np.uint32) << 16) | np.uint32(0x8000)
    extremes = np.array([np.inf, -np.inf, 3.4e38, 1e-40], np.float32)
    x = np.concatenate([halves.view(np.float32), normal(5000), extremes])
    out = np.empty(x.shape, np.uint16)
    CpuBackend().run(Cast(DType.F32, DType.BF16), out, x)
    expected = torch.from_numpy(x).bfloat16().view(torch.uint16).numpy()
    finite = ~np.isnan(x)
    assert np.array_equal(out[finite], expected[finite])
    back = run(Cast(DType.BF16, DType.F32), np.empty(x.shape, np.float32), out)
    assert np.isnan(back[~finite]).all()


def test_cast_to_tf32_rounds_ties_away_from_zero() -> None:
    max_tf32 = np.float32(2.0**128 - 2.0**117)
    edges = [0.0, 1 + 2.0**-11, 1 + 2.0**-11 - 2.0**-23, 1 + 3 * 2.0**-11, 2 - 2.0**-11, max_tf32, np.inf]
    # Half-way to what overflows, and just below it; the smallest f32; half-way between the smallest of tf32.
    overflowing = max_tf32 + np.float32(2.0**116)
    edges += [overflowing, np.nextafter(overflowing, np.float32(0)), 2.0**-149, 2.0**-137, 3 * 2.0**-137]
    spread = np.ldexp(normal(5000), RNG.integers(-150, 124, 5000))
    magnitudes = np.abs(np.concatenate([np.array(edges, np.float32), spread.astype(np.float32)]))
    x = np.concatenate([magnitudes, -magnitudes])
    # 11 digits from the first one on, or from that of the smallest normal number.
    unit = np.exp2(np.maximum(np.frexp(x.astype(np.float64))[1], -125) - 11)
    finite = np.isfinite(x)
    with np.errstate(over="ignore"):
        expected = np.copysign(np.floor(np.abs(x[finite]) / unit[finite] + 0.5) * unit[finite], x[finite]).astype("f4")
    out = narrowed(x, DType.TF32).view(np.uint32)
    assert np.array_equal(out[finite], expected.view(np.uint32))
    assert np.array_equal(out[~finite], x[~finite].view(np.uint32))
    assert not (out & 0x1FFF).any()


def test_cast_to_tf32_keeps_nan() -> None:
    mantissas = np.array([1, 0x1000, 0x1FFF, 0x2000, 0x3FFFFF, 0x400000, 0x7FF000, 0x7FFFFF], np.uint32)
    nan = np.concatenate([mantissas | 0x7F800000, mantissas | 0xFF800000]).view(np.float32)
    assert np.isnan(widened(narrowed(nan, DType.TF32))).all()


COUNT = ((1,), "i4")
CONTRACTS: list[tuple[Operator, list[tuple[tuple[int, ...], Any]]]] = [
    (Linear(8, 4), [((3, 4), "f4"), ((3, 8), "f4"), ((4, 8), "f4"), ((4,), "f4"), COUNT]),
    (Attention(2, 4), [((3, 8), "f4"), ((3, 24), "f4"), ((2, 3), "i4")]),
    (AddLayerNorm(8, 1e-5), [((3, 8), "f4"), ((3, 8), "f4"), ((3, 8), "f4"), ((8,), "f4"), ((8,), "f4"), COUNT]),
    (
        EmbedLayerNorm(8, 1e-5),
        [*[((3, 8), "f4")] * 2, *[((3,), "i4")] * 3, *[((5, 8), "f4")] * 3, ((8,), "f4"), ((8,), "f4"), COUNT],
    ),
    (Pool(8), [((2, 8), "f4"), ((3, 8), "f4"), ((3,), "i4"), ((2,), "i4")]),
    (Dense(8, 4), [((2, 4), "f4"), ((2, 8), "f4"), ((4, 8), "f4"), ((4,), "f4"), ((1,), "i4")]),
    (GatherRows(8, DType.F32), [((2, 8), "f4"), ((3, 8), "f4"), ((3,), "i4"), COUNT]),
    (L2Normalize(8), [((2, 8), "f4"), ((2, 8), "f4")]),
    (Cast(DType.F16, DType.F32), [((2, 8), "f4"), ((2, 8), "f2")]),
    (Split(DType.F16), [((2, 8), "u4"), ((2, 8), "f2")]),
    (RowBounds(8), [((1,), "f4"), ((2, 8), "u4")]),
]


@pytest.mark.parametrize(("op", "signature"), CONTRACTS, ids=[op.name for op, _ in CONTRACTS])
def test_the_contract_names_the_tensor_that_does_not_fit(
    op: Operator, signature: list[tuple[tuple[int, ...], Any]]
) -> None:
    tensors = [np.zeros(shape, dtype) for shape, dtype in signature]
    scalars = (3,) if op.name == "attention" else ()
    if op.name.endswith("layer_norm"):
        with pytest.raises(ShapeError, match="expected the same tensor"):
            op.check(*tensors)
        tensors[0] = tensors[1]
    op.check(*tensors, *scalars)
    for index, tensor in enumerate(tensors):
        wrong_dtype = [*tensors]
        wrong_dtype[index] = tensor.astype(np.int64)
        with pytest.raises(DtypeError, match=f"^{op.name}: `"):
            op.check(*wrong_dtype, *scalars)
        wrong_rank = [*tensors]
        wrong_rank[index] = tensor[None]
        if op.name != "cast":  # of one shape, whichever it is
            with pytest.raises(ShapeError, match=f"^{op.name}: `"):
                op.check(*wrong_rank, *scalars)
    with pytest.raises(ShapeError, match=r"out|bound"):
        op.check(np.zeros((7, *tensors[0].shape[1:]), tensors[0].dtype), *tensors[1:], *scalars)


# What is launched


ARCHS = (75, 80, 90, 100, 120)


def tensor(dtype: DType, *shape: int) -> Tensor:
    """One that is never read: a launch is made of shapes."""
    return Tensor(0, shape, dtype)


@pytest.mark.parametrize(
    ("dtype", "arch"), [*product((DType.F32, DType.F16, DType.BF16, DType.TF32), ARCHS), (DType.SPLIT, 90)]
)
def test_a_launch_of_linear_names_one_of_the_plan_s_kernels_and_covers_the_capacity(dtype: DType, arch: int) -> None:
    plan = Linear(384, 1152).plan(dtype, arch)
    weight, bias, num_rows = tensor(dtype, 1152, 384), tensor(DType.F32, 1152), tensor(DType.I32, 1)
    launched = set()
    for rows in (1, 16, 17, 64, 100, 200, 512, 513, 16384):
        launch = plan.launch(tensor(dtype, rows, 1152), tensor(dtype, rows, 384), weight, bias, num_rows)
        launched.add(launch.spec)
        defines = dict(launch.spec.defines)
        tiles = [-(-size // int(defines[f"BLOCK_{axis}"])) for axis, size in (("M", rows), ("N", 1152))]
        # A kernel whose blocks share out the tiles is told of all of them, and the device's size sets how many blocks.
        assert launch.grid == (math.prod(tiles), 1, 1)
        assert launch.persistent == launch.spec.name.startswith("linear_wgmma")
    # What is compiled at load is what can be launched, and no more.
    assert launched == set(plan.specs) and len(plan.specs) == len(launched)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16, DType.TF32, DType.SPLIT])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize("max_distance", [None, 20])
def test_each_block_size_of_attention_has_its_kernel(
    head_dim: int, dtype: DType, arch: int, max_distance: int | None
) -> None:
    op = Attention(3, head_dim, max_distance=max_distance)
    bias = () if max_distance is None else (tensor(DType.F32, 3, 41),)
    plan, sizes = op.plan(dtype, arch), op.block_sizes(dtype, arch)
    assert list(sizes) == sorted(set(sizes))
    on_wgmma = arch == 90 and head_dim in (64, 128) and dtype in (DType.F16, DType.BF16)
    on_mma_split = arch == 90 and head_dim in (32, 64) and dtype is DType.SPLIT
    assert len(sizes) == (2 if (on_wgmma or on_mma_split) and not bias else 1)
    out, qkv = tensor(dtype, 100, 3 * head_dim), tensor(dtype, 100, 9 * head_dim)
    launches = [plan.launch(out, qkv, tensor(DType.I32, 7, 3), size, *bias) for size in sizes]
    assert tuple(launch.spec for launch in launches) == plan.specs
    for launch, size in zip(launches, sizes, strict=True):
        assert launch.grid == (7, 3, 1) and not launch.persistent
        assert dict(launch.spec.defines)["BLOCK_Q"] == size
        assert dict(launch.spec.defines).get("MAX_DISTANCE") == max_distance
        assert all(given in launch.arguments for given in bias)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
def test_attention_s_factors_take_the_scales_of_split_tensors_out(head_dim: int) -> None:
    op = Attention(3, head_dim)
    out, qkv = tensor(DType.SPLIT, 100, 3 * head_dim).scaled(64.0), tensor(DType.SPLIT, 100, 9 * head_dim).scaled(8.0)
    for block_q in op.block_sizes(DType.SPLIT, 90):
        launch = op.plan(DType.SPLIT, 90).launch(out, qkv, tensor(DType.I32, 7, 3), block_q)
        base = 1.0 if launch.spec.name == "attention_plain" else math.log2(math.e)
        assert launch.arguments[-2:] == (base / math.sqrt(head_dim) / 64, 8.0)


def test_the_cpu_has_one_block_size() -> None:
    assert {Attention(3, dim).block_sizes(DType.F32, 0) for dim in (32, 80, 128)} == {(256,)}


# Parts of a workspace


def test_a_view_is_another_shape_at_an_element_of_the_same_memory() -> None:
    buffer = Tensor(1024, (100,), DType.F32)
    assert buffer.view((4, 5)) == Tensor(1024, (4, 5), DType.F32)
    assert buffer.view((4, 5), 80) == Tensor(1024 + 4 * 80, (4, 5), DType.F32)
    assert Tensor(1024, (100,), DType.F16).view((2,), 3) == Tensor(1030, (2,), DType.F16)
    for shape, start in (((101,), 0), ((4, 5), 81), ((1,), -1)):
        with pytest.raises(ValueError, match=f"does not fit at element {start}"):
            buffer.view(shape, start)
    numbers = np.arange(100, dtype=np.float32)
    part = CpuBackend().view(numbers, (4, 5), 80)
    assert np.array_equal(part, np.arange(80, 100).reshape(4, 5)) and np.shares_memory(part, numbers)
