"""DPOS and its peers: published results, rules, theorems, relations."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from operator_instances import built, cases
from operator_oracle import Case, shortest
from profiles import examples

from benchmarks.operator_graphs import SHAPES, random_problem
from stagewright.formulations.operators.bounds import critical_path
from stagewright.solvers.operators.greedy import favourite_children, m_etf, m_sct, m_topo, single
from stagewright.solvers.operators.insertion import (
    cpop,
    critical_devices,
    dpos,
    heft,
    mean_ranks,
    peft,
)
from stagewright.solvers.operators.ranks import arrays_of, transfers, upward

METHODS = (dpos, heft, cpop, peft, m_etf, m_sct, m_topo, single)

# Figure 2 of Topcuoglu et al.: a 10-task graph, its times on 3 processors, its transfers.
TIMES = [
    [14, 16, 9], [13, 19, 18], [11, 13, 19], [13, 8, 17], [12, 13, 10],
    [13, 16, 9], [7, 15, 11], [5, 11, 14], [18, 12, 20], [21, 7, 16],
]  # fmt: skip
EDGES = [
    (1, 2, 18), (1, 3, 12), (1, 4, 9), (1, 5, 11), (1, 6, 14), (2, 8, 19), (2, 9, 16), (3, 7, 23),
    (4, 8, 27), (4, 9, 23), (5, 9, 13), (6, 8, 15), (7, 10, 17), (8, 10, 11), (9, 10, 13),
]  # fmt: skip


def published():
    """Each transfer is a tensor with one reader."""
    apart = [[int(i != j) for j in range(3)] for i in range(3)]
    tensors = [(i - 1, wait, 0, [j - 1]) for i, j, wait in EDGES]
    return built(Case(TIMES, tensors, [[0] * 3] * 3, apart))


def test_the_graph_of_heft():
    """Table 1 (ranks) and figure 3: HEFT 80, CPOP 86."""
    problem = published()
    ranks = [108, 77, 80, 80, 69, 63.333, 42.667, 35.667, 44.333, 14.667]
    assert mean_ranks(problem).tolist() == pytest.approx(ranks, abs=1e-3)
    assert problem.evaluate(heft(problem)) == 80
    assert problem.evaluate(cpop(problem)) == 86


@examples(150)
@given(cases())
def test_every_method_keeps_the_rules(case):
    problem = built(case)
    optimum = shortest(case)
    for method in METHODS:
        assert problem.evaluate(method(problem)) >= optimum, method.__name__


@examples(100)
@given(cases(most=4, devices=2, contention="exclusive", memory=True))
def test_what_methods_with_memory_find_fits(case):
    problem = built(case)
    for method in (dpos, heft, cpop, peft, m_etf, m_sct):
        found = method(problem)
        if found is not None:
            problem.evaluate(found)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_larger_graphs_and_twice_the_times(method, shape):
    problem = random_problem(120, 4, 3, 1.0, shape, "exclusive", kinds=2)
    twice = replace(
        problem, seconds=2 * problem.seconds, seconds_per_byte=2 * problem.seconds_per_byte
    )
    found = problem.evaluate(method(problem))
    assert twice.evaluate(method(twice)) == pytest.approx(2 * found)


def c_max(problem):
    """C_max: the most transfer time along any chain."""
    arrays = arrays_of(problem)
    return upward(arrays, np.zeros(len(problem.names)), transfers(problem, np.max)).max()


@examples(300)
@given(cases(most=6, devices=3, identical=True))
def test_etf_keeps_its_theorem(case):
    """Hwang et al. 1989, in the form that its proof gives; without groups."""
    problem = replace(built(case), group=np.arange(case.n))
    m, load = case.m, problem.seconds[:, 0].sum()
    most = load / m + (1 - 1 / m) * critical_path(problem) + c_max(problem)
    assert m_etf(problem).end <= most * (1 + 1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_etf_keeps_its_theorem_on_larger_graphs(shape):
    for seed in range(5):
        for ratio in (0, 0.1, 1):
            problem = random_problem(60, 3, seed, ratio, shape)
            load = problem.seconds[:, 0].sum()
            most = load / 3 + 2 / 3 * critical_path(problem) + c_max(problem)
            assert m_etf(problem).end <= most * (1 + 1e-9)


def test_critical_path_devices_change_when_memory_is_full():
    """State 4, 4, 4 on a path; devices of 9 and 5 bytes, the second one is faster."""
    case = Case(
        [[2, 1]] * 3, [(0, 0, 0, [1]), (1, 0, 0, [2])], [[0, 0], [0, 0]], [[0, 1], [1, 0]],
        "none", [4, 4, 4], [9, 5],
    )  # fmt: skip
    problem = built(case)
    assert critical_devices(problem, np.arange(3), 1.0).tolist() == [1, 0, 0]
    assert dpos(problem).device.tolist() == [1, 0, 0]
    assert dpos(replace(problem, memory=np.array([9.0, 3]))) is None


def test_a_favourite_child_stays_on_its_device():
    """a's tensor for b is large, c is small: m-SCT keeps the device for b."""
    case = Case(
        [[2, 2], [5, 5], [1, 1]],
        [(0, 9, 0, [1]), (0, 1, 0, [2])],
        [[0, 0], [0, 0]],
        [[0, 1], [1, 0]],
    )
    problem = built(case)
    assert favourite_children(problem)[0] == 1
    found = m_sct(problem)
    assert found.device[0] == found.device[1]
    assert found.end == 7


def blocked(stages):
    """A chain of 10 s and 1 s operators; after each 10 s one a leaf of the rank of what is left.

    The leaf reads 1 byte. Where the chain runs it can start after the 1 s operator, elsewhere 2 s
    after the 10 s one: algorithm 1 puts it in front of the next operator of the chain, which
    cannot leave its critical-path device.
    """
    seconds, tensors = [], []
    for stage in range(stages - 1):
        long = 3 * stage
        seconds += [10, 1, 13 * (stages - 1 - stage) - 2]
        tensors += [(long, 0, 0, [long + 1]), (long, 1, 0, [long + 2])]
        tensors += [(long + 1, 0, 0, [long + 3])]
    seconds.append(10)
    apart = [[2 * (i != j) for j in range(stages)] for i in range(stages)]
    none = [[0] * stages for _ in range(stages)]
    return Case([[one] * stages for one in seconds], tensors, none, apart)


def test_theorem_1_does_not_hold():
    """w_DPOS <= 2 w_opt + C_max fails on identical devices with any amount of memory."""
    for stages, expected in ((4, 43 + 37 + 24 + 11), (20, 2651)):
        problem = built(blocked(stages))
        ideal = replace(problem, seconds_per_byte=0 * problem.seconds_per_byte)
        optimum = ideal.evaluate(heft(ideal))
        assert optimum == critical_path(problem) == 13 * stages - 5  # hence no list is shorter
        assert c_max(problem) == 2
        assert problem.evaluate(dpos(problem)) == expected > 2 * optimum + c_max(problem)
        assert problem.evaluate(heft(problem)) == optimum + 1
