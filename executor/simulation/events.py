"""The event loop: every entry starts as soon as its dependencies have ended."""

from dataclasses import dataclass

from stagewright.executor.simulation.run import Run
from stagewright.executor.simulation.waiting import edges
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
    starts, ends = [0.0] * len(run.actions), [0.0] * len(run.actions)
    order = [i for i, count in enumerate(awaited) if count == 0]
    for i in order:  # grows during the loop
        ends[i] = starts[i] + run.seconds[i]
        for j in followers[i]:
            starts[j] = max(starts[j], ends[i])
            awaited[j] -= 1
            if awaited[j] == 0:
                order.append(j)
    if len(order) < len(run.actions):
        raise Deadlock(_cycle(run.plan, waiting_cycle(followers, awaited)))
    return Outcome(starts, ends, _slacks(followers, order, ends, run.seconds))


def _cycle(plan: PipelinePlan, cycle: list[int]) -> str:
    entries = (plan.actions[i] for i in cycle)
    return f"deadlock: {' waits for '.join(f'{one.action} on {one.device}' for one in entries)}"


def _slacks(
    followers: list[list[int]], order: list[int], ends: list[float], seconds: list[float]
) -> list[float]:
    """How much longer each entry may take without a longer iteration."""
    latest = [max(ends)] * len(order)
    for i in reversed(order):
        for j in followers[i]:
            latest[i] = min(latest[i], latest[j] - seconds[j])
    return [latest[i] - ends[i] for i in range(len(order))]
