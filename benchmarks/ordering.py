"""Device ordering: a minimum cut by our kernel and by libraries, and the whole order.

An order takes n - 1 cuts, of smaller and smaller parts. scipy knows cuts between two vertices only,
of whole numbers: n - 1 maximum flows give a global one. igraph is measured where it is installed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from time import process_time

import networkx
import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from benchmarks.report import Table
from benchmarks.spec import BenchSpec
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.machines.cluster import Cluster, Device, from_matrix
from stagewright.graphs.machines.ordering import minimum_cut, recursive_device_order

PER_SERVER = 8
INSIDE, BETWEEN, JITTER = 100e9, 10e9, 0.1
WHOLE = 1e6  # bytes per second that count as one in whole numbers
SAME = 1e-3  # relative, after rounding to whole numbers


@dataclass(frozen=True, slots=True)
class Case:
    """So many devices in servers of eight, each link up to 10 % faster or slower than its kind.

    In a ``ring`` a server has links to the two next to it alone, and no single device is the cut.
    """

    devices: int
    ring: bool = False


def jittered(case: Case) -> Cluster:
    """No two links are alike, so that few cuts are found at once."""
    random, server = np.random.default_rng(0), np.arange(case.devices) // PER_SERVER
    apart = np.abs(server[:, None] - server)
    speed = np.where(apart == 0, INSIDE, BETWEEN)
    speed = speed * random.uniform(1 - JITTER, 1 + JITTER, speed.shape)
    links = np.isin(apart, (0, 1, server[-1])) if case.ring else np.ones(speed.shape, dtype=bool)
    rows = np.where(links, speed.astype(object), None).tolist()
    return from_matrix([Device(f"g{n}", "v100", 16e9) for n in range(case.devices)], rows)


SPEC = BenchSpec(
    "ordering",
    jittered,
    tuple(Case(n, ring) for n in (64, 128, 256, 512, 1024) for ring in (False, True)),
)


def by_networkx(weights: Floats) -> float:
    """Stoer and Wagner's algorithm in Python."""
    return float(networkx.stoer_wagner(networkx.from_numpy_array(weights))[0])


def by_scipy(weights: Floats) -> float:
    """The least of the flows from the first vertex to each other one."""
    whole = sparse.csr_array(np.rint(weights / WHOLE).astype(np.int32))
    flows = (csgraph.maximum_flow(whole, 0, sink).flow_value for sink in range(1, len(weights)))
    return float(min(flows)) * WHOLE


def by_igraph(weights: Floats) -> float:
    """Stoer and Wagner's algorithm in C."""
    row, column = np.triu_indices(len(weights), 1)
    edges = np.column_stack([row, column]).tolist()
    graph = import_module("igraph").Graph(n=len(weights), edges=edges)
    return float(graph.mincut(capacity=weights[row, column].tolist()).value)


# Up to how many devices each is measured.
PEERS: tuple[tuple[Callable[[Floats], float], int], ...] = (
    (by_networkx, 128),
    (by_scipy, 256),
    (by_igraph, 256),
)


def compare(case: Case) -> tuple[object, ...]:
    """A row: CPU seconds of one cut by each, and of the whole order by ours.

    Raises
    ------
    AssertionError
        If a peer's cut is another's.
    """
    cluster = SPEC.build(case)
    weights = cluster.direct_bandwidth + cluster.direct_bandwidth.T
    began = process_time()
    value = minimum_cut(weights)[0]
    seconds: list[object] = [process_time() - began]
    for peer, most in PEERS:
        if case.devices > most or (peer is by_igraph and find_spec("igraph") is None):
            seconds.append(None)
            continue
        began = process_time()
        found = peer(weights)
        seconds.append(process_time() - began)
        if abs(found - value) > SAME * value:
            raise AssertionError(f"{case}: {peer.__name__} has {found}, we have {value}")
    began = process_time()
    recursive_device_order(cluster)
    links = "ring of servers" if case.ring else "all pairs"
    return (case.devices, links, *seconds, process_time() - began)


def tables(quick: bool) -> list[Table]:
    """One cut, and an order."""
    rows = tuple(compare(case) for case in SPEC.cases(quick))
    return [
        Table(
            "ordering",
            "Device ordering: CPU seconds for one minimum cut, and ours for the whole order",
            (
                "devices",
                "links",
                "ours",
                "networkx",
                "scipy, n - 1 flows",
                "igraph",
                "whole order, ours",
            ),
            rows,
        )
    ]
