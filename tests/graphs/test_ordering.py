"""Device orders by minimum cuts: against networkx, on clusters of servers, and repeatable."""

import random
from itertools import combinations, pairwise

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from stagewright.graphs.machines.cluster import Device, Link, from_matrix, uniform_servers
from stagewright.graphs.machines.ordering import minimum_cut, recursive_device_order
from stagewright.graphs.machines.topology import dgx1

GB = 1e9


@st.composite
def weights(draw, entries):
    """A symmetric matrix of 2 to 9 vertices."""
    size = draw(st.integers(2, 9))
    matrix = np.zeros((size, size))
    for i, j in combinations(range(size), 2):
        matrix[i, j] = matrix[j, i] = draw(entries)
    return matrix


def stoer_wagner(matrix):
    """networkx's value of a minimum cut; 0 for a graph in pieces, which it refuses."""
    size = len(matrix)
    graph = networkx.Graph()
    graph.add_nodes_from(range(size))
    graph.add_weighted_edges_from(
        (i, j, matrix[i, j]) for i, j in combinations(range(size), 2) if matrix[i, j] > 0
    )
    return networkx.stoer_wagner(graph)[0] if networkx.is_connected(graph) else 0.0


def cut_value(matrix, side):
    return matrix[np.ix_(side, ~side)].sum()


def jittered(servers, devices, seed, intra=100 * GB, inter=10 * GB, jitter=0.1):
    """Servers of devices whose links differ by up to ``jitter``, in both directions."""
    rng = random.Random(seed)
    size = servers * devices
    rows = [
        [
            (intra if i // devices == j // devices else inter) * (1 + rng.uniform(-jitter, jitter))
            for j in range(size)
        ]
        for i in range(size)
    ]
    return from_matrix([Device(f"g{v}", "v100", 16e9) for v in range(size)], rows)


def renamed(cluster, image):
    """The cluster with its devices listed in the order ``image``."""
    grid = np.ix_(image, image)
    devices = [cluster.devices[v] for v in image]
    return from_matrix(devices, cluster.direct_bandwidth[grid])


def runs(order, devices_per_server):
    """Whether every server's devices stand next to each other in ``order``."""
    homes = [v // devices_per_server for v in order]
    changes = sum(a != b for a, b in pairwise(homes))
    return changes == len(set(homes)) - 1


ENTRIES = {
    "integers": st.integers(0, 20).map(float),
    "few values": st.sampled_from((0.0, 1.0, 10.0)),
    "sparse": st.sampled_from((0.0, 0.0, 0.0, 1.0, 7.0)),
    "reals": st.floats(1e-3, 1e3),
    "dense": st.floats(0.9, 1.1),  # a single vertex is the answer at once
}


@pytest.mark.parametrize("entries", ENTRIES)
@examples(80, derandomize=True)
@given(st.data())
def test_the_cut_is_minimal(entries, data):
    matrix = data.draw(weights(ENTRIES[entries]))
    value, side = minimum_cut(matrix)
    assert 0 < side.sum() < len(matrix)
    assert value == pytest.approx(cut_value(matrix, side))
    assert value == pytest.approx(stoer_wagner(matrix))


@pytest.mark.parametrize("groups", [(2, 3), (3, 4), (4, 4), (5, 2)])
def test_groups_that_are_merged_early_are_cut_between(groups):
    """Groups of heavy links, chained by light ones: a cut through a group costs much more."""
    count, size = groups
    home = np.repeat(np.arange(count), size)
    matrix = np.where(home[:, None] == home, 100.0, 0.0)
    for g in range(count - 1):
        one, other = g * size + size - 1, (g + 1) * size
        matrix[one, other] = matrix[other, one] = 1.0 + g
    np.fill_diagonal(matrix, 0.0)
    value, side = minimum_cut(matrix)
    assert value == 1.0
    assert set(home[side]).isdisjoint(home[~side])
    assert min(side.sum(), (~side).sum()) == size


@examples(40, derandomize=True)
@given(st.integers(2, 4), st.integers(2, 4), st.data())
def test_contracting_keeps_the_minimum_of_larger_graphs(servers, devices, data):
    """Servers of strongly linked devices exercise every way in which vertices are merged."""
    size = servers * devices
    matrix = np.zeros((size, size))
    for i, j in combinations(range(size), 2):
        near = i // devices == j // devices
        strategy = st.integers(20, 40) if near else st.sampled_from((0, 0, 1, 2))
        matrix[i, j] = matrix[j, i] = data.draw(strategy)
    value, side = minimum_cut(matrix)
    assert value == pytest.approx(stoer_wagner(matrix))
    assert value == pytest.approx(cut_value(matrix, side))


@pytest.mark.parametrize(("servers", "devices"), [(8, 4), (16, 8), (3, 5)])
@pytest.mark.parametrize("latency", [0.0, 1e-5])
def test_servers_stay_together(servers, devices, latency):
    cluster = uniform_servers(servers, devices, Link(100 * GB), Link(10 * GB, latency))
    order = recursive_device_order(cluster)
    assert sorted(order) == list(range(servers * devices))
    assert runs(order, devices)


@pytest.mark.parametrize(("servers", "devices", "seed"), [(8, 4, 0), (8, 4, 1), (16, 8, 0)])
def test_servers_stay_together_on_jittered_links(servers, devices, seed):
    order = recursive_device_order(jittered(servers, devices, seed))
    assert sorted(order) == list(range(servers * devices))
    assert runs(order, devices)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_servers_stay_together_whatever_the_listing(seed):
    """Devices of different servers listed in a mixture."""
    image = list(range(32))
    random.Random(seed).shuffle(image)
    order = recursive_device_order(renamed(jittered(8, 4, seed), image))
    assert runs([image[v] for v in order], 4)


def test_neighbouring_servers_are_the_better_linked_ones():
    """Pairs of servers on one switch stand next to each other."""
    home = np.arange(16) // 2
    switch = home // 2
    bandwidth = np.where(home[:, None] == home, 100 * GB, 5 * GB)
    bandwidth[(switch[:, None] == switch) & (home[:, None] != home)] = 20 * GB
    shuffled = np.random.default_rng(0).permutation(16)
    grid = np.ix_(shuffled, shuffled)
    devices = [Device(f"g{v}", "v100", 16e9) for v in range(16)]
    order = [
        int(shuffled[v]) for v in recursive_device_order(from_matrix(devices, bandwidth[grid]))
    ]
    assert runs(order, 2)
    assert runs(order, 4)


@pytest.mark.parametrize(
    "build",
    [
        lambda: uniform_servers(8, 4, Link(100 * GB), Link(10 * GB)),
        lambda: jittered(4, 4, 3),
        lambda: dgx1(),
    ],
)
def test_the_order_is_a_function_of_the_cluster(build):
    assert recursive_device_order(build()) == recursive_device_order(build())


@examples(30, derandomize=True)
@given(weights(ENTRIES["reals"]))
def test_a_faster_network_keeps_its_order(matrix):
    """Twice the bandwidth everywhere changes nothing; a power of two even keeps every bit."""
    devices = [Device(f"g{v}", "v100", 16e9) for v in range(len(matrix))]
    once, twice = (from_matrix(devices, matrix * GB * scale) for scale in (1, 2))
    assert recursive_device_order(once) == recursive_device_order(twice)


def test_one_device_and_two():
    assert recursive_device_order(uniform_servers(1, 1, Link(GB))) == (0,)
    assert recursive_device_order(uniform_servers(1, 2, Link(GB))) == (0, 1)
