"""Layouts ranked by what failures leave of them, and a bound on all layouts of the space."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isfinite

import numpy as np

from stagewright.executor.simulation.failures import simulated_goodput
from stagewright.formulations.forms.answers import StopToken, is_stopped
from stagewright.formulations.parallelism.estimate import Estimate
from stagewright.formulations.parallelism.goodput import (
    Failures,
    Goodput,
    RunSize,
    checkpoint,
    daly_interval,
    exact_interval,
    goodput,
    least_checkpoint,
    run_size,
    young_interval,
)
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.machines.fabric import Fabric
from stagewright.service.layouts.failures import GoodputAnswer, SmallerAnswer
from stagewright.service.layouts.requests import LayoutRequest
from stagewright.solvers.parallelism.refining import FoundLayouts, work_alike

PROVED_BY = "bounds on the iteration and on the goodput of the least checkpoint"
_FIRST_KEPT, _MOST_KEPT = 40, 1000
_NEARLY = 4
"""Servers too few up to which each number is searched; beyond, only half of the servers."""
_MOST_AWAY = 8
"""Servers too few with which a run goes on."""
_SIMULATED_FAILURES = 200
"""Failures of a simulated run, at least."""
_SIMULATED_LEAST = 0.01
"""Runs with less goodput take too long to simulate."""


@dataclass(frozen=True, slots=True)
class Smaller:
    """The run with some servers too few, and its layout."""

    size: RunSize
    layout: str


class Ranking:
    """The layouts of a search by their seconds with failures.

    ``others`` is a bound on the seconds of all layouts that the search did not keep.
    """

    def __init__(
        self, request: LayoutRequest, failures: Failures, smaller: Sequence[Smaller], others: float
    ) -> None:
        self.problem, self.failures, self.others = request.problem, failures, others
        self.request, self.smaller = request, smaller

    def goodput(self, one: Estimate, failures: Failures | None = None) -> Goodput:
        """The goodput of a layout, by default with the failures of the request."""
        failures = failures or self.failures
        return goodput(failures, self._size(one, failures), self._sizes)

    def effective(self, one: Estimate) -> float:
        """Seconds of an iteration with failures."""
        return self.goodput(one).effective_seconds(one.seconds)

    def least(self, seconds: float) -> float:
        """No layout that takes so many seconds takes less than this with failures."""
        if not isfinite(seconds):
            return inf
        size = run_size(self.problem, self.failures, seconds, least_checkpoint(self.problem))
        return goodput(self.failures, size, self._sizes, least=True).effective_seconds(seconds)

    def ordered(self, found: FoundLayouts) -> FoundLayouts:
        """The search's best layouts in the order of their seconds with failures."""
        every = sorted([*found.best, *found.folded], key=self.effective)
        best: dict[object, Estimate] = {}
        for one in every:
            best.setdefault(one.layout if self.request.unfolded else work_alike(one.layout), one)
        rows = tuple(best.values())[: self.request.top]
        least = self.least(self.others) * (1 + RELATIVE_TOLERANCE)
        fastest = sum(self.effective(one) <= least for one in rows)
        return replace(
            found,
            best=rows,
            folded=tuple(one for one in every if one not in rows),
            proved=fastest > 0 or (found.proved and not rows),
            fastest=fastest,
        )

    def answer(self, one: Estimate, bound_seconds: float, plan_class: str) -> GoodputAnswer:
        """What failures leave of the best layout.

        All layouts of the class that were not ranked take at least ``bound_seconds``.
        """
        of, size = self.goodput(one), self._size(one)
        mean, effective = of.mean_seconds, of.effective_seconds(one.seconds)
        bound = min(effective, self.least(bound_seconds))
        simulated = self._simulated(of, size)
        return GoodputAnswer.of(
            of,
            size,
            effective_seconds=effective,
            bound_effective_seconds=bound,
            gap=1 - bound / effective if isfinite(effective) else None,
            proved_by=PROVED_BY,
            plan_class=plan_class,
            checkpoint_bytes=checkpoint(self.problem, one.layout).total,
            interval_seconds=of.iterations * one.seconds,
            young_seconds=young_interval(size.stop_seconds, mean),
            daly_seconds=daly_interval(size.stop_seconds, mean),
            exact_seconds=exact_interval(size.stop_seconds, mean),
            other_goodput=self._other(one),
            smaller=tuple(
                SmallerAnswer(servers=away, layout=run.layout, seconds=run.size.iteration_seconds)
                for away, run in enumerate(self.smaller, 1)
            ),
            simulated_low=simulated and simulated[0],
            simulated_high=simulated and simulated[1],
        )

    @cached_property
    def _sizes(self) -> list[RunSize]:
        return [one.size for one in self.smaller]

    def _size(self, one: Estimate, failures: Failures | None = None) -> RunSize:
        of = checkpoint(self.problem, one.layout)
        return run_size(self.problem, failures or self.failures, one.seconds, of)

    def _other(self, one: Estimate) -> float | None:
        """The goodput with the other kind of checkpoints; None if that is not known."""
        other = replace(self.failures, asynchronous=not self.failures.asynchronous)
        if other.asynchronous and self.problem.fabric.host_bytes_per_second is None:
            return None
        return self.goodput(one, other).goodput

    def _simulated(self, of: Goodput, size: RunSize) -> tuple[float, float] | None:
        """The range in which the mean of simulated runs is, with 95 % confidence."""
        runs = self.request.simulations
        if not runs or of.goodput < _SIMULATED_LEAST:
            return None
        from scipy.stats import t  # takes a while to import

        every = [
            of.iterations,
            *(one.iterations(self.failures.mtbf_seconds / one.devices) for one in self._sizes),
        ]
        count = int(_SIMULATED_FAILURES * of.mean_seconds / size.iteration_seconds) + of.iterations
        found = [
            simulated_goodput(self.failures, size, self._sizes, every, count, seed)
            for seed in range(runs)
        ]
        about = float(t.ppf(0.975, runs - 1) * np.std(found, ddof=1)) / runs**0.5
        return float(np.mean(found)) - about, float(np.mean(found)) + about


