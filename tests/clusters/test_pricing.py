"""Throughputs of trainings: as train-plan has them, kept where given, refused where unknown."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from tokens import After

import stagewright
from stagewright.formulations.forms.answers import silent
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.hf_config import parse_hf_config
from stagewright.graphs.workloads.jobs import (
    Job,
    Rate,
    Throughputs,
    Training,
    Workload,
    load_workload,
    save_workload,
)
from stagewright.graphs.workloads.pool import parse_pool
from stagewright.service.clusters import pricing
from stagewright.service.clusters.allocating import allocate
from stagewright.service.clusters.answers import AllocateAnswer, PriceJobsAnswer
from stagewright.service.clusters.pricing import price_jobs
from stagewright.service.clusters.rates import computed_rates
from stagewright.service.clusters.requests import AllocateRequest, PriceJobsRequest
from stagewright.service.jobs.kinds import KINDS, parse_request
from stagewright.service.whole_answers import read, written

CONFIG = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "vocab_size": 32000,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4,
    "rope_scaling": None,
}  # fmt: skip
TRAINING = Training("small", CONFIG, global_batch=16, sequence=1024)


def trained(**fields: Any) -> Training:
    return replace(TRAINING, **fields)


def workload(*scales: int, training: Training = TRAINING, **more: Any) -> Workload:
    """A job of the training for each scale."""
    jobs = tuple(Job(f"job{n}", training.model, 100.0, scale) for n, scale in enumerate(scales))
    return Workload(jobs, trainings=(training,), **more)


def priced(pool: str, *scales: int, **fields: Any) -> PriceJobsAnswer:
    """The answer for jobs of these scales."""
    own = {name: fields.pop(name) for name in ("training",) if name in fields}
    jobs = workload(*scales, **own)
    return price_jobs(PriceJobsRequest.of(workload=jobs, pool=parse_pool(pool), **fields))


@examples(20)
@given(
    kind=st.sampled_from(["h100", "a100", "a100-80gb", "v100"]),
    size=st.sampled_from([1, 2, 4, 8]),
    count=st.sampled_from([1, 2, 4, 8]),
    precision=st.sampled_from(["fp16", "bf16"]),
    batch=st.sampled_from([8, 12, 16]),
)
def test_a_throughput_is_that_of_train_plan(
    kind: str, size: int, count: int, precision: str, batch: int
) -> None:
    inside, precision = min(size, count), "fp16" if kind == "v100" else precision
    training = trained(precision=precision, global_batch=batch)
    (found,) = priced(f"{kind}=8x{size}", count, training=training).prices
    answer = stagewright.train_plan(
        config=parse_hf_config(json.dumps(CONFIG), "config"), device=kind, gpus=count,
        per_server=inside, global_batch=batch, sequence=1024, precision=precision,
    )  # fmt: skip
    assert answer.plan is not None
    assert answer.plan.bound is not None
    assert 1 / found.steps_per_second == pytest.approx(answer.plan.iteration_seconds, rel=1e-9)
    assert found.bound_steps_per_second == pytest.approx(1 / answer.plan.bound.seconds)
    assert found.servers == count // inside
    assert found.steps_per_second_low <= found.steps_per_second <= found.steps_per_second_high
    assert found.steps_per_second <= found.bound_steps_per_second * (1 + 1e-9)


def test_more_memory_faster_links_and_one_server_are_never_slower() -> None:
    small, large = (
        {(one.count, one.placement): one.steps_per_second for one in answer.prices}
        for answer in (priced(f"{kind}=2x2", 2, placement=True) for kind in ("a100", "a100-80gb"))
    )
    assert all(rate <= large[place] for place, rate in small.items())
    assert 0 < small[2, "spread"] <= small[2, "consolidated"]
    (slow,) = priced("a100=2x1", 2, network_bandwidth={"a100": 1e9}).prices
    assert slow.steps_per_second < small[2, "spread"]


def test_servers_hold_equally_many() -> None:
    found = priced("h100=3x4", 1, 6, training=trained(global_batch=6), placement=True)
    servers = {(one.count, one.placement): one.servers for one in found.prices}
    assert servers == {(1, "consolidated"): 1, (6, "consolidated"): 2, (6, "spread"): 3}
    assert len(found.assumed) == 2
    uneven = priced("h100=3x2", 5, training=trained(global_batch=5))
    assert uneven.prices[0].servers == 5
    assert uneven.assumed[-1].startswith("5 h100: equally many on each server")


def test_measured_throughputs_are_kept_and_the_rest_is_computed() -> None:
    measured = Rate("small", 2, "h100", 123.0)
    jobs = workload(2, 4, throughputs=Throughputs((measured,)))
    jobs = replace(jobs, jobs=(jobs.jobs[0], replace(jobs.jobs[1], checkpoint_seconds=5.0)))
    pool = parse_pool("h100=2,a100=1x4")
    answer = price_jobs(PriceJobsRequest.of(workload=jobs, pool=pool))
    assert [(one.accelerator, one.count) for one in answer.prices] == [
        ("h100", 4), ("a100", 2), ("a100", 4),
    ]  # fmt: skip
    assert answer.prices[0].reason == "the cluster has 2 h100"
    assert answer.workload.throughputs.alone[0] == measured
    assert len(answer.workload.throughputs.alone) == 4
    assert not answer.workload.trainings
    assert [one.partition(",")[0] for one in answer.assumed] == [
        "computed for a100: servers of 4",
        "a move of small writes and reads 6.89 GB at 10 GB/s",
    ]
    # 2 bytes of a weight, 12 of its master and its moments, of 491,816,960 parameters.
    computed = pytest.approx(2 * 14 * 491_816_960 / 10e9)
    assert [job.checkpoint_seconds for job in answer.workload.jobs] == [computed, 5.0]
    result = stagewright.allocate(jobs, pool)
    assert result.bound == pytest.approx(stagewright.allocate(answer.workload, pool).bound)
    for one in (jobs, answer.workload):
        realised = stagewright.rounds(one, pool, rounds=2)
        assert (realised.prices, realised.measured) == (answer.prices, ("small on 2 h100",))
    alone = tuple(replace(one, computed=None) for one in answer.workload.throughputs.alone)
    known = [replace(one, throughputs=Throughputs(alone)) for one in (jobs, answer.workload)]
    true = [stagewright.rounds(one, pool, rounds=2) for one in known]
    assert true[0] == true[1]
    assert (true[0].prices, true[0].measured) == ((), ())


def test_true_rates_are_drawn_from_the_ranges_and_learned() -> None:
    jobs, pool = priced("h100=2,a100=2", 1, 1, 2).workload, parse_pool("h100=2,a100=2")
    found = stagewright.simulate_cluster(pool, jobs, drawn_rates=True)
    again = stagewright.simulate_cluster(pool, jobs, drawn_rates=True)
    assert found.drawn == again.drawn
    assert any(one.measured for one in found.drawn)
    for one, price in zip(found.drawn, computed_rates(jobs.throughputs), strict=True):
        assert one.predicted_steps_per_second == price.steps_per_second
        low, high = price.steps_per_second_low, price.steps_per_second_high
        assert low <= one.steps_per_second <= high
    alone = tuple(replace(one, computed=None) for one in jobs.throughputs.alone)
    measured = replace(jobs, throughputs=Throughputs(alone))
    for wrong, ideal in ((jobs, True), (measured, False)):
        with pytest.raises(InputError, match="drawn_rates"):
            stagewright.simulate_cluster(pool, wrong, drawn_rates=True, ideal=ideal)


def test_a_job_may_run_on_any_of_its_counts_that_fits() -> None:
    """8 samples of a model that one accelerator cannot hold: the policy takes two or four."""
    large = trained(config=CONFIG | {"num_hidden_layers": 64}, global_batch=8)
    job = Job("a", "small", 100.0, counts=(1, 2, 4))
    jobs, pool = Workload((job,), trainings=(large,)), parse_pool("a100=4")
    one, two, four = price_jobs(PriceJobsRequest.of(workload=jobs, pool=pool)).prices
    assert (one.steps_per_second, one.count, two.count, four.count) == (0.0, 1, 2, 4)
    answer = allocate(AllocateRequest.of(workload=jobs, pool=pool, policy="makespan"))
    best = max(two.steps_per_second, four.steps_per_second)
    assert answer.objective == pytest.approx(100.0 / best)
    assert [share.count for share in answer.allocation or ()] == [4]


def test_a_file_names_its_configurations_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "jobs").mkdir()
    file = tmp_path / "jobs" / "jobs.json"
    for config in ("../model/config.json", "../model"):
        save_workload(workload(1, training=replace(TRAINING, config=config)), file)
        assert load_workload(file) == workload(1)
    save_workload(workload(1, training=trained(config="no.json")), file)
    with pytest.raises(
        InputError, match=r"jobs\.json: training 'small': config: .*jobs/no\.json: No"
    ):
        load_workload(file)
    save_workload(workload(1), file)
    assert load_workload(file).trainings[0].config["rope_scaling"] is None


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: trained(global_batch=0), "training 'small': global_batch must be at least 1"),
        (lambda: trained(sequence=0), "training 'small': sequence must be at least 1"),
        (lambda: workload(1, training=trained(config="no.json")), "config: give the fields"),
        (lambda: workload(1, training=trained(config={"model_type": "nobody"})),
         "training 'small': config: model_type must be one of"),
        (lambda: workload(1, training=trained(precision="int4")), "training 'small': precision"),
        (lambda: workload(1, training=trained(framework="none")),
         "training 'small': framework 'none' is not known"),
        (lambda: Workload((Job("a", "b", 1.0),), trainings=(TRAINING,)),
         "training 'small': no job is of this model, only of 'b'"),
        (lambda: Workload((Job("a", "small", 1.0),), trainings=(TRAINING, TRAINING)),
         "two trainings are named 'small'"),
        (lambda: replace(workload(1), trainings=()), "neither throughputs nor trainings"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused(make: Any, complaint: str) -> None:
    with pytest.raises(InputError) as error:
        price_jobs(PriceJobsRequest.of(workload=make(), pool=parse_pool("h100=8")))
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("pool", "fields", "complaint"),
    [
        ("gpu=8", {}, "accelerator 'gpu': trainings are computed for kinds of devices"),
        ("l40s=2x1", {}, "the network bandwidth of l40s is not known: give it to price-jobs"),
        ("k80=2", {}, "the server bandwidth of k80 is not known"),
        ("h100=2", {"network_bandwidth": {"a100": 1e9}}, "'a100' is none of the cluster's: h100"),
    ],
)
def test_machines_that_are_not_known_are_refused(
    pool: str, fields: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InputError) as error:
        priced(pool, 2, **fields)
    assert complaint in str(error.value)


def test_links_that_are_given_make_a_kind_known() -> None:
    answer = priced("l40s=2x1", 2, network_bandwidth=5e9)
    assert answer.prices[0].steps_per_second > 0
    assert "5 GB/s out of it" in answer.assumed[0]


LARGE = trained(config=CONFIG | {"num_hidden_layers": 60})


@pytest.mark.parametrize(
    ("pool", "why", "hint"),
    [
        ("a100=1x8", "1 a100: a device has", "; 2 a100 would hold it"),
        ("a100=1x1", "1 a100: a device has", "; 1 mi250x would hold it"),
        ("h100=1", "2 h100: the cluster has 1 h100", "; 1 h100 would hold it"),
        ("v100=1x1", "1 v100: precision bf16: v100 has no bf16 arithmetic", "; 1 mi250x would"),
    ],
)
def test_a_job_that_fits_nowhere_is_told_what_would_hold_it(pool: str, why: str, hint: str) -> None:
    with pytest.raises(InputError) as error:
        priced(pool, int(why[0]), training=LARGE)
    assert f"job 'job0': 'small' runs nowhere in this cluster; {why}" in str(error.value)
    assert hint in str(error.value)


def test_a_stop_leaves_no_throughputs() -> None:
    with pytest.raises(InputError, match="stopped before all throughputs"):
        stagewright.price_jobs(workload(1, 2), parse_pool("h100=8"), stop=After(1))


def test_the_service_computes_them_and_reads_no_files() -> None:
    figures = pytest.importorskip("stagewright.service.http.figures")
    request = AllocateRequest.of(workload=workload(1), pool=parse_pool("h100=2"))
    sent = json.loads(request.model_dump_json())
    assert parse_request("allocate", json.dumps(sent)) == request
    kind = KINDS["allocate"]
    kind.require_answerable(request)
    answer = kind.answer(request, silent, After(1000))
    told = written(answer)
    again = read(told, request)
    assert isinstance(again, AllocateAnswer)
    assert (again.prices, again.assumed) == (answer.prices, answer.assumed)
    assert again.problem.rates.tolist() == [[answer.prices[0].steps_per_second]]
    shown = figures.figures("allocate", request, json.loads(told)).table()
    assert shown["tables"][-1]["rows"][0][:4] == ["small", "h100", "1", "1"]
    sent["workload"]["trainings"][0]["config"] = "examples/configs/transformer-8b.json"
    with pytest.raises(InputError, match="training 'small': config: give the fields"):
        kind.require_answerable(parse_request("allocate", json.dumps(sent)))


def test_trainings_that_are_alike_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []
    search = pricing.find_layouts
    monkeypatch.setattr(
        pricing, "find_layouts", lambda *one, **more: searched.append(one) or search(*one, **more)
    )
    trainings = (TRAINING, trained(model="same"), trained(model="other", global_batch=8))
    jobs = tuple(Job(one.model, one.model, 100.0) for one in trainings)
    request = PriceJobsRequest.of(
        workload=Workload(jobs, trainings=trainings), pool=parse_pool("h100=1")
    )
    small, same, other = (one.steps_per_second for one in price_jobs(request).prices)
    assert (small, len(searched)) == (same, 2)
    assert other > small
