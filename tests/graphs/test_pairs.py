"""Links of nested groups equal those of dense tables; no table of all pairs for many devices."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from stagewright.formulations.pipelines.bounds.server_relaxation import levels_of
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import (
    Cluster,
    Device,
    Link,
    ServerLinks,
    from_matrix,
    load_cluster,
    save_cluster,
)
from stagewright.graphs.machines.ordering import MOST_CUT, group_order, recursive_device_order
from stagewright.graphs.machines.topology import uniform_racks

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
FAST = Link(2 * GB)


@pytest.mark.parametrize(
    ("links", "message"),
    [
        (ServerLinks(PAIRS, FAST, FAST, (("a", "b", "c"), ("d",)), FAST), "in several racks"),
        (ServerLinks(PAIRS, FAST, FAST, PAIRS), "several racks and no inter_rack link"),
        (ServerLinks(PAIRS, FAST, None, (tuple("abcd"),)), "several servers and no inter link"),
        (ServerLinks(PAIRS, FAST, FAST, (("a", "b"), ("c",)), FAST), "'d' is in no rack"),
        (ServerLinks(PAIRS, FAST, FAST, (*PAIRS, ("a",)), FAST), "racks names 'a' twice"),
        (ServerLinks(PAIRS, FAST, FAST, (*PAIRS, ("e",)), FAST), "'e', which is not a device"),
        (ServerLinks(PAIRS, FAST, FAST, inter_rack=FAST), "without links.racks"),
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
