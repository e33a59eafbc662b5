"""Every placement of every cut of a small model, in orders that a framework may run."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations, pairwise, product

from exported_plans import random_rows

from stagewright.executor.export import export
from stagewright.executor.export.options import FormatOptions
from stagewright.formulations.checking.check import check
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.formulations.schedules.order import Order
from stagewright.formulations.schedules.planned import starts_to_the_end
from stagewright.formulations.schedules.published.one_f_one_b import gpipe, interleaved
from stagewright.graphs.documents.errors import InputError


def launched(problem: PipelineProblem, to: str, draw) -> Iterator[PipelinePlan]:
    """The valid plans that the export ``to`` writes, by ``draw`` (a Random) in one random order."""
    for stages, place in staged(problem, to):
        for order in orders(place, problem.microbatches, draw):
            try:
                starts = starts_to_the_end(problem, stages, order)
                plan = assemble(problem, "oracle", stages, starts)
                export(plan, to, FormatOptions(model=problem.chain))
            except InputError:
                continue
            if check(problem, plan) == ():
                yield plan


def staged(problem: PipelineProblem, to: str) -> Iterator[tuple[tuple[Stage, ...], tuple]]:
    """All stages on equal groups of devices, with the group of each."""
    layers, names = len(problem.chain), [one.name for one in problem.cluster.devices]
    modes = ("none", "full", "layer") if to == "deepspeed" else ("none",)
    for count, ranks in product(range(1, layers + 1), range(1, len(names) + 1)):
        sizes = range(1, len(names) // ranks + 1)
        inner = combinations(range(1, layers), count - 1)
        places = [one for one in product(range(ranks), repeat=count) if _in_order(one, ranks)]
        for cut, place, size, mode in product(inner, places, sizes, modes):
            for groups in disjoint(names, size, ranks):
                pairs = zip(pairwise((0, *cut, layers)), place, strict=True)
                yield tuple(Stage(one, groups[p], recompute=mode) for one, p in pairs), place


def _in_order(place: tuple[int, ...], ranks: int) -> bool:
    """Whether all ranks have stages, and the first ones ascend."""
    return list(dict.fromkeys(place)) == list(range(ranks))


def disjoint(names, size: int, count: int) -> Iterator[tuple[tuple[str, ...], ...]]:
    """``count`` groups of ``size`` devices."""
    if count == 0:
        yield ()
        return
    for group in combinations(names, size):
        rest = [one for one in names if one not in group]
        yield from ((group, *groups) for groups in disjoint(rest, size, count - 1))


def orders(place: tuple[int, ...], microbatches: int, draw) -> Iterator[Order]:
    """(Interleaved) 1F1B, GPipe and a random order, of those that exist."""
    ranks, stages = 1 + max(place), len(place)
    if place == tuple(s % ranks for s in range(stages)) and stages % ranks == 0:
        with suppress(InputError):  # not of all numbers
            yield interleaved(ranks, stages // ranks, microbatches)
    yield gpipe(place, microbatches)
    yield Order(tuple(map(tuple, random_rows(place, microbatches, draw.random(), split=False))))
