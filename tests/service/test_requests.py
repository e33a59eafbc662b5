"""Requests and answers travel in JSON; what cannot be held is refused in one line."""

import json
import math
import threading
from importlib.resources import files
from itertools import pairwise
from typing import Any

import pytest
from markets import series
from plans import make_stages, small_problem, valid_plan

from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Progress, Status
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.schedules.published.kinds import ScheduleChoice
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.jobs import Job, PairRate, Rate, Throughputs, Workload
from stagewright.graphs.workloads.pool import parse_pool
from stagewright.graphs.workloads.prices import Market, Preemptions, Uptime
from stagewright.service.answers import Answer, Finite
from stagewright.service.cloud.requests import CloudRequest
from stagewright.service.clusters.allocating import estimate, measure
from stagewright.service.clusters.requests import (
    AllocateRequest,
    ArrivalsRequest,
    EstimateRequest,
    MeasureRequest,
    RoundsRequest,
    RunClusterRequest,
    SimulateClusterRequest,
)
from stagewright.service.layouts.tuning import TuneReadRequest, read_trials
from stagewright.service.pipelines.partitioning import partition
from stagewright.service.pipelines.planning import plan
from stagewright.service.pipelines.plans import simulate
from stagewright.service.pipelines.requests import (
    CheckRequest,
    PartitionRequest,
    PlanRequest,
    SimulateRequest,
)
from stagewright.service.requests import Request
from stagewright.service.schedules.requests import JobShopRequest, ScheduleRequest
from stagewright.solvers.backends.backend import BACKENDS

RATES = Throughputs((Rate("a", 1, "v100", 2.0), Rate("b", 1, "v100", 1.0)))
WORKLOAD = Workload((Job("a", "a", 100.0), Job("b", "b", 50.0)), RATES)
POOL = parse_pool("v100=2@2.5")
MARKET = Market((series([3.0] * 9),))


def requests() -> list[Request]:
    """One of each kind, with every document that it can hold."""
    problem = small_problem()
    of_problem: dict[str, Any] = {"chain": problem.chain, "cluster": problem.cluster}
    plan = valid_plan(problem, make_stages((2, 4, 6), (2, 1, 3), ("split",) * 3))
    up = Uptime("aws", "us-east-1b", "v100", 1, 0.0, 5.0, True)
    arrivals = ArrivalsRequest(throughputs=RATES, jobs_per_hour=2.0, slos=True)
    return [
        PlanRequest(**of_problem, microbatches=2, recompute="full", offload=False, seed=3),
        PlanRequest(**of_problem, order=ScheduleChoice("1f1b-rr", replicas=(2, 1))),
        PartitionRequest(**of_problem, microbatches=2, stages=2),
        CheckRequest(**of_problem, plan=plan, proofs=True),
        SimulateRequest(**of_problem, plan=plan, jitter=0.1, stragglers={"g0": 2.0}),
        ScheduleRequest(microbatches=2, forward=(1, 2), backward=(2.5, 3), in_flight=(2, 1)),
        JobShopRequest(jobs=(((0, 3), (1, 2)), ((1, 4),))),
        AllocateRequest(workload=WORKLOAD, pool=POOL, policy="max-min", parts=2),
        RoundsRequest(workload=WORKLOAD, pool=POOL, rounds=3),
        SimulateClusterRequest(pool=POOL, arrivals=arrivals, window=(1, 4)),
        RunClusterRequest(workload=WORKLOAD, pool=POOL, folder="jobs", address="auto"),
        EstimateRequest(reference=RATES, workload=WORKLOAD),
        MeasureRequest(reference=RATES, model="c"),
        CloudRequest(
            market=MARKET,
            rates={"v100": 1.0},
            preemptions=Preemptions((up,)),
            checkpoint_every_seconds=60.0,
        ),
    ]


