"""Stages whose replicas divide their state: the bytes that replicas hold and exchange.

With ``optimizer`` (ZeRO-1) a replica has all weights and gradients and updates a part. After the
last backward the gradients are reduce-scattered; an update ends with the all-gather of the new
weights. With ``gradients`` (ZeRO-2) a replica has all weights and a part of the gradients: those of
a layer are reduce-scattered at the end of each backward. With ``weights`` (ZeRO-3) a replica keeps
a part of all: the weights of a layer are also gathered for its forward and for its backward.
Computations wait for these exchanges, which are a part of them.

Numbers are divided as they lie in memory, whatever tensor they belong to: the whole stage with
``optimizer``, else layer by layer. All parts are equal, with padding at the end.

Stages whose layers groups of devices compute together, and transfers between the groups.

The devices of a stage are groups of ``stage.tensor`` consecutive ones. A group computes a
microbatch, or its share of one, together. Each device has one shard of the weights, and all have
the group's whole outputs and whole gradients of its inputs. The devices of one position in their
groups have the same shard, so that they sum up its gradients.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.graphs.documents.errors import InputError

T = TypeVar("T")


def groups_of(devices: Sequence[T], tensor: int) -> list[tuple[T, ...]]:
    """The groups of ``tensor`` consecutive devices."""
    return [tuple(devices[i : i + tensor]) for i in range(0, len(devices), tensor)]


def mates(stage: Stage, device: str, size: int) -> tuple[str, ...]:
    """The other devices of the group of ``device``, where groups have ``size`` devices."""
    group = next(one for one in groups_of(stage.devices, size) if device in one)
    return tuple(name for name in group if name != device)


def share_count(stage: Stage) -> int:
    """Among how many groups a microbatch of ``stage`` is split."""
    return len(stage.runners(0)) // stage.tensor


def stays(one: Stage, other: Stage, microbatch: int) -> bool:
    """Whether the same devices have the same samples of a microbatch in both stages."""
    return (one.runners(microbatch), one.tensor) == (other.runners(microbatch), other.tensor)


def crossing(
    senders: Sequence[T], tensor: int, receivers: Sequence[T], other: int
) -> list[tuple[tuple[T, ...], tuple[T, ...]]]:
    """Senders and receivers by position, from groups of ``tensor`` devices to those of ``other``.

    Every device of a group has all of the group's samples: each of ``receivers`` gets them from the
    device of its own position in every sending group, counted modulo ``tensor``. Between equal
    degrees positions stay.

    Examples
    --------
    >>> crossing("ab", 2, "cd", 2)
    [(('a',), ('c',)), (('b',), ('d',))]
    >>> crossing("a", 1, "cd", 2)
    [(('a',), ('c',)), (('a',), ('d',))]
    """
    return [
        (tuple(senders[i % tensor :: tensor]), tuple(receivers[i::other])) for i in range(other)
    ]


def pairs(one: Stage, other: Stage, microbatch: int) -> Iterator[tuple[str, str]]:
    """Sender and receiver of every part of a microbatch from stage ``one`` to ``other``."""
    senders, receivers = one.runners(microbatch), other.runners(microbatch)
    if stays(one, other, microbatch):
        yield from zip(senders, receivers, strict=True)
        return
    for sending, receiving in crossing(senders, one.tensor, receivers, other.tensor):
        yield from ((sender, receiver) for sender in sending for receiver in receiving)


def of_shard(problem: PipelineProblem, stage: Stage) -> PipelineProblem:
    """The problem with the costs of ``stage`` on one device; other stages' costs are not valid."""
    return problem.at(stage.tensor)


def require_whole_stages(stages: Sequence[Stage], who: str, instead: str) -> None:
    """Raise InputError if a stage has a tensor degree above 1, which ``who`` cannot handle."""
    for s, stage in enumerate(stages):
        if stage.tensor > 1:
            raise InputError(f"stage {s} has tensor degree {stage.tensor}: {who}; {instead}")


ALIGNMENT = 16
"""Bytes of which every part is a multiple, as collectives on GPUs are faster so."""


def part_bytes(whole_bytes: float, replicas: int) -> float:
    """Bytes of each of ``replicas`` equal parts.

    Examples
    --------
    >>> part_bytes(100, 2), part_bytes(96, 3)
    (64, 32)
    """
    return ALIGNMENT * math.ceil(whole_bytes / (ALIGNMENT * replicas))


