"""Bandwidth and latency between the ranks of a job, measured by messages to and fro.

From rank i to rank j a message of n bytes goes, and an answer of one byte comes back. The seconds
of the round trip are fitted by latency + n / bandwidth over the sizes; the latency is that of both
ways, and each of them is taken to have half of it. One pair measures at a time.
"""

import itertools
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls

from stagewright.executor.measuring.machine import Machine
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Cluster, Device, from_matrix

SIZES = (4_096, 65_536, 1_048_576, 16_777_216)  # bytes
DIGITS = 4  # significant ones of a measurement


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """Measured from rank i to rank j, in rows i: bytes/s and seconds; 0 for i = j."""

    bandwidth: Floats
    latency: Floats


def measure_links(device: torch.device, sizes: Sequence[int] = SIZES, *, rounds: int = 9) -> Links:
    """Measure every pair of ranks of the default process group; all ranks get the answer.

    Raises
    ------
    InputError
        If there are fewer than two ranks or sizes.
    """
    ranks = dist.get_world_size()
    if ranks < 2:
        raise InputError("there is one rank; links need at least two")
    if len(set(sizes)) < 2 or min(sizes) < 1:
        raise InputError(f"bandwidth and latency need two sizes above zero, got {list(sizes)}")
    links = Links(np.zeros((ranks, ranks)), np.zeros((ranks, ranks)))
    for pair in itertools.permutations(range(ranks), 2):
        if dist.get_rank() in pair:
            seconds = [_round_trip(*pair, size, rounds, device) for size in sizes]
            links.bandwidth[pair], links.latency[pair] = fit(sizes, seconds)
        dist.barrier()
    return _as_senders_see_it(links)


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Bandwidth (bytes/s) and one way's latency (s) of round trips: least relative squares."""
    n, taken = np.array(sizes, dtype=float), np.array(seconds)
    scale = n.max()  # so that both columns are of one order
    columns = np.column_stack([np.ones(len(n)), n / scale]) / taken[:, None]
    (both_ways, of_largest), _ = nnls(columns * taken.max(), np.ones(len(n)))
    if of_largest == 0:  # all sizes took the same time: no more is known than the largest's
        return float(scale / taken[n.argmax()]), 0.0
    return float(scale / (of_largest * taken.max())), float(both_ways * taken.max() / 2)


def describe(
    links: Links, device: torch.device, *, kind: str = "", memory_bytes: float | None = None
) -> Cluster:
    """The cluster of the measured links; every rank says what it is and where it runs.

    Ranks on one host are the devices s0g0, s0g1, ... of one server.
    """
    mine = (
        socket.gethostname(),
        Machine(device, kind=kind).device_kind,
        _memory_bytes(device) if memory_bytes is None else memory_bytes,
    )
    told: list[tuple[str, str, float]] = [mine] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    hosts = list(dict.fromkeys(host for host, _, _ in told))
    servers: list[list[str]] = [[] for _ in hosts]
    devices = []
    for host, its_kind, its_memory in told:
        server = hosts.index(host)
        name = f"s{server}g{len(servers[server])}"
        servers[server].append(name)
        devices.append(Device(name, its_kind, its_memory))
    return from_matrix(
        devices,
        _rounded(links.bandwidth),
        _rounded(links.latency).tolist(),
        servers=servers,
        name=f"measured-{len(devices)}",
    )


def _round_trip(sender: int, receiver: int, size: int, rounds: int, device: torch.device) -> float:
    """The median seconds of ``rounds`` round trips after one that is not counted."""
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    answer = torch.zeros(1, dtype=torch.uint8, device=device)
    taken = []
    for _ in range(1 + rounds):
        start = time.perf_counter()
        if dist.get_rank() == sender:
            dist.send(message, receiver)
            dist.recv(answer, receiver)
        else:
            dist.recv(message, sender)
            dist.send(answer, sender)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return float(np.median(taken[1:]))


def _as_senders_see_it(links: Links) -> Links:
    """Every row from the rank that it starts at: the receiver's clock starts too early."""
    rows: list[tuple[Floats, Floats]] = [(links.bandwidth, links.latency)] * len(links.latency)
    own = dist.get_rank()
    dist.all_gather_object(rows, (links.bandwidth[own], links.latency[own]))
    return Links(np.array([row for row, _ in rows]), np.array([row for _, row in rows]))


def _memory_bytes(device: torch.device) -> float:
    """The GPU's memory, or this rank's share of the host's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    host = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return host / int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def _rounded(values: Floats) -> Floats:
    return np.array([[float(f"{value:.{DIGITS}g}") for value in row] for row in values])
