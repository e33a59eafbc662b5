"""Bandwidth and latency between the ranks of a job, measured by round trips.

Rank i sends rank j a message of n bytes and receives an answer of one byte. The times of the round
trips are fitted by latency + n / bandwidth over the sizes; each direction is assumed to have half
of that latency. One pair measures at a time. The shortest of several round trips counts: what else
a machine does only lengthens them.

An all-reduce of all ranks is timed too. It also copies and adds, so that it reaches only a share of
the bandwidth.

Between CPUs a message also takes time of the ranks that compute: of the thread that posts it, and
of gloo's thread, which needs the same cores; and what it divides is computed by two calls with
colder caches in place of one. It is measured as a pipeline has it: all ranks carry out microbatches
in one part without messages, and in two parts that send one message in each direction and receive
as many, over and over, with messages in flight while they compute. A quarter of the processor time
that the second way takes more is a rank's time for a message: a cut has two messages, on two ranks.
Other processes change it less than elapsed time. Times of several sizes are fitted by a constant
and a time per byte.
"""

import itertools
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls

from stagewright.executor.measuring.machine import (
    MeasuringMachine,
    forward_and_backward,
    layers_of_reference,
    rounded,
)
from stagewright.executor.training.interpreter.exchange import RECV_F, Messages
from stagewright.executor.training.ranks.rank import RankPlace
from stagewright.formulations.plans.actions import SEND_F, Action
from stagewright.formulations.prices.collectives import link_seconds, ring_part
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Cluster, Device, from_matrix

SIZES = (4_096, 65_536, 1_048_576, 16_777_216)  # bytes
_NUMBER_BYTES = 4  # of what an all-reduce adds


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredLinks:
    """Measured bytes/s and seconds from rank i (row) to rank j (column); 0 for i = j.

    ``all_reduce_share`` is the share of the least bandwidth that an all-reduce reaches, at most 1.
    ``message_seconds`` is the time of a rank for a message beside computation, without that of its
    bytes, which ``message_bytes_per_second`` tells (None: they take none). Both are None on GPUs,
    whose messages take no time of the processors that compute.
    """

    bandwidth: Floats
    latency: Floats
    all_reduce_share: float
    message_seconds: float | None
    message_bytes_per_second: float | None


