"""The job shop problem: jobs with ordered steps, each on a given machine, and least makespan."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from stagewright.formulations.forms.models import (
    ABSENT,
    Intervals,
    LinearProgram,
    by_disjunctions,
    starts_of,
)
from stagewright.formulations.pipelines.bounds.stages import ONE_MACHINE, one_machine_bound
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.errors import InputError, InvalidPlan

LONGEST_JOB, LOAD = "longest job", "load of all machines"
_MAX_TOTAL = 2**53  # durations that add up to more are not exact as floats

Pair = tuple[int, int]
"""A machine and the duration of a step on it."""
Step = Pair | tuple[Pair, ...]
"""A step on a given machine, or on one of several."""
Starts = tuple[tuple[int, ...], ...]
"""Start time of every step of every job."""
Machines = tuple[tuple[int, ...], ...]
"""The machine of every step of every job."""


class JobShopSchedule(NamedTuple):
    """When and where the steps of every job are."""

    starts: Starts
    machines: Machines


@dataclass(frozen=True, slots=True)
class JobShop:
    """``jobs[j]`` are the steps of job j in their order: (machine, duration), both integers.

    A step of a flexible job shop has a choice of those, on different machines, and takes one.

    Examples
    --------
    >>> JobShop((((0, 3), (1, 2)), ((1, 2), (0, 4)))).evaluate(((0, 3), (0, 3)))
    7
    >>> JobShop(((((0, 3), (1, 5)),), ((0, 4),))).evaluate(((0,), (0,)), ((1,), (0,)))
    5
    """

    jobs: tuple[tuple[Step, ...], ...]

    def __post_init__(self) -> None:
        if not self.jobs:
            raise InputError("a job shop needs at least one job")
        for j, steps in enumerate(self.choices):
            if not steps:
                raise InputError(f"job {j} needs at least one step")
            for k, choice in enumerate(steps):
                _require_choice(choice, f"job {j}, step {k}")
        most = sum(max(duration for _, duration in it) for steps in self.choices for it in steps)
        if most > _MAX_TOTAL:
            raise InputError(f"the durations add up to {most}, the limit is {_MAX_TOTAL}")

    @property
    def choices(self) -> tuple[tuple[tuple[Pair, ...], ...], ...]:
        """For every step of every job the machines that it may be on, with its duration there."""
        return tuple(tuple(map(_choice, steps)) for steps in self.jobs)

    @property
    def is_flexible(self) -> bool:
        """Whether a step has a choice of machines."""
        return any(len(choice) > 1 for steps in self.choices for choice in steps)

    @property
    def total(self) -> int:
        """The sum of all least durations: the makespan of all steps in sequence."""
        return sum(sum(row) for row in self.least_durations)

    @property
    def least_durations(self) -> tuple[tuple[int, ...], ...]:
        """The duration of every step on its fastest machine."""
        return tuple(
            tuple(min(duration for _, duration in choice) for choice in steps)
            for steps in self.choices
        )

    def evaluate(self, starts: Starts, machines: Machines | None = None) -> int:
        """The makespan of ``starts``, after every constraint was checked.

        ``machines`` may be left out where no step has a choice.

        Raises InvalidPlan naming the first constraint that is broken.
        """
        choices = self.choices
        if machines is None:
            if self.is_flexible:
                raise InvalidPlan("there must be a machine for every step")
            machines = tuple(tuple(choice[0][0] for choice in steps) for steps in choices)
        sizes = [len(steps) for steps in choices]
        if [len(row) for row in starts] != sizes or [len(row) for row in machines] != sizes:
            raise InvalidPlan("there must be one start time per step, and one machine")
        busy = defaultdict[int, list[tuple[int, int, str]]](list)
        for j, rows in enumerate(zip(choices, starts, machines, strict=True)):
            for k, (machine, start, end) in enumerate(_in_order(f"job {j}", *rows)):
                busy[machine].append((start, end, f"job {j}, step {k}"))
        for machine, blocks in busy.items():
            _require_apart(machine, sorted(blocks))
        return max(end for blocks in busy.values() for _, end, _ in blocks)


def _in_order(
    job: str, choices: Sequence[tuple[Pair, ...]], starts: Sequence[int], machines: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Machine, start and end of each step of a job, which follow each other."""
    ready = 0
    for k, (choice, start, machine) in enumerate(zip(choices, starts, machines, strict=True)):
        durations = dict(choice)
        if start < ready:
            raise InvalidPlan(f"{job}, step {k} starts at {start}, ready at {ready}")
        if machine not in durations:
            known = ", ".join(map(str, durations))
            raise InvalidPlan(f"{job}, step {k} is on machine {machine}, may be: {known}")
        ready = start + durations[machine]
        yield machine, start, ready


def _require_apart(machine: int, blocks: Sequence[tuple[int, int, str]]) -> None:
    for (_, end, one), (start, _, other) in pairwise(blocks):
        if start < end:
            raise InvalidPlan(f"machine {machine}: {other} starts before {one} ends")


def _choice(step: Step) -> tuple[Pair, ...]:
    """The pairs (machine, duration) of a step; a single pair if its machine is given."""
    return ((step[0], step[1]),) if step and isinstance(step[0], int) else step


