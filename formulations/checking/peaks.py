"""Memory at every instant: which bytes a device holds when. `memory` gives the bytes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stagewright.formulations.checking.order import Violation
from stagewright.formulations.checking.times import Lane, PlanTimes, devices_by_lanes, host_times
from stagewright.formulations.plans.actions import B, F, I
from stagewright.formulations.plans.memory import (
    kept_bytes,
    stage_static_bytes,
    version_bytes,
    waiting_bytes,
)
from stagewright.formulations.plans.shards import gathered_bytes, of_shard
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.units import format_bytes


def memory_exceeded(times: PlanTimes) -> Iterator[Violation]:
    """The peak memory of every device fits in its memory."""
    problem = times.problem
    for name, static, saved in peaks(times):
        memory = float(problem.memory_bytes[problem.cluster.index[name]])
        # The same expression as in `in_flight_limit`, so that both round alike.
        short = saved - (memory - static)
        if short > 0:
            yield Violation(
                "memory",
                f"device {name}",
                f"needs {format_bytes(static + saved)} at its peak and has "
                f"{format_bytes(memory)}: {short:.0f} bytes short",
            )


def peaks(times: PlanTimes) -> Iterator[tuple[str, float, float]]:
    """Per used device its static bytes, and the peak of the other bytes.

    A layer whose weights are gathered for a while counts as static.
    """
    overlapping = times.schedule is not None and times.rule.staleness > 0
    static_bytes = [
        stage_static_bytes(times.problem, stage, times.rule, overlapping) for stage in times.stages
    ]
    gathered = [gathered_bytes(times.problem, stage) for stage in times.stages]
    for lanes, names in devices_by_lanes(times.stages).items():
        static = sum(static_bytes[s] for s, _, _ in lanes) + max(gathered[s] for s, _, _ in lanes)
        most = _most_bytes([each for lane in lanes for each in _kept(times, lane)], times.tolerance)
        for name in names:
            yield name, static, most


@dataclass(frozen=True, slots=True, eq=False)
class HeldBytes:
    """The same bytes in each of several intervals of time; NaN for missing intervals."""

    starts: Floats
    ends: Floats
    bytes: float


def _kept(times: PlanTimes, lane: Lane) -> Iterator[HeldBytes]:
    """Bytes that a device keeps for its microbatches of a stage, without the static bytes.

    Recomputed activations are kept from the start of B, or of I, to the end of the backward.
    Between two losses, the activations of the first are held from the start on, those of the second
    to the end; and W may wait for long, so that output gradients count.
    """
    s, first, step = lane
    every, stage = (s, slice(first, None, step)), times.stages[s]
    whole, parted = (kept_bytes(times.problem, stage, split) for split in (False, True))
    forward, done = times.starts[F][every], times.done[every]
    if times.rule.updates_every_round:
        yield _old_versions(times, s)
    if times.backward_first:
        yield HeldBytes(np.zeros_like(done), done, whole.saved_bytes)
        yield HeldBytes(forward, np.full_like(forward, math.inf), whole.saved_bytes)
        yield from _waiting_gradients(times, lane)
    else:
        yield HeldBytes(forward, done, whole.saved_bytes)
    yield HeldBytes(times.starts[B][every], done, whole.working_bytes)
    yield HeldBytes(times.starts[I][every], done, parted.working_bytes)
    if stage.offload:
        (_, written), (read, _) = host_times(times, lane)
        yield HeldBytes(forward, written, whole.offloaded_bytes)
        yield HeldBytes(read, done, whole.offloaded_bytes)


def _waiting_gradients(times: PlanTimes, lane: Lane) -> Iterator[HeldBytes]:
    """Output gradients held from the start of I to the end of W, without boundary buffers."""
    s, first, step = lane
    starts, ends = times.starts[I][s, first::step], times.done[s, first::step]
    is_split = ~np.isnan(starts)
    starts, ends = starts[is_split], ends[is_split]
    within, last = waiting_bytes(times.problem, times.stages[s])
    yield HeldBytes(starts, ends, within)
    buffered = int(times.stages[s].layers[1] < len(times.problem.chain))
    # The gradients of n microbatches wait from the n-th start on: one less is beyond the buffer.
    yield HeldBytes(np.sort(starts)[buffered:], np.sort(ends)[: len(ends) - buffered], last)


def _old_versions(times: PlanTimes, s: int) -> HeldBytes:
    """Versions of a stage's weights next to the newest: from the next update to their last use.

    Version k exists after k updates, one at the end of every backward. A microbatch uses the
    newest version at the start of its forward, or with vertical sync of its first stage's forward.
    """
    leader = 0 if times.rule.follows_first_stage else s
    updates = np.sort(times.done[s])
    leaders_updates = np.sort(times.done[leader])
    started = times.starts[F][leader] + times.tolerance
    used = np.searchsorted(leaders_updates, started, side="right")
    last_use = np.full(len(updates) + 1, -math.inf)
    np.maximum.at(last_use, used, times.done[s])
    stage = times.stages[s]
    version = version_bytes(of_shard(times.problem, stage), *stage.layers)
    return HeldBytes(updates, last_use[:-1], version)


def _most_bytes(kept: Sequence[HeldBytes], tolerance: float) -> float:
    """The most bytes at any instant; a maximum is at the start of an interval.

    Intervals are counted, not added up, so that rounding cannot hide a byte.
    """
    instants = np.concatenate([each.starts for each in kept])
    instants = instants[~np.isnan(instants)]
    total = np.zeros(len(instants))
    for each in kept:
        gone = np.maximum(each.ends - tolerance, each.starts)
        count = np.searchsorted(np.sort(each.starts), instants, side="right")
        count -= np.searchsorted(np.sort(gone), instants, side="right")
        total += count * each.bytes
    return float(total.max(initial=0.0))
