"""Steady states of makespan problems: their rules are the same, and patterns become schedules."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from memory_oracle import least_cost
from profiles import examples
from strategies import random_memory_makespan

from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.patterns.repetition_bounds import pace_bounds
from stagewright.formulations.patterns.steady import steady_blocks, steady_problem, unrolled
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.plans.actions import ActionKind
from stagewright.formulations.schedules.order import B, F, I, W
from stagewright.formulations.schedules.placements import v_shape
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.patterns.pattern_orders import pattern_orders
from stagewright.solvers.patterns.repetition import best_repetition
from stagewright.solvers.pipelines.list_scheduling import schedule_order

LIMITS = Limits(seconds=120.0)


def computes(problem):
    """Whether all computations take time, and none of the all-reduces does."""
    times = (*problem.forward, *problem.backward, *problem.last_computation)
    return replace(problem, reduce=(0.0,) * problem.stages) if min(times) > 0 else None


def timetable(problem, repetition):
    """All microbatches at their times in the repetition, transfers included."""
    begin = 2 * problem.stages * repetition.period  # anything so late that no start is negative
    starts = {}
    for number, block in enumerate(steady_blocks(problem)):
        rows = [
            begin + repetition.starts[m % repetition.length][number]
            + m // repetition.length * repetition.period
            for m in range(problem.microbatches)
        ]  # fmt: skip
        starts[block] = np.array(rows)
    back, stages = I if problem.is_split else B, range(problem.stages)
    forward = np.array([starts[F, s] for s in stages])
    backward = np.array([starts[back, s] for s in stages])
    there, home = forward + np.array(problem.forward)[:, None], backward.copy()
    home += np.array(problem.backward)[:, None]
    for s in stages[:-1]:
        there[s] = starts.get((ActionKind.SEND_FORWARD, s), there[s])
        home[s + 1] = starts.get((ActionKind.SEND_BACKWARD, s + 1), home[s + 1])
    weights = np.array([starts[W, s] for s in stages]) if problem.is_split else None
    last = backward if weights is None else weights
    ends = (last + np.array(problem.last_computation)[:, None]).max(axis=1)
    return Timetable(forward, backward, there[:-1], home[1:], ends, weights)


@examples(60)
@given(random_memory_makespan(max_microbatches=6), st.integers(1, 2))
def test_repetitions_keep_the_rules_of_the_makespan_problem(problem, length):
    """Memory, in-flight limits, channels and both duplexes, by the problem's own check."""
    problem = computes(problem)
    assume(problem is not None)
    found = best_repetition(steady_problem(problem), LIMITS, (length,))
    problem.evaluate(timetable(problem, found.repetition))
    order = unrolled(problem, found.repetition)
    problem.evaluate(schedule_order(problem, order))


@examples(60)
@given(random_memory_makespan(max_microbatches=2))
def test_a_schedule_one_after_the_other_is_a_repetition(problem):
    """M microbatches in their least makespan: no repetition of M of them is slower."""
    problem = computes(problem)
    assume(problem is not None)
    problem = replace(problem, objective="makespan")
    count = problem.microbatches
    found = best_repetition(steady_problem(problem), LIMITS, (count,))
    assert found.status is Status.OPTIMAL
    assert found.pace * count <= least_cost(problem) * (1 + 1e-9)


def v_schedule(devices, microbatches, memory, times=(1.0, 1.0, 1.0)):
    stages = 2 * devices
    forward, backward, weight = ((time,) * stages for time in times)
    free = (0.0,) * (stages - 1)
    return MakespanProblem(
        microbatches, forward, backward, free, free, (0.0,) * stages, (microbatches,) * stages,
        v_shape(devices), weight, ((1.0, 0.0, 1.0),) * stages, (float(memory),) * devices,
    )  # fmt: skip


@pytest.mark.parametrize(("devices", "memory"), [(2, 3), (4, 4), (6, 6), (8, 8)])
def test_v_schedules_with_half_of_the_memory_have_no_bubble(devices, memory):
    """F = I = W: the load of 6, with at most half of the 2 p activations of 1F1B (p >= 4)."""
    found = best_repetition(steady_problem(v_schedule(devices, 100, memory)), LIMITS, (1,))
    assert (found.pace, found.is_general) == (6.0, True)
    less = steady_problem(v_schedule(devices, 100, memory - 1))
    slower = best_repetition(less, LIMITS, (1,))
    assert slower.status is Status.OPTIMAL
    assert slower.pace > 6


def test_patterns_are_schedules_of_many_microbatches():
    """Their length is the period times the microbatches, and at most the time of one more."""
    problem = v_schedule(4, 40, 5)
    steady = steady_problem(problem)
    pace = pace_bounds(steady)[0].seconds
    costs = {
        name: problem.evaluate(schedule_order(problem, order))
        for name, order in pattern_orders(problem, LIMITS, (1, 2))
    }
    assert "pattern of 1" in costs
    assert len(costs) > 1
    for cost in costs.values():
        assert cost >= 40 * pace
    assert min(costs.values()) <= 40 * pace + 16  # 16 computations on a microbatch's way


def test_patterns_for_real_times():
    problem = v_schedule(4, 40, 6, (1.37, 1.62, 1.05))
    orders = [order for _, order in pattern_orders(problem, LIMITS, (1,))]
    assert orders
    for order in orders:
        problem.evaluate(schedule_order(problem, order))


def test_what_takes_no_time_has_no_pattern():
    problem = replace(v_schedule(2, 4, 4), weight_gradient=(1.0, 0.0, 1.0, 1.0))
    with pytest.raises(InputError, match="1W must take a positive time"):
        steady_problem(problem)
    assert not list(pattern_orders(problem, LIMITS))
