"""The published schedules: every order runs, and has the bubble and memory of its paper."""

import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from order_timing import bubble, longest_span, makespan, most_on_device, start_times
from profiles import examples
from published import order_of, timed

from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.actions import Action
from stagewright.formulations.schedules.order import (
    B,
    F,
    I,
    Order,
    W,
    both_directions,
    line,
    loop,
    v_shape,
    wave,
)
from stagewright.formulations.schedules.published.chimera import (
    chimera,
    dualpipe,
    dualpipe_v,
    hanayo,
)
from stagewright.formulations.schedules.published.kinds import KINDS, Sizes, schedule_of
from stagewright.formulations.schedules.published.one_f_one_b import (
    breadth_first,
    interleaved,
    one_f_one_b,
    ragged_interleaved,
    round_robin,
)
from stagewright.formulations.schedules.timing import StageTimes, equal_times
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.pipelines.list_scheduling import schedule_order

Blocks = Sequence[Sequence[Action]]


def ends_by_relaxation(
    order: Order, times: StageTimes, rows: Sequence[Blocks] | None = None
) -> list[list[float]]:
    """Per device the end of every block, by repeating all rows until nothing changes.

    Computations in one block start and end together; by default every one is its own block.
    """
    rows = rows or [[[action] for action in row] for row in order.rows]
    made: dict[tuple[str, int, int], float] = {}
    before: dict[tuple[str, int, int], float] | None = None
    ends: list[list[float]] = []
    while made != before:
        before, ends = dict(made), []
        for row in rows:
            now, at = 0.0, []
            for block in row:
                waits = [_arrival(order, times, made, action) for action in block]
                now = max([now, *waits]) + sum(times.of(action) for action in block)
                at.append(now)
                for action in block:
                    if action.kind is not W:
                        made[_key(action)] = now
            ends.append(at)
    return ends


def _key(action: Action) -> tuple[str, int, int]:
    return "F" if action.kind is F else "B", action.stage, action.microbatch or 0


def _arrival(
    order: Order, times: StageTimes, made: dict[tuple[str, int, int], float], action: Action
) -> float:
    s, m = action.stage, action.microbatch or 0
    path = order.paths[order.path_of[m]]
    if action.kind is W or (action.kind is F and s == 0):
        return 0.0
    if action.kind is F:
        sent = times.send_forward[s - 1] if path[s - 1] != path[s] else 0.0
        return made.get(("F", s - 1, m), 0.0) + sent
    if s == len(path) - 1:
        return made.get(("F", s, m), 0.0)
    sent = times.send_backward[s] if path[s + 1] != path[s] else 0.0
    return made.get(("B", s + 1, m), 0.0) + sent


quick = examples(60)
WHOLE = {"input_gradient": 0.5, "weight_gradient": 0.5}  # a whole backward takes a forward's time


# Paths, placements, and start times


def test_a_path_is_the_device_of_each_stage():
    order = order_of(["0F0 1F1 1B1 0B0", "0F1 1F0 1B0 0B1"], (0, 1))
    assert order.paths == ((0, 1), (1, 0))
    assert (order.most_in_flight(), most_on_device(order)) == ((1, 1), (2, 2))
    assert order.split().paths == order.paths
    assert order_of(["0F0 0B0"]) == order_of(["0F0 0B0"], (0,))
    with pytest.raises(InputError, match="the order has 2 paths: a stage is on several devices"):
        order.device  # noqa: B018


