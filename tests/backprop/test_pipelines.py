"""Pipelines and data parallel training: groups of layers, k of section 6, figure 4."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from benchmarks.backprop_systems import BASELINES, SyncLink, baseline, buckets
from stagewright.formulations.backprop.of_stages import window_bounds
from stagewright.formulations.backprop.orders import conventional, fast_forward, reverse_first_k
from stagewright.formulations.backprop.problem import peaks
from stagewright.formulations.backprop.training import Layers, data_parallel, training
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.backprop.exact import best_list_schedule, solve
from stagewright.solvers.backprop.list_scheduling import list_schedule, reverse_search
from stagewright.solvers.planners.ooo import modulo_devices

LIMITS = Limits(seconds=60)


def unit_layers(count, **bytes_):
    return Layers((1.0,) * count, (0.0, *(1.0,) * (count - 1)), (1.0,) * count, **bytes_)


def random_layers(rng, count):
    forward, output, weight = (tuple(map(float, row)) for row in rng.integers(5, 30, (3, count)))
    return Layers(forward, (0.0, *output[1:]), weight)


def test_devices():
    assert modulo_devices(6, 2, 2) == (0, 0, 1, 1, 0, 0)
    with pytest.raises(InputError, match="from 1 to 3"):
        modulo_devices(3, 2, 4)


@examples(15)
@given(st.integers(0, 1000))
def test_combined_k(seed):
    """The search for k is no better than the best k, and no k is better than the bounds."""
    rng = np.random.default_rng(seed)
    layers = random_layers(rng, 6)
    sync = tuple(map(float, rng.integers(1, 60, 6)))
    problem = training(layers, (0, 0, 0, 1, 1, 1), 2, (2.0,) * 5, sync)
    ends = [list_schedule(problem, fast_forward(problem, k)).end for k in range(7)]
    assert reverse_search(problem, 6, fast_forward).timetable.end >= min(ends)
    assert max(bound for _, bound in window_bounds(problem)) <= min(ends)


@pytest.mark.parametrize("device", [(0,) * 6 + (1,) * 6, (0, 1) * 6])
def test_twelve_layers_on_two_devices_are_proved(device):
    layers = random_layers(np.random.default_rng(0), 12)
    problem = training(layers, device, 2, (3.0,) * 11)
    found = solve(problem, replace(LIMITS, seconds=30))
    assert found.status is Status.OPTIMAL
    assert problem.evaluate(found.timetable) == found.cost == pytest.approx(found.bound)


def test_recomputation_by_hand():
    """R1 makes layer 2's input again: a second more, and less memory at the start."""
    kept = data_parallel(unit_layers(2, saved=(3.0, 5.0)), (1.0, 1.0), memory=100.0)
    again = data_parallel(
        unit_layers(2, saved=(3.0, 5.0), kept=(True, False)), (1.0, 1.0), memory=100.0
    )
    found = [list_schedule(one, reverse_first_k(one, 0)) for one in (kept, again)]
    assert [one.end for one in found] == [6, 7]  # dW2 dO2 dW1 S1 F1 F2
    names = [again.operations[i].name for i in found[1].operation[:4]]
    assert "R1.0" in names
    assert found[1].starts[again.find("R", 1)] == 0
    assert found[1].starts[again.find("dW", 2)] == 1
    # Kept: both inputs, then the next ones. Again: F1 makes the second, and F2 drops it.
    assert peaks(kept, found[0]) == (8.0,)
    assert peaks(again, found[1]) == (8.0,)
    held = [tensor for tensor in again.tensors if tensor.amount == 5]
    assert [again.operations[one.first].kind for one in held] == ["R", "F"]


def test_recomputation_leaves_memory_for_reversed_layers():
    """Section 6: where kept inputs fit for no k, recomputed ones fit up to k = 4."""
    fitting = []
    for kept in (True, False):
        layers = unit_layers(
            8, saved=(1.0,) * 8, gradient=(1.0,) * 8, kept=(True, *(kept,) * 3) * 2
        )
        problem = data_parallel(layers, (1.0,) * 8, memory=9.0)
        orders = [list_schedule(problem, reverse_first_k(problem, k)) for k in range(9)]
        fitting.append([k for k in range(9) if peaks(problem, orders[k])[0] <= 9])
    assert fitting == [[], [0, 1, 2, 3, 4]]
    name, found = best_list_schedule(problem)
    assert name != "none"
    problem.evaluate(found)


def test_an_input_from_another_device_is_kept():
    with pytest.raises(InputError, match=r"kept\[1\]"):
        training(unit_layers(2, kept=(True, False)), (0, 1))


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
