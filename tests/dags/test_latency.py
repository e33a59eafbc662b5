"""Least latency of operator graphs: every placement of tiny ones, and the published rules."""

import json
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from commands import answered, answered_json, refused
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

import stagewright
from stagewright.formulations.dags.latency import HOST, LatencyProblem, latency_problem
from stagewright.formulations.dags.latency_bounds import PathBound
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.importers.dnn_partitioning import Workload, read_workload
from stagewright.solvers.dags.latency import place_for_latency

DOWNSETS = Path(__file__).parents[3] / "shared" / "data" / "downsets"
LIMITS = Limits(60)


@st.composite
def problems(draw, most=5):
    """Whole numbers; free nodes and transfers, groups, memory that binds, no hosts at times."""
    n = draw(st.integers(1, most))
    few = st.integers(0, 4)
    pairs = [(a, b) for b in range(n) for a in range(b) if draw(st.integers(0, 2)) == 0]
    place = draw(st.permutations(range(n)))  # not numbered in a topological order
    group = tuple(sorted(place[: draw(st.sampled_from([0, 0, 2, 3]))]))
    accelerators = draw(st.integers(0, 3))
    calls = np.array([draw(few) for _ in range(n)], dtype=float)
    unit = draw(st.sampled_from([0.25, 1.0, 1e9]))  # bytes need not be whole
    return LatencyProblem(
        names=tuple(f"n{i}" for i in range(n)),
        edges=tuple((place[a], place[b]) for a, b in pairs),
        on_accelerator=calls,
        on_host=calls * draw(st.integers(1, 4)) + np.array([draw(few) for _ in range(n)]) // 3,
        transfer=np.array([draw(few) for _ in range(n)], dtype=float),
        bytes=unit * np.array([draw(few) for _ in range(n)], dtype=float),
        supported=np.array([draw(st.integers(0, 5)) > 0 for _ in range(n)]),
        groups=(group,) if len(group) > 1 else (),
        accelerators=accelerators,
        memory=unit * draw(st.sampled_from([4.0, 6.0, inf])),
        hosts=accelerators == 0 or draw(st.booleans()),
    )


def chain(**changes: Any) -> LatencyProblem:
    """Three nodes of 1, 2 and 3 s on an accelerator, ten times that on a host; transfers of 1 s."""
    seconds = np.array([1.0, 2.0, 3.0])
    plain = LatencyProblem(
        names=("a", "b", "c"),
        edges=((0, 1), (1, 2)),
        on_accelerator=seconds,
        on_host=10 * seconds,
        transfer=np.ones(3),
        bytes=np.ones(3),
        supported=np.ones(3, dtype=bool),
        groups=(),
        accelerators=2,
        memory=2.0,
    )
    return replace(plain, **changes)


def by_events(problem, home):
    """The latency by a clock that goes from event to event; None if a call never starts.

    After the published integer program: a call starts once all that is communicated into it is
    done, and takes ``comm_in``, its nodes and ``comm_out`` in turn.
    """
    done: dict[int, float] = {}
    waiting, running = set(range(len(problem.names))), []
    now = 0.0
    while waiting or running:
        for v in sorted(waiting):
            members = {v} if home[v] == HOST else {w for w in waiting if home[w] == home[v]}
            needed = {a for a, b in problem.edges if b in members and a not in members}
            if v not in waiting or any(done.get(a, inf) > now for a in needed):
                continue
            took = problem.on_host[v]
            if home[v] != HOST:
                took = sum(problem.on_accelerator[w] for w in members)
                took += sum(problem.transfer[a] for a in needed)
                left = {a for a, b in problem.edges if a in members and b not in members}
                took += sum(problem.transfer[a] for a in left)
            running.append((now + took, members))
            waiting -= members
        if not running:
            return None
        running.sort(key=lambda one: one[0])
        now, members = running.pop(0)
        done |= dict.fromkeys(members, now)
    return now


def is_allowed(problem, home):
    """The rules but those of time."""
    for d in range(problem.accelerators):
        if sum(problem.bytes[v] for v, h in enumerate(home) if h == d) > problem.memory:
            return False
    hosted = [v for v, h in enumerate(home) if h == HOST]
    return (
        (problem.hosts or not hosted)
        and all(problem.supported[v] or v in hosted for v in range(len(home)))
        and all(len({home[v] for v in group}) == 1 for group in problem.groups)
    )


def homes(problem):
    return product(range(-1, problem.accelerators), repeat=len(problem.names))


def least(problem):
    """The least latency of all placements, infinite if there is none."""
    best = inf
    for home in homes(problem):
        try:
            best = min(best, problem.evaluate(home))
        except InvalidPlan:
            continue
    return best


