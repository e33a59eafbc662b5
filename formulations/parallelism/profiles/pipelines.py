"""Training by measured layer profiles on a mixed cluster: pipelines, tensor groups and replicas.

The model is divided into stages of consecutive layers. Every stage has as many replicas as there
are pipelines; a replica is a tensor group, devices of one server. Pipeline j goes through the j-th
replica of every stage. After the last backward the replicas of a stage sum their gradients and
update (Sailor: Strati et al., SOSP 2025; Metis: Um et al., USENIX ATC 2024).

Time of one-forward-one-backward pipelines whose transfers keep both sides busy.

The order is that of DeepSpeed's ``TrainSchedule``: in turn t, a stage whose number has the parity
of t is in a forward turn, the others are in a backward turn. A turn begins with the exchange
between a stage in a backward turn and the next stage, which is in a forward turn: a gradient back,
an activation ahead, each if there is one. Then both compute.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

import numpy as np
from pydantic import ConfigDict

from stagewright.formulations.parallelism.profiles.cluster import Route, ServerPools
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.documents.units import require_amount, require_count
from stagewright.graphs.models.layer_profiles import LayerProfiles, LayerSizes, LayerTimes


@documents.record
class Replica:
    """``tensor`` devices of server ``server`` of pool ``pool`` (both counted from 0)."""

    pool: int
    server: int
    tensor: int


@documents.record
class ProfiledStage:
    """The next ``layers`` layers, on as many replicas as there are pipelines."""

    layers: int
    replicas: tuple[Replica, ...]


@documents.record
class ProfiledPlan:
    """Pipeline j is the j-th replica of every stage and runs ``microbatches[j]`` microbatches."""

    microbatch_size: int
    stages: tuple[ProfiledStage, ...]
    microbatches: tuple[int, ...]

    def __post_init__(self) -> None:
        require_count(self.microbatch_size, "microbatch_size", 1 << 20)

    @property
    def data(self) -> int:
        """The number of pipelines."""
        return len(self.microbatches)


def even_microbatches(total: int, pipelines: int) -> tuple[int, ...]:
    """``total`` microbatches in equal parts; the first pipelines have one more."""
    least, more = divmod(total, pipelines)
    return tuple(least + (j < more) for j in range(pipelines))


def pipeline_seconds(
    forward: Floats, backward: Floats, transfer: Floats, microbatches: int
) -> Floats:
    """When every stage has done and sent its last backward, shape (p,).

    ``forward`` and ``backward``: seconds of a microbatch on each stage, shape (p,). ``transfer``:
    seconds to send it from a stage to the next, and its gradient back, shape (p - 1,).
    """
    p, m = len(forward), microbatches
    clock = [0.0] * p
    ahead, back, sent = forward.tolist(), backward.tolist(), transfer.tolist()
    for turn in range(2 * (m + p - 1)):
        for s in range((turn + 1) % 2, p - 1, 2):  # s in a backward turn, s + 1 in a forward turn
            gradient = (turn - (2 * p - 1 - s)) // 2
            activation = (turn - s - 1) // 2
            exchanged = (0 <= gradient < m) + (0 <= activation < m)
            if exchanged:
                clock[s] = clock[s + 1] = max(clock[s], clock[s + 1]) + exchanged * sent[s]
        for s in range(p):
            if turn % 2 == s % 2:
                clock[s] += ahead[s] if 0 <= turn - s < 2 * m else 0.0
            else:
                clock[s] += back[s] if 0 <= turn - (2 * p - 1 - s) < 2 * m else 0.0
    return np.array(clock)


def least_finish(
    forward: float,
    backward: float,
    sends: tuple[float, float],
    later: float,
    stages_later: int,
    microbatches: int,
) -> float:
    """A lower bound on the time from a stage's first action to its last, in this order.

    A stage runs ``w = stages_later`` forwards ahead. Between the first forward and its backward
    lies the way through the ``later`` stages, in which the stage has w forwards to do at most; and
    between the last forward and its backward again, with w backwards. With no more than w + 1
    microbatches both are the same time, and only one of them counts.

    ``sends``: seconds of a transfer from the stage before, and to the stage after. ``later``:
    seconds from the end of a forward to the start of its backward if nothing else is to do: both
    transfers, and forward and backward of all later stages.
    """
    before, after = sends
    m, w = microbatches, min(stages_later, microbatches - 1)
    busy = m * (forward + backward + 2 * before + 2 * after)
    own = w * before + (w + 2) * after
    idle = (max(0.0, later - own - w * forward), max(0.0, later - own - w * backward))
    return busy + (sum(idle) if m > stages_later + 1 else max(idle))


@documents.record
class MemoryRule:
    """Bytes of a device: per parameter, per layer in the backward, and beside the plan.

    ``parameter_bytes``: weight, gradient and two moments in fp32. A backward needs
    ``backward_factor`` times what the stage's largest layer keeps of a microbatch, for gradients
    of activations and the allocator's fragments. ``reserve_bytes``: context, kernels, communication
    library. The last two are fitted to Sailor's measured plans on GH200.
    """

    parameter_bytes: float = 16.0
    backward_factor: float = 2.25
    reserve_bytes: float = 4.5e9

    def __post_init__(self) -> None:
        for name in ("parameter_bytes", "backward_factor", "reserve_bytes"):
            require_amount(getattr(self, name), name)


_RULE = MemoryRule()


@dataclass(frozen=True)
class ProfiledProblem:
    """A model's profiles, the cluster, and the samples of an iteration.

    ``gradient_bytes`` are those of a parameter's gradient in an all-reduce.
    """

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    profiles: LayerProfiles
    cluster: ServerPools
    batch: int
    memory: MemoryRule = _RULE
    gradient_bytes: float = 4.0

    def __post_init__(self) -> None:
        require_count(self.batch, "batch", 1 << 30)
        require_amount(self.gradient_bytes, "gradient_bytes")
        for pool in self.cluster.pools:
            if pool.device_kind not in self.profiles.device_kinds:
                raise InputError(
                    f"profiles of {self.profiles.name!r} have no device kind "
                    f"{pool.device_kind!r}, only {', '.join(self.profiles.device_kinds)}"
                )

    def times(self, pool: int, samples: int, tensor: int) -> LayerTimes:
        """The layers' times on a group in ``pool``; see :meth:`LayerProfiles.times`."""
        key = (self.cluster.pools[pool].device_kind, samples, tensor)
        if key not in self._times:
            self._times[key] = self.profiles.times(*key)
        return self._times[key]

    @cached_property
    def _times(self) -> dict[tuple[str, int, int], LayerTimes]:
        return {}

    def sizes(self, tensor: int) -> LayerSizes:
        """The layers' sizes on one of ``tensor`` ranks."""
        return self.profiles.sizes_at(tensor)