def iterations_of(request: LayoutRequest) -> int | None:
    """Iterations of the request's tokens, None without them."""
    if request.tokens is None:
        return None
    each = request.problem.batch * request.problem.sequence
    return -int(-request.tokens // each)


def ranked_layouts(
    request: LayoutRequest,
    failures: Failures,
    find: Callable[[int], FoundLayouts],
    find_on: Callable[[TrainingProblem], Estimate | None],
    stop: StopToken,
) -> tuple[FoundLayouts, Ranking]:
    """A search that keeps as many layouts as prove which is best with failures; the ranking.

    ``find`` searches for so many of the fastest layouts, ``find_on`` for the fastest of a problem
    on fewer servers.
    """
    keep = max(_FIRST_KEPT, request.top)
    found = find(keep)
    smaller = _smaller_runs(request.problem, failures, find_on, stop) if found.best else []
    while True:
        ranking = _policy(request, failures, smaller, found)
        last = keep >= _MOST_KEPT or len(found.best) < keep or is_stopped(stop)
        if last or ranking.ordered(found).proved:
            return found, ranking
        keep = min(4 * keep, _MOST_KEPT)
        found = find(keep)


def _policy(
    request: LayoutRequest, failures: Failures, smaller: list[Smaller], found: FoundLayouts
) -> Ranking:
    """The ranking with smaller layouts, or without where waiting is better for the fastest."""
    rankings = [Ranking(request, failures, one, found.others) for one in ([], smaller)]
    if not smaller or not found.best:
        return rankings[0]
    return min(rankings, key=lambda one: one.effective(found.best[0]))


def _smaller_runs(
    problem: TrainingProblem,
    failures: Failures,
    find_on: Callable[[TrainingProblem], Estimate | None],
    stop: StopToken,
) -> list[Smaller]:
    """The fastest runs with 1, 2, ... servers too few; none where servers are not away."""
    fabric = problem.fabric
    servers = fabric.devices // fabric.per_server
    if not failures.repair_seconds or servers == 1:
        return []
    found: dict[int, Smaller] = {}
    for count in sorted({*range(servers - 1, max(0, servers - 1 - _NEARLY), -1), servers // 2}):
        on = with_servers(fabric, count)
        if on is None or is_stopped(stop):
            continue
        fewer = replace(problem, fabric=on)
        one = find_on(fewer)
        if one is not None:
            size = run_size(fewer, failures, one.seconds, checkpoint(fewer, one.layout))
            found[count] = Smaller(size, str(one.layout))
    runs = []
    for away in range(1, min(servers, _MOST_AWAY + 1)):
        can = [run for count, run in found.items() if count <= servers - away]
        if not can:
            break
        runs.append(min(can, key=lambda run: run.size.iteration_seconds))
    return runs


def with_servers(fabric: Fabric, servers: int) -> Fabric | None:
    """The fabric with another number of servers; None if they would not fill its racks."""
    devices = servers * fabric.per_server
    inner = fabric.levels[:-1]
    if any(devices % level.devices for level in inner):
        return None
    return replace(fabric, levels=(*inner, replace(fabric.levels[-1], devices=devices)))
