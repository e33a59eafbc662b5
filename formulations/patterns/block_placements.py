"""The placements of Tessel (Lin et al., HPCA 2024) as repetitions: V, X, M, NN and K.

A placement is a set of branches from the first forward to the last backward. A block is on one
device, or split over all of them. Forwards take 1 and backwards 3, as in the cases published with
its code; the forward and the backward of a split block take 1 each. A forward of one device
holds one unit of its memory until its backward ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from stagewright.formulations.patterns.repetition import Holding, RepetitionProblem, Room

FORWARD, BACKWARD, SPLIT = 1.0, 3.0, 1.0


@dataclass(slots=True)
class _Stages:
    """Stages in the order of their forwards: (devices, held, stages before it)."""

    devices: list[tuple[int, ...]] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    before: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, devices: Sequence[int], held: float, *before: int) -> int:
        """A stage on ``devices``; its number."""
        self.devices.append(tuple(devices))
        self.held.append(held)
        self.before.append(before)
        return len(self.devices) - 1

    def chain(self, devices: Sequence[int], *before: int) -> int:
        """A stage on each of ``devices``, one after the other; the number of the last one."""
        for d in devices:
            before = (self.add((d,), 1.0, *before),)
        return before[0]

    def problem(self, memory: float) -> RepetitionProblem:
        """The problem of the added stages: all forwards, then all backwards in reverse."""
        n = len(self.devices)
        count = 1 + max(d for devices in self.devices for d in devices)
        single = [len(devices) == 1 for devices in self.devices]
        last = 2 * n - 1
        arcs = [(i, j) for j, before in enumerate(self.before) for i in before]
        final = set(range(n)) - {i for i, _ in arcs}
        before = [*arcs, *((last - j, last - i) for i, j in arcs), *((i, last - i) for i in final)]
        rooms = [
            Room(
                f"memory of device {d}",
                memory,
                tuple(
                    Holding(i, last - i, held)
                    for i, held in enumerate(self.held)
                    if held and d in self.devices[i]
                ),
            )
            for d in range(count)
        ]
        return RepetitionProblem(
            names=(*(f"{i}F" for i in range(n)), *(f"{i}B" for i in reversed(range(n)))),
            seconds=(
                *(FORWARD if one else SPLIT for one in single),
                *(BACKWARD if one else SPLIT for one in reversed(single)),
            ),
            resources=(*self.devices, *reversed(self.devices)),
            before=tuple(sorted(before)),
            rooms=tuple(rooms),
        )


def v_shape(devices: int, memory: float) -> RepetitionProblem:
    """A stage per device: the placement of 1F1B."""
    stages = _Stages()
    stages.chain(range(devices))
    return stages.problem(memory)


def x_shape(devices: int, memory: float) -> RepetitionProblem:
    """Two chains in opposite directions, as in Chimera; a microbatch is one of each."""
    stages = _Stages()
    stages.chain(range(devices))
    stages.chain(range(devices)[::-1])
    return stages.problem(memory)


def m_shape(devices: int, memory: float) -> RepetitionProblem:
    """A first stage (an embedding) split over all devices, then a stage per device."""
    stages = _Stages()
    stages.chain(range(devices), stages.add(range(devices), 0.0))
    return stages.problem(memory)


def nn_shape(devices: int, memory: float) -> RepetitionProblem:
    """Placement NN: M with a second split stage after half of the devices (encoder, decoder)."""
    stages = _Stages()
    half = stages.chain(range(devices // 2), stages.add(range(devices), 0.0))
    stages.chain(range(devices // 2, devices), stages.add(range(devices), 0.0, half))
    return stages.problem(memory)


def k_shape(devices: int, memory: float) -> RepetitionProblem:
    """Two branches on half of the devices each, then a stage that is split and holds memory."""
    stages = _Stages()
    one = stages.chain(range(devices // 2))
    other = stages.chain(range(devices // 2, devices))
    stages.add(range(devices), 1.0, one, other)
    return stages.problem(memory)
