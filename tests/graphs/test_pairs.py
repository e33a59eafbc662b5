"""Links of nested groups equal those of dense tables; no table of all pairs for many devices."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from stagewright.formulations.pipelines.server_relaxation import levels_of
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import (
    Cluster,
    Device,
    Link,
    ServerLinks,
    from_matrix,
    uniform_servers,
)
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
