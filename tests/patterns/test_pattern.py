"""Patterns of least period: solvers, exact times for orders, and a brute force over orders."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from periodic_oracles import brute_force_period
from profiles import examples

from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.forms.models import LinearProgram
from stagewright.formulations.patterns.one_f_one_b import (
    least_period,
    pattern_load_bound,
    period_bound,
)
from stagewright.formulations.patterns.order_model import OrderModel, least_pattern, sequential
from stagewright.formulations.patterns.pattern import Pattern, PatternProblem
from stagewright.formulations.patterns.pattern_models import AtPeriod, ByRate, in_ticks
from stagewright.formulations.patterns.pattern_problems import pattern_problem
from stagewright.formulations.plans.memory import Kept
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.prices.analytic import analytic_model
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.solvers.backends.backend import solve
from stagewright.solvers.backends.cpsat import run_integers
from stagewright.solvers.patterns import pattern as patterns
from stagewright.solvers.patterns.pattern import best_pattern, list_pattern

SOLVERS = ("highs", "pulp-cbc", "cp-sat")
LIMITS = Limits(seconds=20)


def stages(devices, forward, backward, room, *, saved=None, send=0.5, m=8, working=0.0, reduce=0.0):
    """A problem with transfers of ``send`` seconds wherever the device changes."""
    n = len(devices)
    sent = tuple(send * (a != b) for a, b in pairwise(devices))
    return PatternProblem(
        tuple(map(float, forward)),
        tuple(map(float, backward)),
        sent,
        sent,
        tuple(devices),
        tuple(Kept(float(size), working) for size in saved or [1] * n),
        tuple(map(float, room)),
        (reduce,) * n,
        m,
    )


SMALL = {
    "one stage": stages([0], [1], [2], [1]),
    "two on one": stages([0, 0], [1, 2], [2, 3], [2]),
    "there and back": stages([0, 1, 0], [1, 3, 2], [2, 4, 3], [4, 2]),
    "there and back, tight": stages([0, 1, 0], [1, 3, 2], [2, 4, 3], [2, 1]),
    "three devices": stages([0, 1, 2, 0], [2, 1, 3, 1], [3, 3, 2, 2], [4, 2, 1]),
    "uneven bytes": stages(
        [0, 1, 0, 2], [2, 3, 1, 4], [3, 5, 2, 6], [10, 3, 5], saved=[3, 1, 2, 5]
    ),
    "interleaved": stages([0, 1, 0, 1], [1, 2, 2, 1], [2, 3, 4, 2], [4, 4], saved=[1, 2, 1, 1]),
    "recomputed": stages([0, 1, 0], [1, 3, 2], [3, 5, 4], [4, 5], working=2.0),
    "slow links": stages([0, 1, 0, 1], [1, 1, 2, 1], [2, 1, 2, 2], [6, 6], send=2.0),
    "few microbatches": stages(
        [0, 1, 2, 0], [2, 3, 3, 2], [3, 5, 5, 4], [9, 9, 9], m=1, reduce=4.0
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_all_solvers_find_the_same_optimum(name, monkeypatch):
    # Without list schedules, so that the solvers have something to do.
    monkeypatch.setattr(patterns, "_list_schedules", lambda search: None)
    problem, periods = SMALL[name], []
    for backend in SOLVERS:
        answer = best_pattern(problem, LIMITS, backend=backend)
        assert answer.status is Status.OPTIMAL
        assert answer.pattern is not None
        assert problem.evaluate(answer.pattern) == answer.period
        assert answer.bound <= answer.period <= answer.bound * (1 + patterns.PROVED)
        assert answer.period >= period_bound(problem) * (1 - 1e-9)
        periods.append(answer.period)
    assert periods == pytest.approx([periods[0]] * len(SOLVERS), rel=1e-9)


TINY = [
    stages([0, 1], [1, 2], [3, 2], [2, 1], m=1),
    stages([0, 1], [1, 2], [3, 2], [1, 1], m=1),
    stages([0, 0], [1, 2], [3, 2], [2], m=1),
    stages([0, 0], [1, 2], [3, 2], [3], m=1, working=1.0, reduce=2.0),
    stages([0, 1, 0], [1, 3, 2], [2, 4, 3], [2, 1], m=1),
    stages([0, 1, 0], [1, 3, 2], [2, 4, 3], [3, 1], m=1),
    stages([0, 1, 0], [1, 3, 2], [2, 4, 3], [5, 2], m=1, saved=[2, 1, 1], reduce=5.0),
    stages([0, 1, 0], [1, 3, 2], [2, 4, 3], [1, 2], m=1),
]


@pytest.mark.parametrize("problem", TINY)
def test_optimum_is_that_of_all_orders(problem):
    expected = brute_force_period(problem)
    for backend in ("auto", "highs", "cp-sat"):
        answer = best_pattern(problem, LIMITS, backend=backend)
        if answer.period is None:
            assert (answer.status, expected) == (Status.INFEASIBLE, math.inf)
        else:
            assert answer.period == pytest.approx(expected, rel=1e-6)


seconds = st.integers(1, 6)


@st.composite
def problems(draw):
    devices = draw(st.sampled_from([[0, 1, 0], [0, 0, 1], [0, 1, 2, 0], [0, 1, 0, 1], [0, 1, 2]]))
    n, count = len(devices), max(devices) + 1
    figures = [draw(st.lists(seconds, min_size=n, max_size=n)) for _ in range(3)]
    least = [sum(figures[2][s] for s in range(n) if devices[s] == d) for d in range(count)]
    more = draw(st.lists(st.integers(0, 8), min_size=count, max_size=count))
    room = [a + b for a, b in zip(least, more, strict=True)]
    send = draw(st.sampled_from([0.25, 1.0, 3.0]))
    return stages(
        devices, figures[0], figures[1], room, saved=figures[2], send=send, m=draw(seconds)
    )


@examples(15)
@given(problems(), st.sampled_from([0.37, 2.0, 1000.0]))
def test_what_must_hold_between_problems(problem, factor):
    answer = best_pattern(problem, LIMITS)
    assert answer.status is Status.OPTIMAL
    assert problem.evaluate(answer.pattern) == answer.period
    roomy = replace(problem, room_bytes=tuple(2 * room for room in problem.room_bytes))
    longer = replace(problem, microbatches=problem.microbatches + 1)
    for easier in (roomy, longer):
        assert best_pattern(easier, LIMITS).period <= answer.period * (1 + 2 * patterns.PROVED)
    scaled = replace(
        problem,
        forward=tuple(factor * one for one in problem.forward),
        backward=tuple(factor * one for one in problem.backward),
        there=tuple(factor * one for one in problem.there),
        back=tuple(factor * one for one in problem.back),
    )
    assert best_pattern(scaled, LIMITS).period == pytest.approx(factor * answer.period, rel=2e-6)


@examples(15)
@given(problems())
def test_on_devices_of_their_own_1f1b_star_is_optimal(problem):
    n = len(problem.forward)
    room = tuple(float(2 * one.saved_bytes) for one in problem.kept)
    own = stages(range(n), problem.forward, problem.backward, room,
                 saved=[one.saved_bytes for one in problem.kept], m=20)  # fmt: skip
    assert best_pattern(own, LIMITS).period == pytest.approx(least_period(own), rel=1e-9)


@examples(25)
@given(problems(), st.floats(1.0, 3.0), st.booleans())
def test_memory_by_orders_is_memory_by_times(problem, longer, backward_first):
    problem = replace(problem, microbatches=50)  # list schedules do not look at versions
    pattern = list_pattern(problem, pattern_load_bound(problem) * longer, backward_first)
    if pattern is None:
        return
    model, easy = OrderModel(problem), replace(problem, room_bytes=(1e9,) * len(problem.room_bytes))
    peaks = tuple(easy.peak_bytes(pattern, d) for d in range(len(problem.room_bytes)))
    orders = model.orders_of(pattern)
    assert OrderModel(replace(problem, room_bytes=peaks)).overfull(orders) == []
    short = tuple(peak - 0.5 for peak in peaks)
    every = list(range(len(peaks)))
    assert OrderModel(replace(problem, room_bytes=short)).overfull(orders) == every
    least = least_pattern(model, orders)
    assert least is not None
    assert broken_rule(easy, pattern) is None
    assert least.period <= pattern.period * (1 + 1e-9)
    assert model.orders_of(least).tolist() == orders.tolist()


def broken_rule(problem, pattern):
    try:
        problem.evaluate(pattern)
    except InvalidPlan as broken:
        return broken
    return None


def two_on_the_special_device(*order):
    """MadPipe figure 5: stages i and j on one device, in groups g_i = 3 and g_j = 1, T = 4.

    ``order`` names the operations of the special device in a period.
    """
    problem = stages([0, 1, 0], [1, 2, 1], [1, 2, 1], [9, 9], saved=[5, 1, 3], send=0.0, m=9)
    turn = {name: float(order.index(name)) for name in order}
    fi, fj = turn["Fi"], turn["Fj"] + 4
    bj, bi = turn["Bj"] + 4, turn["Bi"] + 8
    # The stage between them works where the two leave it time; it is not looked at here.
    forth = {"0F": fi, "0SEND_F": fi + 1, "1F": fi + 1, "1SEND_F": fi + 3, "2F": fj}
    back = {"2B": bj, "2SEND_B": bj + 1, "1B": bj + 1, "1SEND_B": bj + 3, "0B": bi}
    starts = tuple((forth | back)[str(job.operation)] for job in problem.jobs)
    return problem, Pattern(4.0, starts)


@pytest.mark.parametrize(
    ("order", "peak"),
    [
        (("Fi", "Fj", "Bj", "Bi"), 3 * 5 + 1 * 3),
        (("Fi", "Bi", "Fj", "Bj"), max(3 * 5 + 0 * 3, 2 * 5 + 1 * 3)),
    ],
)
def test_worst_and_best_order_on_the_special_device(order, peak):
    problem, pattern = two_on_the_special_device(*order)
    assert problem.peak_bytes(pattern, 0) == peak
    orders = OrderModel(problem).orders_of(pattern)
    for room, full in ((peak, []), (peak - 1, [0])):
        model = OrderModel(replace(problem, room_bytes=(float(room), 99.0)))
        assert model.overfull(orders) == full


def test_a_pattern_like_the_best_order_is_found_where_no_other_fits():
    problem = stages([0, 1, 0], [1, 2, 1], [1, 2, 1], [15, 99], saved=[5, 1, 3], send=1e-3, m=9)
    tight = best_pattern(problem, LIMITS)
    roomy = best_pattern(replace(problem, room_bytes=(18.0, 99.0)), LIMITS)
    assert roomy.period == pytest.approx(4.0)
    assert roomy.period <= tight.period < sequential(problem).period
    assert tight.status is Status.OPTIMAL


def test_infeasible_at_every_period():
    problem = stages([0, 1, 0], [1, 2, 1], [1, 2, 1], [8, 1], saved=[5, 1, 4])
    for backend in ("auto", *SOLVERS):
        answer = best_pattern(problem, LIMITS, backend=backend)
        assert (answer.status, answer.bound) == (Status.INFEASIBLE, math.inf)
        assert (answer.pattern, answer.period) == (None, None)
    fits = replace(problem, room_bytes=(9.0, 1.0))
    assert best_pattern(fits, LIMITS).status is Status.OPTIMAL


def test_what_a_period_must_leave_time_for():
    problem = stages([0, 1], [1, 1], [1, 1], [9, 9], m=4)
    assert best_pattern(problem, LIMITS).period == pytest.approx(2.0)
    reduced = replace(problem, reduce=(12.0, 0.0))
    assert best_pattern(reduced, LIMITS).period >= 3.0
    offloaded = replace(problem, least_seconds=7.0)
    for backend in SOLVERS:
        assert best_pattern(offloaded, LIMITS, backend=backend).period == pytest.approx(7.0)


@pytest.mark.parametrize("backend", SOLVERS)
def test_a_byte_too_few_is_too_few(backend):
    # Shares of the room are rounded, and a solver's tolerance is wider than a byte of these.
    devices, saved = [0, 1, 0], [5e9, 1.0, 3e9]
    problem = stages(devices, [1, 2, 1], [1, 2, 1], [15e9, 99], saved=saved, send=0.1, m=9)
    enough = best_pattern(problem, LIMITS, backend=backend)
    short = replace(problem, room_bytes=(13e9 - 1, 99.0))
    answer = best_pattern(short, LIMITS, backend=backend)
    assert short.evaluate(answer.pattern) == answer.period
    assert answer.period > enough.period
    assert answer.bound <= answer.period


def test_a_given_bound_proves_a_pattern_optimal():
    problem = SMALL["uneven bytes"]
    best = best_pattern(problem, LIMITS)
    given = best_pattern(problem, LIMITS, lower_seconds=best.period)
    assert (given.status, given.period, given.bound) == (Status.OPTIMAL, best.period, best.period)
    assert given.proved_by == "given bound"


def test_without_time_there_is_still_a_pattern_and_an_honest_bound(monkeypatch):
    monkeypatch.setattr(patterns, "_list_schedules", lambda search: None)
    problem = SMALL["uneven bytes"]
    for backend in ("highs", "cp-sat"):
        answer = best_pattern(problem, Limits(seconds=0.0), backend=backend)
        assert answer.status is Status.FEASIBLE
        assert answer.bound == period_bound(problem) < answer.period
        assert problem.evaluate(answer.pattern) == answer.period


def test_bad_input_is_one_clear_line():
    with pytest.raises(InputError, match="backend 'gurobi' solves no patterns; use auto or highs"):
        best_pattern(SMALL["one stage"], LIMITS, backend="gurobi")
    with pytest.raises(InputError, match="an operation of positive duration"):
        best_pattern(stages([0], [0], [0], [1]), LIMITS)


def test_a_period_is_feasible_from_the_optimum_on_whatever_solves_it():
    problem = SMALL["uneven bytes"]
    least = best_pattern(problem, LIMITS).period
    model = OrderModel(in_ticks(problem, 0.25))
    for period, status in ((least - 0.25, Status.INFEASIBLE), (least, Status.OPTIMAL)):
        form = AtPeriod(model, math.ceil(period / 0.25), problem.room_bytes).apply()
        assert solve(form, "highs", LIMITS).status is status
        assert run_integers(form, LIMITS, lambda step: None).status is status


def test_orders_that_contradict_each_other_have_no_period():
    problem = stages([0, 0], [1, 2], [2, 3], [9])
    model = OrderModel(problem)
    orders = np.zeros(len(model.pairs), dtype=np.int64)
    assert least_pattern(model, orders).period == pytest.approx(8.0)
    orders[model.number[1, 2]] = 2  # the inner stage keeps more than the outer one
    assert least_pattern(model, orders) is None


def test_the_models_know_their_hint():
    problem = SMALL["uneven bytes"]
    first = sequential(problem)
    model = ByRate(OrderModel(problem), period_bound(problem), first.period, problem.room_bytes)
    form, values = model.apply(), model.hint(first)
    rows = form.matrix @ values
    assert (rows >= form.row_lower - 1e-6).all()
    assert (rows <= form.row_upper + 1e-6).all()
    assert (values >= form.lower - 1e-9).all()
    assert (values <= form.upper + 1e-9).all()
    assert model.period(form.cost @ values) == pytest.approx(first.period)


def test_cp_sat_takes_programs_of_integers():
    form = LinearProgram(
        cost=np.array([-5.0, -4.0, -3.0]),
        matrix=AtPeriod(OrderModel(SMALL["one stage"]), 3, (1.0,)).apply().matrix[:0, :3],
        row_lower=np.zeros(0),
        row_upper=np.zeros(0),
        lower=np.zeros(3),
        upper=np.array([2.0, 0.0, 1.0]),
        integral=np.ones(3, dtype=bool),
        hint=np.zeros(3),
    )
    answer = run_integers(form, LIMITS, lambda step: None)
    assert (answer.status, answer.objective, answer.bound) == (Status.OPTIMAL, -13, -13)
    assert answer.values.tolist() == [2, 0, 1]
    empty = run_integers(replace(form, lower=np.full(3, 1.0)), LIMITS, lambda step: None)
    assert (empty.status, empty.bound) == (Status.INFEASIBLE, math.inf)
    with pytest.raises(InputError, match="only if all of it is integers"):
        run_integers(replace(form, cost=np.full(3, 0.5)), LIMITS, lambda step: None)
    with pytest.raises(InputError, match="only if all of it is integers"):
        run_integers(replace(form, integral=np.zeros(3, dtype=bool)), LIMITS, lambda step: None)
    with pytest.raises(InputError, match="every column has two limits"):
        run_integers(replace(form, upper=np.full(3, np.inf)), LIMITS, lambda step: None)


def test_a_network_on_few_devices():
    """ResNet-50, 1000 x 1000 pixels (MadPipe section 5), first and last stage on one device."""
    chain = analytic_model("resnet50", 8, "v100", image=1000)
    cluster = uniform_servers(1, 4, Link(12e9), memory_bytes=16e9)
    problem = PipelineProblem(chain, cluster, 16)
    cuts = np.linspace(0, len(chain), 6).astype(int)
    devices = ("s0g0", "s0g1", "s0g2", "s0g3", "s0g0")
    chosen = [
        Stage((a, b), (v,)) for (a, b), v in zip(pairwise(cuts.tolist()), devices, strict=True)
    ]
    asked = pattern_problem(problem, chosen)
    answer = best_pattern(asked, LIMITS)
    assert answer.status is Status.OPTIMAL
    assert asked.evaluate(answer.pattern) == answer.period >= period_bound(asked) * (1 - 1e-9)
