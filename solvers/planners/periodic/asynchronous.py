"""PipeDream as it was published (thesis 2.4): weights change after every microbatch, no flush.

A stage keeps the versions of its weights that the microbatches in flight have used in their
forwards, so that their backwards use the same (weight stashing); with vertical sync all stages use
the version of the first. Stages run 1F1B* at the least period that leaves room for activations and
versions. The replicas of a stage split every microbatch, and sum its gradient up before the next
begins; the paper's take turns instead, and overlap the sums with the computation.

PipeDream's recurrence looks at neither of these. So the partition that it finds is one of several:
equal numbers of devices per stage at every depth are the others, among them straight pipelines
and data parallelism. They are balanced without regard to memory, with as many microbatches in
flight as there are stages from here to the end, and with one (`GroupTables`).

Balanced stages on groups of devices of one size, at every depth, within memory.

How many microbatches a stage keeps depends on the period, which depends on the cuts. So stages are
balanced for two numbers: as many as there are stages from here to the last, which 1F1B keeps, and
one, which any stages keep that fit at all.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.forms.answers import Limits, OnProgress, Progress
from stagewright.formulations.patterns.one_f_one_b import least_period, one_f_one_b_star
from stagewright.formulations.patterns.pattern import PatternProblem
from stagewright.formulations.patterns.pattern_problems import PatternProblems
from stagewright.formulations.patterns.periodic_bounds import fastest_work
from stagewright.formulations.pipelines.bppm import prefix_sums, range_sums
from stagewright.formulations.plans.actions import STASH, STASH_VERTICAL_SYNC, WeightRule
from stagewright.formulations.plans.memory import buffers_per_boundary, state_factor
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import format_bytes, format_seconds
from stagewright.solvers.planners.baselines import pipedream
from stagewright.solvers.planners.baselines.pipedream import explain_pattern
from stagewright.solvers.planners.periodic.search import Groups, group_sizes, named_group, orders
from stagewright.solvers.planners.steps.planner import PlannerOptions, SearchPlanner
from stagewright.solvers.planners.steps.proposal import (
    Choices,
    NoPlan,
    PeriodicProposal,
    named_stages,
    with_memory_mode,
)
from stagewright.solvers.planners.structures.arrangements import every_balanced_cuts


@dataclass(frozen=True)
class GroupTables:
    """Seconds and bytes of layers [start, stop) on each of ``groups``, shape (L + 1, L + 1).

    ``modes`` are the recomputations that a stage may choose from.
    """

    problem: PipelineProblem
    groups: Groups
    rule: WeightRule
    modes: Sequence[Literal["none", "full"]]

    def partitions(self) -> Iterator[tuple[list[int], Groups]]:
        """Cuts into one stage per group, for the first 1, 2, ... groups, and those in order."""
        count = range(len(self.groups))
        for most in (0, 1):
            tables = [self._allowed(self._forth(g), g, most) for g in count]
            for cuts in every_balanced_cuts(tables):
                if cuts is not None:
                    yield cuts, self.groups
        # From the last stage to the first, which are on the last and the first of the groups.
        tables = [self._allowed(self._back(g), g, g + 1)[::-1, ::-1].T for g in count]
        layers = len(self.problem.chain)
        for depth, cuts in enumerate(every_balanced_cuts(tables), 1):
            if cuts is not None:
                yield [layers - cut for cut in reversed(cuts)], self.groups[:depth][::-1]

    def _forth(self, g: int) -> Floats:
        """Seconds of the slower of a stage on group ``g`` and its transfers forward."""
        if g == 0:
            return self._seconds[g]
        return np.maximum(self._seconds[g], self._sent(g - 1, g)[:, None])

    def _back(self, g: int) -> Floats:
        """Seconds of the slower of a stage on group ``g`` and its transfers backward."""
        if g == 0:
            return self._seconds[g]
        return np.maximum(self._seconds[g], self._sent(g, g - 1)[None, :])

    def _sent(self, one: int, other: int) -> Floats:
        """Seconds of the transfers at every boundary, both ways, shape (L + 1,)."""
        between = range(1, len(self.problem.chain))
        pair = self.groups[one], self.groups[other]
        return np.array(
            [0.0, *(sum(self.problem.transfer_seconds(l, *pair)) for l in between), 0.0]
        )

    @cached_property
    def _seconds(self) -> list[Floats]:
        """Forward, backward, all-reduce and update on each group.

        An all-reduce and an update are taken to be proportional to their bytes.
        """
        problem, found = self.problem, []
        parameters, layers = problem.chain.parameter_bytes, len(problem.chain)
        for group in self.groups:
            costs = [problem.costs(problem.cluster.devices[v].kind, len(group)) for v in group]
            work = np.max([one.forward_seconds + one.backward_seconds for one in costs], axis=0)
            ending = problem.reduce_seconds(0, layers, group)
            ending += problem.update_seconds(0, layers, group)
            work = work + parameters * (ending / max(float(parameters.sum()), 1.0))
            found.append(range_sums(prefix_sums(work)))
        return found

    def _allowed(self, seconds: Floats, g: int, in_flight: int) -> Floats:
        """``seconds``, inf where there is no layer, or no room for so many microbatches."""
        possible = np.triu(np.ones_like(seconds, dtype=bool), 1)
        if in_flight:
            possible &= self._fits(g, in_flight)
        return np.where(possible, seconds, np.inf)

    def _fits(self, g: int, in_flight: int) -> NDArray[np.bool_]:
        """Where states, old versions, activations and buffers fit in a group's least memory."""
        problem, count = self.problem, len(self.groups[g])
        factor = state_factor(problem, count, self.rule) + in_flight - 1
        states = factor * range_sums(prefix_sums(problem.chain.parameter_bytes))
        buffers = buffers_per_boundary(problem, count)
        static = states + buffers[:, None] + buffers[None, :]
        saved = range_sums(prefix_sums(problem.saved_per_layer(count)))
        inputs = np.append(problem.inputs_per_layer(count), 0.0)[:, None]
        # What fits but for rounding is left to the pattern.
        room = min(problem.memory_bytes[v] for v in self.groups[g]) * (1 + RELATIVE_TOLERANCE)
        every = {"none": in_flight * saved, "full": in_flight * inputs + saved}
        found: NDArray[np.bool_] = np.any(
            [static + every[mode] <= room for mode in self.modes], axis=0
        )
        return found


