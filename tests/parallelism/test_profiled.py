"""Profiled pipelines: their time and memory, the measured plans, and the best plan."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiled_oracle import finish, least_seconds
from profiles import examples

from benchmarks.profiled import RATES, predictions
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.parallelism.profiles.cluster import Pool, Route, ServerPools
from stagewright.formulations.parallelism.profiles.pipelines import (
    MemoryRule,
    ProfiledPlan,
    ProfiledProblem,
    ProfiledStage,
    Replica,
    evaluate,
    even_microbatches,
    least_finish,
    pipeline_seconds,
)
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.models.layer_profiles import LayerProfiles, LayerSizes, Measured
from stagewright.solvers.parallelism.profiles import pipelines as solver
from stagewright.solvers.parallelism.profiles.pipelines import profiled_plan

LIMITS = Limits(60)

times = st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0])


@st.composite
def pipelines(draw):
    p = draw(st.integers(1, 5))
    several = st.lists(times, min_size=p, max_size=p)
    sends = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=p - 1, max_size=p - 1))
    return draw(several), draw(several), sends, draw(st.integers(1, 9))


# Time of a pipeline.


def test_a_single_stage_does_one_microbatch_after_the_other():
    assert pipeline_seconds(np.array([1.0]), np.array([2.0]), np.array([]), 3).tolist() == [9.0]


def test_two_stages():
    """Stage 1 is busy from 1 + 0.5 on; it ends with its last gradient, then stage 0's backward.

    0: F0 A0 F1 .. .. G0 A1 B0 .. G1 B1
    1: .. A0 F0 B0    G0 A1 F1 B1 G1
    """
    found = pipeline_seconds(np.array([1.0, 2.0]), np.array([1.0, 2.0]), np.array([0.5]), 2)
    assert found.tolist() == [1 + 0.5 + 4 + 1 + 4 + 0.5 + 1, 1 + 0.5 + 4 + 1 + 4 + 0.5]


@examples(200)
@given(pipelines())
def test_times_are_those_of_the_actions(pipeline):
    forward, backward, sends, microbatches = pipeline
    found = pipeline_seconds(np.array(forward), np.array(backward), np.array(sends), microbatches)
    np.testing.assert_allclose(found, finish(forward, backward, sends, microbatches))


@examples(200)
@given(pipelines())
def test_no_stage_is_done_before_its_bound(pipeline):
    forward, backward, sends, m = pipeline
    found = pipeline_seconds(np.array(forward), np.array(backward), np.array(sends), m)
    p, links = len(forward), [0.0, *sends, 0.0]
    for s in range(p):
        later = sum(forward[s + 1 :]) + sum(backward[s + 1 :]) + 2 * sum(sends[s:])
        least = least_finish(forward[s], backward[s], (links[s], links[s + 1]), later, p - 1 - s, m)
        assert found[s] >= sum(forward[:s]) + sum(sends[: max(0, s - 1)]) + least - 1e-9
        drain = sum(backward[:s]) + sum(sends[: max(0, s - 1)])
        first = sum(forward[:s]) + sum(sends[: max(0, s - 1)])
        assert found[0] >= first + least + drain - 1e-9


def test_the_bound_of_equal_stages_is_the_time():
    """All is busy but the way in and out: (m + p - 1) (F + B)."""
    p, m = 4, 8
    found = pipeline_seconds(np.ones(p), 2 * np.ones(p), np.zeros(p - 1), m)
    assert found[0] == (m + p - 1) * 3
    assert least_finish(1.0, 2.0, (0.0, 0.0), 9.0, 3, m) == found[0]


# A plan by hand: two layers, two kinds, one sample per microbatch.

NET = Route(1e6, 1.5e6, 1.0)
KINDS = ("a", "b")


def problem(memory=1e9):
    measured = (
        Measured("a", 1, 1, (2.0, 4.0), (4.0, 8.0), (1.0, 1.0)),
        Measured("a", 1, 2, (1.0, 2.0), (2.0, 4.0), (0.5, 0.5)),
        Measured("b", 1, 1, (3.0, 6.0), (6.0, 12.0), (2.0, 2.0)),
    )
    sizes = (
        LayerSizes(1, (2e6, 4e6), (100.0, 200.0), (6e6, 1.0)),
        LayerSizes(2, (1e6, 2e6), (50.0, 100.0), (6e6, 1.0)),
    )
    pools = (
        Pool("a", "z", 2, 2, memory, NET),
        Pool("b", "z", 1, 2, memory, NET, inside=Route(4e6, 4e6)),
    )
    profiles = LayerProfiles("two", "measured: here", measured, sizes)
    return ProfiledProblem(profiles, ServerPools(pools), batch=4)


def stage(layers, *replicas):
    return ProfiledStage(layers, tuple(Replica(*one) for one in replicas))


RULE = MemoryRule(parameter_bytes=2.0, backward_factor=3.0, reserve_bytes=7.0)


def test_two_stages_of_two_replicas_by_hand():
    plan = ProfiledPlan(1, (stage(1, (0, 0, 2), (0, 1, 2)), stage(1, (1, 0, 1), (1, 0, 1))), (2, 2))
    found = evaluate(problem(), plan)
    send = 1.0 + 6e6 / 1e6  # the smaller group has one device
    alone = pipeline_seconds(np.array([1.0, 6.0]), np.array([2.0, 12.0]), np.array([send]), 2)
    assert found.pipeline_seconds == alone[0]
    # Two ranks: 2 (k - 1) = 2 steps of half the bytes; stage 1 is inside a server.
    reduce = (2 * (1.0 + 4e6 / 2 / 1e6), 2 * (16e6 / 2 / 4e6))
    assert found.reduce_seconds == reduce
    assert found.update_seconds == (0.5, 2.0)
    ends = [alone[0] + reduce[0] + 0.5, alone[1] + reduce[1] + 2.0]
    assert found.seconds == max(ends)


def test_memory_by_hand():
    plan = ProfiledPlan(1, (stage(1, (0, 0, 2)), stage(1, (1, 0, 1))), (4,))
    found = evaluate(replace(problem(memory=8e6 + 807), memory=RULE), plan)
    # Two microbatches in flight in the first stage, one in the last.
    assert found.memory_bytes == (7 + 2e6 + 2 * 50 + 3 * 50, 7 + 8e6 + 200 + 3 * 200)
    assert found.peak_bytes == 8e6 + 807
    assert found.fits
    tight = replace(problem(memory=8e6 + 806), memory=RULE)
    assert not evaluate(tight, plan).fits
    single = ProfiledPlan(1, plan.stages, (1,))
    alone = evaluate(replace(tight, batch=1), single)
    assert alone.memory_bytes[0] == found.memory_bytes[0] - 50  # one in flight, no second


def test_a_slower_replica_delays_its_stage():
    mixed = ProfiledPlan(1, (stage(2, (0, 0, 1), (1, 0, 1)),), (2, 2))
    equal = ProfiledPlan(1, (stage(2, (0, 0, 1), (0, 1, 1)),), (2, 2))
    assert evaluate(problem(), mixed).pipeline_seconds == 2 * 27
    assert evaluate(problem(), equal).pipeline_seconds == 2 * 18
    fewer = ProfiledPlan(1, mixed.stages, (3, 1))
    assert evaluate(problem(), fewer).pipeline_seconds == 3 * 18


@pytest.mark.parametrize(
    ("plan", "part"),
    [
        (ProfiledPlan(1, (stage(1, (0, 0, 1)),), (4,)), "there are 2 layers"),
        (ProfiledPlan(1, (stage(2, (0, 0, 1)),), (3,)), "the batch has 4"),
        (ProfiledPlan(1, (stage(2, (0, 0, 1)),), (2, 2)), "1 replicas, there are 2 pipelines"),
        (ProfiledPlan(1, (stage(2, (2, 0, 1)),), (4,)), "no pool 2"),
        (ProfiledPlan(1, (stage(2, (1, 1, 1)),), (4,)), "pool 1 has no server 1"),
        (
            ProfiledPlan(1, (stage(1, (0, 0, 2)), stage(1, (0, 0, 1))), (4,)),
            "3 devices are used, it has 2",
        ),
    ],
)
def test_broken_plans_are_invalid(plan, part):
    with pytest.raises(InvalidPlan, match=part):
        evaluate(problem(), plan)


def test_what_is_not_measured_or_known_is_refused():
    with pytest.raises(InputError, match="microbatches of 2"):
        evaluate(problem(), ProfiledPlan(2, (stage(2, (0, 0, 1)),), (2,)))
    with pytest.raises(InputError, match="no device kind 'c'"):
        replace(problem(), cluster=ServerPools((Pool("c", "z", 1, 1, 1e9, NET),)))
    with pytest.raises(InputError, match="between_zones"):
        ServerPools((Pool("a", "y", 1, 1, 1e9, NET), Pool("a", "z", 1, 1, 1e9, NET)))
    with pytest.raises(InputError, match="less than 1 MB/s"):
        Route(10.0, 1e9)


def test_a_route_through_zones_is_as_slow_as_its_slowest_part():
    far = Route(1e6, 8e6, 3.0)
    pools = (Pool("a", "y", 1, 1, 1e9, Route(2e6, 4e6)), Pool("a", "z", 1, 1, 1e9, NET))
    cluster = ServerPools(pools, between_zones=far)
    assert cluster.route(0, 1, same_server=False) == Route(1e6, 1.5e6, 3.0)
    assert cluster.route(0, 0, same_server=True) == Route(2e6, 4e6)


# The best plan.


@st.composite
def problems(draw):
    layers = draw(st.integers(1, 3))
    seconds = st.lists(st.sampled_from([1.0, 2.0, 3.0, 5.0]), min_size=layers, max_size=layers)
    measured = [
        Measured(kind, size, tensor, tuple(draw(seconds)), tuple(draw(seconds)), (0.5,) * layers)
        for kind in KINDS
        for size in draw(st.sampled_from([(1,), (2,), (1, 2)]))
        for tensor in draw(st.sampled_from([(1,), (1, 2)]))
    ]
    amounts = st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=layers, max_size=layers)
    sizes = [
        LayerSizes(t, *(tuple(1e6 * each / t for each in draw(amounts)) for _ in range(3)))
        for t in (1, 2)
    ]
    inside = draw(st.sampled_from([None, Route(1e7, 1e7)]))
    pools = [
        Pool(
            kind,
            draw(st.sampled_from("yz")),
            draw(st.integers(1, 2)),
            draw(st.integers(1, 2)),
            draw(st.sampled_from([12e6, 30e6, 1e9])),
            Route(1e6, draw(st.sampled_from([1e6, 2e6]))),
            inside,
        )
        for kind in KINDS[: draw(st.integers(1, 2))]
    ]
    return ProfiledProblem(
        LayerProfiles("random", "measured: no", tuple(measured), tuple(sizes)),
        ServerPools(tuple(pools), between_zones=Route(1e6, 1e6, 0.5)),
        draw(st.sampled_from([2, 4, 6])),
        MemoryRule(2.0, 1.0, 1e6),
    )


@examples(150)
@given(problems())
def test_the_best_plan_is_that_of_an_enumeration(random):
    found, best = profiled_plan(random, LIMITS), least_seconds(random)
    if best == np.inf:
        assert (found.plan, found.status) == (None, Status.INFEASIBLE)
        return
    assert found.plan is not None
    assert evaluate(random, found.plan) == found.estimate
    assert found.estimate.fits
    assert found.bound <= best * (1 + 1e-9)
    assert found.estimate.seconds >= best * (1 - 1e-9)
    if all(pool.inside is None for pool in random.cluster.pools):
        assert found.status is Status.OPTIMAL  # links do not depend on the servers
    if found.status is Status.OPTIMAL:
        assert found.estimate.seconds == pytest.approx(best)
        assert found.gap == 0


@examples(60)
@given(problems())
def test_the_bound_holds_where_labels_are_too_many(random):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "MOST_LISTED", 3)
        patch.setattr(solver, "MOST_LABELS", 25)
        found = profiled_plan(random, LIMITS)
    best = least_seconds(random)
    assert found.bound <= best * (1 + 1e-9)
    assert (found.status is Status.INFEASIBLE) <= (best == np.inf)


def test_no_time_is_no_answer():
    found = profiled_plan(problem(), Limits(1e-9))
    assert (found.plan, found.status, found.gap) == (None, Status.NO_ANSWER, None)
    assert 0 < found.bound < np.inf


@examples(60)
@given(problems())
def test_the_bound_holds_where_cases_are_left_out(random):
    """The clock jumps over half of the time after the first case."""
    ticks = iter([0.0, 0.0, 0.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "perf_counter", lambda: next(ticks, 31.0))
        found = profiled_plan(random, LIMITS)
    best = least_seconds(random)
    assert found.bound <= best * (1 + 1e-9)
    assert (found.status is Status.INFEASIBLE) <= (best == np.inf)


def test_more_memory_and_more_servers_never_hurt():
    base = replace(problem(memory=30e6), memory=RULE)
    cost = profiled_plan(base, LIMITS).estimate.seconds
    for changed in ({"memory_bytes": 60e6}, {"servers": 3}):
        pools = tuple(replace(pool, **changed) for pool in base.cluster.pools)
        larger = replace(base, cluster=ServerPools(pools))
        assert profiled_plan(larger, LIMITS).estimate.seconds <= cost


def test_replicas_of_a_stage_share_a_server_where_their_sum_decides():
    """Two stages of two replicas on two servers of two: sums are slow outside a server."""
    inside, network = Route(1e12, 1e12), Route(1e6, 1e6)
    measured = Measured("a", 1, 1, (1.0, 1.0), (1.0, 1.0), (0.0, 0.0))
    sizes = LayerSizes(1, (1e6, 1e6), (1.0, 1.0), (1.0, 1.0))
    pool = Pool("a", "z", 2, 2, 40e6, network, inside)
    found = profiled_plan(
        ProfiledProblem(
            LayerProfiles("m", "s", (measured,), (sizes,)),
            ServerPools((pool,)),
            8,
            MemoryRule(reserve_bytes=0.0, parameter_bytes=30.0),
        ),
        LIMITS,
    )
    assert [len({one.server for one in stage.replicas}) for stage in found.plan.stages] == [1, 1]
    assert found.estimate.seconds < 12


def test_microbatches_are_divided_evenly():
    assert even_microbatches(7, 3) == (3, 2, 2)


# Sailor's measured plans.

SAILOR = Path(__file__).parents[3] / "shared" / "data" / "training" / "sailor"


@pytest.mark.skipif(
    not SAILOR.is_dir(), reason="the public profiles and plans are not beside the checkout"
)
def test_measured_plans_of_opt_350m_are_predicted():
    rows = predictions(*RATES)
    assert len(rows) == 15
    assert np.mean([abs(row.time_error) for row in rows]) < 0.06
    assert np.mean([abs(row.memory_error) for row in rows]) < 0.02
    assert max(abs(row.memory_error) for row in rows) < 0.04
