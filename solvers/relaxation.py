"""The bound of :mod:`stagewright.formulations.relaxation`, by bisection over a dynamic program."""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stagewright.formulations.pipeline import PipelineProblem
from stagewright.formulations.relaxation import Relaxation, relax
from stagewright.formulations.spp import cheapest_work

Floats = NDArray[np.float64]

PRECISION = 1e-3  # relative width at which the bisection stops
STEPS = 2e9  # pairs of states beyond which only the load is looked at
MARGIN = 1e-9


def load_bound(problem: PipelineProblem) -> float:
    """All devices together do at least this much per iteration: M sum(work) / V."""
    total = float(cheapest_work(problem).sum())
    return problem.microbatches * total / len(problem.cluster)


def fill_and_drain_bound(problem: PipelineProblem, incumbent: float) -> float:
    """A time that no plan undercuts, up to ``incumbent`` (any known plan's time).

    Proved by the relaxation for every number of stages, replication and order at once; the load
    bound where the tables would be too large.
    """
    low = load_bound(problem)
    layers, size = len(problem.chain), len(problem.cluster)
    if (layers * size) ** 2 / 4 > STEPS or low >= incumbent:
        return low
    form = relax(problem)
    if not _fits_under(form, size, incumbent):
        return incumbent
    high = incumbent
    while high > low * (1 + PRECISION):
        middle = (low + high) / 2
        if _fits_under(form, size, middle):
            high = middle
        else:
            low = middle
    return low


def is_fill_and_drain_bound(problem: PipelineProblem, seconds: float) -> bool:
    """Whether the relaxation proves that no plan takes less than ``seconds``."""
    if seconds <= load_bound(problem):
        return True
    layers, size = len(problem.chain), len(problem.cluster)
    if (layers * size) ** 2 / 4 > STEPS:
        return False
    return not _fits_under(relax(problem), size, seconds)


@njit(cache=True, error_model="numpy")
def _fits_under(form: Relaxation, size: int, limit: float) -> bool:
    """Whether some relaxed plan on ``size`` devices lasts no longer than ``limit``, rounding aside.

    way[i, l] is the least time there and back through stages that hold the first l layers on i
    devices, there[i, l] the least time there alone; both are kept apart, which only relaxes more.
    """
    layers, replicas = form.forward.shape[1] - 1, form.forward.shape[0] - 1
    way = np.full((size + 1, layers + 1), np.inf)
    there = np.full((size + 1, layers + 1), np.inf)
    way[0, 0] = there[0, 0] = 0.0
    for used in range(size):
        for r in range(1, min(size - used, replicas) + 1):
            for before in range(layers):
                if way[used, before] < np.inf:
                    _place(form, limit * (1 + MARGIN), used, r, before, way, there)
    return bool(np.isfinite(way[:, layers]).any())


@njit(cache=True, error_model="numpy")
def _place(
    form: Relaxation, limit: float, used: int, r: int, before: int, way: Floats, there: Floats
) -> None:
    """Every stage that starts behind layer ``before`` on r devices and stays under the limit."""
    M = form.microbatches
    # The channel in front: at best every device used so far sends.
    once = 0.0
    if used > 0:
        share = -(-form.samples // (r * used)) / form.samples
        once = form.boundary[before] * share * form.pace + form.delay
    if 2 * M * once + there[used, before] > limit:
        return
    head, forth = way[used, before] + 2 * once, there[used, before] + once
    ring = 2.0 * (r - 1) / r * form.pace
    ring_delay = 2.0 * (r - 1) * form.delay
    for l in range(before + 1, way.shape[1]):
        f = form.forward[r, l] - form.forward[r, before]
        x = f + form.backward[r, l] - form.backward[r, before]
        weights = form.parameters[l] - form.parameters[before]
        finish = ring * weights + ring_delay + form.update[l] - form.update[before]
        saved = form.saved[r, l] - form.saved[r, before]
        if (
            head + M * x > limit
            or forth + M * x + finish > limit
            or form.first[r, l] > before
            or form.state_factor * weights + saved > form.memory
        ):
            return
        way[used + r, l] = min(way[used + r, l], head + x)
        there[used + r, l] = min(there[used + r, l], forth + f)
