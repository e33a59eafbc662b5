"""Stages whose layers groups of devices compute together, and transfers between the groups.

The devices of a stage are groups of ``stage.tensor`` consecutive ones. A group computes a
microbatch, or its share of one, together. Each device has one shard of the weights, and all have
the group's whole outputs and whole gradients of its inputs. The devices of one position in their
groups have the same shard, so that they sum up its gradients.
"""

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
