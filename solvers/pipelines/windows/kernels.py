"""Compiled kernels of the search in windows; see :mod:`window_search`.

They are in one file because numba recompiles a cached kernel only if the kernel's own file changes.

A state is a set of scheduled blocks. ``where[k]`` is the number of blocks that the k-th microbatch
in the window has behind it, oldest first, 0 after the last. ``clock`` holds the bound of the state,
the time at which each machine is free, and the end of the last block of each such microbatch; times
that cannot matter are raised to the earliest start of what comes next, so that equal states meet.
"""

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.pipelines.blocks import NONE
from stagewright.formulations.pipelines.windows import Window
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.solvers.pipelines.compiled import copy, entry, inner, lean, refer

Places = NDArray[np.int16]
Parents = NDArray[np.int32]
_MIX = np.uint64(0x9E3779B97F4A7C15)
SHIFT = np.uint64(29)


@entry
def advance(
    window: Window,
    target: float,
    width: int,
    done: int,
    where: Places,
    clock: Floats,
    ends: Floats,
    most: int,
) -> tuple[int, Places, Floats, Ints, Parents, Places]:
    """Repeat :func:`expand` until all is scheduled, no state is left, or ``most`` are found.

    Returns
    -------
    The number of scheduled blocks and the states; then the number of states after each step, and of
    each the predecessor and the block, one step after the other.
    """
    window = refer(window)
    total = window.heads.size
    sizes, found = np.empty(total - done, np.int64), 0
    parents, blocks = np.empty(2 * most, np.int32), np.empty(2 * most, np.int16)
    steps = 0
    while done < total and len(where) > 0 and found < most:
        where, clock, parent, block = expand(window, target, width, done, where, clock, ends)
        done += 1
        if found + len(where) > len(parents):
            former, earlier = parents, blocks
            parents = np.empty(found + len(where), np.int32)
            blocks = np.empty(found + len(where), np.int16)
            copy(former, 0, found, parents)
            copy(earlier, 0, found, blocks)
        for k in range(len(where)):
            parents[found + k], blocks[found + k] = parent[k], block[k]
        found += len(where)
        sizes[steps] = len(where)
        steps += 1
    return done, where, clock, sizes[:steps], parents[:found], blocks[:found]


@inner
def expand(
    window: Window, target: float, width: int, done: int, where: Places, clock: Floats, ends: Floats
) -> tuple[Places, Floats, Parents, Places]:
    """Schedule one more block in every state, in all ways that active schedules have.

    ``done`` blocks are scheduled in each state. ``ends`` (n, M) keeps the earliest end of every
    block.

    All blocks left end at or after ``end``, the earliest possible end of a block that can be
    scheduled now. In any schedule, either the machine of that block starts no block before ``end``:
    then this block can go first, and nothing gets later. Or the block that it starts has no
    predecessor left, which would end too late: then it is tried.

    Returns
    -------
    The states that none dominates, with bounds of at most ``target``, and of each its predecessor
    and the block that was scheduled.
    """
    n, size = len(window.durations), len(where) * window.members.shape[1]
    table = np.full(_power_of_two(2 * size), NONE)
    following, beaten = np.full(size, NONE), np.zeros(size, np.bool_)
    next_where = np.zeros((size, where.shape[1]), np.int16)
    next_clock = np.zeros((size, clock.shape[1]))
    parents, blocks = np.empty(size, np.int32), np.empty(size, np.int16)
    item, ready, is_open = np.empty(n, np.int64), np.empty(n), np.empty(n, np.bool_)
    then_item, then_ready, then_open = item.copy(), ready.copy(), is_open.copy()
    found = 0
    for state in range(len(where)):
        gone = (done - _total(where[state])) // n
        _look(window, where[state], clock[state], gone, item, ready, is_open)
        first = _first_to_end(window.durations, ready, is_open)
        end = ready[first] + window.durations[first]
        for j in range(n):
            if not is_open[j] or window.machines[j] != window.machines[first]:
                continue
            if j != first and ready[j] >= end:
                continue
            spot, own = next_where[found], next_clock[found]
            copy(where[state], 0, len(spot), spot)
            copy(clock[state], 0, len(own), own)
            own[0] = max(own[0], ready[j] + window.durations[j] + window.tails[j, item[j]])
            left = gone + _schedule(window, j, item[j] - gone, ready[j], spot, own)
            _look(window, spot, own, left, then_item, then_ready, then_open)
            _raise(window, spot, own, then_ready)
            _bound(window, own, then_item)
            _look_ahead(window, own, then_item, then_ready)
            if own[0] > target:
                continue
            ends[j, item[j]] = min(ends[j, item[j]], ready[j] + window.durations[j])
            if _is_new(found, next_where, next_clock, table, following, beaten, width):
                parents[found], blocks[found] = state, j
                found += 1
    kept = _keep(found, beaten, next_where, next_clock, parents, blocks)
    return next_where[:kept], next_clock[:kept], parents[:kept], blocks[:kept]


