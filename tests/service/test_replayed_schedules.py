"""Orders of schedules timed again on half-duplex channels that serve first come, first served."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from stagewright.formulations.pipelines.windows import timetable_of_order
from stagewright.service.schedules.requests import ScheduleRequest
from stagewright.service.schedules.scheduling import schedule

KINDS = ("gpipe", "1f1b", "pe", "interleaved", "zb-h1", "zb1p", "zbv", "v-half", "optimal")


@examples(100)
@given(st.data())
def test_generated_orders_have_their_times_and_optimal_ones_stay_valid(data):
    kind = data.draw(st.sampled_from(KINDS))
    stages = data.draw(st.integers(2, 3))
    microbatches = stages * data.draw(st.integers(1, 2))

    def times(most, count=stages):
        drawn = data.draw(st.lists(st.integers(1, most), min_size=count, max_size=count))
        return tuple(map(float, drawn))

    request = ScheduleRequest.of(
        microbatches=microbatches,
        forward=times(4),
        backward=times(5),
        weight_gradient=times(4),
        transfers=times(8, 1),  # as slow as computations, or slower
        kind=kind,
        time_limit=1.0,
    )
    answer = schedule(request)
    order = answer.timed.order
    timed, times_again = timetable_of_order(answer.problem, order)
    assert answer.problem.evaluate(times_again) == pytest.approx(timed.makespan())
    assert timed.makespan() >= answer.bound * (1 - 1e-9)
    if kind != "optimal":
        assert timed.makespan() == answer.makespan
        assert timed.starts == answer.timed.starts