@dataclass(frozen=True, slots=True)
class ProfiledEstimate:
    """Time and memory of a plan; lists are by stage.

    ``pipeline_seconds`` are until the last pipeline's last backward, ``reduce_seconds`` and
    ``update_seconds`` are of the slowest replica. ``memory_bytes`` are by stage of the replica with
    the least memory left, ``free_bytes`` what it has left (negative: it does not fit).
    """

    seconds: float
    pipeline_seconds: float
    reduce_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    free_bytes: tuple[float, ...]

    @property
    def peak_bytes(self) -> float:
        """The most that any device holds."""
        return max(self.memory_bytes)

    @property
    def fits(self) -> bool:
        """Whether every device's memory is enough."""
        return min(self.free_bytes) >= 0


def evaluate(problem: ProfiledProblem, plan: ProfiledPlan) -> ProfiledEstimate:
    """Time and memory of a plan, whether or not it fits in memory.

    Raises
    ------
    InvalidPlan
        If it does not cover the layers and the batch, or uses devices that do not exist or twice.
    InputError
        If it uses a microbatch size or tensor degree that was not measured.
    """
    _require_plan(problem, plan)
    finish = np.max([_finish(problem, plan, j) for j in _unequal(problem, plan)], axis=0)
    spans = _spans(plan)
    stages = list(zip(plan.stages, spans, strict=True))
    reduced = [reduce_seconds(problem, stage, span) for stage, span in stages]
    updated = [_update_seconds(problem, plan, stage, span) for stage, span in stages]
    memory = [_tightest(problem, plan, s) for s in range(len(stages))]
    return ProfiledEstimate(
        seconds=float(np.max(finish + reduced + updated)),
        pipeline_seconds=float(finish.max()),
        reduce_seconds=tuple(reduced),
        update_seconds=tuple(updated),
        memory_bytes=tuple(used for used, _ in memory),
        free_bytes=tuple(free for _, free in memory),
    )


