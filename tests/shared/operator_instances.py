"""Random problems of placed operators: tiny ones for the oracle, larger ones of several shapes."""

import numpy as np
from hypothesis import strategies as st
from operator_oracle import Case

from stagewright.formulations.operators.problem import OperatorProblem


def built(case):
    """The problem of an oracle's case."""
    n, m = case.n, case.m
    tensors = sorted(case.tensors, key=lambda row: row[0])
    makers = [row[0] for row in tensors]
    rows = [sorted(row[3]) for row in tensors]
    memory = [1e9] * m if case.memory is None else case.memory
    _, group = np.unique(case.group, return_inverse=True)
    return OperatorProblem(
        names=tuple(f"o{i}" for i in range(n)),
        devices=tuple(f"d{d}" for d in range(m)),
        seconds=np.array(case.seconds, dtype=float).reshape(n, m),
        maker=np.array(makers, dtype=np.int64),
        output=np.array([makers[:t].count(i) for t, i in enumerate(makers)], dtype=np.int64),
        first_reader=np.cumsum([0, *map(len, rows)], dtype=np.int64),
        reader=np.array([j for row in rows for j in row], dtype=np.int64),
        sent_bytes=np.array([row[1] for row in tensors], dtype=float),
        held_bytes=np.array([row[2] for row in tensors], dtype=float),
        latency=np.array(case.latency, dtype=float),
        seconds_per_byte=np.array(case.rate, dtype=float),
        state_bytes=np.array(case.state, dtype=float),
        memory=np.array(memory, dtype=float),
        group=group.astype(np.int64),
        contention=case.contention,
    )


@st.composite
def cases(draw, most=5, devices=3, contention="none", memory=False, identical=False):
    """Whole numbers, up to ``most`` operators; with memory the limits are often active."""
    n, m = draw(st.integers(1, most)), draw(st.integers(2, devices))
    few = st.integers(0, 2 if memory else 4)

    def square(values):
        rows = [[draw(values) for _ in range(m)] for _ in range(m)]
        return [
            [0 if i == j else entry for j, entry in enumerate(row)] for i, row in enumerate(rows)
        ]

    if identical:
        times = [[draw(few)] * m for _ in range(n)]
        latency = [[0] * m for _ in range(m)]
        rate = [[int(i != j) for j in range(m)] for i in range(m)]
    else:
        times = [[draw(few) for _ in range(m)] for _ in range(n)]
        latency, rate = square(st.integers(0, 1)), square(st.integers(0, 2))
    tensors = []
    for i in range(n):
        readers = draw(st.sets(st.integers(i + 1, n - 1), max_size=3)) if i < n - 1 else set()
        for some in (readers, draw(st.sets(st.sampled_from(sorted(readers)))) if readers else ()):
            if some or draw(st.booleans()):
                amount = draw(st.integers(0, 2))
                tensors.append((i, amount, draw(st.sampled_from([0, amount])), sorted(some)))
    group = [draw(st.integers(0, i)) if draw(st.integers(0, 4)) == 0 else i for i in range(n)]
    group = [group[g] for g in group]
    state = [draw(st.integers(0, 2)) for _ in range(n)] if memory else None
    limits = [draw(st.integers(1, 6)) for _ in range(m)] if memory else None
    return Case(times, tensors, latency, rate, contention, state, limits, group)


def random_problem(n, m, seed, ratio=1.0, shape="layered", contention="none", kinds=1):
    """A DAG of ``n`` operators; ``ratio`` is mean communication over mean computation."""
    rng = np.random.default_rng(seed)
    readers = SHAPES[shape](n, rng)
    base = rng.uniform(1, 10, (n, 1))
    speed = (
        np.ones((n, m)) if kinds == 1 else rng.uniform(0.5, 2, (n, kinds))[:, np.arange(m) % kinds]
    )
    sent = rng.uniform(0, 2, n) * 5.5 * ratio
    apart = 1.0 - np.eye(m)
    rows = [sorted(row) for row in readers]
    return OperatorProblem(
        names=tuple(f"o{i}" for i in range(n)),
        devices=tuple(f"d{d}" for d in range(m)),
        seconds=base * speed,
        maker=np.arange(n),
        output=np.zeros(n, dtype=np.int64),
        first_reader=np.cumsum([0, *map(len, rows)], dtype=np.int64),
        reader=np.array([j for row in rows for j in row], dtype=np.int64),
        sent_bytes=sent,
        held_bytes=sent,
        latency=np.zeros((m, m)),
        seconds_per_byte=apart,
        state_bytes=np.ones(n),
        memory=np.full(m, 1e9),
        group=np.arange(n),
        contention=contention,
    )


def _layered(n, rng):
    """Layers of 1 to 6 operators, each reads one to three of the layer before."""
    readers, before, at = [set() for _ in range(n)], [], 0
    while at < n:
        layer = [*range(at, min(n, at + int(rng.integers(1, 7))))]
        for j in layer if before else ():
            for i in rng.choice(before, size=min(len(before), int(rng.integers(1, 4)))):
                readers[i].add(j)
        before, at = layer, layer[-1] + 1
    return readers


def _random(n, rng):
    readers = [set() for _ in range(n)]
    for j in range(1, n):
        for i in rng.integers(max(0, j - 12), j, int(rng.integers(1, 4))):
            readers[i].add(j)
    return readers


def _forks(n, rng):
    """Parallel chains that fork from one operator and join in the last."""
    readers, ends = [set() for _ in range(n)], [0] * 4
    for j in range(1, n - 1):
        k = int(rng.integers(0, 4))
        readers[ends[k]].add(j)
        ends[k] = j
    for i in ends:
        readers[i].add(n - 1)
    return readers


def _training(n, rng):
    """A chain forward, a chain backward that reads it, and updates that end there."""
    third = n // 3
    readers = [set() for _ in range(n)]
    for i in range(third):
        readers[i].add(i + 1)
        backward = 2 * third - 1 - i
        if backward > i:
            readers[i].add(backward)
        if i + third + 1 < 2 * third:
            readers[third + i].add(third + i + 1)
        if 2 * third + i < n:
            readers[third + i].add(2 * third + i)
    return readers


SHAPES = {"layered": _layered, "random": _random, "forks": _forks, "training": _training}
