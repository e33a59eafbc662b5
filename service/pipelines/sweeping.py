"""Sweeps: the plan of every combination of devices, memory, microbatches and planners."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from stagewright.formulations.forms.answers import Status, StopToken, is_stopped
from stagewright.graphs.documents.errors import InputError
from stagewright.service.engines import Engine, Pieces, results
from stagewright.service.pipelines.answers import PlanAnswer, StageAnswer
from stagewright.service.pipelines.sweep_requests import Point, SweepAnswer, SweepRequest, SweepRow

REFUSED = "refused"
FAILED = "failed"


def pieces_of(request: SweepRequest) -> Pieces[Point, SweepRow]:
    """The rows to find out."""
    return Pieces(request.points, _planned, _lost)


def engine_of(request: SweepRequest) -> Engine:
    """Where they are found out."""
    return Engine(request.engine, request.workers, request.address, request.threads)


def row(point: Point, **fields: Any) -> SweepRow:
    """A row with what distinguishes the point."""
    asked = point.request
    microbatches = asked.microbatches if asked.batch is None else None
    return SweepRow(**point.place, batch=asked.batch, **{"microbatches": microbatches} | fields)


def _planned(point: Point, stop: StopToken | None) -> SweepRow:
    from stagewright.service.pipelines.planning import plan

    try:
        return _answered(point, plan(point.request, stop=stop))
    except InputError as error:
        return row(point, status=REFUSED, reason=str(error))


def _answered(point: Point, answer: PlanAnswer) -> SweepRow:
    found = answer.plan
    sizes: dict[str, int] = {}
    if found is not None:
        size = found.microbatch_size or point.request.chain.microbatch_size
        sizes = {"microbatches": found.microbatches, "microbatch_size": size}
    samples = sizes["microbatches"] * sizes["microbatch_size"] if sizes else None
    cost = answer.cost_seconds
    names = ("cost_seconds", "bound_seconds", "gap", "proved_by", "peak_memory_bytes",
             "wall_seconds", "reason")  # fmt: skip
    plans = answer.result.plans
    return row(
        point,
        **sizes,
        **{name: getattr(answer, name) for name in names},
        status=answer.status.value,
        samples=samples,
        samples_per_second=samples / cost if samples and cost else None,
        plans=None if plans is None else f"{plans}{'' if found is None else found.of_sizes}",
        stages=None if answer.stages is None else len(answer.stages),
        replicas=None if answer.stages is None else _replicas(answer.stages),
    )


def _replicas(stages: Sequence[StageAnswer]) -> str:
    return "-".join(str(len(stage.devices) // stage.tensor) for stage in stages)


def _lost(point: Point, why: str) -> SweepRow:
    return row(point, status=FAILED, reason=why)


OnRow = Callable[[SweepRow], None]


def require_planned(request: SweepRequest) -> None:
    """Refuse a sweep of which no planner takes any combination, for the reason of the first.

    Raises
    ------
    InputError
        As :func:`sweep`.
    """
    from stagewright.service.pipelines.planning import require_supported

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
