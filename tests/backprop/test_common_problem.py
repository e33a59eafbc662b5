"""The common problem and its tabu search: figures, an independent search, relations, errors."""

from dataclasses import replace

import numpy as np
import pytest
from backprop_oracle import shortest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from stagewright.formulations.backprop.of_stages import in_turns, renumbered, window_bounds
from stagewright.formulations.backprop.orders import conventional, fast_forward, reverse_first_k
from stagewright.formulations.backprop.problem import WindowTimes
from stagewright.formulations.backprop.training import Layers, data_parallel, training
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.solvers.backprop.exact import best_list_schedule, solve
from stagewright.solvers.backprop.list_scheduling import list_schedule
from stagewright.solvers.backprop.tabu import tabu_search
from stagewright.solvers.planners.ooo import modulo_devices

LIMITS = Limits(seconds=60)


def unit_layers(count, first=0.0):
    """Layers of one second each; ``first`` is the first layer's output gradient."""
    return Layers((1.0,) * count, (first, *(1.0,) * (count - 1)), (1.0,) * count)


def seconds(problem, ranks):
    return problem.evaluate(list_schedule(problem, ranks))


def three_ways(layers, devices, microbatches):
    """Conventional, with fast-forwarding, and with modulo allocation as well."""
    count = layers.count
    blocks = tuple(i * devices // count for i in range(count))
    modulo = tuple(i % devices for i in range(count))
    one, other = (training(layers, d, microbatches) for d in (blocks, modulo))
    return one, other, [
        seconds(one, conventional(one)),
        seconds(one, fast_forward(one)),
        seconds(other, fast_forward(other)),
    ]  # fmt: skip


def test_figure_5():
    assert three_ways(unit_layers(8), 2, 1)[2] == [23, 19, 16]


@pytest.mark.slow
def test_figure_5_is_optimal_for_its_devices():
    blocks, modulo, _ = three_ways(unit_layers(8), 2, 1)
    assert [solve(one, LIMITS).cost for one in (blocks, modulo)] == [19, 16]


def test_figures_6_and_12_by_their_rules():
    """8 layers: 2 devices and 2 microbatches; 4 devices and 4 microbatches."""
    assert three_ways(unit_layers(8), 2, 2)[2] == [35, 30, 24]
    assert three_ways(unit_layers(8), 4, 4)[2] == [41, 32, 28]


def test_ffnn_16():
    """1.22 times by fast-forwarding; 1.60 with modulo allocation, which is optimal there."""
    _, modulo, (gpipe, fast, both) = three_ways(unit_layers(16), 4, 4)
    assert (gpipe, fast, both) == (83, 68, 52)
    assert gpipe / fast == pytest.approx(1.22, abs=0.005)
    assert max(bound for _, bound in window_bounds(modulo)) == both


TIMES = st.integers(1, 3)


@st.composite
def instances(draw, most=3):
    count = draw(st.integers(2, most))
    rows = [draw(st.lists(TIMES, min_size=count, max_size=count)) for _ in range(3)]
    rows[1][0] = draw(st.integers(0, 1))
    sync = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    device = tuple(draw(st.sampled_from([(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 0, 1)])))[:count]
    send = draw(st.lists(st.integers(0, 2), min_size=count - 1, max_size=count - 1))
    return rows, sync, device, send


def built(case, chunk=np.inf, memory=(), saved=()):
    rows, sync, device, send = case
    layers = Layers(*(tuple(map(float, row)) for row in rows), saved=saved)
    return training(layers, device, 1, send, sync, chunk_seconds=chunk, memory=memory)


@examples(25)
@given(instances(), st.booleans())
def test_equals_an_independent_search(case, preemptible):
    problem = built(case, 0.0 if preemptible else np.inf)
    optimum = shortest(*case[0], *case[1:], preemptible=preemptible)
    found = solve(problem, LIMITS)
    assert (found.cost, found.bound, found.status) == (optimum, optimum, Status.OPTIMAL)
    assert max(bound for _, bound in window_bounds(problem)) <= optimum
    assert best_list_schedule(problem)[1].end >= optimum


@examples(15)
@given(instances(), st.lists(st.integers(0, 2), min_size=3, max_size=3), st.integers(0, 2))
def test_equals_an_independent_search_with_memory(case, saved, spare):
    rows, sync, device, send = case
    count = len(device)
    saved, alone = tuple(saved[:count]), (0,) * count
    limit = sum(saved) + spare
    case = (rows, sync, alone, send)
    problem = built(case, memory=(float(limit),), saved=tuple(map(float, saved)))
    optimum = shortest(*rows, sync, alone, send, memory=limit, saved=saved)
    found = solve(problem, LIMITS)
    assert (found.cost, found.bound) == (optimum, optimum)


def test_too_little_memory_is_infeasible():
    layers = replace(unit_layers(2), saved=(1.0, 1.0))
    assert solve(data_parallel(layers, (1, 1), memory=1.0), LIMITS).status is Status.INFEASIBLE


@examples(15)
@given(instances(4), st.sampled_from([np.inf, 0.0, 1.0]))
def test_relations(case, chunk):
    """Twice the times cost twice; a link that may suspend transfers never costs more."""
    rows, sync, device, send = case
    cost = solve(built(case, chunk), LIMITS).cost
    twice = [[2 * one for one in row] for row in rows], [2 * one for one in sync], device, send
    send2 = [2 * one for one in send]
    assert solve(built((*twice[:3], send2), 2 * chunk), LIMITS).cost == pytest.approx(2 * cost)
    assert solve(built(case, 0.0), LIMITS).cost <= cost


def test_times_without_a_common_unit():
    rng = np.random.default_rng(0)
    rows = rng.uniform(0.5, 2, (3, 6))
    problem = data_parallel(Layers(*map(tuple, rows)), tuple(rng.uniform(0.5, 3, 6)))
    found = solve(problem, LIMITS)
    assert problem.evaluate(found.timetable) == found.cost
    assert found.cost == pytest.approx(found.bound, rel=1e-6)


def broken(problem, timetable):
    """Timetables that each break one rule, with a word of the message."""
    starts = timetable.starts
    ends = timetable.ends
    late, early = starts.copy(), starts.copy()
    late[problem.find("dO", 3)] += 0.5  # while another gradient runs
    early[problem.find("F", 1)] -= 1
    parts = np.r_[timetable.operation, problem.find("S[dW]", 1)]
    first = problem.find("S[dW]", 1)
    half = timetable.finish.copy()
    half[timetable.operation == first] -= 0.5
    end = ends[first]
    yield WindowTimes.of_starts(problem, late), "starts"
    yield WindowTimes.of_starts(problem, early), "starts before"
    yield WindowTimes.of_starts(problem, starts - 1), "negative"
    yield (
        WindowTimes(timetable.operation[1:], timetable.start[1:], timetable.finish[1:]),
        "runs for",
    )
    yield (
        WindowTimes(parts, np.r_[timetable.start, end + 50.5], np.r_[half, end + 51]),
        "starts before",
    )


def test_wrong_answers_are_refused():
    problem = data_parallel(unit_layers(4), (1, 1, 1, 1))
    timetable = list_schedule(problem, reverse_first_k(problem, 2))
    problem.evaluate(timetable)
    for wrong, message in broken(problem, timetable):
        with pytest.raises(InvalidPlan, match=message):
            problem.evaluate(wrong)


def test_transfers_are_suspended_only_at_chunks():
    layers = unit_layers(2)
    problem = data_parallel(layers, (1.0, 2.0), chunk_seconds=1.0)
    starts = list_schedule(problem, conventional(problem))
    problem.evaluate(starts)
    one = problem.find("S[dW]", 2)
    keep = starts.operation != one
    pieces = [starts.operation[keep], starts.start[keep], starts.finish[keep]]
    for cut, is_valid in ((2.0, True), (1.5, False)):
        rows = [(one, 1.0, cut), (one, 4.0, 6.0 - (cut - 1.0) + 0.0)]
        shifted = WindowTimes(
            np.r_[pieces[0], [one, one]],
            np.r_[pieces[1] + 10 * np.isin(pieces[0], [problem.find("F", 2)]), [1.0, 4.0]],
            np.r_[pieces[2] + 10 * np.isin(pieces[0], [problem.find("F", 2)]), [cut, rows[1][2]]],
        )
        if is_valid:
            problem.evaluate(shifted)
        else:
            with pytest.raises(InvalidPlan, match="within a chunk"):
                problem.evaluate(shifted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_gradient": (1.0,)}, "weight_gradient needs 2 values"),
        ({"forward": ()}, "layers must be at least 1"),
        ({"kept": (False, True)}, "first layer's input"),
        ({"forward": (1.0, -1.0)}, "F2.0 must be finite"),
    ],
)
def test_bad_layers_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        data_parallel(replace(unit_layers(2), **change), (1.0, 1.0))


