"""Parallel pipelines, PipeDream-2BW and PipeDream-Flush, by the cost model of the plans.

The replicas of a stage split its microbatches, which are as many times larger: what one of them
computes at a time is the thesis's microbatch. They are on one server wherever all stages have room
like that (thesis, section 3.3), in SPP's order of the devices. Stages are cut so that the slowest
is as fast as possible, which for equal blocks gives equal numbers of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from stagewright.formulations.forms.answers import Limits, OnProgress
from stagewright.formulations.patterns.one_f_one_b import (
    least_period,
    one_f_one_b_star,
    period_bound,
)
from stagewright.formulations.patterns.parallel_pipelines import (
    Configuration,
    Family,
    Line,
    Stages,
    divisors,
    samples_of,
)
from stagewright.formulations.patterns.pattern_problems import PatternProblems
from stagewright.formulations.pipelines.bppm import prefix_sums, range_sums
from stagewright.formulations.plans.actions import DOUBLE_BUFFER, FLUSH, WeightRule
from stagewright.formulations.plans.memory import (
    buffers_per_boundary,
    kept_bytes,
    stage_static_bytes,
    state_factor,
)
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.prices.collectives import link_seconds, ring_part
from stagewright.formulations.schedules.published.one_f_one_b import one_f_one_b
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_MICROBATCHES, format_bytes, format_seconds
from stagewright.graphs.machines.ordering import recursive_device_order
from stagewright.solvers.patterns.parallel_pipelines import BestConfiguration, best_configuration
from stagewright.solvers.planners.order import in_order
from stagewright.solvers.planners.periodic.search import (
    FoundPattern,
    Groups,
    PeriodicSearch,
    group_sizes,
    named_group,
)
from stagewright.solvers.planners.steps.planner import PlannerOptions, SearchPlanner
from stagewright.solvers.planners.steps.proposal import (
    Choices,
    NoPlan,
    PeriodicProposal,
    Proposal,
    cost_of,
)
from stagewright.solvers.planners.structures.arrangements import every_balanced_cuts

ROUNDING = 1e-9  # relative; floors are sums of the same numbers in another order


@dataclass(frozen=True)
class PlannedPipelines:
    """The seconds of an iteration of the plan of every configuration, under a weight rule.

    ``problems`` are by the samples of a microbatch, of all replicas together.
    """

    problems: Mapping[int, PipelineProblem]
    rule: WeightRule

    def floors(self, line: Line) -> Floats:
        """Lower bounds by depth, shape (most,); inf where the largest device is too small.

        On the fastest devices without transfers: 2BW's busiest stage, its optimizer step and its
        all-reduce; with a flush, the stages before the busiest one begin earlier and end later.
        """
        problem, stages = self._problem(line), self._cuts(line)
        seconds = self._seconds(line)
        work = problem.microbatches * stages.sums(seconds)
        if self.rule.may_overlap:
            updates = np.min([problem.update_per_layer(kind) for kind in problem.kinds], axis=0)
            floors = stages.most(work) + stages.most(stages.sums(updates))
            if line.width > 1:
                reduced = 2 * ring_part(line.width, stages.sums(_parameters(problem)))
                most = link_seconds(stages.most(reduced), self._bandwidth(line.width))
                floors = np.maximum(floors, most)
        else:
            floors = stages.most(work + prefix_sums(seconds)[stages.start])
        fits = self.least_bytes(line) <= problem.memory_bytes.max() * (1 + ROUNDING)
        return np.where(fits, floors[: line.most] * (1 - ROUNDING), np.inf)

    def least_bytes(self, line: Line) -> Floats:
        """Bytes of the largest stage, shape (most,).

        With as many microbatches in flight as 1F1B needs before a flush; else with one, which long
        enough a period allows.
        """
        problem, stages, width = self._problem(line), self._cuts(line), line.width
        factor = state_factor(problem, width, self.rule, self.rule.may_overlap)
        buffers = buffers_per_boundary(problem, width)
        saved = stages.sums(problem.saved_per_layer(width))
        inputs = problem.inputs_per_layer(width)[stages.start]
        again = line.recompute != "none"
        in_flight = np.ones(len(saved))
        if not self.rule.may_overlap:
            index = np.arange(len(saved)) - np.repeat(stages.first, np.unique(stages.depth))
            in_flight = np.minimum(stages.depth - index, problem.microbatches)
        need = factor * stages.sums(_parameters(problem)) + in_flight * (inputs if again else saved)
        need = need + buffers[stages.start] + buffers[stages.stop] + (saved if again else 0.0)
        return stages.most(need)[: line.most]

    def seconds(self, one: Configuration) -> float:
        """Seconds of a configuration's plan; inf if the plan does not fit in memory."""
        problem, stages = self.problems[one.samples], self.stages(one)
        if self.rule.may_overlap:
            asked = PatternProblems(problem).of(stages)
            return asked.iteration_seconds(least_period(asked))
        if not _drained_fits(problem, stages):
            return math.inf
        return cost_of(problem, drained(problem, stages))

    def stages(self, one: Configuration) -> tuple[Stage, ...]:
        """The stages of a configuration on their devices."""
        problem = self.problems[one.samples]
        line = Line(one.width, one.microbatch_size, one.microbatches, one.recompute, one.depth)
        every = self._cuts(line)
        first = int(every.first[one.depth - 1])
        groups = self._groups(one.width, one.depth)
        return tuple(
            Stage(
                (int(every.start[first + s]), int(every.stop[first + s])),
                named_group(problem, group),
                recompute=one.recompute,
            )
            for s, group in enumerate(groups)
        )

    def _groups(self, width: int, depth: int) -> Groups:
        """Devices for each stage: within servers if all have room like that, else neighbours."""
        order, members = self._order
        within = [
            tuple(one[i : i + width])
            for one in members
            for i in range(0, len(one) - width + 1, width)
        ]
        if len(within) >= depth:
            return tuple(within[:depth])
        return tuple(order[i * width : (i + 1) * width] for i in range(depth))

    @cached_property
    def _order(self) -> tuple[tuple[int, ...], list[list[int]]]:
        """The devices in SPP's order, and those of each server."""
        cluster = next(iter(self.problems.values())).cluster
        order = recursive_device_order(cluster)
        server_of = {v: number for number, one in enumerate(cluster.servers) for v in one}
        members: dict[int, list[int]] = {}
        for v in order:
            members.setdefault(server_of[v], []).append(v)
        return order, list(members.values())

    def _problem(self, line: Line) -> PipelineProblem:
        return self.problems[line.width * line.microbatch_size]

    def _seconds(self, line: Line) -> Floats:
        """Forward and backward of every layer on the fastest kind of device, shape (L,)."""
        return np.asarray(np.min(self._per_kind(line), axis=0))

    def _per_kind(self, line: Line) -> list[Floats]:
        problem, again = self._problem(line), 1 + (line.recompute != "none")
        every = [problem.costs(kind, line.width) for kind in problem.kinds]
        return [again * one.forward_seconds + one.backward_seconds for one in every]

    def _cuts(self, line: Line) -> Stages:
        """The stages of every depth, balanced on the slowest kind of every layer."""
        key = (line.microbatch_size, line.recompute)
        if key not in self._known:
            slowest = np.max(self._per_kind(line), axis=0)
            layers = len(slowest)
            table = range_sums(prefix_sums(slowest))
            table = np.where(np.triu(np.ones_like(table), 1), table, np.inf)
            deepest = min(layers, len(self._problem(line).cluster))
            cuts = every_balanced_cuts([table] * deepest)
            self._known[key] = Stages.of([np.array(one) for one in cuts if one is not None])
        return self._known[key]

    def _bandwidth(self, width: int) -> float:
        """The most that a group of ``width`` devices can have on its slowest link."""
        cluster = next(iter(self.problems.values())).cluster
        if width > max(map(len, cluster.servers)):
            servers = np.empty(len(cluster), dtype=np.int64)
            for number, members in enumerate(cluster.servers):
                servers[list(members)] = number
            best = cluster.pairs.best_between(servers)
            assert best is not None  # the group is on several servers
            return best[0]
        return float(cluster.pairs.bandwidths()[-1])

    @cached_property
    def _known(self) -> dict[tuple[int, str], Stages]:
        return {}


