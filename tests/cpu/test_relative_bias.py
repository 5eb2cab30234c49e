"""The buckets of distances are T5's and MPNet's own in transformers, and a table spreads their values out."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
from transformers.models.t5.modeling_t5 import T5Attention

from embed.relative_bias import MAX_DISTANCE, bias_table, relative_buckets

DISTANCES = np.arange(-512, 513)
# transformers does not type these.
mpnet_buckets: Any = MPNetEncoder.relative_position_bucket
t5_buckets: Any = T5Attention._relative_position_bucket


@pytest.mark.parametrize("num_buckets", [4, 5, 6, 16, 31, 32, 64, 100, 256])
def test_buckets_are_mpnet_s_at_any_distance(num_buckets: int) -> None:
    theirs = mpnet_buckets(torch.from_numpy(DISTANCES), num_buckets=num_buckets).numpy()
    ours = relative_buckets(num_buckets)[np.clip(DISTANCES, -MAX_DISTANCE, MAX_DISTANCE) + MAX_DISTANCE]
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (32, 20), (12, 64), (48, 500)])
def test_buckets_are_t5_s_at_any_distance(num_buckets: int, max_distance: int) -> None:
    theirs = t5_buckets(
        torch.from_numpy(DISTANCES), bidirectional=True, num_buckets=num_buckets, max_distance=max_distance
    ).numpy()
    ours = relative_buckets(num_buckets, max_distance)[np.clip(DISTANCES, -max_distance, max_distance) + max_distance]
    assert np.array_equal(ours, theirs)


def test_a_table_has_a_row_for_each_head_from_keys_long_before_to_keys_long_after() -> None:
    values = np.arange(32 * 3, dtype=np.float32).reshape(32, 3)
    table = bias_table(values)
    assert table.dtype == np.float32 and table.flags.c_contiguous and table.shape == (3, 2 * MAX_DISTANCE + 1)
    # The key long before the query, the one before it, itself, the one after it, and the one long after it.
    places = [0, MAX_DISTANCE - 1, MAX_DISTANCE, MAX_DISTANCE + 1, -1]
    assert np.array_equal(table[:, places], values[[15, 1, 0, 17, 31]].T)
