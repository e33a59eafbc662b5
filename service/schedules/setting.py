"""Stages, devices, chunks, times and memory of a schedule, from what a request says of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypeVar

from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.schedules.order import (
    Device,
    allows,
    both_directions,
    in_turns,
    line,
    placed,
)
from stagewright.formulations.schedules.published.kinds import (
    KINDS,
    OPTIMAL,
    PLACEMENTS,
    USUAL_CHUNKS,
    ScheduleKind,
    Sizes,
    require_chunks,
)
from stagewright.formulations.schedules.timing import ActivationMemory
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_LAYERS, require_amount, require_count

if TYPE_CHECKING:
    from stagewright.service.schedules.requests import ScheduleRequest

T = TypeVar("T")

RULES: tuple[Literal["gpipe", "1f1b", "pe"], ...] = ("gpipe", "1f1b", "pe")
"""Kinds that are list schedules for any devices and in-flight limits."""

SCHEDULES = tuple(dict.fromkeys((*RULES, *KINDS, OPTIMAL)))
"""The kinds of schedule that a request may name."""

ANY, FREE = "any", "free"
"""In place of one of ``PLACEMENTS``: the best of them, and one on any devices."""


@dataclass(frozen=True, slots=True)
class ScheduleSetting:
    """What is scheduled, with every stage divided into its chunks.

    Attributes
    ----------
    placement
        Where the chunks are, in words.
    chunks
        Chunks per device; None if devices have different numbers of them.
    paths
        The device of each chunk; several if stages have copies on several devices.
    problem
        Times, transfers, limits in flight and of memory, objective, devices of the first path.
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
        return _devices(self.paths)

    def stored_problem(self) -> MakespanProblem:
        """The problem with memory; without limits all microbatches fit."""
        if self.problem.memory:
            return self.problem
        least = self.memory.least(self.paths[0])
        enough = tuple(self.problem.microbatches * one for one in least)
        return replace(self.problem, saved=_amounts(self.memory), memory=enough)


def setting_of(asked: "ScheduleRequest") -> ScheduleSetting:
    """The setting of a request.

    Raises
    ------
    InputError
        If there is none; the message begins with a field of the request.
    """
    _require_kind(asked)
    _require_sizes(asked)
    placement, chunks, paths = _given(asked) if asked.device else _chosen(asked)
    memory = _memory(asked, paths)
    if asked.memory:
        for path in paths:
            memory.require_room(path)
    return ScheduleSetting(placement, chunks, paths, _problem(asked, paths[0], memory), memory)


def named_placements(asked: "ScheduleRequest") -> dict[str, Device]:
    """The different placements with a name for as many chunks as the request has."""
    devices, chunks = max(1, len(asked.forward)), _free_chunks(asked)
    found: dict[str, Device] = {}
    for name in PLACEMENTS:
        if allows(name, chunks) and placed(name, devices, chunks) not in found.values():
            found[name] = placed(name, devices, chunks)
    return found


def on_devices(asked: "ScheduleRequest", device: Device) -> ScheduleSetting:
    """The setting of a request with placement ``free`` and these devices of the chunks."""
    memory = _memory(asked, (device,))
    problem = _problem(asked, device, memory)
    return ScheduleSetting(FREE, asked.chunks, (device,), problem, memory)


def published(name: str) -> ScheduleKind | None:
    """The published kind that a generator makes; None for list schedules and the optimum."""
    return None if name in RULES else KINDS.get(name)


def _require_kind(asked: "ScheduleRequest") -> None:
    if asked.kind not in SCHEDULES:
        raise InputError(f"kind {asked.kind!r} is none of {', '.join(SCHEDULES)}")
    kind = published(asked.kind)
    if kind is not None and kind.is_split and not asked.weight_gradient:
        raise InputError(f"weight_gradient is needed: {asked.kind} splits backwards (F,I,W)")
    searches = asked.kind == OPTIMAL
    if asked.placement in (ANY, FREE) and not searches:
        raise InputError(f"placement {asked.placement} is for kind optimal, not {asked.kind}")
    if asked.makespan_limit is not None and not (searches and asked.objective == "memory"):
        raise InputError("makespan_limit is for kind optimal with objective memory")
    if asked.placement == FREE and asked.objective == "memory":
        raise InputError("objective memory is for named placements, not for free ones")
    if asked.placement == FREE and len(set(asked.memory)) > 1:
        raise InputError("memory must be one value for placement free: any device may have a stage")
    has_stores = asked.memory or asked.objective != "makespan"
    if searches and has_stores and asked.backend not in (None, "cp-sat"):
        raise InputError(f"backend {asked.backend} takes neither memory nor spans; use cp-sat")


