"""A batch in microbatches of every size, and plans of one tensor degree: the best, with bounds."""

import math
import random
import threading
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import small_problem
from profiles import examples, slow_after

import stagewright
from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan_class import class_of
from stagewright.formulations.plans.shards import groups_of
from stagewright.formulations.schedules.groups import problem_of_groups
from stagewright.formulations.schedules.published.kinds import ScheduleChoice
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Device, Link, from_matrix, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.service.engines import Engine
from stagewright.service.pipelines import planning
from stagewright.service.pipelines.planning import plan
from stagewright.service.pipelines.requests import PlanRequest
from stagewright.solvers.planning import Result
from stagewright.solvers.planning import plan as solve

BATCH = 12


def request(**changes) -> PlanRequest:
    """Two layers whose forwards cost less per sample in larger microbatches, of 1 to 6 samples."""
    problem = small_problem(layers=3, devices=3)
    layers = tuple(
        replace(one, costs=tuple(_cost(its, size) for its in one.costs for size in (1, 2, 6)))
        for one in problem.chain.layers
    )
    chain = replace(problem.chain, layers=layers)
    given = {
        "chain": chain, "cluster": problem.cluster, "batch": BATCH, "planner": "exact",
        "time_limit": 20.0,
    }  # fmt: skip
    return PlanRequest.of(**(given | changes))


def _cost(like: LayerCost, size: int) -> LayerCost:
    share = size / like.microbatch_size
    fixed = 0.3 * (like.forward_seconds or 0.0)
    return replace(
        like,
        microbatch_size=size,
        forward_seconds=fixed + share * like.forward_seconds,
        backward_seconds=fixed + share * like.backward_seconds,
        saved_bytes=share * like.saved_bytes,
        output_bytes=share * like.output_bytes,
    )


