"""Pipelines: groups of layers, k of section 6, recomputation."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from stagewright.formulations.backprop.of_stages import window_bounds
from stagewright.formulations.backprop.orders import fast_forward, reverse_first_k
from stagewright.formulations.backprop.problem import peaks
from stagewright.formulations.backprop.training import Layers, data_parallel, training
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.backprop.exact import best_list_schedule, solve
from stagewright.solvers.backprop.list_scheduling import list_schedule
from stagewright.solvers.backprop.regions import reverse_search
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
