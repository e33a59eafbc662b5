"""Plans of Sailor with their measured iteration (code eth-easl/sailor, simulations/validation)."""

import os
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError

_Count = Annotated[int, Field(ge=1)]
_Server = tuple[str, _Count, str]  # device kind, devices, zone
_Group = tuple[Annotated[list[_Server], Field(min_length=1)], _Count]  # servers, tensor degree


class _Pipeline(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    num_stages: _Count
    layers_per_stage: list[Annotated[list[int], Field(min_length=1)]]
    tmp_per_stage: list[Annotated[list[_Group], Field(min_length=1)]]
    dp: list[_Count]


class _File(BaseModel):
    """``red_grads`` (seconds of a rank's reduction) and ``N`` (servers) are not used."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    pipeline_list: Annotated[list[_Pipeline], Field(min_length=1, max_length=1)]
    mbs: _Count
    gbs: _Count
    real: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_mem: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


@dataclass(frozen=True, slots=True)
class SailorGroup:
    """A tensor group: ``tensor`` devices of a server."""

    device_kind: str
    zone: str
    tensor: int


@dataclass(frozen=True, slots=True)
class SailorPlan:
    """Layers of each stage, their groups (one per replica), and what was measured.

    ``batch`` and ``microbatch_size`` are in samples; ``seconds`` of an iteration; ``peak_bytes``
    are the most that any device used, as its driver reports.
    """

    layers: tuple[int, ...]
    groups: tuple[tuple[SailorGroup, ...], ...]
    microbatch_size: int
    batch: int
    seconds: float | None
    peak_bytes: float | None


def read_sailor_plan(path: str | os.PathLike[str]) -> SailorPlan:
    """A plan whose pipelines have equal stages.

    Raises
    ------
    InputError
        One line with the file and the field.
    """
    try:
        found = _File.model_validate_json(documents.read_text(path))
    except ValidationError as error:
        raise InputError(f"{path}: {documents.first_problem(error)}") from None
    pipeline = found.pipeline_list[0]
    counts = {len(pipeline.layers_per_stage), len(pipeline.tmp_per_stage), len(pipeline.dp)}
    if counts != {pipeline.num_stages}:
        raise InputError(
            f"{path}: pipeline_list.0: num_stages is {pipeline.num_stages}, the lists have "
            f"{sorted(counts)} stages"
        )
    order = [layer for stage in pipeline.layers_per_stage for layer in stage]
    if order != list(range(len(order))):
        raise InputError(f"{path}: pipeline_list.0.layers_per_stage: layers are not 0, 1, 2, ...")
    return SailorPlan(
        tuple(map(len, pipeline.layers_per_stage)),
        tuple(_groups(path, s, stage) for s, stage in enumerate(pipeline.tmp_per_stage)),
        found.mbs,
        found.gbs,
        found.real,
        found.max_mem,
    )


def _groups(
    path: str | os.PathLike[str], stage: int, groups: list[_Group]
) -> tuple[SailorGroup, ...]:
    found = []
    for number, (servers, tensor) in enumerate(groups):
        place = f"{path}: pipeline_list.0.tmp_per_stage.{stage}.{number}"
        if len(servers) > 1:
            raise InputError(f"{place}: a tensor group in {len(servers)} servers; one is read")
        kind, devices, zone = servers[0]
        if tensor > devices:
            raise InputError(f"{place}: tensor degree {tensor} on {devices} devices")
        found.append(SailorGroup(kind, zone, tensor))
    return tuple(found)
