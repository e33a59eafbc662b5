"""Random problems of placed operators, tiny enough for the oracle."""

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
