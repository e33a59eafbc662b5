"""The kernel of list scheduling with insertion.

Busy times of a device or a pair of devices are kept as maximal blocks, so that the search for idle
time passes over gaps only.
"""

from typing import NamedTuple

import numpy as np

from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.solvers.operators.ranks import Arrays
from stagewright.solvers.pipelines.compiled import entry, inner, paced

ROUNDING = 1e-12  # relative: of sums of bytes
ANY = -1  # device of an operator that is free to choose


class Known(NamedTuple):
    """The ``device`` and ``start`` of the first ``length`` operators of a list, not chosen again.

    ``is_full`` if some device was passed over for them.
    """

    length: int
    is_full: bool
    device: Ints
    start: Floats


class Cutoff(NamedTuple):
    """A list ends when an operator's end and its ``tails``, the least time after it, are above.

    ``most`` seconds.
    """

    most: float
    tails: Floats


@inner
def earliest(begin: Floats, end: Floats, used: int, ready: float, seconds: float) -> float:
    """The earliest start from ``ready`` on in idle time of at least ``seconds``."""
    if seconds == 0.0:
        return ready
    start = ready
    at = np.searchsorted(end[:used], ready, side="right")
    while at < used and begin[at] < start + seconds:
        start = max(start, end[at])
        at += 1
    return start


@inner
def occupy(begin: Floats, end: Floats, used: int, start: float, finish: float) -> int:
    """Mark idle time as busy; return the number of blocks."""
    if finish <= start:
        return used
    at = np.searchsorted(begin[:used], start, side="right")
    joins_left = at > 0 and end[at - 1] == start
    joins_right = at < used and begin[at] == finish
    if joins_left and joins_right:
        end[at - 1] = end[at]
        begin[at : used - 1] = begin[at + 1 : used].copy()
        end[at : used - 1] = end[at + 1 : used].copy()
        return used - 1
    if joins_left:
        end[at - 1] = finish
        return used
    if joins_right:
        begin[at] = start
        return used
    for k in range(used, at, -1):
        begin[k], end[k] = begin[k - 1], end[k - 1]
    begin[at], end[at] = start, finish
    return used + 1


