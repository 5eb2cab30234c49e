"""A bias of attention's scores by the distance from query to key, which distances share in T5's buckets."""

import numpy as np
from numpy.typing import NDArray

MAX_DISTANCE = 128
"""At this distance at the latest the last bucket begins, which has no end. No config.json names it: it is code."""


def relative_buckets(num_buckets: int, max_distance: int = MAX_DISTANCE) -> NDArray[np.intp]:
    """The bucket of each distance, key - query, from -max_distance to max_distance: (2 * max_distance + 1,).

    The second half of the buckets is for keys after the query. Of each half, the first half has one distance each, and
    the others grow by a constant factor up to max_distance. `num_buckets` is 4 to 4 * max_distance - 1.
    Source: Raffel et al. 2020, "Exploring the limits of transfer learning", 2.1, and T5's code.
    """
    half = num_buckets // 2
    num_single = half // 2
    num_shared = half - num_single
    steps = range(1, num_shared)

    def bucket(distance: int) -> int:
        if distance < num_single:
            return distance
        # A bucket begins at (distance / num_single) ** num_shared >= (max_distance / num_single) ** step. In integers:
        # of 32 buckets three begin at equality, 16, 32 and 64, where a logarithm's last bit would decide.
        power, single_power = distance**num_shared, num_single**num_shared
        begun = [step for step in steps if power * num_single**step >= single_power * max_distance**step]
        return num_single + len(begun)

    before = np.array([bucket(distance) for distance in range(max_distance + 1)])
    return np.concatenate([before[::-1], half + before[1:]])


def bias_table(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """What `Attention` takes, (num_heads, 2 * MAX_DISTANCE + 1), of the buckets' values, (num_buckets, num_heads)."""
    return np.ascontiguousarray(values[relative_buckets(len(values))].T)
