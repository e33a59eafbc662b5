"""The chain that a placement's time is the sum of."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from operator_instances import built, cases
from operator_oracle import Case
from profiles import examples

from stagewright.formulations.operators.check import critical_chain
from stagewright.solvers.operators.search import METHODS


@pytest.mark.parametrize("method", ["dpos", "heft", "m-etf"])
@examples(60)
@given(case=cases(most=6))
def test_the_chain_is_as_long_as_the_plan(method, case):
    problem = built(case)
    found = METHODS[method](problem)
    chain = critical_chain(problem, found)
    assert found.finish[chain[-1]] == found.end
    spent = sum(float(found.finish[i] - found.start[i]) for i in chain)
    for i, j in pairwise(chain):
        spent += link(problem, found, i, j)
    assert spent == pytest.approx(found.end)


def link(problem, found, i, j):
    """Seconds of the transfer between two of the chain; fails if j did not wait for i."""
    if found.device[i] == found.device[j]:
        assert found.finish[i] == pytest.approx(found.start[j])
        return 0.0
    maker, reader, tensor = problem.edges
    read = set(tensor[(maker == i) & (reader == j)].tolist())
    seconds = [
        float(finish - start)
        for t, target, start, finish in zip(
            found.sent, found.target, found.sent_start, found.sent_finish, strict=True
        )
        if int(t) in read and target == found.device[j] and np.isclose(finish, found.start[j])
    ]
    assert seconds
    return seconds[0]


def test_a_transfer_that_waits_for_another_follows_what_was_sent_before():
    # Both outputs of 0 and 1 go from device 0 to device 1; the second waits for the first.
    case = Case(
        [[1, 9], [1, 9], [20, 1], [20, 1]],
        [(0, 5, 5, [2]), (1, 5, 5, [3])],
        [[0, 0], [0, 0]],
        [[0, 1], [1, 0]],
        contention="exclusive",
    )
    problem = built(case)
    found = METHODS["heft"](problem)
    assert found.end == 12
    names = [problem.names[i] for i in critical_chain(problem, found)]
    assert names == ["o0", "o3"]
