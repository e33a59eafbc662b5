"""A published schedule, or the optimal one, on balanced stages of a model.

Every device of the order has the same number of stages, cut so that the slowest is as fast as
possible; devices are in SPP's order. Memory is checked, and known to the schedules that respect it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stagewright.formulations.checking.peaks import memory_exceeded
from stagewright.formulations.checking.times import read_times
from stagewright.formulations.forms.answers import Limits, OnProgress
from stagewright.formulations.patterns.one_f_one_b import least_period, one_f_one_b_star
from stagewright.formulations.patterns.pattern_problems import pattern_problem
from stagewright.formulations.plans.actions import WEIGHT_RULES, Weights
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.structure import Structure, misfit, work_of
from stagewright.formulations.schedules.order import Order, placed
from stagewright.formulations.schedules.planned import (
    copies_of,
    stage_times,
    stages_of,
    starts_to_the_end,
)
from stagewright.formulations.schedules.published.kinds import (
    KINDS,
    OPTIMAL,
    ScheduleChoice,
    Sizes,
    schedule_of,
)
from stagewright.formulations.schedules.timing import ActivationMemory
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.ordering import recursive_device_order
from stagewright.solvers.pipelines.structures.scheduling import best_schedule
from stagewright.solvers.planners.steps.planner import (
    ANY_RECOMPUTATION,
    PlannerOptions,
    SearchPlanner,
)
from stagewright.solvers.planners.steps.proposal import (
    Choices,
    MemoryMode,
    NoPlan,
    PeriodicProposal,
    Proposal,
    cost_of,
    with_memory_mode,
)
from stagewright.solvers.planners.structures.arrangements import balanced_cuts
from stagewright.solvers.planners.structures.reordering import reorder
from stagewright.solvers.planners.structures.uniform import RULES

Found = Proposal | PeriodicProposal | NoPlan


@dataclass(frozen=True, slots=True)
class StagedOrder:
    """An order on the stages of a model; ``note`` says why devices are left over."""

    order: Order
    stages: tuple[Stage, ...]
    note: str = ""


def plan_order(
    problem: PipelineProblem, limits: Limits, on_progress: OnProgress, choices: Choices
) -> Found:
    """The schedule that is asked for, with the fastest allowed recomputation that fits.

    Raises
    ------
    InputError
        If the schedule does not exist for these devices, layers and microbatches, or needs the
        times of both parts of a backward.
    """
    asked = choices.order or ScheduleChoice()
    if asked.kind == OPTIMAL:
        stages = _placed_stages(problem, asked)
        attempts: list[Found] = [
            _optimal(problem, _with_mode(stages, mode), limits, on_progress)
            for mode in choices.uniform_modes
        ]
    else:
        layout = _largest_layout(problem, asked)
        attempts = [
            _published(problem, asked.kind, replace(layout, stages=_with_mode(layout.stages, mode)))
            for mode in choices.uniform_modes
        ]
    found = [one for one in attempts if not isinstance(one, NoPlan)]
    return min(found, key=lambda one: _seconds(problem, one)) if found else attempts[0]


def _with_mode(stages: Sequence[Stage], mode: MemoryMode) -> tuple[Stage, ...]:
    return tuple(with_memory_mode(stage, mode) for stage in stages)


def _seconds(problem: PipelineProblem, found: Proposal | PeriodicProposal) -> float:
    return (
        found.predicted_seconds if isinstance(found, PeriodicProposal) else cost_of(problem, found)
    )


# --- Published schedules ----------------------------------------------------------------------


def _largest_layout(problem: PipelineProblem, asked: ScheduleChoice) -> StagedOrder:
    """The layout on as many devices as the schedule and the layers allow."""
    order, note = _largest_order(problem, asked)
    return StagedOrder(order, stages_of(order, *_cuts(problem, asked.kind, copies_of(order))), note)


def require_order(problem: PipelineProblem, choices: Choices) -> None:
    """Refuse a published schedule that does not exist for these devices, layers, microbatches."""
    asked = choices.order or ScheduleChoice()
    if asked.kind == OPTIMAL:
        return
    _largest_order(problem, asked)
    if KINDS[asked.kind].is_split:
        _require_parts(problem, asked.kind)


def _largest_order(problem: PipelineProblem, asked: ScheduleChoice) -> tuple[Order, str]:
    """The order on as many devices as possible, and why others are left over."""
    most = sum(asked.replicas) or len(problem.cluster)
    if most > len(problem.cluster):
        raise InputError(
            f"replicas {', '.join(map(str, asked.replicas))} are {most} devices, the cluster has "
            f"{len(problem.cluster)}"
        )
    least = most if asked.replicas else 1
    refusal: InputError | None = None
    for devices in range(most, least - 1, -1):
        try:
            order = _order(problem, asked, devices)
        except InputError as error:
            refusal = refusal or error
            continue
        return order, f"on {devices} of {most} devices: {refusal}" if refusal else ""
    assert refusal is not None  # every number of devices was refused
    raise refusal


def _order(problem: PipelineProblem, asked: ScheduleChoice, devices: int) -> Order:
    """The order on that many devices, of stages that the layers suffice for."""
    sizes = Sizes(devices, problem.microbatches, asked.count, asked.replicas)
    order = schedule_of(asked.kind, sizes)
    _require_layers(problem, asked.kind, copies_of(order))
    return order


def _require_layers(problem: PipelineProblem, kind: str, copies: Sequence[Sequence[int]]) -> None:
    if len(copies) > len(problem.chain):
        used = 1 + max(max(one) for one in copies)
        raise InputError(
            f"{kind} on {used} devices has {len(copies)} stages, the model has only "
            f"{len(problem.chain)} layers"
        )


def _cuts(
    problem: PipelineProblem, kind: str, copies: Sequence[Sequence[int]]
) -> tuple[list[int], list[str]]:
    """Where the stages on ``copies`` are cut, and the names of the devices, in SPP's order."""
    _require_layers(problem, kind, copies)
    devices = recursive_device_order(problem.cluster)
    groups = [tuple(devices[d] for d in one) for one in copies]
    cuts = balanced_cuts(problem, groups, round_robin=True)
    assert cuts is not None  # there are enough layers, and whole microbatches
    return cuts, [problem.cluster.devices[v].name for v in devices]


