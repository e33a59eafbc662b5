"""The first devices of a cluster keep the links between them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Device, Link, from_matrix, uniform_servers
from stagewright.graphs.machines.parts import first_devices, with_memory
from stagewright.graphs.machines.topology import dgx1, uniform_racks


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
