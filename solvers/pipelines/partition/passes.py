"""The smallest bottleneck W for every number of stages, by PRM's recurrence (``bppm.Recurrence``).

For a fixed bottleneck T a pass finds all states that are reachable with no stage and no channel
above T: i devices used, r of them by the stage placed last, l layers placed. Every state holds the
set of stage counts xi that reach it as a bitset, so one pass over the devices covers all numbers of
stages. Four properties make the pass fast:

* a stage's time grows with its layers, so the l' for which (l', l] is under T form a window that
  only moves forward with l;
* if r r' is large enough, no channel exceeds T for any links: all such r' are combined by suffix
  unions, and the few smaller r' are examined one by one;
* the remaining work must fit under T on the remaining devices, and the work done on the used ones,
  which leaves a band of l for every i;
* a placement is read from the same table.
"""

import math
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

import numpy as np

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.pipelines.bppm import (
    BalancedPartition,
    ByRecurrence,
    Recurrence,
    StageChoice,
)
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.pipelines.partition.kernels import (
    MARGIN,
    ONE,
    Ranges,
    Words,
    predecessor,
    step_time,
    sweep,
)

Cuts = list[tuple[int, int]]
# A bracket is narrowed to this ratio before its upper end is tested for optimality; each failed
# test narrows it further.
FIRST_RATIO = 1e-2
_NARROWING = 1 / 32
_WIDENING = 1.25
UNLIMITED = Limits(math.inf)


class ReachTable(NamedTuple):
    """The result of a pass: ``reach`` has a row per state (see Band), bit xi - 1 per count."""

    limit: float
    band: Ranges
    reach: Words


