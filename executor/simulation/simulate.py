"""A discrete-event run of the order in a plan, under the cost model.

Only the order of a plan's actions on each device and channel is read from its times. Every action
then starts as soon as what it depends on and what stands before it on its device or channel are
done. Memory needs no rule of its own: a valid plan keeps within it by its order on the device.

Of a periodic plan a whole run is done, of as many iterations as it takes to fill the pipeline, to
settle, and to drain; what is measured is measured in between. Devices update their weights where
the plan has its pauses, and then go on at once.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, product

import numpy as np

from stagewright.formulations.checking.check import (
    devices_by_turns,
    durations,
    expected_actions,
    require_structure,
    split_backwards,
    updated_stages,
)
from stagewright.formulations.plans.actions import (
    BARE,
    COMPUTE,
    ON_DEVICE,
    PLANNED,
    Action,
    ActionKind,
    along_way,
)
from stagewright.formulations.plans.periodic import (
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
)
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.formulations.plans.unrolling import unroll_run
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.documents.units import require_amount
from stagewright.graphs.models.precedence import find_cycle

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
SEND_F, SEND_B = ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD
REDUCE, UPDATE = ActionKind.REDUCE, ActionKind.UPDATE


Table = list[list[list[int]]]
"""Entries by stage and microbatch, in the order of their devices."""

Entries = dict[ActionKind, Table]
"""All-reduces stand under microbatch 0, one after another where iterations have one each."""

MEASURED_MICROBATCHES = 48  # at least, of a periodic plan: jitter is to be averaged


class Deadlock(InvalidPlan):
    """An order that contradicts the dependencies; the message prints the cycle of actions."""


@dataclass(frozen=True, slots=True)
class PeriodicRun:
    """What a periodic plan's run of this many microbatches was like.

    ``period_seconds`` is what a microbatch takes once the run repeats itself, with its share of the
    updates: on average over ``measured_microbatches`` in its middle, those after which it repeats
    exactly if it does. ``warm_up_seconds`` last until every operation has begun for the first time,
    and ``drain_seconds`` from when one of them has ended for the last time.
    """

    microbatches: int
    measured_microbatches: int
    period_seconds: float
    warm_up_seconds: float
    drain_seconds: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """What happened: the plan's actions, in the plan's listing, at their simulated times.

    ``idle_seconds`` is each used device's time without computation. ``slack_seconds`` is by how
    much one of its computations may last longer without a longer iteration: 0 for a device on a
    critical path.

    Of a periodic plan the actions are those of a run, ``periodic`` tells of which; the iteration is
    as many measured periods as it has microbatches, and idle is what a device is in it. Slack is by
    how much a computation in the middle of the run may last longer without a later end of the run.
    """

    iteration_seconds: float
    actions: tuple[ScheduledAction, ...]
    idle_seconds: dict[str, float]
    slack_seconds: dict[str, float]
    periodic: PeriodicRun | None = None


@dataclass(frozen=True, slots=True)
class _Run:
    """The actions that are done: those of a finite plan, or of a periodic one's many iterations.

    ``plan`` is finite, ``actions`` are those of its entries (the devices of a stage share one
    text). In a run of many iterations stages share links, and weights have two versions.
    """

    plan: PipelinePlan
    actions: list[Action]
    entries: Entries
    seconds: list[float]
    iteration_microbatches: int
    is_periodic: bool


@dataclass(frozen=True, slots=True)
class _Outcome:
    """When every entry of a run starts and ends, and how much longer it might last."""

    starts: list[float]
    ends: list[float]
    slacks: list[float]


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
    run = _prepare(problem, plan, factors)
    if jitter > 0:
        normal = np.random.default_rng(seed).normal(-(jitter**2) / 2, jitter, len(run.seconds))
        seconds = [value * math.exp(draw) for value, draw in zip(run.seconds, normal, strict=True)]
        run = replace(run, seconds=seconds)
    outcome = _execute(run)
    if isinstance(plan.schedule, PeriodicSchedule):
        return _periodic_summary(run, plan.schedule, outcome)
    return _summary(run, outcome)


def _prepare(problem: PipelineProblem, plan: PipelinePlan, factors: Mapping[str, float]) -> _Run:
    """What is to be done, with the cost model's seconds."""
    schedule, finite = plan.schedule, plan
    if isinstance(schedule, PeriodicSchedule):
        steady = steady_microbatches(schedule)
        measured = max(2 * steady, 2 * plan.microbatches, MEASURED_MICROBATCHES)
        iterations = math.ceil((3 * steady + measured) / plan.microbatches)
        finite = unroll_run(plan, iterations * plan.microbatches)
        finite = _with_updates(problem, plan, schedule, finite)
        problem = replace(problem, microbatches=finite.microbatches)
    actions = _actions(finite)
    seconds = _seconds(problem, finite, actions, factors)
    entries = _entries_by_action(finite, actions)
    return _Run(finite, actions, entries, seconds, plan.microbatches, finite is not plan)


