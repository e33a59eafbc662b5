"""Sweeps: the plan of every combination of devices, memory, microbatches and planners."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from time import perf_counter
from typing import Annotated, Any, Literal, Self

from pydantic import model_validator

from stagewright.formulations.forms.answers import Status, StopToken, is_stopped
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import (
    MAX_DEVICES,
    MIN_MEMORY,
    parse_bytes,
    require_amount,
    require_count,
)
from stagewright.graphs.machines.cluster import Cluster, load_cluster
from stagewright.graphs.machines.parts import first_devices, with_memory
from stagewright.graphs.models.chain import Chain, load_model
from stagewright.service.answers import Answer, Finite
from stagewright.service.engines import Engine, Pieces, results
from stagewright.service.options import Option, itself, listed, whole
from stagewright.service.pipelines.answers import PlanAnswer, StageAnswer
from stagewright.service.pipelines.requests import PlanRequest, Recomputation
from stagewright.service.requests import SearchRequest

MOST_POINTS = 10_000


class SweepRequest(SearchRequest):
    """Plan every combination of the values that are listed; an empty list leaves what is given.

    ``time_limit``, ``threads`` and ``seed`` are of every plan.
    """

    chain: Annotated[Chain, Option("--model", form="FILE", of_file=load_model)]
    """Model file."""
    cluster: Annotated[Cluster, Option(form="FILE", of_file=load_cluster)]
    """Cluster file."""
    microbatches: Annotated[tuple[int, ...], Option(form="M,...", of_text=listed(whole))] = ()
    """Microbatches in an iteration."""
    batches: Annotated[
        tuple[int, ...], Option("--global-batch", form="N,...", of_text=listed(whole))
    ] = ()
    """Samples between two updates, in place of microbatches."""
    devices: Annotated[tuple[int, ...], Option(form="N,...", of_text=listed(whole))] = ()
    """Numbers of devices: the first ones of the cluster file; default: all."""
    memory_bytes: Annotated[
        tuple[float, ...], Option("--memory", form="SIZE,...", of_text=listed(parse_bytes))
    ] = ()
    """Memory of a device in place of the cluster file's, for example 16GB,40GB."""
    planners: Annotated[
        tuple[str, ...],
        Option("--planner", form="NAME,...", of_text=listed(itself), default="auto"),
    ] = ("auto",)
    """Of those that `stagewright planners` lists."""
    recompute: Annotated[Recomputation | None, Option(form="<none|full|layer|auto>")] = None
    """As of `stagewright plan`."""
    offload: bool | None = None
    """As of `stagewright plan`."""
    engine: Literal["local", "ray"] = "local"
    """Processes of this machine, or of a Ray cluster."""
    workers: Annotated[int | None, Option(form="N")] = None
    """With engine local: processes; default: one per core, at most one per plan."""
    address: str | None = None
    """With engine ray: address of the Ray cluster; default: Ray is started here."""

    @model_validator(mode="after")
    def _require_sense(self) -> Self:
        if bool(self.microbatches) == bool(self.batches):
            raise InputError("give one of microbatches and batches")
        for size in self.memory_bytes:
            require_amount(size, "memory_bytes")
            if size < MIN_MEMORY:
                raise InputError(f"memory_bytes must be at least 1 MB, got {size:g} bytes")
        if self.workers is not None:
            require_count(self.workers, "workers", MAX_DEVICES)
        if self.engine == "ray" and self.workers is not None:
            raise InputError("workers is for the engine local: Ray has its own")
        if self.engine == "local" and self.address is not None:
            raise InputError("address is for the engine ray")
        self._require_planners()
        _ = self.points
        return self

    def _require_planners(self) -> None:
        from stagewright.solvers.planning import PLANNERS

        for name in self.planners:
            if name not in PLANNERS:
                raise InputError(f"planners: {name!r} is none of {', '.join(PLANNERS)}")
        if not self.planners:
            raise InputError("planners is empty: name one, such as auto")

    @cached_property
    def points(self) -> "tuple[SweepPoint, ...]":
        """The combinations, each once, in the order of the lists; the last list changes fastest."""
        devices = dict.fromkeys(self.devices or (len(self.cluster),))
        memories: dict[float | None, None] = dict.fromkeys(self.memory_bytes or (None,))
        sizes = dict.fromkeys(self.microbatches or self.batches)
        planners = dict.fromkeys(self.planners)
        count = len(devices) * len(memories) * len(sizes) * len(planners)
        if count > MOST_POINTS:
            raise InputError(f"{count} plans are more than the most, {MOST_POINTS}")
        found = (self._point(*values) for values in product(devices, memories, sizes, planners))
        return tuple(found)

    def _point(self, devices: int, memory: float | None, size: int, planner: str) -> "SweepPoint":
        cluster = first_devices(self.cluster, devices)
        if memory is not None:
            cluster = with_memory(cluster, memory)
        sizes: dict[str, Any] = (
            {"microbatches": size} if self.microbatches else {"microbatches": 1, "batch": size}
        )
        request = PlanRequest.of(
            chain=self.chain,
            cluster=cluster,
            planner=planner,
            recompute=self.recompute,
            offload=self.offload,
            time_limit=self.time_limit,
            threads=self.threads,
            seed=self.seed,
            **sizes,
        )
        return SweepPoint(request, {"devices": devices, "memory_bytes": memory, "planner": planner})


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One request of a sweep; ``place`` has what distinguishes it."""

    request: PlanRequest
    place: Mapping[str, Any]


class SweepRow(Answer):
    """The plan of one combination.

    ``status`` is that of the planner; ``refused``: the planner does not take this combination;
    ``failed``: the process that computed it ended. ``memory_bytes`` None: the cluster's.
    ``cost_seconds`` is the time of an iteration of ``samples`` samples: ``microbatches`` of
    ``microbatch_size``, which the planner chose if there is a ``batch``. ``bound_seconds`` holds
    for all plans of the class ``plans`` for these microbatches (of a ``batch``: as the class says),
    on these devices. ``replicas``: devices of the stages in order, such as 2-1-1.
    """

    devices: int
    memory_bytes: Finite = None
    microbatches: int | None = None
    microbatch_size: int | None = None
    batch: int | None = None
    planner: str
    status: str
    cost_seconds: Finite = None
    samples: int | None = None
    samples_per_second: Finite = None
    bound_seconds: Finite = None
    gap: Finite = None
    proved_by: str | None = None
    plans: str | None = None
    stages: int | None = None
    replicas: str | None = None
    peak_memory_bytes: Finite = None
    wall_seconds: float = 0.0
    reason: str = ""


class SweepAnswer(Answer):
    """A row for every combination, in the order of the request.

    ``best`` is the number of the row with the most samples per second, None without a plan. Each
    row is certified on its own; nothing is claimed of sizes that were not asked for.
    ``status`` is ``done``, or ``interrupted`` if rows are missing their answer for that.
    """

    status: Literal["done", "interrupted"]
    best: int | None
    rows: tuple[SweepRow, ...]
    wall_seconds: float


REFUSED = "refused"
FAILED = "failed"


def pieces_of(request: SweepRequest) -> Pieces[SweepPoint, SweepRow]:
    """The combinations of a sweep to plan, and what is done with each."""
    return Pieces(request.points, _planned, _lost)


def engine_of(request: SweepRequest) -> Engine:
    """The engine that plans the rows of a sweep."""
    return Engine(request.engine, request.workers, request.address, request.threads)


def row(point: SweepPoint, **fields: Any) -> SweepRow:
    """The row of one combination."""
    asked = point.request
    microbatches = asked.microbatches if asked.batch is None else None
    return SweepRow(**point.place, batch=asked.batch, **{"microbatches": microbatches} | fields)


def _planned(point: SweepPoint, stop: StopToken | None) -> SweepRow:
    from stagewright.service.pipelines.planning import plan

    try:
        return _answered(point, plan(point.request, stop=stop))
    except InputError as error:
        return row(point, status=REFUSED, reason=str(error))


def _answered(point: SweepPoint, answer: PlanAnswer) -> SweepRow:
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
    of_sizes = "" if found is None else found.of_sizes
    if answer.result.sizes:
        of_sizes = ", in every size of microbatches"
    return row(
        point,
        **sizes,
        **{name: getattr(answer, name) for name in names},
        status=answer.status.value,
        samples=samples,
        samples_per_second=samples / cost if samples and cost else None,
        plans=None if plans is None else f"{plans}{of_sizes}",
        stages=None if answer.stages is None else len(answer.stages),
        replicas=None if answer.stages is None else _replicas(answer.stages),
    )


def _replicas(stages: Sequence[StageAnswer]) -> str:
    return "-".join(str(len(stage.devices) // stage.tensor) for stage in stages)


def _lost(point: SweepPoint, why: str) -> SweepRow:
    return row(point, status=FAILED, reason=why)


OnRow = Callable[[SweepRow], None]


def require_planned(request: SweepRequest) -> None:
    """Refuse a sweep of which no planner takes any combination, for the reason of the first."""
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
