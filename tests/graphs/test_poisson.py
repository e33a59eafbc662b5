"""Generated jobs: the published seeds' jobs, and the distributions of section 5.7.1."""

import itertools
from collections import Counter

import numpy as np
import pytest

import stagewright
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.jobs import Rate, Throughputs
from stagewright.graphs.workloads.poisson import DISTRIBUTED, LOADS, MODELS, Arrivals
from stagewright.graphs.workloads.pool import parse_pool
from stagewright.service.clusters.requests import ArrivalsRequest

SCALES = (1, 2, 4, 8)
UNIT = Throughputs(
    tuple(
        Rate(model, scale, "v100", 1.0)
        for model in MODELS
        for scale in (SCALES if model in DISTRIBUTED else (1,))
    )
)


def first(arrivals: Arrivals, jobs: int) -> list:
    return list(itertools.islice(arrivals, jobs))


def test_jobs_of_a_published_seed() -> None:
    """Seed 0 at 4 jobs an hour: as the public code's generator gives them."""
    jobs = first(Arrivals(UNIT, 900.0, distributed=True, priorities=True, slos=True), 4)
    assert [(job.model, job.scale, job.weight) for job in jobs] == [
        ("ResNet-18 (batch size 64)", 8, 1.0),
        ("ResNet-50 (batch size 128)", 1, 1.0),
        ("Transformer (batch size 256)", 1, 1.0),
        ("Transformer (batch size 64)", 4, 1.0),
    ]
    durations = [68344.35010595087, 428534.34654652746, 3278.8802495654304, 193739.7359295212]
    assert [job.steps for job in jobs] == pytest.approx(durations, rel=1e-14)
    slos = [10 * durations[0], 10 * durations[1], 2 * durations[2], 1.2 * durations[3]]
    assert [job.slo_seconds for job in jobs] == pytest.approx(slos, rel=1e-14)
    arrivals = [job.arrival_seconds for job in jobs]
    assert arrivals == [0.0, 244.5860729103015, 951.7748275290958, 1367.5426956563874]


def test_single_accelerator_jobs_of_a_published_seed() -> None:
    jobs = first(Arrivals(UNIT, 900.0), 3)
    assert [job.model for job in jobs] == [
        "ResNet-18 (batch size 64)",
        "Transformer (batch size 16)",
        "Recommendation (batch size 2048)",
    ]
    durations = [68344.35010595087, 31016.609145932227, 2146.6088374387864]
    assert [job.steps for job in jobs] == pytest.approx(durations, rel=1e-14)


def test_distributions() -> None:
    count = 4000
    arrivals = Arrivals(UNIT, 600.0, 7, distributed=True, priorities=True, slos=True)
    jobs = first(arrivals, count)
    assert jobs == first(arrivals, count)
    scales = Counter(job.scale for job in jobs)
    shares = [scales[scale] / count for scale in SCALES]
    assert shares == pytest.approx([0.7, 0.1, 0.15, 0.05], abs=0.03)
    assert {job.model for job in jobs if job.scale > 1} == set(DISTRIBUTED)
    assert {job.model for job in jobs} == set(MODELS)
    minutes = np.array([job.steps for job in jobs]) / 60
    assert (minutes > 1000).mean() == pytest.approx(0.2, abs=0.03)
    assert (minutes.min() >= 10**1.5) & (minutes.max() <= 10**4)
    assert np.mean([job.weight == 5 for job in jobs]) == pytest.approx(0.2, abs=0.03)
    factors = Counter(round((job.slo_seconds or 0) / job.steps, 6) for job in jobs)
    assert sorted(factors) == [1.2, 2.0, 10.0]
    assert jobs[-1].arrival_seconds / (count - 1) == pytest.approx(600, rel=0.05)


def test_all_at_once() -> None:
    assert {job.arrival_seconds for job in first(Arrivals(UNIT, 0.0), 20)} == {0.0}


@pytest.mark.parametrize("mean", [-1.0, float("nan"), float("inf")])
def test_mean_is_a_time(mean: float) -> None:
    with pytest.raises(InputError, match="inter-arrival"):
        Arrivals(UNIT, mean)


def test_reference_rates_are_needed() -> None:
    with pytest.raises(InputError, match=r"'A3C' on 1 x 'v100'"):
        Arrivals(Throughputs(tuple(rate for rate in UNIT.alone if rate.model != "A3C")), 900.0)
    singles = Throughputs(tuple(rate for rate in UNIT.alone if rate.scale == 1))
    Arrivals(singles, 900.0)
    with pytest.raises(InputError, match=r"on 2 x 'v100'"):
        Arrivals(singles, 900.0, distributed=True)


def test_a_published_load_has_its_published_figures() -> None:
    """Classes, quantiles and means, each within four standard deviations of 8000 jobs."""
    count = 8000
    found = {}
    for load in LOADS:
        jobs = first(Arrivals(UNIT, 60.0, 3, distributed=True, load=load), count)
        assert {job.scale for job in jobs} == {1, 2, 4, 8}
        hours = np.array([job.steps for job in jobs]) / 3600
        found[load] = hours, np.array([job.scale for job in jobs])
    hours, scale = found["philly"]
    for one, median in ((1, 2.98), (8, 17.94)):
        own = hours[scale == one]
        assert abs((own < median).mean() - 0.5) < 2 / len(own) ** 0.5
    hours, scale = found["helios"]
    assert abs((hours < 206 / 3600).mean() - 0.5) < 2 / count**0.5
    assert hours.max() <= 50 * 24
    hours, scale = found["sia"]
    below = [(hours * scale <= most * (1 + 1e-9)).mean() for most in (1, 10, 100, 1000)]
    assert below == pytest.approx([0.72, 0.92, 0.98, 1.0], abs=0.02)
    hours, scale = found["shockwave"]
    assert hours.min() >= 0.2
    below = [(hours <= most).mean() for most in (1.14, 2.6, 4.54, 5)]
    assert below == pytest.approx([0.72, 0.92, 0.97, 1.0], abs=0.02)


def test_an_unknown_load_is_refused() -> None:
    with pytest.raises(InputError, match="load 'borg' is not known; there are philly, helios"):
        Arrivals(UNIT, 60.0, load="borg")


def test_the_answer_of_a_simulation_says_what_its_load_assumes() -> None:
    arrivals = ArrivalsRequest(throughputs=UNIT, jobs_per_hour=2.0, load="shockwave")
    answer = stagewright.simulate_cluster(parse_pool("v100=4"), arrivals, window=(0, 2))
    source, assumed = answer.assumed
    assert source.startswith("load of Zheng et al., NSDI 2023")
    assert assumed.endswith("arrivals are Poisson")
