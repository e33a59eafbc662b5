"""Forecasts and explained jobs: by hand, by filling water, and by the policy asked anew."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from strategies_allocation import Case, random_case

import stagewright
from stagewright.formulations.clusters.allocation import throughput
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.jobs import Job, Rate, Throughputs, Training, Workload
from stagewright.graphs.workloads.pool import Accelerator, Pool, parse_pool
from stagewright.service.clusters.answers import AllocateAnswer, JobAnswer
from stagewright.service.clusters.requests import AllocateRequest
from stagewright.service.whole_answers import read, written

ROUND = 100.0
CONFIG = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "vocab_size": 32000,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4,
}  # fmt: skip
TRAINING = Training("small", CONFIG, global_batch=16, sequence=1024)


def asked(jobs: Workload, pool: Pool, **fields: Any) -> AllocateAnswer:
    return stagewright.forecast_jobs(jobs, pool, round_seconds=ROUND, **fields)


def alike(*jobs: Job, rate: float = 1.0) -> Workload:
    """Jobs of one model with one rate on ``v100``."""
    return Workload(jobs, Throughputs((Rate("m", 1, "v100", rate),)))


def trained(**fields: Any) -> Workload:
    return Workload((Job("job", "small", 100.0, **fields),), trainings=(TRAINING,))


def explained(answer: AllocateAnswer) -> JobAnswer:
    assert answer.explained is not None
    return answer.explained


@examples(50)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.sampled_from([0.5, 1.0, 2.0]))
def test_who_comes_first_is_done_first(rounds: list[int], rate: float) -> None:
    """On one accelerator, first come first served, one job after the other."""
    jobs = [
        Job(f"j{n}", "m", rate * ROUND * many, arrival_seconds=n) for n, many in enumerate(rounds)
    ]
    answer = asked(alike(*jobs, rate=rate), parse_pool("v100=1"), policy="fifo")
    assert answer.forecasts is not None
    for n, one in enumerate(answer.forecasts):
        assert one.seconds == one.seconds_low == one.seconds_high
        assert one.seconds == pytest.approx(sum(rounds[: n + 1]) * ROUND)


def filled(weights: list[float], count: float) -> list[float]:
    """Shares of time at the level at which ``count`` accelerators are used, none above 1."""
    level = min(
        (level for level in (
            (count - sum(w >= bar for w in weights)) / (sum(w for w in weights if w < bar) or 1.0)
            for bar in (*weights, 1e9)
        ) if level >= 0 and sum(min(1.0, level * w) for w in weights) <= count + 1e-9),
        key=lambda level: -sum(min(1.0, level * w) for w in weights),
    )  # fmt: skip
    return [min(1.0, level * w) for w in weights]


@examples(40)
@given(st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=2, max_size=5), st.integers(1, 3))
def test_a_change_brings_what_water_filling_gives_after_it(
    weights: list[float], count: int
) -> None:
    jobs = [Job(f"j{n}", "m", 100.0, weight=w) for n, w in enumerate(weights)]
    pool = Pool((Accelerator("v100", count),))
    job = explained(asked(alike(*jobs), pool, explain="j0"))
    heavier = [2 * weights[0], *weights[1:]]
    most = float(len(weights))
    found = {one.change: one.steps_per_second for one in job.changes}
    assert job.steps_per_second == pytest.approx(filled(weights, min(count, most))[0], abs=1e-6)
    assert found == pytest.approx(
        {
            "alone in the cluster": 1.0,
            "twice its weight": filled(heavier, min(count, most))[0],
            "1 more v100": filled(weights, min(count + 1, most))[0],
        },
        abs=1e-6,
    )
    (one,) = job.occupancy
    assert one.in_use == pytest.approx(min(count, most))
    assert sum(one.others.values()) == pytest.approx(one.in_use - job.share)
    is_short = job.steps_per_second < 1 - 1e-6
    assert any(f"all {count} v100 are in use" in line for line in job.why) == is_short


@examples(40)
@given(random_case(max_jobs=3), st.data())
def test_an_explanation_agrees_with_its_allocation(case: Case, data: st.DataObject) -> None:
    jobs = replace(case.workload, trainings=())
    name = data.draw(st.sampled_from([job.name for job in jobs.jobs]))
    shared = {"space_sharing": case.space_sharing, "placement": case.placement}
    try:
        request = AllocateRequest.of(workload=jobs, pool=case.pool, explain=name, forecast=True,
                                     round_seconds=ROUND, **shared)  # fmt: skip
        answer = asked(jobs, case.pool, explain=name, **shared)
    except InputError:
        return  # a job fits nowhere
    job, problem = explained(answer), answer.problem
    number = problem.names.index(name)
    assert answer.result.allocation is not None
    rates = throughput(problem, answer.result.allocation)
    assert job.steps_per_second == rates[number]
    assert job.share == pytest.approx(sum(one.share for one in job.choices))
    assert [one.steps_per_second for one in job.choices] == [
        rate for rate, uses in zip(problem.rates[number], problem.uses[number], strict=True) if uses
    ]
    for change in job.changes:
        if change.change.endswith(case.pool.names[-1]):
            last = case.pool.accelerators[-1]
            larger = replace(last, count=last.count + (last.per_server or 1))
            pool = replace(case.pool, accelerators=(*case.pool.accelerators[:-1], larger))
            anew = asked(jobs, pool, **shared)
            assert anew.result.allocation is not None
            assert anew.forecasts is not None
            rate = throughput(anew.problem, anew.result.allocation)[number]
            assert change.steps_per_second == pytest.approx(rate)
            assert change.completion_seconds == anew.forecasts[number].seconds
    again = read(written(answer), request)
    assert isinstance(again, AllocateAnswer)
    assert (again.explained, again.forecasts) == (answer.explained, answer.forecasts)


def test_computed_rates_have_a_range_of_completion() -> None:
    """Of one job, of which nothing is divided: its steps by the ends of its rate."""
    answer = asked(trained(scale=2), parse_pool("h100=1x2"), explain="job")
    job, (one,) = explained(answer), answer.forecasts or ()
    for seconds, rate in (
        (one.seconds, job.steps_per_second),
        (one.seconds_low, job.steps_per_second_high),
        (one.seconds_high, job.steps_per_second_low),
    ):
        assert seconds == pytest.approx(answer.prices[0].checkpoint_seconds + 100.0 / rate)
    changes = {change.change: change.steps_per_second for change in job.changes}
    prices = asked(trained(), parse_pool("h100=1x2"), explain="job")
    assert changes["on 1 in place of 2"] == explained(prices).steps_per_second
    assert changes["2 more h100"] == job.steps_per_second


def test_a_larger_count_that_the_cluster_lacks_is_computed_for_the_larger_cluster() -> None:
    answer = asked(trained(counts=(1, 2)), parse_pool("h100=1"), explain="job")
    job = explained(answer)
    assert "it does not run on 2 h100: the cluster has 1 h100" in job.why
    changes = {change.change: change.steps_per_second for change in job.changes}
    assert (changes["1 more h100"] or 0.0) > 1.5 * job.steps_per_second


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"explain": "j9"}, "explain: no job is named 'j9'; there is 'j0'"),
        ({"explain": "j0", "parts": 2, "policy": "max-min"}, "not solved in parts"),
    ],
)
def test_what_cannot_be_explained_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        asked(alike(Job("j0", "m", 1.0), Job("j1", "m", 1.0)), parse_pool("v100=2"), **fields)


def test_who_fits_nowhere_is_late_or_has_a_name_twice_is_told_what_would_do() -> None:
    with pytest.raises(InputError, match=r"jobs\[2\]: two jobs are named 'a', the other is jobs\["):
        alike(Job("a", "m", 1.0), Job("b", "m", 1.0), Job("a", "m", 1.0))
    rates = Throughputs((Rate("m", 1, "v100", 0.0), Rate("m", 2, "v100", 3.0)))
    with pytest.raises(InputError, match=r"all rates 0; its throughputs know it on 2 v100$"):
        asked(Workload((Job("a", "m", 1.0),), rates), parse_pool("v100=2"))
    late = Job("late", "m", 7200.0, slo_seconds=3600.0)
    answer = asked(alike(late), parse_pool("v100=1@1"), policy="min-cost-slo")
    assert any("no SLO below 2 h can be met" in note for note in answer.notes)
    soon = replace(late, slo_seconds=7200.0)
    answer = asked(alike(soon), parse_pool("v100=1@1"), policy="min-cost-slo")
    assert not any("SLO" in note for note in answer.notes)
