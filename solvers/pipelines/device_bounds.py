"""The largest bound on the schedules of given stages that edge finding proves."""

from collections.abc import Sequence
from time import monotonic

from stagewright.formulations.pipelines.bounds.device_tasks import Tasks, can_split, tasks_of_stages
from stagewright.formulations.pipelines.bounds.devices import (
    EDGE_FINDING,
    SLACK,
    is_refuted,
    machine_bound,
    window_of,
)
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound, Stage
from stagewright.formulations.plans.plan_class import EVERY_FINITE, WHOLE_FINITE, PlanClass

PRECISION = 1e-3  # relative


def device_bounds(
    problem: PipelineProblem,
    stages: Sequence[Stage],
    plans: PlanClass,
    cost: float,
    seconds: float,
) -> tuple[Bound, ...]:
    """Bounds on all schedules of ``stages``, and on the schedules with whole backwards.

    ``cost`` is the time of a schedule in the class ``plans``. Targets below it are tried for
    ``seconds``.
    """
    ends = monotonic() + seconds
    classes = [EVERY_FINITE, WHOLE_FINITE] if any(can_split(problem, stages)) else [EVERY_FINITE]
    found = []
    for one in classes:
        tasks = tasks_of_stages(problem, stages, one.split_backward)
        known = _largest_bound(tasks, cost if one.contains(plans) else 0.0, ends)
        found.append(Bound(known, EDGE_FINDING, "schedule", one))
    return tuple(found)


def _largest_bound(tasks: Tasks, cost: float, ends: float) -> float:
    """The largest target found that no schedule attains; ``cost`` is the time of a schedule."""
    window = window_of(tasks)
    low = machine_bound(tasks, window)
    high, target = cost, cost * (1 - SLACK)
    while high - low > PRECISION * cost and monotonic() < ends:
        if is_refuted(tasks, target, window):
            low = target
        else:
            high = target
        target = (low + high) / 2
    return low