@examples(60)
@given(problems(4))
def test_evaluate_is_the_clock_of_the_published_rules(problem):
    for home in homes(problem):
        expected = by_events(problem, home) if is_allowed(problem, home) else None
        if expected is None:
            with pytest.raises(InvalidPlan):
                problem.evaluate(home)
        else:
            assert problem.evaluate(home) == pytest.approx(expected, abs=1e-12)


@examples(60)
@given(problems())
def test_solver_equals_brute_force_and_bounds_hold(problem):
    best = least(problem)
    bounds = [bound for bound, _ in PathBound(problem).of_heavy_paths()]
    assert max(bounds) <= best * (1 + 1e-9)
    found = place_for_latency(problem, LIMITS)
    if best == inf:
        assert (found.status, found.home) == (Status.INFEASIBLE, None)
    else:
        assert found.status is Status.OPTIMAL
        assert found.cost == problem.evaluate(found.home) == pytest.approx(best)
        assert found.bound <= found.cost
        assert found.gap == pytest.approx(0, abs=1e-3)


@examples(30)
@given(problems())
def test_relations(problem):
    """Twice the times take twice as long; an accelerator, memory or hosts more never hurt."""
    cost = place_for_latency(problem, LIMITS).cost
    if cost is None:
        return
    twice = replace(
        problem,
        on_accelerator=2 * problem.on_accelerator,
        on_host=2 * problem.on_host,
        transfer=2 * problem.transfer,
    )
    assert place_for_latency(twice, LIMITS).cost == pytest.approx(2 * cost)
    for better in (
        replace(problem, accelerators=problem.accelerators + 1),
        replace(problem, memory=problem.memory + 2),
        replace(problem, hosts=True),
    ):
        assert place_for_latency(better, LIMITS).cost <= cost * (1 + 1e-9)


def test_chain_by_hand():
    """Two calls: 1 + 2 + a transfer of b from the first, into the second, and 3: 8 s.

    The other cut costs as much; in one call all would take 6 s; on hosts 60 s.
    """
    found = place_for_latency(chain(), LIMITS)
    assert (found.cost, found.bound, found.status) == (8, 8, Status.OPTIMAL)
    assert place_for_latency(chain(memory=3.0), LIMITS).cost == 6
    assert place_for_latency(chain(accelerators=0), LIMITS).cost == 60
    assert place_for_latency(chain(accelerators=1), LIMITS).cost == 10 + 1 + 2 + 3
    assert place_for_latency(chain(accelerators=1, hosts=False), LIMITS).home is None
    assert PathBound(chain()).of((0, 1, 2)) == 8


@pytest.mark.parametrize(
    ("home", "changes", "complaint"),
    [
        ((0, 0), {}, "2 places for 3 nodes"),
        ((0, 0, 2), {}, "c: there is no accelerator 2"),
        ((0, 0, HOST), {"hosts": False}, "c is on a host, there are none"),
        ((0, 0, 1), {"supported": np.array([1, 0, 1], dtype=bool)}, "b does not run on an acc"),
        ((0, 0, 0), {}, "3 B on accelerator 0 of 2 B"),
        ((0, 1, 1), {"groups": ((0, 1),)}, "a and its group are not together"),
        ((0, 1, 0), {}, "accelerator 0 is not contiguous"),
        ((1, HOST, 1), {}, "accelerator 1 is not contiguous"),
    ],
)
def test_broken_placements_are_refused(home, changes, complaint):
    with pytest.raises(InvalidPlan, match=complaint):
        chain(**changes).evaluate(home)


def test_accelerators_that_wait_in_a_circle_are_refused():
    """Each reads what the other makes, though no path leaves one and returns."""
    crossed = chain(
        names=tuple("abcd"), edges=((0, 1), (2, 3)), on_accelerator=np.ones(4),
        on_host=np.ones(4), transfer=np.ones(4), bytes=np.ones(4), supported=np.ones(4, bool),
    )  # fmt: skip
    with pytest.raises(InvalidPlan, match="accelerator 0 is not contiguous"):
        crossed.evaluate((0, 1, 1, 0))
    assert crossed.evaluate((0, 1, 0, 1)) == 2 + 2 + 2 + 2


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"accelerators": 0, "hosts": False}, "there must be a node and a device"),
        ({"bytes": np.ones(2)}, r"bytes must have the shape \(3,\), got \(2,\)"),
        ({"transfer": np.array([1, -1, 1])}, "transfer must be finite and not negative"),
        ({"edges": ((0, 3),)}, "must be of different nodes below 3"),
        ({"groups": ((0, 1), (1, 2))}, "must be of different nodes below 3"),
        ({"edges": ((0, 1), (1, 0))}, "the nodes form a cycle: a -> b"),
    ],
)
def test_broken_problems_are_refused(changes, complaint):
    with pytest.raises(InputError, match=complaint):
        chain(**changes)


