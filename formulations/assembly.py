"""From stages and start times to the plan document."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from stagewright.formulations.actions import Action, ActionKind
from stagewright.formulations.check import durations, expected_actions, predict, require_valid
from stagewright.formulations.makespan import Timetable
from stagewright.formulations.pipeline import PipelineProblem
from stagewright.formulations.plan import (
    Bound,
    Certificate,
    Guarantee,
    PipelinePlan,
    PlannedLayer,
    Schedule,
    ScheduledAction,
    Stage,
)


def assemble(
    problem: PipelineProblem, planner: str, stages: Sequence[Stage], times: Timetable
) -> PipelinePlan:
    """The checked plan of ``stages`` with the start times of all microbatches, uncertified.

    Raises
    ------
    InvalidPlan
        If a planner's answer breaks a rule of the problem: a fault of ours.
    """
    actions = sorted(
        _scheduled(problem, stages, times),
        key=lambda entry: (entry.start_seconds, entry.finish_seconds, entry.action),
    )
    plan = PipelinePlan(
        problem.digest,
        planner,
        problem.chain.name,
        problem.cluster.name,
        problem.microbatches,
        tuple(stages),
        Schedule(tuple(actions)),
        layers=tuple(
            PlannedLayer(layer.name, layer.parameter_bytes) for layer in problem.chain.layers
        ),
    )
    require_valid(problem, plan)
    return replace(plan, predicted=predict(problem, plan))


def certify(
    problem: PipelineProblem,
    plan: PipelinePlan,
    bounds: Sequence[Bound],
    guarantees: Sequence[Guarantee],
) -> PipelinePlan:
    """``plan`` with its certificate, checked. ``bounds`` needs one of scope ``problem``."""
    assert plan.predicted is not None
    cost = plan.predicted.iteration_seconds
    # A bound that equals the cost may exceed it by the rounding of its sums.
    capped = [replace(bound, seconds=min(bound.seconds, cost)) for bound in bounds]
    whole = max((b for b in capped if b.scope == "problem"), key=lambda bound: bound.seconds)
    schedule = max(capped, key=lambda bound: bound.seconds)
    certificate = Certificate(
        cost,
        whole.seconds,
        (cost - whole.seconds) / cost if cost else 0.0,
        whole.proved_by,
        schedule.seconds,
        (cost - schedule.seconds) / cost if cost else 0.0,
        schedule.proved_by,
        tuple(capped),
        tuple(guarantees),
    )
    certified = replace(plan, certificate=certificate)
    require_valid(problem, certified)
    return certified


def _scheduled(
    problem: PipelineProblem, stages: Sequence[Stage], times: Timetable
) -> Iterator[ScheduledAction]:
    seconds = durations(problem, stages)
    for action in expected_actions(stages, problem.microbatches):
        s, m = action.stage, action.microbatch
        start = _start(times, action)
        lasting = seconds[action.kind][s, m or 0]  # an all-reduce has one column
        finish = start + float(lasting)
        if m is None:
            group, volume = stages[s].devices, problem.gradient_bytes(*stages[s].layers)
            yield ScheduledAction(group[0], str(action), start, finish, group, group, volume)
        elif action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            for device in stages[s].runners(m):
                yield ScheduledAction(device, str(action), start, finish)
        else:
            towards = s + 1 if action.kind is ActionKind.SEND_FORWARD else s - 1
            sources, targets = stages[s].runners(m), stages[towards].runners(m)
            volume = problem.boundary_bytes(stages[min(s, towards)].layers[1])
            yield ScheduledAction(sources[0], str(action), start, finish, sources, targets, volume)


def _start(times: Timetable, action: Action) -> float:
    s, m = action.stage, action.microbatch
    if m is None:
        return float(times.reduce[s])
    if action.kind is ActionKind.SEND_FORWARD:
        return float(times.send_forward[s, m])
    if action.kind is ActionKind.SEND_BACKWARD:
        return float(times.send_backward[s - 1, m])
    rows = times.forward if action.kind is ActionKind.FORWARD else times.backward
    return float(rows[s, m])
