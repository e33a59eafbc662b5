"""Periodic planners: 1F1B* on the best contiguous partition, and MadPipe.

MadPipe (Beaumont, Eyraud-Dubois, Shilova): a dynamic program finds an allocation with one special
device that may have several stages; then its pattern is solved exactly. Here the contiguous optimum
is a candidate too, so that the answer is never worse; a local search lets any device have several
stages; and the joint search settles small cases, and bounds the others.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.forms.answers import Limits, OnProgress, Progress
from stagewright.formulations.patterns.joint_patterns import ALLOCATIONS, JointPatterns
from stagewright.formulations.patterns.madpipe import AllocationProblem
from stagewright.formulations.patterns.one_f_one_b import (
    least_period,
    one_f_one_b_star,
    period_bound,
)
from stagewright.formulations.patterns.pattern import (
    Pattern,
    PatternProblem,
    PatternProblems,
    static_bytes,
)
from stagewright.formulations.patterns.pattern_models import PATTERN, sequential
from stagewright.formulations.patterns.periodic_bounds import (
    fastest_work,
    iteration_bounds,
    least_pause,
    work_periods,
)
from stagewright.formulations.plans.memory import kept_bytes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound, Stage
from stagewright.formulations.plans.plan_class import (
    PATTERNS,
    SEARCHED_ALLOCATIONS,
    WHOLE_PERIODIC,
    PlanClass,
)
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import format_bytes, format_seconds
from stagewright.graphs.machines.ordering import recursive_device_order
from stagewright.solvers.patterns import madpipe
from stagewright.solvers.patterns.allocation_search import (
    Moves,
    disturbed,
    improve_allocation,
    interleaved,
)
from stagewright.solvers.patterns.joint_patterns import joint_optimum
from stagewright.solvers.patterns.pattern import best_pattern
from stagewright.solvers.planners.proposal import Choices, NoPlan, PeriodicProposal

Groups = tuple[tuple[int, ...], ...]
Stages = tuple[Stage, ...]

OPTIMAL_GAP = 1e-6  # relative
MOST_BYTES = 1e17
LONGEST_WAIT = 1e4  # beyond it the times of a run lose the digits of short operations
JOINT_STAGES = 20_000  # stages and groups for them, up to which the joint search may begin
PATTERN_SECONDS = 5.0  # for one allocation's pattern
# Periods between what an allocation allows and the best so far, at which others are asked for.
SHARES = (0.1, 0.25, 0.5, 0.75)
LONGEST = 2.0  # times what the allocation allows, where there is no plan yet
ROUNDS = (2, 3)  # in which stages are dealt out
SEARCHES = 12  # further local searches, each from MOVES random moves away from the best plan
MOVES = 3
SEARCHING = 0.5  # of the time that is left, if they take so long
SCHEDULED = 4  # of each local search, the last allocations


def plan_one_f_one_b_star(
    problem: PipelineProblem,
    limits: Limits,
    on_progress: OnProgress,
    choices: Choices,
) -> PeriodicProposal | NoPlan:
    """The shortest iteration over all contiguous partitions, a stage on every group of devices."""
    search = _Search(problem, limits, on_progress, choices)
    search.each_size(search.contiguous)
    return search.answer("with one stage on every device")


def plan_madpipe(
    problem: PipelineProblem,
    limits: Limits,
    on_progress: OnProgress,
    choices: Choices,
) -> PeriodicProposal | NoPlan:
    """MadPipe's allocation and pattern, or a better one found on the way."""
    search = _Search(problem, limits, on_progress, choices)
    for step in (search.contiguous, search.with_special, search.rearranged, search.jointly):
        search.each_size(step)
    return search.answer("with several stages on one device")


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """An allocation with its pattern; ``predicted_seconds`` is the period it allowed before that.

    ``bound_seconds`` is a bound on the period of all patterns of these stages.
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


@dataclass
class _Search:
    """The best plan so far, and what is proved for every group size."""

    problem: PipelineProblem
    limits: Limits
    on_progress: OnProgress
    choices: Choices
    began: float = field(default_factory=perf_counter)
    best: _Found | None = None
    seen: set[Stages] = field(default_factory=set)
    settled: bool = True  # what was asked of the dynamic program was answered for good

    def __post_init__(self) -> None:
        self.figures = PatternProblems(self.problem)
        self.bounds = {
            size: list(iteration_bounds(self.problem, size, self.choices.periodic_ways))
            for size in _sizes(self.problem, self.choices)
        }
        self._require_times_and_sizes()
        self._require_period()
        devices = self.problem.cluster.devices
        mute = [one.name for one in devices if one.host_bytes_per_second is None]
        if self.choices.offload and mute:
            raise InputError(
                f"offloading needs the devices' host_bytes_per_second in the cluster file; "
                f"{mute[0]!r} has none"
            )

    def each_size(self, step: Callable[[int], None]) -> None:
        """Take a step for every group size of which some plan may be better than the best.

        The most promising first.
        """
        for size in sorted(self.bounds, key=self._bound):
            if self._bound(size) < self._ceiling():
                step(size)

    def contiguous(self, size: int) -> None:
        """1F1B* on the best contiguous partitions.

        First of the least period with any pause; then with ever shorter pauses, until these cannot
        make up for the longer periods.
        """
        floor = max(least_pause(self.problem, size), _longest_update(self.problem))
        for groups in _orders(self.problem, size):
            question = AllocationProblem(
                self.problem, groups, None, self.choices.periodic_recomputations
            )
            pause = math.inf
            while pause > floor * (1 + OPTIMAL_GAP) and self._left() > 0:
                most = max(floor, pause * (1 - OPTIMAL_GAP))
                found = madpipe.least_period(
                    replace(question, most_update_seconds=most), self._limits()
                )
                self.settled &= found.bound == found.period and self._is_plain(groups)
                if found.stages is None:
                    break
                pause = self._one_f_one_b(found.stages)
                if self.problem.microbatches * found.bound + floor >= self._ceiling():
                    break

    def _one_f_one_b(self, stages: Stages) -> float:
        """Take the pattern of 1F1B* for stages with a group each; the pause that they need."""
        asked = self.figures.of(stages)
        period = least_period(asked)
        if period < math.inf:
            # With all-reduces 1F1B* is not proved to be the best pattern.
            pattern, low = one_f_one_b_star(asked, period), period_bound(asked)
            self._consider(_Found(stages, asked, pattern, period, low))
        return asked.pause_seconds

    def _is_plain(self, groups: Groups) -> bool:
        """Whether the groups are all there are, in their only order."""
        return not self.choices.offload and len(_distinct(self.problem, groups)) == 1

    def with_special(self, size: int) -> None:
        """MadPipe: every group that differs from the others is the special one in turn.

        With any pause, and with none longer than that of the best plan.
        """
        for groups in _orders(self.problem, size):
            for special in _distinct(self.problem, groups):
                question = AllocationProblem(
                    self.problem, groups, special, self.choices.periodic_recomputations
                )
                self._by_madpipe(question)
                if self.best is not None and self.best.asked.pause_seconds > 0:
                    most = max(self.best.asked.pause_seconds, _longest_update(self.problem))
                    self._by_madpipe(replace(question, most_update_seconds=most))

    def _by_madpipe(self, question: AllocationProblem) -> None:
        """The pattern of the best allocation.

        What the allocation allows is not always reached; then so is what others allow at periods
        between that and the best.
        """
        if self._left() <= 0:
            self.settled = False
            return
        found = madpipe.least_period(question, self._limits())
        self.settled &= found.bound == found.period
        if found.stages is None:
            return
        self._schedule(found.stages)
        for share in SHARES:
            best = self._best_period()
            if found.period < best * (1 - OPTIMAL_GAP) and self._left() > 0:
                longest = min(best, LONGEST * found.period)
                period = found.period + share * (longest - found.period)
                stages = madpipe.allocate(question, period, self._limits())
                if stages is not None:
                    self._schedule(stages)

    def rearranged(self, size: int) -> None:
        """Local searches in which any group may have several stages."""
        names = tuple(_named(self.problem, group) for group in _orders(self.problem, size)[0])
        moves, end = Moves(names, self.choices.periodic_ways), self._left() * (1 - SEARCHING)
        for attempt, start in enumerate(self._starts(names, moves)):
            left = self._left() - end
            if left <= 0:
                return
            limits = replace(self.limits, seconds=left, seed=self.limits.seed + attempt)
            target = self._bound(size)
            steps = list(improve_allocation(self.figures, moves, start, target, limits))
            for stages, _, bound in steps[::-1][:SCHEDULED]:
                if bound < self._ceiling():
                    self._schedule(stages)

    def _starts(self, names: tuple[tuple[str, ...], ...], moves: Moves) -> Iterator[Stages]:
        """The best plan, stages dealt out in rounds, and what random moves make of the best.

        A number of them and not a time, so that answers repeat.
        """
        dice = random.Random(self.limits.seed)
        if self.best is not None and len(self.best.stages[0].devices) == len(names[0]):
            yield self.best.stages
        for rounds in ROUNDS:
            for there_and_back in (False, True):
                yield interleaved(self.figures, names, rounds, there_and_back)
        for _ in range(SEARCHES):
            if self.best is not None and len(self.best.stages[0].devices) == len(names[0]):
                yield disturbed(moves, self.best.stages, MOVES, dice)

    def jointly(self, size: int) -> None:
        """The joint search: small cases are settled, for larger ones it gives a bound."""
        groups = _orders(self.problem, size)[0]
        stages = (
            len(groups)
            * len(self.choices.periodic_recomputations)
            * len(self.problem.chain) ** 2
            / 2
        )
        if stages > JOINT_STAGES or self._left() <= 0:
            return
        known = None if self.best is None else (self.best.stages, self.best.pattern)
        question = JointPatterns(self.problem, groups, self.choices.periodic_recomputations)
        answer = joint_optimum(question, self._limits(), incumbent=known)
        if answer.stages is not None and answer.pattern is not None:
            asked = self.figures.of(answer.stages)
            low = period_bound(asked)
            self._consider(_Found(answer.stages, asked, answer.pattern, low, low))
        # Groups of devices that differ could be made up in other ways.
        if not self.choices.offload and (size == 1 or len(_distinct(self.problem, groups)) == 1):
            recompute = self.choices.periodic_recomputations
            plans = replace(SEARCHED_ALLOCATIONS, recompute=recompute, equal_groups=(size,))
            self.bounds[size].append(Bound(answer.bound, ALLOCATIONS, "problem", plans))

    def answer(self, kind: str) -> PeriodicProposal | NoPlan:
        """The best plan with the bounds on all others, or why there is none."""
        if self.best is None:
            return self._no_plan(kind)
        best, asked = self.best, self.choices.period_seconds
        pattern = best.pattern
        if asked is not None:
            if asked < pattern.period:
                return NoPlan(
                    f"no plan of period {format_seconds(asked)} was found {kind}; "
                    f"the best has {format_seconds(pattern.period)}",
                    False,
                    self._overall(),
                )
            pattern = _stretched(best.asked, pattern, asked)
        notes = (
            f"period {format_seconds(best.pattern.period)}, "
            f"the allocation allowed {format_seconds(best.predicted_seconds)}",
        )
        schedules = best.asked.iteration_seconds(best.bound_seconds)
        bounds = (*self._overall(), Bound(schedules, PATTERN, "schedule", PATTERNS))
        return PeriodicProposal(best.stages, pattern, best.predicted_seconds, bounds, notes)

    def _schedule(self, stages: Stages) -> None:
        """Solve the pattern of ``stages``, if it may be better than the best."""
        if stages in self.seen:
            return
        self.seen.add(stages)
        asked = self.figures.of(stages)
        low = period_bound(asked)
        if asked.iteration_seconds(low) >= self._ceiling():
            return
        limits = replace(self.limits, seconds=min(PATTERN_SECONDS, max(0.1, self._left())))
        answer = best_pattern(asked, limits, lower_seconds=low)
        if answer.pattern is not None:
            self._consider(_Found(stages, asked, answer.pattern, low, answer.bound))

    def _ceiling(self) -> float:
        """What a plan must undercut to be better than the best."""
        return math.inf if self.best is None else self.best.cost * (1 - OPTIMAL_GAP)

    def _best_period(self) -> float:
        return math.inf if self.best is None else self.best.pattern.period

    def _consider(self, found: _Found) -> None:
        found.asked.evaluate(found.pattern)
        if self.best is None or found.cost < self.best.cost:
            self.best = found
            least = min(self._bound(size) for size in self.bounds)
            self.on_progress(Progress(perf_counter() - self.began, found.cost, least))

    def _left(self) -> float:
        return self.limits.left(perf_counter() - self.began)

    def _limits(self) -> Limits:
        return replace(self.limits, seconds=max(0.1, self._left()))

    def _bound(self, size: int) -> float:
        return max(bound.seconds for bound in self.bounds[size])

    def _overall(self) -> tuple[Bound, ...]:
        """Bounds that hold whatever the group size: the best of each size, the least of these.

        One for every class that some bound is proved for.
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

    def _require_times_and_sizes(self) -> None:
        """Refuse a model without work, and bytes that whole numbers of 64 bits cannot count."""
        if not any(fastest_work(self.problem, 1)):
            raise InputError("the layers take no time: a periodic plan has no period then")
        kept = float(
            self.problem.saved_per_layer(1).sum() + self.problem.chain.parameter_bytes.sum()
        )
        if kept * (self.problem.microbatches + 2) > MOST_BYTES:
            raise InputError(
                f"the layers hold {format_bytes(kept)}, times microbatches more than "
                f"{format_bytes(MOST_BYTES)}: are these bytes?"
            )

    def _require_period(self) -> None:
        """Refuse a period that no plan can have."""
        asked = self.choices.period_seconds
        loads = [max(work_periods(self.problem, size).values()) for size in self.bounds]
        if asked is not None and asked < min(loads) * (1 - OPTIMAL_GAP):
            raise InputError(
                f"the period {asked:.9g} s is below the load bound of {min(loads):.9g} s: "
                "ask for a longer one, or for the least by leaving it out"
            )

    def _no_plan(self, kind: str) -> NoPlan:
        """Infeasible: the stage that is shortest of memory in the best contiguous partition."""
        shortages = [
            _shortage(self.problem, groups, self.choices.periodic_recomputations)
            for size in self.bounds
            for groups in _orders(self.problem, size)
        ]
        short, stages, s = min(shortages, key=lambda one: one[0])
        proved = min(self._bound(size) for size in self.bounds) == math.inf
        plans = self._without_plan(proved)
        if short <= 0:
            return NoPlan(f"no plan was found {kind}", proved, self._overall(), plans=plans)
        stage, memory = stages[s], self.problem.memory_bytes
        has = min(float(memory[self.problem.cluster.index[name]]) for name in stage.devices)
        return NoPlan(
            f"{kind}, at any period, with one microbatch in flight, stage {s} (layers "
            f"{stage.layers[0]} to {stage.layers[1] - 1}) needs {format_bytes(has + short)}, "
            f"device {stage.devices[0]!r} has {format_bytes(has)}: {short:.0f} bytes short",
            plans is not None,
            self._overall(),
            plans=plans,
        )

    def _without_plan(self, proved: bool) -> PlanClass | None:
        """The class that is proved to have no plan: by its bounds, or by the contiguous search."""
        if proved:
            empty = [bound.plans for bound in self._overall() if bound.seconds == math.inf]
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
    """``pattern`` at a longer period; one microbatch after the other where there is time for it.

    Gaps grow in proportion, so that nothing overlaps, and nothing keeps more.
    """
    alone = sequential(asked)
    if period > LONGEST_WAIT * alone.period:
        raise InputError(
            f"the period {period:.9g} s is more than {LONGEST_WAIT:g} times the "
            f"{format_seconds(alone.period)} that a microbatch takes: are these seconds?"
        )
    if period >= alone.period:
        return Pattern(period, alone.starts)
    stretch = period / pattern.period
    return Pattern(period, tuple(start * stretch for start in pattern.starts))


