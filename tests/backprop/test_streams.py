"""Two streams: the model of overlap, Algorithm 1, its memory loop, bounds against every order."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from stagewright.formulations.backprop.problem import peaks
from stagewright.formulations.backprop.regions import Regions, Streams, regions_of
from stagewright.formulations.backprop.training import Layers, single_device
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.solvers.backprop.list_scheduling import joint_schedule, schedule_streams


def streams(count=2, main=0.5, sub=0.5, gap=0.0, **bytes_):
    layers = Layers((1.0,) * count, (0.0, *(1.0,) * (count - 1)), (1.0,) * count, **bytes_)
    return Streams(layers, (main,) * (2 * count), (sub,) * count, gap)


def test_co_run_by_hand():
    """dO2 with dW2, dW1, F1, F2. At half the share nothing is slowed; at full share dW2 waits."""
    assert streams().evaluate((2, 1)) == 4
    assert streams(main=1.0).evaluate((2, 1)) == 5  # dW2 runs after dO2, then dW1
    assert streams(main=1.0).evaluate((1, 2)) == 5  # dW2 waits for F1, F2 waits for dW2
    assert streams(main=0.75).evaluate((2, 1)) == 4.5  # dW2 at half speed, half of it after dO2
    assert streams(gap=0.25).evaluate((2, 1)) == 5


def test_kernels_that_begin_at_zero_keep_their_starts():
    timetable = streams(main=0.75).timetable((2, 1))
    problem = single_device(streams().layers)
    first, other = problem.find("dO", 2), problem.find("dW", 2)
    assert timetable.starts[[first, other]].tolist() == [0, 0]
    assert timetable.ends[[first, other]].tolist() == [1, 1.5]


@st.composite
def devices(draw):
    count = draw(st.integers(2, 5))
    times = st.lists(st.integers(1, 4).map(float), min_size=count, max_size=count).map(tuple)
    share = st.sampled_from([0.25, 0.5, 1.0])
    layers = Layers(draw(times), (0.0, *draw(times)[1:]), draw(times), (1.0,) * count)
    shares = [draw(st.lists(share, min_size=n, max_size=n)) for n in (2 * count, count)]
    return Streams(layers, *map(tuple, shares), draw(st.sampled_from([0.0, 0.5])))


@examples(25)
@given(devices())
def test_no_order_is_below_the_bound_and_two_streams_win(one):
    count = one.layers.count
    ends = tuple(range(1, 2 * count))  # a region per kernel
    found = schedule_streams(one, ends)
    costs = [one.evaluate(order) for order in permutations(range(1, count + 1))]
    assert one.bound() <= min(costs) + 1e-9
    assert min(costs) <= found.cost == one.evaluate(found.order)
    assert found.bound <= min(costs) + 1e-9


def test_algorithm_1_takes_the_largest_speedup_first():
    """The pair of layer 2 and region 1; then layer 1 is left, and region 0 is its best."""
    regions = Regions(
        main=np.array([2.0, 2.0]),
        sub=np.ones((2, 2)),
        speedup=np.array([[1.5, 1.2], [1.4, 1.9]]),
        ready=np.array([0, 0]),
        offset=np.zeros(2),
        last=np.array([1, 1]),
    )
    assert joint_schedule(regions) == [[1], [2]]
    assert joint_schedule(replace(regions, speedup=regions.speedup[::-1])) == [[2], [1]]
    assert joint_schedule(regions, prescheduled=1) == [[1, 2], []]


def test_a_region_closes_when_it_is_covered():
    regions = Regions(
        main=np.array([1.0, 9.0]),
        sub=np.ones((3, 2)),
        speedup=np.array([[1.9, 1.1]] * 3),
        ready=np.zeros(3, int),
        offset=np.zeros(3),
        last=np.ones(3, int),
    )
    assert [len(one) for one in joint_schedule(regions)] == [1, 2]


def test_regions_of_a_device():
    found = regions_of(streams(2, main=0.75), (1, 3))
    assert found.main.tolist() == [1, 2]
    assert found.sub.tolist() == [[2, 2], [2, 2]]
    assert found.speedup.tolist() == [[1.5, 1.5]] * 2
    assert (found.ready.tolist(), found.offset.tolist()) == ([1, 0], [0, 0])
    with pytest.raises(InputError, match="must rise to 3"):
        regions_of(streams(2), (2, 2, 3))


def test_prescheduled_regions_take_less_memory():
    """The late layers' gradients suit the forwards best, but their inputs take memory till then."""
    count, late = 6, (1.0, 1.0, 1.0, 1.0, 8.0, 8.0)
    one = streams(count, saved=late, gradient=late)
    shares = (0.75,) * count + (0.1,) * count
    one = replace(one, main_share=shares)
    ends = (2, 5, 8, 11)
    regions = regions_of(one, ends)
    assert joint_schedule(regions) == [[], [3, 2], [6, 5, 4, 1], []]
    assert joint_schedule(regions, 1) == [[6, 5], [3, 2], [4, 1], []]
    problem = single_device(one.layers)
    assert max(peaks(problem, one.timetable((3, 2, 6, 5, 4, 1)))) == 40
    assert max(peaks(problem, one.timetable((6, 5, 3, 2, 4, 1)))) == 37
    assert schedule_streams(one, ends).cost <= one.timetable((6, 5, 3, 2, 4, 1)).end


def test_wrong_orders_are_refused():
    with pytest.raises(InvalidPlan, match="no order of layers"):
        streams().evaluate((1, 1))
    with pytest.raises(InputError, match="main_share needs 4"):
        replace(streams(), main_share=(0.5,))
