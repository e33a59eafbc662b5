"""Sweeps: the plan of every combination of devices, memory, microbatches and planners."""

from collections.abc import Callable
from time import perf_counter

from stagewright.formulations.forms.answers import Status, StopToken, is_stopped
from stagewright.graphs.documents.errors import InputError
from stagewright.service.engines import results
from stagewright.service.sweep_requests import SweepAnswer, SweepRequest, SweepRow
from stagewright.service.sweep_rows import REFUSED, engine_of, pieces_of, row

OnRow = Callable[[SweepRow], None]


def require_planned(request: SweepRequest) -> None:
    """Refuse a sweep of which no planner takes any combination, for the reason of the first.

    Raises
    ------
    InputError
        As :func:`sweep`.
    """
    from stagewright.service.planning import require_supported

    refused: InputError | None = None
    for point in request.points:
        try:
            require_supported(point.request)
        except InputError as error:
            refused = refused or error
        else:
            return
    if refused is not None:
        raise refused


def sweep(
    request: SweepRequest, on_row: OnRow = lambda _: None, stop: StopToken | None = None
) -> SweepAnswer:
    """Plan all combinations; ``on_row`` is told of each when it is planned.

    After ``stop`` no further plan is begun, and those in flight end with their best so far (on Ray:
    are lost).

    Raises
    ------
    InputError
        If a planner refuses every combination, for the reason of the first; or Ray is not there.
    """
    require_planned(request)
    began = perf_counter()
    found: dict[int, SweepRow] = {}
    for number, one in results(pieces_of(request), engine_of(request), stop):
        found[number] = one
        on_row(one)
    rows = [
        found.get(number) or row(point, status=Status.INTERRUPTED.value)
        for number, point in enumerate(request.points)
    ]
    if all(one.status == REFUSED for one in rows):
        raise InputError(rows[0].reason)
    rates = {n: one.samples_per_second or 0.0 for n, one in enumerate(rows)}
    best = max(rates, key=rates.__getitem__)
    return SweepAnswer(
        status="interrupted" if is_stopped(stop) else "done",
        best=best if rates[best] else None,
        rows=tuple(rows),
        wall_seconds=perf_counter() - began,
    )
