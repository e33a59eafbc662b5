"""Why one layout is slower than another, and by how much which ranks do not fit."""

from dataclasses import dataclass

from stagewright.formulations.parallelism.estimate import Estimate
from stagewright.graphs.documents.units import format_bytes, format_seconds

PARTS = {
    "computation": "compute_seconds",
    "exchanges inside a replica": "exchange_seconds",
    "recomputation": "repeated_seconds",
    "waiting for ZeRO": "zero_seconds",
    "bubble": "bubble_seconds",
    "exchanges between replicas": "gradient_seconds",
    "update": "update_seconds",
}
"""The parts of an iteration on its busiest rank, which add up to its time."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Seconds of one part of an iteration under a layout and under another layout."""

    part: str
    seconds: float
    other_seconds: float

    @property
    def more(self) -> float:
        """Seconds by which the part is longer than under the other layout."""
        return self.seconds - self.other_seconds


def differences(one: Estimate, other: Estimate) -> tuple[Difference, ...]:
    """Part by part, the largest loss first."""
    found = [
        Difference(part, getattr(one, name), getattr(other, name)) for part, name in PARTS.items()
    ]
    return tuple(sorted(found, key=lambda part: -part.more))


def why_slower(one: Estimate, best: Estimate) -> str:
    """By how much a layout is slower than the best, and its largest loss, in words."""
    first = differences(one, best)[0]
    if one.seconds <= best.seconds * (1 + 1e-9):
        return "as fast"
    slower = format_seconds(one.seconds - best.seconds)
    return f"{slower} slower; {first.part} +{format_seconds(first.more)}"


def shortages(found: Estimate) -> tuple[str, ...]:
    """Per position in the pipeline that does not fit, by how many bytes; the fullest first."""
    lines = []
    fullest_first = sorted(enumerate(found.memory), key=lambda one: -one[1].total)
    for rank, memory in fullest_first:
        missing = memory.total - found.memory_bytes
        if missing > 0:
            kinds = ("weights", "gradients", "optimizer", "activations", "buffers", "reserve")
            most = max(kinds, key=lambda kind: getattr(memory, kind))
            lines.append(
                f"pipeline rank {rank} needs {format_bytes(memory.total)}, "
                f"{format_bytes(missing)} more than a device has; most of it is {most} "
                f"({format_bytes(getattr(memory, most))})"
            )
    return tuple(lines)
