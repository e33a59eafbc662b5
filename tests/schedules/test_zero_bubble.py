"""Zero-bubble schedules: the papers' bubbles and memory; the heuristic against measured data."""

import json
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from stagewright.formulations.schedules.automatic import (
    ActivationMemory,
    activations,
    automatic,
    zb1p,
    zb2p,
)
from stagewright.formulations.schedules.backfilling import backfilled
from stagewright.formulations.schedules.controllable_memory import v_half, v_min
from stagewright.formulations.schedules.dualpipe import dualpipe_v
from stagewright.formulations.schedules.interleaved import interleaved
from stagewright.formulations.schedules.one_f_one_b import one_f_one_b
from stagewright.formulations.schedules.order import F, I, Order, W
from stagewright.formulations.schedules.timing import (
    StageTimes,
    bubble,
    equal_times,
    longest_span,
    makespan,
)
from stagewright.formulations.schedules.zbv import zbv
from stagewright.formulations.schedules.zero_bubble import interleaved_zero_bubble, zb_h1, zb_h2
from stagewright.graphs.documents.errors import InputError

DATA = Path(__file__).parents[3] / "shared" / "data" / "schedules" / "split_backward.json"

quick = examples(60)
sizes = st.integers(1, 6)
seconds = st.integers(1, 5)


# By hand


@quick
@given(sizes, st.integers(0, 12), seconds, seconds, seconds)
def test_zb_h1_has_its_bubble_and_the_memory_of_1f1b(p, more, forward, inputs, weight):
    m, weight = p + more, min(forward, inputs, weight)
    order = zb_h1(p, m)
    work = m * (forward + inputs + weight)
    idle = (p - 1) * (forward + inputs - weight)
    assert makespan(order, equal_times(p, forward, inputs, weight)) == work + idle
    assert order.most_in_flight() == (p,) * p
    assert max(one_f_one_b(p, m).most_in_flight()) == p
    assert interleaved_zero_bubble(p, 1, m) == order


@quick
@given(sizes, st.integers(0, 12))
def test_zb_h2_has_no_bubble_with_twice_the_memory(p, more):
    m = 2 * p - 1 + more
    order = zb_h2(p, m)
    assert longest_span(order, equal_times(p)) == 3 * m
    assert makespan(order, equal_times(p)) == 3 * m + p - 1
    assert order.most_in_flight() == (2 * p - 1,) * p


@quick
@given(sizes, st.integers(1, 16))
def test_zbv_has_no_bubble_with_the_memory_of_1f1b(p, m):
    order = zbv(p, m)
    assert max(order.most_on_device()) <= 2 * p
    if m >= 2 * p - 1:
        assert longest_span(order, equal_times(2 * p)) == 6 * m
        assert makespan(order, equal_times(2 * p)) == 6 * m + p - 1


def test_bubbles_of_torchs_runtime():
    """Measured with 8 ranks, 32 microbatches and equal costs; rounded to a tenth of a percent."""
    measured = {
        0.099: interleaved(8, 2, 32),
        0.068: zb_h1(8, 32),
        0.035: interleaved_zero_bubble(8, 2, 32),
    }
    for known, order in measured.items():
        assert bubble(order, equal_times(len(order.device))) == pytest.approx(known, abs=5e-4)
    for order in (zbv(8, 32), dualpipe_v(8, 32)):
        assert bubble(order, equal_times(16)) == pytest.approx(0.035, abs=5e-4)


# Less memory


@quick
@given(st.integers(1, 12), st.integers(0, 24))
def test_v_half_and_v_min_have_their_bubbles_and_memory(p, more):
    m = 2 * p + more
    times = equal_times(2 * p)
    half, least = v_half(p, m), v_min(p, m)
    # 1F1B's bubble is 6 (p - 1) such times; theirs are a half and two thirds of it.
    assert makespan(half, times) <= 6 * m + 3 * (p - 1) + (p == 1)
    assert makespan(least, times) <= 6 * m + 4 * (p - 1) + 1
    # Microbatches of half a device's layers, of which 1F1B keeps 2 p.
    assert max(half.most_on_device()) <= p + 2
    assert max(least.most_on_device()) <= (2 * p + 2) // 3 + 2


def test_v_schedules_against_known_spans():
    """Spans of the greedy V schedules of sail-sg/zero-bubble at p 4, m 12: 83 and 77."""
    assert makespan(v_min(4, 12), equal_times(8)) == 83
    assert makespan(v_half(4, 12), equal_times(8)) == 77