@pytest.mark.parametrize(
    ("rows", "path_of", "message"),
    [
        (["0F0 1F1 1B1 0B0", "0F1 1F0 1B0 0B1"], (), "device 1: 0F1, but stage 0 is on 0"),
        (["0F0 1F1 1B1 0B0", "0F1 1F0 1B0 0B1"], (0, 0), "device 1: 0F1, but stage 0 is on 0"),
        (["0F0 1F1 1B1", "0F1 1F0 1B0 0B1 0B0"], (0, 1), "device 1: 0B0, but stage 0 is on 0"),
        (["0F0 0B0"], (0, 1), "path_of needs 1 values, got 2"),
        (["0F0 0B0 0F1 0B1"], (0,), "path_of needs 2 values, got 1"),
        (["0F0 0B0 0F1 0B1"], (0, 2), "numbered from 0 without gaps"),
        (["0F0 0B0 0F1 0B1"], (-1, 0), "numbered from 0 without gaps"),
    ],
)
def test_what_is_on_no_path_is_refused(rows, path_of, message):
    with pytest.raises(InputError, match=message):
        order_of(rows, path_of)


def test_placements():
    assert line(3) == (0, 1, 2)
    assert loop(3, 2) == (0, 1, 2, 0, 1, 2)
    assert v_shape(3) == (0, 1, 2, 2, 1, 0)
    assert wave(2, 2) == (0, 1, 1, 0, 0, 1, 1, 0)
    assert both_directions(3) == ((0, 1, 2), (2, 1, 0))


def paths_of(name, devices, chunks):
    one = {
        "line": lambda: line(devices),
        "replicated line": lambda: line(devices),
        "loop": lambda: loop(devices, chunks),
        "V": lambda: v_shape(devices),
        "wave": lambda: wave(devices, chunks // 2),
    }
    placement = KINDS[name].placement
    return both_directions(devices) if placement not in one else (one[placement](),)


@quick
@given(timed())
def test_every_order_runs_and_starts_as_early_as_it_can(example):
    name, order, times = example
    starts = start_times(order, times)
    assert [
        [at + times.of(one) for at, one in zip(begun, row, strict=True)]
        for begun, row in zip(starts, order.rows, strict=True)
    ] == ends_by_relaxation(order, times)
    assert makespan(order, times) >= longest_span(order, times)
    assert order.is_split <= KINDS[name].is_split
    devices = len(order.rows)
    assert order.paths == paths_of(name, devices, len(order.paths[0]) // devices)


@quick
@given(timed())
def test_start_times_are_those_of_list_scheduling_where_transfers_take_no_time(example):
    _, order, times = example
    assume(len(order.paths) == 1)
    stages, zeros = len(order.device), (0.0,) * (len(order.device) - 1)
    times = StageTimes(times.forward, times.input_gradient, times.weight_gradient, zeros, zeros)
    problem = MakespanProblem(
        microbatches=order.microbatches,
        forward=times.forward,
        backward=times.input_gradient,
        send_forward=zeros,
        send_backward=zeros,
        reduce=(0.0,) * stages,
        in_flight=(order.microbatches,) * stages,
        device=order.device,
        weight_gradient=times.weight_gradient,
    )
    assert makespan(order.split(), times) == problem.evaluate(schedule_order(problem, order))


def test_a_transfer_takes_no_time_within_a_device():
    order = order_of(["0F0 2F0 2B0 0B0", "1F0 1B0"])
    assert makespan(order, equal_times(3, transfer=5.0)) == 9 + 4 * 5
    order = order_of(["0F0 1F0 1B0 0B0"])
    assert makespan(order, equal_times(2, transfer=5.0)) == 6


# Bubbles and memory of the papers


@quick
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 20))
def test_looped_schedules_divide_the_bubble_by_their_chunks(devices, chunks, microbatches):
    assume(microbatches >= devices)
    times = equal_times(devices * chunks)
    work = 3 * chunks * microbatches
    least = pytest.approx(work + 3 * (devices - 1))
    order = breadth_first(devices, chunks, microbatches)
    assert makespan(order, times) == least
    assert order.most_in_flight() == (microbatches,) * (devices * chunks)
    ragged = ragged_interleaved(devices, chunks, microbatches)
    if microbatches % devices == 0:
        assert ragged == interleaved(devices, chunks, microbatches)
        assert makespan(ragged, times) == least
    assert makespan(ragged, times) <= work + 3 * (devices - 1)


