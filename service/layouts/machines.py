"""Fastest layouts in less memory, and on better machines."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf

from stagewright.formulations.forms.answers import StopToken, is_stopped
from stagewright.formulations.parallelism.estimate import Estimate
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.units import format_bytes
from stagewright.service.layouts.requests import FrontPoint, WhatIf
from stagewright.solvers.parallelism.refining import FoundLayouts

Search = Callable[..., FoundLayouts]
"""The search of a request: of a problem, for so many layouts, with options."""

LESS_MEMORY = 0.93
"""From one point of the front to the next, the limit on memory shrinks at least by this factor."""


def front_of(
    search: Search, problem: TrainingProblem, stop: StopToken | None
) -> Iterator[FrontPoint]:
    """The fastest layout for less and less memory, from any amount to too little.

    One limit is what a device has. What is no faster than a later point is left out.
    """
    limit, has, last = inf, problem.fabric.memory_bytes, None
    while not is_stopped(stop):
        found = search(problem, 1, memory_bytes=limit, stop=stop)
        point = _point(limit, found.best[0]) if found.best else None
        if last is not None and (point is None or point.seconds > last.seconds * (1 + 1e-9)):
            yield last
        if point is None:
            return
        last, below = point, point.peak_bytes * LESS_MEMORY
        limit = has if below < has < limit and point.peak_bytes > has else below


def _point(limit: float, one: Estimate) -> FrontPoint:
    return FrontPoint.of(one, limit_bytes=limit, layout=str(one.layout))


def too_large(problem: TrainingProblem, least: FrontPoint) -> str:
    """How much memory the smallest layout lacks, in words."""
    missing = least.peak_bytes - problem.fabric.memory_bytes
    return (
        f"a device has {format_bytes(problem.fabric.memory_bytes)}; {least.layout} would need "
        f"{format_bytes(least.peak_bytes)}, {format_bytes(missing)} more, and no layout much less"
    )


def what_if(search: Search, problem: TrainingProblem, stop: StopToken | None) -> Iterator[WhatIf]:
    """The fastest layouts on better machines."""
    for change, changed in _changes(problem):
        if is_stopped(stop):
            return
        found = search(changed, 1, stop=stop)
        one = found.best[0] if found.best else None
        yield WhatIf(
            change=change,
            seconds=None if one is None else one.seconds,
            layout=None if one is None else str(one.layout),
        )


def _changes(problem: TrainingProblem) -> Iterator[tuple[str, TrainingProblem]]:
    """The problem on better machines: with more memory, or with one faster level of links."""
    fabric = problem.fabric
    for text, memory in (
        ("1 GB more memory", fabric.memory_bytes + 1e9),
        ("10 % more memory", fabric.memory_bytes * 1.1),
        ("twice the memory", fabric.memory_bytes * 2),
    ):
        yield text, replace(problem, fabric=replace(fabric, memory_bytes=memory))
    for position, level in enumerate(fabric.levels):
        faster = replace(level, bytes_per_second=2 * level.bytes_per_second)
        levels = (*fabric.levels[:position], faster, *fabric.levels[position + 1 :])
        text = f"twice the bandwidth of level {level.name}"
        yield text, replace(problem, fabric=replace(fabric, levels=levels))