def test_a_stopped_search_says_so():
    stop = Event()
    stop.set()
    found = place_for_latency(chain(), Limits(60, stop=stop))
    assert found.status is Status.INTERRUPTED
    assert found.cost == 60  # all on hosts
    assert found.bound <= 8


@pytest.mark.skipif(not DOWNSETS.exists(), reason="the published inputs are absent")
@pytest.mark.parametrize("name", ["bert24", "gnmt"])
def test_published_graphs(name):
    """The clock agrees, and the bound is near: these graphs are almost chains."""
    problem = latency_problem(read_workload(DOWNSETS / f"LayerGraphs_{name}_inference.json"))
    found = place_for_latency(problem, Limits(4))
    assert found.cost == pytest.approx(by_events(problem, found.home))
    assert found.bound <= found.cost <= 1.05 * found.bound


def node(number: int, milliseconds: float, **more: Any) -> dict[str, Any]:
    times = {"fpgaLatency": milliseconds, "cpuLatency": 10 * milliseconds}
    return {"id": number, "name": f"op{number}", "size": 1e3, **times, **more}


def edge(source: int, target: int, milliseconds: float) -> dict[str, Any]:
    return {"sourceId": source, "destId": target, "size": 8.0, "cost": milliseconds}


# The chain above in milliseconds.
WORKLOAD = {
    "maxFPGAs": 2, "maxCPUs": 8, "maxSizePerFPGA": 2e3,
    "nodes": [node(0, 1), node(1, 2), node(2, 3)], "edges": [edge(0, 1, 1), edge(1, 2, 1)],
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ops.json").write_text(json.dumps(WORKLOAD))


ASKED = ("divide", "ops.json", "--objective", "latency")


@pytest.mark.usefixtures("file")
def test_the_command_and_python_answer_alike():
    found = answered_json(*ASKED)
    assert (found["status"], found["cost_seconds"]) == ("optimal", pytest.approx(8e-3))
    assert found["plan_class"] == "placements with one contiguous call for each accelerator"
    assert [one["device"] for one in found["sets"]] == ["accelerator", "accelerator"]
    assert sum(one["seconds"] for one in found["sets"]) == pytest.approx(8e-3)
    text = answered(*ASKED)
    assert "8 ms for one sample (optimal)" in text
    assert "of all placements with one contiguous call" in text
    asked = stagewright.divide(stagewright.load_partition_problem("ops.json"), objective="latency")
    assert asked.cost_seconds == found["cost_seconds"]
    hosted = answered_json(*ASKED, "--devices", 1)
    assert hosted["cost_seconds"] == pytest.approx(16e-3)
    assert hosted["sets"][-1]["device"] == "hosts"


@pytest.mark.usefixtures("file")
def test_why_there_is_no_placement():
    without = (*ASKED, "--hosts", 0)
    for more, reason in (
        (("--devices", 1), "all nodes have 3 kB, all accelerators 2 kB, and there are no hosts"),
        (("--memory", "500B"), "op0 has 1 kB, an accelerator 500 B, and there are no hosts"),
    ):
        found = answered_json(*without, *more, code=1)
        assert (found["status"], found["sets"]) == ("infeasible", None)
        assert reason in found["reason"]
    nodes = [WORKLOAD["nodes"][0], node(1, 2, supportedOnFpga=0), WORKLOAD["nodes"][2]]
    Path("ops.json").write_text(json.dumps(WORKLOAD | {"nodes": nodes}))
    found = answered_json(*without, code=1)
    assert found["reason"] == "op1 does not run on an accelerator, and there are no hosts"
    assert answered_json(*ASKED)["cost_seconds"] == pytest.approx((1 + 1 + 20 + 1 + 3) * 1e-3)
    assert "'op1' does not run on an accelerator" in refused("divide", "ops.json")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--any-sets"], "any_sets does not apply to the objective 'latency'"),
        (["--replicas", 2], "replicas does not apply to the objective 'latency'"),
        (["--bandwidth", "1GB/s"], "bandwidth_bytes_per_second does not apply to the objective"),
        (["--samples", 2], "samples is for Piper's workloads"),
        (["--hosts", 3], "hosts keep no node waiting: give hosts 0, or none"),
    ],
)
@pytest.mark.usefixtures("file")
def test_what_latency_does_not_have_is_refused(arguments, complaint):
    assert complaint in refused(*ASKED, *arguments)


def test_training_and_unequal_costs_are_refused():
    back = WORKLOAD | {"nodes": [node(0, 1), node(1, 2), node(2, 3, isBackwardNode=1)]}
    with pytest.raises(InputError, match="'op2' is a backward node: latency is of inference"):
        latency_problem(Workload.model_validate(back))
    unequal = WORKLOAD | {"edges": [edge(0, 1, 1), edge(0, 2, 2)]}
    with pytest.raises(InputError, match=r"'op0' has edges of costs 1\.0 and 2\.0"):
        latency_problem(Workload.model_validate(unequal))
