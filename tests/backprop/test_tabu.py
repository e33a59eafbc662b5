"""Tabu search, and turns of equal microbatches, against an independent search."""

from dataclasses import replace

import numpy as np
import pytest
from backprop_oracle import shortest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from stagewright.formulations.backprop.of_stages import in_turns, renumbered, window_bounds
from stagewright.formulations.backprop.orders import conventional, fast_forward
from stagewright.formulations.backprop.training import Layers, data_parallel, training
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.solvers.backprop.exact import best_list_schedule, solve
from stagewright.solvers.backprop.list_scheduling import list_schedule
from stagewright.solvers.backprop.tabu import tabu_search
from stagewright.solvers.planners.ooo import modulo_devices


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
