"""Compiled kernels of the recurrence: reachable states of devices and layers."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.pipelines.bppm import Recurrence
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.pipelines.compiled import (
    copy,
    entry,
    lean,
    lean_entry,
    paced,
    refer,
    ring_pace,
)

Words = NDArray[np.uint64]
ONE = np.uint64(1)
TOP = np.uint64(63)
ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
MARGIN = 1e-9  # rounding may not cut a state that just fits


class Ranges(NamedTuple):
    """The range of l that is examined with i devices: ``low[i] <= l <= high[i]``.

    State (i, r, l) is in row ``base[i] + (r - 1) * (high[i] - low[i] + 1) + l - low[i]``.
    """

    low: Ints
    high: Ints
    base: Ints


@lean_entry
def step_time(form: Recurrence, before: int, l: int, used: int, later: int, r: int) -> float:
    """Time of stage (before, l] on r units, or of the channel from the ``later`` before it."""
    form = refer(form)
    time: float = _stage_time(form, before, l, used, r)
    return max(time, _channel_time(form, before, used, later, r)) if used > 0 else time


@lean
def _stage_time(form: Recurrence, before: int, l: int, used: int, r: int) -> float:
    """Time of layers (before, l] on the r units after the first ``used``."""
    f = b = u = 0.0
    for k in range(form.kinds.shape[0]):
        if form.kinds[k, used + r] > form.kinds[k, used]:
            f = max(f, form.forward[k, r, l] - form.forward[k, r, before])
            b = max(b, form.backward[k, r, l] - form.backward[k, r, before])
            u = max(u, form.update[k, l] - form.update[k, before])
    per_byte, once = _reduce(form, used, r)
    time: float = (
        form.microbatches * (f + b)
        + per_byte * (form.parameters[l] - form.parameters[before])
        + once
        + u
    )
    return time


@lean
def _reduce(form: Recurrence, used: int, r: int) -> tuple[float, float]:
    """An all-reduce's seconds per byte of parameters, and its latency."""
    group = used + r, r
    pace, once = form.group_seconds_per_byte[group], form.group_latency[group]
    return ring_pace(r * form.unit, pace, once)


@lean
def _window_starts(
    form: Recurrence, limit: float, low: int, first: int, last: int, used: int, r: int, starts: Ints
) -> None:
    """starts[l] for l = first ... last: the least l' >= low with (l', l] under the limit, or l.

    No window contains layers that cannot be split among r devices.
    """
    per_byte, once = _reduce(form, used, r)
    forward, backward, parameters = form.forward[0, r], form.backward[0, r], form.parameters
    update = form.update[0]
    one_kind = form.kinds.shape[0] == 1
    start = low
    for l in range(first, last + 1):
        start = max(start, form.first[r, l])
        if one_kind:
            # The same arithmetic as in stage_time, without its loop over kinds.
            f, b, p = forward[l], backward[l], parameters[l]
            while start < l and (
                form.microbatches * ((f - forward[start]) + (b - backward[start]))
                + per_byte * (p - parameters[start])
                + once
                + (update[l] - update[start])
                > limit
            ):
                start += 1
        else:
            while start < l and _stage_time(form, start, l, used, r) > limit:
                start += 1
        starts[l] = start


@lean
def _channel_time(form: Recurrence, l: int, used: int, later: int, r: int) -> float:
    """Time of all transfers between the ``later`` units before ``used`` and the next r."""
    there = back = there_latency = back_latency = 0.0
    for k in range(used, used + r):
        for j in range(used - later, used):
            there = max(there, form.seconds_per_byte[k, j])
            back = max(back, form.seconds_per_byte[j, k])
            there_latency = max(there_latency, form.latency[k, j])
            back_latency = max(back_latency, form.latency[j, k])
    share = _share(form, form.boundary[l], r * later)
    once: float = paced(share, there + back, there_latency) + back_latency
    return form.microbatches * once


