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
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from stagewright.formulations.pipelines.bppm import earliest_starts, prefix_sums, range_sums
from stagewright.formulations.plans.memory import buffers_per_boundary, state_factors
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan_class import DISJOINT_SPLIT, PlanClass
from stagewright.formulations.prices.collectives import all_reduce_pace, pace
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.machines.cluster import Cluster

SERVERS = "server-aware relaxation"
SERVERS_AND_TURNS = "server-aware relaxation, also of devices that take turns"
SHARED_SERVERS = "server-aware relaxation, also of shared devices"
SPLIT_SERVERS = "server-aware relaxation, also of shared devices and split backwards"
RELAXED_TREE = "branch and bound on the server-aware relaxation"
RANKS = 3  # at most; slower kinds share the last one


class Place(IntEnum):
    """Where a relaxed stage is, and how near to the previous one."""

    SAME = 0  # in the same server
    NEAR = 1  # in another server of the same rack
    NEW = 2  # in a server of another rack, or the first stage
    SPANS_NEAR = 3  # on several servers of the same rack
    SPANS = 4  # on several servers of another rack
    SPANS_RACKS = 5  # on several racks
    TAKES_TURNS = 6  # anywhere, on devices that take turns


WITHIN = (0, 0, 0, 1, 1, 2)  # by place: whether the stage is in a server, in a rack, or neither
APART = (0, 1, 2, 1, 2, 2)  # by place: the same for the stage and the previous one together
_ANYWHERE = 2 ** len(WITHIN) - 1  # the bits of all places of split stages


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
    """The best links within servers, between servers and between racks, by link thresholds.

    ``home`` is the server of every device, shape (V,), and ``rack`` its rack; ``seconds_per_byte``
    and ``latency`` are those of the best link, of the best between servers, and between racks.
    """

    home: tuple[int, ...]
    rack: tuple[int, ...]
    seconds_per_byte: tuple[float, float, float]
    latency: tuple[float, float, float]

    @property
    def groups(self) -> Ints:
        """The number of servers and of racks, shape (2,)."""
        return np.array([max(self.home) + 1, max(self.rack) + 1])

    @property
    def rooms(self) -> Ints:
        """Devices of the largest server and rack, shape (2,)."""
        return np.array([np.bincount(groups).max() for groups in (self.home, self.rack)])


class ServerRelaxation(NamedTuple):
    """Tables of the relaxed problem, for L layers, C choices of replication and K ranks.

    A choice stands for all numbers of devices with the same largest share of a microbatch, and for
    a rank: it uses the fewest of them, and sends and receives in as many pieces as the most of
    them.

    Attributes
    ----------
    shared, splits
        Whether stages may share their devices, and whether backwards may be split.
    microbatches, samples
        M, and the samples of a microbatch.
    size
        Devices in total.
    groups, rooms
        Servers and racks, and devices of the largest of each, shape (2,).
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
    forward, backward, gradient
        Prefix sums of seconds per microbatch, shape (C, L + 1); ``gradient`` is the part of the
        backward after which the gradient can be sent: the input gradient if it may be split.
    limit
        The most microbatches in flight of a stage of layers [k, l), shape (C, L + 1, L + 1) by
        [choice, k, l]; 0 if the stage is not possible.
    places
        Bits of the places that a split stage from layer l on may have, shape (L + 1,).
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
        Of a transfer in a server, between servers, and between racks, shape (3,).
    ring, ring_latency
        Seconds per byte of parameters of an all-reduce, and its latency, shape (3, C).
    packing
        Values of two dual feasible functions of 0 ... ``rooms[i]`` devices, shape
        (2, 2, rooms[1] + 1) by [i, function, devices]: of runs that fit into the servers (i = 0) or
        racks (i = 1), the sum of the values is at most ``groups[i]``.
    """

    shared: bool
    splits: bool
    microbatches: int
    samples: int
    size: int
    groups: Ints
    rooms: Ints
    available: Ints
    rank: Ints
    together: Bools
    devices: Ints
    pieces: Ints
    rounds: Ints
    turns: int
    forward: Floats
    backward: Floats
    gradient: Floats
    limit: Ints
    places: Ints
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
    problem: PipelineProblem, plans: PlanClass = DISJOINT_SPLIT
) -> tuple[tuple[Levels, ServerRelaxation], ...]:
    """One relaxation per threshold, the slowest links first.

    They cover the ``plans`` of DISJOINT_SPLIT, DISJOINT_WHOLE, SHARED_WHOLE or SHARED_SPLIT.
    """
    levels = tuple(levels_of(problem.cluster))
    best, ranks = _relaxation(problem, levels[0], plans), ranks_of(problem)
    return tuple((level, best._replace(**_links(level, best.devices, ranks))) for level in levels)


