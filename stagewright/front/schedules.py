"""Schedules of given stages, and job shops, for users of Python."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stagewright.formulations.forms.answers import StopToken
from stagewright.front import fields_of
from stagewright.service.schedules.requests import (
    CompareSchedulesRequest,
    JobShopRequest,
    ScheduleRequest,
)

if TYPE_CHECKING:
    from stagewright.service.schedules.requests import (
        JobShopAnswer,
        ScheduleAnswer,
        ScheduleComparison,
    )


def schedule(
    microbatches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    *,
    transfers: Sequence[float] = (),
    in_flight: Sequence[int] = (),
    device: Sequence[int] = (),
    weight_gradient: Sequence[float] = (),
    kind: str = "optimal",
    chunks: int | None = None,
    placement: str | None = None,
    replicas: Sequence[int] = (),
    saved: Sequence[float] = (),
    freed: Sequence[float] = (),
    memory: Sequence[float] = (),
    duplex: str = "half",
    objective: str = "makespan",
    makespan_limit: float | None = None,
    time_limit: float = 10.0,
    threads: int = 1,
    seed: int = 0,
    backend: str | None = None,
    stop: StopToken | None = None,
) -> "ScheduleAnswer":
    """Schedule a pipeline of stages with given times.

    Parameters
    ----------
    forward, backward
        Times of each stage, in any unit.
    transfers
        Times of each channel between neighbouring stages (chunks), or one for all; empty: none
        takes time.
    in_flight
        Maximum number of microbatches in flight on each stage; empty: no limit.
    device
        Device of each stage, numbered in the order of their first stages; empty: one per stage.
        Every pair of neighbouring stages on two devices has its own channel.
    weight_gradient
        Times of each stage's weight gradient; ``backward`` is the input gradient then. Empty:
        backwards are whole.
    kind
        ``gpipe``, ``1f1b``, ``pe``, a published schedule (``stagewright schedule --help`` lists
        them), or the ``optimal`` one.
    chunks
        Divide every stage into that many equal parts, on its device or on all devices in turn as
        the kind places them. None: 2 where the kind has chunks.
    placement
        Where the chunks of the kinds ``pe`` and ``optimal`` are: ``line``, ``loop``, ``V`` or
        ``wave``; for ``optimal`` also the best of them (``any``), or on any device (``free``), with
        a stage's chunks in sequence.
    replicas
        Devices of each stage for the kind ``1f1b-rr``: its copies take microbatches in turn.
    saved, freed
        What a forward of each stage adds to the memory of its device, in any unit, and what its
        input gradient gives back; the rest is for the weight gradient. Empty: 1 and 0.
    memory
        Limit on that memory of each device, or one for all; empty: none.
    objective
        What bound, gap and status are of, and what the optimal schedule minimises: ``makespan``,
        ``span`` or ``memory``.
    makespan_limit
        With the objective ``memory``: the optimal schedule takes at most this.
    duplex
        Whether the two directions of a channel share it (``half``) or not (``full``).
    backend
        Solver of the optimal schedule (default: CP-SAT).
    """
    fields = fields_of(locals(), "stop")
    from stagewright.service.schedules.scheduling import schedule as answer

    return answer(ScheduleRequest.of(**fields), stop=stop)


def compare_schedules(
    microbatches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    *,
    transfers: Sequence[float] = (),
    in_flight: Sequence[int] = (),
    device: Sequence[int] = (),
    weight_gradient: Sequence[float] = (),
    chunks: int | None = None,
    saved: Sequence[float] = (),
    freed: Sequence[float] = (),
    memory: Sequence[float] = (),
    duplex: str = "half",
    objective: str = "makespan",
    time_limit: float = 10.0,
    threads: int = 1,
    seed: int = 0,
    backend: str | None = None,
    stop: StopToken | None = None,
) -> "ScheduleComparison":
    """All schedules that fit a pipeline, the best first, with the optimum of every placement.

    The parameters are those of :func:`schedule`; the optima share the time limit.
    """
    fields = fields_of(locals(), "stop")
    from stagewright.service.schedules.comparing import compare_schedules as answer

    return answer(CompareSchedulesRequest.of(**fields), stop=stop)


def jobshop(
    jobs: Sequence[Sequence[tuple[int, int] | Sequence[tuple[int, int]]]],
    *,
    time_limit: float = 10.0,
    threads: int = 1,
    seed: int = 0,
    backend: str | None = None,
    stop: StopToken | None = None,
) -> "JobShopAnswer":
    """Minimise the makespan of jobs that visit machines in given orders.

    Parameters
    ----------
    jobs
        The steps of each job in their order, as (machine, duration); a step of a flexible job shop
        as a list of those, of which one is chosen.
    backend
        Solver (default: CP-SAT).

    Examples
    --------
    >>> jobshop([[(0, 3), (1, 2)], [(1, 2), (0, 4)]]).makespan
    7
    >>> jobshop([[[(0, 3), (1, 5)]], [(0, 4)]]).chosen_machines
    ((1,), (0,))
    """
    fields = fields_of(locals(), "stop")
    from stagewright.service.schedules.scheduling import jobshop as answer

    return answer(JobShopRequest.of(**fields), stop=stop)
