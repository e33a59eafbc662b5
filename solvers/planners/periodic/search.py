"""The search for periodic plans: the best plan so far, and bounds for every group size."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.forms.answers import Limits, OnProgress, Progress
from stagewright.formulations.patterns.one_f_one_b import period_bound
from stagewright.formulations.patterns.order_model import sequential
from stagewright.formulations.patterns.pattern import Pattern, PatternProblem
from stagewright.formulations.patterns.pattern_models import PATTERN
from stagewright.formulations.patterns.pattern_problems import PatternProblems, static_bytes
from stagewright.formulations.patterns.periodic_bounds import (
    fastest_work,
    iteration_bounds,
    work_periods,
)
from stagewright.formulations.plans.memory import kept_bytes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound, Stage
from stagewright.formulations.plans.plan_class import PATTERNS, WHOLE_PERIODIC, PlanClass
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import format_bytes, format_seconds
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.machines.ordering import recursive_device_order
from stagewright.solvers.patterns.pattern import best_pattern, require_pattern_backend
from stagewright.solvers.planners.steps.planner import PlannerOptions, require_host_links
from stagewright.solvers.planners.steps.proposal import Choices, NoPlan, PeriodicProposal

Stages = tuple[Stage, ...]
Groups = tuple[tuple[int, ...], ...]


def _contiguous_shortage(
    problem: PipelineProblem, groups: Groups, modes: Sequence[Literal["none", "full"]]
) -> tuple[float, Stages, int]:
    """The contiguous partition with the least missing memory: bytes, stages, index of the stage.

    With one microbatch in flight; negative bytes are free memory.
    """
    layers = len(problem.chain)
    names = [named_group(problem, group) for group in groups]
    need = np.full((layers, layers + 1), np.inf)
    for start, stop in combinations(range(layers + 1), 2):
        need[start, stop] = min(
            _needed(problem, one) for one in _modes((start, stop), names[0], modes)
        )
    # best[l]: the least shortage of the first l layers on the groups so far.
    best = np.append(-np.inf, np.full(layers, np.inf))
    cuts: list[NDArray[np.int64]] = []
    rooms = [float(problem.memory_bytes[list(group)].min()) for group in groups]
    for room in rooms:
        worst = np.maximum(best[:layers, None], need - room)
        cuts.append(np.where(worst.min(axis=0) < best, worst.argmin(axis=0), -1))
        best = np.minimum(best, worst.min(axis=0))
    found: list[tuple[float, Stage]] = []
    stop = layers
    for group, room, cut in zip(names[::-1], rooms[::-1], cuts[::-1], strict=True):
        start = int(cut[stop])
        if start >= 0:
            found.append((need[start, stop] - room, Stage((start, stop), group)))
            stop = start
    found.reverse()
    short = [bytes_ for bytes_, _ in found]
    return float(best[layers]), tuple(stage for _, stage in found), short.index(max(short))


def _modes(
    layers: tuple[int, int], names: tuple[str, ...], modes: Sequence[Literal["none", "full"]]
) -> list[Stage]:
    return [Stage(layers, names, recompute=mode) for mode in modes]


def _needed(problem: PipelineProblem, stage: Stage) -> float:
    kept = kept_bytes(problem, stage)
    return static_bytes(problem, stage) + kept.saved_bytes + kept.working_bytes


def group_sizes(problem: PipelineProblem, choices: Choices) -> list[int]:
    """The possible numbers of devices per stage, which is the same for all stages."""
    devices, layers = len(problem.cluster), len(problem.chain)
    most = min(devices, problem.most_replicas(0, layers))
    if choices.group_size is None:
        return list(range(1, most + 1))
    if not 1 <= choices.group_size <= most:
        raise InputError(
            f"group size {choices.group_size}: a stage can have 1 to {most} devices; the cluster "
            f"has {devices}, and a microbatch has samples for {problem.most_replicas(0, layers)}"
        )
    return [choices.group_size]


def longest_update(problem: PipelineProblem) -> float:
    """The longest update time of a layer."""
    return max(float(problem.update_per_layer(kind).max()) for kind in problem.kinds)


def orders(problem: PipelineProblem, size: int) -> list[Groups]:
    """Groups of neighbouring devices in the order of the recursive cuts, and reversed."""
    order = recursive_device_order(problem.cluster)
    last = len(order) - len(order) % size
    groups = tuple(tuple(sorted(order[i : i + size])) for i in range(0, last, size))
    return [groups] if len(distinct(problem, groups)) == 1 else [groups, groups[::-1]]


def distinct(problem: PipelineProblem, groups: Groups) -> list[int]:
    """One group of each type: all groups if links differ, else one per type of devices."""
    if not _links_are_equal(problem.cluster):
        return list(range(len(groups)))
    sorts = [tuple(_machine(problem, v) for v in group) for group in groups]
    return [g for g, sort in enumerate(sorts) if sorts.index(sort) == g]


def interchangeable(problem: PipelineProblem, size: int) -> bool:
    """Whether it does not matter which devices form a group of ``size``.

    Otherwise a bound for one partition into groups says nothing about the others, even if the
    groups of that partition are alike or there is only one.
    """
    devices = len(problem.cluster)
    if size == devices:
        return True
    machines = {_machine(problem, v) for v in range(devices)}
    return len(machines) == 1 and _links_are_equal(problem.cluster)


def _machine(problem: PipelineProblem, device: int) -> tuple[str, float]:
    """The kind and the memory of a device."""
    return problem.cluster.devices[device].kind, float(problem.memory_bytes[device])


def _links_are_equal(cluster: Cluster) -> bool:
    """Whether all pairs of devices have the same bandwidth and latency."""
    every = range(len(cluster))
    slowest = cluster.pairs.slowest(every, every)
    return cluster.pairs.best_between(np.array(every)) in (None, slowest)


def named_group(problem: PipelineProblem, group: Sequence[int]) -> tuple[str, ...]:
    """The names of a group's devices."""
    return tuple(problem.cluster.devices[v].name for v in group)


