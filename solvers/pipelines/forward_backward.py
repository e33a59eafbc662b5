"""Forward-backward improvement of pipeline schedules.

After Li and Willis (1992) and Valls, Ballestin and Quintanilla (2005, "justification"): schedule
the problem backwards in time, each block as late as possible, latest finish first; then forwards
again, as early as possible, in the order of those latest starts; repeat with random perturbations.
The problem reversed in time has the same form, so one dispatcher serves both directions.
"""

from time import perf_counter
from typing import NamedTuple

import numpy as np

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.pipelines.blocks import (
    NONE,
    BlockGraph,
    block_starts,
    blocks_of,
    timetable_of,
)
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.pipelines.compiled import entry, lean, least_index, refer

_EAGERNESS = (0.0, 0.25, 0.5, 1.0)
NOISE = (0.0, 0.2, 1.0, 3.0)  # in units of the longest block
PATIENCE = 3000  # passes without improvement after which the search ends
_RESTART = 40  # passes after which the search starts again from a random rule


def improve(
    problem: MakespanProblem,
    incumbent: Timetable,
    target: float,
    limits: Limits,
    patience: int = PATIENCE,
) -> Timetable:
    """The best schedule found within ``limits``, at worst ``incumbent``.

    The search ends early at ``target``, or after ``patience`` passes without improvement.
    """
    search = _ScheduleSearch(problem, np.random.default_rng(limits.seed))
    best = current = block_starts(problem, incumbent)
    cost, passes, last, began = search.makespan(best), 0, 0, perf_counter()
    while cost > target and passes - last < patience and limits.left(perf_counter() - began) > 0:
        if passes % _RESTART == _RESTART - 1:
            current = search.as_early(search.random_rule())
        elif search.random.integers(2):
            current = best
        current = search.as_early(search.as_late(current))
        passes += 1
        if search.makespan(current) < cost:
            last = passes
        if search.makespan(current) <= cost:
            best, cost = current, search.makespan(current)
    return timetable_of(problem, best)


class _ScheduleSearch:
    """Forward and backward scheduling with random perturbations."""

    def __init__(self, problem: MakespanProblem, random: np.random.Generator) -> None:
        self.blocks = blocks_of(problem)
        self.durations, self.tails = self.blocks.durations, self.blocks.tails
        self.early, self.late = rules_of(self.blocks), rules_of(self.blocks.reversed())
        self.way = 4 * problem.stages - 2
        self.microbatches = problem.microbatches
        self.random = random

    def makespan(self, starts: Floats) -> float:
        return float((starts[:, -1] + self.durations + self.tails).max())

    def as_early(self, priority: Floats) -> Floats:
        """Start times, the smaller ``priority`` first; both of shape (blocks, M)."""
        return dispatch(self.early, priority, self.random.choice(_EAGERNESS))

    def as_late(self, starts: Floats) -> Floats:
        """Latest start times, the (disturbed) latest finish of ``starts`` first."""
        finish = starts + self.durations[:, None] + self._noise(starts.shape)
        priority = np.ascontiguousarray(-finish[::-1, ::-1])
        mirrored = dispatch(self.late, priority, self.random.choice(_EAGERNESS))
        return np.ascontiguousarray(-(mirrored + self.late.durations[:, None])[::-1, ::-1])

    def random_rule(self) -> Floats:
        """Random priorities between "later blocks first" and "earlier microbatches first".

        Weight gradients, which at most an all-reduce waits for, have the priority of block 0.
        """
        blocks = np.arange(len(self.durations))
        urgency = np.where(blocks < self.way, blocks, 0)[:, None]
        return np.asarray(10 * self.random.random() * np.arange(self.microbatches) - urgency)

    def _noise(self, shape: tuple[int, ...]) -> Floats:
        """Noise per block and noise per entry, each in half of the calls."""
        random, unit = self.random, float(self.durations.max())
        by_block = random.integers(2) * random.choice(NOISE) * random.standard_normal((shape[0], 1))
        by_entry = random.integers(2) * random.choice(NOISE) * random.standard_normal(shape)
        return np.asarray(unit * (by_block + by_entry), dtype=np.float64)


class BlockRules(NamedTuple):
    """:class:`BlockGraph` as arrays for :func:`dispatch`; rows are filled up with ``NONE``.

    ``members`` are the blocks of each device and channel; ``wakes`` are the blocks whose next start
    may change when a block is scheduled: itself, its successors, and those whose slot it frees.
    """

    durations: Floats
    releases: Floats
    machines: Ints
    before: Ints
    freeing: Ints
    limits: Ints
    members: Ints
    wakes: Ints