def _require_choice(choice: tuple[Pair, ...], place: str) -> None:
    if not choice:
        raise InputError(f"{place} needs a machine")
    machines = [machine for machine, _ in choice]
    if len(set(machines)) < len(machines):
        twice = next(one for one in machines if machines.count(one) > 1)
        raise InputError(f"{place} has machine {twice} twice")
    for machine, duration in choice:
        if machine < 0 or duration < 0:
            raise InputError(
                f"{place}: machine and duration must not be negative, got {machine}, {duration}"
            )


def static_bound(problem: JobShop) -> tuple[int, str]:
    """The best of some lower bounds on the makespan that need no search, and its name."""
    heads, tails = _heads_and_tails(problem)
    durations = np.array([it for row in problem.least_durations for it in row], dtype=np.int64)
    choices = [choice for steps in problem.choices for choice in steps]
    alone: dict[int, list[int]] = defaultdict(list)
    for i, choice in enumerate(choices):
        if len(choice) == 1:
            alone[choice[0][0]].append(i)
    machines = {machine for choice in choices for machine, _ in choice}
    known = [(int((heads + durations + tails).max()), LONGEST_JOB)]
    known += [
        (int(one_machine_bound(heads[m], durations[m], tails[m])), ONE_MACHINE)
        for m in alone.values()
    ]
    known.append((-(-int(durations.sum()) // len(machines)), LOAD))
    return max(known, key=lambda one: (one[0], one[1] == ONE_MACHINE))


@dataclass(frozen=True, slots=True)
class JobShopByIntervals:
    """The job shop as ``Intervals``: one for each machine of each step, in the order of steps.

    ``incumbent``, a feasible answer, becomes the hint and the horizon.
    """

    problem: JobShop
    incumbent: JobShopSchedule | None = None

    def apply(self) -> Intervals:
        """The model; its lower bound is the best static one."""
        problem = self.problem
        pairs = [pair for steps in problem.choices for choice in steps for pair in choice]
        machine = np.array([machine for machine, _ in pairs])
        choices = _choices(problem)
        hint, horizon = None, problem.total
        if self.incumbent is not None:
            hint, horizon = self._hint(machine), problem.evaluate(*self.incumbent)
        return Intervals(
            durations=np.array([duration for _, duration in pairs], dtype=np.int64),
            machines=tuple(np.flatnonzero(machine == k) for k in np.unique(machine)),
            before=_chains(problem, choices),
            tails=np.zeros(len(pairs), dtype=np.int64),
            horizon=horizon,
            lower_bound=static_bound(problem)[0],
            hint=hint,
            choices=tuple(choices) if problem.is_flexible else (),
        )

    def invert(self, values: Ints) -> JobShopSchedule:
        """The start times and machines per job."""
        pairs = [pair for steps in self.problem.choices for choice in steps for pair in choice]
        found = iter(
            (start, pairs[i][0]) for i, start in enumerate(values.tolist()) if start != ABSENT
        )
        rows = [tuple(next(found) for _ in job) for job in self.problem.jobs]
        return JobShopSchedule(
            tuple(tuple(start for start, _ in row) for row in rows),
            tuple(tuple(machine for _, machine in row) for row in rows),
        )

    def _hint(self, machine: Ints) -> Ints:
        assert self.incumbent is not None
        starts, chosen = (
            np.array([it for row in rows for it in row], dtype=np.int64) for rows in self.incumbent
        )
        step = np.repeat(np.arange(len(starts)), [len(it) for it in _choices(self.problem)])
        return np.where(machine == chosen[step], starts[step], ABSENT)


@dataclass(frozen=True, slots=True)
class ByDisjunctions:
    """The job shop as Manne's mixed-integer program; not for flexible ones."""

    problem: JobShop

    def apply(self) -> LinearProgram:
        """The program; its horizon is the sum of all durations."""
        return by_disjunctions(JobShopByIntervals(self.problem).apply())

    def invert(self, values: Floats) -> JobShopSchedule:
        """The start times and machines per job."""
        steps = sum(len(job) for job in self.problem.jobs)
        return JobShopByIntervals(self.problem).invert(starts_of(values, steps))


def _choices(problem: JobShop) -> list[Ints]:
    """The intervals of each step."""
    ends = np.cumsum([len(choice) for steps in problem.choices for choice in steps])
    return np.split(np.arange(ends[-1]), ends[:-1])


def _chains(problem: JobShop, choices: list[Ints]) -> Ints:
    """Rows (interval of a step, of the next step of the same job), in the order of both."""
    rows, step = [], iter(choices)
    for job in problem.jobs:
        for one, other in pairwise([next(step).tolist() for _ in job]):
            rows += list(product(one, other))
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def _heads_and_tails(problem: JobShop) -> tuple[Ints, Ints]:
    """Least work of the same job before and after each step."""
    heads, tails = [], []
    for row in problem.least_durations:
        ends = np.cumsum(row)
        heads.append(np.r_[0, ends[:-1]])
        tails.append(ends[-1] - ends)
    return np.concatenate(heads), np.concatenate(tails)
