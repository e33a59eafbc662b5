"""Requests travel in JSON, and refuse in one line what they cannot hold."""

import json
from typing import Any

import pytest
from markets import series
from plans import make_stages, small_problem, valid_plan

from stagewright.formulations.schedules.published.kinds import ScheduleChoice
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.jobs import Job, Rate, Throughputs, Workload
from stagewright.graphs.workloads.pool import parse_pool
from stagewright.graphs.workloads.prices import Market, Preemptions, Uptime
from stagewright.service.cloud.requests import CloudRequest
from stagewright.service.clusters.requests import (
    AllocateRequest,
    ArrivalsRequest,
    EstimateRequest,
    MeasureRequest,
    RoundsRequest,
    RunClusterRequest,
    SimulateClusterRequest,
)
from stagewright.service.pipelines.requests import (
    CheckRequest,
    PartitionRequest,
    PlanRequest,
    SimulateRequest,
)
from stagewright.service.requests import Request
from stagewright.service.schedules.requests import JobShopRequest, ScheduleRequest

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
