"""The best bound of all server-aware relaxations of a problem."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from time import monotonic

from stagewright.formulations.forms.answers import StopToken
from stagewright.formulations.pipelines.server_relaxation import (
    Levels,
    RelaxedStage,
    server_relaxations,
)
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan_class import DISJOINT_SPLIT, PlanClass
from stagewright.solvers.pipelines.relaxation import relaxed_load_bound
from stagewright.solvers.pipelines.server_branching import ServerTree
from stagewright.solvers.pipelines.server_search import FEW_LABELS, MOST_LABELS, ServerSearch

OnRelaxed = Callable[[Levels, tuple[RelaxedStage, ...]], None]


def server_bound(
    problem: PipelineProblem,
    incumbent: float,
    seconds: float,
    plans: PlanClass = DISJOINT_SPLIT,
) -> float:
    """A lower bound on all ``plans``, at most ``incumbent`` (any known time).

    After about ``seconds`` the best bound so far is returned.
    """
    return ServerBounds(problem, plans).bound(incumbent, seconds)


def is_server_bound(
    problem: PipelineProblem, seconds: float, plans: PlanClass = DISJOINT_SPLIT
) -> bool:
    """Whether some relaxation proves that no plan of the class takes less than ``seconds``."""
    return ServerBounds(problem, plans).proves(seconds)


def _finer(
    searches: Sequence[tuple[Levels, ServerSearch]],
) -> list[tuple[Levels, ServerSearch]]:
    every = ((level, one.finer()) for level, one in searches)
    return [(level, one) for level, one in every if one is not None]


@dataclass
class ServerBounds:
    """The best bound of all relaxations of a problem whose tables are small enough.

    ``low`` is proved; it rises with every question.
    """

    problem: PipelineProblem
    plans: PlanClass = DISJOINT_SPLIT
    low: float = field(init=False)

    def __post_init__(self) -> None:
        self.low = relaxed_load_bound(self.problem)

    @cached_property
    def searches(self) -> tuple[tuple[Levels, "ServerSearch"], ...]:
        """The searches, each with its links."""
        forms = server_relaxations(self.problem, self.plans)
        most = MOST_LABELS if self.plans.sharing == "none" else FEW_LABELS
        every = ((level, ServerSearch(form, most_labels=most)) for level, form in forms)
        return tuple((level, one) for level, one in every if one.is_small)

    def bound(
        self,
        incumbent: float,
        seconds: float = math.inf,
        on_relaxed: OnRelaxed = lambda *_: None,
    ) -> float:
        """As :func:`server_bound`; ``on_relaxed`` receives the relaxed plans that are found."""
        until = monotonic() + seconds
        searches = list(self.searches)
        while searches and monotonic() < until:
            for level, one in searches:
                self.low = one.raised(self.low, incumbent, until, partial(on_relaxed, level))
            searches = _finer(searches) if self.low < incumbent else []
        return min(self.low, incumbent)

    def proves(self, seconds: float) -> bool:
        """Whether no plan takes less than ``seconds``."""
        searches = list(self.searches)
        while searches and seconds > self.low:
            if any(one.proves(seconds) for _, one in searches):
                self.low = seconds
            searches = _finer(searches)
        return seconds <= self.low

    def branch(
        self,
        incumbent: float,
        seconds: float,
        on_relaxed: OnRelaxed = lambda *_: None,
        stop: StopToken | None = None,
    ) -> float:
        """As :meth:`bound`, and then by branch and bound on the plans of split stages."""
        until = monotonic() + seconds
        self.bound(incumbent, seconds / 2, on_relaxed)
        for i, (level, one) in enumerate(self.searches):
            share = (until - monotonic()) / (len(self.searches) - i)
            tree = ServerTree(one, partial(on_relaxed, level), stop)
            self.low = tree.raised(self.low, incumbent, monotonic() + share)
        return min(self.low, incumbent)

    def proves_by_branching(self, seconds: float, limit: float) -> bool:
        """Whether branch and bound proves that no plan takes less than ``seconds``.

        False if it is not known after ``limit`` seconds.
        """
        until = monotonic() + limit
        trees = [ServerTree(one, lambda _: None) for _, one in self.searches]
        if any(tree.proves(seconds, until) for tree in trees if seconds > self.low):
            self.low = seconds
        return seconds <= self.low

    def near(
        self, seconds: float, steps: float
    ) -> Iterator[tuple[Levels, tuple[RelaxedStage, ...]]]:
        """Relaxed plans of less than ``seconds``, each after at most ``steps``."""
        for level, one in self.searches:
            found = one.answer(seconds, steps)
            if found.plan:
                yield level, found.plan
