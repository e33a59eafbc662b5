"""The document of a chosen layout: the problem, the layout, its time and memory, the bound."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.losses import shortages
from stagewright.formulations.parallelism.stage_costs import RankMemory
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError

FORMAT: Literal["stagewright-layout"] = "stagewright-layout"
VERSION: Literal[1] = 1


@dataclass(frozen=True, slots=True)
class LayoutBound:
    """The bound that no fitting layout of ``space`` takes less than ``seconds``; what proved it."""

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

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
    format: Literal["stagewright-layout"] = FORMAT
    version: Literal[1] = VERSION


def load_layout(path: str | os.PathLike[str]) -> LayoutPlan:
    """Read a layout document; errors are one line with the file and the place."""
    return documents.read(LayoutPlan, path, FORMAT, VERSION)


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
    return tuple([*_time(plan, found), *_memory(plan, found)])


def _time(plan: LayoutPlan, found: Estimate) -> Iterator[str]:
    said = plan.iteration_seconds
    if _differ(found.seconds, said):
        yield f"iteration_seconds is {said:.6g}, computed {found.seconds:.6g}"
    if plan.bound is not None and plan.bound.seconds > found.seconds * (1 + RELATIVE_TOLERANCE):
        yield f"bound is {plan.bound.seconds:.6g} s, above the time {found.seconds:.6g} s"


def _memory(plan: LayoutPlan, found: Estimate) -> Iterator[str]:
    if len(plan.memory) != len(found.memory):
        yield f"memory has {len(plan.memory)} entries for {len(found.memory)} pipeline ranks"
    for rank, (said, computed) in enumerate(zip(plan.memory, found.memory, strict=False)):
        if _differ(said.total, computed.total):
            yield f"memory[{rank}] is {said.total:.6g} bytes, computed {computed.total:.6g}"
    yield from shortages(found)


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > RELATIVE_TOLERANCE * max(abs(one), abs(other))
