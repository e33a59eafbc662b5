"""Start times with channels, and activation memory, of the published schedules."""

from itertools import pairwise
from math import inf

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from order_timing import makespan, most_on_device, start_times
from profiles import examples
from published import generated, order_of, timed

from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.pipelines.windows import timetable_of_order
from stagewright.formulations.schedules.order import line, loop, placed, v_shape, wave
from stagewright.formulations.schedules.planned import with_channels
from stagewright.formulations.schedules.published.kinds import KINDS, Sizes, schedule_of
from stagewright.formulations.schedules.published.one_f_one_b import round_robin
from stagewright.formulations.schedules.timing import ActivationMemory, StageTimes, equal_times
from stagewright.graphs.documents.errors import InputError

quick = examples(60)


@quick
@given(timed())
def test_channels_that_take_no_time_change_no_start(example):
    _, order, times = example
    zeros = (0.0,) * len(times.send_forward)
    times = StageTimes(times.forward, times.input_gradient, times.weight_gradient, zeros, zeros)
    assert with_channels(order, times)[0].starts == start_times(order, times)


@quick
@given(timed())
def test_a_whole_backward_is_a_split_one_that_sends_its_gradient_late(example):
    """`MakespanProblem.evaluate` checks every constraint of the split problem."""
    _, order, times = example
    assume(len(order.paths) == 1)
    pairs = [*pairwise(order.device)]
    sends = tuple(t * (a != b) for t, (a, b) in zip(times.send_forward, pairs, strict=True))
    problem = MakespanProblem(
        microbatches=order.microbatches,
        forward=times.forward,
        backward=times.input_gradient,
        send_forward=sends,
        send_backward=sends,
        reduce=(0.0,) * len(order.device),
        in_flight=order.most_in_flight(),
        device=order.device,
        weight_gradient=times.weight_gradient,
    )
    found, timetable = timetable_of_order(problem, order)
    assert found.makespan() == problem.evaluate(timetable)
    alone = StageTimes(
        times.forward, times.input_gradient, times.weight_gradient, sends, sends
    )  # without queues for channels
    assert found.makespan() >= makespan(order, alone)
    assert found.loads() == tuple(sum(map(times.of, row)) for row in order.rows)


def test_channels_carry_both_directions_one_after_the_other():
    """1F0 ends at 7 while the channel brings microbatch 1 until 11: 1B0's gradient waits for it."""
    order = order_of(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])
    times = equal_times(2, transfer=5.0)
    found, sent = with_channels(order, times)
    assert sent == {(True, 1, 0): 1, (True, 1, 1): 6, (False, 0, 0): 11, (False, 0, 1): 16}
    assert found.starts == ((0, 1, 16, 21), (6, 7, 11, 12))
    assert start_times(order, times)[0] == (0, 1, 14, 17)


def test_two_directions_have_their_own_channels():
    order = order_of(["0F0 1F1 1B1 0B0", "0F1 1F0 1B0 0B1"], (0, 1))
    times = equal_times(2, transfer=5.0)
    assert with_channels(order, times)[0].starts == start_times(order, times)


def test_paths_through_the_same_two_copies_share_their_channel():
    """Stages 1 and 2 have one copy each: microbatch 1 waits until the channel is free at 12."""
    order = round_robin((2, 1, 1), 2)
    assert order.path_of == (0, 1)
    _, sent = with_channels(order, equal_times(3, transfer=5.0))
    assert sent[True, 1, 0] == sent[True, 1, 1] == 1  # from two copies of stage 0
    assert (sent[True, 2, 0], sent[True, 2, 1]) == (7, 12)


def test_a_deadlock_names_a_computation():
    order = order_of(["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"])
    for made in (makespan, with_channels):
        with pytest.raises(InputError, match=r"deadlock: .*, one of them at 0B0"):
            made(order, equal_times(2))


def test_memory_is_added_by_forwards_and_given_back_by_backwards():
    memory = ActivationMemory((4.0, 3.0), (1.0, 3.0), (9.0, 9.0))
    split = order_of(["0F0 0F1 0I0 0F2 0I1 0W0 0W1 0I2 0W2", "1F0 1B0 1F1 1B1 1F2 1B2"])
    assert memory.peaks(split) == (9, 3)  # 8 after two forwards, 5 after I, then 9
    assert memory.least(line(2)) == (4, 3)
    assert memory.within(2, line(2)).limit == (8, 6)
    assert memory.within(5, line(2)) == memory


@quick
@given(generated())
def test_memory_in_microbatches_is_what_is_in_flight(example):
    _, order = example
    ones = (1.0,) * len(order.paths[0])
    memory = ActivationMemory(ones, ones, (inf,) * len(order.rows))
    assert memory.peaks(order) == most_on_device(order)


@quick
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 4), st.data())
def test_heuristics_keep_a_limit_in_memory(devices, microbatches, kept, data):
    name = data.draw(st.sampled_from(["zb1p", "zb2p", "zbv"]))
    stages = devices * KINDS[name].chunks.step
    device = placed(KINDS[name].placement, devices, KINDS[name].chunks.step)
    saved = tuple(float(kept + data.draw(st.integers(0, 3))) for _ in device)
    free = ActivationMemory(saved, (float(kept),) * stages, (inf,) * devices)
    least = free.least(device)
    limit = tuple(one + data.draw(st.integers(0, 12)) for one in least)
    memory = ActivationMemory(saved, free.kept, limit)
    order = schedule_of(
        name, Sizes(devices, microbatches, times=equal_times(stages), memory=memory)
    )
    assert all(peak <= most for peak, most in zip(memory.peaks(order), limit, strict=True))
    most = 2 * devices if name == "zb2p" else devices
    own = zip(memory.peaks(order), least, strict=True)
    assert all(peak <= most * one for peak, one in own)


def test_placements_by_name():
    assert placed("line", 3, 1) == line(3)
    assert placed("loop", 3, 2) == loop(3, 2)
    assert placed("V", 3, 2) == v_shape(3)
    assert placed("wave", 2, 4) == wave(2, 2)
    for name, chunks, needs in (("line", 2, "1 stage"), ("V", 4, "2 stages"), ("wave", 3, "even")):
        with pytest.raises(InputError, match=f"placement {name} has .*{needs}.*, got {chunks}"):
            placed(name, 4, chunks)