@quick
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))
def test_chimera_and_hanayo_have_their_bubbles(half, waves, units):
    p, m = 2 * half, 2 * half * units
    order = chimera(p, m)
    assert makespan(order, equal_times(p, **WHOLE)) == 2 * m + p - 2
    in_flight = most_on_device(order)
    assert (min(in_flight), max(in_flight)) == ((p // 2 + 1, p) if p > 2 else (2, 2))
    # With B = 2 F and m = p the paper's (p - 2) / (3 m / 2 + p - 2).
    assert bubble(chimera(p, p), equal_times(p)) == pytest.approx((p - 2) / (1.5 * p + p - 2))
    order = hanayo(p, waves, m)
    slots = 4 * waves * m
    assert makespan(order, equal_times(2 * waves * p, **WHOLE)) == slots + 2 * p - 2


@quick
@given(st.integers(1, 4), st.integers(0, 8), st.integers(1, 4), st.integers(1, 4))
def test_dualpipe_has_at_most_the_bubble_of_its_formula(half, more, forward, weight):
    """Equal times have the bubble of the formula; see `blocks_of` for pairs that end as one."""
    inputs, p = max(forward, weight), 2 * half
    formula = (half - 1) * (forward + inputs + weight + inputs + weight - 3 * weight)
    order, folded = dualpipe(p, 2 * (p + more)), dualpipe_v(half, p + more)
    work = 2 * (p + more) * (forward + inputs + weight)
    for one, middle in ((order, (half - 1, half)), (folded, (half - 1,))):
        times = equal_times(p, forward, inputs, weight)
        assert makespan(one, times) <= work + formula
        rows = [blocks_of(row, d in middle) for d, row in enumerate(one.rows)]
        last = max(row[-1] for row in ends_by_relaxation(one, times, rows))
        assert last <= work + formula
        if forward == inputs == weight:
            assert last == work + formula
        assert max(most_on_device(one)) == p + 1
    if p >= 4:
        one_f = one_f_one_b(p, 2 * (p + more))
        assert bubble(order, equal_times(p)) < bubble(one_f, equal_times(p))


def blocks_of(row, at_the_middle):
    """A forward and the backward after it as one, except for the first such pair in the middle."""
    blocks, whole = [], at_the_middle
    for action in row:
        if action.kind is B and blocks[-1][-1].kind is F and not whole:
            blocks[-1].append(action)
        else:
            whole = whole and action.kind is not B
            blocks.append([action])
    return blocks


# 1F1B with replicas, and without flush


@quick
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(4, 16))
def test_round_robin_takes_turns_and_admits_noam(replicas, microbatches):
    order = round_robin(tuple(replicas), microbatches)
    assert len(order.rows) == sum(replicas)
    for m, path in enumerate(order.path_of):
        for s, device in enumerate(order.paths[path]):
            assert device == sum(replicas[:s]) + m % replicas[s]
    makespan(order, equal_times(len(replicas)))
    noam = [-(-sum(replicas[s:]) // count) for s, count in enumerate(replicas)]
    turns = [-(-microbatches // count) for count in replicas]
    assert order.most_in_flight() == tuple(map(min, noam, turns))
    if set(replicas) == {1}:
        assert order == one_f_one_b(len(replicas), microbatches)


def test_figure_2_7_of_the_thesis():
    """2-1: the first stage takes 2 + 4, the second 1 + 2; nobody waits in the steady state."""
    order = round_robin((2, 1), 6)
    assert [" ".join(map(str, row)) for row in order.rows] == [
        "0F0 0F2 0B0 0F4 0B2 0B4",
        "0F1 0F3 0B1 0F5 0B3 0B5",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1F5 1B5",
    ]
    times = StageTimes((2.0, 1.0), (2.0, 1.0), (2.0, 1.0), (0.0,), (0.0,))
    starts = start_times(order, times)[2]
    assert [b - a for a, b in pairwise(starts[2:])] == [1, 2] * 4 + [1]


# The registry


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("zigzag", Sizes(2, 2), "unknown schedule 'zigzag'; known are gpipe, 1f1b"),
        ("interleaved", Sizes(4, 6, 2), "multiple of 4 microbatches .* got 6; .* 4 or 8"),
        ("interleaved", Sizes(4, 3, 2), "multiple of 4 microbatches .* got 3; the nearest are 4$"),
        ("chimera", Sizes(3, 4), "even number of devices, got 3; the nearest are 2 or 4"),
        ("chimera", Sizes(1, 4), "even number of devices, got 1; the nearest are 2"),
        ("chimera", Sizes(4, 5), "even number of microbatches, got 5; the nearest are 4 or 6"),
        ("dualpipe", Sizes(4, 6), r"DualPipe needs at least 8 microbatches \(2 p\), got 6"),
        ("dualpipe", Sizes(5, 20), "even number of devices, got 5; the nearest are 4 or 6"),
        ("dualpipev", Sizes(4, 7), r"DualPipeV needs at least 8 microbatches \(2 p\), got 7"),
        ("gpipe", Sizes(4, 4, 2), "gpipe has 1 stage per device, got 2"),
        ("zbv", Sizes(4, 4, 3), "zbv has 2 stages per device, got 3"),
        ("hanayo", Sizes(4, 4, 3), "hanayo has an even number of stages per device, got 3"),
        ("1f1b", Sizes(3, 4, replicas=(2, 1)), "1f1b has no replicas; 1f1b-rr has"),
        ("1f1b-rr", Sizes(5, 2, replicas=(2, 3)), "needs at least 3 microbatches.* got 2"),
        ("zb1p", Sizes(3, 4, times=equal_times(2)), "the times are of 2 stages, not of 3"),
        ("zbv", Sizes(3, 4, times=equal_times(3)), "the times are of 3 stages, not of 6"),
    ],
)
def test_sizes_that_do_not_work_are_refused_in_one_line(name, sizes, message):
    with pytest.raises(InputError, match=message) as error:
        schedule_of(name, sizes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"devices": 0}, "devices must be at least 1, got 0"),
        ({"microbatches": -1}, "microbatches must be at least 1, got -1"),
        ({"chunks": 0}, "chunks must be at least 1, got 0"),
        ({"replicas": (3, 0)}, "replicas must be at least 1 and add up to the 3 devices"),
        ({"replicas": (1, 1)}, r"add up to the 3 devices, got \(1, 1\)"),
    ],
)
def test_numbers_that_are_no_sizes_are_refused(values, message):
    with pytest.raises(InputError, match=message):
        Sizes(**{"devices": 3, "microbatches": 4, **values})


def test_times_need_a_value_for_every_stage():
    with pytest.raises(InputError, match="weight_gradient needs 2 values, got 1"):
        StageTimes((1.0, 1.0), (1.0, 1.0), (1.0,), (0.0,), (0.0,))


@pytest.mark.parametrize("name", [*KINDS])
def test_every_kind_has_an_order_by_default(name):
    order = schedule_of(name, Sizes(4, 8))
    kind = KINDS[name]
    assert (len(order.rows), order.microbatches, order.is_split) == (4, 8, kind.is_split)
    assert len(order.paths[0]) == 4 * kind.chunks.step
    times = equal_times(len(order.paths[0]), 3.0, 2.0, 1.0, 0.5)
    timed = schedule_of(name, Sizes(4, 8, times=times))
    assert kind.depends_on_times or timed == order
    if name in ("zb1p", "zb2p"):
        assert makespan(timed, times) <= makespan(order, times)
    assert re.search(r"\d{4}", kind.source)
    kinds = {one.kind for row in order.rows for one in row}
    assert kinds <= ({F, B, I, W} if kind.is_split else {F, B})