def drained(problem: PipelineProblem, stages: Sequence[Stage]) -> Proposal:
    """The plan of 1F1B with a flush; memory is not checked."""
    return in_order(problem, tuple(stages), one_f_one_b(len(stages), problem.microbatches))


def _drained_fits(problem: PipelineProblem, stages: Sequence[Stage]) -> bool:
    """Whether every device has room for the microbatches in flight of 1F1B."""
    for s, stage in enumerate(stages):
        kept = kept_bytes(problem, stage)
        in_flight = min(len(stages) - s, problem.microbatches)
        saved = in_flight * kept.saved_bytes + kept.working_bytes
        members = [problem.cluster.index[name] for name in stage.devices]
        room = float(problem.memory_bytes[members].min()) - stage_static_bytes(problem, stage)
        if saved > room:
            return False
    return True


def _parameters(problem: PipelineProblem) -> Floats:
    return problem.chain.parameter_bytes


@dataclass(frozen=True, slots=True)
class Chosen:
    """The best configuration, of which family, by which costs."""

    choice: BestConfiguration
    family: Family
    costs: PlannedPipelines


def choose(
    problems: Mapping[int, PipelineProblem], rule: WeightRule, choices: Choices, limits: Limits
) -> Chosen:
    """The best configuration for problems of one batch, by the samples of a microbatch."""
    one = next(iter(problems.values()))
    family = Family(
        one.chain.microbatch_size * one.microbatches,
        len(one.cluster),
        len(one.chain),
        tuple(problems),
        choices.group_size,
        int(one.chain.min_samples.max()),
        choices.periodic_recomputations,
    )
    costs = PlannedPipelines(problems, rule)
    return Chosen(best_configuration(family, costs, limits), family, costs)