def random_layers(rng, count, most):
    forward, output, weight = (tuple(map(float, row)) for row in rng.integers(1, most, (3, count)))
    return Layers(forward, (0.0, *output[1:]), weight)


def pipeline(seed, layers=12, most=50):
    rng = np.random.default_rng(seed)
    send = rng.integers(0, 20, layers - 1).astype(float).tolist()
    sync = rng.integers(1, 3 * most, layers).astype(float).tolist()
    device = modulo_devices(layers, 2, int(rng.choice([1, 2, 3, 6])))
    return training(random_layers(rng, layers, most), device, 2, send, sync)


@st.composite
def tiny(draw):
    count, times = draw(st.integers(2, 3)), st.integers(1, 3)
    forward, weight, sync = (
        tuple(draw(times if low else st.integers(0, 2)) for _ in range(count)) for low in (1, 1, 0)
    )
    output = (0, *(draw(times) for _ in range(count - 1)))
    device = tuple(draw(st.integers(0, 1)) for _ in range(count))
    send = tuple(draw(st.integers(0, 2)) for _ in range(count - 1))
    return forward, output, weight, sync, device, send


@examples(25)
@given(tiny())
def test_two_microbatches_equal_an_independent_search(case):
    """The optimum with turns is the optimum of all orders; no search goes below it."""
    forward, output, weight, sync, device, send = case
    problem = training(Layers(forward, output, weight), device, 2, send, sync)
    turns = in_turns(problem)
    assert len(turns.before) > len(problem.before)
    least = shortest(*case, microbatches=2)
    assert max(bound for _, bound in window_bounds(turns)) <= least
    found = solve(problem, Limits(seconds=60))
    assert (found.cost, found.status) == (least, Status.OPTIMAL)
    first = renumbered(problem, list_schedule(problem, conventional(problem)))
    other = tabu_search(turns, first, 0.0, 20_000)
    assert least <= turns.evaluate(other) <= first.end


