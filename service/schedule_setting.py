"""Stages, devices, chunks, times and memory of a schedule, from what a request says of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal

from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.schedules.kinds import KINDS, ScheduleKind, Sizes, require_chunks
from stagewright.formulations.schedules.memory import ActivationMemory
from stagewright.formulations.schedules.placements import Device, both_directions, line, placed
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_amount

if TYPE_CHECKING:
    from stagewright.service.pipeline_requests import ScheduleRequest

OPTIMAL: Final = "optimal"
RULES: tuple[Literal["gpipe", "1f1b", "pe"], ...] = ("gpipe", "1f1b", "pe")
"""Kinds that are list schedules for any devices and in-flight limits."""

SCHEDULES = tuple(dict.fromkeys((*RULES, *KINDS, OPTIMAL)))
"""The kinds of schedule that a request may name."""

USUAL_CHUNKS = 2
"""Chunks of a stage where a kind allows several and none are asked for."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is scheduled, with every stage divided into its chunks.

    Attributes
    ----------
    placement
        Where the chunks are, in words.
    chunks
        Chunks per device; None if devices have different numbers of them.
    paths
        The device of each chunk; two for schedules in both directions.
    problem
        The times, transfers and in-flight limits, with the devices of the first path.
    memory
        What microbatches occupy, and the limits of the devices; infinite where there are none.
    """

    placement: str
    chunks: int | None
    paths: tuple[Device, ...]
    problem: MakespanProblem
    memory: ActivationMemory

    @property
    def devices(self) -> int:
        """Number of devices."""
        return 1 + max(self.paths[0])


def setting_of(asked: "ScheduleRequest") -> Setting:
    """The setting of a request.

    Raises
    ------
    InputError
        If there is none; the message begins with a field of the request.
    """
    _require_kind(asked)
    _require_sizes(asked)
    placement, chunks, paths = _given(asked) if asked.device else _chosen(asked)
    problem = _problem(asked, paths[0])
    setting = Setting(placement, chunks, paths, problem, _memory(asked, paths[0]))
    if asked.memory:
        for path in paths:
            setting.memory.require_room(path)
    return setting


def published(name: str) -> ScheduleKind | None:
    """The published kind that a generator makes; None for list schedules and the optimum."""
    return None if name in RULES else KINDS.get(name)


def _require_kind(asked: "ScheduleRequest") -> None:
    if asked.kind not in SCHEDULES:
        raise InputError(f"kind {asked.kind!r} is none of {', '.join(SCHEDULES)}")
    kind = published(asked.kind)
    if kind is not None and kind.is_split and not asked.weight_gradient:
        raise InputError(f"weight_gradient is needed: {asked.kind} splits backwards (F,I,W)")
    if asked.kind == OPTIMAL and asked.memory:
        raise InputError(
            "memory cannot limit kind optimal yet: limit its microbatches in flight, or name "
            "another kind"
        )
    if asked.kind == OPTIMAL and asked.objective != "makespan":
        raise InputError(
            f"objective {asked.objective} is not possible with kind optimal yet, which minimises "
            "the makespan; other kinds take it"
        )


def _require_sizes(asked: "ScheduleRequest") -> None:
    """Refuse lists of other lengths than the stages."""
    stages = len(asked.forward)
    for name in ("backward", "weight_gradient", "in_flight", "saved", "freed", "device"):
        size = len(getattr(asked, name))
        if size != stages and (size or name == "backward"):
            raise InputError(f"{name} needs {stages} values, got {size}")


_Placed = tuple[str, int | None, tuple[Device, ...]]


def _given(asked: "ScheduleRequest") -> _Placed:
    """The devices that the request gives; a published kind must have its own."""
    if asked.chunks is not None or asked.placement is not None:
        name = "placement" if asked.chunks is None else "chunks"
        raise InputError(f"{name} must be left out if the device of every stage is given")
    ranks = 1 + max(asked.device)
    chunks = len(asked.device) // ranks if len(asked.device) % ranks == 0 else None
    kind = published(asked.kind)
    if kind is not None:
        if chunks is None:
            raise InputError(f"device must have as many stages of {asked.kind} everywhere")
        require_chunks(asked.kind, chunks)
        (wanted, *others) = _paths(kind.placement, ranks, chunks)
        if others or wanted != asked.device:
            text = "two per stage" if others else ",".join(map(str, wanted))
            raise InputError(f"device must be left out: {asked.kind} has its own, {text}")
    return "given", chunks, (asked.device,)


def _chosen(asked: "ScheduleRequest") -> _Placed:
    """The devices of the kind or placement that the request names."""
    devices = max(1, len(asked.forward))
    if asked.kind not in KINDS:
        placement, chunks = _free_placement(asked)
        return placement, chunks, _paths(placement, devices, chunks)
    kind = KINDS[asked.kind]
    usual = kind.chunks.step if kind.chunks.fixed else USUAL_CHUNKS
    chunks = usual if asked.chunks is None else asked.chunks
    require_chunks(asked.kind, chunks)
    if asked.placement not in (None, kind.placement):
        raise InputError(
            f"placement of {asked.kind} is {kind.placement}, got {asked.placement}: leave it out"
        )
    return kind.placement, chunks, _paths(kind.placement, devices, chunks)


def _free_placement(asked: "ScheduleRequest") -> tuple[str, int]:
    """Placement and chunks of kinds that take any."""
    if asked.placement is None:
        if asked.chunks not in (None, 1):
            raise InputError(
                f"placement must be given for {asked.kind} with chunks: loop, V or wave; choosing "
                "it is not possible yet"
            )
        return "line", 1
    usual = 1 if asked.placement == "line" else USUAL_CHUNKS
    return asked.placement, usual if asked.chunks is None else asked.chunks


def _paths(placement: str, devices: int, chunks: int) -> tuple[Device, ...]:
    if placement == "both directions":
        return both_directions(devices)
    if placement == "replicated line":
        return (line(devices),)
    return (placed(placement, devices, chunks),)


def _spread(asked: "ScheduleRequest", values: Sequence[float], path: Device) -> tuple[float, ...]:
    """Values of stages as those of their chunks, of equal size."""
    chunks = len(path) // max(1, len(values))
    return tuple(values) if chunks == 1 else tuple(values[home] / chunks for home in path)


def _problem(asked: "ScheduleRequest", path: Device) -> MakespanProblem:
    limits = asked.in_flight
    if limits and len(limits) != len(path):
        limits = tuple(limits[home] for home in path)
    weights = _spread(asked, asked.weight_gradient, path) if asked.weight_gradient else None
    sends = _sends(asked.transfers, path)
    return MakespanProblem(
        microbatches=asked.microbatches,
        forward=_spread(asked, asked.forward, path),
        backward=_spread(asked, asked.backward, path),
        send_forward=sends,
        send_backward=sends,
        reduce=(0.0,) * len(path),
        in_flight=limits or (asked.microbatches,) * len(path),
        device=path,
        weight_gradient=weights,
    )


def _sends(transfers: tuple[float, ...], path: Device) -> tuple[float, ...]:
    """The transfer times of all channels; none between chunks on one device."""
    count = len(path) - 1
    times = transfers * count if len(transfers) == 1 else transfers or (0.0,) * count
    if len(times) != count:
        raise InputError(
            f"transfers needs one value or {count}, one per channel; got {len(transfers)}"
        )
    moves = (one != following for one, following in pairwise(path))
    return tuple(time if moved else 0.0 for time, moved in zip(times, moves, strict=True))


def _memory(asked: "ScheduleRequest", path: Device) -> ActivationMemory:
    devices, stages = 1 + max(path), len(asked.forward)
    saved = asked.saved or (1.0,) * stages
    freed = asked.freed or (0.0,) * stages
    for s, (most, less) in enumerate(zip(saved, freed, strict=True)):
        require_amount(most, f"saved[{s}]")
        if not 0 <= less <= most:
            raise InputError(f"freed[{s}] must be 0 to {most:g}, what is saved, got {less:g}")
    if len(asked.memory) not in (0, 1, devices):
        raise InputError(
            f"memory needs one value or {devices}, one per device; got {len(asked.memory)}"
        )
    for d, limit in enumerate(asked.memory):
        require_amount(limit, f"memory[{d}]")
    limits = asked.memory or (math.inf,)
    kept = [most - less for most, less in zip(saved, freed, strict=True)]
    return ActivationMemory(
        saved=_spread(asked, saved, path),
        kept=_spread(asked, kept, path),
        limit=limits * (devices // len(limits)),
    )


def sizes_of(asked: "ScheduleRequest", setting: Setting) -> Sizes:
    """What a generator needs."""
    from stagewright.formulations.pipelines.timed_rows import stage_times

    return Sizes(
        devices=setting.devices,
        microbatches=asked.microbatches,
        chunks=setting.chunks,
        times=stage_times(setting.problem),
        memory=setting.memory,
        goal="span" if asked.objective == "span" else "makespan",
    )
