"""The simulated actions: of a finite plan, or of many iterations of a periodic plan."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from stagewright.formulations.plans.actions import ON_DEVICE, PLANNED, UPDATE, Action, ActionKind
from stagewright.formulations.plans.periodic import (
    finite_run,
    forward_shifts,
    period_begin,
    steady_microbatches,
)
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import (
    PeriodicSchedule,
    PipelinePlan,
    Schedule,
    ScheduledAction,
    Stage,
)
from stagewright.formulations.plans.shards import groups_of
from stagewright.formulations.plans.timing import (
    durations,
    expected_actions,
    kernel_shares,
    split_backwards,
    update_seconds,
    updated_stages,
)

Table = list[list[list[int]]]
"""Entries by stage and microbatch, in the order of their devices."""

Entries = dict[ActionKind, Table]
"""All-reduces are under microbatch 0, one after another, one per iteration."""

_MEASURED_MICROBATCHES = 48  # minimum for a periodic plan, to average jitter


@dataclass(frozen=True, slots=True)
class Run:
    """The simulated actions: of a finite plan, or of many iterations of a periodic plan.

    ``plan`` is finite, ``actions`` are those of its entries (the devices of a stage share one
    text). In a run of many iterations stages share links, and weights have two versions. ``sub``
    are the entries in sub-streams; if there are any, ``shares`` has the share of its device that
    each entry occupies.
    """

    plan: PipelinePlan
    actions: list[Action]
    entries: Entries
    seconds: list[float]
    iteration_microbatches: int
    is_periodic: bool
    sub: frozenset[int] = frozenset()
    shares: tuple[float, ...] = ()

    def by_device(self) -> dict[str, list[int]]:
        """The entries that each device computes."""
        own: dict[str, list[int]] = {
            name: [] for stage in self.plan.stages for name in stage.devices
        }
        for i, action in enumerate(self.actions):
            if action.kind in ON_DEVICE:
                own[self.plan.actions[i].device].append(i)
        return own


def prepared_run(problem: PipelineProblem, plan: PipelinePlan, factors: Mapping[str, float]) -> Run:
    """The simulated actions with the cost model's seconds."""
    schedule, finite = plan.schedule, plan
    if isinstance(schedule, PeriodicSchedule):
        steady = steady_microbatches(schedule)
        measured = max(2 * steady, 2 * plan.microbatches, _MEASURED_MICROBATCHES)
        iterations = math.ceil((3 * steady + measured) / plan.microbatches)
        finite = finite_run(plan, iterations)
        finite = _with_updates(problem, plan, schedule, finite)
        problem = replace(problem, microbatches=finite.microbatches)
    actions = _actions(finite)
    seconds = _seconds(problem, finite, actions, factors)
    entries = _entries_by_action(finite, actions)
    run = Run(finite, actions, entries, seconds, plan.microbatches, finite is not plan)
    if not plan.uses_two_streams:
        return run
    sub = frozenset(i for i, entry in enumerate(plan.actions) if entry.stream == "sub")
    shares = [kernel_shares(problem, stage) for stage in plan.stages]
    occupied = tuple(shares[action.stage].get(action.kind, 0.0) for action in actions)
    return replace(run, sub=sub, shares=occupied)


def planned_run(plan: PipelinePlan, iteration_microbatches: int) -> Run:
    """The actions of a finite plan with its own seconds, or of several iterations of a plan."""
    actions = _actions(plan)
    seconds = [entry.finish_seconds - entry.start_seconds for entry in plan.actions]
    entries = _entries_by_action(plan, actions)
    is_periodic = iteration_microbatches < plan.microbatches
    return Run(plan, actions, entries, seconds, iteration_microbatches, is_periodic)


def is_complete(plan: PipelinePlan) -> bool:
    """Whether the schedule of a finite plan has the actions that its stages need, and no other."""
    found = {entry.action for entry in plan.actions}
    updated = [s for s in range(len(plan.stages)) if str(Action(s, UPDATE)) in found]
    split, rule = split_backwards(plan), plan.weight_rule
    expected = expected_actions(plan.stages, plan.microbatches, split, updated, rule)
    return found == set(map(str, expected))


