"""The makespan problem as ``Intervals`` and as a mixed-integer program.

Microbatches are identical, so the models fix their order in every block; see :mod:`makespan`.
In-flight limits become precedences: forward m + k of a stage waits for the end of its backward
(weight gradient) m. What a microbatch keeps up to the end of I, and up to the end of W, is held in
the device's store.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from stagewright.formulations.forms import models
from stagewright.formulations.forms.models import HeldAmounts, Intervals
from stagewright.formulations.pipelines.blocks import (
    NONE,
    BlockGraph,
    block_starts,
    blocks_of,
    numbering,
    timetable_of,
)
from stagewright.formulations.pipelines.bounds.stages import schedule_bounds
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.graphs.documents.arrays import Floats, Ints

MEMORY_UNITS = 2**20  # of the largest limit, for amounts without a common unit

CP_SAT = "CP-SAT"


@dataclass(frozen=True)
class ByIntervals:
    """One interval per block and microbatch, with index ``block * M + m``.

    Blocks are numbered as in :func:`blocks_of`. Times that are multiples of a common unit are
    exact, as rounding would break ties, which makes the search much harder. Other times are rounded
    down, so a bound on the model, in units, is a bound on the problem. ``incumbent``, a feasible
    timetable, gives the hint and the horizon.
    """

    problem: MakespanProblem
    incumbent: Timetable

    @cached_property
    def unit(self) -> float:
        """Time per tick: 1 for integers, else the common unit, else a power of two."""
        horizon = self.incumbent.makespan(self.problem)
        return models.tick(self._times, horizon)

    @property
    def _times(self) -> Floats:
        blocks = blocks_of(self.problem)
        return np.unique(np.r_[blocks.durations, blocks.tails])

    @cached_property
    def ticks(self) -> MakespanProblem:
        """The problem in ticks."""

        def count(times: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(models.in_ticks(np.array(times), self.unit).tolist())

        problem, weight = self.problem, self.problem.weight_gradient
        return replace(
            problem,
            forward=count(problem.forward),
            backward=count(problem.backward),
            send_forward=count(problem.send_forward),
            send_backward=count(problem.send_backward),
            reduce=count(problem.reduce),
            weight_gradient=None if weight is None else count(weight),
        )

    def apply(self) -> Intervals:
        """The model, with the best static bound and the incumbent's order as the hint."""
        count, blocks = self.problem.microbatches, blocks_of(self.ticks)
        number = np.arange(len(blocks.durations) * count).reshape(-1, count)
        last_tails = np.zeros(number.shape, dtype=np.int64)
        last_tails[:, -1] = blocks.tails  # the other microbatches of a block end earlier
        hint = earliest(self.ticks, block_starts(self.problem, self.incumbent))
        return Intervals(
            durations=np.repeat(blocks.durations, count).astype(np.int64),
            machines=_machines(blocks, number),
            before=_precedences(blocks, number),
            tails=last_tails.ravel(),
            horizon=_horizon(self.ticks, hint),
            lower_bound=int(max(bound.seconds for bound in schedule_bounds(self.ticks))),
            hint=block_starts(self.ticks, hint).ravel().astype(np.int64),
            stores=_stores(self.problem, number),
            spans=_spans(self.problem, number) if self.problem.objective == "span" else None,
        )

    def invert(self, values: Ints) -> Timetable:
        """The order of ``values`` with its earliest times, in the problem's unit.

        For spans, in which early starts count, the times of ``values`` if ticks are exact.
        """
        starts = values.reshape(-1, self.problem.microbatches).astype(float)
        if self.problem.objective == "span" and models.are_multiples(self._times, self.unit):
            return timetable_of(self.problem, starts * self.unit)
        return earliest(self.problem, starts, block_durations=blocks_of(self.ticks).durations)


