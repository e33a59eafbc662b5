"""A discrete-event run of the order in a plan, under the cost model.

Only the order of a plan's actions on each device and channel is read from its times. Every action
then starts as soon as what it depends on and what stands before it on its device or channel are
done. Memory needs no rule of its own: a valid plan keeps within it by its order on the device.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product

import numpy as np

from stagewright.formulations.actions import COMPUTE, PLANNED, Action, ActionKind, along_way
from stagewright.formulations.check import (
    devices_by_turns,
    durations,
    expected_actions,
    require_structure,
    split_backwards,
)
from stagewright.formulations.pipeline import PipelineProblem
from stagewright.formulations.plan import InvalidPlan, PipelinePlan, ScheduledAction
from stagewright.graphs.errors import InputError
from stagewright.graphs.precedence import find_cycle
from stagewright.graphs.units import require_amount

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
SEND_F, SEND_B = ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD
REDUCE = ActionKind.REDUCE

Table = list[list[list[int]]]
"""Entries by stage and microbatch, in the order of their devices."""

Entries = dict[ActionKind, Table]


class Deadlock(InvalidPlan):
    """An order that contradicts the dependencies; the message prints the cycle of actions."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """What happened: the plan's actions, in the plan's listing, at their simulated times.

    ``idle_seconds`` is each used device's time without computation. ``slack_seconds`` is by how
    much one of its computations may last longer without a longer iteration: 0 for a device on a
    critical path.
    """

    iteration_seconds: float
    actions: tuple[ScheduledAction, ...]
    idle_seconds: dict[str, float]
    slack_seconds: dict[str, float]


def simulate(
    problem: PipelineProblem,
    plan: PipelinePlan,
    *,
    jitter: float = 0.0,
    stragglers: Mapping[str, float] | None = None,
    seed: int = 0,
) -> Simulation:
    """Run the order of ``plan``.

    Without jitter and stragglers no action of a valid plan ends later than in the plan, and all
    times are the plan's if nothing in it waits without need.

    Parameters
    ----------
    jitter
        Every duration is multiplied by a log-normal variable of mean 1 whose logarithm has this
        standard deviation.
    stragglers
        Factors on the computations of some devices, by name; 2 is twice as slow.
    seed
        Of the jitter.

    Raises
    ------
    InvalidPlan
        If actions are missing or misplaced, or the plan answers another problem.
    Deadlock
        If the order contradicts the dependencies.
    InputError
        If a straggler is no device of the cluster, or a factor or the jitter is out of range.
    """
    factors = dict(stragglers or {})
    _require_options(problem, jitter, factors)
    require_structure(problem, plan)
    actions = _actions(plan)
    seconds = _seconds(problem, plan, actions, factors)
    if jitter > 0:
        normal = np.random.default_rng(seed).normal(-(jitter**2) / 2, jitter, len(seconds))
        seconds = [value * math.exp(draw) for value, draw in zip(seconds, normal, strict=True)]
    followers, order, starts = _run(plan, actions, seconds)
    return _summary(plan, actions, seconds, starts, _slacks(followers, order, starts, seconds))


def _require_options(problem: PipelineProblem, jitter: float, factors: Mapping[str, float]) -> None:
    require_amount(jitter, "jitter")
    for name, factor in factors.items():
        if name not in problem.cluster.index:
            raise InputError(f"straggler {name!r} is no device of {problem.cluster.name!r}")
        require_amount(factor, f"straggler {name!r}: factor")
        if factor == 0:
            raise InputError(f"straggler {name!r}: factor must be positive, got 0")


def _actions(plan: PipelinePlan) -> list[Action]:
    """The action of every entry; the devices of a stage share one text."""
    expected = expected_actions(plan.stages, plan.microbatches, split_backwards(plan))
    by_text = {str(action): action for action in expected}
    return [by_text[entry.action] for entry in plan.actions]


def _seconds(
    problem: PipelineProblem,
    plan: PipelinePlan,
    actions: list[Action],
    factors: Mapping[str, float],
) -> list[float]:
    lasting = durations(problem, plan.stages, split_backwards(plan))
    table = {kind: rows.tolist() for kind, rows in lasting.items()}
    return [
        table[action.kind][action.stage][action.microbatch or 0]
        * (factors.get(entry.device, 1.0) if action.kind in COMPUTE else 1.0)
        for action, entry in zip(actions, plan.actions, strict=True)
    ]


def _run(
    plan: PipelinePlan, actions: list[Action], seconds: list[float]
) -> tuple[list[list[int]], list[int], list[float]]:
    """Who follows whom, an order in which all can run, and the start of every entry."""
    followers: list[list[int]] = [[] for _ in actions]
    awaited = [0] * len(actions)
    for before, after in _edges(plan, actions):
        followers[before].append(after)
        awaited[after] += 1
    starts = [0.0] * len(actions)
    order = [i for i, count in enumerate(awaited) if count == 0]
    for i in order:  # grows while it is read
        end = starts[i] + seconds[i]
        for j in followers[i]:
            starts[j] = max(starts[j], end)
            awaited[j] -= 1
            if awaited[j] == 0:
                order.append(j)
    if len(order) < len(actions):
        raise Deadlock(_cycle(plan, find_cycle(followers, awaited)))
    return followers, order, starts


def _edges(plan: PipelinePlan, actions: list[Action]) -> Iterator[tuple[int, int]]:
    """Pairs of entries (before, after): the dependencies, then the order on each resource."""
    entries = _entries_by_action(plan, actions)
    together = _together(plan, entries)
    orders = (pairwise(queue) for queue in _queues(plan, actions))
    for before, after in chain(_dependencies(plan, entries), *orders):
        for mate in together.get(after, (after,)):
            yield before, mate


def _dependencies(plan: PipelinePlan, entries: Entries) -> Iterator[tuple[int, int]]:
    """Each block of a microbatch after the one before it, and sums at the end."""
    last = len(plan.stages) - 1
    # What makes the gradient that goes on, and what ends a backward; where the one stands, the
    # other kind has no entries.
    gradient, done = _either(entries[B], entries[I]), _either(entries[B], entries[W])
    for s in range(last):
        for m in range(plan.microbatches):
            forward, backward = entries[SEND_F][s][m], entries[SEND_B][s + 1][m]
            yield from _crossing(entries[F][s][m], forward, entries[F][s + 1][m])
            yield from _crossing(gradient[s + 1][m], backward, gradient[s][m])
    for m in range(plan.microbatches):
        yield from _crossing(entries[F][last][m], [], gradient[last][m])
    for s in range(last + 1):
        for one, other in zip(entries[I][s], entries[W][s], strict=True):
            yield from _crossing(one, [], other)
        yield from product(chain.from_iterable(done[s]), entries[REDUCE][s][0])


def _either(one: Table, other: Table) -> Table:
    return [
        [first or second for first, second in zip(*rows, strict=True)]
        for rows in zip(one, other, strict=True)
    ]


def _crossing(
    before: Sequence[int], transfer: Sequence[int], after: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Through a transfer, or else on each device from its own entry to its own."""
    if transfer:
        yield from product(before, transfer)
        yield from product(transfer, after)
    else:
        yield from zip(before, after, strict=True)


