"""The document of a plan by layer profiles: the problem, the plan, its time, the bound."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

from stagewright.formulations.parallelism.document import LayoutBound, differ, faults_of_time
from stagewright.formulations.parallelism.profiles.pipelines import (
    ProfiledEstimate,
    ProfiledPlan,
    ProfiledProblem,
    evaluate,
)
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.documents.units import format_bytes


@dataclass(frozen=True)
class ProfiledDocument:
    """A plan with its predicted iteration time, and the peak memory of each stage's devices."""

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    problem: ProfiledProblem
    plan: ProfiledPlan
    iteration_seconds: float
    memory_bytes: tuple[float, ...]
    bound: LayoutBound | None = None
    format: Literal["stagewright-profiled-plan"] = "stagewright-profiled-plan"
    version: Literal[1] = 1


def load_profiled_plan(path: str | os.PathLike[str]) -> ProfiledDocument:
    """Read a document; errors are one line with the file and the place."""
    return documents.read(ProfiledDocument, path)


def save_profiled_plan(plan: ProfiledDocument, path: str | os.PathLike[str]) -> None:
    """Write a document atomically."""
    documents.write(ProfiledDocument, plan, path)


def profiled_document(
    problem: ProfiledProblem,
    plan: ProfiledPlan,
    found: ProfiledEstimate,
    bound: LayoutBound | None = None,
) -> ProfiledDocument:
    """The document of an evaluated plan."""
    return ProfiledDocument(problem, plan, found.seconds, found.memory_bytes, bound)


def violations(document: ProfiledDocument) -> tuple[str, ...]:
    """The faults of a document, computed again from its problem and plan; empty if valid.

    The evaluation shares no table or bound with the search.
    """
    try:
        found = evaluate(document.problem, document.plan)
    except (InputError, InvalidPlan) as error:
        return (str(error),)
    time = faults_of_time(document.iteration_seconds, found.seconds, document.bound)
    return tuple([*time, *_memory(document, found)])


def _memory(document: ProfiledDocument, found: ProfiledEstimate) -> Iterator[str]:
    if len(document.memory_bytes) != len(found.memory_bytes):
        yield (
            f"memory_bytes has {len(document.memory_bytes)} entries for "
            f"{len(found.memory_bytes)} stages"
        )
    both = zip(document.memory_bytes, found.memory_bytes, strict=False)
    for s, (said, computed) in enumerate(both):
        if differ(said, computed):
            yield f"memory_bytes[{s}] is {said:.6g}, computed {computed:.6g}"
    yield from memory_shortages(document.problem, document.plan, found)


def memory_shortages(
    problem: ProfiledProblem, plan: ProfiledPlan, found: ProfiledEstimate
) -> Iterator[str]:
    """The stages whose devices have too little memory, in words."""
    both = zip(found.memory_bytes, found.free_bytes, strict=True)
    for s, (used, free) in enumerate(both):
        if free < 0:
            kinds = {problem.cluster.pools[one.pool].device_kind for one in plan.stages[s].replicas}
            yield (
                f"stage {s} ({plan.stages[s].layers} layers) needs {format_bytes(used)} on a "
                f"device of {' or '.join(sorted(kinds))}, which has {format_bytes(used + free)}: "
                f"{format_bytes(-free)} too little"
            )