@entry
def place(  # noqa: C901 - one pass over operators
    a: Arrays,
    order: Ints,
    fixed: Ints,
    is_source: Bools,
    lookahead: Floats,
    held: float,
    known: Known,
    cutoff: Cutoff,
) -> tuple[bool, int, bool, Ints, Floats, Floats]:
    """The fields of a listing."""
    n, m = a.seconds.shape
    is_full = known.length > 0 and known.is_full
    is_freed, memory = held < 0.0, a.memory * (-held if held < 0.0 else 1.0)
    held = 1.0 if is_freed else held
    left = a.first_reader[1:] - a.first_reader[:-1]  # readers that are not listed
    tensors = len(a.maker)
    device = np.full(n, ANY)
    start = np.zeros(n)
    there = np.full((tensors, m), np.inf)  # when a tensor is on a device
    sent_start = np.full((tensors, m), np.nan)
    home = np.full(len(a.group_bytes), ANY)
    taken = np.zeros(m)
    begin, end, used = np.empty((m, n)), np.empty((m, n)), np.zeros(m, np.int64)
    links, size = (m * m, tensors) if a.exclusive else (0, 0)
    link_begin, link_end = np.empty((links, size)), np.empty((links, size))
    link_used = np.zeros(links, np.int64)
    members, first_member = members_of(a.group, len(home))
    for k in range(n):
        i = order[k]
        group = a.group[i]
        if device[i] != ANY or (is_source[i] and home[group] == ANY):
            continue
        best, best_cost, best_start = ANY, np.inf, 0.0
        if k < known.length:
            best, best_start = known.device[i], known.start[i]
        for turn in range(2 if best == ANY else 0):
            for d in range(m):
                if home[group] != ANY and d != home[group]:
                    continue
                if turn == 0 and home[group] == ANY and fixed[i] != ANY and d != fixed[i]:
                    continue
                need = _need(a, i, d, is_source, members, first_member, device, home, there, held)
                if taken[d] + need > memory[d] * (1 + ROUNDING):
                    is_full = True
                    continue
                ready = _ready(a, i, d, device, start, there, link_begin, link_end, link_used)
                begins = earliest(begin[d], end[d], used[d], ready, a.seconds[i, d])
                cost = begins + a.seconds[i, d]
                if len(lookahead):
                    cost += lookahead[i, d]
                if cost < best_cost:
                    best, best_cost, best_start = d, cost, begins
            if best != ANY or fixed[i] == ANY:
                break  # else the given device is full: take another one
        if best == ANY:
            return False, k, is_full, device, start, sent_start
        d = best
        taken[d] += _need(a, i, d, is_source, members, first_member, device, home, there, held)
        device[i] = d
        _settle(a, group, d, is_source, members, first_member, device, home, there)
        for e in range(a.first_input[i], a.first_input[i + 1]):
            source = a.maker[a.input[e]]
            if device[source] == ANY:
                g = a.group[source]
                _settle(a, g, d, is_source, members, first_member, device, home, there)
        if a.exclusive:
            best_start = _send_in_turn(
                a, i, d, device, start, there, sent_start, link_begin, link_end, link_used
            )
            best_start = earliest(begin[d], end[d], used[d], best_start, a.seconds[i, d])
        else:
            for e in range(a.first_input[i], a.first_input[i + 1]):
                t = a.input[e]
                if there[t, d] == np.inf:
                    j = a.maker[t]
                    sent_start[t, d] = start[j] + a.seconds[j, device[j]]
                    there[t, d] = sent_start[t, d] + transfer(a, t, device[j], d)
        finish = best_start + a.seconds[i, d]
        used[d] = occupy(begin[d], end[d], used[d], best_start, finish)
        start[i] = best_start
        for t in range(a.first_output[i], a.first_output[i + 1]):
            there[t, d] = finish
        if is_freed:
            for e in range(a.first_input[i], a.first_input[i + 1]):
                left[a.input[e]] -= 1
                _free(a, a.input[e], left, device, there, taken)
            for t in range(a.first_output[i], a.first_output[i + 1]):
                _free(a, t, left, device, there, taken)
        if len(cutoff.tails) and finish + cutoff.tails[i] > cutoff.most:
            return False, k + 1, is_full, device, start, sent_start
    for i in range(n):  # sources that nothing reads
        if device[i] == ANY:
            d = home[a.group[i]]
            if d == ANY:
                d = int(np.argmax(memory - taken))
                taken[d] += a.group_bytes[a.group[i]]
                if taken[d] > memory[d] * (1 + ROUNDING):
                    return False, n, True, device, start, sent_start
                home[a.group[i]] = d
            device[i] = d
    return True, n, is_full, device, start, sent_start


@inner
def _free(a: Arrays, t: int, left: Ints, device: Ints, there: Floats, taken: Floats) -> None:
    """A tensor without readers to come, and its copies, leave the memory."""
    if left[t] == 0:
        for d in range(len(taken)):
            if there[t, d] < np.inf:
                taken[d] -= a.held_bytes[t] if d == device[a.maker[t]] else a.sent_bytes[t]


@inner
def members_of(group: Ints, count: int) -> tuple[Ints, Ints]:
    """Operators by group, and the place of the first of each group."""
    first = np.zeros(count + 1, np.int64)
    for g in group:
        first[g + 1] += 1
    first = np.cumsum(first)
    members, at = np.empty(len(group), np.int64), first.copy()
    for i in range(len(group)):
        members[at[group[i]]] = i
        at[group[i]] += 1
    return members, first


