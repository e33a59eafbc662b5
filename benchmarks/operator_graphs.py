"""Random DAGs of operators in several shapes."""

import numpy as np

from stagewright.formulations.operators.problem import Contention, OperatorProblem

Readers = list[set[int]]


def random_problem(
    n: int,
    m: int,
    seed: int,
    ratio: float = 1.0,
    shape: str = "layered",
    contention: Contention = "none",
    kinds: int = 1,
) -> OperatorProblem:
    """A DAG of ``n`` operators; ``ratio`` is mean communication over mean computation.

    Times are from 1 to 10 s; each kind of device, if there are several, halves to doubles them.
    """
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


def _layered(n: int, rng: np.random.Generator) -> Readers:
    """Layers of 1 to 6 operators, each reads one to three of the layer before."""
    readers: Readers = [set() for _ in range(n)]
    before: list[int] = []
    at = 0
    while at < n:
        layer = [*range(at, min(n, at + int(rng.integers(1, 7))))]
        for j in layer if before else ():
            for i in rng.choice(before, size=min(len(before), int(rng.integers(1, 4)))):
                readers[i].add(j)
        before, at = layer, layer[-1] + 1
    return readers


def _random(n: int, rng: np.random.Generator) -> Readers:
    readers: Readers = [set() for _ in range(n)]
    for j in range(1, n):
        for i in rng.integers(max(0, j - 12), j, int(rng.integers(1, 4))):
            readers[i].add(j)
    return readers


def _forks(n: int, rng: np.random.Generator) -> Readers:
    """Parallel chains that fork from one operator and join in the last."""
    readers: Readers = [set() for _ in range(n)]
    ends = [0] * 4
    for j in range(1, n - 1):
        k = int(rng.integers(0, 4))
        readers[ends[k]].add(j)
        ends[k] = j
    for i in ends:
        readers[i].add(n - 1)
    return readers


def _training(n: int, rng: np.random.Generator) -> Readers:
    """A chain forward, a chain backward that reads it, and updates that end there."""
    third = n // 3
    readers: Readers = [set() for _ in range(n)]
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
