"""Prices of stages, and the pipelines within a time per sample, compiled."""

from typing import NamedTuple

import numpy as np
from numba import njit

from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.solvers.dags.knapsack import choose
from stagewright.solvers.dags.merging import Downsets

Rows = list[tuple[int, int, int, int, int]]  # source, target, degree, only, step of a stage
Steps = list[tuple[int, float, float]]  # flight, seconds, exchange of a choice

ROUNDING = 1e-9  # of the devices that a lower bound needs


class OptionCosts(NamedTuple):
    """Costs of the options of layers, which are in the order in which upsets grow.

    The options of layer v on ``shards[t]`` shards are ``option[v, t]`` to ``option[v, t + 1] - 1``.
    Of an option: ``seconds`` and, per replica other than the first, ``exchange`` (seconds per
    sample), ``flight`` and ``fixed`` bytes. The edges of layer v are ``edge[v]`` to
    ``edge[v + 1] - 1``, ``other`` their other ends; edge number ``edge[v] + j`` costs
    ``crossing[across[o] + j]`` seconds with option o if it leaves or enters the stage.
    """

    shards: Ints
    option: Ints
    seconds: Floats
    exchange: Floats
    flight: Floats
    fixed: Floats
    edge: Ints
    other: Ints
    across: Ints
    crossing: Floats


class PiperMachine(NamedTuple):
    """Devices and their bytes, the most replicas in all, and the replicas that a stage may have.

    ``equal[t]``: whether all options of a layer on ``shards[t]`` shards have the same ``exchange``.
    Then the best choice in a given memory is the same for every number of replicas.
    """

    devices: int
    memory: float
    most: int
    replicas: Ints
    equal: Bools


class UpsetWork(NamedTuple):
    """For every upset, least ``device_seconds`` of layers outside, least ``seconds`` of its layers.

    Within a limit on the time per sample, layers take at least that many device-seconds, divided by
    the limit, devices, and their stages at least that many seconds, divided by it, replicas.
    """

    device_seconds: Floats
    seconds: Floats


class StageRows(NamedTuple):
    """Stages from an upset to a larger one: row r is for ``shards[degree[r]]`` shards.

    ``step[r]`` to ``step[r + 1] - 1`` are its best choices in ascending order of time: with up to
    ``flight`` samples in flight on a replica, d replicas take ``(seconds + (d - 1) * exchange) /
    d``. ``only`` is the number of replicas that they are best for, 0 for all. Rows ascend by
    ``source``.
    """

    source: Ints
    target: Ints
    degree: Ints
    only: Ints
    step: Ints
    flight: Ints
    seconds: Floats
    exchange: Floats


