"""Tables of least memory and work of the layers before a stage, for pruning allocations.

The layers [0, l) are still to be placed, and the path from their forward through the later layers
to their backward takes at least a known delay. In 1F1B* (MadPipe section 4.1) the delay after a
stage is flight - 1 periods and a rest; (+) adds transfers and stages. It is rounded down to STEPS
values per period and to at most FLIGHTS microbatches, so the tables are relaxations. Every layer
takes its least time and bytes of any group, every transfer its least time.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from stagewright.formulations.patterns.joint_patterns import JointForm
from stagewright.graphs.documents.arrays import Floats, Ints

MARGIN = 1e-9  # relative; rounding must not refute a period that is just feasible
STEPS = 32  # delays per period
_FLIGHTS = 18
ROWS = STEPS * _FLIGHTS
UNITS = 64  # of the largest memory
_SHUFFLED = 4.0  # layers by which the order of starts may change


class Completion(NamedTuple):
    """Least needs of layers [0, l) after each delay, at a period or any shorter period.

    Attributes
    ----------
    period
        Seconds.
    unit
        The largest memory of a group, divided by ``UNITS``.
    starts
        The starts to try for a stage that ends before layer l and takes at most one period, in
        order; -1 after the last, shape (L + 1, L + 1).
    needed
        Least bytes, averaged over the period, on all groups together; shape (L + 1, ROWS).
    placeable
        The most work (seconds on the fastest groups) that one group can take with so many free
        units of memory, shape (L + 1, ROWS, UNITS + 1).
    """

    period: float
    unit: float
    starts: Ints
    needed: Floats
    placeable: Floats


class Cheapest(NamedTuple):
    """Least seconds and bytes over all groups of every stage, shape (R, L + 1, L + 1).

    ``work`` is infinite for no stage; ``working`` are byte-seconds per microbatch, ``peak`` the
    bytes of a backward, ``sends`` the least seconds of the transfers before each layer.
    """

    work: Floats
    static: Floats
    saved: Floats
    working: Floats
    peak: Floats
    sends: Floats


def completion(
    form: JointForm, period: float, noise: np.random.Generator | None = None
) -> Completion:
    """The tables of ``form`` for ``period``; longest stages come first, apart from ``noise``."""
    stages, memory = form.stages, float(form.groups["memory"].max())
    size = stages.shape[-1]
    below = np.tri(size, dtype=bool)
    backward = np.where(below, 0.0, stages["work"] - stages["forward"])
    working = stages["working"] * np.where(np.isfinite(backward), backward, 0.0)
    cheapest = Cheapest(
        work=np.where(below, np.inf, stages["work"].min(axis=0)),
        static=stages["static"].min(axis=0),
        saved=stages["saved"].min(axis=0),
        working=working.min(axis=0),
        peak=stages["working"].min(axis=0),
        sends=form.sends.min(axis=0),
    )
    ahead = np.ascontiguousarray(form.ahead["work"])
    starts = _starts(ahead, period, noise)
    needed, placeable = _tables(cheapest, ahead, period, memory)
    return Completion(period, memory / UNITS, starts, needed, placeable)


def _starts(ahead: Floats, period: float, noise: np.random.Generator | None) -> Ints:
    first = np.searchsorted(ahead, ahead - period * (1 + MARGIN))
    starts = np.full((len(ahead), len(ahead)), -1)
    for stop in range(1, len(ahead)):
        found = np.arange(first[stop], stop)
        if noise is not None:
            found = found[np.argsort(found + noise.uniform(0.0, _SHUFFLED, len(found)))]
        starts[stop, : len(found)] = found
    return starts


@njit(cache=True, error_model="numpy")
def delayed(flight: int, rest: float, seconds: float, limit: float) -> tuple[int, float]:
    """(+): the delay after ``seconds`` more; see `allocation_period.delayed`."""
    return (flight, rest + seconds) if rest + seconds <= limit else (flight + 1, seconds)


@njit(cache=True, error_model="numpy")
def row_of(flight: int, rest: float, period: float) -> int:
    """The row of the tables for a delay, rounded down."""
    step = min(STEPS - 1, int(rest / period * STEPS * (1 - MARGIN)))
    return min((flight - 1) * STEPS + step, ROWS - 1)


@njit(cache=True, error_model="numpy")
def _delay(row: int, period: float) -> tuple[int, float]:
    """The least delay of a row."""
    return row // STEPS + 1, row % STEPS * period / STEPS


@njit(cache=True, error_model="numpy")
def _shortest(ahead: Floats, period: float) -> Ints:
    """For each l the first row that can occur: no transfers, one layer after the other."""
    rows = np.zeros(len(ahead), dtype=np.int64)
    for l in range(len(ahead) - 2, -1, -1):
        flight, rest = _delay(rows[l + 1], period)
        flight, rest = delayed(flight, rest, ahead[l + 1] - ahead[l], period * (1 + MARGIN))
        rows[l] = row_of(flight, rest, period)
    return rows


@njit(cache=True, error_model="numpy")
def _tables(
    cheapest: Cheapest, ahead: Floats, period: float, memory: float
) -> tuple[Floats, Floats]:
    size, limit = len(ahead), period * (1 + MARGIN)
    needed = np.full((size, ROWS), np.inf)
    needed[0] = 0.0
    placeable = np.zeros((size, ROWS, UNITS + 1))
    shortest = _shortest(ahead, period)
    for stop in range(1, size):
        for row in range(shortest[stop], ROWS):
            flight, rest = _delay(row, period)
            # The last layer is on another group.
            one, part = delayed(flight, rest, ahead[stop] - ahead[stop - 1], limit)
            placeable[stop, row] = placeable[stop - 1, row_of(one, part, period)]
            if stop < size - 1:
                flight, rest = delayed(flight, rest, cheapest.sends[stop], limit)
            if stop == size - 1 or cheapest.sends[stop] <= limit:
                _place(cheapest, ahead, period, memory, stop, row, flight, rest, needed, placeable)
    return needed, placeable


@njit(cache=True, error_model="numpy")
def _place(
    cheapest: Cheapest, ahead: Floats, period: float, memory: float, stop: int, row: int,
    flight: int, rest: float, needed: Floats, placeable: Floats,
) -> None:  # fmt: skip
    """Try every stage that ends before layer ``stop``."""
    limit, unit = period * (1 + MARGIN), memory / UNITS
    for mode in range(len(cheapest.work)):
        for start in range(stop - 1, -1, -1):
            work = cheapest.work[mode, start, stop]
            if work > limit:
                break
            own, part = delayed(flight, rest, work, limit)
            static, saved = cheapest.static[mode, start, stop], cheapest.saved[mode, start, stop]
            if static + own * saved + cheapest.peak[mode, start, stop] > memory * (1 + MARGIN):
                continue
            average = static + (own - 1 + part / period) * saved
            average += cheapest.working[mode, start, stop] / period
            then = row_of(own, part, period)
            needed[stop, row] = min(needed[stop, row], average + needed[start, then])
            units = int(average / unit * (1 - MARGIN))
            seconds = ahead[stop] - ahead[start]
            for free in range(units, UNITS + 1):
                placed = seconds + placeable[start, then, free - units]
                placeable[stop, row, free] = max(placeable[stop, row, free], placed)