def _require_plan(problem: ProfiledProblem, plan: ProfiledPlan) -> None:
    """Raise InvalidPlan if a rule of the problem is broken."""
    layers = [stage.layers for stage in plan.stages]
    if not layers or min(layers) < 1 or sum(layers) != problem.profiles.layers:
        raise InvalidPlan(f"stages of {layers} layers: there are {problem.profiles.layers} layers")
    samples = plan.microbatch_size * sum(plan.microbatches)
    if not plan.microbatches or min(plan.microbatches) < 1 or samples != problem.batch:
        raise InvalidPlan(
            f"{list(plan.microbatches)} microbatches of {plan.microbatch_size} samples are "
            f"{samples} samples, the batch has {problem.batch}"
        )
    for s, stage in enumerate(plan.stages):
        if len(stage.replicas) != plan.data:
            raise InvalidPlan(
                f"stage {s} has {len(stage.replicas)} replicas, there are {plan.data} pipelines"
            )
    _require_devices(problem, plan)


def _require_devices(problem: ProfiledProblem, plan: ProfiledPlan) -> None:
    used: Counter[tuple[int, int]] = Counter()
    for s, stage in enumerate(plan.stages):
        for one in stage.replicas:
            if not 0 <= one.pool < len(problem.cluster.pools):
                raise InvalidPlan(f"stage {s}: there is no pool {one.pool}")
            if not 0 <= one.server < problem.cluster.pools[one.pool].servers:
                raise InvalidPlan(f"stage {s}: pool {one.pool} has no server {one.server}")
            used[one.pool, one.server] += one.tensor
    for (pool, server), devices in used.items():
        if devices > problem.cluster.pools[pool].devices:
            raise InvalidPlan(
                f"server {server} of pool {pool}: {devices} devices are used, it has "
                f"{problem.cluster.pools[pool].devices}"
            )


def _spans(plan: ProfiledPlan) -> list[slice]:
    ends = np.cumsum([stage.layers for stage in plan.stages])
    return [slice(int(end) - stage.layers, int(end))
            for end, stage in zip(ends, plan.stages, strict=True)]  # fmt: skip


def _unequal(problem: ProfiledProblem, plan: ProfiledPlan) -> list[int]:
    """One pipeline of each kind, since equal pipelines take equal times."""
    found: dict[object, int] = {}
    for j, count in enumerate(plan.microbatches):
        path = [stage.replicas[j] for stage in plan.stages]
        kinds = tuple((one.pool, one.tensor) for one in path)
        moves = tuple(_same_server(a, b) for a, b in pairwise(path))
        found.setdefault((count, kinds, moves), j)
    return list(found.values())


def _same_server(one: Replica, other: Replica) -> bool:
    return (one.pool, one.server) == (other.pool, other.server)


