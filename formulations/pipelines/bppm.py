"""BPPM: balanced pipeline partition and device mapping (SPP section IV-B, Algorithm 4, PRM).

Devices are in a fixed order and every stage takes the next ones. The objective is the bottleneck:
the largest time that all microbatches of an iteration spend on one stage (including its all-reduce)
or one channel; it is minimised for every number of stages. The recurrence W(l, xi, r, i) is
evaluated from the last layer to the first. Its values are the same, and the number of later stages
is known for every stage, which gives the microbatches that it must hold in flight (1F1B's min(M,
number of stages from the last)).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.memory import (
    buffers_per_boundary,
    in_flight_limit,
    state_factors,
)
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.prices.collectives import pace
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_count
from stagewright.graphs.machines.cluster import Cluster


class Recurrence(NamedTuple):
    """PRM's tables as a named tuple, which compiled kernels accept.

    Layers and devices are counted from the end of the pipeline, and devices in units, which are
    never parted; usually a unit is one device. K device kinds, V units, L layers, M microbatches.
    Every prefix sum has L + 1 entries, entry l for the last l layers.

    Attributes
    ----------
    microbatches
        M.
    samples
        Samples of a microbatch, b.
    unit
        Devices of a unit.
    warm_up
        The n-th stage from the end must hold min(warm_up, n) microbatches in memory.
    forward, backward
        Prefix sums of a replica's seconds per microbatch, shape (K, R + 1, L + 1) by kind and
        number of units; a stage has at most R.
    update
        Prefix sums of the optimizer's step in seconds, shape (K, L + 1) by kind.
    parameters
        Prefix sums of parameter bytes, shape (L + 1,).
    first
        The earliest start of a stage of r devices that ends before the last l layers, such that a
        microbatch has enough samples, shape (R + 1, L + 1) by r.
    boundary
        Bytes per microbatch that enter the last l layers, shape (L + 1,); 0 at both ends.
    saved
        Prefix sums of saved bytes per microbatch, shape (R + 1, L + 1) by number of units.
    state_factor
        Bytes of weights, gradients and optimizer state per parameter byte, shape (R + 1,) by number
        of units.
    buffers
        Bytes of buffers before the last l layers, shape (R + 1, L + 1) by number of units.
    kinds
        kinds[k, i]: how many devices of the first i units are of kind k, shape (K, V + 1).
    memory
        Least memory bytes of a device of each unit, shape (V,).
    seconds_per_byte, latency
        The largest inverse bandwidth and latency from unit to unit, shape (V, V).
    group_seconds_per_byte, group_latency
        The largest of these among the r units before position i, shape (V + 1, V + 1) by i and r.
    """

    microbatches: int
    samples: int
    unit: int
    warm_up: int
    forward: Floats
    backward: Floats
    update: Floats
    parameters: Floats
    first: Ints
    boundary: Floats
    saved: Floats
    state_factor: Floats
    buffers: Floats
    kinds: Ints
    memory: Floats
    seconds_per_byte: Floats
    latency: Floats
    group_seconds_per_byte: Floats
    group_latency: Floats


@dataclass(frozen=True, slots=True)
class BalancedPartition:
    """Partition, replication and mapping for ``problem`` with devices in ``order``.

    ``order`` lists the indices of the devices, all of which are used; the first stage takes the
    first ones. The n-th stage from the end must hold min(warm_up, n) microbatches; None means
    1F1B's min(M, n). Every stage has a multiple of ``unit`` devices.
    """

    problem: PipelineProblem
    order: tuple[int, ...]
    warm_up: int | None = None
    unit: int = 1

    def __post_init__(self) -> None:
        if not self.order or len({*self.order}) < len(self.order):
            raise InputError("order must list devices of the cluster, each at most once")
        if not {*self.order} <= {*range(len(self.problem.cluster))}:
            raise InputError(f"order must list indices below {len(self.problem.cluster)}")
        require_count(self.unit, "unit", int(self.problem.replicas_per_layer.max()))
        if len(self.order) % self.unit:
            raise InputError(f"{len(self.order)} devices are no multiple of {self.unit}")

    def evaluate(self, stages: Sequence["StageChoice"]) -> float:
        """W of ``stages``: the largest time of a stage or channel over all microbatches."""
        problem, total = self.problem, self.problem.microbatches
        times = [
            total * sum(problem.compute_seconds(stage.start, stage.stop, stage.devices))
            + problem.finish_seconds(stage.start, stage.stop, stage.devices)
            for stage in stages
        ]
        times += [
            total * sum(problem.transfer_seconds(one.stop, one.devices, next_.devices))
            for one, next_ in pairwise(stages)
        ]
        return max(times)


@dataclass(frozen=True, slots=True)
class StageChoice:
    """Layers [start, stop) on ``devices``, given by their indices in the cluster."""

    start: int
    stop: int
    devices: tuple[int, ...]


class ByRecurrence:
    """BPPM as a dynamic program."""

    def apply(self, question: BalancedPartition) -> Recurrence:
        """The tables of PRM's recurrence."""
        problem, unit = question.problem, question.unit
        units = np.array(question.order[::-1]).reshape(-1, unit)
        cluster = problem.cluster
        seconds_per_byte, latency = _between_units(cluster, units)
        kinds = np.array([cluster.devices[v].kind for v in units.ravel()]).reshape(units.shape)
        counts = np.array([(kinds == kind).sum(axis=1) for kind in problem.kinds])
        most = min(len(units), int(problem.replicas_per_layer.max()) // unit)
        shares = [max(r, 1) * unit for r in range(most + 1)]
        by_share = [[problem.costs(kind, r) for r in shares] for kind in problem.kinds]
        saved = np.array([problem.saved_per_layer(r) for r in shares])
        entering = [problem.boundary_bytes(stop) for stop in range(1, len(problem.chain))]
        return Recurrence(
            problem.microbatches,
            problem.chain.microbatch_size,
            unit,
            question.warm_up or problem.microbatches,
            _suffix_sums(np.array([[c.forward_seconds for c in row] for row in by_share])),
            _suffix_sums(np.array([[c.backward_seconds for c in row] for row in by_share])),
            _suffix_sums(np.array([problem.update_per_layer(kind) for kind in problem.kinds])),
            _suffix_sums(problem.chain.parameter_bytes),
            earliest_starts(problem.replicas_per_layer[::-1] // unit, most),
            np.array([0.0, *entering[::-1], 0.0]),
            _suffix_sums(saved),
            state_factors(problem, most * unit)[::unit],
            np.array([buffers_per_boundary(problem, r)[::-1] for r in shares]),
            np.concatenate([np.zeros((len(counts), 1), np.int64), counts.cumsum(axis=1)], axis=1),
            problem.memory_bytes[units].min(axis=1),
            seconds_per_byte,
            latency,
            _largest_in_windows(seconds_per_byte),
            _largest_in_windows(latency),
        )

    def invert(
        self, question: BalancedPartition, cuts: Sequence[tuple[int, int]]
    ) -> tuple[StageChoice, ...]:
        """The stages for ``cuts``: layers and units placed so far, per stage from the last."""
        layers, size = len(question.problem.chain), len(question.order)
        stages = []
        taken = used = 0
        for l, i in cuts:
            devices = question.order[size - i * question.unit : size - used * question.unit]
            stages.append(StageChoice(layers - l, layers - taken, tuple(devices)))
            taken, used = l, i
        return tuple(stages[::-1])


def prefix_sums(values: Floats) -> Floats:
    """Entry l is the sum of the first l values along the last axis, starting with l = 0."""
    sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    sums[..., 1:] = np.cumsum(values, axis=-1)
    return sums


def range_sums(prefix: Floats) -> Floats:
    """Sums over the layers [k, l) from prefix sums, shape (L + 1, L + 1) by k and l."""
    return prefix[None, :] - prefix[:, None]


def earliest_starts(replicas: Ints, most: int) -> Ints:
    """out[r, l] = the least l' such that each of the layers (l', l] can be split among r."""
    layers = np.arange(1, len(replicas) + 1)
    blocked = np.where(replicas[None, :] < np.arange(most + 1)[:, None], layers, 0)
    out = np.zeros((most + 1, len(replicas) + 1), dtype=np.int64)
    out[:, 1:] = np.maximum.accumulate(blocked, axis=1)
    return out


def _suffix_sums(values: Floats) -> Floats:
    """Entry l is the sum of the last l values along the last axis."""
    return prefix_sums(values[..., ::-1])


def _between_units(cluster: Cluster, units: Ints) -> tuple[Floats, Floats]:
    """The largest seconds per byte and latency from each unit to each, 0 for one device; (V, V)."""
    seconds_per_byte, latency = np.zeros((2, len(units), len(units)))
    for i, unit in enumerate(units):
        width, late = cluster.pairs.block(unit.tolist(), units.ravel().tolist())
        seconds_per_byte[i] = pace(width.min(axis=0).reshape(units.shape).min(axis=1))
        latency[i] = late.max(axis=0).reshape(units.shape).max(axis=1)
    return seconds_per_byte, latency


def _largest_in_windows(matrix: Floats) -> Floats:
    """out[i, r] = the largest entry among rows and columns i - r ... i - 1."""
    size = len(matrix)
    either = np.maximum(matrix, matrix.T)
    out = np.zeros((size + 1, size + 1))
    for i in range(1, size + 1):
        # Row i - 1 and the units just before it, nearest first.
        newest = np.maximum.accumulate(either[i - 1, :i][::-1])
        out[i, 1 : i + 1] = np.maximum(out[i - 1, :i], newest)
    return out


LEMMA_1_PREMISE = "for PE's schedule of its stages, whose microbatches all fit in memory"
LEMMA_1 = "SPP Lemma 1, (1 + (4S-4)/M) M C + max A"
THEOREM_1 = "SPP Theorem 1, (2 + (4V-4)/M) W"


def makespan_problem(
    problem: PipelineProblem, stages: Sequence[StageChoice]
) -> MakespanProblem | None:
    """The scheduling problem (section III-B2) of given stages; None if one cannot be scheduled.

    Its ``reduce`` is the all-reduce of a stage followed by the optimizer step; a device without
    other stages is idle then. None if some stage cannot hold one microbatch in memory.
    """
    messages = message_seconds(problem, [(stage.stop, len(stage.devices)) for stage in stages])
    computed = [
        np.add(problem.compute_seconds(s.start, s.stop, s.devices), own).tolist()
        for s, own in zip(stages, messages, strict=True)
    ]
    sent = [
        problem.transfer_seconds(one.stop, one.devices, following.devices)
        for one, following in pairwise(stages)
    ]
    limits = tuple(in_flight_limit(problem, s.start, s.stop, s.devices) for s in stages)
    if min(limits) < 1:
        return None
    return MakespanProblem(
        problem.microbatches,
        tuple(forward for forward, _ in computed),
        tuple(backward for _, backward in computed),
        tuple(there for there, _ in sent),
        tuple(back for _, back in sent),
        tuple(problem.finish_seconds(s.start, s.stop, s.devices) for s in stages),
        limits,
    )


def message_seconds(problem: PipelineProblem, stages: Sequence[tuple[int, int]]) -> list[float]:
    """Time for messages in a forward, and in a backward, of each stage: its end and its devices.

    A device of a stage exchanges one with each of the stage before it and of the stage after it.
    """
    seconds = [0.0] * len(stages)
    if problem.cluster.message_seconds is not None:
        for s, ((stop, senders), (_, receivers)) in enumerate(pairwise(stages)):
            each = problem.message_seconds(stop, senders, receivers)
            seconds[s] += receivers * each
            seconds[s + 1] += senders * each
    return seconds


def lemma1_seconds(problem: MakespanProblem) -> float:
    """Lemma 1: PE ends within (1 + (4|S| - 4) / M) M C + max A, without in-flight limits.

    C is the largest time of a microbatch on a stage or channel, in both directions.
    """
    stages = np.add(problem.forward, problem.backward)
    channels = np.add(problem.send_forward, problem.send_backward)
    largest = max([*stages, *channels])
    return float((problem.microbatches + 4 * len(stages) - 4) * largest + max(problem.reduce))


def theorem1_seconds(problem: PipelineProblem, balanced: MakespanProblem) -> float:
    """The time of Theorem 1 for the balanced stages: (2 + (4V - 4) / M) W.

    W is the largest time of a stage, including its ``reduce``, or of a channel, over all
    microbatches.
    """
    stages = np.add(balanced.forward, balanced.backward) * balanced.microbatches
    channels = np.add(balanced.send_forward, balanced.send_backward) * balanced.microbatches
    largest = max([*(stages + np.array(balanced.reduce)), *channels])
    return float((2 + (4 * len(problem.cluster) - 4) / problem.microbatches) * largest)


def theorem1_premise(problem: PipelineProblem) -> str:
    """The statement and the premises of Theorem 1."""
    return (
        f"at most {theorem1_factor(problem):.4g} T*, T* the least time of plans with disjoint "
        "devices and split replicas that use every device, where devices are of one kind, take "
        "time in proportion to their share of a microbatch, and links have no latency"
    )


def theorem1_factor(problem: PipelineProblem) -> float:
    """Theorem 1: SPP's makespan is below this factor times the optimum over all devices.

    (2 + (4V - 4) / M) (1 + Phi), with Phi of Lemma 2. The proof assumes no latencies, no memory
    limits, and one kind of devices whose time is proportional to the share of a microbatch.
    """
    cluster, size = problem.cluster, len(problem.cluster)
    links = cluster.pairs.bandwidths()
    if not len(links):
        return 2.0
    costs = problem.costs(problem.kinds[0], 1)
    work = costs.forward_seconds + costs.backward_seconds
    if not work.any():
        return float("inf")  # Lemma 2 compares with the work
    moved = [2 * problem.boundary_bytes(stop) for stop in range(1, len(problem.chain))]
    slowest = pace(links[0]) - pace(links[-1])
    phi = max(float(work.max()) * links[-1], *moved, 0.0) * slowest * size / work.sum()
    return float((2 + (4 * size - 4) / problem.microbatches) * (1 + phi))


def shortest_path_seconds(problem: PipelineProblem, stages: int) -> float:
    """A lower bound on the time of a microbatch in any plan of ``stages`` stages.

    Stage s does work w_s on r_s devices in time w_s / r_s, with sum r_s <= V. By Cauchy-Schwarz,
    sum w_s / r_s >= (sum sqrt w_s)^2 / V, which is least when all stages but one consist of a
    single layer, the smallest ones. Work is that of the cheapest kind and share of a microbatch.
    """
    work = cheapest_work(problem)
    smallest = np.sort(work)[: stages - 1]
    roots = np.sqrt(smallest).sum() + np.sqrt(max(work.sum() - smallest.sum(), 0.0))
    return float(roots**2 / len(problem.cluster))


def cheapest_work(problem: PipelineProblem, split: bool = False) -> Floats:
    """Device-seconds per layer and microbatch for the cheapest kind and share, shape (L,).

    ``split``: backwards may be in parts, if these take less time.
    """

    def backward(kind: str, r: int) -> Floats:
        whole = problem.costs(kind, r).backward_seconds
        return problem.least_backward(kind, r)[1] if split else whole

    allowed = problem.replicas_per_layer
    rows = [
        np.where(
            r <= allowed,
            r * (problem.costs(kind, r).forward_seconds + backward(kind, r)),
            np.inf,
        )
        for kind in problem.kinds
        for r in range(1, min(len(problem.cluster), int(allowed.max())) + 1)
    ]
    return np.asarray(np.min(rows, axis=0))
