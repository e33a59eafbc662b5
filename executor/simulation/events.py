"""The event loop: every entry starts as soon as its dependencies have ended."""

from dataclasses import dataclass

from stagewright.executor.simulation.run import Run
from stagewright.executor.simulation.streams import CoRun
from stagewright.executor.simulation.waiting import edges
from stagewright.formulations.plans.actions import ON_DEVICE
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.graphs.models.deadlock import waiting_cycle


class Deadlock(InvalidPlan):
    """An order that contradicts the dependencies; the message prints the cycle of actions."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Start, end and slack of every entry of a run."""

    starts: list[float]
    ends: list[float]
    slacks: list[float]


def execute(run: Run) -> Outcome:
    """Start every entry as soon as possible."""
    followers: list[list[int]] = [[] for _ in run.actions]
    awaited = [0] * len(run.actions)
    for before, after in edges(run):
        followers[before].append(after)
        awaited[after] += 1
    if run.sub:
        found = CoRun(run, followers, awaited)
        found.execute()
        starts, ends, order = found.starts, found.ends, found.order
    else:
        starts, ends, order = _in_sequence(run, followers, awaited)
    if len(order) < len(run.actions):
        raise Deadlock(_cycle(run.plan, waiting_cycle(followers, awaited)))
    return Outcome(starts, ends, _slacks(run, followers, order, starts, ends))


def _in_sequence(
    run: Run, followers: list[list[int]], awaited: list[int]
) -> tuple[list[float], list[float], list[int]]:
    """Starts, ends, and the entries that have started; ``awaited`` is counted down."""
    starts, ends = [0.0] * len(run.actions), [0.0] * len(run.actions)
    order = [i for i, count in enumerate(awaited) if count == 0]
    for i in order:  # grows during the loop
        ends[i] = starts[i] + run.seconds[i]
        for j in followers[i]:
            starts[j] = max(starts[j], ends[i])
            awaited[j] -= 1
            if awaited[j] == 0:
                order.append(j)
    return starts, ends, order


def _cycle(plan: PipelinePlan, cycle: list[int]) -> str:
    entries = (plan.actions[i] for i in cycle)
    return f"deadlock: {' waits for '.join(f'{one.action} on {one.device}' for one in entries)}"


def _with_two_streams(run: Run) -> frozenset[int]:
    """The entries on devices that use both streams."""
    names = {run.plan.actions[i].device for i in run.sub}
    return frozenset(
        i
        for i, (action, entry) in enumerate(zip(run.actions, run.plan.actions, strict=True))
        if entry.device in names and action.kind in ON_DEVICE
    )


def _slacks(
    run: Run, followers: list[list[int]], order: list[int], starts: list[float], ends: list[float]
) -> list[float]:
    """How much longer each entry may take without a longer iteration.

    On devices with two streams none: beside another kernel a short delay may become a long one.
    """
    fixed, latest_starts = _with_two_streams(run), list(starts)
    slacks = [0.0] * len(order)
    last = max(ends)
    for i in reversed(order):
        if i not in fixed:
            latest = min([last, *(latest_starts[j] for j in followers[i])])
            slacks[i], latest_starts[i] = latest - ends[i], latest - run.seconds[i]
    return slacks