def measure_links(
    device: torch.device, sizes: Sequence[int] = SIZES, *, rounds: int = 9
) -> MeasuredLinks:
    """Measure every pair of ranks of the default process group; all ranks return the result.

    Raises InputError if there are fewer than two ranks or sizes.
    """
    ranks = dist.get_world_size()
    if ranks < 2:
        raise InputError("links need at least two ranks, there is one")
    if len(set(sizes)) < 2 or min(sizes) < 1:
        raise InputError(f"bandwidth and latency need two sizes above zero, got {list(sizes)}")
    bandwidth, latency = np.zeros((ranks, ranks)), np.zeros((ranks, ranks))
    for pair in itertools.permutations(range(ranks), 2):
        if dist.get_rank() in pair:
            seconds = [_round_trip(*pair, size, rounds, device) for size in sizes]
            bandwidth[pair], latency[pair] = fit(sizes, seconds)
        dist.barrier()
    bandwidth, latency = _as_senders_see_it(bandwidth, latency)
    numbers = -(-max(sizes) // _NUMBER_BYTES)
    together = _all_reduce(numbers, rounds, device)
    share = reduce_share(ranks, _NUMBER_BYTES * numbers, together, bandwidth, latency)
    message = _message_price(rounds) if device.type == "cpu" else (None, None)
    return MeasuredLinks(bandwidth, latency, share, *message)


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Bandwidth (bytes/s) and one-way latency (s) of round trips, by relative least squares."""
    both_ways, bandwidth = _line(sizes, seconds)
    if bandwidth is None:  # all sizes took the same time: only the largest's rate is known
        return max(sizes) / seconds[int(np.argmax(sizes))], 0.0
    return bandwidth, both_ways / 2


def _line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float | None]:
    """A constant (s) and a rate (bytes/s), None if bytes take no time; relative least squares."""
    n, taken = np.array(sizes, dtype=float), np.array(seconds)
    scale = n.max()  # so that both columns have the same order of magnitude
    columns = np.column_stack([np.ones(len(n)), n / scale]) / taken[:, None]
    (constant, of_largest), _ = nnls(columns * taken.max(), np.ones(len(n)))
    rate = float(scale / (of_largest * taken.max())) if of_largest else None
    return float(constant * taken.max()), rate


def reduce_share(
    ranks: int, size: int, seconds: float, bandwidth: Floats, latency: Floats
) -> float:
    """The share of the least bandwidth that a ring all-reduce of ``size`` bytes reached, above 0.

    The inverse of the cost model's ``reduce_seconds``.
    """
    of_links = link_seconds(2 * ring_part(ranks, size), float(bandwidth[bandwidth > 0].min()))
    of_bytes = seconds - 2 * (ranks - 1) * latency.max()
    return float(of_links / max(of_links, of_bytes))


def describe(
    links: MeasuredLinks, device: torch.device, *, kind: str = "", memory_bytes: float | None = None
) -> Cluster:
    """The cluster of the measured links, from every rank's kind of device and host.

    Ranks on one host are the devices s0g0, s0g1, ... of one server.
    """
    mine = (
        socket.gethostname(),
        MeasuringMachine(device, kind=kind).device_kind,
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
        _each_rounded(links.bandwidth),
        _each_rounded(links.latency).tolist(),
        servers=servers,
        name=f"measured-{len(devices)}",
        all_reduce_share=rounded(links.all_reduce_share),
        message_seconds=_rounded_or_none(links.message_seconds),
        message_bytes_per_second=_rounded_or_none(links.message_bytes_per_second),
    )


def _round_trip(sender: int, receiver: int, size: int, rounds: int, device: torch.device) -> float:
    """The least seconds of ``rounds`` round trips, after one for warm-up."""
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
    return min(taken[1:])


def _all_reduce(numbers: int, rounds: int, device: torch.device) -> float:
    """The least seconds of ``rounds`` sums of so many numbers over all ranks, of the slowest rank.

    One round before them is for warm-up.
    """
    values = torch.zeros(numbers, dtype=torch.float32, device=device)
    taken = []
    for _ in range(1 + rounds):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(values)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    told = [taken] * dist.get_world_size()
    dist.all_gather_object(told, taken)
    return float(np.max(told, axis=0)[1:].min())


MESSAGES = (4_096, 131_072, 524_288)  # bytes
ITERATIONS = 25  # in a row
_IN_FLIGHT = 4  # messages: those of two microbatches


def _message_price(rounds: int) -> tuple[float, float | None]:
    """A rank's time for a message beside computation, of the slowest rank, and its bytes/s.

    The median of ``rounds`` differences to the same computation without messages counts.
    """
    rows, weights = layers_of_reference()
    added = [[_added_seconds(size, rows, weights) for size in MESSAGES] for _ in range(1 + rounds)]
    own = np.median(added[1:], axis=0) / 4  # a cut has two messages on both sides
    every = [own] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return _line(MESSAGES, np.maximum(1e-6, np.max(every, axis=0)).tolist())  # a call takes 1 us


def _added_seconds(size: int, rows: torch.Tensor, weights: Sequence[torch.Tensor]) -> float:
    """By how much a cut and its messages of ``size`` bytes lengthen a microbatch."""
    half = len(weights) // 2
    cut = _microbatch_seconds(size, rows, [weights[:half], weights[half:]])
    return cut - _microbatch_seconds(size, rows, [weights])


def _microbatch_seconds(
    size: int, rows: torch.Tensor, parts: Sequence[Sequence[torch.Tensor]]
) -> float:
    """Processor time of a forward and a backward by ``parts``, gloo's thread included.

    Where there are two, each rank sends to the next, by the executor's own calls, after the forward
    of the first and the backward of the second part, and receives as much from the rank before.
    What is sent is made of what was received.
    """
    rank, ranks, cpu = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    messages = Messages(RankPlace(("",) * ranks, rank, cpu, cpu, dist.group.WORLD))
    first = torch.ones(size, dtype=torch.uint8)
    rooms = [first] * (2 * ITERATIONS)
    sent, received = ([Action(0, kind, i) for i in range(len(rooms))] for kind in (SEND_F, RECV_F))

    def expect(i: int) -> None:
        rooms[i] = torch.empty_like(first)
        messages.expect(received[i], rooms[i], [rooms[i]], (rank - 1) % ranks, i)
        messages.taken(received[i - _IN_FLIGHT])

    def hand_over(i: int) -> None:
        made = rooms[i - _IN_FLIGHT].clone()
        if len(parts) > 1:
            messages.post(sent[i], made, (rank + 1) % ranks, i)
            messages.release(sent[i - _IN_FLIGHT])

    dist.barrier()
    start = time.process_time()
    for i in range(0, len(rooms), 2):
        if len(parts) > 1:
            expect(i)
            expect(i + 1)
        forward_and_backward(rows, parts, partial(hand_over, i), partial(hand_over, i + 1))
    for i in range(-_IN_FLIGHT, 0):
        messages.taken(received[i])
        messages.release(sent[i])
    return (time.process_time() - start) / ITERATIONS


def _as_senders_see_it(bandwidth: Floats, latency: Floats) -> tuple[Floats, Floats]:
    """Every row as measured by its sender: the receiver's clock starts too early."""
    rows: list[tuple[Floats, Floats]] = [(bandwidth, latency)] * len(latency)
    own = dist.get_rank()
    dist.all_gather_object(rows, (bandwidth[own], latency[own]))
    return np.array([row for row, _ in rows]), np.array([row for _, row in rows])


def _memory_bytes(device: torch.device) -> float:
    """The GPU's memory, or this rank's share of the host's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    host = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return host / int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def _each_rounded(values: Floats) -> Floats:
    return np.array([[rounded(value) for value in row] for row in values])


def _rounded_or_none(value: float | None) -> float | None:
    return None if value is None else rounded(value)
