"""Times as integers: a common unit where there is one, else fine ticks, rounded down."""

import math
from fractions import Fraction

import numpy as np

from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Floats

TICKS = 24  # log2 of the horizon for times without a common unit; finer ticks slow the proofs
_MAX_TICKS = 2**40  # times with a common unit are taken exactly up to this horizon
_MAX_DENOMINATOR = 10_000  # of a time as a fraction of the least time
SHARES = 2.0**40  # integers in a memory
EXACT = 1e-12  # relative error of a time that still counts as a multiple of the unit


def exact_unit(values: Floats, most: float) -> float | None:
    """1 for integers, else the common unit of ``values``; None without one that is large enough."""
    positive = values[values > 0]
    if len(positive) == 0:
        return 1.0
    for unit in (1.0, _common_unit(positive)):
        if most <= _MAX_TICKS * unit and are_multiples(positive, unit):
            return unit
    return None


def tick(times: Floats, horizon: float) -> float:
    """Time per tick: the exact unit, else a power of two that gives ``TICKS`` bits."""
    unit = exact_unit(times, horizon)
    return math.ldexp(1.0, math.frexp(horizon)[1] - TICKS) if unit is None else unit


def in_ticks(times: Floats, unit: float) -> Floats:
    """``times`` in ticks, rounded down unless they are multiples of ``unit``."""
    ticks = times / unit
    nearest = np.round(ticks)
    multiple = np.abs(ticks - nearest) <= EXACT * nearest
    return np.where(multiple, nearest, np.floor(ticks))


def lost_seconds(times: Floats, unit: float) -> Floats:
    """Seconds that each of ``times`` loses by rounding to ticks; 0 for multiples of ``unit``."""
    return np.maximum(times - in_ticks(times, unit) * unit, 0.0)


def memory_shares(held: Floats, memory: float) -> tuple[list[int], int]:
    """Bytes as integers (shares of memory), and the memory as such an integer.

    They are rounded down, and the tolerance of memory is added: what fits is not lost. What is too
    large stays so.
    """
    shares = np.minimum(held / memory, 2.0) if memory else np.where(held > 0, 2.0, 0.0)
    room = SHARES * (1 + RELATIVE_TOLERANCE) if memory else 0.0
    return np.floor(shares * SHARES).astype(np.int64).tolist(), int(room)


def _common_unit(times: Floats) -> float:
    """The largest unit of which all ``times`` are multiples, estimated from their ratios.

    If that unit would be too small to be used, any other unit that is too small.
    """
    least = float(times.min())
    ratios = [Fraction(time / least).limit_denominator(_MAX_DENOMINATOR) for time in times.tolist()]
    return least / min(math.lcm(*(ratio.denominator for ratio in ratios)), 2 * _MAX_TICKS)


def are_multiples(times: Floats, unit: float) -> bool:
    """Whether all ``times`` are multiples of ``unit``."""
    ticks = times / unit
    return bool((np.abs(ticks - np.round(ticks)) <= EXACT * ticks).all())