PERIODIC_OPTIONS = PlannerOptions(
    ("none", "full", "auto"), offload=True, group_size=True, period_seconds=True, backend=True
)
"""The choices that periodic planners support."""
OPTIMAL_GAP = 1e-6  # relative
_MOST_BYTES = 1e17
_LONGEST_WAIT = 1e4  # times the sequential period; above it short operations lose precision
_PATTERN_SECONDS = 5.0  # time limit of one pattern


@dataclass(frozen=True, slots=True, eq=False)
class FoundPattern:
    """An allocation with its pattern.

    ``predicted_seconds`` is the period estimated from the allocation, ``bound_seconds`` a lower
    bound on the period of all patterns of these stages.
    """

    stages: Stages
    asked: PatternProblem
    pattern: Pattern
    predicted_seconds: float
    bound_seconds: float

    @property
    def cost(self) -> float:
        """Seconds of an iteration."""
        return self.asked.iteration_seconds(self.pattern.period)


def require_periodic(problem: PipelineProblem, choices: Choices) -> None:
    """Refuse choices that no periodic plan has, before a search.

    Raises
    ------
    InputError
        If the layers take no time, or their sizes overflow 64-bit integers; or the group size is
        out of range, the period below the load bound, or the backend unknown.
    """
    sizes = group_sizes(problem, choices)
    if not any(fastest_work(problem, 1)):
        raise InputError("the layers take no time: a periodic plan needs a positive period")
    kept = float(problem.saved_per_layer(1).sum() + problem.chain.parameter_bytes.sum())
    if kept * (problem.microbatches + 2) > _MOST_BYTES:
        raise InputError(
            f"the layers keep {format_bytes(kept)} per microbatch, in total more than "
            f"{format_bytes(_MOST_BYTES)}: are the sizes in bytes?"
        )
    asked = choices.period_seconds
    loads = [max(work_periods(problem, size).values()) for size in sizes]
    if asked is not None and asked < min(loads) * (1 - OPTIMAL_GAP):
        raise InputError(
            f"the period {asked:.9g} s is below the load bound of {min(loads):.9g} s: "
            "give a longer one, or leave it out for the least period"
        )
    require_pattern_backend(choices.backend)


