"""The cost of a job on cloud instances with changing prices, and a plan for it."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stagewright.formulations.cloud.strategies import STRATEGIES, Home, follow, offers_seen
from stagewright.formulations.cloud.switching import (
    Offer,
    Outcome,
    Overheads,
    Plan,
    Stay,
    SwitchingProblem,
    evaluate,
    offers_of,
)
from stagewright.formulations.forms.answers import Status, StopToken, is_stopped
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.prices import useful_share
from stagewright.service.cloud.requests import (
    OPTIMAL,
    ROLLING,
    CloudAnswer,
    CloudRequest,
    StayAnswer,
    home_of,
    strategies,
)
from stagewright.solvers.cloud.switching import SwitchingResult, solve_rolling, solve_switching


def cloud(request: CloudRequest, stop: StopToken | None = None) -> CloudAnswer:
    """The costs of the strategies, and the plan of the last; missing the deadline is an answer.

    Once ``stop`` is set, the answer has the strategies so far, and its status is ``interrupted``.

    Raises
    ------
    InputError
        If there is no such strategy, a price or rate is missing, or no instance makes progress.
    """
    names, home = strategies(request.strategy), home_of(request.home)
    problem = switching_problem(request)
    found = _followed(problem, names, home, stop)
    shown = found[-1] if found else _Followed(names[0], None, None)
    result = shown.result
    return CloudAnswer(
        status=_status(shown, complete=len(found) == len(names)),
        v100_hours=problem.work_hours,
        gpus=request.gpus,
        start=_iso(problem.start_seconds),
        deadline=_iso(problem.deadline_seconds),
        instances=len(problem.offers),
        reason=_reason(shown) if found else "interrupted before the first strategy was followed",
        bound_dollars=None if result is None else result.bound,
        gap=None if result is None else result.gap,
        proved_by=None if result is None else result.proved_by,
        wall_seconds=None if result is None else result.seconds,
        strategies={one.name: one.outcome for one in found},
        plan=None if shown.plan is None else [_stay(problem, stay) for stay in shown.plan],
        problem=problem,
        stays=shown.plan,
    )


def _iso(seconds: float) -> str:
    """A time in UTC."""
    at = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


# --- The problem ---------------------------------------------------------------------------------


def switching_problem(request: CloudRequest) -> SwitchingProblem:
    """The problem of a request; errors as for :func:`cloud`."""
    overheads = Overheads(
        request.checkpoint_seconds,
        request.restore_seconds,
        request.egress_dollars,
        request.dataset_dollars,
    )
    offers = _useful(request, offers_of(request.market, request.rates, request.gpus), overheads)
    begin = max(offer.series.from_seconds for offer in offers)
    end = min(offer.series.until_seconds for offer in offers)
    if request.start_seconds is not None:
        begin = request.start_seconds
    if request.deadline_seconds is not None:
        end = begin + request.deadline_seconds
    problem = SwitchingProblem(offers, request.v100_hours, begin, end, overheads)
    for name in strategies(request.strategy):
        if name in STRATEGIES:
            offers_seen(problem, name, home_of(request.home))
    return problem


def _useful(
    request: CloudRequest, offers: tuple[Offer, ...], overheads: Overheads
) -> tuple[Offer, ...]:
    """The offers; with preemptions, at the rates that are left of them.

    A job on several instances stops when one of them is preempted. A kind of instance that no log
    shows is assumed never preempted.
    """
    seen, every = request.preemptions, request.checkpoint_every_seconds
    if seen is None or every is None:
        return offers
    found = []
    for offer in offers:
        one = offer.instance
        mean = seen.of(one.provider, one.gpu, one.gpus).mean_seconds / offer.instances
        share = useful_share(mean, every, overheads.checkpoint_seconds, overheads.restore_seconds)
        if share > 0:
            found.append(replace(offer, rate=offer.rate * share))
    if not found:
        raise InputError(
            f"preempted: with a checkpoint every {every:g} s no instance makes progress; write "
            "them more often"
        )
    return tuple(found)


# --- Answers -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Followed:
    """The result of a strategy; only the optimum has ``result``."""

    name: str
    plan: Plan | None
    outcome: Outcome | None
    result: SwitchingResult | None = None


def _followed(
    problem: SwitchingProblem, names: Sequence[str], home: Home, stop: StopToken | None
) -> list[_Followed]:
    """The costs of strategies in the order of ``names``, the optimum last; fewer once stopped."""
    answers: list[_Followed] = []
    for name in names:
        if is_stopped(stop):
            break
        if name == OPTIMAL:
            hints = [one.plan for one in answers if one.plan and one.outcome]
            result = solve_switching(problem, hints, stop)
            answers.append(_Followed(name, result.plan, result.outcome, result))
        elif name == ROLLING:
            plan = solve_rolling(problem, stop)
            if plan is None and is_stopped(stop):
                break
            outcome = None if plan is None else evaluate(problem, plan)
            answers.append(_Followed(name, plan, outcome))
        else:
            followed = follow(problem, name, home)
            kept = None if followed.outcome is None else followed.plan
            answers.append(_Followed(name, kept, followed.outcome))
    return answers


def _status(shown: _Followed, complete: bool) -> Status:
    if not complete:
        return Status.INTERRUPTED
    if shown.result is not None:
        return shown.result.status
    return Status.FEASIBLE if shown.outcome else Status.INFEASIBLE


def _reason(shown: _Followed) -> str | None:
    if shown.outcome is not None:
        return None
    if shown.result is not None:
        return shown.result.reason
    return f"{shown.name} does not end before the deadline"


def _stay(problem: SwitchingProblem, stay: Stay) -> StayAnswer:
    offer, begin, end = problem.offers[stay.offer], stay.begin_seconds, stay.end_seconds
    return StayAnswer(
        instance=offer.instance.key,
        count=round(offer.instances),
        begin=_iso(begin),
        end=_iso(end),
        dollars=offer.dollars(begin, end),
    )