@njit(cache=True, error_model="numpy")
def _dead(c: OptionCosts, m: PiperMachine, v: int, t: int, sums: Floats, cutoff: float) -> bool:
    """Add layer ``v`` to the least sums; return whether no stage can have all these layers."""
    begin, end = c.option[v, t], c.option[v, t + 1]
    if begin == end:
        return True
    sums[0] += c.seconds[begin:end].min()
    sums[1] += (c.flight[begin:end] + c.fixed[begin:end]).min()
    width = min(m.devices // c.shards[t], m.most)
    return bool(sums[0] > cutoff * width or sums[1] > m.memory)


class Items(NamedTuple):
    """The options of a stage's layers on some shards; layer i has those from ``first[i]`` on."""

    first: Ints
    seconds: Floats
    exchange: Floats
    flight: Floats
    fixed: Floats


@njit(cache=True, error_model="numpy")
def _items(c: OptionCosts, layers: Ints, inside: Bools, t: int) -> Items:
    first = np.zeros(len(layers) + 1, dtype=np.int64)
    for x, v in enumerate(layers):
        first[x + 1] = first[x] + c.option[v, t + 1] - c.option[v, t]
    number, seconds = np.empty(first[-1], dtype=np.int64), np.empty(first[-1])
    at = 0
    for v in layers:
        for o in range(c.option[v, t], c.option[v, t + 1]):
            number[at], seconds[at] = o, c.seconds[o]
            for j in range(c.edge[v + 1] - c.edge[v]):
                if not inside[c.other[c.edge[v] + j]]:
                    seconds[at] += c.crossing[c.across[o] + j]
            at += 1
    return Items(first, seconds, c.exchange[number], c.flight[number], c.fixed[number])


class StageRoom(NamedTuple):
    """Devices and replicas left to a stage by the other stages, within a time per sample.

    ``own``: devices that it may have; ``later``: those that it and later stages may have;
    ``replicas``: those that the later stages have at least.
    """

    own: float
    later: float
    replicas: float


@njit(cache=True, error_model="numpy")
def _window(m: PiperMachine, work: UpsetWork, i: int, j: int, limit: float) -> StageRoom:
    """The window of a stage from upset i to upset j."""
    each = (1 - ROUNDING) / limit
    before, total = work.device_seconds[j], work.device_seconds[0]
    after = total - work.device_seconds[i]
    return StageRoom(
        m.devices - (before + after) * each, m.devices - before * each, work.seconds[i] * each
    )


@njit(cache=True, error_model="numpy")
def _flights(m: PiperMachine, window: StageRoom, shards: int) -> tuple[Ints, Ints]:
    """For each number of replicas, least and most samples in flight; 1 and 0 if too many."""
    low, high = np.ones(len(m.replicas), dtype=np.int64), np.zeros(len(m.replicas), dtype=np.int64)
    for x, d in enumerate(m.replicas):
        later = min(float(m.most - d), np.floor(window.later - shards * d))
        if shards * d <= window.own and window.replicas <= later:
            low[x] = int(np.ceil((d + window.replicas) / d))
            high[x] = int(np.ceil((d + later) / d))
    return low, high


@njit(cache=True, error_model="numpy")
def _choices(
    m: PiperMachine, low: Ints, high: Ints, only: int, cutoff: float, items: Items, steps: Steps
) -> None:
    """Append the best choice for every number of samples in flight, as far as there is one.

    For ``only`` that many replicas; 0: all options of a layer have the same ``exchange``. The best
    choice with y samples in flight is the best with all more that it fits with.
    """
    usable = low <= high
    if only:
        usable &= m.replicas == only
    if not usable.any():
        return
    shared = 0.0 if only else items.exchange[items.first[:-1]].sum()
    time = items.seconds + max(0, only - 1) * items.exchange
    bound = m.replicas * cutoff - (m.replicas - 1) * shared
    y = low[usable].min()
    while y <= high[usable].max():
        size = y * items.flight + items.fixed
        chosen = choose(items.first, time, size, m.memory, bound[usable & (y <= high)].max())
        if not len(chosen):
            return
        room, each = m.memory - items.fixed[chosen].sum(), items.flight[chosen].sum()
        last = m.most if each * m.most <= room else max(y, int(room / each))
        steps.append((last, items.seconds[chosen].sum(), items.exchange[chosen].sum()))
        y = last + 1


@njit(cache=True, error_model="numpy")
def price(  # noqa: C901 - one walk over the lattice
    c: OptionCosts,
    m: PiperMachine,
    work: UpsetWork,
    lattice: Downsets,
    begin: int,
    end: int,
    cutoff: float,
) -> StageRows:
    """The stages from the upsets ``begin`` to ``end`` that may take at most ``cutoff`` seconds.

    A stage is walked by adding layers in ascending order, so that every larger upset is met once.
    """
    n, degrees = len(c.edge) - 1, len(c.shards)
    rows, steps = [(0, 0, 0, 0, 0)], [(0, 0.0, 0.0)]  # the first ones tell the types
    layers, inside = np.zeros(n + 1, dtype=np.int64), np.zeros(n, dtype=np.bool_)
    at, edge = np.zeros(n + 1, dtype=np.int64), np.zeros(n + 1, dtype=np.int64)
    sums = np.zeros((n + 1, degrees, 2))
    dead = np.zeros((n + 1, degrees), dtype=np.bool_)
    all_ = np.zeros(1, dtype=np.int64)
    for i in range(begin, end):
        depth, at[0], edge[0], layers[0] = 0, i, lattice.first[i], -1
        while depth >= 0:
            if edge[depth] == lattice.first[at[depth] + 1]:
                if depth:
                    inside[layers[depth]] = False
                depth -= 1
                continue
            v, j = lattice.node[edge[depth]], lattice.target[edge[depth]]
            edge[depth] += 1
            if v < layers[depth]:
                continue
            for t in range(degrees):
                sums[depth + 1, t] = sums[depth, t]
                dead[depth + 1, t] = dead[depth, t] or _dead(c, m, v, t, sums[depth + 1, t], cutoff)
            if dead[depth + 1].all():
                continue
            depth += 1
            at[depth], edge[depth], layers[depth], inside[v] = j, lattice.first[j], v, True
            window = _window(m, work, i, j, cutoff)
            for t in range(degrees):
                if dead[depth, t] or sums[depth, t, 0] * c.shards[t] > cutoff * window.own:
                    continue
                items = _items(c, layers[1 : depth + 1], inside, t)
                low, high = _flights(m, window, c.shards[t])
                for only in all_ if m.equal[t] else m.replicas:
                    before = len(steps)
                    _choices(m, low, high, only, cutoff, items, steps)
                    if len(steps) > before:
                        rows.append((i, j, t, only, before - 1))
    return _stages(rows, steps)


@njit(cache=True, error_model="numpy")
def _stages(rows: Rows, steps: Steps) -> StageRows:
    """The found stages as arrays, without the first (empty) entry of each list."""
    r, s = len(rows) - 1, len(steps) - 1
    ends = np.empty((4, r), dtype=np.int64)
    step, flight = np.full(r + 1, s), np.empty(s, dtype=np.int64)
    seconds, exchange = np.empty(s), np.empty(s)
    for x in range(r):
        ends[0, x], ends[1, x], ends[2, x], ends[3, x], step[x] = rows[x + 1]
    for x in range(s):
        flight[x], seconds[x], exchange[x] = steps[x + 1]
    return StageRows(ends[0], ends[1], ends[2], ends[3], step, flight, seconds, exchange)


class LeastDevices(NamedTuple):
    """The least devices of an upset with s replicas in all, ``least[upset, s]``.

    ``row`` and ``replicas`` are those of the first stage of such a pipeline.
    """

    least: Ints
    row: Ints
    replicas: Ints


@njit(cache=True, error_model="numpy")
def within(  # noqa: C901 - one pass over the stages
    c: OptionCosts, m: PiperMachine, work: UpsetWork, stages: StageRows, limit: float
) -> LeastDevices:
    """Pipelines whose stages take at most ``limit`` seconds, from the last stage to the first.

    Of two pipelines of an upset one is left out that has neither fewer devices nor fewer replicas.
    """
    size = len(work.seconds)
    least = np.full((size, m.most + 1), m.devices + 1)
    row = np.full((size, m.most + 1), -1)
    replicas = np.zeros((size, m.most + 1), dtype=np.int64)
    useful = np.empty(m.most + 1, dtype=np.int64)
    least[0, 0] = 0
    r = 0
    for i in range(size):
        count, fewest = 0, m.devices + 1
        for s in range(m.most + 1):
            if least[i, s] < fewest:
                fewest = least[i, s]
                useful[count] = s
                count += 1
        while r < len(stages.source) and stages.source[r] == i:
            j, shards, only = stages.target[r], c.shards[stages.degree[r]], stages.only[r]
            left = _window(m, work, stages.source[r], j, limit).later
            furthest = -1  # most replicas of later stages
            for d in m.replicas:
                if d * shards > left or furthest >= m.most - d:
                    break
                if only != 0 and d != only:
                    continue
                y = 0
                for q in range(stages.step[r], stages.step[r + 1]):
                    if stages.seconds[q] + (d - 1) * stages.exchange[q] > d * limit:
                        break
                    y = stages.flight[q]
                later = min(d * y, m.most) - d
                if later <= furthest:
                    continue
                furthest = later
                for x in range(count):
                    s = useful[x]
                    if s > later:
                        break
                    devices = least[i, s] + d * shards
                    if devices <= left and devices < least[j, s + d]:
                        least[j, s + d], row[j, s + d], replicas[j, s + d] = devices, r, d
            r += 1
    return LeastDevices(least, row, replicas)