def plan_two_buffered(
    problem: PipelineProblem, limits: Limits, on_progress: OnProgress, choices: Choices
) -> PeriodicProposal | NoPlan:
    """PipeDream-2BW: 1F1B* at its least period on the best configuration."""
    search = PeriodicSearch(problem, limits, on_progress, choices)
    found = _of_problem(problem, DOUBLE_BUFFER, choices, limits)
    if found.choice.best is None:
        return _nothing_fits(found)
    stages = found.costs.stages(found.choice.best)
    asked = search.figures.of(stages)
    period = least_period(asked)
    pattern = one_f_one_b_star(asked, period)
    search.consider(FoundPattern(stages, asked, pattern, period, period_bound(asked)))
    answer = search.answer("of equally replicated stages")
    if isinstance(answer, NoPlan):
        return answer
    return replace(answer, notes=(claim(found.choice), *answer.notes))


def plan_flushed(
    problem: PipelineProblem, limits: Limits, on_progress: OnProgress, choices: Choices
) -> Proposal | NoPlan:
    """PipeDream-Flush: 1F1B and a flush on the best configuration."""
    found = _of_problem(problem, FLUSH, choices, limits)
    if found.choice.best is None:
        return _nothing_fits(found)
    stages = found.costs.stages(found.choice.best)
    return replace(drained(problem, stages), notes=(claim(found.choice),))


