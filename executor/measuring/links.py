"""Bandwidth and latency between the ranks of a job, measured by round trips.

Rank i sends rank j a message of n bytes and receives an answer of one byte. The times of the round
trips are fitted by latency + n / bandwidth over the sizes; each direction is assumed to have half
of that latency. One pair measures at a time. The shortest of several round trips counts: what else
a machine does only lengthens them.

An all-reduce of all ranks is timed too. It also copies and adds, so that it reaches only a share of
the bandwidth.

Between CPUs a message also takes time of the ranks that compute: of the thread that posts it, and
of gloo's thread, which needs the same cores. It is measured as a pipeline has it: all ranks compute
a unit of work, send one message and receive one, over and over, with messages in flight while they
compute. What a round takes longer than without messages, halved, is a rank's time for a message.
"""

import itertools
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls

from stagewright.executor.training.interpreter.exchange import RECV_F, Messages
from stagewright.executor.training.ranks.rank import RankPlace
from stagewright.formulations.plans.actions import SEND_F, Action
from stagewright.formulations.prices.collectives import link_seconds, ring_part
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Cluster, Device, from_matrix

Seconds = Callable[[], float]
"""A measured time; on a GPU who asks for it waits until it is over."""


@dataclass(frozen=True, slots=True)
class MeasuringMachine:
    """The measuring device: ``kind`` is the device kind that clusters use for it."""

    device: torch.device
    threads: int = 1
    kind: str = ""

    @property
    def device_kind(self) -> str:
        """``kind``, or else the name of the device."""
        if self.kind:
            return self.kind
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu core"
        return name.lower().replace(" ", "-")

    @property
    def clock(self) -> str:
        """The kind of time that is measured."""
        return "processor time" if self._counts_processor_time else "elapsed time"

    def __str__(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{self.threads} of {os.cpu_count()} cores of {_processor()}, {self.clock}"

    @property
    def _counts_processor_time(self) -> bool:
        return self.device.type == "cpu" and self.threads == 1

    def timed(self, work: Callable[[], Any]) -> tuple[Seconds, Any]:
        """The seconds that ``work`` takes, and its result.

        On a GPU they are those between two events of its stream, and nothing waits before they are
        asked for: as in a run, the host issues what follows while the GPU computes, and a kernel
        that is issued too late for the GPU takes the time of its launch.
        """
        if self.device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            result = work()
            ended.record()
            return partial(_between, began, ended), result
        clock = time.process_time if self._counts_processor_time else time.perf_counter
        start = clock()
        result = work()
        seconds = clock() - start
        return lambda: seconds, result


def _between(began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
    ended.synchronize()
    milliseconds: float = began.elapsed_time(ended)
    return 1e-3 * milliseconds


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use ``count`` threads within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _processor() -> str:
    """The processor's name, with family and model if the kernel reports them."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor() or platform.machine()
    fields = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE))
    name = fields.get("model name", platform.machine())
    return f"{name} (family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"


SIZES = (4_096, 65_536, 1_048_576, 16_777_216)  # bytes
DIGITS = 4  # significant digits of a measurement
_NUMBER_BYTES = 4  # of what an all-reduce adds


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredLinks:
    """Measured bytes/s and seconds from rank i (row) to rank j (column); 0 for i = j.

    ``all_reduce_share`` is the share of the least bandwidth that an all-reduce reaches, at most 1.
    ``message_seconds`` is the time of a rank for a message beside computation; None on GPUs, whose
    messages take no time of the processors that compute.
    """

    bandwidth: Floats
    latency: Floats
    all_reduce_share: float
    message_seconds: float | None


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
    message = _message_seconds(min(sizes), rounds) if device.type == "cpu" else None
    return MeasuredLinks(bandwidth, latency, share, message)


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Bandwidth (bytes/s) and one-way latency (s) of round trips, by relative least squares."""
    n, taken = np.array(sizes, dtype=float), np.array(seconds)
    scale = n.max()  # so that both columns have the same order of magnitude
    columns = np.column_stack([np.ones(len(n)), n / scale]) / taken[:, None]
    (both_ways, of_largest), _ = nnls(columns * taken.max(), np.ones(len(n)))
    if of_largest == 0:  # all sizes took the same time: only the largest's rate is known
        return float(scale / taken[n.argmax()]), 0.0
    return float(scale / (of_largest * taken.max())), float(both_ways * taken.max() / 2)


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
        message_seconds=None if links.message_seconds is None else rounded(links.message_seconds),
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


UNIT_SECONDS = 1e-3  # of computation between two messages, as of a small stage
EXCHANGES = 50  # in a row
_SIDE = 96  # of the matrices that are multiplied in a unit


def _message_seconds(size: int, rounds: int) -> float:
    """A rank's time for a message of ``size`` bytes, beside computation; of the slowest rank.

    Each rank sends to the next and receives from the one before, by the executor's own calls; both
    are in flight while it computes. The lower quartile of ``rounds`` differences to the same
    computation without messages counts, as what else a machine does lengthens most of the others.
    """
    products, added = _products(), []
    for _ in range(1 + rounds):
        alone = _exchange_seconds(0, products)
        added.append(_exchange_seconds(size, products) - alone)
    own = max(0.0, float(np.percentile(added[1:], 25)) / 2)
    told = [own] * dist.get_world_size()
    dist.all_gather_object(told, own)
    return max(told)


def _products() -> int:
    """How many products of matrices take a unit's seconds on the slowest rank, at least 1."""
    start = time.thread_time()
    _compute(torch.ones(_SIDE, _SIDE), 100)
    each = torch.tensor((time.thread_time() - start) / 100)
    dist.all_reduce(each, dist.ReduceOp.MAX)
    return max(1, round(UNIT_SECONDS / float(each)))


def _compute(matrix: torch.Tensor, products: int) -> None:
    for _ in range(products):
        torch.mm(matrix, matrix)


def _exchange_seconds(size: int, products: int) -> float:
    """Seconds of a unit of computation with a send and a receive of ``size`` bytes; 0: without."""
    rank, ranks, cpu = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    messages = Messages(RankPlace(("",) * ranks, rank, cpu, cpu, dist.group.WORLD))
    matrix, message = torch.ones(_SIDE, _SIDE), torch.zeros(size, dtype=torch.uint8)
    sent, received = ([Action(0, kind, i) for i in range(EXCHANGES)] for kind in (SEND_F, RECV_F))
    dist.barrier()
    start = time.perf_counter()
    for i in range(EXCHANGES):
        if size:
            room = torch.empty_like(message)
            messages.expect(received[i], room, [room], (rank - 1) % ranks, i)
        _compute(matrix, products)
        if size:
            messages.post(sent[i], message.detach().contiguous(), (rank + 1) % ranks, i)
            messages.taken(received[i - 1])
            messages.release(sent[i - 1])
    messages.taken(received[-1])
    messages.release(sent[-1])
    return (time.perf_counter() - start) / EXCHANGES


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


def rounded(value: float) -> float:
    """A number with as many digits as a measurement has."""
    return float(f"{value:.{DIGITS}g}")