@lean
def _keep(
    found: int, beaten: Bools, where: Places, clock: Floats, parents: Parents, blocks: Places
) -> int:
    """Move the states that none dominates to the front; their number."""
    kept = 0
    for k in range(found):
        if not beaten[k]:
            copy(where[k], 0, where.shape[1], where[kept])
            copy(clock[k], 0, clock.shape[1], clock[kept])
            parents[kept], blocks[kept] = parents[k], blocks[k]
            kept += 1
    return kept


@lean
def _total(where: Places) -> int:
    """The sum; numpy's takes longer to compile."""
    total = 0
    for k in range(len(where)):
        total += where[k]
    return total


@lean
def _look(
    window: Window,
    where: Places,
    clock: Floats,
    gone: int,
    item: Ints,
    ready: Floats,
    is_open: Bools,
) -> None:
    """The next microbatch of each block, its earliest start, and whether it can be scheduled now.

    The k-th microbatch is the next one of all blocks from its place up to that of the one before
    it. ``gone`` microbatches have left the window.
    """
    n, count = window.heads.shape
    base, top = len(clock) - len(where), n
    is_open[:] = False
    for k in range(len(where)):
        m = gone + k
        if m == count or top == 0:
            break
        start = clock[base + k]
        for j in range(where[k], top):
            start = max(start, window.heads[j, m], clock[1 + window.machines[j]])
            freeing = window.freeing[j]
            # The blocks from ``top`` on are next for older microbatches.
            waits = freeing >= top and item[freeing] <= m - window.limits[j]
            if waits:
                start = max(start, ready[freeing] + window.durations[freeing])
            item[j], ready[j] = m, start
            is_open[j] = j == where[k] and not waits
            start += window.durations[j]
        top = where[k]
    item[:top], ready[:top] = count, np.inf


@lean
def _first_to_end(durations: Floats, ready: Floats, is_open: Bools) -> int:
    """The block with the earliest possible end of all that can be scheduled."""
    first = NONE
    for j in range(len(ready)):
        if is_open[j] and (
            first == NONE or ready[j] + durations[j] < ready[first] + durations[first]
        ):
            first = j
    return first


@lean
def _schedule(window: Window, j: int, k: int, start: float, where: Places, clock: Floats) -> int:
    """Schedule block j of the k-th microbatch; returns how many microbatches leave the window."""
    base, width = len(clock) - len(where), len(where)
    where[k] += 1
    clock[base + k] = start + window.durations[j]
    clock[1 + window.machines[j]] = start + window.occupied[j]
    if where[0] < len(window.durations):
        return 0
    for t in range(width - 1):
        where[t], clock[base + t] = where[t + 1], clock[base + t + 1]
    where[width - 1], clock[base + width - 1] = 0, 0.0
    return 1


@lean
def _raise(window: Window, where: Places, clock: Floats, ready: Floats) -> None:
    """Raise the times of a state to the earliest start of the next computation."""
    base = len(clock) - len(where)
    clock[1:base] = np.inf
    for j in range(len(ready)):
        machine = 1 + window.machines[j]
        clock[machine] = min(clock[machine], ready[j])
    for i in range(1, base):
        if clock[i] == np.inf:
            clock[i] = 0.0  # no work is left
    for k in range(len(where)):
        j = where[k]
        if j == 0:
            break
        if k > 0 and where[k - 1] == j:
            clock[base + k] = max(clock[base + k], clock[base + k - 1] + window.occupied[j])
        else:
            clock[base + k] = ready[j]


