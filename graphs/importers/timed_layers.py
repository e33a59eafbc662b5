"""Layers of a model as the script of ``anchor`` timed them on one server."""

import os
from typing import Literal

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_amount, require_count
from stagewright.graphs.machines.anchors import TimedLayer, TimedModel
from stagewright.graphs.machines.rates import RateSet
from stagewright.graphs.models.operations import MAX_SIZE


@documents.record
class TimedUpdate:
    """Seconds of the optimizer's step of so many parameters."""

    parameters: int
    seconds: float

    def __post_init__(self) -> None:
        require_count(self.parameters, "parameters", 1 << 40)
        require_amount(self.seconds, "seconds")


@documents.record
class TimedCollective:
    """Seconds of a collective of ``bytes`` (the whole) on a group of ranks of one server."""

    operation: Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]
    ranks: int
    bytes: int
    seconds: float

    def __post_init__(self) -> None:
        require_count(self.ranks, "ranks", MAX_SIZE)
        require_count(self.bytes, "bytes", 1 << 50)
        if not self.seconds > 0:
            raise InputError(f"seconds must be above 0, got {self.seconds:g}")


@documents.record
class TimedLayers:
    """The timings of a model's layers, the optimizer's step and a server's collectives.

    ``rates`` are those for what was not timed, ``through`` is the software whose layers were timed,
    ``skipped`` what had no room in memory or too few ranks, or is not the stack's.
    """

    model: TimedModel
    rates: RateSet
    stack: str
    machine: str
    through: str
    layers: tuple[TimedLayer, ...]
    update: TimedUpdate
    collectives: tuple[TimedCollective, ...] = ()
    skipped: tuple[str, ...] = ()
    format: Literal["stagewright-timed-layers"] = "stagewright-timed-layers"
    version: Literal[1] = 1


def read_timed_layers(path: str | os.PathLike[str]) -> TimedLayers:
    """The timings at ``path``; InputError, in one line, if they are not valid."""
    return documents.read(TimedLayers, path)
