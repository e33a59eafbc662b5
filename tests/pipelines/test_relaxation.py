"""The bounds of every plan: never above the joint optimum, and how they move with the problem."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles import brute_force_joint
from plans import scaled
from profiles import examples
from strategies import PROBLEMS, hard_problem, paper_problem

from stagewright.formulations.pipelines.bounds.relaxation import relax
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.machines.cluster import Device, Link, from_matrix, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.pipelines.relaxation import (
    PRECISION,
    fill_and_drain_bound,
    relaxed_load_bound,
)

ROUNDING = 1e-9  # relative, of sums of floats
GB = 1e9

quick = examples(40, derandomize=True)


def with_one_more_device(problem):
    """A copy of the last device, linked like it, and to it by the best link there is."""
    cluster = problem.cluster
    size = len(cluster)
    image = [*range(size), size - 1]
    bandwidth = cluster.direct_bandwidth[image][:, image]
    latency = cluster.latency[image][:, image]
    apart = cluster.direct_bandwidth[cluster.direct_bandwidth > 0]
    bandwidth[size - 1, size] = bandwidth[size, size - 1] = apart.max() if len(apart) else GB
    devices = [*cluster.devices, replace(cluster.devices[-1], name="new")]
    return PipelineProblem(
        problem.chain, from_matrix(devices, bandwidth, latency.tolist()), problem.microbatches
    )


def equal_layers(count, costs, parameters=0.0):
    layers = tuple(Layer(f"l{i}", parameters, costs) for i in range(count))
    return Chain("equal", "by hand", 840, layers)


@pytest.mark.parametrize("problems", PROBLEMS)
@quick
@given(st.data())
def test_never_above_the_joint_optimum(problems, data):
    problem = data.draw(PROBLEMS[problems]())
    optimum = brute_force_joint(problem)
    assume(optimum < inf)
    for incumbent in (optimum, 1.3 * optimum, 10 * optimum):
        bound = fill_and_drain_bound(problem, incumbent)
        assert relaxed_load_bound(problem) <= bound * (1 + ROUNDING)
        assert bound <= optimum * (1 + ROUNDING)


@pytest.mark.parametrize("problems", PROBLEMS)
@quick
@given(st.data())
def test_never_above_the_incumbent(problems, data):
    """Also where the incumbent is better than any plan can be."""
    problem = data.draw(PROBLEMS[problems](5, 5, 5))
    load = relaxed_load_bound(problem)
    for factor in (1.0, 1.01, 1.5, 4.0):
        assert fill_and_drain_bound(problem, load * factor) <= load * factor * (1 + ROUNDING)


@quick
@given(hard_problem(5, 4, 4), st.sampled_from((2.0, 3.0, 0.5)))
def test_twice_the_times_is_twice_the_bound(problem, factor):
    other = scaled(problem, factor)
    assert relaxed_load_bound(other) == pytest.approx(factor * relaxed_load_bound(problem))
    incumbent = 5 * relaxed_load_bound(problem)
    assert fill_and_drain_bound(other, factor * incumbent) == pytest.approx(
        factor * fill_and_drain_bound(problem, incumbent), rel=2 * PRECISION
    )


@quick
@given(paper_problem(5, 4, 4))
def test_more_devices_never_raise_it(problem):
    more = with_one_more_device(problem)
    assert relaxed_load_bound(more) <= relaxed_load_bound(problem) * (1 + ROUNDING)
    incumbent = 5 * relaxed_load_bound(problem)
    bound = fill_and_drain_bound(problem, incumbent)
    assert fill_and_drain_bound(more, incumbent) <= bound * (1 + 2 * PRECISION)


def test_by_hand_load():
    """4 layers of 3 s, 5 microbatches, 3 devices."""
    problem = PipelineProblem(
        equal_layers(4, (LayerCost(840, 1.0, 0.0, 0.0, 2.0),)), uniform_servers(1, 3, Link(GB)), 5
    )
    assert relaxed_load_bound(problem) == pytest.approx(5 * 12 / 3)


def test_by_hand_slow_network():
    """Two layers of 3 s, 100 GB of parameters each and a boundary of 100 GB, at 1 GB/s.

    Neither sharing nor cutting pays: one device does all, 4 x 6 s.
    """
    cost = LayerCost(840, 1.0, 0.0, 100 * GB, 2.0)
    chain = equal_layers(2, (cost,), 100 * GB)
    cluster = uniform_servers(1, 2, Link(GB), memory_bytes=1e13)
    problem = PipelineProblem(chain, cluster, 4)
    assert relaxed_load_bound(problem) == pytest.approx(12.0)
    assert fill_and_drain_bound(problem, 24.0) == pytest.approx(24.0, rel=2 * PRECISION)
    assert fill_and_drain_bound(problem, 100.0) == pytest.approx(24.0, rel=2 * PRECISION)


def test_by_hand_fill_and_drain():
    """Nothing to send, an all-reduce that never pays: two stages of 3 s, 4 microbatches.

    The last stage waits for the first one's forward, and its last backward for the way back.
    """
    cost = LayerCost(840, 1.0, 0.0, 0.0, 2.0)
    chain = equal_layers(2, (cost,), 100 * GB)
    problem = PipelineProblem(chain, uniform_servers(1, 2, Link(GB), memory_bytes=1e13), 4)
    assert brute_force_joint(problem) == pytest.approx(15.0)
    assert fill_and_drain_bound(problem, 100.0) == pytest.approx(15.0, rel=2 * PRECISION)


def test_by_hand_channel():
    """Two layers that no device holds both, 10 s for a boundary, 4 microbatches.

    The channel works for 80 s, and waits for the first forward of 1 s; the relaxation does not see
    the last backward of 2 s.
    """
    cost = LayerCost(840, 1.0, 0.0, 10 * GB, 2.0)
    cluster = uniform_servers(1, 2, Link(GB), memory_bytes=500 * GB)
    problem = PipelineProblem(equal_layers(2, (cost,), 100 * GB), cluster, 4)
    assert brute_force_joint(problem) == pytest.approx(83.0)
    assert fill_and_drain_bound(problem, 200.0) == pytest.approx(81.0, rel=2 * PRECISION)


def test_an_incumbent_at_the_load_is_optimal():
    problem = PipelineProblem(
        equal_layers(4, (LayerCost(840, 1.0, 0.0, 0.0, 2.0),)), uniform_servers(1, 3, Link(GB)), 5
    )
    assert fill_and_drain_bound(problem, 20.0) == pytest.approx(20.0)


def test_the_relaxation_takes_the_best_of_everything():
    """The quickest kind, the widest link, the least latency, the largest memory."""
    costs = (
        LayerCost(840, 1.0, 5.0, 7.0, 2.0, device_kind="fast"),
        LayerCost(840, 3.0, 5.0, 7.0, 1.0, device_kind="slow"),
    )
    chain = equal_layers(2, costs, 11.0)
    devices = [Device("a", "fast", 2e9), Device("b", "slow", 3e9)]
    cluster = from_matrix(devices, [[0, 1 * GB], [4 * GB, 0]], [[0.0, 0.2], [0.1, 0.0]])
    form = relax(PipelineProblem(chain, cluster, 3))
    assert form.forward[1].tolist() == [0.0, 1.0, 2.0]
    assert form.backward[1].tolist() == [0.0, 1.0, 2.0]
    assert form.forward[2].tolist() == [0.0, 0.5, 1.0]
    assert form.parameters.tolist() == [0.0, 11.0, 22.0]
    assert form.boundary.tolist() == [0.0, 7.0, 0.0]
    assert (form.memory, form.seconds_per_byte, form.latency) == (3e9, 1 / (4 * GB), 0.1)
