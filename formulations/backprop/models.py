"""The common problem as ``Intervals``, for constraint programming."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from stagewright.formulations.backprop.problem import BackpropProblem, WindowTimes
from stagewright.formulations.forms.models import (
    HeldAmounts,
    Intervals,
    are_multiples,
    exact_unit,
    in_ticks,
    tick,
)
from stagewright.formulations.pipelines.bounds.every_plan import LeastTimes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.documents.arrays import Ints
from stagewright.graphs.documents.errors import InputError

TWO_STREAMS = "two streams of a single device"


def two_streams_bound(problem: PipelineProblem) -> float | None:
    """The larger of two lower bounds; None for several devices. Proof: docs/certificates.md.

    - The main stream's computations, and after its last gradient the first layer's last weight
      gradient, which nothing but other weight gradients can run beside.
    - All computations by the share of the device that they occupy; the device is alone with its
      first gradient and with the last layer's forwards, whatever their shares.
    """
    if len(problem.cluster) > 1:
        return None
    times, count = LeastTimes(problem, streams=2), problem.microbatches
    forward, gradient = times.forward[0, 0], times.gradient[0, 0]
    weights = times.backward[0, 0] - gradient
    steps = float(times.update[0].sum())
    main = count * float((forward + gradient).sum()) + float(weights[0])
    area = count * float(times.area[0, 0].sum())
    kind = problem.kinds[0]
    of_forward, _, of_weights = problem.layer_shares(kind, 1)[:, -1].tolist()
    alone = float(problem.costs(kind, 1).backward_seconds[-1])
    if problem.splits_per_layer[-1]:
        parts = problem.gradient_costs(kind, 1)
        split = parts.forward_seconds[-1] + of_weights * parts.backward_seconds[-1]
        alone = min(alone, float(split))
    of_last = float(times.area[0, 0, -1]) - of_forward * float(forward[-1])
    room = alone - of_last + count * float(forward[-1]) * (1 - of_forward)
    return float(max(main, area + room) + steps)


_MAX_PIECES = 2000  # of all operations that may be suspended
MEMORY_UNITS = 2**20  # of the largest limit, for amounts without a common unit


@dataclass(frozen=True)
class BackpropByIntervals:
    """One interval per piece of an operation, then one per tensor with several last uses.

    Chunks become pieces in sequence. On preemptible links the pieces are single ticks, which loses
    nothing if times are exact multiples of a tick: take an optimal schedule, keep the order on
    exclusive resources, and let the links serve by the completion times of that schedule. Then no
    operation ends later (induction over completions, as earliest deadline first is optimal for
    given releases), and all events of the new schedule are sums of durations.

    Other times are rounded down, so a bound on the model is a bound on the problem.
    """

    problem: BackpropProblem
    horizon: float

    @cached_property
    def unit(self) -> float:
        """Seconds per tick."""
        chunks = [one.chunk_seconds for one in self.problem.resources]
        finite = [chunk for chunk in chunks if 0 < chunk < math.inf]
        times = np.unique(np.concatenate([self.problem.seconds, finite]))
        return tick(times, self.horizon)

    @cached_property
    def pieces(self) -> tuple[tuple[int, ...], ...]:
        """Ticks of each operation's pieces; more than ``_MAX_PIECES`` are refused."""
        ticks = in_ticks(self.problem.seconds, self.unit).astype(np.int64).tolist()
        found = [self._pieces(i, length) for i, length in enumerate(ticks)]
        if sum(len(one) for one in found if len(one) > 1) > _MAX_PIECES:
            raise InputError(f"more than {_MAX_PIECES} pieces of transfers: use coarser chunks")
        return tuple(found)

    def _pieces(self, i: int, length: int) -> tuple[int, ...]:
        r = self.problem.resource[i]
        chunk = math.inf if r < 0 else self.problem.resources[r].chunk_seconds
        if math.isinf(chunk) or length == 0:
            return (length,)
        size = max(1, round(chunk / self.unit))
        if length > _MAX_PIECES * size:
            raise InputError(f"more than {_MAX_PIECES} pieces of transfers: use coarser chunks")
        whole, rest = divmod(length, size)
        return (size,) * whole + ((rest,) if rest else ())

    @cached_property
    def _first(self) -> Ints:
        """The first interval of each operation; one more than the last interval at the end."""
        return np.concatenate(([0], np.cumsum([len(one) for one in self.pieces])))

    def apply(self, lower_bound: float, hint: WindowTimes | None = None) -> Intervals:
        """The model; ``hint`` is a feasible answer."""
        problem, first = self.problem, self._first
        last = first[1:] - 1
        durations = [length for one in self.pieces for length in one]
        inside = [(j, j + 1) for i in range(len(last)) for j in range(first[i], last[i])]
        before = [(last[i], first[j]) for i, j in problem.before] + inside
        stores = self._stores(durations, before)
        owner = np.repeat(np.arange(len(last)), np.diff(first))
        places = problem.resource[owner]
        return Intervals(
            durations=np.array(durations, dtype=np.int64),
            machines=tuple(np.flatnonzero(places == r) for r in range(len(problem.resources))),
            before=np.array(before, dtype=np.int64).reshape(-1, 2),
            tails=np.zeros(len(durations), dtype=np.int64),
            horizon=math.floor(self.horizon / self.unit * (1 + 1e-9)),
            lower_bound=self._least(lower_bound),
            hint=None if hint is None else self._hint(hint, len(durations)),
            stores=stores,
        )

    def _least(self, seconds: float) -> int:
        """A bound in ticks; rounded times shorten the model by less than a tick each."""
        return math.ceil(seconds / self.unit * (1 - 1e-9)) if self.is_exact else 0

    def _stores(
        self, durations: list[int], before: list[tuple[int, int]]
    ) -> tuple[HeldAmounts, ...]:
        """Tensors per device; an interval of no length joins several last uses."""
        problem, first, found = self.problem, self._first, []
        held = [[t for t in problem.tensors if t.device == d] for d in range(len(problem.memory))]
        end = len(durations)
        durations.append(0)
        before += [(int(last) - 1, end) for last in first[1:]]
        unit = max(problem.memory, default=1.0) / MEMORY_UNITS
        amounts = np.array([tensor.amount for tensor in problem.tensors])
        unit = exact_unit(np.unique(amounts), max(problem.memory, default=1.0)) or unit
        for limit, tensors in zip(problem.memory, held, strict=True):
            rows = []
            for tensor in tensors:
                rows.append((first[tensor.first], self._join(tensor.last, end, durations, before)))
            if rows:
                sizes = in_ticks(np.array([tensor.amount for tensor in tensors]), unit)
                starts, ends = np.array(rows, dtype=np.int64).T
                capacity = math.floor(limit / unit * (1 + 1e-12))
                found.append(HeldAmounts(starts, ends, sizes.astype(np.int64), capacity))
        return tuple(found)

    def _join(
        self, last: Sequence[int], end: int, durations: list[int], before: list[tuple[int, int]]
    ) -> int:
        if not last:
            return end
        ends = [int(self._first[i + 1]) - 1 for i in last]
        if len(ends) == 1:
            return ends[0]
        durations.append(0)
        before += [(i, len(durations) - 1) for i in ends]
        return len(durations) - 1

    def _hint(self, hint: WindowTimes, count: int) -> Ints:
        """Ticks of the pieces of ``hint``; approximate where times are rounded."""
        starts = np.full(count, round(hint.end / self.unit), dtype=np.int64)
        order = np.lexsort((hint.start, hint.operation))
        left = [list(one)[::-1] for one in self.pieces]
        next_ = self._first[:-1].tolist()
        rows = zip(
            hint.operation[order].tolist(), hint.start[order], hint.finish[order], strict=True
        )
        for i, start, finish in rows:
            now, stop = round(start / self.unit), round(finish / self.unit)
            while left[i] and (now < stop or left[i][-1] == 0):
                starts[next_[i]] = now
                next_[i] += 1
                now += left[i].pop()
        return starts

    @property
    def is_exact(self) -> bool:
        """Whether all times are multiples of the tick."""
        return are_multiples(self.problem.seconds, self.unit)

    def invert(self, values: Ints) -> WindowTimes:
        """The timetable of exact ticks."""
        lengths = np.array([length for one in self.pieces for length in one])
        owner = np.repeat(np.arange(len(self.pieces)), np.diff(self._first))
        starts = values[: len(lengths)]
        rows: list[list[int]] = []
        for i, start, length in zip(owner.tolist(), starts.tolist(), lengths.tolist(), strict=True):
            if rows and rows[-1][0] == i and rows[-1][2] == start:
                rows[-1][2] = start + length
            else:
                rows.append([i, start, start + length])
        operation, start, finish = np.array(rows, dtype=np.int64).T
        return WindowTimes(operation, start * self.unit, finish * self.unit)

    def ordered(self, values: Ints) -> BackpropProblem:
        """The problem with the order of ``values`` on every resource as precedences."""
        starts = values[self._first[:-1]]
        lengths = np.array([sum(one) for one in self.pieces])
        rank = np.empty(len(starts), dtype=np.int64)
        rank[list(self.problem.topological)] = np.arange(len(starts))
        order = np.lexsort((rank, starts + lengths, starts)).tolist()
        chains: list[tuple[int, int]] = []
        for r in range(len(self.problem.resources)):
            chains += pairwise(i for i in order if self.problem.resource[i] == r)
        return replace(self.problem, before=self.problem.before + tuple(chains))
