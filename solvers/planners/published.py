"""Published schedules as seeds: balanced stages on groups of devices, in the orders that fit best.

The groups are neighbours in SPP's order of devices; stages are placed on them in a line, a loop, a
V or a wave. The schedules of a placement are bounded first, and those that may beat a given time
are timed, least bound first.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from time import monotonic

import numpy as np

from stagewright.formulations.forms.answers import Limits, OnProgress, Progress
from stagewright.formulations.pipelines.bounds import quick_bound
from stagewright.formulations.pipelines.grouped_stages import GroupedStages, splits
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.structure import Structure, misfit
from stagewright.formulations.schedules.placements import placed
from stagewright.graphs.machines.ordering import recursive_device_order
from stagewright.solvers.pipelines.generated import generated
from stagewright.solvers.pipelines.row_search import RowSearch, compile_row_kernels
from stagewright.solvers.planners.proposal import (
    MemoryMode,
    NoPlan,
    Proposal,
    cost_of,
    with_memory_mode,
)
from stagewright.solvers.planners.reordering import grouped_starts
from stagewright.solvers.planners.seeds import balanced_cuts

RULES = 30  # tried for each placement, after the published schedules
PLACEMENTS = (("line", 1), ("loop", 2), ("V", 2), ("loop", 3), ("loop", 4), ("wave", 4))


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """Stages, and a bound on their schedules."""

    structure: Structure
    grouped: GroupedStages
    bound: float


def plan_published(
    problem: PipelineProblem,
    ceiling: float,
    modes: Sequence[MemoryMode],
    limits: Limits,
    on_progress: OnProgress,
) -> Proposal | NoPlan:
    """The best published schedule of balanced stages with one of the memory ``modes``.

    Stages whose schedules all take ``ceiling`` seconds or more are left out.
    """
    began = monotonic()

    def left() -> float:
        return limits.left(monotonic() - began)

    compile_row_kernels()
    candidates = _promising(problem, modes, ceiling, left)
    best: Proposal | None = None
    cost, tried = float("inf"), 0
    for one in sorted(candidates, key=lambda one: one.bound):
        if one.bound >= cost or left() <= 0:
            break
        tried += 1
        found = _scheduled(one, limits.seed, left)
        seconds = cost_of(problem, found)
        if seconds < cost:
            best, cost = found, seconds
            made = partial(Proposal, best.stages, best.starts)
            on_progress(Progress(monotonic() - began, cost, 0.0, made))
    if best is None:
        return NoPlan("no published schedule of balanced stages promises to be better", False)
    return replace(best, notes=(*best.notes, f"{tried} of {len(candidates)} placements tried"))


def _promising(
    problem: PipelineProblem,
    modes: Sequence[MemoryMode],
    ceiling: float,
    left: Callable[[], float],
) -> list[_Candidate]:
    """The stages whose schedules may be below the ceiling."""
    candidates = []
    for structure in _structures(problem, modes):
        if left() <= 0:
            break
        found = _candidate(problem, structure)
        if found is not None and found.bound < ceiling:
            candidates.append(found)
    return candidates


def _structures(problem: PipelineProblem, modes: Sequence[MemoryMode]) -> Iterator[Structure]:
    """Balanced stages on equal groups, with whole backwards and split ones."""
    order = np.array(recursive_device_order(problem.cluster))
    names = [device.name for device in problem.cluster.devices]
    for count in range(2, len(order) + 1):
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


def _candidate(problem: PipelineProblem, structure: Structure) -> _Candidate | None:
    """The structure with its bound; None if it does not fit in memory."""
    grouped = GroupedStages.of(problem, structure)
    if misfit(problem, structure, grouped.work) is not None:
        return None
    parallel = next(grouped.problems(), None)
    return None if parallel is None else _Candidate(structure, grouped, quick_bound(parallel))


def _scheduled(one: _Candidate, seed: int, left: Callable[[], float]) -> Proposal:
    """The best of the published schedules and of some random rules."""
    parallel, *ordered = one.grouped.problems()
    # The all-reduces in the order that promises most.
    scheduling = min(ordered or [parallel], key=quick_bound)
    rows, source = RowSearch(scheduling, seed), "eager"
    rows.first()
    for name, order in generated(scheduling):
        source = name if rows.offer(order) else source
        if left() <= 0:
            break
    cost = rows.cost
    rows.try_rules(RULES)
    source = source if rows.cost == cost else "random rules"
    starts = grouped_starts(one.grouped, rows.timetable())
    return Proposal(one.structure.stages, starts, notes=(source,))
