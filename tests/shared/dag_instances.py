"""Tiny operator graphs to divide, and the least largest load by every assignment."""

from itertools import product
from math import inf

import numpy as np
from hypothesis import strategies as st

from stagewright.formulations.dags.problem import DagProblem, DevicePool, Tensor


@st.composite
def problems(draw, most=6):
    """Whole numbers; many parts without time, tensors of several parts, memory that binds."""
    n = draw(st.integers(1, most))
    few = st.integers(0, 3)
    edges = [(a, b) for b in range(n) for a in range(b) if draw(st.integers(0, 2)) == 0]
    tensors = []
    for a in range(n):
        readers = [b for x, b in edges if x == a]
        if readers:
            chosen = draw(st.sets(st.sampled_from(readers), min_size=1))
            tensors.append(Tensor((a, *sorted(chosen)), float(draw(few))))
    if n > 2 and draw(st.booleans()):  # as of a backward, which goes against the edges
        tensors.append(Tensor(tuple(sorted(draw(st.sets(
            st.integers(0, n - 1), min_size=2, max_size=3)))), float(draw(few))))  # fmt: skip
    hosts = draw(st.integers(0, 1))
    seconds = [[draw(few), 0] for _ in range(n)]
    for row in seconds:
        row[1] = row[0] * draw(st.integers(1, 3))
    held = [draw(few) for _ in range(n)]
    memory = draw(st.sampled_from([inf, 3.0, 5.0]))
    pools = (
        DevicePool("gpu", draw(st.integers(1, 3)), memory),
        DevicePool("host", hosts, inf, False),
    )
    place = draw(st.permutations(range(n)))  # parts need not be numbered in a topological order
    return DagProblem(
        tuple(f"p{i}" for i in range(n)),
        tuple((place[a], place[b]) for a, b in edges),
        np.array(seconds, dtype=float)[np.argsort(place)],
        np.array(held, dtype=float)[np.argsort(place)],
        tuple(Tensor(tuple(place[i] for i in one.parts), one.seconds) for one in tensors),
        pools,
    )


def least(problem):
    """The least largest load, by every assignment of parts to devices."""
    devices = [k for k, pool in enumerate(problem.pools) for _ in range(pool.count)]
    n, best = len(problem.names), inf
    for home in product(range(len(devices)), repeat=n):
        if not _is_ordered(problem, home):
            continue
        worst = 0.0
        for d, k in enumerate(devices):
            own = [i for i in range(n) if home[i] == d]
            if sum(problem.bytes[i] for i in own) > problem.pools[k].memory:
                worst = inf
            load = sum(problem.seconds[i][k] for i in own)
            if problem.pools[k].pays_transfers:
                for tensor in problem.tensors:
                    there = [i for i in tensor.parts if home[i] == d]
                    if there and len(there) < len(tensor.parts):
                        load += tensor.seconds
            worst = max(worst, load)
        best = min(best, worst)
    return best


def _is_ordered(problem, home):
    """Whether devices can be ordered so that no edge goes back: repeatedly take one off."""
    arcs = {(home[a], home[b]) for a, b in problem.edges if home[a] != home[b]}
    left = set(home)
    while left:
        free = [d for d in left if not any(b == d and a in left for a, b in arcs)]
        if not free:
            return False
        left -= set(free)
    return True
