"""Labels of profiled pipelines: their bounds, what is left out, and the costs of stages."""

from itertools import combinations, product
from math import comb, inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from stagewright.formulations.parallelism.profiles.cluster import Pool, Route, ServerPools
from stagewright.formulations.parallelism.profiles.pipelines import (
    MemoryRule,
    ProfiledProblem,
    device_bytes,
    evaluate,
)
from stagewright.graphs.models.layer_profiles import LayerProfiles, LayerSizes, Measured
from stagewright.solvers.parallelism.profiles.labels import Overflow, ProfileLabels
from stagewright.solvers.parallelism.profiles.pipelines import placements
from stagewright.solvers.parallelism.profiles.tables import Tables

MOST = 10**6


@st.composite
def tables(draw, *, most=5, memory=1e12):
    """Two kinds, one of them with two tensor degrees; transfers and reductions of some weight."""
    number = draw(st.integers(2, most))
    seconds = st.lists(st.floats(0.5, 5.0), min_size=number, max_size=number).map(tuple)
    amounts = st.lists(st.floats(0.0, 4e6), min_size=number, max_size=number).map(tuple)
    measured = tuple(
        Measured(kind, 1, tensor, draw(seconds), draw(seconds), draw(seconds))
        for kind, tensor in (("a", 1), ("a", 2), ("b", 1))
    )
    sizes = tuple(LayerSizes(t, *(draw(amounts) for _ in range(3))) for t in (1, 2))
    slow, quick = Route(1e6, 1.5e6, 0.1), Route(2e6, 4e6)
    pools = (Pool("a", "y", 4, 2, memory, slow, quick), Pool("b", "z", 3, 1, memory, quick))
    batch, data = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    problem = ProfiledProblem(
        LayerProfiles("random", "measured: no", measured, sizes),
        ServerPools(pools, between_zones=Route(3e6, 3e6)),
        max(batch, data),
        MemoryRule(2.0, 1.5, 1e6),
    )
    return Tables(problem, 1, data)


def pipelines(made: Tables):
    """Ends and choices of every pipeline for which there are devices, in number."""
    for number in range(1, made.layers + 1):
        for cuts in combinations(range(1, made.layers), number - 1):
            for chosen in product(range(len(made.choices)), repeat=number):
                used = [0] * len(made.capacity)
                for one in chosen:
                    used[made.choices[one].pool] += made.devices[one]
                if all(map(int.__le__, used, made.capacity)):
                    yield (*cuts, made.layers), chosen


@examples(100, quick=30)
@given(tables(most=4))
def test_without_a_cutoff_all_pipelines_are_listed(made):
    found = ProfileLabels(made, inf, MOST, prune=False).run()
    listed = [
        (tuple(one.stop for one in label.stages()), tuple(one.choice for one in label.stages()))
        for _, label in found
    ]
    assert sorted(listed) == sorted(pipelines(made))


@examples(300, quick=60)
@given(tables())
def test_bounds_are_below_the_times_and_pruning_keeps_the_least(made):
    every = ProfileLabels(made, inf, MOST, prune=False).run()
    for bound, label in every:
        ideal = made.ideal_seconds(list(label.stages()))
        assert made.bound() <= bound * (1 + 1e-9)
        assert bound <= ideal * (1 + 1e-9)
    kept = ProfileLabels(made, inf, MOST, prune=True).run()
    assert len(kept) <= len(every)
    assert kept[0][0] == pytest.approx(every[0][0])


@examples(100, quick=30)
@given(tables(), st.floats(1.0, 1.5))
def test_a_cutoff_leaves_out_only_what_is_not_below_it(made, factor):
    every = ProfileLabels(made, inf, MOST, prune=False).run()
    cutoff = every[0][0] * factor
    below = ProfileLabels(made, cutoff, MOST, prune=False).run()
    expected = [bound for bound, _ in every if bound < cutoff * (1 - 1e-9)]
    np.testing.assert_allclose([bound for bound, _ in below[: len(expected)]], expected)
    assert all(bound < cutoff for bound, _ in below)