def reach_under(form: Recurrence, limit: float, most: int) -> ReachTable:
    """All states with no stage or channel above ``limit`` in at most ``most`` stages."""
    band = _band(form, limit)
    reach = np.zeros((int(band.base[-1]), (most + 63) // 64), dtype=np.uint64)
    largest_boundary = float(form.boundary.max())
    slowest = (float(form.seconds_per_byte.max()), float(form.latency.max()))
    needed = form.state_factor * form.parameters[-1] + 2.0 * form.buffers.max(axis=1)
    needed += min(form.warm_up, most) * form.saved[:, -1]
    sweep(form, band, limit, most, largest_boundary, slowest, needed, reach)
    return ReachTable(limit, band, reach)


def complete_counts(form: Recurrence, table: ReachTable) -> list[int]:
    """The numbers of stages in which all layers can be placed on all devices, ascending."""
    return [
        word * 64 + bit + 1
        for word, value in enumerate(np.bitwise_or.reduce(_final(form, table), axis=0))
        for bit in range(64)
        if int(value) >> bit & 1
    ]


def trace_back(form: Recurrence, table: ReachTable, stages: int) -> Cuts:
    """Read a placement in ``stages`` stages from the table.

    Per stage from the last: (layers placed, devices used) so far. Among all placements under the
    limit, each stage from the first on is as fast as possible.
    """
    word, bit = divmod(stages - 1, 64)
    final = np.flatnonzero(_final(form, table)[:, word] >> np.uint64(bit) & ONE)
    l, i, r = len(form.parameters) - 1, len(form.memory), 0
    best = np.inf
    for candidate in final + 1:
        before = predecessor(
            form, table.band, table.reach, table.limit, stages, l, i, int(candidate)
        )
        if before[0] < best:
            best, r = before[0], int(candidate)
    cuts = [(l, i)]
    for n in range(stages, 1, -1):
        _, l, later = predecessor(form, table.band, table.reach, table.limit, n, l, i, r)
        i, r = i - r, later
        cuts.append((l, i))
    return cuts[::-1]


def bottleneck(form: Recurrence, cuts: Cuts) -> float:
    """The largest stage or channel time of a placement, with the kernel's arithmetic."""
    worst, taken, used, replicas = 0.0, 0, 0, 0
    for l, i in cuts:
        worst = max(worst, step_time(form, taken, l, used, replicas, i - used))
        taken, used, replicas = l, i, i - used
    return worst


def least_work(form: Recurrence) -> Floats:
    """Prefix sums over the last l layers of M device-seconds at the cheapest kind and share.

    A stage on r devices under T does at most r T of this work.
    """
    replicas = np.arange(form.forward.shape[1])[None, :, None]
    work = (np.diff(form.forward) + np.diff(form.backward)) * replicas
    cheapest = work[:, 1:].min(axis=(0, 1))
    return form.microbatches * np.concatenate([[0.0], np.cumsum(cheapest)])


def _band(form: Recurrence, limit: float) -> Ranges:
    work, size = least_work(form), len(form.memory)
    layers = len(work) - 1
    devices = np.arange(size + 1)
    room = np.minimum(limit, 2 * work[-1]) * (1 + MARGIN)
    high = np.searchsorted(work, devices * room, side="right") - 1
    low = np.searchsorted(work, work[-1] * (1 - MARGIN) - (size - devices) * room)
    high[:size] = np.minimum(high[:size], layers - 1)
    low[size] = layers
    low[0] = high[0] = 0
    low = np.minimum(np.maximum(low, devices > 0), high + 1)
    base = np.concatenate([[0], np.cumsum(devices * (high - low + 1))])
    return Ranges(low.astype(np.int64), high.astype(np.int64), base.astype(np.int64))


def _final(form: Recurrence, table: ReachTable) -> Words:
    """Bitsets of the complete states, a row per r = 1 ... V."""
    size = len(form.memory)
    if table.band.high[size] < table.band.low[size]:
        return np.zeros((0, table.reach.shape[1]), dtype=np.uint64)
    return table.reach[table.band.base[size] : table.band.base[size + 1]]


@dataclass(frozen=True, slots=True)
class Balanced:
    """A partition and its bottleneck; ``bound`` is a lower bound on W, equal to it if exact."""

    bottleneck_seconds: float
    bound_seconds: float
    stages: tuple[StageChoice, ...]


@dataclass
class PartitionSearch:
    """Brackets of W(xi) for every number of stages xi <= ``most``, narrowed pass by pass.

    A pass decides for all numbers of stages whether they fit under its limit, so narrowing one
    bracket narrows the others. W(xi) is at least ``bound[xi]``, and ``found[xi]`` is the best
    placement so far with its bottleneck. The search ends early when ``limits`` do, counted from the
    first moment.
    """

    question: BalancedPartition
    most: int | None = None
    limits: Limits = UNLIMITED
    form: Recurrence = field(init=False)
    bound: dict[int, float] = field(init=False)
    found: dict[int, tuple[float, Cuts]] = field(init=False)
    passes: int = field(init=False, default=0)
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = monotonic()
        self.form = ByRecurrence().apply(self.question)
        layers, size = len(self.form.parameters) - 1, len(self.form.memory)
        self.most = min(layers, size, self.most or size)
        load = float(least_work(self.form)[-1]) / size
        self.bound = dict.fromkeys(range(1, self.most + 1), load * (1 - MARGIN))
        self.found = {}

    @property
    def is_over(self) -> bool:
        """Whether the search was stopped, or has no time left."""
        return self.limits.left(monotonic() - self.began) <= 0

    def test(self, limit: float) -> None:
        """Run one pass: find the numbers of stages that fit under ``limit``, with placements."""
        assert self.most is not None
        self.passes += 1
        table = reach_under(self.form, limit, self.most)
        fitting = set(complete_counts(self.form, table))
        for stages in range(1, self.most + 1):
            if stages not in fitting:
                self.bound[stages] = max(self.bound[stages], math.nextafter(limit, math.inf))
            elif stages not in self.found or self.found[stages][0] > limit:
                cuts = trace_back(self.form, table, stages)
                self.found[stages] = (bottleneck(self.form, cuts), cuts)

    def solve(self, stages: int, ratio: float = 0.0, ceiling: float = math.inf) -> Balanced | None:
        """A partition into ``stages`` stages with W at most 1 + ``ratio`` times the least.

        None if every partition that fits in memory has a bottleneck of ``ceiling`` or more, or if
        the search is over. With ``ratio`` 0 the result is exact to the last bit of a float.
        """
        self._find_one(stages, ceiling)
        narrow = FIRST_RATIO
        while self.bound[stages] < ceiling and not self.is_over:
            low, (high, cuts) = self.bound[stages], self.found[stages]
            if high >= ceiling:
                self.test(math.nextafter(ceiling, 0.0))
            elif high <= low * (1 + ratio):
                choice = ByRecurrence().invert(self.question, cuts)
                return Balanced(high, min(low, high), choice)
            elif high <= low * (1 + max(narrow, ratio)) or (ratio > 0 and narrow == FIRST_RATIO):
                # The placement found may already be optimal: test just below it.
                self.test(min(math.nextafter(high, 0.0), high / (1 + ratio)))
                narrow *= _NARROWING
            else:
                self.test(math.sqrt(low) * math.sqrt(high) if low else high / 2)
        return None

    def with_memory(self, factor: float) -> tuple[StageChoice, ...] | None:
        """A partition that fits in ``factor`` times the devices' memory; None if there is none."""
        assert self.most is not None
        form = self.form._replace(memory=self.form.memory * factor)
        table = reach_under(form, math.inf, self.most)
        counts = complete_counts(form, table)
        if not counts:
            return None
        cuts = trace_back(form, table, counts[-1])
        return ByRecurrence().invert(self.question, cuts)

    def next_limit(self, limit: float) -> float:
        """The next larger limit if ``limit`` found nothing; inf tests memory only."""
        wider = limit * _WIDENING
        return wider if wider < 4 * float(least_work(self.form)[-1]) else math.inf

    def _find_one(self, stages: int, ceiling: float) -> None:
        """Raise the limit until a placement is found or the ceiling is exceeded."""
        while not (stages in self.found or self.is_over) and self.bound[stages] < ceiling:
            limit = self.next_limit(self.bound[stages])
            self.test(min(limit, math.nextafter(ceiling, 0)) if ceiling < math.inf else limit)
