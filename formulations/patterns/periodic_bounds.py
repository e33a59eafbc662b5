"""Lower bounds on the iteration of periodic plans, from work, memory, all-reduces and updates.

They hold for every partition, allocation and pattern in which every stage has ``size`` devices
that split the microbatches. An iteration takes m periods and a pause; a bound on the period and a
bound on the pause add up.
"""

import math
from dataclasses import replace

import numpy as np

from stagewright.formulations.plans.actions import DOUBLE_BUFFER
from stagewright.formulations.plans.memory import state_factor
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound
from stagewright.formulations.plans.plan_class import EVERY_PERIODIC, WHOLE_PERIODIC
from stagewright.formulations.prices.collectives import ring_seconds
from stagewright.graphs.documents.arrays import Floats

MARGIN = 1e-12

LOAD = "load of all devices"
LAYER = "longest layer"
_REDUCTION = "largest all-reduce of a layer"
_REDUCTIONS = "all-reduces of all devices"
_AVERAGE_MEMORY = "memory of all devices, averaged over the period"
_LAYER_MEMORY = "microbatches in flight that 1F1B* keeps of one layer"

NAMES = (LOAD, LAYER, _REDUCTION, _REDUCTIONS, _AVERAGE_MEMORY, _LAYER_MEMORY)


def iteration_bounds(
    problem: PipelineProblem, size: int, recompute: tuple[str, ...] = ("none",)
) -> tuple[Bound, ...]:
    """Bounds on the iteration, in seconds, if every stage has ``size`` devices.

    ``recompute`` lists the allowed memory modes of the stages; unless it is "none" only, the memory
    bounds are left out. A bound is infinite if no plan fits in memory.
    """
    work = fastest_work(problem, size)
    periods = [(name, one, EVERY_PERIODIC) for name, one in work_periods(problem, size).items()]
    if recompute == ("none",):
        periods += [
            (_AVERAGE_MEMORY, _average_memory(problem, size, work), WHOLE_PERIODIC),
            (_LAYER_MEMORY, _layer_memory(problem, size, work), WHOLE_PERIODIC),
        ]
    pause, reductions = least_pause(problem, size), _least_reductions(problem, size)
    found = [
        (name, problem.microbatches * period + pause, plans) for name, period, plans in periods
    ]
    # All-reduces may overlap with the pause.
    found += [
        (_REDUCTION, float(reductions.max()), EVERY_PERIODIC),
        (_REDUCTIONS, size * float(reductions.sum()) / len(problem.cluster), EVERY_PERIODIC),
    ]
    return tuple(
        Bound(seconds, name, "problem", replace(plans, equal_groups=(size,)))
        for name, seconds, plans in found
    )


def work_periods(problem: PipelineProblem, size: int) -> dict[str, float]:
    """Lower bounds on the period from work, by name of the argument."""
    work = fastest_work(problem, size)
    return {LOAD: size * float(work.sum()) / len(problem.cluster), LAYER: float(work.max())}


def least_pause(problem: PipelineProblem, size: int) -> float:
    """A lower bound on the longest time of an iteration's updates on a device.

    Every layer is updated on ``size`` devices.
    """
    updates = np.min([problem.update_per_layer(kind) for kind in problem.kinds], axis=0)
    return max(size * float(updates.sum()) / len(problem.cluster), float(updates.max()))


def fastest_work(problem: PipelineProblem, size: int) -> Floats:
    """Seconds of forward and backward per layer on ``size`` devices of its best kind, (L,)."""
    rows = [
        problem.costs(kind, size).forward_seconds + problem.least_backward(kind, size)[1]
        for kind in problem.kinds
    ]
    return np.asarray(np.min(rows, axis=0))


def _least_reductions(problem: PipelineProblem, size: int) -> Floats:
    if size == 1:
        return np.zeros(len(problem.chain))
    best, slowdown = problem.cluster.pairs.bandwidths()[-1], problem.cluster.all_reduce_slowdown
    return 2 * ring_seconds(size, problem.chain.parameter_bytes, float(best), slowdown=slowdown)


def _weights(problem: PipelineProblem, size: int) -> Floats:
    """Resident bytes of each layer on a device, shape (L,).

    As ``pattern_problems.static_bytes``, without the buffers.
    """
    factor = state_factor(problem, size, DOUBLE_BUFFER, overlapping=True)
    return problem.chain.parameter_bytes * factor


def _average_memory(problem: PipelineProblem, size: int, work: Floats) -> float:
    """A layer keeps its activations during all the work between its forward and its backward.

    On average over a period, each layer keeps (sum of the work from it on) / T microbatches. The
    total memory must hold these and the weights.
    """
    trips = np.cumsum(work[::-1])[::-1]
    kept = size * float(problem.saved_per_layer(size) @ trips)
    memory = float(problem.memory_bytes.sum()) * (1 + MARGIN)
    room = memory - size * float(_weights(problem, size).sum())
    return kept / room if room > 0 else math.inf


def _layer_memory(problem: PipelineProblem, size: int, work: Floats) -> float:
    """A layer with a device to itself: T g is at least the work from the layer to the end."""
    trips = np.cumsum(work[::-1])[::-1]
    saved = problem.saved_per_layer(size)
    # Rounding must not reduce a memory for exactly g microbatches to g - 1.
    room = float(problem.memory_bytes.max()) * (1 + MARGIN) - _weights(problem, size)
    most = np.full(len(saved), np.inf)
    np.divide(room * (1 + MARGIN), saved, out=most, where=saved > 0)
    if (room < 0).any() or (most < 1).any():
        return math.inf
    most = np.minimum(np.floor(most), problem.microbatches + 1)
    return float((trips / most).max())
