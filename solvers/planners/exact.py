"""The exact joint planner: best-first branch and bound over plans, CP-SAT for their schedules."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import numpy as np

from stagewright.formulations.forms.answers import Limits, OnProgress, Progress, Status, silent
from stagewright.formulations.pipelines.bounds.stages import schedule_bounds
from stagewright.formulations.pipelines.bppm import StageChoice, makespan_problem
from stagewright.formulations.pipelines.joint import JOINT_SEARCH, JointPlanning, Prefix
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.pipelines.makespan_models import ByIntervals
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound
from stagewright.formulations.plans.plan_class import DISJOINT_SPLIT
from stagewright.solvers.backends.backend import solve
from stagewright.solvers.best_first import BestFirst
from stagewright.solvers.pipelines.list_scheduling import best_list_schedule
from stagewright.solvers.pipelines.relaxation import relaxed_load_bound
from stagewright.solvers.planners.spp import plan_spp
from stagewright.solvers.planners.steps.proposal import (
    NoPlan,
    Proposal,
    cost_of,
    named_stages,
    proposal_of,
)
from stagewright.solvers.planners.structures.uniform import UniformPlanner

STEPS = 2e7  # entries of the tables of bounds above which only the load bound is used
_REPORT_SECONDS = 0.5  # between two reports of the bound


@dataclass(frozen=True, slots=True, eq=False)
class ExactAnswer:
    """The best plan found, and a proved bound on every plan.

    ``stages`` is None if no plan is better than the given incumbent, none fits, or none was found
    in time. If ``complete``, the search ended before the time limit: no plan improves on the best
    one, or the incumbent, by more than the gap to ``bound_seconds``, which is inf if none fits.
    """

    stages: tuple[StageChoice, ...] | None
    timetable: Timetable | None
    cost_seconds: float | None
    bound_seconds: float
    complete: bool
    plans: int = 0  # scheduled
    proofs: int = 0  # CP-SAT calls


def exact(
    problem: PipelineProblem,
    limits: Limits,
    on_progress: OnProgress = silent,
    incumbent_seconds: float = math.inf,
) -> ExactAnswer:
    """The least iteration time over all partitions, mappings and schedules.

    ``incumbent_seconds`` is the time of a known plan.
    """
    if (len(problem.chain) * len(problem.cluster)) ** 2 / 4 > STEPS:
        return ExactAnswer(None, None, None, relaxed_load_bound(problem), False)
    search = _PlanSearch(problem, limits, on_progress, incumbent_seconds)
    complete = search.run()
    stages, timetable = search.best or (None, None)
    cost = search.cost if search.best else None
    return ExactAnswer(
        stages, timetable, cost, search.bound(), complete, search.plans, search.proofs
    )


def plan_exact(
    problem: PipelineProblem, limits: Limits, on_progress: OnProgress
) -> Proposal | NoPlan:
    """The exact joint plan; starts from SPP's plan and never returns a worse one."""
    began = perf_counter()
    first = plan_spp(problem, limits, on_progress)
    left = limits.left(perf_counter() - began)
    known = first if isinstance(first, Proposal) else None
    return improve_exactly(problem, known, replace(limits, seconds=left), on_progress)


def improve_exactly(
    problem: PipelineProblem, known: Proposal | None, limits: Limits, on_progress: OnProgress
) -> Proposal | NoPlan:
    """The joint optimum, or the best plan found in time; never worse than the one known."""
    seconds = cost_of(problem, known) if known else math.inf
    answer = exact(problem, limits, on_progress, seconds)
    bounds = (Bound(answer.bound_seconds, JOINT_SEARCH, "problem", DISJOINT_SPLIT),)
    ended = "complete" if answer.complete else f"stopped by {limits.end}"
    notes = (f"{answer.plans} plans scheduled, {answer.proofs} by CP-SAT; {ended}",)
    if answer.stages is not None and answer.timetable is not None:
        return proposal_of(
            problem, named_stages(problem, answer.stages), answer.timetable, bounds, notes
        )
    if known is not None:
        return replace(known, bounds=(*known.bounds, *bounds), notes=notes)
    if answer.complete:
        return NoPlan("no partition of the layers fits in memory", plans=DISJOINT_SPLIT)
    return NoPlan(f"{limits.end} came before any plan was found", False, bounds)


@dataclass(frozen=True, slots=True, eq=False)
class _CompletePlan:
    """A complete plan that is not scheduled yet."""

    stages: tuple[StageChoice, ...]
    scheduling: MakespanProblem


