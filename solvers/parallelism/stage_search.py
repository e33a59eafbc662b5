"""The best blocks of every stage of one plain layout, by branch and bound over intervals.

A node gives every stage an interval of blocks. Times grow with blocks, and the time of the
pipeline with those of its stages, so that the time with the least values of every stage is a lower
bound. A stage's interval ends where that bound, with the stage's own value, reaches the best known
time; it begins where the others can take no more. What is left is halved, least bound first.

A lower bound on the time of all divisions of a plain pipeline, by a recurrence over its stages.

No stage computes before the stages before it have passed on the first microbatch, and the last one
comes back through them: with a stage's forward f and backward b (without the weights' part, where
that is put off) and a hop h, an iteration takes at least the sum of f + b + 2 h over the stages
before any one stage, and m (f + b) of that one. To its own last computation it takes at least the
sum of f + h over the stages before, and all its work. The least of both over all divisions is
V(s, i) = min over n of max(work(s, i, n), way(s, i, n) + V(s + 1, i + n)), for the stages from s on
with the blocks from i on.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from stagewright.formulations.parallelism.pipeline_time import Walk
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.parallelism.space import StageOption, StageOptions

Ends = tuple[float, float]
"""Until the first stage's last backward, and until the last computation of any stage (s)."""

NEVER: Ends = (inf, inf)


@dataclass(frozen=True, slots=True)
class LeastDivision:
    """No division takes less than ``seconds``, without the update; ``blocks`` is a good one."""

    seconds: float
    blocks: tuple[int, ...]


def least_division(
    options: StageOptions, low: Sequence[int], high: Sequence[int], starts: Sequence[range]
) -> LeastDivision | None:
    """The bound for stages with ``low`` to ``high`` blocks that begin in ``starts``.

    None if no division fits.
    """
    after: dict[int, Ends] = {options.blocks: (0.0, 0.0)}
    taken: list[dict[int, int]] = []
    for stage in reversed(range(options.stages)):
        found, choice = {}, {}
        for start in starts[stage]:
            best, count = _best(options, stage, start, range(low[stage], high[stage] + 1), after)
            if best != NEVER:
                found[start], choice[start] = best, count
        after = found
        taken.append(choice)
    if 0 not in after:
        return None
    blocks, start = [], 0
    for choice in reversed(taken):
        blocks.append(choice[start])
        start += choice[start]
    return LeastDivision(max(after[0]), tuple(blocks))


def _best(
    options: StageOptions, stage: int, start: int, counts: range, after: dict[int, Ends]
) -> tuple[Ends, int]:
    """The least of both ends over a stage's possible blocks, and the blocks of the first end."""
    back, here, blocks = inf, inf, counts.start
    for count in counts:
        then = after.get(start + count)
        if then is None:
            continue
        one = options.option(stage, start, count)
        if one is None:
            break  # more do not fit either
        ends = _ends(options, stage, one, then)
        if ends[0] < back:
            back, blocks = ends[0], count
        here = min(here, ends[1])
    return (back, here), blocks


def _ends(options: StageOptions, stage: int, one: StageOption, then: Ends) -> Ends:
    """Both ends of the pipeline from this stage on, from the later stages' ends ``then``."""
    m, hop = options.microbatches, options.hop
    each = one.forward + one.returned
    is_last = stage == options.stages - 1
    back = m * each if is_last else max(m * each, each + 2 * hop + then[0])
    own = m * (each + one.weight) + one.reduction
    here = own if is_last else max(own, one.forward + hop + then[1])
    return back + (one.reduction if stage == 0 else 0.0), here


_MOST_NODES = 200
MOST_STEPS = 5_000_000
"""Nodes, and computations in the pipelines walked, after which the bound is what is left open."""


@dataclass(frozen=True, slots=True)
class BlockDivision:
    """Blocks of every stage, how many of each are recomputed, and the iteration in seconds."""

    blocks: tuple[int, ...]
    recomputed: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Divided:
    """The best division that is faster than the given time, if there is one.

    None is faster than ``bound``; if it is not below the best time, the best is proved so.
    """

    best: BlockDivision | None
    bound: float


@dataclass(frozen=True, slots=True)
class _Box:
    """The fewest and the most blocks of every stage."""

    low: Ints
    high: Ints


