"""The document of a chosen layout: the problem, the layout, its time and memory, the bound."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.pipeline_time import RankMemory
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import format_bytes, format_seconds

PARTS = {
    "computation": "compute_seconds",
    "exchanges inside a replica": "exchange_seconds",
    "recomputation": "repeated_seconds",
    "waiting for ZeRO or the host": "zero_seconds",
    "bubble": "bubble_seconds",
    "exchanges between replicas": "gradient_seconds",
    "update": "update_seconds",
}
"""The parts of an iteration on its busiest rank, which add up to its time."""
_ROUNDING_SECONDS = 1e-8


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


def rounded(seconds: float) -> float:
    """Seconds; 0 where only rounding errors of sums are left."""
    return 0.0 if abs(seconds) < _ROUNDING_SECONDS else seconds


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


@documents.record
class LayoutBound:
    """The bound that no fitting layout of ``space`` takes less than ``seconds``; what proved it."""

    seconds: float
    proved_by: str
    space: str


@dataclass(frozen=True)
class LayoutPlan:
    """A layout with its predicted iteration time and peak memory by position in the pipeline."""

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    problem: TrainingProblem
    layout: Layout
    iteration_seconds: float
    memory: tuple[RankMemory, ...]
    bound: LayoutBound | None = None
    format: Literal["stagewright-layout"] = "stagewright-layout"
    version: Literal[1] = 1


def load_layout(path: str | os.PathLike[str]) -> LayoutPlan:
    """Read a layout document; errors are one line with the file and the place."""
    return documents.read(LayoutPlan, path)


def save_layout(plan: LayoutPlan, path: str | os.PathLike[str]) -> None:
    """Write a layout document atomically."""
    documents.write(LayoutPlan, plan, path)


def layout_plan(
    problem: TrainingProblem, found: Estimate, bound: LayoutBound | None = None
) -> LayoutPlan:
    """The document of an evaluated layout."""
    return LayoutPlan(problem, found.layout, found.seconds, found.memory, bound)


def violations(plan: LayoutPlan) -> tuple[str, ...]:
    """The faults of a document, computed again from its problem and layout; empty if valid."""
    try:
        found = evaluate(plan.problem, plan.layout)
    except InputError as error:
        return (str(error),)
    time = faults_of_time(plan.iteration_seconds, found.seconds, plan.bound)
    return tuple([*time, *_memory(plan, found)])


def faults_of_time(said: float, computed: float, bound: LayoutBound | None) -> Iterator[str]:
    """What is wrong with the said seconds of an iteration, and with a bound on them."""
    if differ(said, computed):
        yield f"iteration_seconds is {said:.6g}, computed {computed:.6g}"
    if bound is not None and bound.seconds > computed * (1 + RELATIVE_TOLERANCE):
        yield f"bound is {bound.seconds:.6g} s, above the time {computed:.6g} s"


def _memory(plan: LayoutPlan, found: Estimate) -> Iterator[str]:
    if len(plan.memory) != len(found.memory):
        yield f"memory has {len(plan.memory)} entries for {len(found.memory)} pipeline ranks"
    for rank, (said, computed) in enumerate(zip(plan.memory, found.memory, strict=False)):
        if differ(said.total, computed.total):
            yield f"memory[{rank}] is {said.total:.6g} bytes, computed {computed.total:.6g}"
    yield from shortages(found)


def differ(one: float, other: float) -> bool:
    """Whether two numbers differ by more than rounding."""
    return abs(one - other) > RELATIVE_TOLERANCE * max(abs(one), abs(other))
