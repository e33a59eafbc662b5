"""Build the plan document from stages and start times, those of SPP's timetables too."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from stagewright.formulations.checking.certificates import certificate
from stagewright.formulations.checking.check import predicted, require_valid
from stagewright.formulations.checking.times import read_times
from stagewright.formulations.patterns.pattern import Pattern
from stagewright.formulations.patterns.pattern_problems import pattern_problem
from stagewright.formulations.pipelines.makespan import Timetable
from stagewright.formulations.plans import timing
from stagewright.formulations.plans.actions import (
    COMPUTE,
    DOUBLE_BUFFER,
    FLUSH,
    ON_DEVICE,
    ActionKind,
    Operation,
    WeightRule,
)
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import (
    Begins,
    Bound,
    Guarantee,
    PeriodicAction,
    PeriodicSchedule,
    PipelinePlan,
    PlannedLayer,
    Schedule,
    ScheduledAction,
    Stage,
)
from stagewright.formulations.plans.plan_class import class_of
from stagewright.formulations.plans.timing import Blocks, durations
from stagewright.graphs.documents.arrays import Floats


def starts_of(problem: PipelineProblem, stages: Sequence[Stage], times: Timetable) -> Blocks:
    """The start times of ``times`` as the checker's blocks.

    The all-reduce and the optimizer step, which a makespan problem combines, are separated, and
    transfers between stages on the same devices, which are no actions, are removed.
    """
    lasting = durations(problem, stages)
    nowhere = np.full((1, problem.microbatches), np.nan)
    reduced = np.nan_to_num(lasting[ActionKind.REDUCE])
    starts = {
        ActionKind.FORWARD: times.forward,
        ActionKind.BACKWARD: times.backward,
        ActionKind.SEND_FORWARD: np.concatenate([times.send_forward, nowhere]),
        ActionKind.SEND_BACKWARD: np.concatenate([nowhere, times.send_backward]),
        ActionKind.REDUCE: times.reduce[:, None],
        ActionKind.UPDATE: times.reduce[:, None] + reduced,
    }
    return {
        kind: np.where(np.isnan(seconds), np.nan, starts.get(kind, np.nan))
        for kind, seconds in lasting.items()
    }


def timetable_of(starts: Blocks) -> Timetable:
    """The inverse of :func:`starts_of`, for split stages on disjoint devices, whole backwards."""
    begun = np.fmin(starts[ActionKind.REDUCE], starts[ActionKind.UPDATE])[:, 0]
    return Timetable(
        starts[ActionKind.FORWARD],
        starts[ActionKind.BACKWARD],
        starts[ActionKind.SEND_FORWARD][:-1],
        starts[ActionKind.SEND_BACKWARD][1:],
        np.where(np.isnan(begun), starts[ActionKind.BACKWARD].max(axis=1), begun),
    )


def assemble(
    problem: PipelineProblem,
    planner: str,
    stages: Sequence[Stage],
    starts: timing.Blocks,
    rule: WeightRule = FLUSH,
    begins: Begins = "forward",
    sub_ends: Floats | None = None,
) -> PipelinePlan:
    """Build the plan of ``stages`` with the start times of all actions, unchecked and uncertified.

    A backward is split where ``starts`` has its input gradient. ``begins`` as in `Schedule`.
    ``sub_ends`` has the ends of the weight gradients that are in the sub-streams of their devices,
    shape (S, M), NaN for those that are not.
    """
    actions = sorted(
        _scheduled(problem, stages, starts, rule, sub_ends),
        key=lambda entry: (entry.start_seconds, entry.finish_seconds, entry.action),
    )
    return _with_figures(problem, planner, stages, Schedule(tuple(actions), begins), rule)


def assemble_pattern(
    problem: PipelineProblem,
    planner: str,
    stages: Sequence[Stage],
    pattern: Pattern,
    rule: WeightRule = DOUBLE_BUFFER,
) -> PipelinePlan:
    """Build the periodic plan of ``stages`` with the times of ``pattern``, unchecked, uncertified.

    ``pattern`` is a solution of ``pattern_problem(problem, stages, rule)``.
    """
    asked = pattern_problem(problem, stages, rule)
    timed = [
        (job.operation, start, job.seconds)
        for job, start in zip(asked.jobs, pattern.starts, strict=True)
    ]
    reduces = zip(stages, asked.reduce_starts(pattern), asked.reduce, strict=True)
    timed += [
        (Operation(s, ActionKind.REDUCE), start, seconds)
        for s, (stage, start, seconds) in enumerate(reduces)
        if stage.replicas > 1 and not rule.updates_every_round
    ]
    actions = [
        entry
        for operation, start, seconds in timed
        for entry in _repeated(problem, stages, operation, start, seconds, pattern.period)
    ]
    actions.sort(key=lambda entry: (entry.start_seconds, entry.seconds, entry.action, entry.device))
    schedule = PeriodicSchedule(pattern.period, tuple(actions), asked.pause_seconds)
    return _with_figures(problem, planner, stages, schedule, rule)


def _with_figures(
    problem: PipelineProblem,
    planner: str,
    stages: Sequence[Stage],
    schedule: Schedule | PeriodicSchedule,
    rule: WeightRule,
) -> PipelinePlan:
    """The plan with the predictions of its actions; `certify` and `require_valid` check it."""
    plan = PipelinePlan(
        digest=problem.digest,
        planner=planner,
        model=problem.chain.name,
        cluster=problem.cluster.name,
        microbatches=problem.microbatches,
        stages=tuple(stages),
        schedule=schedule,
        weights=rule.name,
        memory_limit_bytes=problem.memory_limit_bytes,
        assumed_share=problem.assumed_share,
        microbatch_size=problem.microbatch_size,
        message_seconds=problem.cluster.message_seconds,
        message_bytes_per_second=problem.cluster.message_bytes_per_second,
        reference_seconds=problem.chain.reference_seconds,
        layers=tuple(
            PlannedLayer(layer.name, layer.parameter_bytes) for layer in problem.chain.layers
        ),
    )
    return replace(plan, predicted=predicted(read_times(problem, plan)))


def _repeated(
    problem: PipelineProblem,
    stages: Sequence[Stage],
    operation: Operation,
    start: float,
    seconds: float,
    period: float,
) -> Iterator[PeriodicAction]:
    """The entries of an operation whose first time begins at ``start``."""
    shift = math.floor(start / period)
    begin = start - shift * period
    if begin >= period:  # rounded up to the start of the next period
        shift, begin = shift + 1, 0.0
    stage, text = stages[operation.stage], str(operation)
    if operation.kind in COMPUTE:
        for device in stage.devices:
            yield PeriodicAction(device, text, max(begin, 0.0), shift, seconds)
        return
    sources, targets, volume = _carried(problem, stages, operation)
    yield PeriodicAction(
        sources[0], text, max(begin, 0.0), shift, seconds, sources, targets, volume
    )


def _carried(
    problem: PipelineProblem, stages: Sequence[Stage], operation: Operation
) -> tuple[tuple[str, ...], tuple[str, ...], float]:
    """Sources, targets and bytes of a transfer or an all-reduce."""
    s = operation.stage
    if operation.kind is ActionKind.REDUCE:
        return stages[s].devices, stages[s].devices, timing.reduce_bytes(problem, stages[s])
    towards = s + 1 if operation.kind is ActionKind.SEND_FORWARD else s - 1
    volume = timing.transfer_bytes(problem, stages[s], stages[towards])
    return stages[s].devices, stages[towards].devices, volume


def certify(
    problem: PipelineProblem,
    plan: PipelinePlan,
    bounds: Sequence[Bound],
    guarantees: Sequence[Guarantee],
) -> PipelinePlan:
    """Check ``plan`` and add its certificate.

    ``bounds`` must contain one of scope ``problem`` on every plan. Bounds on classes that do not
    contain this plan are only listed.

    Raises InvalidPlan if the plan breaks a rule of the problem, or costs less than a bound on its
    class. Both are bugs of Stagewright.
    """
    assert plan.predicted is not None
    cost = plan.predicted.iteration_seconds
    certified = replace(plan, certificate=certificate(class_of(plan), cost, bounds, guarantees))
    require_valid(problem, certified)
    return certified


def _scheduled(
    problem: PipelineProblem,
    stages: Sequence[Stage],
    starts: timing.Blocks,
    rule: WeightRule,
    sub_ends: Floats | None,
) -> Iterator[ScheduledAction]:
    split = ~np.isnan(starts[ActionKind.INPUT_GRADIENT])
    seconds = timing.durations(problem, stages, split, rule)
    ends = {kind: starts[kind] + seconds[kind] for kind in seconds}
    beside = np.full(split.shape, np.nan) if sub_ends is None else sub_ends
    weights = ActionKind.WEIGHT_GRADIENT
    ends[weights] = np.where(np.isnan(beside), ends[weights], beside)
    updated = timing.updated_stages(problem, stages, rule)
    for action in timing.expected_actions(stages, problem.microbatches, split, updated, rule):
        s, m = action.stage, action.microbatch
        start = float(starts[action.kind][s, m or 0])  # an all-reduce has one column
        finish = float(ends[action.kind][s, m or 0])
        if action.kind is ActionKind.REDUCE:
            group, volume = stages[s].devices, timing.reduce_bytes(problem, stages[s])
            yield ScheduledAction(group[0], str(action), start, finish, group, group, volume)
        elif m is None or action.kind in ON_DEVICE:
            in_sub = action.kind is weights and not np.isnan(beside[s, m])
            for device in stages[s].devices if m is None else stages[s].runners(m):
                yield ScheduledAction(
                    device, str(action), start, finish, stream="sub" if in_sub else None
                )
        else:
            assert m is not None  # a transfer is of a microbatch
            towards = s + 1 if action.kind is ActionKind.SEND_FORWARD else s - 1
            sources, targets = stages[s].runners(m), stages[towards].runners(m)
            volume = timing.transfer_bytes(problem, stages[s], stages[towards])
            yield ScheduledAction(sources[0], str(action), start, finish, sources, targets, volume)