@dataclass
class PeriodicSearch:
    """The best plan so far, and bounds for every group size."""

    problem: PipelineProblem
    limits: Limits
    on_progress: OnProgress
    choices: Choices
    began: float = field(default_factory=perf_counter)
    best: FoundPattern | None = None
    seen: set[Stages] = field(default_factory=set)
    settled: bool = True  # whether all answers of the dynamic program are exact

    def __post_init__(self) -> None:
        self.figures = PatternProblems(self.problem)
        require_periodic(self.problem, self.choices)
        self.bounds = {
            size: list(iteration_bounds(self.problem, size, self.choices.periodic_modes))
            for size in group_sizes(self.problem, self.choices)
        }
        if self.choices.offload:
            require_host_links(self.problem)

    def each_size(self, step: Callable[[int], None]) -> None:
        """Run ``step`` for every group size that may have a better plan.

        Sizes are in order of their bounds.
        """
        for size in sorted(self.bounds, key=self.bound):
            if self.bound(size) < self.ceiling():
                step(size)

    def answer(self, kind: str) -> PeriodicProposal | NoPlan:
        """The best plan with bounds on all plans, or why there is none."""
        if self.best is None:
            return self.no_plan(kind)
        best, asked = self.best, self.choices.period_seconds
        pattern = best.pattern
        if asked is not None:
            if asked < pattern.period:
                return NoPlan(
                    f"no plan of period {format_seconds(asked)} was found {kind}; "
                    f"the best has {format_seconds(pattern.period)}",
                    False,
                    self.overall(),
                )
            pattern = _stretched(best.asked, pattern, asked)
        notes = (
            f"period {format_seconds(best.pattern.period)}, "
            f"the allocation allowed {format_seconds(best.predicted_seconds)}",
        )
        schedules = best.asked.iteration_seconds(best.bound_seconds)
        bounds = (*self.overall(), Bound(schedules, PATTERN, "schedule", PATTERNS))
        return PeriodicProposal(best.stages, pattern, best.predicted_seconds, bounds, notes)

    def schedule(self, stages: Stages) -> None:
        """Solve the pattern of ``stages`` if it may be better than the best plan."""
        if stages in self.seen:
            return
        self.seen.add(stages)
        asked = self.figures.of(stages)
        low = period_bound(asked)
        if asked.iteration_seconds(low) >= self.ceiling():
            return
        limits = replace(self.limits, seconds=min(_PATTERN_SECONDS, max(0.1, self.left())))
        answer = best_pattern(asked, limits, backend=self.choices.backend, lower_seconds=low)
        if answer.pattern is not None:
            self.consider(FoundPattern(stages, asked, answer.pattern, low, answer.bound))

    def ceiling(self) -> float:
        """The cost below which a plan is an improvement."""
        return math.inf if self.best is None else self.best.cost * (1 - OPTIMAL_GAP)

    def best_period(self) -> float:
        """The period of the best plan, inf without one."""
        return math.inf if self.best is None else self.best.pattern.period

    def consider(self, found: FoundPattern) -> None:
        """Check a pattern and keep it if it is the best."""
        found.asked.evaluate(found.pattern)
        if self.best is None or found.cost < self.best.cost:
            self.best = found
            least = min(self.bound(size) for size in self.bounds)
            elapsed = perf_counter() - self.began
            # A requested period applies to the final answer only.
            made = partial(self._proposal, found) if self.choices.period_seconds is None else None
            self.on_progress(Progress(elapsed, found.cost, least, made))

    def _proposal(self, found: FoundPattern) -> PeriodicProposal:
        return PeriodicProposal(
            found.stages, found.pattern, found.predicted_seconds, self.overall()
        )

    def left(self) -> float:
        """Remaining seconds."""
        return self.limits.left(perf_counter() - self.began)

    def limits_left(self) -> Limits:
        """The limits of the next solve."""
        return replace(self.limits, seconds=max(0.1, self.left()))

    def bound(self, size: int) -> float:
        """The best bound on all plans of a group size."""
        return max(bound.seconds for bound in self.bounds[size])

    def overall(self) -> tuple[Bound, ...]:
        """Bounds for all group sizes: the least, over sizes, of the best bound of each size.

        There is one for every class that has a bound.
        """
        if len(self.bounds) == 1:
            (bounds,) = self.bounds.values()
            return tuple(bounds)
        sizes = tuple(sorted(self.bounds))
        found = [bound for bounds in self.bounds.values() for bound in bounds]
        classes = dict.fromkeys(replace(bound.plans, equal_groups=sizes) for bound in found)
        overall = []
        for plans in classes:
            best = [
                max(
                    (
                        bound
                        for bound in bounds
                        if bound.plans.contains(replace(plans, equal_groups=(size,)))
                    ),
                    key=lambda bound: bound.seconds,
                )
                for size, bounds in self.bounds.items()
            ]
            least = min(best, key=lambda bound: bound.seconds)
            overall.append(replace(least, plans=plans))
        return tuple(overall)

    def no_plan(self, kind: str) -> NoPlan:
        """The refusal, which names the stage with most missing memory in the best partition."""
        shortages = [
            _contiguous_shortage(self.problem, groups, self.choices.periodic_recomputations)
            for size in self.bounds
            for groups in orders(self.problem, size)
        ]
        short, stages, s = min(shortages, key=lambda one: one[0])
        proved = min(self.bound(size) for size in self.bounds) == math.inf
        plans = self._without_plan(proved)
        if short <= 0:
            return NoPlan(f"no plan was found {kind}", proved, self.overall(), plans=plans)
        stage, memory = stages[s], self.problem.memory_bytes
        has = min(float(memory[self.problem.cluster.index[name]]) for name in stage.devices)
        return NoPlan(
            f"{kind}, at any period, with one microbatch in flight, stage {s} (layers "
            f"{stage.layers[0]} to {stage.layers[1] - 1}) needs {format_bytes(has + short)}, "
            f"device {stage.devices[0]!r} has {format_bytes(has)}: {short:.0f} bytes short",
            plans is not None,
            self.overall(),
            plans=plans,
        )

    def _without_plan(self, proved: bool) -> PlanClass | None:
        """The class that is proved to have no plan, by bounds or by the contiguous search."""
        if proved:
            empty = [bound.plans for bound in self.overall() if bound.seconds == math.inf]
            return next(
                one
                for one in empty
                if not any(other != one and other.contains(one) for other in empty)
            )
        if not self.settled:
            return None
        return replace(
            WHOLE_PERIODIC,
            sharing="none",
            recompute=self.choices.periodic_recomputations,
            equal_groups=tuple(sorted(self.bounds)),
        )


def _stretched(asked: PatternProblem, pattern: Pattern, period: float) -> Pattern:
    """``pattern`` stretched to a longer period, or the sequential pattern if that is possible.

    Starts are scaled, so that nothing overlaps and no stage keeps more microbatches.
    """
    alone = sequential(asked)
    if period > _LONGEST_WAIT * alone.period:
        raise InputError(
            f"the period {period:.9g} s is more than {_LONGEST_WAIT:g} times the "
            f"{format_seconds(alone.period)} that a microbatch takes: is it in seconds?"
        )
    if period >= alone.period:
        return Pattern(period, alone.starts)
    stretch = period / pattern.period
    return Pattern(period, tuple(start * stretch for start in pattern.starts))
