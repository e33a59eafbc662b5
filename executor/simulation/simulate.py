"""Discrete-event simulation of the order in a plan, under the cost model.

Only the order of a plan's actions on each stream and channel is read from its times. Every action
then starts as soon as its dependencies and its predecessors on its stream or channel have ended.
Memory needs no separate rule: the order of a valid plan on each device respects it.

A periodic plan is simulated for enough iterations to fill the pipeline, reach the steady state and
drain; measurements are taken in the steady state. Devices update their weights where the plan has
its pauses, and then continue at once.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from stagewright.executor.simulation.events import Simulation, execute, periodic_summary, summary
from stagewright.executor.simulation.run import prepared_run, together
from stagewright.formulations.checking.check import require_structure
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PeriodicSchedule, PipelinePlan
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_amount


def simulate(
    problem: PipelineProblem,
    plan: PipelinePlan,
    *,
    jitter: float = 0.0,
    stragglers: Mapping[str, float] | None = None,
    seed: int = 0,
) -> Simulation:
    """Run the order of ``plan``.

    Devices that exchange values within an action start and end it together, with the slowest.
    Without jitter and stragglers no action of a valid plan ends later than in the plan, and all
    times are the plan's if no action in it waits unnecessarily. Only of a plan with two streams an
    action may end later, if another one waits in the plan and leaves the device to it. Raises
    InvalidPlan if actions are missing or misplaced, or the plan answers another problem. Raises
    Deadlock if the order contradicts the dependencies. Raises InputError if a straggler is not a
    device of the cluster, or a factor or the jitter is out of range. ``jitter``: every duration is
    multiplied by a log-normal variable of mean 1 whose logarithm has this standard deviation.
    ``stragglers``: factors on the computations of some devices, by name; 2 is twice as slow.
    ``seed``: seed of the jitter.
    """
    factors = dict(stragglers or {})
    _require_options(problem, jitter, factors)
    require_structure(problem, plan)
    run = prepared_run(problem, plan, factors)
    if jitter > 0:
        normal = np.random.default_rng(seed).normal(-(jitter**2) / 2, jitter, len(run.seconds))
        seconds = [value * math.exp(draw) for value, draw in zip(run.seconds, normal, strict=True)]
        run = replace(run, seconds=seconds)
    run = together(run)
    outcome = execute(run)
    if isinstance(plan.schedule, PeriodicSchedule):
        return periodic_summary(run, plan.schedule, outcome)
    return summary(run, outcome)


def _require_options(problem: PipelineProblem, jitter: float, factors: Mapping[str, float]) -> None:
    require_amount(jitter, "jitter")
    for name, factor in factors.items():
        if name not in problem.cluster.index:
            raise InputError(f"straggler {name!r} is not a device of {problem.cluster.name!r}")
        require_amount(factor, f"straggler {name!r}: factor")
        if factor == 0:
            raise InputError(f"straggler {name!r}: factor must be positive, got 0")
