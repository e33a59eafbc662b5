"""The rows of a sweep: each is the plan of one combination."""

from collections.abc import Sequence
from typing import Any

from stagewright.formulations.forms.answers import StopToken
from stagewright.graphs.documents.errors import InputError
from stagewright.service.engines import Engine, Pieces
from stagewright.service.pipeline_answers import PlanAnswer, StageAnswer
from stagewright.service.sweep_requests import Point, SweepRequest, SweepRow

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
    from stagewright.service.planning import plan

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
    return row(
        point,
        **sizes,
        status=answer.status.value,
        cost_seconds=cost,
        samples=samples,
        samples_per_second=samples / cost if samples and cost else None,
        bound_seconds=answer.bound_seconds,
        gap=answer.gap,
        proved_by=answer.proved_by,
        plans=None
        if answer.result.plans is None
        else f"{answer.result.plans}{'' if found is None else found.of_sizes}",
        stages=None if answer.stages is None else len(answer.stages),
        replicas=None if answer.stages is None else _replicas(answer.stages),
        peak_memory_bytes=answer.peak_memory_bytes,
        wall_seconds=answer.wall_seconds,
        reason=answer.reason,
    )


def _replicas(stages: Sequence[StageAnswer]) -> str:
    return "-".join(str(len(stage.devices) // stage.tensor) for stage in stages)


def _lost(point: Point, why: str) -> SweepRow:
    return row(point, status=FAILED, reason=why)
