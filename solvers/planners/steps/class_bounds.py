"""The best proved bounds on classes of plans, shared by the steps of planning a problem."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from stagewright.formulations.pipelines.bounds.relaxation import FILL_AND_DRAIN, WIDE_FILL_AND_DRAIN
from stagewright.formulations.pipelines.bounds.server_relaxation import (
    SERVERS,
    SERVERS_AND_TURNS,
    SHARED_SERVERS,
    SPLIT_SERVERS,
)
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound, Stage
from stagewright.formulations.plans.plan_class import (
    DISJOINT_SPLIT,
    DISJOINT_WHOLE,
    SHARED_SPLIT,
    SHARED_WHOLE,
    PlanClass,
)
from stagewright.solvers.pipelines.device_bounds import device_bounds
from stagewright.solvers.pipelines.every_plan import every_plan_bounds
from stagewright.solvers.pipelines.relaxation import FillAndDrain
from stagewright.solvers.pipelines.servers.relaxation import ServerBounds

SHARE = 0.1  # of the time limit, for the passes of the relaxation


class ClassBounds:
    """Bounds on every plan, and on smaller classes as far as they are asked for or reported.

    Every layer of the problem must fit in memory.
    """

    def __init__(self, problem: PipelineProblem, seconds: float = math.inf) -> None:
        self.problem = problem
        self.every = every_plan_bounds(problem)
        self._relaxed: tuple[tuple[PlanClass, str, FillAndDrain | ServerBounds], ...] = (
            (DISJOINT_SPLIT, FILL_AND_DRAIN, FillAndDrain(problem)),
            (DISJOINT_SPLIT, SERVERS, ServerBounds(problem)),
            (DISJOINT_WHOLE, WIDE_FILL_AND_DRAIN, FillAndDrain(problem, wide=True)),
            (DISJOINT_WHOLE, SERVERS_AND_TURNS, ServerBounds(problem, DISJOINT_WHOLE)),
            (SHARED_WHOLE, SHARED_SERVERS, ServerBounds(problem, SHARED_WHOLE)),
            (SHARED_SPLIT, SPLIT_SERVERS, ServerBounds(problem, SHARED_SPLIT)),
        )
        self._reported: dict[PlanClass, float] = {}
        self._share = seconds * SHARE
        self._until = monotonic() + seconds

    def report(self, bounds: Iterable[tuple[PlanClass, float]]) -> None:
        """Keep bounds that a search has proved."""
        for plans, seconds in bounds:
            self._reported[plans] = max(seconds, self._reported.get(plans, 0.0))

    def relaxed(self, plans: PlanClass, cost: float) -> tuple[Bound, ...]:
        """The relaxations' bounds, at most ``cost``, on their smallest class with ``plans``.

        Passes for which no time is left are left out.
        """
        smallest = next((one for one, _, _ in self._relaxed if one.contains(plans)), None)
        found = []
        for known, name, relaxation in self._relaxed:
            if known == smallest:
                with self._spending() as seconds:
                    found.append(Bound(relaxation.bound(cost, seconds), name, "problem", known))
        return tuple(found)

    def of_schedules(
        self, stages: Sequence[Stage], plans: PlanClass, cost: float
    ) -> tuple[Bound, ...]:
        """Bounds on the schedules of ``stages``, of which one in ``plans`` takes ``cost``."""
        with self._spending() as seconds:
            return device_bounds(self.problem, stages, plans, cost, seconds)

    @contextmanager
    def _spending(self) -> Iterator[float]:
        """The seconds that a bound may take: of the share that is left, and before the limit."""
        began = monotonic()
        yield max(0.0, min(self._share, self._until - began))
        self._share -= monotonic() - began

    def best(self, plans: PlanClass, cost: float) -> float:
        """The best known bound on a class that contains ``plans``, at most ``cost``."""
        known = [(bound.plans, bound.seconds) for bound in self.every]
        known += [(one, relaxation.low) for one, _, relaxation in self._relaxed]
        known += self._reported.items()
        return min(cost, max(seconds for one, seconds in known if one.contains(plans)))