@examples(100, quick=30)
@given(tables())
def test_no_placement_is_faster_than_the_ideal(made):
    for _, label in ProfileLabels(made, inf, MOST, prune=True).run():
        stages = list(label.stages())
        for plan in placements(made, stages):
            seconds = evaluate(made.problem, plan).seconds
            assert seconds >= made.ideal_seconds(stages) * (1 - 1e-9)


@examples(100, quick=30)
@given(tables(memory=14e6), st.integers(0, 4))
def test_stages_are_those_that_fit(made, later):
    in_flight = min(made.microbatches, later + 1)
    for choice, one in enumerate(made.choices):
        found = [stage.start for stage in made.stages(made.layers, choice, later, inf)]
        fitting = [
            start
            for start in range(made.layers)
            if device_bytes(made.problem, 1, one.tensor, slice(start, made.layers), in_flight)
            <= made.memory(choice)
        ]
        assert found == fitting[::-1]


def test_too_many_labels_and_no_time_are_said():
    number = 6
    measured = Measured("a", 1, 1, (1.0,) * number, (2.0,) * number, (0.0,) * number)
    sizes = LayerSizes(1, (1.0,) * number, (1.0,) * number, (1.0,) * number)
    route = Route(1e6, 1e6)
    problem = ProfiledProblem(
        LayerProfiles("six", "measured: no", (measured,), (sizes,)),
        ServerPools((Pool("a", "z", 6, 1, 1e12, route),)),
        4,
    )
    made = Tables(problem, 1, 1)
    labels = ProfileLabels(made, inf, MOST, prune=False)
    assert len(labels.run()) == sum(comb(5, k) for k in range(6))
    with pytest.raises(Overflow):
        ProfileLabels(made, inf, labels.made - 1, prune=False).run()
    few = ProfileLabels(made, inf, MOST, prune=True, width=1).run()
    assert few[0][0] >= labels.run()[0][0]


def test_equal_stages_have_the_time_of_the_formula():
    """Six equal layers on six stages: (m + p - 1) (F + B), no transfers of note."""
    measured = Measured("a", 1, 1, (1.0,) * 6, (2.0,) * 6, (0.0,) * 6)
    sizes = LayerSizes(1, (0.0,) * 6, (0.0,) * 6, (0.0,) * 6)
    problem = ProfiledProblem(
        LayerProfiles("six", "measured: no", (measured,), (sizes,)),
        ServerPools((Pool("a", "z", 6, 1, 1e12, Route(1e6, 1e6)),)),
        batch=12,
    )
    bound, label = ProfileLabels(Tables(problem, 1, 1), inf, MOST, prune=True).run()[0]
    assert len(list(label.stages())) == 6
    assert bound == pytest.approx((12 + 6 - 1) * 3)


def test_a_tail_that_ends_sooner_may_be_worse_behind_a_slow_stage():
    """Tails of 3 and 3 seconds, or of 1 and 3.4: the first ends sooner, the second is shorter.

    Behind a stage of 4 seconds, twice ahead, the way through the later stages counts: it idles for
    6 - 2 seconds with the first, for 4.4 - 2 with the second.
    """
    far = 100.0
    seconds = {"a": (far, 3.0, 3.4), "b": (far, 1.0, 3.0), "c": (4.0, far, far)}
    measured = tuple(
        Measured(kind, 1, 1, tuple(t / 4 for t in of), tuple(3 * t / 4 for t in of), (0.0,) * 3)
        for kind, of in seconds.items()
    )
    sizes = LayerSizes(1, (0.0,) * 3, (0.0,) * 3, (0.0,) * 3)
    pools = tuple(Pool(kind, "z", 1, 1, 1e12, Route(1e6, 1e6)) for kind in seconds)
    problem = ProfiledProblem(
        LayerProfiles("three", "measured: no", measured, (sizes,)), ServerPools(pools), batch=12
    )
    bound, label = ProfileLabels(Tables(problem, 1, 1), inf, MOST, prune=True).run()[0]
    assert bound == pytest.approx(12 * 4 + 4.4 - 2)
    assert [stage.choice for stage in label.stages()] == [2, 1, 0]
