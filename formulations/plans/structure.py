"""The part of a finite plan chosen before its order: the stages, and which backwards are split.

`work_of` turns a structure into arrays for the scheduling heuristics: durations, devices and
channels of the actions, and the bytes that they keep.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.plans.actions import ActionKind
from stagewright.formulations.plans.memory import kept_bytes, stage_static_bytes
from stagewright.formulations.plans.pipeline import PipelineProblem, remembered
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.shards import gathered_bytes, share_count
from stagewright.formulations.plans.timing import (
    Blocks,
    durations,
    offload_seconds,
    positions,
    transfers,
)
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.units import format_bytes


@dataclass(frozen=True, slots=True)
class Structure:
    """Stages, and for each whether its backwards are split into I and W."""

    stages: tuple[Stage, ...]
    split: tuple[bool, ...]

    @classmethod
    def whole(cls, stages: Sequence[Stage]) -> "Structure":
        """The stages with whole backwards."""
        return cls(tuple(stages), (False,) * len(stages))


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A structure as arrays.

    S stages, M microbatches, V devices; N lanes: a stage has one, or one per device with
    round-robin replication.

    Attributes
    ----------
    seconds
        Of F, of B or I, of W (0 if there is none), of SEND_F to the next stage, of SEND_B to the
        one before; shape (5, S, M).
    split
        Whether a stage's backwards are split into I and W, shape (S,).
    lane, channel
        The lane on which a stage runs a microbatch, and the channel on which it is sent between
        stages s and s + 1 (-1: none), shape (S, M).
    stage
        The stage of every lane, shape (N,).
    members
        The devices of every lane.
    near
        The lanes that share a device with a lane, including itself.
    places
        The lanes of every device.
    kept, again
        Bytes that a lane's device holds per microbatch from the start of F, and in addition from
        the start of B or I, until the backward ends; shape (N,). Without offloaded bytes.
    offloaded, offload
        Bytes that a lane's device offloads per microbatch, and the seconds of moving them one way
        (-1: it does not offload); shape (N,).
    memory, room
        Bytes of every device, and the bytes left for microbatches; shape (V,).
    alone
        Peak bytes of a single microbatch on every device, shape (V,).
    """

    seconds: Floats
    split: NDArray[np.bool_]
    lane: Ints
    channel: Ints
    stage: Ints
    members: list[list[int]]
    near: list[list[int]]
    places: list[list[int]]
    kept: Floats
    again: Floats
    offloaded: Floats
    offload: Floats
    memory: Floats
    room: Floats
    alone: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Endings:
    """Seconds of the all-reduces and optimizer steps after the backwards; NaN if there is none.

    ``devices`` are the positions of every stage's devices; arrays have shape (S,).
    """

    devices: tuple[tuple[int, ...], ...]
    reduce: Floats
    update: Floats


def work_of(problem: PipelineProblem, structure: Structure) -> tuple[Work, Endings, Blocks]:
    """The structure as arrays, the actions after its backwards, and the checker's durations."""
    stages, m = structure.stages, problem.microbatches
    split = np.array(structure.split)
    seconds = durations(problem, stages, np.repeat(split[:, None], m, axis=1))
    index = problem.cluster.index
    everyone = tuple(tuple(index[name] for name in stage.devices) for stage in stages)
    endings = Endings(everyone, seconds[ActionKind.REDUCE][:, 0], seconds[ActionKind.UPDATE][:, 0])
    return _work(problem, structure, _seconds(seconds)), endings, seconds


def work_of_stages(
    problem: PipelineProblem, stages: Sequence[Stage], parts: bool
) -> tuple[Work, Endings]:
    """The work of stages that may split their backwards where they can, if ``parts``.

    A backward that may be split is an input gradient, and a weight gradient for the rest of the
    time of a whole backward where that is less: the parts may take longer than the whole.
    """
    split = can_split(problem, stages) if parts else (False,) * len(stages)
    work, endings, _ = work_of(problem, Structure(tuple(stages), split))
    whole = durations(problem, stages)[ActionKind.BACKWARD]
    seconds = work.seconds.copy()
    seconds[1] = np.minimum(seconds[1], whole)
    seconds[2] = np.minimum(seconds[2], whole - seconds[1])
    return replace(work, seconds=seconds), endings