def test_the_best_of_all_sizes_and_a_bound_on_all() -> None:
    asked = request()
    found = plan(asked)
    alone = {
        size: plan(request(microbatch_size=size)) for size in (1, 2, 3, 4, 6) if BATCH % size == 0
    }
    assert [one.samples for one in found.sizes] == list(alone)
    assert [one.microbatches for one in found.sizes] == [BATCH // size for size in alone]
    best = min(alone, key=lambda size: alone[size].cost_seconds)
    assert all(one.status is Status.OPTIMAL for one in alone.values())
    assert found.cost_seconds == pytest.approx(alone[best].cost_seconds)
    assert found.plan.microbatch_size == best
    assert found.microbatches == BATCH // best
    # All sizes are solved: their least bound is the best cost, up to the class it is about.
    assert found.bound_seconds <= found.cost_seconds * (1 + 1e-9)
    assert found.bound_seconds <= min(one.cost_seconds for one in alone.values())
    (row,) = stagewright.sweep(
        asked.chain, asked.cluster, batches=(BATCH,), planners=("dp",), workers=1
    ).rows
    assert row.plans is not None
    assert row.plans.endswith(", in every size of microbatches")


def test_sizes_with_many_microbatches_do_not_take_the_time_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their schedules are the longest: they may take more than their share of the time."""
    shares: list[tuple[int, float]] = []
    solved = planning.solve

    def solve(problem: PipelineProblem, planner: str, limits: Limits, *others: Any) -> Result:
        shares.append((problem.microbatches, limits.seconds))
        return solved(problem, planner, limits, *others)

    monkeypatch.setattr(planning, "solve", solve)
    found = plan(request(planner="dp"))
    first = shares[: len(found.sizes)]
    assert [count for count, _ in first] == sorted(one.microbatches for one in found.sizes)
    assert first[0][1] == pytest.approx(20.0 / 2 / len(first), rel=0.5)  # the whole share


@pytest.mark.parametrize("to", slow_after(1, ["torch-csv", "deepspeed"]))
def test_a_framework_s_bound_is_below_its_plans_of_every_size(to: str) -> None:
    found = plan(request(planner="auto", runtime=to, time_limit=1.0))
    alone = [
        plan(request(planner="auto", runtime=to, microbatch_size=one.samples, time_limit=0.3))
        for one in found.sizes
    ]
    costs = [one.cost_seconds for one in alone if one.cost_seconds is not None]
    least = min(costs, default=math.inf)
    known = found.restriction
    assert known.bound_seconds <= min(least, found.cost_seconds) * (1 + 1e-9)
    assert (found.status is Status.OPTIMAL) == (known.gap <= 1e-6)


def test_the_plan_is_of_its_size() -> None:
    asked = request(planner="pipedream")
    found = plan(asked)
    problem = PipelineProblem(
        asked.chain, asked.cluster, found.microbatches, microbatch_size=found.plan.microbatch_size
    )
    assert check(problem, found.plan) == ()
    assert found.plan.certificate.bound_seconds <= found.cost_seconds


def test_sizes_that_do_not_fit_do_not_lower_the_bound() -> None:
    """Nothing of a size that is proved infeasible can be faster."""
    found = plan(request(memory_limit_bytes=6e8))
    fitting = [one for one in found.sizes if one.status is not Status.INFEASIBLE]
    assert 0 < len(fitting) < len(found.sizes)
    assert found.bound_seconds >= min(one.bound_seconds for one in fitting) * (1 - 1e-9)
    nothing = plan(request(memory_limit_bytes=4e8))
    assert nothing.status is Status.INFEASIBLE
    assert nothing.plan is None
    assert nothing.cost_seconds is None
    assert "in microbatches of every size" in nothing.reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "the batch must be at least 1 sample, got 0"),
        ({"microbatch_size": 5}, "12 samples is no multiple of a microbatch of 5"),
        ({"microbatch_size": 12}, "microbatch"),
        ({"batch": None, "microbatch_size": 2, "microbatches": 4}, "goes with a batch"),
    ],
)
def test_what_is_no_batch_is_refused(changes, message) -> None:
    with pytest.raises(InputError, match=message):
        plan(request(**changes))


@pytest.mark.real
@pytest.mark.parametrize(
    "engine",
    [
        Engine(workers=2),
        pytest.param(
            Engine("ray"),
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
            ],
        ),
    ],
    ids=["processes", "ray"],
)
def test_sizes_at_the_same_time_give_what_they_give_one_by_one(engine: Engine) -> None:
    told: list[float | None] = []
    there = plan(request(), lambda one: told.append(one.objective), engine=engine)
    here = plan(request())
    assert there.sizes == here.sizes
    assert (there.cost_seconds, there.bound_seconds) == (here.cost_seconds, here.bound_seconds)
    assert min(told) == there.cost_seconds


@pytest.mark.real
def test_a_stop_leaves_the_sizes_that_are_not_begun() -> None:
    stop = threading.Event()
    stop.set()
    found = plan(request(), stop=stop, engine=Engine(workers=2))
    assert found.status is Status.INTERRUPTED
    assert {one.status for one in found.sizes} == {Status.INTERRUPTED}


@pytest.mark.parametrize("seed", slow_after(1, range(60)))
def test_no_plan_of_any_planner_beats_a_bound_on_its_class(seed: int) -> None:
    """Of a batch on unequal links, in microbatches of every size: what is proved holds for all."""
    draw = random.Random(seed)
    layers = tuple(
        Layer(f"l{i}", draw.randint(0, 9) * 1e6, tuple(_cost(like, size) for size in (1, 2, 3)))
        for i in range(draw.randint(1, 3))
        for like in [LayerCost(1, draw.uniform(0, 3), draw.randint(0, 9) * 1e6,
                               draw.randint(0, 9) * 1e6, draw.uniform(0.1, 5))]
    )  # fmt: skip
    devices = [Device(f"d{i}", "any", 1e8 * draw.choice([1, 10])) for i in range(3)]
    rows = [[None if i == j else draw.choice([1e6, 1e7]) for j in range(3)] for i in range(3)]
    chain, cluster = Chain("m", "by hand", 1, layers), from_matrix(devices, rows)
    batch = draw.choice([2, 3, 4, 6])
    planners = ("exact", "spp", "dp", "2bw", "2bw-flush", "pipedream-async")
    found = [
        stagewright.plan(chain, cluster, global_batch=batch, planner=name, time_limit=1.0)
        for name in planners
    ]
    plans = [one.plan for one in found if one.plan is not None]
    for one in found:
        for plan_ in plans:
            sizes = [its.samples for its in one.sizes] or [one.plan and one.plan.microbatch_size]
            if one.plans and one.plans.contains(class_of(plan_)) and plan_.microbatch_size in sizes:
                bound = math.inf if one.status is Status.INFEASIBLE else one.bound
                assert plan_.predicted is not None
                assert bound is not None
                assert bound <= plan_.predicted.iteration_seconds * (1 + 1e-6), one.planner


def problem_on(servers: int, devices: int, layers: int, microbatches: int) -> PipelineProblem:
    """Layers with costs at degrees 1, 2 and 4 on equal servers of fast devices."""
    given = small_problem(layers=layers, microbatches=microbatches, degrees=(2, 4), parts=True)
    cluster = uniform_servers(
        servers, devices, Link(20e9, 1e-6), Link(5e9, 1e-5), kind="fast", memory_bytes=64e9
    )
    return replace(given, cluster=cluster)


def group_request(problem: PipelineProblem, tensor: int, **fields: object) -> PlanRequest:
    return PlanRequest.of(
        chain=problem.chain,
        cluster=problem.cluster,
        microbatches=problem.microbatches,
        tensor=tensor,
        **fields,
    )


@examples(30)
@given(
    servers=st.integers(1, 3),
    tensor=st.sampled_from([2, 4]),
    layers=st.integers(4, 7),
    microbatches=st.integers(1, 4),
    planner=st.sampled_from(["spp", "gpipe", "1f1b", "zb-h1"]),
    share=st.sampled_from([None, 0.25]),
)
def test_groups_are_devices(
    servers: int, tensor: int, layers: int, microbatches: int, planner: str, share: float | None
) -> None:
    """On equal links the plan takes as long as that of the groups does, or less; proved."""
    problem = problem_on(servers, 4, layers, microbatches)
    problem = replace(problem, cluster=replace(problem.cluster, all_reduce_share=share))
    fields = {"order": ScheduleChoice(planner)} if "1" in planner else {"planner": planner}
    asked = group_request(problem, tensor, **fields)
    answer = plan(asked)
    assert answer.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert answer.bound_seconds > 0
    found = answer.plan
    assert found is not None
    assert class_of(found).tensor == answer.plans["tensor"] == (tensor,)
    assert not check(asked.problem, found)
    assert {stage.tensor for stage in found.stages} == {tensor}
    known = [
        {device.name for device in problem.cluster.devices[i : i + tensor]}
        for i in range(0, len(problem.cluster), tensor)
    ]
    groups = [set(one) for stage in found.stages for one in groups_of(stage.devices, tensor)]
    assert all(group in known for group in groups)
    of_groups = problem_of_groups(problem, tensor)
    if "1" in planner:
        alone = plan(PlanRequest.of(chain=of_groups.chain, cluster=of_groups.cluster,
                                    microbatches=microbatches, **fields)).result  # fmt: skip
    else:
        alone = solve(of_groups, planner)
    assert alone.cost is not None
    assert answer.cost_seconds is not None
    assert answer.cost_seconds <= alone.cost * (1 + 1e-9)


def test_groups_reach_the_same_share_of_the_bandwidth() -> None:
    problem = problem_on(2, 4, 4, 2)
    problem = replace(problem, cluster=replace(problem.cluster, all_reduce_share=0.25))
    assert problem_of_groups(problem, 2).cluster.all_reduce_share == 0.25


def test_a_group_has_the_least_of_its_members() -> None:
    """Memory of the smallest, and the slowest link between members at the same place."""
    devices = [Device(f"g{v}", "fast" if v != 2 else "slow", (9 - v) * 1e9) for v in range(5)]
    bandwidth = [[10e9 + 1e9 * i + 1e8 * j for j in range(5)] for i in range(5)]
    problem = replace(
        small_problem(degrees=(2,)), cluster=from_matrix(devices, bandwidth, 1e-6, name="five")
    )
    found = problem_of_groups(problem, 2)
    assert [one.name for one in found.cluster.devices] == ["g0+g1", "g3+g4"]
    assert [one.memory_bytes for one in found.cluster.devices] == [8e9, 5e9]
    assert found.cluster.bandwidth[0, 1] == min(bandwidth[0][3], bandwidth[1][4])
    assert found.cluster.bandwidth[1, 0] == min(bandwidth[3][0], bandwidth[4][1])
    for one, whole in zip(found.chain.layers, problem.chain.layers, strict=True):
        assert one.costs == problem.at(2).chain.layers[problem.chain.layers.index(whole)].costs


def whole(problem: PipelineProblem) -> PipelineProblem:
    first, *rest = problem.chain.layers
    layers = (Layer("one", first.parameter_bytes, first.costs_at(1)), *rest)
    return replace(problem, chain=replace(problem.chain, layers=layers))


@pytest.mark.parametrize(
    ("change", "tensor", "fields", "message"),
    [
        (whole, 2, {}, "layer 'one' has no cost at tensor degree 2; it has costs at 1"),
        (lambda one: replace(one, cluster=uniform_servers(2, 1, Link(1e9), Link(1e9), kind="fast")),
         2, {}, "no server of '2x1' has 2 devices of one kind"),
        (None, 2, {"order": ScheduleChoice("chimera")}, "takes microbatches in turn, group by"),
        (None, 2, {"planner": "madpipe"}, "divided stages have no 'double-buffer' weights"),
    ],
)  # fmt: skip
def test_what_is_not_run_divided_is_not_planned(
    change: object, tensor: int, fields: dict[str, object], message: str
) -> None:
    problem = problem_on(2, 2, 4, 4)
    with pytest.raises(InputError, match=message):
        plan(group_request(change(problem) if callable(change) else problem, tensor, **fields))


@pytest.mark.parametrize(
    ("tensor", "fields", "message"),
    [
        (1, {}, "tensor must be at least 2, or left out, got 1"),
        (16, {}, "tensor"),
        (2, {"batch": 8}, "batch is not planned together with a tensor degree"),
        (2, {"offload": True}, "offload is not planned together with a tensor degree"),
    ],
)
def test_what_is_not_asked_for_with_a_degree(
    tensor: int, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        group_request(problem_on(2, 2, 4, 4), tensor, **fields)


def test_what_does_not_fit_is_said_of_groups() -> None:
    cost = LayerCost(6, 0.1, 1e9, 1e6, backward_seconds=0.2, device_kind="fast")
    shard = replace(cost, tensor=2, shard_parameter_bytes=5e9)
    problem = problem_on(1, 2, 4, 4)
    layers = (Layer("large", 1e10, (cost, shard)),)
    problem = replace(problem, chain=replace(problem.chain, layers=layers, microbatch_size=6))
    small = uniform_servers(1, 2, Link(1e9), kind="fast", memory_bytes=1e9)
    answer = plan(group_request(replace(problem, cluster=small), 2))
    assert answer.status is Status.INFEASIBLE
    assert answer.reason.startswith("every 2 devices are planned as one, which alone are spoken of")
