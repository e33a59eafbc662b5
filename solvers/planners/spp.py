"""SPP: device order, then partition and schedule for every number of stages (Algorithm 3)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic

import numpy as np

from stagewright.formulations.forms.answers import Limits, OnProgress, Progress
from stagewright.formulations.pipelines import bppm
from stagewright.formulations.pipelines.bounds.stages import quick_bound
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Guarantee
from stagewright.formulations.plans.plan_class import DISJOINT_SPLIT
from stagewright.graphs.machines.ordering import recursive_device_order
from stagewright.solvers.pipelines.list_scheduling import best_list_schedule, list_schedule
from stagewright.solvers.pipelines.partition.passes import PartitionSearch
from stagewright.solvers.planners.steps.proposal import (
    NoPlan,
    Proposal,
    cost_of,
    named_stages,
    proposal_of,
    shortage,
)
from stagewright.solvers.planners.structures.refine import refine
from stagewright.solvers.planners.structures.uniform import UniformPlanner

# From this many (units x layers) on, W is settled to 2 % of the recurrence's optimum, not to
# its last bit: a pass of the kernel then takes seconds.
_EXACT_UP_TO = 50_000
# The kernel's tables grow with the square of the number of units that the devices are taken in.
MOST_UNITS = 1280
_COARSE_RATIO = 0.02
# The partition of the least bottleneck does not always have the least makespan, so this many of its
# neighbours are examined. A number and not a time, for reproducible answers.
_REFINING_ATTEMPTS = 1000
_REFINED_STARTS = 3
_MEMORY_PRECISION = 1e-3  # relative; of the missing memory in the message


@dataclass(frozen=True, slots=True, eq=False)
class _ScheduledPartition:
    """A partition with its schedule; ``pe_seconds`` is the makespan of PE alone."""

    stages: tuple[bppm.StageChoice, ...]
    scheduling: MakespanProblem
    times: Timetable
    seconds: float
    pe_seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class StageCountSearch:
    """The result of the search over stage counts: all candidates, the best one, and notes."""

    search: PartitionSearch
    candidates: tuple[_ScheduledPartition, ...]
    best: _ScheduledPartition
    notes: tuple[str, ...]


def plan_spp(
    problem: PipelineProblem, limits: Limits, on_progress: OnProgress
) -> Proposal | NoPlan:
    """SPP's plan (:func:`search_stage_counts`), with two additions to the paper.

    SPP uses every device, which is slow if all-reduces cost more than they save. So half of the
    devices are tried too, then a quarter, and so on. A short local search follows.
    """
    began = monotonic()
    found = search_stage_counts(problem, limits, on_progress)
    if isinstance(found, NoPlan):
        return found
    left = replace(limits, seconds=limits.left(monotonic() - began))
    candidates = [*found.candidates, *_on_fewer_devices(problem, found, left, on_progress)]
    starts = sorted(candidates, key=_seconds)[:_REFINED_STARTS]
    left = replace(limits, seconds=limits.left(monotonic() - began))
    refined = _refined(problem, starts, left, on_progress)
    return replace(
        refined,
        guarantees=_guarantees(problem, found, cost_of(problem, refined)),
        notes=(*found.notes, *refined.notes),
    )


def _on_fewer_devices(
    problem: PipelineProblem, found: StageCountSearch, limits: Limits, on_progress: OnProgress
) -> list[_ScheduledPartition]:
    """Candidates on the first half of the order, the first quarter, ..., while one may win."""
    began, best = monotonic(), found.best
    work = problem.microbatches * float(bppm.cheapest_work(problem).sum())
    candidates: list[_ScheduledPartition] = []
    size = len(found.search.question.order) // 2
    while size >= 1 and work / size < best.seconds and limits.left(monotonic() - began) > 0:
        left = replace(limits, seconds=limits.left(monotonic() - began))
        fewer = search_stage_counts(problem, left, on_progress, size, best)
        if isinstance(fewer, StageCountSearch):
            candidates += fewer.candidates
            best = fewer.best
        size //= 2
    return candidates


def search_stage_counts(
    problem: PipelineProblem,
    limits: Limits,
    on_progress: OnProgress,
    size: int | None = None,
    known: _ScheduledPartition | None = None,
) -> StageCountSearch | NoPlan:
    """Order the devices, then partition and schedule for every stage count that can still win.

    A number of stages is pruned when its bottleneck W, or the least time of a microbatch through
    that many stages, is at least the best makespan found. Every partition is scheduled by PE and by
    the other list rules, and the shortest schedule is kept, so Lemma 1 and Theorem 1 hold for it.
    ``size`` limits the search to the first devices of the order; ``known`` is a candidate that must
    be improved on. Many devices are taken in units.
    """
    began = monotonic()
    unit, used = _units(problem, size)
    order = recursive_device_order(problem.cluster)[:used]
    if limits.left(monotonic() - began) <= 0:
        return NoPlan(f"{limits.end} came before any partition was found", proved=False)
    left = replace(limits, seconds=limits.left(monotonic() - began))
    search = PartitionSearch(bppm.BalancedPartition(problem, order, unit=unit), limits=left)
    exact = unit == 1 and len(order) * len(problem.chain) <= _EXACT_UP_TO
    ratio = 0.0 if exact else _COARSE_RATIO
    candidates = _first_candidates(problem, search)
    if not search.found:
        # 1F1B's warm-up does not fit in memory; a single microbatch in flight may, but is slower.
        left = replace(limits, seconds=limits.left(monotonic() - began))
        search = PartitionSearch(bppm.BalancedPartition(problem, order, 1, unit), limits=left)
        candidates = _first_candidates(problem, search)
    best = min([*candidates, *([known] if known else [])], key=_seconds, default=None)
    paths = {count: bppm.shortest_path_seconds(problem, count) for count in search.bound}
    solved: list[int] = []
    late = False
    for count in sorted(search.bound, reverse=True):
        late = limits.left(monotonic() - began) <= 0 and best is not None
        ceiling = best.seconds if best else math.inf
        if late or max(search.bound[count], paths[count]) >= ceiling:
            continue
        search.most = count  # larger numbers of stages are settled, so passes skip them
        balanced = search.solve(count, ratio, ceiling)
        solved += [count] if balanced else []
        candidate = _schedule(problem, balanced.stages, ceiling) if balanced else None
        if candidate is None:
            continue
        candidates.append(candidate)
        if candidate.seconds < ceiling:
            best = candidate
            # Bottlenecks bound the plans of this order of devices only.
            stages = named_stages(problem, best.stages)
            made = partial(proposal_of, problem, stages, best.times)
            on_progress(Progress(monotonic() - began, best.seconds, 0.0, made))
    if best is None:
        return _nothing_found(search)
    notes = _notes(search, paths, solved, best, ratio, late)
    return StageCountSearch(search, tuple(candidates), best, notes)


def _units(problem: PipelineProblem, size: int | None) -> tuple[int, int]:
    """The devices of a unit, and how many devices are used: all that can be, up to ``size``.

    A unit is the least power of two for which there are at most MOST_UNITS, if every layer can be
    split among as many devices; if not, the largest for which it can, and fewer devices are used.
    """
    replicas = problem.replicas_per_layer
    unit = 1
    while True:
        # Every device of the order gets a stage; no layer can be split among more than these.
        usable = min(len(problem.cluster), int((replicas // unit).sum()) * unit)
        units = min(usable, size or usable) // unit
        if units <= MOST_UNITS or 2 * unit > replicas.min():
            return unit, unit * min(units, MOST_UNITS)
        unit *= 2


def _refined(
    problem: PipelineProblem,
    starts: Sequence[_ScheduledPartition],
    limits: Limits,
    on_progress: OnProgress,
) -> Proposal:
    """The best result of a short local search from each start; all share the time."""
    began = monotonic()
    ends = [
        refine(
            problem,
            proposal_of(problem, named_stages(problem, start.stages), start.times),
            replace(limits, seconds=limits.left(monotonic() - began)),
            on_progress,
            _REFINING_ATTEMPTS,
        )
        for start in starts
    ]
    return min(ends, key=lambda end: cost_of(problem, end))


def _nothing_found(search: PartitionSearch) -> NoPlan:
    if search.is_over:
        return NoPlan(f"{search.limits.end} came before any partition was found", proved=False)
    proved = search.question.unit == 1 and _is_proof(search.question.problem)
    return NoPlan(_why_nothing_fits(search), proved, plans=DISJOINT_SPLIT if proved else None)


def _is_proof(problem: PipelineProblem) -> bool:
    """Whether no plan fits if none fits on all devices in their order.

    This holds if devices have the same memory and more devices in a stage never need more of it.
    """
    size = len(problem.cluster)
    saved = [problem.saved_per_layer(r) for r in range(1, size + 1)]
    return bool(
        len(set(problem.memory_bytes)) == 1
        and problem.replicas_per_layer.min() >= size
        and (np.diff(saved, axis=0) <= 0).all()
    )


def _why_nothing_fits(search: PartitionSearch) -> str:
    """The stage that exceeds its memory in the partition that is closest to fitting."""
    problem = search.question.problem
    enough, scarce = 2.0, 1.0  # multiples of the memory that are sufficient and insufficient
    while (stages := search.with_memory(enough)) is None:
        enough, scarce = 2 * enough, enough
    while enough > scarce * (1 + _MEMORY_PRECISION):
        middle = math.sqrt(enough * scarce)
        found = search.with_memory(middle)
        if found is None:
            scarce = middle
        else:
            enough, stages = middle, found
    return f"in the partition that is closest to fitting, {shortage(problem, stages)}"


def _seconds(candidate: _ScheduledPartition) -> float:
    return candidate.seconds


def _first_candidates(
    problem: PipelineProblem, search: PartitionSearch
) -> list[_ScheduledPartition]:
    """Widen the limit until partitions are found; schedule the most promising of them."""
    limit = min(search.bound.values())
    while not (search.found or search.is_over) and min(search.bound.values()) < math.inf:
        limit = search.next_limit(limit)
        search.test(limit)
    candidates: list[_ScheduledPartition] = []
    for count in sorted(search.found, key=lambda n: _promise(problem, search, n))[:3]:
        stages = bppm.ByRecurrence().invert(search.question, search.found[count][1])
        candidate = _schedule(problem, stages)
        candidates += [candidate] if candidate else []
        if candidates and search.is_over:
            break
    return candidates


def _promise(problem: PipelineProblem, search: PartitionSearch, count: int) -> float:
    """An estimate of the makespan, for the order in which stage counts are tried."""
    if count not in search.found:
        return math.inf
    return search.found[count][0] * (1 + (count - 1) / problem.microbatches)


def _schedule(
    problem: PipelineProblem, stages: tuple[bppm.StageChoice, ...], ceiling: float = math.inf
) -> _ScheduledPartition | None:
    """Schedule the stages by list rules; None if no schedule can end before ``ceiling``."""
    scheduling = bppm.makespan_problem(problem, stages)
    if scheduling is None:
        return None
    bound = quick_bound(scheduling)
    if bound >= ceiling:
        return None
    pe = list_schedule(scheduling, "pe")
    assert pe is not None  # PE keeps every limit
    pe_seconds = pe.makespan(scheduling)
    times = pe if pe_seconds <= bound else best_list_schedule(scheduling)[1]
    return _ScheduledPartition(stages, scheduling, times, times.makespan(scheduling), pe_seconds)


def _guarantees(
    problem: PipelineProblem, found: StageCountSearch, cost: float
) -> tuple[Guarantee, ...]:
    """Lemma 1 and Theorem 1, if memory does not limit the microbatches in flight."""
    best = found.best
    question = found.search.question
    if len(question.order) < len(problem.cluster) or question.unit > 1:
        return ()  # not every partition on all devices is searched
    _, cuts = min(found.search.found.values())
    balanced_stages = bppm.ByRecurrence().invert(question, cuts)
    balanced = bppm.makespan_problem(problem, balanced_stages)
    assert balanced is not None  # in the recurrence every stage can hold a microbatch
    if min(*best.scheduling.in_flight, *balanced.in_flight) < problem.microbatches:
        return ()
    lemma, theorem = bppm.lemma1_seconds(best.scheduling), bppm.theorem1_seconds(problem, balanced)
    return (
        Guarantee(
            bppm.LEMMA_1,
            lemma,
            best.pe_seconds,
            best.pe_seconds <= lemma * (1 + 1e-9),
            bppm.LEMMA_1_PREMISE,
            named_stages(problem, best.stages),
        ),
        Guarantee(
            bppm.THEOREM_1,
            theorem,
            cost,
            cost <= theorem * (1 + 1e-9),
            bppm.theorem1_premise(problem),
            named_stages(problem, balanced_stages),
        ),
    )


def _notes(
    search: PartitionSearch,
    paths: dict[int, float],
    solved: list[int],
    best: _ScheduledPartition,
    ratio: float,
    late: bool,
) -> tuple[str, ...]:
    others = [count for count in paths if count not in solved]
    by_bottleneck = sum(search.bound[count] >= best.seconds for count in others)
    by_path = sum(search.bound[count] < best.seconds <= paths[count] for count in others)
    exactness = "exactly" if ratio == 0 else f"within {ratio:.0%}"
    unit = search.question.unit
    return (
        *([f"devices are taken in units of {unit}"] if unit > 1 else []),
        f"of {len(paths)} stage counts: W solved {exactness} for {len(solved)} "
        f"in {search.passes} passes, {by_bottleneck} pruned by their bottleneck, "
        f"{by_path} by the shortest path of a microbatch",
        *([f"stopped by {search.limits.end}"] if late else []),
    )


PLANNER = UniformPlanner(
    "spp",
    "device order by min-cuts, balanced partition, list schedule, best number of stages",
    "Luo et al., INFOCOM 2022",
    plan_spp,
)