def _with_updates(
    problem: PipelineProblem, plan: PipelinePlan, schedule: PeriodicSchedule, run: PipelinePlan
) -> PipelinePlan:
    """The run with the updates of its iterations, one after another in the pauses.

    The update of iteration i is in the last pause before iteration i + 2 begins on its stage.
    """
    m, shifts = plan.microbatches, forward_shifts(schedule)
    entries, until = [], dict[tuple[str, float], float]()
    for s in sorted(updated_stages(problem, plan.stages, plan.weight_rule)):
        stage = plan.stages[s]
        seconds = update_seconds(problem, stage)
        for i, name in product(range(run.microbatches // m), stage.devices):
            period = ((i + 2) * m + shifts[s]) // m * m
            begin = period_begin(schedule, m, period) - schedule.pause_seconds
            start = until.get((name, begin), begin)
            until[name, begin] = start + seconds
            entries.append(ScheduledAction(name, str(Action(s, UPDATE)), start, start + seconds))
    actions = (*run.actions, *entries)
    return replace(run, schedule=Schedule(actions))


def _actions(plan: PipelinePlan) -> list[Action]:
    """The action of every entry; the devices of a stage share one text."""
    expected = expected_actions(
        plan.stages,
        plan.microbatches,
        split_backwards(plan),
        range(len(plan.stages)),
        plan.weight_rule,
    )
    by_text = {str(action): action for action in expected}
    return [by_text[entry.action] for entry in plan.actions]


def _seconds(
    problem: PipelineProblem,
    plan: PipelinePlan,
    actions: list[Action],
    factors: Mapping[str, float],
) -> list[float]:
    lasting = durations(problem, plan.stages, split_backwards(plan), plan.weight_rule)
    table = {kind: rows.tolist() for kind, rows in lasting.items()}
    return [
        table[action.kind][action.stage][action.microbatch or 0]
        * (factors.get(entry.device, 1.0) if action.kind in ON_DEVICE else 1.0)
        for action, entry in zip(actions, plan.actions, strict=True)
    ]


def _entries_by_action(plan: PipelinePlan, actions: list[Action]) -> Entries:
    entries = plan.actions
    found: Entries = {
        kind: [[[] for _ in range(plan.microbatches)] for _ in plan.stages] for kind in PLANNED
    }
    for i in sorted(range(len(entries)), key=lambda i: entries[i].device):
        found[actions[i].kind][actions[i].stage][actions[i].microbatch or 0].append(i)
    return found


def joint_groups(
    plan: PipelinePlan, stage: Stage, kind: ActionKind, entries: Sequence[int]
) -> list[list[int]]:
    """Entries of an action of ``stage`` by the groups of devices that exchange values within it.

    These are tensor groups, or all replicas that divide their state.
    """
    size = stage.joint(kind)
    at = {plan.actions[i].device: i for i in entries}
    groups = groups_of(stage.devices, size)
    return [[at[name] for name in group] for group in groups if size > 1 and group[0] in at]


def together(run: Run) -> Run:
    """The run in which devices that exchange values within an action take as long as the slowest.

    A round-robin stage's updates are such an action, if they end with an all-gather.
    """
    seconds = list(run.seconds)
    for (s, stage), kind in product(enumerate(run.plan.stages), ON_DEVICE):
        for group in (
            one
            for entries in run.entries[kind][s]
            for one in joint_groups(run.plan, stage, kind, entries)
        ):
            slowest = max(seconds[i] for i in group)
            for i in group:
                seconds[i] = slowest
    return replace(run, seconds=seconds)


def either(one: Table, other: Table) -> Table:
    """The entries of two kinds, of which each microbatch has exactly one."""
    return [
        [first or second for first, second in zip(*rows, strict=True)]
        for rows in zip(one, other, strict=True)
    ]
