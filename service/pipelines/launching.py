"""Plans that a framework launches as they are, and which exports any plan has."""

from dataclasses import replace
from time import monotonic

from stagewright.executor.export import export
from stagewright.executor.export.options import FormatOptions
from stagewright.executor.export.runtimes import RUNTIMES, runtime_of
from stagewright.formulations.checking.certificates import best_of, gap
from stagewright.formulations.forms.answers import Limits, OnProgress, Status, settled, silent
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.schedules.runtimes import Runtime
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.models.chain import Chain
from stagewright.solvers.planners.launchable import plans_of
from stagewright.solvers.planners.steps.proposal import Choices
from stagewright.solvers.planning import OPTIMAL_GAP, Restriction, Result
from stagewright.solvers.planning import plan as solve

SHARE = 0.6  # of the time limit, for the framework's plans; the rest for those of all kinds
_MOST_ACTIONS = 10_000  # of a plan whose exports are tried unasked, about a second each


def required_runtime(to: str, chain: Chain, choices: Choices) -> Runtime:
    """What the export ``to`` runs of a model, if it runs plans with ``choices``.

    Raises
    ------
    InputError
        If there is no such export, or it does not know the model's layers, or not the choices.
    """
    runtime = runtime_of(to, chain)
    runtime.require(choices.recompute, choices.shards)
    return runtime


def plan_for(
    to: str,
    problem: PipelineProblem,
    planner: str,
    limits: Limits,
    on_progress: OnProgress,
    choices: Choices,
    compares: bool = True,
) -> Result:
    """The best plan found that the export ``to`` writes, with what the restriction costs.

    If it ``compares``, the rest of the time is for plans of any kind; their best is the answer if
    it can be exported too. ``Result.restriction`` has the bound on all plans that the framework
    runs.

    Raises
    ------
    InputError
        If there is no such export, the framework does not know the model's layers, or the planner
        does not plan for a framework.
    """
    began, runtime = monotonic(), required_runtime(to, problem.chain, choices)
    own = replace(limits, seconds=(SHARE if compares else 1) * limits.seconds)
    found = solve(problem, planner, own, on_progress, replace(choices, runtime=runtime))
    free_cost = None
    left = limits.left(monotonic() - began)
    if compares and left > 0:
        free = solve(problem, "auto", replace(limits, seconds=left), silent, _free(choices))
        free_cost = free.cost
        if _is_better(free, found, choices) and _is_exported(free.plan, to, problem.chain):
            found = free
    found = _exported(found, to, problem.chain, choices)
    found = restricted(problem, runtime, found, free_cost)
    return replace(found, seconds=monotonic() - began)


def restricted(
    problem: PipelineProblem, runtime: Runtime, found: Result, free_cost: float | None
) -> Result:
    """The result with what the restriction to a framework costs, and a status by that."""
    known = _restriction(problem, runtime, found, free_cost)
    status = status_for(found.status, found.cost, known)
    return replace(found, status=status, restriction=known)


def _exported(found: Result, to: str, chain: Chain, choices: Choices) -> Result:
    """The result; without its plan if shards give it an order that cannot be exported."""
    if found.plan is None or _is_long(found.plan):
        return found
    refused = why_not(found.plan, to, chain)
    if refused is None:
        return found
    assert choices.shards != "none", f"a plan for {to} cannot be exported: {refused}"
    reason = f"the plan with shards has no export to {to}: {refused}"
    return Result(
        Status.NO_ANSWER, found.planner, None, None, None, None, None, found.seconds, reason
    )


def status_for(status: Status, cost: float | None, known: Restriction) -> Status:
    """The status of a plan for a framework: optimal are plans that no other for it can beat."""
    open_ = Status.FEASIBLE if status is Status.OPTIMAL else status
    return open_ if known.bound is None else settled(open_, cost, known.bound, OPTIMAL_GAP)


def _free(choices: Choices) -> Choices:
    """The choices of a plan of any kind to compare with: recomputation and offloading."""
    return Choices(recompute=choices.recompute, offload=choices.offload)


def _is_better(free: Result, found: Result, choices: Choices) -> bool:
    if choices.shards != "none" or free.cost is None:
        return False
    return found.cost is None or free.cost < found.cost


def _restriction(
    problem: PipelineProblem, runtime: Runtime, found: Result, free_cost: float | None
) -> Restriction:
    """What is proved about the framework's plans, and the best found of any kind."""
    plans = plans_of(problem, runtime)
    proof = None if found.plan is None else found.plan.certificate
    if found.cost is None or proof is None:
        return Restriction(runtime.name, plans, None, None, None, free_cost)
    known = [one for one in proof.bounds if one.scope == "problem" and one.plans.contains(plans)]
    best = best_of(known)  # one at least is about every plan
    seconds = min(best.seconds, found.cost)
    return Restriction(
        runtime.name, plans, seconds, gap(found.cost, seconds), best.proved_by, free_cost
    )


def why_not(plan: PipelinePlan | None, to: str, chain: Chain) -> str | None:
    """Why the export ``to`` refuses a plan; None if it writes it."""
    if plan is None:
        return "there is no plan"
    try:
        export(plan, to, FormatOptions(model=chain))
    except (InputError, InvalidPlan) as error:
        return str(error)
    return None


def exports(plan: PipelinePlan, chain: Chain) -> dict[str, str | None] | None:
    """The exports to other frameworks, each with why it refuses the plan or None.

    None for plans with so many actions that it would take long.
    """
    if _is_long(plan):
        return None
    return {to: why_not(plan, to, chain) for to in RUNTIMES}


def _is_exported(plan: PipelinePlan | None, to: str, chain: Chain) -> bool:
    """Whether the export ``to`` writes a plan, as far as that is found out in a short time."""
    return plan is not None and not _is_long(plan) and why_not(plan, to, chain) is None


def _is_long(plan: PipelinePlan) -> bool:
    """Whether it would take long to find out if a plan can be exported."""
    return not plan.is_periodic and len(plan.actions) > _MOST_ACTIONS