def _published(problem: PipelineProblem, name: str, layout: StagedOrder) -> Found:
    """The plan of a published schedule on given stages."""
    found = timed(problem, name, layout)
    return fitting(problem, name, found) if isinstance(found, Proposal) else found


def timed(problem: PipelineProblem, name: str, layout: StagedOrder) -> Found:
    """The plan of a published schedule on given stages; memory is not checked at every instant.

    Raises InputError if the schedule needs the times of both parts of a backward, and there are
    none.
    """
    kind, order, stages = KINDS[name], layout.order, layout.stages
    if kind.is_split:
        _require_parts(problem, name)
    if kind.weights == "double-buffer":
        return _without_flush(problem, name, layout)
    structure = Structure(stages, (order.is_split,) * len(stages))
    short = misfit(problem, structure)
    if short is not None:
        return NoPlan(short)
    if kind.depends_on_times:
        order = schedule_of(name, _priced(problem, layout))
    weights, note = _weights(kind.weights, name, stages)
    found = in_order(problem, stages, order, weights)
    return replace(found, notes=tuple(filter(None, (layout.note, note))))


def in_order(
    problem: PipelineProblem, stages: tuple[Stage, ...], order: Order, weights: Weights = "flush"
) -> Proposal:
    """The proposal that follows an order as early as possible; memory is not checked.

    All-reduces and optimizer steps follow the backwards.

    Raises InputError if the devices deadlock.
    """
    starts = starts_to_the_end(problem, stages, order, WEIGHT_RULES[weights])
    return Proposal(stages, starts, weights=weights)