class _PlanSearch(BestFirst[Prefix | _CompletePlan]):
    """The search over prefixes and complete plans, whose attempts are CP-SAT's."""

    def __init__(
        self, problem: PipelineProblem, limits: Limits, on_progress: OnProgress, cost: float
    ) -> None:
        super().__init__(limits, cost)
        self.problem, self.on_progress = problem, on_progress
        self.best: tuple[tuple[StageChoice, ...], Timetable] | None = None
        self.plans = self.proofs = 0
        self._tree = JointPlanning(problem)
        self._reported = 0.0  # time of the last report of the bound
        self._seen: set[MakespanProblem] = set()
        self._done: dict[int, list[np.ndarray[tuple[int], np.dtype[np.float64]]]] = {}
        self._push(self._tree.root.bound, self._tree.root)

    def run(self) -> bool:
        """Search until the heap is empty (True) or the time limit is reached (False)."""
        while self._heap:
            if self._left() <= 0:
                return False
            attempt, bound, item = self._pop()
            self._report(bound)
            if bound >= self._ceiling():
                self._close(bound)
            elif isinstance(item, _CompletePlan):
                self._schedule(item, bound, attempt)
            elif item.layers == len(self.problem.chain):
                self._complete(item)
            elif not self._expand(item):
                self._push(bound, item)
                return False
        return True

    def _report(self, bound: float) -> None:
        """Report the bound at intervals; ``bound`` is the current item's bound."""
        elapsed = perf_counter() - self.began
        if elapsed > self._reported + _REPORT_SECONDS:
            self._reported = elapsed
            self._tell(None, bound)

    def _expand(self, prefix: Prefix) -> bool:
        """Push the children; False if the time limit is reached before the last one."""
        for child in self._tree.children(prefix, lambda: self._left() <= 0):
            if self._left() <= 0:
                return False
            self._push(child.bound, child)
        return self._left() > 0

    def _complete(self, prefix: Prefix) -> None:
        """Push a complete plan with the bounds on its schedule, unless it is dominated."""
        scheduling = makespan_problem(self.problem, prefix.stages)
        assert scheduling is not None  # the tree has no stages that do not fit
        if scheduling in self._seen or self._dominated(scheduling):
            return
        self._seen.add(scheduling)
        bound = max(prefix.bound, *(bound.seconds for bound in schedule_bounds(scheduling)))
        self._push(bound, _CompletePlan(prefix.stages, scheduling))

    def _schedule(self, candidate: _CompletePlan, bound: float, attempt: int) -> None:
        """Try list schedules, then CP-SAT with a time limit."""
        scheduling = candidate.scheduling
        _, times = best_list_schedule(scheduling)
        self.plans += attempt == 0
        self._offer(candidate, times, bound)
        open_, bound = self._prove(candidate, times, bound, attempt)
        if open_:
            self._push(bound, candidate, attempt + 1)
        else:
            self._close(bound)
            self._done.setdefault(scheduling.stages, []).append(_row(scheduling))

    def _prove(
        self, candidate: _CompletePlan, times: Timetable, bound: float, attempt: int
    ) -> tuple[bool, float]:
        """Whether the candidate may still be better than the best plan, and a bound for it."""
        if bound >= self._ceiling():
            return False, bound
        self.proofs += 1
        model = ByIntervals(candidate.scheduling, times)
        # Ticks are rounded down, so a schedule below the ceiling fits in the horizon.
        horizon = math.floor(self._ceiling() / model.unit)
        form = replace(model.apply(), horizon=horizon, hint=None)
        seconds = self._seconds(attempt)
        answer = solve(form, "cp-sat", replace(self.limits, seconds=seconds))
        if answer.status is Status.INFEASIBLE:
            return False, (horizon + 1) * model.unit
        if answer.values is not None:
            self._offer(candidate, model.invert(answer.values), bound)
        bound = max(bound, answer.bound * model.unit)
        return answer.status is not Status.OPTIMAL and bound < self._ceiling(), bound

    def _offer(self, candidate: _CompletePlan, times: Timetable, bound: float) -> None:
        """Keep a schedule if it is the best; ``bound`` is its candidate's bound."""
        seconds = candidate.scheduling.evaluate(times)
        if seconds < self.cost:
            self.cost, self.best = seconds, (candidate.stages, times)
            stages = named_stages(self.problem, candidate.stages)
            self._tell(seconds, bound, partial(proposal_of, self.problem, stages, times))

    def _tell(
        self, seconds: float | None, bound: float, made: Callable[[], Proposal] | None = None
    ) -> None:
        elapsed, bound = perf_counter() - self.began, min(bound, self.bound())
        self.on_progress(Progress(elapsed, seconds, bound, made, DISJOINT_SPLIT))

    def _dominated(self, scheduling: MakespanProblem) -> bool:
        """Whether a closed plan has no larger times and no lower in-flight limits."""
        done = self._done.get(scheduling.stages)
        return done is not None and bool((np.array(done) <= _row(scheduling)).all(axis=1).any())

    def _depth(self, item: Prefix | _CompletePlan) -> int:
        return item.layers if isinstance(item, Prefix) else len(self.problem.chain) + 1


def _row(scheduling: MakespanProblem) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The problem as one row of numbers, in which smaller numbers are better."""
    limits = -np.minimum(scheduling.in_flight, scheduling.microbatches)
    return np.concatenate([
        scheduling.forward, scheduling.backward, scheduling.send_forward,
        scheduling.send_backward, scheduling.reduce, limits,
    ])  # fmt: skip


PLANNER = UniformPlanner(
    "exact",
    "partition, mapping and order at once, for small cases",
    "joint branch and bound over CP-SAT schedules",
    plan_exact,
)