RECURRENCE = "PipeDream's recurrence"
SHOWN = 3  # kinds of partition


@dataclass(frozen=True, slots=True, eq=False)
class _FoundPartition:
    """Stages with their pattern problem and the least period of 1F1B*; ``kind`` says whose."""

    kind: str
    stages: tuple[Stage, ...]
    asked: PatternProblem
    period: float

    def proposal(self, rule: WeightRule, notes: tuple[str, ...] = ()) -> PeriodicProposal:
        """The plan of 1F1B*."""
        pattern = one_f_one_b_star(self.asked, self.period)
        return PeriodicProposal(self.stages, pattern, self.period, (), notes, rule.name)


def require_work(problem: PipelineProblem, choices: Choices) -> None:
    """Refuse layers that take no time, and a group size that is out of range."""
    if not fastest_work(problem, 1).any():
        raise InputError("the layers take no time: a periodic plan needs a positive period")
    group_sizes(problem, choices)


def plan_asynchronous(
    problem: PipelineProblem, limits: Limits, on_progress: OnProgress, choices: Choices
) -> PeriodicProposal | NoPlan:
    """The partition with the shortest period, of PipeDream's and of equally replicated ones.

    Raises InputError if the layers take no time, or the group size is out of range.
    """
    require_work(problem, choices)
    began, rule = perf_counter(), STASH_VERTICAL_SYNC if choices.vertical_sync else STASH
    best: dict[str, _FoundPartition] = {}
    tried = 0
    for one in _candidates(problem, rule, choices):
        tried += 1
        if one.period < min((known.period for known in best.values()), default=math.inf):
            made = partial(one.proposal, rule)
            seconds = perf_counter() - began
            on_progress(Progress(seconds, one.asked.iteration_seconds(one.period), 0.0, made))
        if one.period < best[one.kind].period if one.kind in best else one.period < math.inf:
            best[one.kind] = one
        if limits.left(perf_counter() - began) <= 0:
            break
    else:
        if not best:
            return _no_plan(problem, rule, choices)
    if not best:
        return NoPlan(f"none of the first {tried} partitions fits in memory", proved=False)
    fastest = sorted(best.values(), key=lambda one: one.period)
    return fastest[0].proposal(rule, tuple(_notes(problem, choices, fastest, tried)))


