"""The rules of placed operators: the checker against wrong timetables and broken problems."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from operator_instances import built, cases
from operator_oracle import Case, shortest
from profiles import examples

from benchmarks.operator_graphs import SHAPES, random_problem
from stagewright.formulations.operators.plan import SplitChoice, operator_problem
from stagewright.formulations.operators.problem import GraphTimes
from stagewright.formulations.operators.rules import peaks
from stagewright.formulations.operators.splitting import split_graph
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.operators.step_graph import Node, Output, Split, StepGraph
from stagewright.solvers.operators.insertion import by_devices, dpos

APART = [[0, 1], [1, 0]]
# a (2 s) makes 3 bytes that b (1 s) and c (4 s) read; c and d (1 s) are a group.
DIAMOND = Case(
    [[2, 2], [1, 1], [4, 4], [1, 1]],
    [(0, 3, 3, [1, 2]), (1, 1, 1, [3]), (2, 1, 1, [3])],
    [[0, 0], [0, 0]],
    APART,
    "exclusive",
    [1, 1, 1, 1],
    [12, 12],
    [0, 1, 2, 2],
)


def diamond():
    """a and b on device 0, c and d on device 1."""
    times = [np.array(row, dtype=float) for row in ([0, 2, 5, 9], [2, 3, 9, 10])]
    sent = np.array([0, 1]), np.array([1, 1]), np.array([2.0, 3.0]), np.array([5.0, 4.0])
    return GraphTimes(np.array([0, 0, 1, 1]), *times, *sent)


def moved(**changes):
    """The timetable of the diamond with some entries replaced."""
    right = diamond()
    fields = {name: getattr(right, name).copy() for name in changes}
    for name, entries in changes.items():
        for k, value in entries.items():
            fields[name][k] = value
    return replace(right, **fields)


def test_a_transfer_of_the_pair_waits_for_the_other():
    problem = built(DIAMOND)
    with pytest.raises(InvalidPlan, match="output 0 of o1 to d1 starts while another"):
        problem.evaluate(diamond())
    assert replace(problem, contention="none").evaluate(diamond()) == 10
    late = moved(sent_start={1: 5}, sent_finish={1: 6})
    assert problem.evaluate(late) == 10
    # State 2 and, of a's tensor (0 to 5) and b's (2 to 6), 3 + 1; state 2, and copies 3, 1 and c's.
    assert peaks(problem, late) == (6, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": {1: 1}}, "missing|not read there"),
        ({"device": {3: 0}}, "o3 is not on the device of o2"),
        ({"device": {0: 2}}, "there is no device 2"),
        ({"finish": {0: 1}}, "o0 runs for 1 s of 2 s"),
        ({"start": {1: 1}, "finish": {1: 2}}, "o1 starts before it has output 0 of o0"),
        ({"start": {2: 4}, "finish": {2: 8}}, "o2 starts before it has output 0 of o0"),
        ({"start": {3: 8}, "finish": {3: 9}}, "starts before it has output 0 of o2"),
        ({"start": {0: -1}, "finish": {0: 1}}, "negative"),
        ({"finish": {3: np.inf}}, "not finite"),
        ({"sent_start": {0: 1}, "sent_finish": {0: 4}}, "starts before the tensor is made"),
        ({"sent_finish": {0: 4}}, "takes 2 s of 3 s"),
        ({"sent": {1: 0}}, "sent twice"),
        ({"target": {0: 0}}, "is not read there"),
        ({"sent": {1: 7}}, "there is no tensor 7"),
    ],
)
def test_wrong_timetables_are_refused(changes, message):
    problem = replace(built(DIAMOND), contention="none")
    problem.evaluate(diamond())
    with pytest.raises(InvalidPlan, match=message):
        problem.evaluate(moved(**changes))


def test_lists_that_are_too_short_are_refused():
    problem, right = replace(built(DIAMOND), contention="none"), diamond()
    sent = {name: getattr(right, name)[:1] for name in ("sent", "target")}
    times = {name: getattr(right, name)[:1] for name in ("sent_start", "sent_finish")}
    with pytest.raises(InvalidPlan, match="output 0 of o1 to d1 is missing"):
        problem.evaluate(replace(right, **sent, **times))
    with pytest.raises(InvalidPlan, match="finishes of transfers needed"):
        problem.evaluate(replace(right, **sent))
    with pytest.raises(InvalidPlan, match="4 devices"):
        problem.evaluate(replace(right, device=right.device[:3]))


def test_a_device_runs_one_operator_at_a_time():
    case = Case([[2], [3], [0]], [], [[0]], [[0]])
    none = np.zeros(0, dtype=np.int64)
    empty = (none, none, none.astype(float), none.astype(float))

    def table(starts):
        starts = np.array(starts, dtype=float)
        return GraphTimes(np.zeros(3, dtype=np.int64), starts, starts + np.array([2, 3, 0]), *empty)

    assert built(case).evaluate(table([0, 2, 1])) == 5  # what takes no time occupies nothing
    with pytest.raises(InvalidPlan, match="o1 starts while o0 runs"):
        built(case).evaluate(table([0, 1, 1]))


def test_memory_of_state_tensors_and_copies():
    late = moved(sent_start={1: 5}, sent_finish={1: 6})
    problem = built(DIAMOND)
    for device, need in ((0, 6), (1, 7)):
        memory = problem.memory.copy()
        memory[device] = need
        replace(problem, memory=memory).evaluate(late)
        memory[device] -= 1
        with pytest.raises(InvalidPlan, match=f"d{device}: {need} bytes in memory"):
            replace(problem, memory=memory).evaluate(late)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contention": "shared"}, "contention must be none or exclusive"),
        ({"seconds": np.ones((4, 3))}, "seconds must have the shape"),
        ({"state_bytes": np.array([1, -1, 0, 0.0])}, "state_bytes must be finite"),
        ({"latency": np.ones((2, 2))}, "diagonal of latency"),
        ({"reader": np.array([0, 2, 3, 3])}, "readers must come after"),
        ({"maker": np.array([1, 0, 2])}, "maker must be"),
        ({"first_reader": np.array([0, 2, 3, 5])}, "first_reader must ascend"),
    ],
)
def test_broken_problems_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        replace(built(DIAMOND), **change)


@examples(150)
@given(cases())
def test_dpos_keeps_the_rules_and_is_no_shorter_than_the_optimum(case):
    problem = built(case)
    assert problem.evaluate(dpos(problem)) >= shortest(case)


@examples(50)
@given(cases(most=4, devices=2, contention="exclusive"))
def test_dpos_with_contention(case):
    problem = built(case)
    assert problem.evaluate(dpos(problem)) >= shortest(case)


@examples(150)
@given(cases(most=3, devices=2, contention="exclusive", memory=True))
def test_dpos_with_memory(case):
    """What it finds fits; with all tensors held it never finds what does not."""
    problem = built(case)
    found = dpos(problem)
    if found is not None:
        assert problem.evaluate(found) >= shortest(case)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("contention", ["none", "exclusive"])
def test_larger_graphs(shape, contention):
    for ratio in (0.1, 1, 10):
        problem = random_problem(200, 4, 0, ratio, shape, contention, kinds=2)
        assert problem.evaluate(dpos(problem)) <= 20 * problem.seconds.max(axis=1).sum()


WEIGHT = Node("w", "parameter", "state", outputs=(Output(400.0),), state_bytes=1200.0)
DATA = Node("x", "placeholder", "input", outputs=(Output(320.0),))
PRODUCT = Node(
    "y", "mm", "forward", (("x", 0), ("w", 0), ("w", 0)), (Output(80.0),), {"a": 2.0, "b": 1.0}
)
UPDATE = Node("u", "add_", "update", (("w", 0), ("y", 0)), (), {"a": 0.5}, beside="w")
GRAPH = StepGraph("small", "test", 8, (WEIGHT, DATA, PRODUCT, UPDATE))


def test_a_step_becomes_a_problem():
    cluster = uniform_servers(1, 2, Link(1e8, 1e-3), kind="a")
    problem = operator_problem(GRAPH, cluster)
    assert problem.seconds.tolist() == [[0, 0], [0, 0], [2, 2], [0.5, 0.5]]
    assert [row.tolist() for row in problem.edges] == [[0, 0, 1, 2], [2, 3, 2, 3], [0, 0, 1, 2]]
    assert problem.held_bytes.tolist() == [0, 320, 80]  # the parameter is a part of its state
    assert problem.group.tolist() == [0, 1, 2, 0]
    assert problem.transfer_seconds(0, 0, 1) == 1e-3 + 400 / 1e8
    assert problem.unmeasured == ()
    other = operator_problem(GRAPH, uniform_servers(1, 2, Link(1e8), kind="b"))
    assert other.unmeasured == ("u",)
    assert other.seconds[3].tolist() == [0, 0]
    assert other.digest != problem.digest


def test_parameters_are_placed_with_their_first_reader():
    cluster = uniform_servers(1, 2, Link(1e8, 1e-3), kind="a")
    heavy = Node("z", "mm", "forward", (("x", 0),), (), {"a": 9.0})
    graph = StepGraph("small", "test", 8, (WEIGHT, DATA, heavy, PRODUCT, UPDATE))
    problem = operator_problem(graph, cluster)
    found = dpos(problem)
    assert found.device[0] == found.device[3] == found.device[4] != found.device[2]
    assert problem.evaluate(found) == 9


VIEW = Node("v", "t", "forward", (("y", 0),), (Output(40.0, shared=True),), {"a": 0.0})
LAST = Node("z", "mm", "forward", (("v", 0), ("w", 0)), (Output(8.0),), {"a": 4.0})
SAFE = replace(UPDATE, after=("z", "y"))


def test_what_must_come_after_is_waited_for():
    """The update of w waits for its last reader, with a message if that is elsewhere."""
    cluster = uniform_servers(1, 2, Link(1e8, 1e-3), kind="a")
    graph = StepGraph("small", "test", 8, (WEIGHT, DATA, PRODUCT, VIEW, LAST, SAFE))
    problem = operator_problem(graph, cluster)
    assert problem.held_bytes.tolist() == [0, 320, 80, 0, 80, 8, 0]  # the view is all of y
    assert problem.sent_bytes.tolist() == [400, 320, 80, 0, 40, 8, 0]
    free = operator_problem(replace(graph, nodes=(*graph.nodes[:-1], UPDATE)), cluster)
    home = np.array([0, 0, 0, 1, 1, 0])
    order = np.arange(6)
    waits, overlaps = (by_devices(one, order, home) for one in (problem, free))
    end = problem.evaluate(waits)
    assert waits.start[5] == pytest.approx(waits.finish[4] + 1e-3)
    assert end == pytest.approx(waits.finish[4] + 1e-3 + 0.5)
    assert overlaps.start[5] < overlaps.finish[4]
    with pytest.raises(InvalidPlan):
        problem.evaluate(overlaps)


def test_parts_keep_what_comes_before_and_after():
    both = replace(PRODUCT, splits=(Split("batch", 8, (0, None, None), (0,)),), after=("x",))
    graph = StepGraph("small", "test", 8, (WEIGHT, DATA, both, replace(UPDATE, after=("y",))))
    made = split_graph(graph, [SplitChoice("y", "batch", 2)])
    after = {node.name: node.after for node in made.nodes}
    assert after == {
        "w": (), "x": (), "y/cut0": ("x",), "y/0": ("x",), "y/1": ("x",), "y/join0": (),
        "u": ("y/0", "y/1"),
    }  # fmt: skip
