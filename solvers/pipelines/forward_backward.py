"""Forward-backward improvement of pipeline schedules.

After Li and Willis (1992) and Valls, Ballestin and Quintanilla (2005, "justification"): schedule
the problem backwards in time, each block as late as possible, latest finish first; then forwards
again, as early as possible, in the order of those latest starts; and so on, with random changes.
The pipeline's problem reversed in time is again a pipeline's problem, so that one dispatcher serves
both directions.
"""

from time import perf_counter

import numpy as np
from numba import njit

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.pipelines.bounds import blocks_of
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.pipelines.makespan_models import block_starts, timetable_of
from stagewright.graphs.documents.arrays import Floats, Ints

EAGERNESS = (0.0, 0.25, 0.5, 1.0)
NOISE = (0.0, 0.2, 1.0, 3.0)  # in units of the longest block
PATIENCE = 3000  # passes without improvement after which the search ends
RESTART = 40  # passes after which the search starts again from a random rule


def improve(
    problem: MakespanProblem, incumbent: Timetable, target: float, limits: Limits
) -> Timetable:
    """The best schedule found within ``limits``, at worst ``incumbent``.

    The search ends early at ``target``, or when it has run out of patience.
    """
    search = _Search(problem, np.random.default_rng(limits.seed))
    best = current = block_starts(problem, incumbent)
    cost, passes, last, began = search.makespan(best), 0, 0, perf_counter()
    while cost > target and passes - last < PATIENCE and limits.left(perf_counter() - began) > 0:
        if passes % RESTART == RESTART - 1:
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


class _Search:
    """The two directions of scheduling, with their random choices."""

    def __init__(self, problem: MakespanProblem, random: np.random.Generator) -> None:
        self.durations, self.releases, self.tails = blocks_of(problem)
        self.limits = np.minimum(problem.in_flight, problem.microbatches).astype(np.int64)
        self.microbatches = problem.microbatches
        self.random = random

    def makespan(self, starts: Floats) -> float:
        return float((starts[:, -1] + self.durations + self.tails).max())

    def as_early(self, priority: Floats) -> Floats:
        """Start times, the smaller ``priority`` first; both of shape (blocks, M)."""
        eagerness = self.random.choice(EAGERNESS)
        return dispatch(self.durations, self.releases, self.limits, priority, eagerness)

    def as_late(self, starts: Floats) -> Floats:
        """Latest start times, the (disturbed) latest finish of ``starts`` first."""
        finish = starts + self.durations[:, None] + self._noise(starts.shape)
        priority = np.ascontiguousarray(-finish[::-1, ::-1])
        durations, releases = self.durations[::-1].copy(), self.tails[::-1].copy()
        eagerness = self.random.choice(EAGERNESS)
        mirrored = dispatch(durations, releases, self.limits, priority, eagerness)
        return np.ascontiguousarray(-(mirrored + durations[:, None])[::-1, ::-1])

    def random_rule(self) -> Floats:
        """Priorities between "later blocks first" and "earlier microbatches first"."""
        blocks = np.arange(len(self.durations))[:, None]
        return np.asarray(10 * self.random.random() * np.arange(self.microbatches) - blocks)

    def _noise(self, shape: tuple[int, ...]) -> Floats:
        """Noise by block and by entry, each of them in half of the calls."""
        random, unit = self.random, float(self.durations.max())
        by_block = random.integers(2) * random.choice(NOISE) * random.standard_normal((shape[0], 1))
        by_entry = random.integers(2) * random.choice(NOISE) * random.standard_normal(shape)
        return np.asarray(unit * (by_block + by_entry), dtype=np.float64)


@njit(cache=True)
def dispatch(
    durations: Floats, releases: Floats, limits: Ints, priority: Floats, eagerness: float
) -> Floats:
    """Schedule generation after Giffler and Thompson (1960), with bounded waiting.

    The device or channel that could complete a block first takes one: of its two candidates, those
    that can start early enough, the one with the smaller ``priority``. ``eagerness`` 0 admits only
    the earliest start (no device idles while it could work), 1 every start before that completion.

    Returns
    -------
    Start times, shape (blocks, M).
    """
    blocks, microbatches = priority.shape
    last = blocks - 1
    starts = np.zeros((blocks, microbatches))
    done = np.zeros(blocks, np.int64)
    ready = np.full(blocks, np.inf)
    ready[0] = releases[0]
    free = np.zeros(blocks // 2)
    for _ in range(blocks * microbatches):
        resource, completion = _first_to_complete(ready, free, durations)
        there, back = resource, last - resource
        early = max(ready[there], free[resource])
        early_back = max(ready[back], free[resource])
        first = min(early, early_back)
        admitted = first + eagerness * (completion - first)
        if min(admitted, completion) < max(early, early_back):  # one candidate only
            block = there if early <= early_back else back
        elif priority[there, done[there]] < priority[back, done[back]]:
            block = there
        else:
            block = back
        start = max(ready[block], free[resource])
        starts[block, done[block]] = start
        free[resource] = start + durations[block]
        done[block] += 1
        for following in (block, min(block + 1, last), last - block):
            ready[following] = _earliest(following, starts, done, durations, releases, limits)
    return starts


@njit(cache=True)
def _first_to_complete(ready: Floats, free: Floats, durations: Floats) -> tuple[int, float]:
    """The resource whose next block can be complete first, and when."""
    last = len(ready) - 1
    best, completion = 0, np.inf
    for resource in range(len(free)):
        there = max(ready[resource], free[resource]) + durations[resource]
        back = max(ready[last - resource], free[resource]) + durations[last - resource]
        if min(there, back) < completion:
            best, completion = resource, min(there, back)
    return best, completion


@njit(cache=True)
def _earliest(
    block: int, starts: Floats, done: Ints, durations: Floats, releases: Floats, limits: Ints
) -> float:
    """When the next microbatch of ``block`` can start for all that precedes it; inf: not yet."""
    m, last = done[block], len(done) - 1
    if m == starts.shape[1] or (block > 0 and done[block - 1] <= m):
        return np.inf
    earliest = releases[block]
    if block > 0:
        earliest = max(earliest, starts[block - 1, m] + durations[block - 1])
    if 2 * block < last and block % 2 == 0 and m >= limits[block // 2]:
        freeing, slot = last - block, m - limits[block // 2]
        if done[freeing] <= slot:
            return np.inf
        earliest = max(earliest, starts[freeing, slot] + durations[freeing])
    return float(earliest)