@quick
@given(st.integers(1, 4), st.integers(1, 8), st.randoms(use_true_random=False))
def test_backfilling_keeps_memory_and_the_order_of_each_kind(p, m, random):
    late = [list(row) for row in zb_h2(p, m).rows]
    order = backfilled(tuple(map(tuple, late)))
    assert max(order.most_in_flight()) <= max(Order(tuple(map(tuple, late))).most_in_flight())
    for kind in (F, I, W):
        for row in order.rows:
            numbers = [one.microbatch for one in row if one.kind is kind]
            assert numbers == sorted(numbers)
    times = equal_times(p)
    assert makespan(order, times) <= makespan(Order(tuple(map(tuple, late))), times)


# The heuristic


def of_row(row):
    sends = (float(row["comm"]),) * (row["p"] - 1)
    kinds = (tuple(map(float, row[name])) for name in ("cost_f", "cost_b", "cost_w"))
    memory = ActivationMemory(
        saved=tuple(map(float, row["mem_f"])),
        kept=tuple(-float(x) for x in row["mem_w"]),
        limit=tuple(map(float, row["max_mem"])),
    )
    return StageTimes(*kinds, sends, sends), memory


def most_memory(order, memory):
    """The peak of each stage over its limit."""
    for s, row in enumerate(order.rows):
        saved, kept = memory.saved[s], memory.kept[s]
        steps = {F: saved, I: kept - saved, W: -kept}
        yield max(accumulate(steps[one.kind] for one in row)) / memory.limit[s]


def test_the_heuristic_is_as_good_as_the_authors_program():
    if not DATA.exists():
        pytest.skip("the shared data are not here")
    for row in json.loads(DATA.read_text()):
        times, memory = of_row(row)
        span = automatic(times, row["n"], memory, "span")
        assert longest_span(span, times) <= row["zb_heur_span"], row["name"]
        assert makespan(automatic(times, row["n"], memory), times) <= row["zb_heur_makespan"]
        assert max(most_memory(span, memory)) <= 1


@quick
@given(st.data())
def test_the_heuristic_keeps_memory_for_any_times(data):
    p, m = data.draw(sizes), data.draw(st.integers(1, 10))

    def several(least, most, count=p):
        return tuple(float(data.draw(st.integers(least, most))) for _ in range(count))

    sends = several(0, 3, p - 1), several(0, 3, p - 1)
    times = StageTimes(several(0, 5), several(0, 5), several(0, 5), *sends)
    saved = several(1, 4)
    kept = tuple(min(a, b) for a, b in zip(saved, several(0, 4), strict=True))
    limit = tuple(a * data.draw(st.integers(1, 6)) for a in saved)
    memory = ActivationMemory(saved, kept, limit)
    for goal, cost in (("span", longest_span), ("makespan", makespan)):
        order = automatic(times, m, memory, goal)
        assert (order.device, order.microbatches) == (tuple(range(p)), m)
        assert max(most_memory(order, memory)) <= 1
        other = automatic(times, m, memory, "makespan" if goal == "span" else "span")
        assert cost(order, times) <= cost(other, times)


@quick
@given(sizes, st.integers(0, 12))
def test_equal_times_get_the_bubbles_of_zb_h1_and_zb_h2(p, more):
    m, times = p + more, equal_times(p)
    assert makespan(zb1p(p, m), times) == 3 * m + p - 1
    assert max(zb1p(p, m).most_in_flight()) <= p
    double = zb2p(p, p + m)
    assert longest_span(double, times) == 3 * (p + m)
    assert max(double.most_in_flight()) <= 2 * p


@pytest.mark.parametrize(
    ("saved", "kept", "limit", "message"),
    [
        (2.0, 3.0, 4.0, r"kept\[1\] must be 0 to 2.0 \(saved\[1\]\), got 3.0"),
        (2.0, -1.0, 4.0, r"kept\[1\] must be 0 to 2.0"),
        (2.0, 1.0, 1.5, r"limit\[1\] must be at least 2.0 \(saved\[1\]\), got 1.5"),
    ],
)
def test_memory_that_cannot_be_is_refused(saved, kept, limit, message):
    with pytest.raises(InputError, match=message):
        ActivationMemory((1.0, saved), (1.0, kept), (1.0, limit))
    assert activations(2, 3).limit == (3.0, 3.0)
