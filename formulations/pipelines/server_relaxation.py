"""A relaxation of pipeline planning that knows servers: slow links between groups of devices.

Remove all links of at most some bandwidth; the connected components of the rest are *servers*. If
two neighbouring stages are not in one server, some device of one and some device of the other have
a removed link between them, which is *slow*: no better than the best link between servers. So a
plan is a sequence of *runs*, consecutive stages in one server, and of stages that span servers; the
channels between runs are slow, and so is the all-reduce of a stage that spans. All other links are
as good as the best of the cluster, every layer takes the time of its fastest device kind, and every
device has the largest memory. docs/certificates.md has the conditions and their proof.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csgraph

from stagewright.formulations.pipelines.bppm import earliest_starts, prefix_sums, range_sums
from stagewright.formulations.plans.memory import buffers_per_boundary, state_factors
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.machines.cluster import Cluster

SERVERS = "server-aware relaxation"
SERVERS_AND_TURNS = "server-aware relaxation, also of devices that take turns"
RANKS = 3  # at most; slower kinds share the last one


class Place(IntEnum):
    """Where a relaxed stage stands."""

    NEW = 0  # the first stage of a run
    SAME = 1  # in the same server as the previous stage
    SPANS = 2  # on several servers
    TAKES_TURNS = 3  # anywhere, on devices that take turns


@dataclass(frozen=True, slots=True)
class RelaxedStage:
    """Layers [start, stop) on a number of devices."""

    start: int
    stop: int
    devices: int
    place: Place
    rank: int


@dataclass(frozen=True, slots=True)
class Levels:
    """The links of one threshold.

    ``home`` is the server of every device, shape (V,); ``seconds_per_byte`` and ``latency`` are
    those of the best link, and of the best link between servers.
    """

    home: tuple[int, ...]
    seconds_per_byte: tuple[float, float]
    latency: tuple[float, float]

    @property
    def servers(self) -> int:
        """The number of servers."""
        return max(self.home) + 1

    @property
    def room(self) -> int:
        """The number of devices of the largest server."""
        return int(np.bincount(self.home).max())


class ServerRelaxation(NamedTuple):
    """Tables of the relaxed problem, for L layers, C choices of replication and K ranks.

    A choice stands for all numbers of devices with the same largest share of a microbatch, and for
    a rank: it uses the fewest of them, and sends and receives in as many pieces as the most of
    them.

    Attributes
    ----------
    microbatches, samples
        M, and the samples of a microbatch.
    size, servers, room
        Devices in total, servers, and devices of the largest server.
    available
        Devices of each rank and of all faster ones, shape (K,).
    rank
        Of a choice, shape (C,); devices that take turns may be of any kind, and have rank 0.
    together
        Whether devices of two ranks are in one server, shape (K, K).
    devices, pieces
        Devices of a choice, and pieces in which its stage sends a microbatch, shape (C,).
    rounds
        Microbatches that the busiest device computes, shape (C,): M if they are split, ceil(M / r)
        if r devices take turns.
    turns
        The first choice of devices that take turns; C if there is none.
    forward, backward
        Prefix sums of seconds per microbatch, shape (C, L + 1).
    limit
        The most microbatches in flight of a stage of layers [k, l), shape (C, L + 1, L + 1) by
        [choice, k, l]; 0 if the stage is not possible.
    update
        Prefix sums of seconds of the optimizer's step, shape (C, L + 1).
    parameters
        Prefix sums of parameter bytes, shape (L + 1,).
    boundary
        Bytes per microbatch before layer l, shape (L + 1,); 0 at both ends.
    share
        The largest of p pieces of a microbatch, as a fraction of it, shape (b + 1,) by p; with more
        pieces it is one sample, too.
    seconds_per_byte, latency
        Of a transfer, shape (2,): fast and slow.
    ring, ring_latency
        Seconds per byte of parameters of an all-reduce, and its latency, shape (2, C).
    packing
        Values of two dual feasible functions of 0 ... ``room`` devices, shape (2, room + 1): of
        runs that fit into the servers, the sum of the values is at most ``servers``.
    """

    microbatches: int
    samples: int
    size: int
    servers: int
    room: int
    available: Ints
    rank: Ints
    together: Bools
    devices: Ints
    pieces: Ints
    rounds: Ints
    turns: int
    forward: Floats
    backward: Floats
    limit: Ints
    update: Floats
    parameters: Floats
    boundary: Floats
    share: Floats
    seconds_per_byte: Floats
    latency: Floats
    ring: Floats
    ring_latency: Floats
    packing: Floats


def server_relaxations(
    problem: PipelineProblem, wide: bool = False
) -> tuple[tuple[Levels, ServerRelaxation], ...]:
    """One relaxation per threshold, the slowest links first.

    They cover the plans of DISJOINT_SPLIT, or of DISJOINT_WHOLE if ``wide``.
    """
    levels = tuple(levels_of(problem.cluster))
    best, ranks = _relaxation(problem, levels[0], wide), ranks_of(problem)
    return tuple((level, best._replace(**_links(level, best.devices, ranks))) for level in levels)


def _relaxation(problem: PipelineProblem, level: Levels, wide: bool) -> ServerRelaxation:
    ranks = ranks_of(problem)
    choices = tuple(_choices(problem, ranks, wide))
    costs = [_fastest(problem, one, ranks) for one in choices]
    boundary = [problem.boundary_bytes(stop) for stop in range(1, len(problem.chain))]
    pieces = range(1, problem.chain.microbatch_size + 1)
    devices = np.array([one.devices for one in choices])
    return ServerRelaxation(
        microbatches=problem.microbatches,
        samples=problem.chain.microbatch_size,
        size=len(problem.cluster),
        available=np.cumsum(np.bincount(ranks)),
        rank=np.array([one.rank for one in choices]),
        devices=devices,
        pieces=np.array([one.pieces for one in choices]),
        rounds=np.array([one.rounds for one in choices]),
        turns=sum(not one.takes_turns for one in choices),
        forward=prefix_sums(np.array([forward for forward, _, _ in costs])),
        backward=prefix_sums(np.array([backward for _, backward, _ in costs])),
        limit=np.array([_limits(problem, one, ranks, wide) for one in choices]),
        update=prefix_sums(np.array([update for _, _, update in costs])),
        parameters=prefix_sums(problem.chain.parameter_bytes),
        boundary=np.array([0.0, *boundary, 0.0]),
        share=np.array([1.0, *(problem.share_bytes(1.0, p) for p in pieces)]),
        **_links(level, devices, ranks),
    )


def ranks_of(problem: PipelineProblem) -> Ints:
    """The rank of every device, shape (V,): 0 for the kind with the least seconds of all layers."""
    seconds = {}
    for kind in problem.kinds:
        costs = problem.costs(kind, 1)
        seconds[kind] = float((costs.forward_seconds + costs.backward_seconds).sum())
    order = sorted(problem.kinds, key=lambda kind: seconds[kind])
    return np.array(
        [min(order.index(device.kind), RANKS - 1) for device in problem.cluster.devices]
    )


def _fastest(
    problem: PipelineProblem, choice: "_Choice", ranks: Ints
) -> tuple[Floats, Floats, Floats]:
    """Forward, backward and optimizer's step in seconds per layer of the slowest replica, (L,).

    The slowest device of a stage has the rank of the choice; devices that take turns have any.
    """
    kinds = {
        device.kind
        for device, rank in zip(problem.cluster.devices, ranks, strict=True)
        if choice.takes_turns or rank == choice.rank
    }
    costs = [problem.costs(kind, choice.shares) for kind in kinds]
    forward = np.min([one.forward_seconds for one in costs], axis=0)
    backward = np.min([one.backward_seconds for one in costs], axis=0)
    return forward, backward, np.min([problem.update_per_layer(kind) for kind in kinds], axis=0)


def _links(level: Levels, devices: Ints, ranks: Ints) -> dict[str, Any]:
    """The fields of a relaxation that depend on the links."""
    pace, latency = np.array(level.seconds_per_byte), np.array(level.latency)
    has = np.zeros((level.servers, int(ranks.max()) + 1), dtype=bool)
    has[list(level.home), ranks] = True
    return {
        "servers": level.servers,
        "room": level.room,
        "together": (has[:, :, None] & has[:, None, :]).any(axis=0),
        "seconds_per_byte": pace,
        "latency": latency,
        "ring": pace[:, None] * (2 * (devices - 1) / devices),
        "ring_latency": latency[:, None] * (2 * (devices - 1)),
        "packing": np.array([dual_feasible(level.room, 1), dual_feasible(level.room, 2)]),
    }


def levels_of(cluster: Cluster) -> Iterator[Levels]:
    """The links of every threshold that leaves several servers, or of none if there is none."""
    size = len(cluster)
    apart = ~np.eye(size, dtype=bool)
    if size == 1:
        yield Levels((0,), (0.0, 0.0), (0.0, 0.0))
        return
    links = cluster.bandwidth[apart]
    pace, latency = 1 / float(links.max()), float(cluster.latency[apart].min())
    found = False
    for threshold in np.unique(links)[:-1]:
        fast = (cluster.bandwidth > threshold) & apart
        count, home = csgraph.connected_components(fast, directed=False)
        if count > 1:
            found = True
            between = home[:, None] != home[None, :]
            slow = 1 / float(cluster.bandwidth[between].max())
            delay = float(cluster.latency[between].min())
            yield Levels(tuple(home.tolist()), (pace, slow), (latency, delay))
    if not found:
        yield Levels((0,) * size, (pace, pace), (latency, latency))


def dual_feasible(room: int, k: int) -> Floats:
    """The dual feasible function u_k of Fekete and Schepers (2001) of q / room, q = 0 ... room.

    Of any numbers q whose sum is at most ``room``, the sum of the values is at most 1.
    """
    q = np.arange(room + 1)
    whole, rest = np.divmod((k + 1) * q, room)
    return np.where(rest == 0, q / room, whole / k)


@dataclass(frozen=True, slots=True)
class _Choice:
    devices: int
    shares: int  # among which a microbatch is split
    pieces: int
    rounds: int
    rank: int

    @property
    def takes_turns(self) -> bool:
        return self.shares < self.devices


def _choices(problem: PipelineProblem, ranks: Ints, wide: bool) -> Iterator[_Choice]:
    """The least devices for every share of a microbatch and rank, and for every number of turns."""
    size, microbatches = len(problem.cluster), problem.microbatches
    available = np.cumsum(np.bincount(ranks))
    most = min(size, int(problem.replicas_per_layer.max()))
    numbers = range(1, most + 1)
    for r in numbers:
        if r == 1 or problem.samples(r) < problem.samples(r - 1):
            same = [q for q in numbers if problem.samples(q) == problem.samples(r)]
            for rank in np.flatnonzero(available >= r).tolist():
                yield _Choice(r, r, same[-1], microbatches, rank)
    for r in range(2, size + 1 if wide else 2):
        turns = -(-microbatches // r)
        if turns < -(-microbatches // (r - 1)):
            yield _Choice(r, 1, 1, turns, 0)


def _limits(problem: PipelineProblem, choice: _Choice, ranks: Ints, wide: bool) -> Ints:
    """Microbatches in flight of layers [k, l) on the largest memory of the rank, (L + 1, L + 1).

    If ``wide``, stages may recompute layer by layer or offload: the states and the activations of
    one layer must fit, and then all microbatches do.
    """
    layers, microbatches = len(problem.chain), problem.microbatches
    parameters = range_sums(prefix_sums(problem.chain.parameter_bytes))
    memory = problem.memory_bytes[(ranks == choice.rank) | choice.takes_turns]
    free = float(memory.max()) * (1 + 1e-9)
    free_bytes = free - state_factors(problem, choice.devices)[choice.devices] * parameters
    saved = problem.saved_per_layer(choice.shares)
    first = earliest_starts(problem.replicas_per_layer, choice.shares)[-1]
    possible = np.triu(first[None, :] <= np.arange(layers + 1)[:, None], 1)
    if wide:
        largest = np.zeros((layers + 1, layers + 1))
        for k in range(layers):
            largest[k, k + 1 :] = np.maximum.accumulate(saved[k:])
        return np.where(possible & (largest <= free_bytes), microbatches, 0)
    buffers = buffers_per_boundary(problem, choice.shares)
    free_bytes -= buffers[:, None] + buffers[None, :]
    held = range_sums(prefix_sums(saved))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        fits = np.where(held > 0, np.floor(free_bytes / held), microbatches)
    fits = np.clip(fits, 0, microbatches).astype(np.int64)
    return np.where(possible & (free_bytes >= 0), fits, 0)