class StageSearch:
    """The search of the divisions of one layout, below a time that is already known."""

    def __init__(self, options: StageOptions, walk: Walk, below: float) -> None:
        self.options, self.walk = options, walk
        self.stages, self.blocks = options.stages, options.blocks
        self.below, self.steps = below, 0

    best: BlockDivision | None = None

    def run(self, nodes: int = _MOST_NODES) -> Divided:
        """Search until it is proved, or through so many nodes."""
        numbers = itertools.count()
        heap: list[tuple[float, int, _Box]] = []
        root = self._root()
        bound = np.inf if root is None else self._bound(root)
        if root is not None and bound < self._worth:
            self._descend(root)
            heap = [(bound, next(numbers), root)]
        while heap and nodes and heap[0][0] < self._worth and self.steps < MOST_STEPS:
            nodes -= 1
            box = self._tightened(heapq.heappop(heap)[2])
            for half in [] if box is None else self._halves(box):
                bound = self._bound(half)
                if bound < self._worth:
                    heapq.heappush(heap, (bound, next(numbers), half))
        open_bound = heap[0][0] if heap else self.below
        return Divided(self.best, min(open_bound, self.below))

    @property
    def _worth(self) -> float:
        """The time below which a bound must be for a division to be worth looking at."""
        return self.below * (1 - RELATIVE_TOLERANCE)

    def _root(self) -> _Box | None:
        """The box of block counts that each stage's memory and time allow by themselves."""
        low = np.ones(self.stages, dtype=np.int64)
        low[[0, -1]] = 0
        if self.stages == 1:
            low[0] = self.blocks
        spare = self.blocks - int(low.sum())
        high = low.copy()
        more = spare
        for stage in range(self.stages):
            more = self._most(stage, int(low[stage]), spare, more)
            high[stage] += more
        return self._summed(_Box(low, high))

    def _most(self, stage: int, low: int, spare: int, guess: int) -> int:
        """How many more than ``low`` a stage can have; -1 if not even these.

        Mostly as many as the ``guess``, those of the stage before.
        """
        least, most, guesses = -1, spare, [guess + 1, guess]
        while least < most:
            middle = guesses.pop() if guesses else (least + most + 1) // 2
            if not least < middle <= most:
                continue
            if self._alone(stage, low + middle):
                least = middle
            else:
                most = middle - 1
        return least

    def _alone(self, stage: int, count: int) -> bool:
        """Whether a stage with so many blocks may be in a division below the time."""
        found = self._least(stage, count, count, range(self.blocks - count + 1))
        if found is None:
            return False
        each = found.forward + found.returned
        total = self.options.microbatches * each
        return bool(total + found.update < self._worth)

    def _summed(self, box: _Box) -> _Box | None:
        """The box narrowed so that all stages can sum to the model's blocks; None if empty."""
        low, high = box.low, box.high
        if (low > high).any():
            return None
        while True:
            raised = np.maximum(low, self.blocks - (high.sum() - high))
            lowered = np.minimum(high, self.blocks - (raised.sum() - raised))
            if (raised > lowered).any():
                return None
            if (raised == low).all() and (lowered == high).all():
                return _Box(low, high)
            low, high = raised, lowered

    # Times.

    def _least(self, stage: int, low: int, high: int, starts: range) -> StageOption | None:
        """The least of each cost of a stage, over its possible starts and block counts."""
        if self.options.is_uniform:
            starts = range(1)
        if len(starts) == 1 and low == high:
            return self.options.option(stage, starts[0], low)
        every = [self.options.option(stage, start, low) for start in starts]
        fitting = [one for one in every if one is not None]
        if not fitting:
            return None
        # The exchange of gradients alone may take less with more blocks, which hide it.
        more = [
            self.options.option(stage, start, count)
            for start in starts
            for count in range(low + 1, high + 1)
        ]
        reductions = [one.reduction for one in (*every, *more) if one is not None]
        return StageOption(
            recomputed=min(one.recomputed for one in fitting),
            forward=min(one.forward for one in fitting),
            returned=min(one.returned for one in fitting),
            weight=min(one.weight for one in fitting),
            reduction=min(reductions),
            update=min(one.update for one in fitting),
        )

    def _starts(self, box: _Box, stage: int) -> range:
        """Where a stage may start."""
        before = int(box.low[:stage].sum()), int(box.high[:stage].sum())
        after = int(box.low[stage:].sum()), int(box.high[stage:].sum())
        first = max(before[0], self.blocks - after[1])
        return range(first, max(first, min(before[1], self.blocks - after[0])) + 1)

    def _all(self, box: _Box) -> list[StageOption] | None:
        """The least costs of every stage; None if a stage does not fit."""
        found = []
        for stage in range(self.stages):
            low, high = int(box.low[stage]), int(box.high[stage])
            one = self._least(stage, low, high, self._starts(box, stage))
            if one is None:
                return None
            found.append(one)
        return found

    def _bound(self, box: _Box) -> float:
        every = self._all(box)
        if every is None:
            return np.inf
        walked = self.seconds(every)
        if walked >= self._worth:
            return walked
        least = self._division(box)
        if least is None:
            return np.inf
        return max(walked, least.seconds + max(one.update for one in every))

    def _division(self, box: _Box) -> LeastDivision | None:
        starts = [self._starts(box, stage) for stage in range(self.stages)]
        low, high = box.low.tolist(), box.high.tolist()
        return least_division(self.options, low, high, starts)

    def seconds(self, every: list[StageOption]) -> float:
        """An iteration, as ``estimate.evaluate`` has it."""
        forward, returned, weight, reduction, update = _columns(every)
        of = self.options
        self.steps += 2 * self.stages * of.microbatches
        finish, _ = self.walk(
            of.codes, of.stage_of, of.microbatches, forward, returned + weight, weight, of.paired,
            of.hops, forward,
        )  # fmt: skip
        end = np.maximum(finish, of.sending) + reduction
        return float(end.max() + update.max())

    def _tightened(self, box: _Box) -> _Box | None:
        """The box narrowed by the bound until nothing changes."""
        while True:
            every = self._all(box)
            if every is None or self.seconds(every) >= self._worth:
                return None
            if (box.low == box.high).all():
                self._try(box.low)
                return None
            high = [self._highest(box, every, stage) for stage in range(self.stages)]
            found = self._summed(_Box(box.low, np.array(high)))
            if found is None or _are_equal(found, box):
                return found
            box = found

    def _highest(self, box: _Box, every: list[StageOption], stage: int) -> int:
        """The most blocks of a stage with which the bound is still below the best time."""
        least, most = int(box.low[stage]), int(box.high[stage])
        starts = self._starts(box, stage)
        while least < most:
            middle = (least + most + 1) // 2
            one = self._least(stage, middle, int(box.high[stage]), starts)
            changed = None if one is None else [*every[:stage], one, *every[stage + 1 :]]
            if changed is not None and self.seconds(changed) < self._worth:
                least = middle
            else:
                most = middle - 1
        return least

    def _halves(self, box: _Box) -> list[_Box]:
        stage = int(np.argmax(box.high - box.low))
        middle = int(box.low[stage] + box.high[stage]) // 2
        low, high = box.low.copy(), box.high.copy()
        low[stage], high[stage] = middle + 1, middle
        return [one for one in map(self._summed, (_Box(box.low, high), _Box(low, box.high))) if one]

    # Divisions.

    def _try(self, blocks: Ints) -> float:
        """The time of a division, which is kept if it is the best."""
        starts = np.concatenate(([0], np.cumsum(blocks)))
        every = [
            self.options.option(stage, int(starts[stage]), int(blocks[stage]))
            for stage in range(self.stages)
        ]
        fitting = [one for one in every if one is not None]
        if len(fitting) < len(every):
            return np.inf
        seconds = self.seconds(fitting)
        if seconds < self._worth:
            self.below = seconds
            recomputed = tuple(one.recomputed for one in fitting)
            self.best = BlockDivision(tuple(map(int, blocks)), recomputed, seconds)
        return seconds

    def _descend(self, box: _Box) -> None:
        """A good first division: the bound's division, improved by moving single blocks."""
        least = self._division(box)
        if least is None:
            return
        blocks = np.array(least.blocks)
        now = self._try(blocks)
        while True:
            moved = [(self._try(one), tuple(one)) for one in self._moves(box, blocks)]
            best = min(moved, default=(np.inf, ()))
            if best[0] >= now * (1 - RELATIVE_TOLERANCE):
                return
            now, blocks = best[0], np.array(best[1])

    def _load(self, stage: int, count: int) -> float:
        start = min(self.blocks - count, round(self.blocks * stage / self.stages))
        one = self.options.option(stage, start, count)
        return np.inf if one is None else one.forward + one.returned + one.weight

    def _moves(self, box: _Box, blocks: Ints) -> list[Ints]:
        """A block from one of the fullest stages to one of the others."""
        loads = np.array([self._load(stage, int(blocks[stage])) for stage in range(self.stages)])
        fullest = np.argsort(-loads, kind="stable")
        found = []
        for source, target in itertools.product(fullest[:MOVED], fullest[::-1][:TAKING]):
            can = blocks[source] > box.low[source] and blocks[target] < box.high[target]
            if source != target and can:
                one = blocks.copy()
                one[source] -= 1
                one[target] += 1
                found.append(one)
        return found


MOVED, TAKING = 3, 8
"""From how many stages, and to how many, a block is moved."""


def _columns(every: list[StageOption]) -> tuple[Floats, ...]:
    names = ("forward", "returned", "weight", "reduction", "update")
    return tuple(np.array([getattr(one, name) for one in every]) for name in names)


def _are_equal(one: _Box, other: _Box) -> bool:
    return bool((one.low == other.low).all() and (one.high == other.high).all())
