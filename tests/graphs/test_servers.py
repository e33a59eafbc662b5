"""Several servers of one, and servers of several kinds."""

from dataclasses import replace

import numpy as np
import pytest

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import (
    Cluster,
    Device,
    Link,
    MatrixLinks,
    ServerLinks,
    from_matrix,
    uniform_servers,
)
from stagewright.graphs.machines.servers import ServerGroup, mixed_servers, repeated
from stagewright.graphs.machines.topology import dgx1

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
