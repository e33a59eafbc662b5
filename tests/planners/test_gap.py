"""Planning ends at the requested gap, with a checked plan and a certificate that shows the gap."""

import threading
from dataclasses import replace
from typing import Any

import pytest
from plans import long_problem, small_problem

from stagewright.cli.pipelines.planning import _print_result
from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, Progress, Status, silent
from stagewright.formulations.plans.plan_class import DISJOINT_SPLIT
from stagewright.front.pipelines import plan as plan_from_python
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import parse_share
from stagewright.service.pipelines.planning import answer_of
from stagewright.service.pipelines.requests import PlanRequest
from stagewright.solvers.planners import auto
from stagewright.solvers.planners.steps.planner import SearchPlanner
from stagewright.solvers.planners.steps.proposal import Choices, NoPlan, Proposal, cost_of
from stagewright.solvers.planning import PLANNERS, plan

# Seconds that no test here takes, unless the gap does not end the search. Some planners give their
# first steps a share of it.
LONG = 20.0


@pytest.mark.parametrize(
    ("planner", "gap"), [("auto", 0.2), ("exact", 0.2), ("general", 0.4),
                         ("madpipe", 0.5), ("1f1b-star", 0.5)],
)  # fmt: skip
def test_a_search_ends_at_the_gap(planner, gap):
    problem = long_problem()
    steps: list[Progress] = []
    seconds = 6 * LONG if planner == "auto" else LONG  # it may be late on a busy machine
    result = plan(problem, planner, Limits(seconds, gap=gap), steps.append)
    assert result.status is Status.FEASIBLE
    assert check(problem, result.plan) == ()
    assert result.gap == result.plan.certificate.gap <= gap
    assert f"at most {gap:.2%} was asked for" in result.ended
    assert result.ended in result.reason
    last = steps[-1]
    assert last.objective is not None
    assert 1 - last.bound / last.objective <= gap


def test_the_gap_ends_the_portfolio_after_the_step_that_reaches_it():
    few = plan(long_problem(), limits=Limits(LONG, gap=0.9))
    more = plan(long_problem(), limits=Limits(LONG, gap=0.9 * few.gap))
    assert len(few.attempts) < len(more.attempts)
    assert few.cost >= more.cost


def test_a_bound_that_the_search_proves_reaches_the_gap():
    """Only the joint search's bound, which grows while it works, is good enough here."""
    problem = small_problem(layers=4, devices=3, microbatches=4)
    loose = plan(problem, "spp", Limits(LONG))
    optimal = plan(problem, "exact", Limits(LONG))
    assert optimal.status is Status.OPTIMAL
    assert loose.gap > 0.01
    near = plan(problem, "exact", Limits(LONG, gap=loose.gap / 2))
    assert near.gap <= loose.gap / 2
    assert near.status is Status.OPTIMAL or near.ended
    assert near.cost >= optimal.cost
    assert near.bound <= optimal.cost * (1 + 1e-9)
    assert DISJOINT_SPLIT.contains(near.plans) or near.plans.contains(DISJOINT_SPLIT)


@pytest.mark.parametrize("asked", [0.0, 0.01])
def test_a_plan_of_a_class_with_a_nearer_bound_is_told_of_or_is_the_answer(
    asked, monkeypatch, capsys
):
    problem = small_problem(layers=3, devices=3, microbatches=2)
    proved = PLANNERS["exact"].propose(problem, Choices(), Limits(LONG), silent)
    faster_found = threading.Event()

    def watch(step: Progress) -> None:
        if step.objective is not None and step.objective < (1 - 1e-6) * cost_of(problem, proved):
            faster_found.set()

    fast = PLANNERS["general"].propose(problem, Choices(), Limits(LONG, stop=faster_found), watch)

    def both(*given: Any) -> Proposal | NoPlan:
        portfolio = auto._Portfolio(*given[:3], choices=Choices())
        for made in (proved, fast, proved):
            portfolio.consider("made", lambda _, made=made: made, 1.0)
        return portfolio.answer()

    monkeypatch.setitem(PLANNERS, "auto", SearchPlanner("auto", "", "", both))
    assert plan(problem, limits=Limits(LONG)).other is None  # it is too slow
    monkeypatch.setattr(auto, "_SLOWER", 1.0)
    result = plan(problem, limits=Limits(LONG, gap=asked))
    first, second = result.plan, result.other
    assert check(problem, first) == check(problem, second) == ()
    assert (result.gap <= asked) == (asked > 0)
    nearer, faster = (first, second) if asked else (second, first)
    assert nearer.certificate.gap <= 1e-9 < faster.certificate.gap
    assert faster.certificate.cost_seconds == cost_of(problem, fast)
    assert nearer.certificate.cost_seconds > faster.certificate.cost_seconds
    told = answer_of(problem, result).json_object()["other"]
    assert (told["gap"], told["plans"]["sharing"]) == (
        second.certificate.gap, second.certificate.plans.sharing
    )  # fmt: skip
    _print_result(problem.chain, result)
    assert f"% {'faster' if asked else 'slower'}: gap" in capsys.readouterr().out


def test_without_a_gap_nothing_changes():
    problem = small_problem(layers=4, devices=2, microbatches=2)
    result = plan(problem, "spp", Limits(LONG))
    again = plan(problem, "spp", Limits(LONG, gap=0.0), [].append)
    assert (again.cost, again.ended) == (result.cost, "")


def test_an_optimum_stays_optimal_and_an_interrupt_stays_one():
    problem = small_problem(layers=3, devices=2)
    assert plan(problem, "exact", Limits(LONG, gap=1e-6)).status is Status.OPTIMAL
    token = threading.Event()
    token.set()
    stopped = plan(long_problem(), "exact", Limits(LONG, stop=token, gap=0.01))
    assert stopped.status is Status.INTERRUPTED
    assert stopped.ended == ""


@pytest.mark.parametrize(
    ("text", "share"), [("1%", 0.01), ("0.01", 0.01), (0.01, 0.01), (" 2.5 % ", 0.025), (0, 0.0),
                        ("100%", 1.0)],
)  # fmt: skip
def test_a_share_is_a_percentage_or_a_number(text, share):
    assert parse_share(text, "gap") == pytest.approx(share)


@pytest.mark.parametrize("text", ["-1%", "nan", "200%", "", "%", "one", "1%%", 1.5, -0.1, "inf"])
def test_nonsense_is_refused_in_one_line(text):
    problem = small_problem()
    with pytest.raises(InputError, match="gap must be from 0 to 100%") as caught:
        plan_from_python(problem.chain, problem.cluster, gap=text)
    assert "\n" not in str(caught.value)


def test_a_request_has_the_gap_as_a_number():
    problem = small_problem()
    given = {"chain": problem.chain, "cluster": problem.cluster}
    assert PlanRequest.of(**given, gap=0.01).limits() == replace(Limits(10.0), gap=0.01)
    for wrong in ("1%", True, -1.0, 2.0):
        with pytest.raises(InputError):
            PlanRequest.of(**given, gap=wrong)