@lean
def _share(form: Recurrence, volume: float, pairs: int) -> float:
    """Bytes of the largest share of a microbatch, in whole samples, over ``pairs`` of units."""
    share: float = volume * -(-form.samples // (pairs * form.unit**2)) / form.samples
    return share


@lean
def _most_in_flight(form: Recurrence, before: int, l: int, r: int, memory: float) -> int:
    """Microbatches of layers (before, l] that fit on each of r units, at most form.warm_up."""
    free = memory
    free -= form.state_factor[r] * (form.parameters[l] - form.parameters[before])
    free -= form.buffers[r, before] + form.buffers[r, l]
    saved = form.saved[r, l] - form.saved[r, before]
    if free < 0.0:
        return 0
    if saved * form.warm_up <= free:
        return form.warm_up
    return int(free // saved)


@lean
def _row(band: Ranges, i: int, r: int, l: int) -> int:
    row: int = band.base[i] + (r - 1) * (band.high[i] - band.low[i] + 1) + l - band.low[i]
    return row


@lean
def _least_memory(form: Recurrence, used: int, i: int) -> float:
    """The least memory of the units [used, i), 0 without any."""
    least = np.inf if used < i else 0.0
    for k in range(used, i):
        least = min(least, form.memory[k])
    return least


@entry
def sweep(  # noqa: C901 - one flat pass, its steps are the functions below
    form: Recurrence,
    band: Ranges,
    limit: float,
    most: int,
    largest: float,
    slowest: tuple[float, float],
    needed: Floats,
    reach: Words,
) -> None:
    """Fill ``reach``, from few devices to many.

    ``needed`` are the bytes that are enough for any stage on each number of devices.
    """
    form, band = refer(form), refer(band)
    size, layers, words = len(form.memory), len(form.parameters) - 1, reach.shape[1]
    joined = np.zeros((size + 2, layers + 1, words), dtype=np.uint64)
    source = np.zeros((layers + 1, words), dtype=np.uint64)
    worst = np.zeros((4, size + 1))
    front = np.zeros(layers + 1, dtype=np.uint64)
    starts = np.zeros(layers + 1, dtype=np.int64)
    replicas = form.forward.shape[1] - 1
    for used in range(size):
        low, high = band.low[used], band.high[used]
        if used > 0:
            low, high = _join(band, used, reach, joined)
        if low > high:
            continue
        worst[:] = 0.0
        memory = np.inf
        for r in range(1, min(size - used, replicas) + 1):
            memory = min(memory, form.memory[used + r - 1])
            free = _unconstrained(form, limit, largest, slowest, used, r)
            _collect_links(form, used, r, free, worst)
            first, last = max(band.low[used + r], low + 1), band.high[used + r]
            if first > last:
                continue
            _window_starts(form, limit, low, first, last, used, r, starts)
            at = _row(band, used + r, r, first)
            out = reach[at : at + last - first + 1]
            behind = joined[free]
            if free > 1:
                for l in range(low, high + 1):
                    copy(joined[free, l], 0, words, source[l])
                _through_narrow(form, band, limit, reach, low, high, used, r, free, worst, source)
                behind = source
            if used == 0:
                _place_first(form, starts, first, last, r, memory, out)
            elif needed[r] <= memory:
                _place(starts, first, last, high, behind, front, out)
            else:
                _place_in_memory(form, starts, first, last, high, r, memory, most, behind, out)


@lean
def _join(band: Ranges, used: int, reach: Words, joined: Words) -> tuple[int, int]:
    """joined[r', l]: union of states with at least r' replicas; returns least and largest l."""
    low, high = band.low[used], band.high[used]
    joined[used + 1, low : high + 1] = 0
    for later in range(used, 0, -1):
        at = _row(band, used, later, low)
        for l in range(low, high + 1):
            for w in range(reach.shape[1]):
                joined[later, l, w] = joined[later + 1, l, w] | reach[at + l - low, w]
    while low <= high and not _is_any(joined[1, low]):
        low += 1
    while low <= high and not _is_any(joined[1, high]):
        high -= 1
    return low, high


@lean
def _is_any(words: Words) -> bool:
    """Whether a bit is set; numpy's ``any`` takes longer to compile."""
    for word in words:  # noqa: SIM110 (numba has no any())
        if word != 0:
            return True
    return False


@lean
def _unconstrained(
    form: Recurrence, limit: float, largest: float, slowest: tuple[float, float], used: int, r: int
) -> int:
    """The least number of replicas of the later stage such that no channel exceeds the limit."""
    slack = limit / form.microbatches - 2.0 * slowest[1]
    whole = largest * 2.0 * slowest[0]  # seconds of a microbatch in one share
    if slack <= 0.0:
        return used + 1
    # The largest number of samples in a share.
    samples = np.floor(slack * form.samples / whole * (1 - 1e-12)) if whole > 0.0 else np.inf
    if samples < 1.0:
        return used + 1
    needed = form.samples / (r * form.unit**2 * samples)
    return max(1, int(np.ceil(min(needed, used + 1.0))))


@lean
def _collect_links(form: Recurrence, used: int, r: int, free: int, worst: Floats) -> None:
    """Add the links of the newest of the r devices after ``used`` to ``worst``.

    ``worst[:, r']`` has the seconds per byte in both directions, then the latencies, of the slowest
    link between the r'-th device before ``used`` and the devices after it. ``free`` does not
    increase with r, so rows beyond it are never needed later.
    """
    newest = used + r - 1
    for later in range(1, free):
        j = used - later
        worst[0, later] = max(worst[0, later], form.seconds_per_byte[newest, j])
        worst[1, later] = max(worst[1, later], form.seconds_per_byte[j, newest])
        worst[2, later] = max(worst[2, later], form.latency[newest, j])
        worst[3, later] = max(worst[3, later], form.latency[j, newest])


@lean
def _through_narrow(
    form: Recurrence,
    band: Ranges,
    limit: float,
    reach: Words,
    low: int,
    high: int,
    used: int,
    r: int,
    free: int,
    worst: Floats,
    source: Words,
) -> None:
    """Add to ``source`` the states of fewer than ``free`` replicas whose channel is fast enough."""
    there = back = there_latency = back_latency = 0.0
    for later in range(1, free):
        there = max(there, worst[0, later])
        back = max(back, worst[1, later])
        there_latency = max(there_latency, worst[2, later])
        back_latency = max(back_latency, worst[3, later])
        at = _row(band, used, later, low) - low
        for l in range(low, high + 1):
            share = _share(form, form.boundary[l], r * later)
            once = paced(share, there + back, there_latency) + back_latency
            if form.microbatches * once <= limit:
                for w in range(reach.shape[1]):
                    source[l, w] |= reach[at + l, w]


@lean
def _place(
    starts: Ints, first: int, last: int, high: int, source: Words, front: Words, out: Words
) -> None:
    """Place a stage after ``source``: for every l the union over its window, one more stage.

    ``out`` has a row per l from ``first`` on. The window is a queue of two stacks with running
    unions: ``front[k]`` is the union of source[k ... border - 1], ``back`` that of newer entries.
    """
    for w in range(source.shape[1]):
        border = tail = starts[first]
        back = np.uint64(0)
        for l in range(first, last + 1):
            start = starts[l]
            if start > high:
                break
            while tail < min(l, high + 1):
                back |= source[tail, w]
                tail += 1
            if start >= border:
                _join_back(source, w, start, tail, front)
                border, back = tail, np.uint64(0)
            if start < tail:
                union = front[start] | back
                out[l - first, w] |= union << ONE
                if w + 1 < source.shape[1]:
                    out[l - first, w + 1] |= union >> TOP


@lean
def _join_back(source: Words, w: int, start: int, tail: int, front: Words) -> None:
    """front[k] = the union of source[k ... tail - 1]."""
    union = np.uint64(0)
    for k in range(tail - 1, start - 1, -1):
        union |= source[k, w]
        front[k] = union


@lean
def _place_in_memory(
    form: Recurrence,
    starts: Ints,
    first: int,
    last: int,
    high: int,
    r: int,
    memory: float,
    most: int,
    source: Words,
    out: Words,
) -> None:
    """As ``_place``, if the n-th stage from the end must hold min(warm_up, n) microbatches."""
    for l in range(first, last + 1):
        for before in range(starts[l], min(l, high + 1)):
            if not _is_any(source[before]):
                continue
            possible = _most_in_flight(form, before, l, r, memory)
            counts = most if possible >= form.warm_up else min(possible, most)
            carry = np.uint64(0)
            for w in range(source.shape[1]):
                allowed = min(max(counts - 64 * w, 0), 64)
                mask = np.uint64(0) if allowed == 0 else ALL >> np.uint64(64 - allowed)
                out[l - first, w] |= ((source[before, w] << ONE) | carry) & mask
                carry = source[before, w] >> TOP


@lean
def _place_first(
    form: Recurrence, starts: Ints, first: int, last: int, r: int, memory: float, out: Words
) -> None:
    """Place the last stage of the pipeline."""
    for l in range(first, last + 1):
        if starts[l] == 0 and _most_in_flight(form, 0, l, r, memory) > 0:
            out[l - first, 0] |= ONE


@lean_entry
def predecessor(
    form: Recurrence, band: Ranges, reach: Words, limit: float, stages: int, l: int, i: int, r: int
) -> tuple[float, int, int]:
    """(time, l', r') of the fastest stage (l', l] on r devices that ends ``stages`` stages."""
    form, band = refer(form), refer(band)
    used = i - r
    memory = _least_memory(form, used, i)
    best = (np.inf, 0, 0)
    if stages == 1:
        return (_stage_time(form, 0, l, 0, r), 0, 0) if used == 0 else best
    word, bit = (stages - 2) // 64, np.uint64((stages - 2) % 64)
    for before in range(max(band.low[used], form.first[r, l]), min(band.high[used], l - 1) + 1):
        time = _stage_time(form, before, l, used, r)
        if time > limit or time >= best[0]:
            continue
        if _most_in_flight(form, before, l, r, memory) < min(stages, form.warm_up):
            continue
        for later in range(1, used + 1):
            if reach[_row(band, used, later, before), word] >> bit & ONE == np.uint64(0):
                continue
            if _channel_time(form, before, used, later, r) <= limit:
                best = (time, before, later)
                break
    return best
