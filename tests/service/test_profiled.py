"""Plans by layer profiles through the service: answers, stops, problems from what users name."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from profiled_oracle import least_seconds

import stagewright
from benchmarks.decoder import Decoder
from stagewright.formulations.forms.answers import Status
from stagewright.formulations.parallelism.profiles.cluster import (
    Pool,
    Route,
    ServerPools,
    pool_of_kind,
    server_pools,
)
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import (
    Cluster,
    Device,
    Link,
    ServerLinks,
    from_matrix,
    uniform_servers,
)
from stagewright.graphs.machines.networks import NETWORK_SHARE, SERVER_SHARE
from stagewright.graphs.models.architecture import Architecture, FeedForward, GroupedAttention
from stagewright.graphs.models.layer_profiles import (
    LayerProfiles,
    LayerSizes,
    Measured,
    layer_sizes,
    with_sizes,
)
from stagewright.service.layouts.problems import profiled_problem
from stagewright.service.layouts.profiled import ProfiledRequest, find_profiled_plan

GPT = Architecture(
    "gpt",
    layers=2,
    hidden=256,
    vocabulary=1024,
    attention=GroupedAttention(4, 4, 64, bias=True, output_bias=True),
    feed_forward=FeedForward(1024, gated=False, bias=True),
    norm="layer",
    positions=128,
)


def profiles(layers: int = 3, precision: str = "fp32") -> LayerProfiles:
    times = tuple(float(2 + i % 2) for i in range(layers))
    measured = tuple(
        Measured(kind, 1, t, tuple(x / t * slow for x in times), times, times)
        for kind, slow in (("a", 1.0), ("b", 3.0))
        for t in (1, 2)
    )
    sizes = tuple(LayerSizes(t, (1e6 / t,) * layers, (1.0,) * layers, (1e6,) * layers)
                  for t in (1, 2))  # fmt: skip
    return LayerProfiles("m", "s", measured, sizes, precision)


def pools(memory: float = 1e9) -> ServerPools:
    route = Route(1e6, 1e6)
    return ServerPools((Pool("A", "z", 1, 2, memory, route), Pool("b", "z", 1, 1, memory, route)))


# The answer.


def test_the_answer_is_the_best_plan_there_is() -> None:
    problem = stagewright.profiled_problem(profiles(), pools(), batch=3, reserve_bytes=0.0)
    found = stagewright.profiled_train_plan(problem, time_limit=30)
    assert found.status is Status.OPTIMAL
    assert found.iteration_seconds == pytest.approx(least_seconds(problem))
    assert found.plan is not None
    assert stagewright.check_profiled_plan(found.plan) == ()
    assert found.plan.bound is not None
    assert found.plan.bound.seconds == found.bound_seconds


def test_documents_are_read_as_they_were_written(tmp_path) -> None:
    problem = profiled_problem(profiles(), pools(), batch=2, reserve_bytes=0.0)
    plan = stagewright.profiled_train_plan(problem).plan
    stagewright.save_profiled_plan(plan, tmp_path / "plan.json")
    assert stagewright.load_profiled_plan(tmp_path / "plan.json") == plan


def test_a_request_travels_in_json() -> None:
    problem = profiled_problem(profiles(), pools(), batch=2, reserve_bytes=0.0)
    request = ProfiledRequest.of(problem=problem, time_limit=5.0)
    again = ProfiledRequest.parse(request.model_dump_json())
    assert again.problem == problem
    first, second = find_profiled_plan(request), find_profiled_plan(again)
    assert first.iteration_seconds == second.iteration_seconds


def test_a_stopped_search_says_so() -> None:
    stop = threading.Event()
    stop.set()
    problem = profiled_problem(profiles(), pools(), batch=3)
    found = stagewright.profiled_train_plan(problem, stop=stop)
    assert found.status is Status.INTERRUPTED
    assert found.plan is None
    assert "ended before a plan was found" in found.reason
    with pytest.raises(InputError, match="time_limit must be"):
        stagewright.profiled_train_plan(problem, time_limit=0)


def test_the_reason_names_what_the_least_enlarged_plan_lacks() -> None:
    problem = profiled_problem(profiles(), pools(20e6), batch=2, reserve_bytes=0.0)
    assert stagewright.profiled_train_plan(problem).plan is not None
    found = stagewright.profiled_train_plan(
        profiled_problem(profiles(), pools(7e6), batch=2, reserve_bytes=0.0)
    )
    assert found.status is Status.INFEASIBLE
    assert "which has 7 MB" in found.reason


# Problems.


def test_precision_is_that_of_the_profiles() -> None:
    of = {
        precision: profiled_problem(profiles(precision=precision), pools(), batch=2)
        for precision in ("fp32", "bf16")
    }
    assert (of["fp32"].memory.parameter_bytes, of["fp32"].gradient_bytes) == (16, 4)
    assert (of["bf16"].memory.parameter_bytes, of["bf16"].gradient_bytes) == (18, 4)
    with pytest.raises(InputError, match="precision must be fp32, fp16, bf16, got 'int8'"):
        profiles(precision="int8")


def test_kinds_are_spelled_as_in_the_profiles() -> None:
    problem = profiled_problem(profiles(), pools(), batch=2)
    assert [pool.device_kind for pool in problem.cluster.pools] == ["a", "b"]
    other = replace(pools(), pools=(replace(pools().pools[0], device_kind="c"),))
    with pytest.raises(InputError, match="have no device kind 'c', only a, b"):
        profiled_problem(profiles(), other, batch=2)


# Clusters.


def test_pools_of_a_cluster_of_unequal_servers() -> None:
    names = (("a0", "a1"), ("a2", "a3"), ("b0",), ("c0", "c1", "c2"))
    kinds = {"a": 40e9, "b": 16e9, "c": 40e9}
    devices = tuple(
        Device(n, "b" if n[0] == "b" else "a", kinds[n[0]]) for row in names for n in row
    )
    found = server_pools(Cluster("m", devices, ServerLinks(names, Link(9e9), Link(2e9, 1e-5))))
    shapes = [(one.device_kind, one.servers, one.devices) for one in found.pools]
    assert shapes == [("a", 2, 2), ("b", 1, 1), ("a", 1, 3)]
    assert found.pools[0].network == Route(2e9, 4e9, 1e-5)
    assert found.pools[0].inside == Route(9e9, 18e9)
    assert found.pools[1].inside is None
    assert found.between_zones is None


def test_racks_are_zones() -> None:
    names = (("a", "b"), ("c", "d"))
    devices = tuple(Device(n, "a", 1e9) for row in names for n in row)
    links = ServerLinks(names, Link(9e9), Link(5e9), racks=names, inter_rack=Link(1e9))
    found = server_pools(Cluster("m", devices, links))
    assert [one.zone for one in found.pools] == ["rack 0", "rack 1"]
    assert found.route(0, 1, same_server=False).device_bytes_per_second == 1e9
    assert found.route(0, 0, same_server=False).device_bytes_per_second == 5e9


def test_clusters_that_have_no_pools() -> None:
    devices = (Device("x", "a", 1e9), Device("y", "b", 1e9))
    with pytest.raises(InputError, match="'y' differs from 'x' of the same server"):
        server_pools(Cluster("m", devices, ServerLinks((("x", "y"),), Link(1e9))))
    alike, rates = (devices[0], replace(devices[1], kind="a")), np.array([[0, 1e9], [2e9, 0]])
    with pytest.raises(InputError, match="matrix of unequal links"):
        server_pools(from_matrix(alike, rates))
    assert server_pools(from_matrix(alike, np.full((2, 2), 1e9))).pools[0].devices == 2
    assert server_pools(uniform_servers(2, 3, Link(1e9), Link(1e9))).pools[0].servers == 2


def test_pools_by_kind_have_its_links_and_memory() -> None:
    pool = pool_of_kind("A100", 2, 4)
    assert pool.memory_bytes == 39.38 * 2**30
    assert pool.inside is not None
    assert pool.inside.device_bytes_per_second == pytest.approx(SERVER_SHARE * 300e9)
    assert pool.network.device_bytes_per_second == pytest.approx(NETWORK_SHARE * 25e9)
    assert pool.network.group_bytes_per_second == pytest.approx(4 * NETWORK_SHARE * 25e9)
    with pytest.raises(InputError, match="network_bandwidth of x is not known"):
        pool_of_kind("x", 2, 4, memory_bytes=1e9, server_bandwidth=1e9)
    with pytest.raises(InputError, match="memory_bytes of x is not known"):
        pool_of_kind("x", 2, 4, server_bandwidth=1e9, network_bandwidth=1e9)


# Sizes.


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_parameters_are_those_of_megatrons_decoder(tensor: int) -> None:
    """Its vocabulary is padded: 1,024 is a multiple."""
    other = Decoder(2, 256, 4, 1024, 1024, 128).sizes(tensor)
    found = layer_sizes(GPT, 4, 128, tensor, 4, "materialized")
    assert found.parameters[1:3] == pytest.approx(other.parameters[1:3])
    assert found.parameters[0] == pytest.approx(other.parameters[0])
    assert found.parameters[3] == pytest.approx(other.parameters[3])
    assert found.output_bytes == pytest.approx(other.output_bytes)


def test_the_last_norm_may_be_a_layer() -> None:
    whole, apart = (layer_sizes(GPT, layers, 128, 1, 2, "fused") for layers in (4, 5))
    for name in ("parameters", "saved_bytes"):
        one, other = getattr(whole, name), getattr(apart, name)
        assert one[:3] == other[:3]
        assert one[3] == pytest.approx(other[3] + other[4])
    assert apart.parameters[3] == 2 * 256
    with pytest.raises(InputError, match="the profiles have 6 layers"):
        layer_sizes(GPT, 6, 128, 1, 2, "fused")


def test_degrees_that_do_not_divide_are_refused() -> None:
    measured = Measured("a", 1, 3, (1.0,) * 4, (1.0,) * 4, (1.0,) * 4)
    with pytest.raises(InputError, match="tensor degree 3 does not divide 4 heads"):
        with_sizes(LayerProfiles("m", "s", (measured,)), GPT, sequence=128)


def test_a_gap_that_time_does_not_close_is_told() -> None:
    """Four groups of a stage on two servers: the sum inside a server is out of reach."""
    inside, network = Route(1e9, 1e9), Route(1e6, 1e6)
    pool = Pool("a", "z", 2, 2, 1e9, network, inside)
    problem = profiled_problem(profiles(), ServerPools((pool,)), batch=2, reserve_bytes=0.0)
    found = stagewright.profiled_train_plan(problem, time_limit=30)
    told = [one for one in found.remarks if "more time would not close the gap" in one]
    assert (found.status is Status.FEASIBLE) == bool(told)
    assert found.bound_seconds <= least_seconds(problem) * (1 + 1e-9)
