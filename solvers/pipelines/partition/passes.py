"""The smallest bottleneck W for every number of stages, from passes of the recurrence's kernel."""

import math
from dataclasses import dataclass, field
from time import monotonic

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.pipelines.bppm import (
    BalancedPartition,
    ByRecurrence,
    Recurrence,
    StageChoice,
)
from stagewright.solvers.pipelines.partition import kernels as recurrence_kernels
from stagewright.solvers.pipelines.partition import recurrence
from stagewright.solvers.pipelines.partition.recurrence import Cuts

# A bracket is narrowed to this ratio before its upper end is tested for optimality; each failed
# test narrows it further.
FIRST_RATIO = 1e-2
_NARROWING = 1 / 32
_WIDENING = 1.25
UNLIMITED = Limits(math.inf)


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
        load = float(recurrence.least_work(self.form)[-1]) / size
        self.bound = dict.fromkeys(range(1, self.most + 1), load * (1 - recurrence_kernels.MARGIN))
        self.found = {}

    @property
    def is_over(self) -> bool:
        """Whether the search was stopped, or has no time left."""
        return self.limits.left(monotonic() - self.began) <= 0

    def test(self, limit: float) -> None:
        """Run one pass: find the numbers of stages that fit under ``limit``, with placements."""
        assert self.most is not None
        self.passes += 1
        table = recurrence.reach_under(self.form, limit, self.most)
        fitting = set(recurrence.complete_counts(self.form, table))
        for stages in range(1, self.most + 1):
            if stages not in fitting:
                self.bound[stages] = max(self.bound[stages], math.nextafter(limit, math.inf))
            elif stages not in self.found or self.found[stages][0] > limit:
                cuts = recurrence.trace_back(self.form, table, stages)
                self.found[stages] = (recurrence.bottleneck(self.form, cuts), cuts)

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
        table = recurrence.reach_under(form, math.inf, self.most)
        counts = recurrence.complete_counts(form, table)
        if not counts:
            return None
        cuts = recurrence.trace_back(form, table, counts[-1])
        return ByRecurrence().invert(self.question, cuts)

    def next_limit(self, limit: float) -> float:
        """The next larger limit if ``limit`` found nothing; inf tests memory only."""
        wider = limit * _WIDENING
        return wider if wider < 4 * float(recurrence.least_work(self.form)[-1]) else math.inf

    def _find_one(self, stages: int, ceiling: float) -> None:
        """Raise the limit until a placement is found or the ceiling is exceeded."""
        while not (stages in self.found or self.is_over) and self.bound[stages] < ceiling:
            limit = self.next_limit(self.bound[stages])
            self.test(min(limit, math.nextafter(ceiling, 0)) if ceiling < math.inf else limit)
