"""A global batch in microbatches of every size: one plan for each, the best of them further."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic

from stagewright.formulations.checking.certificates import gap
from stagewright.formulations.forms.answers import (
    Limits,
    OnProgress,
    Progress,
    Status,
    StopToken,
    settled,
    silent,
)
from stagewright.formulations.patterns.parallel_pipelines import samples_of
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan_class import PlanClass
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_MICROBATCHES
from stagewright.service.engines import HERE, Engine, Pieces, results
from stagewright.service.pipelines.launching import status_for
from stagewright.solvers.pipelines.every_plan import every_plan_bounds
from stagewright.solvers.planners.parallel_pipelines import in_microbatches
from stagewright.solvers.planning import OPTIMAL_GAP, Result, SizeResult

FIRST = 0.5  # of the time limit, for a plan of every size; the rest is for the best of them
_FINALISTS = 2  # sizes that are searched further

SolveOne = Callable[[PipelineProblem, Limits, OnProgress, Result | None], Result]
"""Plan a problem, from an earlier result if there is one."""


def problems_of(
    problem: PipelineProblem, batch: int, samples: int | None
) -> tuple[PipelineProblem, ...]:
    """The problem in microbatches of every size that the model has costs for, or of one size.

    Raises
    ------
    InputError
        If there is no such size; it names the nearest batches that have one.
    """
    if samples is not None and (samples < 1 or batch % samples):
        raise InputError(
            f"a global batch of {batch} samples is no multiple of a microbatch of {samples}"
        )
    sizes = samples_of(problem.chain, batch) if samples is None else (samples,)
    found = tuple(in_microbatches(problem, batch, sizes).values())
    if not found:
        least = int(problem.chain.min_samples.max())
        raise InputError(
            f"a global batch of {batch} samples has no microbatches of at least {least} samples, "
            f"of which at most {MAX_MICROBATCHES} can be planned: use another batch"
        )
    return found


def plan_every_size(
    problems: Sequence[PipelineProblem],
    solve_one: SolveOne,
    limits: Limits,
    on_progress: OnProgress,
    engine: Engine = HERE,
) -> tuple[PipelineProblem, Result]:
    """The best result of all problems, with a bound on the plans of every size, and its problem.

    The sizes share the time for their first plans, unless ``engine`` plans them at the same time.
    """
    began = monotonic()
    best = math.inf

    def report(progress: Progress) -> None:
        """Tell of plans that are better than those of all sizes before."""
        nonlocal best
        if progress.doing:
            on_progress(progress)
        if progress.objective is not None and progress.objective < best:
            best = progress.objective
            on_progress(replace(progress, seconds=monotonic() - began, bound=0.0))

    first = _one_by_one if engine == HERE else partial(_at_once, engine)
    found = first(problems, solve_one, limits, report)
    finalists = sorted(range(len(found)), key=lambda i: _cost(found[i]))[:_FINALISTS]
    for n, i in enumerate(finalists):
        left = limits.left(monotonic() - began) / (len(finalists) - n)
        if left > 0 and found[i].plan is not None and found[i].status is not Status.OPTIMAL:
            again = solve_one(problems[i], replace(limits, seconds=left), report, found[i])
            found[i] = min(again, found[i], key=_cost)
    chosen = min(range(len(found)), key=lambda i: _cost(found[i]))
    result = _of_every_size(problems, found, chosen)
    return problems[chosen], replace(result, seconds=monotonic() - began)


def _one_by_one(
    problems: Sequence[PipelineProblem], solve_one: SolveOne, limits: Limits, report: OnProgress
) -> list[Result]:
    """Plan every size of microbatches one after the other, in a share of the time limit."""
    began = monotonic()
    made: dict[int, Result] = {}
    # Few microbatches are planned first: many may take longer than their share of the time.
    for i in sorted(range(len(problems)), key=lambda i: problems[i].microbatches):
        left = limits.left(monotonic() - began) - (1 - FIRST) * limits.seconds
        share = replace(limits, seconds=max(0.0, left) / (len(problems) - len(made)))
        made[i] = solve_one(problems[i], share, report, None)
    return [made[i] for i in range(len(problems))]


@dataclass(frozen=True, slots=True)
class _Size:
    """A problem in microbatches of one size, and how it is planned."""

    problem: PipelineProblem
    solve_one: SolveOne
    limits: Limits


def _at_once(
    engine: Engine,
    problems: Sequence[PipelineProblem],
    solve_one: SolveOne,
    limits: Limits,
    report: OnProgress,
) -> list[Result]:
    """Plan all sizes of microbatches at the same time, each in a share of the time limit."""
    share = replace(limits, seconds=FIRST * limits.seconds, stop=None)
    sizes = [_Size(one, solve_one, share) for one in problems]
    found: dict[int, Result] = {}
    for number, result in results(Pieces(sizes, _planned, _lost), engine, limits.stop):
        found[number] = result
        report(Progress(0.0, result.cost, 0.0, partial(getattr, result, "plan")))
    left_out = _unplanned(limits.status(found=False), "")
    return [found.get(number, left_out) for number in range(len(sizes))]


def _planned(size: _Size, stop: StopToken | None) -> Result:
    return size.solve_one(size.problem, replace(size.limits, stop=stop), silent, None)


def _lost(_: _Size, why: str) -> Result:
    return _unplanned(Status.NO_ANSWER, why)


def _unplanned(status: Status, why: str) -> Result:
    return Result(
        status=status, planner="batch", plan=None, cost=None, bound=None, gap=None, proved_by=None,
        seconds=0.0, reason=why,
    )  # fmt: skip


def _cost(result: Result) -> float:
    return math.inf if result.cost is None else result.cost


def _of_every_size(
    problems: Sequence[PipelineProblem], found: Sequence[Result], chosen: int
) -> Result:
    """The chosen result, with a bound on the plans of its class in every size."""
    result = replace(found[chosen], other=None)  # whose bound is about one size alone
    sizes = tuple(
        SizeResult(one.chain.microbatch_size, one.microbatches, its.status, its.cost, its.bound)
        for one, its in zip(problems, found, strict=True)
    )
    if result.plan is None:
        return _without_plan(found, sizes)
    if result.plans is None or result.cost is None:  # with shards or a tensor degree
        return replace(result, sizes=sizes)
    bounds = [_bound(one, its, result.plans) for one, its in zip(problems, found, strict=True)]
    weakest = min(range(len(bounds)), key=bounds.__getitem__)
    bound = min(bounds[weakest], result.cost)
    proved_by = result.proved_by if weakest == chosen else "the least bound of all sizes"
    share = gap(result.cost, bound)
    open_ = Status.FEASIBLE if result.status is Status.OPTIMAL else result.status
    status = settled(open_, result.cost, bound, OPTIMAL_GAP)
    every = replace(result, status=status, bound=bound, gap=share, proved_by=proved_by, sizes=sizes)
    return every if result.restriction is None else _for_framework(problems, found, every)


def _for_framework(
    problems: Sequence[PipelineProblem], found: Sequence[Result], result: Result
) -> Result:
    """The result with a bound on what the framework runs of every size, and a status by that."""
    known, cost = result.restriction, result.cost
    assert known is not None
    assert cost is not None
    bounds = [
        _bound(one, its, its.restriction.plans)
        for one, its in zip(problems, found, strict=True)
        if its.restriction is not None
    ]
    bound = min(cost, *bounds)
    proved_by = known.proved_by if known.bound == bound else "the least bound of all sizes"
    known = replace(known, bound=bound, gap=gap(cost, bound), proved_by=proved_by)
    return replace(result, status=status_for(result.status, cost, known), restriction=known)


def _without_plan(found: Sequence[Result], sizes: tuple[SizeResult, ...]) -> Result:
    """The result without a plan; infeasible if one class is proved empty for every size."""
    for one in found:
        if one.status is Status.INFEASIBLE and all(_is_empty(its, one.plans) for its in found):
            return replace(one, reason=f"in microbatches of every size, {one.reason}", sizes=sizes)
    open_ = [one for one in found if one.status is not Status.INFEASIBLE]
    return replace((open_ or found)[0], status=_ended(open_), plans=None, bound=None, sizes=sizes)


def _is_empty(result: Result, plans: PlanClass | None) -> bool:
    """Whether a result says that there is no plan of a class; None: of the planner's own kind."""
    if result.status is not Status.INFEASIBLE or plans is None or result.plans is None:
        return result.status is Status.INFEASIBLE and plans is None
    return result.plans.contains(plans)


def _ended(open_: Sequence[Result]) -> Status:
    interrupted = any(one.status is Status.INTERRUPTED for one in open_)
    return Status.INTERRUPTED if interrupted else Status.NO_ANSWER


def _bound(problem: PipelineProblem, result: Result, plans: PlanClass) -> float:
    """The best known bound on the plans of a class in microbatches of one size."""
    if result.status is Status.INFEASIBLE:
        return math.inf if result.plans is not None and result.plans.contains(plans) else 0.0
    known = [(one.plans, one.seconds) for one in every_plan_bounds(problem)]
    if result.plan is not None and result.plan.certificate is not None:
        bounds = result.plan.certificate.bounds
        known += [(one.plans, one.seconds) for one in bounds if one.scope == "problem"]
    elif result.plans is not None and result.bound is not None:
        known.append((result.plans, result.bound))
    return max((seconds for one, seconds in known if one.contains(plans)), default=0.0)
