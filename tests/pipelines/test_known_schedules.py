"""Makespan problems whose best figures are known, and list schedules of structures."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from profiles import examples
from strategies import hard_problem

from benchmarks.schedules import DATA, Case, controlled, instances
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.structure import Structure, misfit, work_of
from stagewright.solvers.pipelines.scheduling import solve_schedule
from stagewright.solvers.pipelines.structures.run import list_schedule
from stagewright.solvers.pipelines.structures.scheduling import (
    Priority,
    flight_limits,
    latencies,
    urgency_keys,
)
from stagewright.solvers.pipelines.structures.state import ListWork

LIMITS = Limits(seconds=30, threads=2)
SHORT = Limits(seconds=2, threads=2)
SLACK = 1 + 1e-9

KNOWN = [one for one in controlled(4, 12) if one.theirs is not None]


def solved(case: Case, limits: Limits) -> tuple[float, Status]:
    """The cost of a checked timetable, and the status."""
    result = solve_schedule(case.problem, "optimal", limits)
    assert case.problem.evaluate(result.timetable) == result.cost >= result.bound
    return result.cost, result.status


@pytest.mark.parametrize("case", KNOWN, ids=lambda one: f"{one.name} {one.problem.objective}")
def test_controllable_memory_is_proved(case):
    assert solved(case, LIMITS) == (case.theirs, Status.OPTIMAL)


def test_less_memory_than_zero_bubble_searches_has_schedules_too():
    costs = [
        solved(one, Limits(seconds=0.1))[0]
        for one in controlled(4, 12)
        if one.problem.objective == "span"
    ]
    assert all(cost < 12 * 4 * 6 for cost in costs)  # microbatches one after the other


def test_a_makespan_of_195_is_proved():
    """Where zero-bubble's heuristic takes 198."""
    problem = MakespanProblem(
        microbatches=12,
        forward=(5.0,) * 4,
        backward=(6.0,) * 4,
        send_forward=(0.0,) * 3,
        send_backward=(0.0,) * 3,
        reduce=(0.0,) * 4,
        in_flight=(12,) * 4,
        weight_gradient=(4.0,) * 4,
        saved=((2.0, 1.0, 1.0),) * 4,
        memory=(10.0,) * 4,
    )
    assert solved(Case("", problem, 198.0), LIMITS) == (195.0, Status.OPTIMAL)


@pytest.mark.slow
def test_never_worse_than_zero_bubble():
    """All but one instance in 2 seconds each; the last one takes longer."""
    if not DATA.exists():
        pytest.skip("the shared data are not here")
    cases = [one for one in instances() if one.theirs is not None]
    quick = [one for one in cases if not one.name.endswith("transfer 1610, memory 48")]
    assert len(quick) == len(cases) - 1
    for one in quick:
        assert solved(one, SHORT)[0] <= one.theirs * SLACK, one.name


@st.composite
def structures(draw):
    """A problem and stages on any devices, shared or not, that fit in memory."""
    problem = draw(hard_problem(4, 6, 4))
    layers = len(problem.chain)
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1)))) if layers > 1 else []
    stages = []
    for start, stop in zip([0, *cuts], [*cuts, layers], strict=True):
        turns = draw(st.booleans())
        most = len(problem.cluster) if turns else problem.most_replicas(start, stop)
        names = draw(st.permutations([device.name for device in problem.cluster.devices]))
        devices = tuple(names[: draw(st.integers(1, min(most, len(names))))])
        kind = "round-robin" if turns and len(devices) > 1 else "split"
        stages.append(Stage((start, stop), devices, kind))
    structure = Structure.whole(tuple(stages))
    work = work_of(problem, structure)[0]
    assume(misfit(problem, structure) is None)
    return work


@examples(200)
@given(structures(), st.sampled_from((Priority(1.0), Priority(2.0), Priority())))
def test_one_device_stands_for_those_in_the_same_state(work, rule):
    keys, limits = urgency_keys(work, rule), flight_limits(work, rule, latencies(work))
    merged, every = ListWork.of(work), ListWork.of(work, merges=False)
    assert len(merged.room) <= len(every.room)
    ours, plain = (list_schedule(one, keys, limits, np.inf) for one in (merged, every))
    assert ours[0]
    np.testing.assert_array_equal(ours[1], plain[1])
    np.testing.assert_array_equal(ours[2][merged.alike], plain[2])