def earliest(
    problem: MakespanProblem, starts: Floats, block_durations: Floats | None = None
) -> Timetable:
    """The earliest timetable with the order of ``starts`` (blocks, M) on devices and channels.

    ``block_durations`` are the durations that ``starts`` is based on, by default the problem's.
    """
    blocks, count = blocks_of(problem), problem.microbatches
    finish = starts + (blocks.durations if block_durations is None else block_durations)[:, None]
    block, m = np.divmod(np.arange(starts.size), count)
    # A topological order: a block of zero duration precedes blocks with the same start.
    order = np.lexsort((block, m, finish.ravel(), starts.ravel()))
    times, work = np.zeros(starts.shape), blocks.durations.tolist()
    machine, freeing, limits = (
        array.tolist() for array in (blocks.machines, blocks.freeing, blocks.limits)
    )
    before = [[i for i in row if i != NONE] for row in blocks.before.tolist()]
    free = [0.0] * (max(machine) + 1)
    works = [any(work[j] > 0 for j in own) for own in blocks.members()]
    for j, i in zip(block[order].tolist(), m[order].tolist(), strict=True):
        start = max([free[machine[j]], *(times[p, i] + work[p] for p in before[j])])
        if freeing[j] != NONE and i >= limits[j]:
            start = max(start, times[freeing[j], i - limits[j]] + work[freeing[j]])
        times[j, i] = start
        if works[machine[j]]:
            free[machine[j]] = start + work[j]
    return timetable_of(problem, times)


def _machines(blocks: BlockGraph, number: Ints) -> tuple[Ints, ...]:
    """The intervals of each device and channel that has any work."""
    return tuple(number[own].ravel() for own in blocks.members() if blocks.durations[own].any())


def _precedences(blocks: BlockGraph, number: Ints) -> Ints:
    """Rows (before, after): within each microbatch, within each block, and in-flight slots."""
    after, column = np.nonzero(blocks.before != NONE)
    first = blocks.before[after, column]
    rows = [
        np.column_stack([number[first].ravel(), number[after].ravel()]),
        np.column_stack([number[:, :-1].ravel(), number[:, 1:].ravel()]),
    ]
    for j in np.flatnonzero(blocks.freeing != NONE).tolist():
        limit = blocks.limits[j]
        rows.append(np.column_stack([number[blocks.freeing[j], :-limit], number[j, limit:]]))
    return np.concatenate(rows)


def _horizon(problem: MakespanProblem, known: Timetable) -> int:
    """A time by which all blocks end in some schedule that is no worse than ``known``.

    Of spans of at most S, the union of all devices' covers D S; at other times transfers run. Else
    all that follows could start earlier, as no device holds anything.
    """
    if problem.objective == "makespan":
        return int(known.makespan(problem))
    sends = problem.microbatches * (sum(problem.send_forward) + sum(problem.send_backward))
    return int((1 + max(problem.device)) * known.span(problem) + sends)


def _spans(problem: MakespanProblem, number: Ints) -> Ints:
    """Rows (first forward of the device, last computation of the stage)."""
    forward, backward, weight = numbering(problem.stages)
    last = weight if problem.is_split else backward
    first = [problem.stages_on(d)[0] for d in problem.device]
    return np.column_stack([number[forward[first], 0], number[last, -1]])


def _stores(problem: MakespanProblem, number: Ints) -> tuple[HeldAmounts, ...]:
    """The memory of each device, in units that are exact or rounded down, which only relaxes."""
    if not problem.memory:
        return ()
    taken, early, late = np.array(problem.saved).T
    most = max(problem.memory)
    unit = models.exact_unit(np.unique([taken, early, late]), most) or most / MEMORY_UNITS
    forward, backward, weight = numbering(problem.stages)
    kept = [(weight, late), (backward, early)] if problem.is_split else [(backward, taken)]
    found = []
    for d, limit in enumerate(problem.memory):
        on = problem.stages_on(d)
        rows = [(s, last[s], amount[s]) for s in on for last, amount in kept if amount[s] > 0]
        if rows:
            amounts = [math.floor(amount / unit * (1 + models.EXACT)) for *_, amount in rows]
            found.append(
                HeldAmounts(
                    first=np.concatenate([number[forward[s]] for s, *_ in rows]),
                    last=np.concatenate([number[last] for _, last, _ in rows]),
                    amounts=np.repeat(amounts, problem.microbatches),
                    capacity=math.floor(limit / unit * (1 + models.EXACT)),
                )
            )
    return tuple(found)
