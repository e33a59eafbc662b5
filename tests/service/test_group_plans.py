"""Plans of one tensor degree: groups are planned as devices, the plan is one for the devices."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import small_problem
from profiles import examples

from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Status
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan_class import class_of
from stagewright.formulations.plans.shards import groups_of
from stagewright.formulations.schedules.groups import problem_of_groups
from stagewright.formulations.schedules.published.kinds import ScheduleChoice
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Device, Link, from_matrix, uniform_servers
from stagewright.graphs.models.chain import Layer, LayerCost
from stagewright.service.pipelines.planning import plan
from stagewright.service.pipelines.requests import PlanRequest
from stagewright.solvers.planning import plan as solve


def problem_on(servers: int, devices: int, layers: int, microbatches: int) -> PipelineProblem:
    """Layers with costs at degrees 1, 2 and 4 on equal servers of fast devices."""
    given = small_problem(layers=layers, microbatches=microbatches, degrees=(2, 4), parts=True)
    cluster = uniform_servers(
        servers, devices, Link(20e9, 1e-6), Link(5e9, 1e-5), kind="fast", memory_bytes=64e9
    )
    return replace(given, cluster=cluster)


def request(problem: PipelineProblem, tensor: int, **fields: object) -> PlanRequest:
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
    asked = request(problem, tensor, **fields)
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
        plan(request(change(problem) if callable(change) else problem, tensor, **fields))


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
        request(problem_on(2, 2, 4, 4), tensor, **fields)


def test_what_does_not_fit_is_said_of_groups() -> None:
    cost = LayerCost(6, 0.1, 1e9, 1e6, backward_seconds=0.2, device_kind="fast")
    shard = replace(cost, tensor=2, shard_parameter_bytes=5e9)
    problem = problem_on(1, 2, 4, 4)
    layers = (Layer("large", 1e10, (cost, shard)),)
    problem = replace(problem, chain=replace(problem.chain, layers=layers, microbatch_size=6))
    small = uniform_servers(1, 2, Link(1e9), kind="fast", memory_bytes=1e9)
    answer = plan(request(replace(problem, cluster=small), 2))
    assert answer.status is Status.INFEASIBLE
    assert answer.reason.startswith("every 2 devices are planned as one, which alone are spoken of")