def rules_of(blocks: BlockGraph) -> BlockRules:
    """The arrays of ``blocks`` for the dispatcher."""
    n, own = len(blocks.durations), blocks.members()
    members = np.full((len(own), max(map(len, own))), NONE)
    for machine, row in enumerate(own):
        members[machine, : len(row)] = row
    freed, limited = np.full(n, NONE), np.flatnonzero(blocks.freeing != NONE)
    freed[blocks.freeing[limited]] = limited
    return BlockRules(
        durations=blocks.durations,
        releases=blocks.releases,
        machines=blocks.machines,
        before=blocks.before,
        freeing=blocks.freeing,
        limits=blocks.limits,
        members=members,
        wakes=np.column_stack([np.arange(n), blocks.after(), freed]),
    )


@entry
def dispatch(rules: BlockRules, priority: Floats, eagerness: float) -> Floats:
    """Schedule generation after Giffler and Thompson (1960), with bounded waiting.

    The device or channel with the earliest possible completion of a block is scheduled next. Its
    candidates are the blocks that can start early enough; the smallest ``priority`` is chosen.
    ``eagerness`` 0 admits only the earliest start (non-delay schedules), 1 every start before that
    completion (active schedules). Blocks whose priority is NaN are first come, first served.

    Returns
    -------
    Start times, shape (blocks, M).
    """
    rules = refer(rules)
    durations, machines, wakes = rules.durations, rules.machines, rules.wakes
    starts, done = np.zeros(priority.shape), np.zeros(len(priority), np.int64)
    count = len(rules.members)
    ready, free, ends = np.empty(len(priority)), np.zeros(count), np.empty(count)
    for block in range(len(ready)):
        ready[block] = _earliest(rules, block, starts, done)
    for machine in range(len(ends)):
        ends[machine] = _first_end(rules, machine, ready, free)
    for _ in range(priority.size):
        machine = least_index(ends)
        block = _choice(rules.members, machine, ends, ready, free, done, priority, eagerness)
        starts[block, done[block]] = max(ready[block], free[machine])
        free[machine] = starts[block, done[block]] + durations[block]
        done[block] += 1
        for k in range(wakes.shape[1]):
            woken = wakes[block, k]
            if woken != NONE:
                ready[woken] = _earliest(rules, woken, starts, done)
                ends[machines[woken]] = _first_end(rules, machines[woken], ready, free)
    return starts


@lean
def _first_end(rules: BlockRules, machine: int, ready: Floats, free: Floats) -> float:
    """The earliest completion of the next block of a device or channel."""
    end = np.inf
    for k in range(rules.members.shape[1]):
        block = rules.members[machine, k]
        if block != NONE:
            end = min(end, max(ready[block], free[machine]) + rules.durations[block])
    return end


@lean
def _choice(
    members: Ints,
    machine: int,
    ends: Floats,
    ready: Floats,
    free: Floats,
    done: Ints,
    priority: Floats,
    eagerness: float,
) -> int:
    """The block that a device or channel takes next."""
    first = np.inf
    for k in range(members.shape[1]):
        block = members[machine, k]
        if block != NONE:
            first = min(first, max(ready[block], free[machine]))
    admitted = min(first + eagerness * (ends[machine] - first), ends[machine])
    chosen, least = NONE, np.inf
    for k in range(members.shape[1]):
        block = members[machine, k]
        if block == NONE or max(ready[block], free[machine]) > admitted:
            continue
        urgency = priority[block, done[block]]
        if np.isnan(urgency):
            urgency = ready[block]
        if chosen == NONE or urgency <= least:
            chosen, least = block, urgency
    return chosen


@lean
def _earliest(rules: BlockRules, block: int, starts: Floats, done: Ints) -> float:
    """Earliest start of ``block``'s next microbatch by its predecessors; inf if one is open."""
    m = done[block]
    if m == starts.shape[1]:
        return np.inf
    earliest = rules.releases[block]
    for k in range(rules.before.shape[1]):
        one = rules.before[block, k]
        if one != NONE:
            if done[one] <= m:
                return np.inf
            earliest = max(earliest, starts[one, m] + rules.durations[one])
    frees, slot = rules.freeing[block], m - rules.limits[block]
    if frees != NONE and slot >= 0:
        if done[frees] <= slot:
            return np.inf
        earliest = max(earliest, starts[frees, slot] + rules.durations[frees])
    return float(earliest)