def can_split(problem: PipelineProblem, stages: Sequence[Stage]) -> tuple[bool, ...]:
    """Which stages may split their backwards."""
    return tuple(
        not one.offload and problem.layer_with_whole_backward(*one.layers) is None for one in stages
    )


def _work(problem: PipelineProblem, structure: Structure, seconds: Floats) -> Work:
    stages = structure.stages
    lanes = [(s, lane) for s, one in enumerate(stages) for lane in positions(problem, one)]
    every = [_bytes_of(problem, *one) for one in zip(stages, structure.split, strict=True)]
    kept, again, offloaded, _, _ = np.array([every[s] for s, _ in lanes]).T
    places: list[list[int]] = [[] for _ in problem.cluster.devices]
    for n, (_, devices) in enumerate(lanes):
        for v in devices:
            places[v].append(n)
    return Work(
        seconds=seconds,
        split=np.array(structure.split),
        lane=_lane_table(stages, problem.microbatches),
        channel=_channel_table(problem, stages),
        stage=np.array([s for s, _ in lanes]),
        members=[devices for _, devices in lanes],
        near=[sorted({n for v in devices for n in places[v]}) for _, devices in lanes],
        places=places,
        kept=kept,
        again=again,
        offloaded=offloaded,
        offload=np.array([_offload_seconds(problem, stages[s], devices) for s, devices in lanes]),
        memory=problem.memory_bytes,
        room=_room(problem, structure),
        alone=_alone(problem, structure),
    )


def short_bytes(problem: PipelineProblem, structure: Structure) -> Floats:
    """Bytes that every device is short of with a single microbatch in flight, shape (V,).

    0 or less where it fits. This asks for no times, unlike :func:`work_of`.
    """
    return _alone(problem, structure) - _room(problem, structure)


def misfit(problem: PipelineProblem, structure: Structure) -> str | None:
    """Why the structure has no schedule; None if one microbatch at a time fits everywhere."""
    for s, stage in enumerate(structure.stages):
        most, shares = problem.most_replicas(*stage.layers), share_count(stage)
        if shares > most:
            return (
                f"stage {s} (layers {stage.layers[0]} to {stage.layers[1] - 1}) splits "
                f"microbatches of {problem.chain.microbatch_size} samples among {shares} devices, "
                f"at most {most} are possible: plan larger microbatches"
            )
    short = short_bytes(problem, structure)
    v = int(short.argmax())
    if short[v] <= 0:
        return None
    device = problem.cluster.devices[v]
    memory = float(problem.memory_bytes[v])
    return (
        f"device {device.name!r} with one microbatch in flight needs "
        f"{format_bytes(memory + short[v])}, it has {format_bytes(memory)}: "
        f"{short[v]:.0f} bytes short"
    )


def ending_starts(work: Work, endings: Endings, starts: Floats) -> tuple[Floats, Floats, float]:
    """Starts of all-reduces and optimizer steps, and the end of the last action.

    All-reduces start in the order in which their backwards end, optimizer steps in the order of
    their all-reduces, after all other computations of the device. ``starts`` has the rows of
    `Work.seconds`.
    """
    _, whole, parts, *_ = starts + work.seconds
    backwards = np.where(work.split[:, None], parts, whole)
    done: list[float] = backwards.max(axis=1).tolist()
    reduces, updates = np.full((2, len(done)), np.nan)
    free, busy = [0.0] * len(work.room), [0.0] * len(work.room)
    for s in sorted(range(len(done)), key=done.__getitem__):
        group = endings.devices[s]
        for v in group:
            busy[v] = max(busy[v], done[s])
        if not np.isnan(endings.reduce[s]):
            reduces[s] = max(done[s], *(free[v] for v in group))
            done[s] = float(reduces[s] + endings.reduce[s])
            for v in group:
                free[v] = done[s]
    for s in sorted(range(len(done)), key=done.__getitem__):
        if not np.isnan(endings.update[s]):
            updates[s] = max(done[s], *(busy[v] for v in endings.devices[s]))
            done[s] = float(updates[s] + endings.update[s])
            for v in endings.devices[s]:
                busy[v] = done[s]
    return reduces, updates, max(done)