def _divided_bytes(problem: PipelineProblem, stage: Stage) -> list[float]:
    """Parameter bytes of each unit that replicas divide, on a device: the stage, or its layers."""
    shard, layers = of_shard(problem, stage), slice(*stage.layers)
    if stage.shards == "optimizer":
        return [shard.gradient_bytes(*stage.layers)]
    return [one for one in shard.chain.parameter_bytes[layers].tolist() if one]


def _parts(problem: PipelineProblem, stage: Stage) -> list[float]:
    """The bytes of a replica's part of each unit that the stage's replicas divide."""
    return [part_bytes(one, stage.replicas) for one in _divided_bytes(problem, stage)]


def _own_bytes(problem: PipelineProblem, stage: Stage) -> float:
    """Parameter bytes of a replica's part."""
    return sum(_parts(problem, stage))


def state_bytes(problem: PipelineProblem, stage: Stage) -> float:
    """Bytes of weights, gradients and optimizer state that a device always holds.

    One version of the weights, as ``flush`` has it.
    """
    of_optimizer = problem.chain.optimizer_bytes_per_parameter_byte
    own = _own_bytes(problem, stage)
    whole = of_shard(problem, stage).gradient_bytes(*stage.layers)
    weights = own if stage.shards == "weights" else whole
    gradients = whole if stage.shards == "optimizer" else own
    return weights + gradients + of_optimizer * own


def gathered_bytes(problem: PipelineProblem, stage: Stage) -> float:
    """Bytes of a layer's whole gradients, and weights, while it computes, for the largest layer.

    Only in its backward are there both; a device computes one layer at a time, of all its stages.
    """
    count = {"gradients": 1, "weights": 2}.get(stage.shards, 0)
    return count * stage.replicas * max(_parts(problem, stage), default=0.0)


def round_seconds(problem: PipelineProblem, stage: Stage) -> float:
    """Seconds of a reduce-scatter or all-gather of all units that the stage's replicas divide."""
    devices = [problem.cluster.index[name] for name in stage.devices]
    rings = [devices[i :: stage.tensor] for i in range(stage.tensor)]
    volumes = [stage.replicas * one for one in _parts(problem, stage)]
    return max(sum(problem.round_seconds(one, ring) for one in volumes) for ring in rings)


def exchange_seconds(problem: PipelineProblem, stage: Stage) -> tuple[float, float, float]:
    """Seconds of a forward's exchanges, and of those for the gradients of input and weights.

    The weight gradient (W, or the rest of B) reduce-scatters the gradients. Divided weights are
    gathered for the forward and for the input gradient (I, or the first part of B). With
    ``recompute`` ``full`` all forwards run first, which gather once more; with ``layer`` a layer is
    recomputed while its weights are there. A layer whose W needs its weights, as one without an
    input gradient, is taken to gather them in I.
    """
    if stage.shards not in ("gradients", "weights"):
        return 0.0, 0.0, 0.0
    once = round_seconds(problem, stage)
    if stage.shards == "gradients":
        return 0.0, 0.0, once
    return once, (2 if stage.recompute == "full" else 1) * once, once


def update_share(problem: PipelineProblem, stage: Stage) -> float:
    """The share of a stage's optimizer step that a replica does."""
    whole = of_shard(problem, stage).gradient_bytes(*stage.layers)
    if stage.shards == "none" or not whole:
        return 1.0
    return min(1.0, _own_bytes(problem, stage) / whole)


def exchanged_rounds(stage: Stage, microbatches: int) -> int:
    """How often the weights or gradients of a stage go around its replicas in an iteration.

    An all-reduce counts twice: it is a reduce-scatter and an all-gather.
    """
    if stage.shards in ("none", "optimizer"):
        return 2
    if stage.shards == "gradients":
        return microbatches + 1
    return microbatches * (4 if stage.recompute == "full" else 3)


def require_no_shards(stages: Sequence[Stage], who: str, instead: str) -> None:
    """Raise InputError if the replicas of a stage divide their state, which ``who`` cannot."""
    for s, stage in enumerate(stages):
        if stage.shards != "none":
            what = "optimizer state" if stage.shards == "optimizer" else stage.shards
            raise InputError(f"stage {s} shards its {what}: {who}; {instead}")
