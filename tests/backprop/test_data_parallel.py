"""Data parallel: figure 4, Algorithm 2, every k, the other systems' schedules."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from benchmarks.backprop_systems import BASELINES, SyncLink, baseline, buckets
from stagewright.formulations.backprop.of_stages import window_bounds
from stagewright.formulations.backprop.orders import conventional, reverse_first_k
from stagewright.formulations.backprop.training import Layers, data_parallel
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.solvers.backprop.exact import best_list_schedule, solve
from stagewright.solvers.backprop.list_scheduling import list_schedule
from stagewright.solvers.backprop.regions import reverse_search


def unit_layers(count):
    return Layers((1.0,) * count, (0.0, *(1.0,) * (count - 1)), (1.0,) * count)


def random_problem(rng, count, scale, chunk=np.inf):
    times = tuple(rng.integers(1, 50, count).astype(float).tolist())
    sync = np.maximum(1, np.round(rng.integers(1, 200, count) * scale)).tolist()
    layers = Layers(times, (0.0, *times[1:]), times)
    return data_parallel(layers, sync, chunk_seconds=chunk)


def test_order_of_algorithm_2():
    problem = data_parallel(unit_layers(4), (1.0,) * 4)
    timetable = list_schedule(problem, reverse_first_k(problem, 2))
    gradients = [one for one in range(len(problem.operations)) if problem.seconds[one] > 0]
    names = [
        problem.operations[i].name.removesuffix(".0")
        for i in sorted(gradients, key=lambda i: timetable.starts[i])
        if problem.operations[i].kind in ("dO", "dW")
    ]
    assert names == ["dW4", "dO4", "dW3", "dO3", "dO2", "dW1", "dW2"]


def test_figure_4_by_its_differences():
    """The figure has no printed times; these give its differences: 1 by priority, 3 reversed."""
    problem = data_parallel(unit_layers(5), (3.0, 1.0, 1.0, 3.0, 4.0), chunk_seconds=0.0)
    fifo = list_schedule(problem, conventional(problem), ("sync",)).end
    priority = list_schedule(problem, conventional(problem)).end
    first = [list_schedule(problem, reverse_first_k(problem, k)).end for k in range(6)]
    assert (fifo, priority, first[3]) == (18, 17, 15)  # 16 % and 12 %, as printed
    assert first[3] == min(first)
    assert solve(problem, Limits(seconds=60)).cost == 15


@examples(15)
@given(st.integers(0, 1000))
def test_search_for_k_against_every_k(seed):
    problem = random_problem(np.random.default_rng(seed), 20, 0.5)
    found = reverse_search(problem, 20)
    ends = [list_schedule(problem, reverse_first_k(problem, k)).end for k in range(21)]
    usual = list_schedule(problem, conventional(problem)).end
    assert min(ends) <= found.timetable.end <= usual * (1 + 1e-9)
    assert found.tried <= len(ends)
    assert max(bound for _, bound in window_bounds(problem)) <= min(ends)


def test_buckets_are_closed_from_the_last_layer():
    assert buckets((1, 1, 3, 2, 2), 4) == [[5, 4], [3, 2], [1]]
    assert buckets((1, 1, 3, 2, 2), 4, 1) == [[5], [4, 3], [2, 1]]
    assert buckets((1, 1), 2) == [[2, 1]]


def systems(latency):
    amounts = (30e6, 20e6, 50e6, 1e6, 10e6, 40e6)
    link = SyncLink(bandwidth=20e6, latency=latency)
    ends = {}
    for name in BASELINES:
        problem, timetable = baseline(name, unit_layers(6), amounts, link)
        ends[name] = problem.evaluate(timetable)
    return ends


def test_systems_on_one_link():
    """Without latency: chunks by priority win; what waits for the backward, or for more, loses."""
    ends = systems(0.0)
    assert ends["BytePS"] <= ends["wait-free"] <= ends["DDP"] <= ends["Horovod"]
    assert ends["wait-free"] < ends["after backward"]
    assert all(systems(0.1)[name] > end for name, end in ends.items())


def test_after_backward_sends_late():
    problem, timetable = baseline("after backward", unit_layers(3), (1e6,) * 3, SyncLink(1e6))
    starts = timetable.starts
    assert starts[problem.find("S[dW]", 3)] == 5  # three weight and two output gradients
    assert timetable.end == 5 + 3 + 3  # first come, first served: the first layer's is last


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_sixty_layers_are_proved(scale):
    problem = random_problem(np.random.default_rng(1), 60, scale)
    assert solve(problem, Limits(seconds=30)).status is Status.OPTIMAL


def test_preemptible_links_are_never_worse():
    rng = np.random.default_rng(3)
    for _ in range(5):
        seed = int(rng.integers(1000))
        exclusive, preemptible = (
            best_list_schedule(random_problem(np.random.default_rng(seed), 30, 0.5, chunk))[1]
            for chunk in (np.inf, 0.0)
        )
        assert preemptible.end <= exclusive.end
