"""The critical path of a finite plan: a longest chain of actions that wait for each other."""

from dataclasses import dataclass

from stagewright.executor.simulation.run import Run
from stagewright.formulations.plans.actions import Action
from stagewright.formulations.plans.plan import ScheduledAction


@dataclass(frozen=True, slots=True)
class Step:
    """An action of the path; it starts ``wait_seconds`` after the end of the step before it.

    The wait is 0 unless the plan itself delays the action (or a measured action started late).
    """

    entry: ScheduledAction
    action: Action
    wait_seconds: float

    @property
    def seconds(self) -> float:
        """How long the action takes."""
        return self.entry.finish_seconds - self.entry.start_seconds


def predecessors(run: Run, pairs: list[tuple[int, int]]) -> list[list[int]]:
    """For each entry, the entries that it waits for; ``pairs`` are entries (before, after)."""
    found: list[list[int]] = [[] for _ in run.actions]
    for before, after in pairs:
        found[after].append(before)
    return found


def critical_path(run: Run, before: list[list[int]]) -> tuple[Step, ...]:
    """A chain from the start of the iteration to its end, each action after the one it waits for.

    From the action that ends last it goes back to the one that ended last of those that an action
    waits for; of equal ones to the one on the same device. Its seconds and waits add up to the
    iteration (Kelley, Critical-Path Planning and Scheduling: Mathematical Basis, 1961).
    """
    entries, steps = run.plan.actions, list[Step]()
    if not entries:
        return ()
    i: int | None = max(range(len(entries)), key=lambda k: entries[k].finish_seconds)
    while i is not None:
        one = entries[i]
        last = max(
            before[i],
            key=lambda k: (entries[k].finish_seconds, entries[k].device == one.device),
            default=None,
        )
        ended = 0.0 if last is None else entries[last].finish_seconds
        steps.append(Step(one, run.actions[i], one.start_seconds - ended))
        i = last
    return tuple(reversed(steps))