def _require_sizes(asked: "ScheduleRequest") -> None:
    """Refuse lists whose length is not the number of stages, and values that are no times."""
    stages = len(asked.forward)
    require_count(stages, "stages", MAX_LAYERS)
    names = "backward", "weight_gradient", "in_flight", "saved", "freed", "device", "replicas"
    for name in names:
        size = len(getattr(asked, name))
        if size != stages and (size or name == "backward"):
            raise InputError(f"{name} needs {stages} values, got {size}")
    for name in ("forward", "backward", "weight_gradient", "transfers"):
        for place, value in enumerate(getattr(asked, name)):
            require_amount(value, f"{name}[{place}]")
    if asked.replicas and asked.kind != "1f1b-rr":
        raise InputError(f"replicas are of kind 1f1b-rr, not {asked.kind}")
    for count in asked.replicas:
        require_count(count, "replicas", MAX_LAYERS)


_Placed = tuple[str, int | None, tuple[Device, ...]]


def _given(asked: "ScheduleRequest") -> _Placed:
    """Placement, chunks and paths of a request that gives the device of every stage."""
    for name in ("placement", "chunks", "replicas"):
        if getattr(asked, name):
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
    """Placement, chunks and paths of the kind or placement that a request names."""
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
    if asked.replicas:
        return kind.placement, chunks, in_turns(asked.replicas, asked.microbatches)
    return kind.placement, chunks, _paths(kind.placement, devices, chunks)


def _free_placement(asked: "ScheduleRequest") -> tuple[str, int]:
    """Placement and chunks of a kind that can be scheduled on any placement."""
    chunks = _free_chunks(asked)
    if asked.placement is None and chunks == 1:
        return "line", 1
    if asked.placement in (ANY, FREE):
        return next(iter(named_placements(asked))), chunks
    if asked.placement is None:
        several = ", ".join(PLACEMENTS[1:])
        raise InputError(
            f"placement must be given for {asked.kind} with chunks: {several}, or with kind "
            f"optimal {ANY} or {FREE}"
        )
    return asked.placement, chunks


def _free_chunks(asked: "ScheduleRequest") -> int:
    """The number of chunks of a kind that can be scheduled on any placement."""
    if asked.chunks is not None:
        return asked.chunks
    return 1 if asked.placement in (None, "line") else USUAL_CHUNKS


def _paths(placement: str, devices: int, chunks: int) -> tuple[Device, ...]:
    if placement == "both directions":
        return both_directions(devices)
    if placement == "replicated line":
        return (line(devices),)
    return (placed(placement, devices, chunks),)


def _spread(asked: "ScheduleRequest", values: Sequence[float], path: Device) -> tuple[float, ...]:
    """Values of stages as those of their chunks, of equal size.

    A stage's chunks are on its device, as other kinds have them; with placement ``free`` they are
    consecutive in the model.
    """
    chunks = len(path) // max(1, len(values))
    return tuple(value / chunks for value in _repeated(asked, values, path))


def _repeated(asked: "ScheduleRequest", values: Sequence[T], path: Device) -> tuple[T, ...]:
    """For every chunk the value of its stage."""
    if len(path) == len(values):
        return tuple(values)
    if asked.placement == FREE:
        return tuple(value for value in values for _ in range(len(path) // len(values)))
    return tuple(values[home] for home in path)


def _devices(paths: Sequence[Device]) -> int:
    return 1 + max(map(max, paths))


def _problem(asked: "ScheduleRequest", path: Device, memory: ActivationMemory) -> MakespanProblem:
    """The scheduling problem of stages on one path of devices."""
    device, limit = path, memory.limit
    if asked.replicas:
        device, limit = line(len(path)), tuple(memory.limit[d] for d in path)
    limits = _repeated(asked, asked.in_flight, path) if asked.in_flight else ()
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
        device=device,
        weight_gradient=weights,
        saved=_amounts(memory) if asked.memory else (),
        memory=limit if asked.memory else (),
        objective="span" if asked.objective == "span" else "makespan",
        duplex=asked.duplex,
    )


def _amounts(memory: ActivationMemory) -> tuple[tuple[float, float, float], ...]:
    """By stage: what a forward takes, and input and weight gradients give back, of memory."""
    pairs = zip(memory.saved, memory.kept, strict=True)
    return tuple((saved, saved - kept, kept) for saved, kept in pairs)


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


def _memory(asked: "ScheduleRequest", paths: Sequence[Device]) -> ActivationMemory:
    devices, stages, path = _devices(paths), len(asked.forward), paths[0]
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


def sizes_of(asked: "ScheduleRequest", setting: ScheduleSetting) -> Sizes:
    """What a generator needs."""
    from stagewright.formulations.pipelines.windows import stage_times

    return Sizes(
        devices=setting.devices,
        microbatches=asked.microbatches,
        chunks=setting.chunks,
        replicas=asked.replicas,
        times=stage_times(setting.problem),
        memory=setting.memory,
        goal="span" if asked.objective == "span" else "makespan",
    )