def _with_updates(
    problem: PipelineProblem, plan: PipelinePlan, schedule: PeriodicSchedule, run: PipelinePlan
) -> PipelinePlan:
    """The run with the updates of its iterations, one after another in the pauses.

    That of iteration i is in the last pause before iteration i + 2 begins on its stage.
    """
    m, shifts = plan.microbatches, forward_shifts(schedule)
    entries, until = [], dict[tuple[str, float], float]()
    for s in sorted(updated_stages(problem, plan.stages, plan.weights)):
        stage = plan.stages[s]
        devices = [problem.cluster.index[name] for name in stage.devices]
        seconds = problem.update_seconds(*stage.layers, devices)
        for i, name in product(range(run.microbatches // m), stage.devices):
            period = ((i + 2) * m + shifts[s]) // m * m
            begin = period_begin(schedule, m, period) - schedule.pause_seconds
            start = until.get((name, begin), begin)
            until[name, begin] = start + seconds
            entries.append(ScheduledAction(name, str(Action(s, UPDATE)), start, start + seconds))
    actions = (*run.actions, *entries)
    return replace(run, schedule=Schedule(actions))


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
    expected = expected_actions(
        plan.stages, plan.microbatches, split_backwards(plan), range(len(plan.stages))
    )
    by_text = {str(action): action for action in expected}
    return [by_text[entry.action] for entry in plan.actions]


def _seconds(
    problem: PipelineProblem,
    plan: PipelinePlan,
    actions: list[Action],
    factors: Mapping[str, float],
) -> list[float]:
    lasting = durations(problem, plan.stages, split_backwards(plan), plan.weights)
    table = {kind: rows.tolist() for kind, rows in lasting.items()}
    return [
        table[action.kind][action.stage][action.microbatch or 0]
        * (factors.get(entry.device, 1.0) if action.kind in ON_DEVICE else 1.0)
        for action, entry in zip(actions, plan.actions, strict=True)
    ]


def _execute(run: _Run) -> _Outcome:
    """Start every entry as soon as it may."""
    followers: list[list[int]] = [[] for _ in run.actions]
    awaited = [0] * len(run.actions)
    for before, after in _edges(run):
        followers[before].append(after)
        awaited[after] += 1
    starts, ends = [0.0] * len(run.actions), [0.0] * len(run.actions)
    order = [i for i, count in enumerate(awaited) if count == 0]
    for i in order:  # grows while it is read
        ends[i] = starts[i] + run.seconds[i]
        for j in followers[i]:
            starts[j] = max(starts[j], ends[i])
            awaited[j] -= 1
            if awaited[j] == 0:
                order.append(j)
    if len(order) < len(run.actions):
        raise Deadlock(_cycle(run.plan, find_cycle(followers, awaited)))
    return _Outcome(starts, ends, _slacks(followers, order, ends, run.seconds))


def _edges(run: _Run) -> Iterator[tuple[int, int]]:
    """Pairs of entries (before, after): the dependencies, then the order on each resource."""
    # In a run every device updates its weights by itself.
    together = _together(run.plan, run.entries, COMPUTE if run.is_periodic else ON_DEVICE)
    orders = (pairwise(queue) for queue in _queues(run))
    for before, after in chain(_dependencies(run), *orders):
        for mate in together.get(after, (after,)):
            yield before, mate


def _dependencies(run: _Run) -> Iterator[tuple[int, int]]:
    """Each block of a microbatch after the one before it, and sums at the end."""
    entries, last = run.entries, len(run.plan.stages) - 1
    # What makes the gradient that goes on, and what ends a backward; where the one stands, the
    # other kind has no entries.
    gradient, done = _either(entries[B], entries[I]), _either(entries[B], entries[W])
    for s in range(last):
        for m in range(run.plan.microbatches):
            forward, backward = entries[SEND_F][s][m], entries[SEND_B][s + 1][m]
            yield from _crossing(entries[F][s][m], forward, entries[F][s + 1][m])
            yield from _crossing(gradient[s + 1][m], backward, gradient[s][m])
    for m in range(run.plan.microbatches):
        yield from _crossing(entries[F][last][m], [], gradient[last][m])
    for s in range(last + 1):
        for one, other in zip(entries[I][s], entries[W][s], strict=True):
            yield from _crossing(one, [], other)
        reductions, updates = entries[REDUCE][s][0], entries[UPDATE][s][0]
        yield from _updates(run, done[s], reductions, updates, entries[F][s])


def _updates(
    run: _Run,
    done: list[list[int]],
    reductions: list[int],
    updates: list[int],
    forwards: list[list[int]],
) -> Iterator[tuple[int, int]]:
    """A stage's sums and updates at the end of every iteration, and what waits for them.

    ``done`` and ``forwards`` are its entries by microbatch. With two versions of the weights the
    update of iteration i makes what iteration i + 2 computes on (PipeDream-2BW). All-reduces are
    done one after another.
    """
    m = run.iteration_microbatches
    iterations = run.plan.microbatches // m
    yield from pairwise(reductions)
    for i in range(iterations):
        ends = list(chain.from_iterable(done[i * m : (i + 1) * m]))
        if reductions:
            yield from product(ends, [reductions[i]])
            ends = [reductions[i]]
        if updates:
            own = updates[i::iterations]  # those of a device follow one another
            yield from product(ends, own)
            ends = own
        if (i + 2) * m < run.plan.microbatches:
            yield from product(ends, forwards[(i + 2) * m])


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


def _together(
    plan: PipelinePlan, entries: Entries, kinds: Sequence[ActionKind]
) -> dict[int, list[int]]:
    """The entries of ``kinds`` that start together though their devices do not always do the same.

    The devices that split a microbatch start it together: by themselves where they take the same
    turns in all stages, else each waits until all are free.
    """
    groups = devices_by_turns(plan.stages).items()
    turns = {name: taken for taken, names in groups for name in names}
    apart = [
        s for s, stage in enumerate(plan.stages) if len({turns[name] for name in stage.devices}) > 1
    ]
    mates = (group for kind in kinds for s in apart for group in entries[kind][s])
    return {i: group for group in mates for i in group}


def _entries_by_action(plan: PipelinePlan, actions: list[Action]) -> Entries:
    entries = plan.actions
    found: Entries = {
        kind: [[[] for _ in range(plan.microbatches)] for _ in plan.stages] for kind in PLANNED
    }
    for i in sorted(range(len(entries)), key=lambda i: entries[i].device):
        found[actions[i].kind][actions[i].stage][actions[i].microbatch or 0].append(i)
    return found


def _queues(run: _Run) -> list[list[int]]:
    """Per device and channel its entries in the order of their times in the plan.

    Among actions that last no time at one instant, the order is that of a microbatch's way.
    """
    entries = run.plan.actions
    queues: defaultdict[object, list[int]] = defaultdict(list)
    for i, (action, entry) in enumerate(zip(run.actions, entries, strict=True)):
        if action.kind in ON_DEVICE:
            queues[entry.device].append(i)
        elif action.kind is REDUCE:
            for name in entry.sources or ():
                queues["all-reduces", name].append(i)
        else:
            queues[_channel(run, action, entry)].append(i)

    def in_plan(i: int) -> tuple[float, float, int, int]:
        return (entries[i].start_seconds, entries[i].finish_seconds, *along_way(run.actions[i]))

    return [sorted(queue, key=in_plan) for queue in queues.values()]


def _channel(run: _Run, action: Action, entry: ScheduledAction) -> object:
    """What one transfer at a time takes: a stage's way to the next, or in a run a whole link."""
    ends = (entry.sources, entry.targets)
    if action.kind is SEND_B:
        ends = ends[::-1]
    if run.is_periodic:
        return frozenset(ends)
    return (action.stage - (action.kind is SEND_B), *ends)


def _cycle(plan: PipelinePlan, cycle: list[int]) -> str:
    entries = (plan.actions[i] for i in cycle)
    return f"deadlock: {' waits for '.join(f'{one.action} on {one.device}' for one in entries)}"


def _slacks(
    followers: list[list[int]], order: list[int], ends: list[float], seconds: list[float]
) -> list[float]:
    """How much longer each entry may last without a longer iteration."""
    latest = [max(ends)] * len(order)
    for i in reversed(order):
        for j in followers[i]:
            latest[i] = min(latest[i], latest[j] - seconds[j])
    return [latest[i] - ends[i] for i in range(len(order))]


def _summary(run: _Run, outcome: _Outcome) -> Simulation:
    iteration = max(outcome.ends)
    busy, slack = _per_device(run, outcome, range(len(run.actions)))
    return Simulation(
        iteration,
        _timed(run, outcome),
        {name: iteration - seconds for name, seconds in busy.items()},
        {name: min(iteration, seconds) for name, seconds in slack.items()},
    )


def _periodic_summary(run: _Run, schedule: PeriodicSchedule, outcome: _Outcome) -> Simulation:
    """What is measured in the middle of the run, and how long it takes to begin and to end."""
    steady, m = steady_microbatches(schedule), run.iteration_microbatches
    middle = slice(2 * steady, run.plan.microbatches - steady)
    backwards = _either(run.entries[B], run.entries[W])[0]
    through = np.array([max(outcome.ends[i] for i in done) for done in backwards[middle]])
    repeats_after, period = _repetition(through)
    rows = (row[middle] for kind in COMPUTE for row in run.entries[kind])
    inside = chain.from_iterable(chain.from_iterable(rows))
    busy, slack = _per_device(run, outcome, inside)
    updates, _ = _per_device(
        run, outcome, chain.from_iterable(row[0] for row in run.entries[UPDATE])
    )
    iterations = run.plan.microbatches // m
    return Simulation(
        m * period,
        _timed(run, outcome),
        # What is computed of these microbatches may lie outside of the measured time.
        {
            name: max(0.0, m * (period - all_ / len(through)) - updates[name] / iterations)
            for name, all_ in busy.items()
        },
        slack,
        PeriodicRun(
            run.plan.microbatches, repeats_after, period, *_warm_up_and_drain(run, outcome)
        ),
    )


def _repetition(ends: Floats) -> tuple[int, float]:
    """After how many microbatches a run repeats itself, and the seconds per microbatch.

    ``ends`` are those of equal events of microbatches one after another. Where nothing repeats
    itself exactly it is the average over all.
    """
    rounding = RELATIVE_TOLERANCE * float(ends[-1])
    for count in range(1, len(ends) // 2 + 1):
        steps = ends[count:] - ends[:-count]
        if np.ptp(steps) <= rounding:
            return count, float(steps[-1]) / count
    count = len(ends) - 1
    return count, float(ends[-1] - ends[0]) / count


def _warm_up_and_drain(run: _Run, outcome: _Outcome) -> tuple[float, float]:
    """Until everything has begun once, and from when something has ended for good, in seconds."""
    rows = [row for kind in PLANNED if kind not in BARE for row in run.entries[kind] if row[0]]
    last_ends = [max(outcome.ends[i] for i in row[-1]) for row in rows]
    return (
        max(outcome.starts[i] for row in rows for i in row[0]),
        max(outcome.ends) - min(last_ends),
    )


def _per_device(
    run: _Run, outcome: _Outcome, inside: Iterable[int]
) -> tuple[dict[str, float], dict[str, float]]:
    """Per used device the sum of its computations among the entries ``inside``, and their slack."""
    used = [name for stage in run.plan.stages for name in stage.devices]
    busy, slack = dict.fromkeys(used, 0.0), dict.fromkeys(used, math.inf)
    for i in inside:
        if run.actions[i].kind in ON_DEVICE:
            device = run.plan.actions[i].device
            busy[device] += run.seconds[i]
            slack[device] = min(slack[device], outcome.slacks[i])
    return busy, slack


def _timed(run: _Run, outcome: _Outcome) -> tuple[ScheduledAction, ...]:
    return tuple(
        replace(entry, start_seconds=start, finish_seconds=end)
        for entry, start, end in zip(run.plan.actions, outcome.starts, outcome.ends, strict=True)
    )
