"""Placements: on which device each stage is, for p devices with v stages ("chunks") each."""

import math
from collections.abc import Sequence
from itertools import accumulate

from stagewright.graphs.documents.errors import InputError

Device = tuple[int, ...]


def line(devices: int) -> Device:
    """Stage s on device s."""
    return tuple(range(devices))


def loop(devices: int, chunks: int) -> Device:
    """Stage s on device s mod p (Narayanan et al. 2021, section 2.2)."""
    return tuple(range(devices)) * chunks


def v_shape(devices: int) -> Device:
    """Two stages per device, there and back: 0, ..., p - 1, p - 1, ..., 0 (Qi et al. 2024)."""
    return wave(devices, 1)


def wave(devices: int, waves: int) -> Device:
    """The V repeated: 2 w stages per device, neighbouring ones on the same device at each turn.

    Source: Liu et al. 2023 (Hanayo).
    """
    return (*range(devices), *reversed(range(devices))) * waves


def both_directions(devices: int) -> tuple[Device, Device]:
    """Stage s on device s for microbatches that go down, on device p - 1 - s for those that go up.

    Every device keeps the weights of two stages (Li and Hoefler 2021, Chimera).
    """
    return line(devices), tuple(reversed(range(devices)))


def in_turns(replicas: Sequence[int], microbatches: int) -> tuple[Device, ...]:
    """The different ways of microbatches through stages whose copies take them in turn.

    The devices are numbered stage after stage; microbatch m is on copy m mod ``replicas[s]``.
    """
    firsts = [0, *accumulate(replicas)]
    ways = range(min(math.lcm(*replicas), microbatches))
    return tuple(
        tuple(first + m % count for first, count in zip(firsts, replicas, strict=False))
        for m in ways
    )


def placed(placement: str, devices: int, chunks: int) -> Device:
    """A placement with one path by name: ``line``, ``loop``, ``V`` or ``wave``.

    Raises
    ------
    InputError
        If the placement does not have that many stages per device.
    """
    if not allows(placement, chunks):
        needs = {"line": "1 stage", "V": "2 stages", "wave": "an even number of stages"}[placement]
        raise InputError(f"placement {placement} has {needs} per device, got {chunks}")
    if placement in ("V", "wave"):
        return wave(devices, chunks // 2)
    return loop(devices, chunks)


def allows(placement: str, chunks: int) -> bool:
    """Whether a placement with one path can have that many stages per device."""
    allowed = {"line": chunks == 1, "V": chunks == 2, "wave": chunks % 2 == 0}
    return allowed.get(placement, True)