def in_microbatches(
    problem: PipelineProblem, batch: int, sizes: Sequence[int]
) -> dict[int, PipelineProblem]:
    """The problem of a batch in microbatches of each size that can be planned, by size."""
    least = int(problem.chain.min_samples.max())
    return {
        samples: replace(problem, microbatches=batch // samples, microbatch_size=samples)
        for samples in sizes
        if samples >= least and batch // samples <= MAX_MICROBATCHES
    }


def of_batch(
    problem: PipelineProblem, planner: str, choices: Choices, limits: Limits
) -> tuple[PipelineProblem, str] | NoPlan:
    """The problem with the best size of microbatches for the batch of ``choices``; the claim.

    Raises
    ------
    InputError
        If the batch has no such microbatches; it names the nearest that have.
    """
    assert choices.batch is not None
    chain, batch, least = problem.chain, choices.batch, int(problem.chain.min_samples.max())
    problems = in_microbatches(problem, batch, samples_of(chain, batch))
    found = choose(problems, RULES[planner], choices, limits) if problems else None
    if found is None or not found.choice.configurations:
        width = "" if choices.group_size is None else f" on {choices.group_size} replicas"
        raise InputError(
            f"a batch of {batch} samples has no microbatches of at least {least} samples{width}, "
            f"of which at most {MAX_MICROBATCHES} can be planned: use another batch or group size"
        )
    best = found.choice.best
    if best is None:
        return _nothing_fits(found)
    return problems[
        best.samples
    ], f"batch {batch}, every size of microbatches: {claim(found.choice)}"


def claim(found: BestConfiguration) -> str:
    """A sentence that says among which configurations the choice is the best."""
    text = f"{found.best}: of {found.configurations} configurations of equally replicated stages "
    if found.bound_seconds < found.seconds:
        return f"{text}none takes less than {format_seconds(found.bound_seconds)}"
    return f"{text}the best"


def _nothing_fits(found: Chosen) -> NoPlan:
    """Why there is no plan, with the least memory of a configuration."""
    if found.choice.bound_seconds < math.inf:
        tried = f"{found.choice.priced} of {found.choice.configurations} configurations"
        return NoPlan(f"none of {tried} that were tried in time fits", proved=False)
    lines = list(found.family.lines())
    needs = [found.costs.least_bytes(line) for line in lines]
    best = min(range(len(lines)), key=lambda i: float(needs[i].min()))
    need, one = float(needs[best].min()), lines[best].at(1 + int(needs[best].argmin()))
    memory = found.costs.problems[one.samples].memory_bytes
    room = float(memory.max())
    has = f"every device has {format_bytes(room)}, {need - room:.0f} bytes less"
    if need <= room:
        has = f"devices have {format_bytes(float(memory.min()))} to {format_bytes(room)}"
    return NoPlan(
        f"none of {found.choice.configurations} configurations of equally replicated stages fits; "
        f"the one of least memory, {one}, needs {format_bytes(need)} on a device, and {has}"
    )


def require_width(problem: PipelineProblem, choices: Choices) -> None:
    """Refuse a group size that is out of range, or has no equal shares of a microbatch.

    With a batch the size of its microbatches is chosen for the group size.
    """
    if choices.batch is not None:
        return
    samples = problem.chain.microbatch_size
    group_sizes(problem, choices)
    if choices.group_size is not None and samples % choices.group_size:
        able = [str(one) for one in divisors(samples) if one <= len(problem.cluster)]
        raise InputError(
            f"group size {choices.group_size}: {samples} samples of a microbatch are not shared "
            f"equally by so many replicas; use {', '.join(able)}"
        )


def _of_problem(
    problem: PipelineProblem, rule: WeightRule, choices: Choices, limits: Limits
) -> Chosen:
    """The choice for one size of microbatches, of which a requested width has equal shares."""
    require_width(problem, choices)
    return choose({problem.chain.microbatch_size: problem}, rule, choices, limits)


TWO_BUFFERED = SearchPlanner(
    "2bw",
    "equally replicated stages without flush, two versions of the weights; all widths, depths and "
    "recomputations, with --global-batch all microbatch sizes",
    "PipeDream-2BW: Narayanan's thesis, 3.3",
    plan_two_buffered,
    PlannerOptions(("none", "full", "auto"), group_size=True, period_seconds=True, batch=True),
)
FLUSHED = SearchPlanner(
    "2bw-flush",
    "the same with a flush and one version of the weights; 1F1B",
    "PipeDream-Flush: Narayanan's thesis, 3.3",
    plan_flushed,
    PlannerOptions(("none", "full", "auto"), group_size=True, batch=True),
)
RULES = {TWO_BUFFERED.name: DOUBLE_BUFFER, FLUSHED.name: FLUSH}
