"""Simulated annealing over devices of groups and one order of all operators.

An order and devices give a timetable: every operator starts as early as its inputs and the
operators before it on its device allow. Some order gives every timetable that cannot be shifted to
the left. A move changes what comes after its first place only, so the times before it are kept.
"""

import numpy as np

from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.operators.insertion_kernel import earliest, members_of, occupy, transfer
from stagewright.solvers.operators.ranks import Arrays
from stagewright.solvers.pipelines.compiled import entry, inner

_PENALTY = 2.0  # of a plan's time, for memory exceeded by the whole of a device's memory
_COOLING = 400.0  # the temperature at the start over that at the end
_WALK = 0.6  # chance that a walk of moved operators goes on
CRITICAL = 0.7  # share of moves of operators on the critical chain


@entry
def anneal(  # noqa: C901 - one loop over moves
    a: Arrays,
    order: Ints,
    home: Ints,
    tails: Floats,
    budget: int,
    random: np.random.Generator,
    limited: bool,
    first: float,
) -> tuple[Ints, Ints]:
    """(order, home) of the best after ``budget`` evaluations.

    ``home`` has the device of each group, ``tails`` the least time after each operator. Memory is
    looked at if ``limited``. ``first`` is the temperature at the start, as a share of the time.
    """
    n, m = a.seconds.shape
    order, home = order.copy(), home.copy()
    place = np.empty(n, np.int64)
    for k in range(n):
        place[order[k]] = k
    free, finish, cause = np.zeros((n + 1, m)), np.zeros(n), np.full(n, -1)
    other_free, other_finish, other_cause = free.copy(), finish.copy(), cause.copy()
    members, first_member = members_of(a.group, len(home))
    end = _times(a, order, home, tails, 0, np.inf, free, finish, cause)
    excess = _excess(a, home, finish) if limited else 0.0
    now = end * (1 + _PENALTY * excess)
    best, best_order, best_home, best_fits = now, order.copy(), home.copy(), excess == 0
    chain, length = np.empty(n, np.int64), 0
    other_order, other_home, other_place = order.copy(), home.copy(), place.copy()
    scale = max(end, 1e-300)
    for turn in range(budget):
        heat = scale * first * _COOLING ** (-turn / budget)
        most = now - heat * np.log(1.0 - random.random())
        if length == 0:
            length = _critical(finish, cause, chain)
        if random.random() < CRITICAL:
            i = chain[int(random.integers(0, length))]
        else:
            i = int(random.integers(0, n))
        kind = random.random()
        begin = n
        if m > 1 and kind < 0.6:
            begin = _rehome(a, i, members, first_member, other_home, other_place, random)
        if kind >= 0.5 or m == 1:
            begin = min(begin, _shift(a, i, other_order, other_place, random))
        end = np.inf
        if begin < n:
            other_free[begin] = free[begin]
            other_finish[:] = finish
            other_cause[:] = cause
            if a.exclusive:
                begin = 0
            end = _times(
                a,
                other_order,
                other_home,
                tails,
                begin,
                most,
                other_free,
                other_finish,
                other_cause,
            )
        cost = end
        if end <= most and limited:
            excess = _excess(a, other_home, other_finish)
            cost = end * (1 + _PENALTY * excess)
        if cost <= most:
            now, length = cost, 0
            order[:], home[:], place[:] = other_order, other_home, other_place
            free[begin:] = other_free[begin:]
            finish[:], cause[:] = other_finish, other_cause
            if cost < best and (excess == 0 or not best_fits):
                best, best_fits = cost, excess == 0
                best_order[:], best_home[:] = order, home
            elif excess == 0 and not best_fits:
                best, best_fits = cost, True
                best_order[:], best_home[:] = order, home
        else:
            other_order[:], other_home[:], other_place[:] = order, home, place
    return best_order, best_home


@inner
def _critical(finish: Floats, cause: Ints, chain: Ints) -> int:
    """Fill in a chain of operators, each waiting for the previous, up to the last; its length."""
    i, length = np.argmax(finish), 0
    while i >= 0:
        chain[length] = i
        length += 1
        i = cause[i]
    return length