@inner
def _settle(
    a: Arrays,
    group: int,
    d: int,
    is_source: Bools,
    members: Ints,
    first_member: Ints,
    device: Ints,
    home: Ints,
    there: Floats,
) -> None:
    """Put a group on device d, together with its waiting sources."""
    if home[group] != ANY:
        return
    home[group] = d
    for k in range(first_member[group], first_member[group + 1]):
        i = members[k]
        if is_source[i] and device[i] == ANY:
            device[i] = d
            for t in range(a.first_output[i], a.first_output[i + 1]):
                there[t, d] = 0.0


@inner
def transfer(a: Arrays, t: int, source: int, target: int) -> float:
    """Seconds of a tensor between two devices."""
    pair = source, target
    seconds: float = paced(a.sent_bytes[t], a.seconds_per_byte[pair], a.latency[pair])
    return seconds


@inner
def _need(
    a: Arrays,
    i: int,
    d: int,
    is_source: Bools,
    members: Ints,
    first_member: Ints,
    device: Ints,
    home: Ints,
    there: Floats,
    held: float,
) -> float:
    """Bytes that operator i adds on device d: its state, its tensors, and copies of its inputs."""
    need, group = 0.0, a.group[i]
    if home[group] == ANY:
        need += _group_need(a, group, is_source, members, first_member, held)
    for t in range(a.first_output[i], a.first_output[i + 1]):
        need += held * a.held_bytes[t]
    for e in range(a.first_input[i], a.first_input[i + 1]):
        t = a.input[e]
        source = a.maker[t]
        if device[source] != ANY:
            if there[t, d] == np.inf:
                need += held * a.sent_bytes[t]
        elif a.group[source] != group:
            need += _group_need(a, a.group[source], is_source, members, first_member, held)
    return need


@inner
def _group_need(
    a: Arrays, group: int, is_source: Bools, members: Ints, first_member: Ints, held: float
) -> float:
    """Bytes of a group that gets its device: its state, and the tensors of its sources."""
    need = a.group_bytes[group]
    for k in range(first_member[group], first_member[group + 1]):
        i = members[k]
        if is_source[i]:
            for t in range(a.first_output[i], a.first_output[i + 1]):
                need += held * a.held_bytes[t]
    return float(need)


@inner
def _ready(
    a: Arrays,
    i: int,
    d: int,
    device: Ints,
    start: Floats,
    there: Floats,
    link_begin: Floats,
    link_end: Floats,
    link_used: Ints,
) -> float:
    """Time at which all inputs of operator i can be on device d, each transfer as if alone."""
    ready = 0.0
    for e in range(a.first_input[i], a.first_input[i + 1]):
        t = a.input[e]
        j = a.maker[t]
        if device[j] == ANY:
            continue
        at = there[t, d]
        if at == np.inf:
            at = start[j] + a.seconds[j, device[j]]
            runs = transfer(a, t, device[j], d)
            if a.exclusive:
                k = device[j] * len(a.memory) + d
                at = earliest(link_begin[k], link_end[k], link_used[k], at, runs)
            at += runs
        ready = max(ready, at)
    return ready


@inner
def _send_in_turn(
    a: Arrays,
    i: int,
    d: int,
    device: Ints,
    start: Floats,
    there: Floats,
    sent_start: Floats,
    link_begin: Floats,
    link_end: Floats,
    link_used: Ints,
) -> float:
    """Send the inputs of operator i to device d, the first that is made first; when all are."""
    own = a.input[a.first_input[i] : a.first_input[i + 1]]
    made = np.empty(len(own))
    for e in range(len(own)):
        j = a.maker[own[e]]
        made[e] = start[j] + a.seconds[j, device[j]]
    ready = 0.0
    for e in np.argsort(made, kind="mergesort"):
        t = own[e]
        if there[t, d] == np.inf:
            source = device[a.maker[t]]
            k, runs = source * len(a.memory) + d, transfer(a, t, source, d)
            begins = earliest(link_begin[k], link_end[k], link_used[k], made[e], runs)
            link_used[k] = occupy(link_begin[k], link_end[k], link_used[k], begins, begins + runs)
            sent_start[t, d], there[t, d] = begins, begins + runs
        ready = max(ready, there[t, d])
    return ready