@pytest.mark.parametrize("request_", requests(), ids=lambda one: type(one).__name__)
def test_a_request_comes_back_from_its_json(request_: Request) -> None:
    text = request_.model_dump_json()
    assert type(request_).parse(text) == request_
    extra = json.dumps(json.loads(text) | {"colour": "red"})
    with pytest.raises(InputError, match="colour: unknown field"):
        type(request_).parse(extra)
    assert type(request_).model_json_schema()["additionalProperties"] is False


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"workload": {}}, "workload must be a Workload, got {} (dict)"),
        ({"policy": 3}, "policy must be a str, got 3 (int)"),
        ({"space_sharing": 1}, "space_sharing must be a bool, got 1 (int)"),
        ({"space_sharing": True}, "space_sharing needs throughputs of pairs"),
        ({"time_limit": "60"}, "time_limit must be a number, got '60'"),
        ({"time_limit": 0}, "time_limit must be a positive number of seconds"),
        ({"budget_dollars": -1.0}, "budget_dollars must be finite and not negative"),
        ({"budget_dollars": float("nan")}, "budget_dollars must be finite"),
        ({"parts": "two"}, "parts must be a whole number, got 'two' (str)"),
        ({"parts": 2, "budget_dollars": 1.0}, "budget_dollars is for a policy"),
        ({"parts": 2, "backend": "highs"}, "backend is for a policy"),
        ({"at_once": True}, "at_once is for parts"),
        ({"colour": "red"}, "colour: unknown field"),
    ],
)
def test_wrong_fields_get_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        AllocateRequest.of(**({"workload": WORKLOAD, "pool": POOL} | fields))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give either a workload or arrivals"),
        ({"workload": WORKLOAD, "window": (0, 3)}, "window 0-3: there are 2 jobs"),
        ({"workload": WORKLOAD, "window": (1, 1)}, "window 1-1: the first must come before"),
        ({"workload": WORKLOAD, "repair_hours": 0.0}, "repair_hours must be a positive number"),
        (
            {"arrivals": ArrivalsRequest(throughputs=RATES, jobs_per_hour=2.0)},
            "arrivals have no end: give a window",
        ),
    ],
)
def test_a_simulation_needs_jobs_with_an_end(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        SimulateClusterRequest.of(pool=POOL, **fields)
    assert str(caught.value).startswith(message)


def test_what_makes_no_problem_is_refused_at_once() -> None:
    problem = small_problem()
    of_problem: dict[str, Any] = {"chain": problem.chain, "cluster": problem.cluster}
    with pytest.raises(InputError, match="microbatches must be at least 1, got 0"):
        PlanRequest.of(**of_problem, microbatches=0)
    with pytest.raises(InputError, match="stages must be at most"):
        PartitionRequest.of(**of_problem, microbatches=2, stages=99)
    with pytest.raises(InputError, match=r"forward\[1\] must be finite and not negative"):
        ScheduleRequest.of(microbatches=2, forward=(1.0, -1.0), backward=(1.0, 1.0))


def test_documents_within_a_request_are_read_strictly() -> None:
    problem = small_problem()
    request = PlanRequest(chain=problem.chain, cluster=problem.cluster)
    document = json.loads(request.model_dump_json())
    document["chain"]["microbatch_size"] = "6"
    with pytest.raises(InputError, match=r"chain.microbatch_size: Input should be a valid integer"):
        PlanRequest.parse(json.dumps(document))
    with pytest.raises(InputError, match="Invalid JSON"):
        PlanRequest.parse("{")


PROBLEM = small_problem()
GIVEN: dict[str, Any] = {"chain": PROBLEM.chain, "cluster": PROBLEM.cluster, "microbatches": 4}


def test_what_is_not_finite_is_null() -> None:
    class Cost(Answer):
        seconds: Finite

    for value in (math.inf, -math.inf, math.nan):
        assert json.loads(Cost(seconds=value).model_dump_json()) == {"seconds": None}


def test_an_answer_carries_the_plan_and_writes_figures() -> None:
    answer = plan(PlanRequest(**GIVEN, planner="spp", time_limit=5.0))
    assert answer.plan is answer.result.plan is not None
    written = json.loads(answer.model_dump_json())
    assert written == answer.json_object()
    assert "result" not in written
    assert written["cost_seconds"] == answer.result.cost
    assert [tuple(stage["layers"]) for stage in written["stages"]] == [
        stage.layers for stage in answer.plan.stages
    ]
    assert check(PROBLEM, answer.plan) == ()


@pytest.mark.parametrize("planner", ["spp", "exact", "general", "auto", "1f1b-star", "madpipe"])
def test_progress_carries_the_best_checked_plan(planner: str) -> None:
    told: list[Progress] = []
    answer = plan(PlanRequest(**GIVEN, planner=planner, time_limit=10.0, gap=0.3), told.append)
    plans: list[PipelinePlan] = [news.best() for news in told if news.best is not None]
    assert plans
    costs = [one.certificate.cost_seconds for one in plans if one.certificate is not None]
    assert costs == sorted(costs, reverse=True)
    assert answer.cost_seconds == pytest.approx(min(costs))
    for one in plans:
        assert check(PROBLEM, one) == ()


def test_a_service_stops_a_search_and_keeps_its_best_plan() -> None:
    stop = threading.Event()

    def take(news: Progress) -> None:
        if news.best is not None:
            stop.set()

    answer = plan(PlanRequest(**GIVEN, planner="auto", time_limit=600.0), take, stop)
    assert answer.plan is not None
    assert answer.status in (Status.INTERRUPTED, Status.OPTIMAL)


def test_a_slow_device_slows_the_simulation() -> None:
    plan_ = valid_plan(PROBLEM, make_stages((2, 4, 6), (2, 1, 3), ("split",) * 3))
    asked: dict[str, Any] = {"plan": plan_, "chain": PROBLEM.chain, "cluster": PROBLEM.cluster}
    assert simulate(SimulateRequest(**asked)).slowdown == pytest.approx(1.0)
    slow = simulate(SimulateRequest(**asked, stragglers={PROBLEM.cluster.devices[0].name: 3.0}))
    assert slow.slowdown > 1.0
    assert slow.iteration_seconds == slow.simulation.iteration_seconds


INTEGER_BACKENDS = ["highs", "pulp-cbc"]


@pytest.mark.parametrize("backend", INTEGER_BACKENDS)
def test_integer_programs_agree_with_the_recurrence(backend: str) -> None:
    assert backend in BACKENDS
    exact = partition(PartitionRequest(**GIVEN))
    assert exact.status is Status.OPTIMAL
    for one in exact.partitions[:3]:
        (other,) = partition(
            PartitionRequest(**GIVEN, stages=one.count, backend=backend, time_limit=60.0)
        ).partitions
        assert other.status is one.status
        assert other.bottleneck_seconds == pytest.approx(one.bottleneck_seconds, rel=1e-6)


def test_a_partition_takes_all_layers_once() -> None:
    answer = partition(PartitionRequest(**GIVEN))
    for one in answer.partitions:
        if one.stages is not None:
            edges = [stage.layers for stage in one.stages]
            assert edges[0][0] == 0
            assert edges[-1][1] == len(PROBLEM.chain)
            assert all(a[1] == b[0] for a, b in pairwise(edges))
            used = [name for stage in one.stages for name in stage.devices]
            assert tuple(used) == answer.order


def test_allocations_in_parts_stay_below_the_whole() -> None:
    from stagewright.service.clusters.allocating import allocate

    rates = Throughputs(
        tuple(Rate(f"m{n}", 1, kind, rate * (1 + n / 10)) for n in range(8)
              for kind, rate in (("v100", 4.0), ("k80", 1.0)))
    )  # fmt: skip
    jobs = Workload(tuple(Job(f"j{n}", f"m{n}", 100.0) for n in range(8)), rates)
    pool = parse_pool("v100=2,k80=2")
    whole = allocate(AllocateRequest(workload=jobs, pool=pool, policy="max-min"))
    parts = allocate(AllocateRequest(workload=jobs, pool=pool, policy="max-min", parts=2))
    assert whole.objective is not None
    assert parts.objective is not None
    assert parts.bound is not None
    assert parts.objective <= whole.objective * (1 + 1e-9) <= parts.bound * (1 + 2e-9)
    assert parts.plan is not None
    assert {job for share in parts.plan.shares for job in share.jobs} == {f"j{n}" for n in range(8)}


REFERENCE = Throughputs(
    tuple(Rate(model, 1, "v100", 10.0) for model in ("light", "heavy")),
    (
        PairRate(("light", "light"), 1, "v100", (9.0, 9.0)),
        PairRate(("heavy", "light"), 1, "v100", (6.0, 6.0)),
        PairRate(("heavy", "heavy"), 1, "v100", (3.0, 3.0)),
    ),
)


def test_a_new_job_is_estimated_from_the_one_that_it_is_like() -> None:
    seen = Throughputs(
        (Rate("new", 1, "v100", 20.0),), (PairRate(("heavy", "new"), 1, "v100", (3.0, 6.0)),)
    )
    workload = Workload((Job("n", "new", 10.0),), seen)
    answer = estimate(EstimateRequest(reference=REFERENCE, workload=workload))
    assert [(one.model, one.nearest) for one in answer.new] == [("new", "heavy")]
    assert answer.measured == 4
    rates = {one.models: one.steps_per_second for one in answer.estimated}
    # As heavy beside light and beside its like: 0.6 and 0.3 of its rate.
    assert rates == {("light", "new"): (6.0, 12.0), ("new", "new"): (6.0, 6.0)}
    assert len(answer.workload.throughputs.pairs) == 6


def test_what_to_measure_of_a_new_job() -> None:
    request = MeasureRequest(reference=REFERENCE, model="new", fraction=1.0)
    assert measure(request).pairs == (("v100", "heavy"), ("v100", "light"))


def test_a_notebook_shows_how_a_tuning_stands() -> None:
    text = files("stagewright.service.http.page").joinpath("example-tune-read.json").read_text()
    answer = read_trials(TuneReadRequest.parse(text))
    assert answer.best is not None
    assert repr(answer).splitlines()[0] == f"best so far: {answer.best.layout}, 3.24 s"
    assert "<td>out of memory</td>" in answer._repr_html_()
    states = [one["state"] for one in answer.shown().rows]
    assert states[:3] == ["measured", "measured", "out of memory"]
    assert (states.count("next"), len(states)) == (1, 3 + len(answer.open))
