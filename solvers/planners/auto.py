"""The portfolio: every planner within the limit, then CP-SAT on the best plan's schedule."""

from collections.abc import Callable
from dataclasses import replace
from time import monotonic

from stagewright.formulations.assembly import assemble
from stagewright.formulations.bppm import StageChoice
from stagewright.formulations.forms import Limits, OnProgress, Status
from stagewright.formulations.pipeline import PipelineProblem
from stagewright.formulations.plan import Bound
from stagewright.formulations.spp import makespan_problem
from stagewright.solvers.planners.dp import plan_dp
from stagewright.solvers.planners.exact_plan import plan_exact
from stagewright.solvers.planners.gpipe import plan_gpipe
from stagewright.solvers.planners.hetpipe import plan_hetpipe
from stagewright.solvers.planners.pipedream import plan_pipedream
from stagewright.solvers.planners.proposal import Attempt, NoPlan, Proposal
from stagewright.solvers.planners.spp import plan_spp
from stagewright.solvers.relaxation import fill_and_drain_bound
from stagewright.solvers.scheduling import solve_schedule

Planner = Callable[[PipelineProblem, Limits, OnProgress], Proposal | NoPlan]

HEURISTICS: tuple[tuple[str, Planner], ...] = (
    ("spp", plan_spp),
    ("dp", plan_dp),
    ("gpipe", plan_gpipe),
    ("pipedream", plan_pipedream),
    ("hetpipe", plan_hetpipe),
)
# Devices times layers up to which the joint reference has a chance within a short limit.
SMALL = 60
GOOD_ENOUGH = 1e-6  # relative gap


def plan_auto(
    problem: PipelineProblem, limits: Limits, on_progress: OnProgress
) -> Proposal | NoPlan:
    """The best checked plan of the portfolio within ``limits.seconds``.

    SPP comes first and may use half of the time, the baselines take little; what is left goes to
    the schedule of the best plan and, for small problems, to the joint reference.
    """
    began = monotonic()
    best: Proposal | None = None
    cost = float("inf")
    tried: list[Attempt] = []
    refusals: list[NoPlan] = []

    def consider(name: str, run: Planner, seconds: float) -> None:
        nonlocal best, cost
        since = monotonic()
        answer = run(problem, replace(limits, seconds=seconds), on_progress)
        spent = monotonic() - since
        if isinstance(answer, NoPlan):
            refusals.append(answer)
            status = Status.INFEASIBLE if answer.proved else Status.NO_ANSWER
            tried.append(Attempt(name, status, None, spent, answer.reason))
            return
        reached = _cost(problem, name, answer)
        notes = "; ".join(answer.notes)
        tried.append(Attempt(name, Status.FEASIBLE, reached, spent, notes))
        # A bound on every plan holds whoever proved it; one on a schedule only for its stages.
        shared = [bound for bound in answer.bounds if bound.scope == "problem"]
        if best is None or reached <= cost:
            shared = [bound for bound in (best.bounds if best else ()) if bound.scope == "problem"]
            best, cost = answer, reached
        best = replace(best, bounds=(*best.bounds, *shared))

    def left() -> float:
        return limits.seconds - (monotonic() - began)

    for name, run in HEURISTICS:
        if left() > 0 or best is None:
            consider(name, run, limits.seconds / 2)
    if best is not None and fill_and_drain_bound(problem, cost) < cost * (1 - GOOD_ENOUGH):
        if left() > 0 and _is_split(best):
            improved = best
            consider("cp-sat schedule", _improve(improved, on_progress), left() / 2)
        if left() > 0 and len(problem.cluster) * len(problem.chain) <= SMALL:
            consider("exact", plan_exact, left())
    if best is None:
        exact = plan_exact(problem, replace(limits, seconds=max(left(), 1.0)), on_progress)
        if isinstance(exact, NoPlan):
            reasons = "; ".join(dict.fromkeys(refusal.reason for refusal in refusals))
            return replace(exact, reason=f"{exact.reason} ({reasons})", attempts=tuple(tried))
        best = exact
    return replace(best, attempts=tuple(tried))


def _cost(problem: PipelineProblem, name: str, proposal: Proposal) -> float:
    predicted = assemble(problem, name, proposal.stages, proposal.times).predicted
    assert predicted is not None
    return predicted.iteration_seconds


def _is_split(proposal: Proposal) -> bool:
    return all(stage.replication == "split" for stage in proposal.stages)


def _improve(proposal: Proposal, on_progress: OnProgress) -> Planner:
    """CP-SAT on the schedule of the proposal's stages, started from its times."""

    def run(problem: PipelineProblem, limits: Limits, _: OnProgress) -> Proposal | NoPlan:
        index = problem.cluster.index
        choices = [
            StageChoice(*stage.layers, tuple(index[name] for name in stage.devices))
            for stage in proposal.stages
        ]
        scheduling = makespan_problem(problem, choices)
        assert scheduling is not None
        solved = solve_schedule(scheduling, "optimal", limits, on_progress, proposal.times)
        assert solved.timetable is not None
        bound = Bound(solved.bound, solved.proved_by, "schedule")
        return replace(proposal, times=solved.timetable, bounds=(*proposal.bounds, bound))

    return run
