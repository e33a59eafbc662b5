"""Requests and answers of sweeps: the plans of many combinations of sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Annotated, Any, Literal, Self

from pydantic import model_validator

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
from stagewright.service.options import Option, itself, listed, whole
from stagewright.service.pipelines.requests import PlanRequest, Recomputation
from stagewright.service.requests import Search

MOST_POINTS = 10_000


class SweepRequest(Search):
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
    """Samples between two updates, in place of microbatches, for planners 2bw and 2bw-flush."""
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
    def points(self) -> "tuple[Point, ...]":
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

    def _point(self, devices: int, memory: float | None, size: int, planner: str) -> "Point":
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
        return Point(request, {"devices": devices, "memory_bytes": memory, "planner": planner})


@dataclass(frozen=True, slots=True)
class Point:
    """One request of a sweep; ``place`` has what distinguishes it."""

    request: PlanRequest
    place: Mapping[str, Any]


class SweepRow(Answer):
    """The plan of one combination.

    ``status`` is that of the planner; ``refused``: the planner does not take this combination;
    ``failed``: the process that computed it ended. ``memory_bytes`` None: the cluster's.
    ``cost_seconds`` is the time of an iteration of ``samples`` samples: ``microbatches`` of
    ``microbatch_size``, which the planner chose if there is a ``batch``. ``bound_seconds`` holds
    for all plans of the class ``plans`` for these microbatches, on these devices. ``replicas``:
    devices of the stages in order, such as 2-1-1.
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