def _together(plan: PipelinePlan, entries: Entries) -> dict[int, list[int]]:
    """The entries that start together though their devices do not always do the same.

    The devices that split a microbatch start it together: by themselves where they take the same
    turns in all stages, else each waits until all are free.
    """
    groups = devices_by_turns(plan.stages).items()
    turns = {name: taken for taken, names in groups for name in names}
    apart = [
        s
        for s, stage in enumerate(plan.stages)
        if len({turns[name] for name in stage.runners(0)}) > 1
    ]
    mates = (group for kind in COMPUTE for s in apart for group in entries[kind][s])
    return {i: group for group in mates for i in group}


def _entries_by_action(plan: PipelinePlan, actions: list[Action]) -> Entries:
    entries = plan.actions
    found: Entries = {
        kind: [[[] for _ in range(plan.microbatches)] for _ in plan.stages] for kind in PLANNED
    }
    for i in sorted(range(len(entries)), key=lambda i: entries[i].device):
        found[actions[i].kind][actions[i].stage][actions[i].microbatch or 0].append(i)
    return found


def _queues(plan: PipelinePlan, actions: list[Action]) -> list[list[int]]:
    """Per device and channel its entries in the order of their times in the plan.

    Among actions that last no time at one instant, the order is that of a microbatch's way.
    """
    queues: defaultdict[object, list[int]] = defaultdict(list)
    for i, (action, entry) in enumerate(zip(actions, plan.actions, strict=True)):
        if action.kind in COMPUTE:
            queues[entry.device].append(i)
        elif action.kind is SEND_F:
            queues[action.stage, entry.sources, entry.targets].append(i)
        elif action.kind is SEND_B:
            queues[action.stage - 1, entry.targets, entry.sources].append(i)

    def in_plan(i: int) -> tuple[float, float, int, int]:
        entry = plan.actions[i]
        return (entry.start_seconds, entry.finish_seconds, *along_way(actions[i]))

    return [sorted(queue, key=in_plan) for queue in queues.values()]


def _cycle(plan: PipelinePlan, cycle: list[int]) -> str:
    entries = (plan.actions[i] for i in cycle)
    return f"deadlock: {' waits for '.join(f'{one.action} on {one.device}' for one in entries)}"


def _slacks(
    followers: list[list[int]], order: list[int], starts: list[float], seconds: list[float]
) -> list[float]:
    """How much longer each entry may last without a longer iteration."""
    latest = [max(starts[i] + seconds[i] for i in order)] * len(order)
    for i in reversed(order):
        for j in followers[i]:
            latest[i] = min(latest[i], latest[j] - seconds[j])
    return [latest[i] - starts[i] - seconds[i] for i in range(len(order))]


def _summary(
    plan: PipelinePlan,
    actions: list[Action],
    seconds: list[float],
    starts: list[float],
    slacks: list[float],
) -> Simulation:
    entries = plan.actions
    ends = [start + duration for start, duration in zip(starts, seconds, strict=True)]
    iteration = max(ends)
    used = [name for stage in plan.stages for name in stage.devices]
    idle, slack = dict.fromkeys(used, iteration), dict.fromkeys(used, iteration)
    for i, (action, entry) in enumerate(zip(actions, entries, strict=True)):
        if action.kind in COMPUTE:
            idle[entry.device] -= seconds[i]
            slack[entry.device] = min(slack[entry.device], slacks[i])
    timed = (
        ScheduledAction(
            entry.device, entry.action, start, end, entry.sources, entry.targets, entry.bytes
        )
        for entry, start, end in zip(entries, starts, ends, strict=True)
    )
    return Simulation(iteration, tuple(timed), idle, slack)
