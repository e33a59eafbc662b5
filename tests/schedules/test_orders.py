"""Orders as data, and the generators against the literature's formulas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.actions import parse_action
from stagewright.formulations.schedules.order import Order
from stagewright.formulations.schedules.published.one_f_one_b import (
    gpipe,
    interleaved,
    one_f_one_b,
    pe,
)
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.pipelines.list_scheduling import schedule_order

quick = examples(60)
sizes = st.integers(1, 6)


def order_of(*rows):
    return Order(tuple(tuple(map(parse_action, row.split())) for row in rows))


def text(order):
    return [" ".join(map(str, row)) for row in order.rows]


def equal_stages(device, microbatches, forward=1.0, backward=2.0, weight=None):
    stages = len(device)
    return MakespanProblem(
        microbatches=microbatches,
        forward=(forward,) * stages,
        backward=(backward,) * stages,
        send_forward=(0.0,) * (stages - 1),
        send_backward=(0.0,) * (stages - 1),
        reduce=(0.0,) * stages,
        in_flight=(microbatches,) * stages,
        device=tuple(device),
        weight_gradient=None if weight is None else (weight,) * stages,
    )


def bubble(order, forward=1.0, backward=2.0):
    """Idle time as a fraction of the work of a device, for equal stages without transfers."""
    problem = equal_stages(order.device, order.microbatches, forward, backward)
    chunks = problem.stages // len(order.rows)
    work = order.microbatches * chunks * (forward + backward)
    return (problem.evaluate(schedule_order(problem, order)) - work) / work


# The type


def test_an_order_knows_its_devices_and_microbatches():
    order = order_of("0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1", "1F0 1F1 1I0 1I1 1W0 1W1")
    assert (order.device, order.microbatches, order.is_split) == ((0, 1, 0), 2, True)
    assert order.most_in_flight() == (2, 2, 1)


def test_a_split_order_has_both_parts_in_the_place_of_a_backward():
    order = order_of("0F0 0F1 0B0 0I1 0W1")
    assert text(order.split()) == ["0F0 0F1 0I0 0W0 0I1 0W1"]
    assert order.split().split() == order.split()
    assert order.split().most_in_flight() == order.most_in_flight()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((), "at least one stage"),
        (("0F0 0F0 0B0",), "device 0: duplicate action 0F0"),
        (("0F0 0B0 0B0",), "device 0: duplicate action 0B0"),
        (("0B0 0F0",), "device 0: 0B0 before 0F0"),
        (("0F0 0W0 0I0",), "device 0: 0W0 before 0I0"),
        (("0W0 0F0 0I0",), "device 0: 0W0 before 0F0"),
        (("0F0 0I0 0B0 0W0",), "device 0: 0B0, but the backward is split"),
        (("0F0 0B0 0W0",), "device 0: 0W0, but the backward is whole"),
        (("0F0 0B0", "0F1 0B1"), "device 1: 0F1, but stage 0 is on 0"),
        (("0F0 0SEND_F0 0B0",), "0SEND_F0 is not a computation"),
        (("0F0 0B0 0UPDATE",), "0UPDATE is not a computation"),
        (("0F0 0F1 0B1",), "stage 0 has no backward of microbatch 0"),
        (("0F0 0I0",), "stage 0 has no weight gradient of microbatch 0"),
        (("0F1 0B1",), "stage 0 has no forward of microbatch 0"),
        (("0F0 0B0", "1F0 1B0 1F1 1B1"), "stage 0 has no forward of microbatch 1"),
        (("1F0 1B0",), "stage 0 has no forward of microbatch 0"),
    ],
)
def test_what_is_no_order_is_refused(rows, message):
    with pytest.raises(InputError, match=message) as error:
        order_of(*rows)
    assert "\n" not in str(error.value)


@quick
@given(st.data())
def test_orders_with_an_action_removed_or_duplicated_are_refused(data):
    rows = [list(row) for row in interleaved(2, 2, 4).split().rows]
    row = data.draw(st.sampled_from(rows))
    place = data.draw(st.integers(0, len(row) - 1))
    if data.draw(st.booleans()):
        row.insert(data.draw(st.integers(0, len(row))), row[place])
    else:
        del row[place]
    with pytest.raises(InputError):
        Order(tuple(map(tuple, rows)))


# The generators


def test_generators_by_hand():
    assert text(gpipe((0, 1), 2)) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert text(gpipe((0, 0), 2)) == ["0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"]
    assert text(one_f_one_b(2, 3)) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    assert text(one_f_one_b(2, 3, (1, 2))) == ["0F0 0B0 0F1 0B1 0F2 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    # Passes: {F0:0} {F0:1, SF:0} {SF:1, FB1:0} {FB1:1, SB:0} {SB:1, B0:0} {B0:1}
    assert text(pe((0, 1), 2, (2, 2))) == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    assert text(pe((0, 1), 2, (1, 1))) == ["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"]
    # Narayanan et al. 2021, figure 4: rank 1 of 2 runs 2 forwards ahead.
    assert text(interleaved(2, 2, 2)) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]  # fmt: skip


@quick
@given(sizes, st.integers(1, 12))
def test_gpipe_and_1f1b_have_the_bubble_of_the_literature(stages, microbatches):
    for order in (gpipe(tuple(range(stages)), microbatches), one_f_one_b(stages, microbatches)):
        assert bubble(order) == pytest.approx((stages - 1) / microbatches)


@quick
@given(st.integers(2, 5), st.integers(2, 4), st.integers(1, 4))
def test_interleaving_divides_the_bubble_by_its_chunks(ranks, chunks, groups):
    order = interleaved(ranks, chunks, groups * ranks)
    assert bubble(order) == pytest.approx((ranks - 1) / (chunks * groups * ranks))


@quick
@given(sizes, st.integers(1, 12))
def test_1f1b_stashes_what_is_left_of_the_pipeline(stages, microbatches):
    order = one_f_one_b(stages, microbatches)
    assert order.most_in_flight() == tuple(min(microbatches, stages - s) for s in range(stages))
    assert gpipe(order.device, microbatches).most_in_flight() == (microbatches,) * stages
    assert interleaved(stages, 1, microbatches) == order


@quick
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 6))
def test_1f1b_and_pe_keep_limits_and_run(limits, microbatches):
    limits = tuple(limits)
    for order in (
        one_f_one_b(len(limits), microbatches, limits),
        pe(tuple(range(len(limits))), microbatches, limits),
    ):
        assert all(
            most <= limit for most, limit in zip(order.most_in_flight(), limits, strict=True)
        )
        problem = equal_stages(order.device, microbatches)
        problem.evaluate(schedule_order(problem, order))


@pytest.mark.parametrize("device", [(0, 1, 1, 0), (0, 1, 0, 1), (0, 0, 1, 2)])
def test_any_placement_runs(device):
    problem = equal_stages(device, 4)
    for order in (gpipe(device, 4), pe(device, 4, (4,) * 4)):
        assert order.device == device
        problem.evaluate(schedule_order(problem, order))


# Scheduling an order


def test_weight_gradients_fill_the_end():
    # 2 stages, F = I = W = 1, M = 2: with W put off, stage 0 gets its gradients earlier.
    problem = equal_stages((0, 1), 2, 1.0, 1.0, weight=1.0)
    late = order_of("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")
    at_once = one_f_one_b(2, 2)
    assert problem.evaluate(schedule_order(problem, late)) == 7
    assert problem.evaluate(schedule_order(problem, at_once)) == 8


def test_microbatches_may_come_in_any_order():
    problem = equal_stages((0, 1), 2)
    times = schedule_order(problem, order_of("0F1 0F0 0B1 0B0", "1F1 1B1 1F0 1B0"))
    assert times.forward.tolist() == [[1, 0], [4, 1]]
    assert problem.evaluate(times) == 9


def test_devices_that_wait_for_each_other_are_found():
    order = order_of("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    with pytest.raises(ValueError, match="wait for each other"):
        schedule_order(equal_stages((0, 1), 2), order)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (gpipe((0, 1), 3), "3 microbatches"),
        (gpipe((0, 0), 2), r"\(0, 0\)"),
        (gpipe((0, 1), 2).split(), "whole in the problem"),
    ],
)
def test_an_order_of_another_problem_is_refused(order, message):
    with pytest.raises(InputError, match=message):
        schedule_order(equal_stages((0, 1), 2), order)
