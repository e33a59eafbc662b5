"""The job shop problem: jobs with ordered steps, each on a given machine, and least makespan."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stagewright.formulations.forms.disjunctive import by_disjunctions, starts_of
from stagewright.formulations.forms.models import Intervals, LinearProgram
from stagewright.formulations.pipelines.bounds import one_machine_bound
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.errors import InputError, InvalidPlan

MAX_TOTAL = 2**53  # durations that add up to more are not exact as floats

Starts = tuple[tuple[int, ...], ...]
"""Start time of every step of every job."""


@dataclass(frozen=True, slots=True)
class JobShop:
    """``jobs[j]`` are the steps of job j in their order: (machine, duration), both integers.

    Examples
    --------
    >>> JobShop((((0, 3), (1, 2)), ((1, 2), (0, 4)))).evaluate(((0, 3), (0, 3)))
    7
    """

    jobs: tuple[tuple[tuple[int, int], ...], ...]

    def __post_init__(self) -> None:
        if not self.jobs:
            raise InputError("a job shop needs at least one job")
        for j, steps in enumerate(self.jobs):
            if not steps:
                raise InputError(f"job {j} needs at least one step")
            for k, (machine, duration) in enumerate(steps):
                if machine < 0 or duration < 0:
                    raise InputError(
                        f"job {j}, step {k}: machine and duration must not be negative, "
                        f"got {machine}, {duration}"
                    )
        if self.total > MAX_TOTAL:
            raise InputError(f"the durations add up to {self.total}, the limit is {MAX_TOTAL}")

    @property
    def total(self) -> int:
        """The sum of all durations: the makespan of all steps in sequence."""
        return sum(duration for steps in self.jobs for _, duration in steps)

    def evaluate(self, starts: Starts) -> int:
        """The makespan of ``starts``, after every constraint was checked.

        Raises
        ------
        InvalidPlan
            Naming the first constraint that is broken.
        """
        if [len(row) for row in starts] != [len(steps) for steps in self.jobs]:
            raise InvalidPlan("there must be one start time per step")
        busy = defaultdict[int, list[tuple[int, int, str]]](list)
        for j, (row, steps) in enumerate(zip(starts, self.jobs, strict=True)):
            ready = 0
            for k, (start, (machine, duration)) in enumerate(zip(row, steps, strict=True)):
                if start < ready:
                    raise InvalidPlan(f"job {j}, step {k} starts at {start}, ready at {ready}")
                ready = start + duration
                busy[machine].append((start, ready, f"job {j}, step {k}"))
        for machine, blocks in busy.items():
            for (_, end, one), (start, _, other) in pairwise(sorted(blocks)):
                if start < end:
                    raise InvalidPlan(f"machine {machine}: {other} starts before {one} ends")
        return max(end for blocks in busy.values() for _, end, _ in blocks)


def parse_jobshop(text: str, place: str) -> JobShop:
    """Read the literature's text format; ``place`` (a file name) starts every message.

    ``#`` starts a comment. The first line gives the numbers of jobs and machines, each further line
    one job: a pair of machine (from 0) and duration per step, one step per machine.

    Raises
    ------
    InputError
        One line that names the line of the fault.
    """
    lines = [
        (number, content.split())
        for number, line in enumerate(text.splitlines(), start=1)
        if (content := line.partition("#")[0].strip())
    ]
    if not lines:
        raise InputError(f"{place}: empty; the first line must give jobs and machines")
    number, words = lines[0]
    header = _integers(words, f"{place}, line {number}")
    if len(header) != 2 or min(header) < 1:
        raise InputError(
            f"{place}, line {number}: expected the numbers of jobs and machines, "
            f"got {' '.join(words)!r}"
        )
    count, machines = header
    jobs = tuple(_job(words, machines, f"{place}, line {number}") for number, words in lines[1:])
    if len(jobs) != count:
        raise InputError(
            f"{place}, line {lines[-1][0]}: the first line announces {count} jobs, "
            f"the file has {len(jobs)}"
        )
    try:
        return JobShop(jobs)
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def _job(words: list[str], machines: int, place: str) -> tuple[tuple[int, int], ...]:
    numbers = _integers(words, place)
    if len(numbers) != 2 * machines:
        raise InputError(
            f"{place}: expected {machines} pairs of machine and duration, "
            f"got {len(numbers)} numbers"
        )
    steps = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    for machine, duration in steps:
        if not 0 <= machine < machines:
            raise InputError(f"{place}: machine {machine} is not in 0 ... {machines - 1}")
        if duration < 0:
            raise InputError(f"{place}: duration {duration} is negative")
    return steps


def _integers(words: list[str], place: str) -> list[int]:
    numbers = []
    for word in words:
        try:
            numbers.append(int(word))
        except ValueError:
            raise InputError(f"{place}: {word[:40]!r} is not an integer") from None
    return numbers


@dataclass(frozen=True, slots=True)
class ByIntervals:
    """The job shop as ``Intervals``, one per step, in the order of jobs and steps.

    ``incumbent``, a feasible answer, becomes the hint and the horizon.
    """

    problem: JobShop
    incumbent: Starts | None = None

    def apply(self) -> Intervals:
        """The model; its lower bound is the best one-machine bound."""
        problem = self.problem
        steps = [step for job in problem.jobs for step in job]
        machine = np.array([machine for machine, _ in steps])
        durations = np.array([duration for _, duration in steps], dtype=np.int64)
        members = tuple(np.flatnonzero(machine == k) for k in np.unique(machine))
        heads, tails = _heads_and_tails(problem)
        hint, horizon = None, problem.total
        if self.incumbent is not None:
            hint = np.array([start for row in self.incumbent for start in row], dtype=np.int64)
            horizon = problem.evaluate(self.incumbent)
        return Intervals(
            durations=durations,
            machines=members,
            before=_chains(problem),
            tails=np.zeros(len(steps), dtype=np.int64),
            horizon=horizon,
            lower_bound=int(
                max(one_machine_bound(heads[m], durations[m], tails[m]) for m in members)
            ),
            hint=hint,
        )

    def invert(self, values: Ints) -> Starts:
        """The start times per job."""
        starts = iter(values.tolist())
        return tuple(tuple(next(starts) for _ in job) for job in self.problem.jobs)


@dataclass(frozen=True, slots=True)
class ByDisjunctions:
    """The job shop as Manne's mixed-integer program."""

    problem: JobShop

    def apply(self) -> LinearProgram:
        """The program; its horizon is the sum of all durations."""
        return by_disjunctions(ByIntervals(self.problem).apply())

    def invert(self, values: Floats) -> Starts:
        """The start times per job."""
        steps = sum(len(job) for job in self.problem.jobs)
        return ByIntervals(self.problem).invert(starts_of(values, steps))


def _chains(problem: JobShop) -> Ints:
    """Rows (step, next step of the same job), in the order of jobs and steps."""
    rows, first = [], 0
    for job in problem.jobs:
        rows += list(pairwise(range(first, first + len(job))))
        first += len(job)
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def _heads_and_tails(problem: JobShop) -> tuple[Ints, Ints]:
    """Work of the same job before and after each step."""
    heads, tails = [], []
    for job in problem.jobs:
        ends = np.cumsum([duration for _, duration in job])
        heads.append(np.r_[0, ends[:-1]])
        tails.append(ends[-1] - ends)
    return np.concatenate(heads), np.concatenate(tails)