def _notes(
    problem: PipelineProblem, choices: Choices, fastest: Sequence[_FoundPartition], tried: int
) -> Iterator[str]:
    """The shortest periods by kind of partition, and the recurrence's against its prediction."""
    shown = [one for one in fastest if one.kind == RECURRENCE or one in fastest[:SHOWN]]
    each = ", ".join(f"{one.kind} {format_seconds(one.period)}" for one in shown)
    yield f"a microbatch every, of {tried} partitions: {each}"
    if choices.group_size is None:
        yield _explained(problem, next((one for one in fastest if one.kind == RECURRENCE), None))


def _explained(problem: PipelineProblem, found: _FoundPartition | None) -> str:
    """A note with the recurrence's predicted time for its partition, and the plan's time."""
    predicted = pipedream.optimum(problem).seconds
    if found is None:
        return (
            f"{RECURRENCE}: {format_seconds(predicted)} per microbatch, checked: fits in no memory"
        )
    return explain_pattern(predicted, problem, found.stages, found.asked, found.period)


def _candidates(
    problem: PipelineProblem, rule: WeightRule, choices: Choices
) -> Iterator[_FoundPartition]:
    """The partitions to try, each with every allowed recomputation."""
    figures = PatternProblems(problem, rule)
    seen: set[tuple[Stage, ...]] = set()
    for kind, stages in _partitions(problem, rule, choices):
        if stages in seen:
            continue
        seen.add(stages)
        for mode in choices.periodic_recomputations:
            again = tuple(with_memory_mode(stage, mode) for stage in stages)
            asked = figures.of(again)
            yield _FoundPartition(kind, again, asked, least_period(asked))


def _partitions(
    problem: PipelineProblem, rule: WeightRule, choices: Choices
) -> Iterator[tuple[str, tuple[Stage, ...]]]:
    sizes = group_sizes(problem, choices)  # refuses a size that is out of range
    if choices.group_size is None:
        found = pipedream.partition(problem)
        most = (problem.most_replicas(one.start, one.stop) for one in found)
        fitting = [
            replace(one, devices=one.devices[:few]) for one, few in zip(found, most, strict=True)
        ]
        yield RECURRENCE, named_stages(problem, fitting)
    for size in sizes:
        for groups in orders(problem, size):
            tables = GroupTables(
                problem, groups[: len(problem.chain)], rule, choices.periodic_recomputations
            )
            for cuts, first in tables.partitions():
                yield _kind(problem, size, len(cuts) - 1), _staged(problem, first, cuts)


def _kind(problem: PipelineProblem, size: int, depth: int) -> str:
    if size == 1:
        return "straight pipelines"
    if size == len(problem.cluster):
        return "data parallelism"
    return f"{size} devices a stage" if depth > 1 else "one stage"


def _staged(problem: PipelineProblem, groups: Groups, cuts: Sequence[int]) -> tuple[Stage, ...]:
    return tuple(
        Stage((cuts[s], cuts[s + 1]), named_group(problem, groups[s])) for s in range(len(cuts) - 1)
    )


def _no_plan(problem: PipelineProblem, rule: WeightRule, choices: Choices) -> NoPlan:
    """The refusal: the partition that lacks the least memory with one microbatch in flight."""
    short, found, s = min(
        (
            (max(one.asked.short_bytes()), one, int(np.argmax(one.asked.short_bytes())))
            for one in _candidates(problem, rule, choices)
        ),
        key=lambda one: one[0],
    )
    stage = found.stages[s]
    name = min(stage.devices, key=lambda v: problem.memory_bytes[problem.cluster.index[v]])
    has = float(problem.memory_bytes[problem.cluster.index[name]])
    return NoPlan(
        f"at any period, with one microbatch in flight, stage {s} (layers {stage.layers[0]} to "
        f"{stage.layers[1] - 1}) of {found.kind} needs {format_bytes(has + short)}, device "
        f"{name!r} has {format_bytes(has)}: {short:.0f} bytes short"
    )


PLANNER = SearchPlanner(
    "pipedream-async",
    "weights that change after every microbatch, stashed for its backward (or synchronised "
    "vertically); no flush; the best of PipeDream's recurrence and equal replicas at every depth",
    "PipeDream: Narayanan's thesis, 2.4",
    plan_asynchronous,
    PlannerOptions(("none", "full", "auto"), group_size=True, vertical_sync=True),
)