@pytest.mark.parametrize("seed", range(4))
def test_search_of_orders(seed):
    """Valid, no later, the same each time, and much better than the order it begins with."""
    problem = pipeline(seed)
    turns = in_turns(problem)
    before = list_schedule(problem, fast_forward(problem))
    first = renumbered(problem, before)
    assert turns.evaluate(first) == before.end
    found, again = (tabu_search(turns, first, 0.0, 300_000) for _ in range(2))
    assert problem.evaluate(found) < 0.97 * before.end
    assert (found.starts == again.starts).all()


@pytest.mark.usefixtures("usual_searches")
def test_list_schedules_of_a_hard_pipeline():
    """Two percent of the optimum, 7.3 without the search of orders."""
    rng = np.random.default_rng(21)
    layers, send = random_layers(rng, 12, 50), rng.integers(0, 20, 11).astype(float).tolist()
    problem = training(layers, modulo_devices(12, 2, int(rng.choice([1, 2, 3, 6]))), 2, send)
    name, found = best_list_schedule(problem)
    assert found.end <= 1.02 * solve(problem, Limits(seconds=20, threads=2)).bound
    assert "tabu" in name


def test_what_has_no_turns():
    """Memory, single microbatches, microbatches of different times."""
    layers = Layers((1.0, 1.0), (0.0, 1.0), (1.0, 1.0), saved=(1.0, 1.0))
    alone = data_parallel(layers, (1.0, 1.0))
    limited = training(layers, (0, 1), 2, memory=(9.0, 9.0))
    equal = training(layers, (0, 1), 2)
    i = equal.find("dW", 2, 1)
    changed = replace(equal.operations[i], seconds=2.0)
    other = replace(equal, operations=(*equal.operations[:i], changed, *equal.operations[i + 1 :]))
    for problem in (alone, limited, other):
        assert in_turns(problem) is problem
    assert in_turns(equal) is not equal


def test_a_link_that_suspends_keeps_its_pieces():
    problem = data_parallel(
        random_layers(np.random.default_rng(0), 8, 20), (9.0,) * 8, chunk_seconds=0.0
    )
    found = best_list_schedule(problem)[1]
    assert problem.evaluate(found) == pytest.approx(found.end)
