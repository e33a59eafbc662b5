"""Bounds on the schedules of stages on groups of devices, against the best plan of the stages."""

import math
import random
from itertools import islice

import pytest
from group_instances import FAMILIES, random_problem
from group_oracle import Structures, scheduled
from profiles import slow_after

from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.pipelines.bounds.stages import schedule_bounds
from stagewright.formulations.pipelines.grouped_stages import is_grouped, relaxed_schedule
from stagewright.formulations.plans.plan import Stage
from stagewright.solvers.pipelines.scheduling import solve_schedule

ROUNDING = 1 + 1e-6
SEEDS = [
    (name, seed, (seed + place) % 2 == 0)
    for seed in range(80)
    for place, name in enumerate(FAMILIES)
]


@pytest.mark.parametrize(("name", "seed", "split"), slow_after(len(FAMILIES), SEEDS))
def test_no_plan_of_the_stages_undercuts_a_bound(name, seed, split):
    """Recomputation, offloading, all-reduces in turn and both ways of a backward included."""
    problem = random_problem(name, seed)
    everything = Structures(problem, split)
    every = [stages for _, stages in islice(everything.below(math.inf), 300)]
    for stages in random.Random(seed).sample(every, min(3, len(every))):
        plan = scheduled(everything, stages, math.inf, 1.0)
        if plan is None or plan == "open":
            continue
        assert check(problem, plan) == ()
        relaxed = relaxed_schedule(problem, stages, split)
        assert relaxed is not None
        cost = plan.predicted.iteration_seconds * ROUNDING
        assert all(bound.seconds <= cost for bound in schedule_bounds(relaxed))
        assert solve_schedule(relaxed, "optimal", Limits(0.5)).bound <= cost


def test_stages_on_the_same_devices_in_another_order_are_no_group():
    one, two = Stage((0, 1), ("a", "b")), Stage((1, 2), ("b", "a"))
    assert not is_grouped((one, two))
    assert is_grouped((one, Stage((1, 2), ("a", "b"))))
    assert not is_grouped((one, Stage((1, 2), ("a",))))
