"""Links of nested groups equal those of dense tables; servers of one and of several kinds."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from stagewright.formulations.pipelines.bounds.server_relaxation import levels_of
from stagewright.formulations.plans.actions import UPDATE, B, F, I, W
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.timing import covered_seconds, kernel_shares
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import (
    Cluster,
    Device,
    Link,
    MatrixLinks,
    ServerLinks,
    from_matrix,
    load_cluster,
    save_cluster,
    uniform_servers,
)
from stagewright.graphs.machines.fabric import ServerGroup, mixed_servers, repeated
from stagewright.graphs.machines.ordering import MOST_CUT, group_order, recursive_device_order
from stagewright.graphs.machines.parts import first_devices, with_memory
from stagewright.graphs.machines.topology import dgx1, uniform_racks
from stagewright.graphs.models.chain import Chain, Layer, LayerCost, load_model, save_model

GB = 1e9
LINKS = st.builds(
    Link, st.sampled_from((1 * GB, 2 * GB, 5 * GB)), st.sampled_from((0.0, 1e-6, 2e-6))
)


@st.composite
def nested(draw):
    """A few racks of a few servers of a few devices, in any order and of any size."""
    shape = draw(
        st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=3)
    )
    names = draw(st.permutations([f"g{i}" for i in range(sum(map(sum, shape)))]))
    left, racks, servers = iter(names), [], []
    for rack in shape:
        inside = [tuple(next(left) for _ in range(devices)) for devices in rack]
        servers += inside
        racks.append(tuple(name for server in inside for name in server))
    two_levels = ServerLinks(tuple(servers), draw(LINKS), draw(LINKS))
    more = {"racks": tuple(racks), "inter_rack": draw(LINKS)} if draw(st.booleans()) else {}
    devices = tuple(Device(name, "v100", 16 * GB) for name in sorted(names))
    return Cluster("nested", devices, replace(two_levels, **more))


def dense(cluster):
    """The same links by their definition: the smallest group that has both devices."""
    links, index = cluster.links, cluster.index
    size = len(cluster)
    outer = links.inter if links.racks is None else links.inter_rack
    bandwidth = np.full((size, size), outer.bandwidth_bytes_per_second)
    latency = np.full((size, size), outer.latency_seconds)
    for groups, link in ((links.racks or (), links.inter), (links.servers, links.intra)):
        for group in groups:
            grid = np.ix_([index[name] for name in group], [index[name] for name in group])
            bandwidth[grid], latency[grid] = link.bandwidth_bytes_per_second, link.latency_seconds
    np.fill_diagonal(latency, 0.0)
    return from_matrix(cluster.devices, bandwidth, latency.tolist())


def servers_of(sizes, inside=2 * GB):
    """Servers of so many devices, 1 GB/s between them."""
    names = [tuple(f"s{s}g{g}" for g in range(size)) for s, size in enumerate(sizes)]
    devices = tuple(Device(name, "v100", 16 * GB) for server in names for name in server)
    return Cluster("made", devices, ServerLinks(tuple(names), Link(inside), Link(GB)))


@examples(100)
@given(nested(), st.data())
def test_counting_equals_the_tables(cluster, data):
    same = dense(cluster)
    ours, tables = cluster.pairs, same.pairs
    size = len(cluster)
    assert type(ours) is not type(tables)
    assert np.array_equal(cluster.bandwidth, same.bandwidth)
    assert np.array_equal(cluster.latency, same.latency)
    assert np.array_equal(cluster.direct_bandwidth, same.direct_bandwidth)
    group = st.lists(st.integers(0, size - 1), min_size=1, unique=True)
    ones, others = data.draw(group), data.draw(group)
    assert ours.slowest(ones, others) == tables.slowest(ones, others)
    assert ours.slowest(ones, ones) == tables.slowest(ones, ones)
    for mine, theirs in zip(ours.block(ones, others), tables.block(ones, others), strict=True):
        assert np.array_equal(mine, theirs)
    groups = np.array(data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)))
    for labels in (groups, np.arange(size), np.zeros(size, dtype=int)):
        assert ours.best_between(labels) == tables.best_between(labels)
    assert np.array_equal(ours.bandwidths(), tables.bandwidths())
    for bandwidth in (0.0, *ours.bandwidths()):
        assert np.array_equal(ours.components(bandwidth), tables.components(bandwidth))
    if size > 1:
        for mine, theirs in zip(ours.nearest(), tables.nearest(), strict=True):
            assert np.array_equal(mine, theirs)
    assert [*levels_of(cluster)] == [*levels_of(same)]


@examples(50)
@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_order_by_groups_equals_the_order_by_cuts(servers, devices, data):
    """For servers of one size with faster links inside, whatever the order of the devices."""
    cluster = servers_of([devices] * servers)
    cluster = replace(cluster, devices=tuple(data.draw(st.permutations(cluster.devices))))
    assert group_order(cluster.pairs).tolist() == [*recursive_device_order(cluster)]


def test_many_devices_are_ordered_by_groups():
    """Racks, servers and devices by their first devices, which are not in the order of the file."""
    cluster = uniform_racks(5, 30, 8, (Link(4 * GB), Link(2 * GB), Link(GB)))
    cluster = replace(cluster, devices=cluster.devices[::-1])
    assert len(cluster) > MOST_CUT
    assert [*recursive_device_order(cluster)] == [*range(len(cluster))]
    alternating = replace(cluster, devices=cluster.devices[::2] + cluster.devices[1::2])
    names = [alternating.devices[v].name for v in recursive_device_order(alternating)]
    assert [name.partition("g")[0] for name in names[::8]] == [
        f"r{r}s{s}" for r in range(4, -1, -1) for s in range(29, -1, -1)
    ]


def test_ten_thousand_devices_in_little_memory():
    """The links of three levels by counting; a table of all pairs alone has 800 MB."""
    cluster = uniform_racks(125, 10, 8, (Link(300 * GB, 1e-6), Link(50 * GB), Link(GB, 1e-5)))
    tracemalloc.start()
    (level,) = levels_of(cluster)
    bandwidth, latency = cluster.pairs.nearest()
    slowest = cluster.pairs.slowest(range(10_000), range(10_000))
    order = recursive_device_order(cluster)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6
    assert level.groups.tolist() == [1250, 125]
    assert level.rooms.tolist() == [8, 80]
    assert level.seconds_per_byte == (1 / (300 * GB), 1 / (50 * GB), 1 / GB)
    assert level.latency == (0.0, 0.0, 1e-5)
    assert [np.count_nonzero(bandwidth == width * GB) for width in (300, 50, 1)] == [7, 72, 9920]
    assert [np.count_nonzero(latency == late) for late in (0.0, 1e-6, 1e-5)] == [72, 7, 9920]
    assert slowest == (GB, 1e-5)
    assert sorted(order) == [*range(10_000)]


FOUR = tuple(Device(name, "v100", 16 * GB) for name in "abcd")
PAIRS = (("a", "b"), ("c", "d"))
FAST_LINK = Link(2 * GB)


@pytest.mark.parametrize(
    ("links", "message"),
    [
        (
            ServerLinks(PAIRS, FAST_LINK, FAST_LINK, (("a", "b", "c"), ("d",)), FAST_LINK),
            "in several racks",
        ),
        (ServerLinks(PAIRS, FAST_LINK, FAST_LINK, PAIRS), "several racks and no inter_rack link"),
        (
            ServerLinks(PAIRS, FAST_LINK, None, (tuple("abcd"),)),
            "several servers and no inter link",
        ),
        (
            ServerLinks(PAIRS, FAST_LINK, FAST_LINK, (("a", "b"), ("c",)), FAST_LINK),
            "'d' is in no rack",
        ),
        (
            ServerLinks(PAIRS, FAST_LINK, FAST_LINK, (*PAIRS, ("a",)), FAST_LINK),
            "racks names 'a' twice",
        ),
        (
            ServerLinks(PAIRS, FAST_LINK, FAST_LINK, (*PAIRS, ("e",)), FAST_LINK),
            "'e', which is not a device",
        ),
        (ServerLinks(PAIRS, FAST_LINK, FAST_LINK, inter_rack=FAST_LINK), "without links.racks"),
    ],
)
def test_wrong_racks_are_refused(links, message):
    with pytest.raises(InputError, match=message):
        Cluster("wrong", FOUR, links)


def test_racks_are_read_back(tmp_path):
    cluster = uniform_racks(2, 2, 2, (Link(4 * GB), Link(2 * GB), Link(GB, 1e-6)))
    save_cluster(cluster, tmp_path / "cluster.json")
    assert load_cluster(tmp_path / "cluster.json") == cluster
    assert cluster.bandwidth[0, [1, 2, 4]].tolist() == [4 * GB, 2 * GB, GB]
    assert cluster.latency[0, 4] == 1e-6


A = Device("a", "a100", 40e9, host_bytes_per_second=24e9)
V = Device("v", "v100", 16e9)


def group(
    device: Device, servers: int, devices: int, intra: Link | None, inter: Link | None
) -> ServerGroup:
    every = tuple(replace(device, name=f"g{i}") for i in range(devices))
    return ServerGroup(every, servers, intra, inter)


FAST, SLOW, NET = Link(300e9, 1e-6), Link(25e9, 2e-6), Link(12.5e9, 5e-6)


def test_equal_links_are_levels() -> None:
    made = mixed_servers([group(A, 1, 2, FAST, NET), group(V, 2, 1, None, NET)], "mix")
    assert isinstance(made.links, ServerLinks)
    assert [(one.name, one.kind) for one in made.devices] == [
        ("s0g0", "a100"), ("s0g1", "a100"), ("s1g0", "v100"), ("s2g0", "v100"),
    ]  # fmt: skip
    assert made.devices[1].host_bytes_per_second == 24e9
    assert made.bandwidth[0, [1, 2, 3]].tolist() == [300e9, 12.5e9, 12.5e9]


def test_a_group_of_one_kind_is_uniform_servers() -> None:
    made = mixed_servers([group(V, 3, 2, SLOW, NET)], "3x2")
    assert made == uniform_servers(3, 2, SLOW, NET, kind="v100", memory_bytes=16e9)


def test_unequal_links_are_a_matrix_at_the_lower_rate_of_both() -> None:
    slower = Link(1e9, 3e-6)
    groups = [group(A, 1, 2, FAST, NET), group(V, 2, 2, SLOW, slower)]
    made = mixed_servers(groups, "mix")
    assert isinstance(made.links, MatrixLinks)
    assert made.servers == ((0, 1), (2, 3), (4, 5))
    assert made.bandwidth[0, 1:].tolist() == [300e9, 1e9, 1e9, 1e9, 1e9]
    assert made.bandwidth[2, 3:].tolist() == [25e9, 1e9, 1e9]
    assert made.latency[0, [1, 2]].tolist() == [1e-6, 5e-6]
    assert made.latency[2, [3, 4]].tolist() == [2e-6, 3e-6]
    np.testing.assert_array_equal(made.bandwidth, made.bandwidth.T)


def test_missing_links_and_too_many_devices_are_refused() -> None:
    with pytest.raises(InputError, match="has no links"):
        mixed_servers([group(A, 1, 1, None, None)], "one")
    with pytest.raises(InputError, match="the servers must be connected"):
        mixed_servers([group(A, 1, 2, FAST, None), group(V, 1, 2, SLOW, NET)], "mix")
    with pytest.raises(InputError, match=r"1056 devices with unequal links.*at most 1024"):
        mixed_servers([group(A, 4, 8, FAST, NET), group(V, 128, 8, SLOW, NET)], "mix")
    with pytest.raises(InputError, match="the number of devices must be at most"):
        mixed_servers([group(A, 10_000, 8, FAST, NET)], "many")


def test_several_dgx1() -> None:
    one = dgx1(latency=1e-6)
    made = mixed_servers([repeated(one, 3, NET)], "3 x dgx1")
    assert len(made.servers) == 3
    assert [made.devices[i].name for i in (0, 8, 23)] == ["s0g0", "s1g0", "s2g7"]
    for first in (0, 8, 16):
        inside = slice(first, first + 8)
        np.testing.assert_array_equal(made.bandwidth[inside, inside], one.bandwidth)
        np.testing.assert_array_equal(made.latency[inside, inside], one.latency)
    assert (made.bandwidth[:8, 8:] == 12.5e9).all()
    assert (made.latency[:8, 8:] == 5e-6).all()


def test_several_servers_of_equal_links_are_levels() -> None:
    """As many as a cluster may have: no matrix is made."""
    one = from_matrix([A, V], [[None, 9e9], [9e9, None]], 1e-6, name="pair")
    made = mixed_servers([repeated(one, 5000, NET)], "5000 x pair")
    assert isinstance(made.links, ServerLinks)
    assert made.links.intra == Link(9e9, 1e-6)
    assert (made.name, made.devices[2].name) == ("5000 x pair", "s1a")
    single = from_matrix([A], [[None]])
    assert mixed_servers([repeated(single, 2, NET)], "two").bandwidth[0, 1] == 12.5e9


def test_one_way_links_are_kept_apart() -> None:
    one = from_matrix([A, V], [[None, 9e9], [8e9, None]])
    made = mixed_servers([repeated(one, 2, NET)], "two")
    assert made.bandwidth[2:, 2:].tolist() == [[np.inf, 9e9], [8e9, np.inf]]


@pytest.mark.parametrize(
    ("one", "servers", "message"),
    [
        (dgx1(), 0, "the number of servers must be at least 1"),
        (dgx1(), 129, "1032 devices with unequal links"),
        (dgx1(), 10_000, "the number of devices must be at most"),
        (uniform_servers(2, 2, SLOW, NET), 2, "has servers already"),
    ],
)
def test_what_is_not_repeated(one: Cluster, servers: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        mixed_servers([repeated(one, servers, NET)], "many")


@examples(50)
@given(st.sampled_from(["servers", "racks", "cube"]), st.data())
def test_links_of_the_first_devices_stay(shape, data):
    cluster = {
        "servers": lambda: uniform_servers(3, 4, Link(9e9, 1e-6), Link(1e9, 2e-6)),
        "racks": lambda: uniform_racks(2, 3, 2, (Link(9e9), Link(3e9), Link(1e9, 5e-6))),
        "cube": dgx1,
    }[shape]()
    count = data.draw(st.integers(1, len(cluster)))
    part = first_devices(cluster, count)
    assert part.devices == cluster.devices[:count]
    assert np.array_equal(part.direct_bandwidth, cluster.direct_bandwidth[:count, :count])
    servers = [[v for v in server if v < count] for server in cluster.servers]
    assert [list(one) for one in part.servers] == [one for one in servers if one]
    if shape != "cube":
        assert np.array_equal(part.bandwidth, cluster.bandwidth[:count, :count])
        assert np.array_equal(part.latency, cluster.latency[:count, :count])


def test_all_devices_are_the_cluster_itself():
    cluster = dgx1()
    assert first_devices(cluster, 8) is cluster


def test_devices_connected_by_others_only_are_refused():
    devices = [Device(name, "v100", 1e9) for name in "abc"]
    line = from_matrix(devices, [[None, None, 1e9], [None, None, 1e9], [1e9, 1e9, None]])
    with pytest.raises(InputError, match=r"'matrix, first 2' is not connected"):
        first_devices(line, 2)


@pytest.mark.parametrize("count", [0, 9])
def test_other_numbers_are_refused(count):
    with pytest.raises(InputError, match=f"devices must be 1 to 8.*got {count}"):
        first_devices(dgx1(), count)


def test_memory_is_of_every_device():
    assert {one.memory_bytes for one in with_memory(dgx1(), 7e9).devices} == {7e9}


def cost(size: int, *shares: float | None) -> LayerCost:
    names = ("forward_share", "input_gradient_share", "weight_gradient_share")
    given = dict(zip(names, shares, strict=False))
    return LayerCost(size, 1.0, 1.0, 1.0, input_gradient_seconds=1.0, weight_gradient_seconds=1.0,
                     **given)  # fmt: skip


def problem(assumed: float | None = None) -> PipelineProblem:
    """Two layers: shares at 2 and 8 samples; at 8 samples, only of the forward."""
    layers = (
        Layer("one", 1.0, (cost(2, 0.2, 0.3, 0.4), cost(8, 0.6, 0.5, 0.9))),
        Layer("two", 1.0, (cost(8, 0.7),)),
    )
    cluster = uniform_servers(1, 8, Link(1e9))
    return PipelineProblem(Chain("m", "by hand", 8, layers), cluster, 1, assumed_share=assumed)


@pytest.mark.parametrize(
    ("replicas", "first"),
    [
        (1, [0.6, 0.5, 0.9]),
        (2, [0.6, 0.5, 0.9]),  # 4 samples: the larger of both neighbours
        (4, [0.2, 0.3, 0.4]),
        (8, [0.2, 0.3, 0.4]),  # 1 sample: below the smallest
    ],
)
def test_shares_at_other_sizes(replicas: int, first: list[float]) -> None:
    found: Floats = problem().layer_shares("v100", replicas)
    assert found[:, 0].tolist() == first
    assert found[:, 1].tolist() == [0.7, 1, 1]
    assert problem(0.3).layer_shares("v100", replicas)[:, 1].tolist() == [0.7, 0.3, 0.3]


def test_the_largest_share_of_a_stage_counts() -> None:
    stage = Stage((0, 2), ("s0g0",))
    assert kernel_shares(problem(0.3), stage) == {F: 0.7, I: 0.5, W: 0.9, B: 0.9, UPDATE: 1}
    again = kernel_shares(problem(0.3), replace(stage, recompute="full"))
    assert (again[I], again[B]) == (0.7, 0.9)
    assert set(kernel_shares(problem(), stage).values()) == {0.7, 1.0}


def test_shares_are_above_0_and_at_most_1(tmp_path) -> None:
    for wrong in (0.0, 1.1):
        with pytest.raises(InputError, match="weight_gradient_share must be above 0 and at most 1"):
            cost(1, 0.5, 0.5, wrong)
    save_model(problem().chain, tmp_path / "m.json")
    assert load_model(tmp_path / "m.json") == problem().chain
    assert problem(0.3).digest != problem().digest != problem(0.4).digest


def test_covered_seconds() -> None:
    nan = float("nan")
    starts, ends = [[4.0, 0.0, nan, 1.0, 9.0], [5.0, 2.0, nan, 3.0, 9.0]]
    assert covered_seconds(np.array(starts), np.array(ends)) == 4
    assert covered_seconds(np.array([nan]), np.array([nan])) == 0
