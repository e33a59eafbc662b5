"""The pipeline's makespan problem for fixed stages (SPP section III-B2), in plain numbers.

Resources are stages, one half-duplex channel per pair of neighbouring stages, and one all-reduce
per stage that runs beside everything else. Microbatches are alike, so in some optimal schedule
every block processes them in the order of their indices: sorting the start times of a block
and handing the k-th start to microbatch k keeps every constraint.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.documents.units import (
    MAX_LAYERS,
    MAX_MICROBATCHES,
    require_amount,
    require_count,
)


@dataclass(frozen=True, slots=True)
class MakespanProblem:
    """Times in any one unit; S stages.

    ``forward``, ``backward`` and ``reduce`` have S entries (``reduce`` 0 for a stage that is not
    replicated); ``send_forward[s]`` and ``send_backward[s]`` are the transfer times from s to
    s + 1 and back, S - 1 entries. ``in_flight[s]`` bounds the microbatches whose forward has
    started and whose backward has not finished on stage s.
    """

    microbatches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    send_forward: tuple[float, ...]
    send_backward: tuple[float, ...]
    reduce: tuple[float, ...]
    in_flight: tuple[int, ...]

    def __post_init__(self) -> None:
        stages = len(self.forward)
        require_count(self.microbatches, "microbatches", MAX_MICROBATCHES)
        require_count(stages, "stages", MAX_LAYERS)
        for name, size in (
            ("forward", stages), ("backward", stages), ("send_forward", stages - 1),
            ("send_backward", stages - 1), ("reduce", stages), ("in_flight", stages),
        ):  # fmt: skip
            values = getattr(self, name)
            if len(values) != size:
                raise InputError(f"{name} needs {size} values, got {len(values)}")
            for s, value in enumerate(values):
                require_amount(value, f"{name}[{s}]")
        if min(self.in_flight) < 1:
            raise InputError(f"in_flight must be at least 1 everywhere, got {self.in_flight}")

    @property
    def stages(self) -> int:
        """Number of stages S."""
        return len(self.forward)

    def evaluate(self, timetable: "Timetable") -> float:
        """The makespan of ``timetable``, after every constraint was checked.

        Raises
        ------
        InvalidPlan
            Naming the first constraint that is broken.
        """
        tolerance = RELATIVE_TOLERANCE * max(timetable.makespan(self), 0.0)
        _require_order(self, timetable, tolerance)
        for s in range(self.stages):
            _require_exclusive(
                f"stage {s}",
                ("F", timetable.forward[s], self.forward[s]),
                ("B", timetable.backward[s], self.backward[s]),
                tolerance,
            )
            _require_in_flight(self, timetable, s, tolerance)
        for s in range(self.stages - 1):
            _require_exclusive(
                f"channel {s}-{s + 1}",
                ("SEND_F", timetable.send_forward[s], self.send_forward[s]),
                ("SEND_B", timetable.send_backward[s], self.send_backward[s]),
                tolerance,
            )
        return timetable.makespan(self)


@dataclass(frozen=True, slots=True, eq=False)
class Timetable:
    """Start times: ``forward`` and ``backward`` (S, M), sends (S - 1, M), ``reduce`` (S,).

    ``send_backward[s]`` is the transfer from stage s + 1 back to stage s.
    """

    forward: Floats
    backward: Floats
    send_forward: Floats
    send_backward: Floats
    reduce: Floats

    def makespan(self, problem: MakespanProblem) -> float:
        """When the last backward or all-reduce ends (SPP equation 2)."""
        computed = (self.backward + np.array(problem.backward)[:, None]).max()
        return float(max(computed, (self.reduce + np.array(problem.reduce)).max()))


def _require_order(problem: MakespanProblem, times: Timetable, tolerance: float) -> None:
    """Every block of a microbatch starts after the block before it (SPP's dependencies)."""
    last = problem.stages - 1
    steps = [("F", "B", last, times.forward[last], problem.forward[last], times.backward[last])]
    for s in range(last):
        there, back = times.send_forward[s], times.send_backward[s]
        steps += [
            ("F", "SEND_F", s, times.forward[s], problem.forward[s], there),
            ("SEND_F", "next F", s, there, problem.send_forward[s], times.forward[s + 1]),
            ("next B", "SEND_B", s, times.backward[s + 1], problem.backward[s + 1], back),
            ("SEND_B", "B", s, back, problem.send_backward[s], times.backward[s]),
        ]
    if not all(np.isfinite(start).all() and (start >= -tolerance).all() for *_, start in steps):
        raise InvalidPlan("a start time is negative or not finite")
    if not ((times.forward[0] >= -tolerance).all() and np.isfinite(times.reduce).all()):
        raise InvalidPlan("a start time is negative or not finite")
    for before, after, s, start, duration, following in steps:
        early = np.flatnonzero(following < start + duration - tolerance)
        if len(early):
            raise InvalidPlan(
                f"stage {s}, microbatch {early[0]}: {after} starts before {before} ends"
            )
    ends = times.backward.max(axis=1) + np.array(problem.backward)
    for s, end in enumerate(ends):
        if problem.reduce[s] > 0 and times.reduce[s] < end - tolerance:
            raise InvalidPlan(f"stage {s}: the all-reduce starts before the last backward ends")


def _require_exclusive(
    place: str, one: tuple[str, Floats, float], other: tuple[str, Floats, float], tolerance: float
) -> None:
    blocks = sorted(
        (float(start), float(start) + duration, f"{name}{m}")
        for name, starts, duration in (one, other)
        for m, start in enumerate(starts)
    )
    for (_, finish, name), (start, _, following) in pairwise(blocks):
        if start < finish - tolerance:
            raise InvalidPlan(f"{place}: {following} starts before {name} ends")


def _require_in_flight(
    problem: MakespanProblem, times: Timetable, s: int, tolerance: float
) -> None:
    starts = np.sort(times.forward[s])
    finished = np.sort(times.backward[s]) + problem.backward[s]
    in_flight = np.arange(1, len(starts) + 1) - np.searchsorted(
        finished, starts + tolerance, side="right"
    )
    if in_flight.max() > problem.in_flight[s]:
        raise InvalidPlan(
            f"stage {s}: {in_flight.max()} microbatches in flight, the limit is "
            f"{problem.in_flight[s]}"
        )
