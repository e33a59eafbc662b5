"""The best options within a capacity, against every choice and against every whole capacity."""

from itertools import pairwise, product
from math import inf

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from stagewright.solvers.dags.knapsack import choose

ITEMS = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4),
    min_size=1,
    max_size=6,
)


@examples(400)
@given(items=ITEMS, capacity=st.integers(0, 40), most=st.sampled_from([3.0, 12.0, inf]))
def test_the_best_options_equal_every_choice(items, capacity, most):
    fitting = [one for one in product(*items) if sum(size for _, size in one) <= capacity]
    right = min((sum(time for time, _ in one) for one in fitting), default=inf)
    first = np.cumsum([0, *map(len, items)])
    time, size = np.array([one for its in items for one in its], dtype=float).T.copy()
    chosen = choose(first, time, size, float(capacity), most)
    if right == inf or right > most:
        assert not len(chosen)
        return
    assert all(a <= o < b for a, o, b in zip(first[:-1], chosen, first[1:], strict=True))
    assert time[chosen].sum() == right
    assert size[chosen].sum() <= capacity


@examples(400)
@given(seed=st.integers(0, 10**6))
def test_the_best_options_of_more_items(seed):
    """Against the least time for every whole capacity."""
    random = np.random.default_rng(seed)
    counts = random.integers(1, 4, 12)
    first = np.cumsum([0, *counts])
    time, size = random.integers(1, 60, (2, first[-1])).astype(float)
    capacity = int(random.integers(12, 60) * 6)
    best = np.zeros(capacity + 1)
    for a, b in pairwise(first):
        rows = [np.full(capacity + 1, inf) for _ in range(a, b)]
        for row, o in zip(rows, range(a, b), strict=True):
            row[int(size[o]) :] = time[o] + best[: capacity + 1 - int(size[o])]
        best = np.min(rows, axis=0)
    assert not len(choose(first, time, size, float(capacity), best[capacity] - 1))
    for most in (best[capacity], inf) if best[capacity] < inf else ():
        chosen = choose(first, time, size, float(capacity), most)
        assert time[chosen].sum() == best[capacity]
        assert size[chosen].sum() <= capacity
