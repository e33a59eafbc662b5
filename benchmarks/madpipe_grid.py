"""MadPipe's first phase as printed: a dynamic program on a grid of loads, bytes and delays."""

import math
import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stagewright.formulations.patterns.joint_patterns import AllocationTables, Placed
from stagewright.formulations.patterns.madpipe import StageAllocationProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.patterns.madpipe_kernels import MARGIN


@dataclass(frozen=True, slots=True)
class Grid:
    """Numbers of grid values for the special load, its memory, and V (MadPipe 5.1)."""

    loads: int = 101
    memories: int = 11
    delays: int = 51

    def __post_init__(self) -> None:
        if min(self.loads, self.memories, self.delays) < 2:
            raise InputError(f"a grid needs at least two values per dimension, got {self}")


@dataclass(frozen=True, slots=True)
class GridAnswer:
    """The result of MadPipe's first phase: target and expected period in seconds, and stages.

    If no target period has an allocation, ``stages`` is None and both periods are infinite.
    """

    target: float
    period: float
    stages: tuple[Stage, ...] | None
    seconds: float


def by_grid(
    question: StageAllocationProblem, grid: Grid | None = None, passes: int = 10
) -> GridAnswer:
    """MadPipe's first phase as published: MadPipe-DP on a grid within Algorithm 1 (MadPipe 4.2).

    As printed, the special group keeps g - 1 microbatches of each stage, C is also added between
    its own stages, and weight versions are not limited. Loads and bytes are rounded up to the grid,
    from 0 to U(1, L) and to M; delays likewise, from 0 to U(1, L) + sum C, with larger ones
    rounded down to the last value.

    Raises
    ------
    InputError
        If the problem is not one of the paper: no special group, groups of several or different
        devices, different links, or recomputation.
    """
    begun = time.perf_counter()
    _require_printed(question)
    form, tick = question.tables, question.tick
    raster = _raster(form, grid or Grid())
    everything = float(form.seconds[0, 0, -1, 0])
    low, high = everything / len(question.groups), everything + float(raster.crossing.sum())
    best: tuple[float, float, float, list[Placed]] = (math.inf, math.inf, math.inf, [])
    target = low
    for _ in range(passes):
        # Allocations with a period above ``high`` do not affect the rest.
        period, placed = _madpipe_dp(GridPass(form, raster, target, high))
        best = min(best, (max(period, target), target, period, placed))
        low = max(low, min(period, target))
        high = min(high, max(period, target))
        target = (low + high) / 2
    _, target, period, placed = best
    seconds = time.perf_counter() - begun
    if not placed:
        return GridAnswer(math.inf, math.inf, None, seconds)
    return GridAnswer(target * tick, period * tick, question.stages(placed), seconds)


def madpipe_dp(
    question: StageAllocationProblem, target: float, grid: Grid | None = None
) -> tuple[float, tuple[Stage, ...] | None]:
    """MadPipe-DP: the least period on the grid, with memory computed for the ``target`` period.

    Both in seconds; the period is infinite, without stages, if nothing fits. Grid and errors as in
    ``by_grid``.
    """
    _require_printed(question)
    form, tick = question.tables, question.tick
    period, placed = _madpipe_dp(
        GridPass(form, _raster(form, grid or Grid()), target / tick, math.inf)
    )
    return period * tick, question.stages(placed) if placed else None


class Raster(NamedTuple):
    """The grid: values per dimension, and the step between two of them, in ticks and bytes.

    ``crossing`` is C(l) between any two stages, shape (L + 1,).
    """

    loads: int
    memories: int
    delays: int
    load: float
    memory: float
    delay: float
    crossing: Floats


class GridPass(NamedTuple):
    """One pass of the program: memory for period ``target``, no period above ``ceiling``."""

    form: AllocationTables
    raster: Raster
    target: float
    ceiling: float


def _require_printed(question: StageAllocationProblem) -> None:
    form = question.tables
    if question.special is None:
        raise InputError("by_grid: special must name a group; the grid is for its load and memory")
    if question.recompute != ("none",):
        raise InputError(f"by_grid: recompute must be ('none',), got {question.recompute}")
    apart = [
        form.transfer[a, b]
        for a, b in np.ndindex(len(form.sort), len(form.sort))
        if a < b or (a != b and form.special in (a, b))
    ]
    even = len(set(form.sort)) == len(set(form.memory)) == 1 and len(question.groups[0]) == 1
    if not even or any(not np.array_equal(one, apart[0]) for one in apart):
        raise InputError("by_grid: groups must be single equal devices with equal links")


def _raster(form: AllocationTables, grid: Grid) -> Raster:
    crossing = form.transfer.max(axis=(0, 1)).astype(np.float64)
    everything = float(form.seconds[0, 0, -1, 0])
    return Raster(
        grid.loads,
        grid.memories,
        grid.delays,
        max(1.0, everything) / (grid.loads - 1),
        float(form.memory[0]) / (grid.memories - 1),
        max(1.0, everything + float(crossing.sum())) / (grid.delays - 1),
        crossing,
    )