def _finish(problem: ProfiledProblem, plan: ProfiledPlan, j: int) -> Floats:
    """When each stage of pipeline ``j`` is done."""
    path = [stage.replicas[j] for stage in plan.stages]
    spans = _spans(plan)
    ahead, back = [], []
    for one, span in zip(path, spans, strict=True):
        times = problem.times(one.pool, plan.microbatch_size, one.tensor)
        ahead.append(times.forward[span].sum())
        back.append(times.backward[span].sum())
    moves = [
        transfer_seconds(problem, plan.microbatch_size, span.stop, a, b)
        for a, b, span in zip(path, path[1:], spans, strict=False)
    ]
    return pipeline_seconds(np.array(ahead), np.array(back), np.array(moves), plan.microbatches[j])


def transfer_seconds(
    problem: ProfiledProblem, samples: int, cut: int, one: Replica, other: Replica
) -> float:
    """Seconds to send the output of layer ``cut - 1`` for ``samples`` samples."""
    route = problem.cluster.route(one.pool, other.pool, same_server=_same_server(one, other))
    return cut_seconds(problem, samples, cut, route, min(one.tensor, other.tensor))


def cut_seconds(
    problem: ProfiledProblem, samples: int, cut: int, route: Route, tensor: int
) -> float:
    """As :func:`transfer_seconds`, over a given ``route`` between groups of ``tensor`` devices."""
    moved = samples * problem.sizes(tensor).output_bytes[cut - 1]
    return route.send_seconds(moved, tensor)


def reduce_seconds(problem: ProfiledProblem, stage: ProfiledStage, span: slice) -> float:
    """Seconds in which the replicas of a stage sum their gradients, one ring per rank.

    The ring goes through the replicas in their order; the slowest hop decides, and the replica
    with the smallest tensor degree, whose ranks have the most parameters.
    """
    replicas = stage.replicas
    hops = zip(replicas, (*replicas[1:], replicas[0]), strict=True)
    tensor = min(one.tensor for one in replicas)
    moved = ring_bytes(problem, tensor, span)
    return max(
        problem.cluster.route(a.pool, b.pool, same_server=_same_server(a, b)).reduce_seconds(
            moved, len(replicas)
        )
        for a, b in hops
    )


def ring_bytes(problem: ProfiledProblem, tensor: int, span: slice) -> float:
    """The bytes of a rank's gradients."""
    return problem.gradient_bytes * sum(problem.sizes(tensor).parameters[span])


def _update_seconds(
    problem: ProfiledProblem, plan: ProfiledPlan, stage: ProfiledStage, span: slice
) -> float:
    kinds = {(one.pool, one.tensor) for one in stage.replicas}
    return max(
        float(problem.times(pool, plan.microbatch_size, tensor).update[span].sum())
        for pool, tensor in kinds
    )


def device_bytes(
    problem: ProfiledProblem, samples: int, tensor: int, span: slice, in_flight: int
) -> float:
    """Peak bytes of a device that keeps ``in_flight`` microbatches of ``samples`` samples."""
    rule, sizes = problem.memory, problem.sizes(tensor)
    kept = samples * np.array(sizes.saved_bytes[span])
    return (
        rule.reserve_bytes
        + rule.parameter_bytes * sum(sizes.parameters[span])
        + in_flight * float(kept.sum())
        + rule.backward_factor * float(kept.max())
    )


def _tightest(problem: ProfiledProblem, plan: ProfiledPlan, s: int) -> tuple[float, float]:
    """Used and free bytes of the device of a stage that has the least free memory."""
    later, span = len(plan.stages) - s, _spans(plan)[s]
    kinds = {
        (one.pool, one.tensor, min(later, count))
        for one, count in zip(plan.stages[s].replicas, plan.microbatches, strict=True)
    }
    found = []
    for pool, tensor, in_flight in kinds:
        used = device_bytes(problem, plan.microbatch_size, tensor, span, in_flight)
        found.append((used, problem.cluster.pools[pool].memory_bytes - used))
    return min(found, key=lambda one: one[1])
