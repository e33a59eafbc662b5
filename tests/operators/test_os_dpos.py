"""OS-DPOS against algorithm 2 as it is written, and what it computes faster against the rules."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_instances import built, cases
from profiles import examples
from random_steps import MEGABYTE, graphs

from stagewright.formulations.operators import rules
from stagewright.formulations.operators.plan import operator_problem
from stagewright.formulations.operators.splitting import choices_of, split_graph
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.solvers.operators.dividing import Places, divided
from stagewright.solvers.operators.insertion import dpos, peaks
from stagewright.solvers.operators.os_dpos import os_dpos, placed_critical_path
from stagewright.solvers.operators.ranks import arrays_of
from stagewright.solvers.operators.search import FREED, METHODS, SHARES, first_of


def cluster(devices, memory):
    links = (Link(1e10, 1e-5), Link(2e9, 1e-4))
    return uniform_servers(2, devices // 2, *links, memory_bytes=memory * MEGABYTE, kind="a")


def algorithm_2(graph, machines, contention):
    """Every candidate from the document, every list from the beginning."""
    problem = operator_problem(graph, machines, contention)
    method = first_of(dpos, SHARES)
    if method(problem) is None:
        method = first_of(dpos, FREED)
    best = method(problem)
    chosen, tried = [], 1
    if best is None:
        return chosen, None, tried
    path = placed_critical_path(problem, best)
    work = problem.seconds[path, best.device[path]]
    for i in path[np.argsort(-work, kind="stable")].tolist():
        choices = choices_of(graph, graph.nodes[i], len(machines))
        least = None
        for choice in choices:
            split = split_graph(graph, [*chosen, choice])
            listed = method(operator_problem(split, machines, contention))
            tried += 1
            if listed is not None and listed.end < (least[1] if least else best).end:
                least = choice, listed
        if choices and least is None:
            break
        if least is not None:
            chosen, best = [*chosen, least[0]], least[1]
    return chosen, best, tried


@pytest.mark.parametrize("contention", ["none", "exclusive"])
@examples(150)
@given(graphs(), st.sampled_from([2, 4]), st.sampled_from([20, 30, 40, 60, 1000]))
def test_equals_algorithm_2(contention, graph, devices, memory):
    machines = cluster(devices, memory)
    chosen, best, tried = algorithm_2(graph, machines, contention)
    found = os_dpos(graph, machines, contention)
    assert (list(found.splits), found.tried) == (chosen, tried)
    if best is None:
        assert found.timetable is None
        return
    assert found.problem.evaluate(found.timetable) == best.end
    assert found.timetable.device.tolist() == best.device.tolist()
    assert found.timetable.start.tolist() == best.start.tolist()


@examples(150)
@given(graphs(), st.data())
def test_divided_arrays_are_those_of_the_divided_graph(graph, data):
    machines = cluster(2, 1000)
    places, arrays = Places(graph, machines), arrays_of(operator_problem(graph, machines))
    chosen = []
    for node in data.draw(st.permutations(graph.nodes)):
        choices = choices_of(graph, node, 4)
        if choices and data.draw(st.booleans()):
            choice = data.draw(st.sampled_from(choices))
            division = places.division(arrays, choice)
            arrays = divided(arrays, division)
            places.divide(choice.operator, division)
            chosen.append(choice)
    problem = operator_problem(split_graph(graph, chosen), machines)
    for name, one, other in zip(arrays._fields, arrays, arrays_of(problem), strict=True):
        assert np.array_equal(one, other), name


@examples(150)
@given(
    st.sampled_from(["none", "exclusive"]).flatmap(lambda one: cases(contention=one, memory=True)),
    st.sampled_from(["single", "m-topo", "dpos"]),
)
def test_memory_is_the_checkers(case, method):
    problem = built(case)
    found = METHODS[method](problem)
    if found is not None:
        assert peaks(arrays_of(problem), found).tolist() == list(rules.peaks(problem, found))