def device_loads(work: Work) -> Floats:
    """Compute seconds of every device in an iteration, shape (V,)."""
    busy = np.zeros(len(work.room))
    every = work.seconds[:3].sum(axis=0)
    for n, s in enumerate(work.stage):
        busy[work.members[n]] += every[s, work.lane[s] == n].sum()
    return busy


def _seconds(seconds: Blocks) -> Floats:
    of = seconds.__getitem__
    backward = np.fmax(of(ActionKind.BACKWARD), of(ActionKind.INPUT_GRADIENT))
    weights = np.nan_to_num(of(ActionKind.WEIGHT_GRADIENT))
    sends = of(ActionKind.SEND_FORWARD), of(ActionKind.SEND_BACKWARD)
    return np.stack([of(ActionKind.FORWARD), backward, weights, *map(np.nan_to_num, sends)])


def _lane_table(stages: Sequence[Stage], microbatches: int) -> Ints:
    turns = np.array([stage.turns for stage in stages])
    first = np.concatenate([[0], np.cumsum(turns)[:-1]])
    return np.asarray(first[:, None] + np.arange(microbatches)[None, :] % turns[:, None])


def _channel_table(problem: PipelineProblem, stages: Sequence[Stage]) -> Ints:
    channel, number = np.full((len(stages), problem.microbatches), -1), count()
    for s, neighbours in enumerate(pairwise(stages)):
        for first, cycle, *_ in transfers(problem, *neighbours):
            channel[s, first::cycle] = next(number)
    return channel


def _offload_seconds(problem: PipelineProblem, stage: Stage, devices: Sequence[int]) -> float:
    """The seconds of offloading a microbatch's bytes; -1 if the stage does not offload."""
    seconds = offload_seconds(problem, stage, devices) if stage.offload else -1.0
    assert seconds is not None  # the search offloads only where the host link is known
    return seconds


def _room(problem: PipelineProblem, structure: Structure) -> Floats:
    static, gathered = np.zeros((2, len(problem.cluster)))
    for stage, split in zip(structure.stages, structure.split, strict=True):
        *_, always, once = _bytes_of(problem, stage, split)
        for devices in positions(problem, stage):
            static[devices] += always
            gathered[devices] = np.maximum(gathered[devices], once)
    return np.asarray(problem.memory_bytes - (static + gathered))


@remembered
def _bytes_of(problem: PipelineProblem, stage: Stage, split: bool) -> tuple[float, ...]:
    """Bytes of a stage on a device: the three of `Kept`, then the static and the gathered ones."""
    kept = kept_bytes(problem, stage, split)
    static, gathered = stage_static_bytes(problem, stage), gathered_bytes(problem, stage)
    return kept.saved_bytes, kept.working_bytes, kept.offloaded_bytes, static, gathered


def _alone(problem: PipelineProblem, structure: Structure) -> Floats:
    """The peak bytes of a single microbatch on every device, shape (V,)."""
    held, peak, offloaded = np.zeros((3, len(problem.cluster)))
    for stage, split in zip(structure.stages, structure.split, strict=True):
        saved, working, moved, *_ = _bytes_of(problem, stage, split)
        for devices in positions(problem, stage):
            held[devices] += saved
            peak[devices] = np.maximum(peak[devices], held[devices] + working)
            offloaded[devices] = np.maximum(offloaded[devices], moved)
    return np.asarray(peak + offloaded)