def _require_parts(problem: PipelineProblem, name: str) -> None:
    layer = problem.layer_with_whole_backward(0, len(problem.chain))
    if layer is not None:
        raise InputError(
            f"{name} splits backwards, but layer {layer!r} has only the time of a whole one: give "
            "its input_gradient_seconds and weight_gradient_seconds"
        )


def _weights(rule: Weights, name: str, stages: Sequence[Stage]) -> tuple[Weights, str]:
    """The weight rule of the plan, and why it is not the publication's."""
    if WEIGHT_RULES[rule].updates_every_round and any(len(one.devices) > 1 for one in stages):
        return "flush", (
            f"weights 'flush' in place of {name}'s {rule!r}: plans have no all-reduce after every "
            "round of a replicated stage"
        )
    return rule, ""


def _priced(problem: PipelineProblem, layout: StagedOrder) -> Sizes:
    """The sizes with the times of the stages, and with the memory that their devices have left.

    What a stage saves is kept until its weight gradient; one recomputation at a time has room.
    """
    stages = layout.stages
    work, _, _ = work_of(problem, Structure(stages, (True,) * len(stages)))
    limits = []
    for d in range(len(layout.order.rows)):
        mine = [s for s, home in enumerate(layout.order.device) if home == d]
        room = float(work.room[work.members[mine[0]][0]])
        limits.append(max(room - work.again[mine].max(), work.kept[mine].sum()))
    saved = tuple(work.kept.tolist())
    return Sizes(
        len(limits),
        problem.microbatches,
        times=stage_times(problem, stages),
        memory=ActivationMemory(saved, saved, tuple(limits)),
    )


def _without_flush(
    problem: PipelineProblem, name: str, layout: StagedOrder
) -> PeriodicProposal | NoPlan:
    """1F1B's pattern at its least period: iterations overlap, with two versions of the weights."""
    asked = pattern_problem(problem, layout.stages)
    period = least_period(asked)
    if period == np.inf:
        return NoPlan(f"{name} does not fit at any period on these stages")
    pattern = one_f_one_b_star(asked, period)
    notes = (layout.note,) if layout.note else ()
    return PeriodicProposal(layout.stages, pattern, period, (), notes)


def fitting(problem: PipelineProblem, name: str, proposal: Proposal) -> Proposal | NoPlan:
    """The proposal, if the memory of every device suffices at every instant."""
    rule = WEIGHT_RULES[proposal.weights]
    plan = assemble(problem, name, proposal.stages, proposal.starts, rule)
    for short in memory_exceeded(read_times(problem, plan)):
        return NoPlan(f"{name}: {short.place} {short.message}")
    return proposal


# --- The optimal schedule ---------------------------------------------------------------------


def _placed_stages(problem: PipelineProblem, asked: ScheduleChoice) -> tuple[Stage, ...]:
    most = min(len(problem.cluster), len(problem.chain) // asked.count)
    device = placed(asked.way, max(most, 1), asked.count)
    cuts, names = _cuts(problem, OPTIMAL, [(d,) for d in device])
    return tuple(Stage((cuts[s], cuts[s + 1]), (names[d],)) for s, d in enumerate(device))


def _optimal(
    problem: PipelineProblem, stages: tuple[Stage, ...], limits: Limits, on_progress: OnProgress
) -> Proposal | NoPlan:
    """The best order of the stages, with split backwards where the profile has both parts."""
    split = [problem.layer_with_whole_backward(*stage.layers) is None for stage in stages]
    structure = Structure(stages, tuple(split))
    work, endings, _ = work_of(problem, structure)
    short = misfit(problem, structure)
    if short is not None:
        return NoPlan(short)
    listed = best_schedule(work, endings, RULES)
    assert listed is not None  # every structure that fits has a schedule
    known = Proposal(stages, listed.starts)
    better = reorder(problem, known, limits, on_progress)
    return known if isinstance(better, NoPlan) else better


PLANNER = SearchPlanner(
    "order",
    "balanced stages, one on every device or several, in a published or the optimal schedule",
    "`stagewright schedule`, sources of its kinds",
    plan_order,
    PlannerOptions(ANY_RECOMPUTATION, order=True),
)