def _sizes(problem: PipelineProblem, choices: Choices) -> list[int]:
    """Numbers of devices that a stage may have: all stages have the same number."""
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


def _longest_update(problem: PipelineProblem) -> float:
    """What the update of one layer takes at most."""
    return max(float(problem.update_per_layer(kind).max()) for kind in problem.kinds)


def _orders(problem: PipelineProblem, size: int) -> list[Groups]:
    """Groups of neighbouring devices, in the order of the recursive cuts; and the other way."""
    order = recursive_device_order(problem.cluster)
    last = len(order) - len(order) % size
    groups = tuple(tuple(sorted(order[i : i + size])) for i in range(0, last, size))
    return [groups] if len(_distinct(problem, groups)) == 1 else [groups, groups[::-1]]


def _distinct(problem: PipelineProblem, groups: Groups) -> list[int]:
    """One group of each sort: all where links differ, else by their devices."""
    cluster = problem.cluster
    apart = ~np.eye(len(cluster), dtype=bool)
    links = np.stack([cluster.bandwidth[apart], cluster.latency[apart]])
    if links.size and (links != links[:, :1]).any():
        return list(range(len(groups)))
    sorts = [
        tuple((cluster.devices[v].kind, float(problem.memory_bytes[v])) for v in group)
        for group in groups
    ]
    return [g for g, sort in enumerate(sorts) if sorts.index(sort) == g]


def _named(problem: PipelineProblem, group: Sequence[int]) -> tuple[str, ...]:
    return tuple(problem.cluster.devices[v].name for v in group)


def _shortage(
    problem: PipelineProblem, groups: Groups, ways: Sequence[Literal["none", "full"]]
) -> tuple[float, Stages, int]:
    """The contiguous partition that comes nearest to fitting: bytes short, stages, which is short.

    With one microbatch in flight; negative bytes are left over.
    """
    layers = len(problem.chain)
    names = [_named(problem, group) for group in groups]
    need = np.full((layers, layers + 1), np.inf)
    for start, stop in combinations(range(layers + 1), 2):
        need[start, stop] = min(
            _needed(problem, one) for one in _ways((start, stop), names[0], ways)
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


def _ways(
    layers: tuple[int, int], names: tuple[str, ...], ways: Sequence[Literal["none", "full"]]
) -> list[Stage]:
    return [Stage(layers, names, recompute=way) for way in ways]


def _needed(problem: PipelineProblem, stage: Stage) -> float:
    kept = kept_bytes(problem, stage)
    return static_bytes(problem, stage) + kept.saved_bytes + kept.working_bytes
