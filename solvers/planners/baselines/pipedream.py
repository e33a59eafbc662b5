"""SPP's baselines (V-A): data parallelism, GPipe without replication, and PipeDream's partition.

PipeDream's has a synchronous barrier (thesis 2.4.1; baseline iii). What the recurrence leaves out
is in the plan, which the cost model prices: transfers that share a channel, the activations of
microbatches in flight, uneven shares of a microbatch, and the drain at the end of an iteration.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from stagewright.formulations.forms.answers import Limits, OnProgress
from stagewright.formulations.patterns.one_f_one_b import pattern_load_bound
from stagewright.formulations.patterns.pattern import PatternProblem
from stagewright.formulations.pipelines.bppm import StageChoice, makespan_problem, prefix_sums
from stagewright.formulations.plans.memory import least_state_factor
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.timing import compute_seconds, reduce_seconds, update_seconds
from stagewright.graphs.documents.arrays import Ints
from stagewright.graphs.documents.units import format_seconds
from stagewright.solvers.pipelines.list_scheduling import list_schedule
from stagewright.solvers.planners.baselines.hierarchy import (
    ROUNDING,
    LayerCosts,
    Shape,
    hierarchy_of,
    optimize,
    placed,
)
from stagewright.solvers.planners.steps.proposal import (
    Choices,
    NoPlan,
    Proposal,
    cost_of,
    named_stages,
    proposal_of,
    shortage,
)
from stagewright.solvers.planners.structures.uniform import UniformPlanner


def plan_dp(problem: PipelineProblem, limits: Limits, on_progress: OnProgress) -> Proposal | NoPlan:
    """One stage on all devices, which split each microbatch, followed by one all-reduce.

    If there are more devices than samples in a microbatch, the surplus devices stay idle.
    """
    layers = len(problem.chain)
    devices = range(min(len(problem.cluster), problem.most_replicas(0, layers)))
    whole = (StageChoice(0, layers, tuple(devices)),)
    return _flushed(problem, whole)


def _flushed(problem: PipelineProblem, stages: tuple[StageChoice, ...]) -> Proposal | NoPlan:
    """The stages scheduled by 1F1B, which keeps every limit, with a flush per iteration."""
    scheduling = makespan_problem(problem, stages)
    if scheduling is None:
        return NoPlan(shortage(problem, stages))
    times = list_schedule(scheduling, "1f1b")
    assert times is not None
    return proposal_of(problem, named_stages(problem, stages), times)


DP = UniformPlanner(
    "dp", "data parallelism: the whole model on every device", "SPP section V-A, baseline", plan_dp
)


def plan_gpipe(
    problem: PipelineProblem, limits: Limits, on_progress: OnProgress
) -> Proposal | NoPlan:
    """GPipe as SPP describes it (section II): no replication, devices in the cluster's order."""
    count = min(len(problem.chain), len(problem.cluster))
    parts = np.array_split(np.arange(len(problem.chain)), count)
    stages = tuple(
        StageChoice(int(part[0]), int(part[-1]) + 1, (v,)) for v, part in enumerate(parts)
    )
    scheduling = makespan_problem(problem, stages)
    times = list_schedule(scheduling, "gpipe") if scheduling else None
    if times is None:
        return NoPlan(shortage(problem, stages, in_flight=problem.microbatches))
    return proposal_of(problem, named_stages(problem, stages), times)


GPIPE = UniformPlanner(
    "gpipe", "equal numbers of layers, all forwards first", "Huang et al., NeurIPS 2019", plan_gpipe
)


SMALL = 0.005  # of the plan's time: no cause that is worth a word


def explain_pattern(
    predicted: float,
    problem: PipelineProblem,
    stages: Sequence[Stage],
    asked: PatternProblem,
    period: float,
) -> str:
    """One line on a periodic plan, in which every microbatch has an all-reduce and an update.

    The changes, in seconds per microbatch, add up: whole samples instead of equal shares, the
    devices and links that the stages have, and recomputation; the all-reduce and the update after
    the backward, and the transfers that share a channel; and a longer period because of memory.
    """
    computed, moved = _loads(problem, stages)
    reduced = [reduce_seconds(problem, stage) for stage in stages]
    overlapped, load = max(*computed, *moved, *reduced), pattern_load_bound(asked)
    causes = (
        ("whole samples, links and recomputation of the stages", overlapped - predicted),
        ("all-reduce and update after the backward, shared channels", load - overlapped),
        ("memory", period - load),
    )
    seen = [
        f"{name} {'+' if change > 0 else '-'}{format_seconds(abs(change))}"
        for name, change in causes
        if abs(change) > SMALL * period
    ]
    because = f", because: {', '.join(seen)}" if seen else ""
    return f"{_predicted(predicted)}{format_seconds(period)}{because}"


def _explain_iteration(
    predicted: float, problem: PipelineProblem, stages: Sequence[Stage], iteration: float
) -> str:
    """One line on a finite plan, in which an iteration has one all-reduce and one update.

    Its seconds per microbatch are those of the slowest device or channel, of the longest all-reduce
    with its update, divided among the microbatches, and the rest.
    """
    computed, moved = _loads(problem, stages)
    each = iteration / problem.microbatches
    load = min(max(*computed, *moved), each)
    ends = [reduce_seconds(problem, one) + update_seconds(problem, one) for one in stages]
    ending = min(max(ends) / problem.microbatches, each - load)
    parts = (
        ("slowest device or channel", load),
        ("all-reduce and update", ending),
        ("filling, draining and waiting", each - load - ending),
    )
    seen = [f"{name} {format_seconds(part)}" for name, part in parts if part > SMALL * each]
    return f"{_predicted(predicted)}{format_seconds(each)}, of which {', '.join(seen)}"


