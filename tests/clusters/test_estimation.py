"""Estimates of colocated rates, and the benchmark of thesis section 5.7 on its small cases."""

from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples, slow_after

from benchmarks import estimation, gavel, gavel_runs
from stagewright.formulations.clusters.allocation import problem_of
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.jobs import Job, PairRate, Rate, Throughputs, Workload
from stagewright.graphs.workloads.pool import parse_pool
from stagewright.solvers.clusters.estimation import Estimator, completed, pairs_to_profile

GAVEL = Path(__file__).parents[3] / "shared" / "data" / "gavel" / "simulation_throughputs.json"
ACCELERATORS = ("v100", "k80")

small = examples(10, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


def table_of(kept: dict[str, float], rates: dict[str, float], scale: int = 1) -> Throughputs:
    """A model keeps of its rate what is its own, times what its partner lets it."""
    alone = [
        Rate(model, scale, accelerator, rate / (1 + number))
        for number, accelerator in enumerate(ACCELERATORS)
        for model, rate in rates.items()
    ]
    by_place = {(rate.accelerator, rate.model): rate.steps_per_second for rate in alone}
    pairs = [
        PairRate(
            both,
            scale,
            accelerator,
            (
                by_place[accelerator, both[0]] * kept[both[0]] * kept[both[1]],
                by_place[accelerator, both[1]] * kept[both[0]] * kept[both[1]],
            ),
        )
        for accelerator in ACCELERATORS
        for both in combinations_with_replacement(sorted(rates), 2)
    ]
    return Throughputs(tuple(alone), tuple(pairs))


KEPT = {"light": 0.95, "middle": 0.7, "heavy": 0.45}
RATES = {"light": 40.0, "middle": 12.0, "heavy": 3.0}
REFERENCE = table_of(KEPT, RATES)


def with_new(like: str, rate: float = 7.0) -> Throughputs:
    """The reference jobs, and ``new``, which keeps what ``like`` does."""
    return table_of(KEPT | {"new": KEPT[like]}, RATES | {"new": rate})


def measured_of(whole: Throughputs, *partners: str, accelerator: str = "v100") -> Throughputs:
    return Throughputs(
        tuple(rate for rate in whole.alone if rate.model == "new"),
        tuple(
            pair
            for pair in whole.pairs
            if pair.accelerator == accelerator
            and any(set(pair.models) == {"new", partner} for partner in partners)
        ),
    )


def by_place(throughputs: Throughputs) -> dict[tuple[str, frozenset[str]], PairRate]:
    return {(pair.accelerator, frozenset(pair.models)): pair for pair in throughputs.pairs}


@pytest.mark.parametrize("like", sorted(KEPT))
@pytest.mark.parametrize("partner", sorted(KEPT))
def test_a_twin_of_a_reference_job_is_known_from_one_measurement(like: str, partner: str):
    whole = with_new(like)
    measured = measured_of(whole, partner)
    estimator = Estimator(REFERENCE)
    assert estimator.nearest(measured) == {("new", 1): like}
    found, true = by_place(estimator.estimate(measured)), by_place(whole)
    assert found.keys() == true.keys()
    for place, pair in true.items():
        assert found[place].models == pair.models
        assert found[place].steps_per_second == pytest.approx(pair.steps_per_second)


def test_measurements_replace_estimates():
    whole = with_new("light")
    surprise = PairRate(("heavy", "new"), 1, "k80", (0.25, 0.5))
    few = measured_of(whole, "middle")
    more = Throughputs(few.alone, (*few.pairs, surprise))
    place = ("k80", frozenset(("heavy", "new")))
    assert by_place(Estimator(REFERENCE).estimate(few))[place] != surprise
    assert by_place(Estimator(REFERENCE).estimate(more))[place] == surprise


def test_two_new_jobs_keep_what_their_reference_jobs_do():
    whole = table_of(KEPT | {"a": 0.95, "b": 0.45}, RATES | {"a": 5.0, "b": 2.0})
    measured = Throughputs(
        tuple(rate for rate in whole.alone if rate.model in ("a", "b")),
        tuple(pair for pair in whole.pairs if pair.models in (("a", "middle"), ("b", "middle"))),
    )
    found = by_place(Estimator(REFERENCE).estimate(measured))["v100", frozenset("ab")]
    assert found.steps_per_second == pytest.approx((5.0 * 0.95 * 0.45, 2.0 * 0.95 * 0.45))


def test_other_scales_have_references_of_their_own():
    four = table_of({"light": 0.5, "heavy": 0.9}, {"light": 40.0, "heavy": 3.0}, scale=4)
    reference = Throughputs(REFERENCE.alone + four.alone, REFERENCE.pairs + four.pairs)
    whole = table_of({"light": 0.5, "heavy": 0.9, "new": 0.9}, {"light": 40.0, "heavy": 3.0,
                                                                "new": 7.0}, scale=4)  # fmt: skip
    assert Estimator(reference).nearest(measured_of(whole, "light")) == {("new", 4): "heavy"}


def test_estimates_make_a_problem():
    estimate = Estimator(REFERENCE).estimate(measured_of(with_new("light"), "heavy"))
    jobs = tuple(Job(str(n), model, 1.0) for n, model in enumerate(("new", "light", "new")))
    problem = problem_of(Workload(jobs, estimate), parse_pool("v100=1,k80=1"), space_sharing=True)
    assert len(problem.table.paired) == 2 * 3  # each two of light and new beat taking turns


def test_bad_measurements_are_refused():
    whole = with_new("light")
    with pytest.raises(
        InputError, match=r"'new' was measured .* but not alone: add its rate alone"
    ):
        Estimator(REFERENCE).estimate(Throughputs((), measured_of(whole, "heavy").pairs))
    eight = Throughputs((Rate("new", 8, "v100", 1.0),))
    with pytest.raises(InputError, match="'new': no reference job runs on 8 accelerators"):
        Estimator(REFERENCE).estimate(eight)
    with pytest.raises(InputError, match="no reference job runs on 8 accelerators; 'new' asks"):
        pairs_to_profile(REFERENCE, ("new", 8), 0.5)
    for fraction in (1.5, 0.0):
        with pytest.raises(InputError, match=f"above 0 and at most 1, got {fraction:g}"):
            pairs_to_profile(REFERENCE, ("new", 1), fraction)


def test_pairs_to_profile_are_the_part_asked_for():
    every = pairs_to_profile(REFERENCE, ("new", 1), 1.0)
    assert set(every) == {(name, model) for name in ACCELERATORS for model in RATES}
    assert len(pairs_to_profile(REFERENCE, ("new", 1), 0.5)) == 3
    assert len(pairs_to_profile(REFERENCE, ("new", 1), 0.01)) == 1
    draws = [pairs_to_profile(REFERENCE, ("new", 1), 0.5, seed) for seed in range(8)]
    assert draws[3] == pairs_to_profile(REFERENCE, ("new", 1), 0.5, 3)
    assert len(set(draws)) > 1


@small
@given(seeds, st.booleans())
def test_completion_keeps_what_is_known_and_finds_low_rank(seed: int, holes: bool):
    rng = np.random.default_rng(seed)
    whole = rng.uniform(0.2, 1.0, (13, 2)) @ rng.uniform(0.2, 1.0, (2, 30))
    known = np.ones(whole.shape, dtype=bool)
    known[-1, rng.choice(30, 18, replace=False)] = False
    if holes:
        known[rng.integers(12, size=6), rng.integers(30, size=6)] = False
    values = np.where(known, whole, np.nan)
    found = np.concatenate(completed(values[:-1], values[-1:], rank=2, ridge=1e-9))
    assert (found[known] == whole[known]).all()
    assert np.abs(found - whole).max() < (0.05 if holes else 1e-4)


def test_a_row_of_which_nothing_is_known_gets_the_means():
    reference = np.array([[0.2, 0.4], [0.6, 1.0]])
    filled, rows = completed(reference, np.full((1, 2), np.nan))
    assert (filled == reference).all()
    assert rows[0] == pytest.approx([0.4, 0.7])


@pytest.mark.skipif(not GAVEL.exists(), reason="Gavel's throughput table is not here")
def test_estimates_of_measured_models_beat_the_mean():
    table = estimation.measured_table()
    found = np.array(
        [
            row
            for model in ("ResNet-18 (batch size 64)", "LM (batch size 20)", "CycleGAN")
            for row in estimation.errors(table, model, 0.4, seed=0)
        ],
        dtype=float,
    )
    estimate, mean = np.nanmedian(found[:, 0]), np.nanmedian(found[:, 1])
    assert estimate < 0.15
    assert estimate < 0.8 * mean


needs_gavel = pytest.mark.skipif(not gavel_runs.DATA.is_dir(), reason=gavel_runs.MISSING)


@needs_gavel
def test_public_traces_take_as_long_as_in_the_public_code():
    for one in gavel.REFERENCES[:1]:
        outcome = gavel_runs.simulate(one.case)
        assert one.ours({one.case: outcome}) == pytest.approx(one.hours, rel=0.03)


@needs_gavel
@pytest.mark.parametrize("discipline", slow_after(1, ["fifo", "fairness"]))
def test_entities_share_by_weight(discipline):
    found = gavel.growth(discipline)
    parts = gavel.shares(found.ours)[-1].reshape(3, 6)
    assert parts.sum(axis=1) == pytest.approx([1 / 6, 1 / 3, 1 / 2], abs=1e-3)
    assert (parts[0, -1] < 1e-6) == (discipline == "fifo")
