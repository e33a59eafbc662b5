from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from makespan_oracle import brute_force_makespan
from profiles import examples
from strategies import random_makespan

from stagewright.formulations.pipelines.blocks import blocks_of
from stagewright.formulations.pipelines.bounds.stages import one_machine_bound, schedule_bounds
from stagewright.formulations.pipelines.makespan import MakespanProblem

NAMES = (
    "critical path",
    "busiest device",
    "busiest channel",
    "warm-up and drain",
    "in-flight slots",
    "one-machine relaxation",
)


def bounds(problem):
    return {bound.proved_by: bound.seconds for bound in schedule_bounds(problem)}


def uniform(stages, microbatches, in_flight, forward=1.0, backward=2.0, send=0.0):
    return MakespanProblem(
        microbatches,
        (forward,) * stages,
        (backward,) * stages,
        (send,) * (stages - 1),
        (send,) * (stages - 1),
        (0.0,) * stages,
        (in_flight,) * stages,
    )


@examples(150, derandomize=True)
@given(random_makespan())
def test_no_bound_exceeds_the_optimum(problem):
    optimum = brute_force_makespan(problem)
    for name, seconds in bounds(problem).items():
        assert seconds <= optimum * (1 + 1e-9), name


@examples(50, derandomize=True)
@given(random_makespan(max_stages=2, max_microbatches=4))
def test_no_bound_exceeds_the_optimum_with_more_microbatches(problem):
    optimum = brute_force_makespan(problem, fifo=True)
    assert max(bounds(problem).values()) <= optimum * (1 + 1e-9)


@examples(100, derandomize=True)
@given(random_makespan(max_stages=5, max_microbatches=8))
def test_the_relaxation_covers_the_loads_and_the_path(problem):
    found = bounds(problem)
    for name in ("critical path", "busiest device", "warm-up and drain", "in-flight slots"):
        assert found["one-machine relaxation"] >= found[name] * (1 - 1e-9), name


@examples(50, derandomize=True)
@given(random_makespan(max_stages=4, max_microbatches=5), st.floats(1e-6, 1e6))
def test_bounds_scale_with_time(problem, factor):
    times = ("forward", "backward", "send_forward", "send_backward", "reduce")
    scaled = replace(
        problem, **{name: tuple(factor * t for t in getattr(problem, name)) for name in times}
    )
    for name, seconds in bounds(problem).items():
        assert bounds(scaled)[name] == pytest.approx(factor * seconds)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 5), (4, 4), (8, 32)])
def test_equal_stages_have_the_bubble_of_the_literature(stages, microbatches):
    # (M + S - 1)(f + b), which 1F1B reaches (Narayanan's thesis, section 4.2.2)
    found = bounds(uniform(stages, microbatches, stages))
    assert found["busiest device"] == (microbatches + stages - 1) * 3
    assert tuple(found) == NAMES


def test_one_slot_is_one_microbatch_after_the_other():
    assert bounds(uniform(3, 4, 1, send=1.0))["in-flight slots"] == 4 * (3 * 3 + 2 * 2)


def test_three_microbatches_take_two_turns_in_two_slots():
    assert bounds(uniform(2, 3, 2))["in-flight slots"] == 2 * 6


def test_the_channel_is_shared_by_both_directions():
    # F, then five transfers each way of 10, then B; the all-reduce follows
    problem = replace(uniform(2, 5, 5, send=10.0), reduce=(7.0, 0.0))
    assert bounds(problem)["busiest channel"] == 1 + 100 + 2 + 7


def test_warm_up_and_drain_leave_gaps():
    # Stage 0 sends 2 of 4 microbatches ahead: of the round trip of 1 + 3 + 1 + 2 + 3 = 10 it works
    # 2 while warming up, and 1 + 2 while draining.
    problem = uniform(2, 4, 2, send=3.0)
    assert bounds(problem)["warm-up and drain"] == 12 + (10 - 2) + (10 - 3)


def test_an_all_reduce_of_a_late_stage_can_decide():
    problem = replace(uniform(2, 3, 3), reduce=(0.0, 50.0))
    found = bounds(problem)
    assert found["busiest device"] == 1 + 9 + 50
    assert found["critical path"] == 1 + 3 + 50


def test_blocks_follow_a_microbatch():
    problem = MakespanProblem(
        2, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0), (7.0, 8.0), (9.0, 10.0), (11.0, 12.0, 13.0), (2, 2, 2)
    )
    blocks = blocks_of(problem)
    assert blocks.durations.tolist() == [1, 7, 2, 8, 3, 6, 10, 5, 9, 4]
    assert blocks.machines.tolist() == [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]
    assert blocks.releases.tolist() == [0] * 10
    assert blocks.tails.tolist() == [0, 0, 0, 0, 0, 13, 0, 12, 0, 11]


def preemptive_optimum(heads, durations, tails):
    """Jackson's bound as a maximum over sets: least head + work + least tail."""
    n = len(heads)
    sets = (np.flatnonzero([mask >> i & 1 for i in range(n)]) for mask in range(1, 2**n))
    return max(heads[s].min() + durations[s].sum() + tails[s].min() for s in sets)


@examples(100, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=7
    )
)
def test_the_one_machine_bound_is_the_largest_of_all_sets(tasks):
    heads, durations, tails = np.array(tasks).T
    found = one_machine_bound(heads, durations, tails)
    assert found == preemptive_optimum(heads, durations, tails)