def _predicted(seconds: float) -> str:
    return f"PipeDream's recurrence: {format_seconds(seconds)} per microbatch, checked: "


def _loads(problem: PipelineProblem, stages: Sequence[Stage]) -> tuple[list[float], list[float]]:
    """Seconds of computation of each stage, and of both ways of each channel."""
    groups = [[problem.cluster.index[name] for name in stage.devices] for stage in stages]
    computed = [
        sum(compute_seconds(problem, stage, devices))
        for stage, devices in zip(stages, groups, strict=True)
    ]
    moved = [
        sum(problem.transfer_seconds(stage.layers[1], *pair))
        for stage, pair in zip(stages, pairwise(groups), strict=False)
    ]
    return computed, [0.0, *moved]


STEP_SECONDS = 4e-9  # predicted, of a choice in the tables


def plan_pipedream(
    problem: PipelineProblem, limits: Limits, on_progress: OnProgress
) -> Proposal | NoPlan:
    """PipeDream's partition and replication, scheduled by 1F1B with a flush per iteration.

    Devices are used in the order of the cluster, as in the paper's homogeneous levels. If a stage
    has more devices than a microbatch can be split among, the last ones stay idle.
    """
    needed = _predicted_seconds(problem)
    if needed > limits.seconds:
        return NoPlan(f"its tables take about {needed:.2g} s, more than is left", proved=False)
    stages = tuple(
        replace(one, devices=one.devices[: problem.most_replicas(one.start, one.stop)])
        for one in partition(problem)
    )
    return _flushed(problem, stages)


class RecurrenceOptimum(NamedTuple):
    """The stages of the recurrence, and seconds of its slowest stage or channel per microbatch."""

    stages: tuple[StageChoice, ...]
    seconds: float


def optimum(problem: PipelineProblem, shape: Shape = "any") -> RecurrenceOptimum:
    """The answer of PipeDream's optimizer on the levels of the cluster.

    With stages that a device has memory for, if there are such; else memory is not looked at.
    ``shape`` is that of :func:`hierarchy.optimize`: straight pipelines and data parallelism are
    restrictions of the same recurrence. There are no stages if there are too few layers for it.
    """
    hierarchy = hierarchy_of(problem.cluster)
    for memory in (True, False):
        tables = optimize(costs_of(problem, memory=memory), hierarchy, shape=shape)
        slowest = float(tables[-1].slowest[0, -1, -1])
        if np.isfinite(slowest):
            return RecurrenceOptimum(placed(tables, hierarchy), slowest)
    return RecurrenceOptimum((), np.inf)


def partition(problem: PipelineProblem, shape: Shape = "any") -> tuple[StageChoice, ...]:
    """The stages of :func:`optimum`."""
    return optimum(problem, shape).stages


def costs_of(problem: PipelineProblem, *, memory: bool = True) -> LayerCosts:
    """The costs of the slowest kind of device, and the layers that fit in the largest memory."""
    costs = [problem.costs(kind, 1) for kind in problem.kinds]
    work = np.max([c.forward_seconds + c.backward_seconds for c in costs], axis=0)
    layers = len(work)
    return LayerCosts(
        work=work,
        parameter_bytes=problem.chain.parameter_bytes,
        output_bytes=np.array([problem.boundary_bytes(s + 1) for s in range(layers)]),
        most_stop=_most_stop(problem) if memory else np.full(layers, layers),
    )


def _most_stop(problem: PipelineProblem) -> Ints:
    """The furthest end of a stage from each layer whose states fit on the largest device."""
    states = prefix_sums(least_state_factor(problem) * problem.chain.parameter_bytes)
    room = float(problem.memory_bytes.max()) * (1 + ROUNDING)
    found: Ints = np.searchsorted(states, states[:-1] + room, side="right") - 1
    return found


def _predicted_seconds(problem: PipelineProblem) -> float:
    """Seconds that the tables of all levels take, if one in ten cuts is looked at."""
    layers, levels = len(problem.chain), hierarchy_of(problem.cluster).levels
    steps = [layers**3 / 60 * level.workers**2 / 2 for level in levels[:-1]]
    return (sum(steps) + layers**2 / 20 * levels[-1].workers ** 2 / 2) * STEP_SECONDS


@dataclass(frozen=True, slots=True)
class ExplainedPlanner(UniformPlanner):
    """PipeDream's planner, whose notes compare the recurrence's prediction with the plan's time."""

    def propose(
        self, problem: PipelineProblem, choices: Choices, limits: Limits, on_progress: OnProgress
    ) -> Proposal | NoPlan:
        """The proposal of the planner, with a note that explains its cost."""
        found = UniformPlanner.propose(self, problem, choices, limits, on_progress)
        if isinstance(found, NoPlan):
            return found
        predicted, cost = optimum(problem).seconds, cost_of(problem, found)
        note = _explain_iteration(predicted, problem, found.stages, cost)
        return replace(found, notes=(*found.notes, note))


PLANNER = ExplainedPlanner(
    "pipedream",
    "hierarchical partition and replication, 1F1B with a flush",
    "Narayanan's thesis 2.4.1",
    plan_pipedream,
)
