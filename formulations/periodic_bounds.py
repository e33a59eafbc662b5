"""Periods that no periodic plan of a problem undercuts, by the work and by the memory it needs.

They hold for every partition, allocation and pattern in which all stages have ``size`` devices each
that split the microbatches.
"""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.pipeline import PipelineProblem
from stagewright.formulations.plan import Bound
from stagewright.formulations.plan_class import EVERY_PERIODIC, WHOLE_PERIODIC

Floats = NDArray[np.float64]

MARGIN = 1e-12

LOAD = "load of all devices"
LAYER = "longest layer"
REDUCTION = "largest all-reduce of a layer"
AVERAGE_MEMORY = "memory of all devices, averaged over the period"
LAYER_MEMORY = "microbatches in flight that 1F1B* keeps of one layer"

NAMES = (LOAD, LAYER, REDUCTION, AVERAGE_MEMORY, LAYER_MEMORY)


def iteration_seconds(problem: PipelineProblem, period: float) -> float:
    """What an iteration takes at least if its period is at least ``period``."""
    return period * problem.microbatches


def period_bounds(
    problem: PipelineProblem, size: int, recompute: tuple[str, ...] = ("none",)
) -> tuple[Bound, ...]:
    """Bounds on the period, in seconds, if every stage has ``size`` devices.

    ``recompute`` is what the stages may do; where that is anything but "none", the memory bounds
    are left out. Infinite if nothing fits.
    """
    work = fastest_work(problem, size)
    reductions = _least_reductions(problem, size)
    plans = replace(EVERY_PERIODIC, equal_groups=(size,))
    found = [
        Bound(size * float(work.sum()) / len(problem.cluster), LOAD, "problem", plans),
        Bound(float(work.max()), LAYER, "problem", plans),
        Bound(float(reductions.max()) / problem.microbatches, REDUCTION, "problem", plans),
    ]
    if recompute == ("none",):
        plans = replace(WHOLE_PERIODIC, equal_groups=(size,))
        average, layer = _average_memory(problem, size, work), _layer_memory(problem, size, work)
        found.append(Bound(average, AVERAGE_MEMORY, "problem", plans))
        found.append(Bound(layer, LAYER_MEMORY, "problem", plans))
    return tuple(found)


def fastest_work(problem: PipelineProblem, size: int) -> Floats:
    """Seconds of forward and backward per layer on ``size`` devices of its best kind, (L,)."""
    rows = [
        problem.costs(kind, size).forward_seconds + problem.costs(kind, size).backward_seconds
        for kind in problem.kinds
    ]
    return np.asarray(np.min(rows, axis=0))


def _least_reductions(problem: PipelineProblem, size: int) -> Floats:
    if size == 1:
        return np.zeros(len(problem.chain))
    bandwidth = problem.cluster.bandwidth[~np.eye(len(problem.cluster), dtype=bool)]
    return 2 * (size - 1) / size * problem.chain.parameter_bytes / float(bandwidth.max())


def _weights(problem: PipelineProblem, size: int) -> Floats:
    """Bytes that a device holds all the time for each of its layers, shape (L,).

    As `static_bytes` of :mod:`stagewright.formulations.pattern`, without the buffers.
    """
    gradients = 1 + (size > 1)
    states = 2 + gradients + problem.chain.optimizer_bytes_per_parameter_byte
    return problem.chain.parameter_bytes * states


def _average_memory(problem: PipelineProblem, size: int, work: Floats) -> float:
    """A layer's activations stay for all the work from its forward to its backward.

    Over a period, each layer keeps them for (sum of the work from it on) / T microbatches on
    average, and the devices' memory is at least that and the weights.
    """
    trips = np.cumsum(work[::-1])[::-1]
    kept = size * float(problem.saved_per_layer(size) @ trips)
    room = float(problem.memory_bytes.sum()) - size * float(_weights(problem, size).sum())
    if room <= 0:
        return math.inf
    return kept / room


def _layer_memory(problem: PipelineProblem, size: int, work: Floats) -> float:
    """A layer with a whole device to itself: T g is at least the work from it to the end."""
    trips = np.cumsum(work[::-1])[::-1]
    saved = problem.saved_per_layer(size)
    room = float(problem.memory_bytes.max()) - _weights(problem, size)
    most = np.full(len(saved), np.inf)
    # Room for exactly g of them must not be taken for less by rounding.
    np.divide(room * (1 + MARGIN), saved, out=most, where=saved > 0)
    if (room < 0).any() or (most < 1).any():
        return math.inf
    most = np.minimum(np.floor(most), problem.microbatches + 1)
    return float((trips / most).max())