@inner
def _neighbour(a: Arrays, i: int, random: np.random.Generator) -> int:
    """A random maker or reader of operator i, or -1."""
    inputs = a.first_input[i + 1] - a.first_input[i]
    begin, end = a.first_reader[a.first_output[i]], a.first_reader[a.first_output[i + 1]]
    if inputs + end - begin == 0:
        return -1
    k = int(random.integers(0, inputs + end - begin))
    if k < inputs:
        return int(a.maker[a.input[a.first_input[i] + k]])
    return int(a.reader[begin + k - inputs])


@inner
def _rehome(
    a: Arrays,
    i: int,
    members: Ints,
    first_member: Ints,
    home: Ints,
    place: Ints,
    random: np.random.Generator,
) -> int:
    """Move the groups on a random walk from operator i to one device; the first place."""
    m = len(a.memory)
    old = home[a.group[i]]
    j = _neighbour(a, i, random)
    d = home[a.group[j]] if j >= 0 and random.random() < 0.5 else old
    if d == old:
        d = (old + 1 + int(random.integers(0, m - 1))) % m
    home[a.group[i]] = d
    least = _least_place(a, i, members, first_member, place)
    while random.random() < _WALK:
        i = _neighbour(a, i, random)
        if i < 0:
            break
        if home[a.group[i]] != d:
            home[a.group[i]] = d
            least = min(least, _least_place(a, i, members, first_member, place))
    return least


@inner
def _least_place(a: Arrays, i: int, members: Ints, first_member: Ints, place: Ints) -> int:
    least = len(place)
    for k in range(first_member[a.group[i]], first_member[a.group[i] + 1]):
        least = min(least, place[members[k]])
    return least


@inner
def _shift(a: Arrays, i: int, order: Ints, place: Ints, random: np.random.Generator) -> int:
    """Move operator i to a random place between its makers and readers; the first place."""
    n, old = len(order), place[i]
    low, high = 0, n - 1
    for e in range(a.first_input[i], a.first_input[i + 1]):
        low = max(low, place[a.maker[a.input[e]]] + 1)
    for e in range(a.first_reader[a.first_output[i]], a.first_reader[a.first_output[i + 1]]):
        high = min(high, place[a.reader[e]] - 1)
    if high <= low:
        return n
    new = low + int(random.integers(0, high - low))
    if new >= old:
        new += 1
    step = 1 if new > old else -1
    for k in range(old, new, step):
        order[k] = order[k + step]
        place[order[k]] = k
    order[new], place[i] = i, new
    return int(min(old, new))


@inner
def _times(  # noqa: C901 - one pass over operators
    a: Arrays,
    order: Ints,
    home: Ints,
    tails: Floats,
    begin: int,
    most: float,
    free: Floats,
    finish: Floats,
    cause: Ints,
) -> float:
    """The end of the timetable, or infinity once it must exceed ``most``.

    ``free[k]`` is when each device is free before the operator at place k, ``cause`` the operator
    that each waits for.
    """
    if a.exclusive:
        return _times_in_turn(a, order, home, tails, most, free, finish, cause)
    n, m = a.seconds.shape
    last = np.full(m, -1)  # unknown before ``begin``: those causes are found by their finish
    for k in range(begin):
        if finish[order[k]] == free[begin, home[a.group[order[k]]]]:
            last[home[a.group[order[k]]]] = order[k]
    for k in range(begin, n):
        i = order[k]
        d = home[a.group[i]]
        start, why = 0.0, -1
        if a.seconds[i, d] > 0.0:
            start, why = free[k, d], last[d]
        for e in range(a.first_input[i], a.first_input[i + 1]):
            t = a.input[e]
            j = a.maker[t]
            h = home[a.group[j]]
            at = finish[j]
            if h != d:
                at += transfer(a, t, h, d)
            if at > start:
                start, why = at, j
        ends = start + a.seconds[i, d]
        if ends + tails[i] > most:
            return np.inf
        free[k + 1] = free[k]
        if a.seconds[i, d] > 0.0:
            free[k + 1, d] = ends
            last[d] = i
        finish[i], cause[i] = ends, why
    return float(finish.max())