def _relaxation(problem: PipelineProblem, level: Levels, plans: PlanClass) -> ServerRelaxation:
    ranks = ranks_of(problem)
    choices = tuple(_choices(problem, ranks, "round-robin" in plans.replication))
    costs = [_fastest(problem, one, ranks, plans.split_backward) for one in choices]
    boundary = [problem.boundary_bytes(stop) for stop in range(1, len(problem.chain))]
    pieces = range(1, problem.chain.microbatch_size + 1)
    devices = np.array([one.devices for one in choices])
    return ServerRelaxation(
        shared=plans.sharing != "none",
        splits=plans.split_backward,
        microbatches=problem.microbatches,
        samples=problem.chain.microbatch_size,
        size=len(problem.cluster),
        available=np.cumsum(np.bincount(ranks)),
        rank=np.array([one.rank for one in choices]),
        devices=devices,
        pieces=np.array([one.pieces for one in choices]),
        rounds=np.array([one.rounds for one in choices]),
        turns=sum(not one.takes_turns for one in choices),
        forward=prefix_sums(np.array([one.forward for one in costs])),
        backward=prefix_sums(np.array([one.backward for one in costs])),
        gradient=prefix_sums(np.array([one.gradient for one in costs])),
        limit=np.array([_limits(problem, one, ranks, plans.offload) for one in choices]),
        places=np.full(len(problem.chain) + 1, _ANYWHERE),
        update=prefix_sums(np.array([one.update for one in costs])),
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


class _Seconds(NamedTuple):
    """Seconds per layer, each of shape (L,)."""

    forward: Floats
    backward: Floats
    gradient: Floats
    update: Floats


def _fastest(problem: PipelineProblem, choice: "_Choice", ranks: Ints, split: bool) -> _Seconds:
    """The least times of the slowest replica; ``split``: backwards may be split.

    The slowest device of a stage has the rank of the choice; devices that take turns have any.
    """
    kinds = {
        device.kind
        for device, rank in zip(problem.cluster.devices, ranks, strict=True)
        if choice.takes_turns or rank == choice.rank
    }
    costs = [problem.costs(kind, choice.shares) for kind in kinds]
    forward = np.min([one.forward_seconds for one in costs], axis=0)
    backward = gradient = np.min([one.backward_seconds for one in costs], axis=0)
    if split:
        least = [problem.least_backward(kind, choice.shares) for kind in kinds]
        gradient, backward = np.min(least, axis=0)
    update = np.min([problem.update_per_layer(kind) for kind in kinds], axis=0)
    return _Seconds(forward, backward, gradient, update)


def _links(level: Levels, devices: Ints, ranks: Ints) -> dict[str, Any]:
    """The fields of a relaxation that depend on the links."""
    seconds_per_byte, latency = np.array(level.seconds_per_byte), np.array(level.latency)
    ring, ring_latency = all_reduce_pace(devices, seconds_per_byte[:, None], latency[:, None])
    has = np.zeros((level.groups[0], int(ranks.max()) + 1), dtype=bool)
    has[list(level.home), ranks] = True
    packing = np.full((2, 2, level.rooms[1] + 1), np.inf)
    for i, room in enumerate(level.rooms):
        for k in (1, 2):
            packing[i, k - 1, : room + 1] = dual_feasible(room, k)
    return {
        "groups": level.groups,
        "rooms": level.rooms,
        "together": (has[:, :, None] & has[:, None, :]).any(axis=0),
        "seconds_per_byte": seconds_per_byte,
        "latency": latency,
        "ring": ring,
        "ring_latency": ring_latency,
        "packing": packing,
    }


def levels_of(cluster: Cluster) -> Iterator[Levels]:
    """The links of every pair of successive thresholds that leave several groups.

    With one such threshold there is one rack; with none there is one server.
    """
    size = len(cluster)
    one = (0,) * size
    homes = [one]
    for threshold in cluster.pairs.bandwidths()[:-1]:
        home = cluster.pairs.components(threshold).tolist()
        if max(home) > max(homes[-1]):
            homes.append(tuple(home))
    # The first is the whole cluster: a rack only if there is no other.
    nested = homes if len(homes) < 3 else homes[1:]
    for rack, home in pairwise(nested) if len(nested) > 1 else [(one, one)]:
        yield Levels(home, rack, *zip(*_best_links(cluster, home, rack), strict=True))


def _best_links(
    cluster: Cluster, home: tuple[int, ...], rack: tuple[int, ...]
) -> Iterator[tuple[float, float]]:
    """The best seconds per byte and latency of all links, between servers, and between racks.

    Between the only server and itself, or rack, the links are the previous ones.
    """
    best = 0.0, 0.0
    for groups in (range(len(cluster)), home, rack):
        found = cluster.pairs.best_between(np.array(groups))
        if found is not None:
            best = pace(found[0]), found[1]
        yield best


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


def _choices(problem: PipelineProblem, ranks: Ints, turns: bool) -> Iterator[_Choice]:
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
    for r in range(2, size + 1 if turns else 2):
        rounds = -(-microbatches // r)
        if rounds < -(-microbatches // (r - 1)):
            yield _Choice(r, 1, 1, rounds, 0)


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
