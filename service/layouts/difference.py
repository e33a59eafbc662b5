"""Two layouts compared: the iteration by part, the prices, the memory of the ranks, the fields."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from stagewright.executor.simulation.difference import Part
from stagewright.formulations.parallelism.document import LayoutPlan, differences, rounded
from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.switches import price_effects
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import format_bytes
from stagewright.solvers.parallelism.tree import compiled_walk


@dataclass(frozen=True, slots=True)
class LayoutDifference:
    """How the second of two layouts differs from the first.

    ``parts`` add up to ``iteration``, on the busiest rank; zeros are left out. ``prices`` are what
    each adds to the iteration, switched off alone; they do not add up. ``memory_bytes`` are the
    peaks by the position in the pipeline, of the first layout and of the second. ``changes`` says
    in words which fields of layout and problem differ.
    """

    iteration: Part
    parts: tuple[Part, ...]
    tokens_per_second: tuple[float, float]
    prices: tuple[Part, ...]
    memory_bytes: tuple[tuple[float, ...], tuple[float, ...]]
    changes: tuple[str, ...]


def layout_difference(first: LayoutPlan, second: LayoutPlan) -> LayoutDifference:
    """How the ``second`` layout differs from the first, both evaluated again.

    Raises
    ------
    InputError
        If they are of different models, or a layout breaks a rule.
    """
    models = [one.problem.architecture for one in (first, second)]
    if models[0] != models[1]:
        names = [f"{one.name!r} with {one.layers} blocks" for one in models]
        raise InputError(
            f"the first layout is of {names[0]}, the second of {names[1]}: only layouts of one "
            "model, with the same weights trained, are compared"
        )
    one, other = (evaluate(plan.problem, plan.layout, compiled_walk()) for plan in (first, second))
    return LayoutDifference(
        iteration=Part("iteration", one.seconds, other.seconds),
        parts=tuple(
            Part(part.part, rounded(part.seconds), rounded(part.other_seconds))
            for part in reversed(differences(one, other))
            if rounded(max(part.seconds, part.other_seconds))
        ),
        tokens_per_second=(_tokens(first.problem, one), _tokens(second.problem, other)),
        prices=tuple(_prices((first.problem, one), (second.problem, other))),
        memory_bytes=(_peaks(one), _peaks(other)),
        changes=(
            *first.layout.differences(second.layout),
            *_changes(first.problem, second.problem),
        ),
    )


def _tokens(problem: TrainingProblem, one: Estimate) -> float:
    return problem.batch * problem.sequence / one.seconds


def _peaks(one: Estimate) -> tuple[float, ...]:
    return tuple(rank.total for rank in one.memory)


def _prices(
    first: tuple[TrainingProblem, Estimate], second: tuple[TrainingProblem, Estimate]
) -> Iterator[Part]:
    """The prices that add more to one iteration than to the other, the largest change first."""
    adds, others = (
        {effect.price: rounded(effect.seconds) for effect in price_effects(*one, compiled_walk())}
        for one in (first, second)
    )
    least = RELATIVE_TOLERANCE * max(first[1].seconds, second[1].seconds)
    parts = [
        Part(price, adds.get(price, 0.0), others.get(price, 0.0)) for price in {**adds, **others}
    ]
    for part in sorted(parts, key=lambda part: -abs(part.difference)):
        if abs(part.difference) > least:
            yield part


def _changes(first: TrainingProblem, second: TrainingProblem) -> Iterator[str]:
    """The fields of the problems that differ."""
    for what, one, other in zip(_NAMES, _said(first), _said(second), strict=True):
        if one != other:
            yield f"{what} {one} -> {other}"
    for field in fields(first.precision):
        mine, others = (getattr(each.precision, field.name) for each in (first, second))
        if mine != others:
            yield f"{field.name} {mine} -> {others}"


_NAMES = (
    "sequence", "batch", "devices", "kind of device", "devices in a server", "memory of a device",
    "links", "rates", "software", "attention", "overlap", "reserve",
)  # fmt: skip


def _said(problem: TrainingProblem) -> tuple[object, ...]:
    fabric = problem.fabric
    links = ", ".join(
        f"{level.name} {level.bytes_per_second / 1e9:g} GB/s" for level in fabric.levels
    )
    return (
        problem.sequence,
        problem.batch,
        fabric.devices,
        fabric.device,
        fabric.per_server,
        format_bytes(fabric.memory_bytes),
        links,
        problem.rates.name,
        problem.memory.name,
        problem.attention,
        "yes" if problem.overlap else "no",
        format_bytes(problem.reserve_bytes),
    )
