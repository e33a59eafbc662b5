"""One option for each item, as little time as possible within a capacity; compiled."""

import numpy as np
from numba import njit

from stagewright.graphs.documents.arrays import Floats, Ints

SLACK = 1 + 1e-12  # of lower bounds: the rounding of their sums


@njit(cache=True, error_model="numpy")
def choose(first: Ints, time: Floats, size: Floats, capacity: float, most: float) -> Ints:
    """The least sum of times of options whose sizes sum up to at most ``capacity``, exactly.

    The options of item i are ``first[i]`` to ``first[i + 1] - 1``, at least one. The numbers of the
    chosen ones are returned; none if no choice fits or takes at most ``most``.
    """
    n = len(first) - 1
    none = np.empty(0, dtype=np.int64)
    fast = np.empty(n, dtype=np.int64)
    total, need = 0.0, -capacity
    for i in range(n):
        best = first[i]
        for o in range(first[i], first[i + 1]):
            if time[o] < time[best] or (time[o] == time[best] and size[o] < size[best]):
                best = o
        fast[i] = best
        total += time[best]
        need += size[best]
    if total > most:
        return none
    if need <= 0:
        return fast
    rate, saving = _savings(first, time, size, fast)
    if saving.sum() < need:
        return none
    return _save(first, time, size, fast, need, most - total, rate, saving)


@njit(cache=True, error_model="numpy")
def _savings(first: Ints, time: Floats, size: Floats, fast: Ints) -> tuple[Floats, Floats]:
    """For each item, the least time per size saved (infinite if none) and the largest saving."""
    n = len(fast)
    rate, saving = np.full(n, np.inf), np.zeros(n)
    for i in range(n):
        for o in range(first[i], first[i + 1]):
            saved = size[fast[i]] - size[o]
            if saved > 0:
                rate[i] = min(rate[i], (time[o] - time[fast[i]]) / saved)
                saving[i] = max(saving[i], saved)
    return rate, saving


@njit(cache=True, error_model="numpy")
def _save(  # noqa: C901 - one merge of lists
    first: Ints,
    time: Floats,
    size: Floats,
    fast: Ints,
    need: float,
    most: float,
    rate: Floats,
    saving: Floats,
) -> Ints:
    """Replace options of ``fast`` to save at least ``need``, in at most ``most`` more time.

    Items are taken in ascending order of their rate. A list has the choices of the first items in
    ascending order of time, without those that another one beats in time and saving (Nemhauser and
    Ullmann, 1969), and those that take longer than a known whole choice when the rest is saved at
    the next rates.
    """
    order = np.argsort(rate)
    n = int((saving > 0).sum())  # others have the rate infinity
    reach, cost = np.zeros(n + 1), np.zeros(n + 1)
    for x in range(n):
        reach[x + 1] = reach[x] + saving[order[x]]
        cost[x + 1] = cost[x] + saving[order[x]] * rate[order[x]]
    extra, saved = np.zeros(64), np.zeros(64)
    parent, option = np.full(64, -1), np.full(64, -1)
    begin, end, found = 0, 1, -1
    at = np.empty((first[1:] - first[:-1]).max(), dtype=np.int64)
    for x in range(n):
        i = order[x]
        own = first[i + 1] - first[i]
        at[:own] = begin
        new, top = end, -1.0
        while True:
            pick, least = -1, np.inf
            for q in range(own):
                o = first[i] + q
                if at[q] < end and size[o] <= size[fast[i]]:
                    took = extra[at[q]] + time[o] - time[fast[i]]
                    if took < least:
                        pick, least = q, took
            if pick < 0 or least > most or (least == most and found >= 0):
                break
            o, old = first[i] + pick, at[pick]
            at[pick] += 1
            kept = min(need, saved[old] + size[fast[i]] - size[o])
            missing = need - kept
            if kept <= top:
                continue
            if missing > 0:
                goal = (reach[x + 1] + missing) / SLACK
                if goal > reach[n]:
                    continue
                p = np.searchsorted(reach, goal) - 1
                bound = cost[p] - cost[x + 1] + (goal - reach[p]) * rate[order[p]]
                if (least + bound) / SLACK > most:
                    continue
            top = kept
            if new == len(extra):
                extra, saved = np.append(extra, extra), np.append(saved, saved)
                parent, option = np.append(parent, parent), np.append(option, option)
            extra[new], saved[new], parent[new], option[new] = least, kept, old, o
            if missing <= 0:
                most, found = least, new
            new += 1
        begin, end = end, new
    if found < 0:
        return np.empty(0, dtype=np.int64)
    while parent[found] >= 0:
        fast[np.searchsorted(first, option[found], side="right") - 1] = option[found]
        found = parent[found]
    return fast