@inner
def _times_in_turn(  # noqa: C901 - one pass over operators
    a: Arrays,
    order: Ints,
    home: Ints,
    tails: Floats,
    most: float,
    free: Floats,
    finish: Floats,
    cause: Ints,
) -> float:
    """As :func:`_times` from the beginning, with one transfer at a time on a pair of devices."""
    n, m = a.seconds.shape
    tensors = len(a.maker)
    there = np.full((tensors, m), np.inf)
    begin, end = np.empty((m * m, tensors)), np.empty((m * m, tensors))
    used, last = np.zeros(m * m, np.int64), np.full(m, -1)
    for k in range(n):
        i = order[k]
        d = home[a.group[i]]
        start, why = 0.0, -1
        if a.seconds[i, d] > 0.0:
            start, why = free[k, d], last[d]
        for e in range(a.first_input[i], a.first_input[i + 1]):
            t = a.input[e]
            j = a.maker[t]
            h = home[a.group[j]]
            if there[t, d] == np.inf:
                at, runs = finish[j], transfer(a, t, h, d)
                if h != d:
                    c = h * m + d
                    at = earliest(begin[c], end[c], used[c], at, runs)
                    used[c] = occupy(begin[c], end[c], used[c], at, at + runs)
                there[t, d] = at + runs
            if there[t, d] > start:
                start, why = there[t, d], j
        ends = start + a.seconds[i, d]
        if ends + tails[i] > most:
            return np.inf
        free[k + 1] = free[k]
        if a.seconds[i, d] > 0.0:
            free[k + 1, d] = ends
            last[d] = i
        finish[i], cause[i] = ends, why
    return float(finish.max())


@inner
def _excess(a: Arrays, home: Ints, finish: Floats) -> float:  # noqa: C901 - one pass over tensors
    """The largest excess of any device's memory, as a share of that memory.

    Transfers are taken to start when their tensors are made, which holds without contention.
    """
    m, tensors = len(a.memory), len(a.maker)
    state = np.zeros(m)
    for g in range(len(home)):
        state[home[g]] += a.group_bytes[g]
    times, changes = np.empty(2 * tensors * m), np.empty(2 * tensors * m)
    where, count = np.empty(2 * tensors * m, np.int64), 0
    last = np.empty(m)
    for t in range(tensors):
        i = a.maker[t]
        h = home[a.group[i]]
        last[:] = 0.0
        last[h] = finish[i]
        for e in range(a.first_reader[t], a.first_reader[t + 1]):
            d = home[a.group[a.reader[e]]]
            last[d] = max(last[d], finish[a.reader[e]])
            if d != h:
                runs = transfer(a, t, h, d)
                last[h] = max(last[h], finish[i] + runs)
        for d in range(m):
            begin = finish[i] - a.seconds[i, h] if d == h else finish[i]
            amount = a.held_bytes[t] if d == h else a.sent_bytes[t]
            if last[d] > begin and amount > 0.0:
                times[count], changes[count], where[count] = begin, amount, d
                times[count + 1], changes[count + 1], where[count + 1] = last[d], -amount, d
                count += 2
    now, peak = state.copy(), state.copy()
    # Ends come before starts of the same time, and before starts that differ by rounding.
    keys = times[:count] + np.where(changes[:count] > 0.0, 1e-9, 0.0) * finish.max()
    for k in np.argsort(keys):
        d = where[k]
        now[d] += changes[k]
        peak[d] = max(peak[d], now[d])
    excess = 0.0
    for d in range(m):
        if peak[d] > a.memory[d] * (1 + 1e-9):
            excess = max(excess, peak[d] / max(a.memory[d], 1.0) - 1.0)
    return excess
