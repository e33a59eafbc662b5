"""The cheapest plan on cloud instances: known optima, brute force, and the strategies below it."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markets import START, problem, series
from profiles import examples
from tokens import After

from benchmarks.cloud import shares_of
from stagewright.formulations.cloud.strategies import STRATEGIES, Home, follow, stick
from stagewright.formulations.cloud.switching import (
    Offer,
    Overheads,
    Plan,
    Stay,
    SwitchingProblem,
    evaluate,
    offers_of,
)
from stagewright.formulations.forms.answers import Status
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.workloads.prices import HOUR, Market
from stagewright.solvers.cloud.switching import solve_rolling, solve_switching

few = examples(20)
HOURLY = Overheads(checkpoint_seconds=HOUR, restore_seconds=HOUR)


def at(hours: float) -> float:
    return START + hours * HOUR


def stays(*rows: tuple[int, float, float]) -> Plan:
    return tuple(Stay(offer, at(begin), at(end)) for offer, begin, end in rows)


# --- The evaluation ------------------------------------------------------------------------------


def test_a_plan_is_paid_by_its_prices_and_works_outside_its_overheads():
    asked = problem(
        [(1.0, [1, 2, 4, 8, 16, 32]), (3.0, [5, 6, 7, 8, 9, 10])],
        work=4,
        overheads=Overheads(0.5 * HOUR, 0.25 * HOUR, egress_dollars=0.3, dataset_dollars=7),
        places=[("aws", "us-east-1"), ("azure", "us-east")],
    )
    found = evaluate(asked, stays((0, 0.5, 2.25), (1, 3, 4.5)))
    # 0.5 h at 1, 1 h at 2, 0.25 h at 4; then 1 h at 8, 0.5 h at 9.
    assert found.compute_dollars == pytest.approx(0.5 + 2 + 1 + 8 + 4.5)
    assert found.moving_dollars == pytest.approx(7.3)
    # 1.75 h less restore and checkpoint; 1.5 h less a restore.
    assert found.work_hours == pytest.approx(1.0 + 3 * 1.25)
    assert (found.switches, found.seconds) == (1, 4.5 * HOUR)


@given(st.integers(1, 20), st.integers(1, 16))
def test_instances_are_rented_whole_until_there_are_gpus_enough(gpus: int, size: int):
    market = Market((series([8.0], name="big", gpus=size),))
    (offer,) = offers_of(market, {"v100": 1.0}, gpus)
    asked = SwitchingProblem((offer,), 0.5, START, at(1))
    dollars = rented = 0.0
    while rented < gpus:
        rented += size
        dollars += 8.0
    assert offer.price(START) == pytest.approx(dollars)
    assert evaluate(asked, stays((0, 0, 0.5))).dollars == pytest.approx(0.5 * dollars)


def test_a_share_of_an_instance_is_paid_by_gpu():
    (offer,) = shares_of(Market((series([8.0], name="big", gpus=8),)), {"v100": 1.0})
    asked = SwitchingProblem((offer,), 0.5, START, at(1))
    assert evaluate(asked, stays((0, 0, 0.5))).dollars == pytest.approx(0.5)


def test_a_job_of_no_gpus_and_an_offer_of_no_instances_are_refused():
    with pytest.raises(InputError, match="gpus must be at least 1, got 0"):
        offers_of(_market(), {"v100": 1.0}, 0)
    with pytest.raises(InputError, match="more than zero of 'aws/us-east-1/a', got 0"):
        Offer(series([1.0]), 1.0, 0.0)


@pytest.mark.parametrize(
    ("plan", "word"),
    [
        ((), "no stays"),
        (stays((2, 0, 3)), "offer 2 of 2"),
        (stays((0, -1, 3)), "is not between"),
        (stays((0, 0, 7)), "is not between"),
        (stays((0, 0, 3), (1, 2, 4)), "is not between"),
        (stays((0, 2, 1)), "is not between"),
        (stays((0, 0, 1.5), (1, 1.5, 6)), "overheads"),
        (stays((0, 0, 0.5)), "overheads"),
        (stays((0, 0, 2)), "1 of 2 hours of work"),
    ],
)
def test_broken_plans_are_rejected(plan: Plan, word: str):
    asked = problem([(1.0, [1] * 6), (1.0, [2] * 6)], 2, HOURLY)
    assert evaluate(asked, stays((0, 0, 3))).dollars == pytest.approx(3)
    with pytest.raises(InvalidPlan, match=word):
        evaluate(asked, plan)


def test_a_running_job_begins_where_it_is():
    asked = replace(problem([(1.0, [1] * 6), (1.0, [2] * 6)], 2, HOURLY), running=0)
    assert evaluate(asked, stays((0, 0, 2))).dollars == pytest.approx(2)  # nothing to restore
    with pytest.raises(InvalidPlan, match="where the job runs"):
        evaluate(asked, stays((1, 0, 3)))


# --- Known optima --------------------------------------------------------------------------------


def test_without_overheads_the_cheapest_hours_are_taken():
    asked = problem([(1.0, [5, 1, 9, 2, 9, 3]), (2.0, [8, 8, 8, 8, 3, 8])], work=4.5)
    found = solve_switching(asked)
    # Per work: 1.5 in hour 4 (two hours of work), then 1, 2 and half of 3.
    assert found.outcome is not None
    assert found.outcome.dollars == pytest.approx(3 + 1 + 2 + 0.5 * 3)
    assert (found.status, found.gap) == (Status.OPTIMAL, pytest.approx(0, abs=1e-9))


def test_a_deadline_mixes_a_slow_and_a_fast_gpu():
    # 6.3.1: part of the time on a cheap K80 and the rest on a V100. x + y = 10, x + 4 y = 16.
    asked = problem([(1.0, [1] * 10), (4.0, [8] * 10)], work=16)
    for found in (solve_switching(asked).outcome, evaluate(asked, solve_rolling(asked) or ())):
        assert found is not None
        assert found.dollars == pytest.approx(8 * 1 + 2 * 8)
        assert found.seconds <= 10 * HOUR


def test_a_move_is_made_only_where_it_pays():
    prices = [(1.0, [2, 2, 2, 2, 2, 2, 2, 2]), (1.0, [9, 9, 9, 1, 1, 1, 1, 1])]
    asked = problem(prices, work=6, overheads=Overheads(0.5 * HOUR, 0.5 * HOUR))
    dear = replace(asked, overheads=Overheads(0.5 * HOUR, 0.5 * HOUR, egress_dollars=5))
    moved, stayed = solve_switching(asked).plan, solve_switching(dear).plan
    assert moved is not None
    assert len(moved) == 2
    assert stayed is not None
    assert len(stayed) == 2  # in one region nothing leaves it
    apart = problem(prices, 6, dear.overheads, places=[("aws", "us-east-1"), ("aws", "us-west-2")])
    alone = solve_switching(apart).plan
    assert alone is not None
    assert len(alone) == 1


def test_the_dataset_is_copied_once_to_a_provider():
    prices = [(1.0, [1, 9, 1, 9, 1, 9]), (1.0, [9, 1, 9, 1, 9, 1])]
    places = [("aws", "us-east-1"), ("azure", "us-east")]
    cheap = problem(prices, 6, Overheads(dataset_dollars=1), places=places)
    found = solve_switching(cheap)
    assert found.outcome is not None
    assert found.outcome.dollars == pytest.approx(6 + 1)
    assert found.outcome.switches == 5
    dear = problem(prices, 3, Overheads(dataset_dollars=100), places=places)
    assert solve_switching(dear).outcome.dollars == pytest.approx(3)  # it waits at one of them


def test_too_much_work_is_infeasible_with_a_reason():
    found = solve_switching(problem([(1.0, [1] * 4), (2.0, [1] * 4)], work=8.5))
    assert (found.status, found.plan, found.gap) == (Status.INFEASIBLE, None, None)
    assert found.reason is not None
    assert "8 of 8.5 hours of work" in found.reason
    late = problem([(1.0, [1] * 4), (2.0, [1] * 4)], 8.0, Overheads(restore_seconds=60))
    assert solve_switching(late).status is Status.INFEASIBLE
    assert solve_rolling(late) is None
    never = solve_switching(problem([(1.0, [1])], 0.5, Overheads(restore_seconds=2 * HOUR)))
    assert never.reason is not None
    assert "at most 0 of 0.5 hours" in never.reason


def test_no_wait_is_planned_that_saves_nothing():
    found = solve_switching(problem([(1.0, [9, 2, 2, 2, 2, 9, 2])], work=4))
    assert found.plan == stays((0, 1, 5))
    paused = solve_switching(problem([(1.0, [2, 2, 9, 2, 9])], 3)).plan
    assert paused == stays((0, 0, 2), (0, 3, 4))


def test_what_costs_nothing_is_optimal():
    found = solve_switching(problem([(1.0, [0, 0, 0]), (2.0, [1, 1, 1])], 2, HOURLY))
    assert found.outcome is not None
    assert (found.status, found.outcome.dollars, found.gap) == (Status.OPTIMAL, 0, 0)


def test_constant_prices_leave_no_gap_for_the_restore():
    found = solve_switching(problem([(1.0, [2] * 50)], 5, HOURLY))
    assert found.status is Status.OPTIMAL
    assert found.outcome is not None
    assert found.outcome.dollars == pytest.approx(12)


# --- Properties ----------------------------------------------------------------------------------

PRICE = st.sampled_from([1.0, 2.0, 3.0, 5.0, 8.0])
OVERHEADS = st.builds(
    Overheads,
    st.sampled_from([0.0, HOUR / 2]),
    st.sampled_from([0.0, HOUR / 2]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([0.0, 1.0]),
)
PLACES = [("aws", "us-east-1"), ("aws", "us-west-2"), ("azure", "us-east")]


@st.composite
def problems(draw: st.DrawFn, hours: int = 4, offers: int = 2) -> SwitchingProblem:
    rows = [
        (draw(st.sampled_from([1.0, 2.0])), draw(st.lists(PRICE, min_size=hours, max_size=hours)))
        for _ in range(offers)
    ]
    places = [draw(st.sampled_from(PLACES)) for _ in rows]
    work = draw(st.sampled_from([0.5, 1.0, 1.75, 2.5]))
    made = problem(rows, work, draw(OVERHEADS), places=places)
    rented = tuple(
        replace(one, instances=draw(st.sampled_from([0.25, 1, 3]))) for one in made.offers
    )
    return replace(made, offers=rented)


def brute_force(asked: SwitchingProblem, slots: int) -> float:
    """The cheapest of all plans that change only every half hour, with the end cut to the work."""
    best = float("inf")
    for row in itertools.product((None, *range(len(asked.offers))), repeat=slots):
        runs = [(key, len(list(group))) for key, group in itertools.groupby(row)]
        plan, hour = [], 0.0
        for offer, length in runs:
            if offer is not None:
                plan.append(Stay(offer, at(hour), at(hour + length / 2)))
            hour += length / 2
        best = min(best, _dollars_cut_to_the_work(asked, tuple(plan)))
    return best


def _dollars_cut_to_the_work(asked: SwitchingProblem, plan: Plan) -> float:
    try:
        done = evaluate(asked, plan)
        excess = (done.work_hours - asked.work_hours) / asked.offers[plan[-1].offer].rate
        last = replace(plan[-1], end_seconds=plan[-1].end_seconds - excess * HOUR)
        return evaluate(asked, (*plan[:-1], last)).dollars
    except InvalidPlan:
        return float("inf")


@examples(15)
@given(problems(hours=3))
def test_the_bound_holds_for_every_plan_and_the_cost_is_near_it(asked: SwitchingProblem):
    found, brute = solve_switching(asked), brute_force(asked, 6)
    assert found.bound <= brute * (1 + 1e-9)
    if found.outcome is None:
        assert brute == float("inf")
        return
    assert found.bound <= found.outcome.dollars
    if not any(getattr(asked.overheads, name) for name in asked.overheads.__slots__):
        assert found.outcome.dollars <= brute * (1 + 1e-9)
        assert found.status is Status.OPTIMAL


@few
@given(problems(hours=6, offers=3), st.integers(0, 6))
def test_a_stopped_search_has_a_plan_and_a_weaker_bound(asked: SwitchingProblem, times: int):
    found, whole = solve_switching(asked, stop=After(times)), solve_switching(asked)
    if whole.plan is None:
        assert (found.status, found.plan) == (Status.INFEASIBLE, None)
        return
    assert found.bound <= whole.bound * (1 + 1e-9)
    assert evaluate(asked, found.plan) == found.outcome
    assert found.status in (Status.INTERRUPTED, Status.OPTIMAL, whole.status)
    assert solve_rolling(asked, After(0)) is None


@few
@given(problems(hours=6, offers=3))
def test_no_strategy_is_cheaper_than_the_optimum(asked: SwitchingProblem):
    plans = [stick(asked, i) for i in range(len(asked.offers))]
    followed = [follow(asked, name, Home()) for name in ("multi-cloud", "dynamic")]
    plans += [one.plan for one in followed]
    rolling = solve_rolling(asked)
    plans += [rolling] if rolling is not None else []
    in_time = [plan for plan in plans if plan[-1].end_seconds <= asked.deadline_seconds]
    found = solve_switching(asked, in_time)
    for plan in in_time:
        cost = evaluate(asked, plan).dollars
        assert found.bound <= cost * (1 + 1e-9)
        assert found.outcome is not None
        assert found.outcome.dollars <= cost * (1 + 1e-9)


@few
@given(problems(hours=5, offers=3))
def test_twice_the_prices_cost_twice_and_more_offers_never_hurt(asked: SwitchingProblem):
    doubled = tuple(
        replace(
            one,
            series=replace(
                one.series, dollars_per_hour=tuple(2 * p for p in one.series.dollars_per_hour)
            ),
        )
        for one in asked.offers
    )
    fees = replace(
        asked.overheads,
        egress_dollars=2 * asked.overheads.egress_dollars,
        dataset_dollars=2 * asked.overheads.dataset_dollars,
    )
    found = solve_switching(asked)
    twice = solve_switching(replace(asked, offers=doubled, overheads=fees))
    fewer = solve_switching(replace(asked, offers=asked.offers[:2]))
    assert twice.bound == pytest.approx(2 * found.bound)
    assert found.bound <= fewer.bound * (1 + 1e-9)


@few
@given(problems(hours=5, offers=3), st.integers(0, 2))
def test_a_running_job_costs_no_more_than_one_that_has_to_begin_there(asked, running):
    begun = replace(asked, running=running)
    plan = stick(asked, running)
    if plan[-1].end_seconds <= asked.deadline_seconds:
        restore = asked.overheads.restore_seconds
        going = (replace(plan[0], end_seconds=plan[0].end_seconds - restore),)
        assert solve_switching(begun).bound <= evaluate(begun, going).dollars * (1 + 1e-9)
        assert evaluate(begun, going).dollars <= evaluate(asked, plan).dollars


# --- The strategies ------------------------------------------------------------------------------


def _market() -> Market:
    return Market(
        (
            series([3.0] * 40, name="p3.2xlarge"),
            series([8.0] * 40, name="p3.8xlarge", gpus=4),
            series([0.9] * 40, name="p2.xlarge", gpu="k80"),
            series([0.9] * 4 + [0.2] * 36, name="NC6", gpu="k80", place=("azure", "us-east")),
        )
    )


def test_each_strategy_picks_what_it_sees_and_dynamic_follows_the_prices():
    offers = shares_of(_market(), {"v100": 1.0, "k80": 0.4})
    asked = SwitchingProblem(offers, 6.0, START, at(40))
    found = {name: follow(asked, name, Home()).outcome for name in STRATEGIES}
    dollars = {name: one.dollars for name, one in found.items() if one is not None}
    assert dollars["1xv100"] == pytest.approx(18)
    assert dollars["gpu-type"] == pytest.approx(0.9 * 15)  # 2.25 for work of an hour, not 3
    assert dollars["multi-gpu"] == pytest.approx(12)  # 2 for work of an hour
    assert dollars["multi-cloud"] == pytest.approx(12)
    # Four hours on the quarter of the p3.8xlarge, then five on the NC6.
    assert dollars["dynamic"] == pytest.approx(8 + 5 * 0.2)
    assert found["dynamic"] is not None
    assert found["dynamic"].switches == 1
    assert follow(asked, "dynamic", Home()).plan == stays((1, 0, 4), (3, 4, 9))


def test_a_large_instance_pays_only_for_a_job_that_fills_it():
    rates = {"v100": 1.0, "k80": 0.4}
    dollars = {}
    for gpus in (1, 4, 5):
        asked = SwitchingProblem(offers_of(_market(), rates, gpus), 6.0, START, at(40))
        outcomes = {name: follow(asked, name, Home()).outcome for name in STRATEGIES}
        dollars[gpus] = {name: one.dollars for name, one in outcomes.items() if one is not None}
    # One GPU: a p3.8xlarge costs 8 an hour, the work of an hour on a k80 2.25.
    assert dollars[1]["multi-gpu"] == dollars[1]["gpu-type"] == pytest.approx(13.5)
    # Four GPUs fill it; five need two of them, and are cheaper on five p2.xlarge.
    assert dollars[4]["multi-gpu"] == pytest.approx(6 * 8)
    assert dollars[5]["multi-gpu"] == dollars[5]["gpu-type"] == pytest.approx(5 * 13.5)


def test_dynamic_keeps_its_deadline_and_the_others_tell_that_they_miss_it():
    offers = offers_of(_market(), {"v100": 1.0, "k80": 0.4})
    asked = SwitchingProblem(offers, 6.0, START, at(7))
    assert follow(asked, "gpu-type", Home()).outcome is None
    kept = follow(asked, "dynamic", Home()).outcome
    assert kept is not None
    assert kept.switches == 0


@pytest.mark.parametrize(
    ("name", "home", "word"),
    [("cheap", Home(), "unknown strategy"), ("1xv100", Home("aws", "mars"), "no instance in")],
)
def test_strategies_that_cannot_be_followed_are_refused(name: str, home: Home, word: str):
    asked = problem([(1.0, [1] * 4)], 1)
    with pytest.raises(InputError, match=word):
        follow(asked, name, home)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"offers": ()}, "no instances"),
        ({"work_hours": 0.0}, "work must be more than zero"),
        ({"deadline_seconds": START}, "not after the start"),
        ({"deadline_seconds": at(5)}, "i0.* are known from"),
    ],
)
def test_problems_that_make_no_sense_are_refused(change: dict[str, object], word: str):
    with pytest.raises(InputError, match=word):
        replace(problem([(1.0, [1] * 4)], 1), **change)


def test_rates_of_unknown_gpus_are_refused():
    with pytest.raises(InputError, match=r"'tpu'; known: k80, v100"):
        offers_of(_market(), {"tpu": 1.0})
    with pytest.raises(InputError, match="no instance has a rate above zero"):
        offers_of(_market(), {"v100": 0.0})
    with pytest.raises(InputError, match="finite and not negative"):
        Overheads(checkpoint_seconds=-1)