def _madpipe_dp(at: GridPass) -> tuple[float, list[Placed]]:
    """T(L, P - 1, 0, 0, 0) and its allocation; infinite if it is above ``ceiling``."""
    form, raster = at.form, at.raster
    layers, groups = form.seconds.shape[-1] - 1, len(form.normal)
    size = (groups + 1) * raster.loads * raster.memories * raster.delays
    reached = np.zeros((layers + 1, size), dtype=np.bool_)
    periods = np.empty((layers + 1, size))
    state = groups * raster.loads * raster.memories * raster.delays
    _grid_reach(at, state, reached)
    _grid_solve(at, reached, periods)
    period, l = float(periods[layers, state]), layers
    found: list[Placed] = []
    while l > 0 and period < math.inf:
        p = state // (raster.loads * raster.memories * raster.delays)
        _, k, special, following = _grid_best(at, periods, l, state)
        group = form.special if special else int(form.normal[p - 1])
        found.append(Placed(k, l, group, 0))
        l, state = k, following
    return period, found[::-1]


@njit(cache=True)
def _grid_reach(at: GridPass, start: int, reached: NDArray[np.bool_]) -> None:
    """Mark the states that T(L, P - 1, 0, 0, 0) depends on."""
    layers = reached.shape[0] - 1
    reached[layers, start] = True
    for l in range(layers, 0, -1):
        states: Ints = np.flatnonzero(reached[l])
        for state in states:
            for k in range(l - 1, -1, -1):
                if at.form.seconds[0, 0, l, k] > at.ceiling:
                    break
                normal, special = _grid_stage(at, k, l, state)
                if normal >= 0:
                    reached[k, normal] = True
                if special >= 0:
                    reached[k, special] = True


@njit(cache=True)
def _grid_solve(at: GridPass, reached: NDArray[np.bool_], periods: Floats) -> None:
    """T of every marked state, in increasing order of layers."""
    states: Ints = np.flatnonzero(reached[0])
    for state in states:
        periods[0, state] = _grid_load(at.raster, state)
    for l in range(1, reached.shape[0]):
        asked: Ints = np.flatnonzero(reached[l])
        for state in asked:
            best = _grid_best(at, periods, l, state)
            periods[l, state] = best[0]


@njit(cache=True)
def _grid_load(raster: Raster, state: int) -> float:
    """The special load t_P of a state."""
    load: float = state // (raster.memories * raster.delays) % raster.loads * raster.load
    return load


@njit(cache=True)
def _grid_best(at: GridPass, periods: Floats, l: int, state: int) -> tuple[float, int, bool, int]:
    """T of a state, first layer k of its last stage, whether that is special, and the next state.

    The least of T_N(k) and T_S(k) over all k (MadPipe 4.2.2).
    """
    raster = at.raster
    best, first, is_special, following = np.inf, 0, True, 0
    for k in range(l - 1, -1, -1):
        seconds = at.form.seconds[0, 0, l, k]
        if seconds > at.ceiling:
            break
        normal, special = _grid_stage(at, k, l, state)
        if normal >= 0:
            period = max(seconds, raster.crossing[k], periods[k, normal])
            if period < best:
                best, first, is_special, following = period, k, False, normal
        if special >= 0:
            load = _grid_load(raster, state) + seconds
            period = max(load, raster.crossing[k], periods[k, special])
            if period < best:
                best, first, is_special, following = period, k, True, special
    return best, first, is_special, following


@njit(cache=True)
def _grid_stage(at: GridPass, k: int, l: int, state: int) -> tuple[int, int]:
    """The states after placing [k, l) on a normal group and on the special one; -1: infeasible.

    Without a normal group left (p = 0), the special one takes all layers.
    """
    form, raster, target, ceiling = at.form, at.raster, at.target, at.ceiling
    state, v = divmod(state, raster.delays)
    state, m = divmod(state, raster.memories)
    p, t = divmod(state, raster.loads)
    if raster.crossing[k] > ceiling or (p == 0 and k > 0):
        return -1, -1
    seconds, delay = form.seconds[0, 0, l, k], v * raster.delay
    flight = math.ceil((delay + seconds) / target - MARGIN)
    behind = _printed_add(_printed_add(delay, seconds, target), raster.crossing[k], target)
    v = min(_up(behind, raster.delay), raster.delays - 1)
    normal = special = -1
    static, saved = form.static[0, l, k], form.saved[0, 0, l, k]
    if p > 0 and static + flight * saved <= form.memory[0]:
        normal = ((p - 1) * raster.loads + t) * raster.memories + m
        normal = normal * raster.delays + v
    load = t * raster.load + seconds
    special_memory = _up(m * raster.memory + static + (flight - 1) * saved, raster.memory)
    if load <= ceiling and special_memory < raster.memories:
        t = min(_up(load, raster.load), raster.loads - 1)
        special = ((p * raster.loads + t) * raster.memories + special_memory) * raster.delays + v
    return normal, special


@njit(cache=True)
def _printed_add(delay: float, seconds: float, target: float) -> float:
    """V (+) y as printed (MadPipe 4.2.2)."""
    groups = math.ceil(delay / target - MARGIN)
    if groups == math.ceil((delay + seconds) / target - MARGIN):
        return delay + seconds
    return target * groups + seconds


@njit(cache=True)
def _up(value: float, step: float) -> int:
    """The index of the first grid value that is at least ``value``."""
    return math.ceil(value / step - MARGIN)
