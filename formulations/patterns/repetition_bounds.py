"""Lower bounds on the period per microbatch that hold for repetitions of every length.

They bound the long-run average time per microbatch of any schedule, periodic or not: work per
microbatch, and what a room holds on average. A finite schedule can be shorter than its number of
microbatches times a memory bound, since rooms are empty at both ends.
"""

from typing import NamedTuple

from stagewright.formulations.patterns.repetition import RepetitionProblem, Room

LOAD = "load of a resource"
AREA = "amounts held, averaged over time"
COUNT = "microbatches in flight"

MARGIN = 1e-12  # relative: an amount that just fits must fit


class PaceBound(NamedTuple):
    """``seconds`` per microbatch, by the argument ``proved_by``.

    ``length``: it holds for repetitions of exactly so many microbatches; None: of any number.
    """

    seconds: float
    proved_by: str
    length: int | None = None


def pace_bounds(problem: RepetitionProblem) -> tuple[PaceBound, ...]:
    """The bounds of all arguments, the largest first."""
    loads = (sum(problem.seconds[i] for i in members) for members in problem.shared.values())
    found = [PaceBound(max(loads, default=0.0), LOAD)]
    if problem.rooms:
        found.append(PaceBound(max(_area(problem, room) for room in problem.rooms), AREA))
        found.append(PaceBound(max(_count(problem, room) for room in problem.rooms), COUNT))
    return tuple(sorted(found, reverse=True))


def held_seconds(problem: RepetitionProblem, first: int, last: int) -> float:
    """The least time that a holding lasts."""
    seconds = problem.path_seconds(first, last)
    assert seconds is not None  # checked by the problem
    return seconds


def _area(problem: RepetitionProblem, room: Room) -> float:
    """Per microbatch, amount times the least time that it is held, over the capacity."""
    area = sum(one.amount * held_seconds(problem, one.first, one.last) for one in room.holdings)
    return _quotient(area, room.capacity)


def _count(problem: RepetitionProblem, room: Room) -> float:
    """Least seconds per microbatch, since a capacity holds a whole number of microbatches."""
    found = 0.0
    for one in room.holdings:
        if one.amount > 0 and room.capacity < float("inf"):
            most = int(room.capacity / one.amount * (1 + MARGIN))
            found = max(found, _quotient(held_seconds(problem, one.first, one.last), most))
    return found


def _quotient(amount: float, capacity: float) -> float:
    if amount == 0:
        return 0.0
    return amount / capacity if capacity > 0 else float("inf")