@lean
def _bound(window: Window, clock: Floats, item: Ints) -> None:
    """Raise the bound of a state to that of each machine: its work, idle time, and a tail."""
    count = window.heads.shape[1]
    for i in range(window.members.shape[0]):
        work, after = 0.0, np.inf
        for j in window.members[i]:
            if j == NONE:
                break
            if item[j] == count:
                continue
            work += (count - item[j]) * window.occupied[j]
            if window.is_late[j]:
                opposite = window.opposite[j]
                idle = window.drains[j] if opposite != NONE and item[opposite] < count else 0.0
                rest = window.durations[j] - window.occupied[j] + window.tails[j, count - 1]
                after = min(after, idle + rest)
        if work > 0.0:
            clock[0] = max(clock[0], clock[1 + i] + work + after)


@lean
def _look_ahead(window: Window, clock: Floats, item: Ints, ready: Floats) -> None:
    """Raise the bound of a state to that of the next microbatch of each block, and of two blocks.

    Of two blocks on a machine one is first.
    """
    count = window.heads.shape[1]
    for j in range(len(ready)):
        if item[j] < count:
            end = ready[j] + window.durations[j]
            clock[0] = max(clock[0], end + window.tails[j, item[j]])
    for row in window.members:
        for x in range(len(row)):
            j = row[x]
            if j == NONE:
                break
            for i in row[:x]:
                if item[i] < count and item[j] < count:
                    one = _in_turn(window, i, j, item, ready)
                    other = _in_turn(window, j, i, item, ready)
                    clock[0] = max(clock[0], min(one, other))


@lean
def _in_turn(window: Window, i: int, j: int, item: Ints, ready: Floats) -> float:
    """A bound with block i before block j, both of their next microbatch."""
    end = ready[i] + window.durations[i]
    after = max(ready[j], ready[i] + window.occupied[i]) + window.durations[j]
    return float(max(end + window.tails[i, item[i]], after + window.tails[j, item[j]]))


@lean
def _is_new(
    new: int, where: Places, clock: Floats, table: Ints, following: Ints, beaten: Bools, width: int
) -> bool:
    """Whether state ``new`` is one more state: no other dominates it, and there is room for it.

    Marks the states that it dominates. Without room it is merged with another state.
    """
    slot = _slot(where[new], len(table))
    while table[slot] != NONE and not _is_equal(where[table[slot]], where[new]):
        slot = (slot + 1) & (len(table) - 1)
    previous, other, length = NONE, table[slot], 0
    while other != NONE:
        below, above = _compare(clock[other], clock[new])
        if below:
            return False
        after = following[other]
        if above:
            beaten[other] = True
            if previous == NONE:
                table[slot] = after
            else:
                following[previous] = after
        else:
            previous, length = other, length + 1
        other = after
    if length >= width:
        _merge(table[slot], clock, clock[new], following)
        return False
    following[new], table[slot] = table[slot], new
    beaten[new] = False
    return True


@lean
def _merge(first: int, clock: Floats, new: Floats, following: Ints) -> None:
    """Merge ``new`` into the nearest state from ``first`` on, with the earlier times of both."""
    nearest, least, other = first, np.inf, first
    while other != NONE:
        distance = _distance(clock[other], new)
        if distance < least:
            nearest, least = other, distance
        other = following[other]
    for i in range(len(new)):
        clock[nearest, i] = min(clock[nearest, i], new[i])


@lean
def _distance(one: Floats, other: Floats) -> float:
    """The sum of all differences."""
    total = 0.0
    for i in range(len(one)):
        total += abs(one[i] - other[i])
    return total


@lean
def _is_equal(one: Places, other: Places) -> bool:
    """Whether all places are equal; faster than numpy's comparison of short arrays."""
    for k in range(len(one)):
        if one[k] != other[k]:
            return False
        if one[k] == 0:
            return True
    return True


@lean
def _compare(one: Floats, other: Floats) -> tuple[bool, bool]:
    """Whether ``one`` is at most ``other`` everywhere, and whether at least."""
    below = above = True
    for i in range(len(one)):
        if one[i] > other[i]:
            below = False
        elif one[i] < other[i]:
            above = False
        if not (below or above):
            break
    return below, above


@lean
def _slot(where: Places, size: int) -> np.int64:
    """The first place of a state in a table of ``size``, a power of two."""
    value = _MIX
    for k in range(len(where)):
        if where[k] == 0:
            break
        value = (value ^ np.uint64(where[k])) * _MIX
        value ^= value >> SHIFT
    return np.int64(value & np.uint64(size - 1))


@lean
def _power_of_two(least: int) -> int:
    power = 1
    while power < least:
        power *= 2
    return power
