"""What other systems send, on the same link: latency plus bytes by bandwidth for each message."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stagewright.formulations.backprop.orders import conventional
from stagewright.formulations.backprop.problem import BackpropProblem, WindowTimes
from stagewright.formulations.backprop.training import Layers, data_parallel
from stagewright.graphs.documents.units import require_amount, require_bandwidth
from stagewright.solvers.backprop.list_scheduling import list_schedule

DDP_BUCKET = 25 * 2**20  # torch's default; its first bucket has 1 MiB
DDP_FIRST_BUCKET = 2**20
HOROVOD_FUSION = 64 * 2**20
BYTEPS_CHUNK = 4_096_000  # BYTEPS_PARTITION_BYTES


@dataclass(frozen=True, slots=True)
class SyncLink:
    """A link on which ``b`` bytes are synchronised in ``latency + b / bandwidth`` seconds.

    ``bandwidth`` counts bytes of gradients: the algorithm of the all-reduce or of the servers is
    already in it.
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        require_bandwidth(self.bandwidth, "bandwidth")
        require_amount(self.latency, "latency")

    def seconds(self, amount: float) -> float:
        """Seconds of a message; nothing is sent for no bytes."""
        return self.latency + amount / self.bandwidth if amount > 0 else 0.0


def buckets(amounts: Sequence[float], most: float, first: float | None = None) -> list[list[int]]:
    """Consecutive layers from L down to 1, closed once they hold ``most`` bytes, as DDP does."""
    found: list[list[int]] = [[]]
    held, limit = 0.0, most if first is None else first
    for layer in range(len(amounts), 0, -1):
        found[-1].append(layer)
        held += amounts[layer - 1]
        if held >= limit and layer > 1:
            found.append([])
            held, limit = 0.0, most
    return found


def by_layer(layers: Layers, amounts: Sequence[float], link: SyncLink) -> BackpropProblem:
    """A message per layer that is never suspended; first come, first sent is wait-free backprop."""
    return data_parallel(layers, [link.seconds(amount) for amount in amounts])


def in_chunks(
    layers: Layers, amounts: Sequence[float], link: SyncLink, chunk: float = BYTEPS_CHUNK
) -> BackpropProblem:
    """Chunks of ``chunk`` bytes, each with the link's latency; the first layers go first.

    ByteScheduler and BytePS. A message of n chunks takes n latencies, spread evenly over it.
    """
    sync = [math.ceil(one / chunk) * link.latency + one / link.bandwidth for one in amounts]
    return data_parallel(layers, sync, chunk_seconds=link.seconds(chunk))


def after_backward(layers: Layers, amounts: Sequence[float], link: SyncLink) -> BackpropProblem:
    """Nothing is sent before the backward has ended."""
    sync = [link.seconds(amount) for amount in amounts]
    return data_parallel(layers, sync, after_backward=True)


def in_buckets(
    layers: Layers, amounts: Sequence[float], link: SyncLink, groups: Sequence[Sequence[int]]
) -> BackpropProblem:
    """One message per group of layers, sent when all weight gradients in it have ended."""
    sync = [0.0] * layers.count
    for group in groups:
        sync[max(group) - 1] = link.seconds(sum(amounts[layer - 1] for layer in group))
    problem = data_parallel(layers, sync)
    find = problem.find
    joined = [
        pair
        for group in groups
        for layer in group
        if layer != max(group)
        for pair in (
            (find("dW", layer), find("S[dW]", max(group))),
            (find("S[dW]", max(group)), find("S[dW]", layer)),
        )
    ]
    return replace(problem, before=problem.before + tuple(joined))


Baseline = Callable[[Layers, Sequence[float], SyncLink], BackpropProblem]


def _ddp(layers: Layers, amounts: Sequence[float], link: SyncLink) -> BackpropProblem:
    groups = buckets(amounts, DDP_BUCKET, DDP_FIRST_BUCKET)
    return in_buckets(layers, amounts, link, groups)


def _horovod(layers: Layers, amounts: Sequence[float], link: SyncLink) -> BackpropProblem:
    return in_buckets(layers, amounts, link, buckets(amounts, HOROVOD_FUSION))


# Each with whether messages are sent first come, first served; else the first layers go first.
BASELINES: dict[str, tuple[Baseline, bool]] = {
    "after backward": (after_backward, True),
    "wait-free": (by_layer, True),
    "DDP": (_ddp, True),
    "Horovod": (_horovod, True),
    "BytePS": (in_chunks, False),
}


def baseline(
    name: str, layers: Layers, amounts: Sequence[float], link: SyncLink
) -> tuple[BackpropProblem, WindowTimes]:
    """A system's problem and schedule: layer by layer, ``amounts`` bytes of gradients per layer.

    Horovod's fusion is by bytes alone, as if its cycle time never ended a buffer early.
    """
    build, is_queue = BASELINES[name]
    problem = build(layers, amounts, link)
    queues = ("sync",) if is_queue else ()
    return problem, list_schedule(problem, conventional(problem), queues)


def consecutive_devices(layers: int, devices: int) -> tuple[int, ...]:
    """The conventional allocation: consecutive layers, as even as possible."""
    return tuple(i * devices // layers for i in range(layers))
