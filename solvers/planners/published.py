"""Published schedules as seeds: balanced stages on groups of devices, in the orders that fit best.

The groups are neighbours in SPP's order of devices; stages are placed on them in a line, a loop, a
V or a wave. The schedules of a placement are bounded first, and those that may beat a given time
are timed, least bound first.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from time import monotonic

import numpy as np

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.pipelines.bounds.stages import quick_bound
from stagewright.formulations.pipelines.grouped_stages import GroupedStages, splits
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.structure import Structure, misfit
from stagewright.formulations.schedules.order import placed
from stagewright.graphs.machines.ordering import recursive_device_order
from stagewright.solvers.pipelines.rows.search import RowSearch, compile_row_kernels
from stagewright.solvers.pipelines.scheduling import generated
from stagewright.solvers.planners.steps.planner import PlanSearch
from stagewright.solvers.planners.steps.proposal import (
    MemoryMode,
    NoPlan,
    Proposal,
    cost_of,
    with_memory_mode,
)
from stagewright.solvers.planners.structures.arrangements import balanced_cuts
from stagewright.solvers.planners.structures.reordering import grouped_starts

RULES = 30  # tried for each placement, after the published schedules
TIGHT = 1e-6  # relative; rows this near to their bound are not searched further
ACTION_SECONDS = 1e-5  # to state and bound a microbatch at a stage, approximately
PLACEMENTS = (("line", 1), ("loop", 2), ("V", 2), ("loop", 3), ("loop", 4), ("wave", 4))


@dataclass(eq=False)
class _PlacementCandidate:
    """Stages with a bound on their schedules; the best rows found so far, and where from."""

    structure: Structure
    grouped: GroupedStages
    bound: float
    rows: RowSearch | None = None
    source: str = "eager"

    def begin(self, seed: int, left: Callable[[], float]) -> RowSearch:
        """Try the published schedules, then some random rules."""
        parallel, *ordered = self.grouped.problems()
        # The all-reduces in the order that promises most.
        scheduling = min(ordered or [parallel], key=quick_bound)
        self.rows = rows = RowSearch(scheduling, seed)
        rows.first()
        for name, order in generated(scheduling):
            if left() <= 0:
                break
            self.source = name if rows.offer(order) else self.source
        known = rows.cost
        rows.try_rules(RULES)
        self.source = self.source if rows.cost == known else "search for rows"
        return rows


@dataclass
class PublishedSearch(PlanSearch):
    """The best published schedule of balanced stages; a run goes on where the last one ended.

    Placements are bounded, then tried as long as they promise to be better. The rows of the best
    one are searched further where memory is short, so that few rules find good ones.
    """

    modes: Sequence[MemoryMode] = ()
    structures: Iterable[Structure] = ()  # those that are not yet bounded
    seen: set[Structure] = field(default_factory=set)
    bounded: list[_PlacementCandidate] = field(default_factory=list)
    tried: list[tuple[float, int, _PlacementCandidate]] = field(default_factory=list)

    def run(self, ceiling: float, modes: Sequence[MemoryMode], limits: Limits) -> Proposal | NoPlan:
        """The best schedule with one of the memory ``modes``.

        Stages whose schedules all take ``ceiling`` seconds or more are left out.
        """
        compile_row_kernels()
        self.limits, self.began = limits, monotonic()
        if modes != self.modes:
            self.modes, self.structures = modes, _structures(self.problem, modes)
        self._bound()
        while self.bounded and self.left() > 0:
            one = self.bounded.pop(0)
            if one.bound < min(ceiling, self.cost):
                rows = one.begin(limits.seed, self.left)
                self.tried.append((self._consider(one, rows), len(self.tried), one))
        if self.tried and self.left() > 0:
            cost, _, one = min(self.tried, key=lambda entry: entry[:2])
            if cost > one.bound * (1 + TIGHT):
                self._improve(one)
        if self.best is None:
            return NoPlan("no published schedule of balanced stages promises to be better", False)
        return replace(self.best, notes=(f"{len(self.tried)} placements tried", *self.best.notes))

    def _bound(self) -> None:
        """Bound placements for half of the time, and sort them; what takes longer is for later."""
        later, half = [], self.limits.seconds / 2
        for structure in self.structures:
            if structure in self.seen:
                continue
            seconds = len(structure.stages) * self.problem.microbatches * ACTION_SECONDS
            if self.left() - seconds <= half:
                later.append(structure)
                if self.left() <= half:
                    break
                continue
            self.seen.add(structure)
            found = _candidate(self.problem, structure)
            if found is not None:
                self.bounded.append(found)
        self.structures = chain(later, self.structures)
        self.bounded.sort(key=lambda one: one.bound)

    def _improve(self, one: _PlacementCandidate) -> None:
        """Search further for rows."""
        rows = one.rows
        if rows is not None and rows.problem.memory:
            rows.run(one.bound, replace(self.limits, seconds=self.left()))
            one.source = "search for rows"
            self._consider(one, rows)

    def _consider(self, one: _PlacementCandidate, rows: RowSearch) -> float:
        """The cost of the best rows of a candidate."""
        starts = grouped_starts(one.grouped, rows.timetable())
        found = Proposal(one.structure.stages, starts, notes=(one.source,))
        cost = cost_of(self.problem, found)
        if cost < self.cost:
            self.keep(found, cost)
        return cost


def _structures(problem: PipelineProblem, modes: Sequence[MemoryMode]) -> Iterator[Structure]:
    """Balanced stages on equal groups, most groups first, with whole backwards and split ones."""
    order = np.array(recursive_device_order(problem.cluster))
    names = [device.name for device in problem.cluster.devices]
    for count in range(len(order), 1, -1):
        if len(order) % count:
            continue
        groups = [tuple(part.tolist()) for part in np.array_split(order, count)]
        for way, chunks in PLACEMENTS:
            if chunks * count > len(problem.chain):
                continue
            path = [groups[d] for d in placed(way, count, chunks)]
            cuts = balanced_cuts(problem, path, round_robin=False)
            for mode in modes if cuts is not None else ():
                assert cuts is not None
                stages = tuple(
                    with_memory_mode(Stage(layers, tuple(names[v] for v in group)), mode)
                    for layers, group in zip(pairwise(cuts), path, strict=True)
                )
                split = splits(problem, stages)
                if any(split):
                    yield Structure(stages, split)
                if chunks > 1:  # other planners have whole backwards on a line
                    yield Structure.whole(stages)


def _candidate(problem: PipelineProblem, structure: Structure) -> _PlacementCandidate | None:
    """The structure with its bound; None if it does not fit in memory."""
    if misfit(problem, structure) is not None:
        return None
    grouped = GroupedStages.of(problem, structure)
    parallel = next(grouped.problems(), None)
    return (
        None if parallel is None else _PlacementCandidate(structure, grouped, quick_bound(parallel))
    )
