"""Local search over allocations: any number of devices with several stages, recomputation.

Where MadPipe's dynamic program has one special processor, here every device may get more stages
than one. Allocations are compared by the period that loads and memory allow at best
(:func:`~stagewright.formulations.one_f_one_b.period_bound`); patterns are not solved.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from time import perf_counter

from stagewright.formulations.forms import Limits
from stagewright.formulations.one_f_one_b import allows, period_bound
from stagewright.formulations.pattern import PatternProblem, PatternProblems
from stagewright.formulations.plan import Stage

Stages = tuple[Stage, ...]
Names = tuple[str, ...]

STEPS = (-2, -1, 1, 2)  # layers by which a boundary moves
MARGIN = 1e-9  # relative; less is no improvement
LONGEST = 1e15  # seconds; a period at which every group is the first


@dataclass(frozen=True, slots=True)
class Moves:
    """What may be changed: the device groups, and what a stage does about what it keeps.

    ``ways`` are "none", "full" (recomputation) and "offload".
    """

    groups: tuple[Names, ...]
    ways: tuple[str, ...] = ("none",)

    def of(self, stages: Stages) -> Iterator[Stages]:
        """Allocations that differ from ``stages`` in one thing."""
        every = chain(
            self._shifted(stages),
            self._moved(stages),
            self._split(stages),
            self._swapped(stages),
            self._treated(stages),
        )
        for one in map(_merged, every):
            offloading = [stage.devices for stage in one if stage.offload]
            if len(set(offloading)) == len(offloading):
                yield one

    def _shifted(self, stages: Stages) -> Iterator[Stages]:
        for s in range(len(stages) - 1):
            (start, cut), (_, stop) = stages[s].layers, stages[s + 1].layers
            for step in STEPS:
                if start < cut + step < stop:
                    pair = (
                        replace(stages[s], layers=(start, cut + step)),
                        replace(stages[s + 1], layers=(cut + step, stop)),
                    )
                    yield (*stages[:s], *pair, *stages[s + 2 :])

    def _moved(self, stages: Stages) -> Iterator[Stages]:
        for s, stage in enumerate(stages):
            for group in self.groups:
                if group != stage.devices:
                    yield (*stages[:s], replace(stage, devices=group), *stages[s + 1 :])

    def _split(self, stages: Stages) -> Iterator[Stages]:
        for s, stage in enumerate(stages):
            start, stop = stage.layers
            for cut in range(start + 1, stop):
                left, right = (
                    replace(stage, layers=(start, cut)),
                    replace(stage, layers=(cut, stop)),
                )
                for group in self.groups:
                    if group != stage.devices:
                        yield (*stages[:s], replace(left, devices=group), right, *stages[s + 1 :])
                        yield (*stages[:s], left, replace(right, devices=group), *stages[s + 1 :])

    def _swapped(self, stages: Stages) -> Iterator[Stages]:
        for s, r in combinations(range(len(stages)), 2):
            if stages[s].devices != stages[r].devices:
                swapped = list(stages)
                swapped[s] = replace(stages[s], devices=stages[r].devices)
                swapped[r] = replace(stages[r], devices=stages[s].devices)
                yield tuple(swapped)

    def _treated(self, stages: Stages) -> Iterator[Stages]:
        for s, stage in enumerate(stages):
            for changed in _ways(stage, self.ways):
                if changed != stage:
                    yield (*stages[:s], changed, *stages[s + 1 :])


def _ways(stage: Stage, ways: Sequence[str]) -> Iterator[Stage]:
    for way in ways:
        yield replace(
            stage, recompute="full" if way == "full" else "none", offload=way == "offload"
        )


def improve_allocation(
    figures: PatternProblems,
    moves: Moves,
    stages: Stages,
    target_seconds: float,
    limits: Limits,
) -> Iterator[tuple[Stages, PatternProblem, float]]:
    """Allocations of ever lower bound on their period, beginning from ``stages``.

    First improvement in a random order; ends in a local optimum, at ``target_seconds``, or at the
    time limit.

    Yields
    ------
    tuple
        Stages, their scheduling problem, and its bound in seconds.
    """
    began, dice = perf_counter(), random.Random(limits.seed)
    best = period_bound(figures.of(stages))
    while best > target_seconds:
        neighbours = list(moves.of(stages))
        dice.shuffle(neighbours)
        for one in neighbours:
            if perf_counter() - began > limits.seconds:
                return
            asked = figures.of(one)
            if allows(asked, min(best * (1 - MARGIN), LONGEST)):
                stages, best = one, period_bound(asked)
                yield stages, asked, best
                break
        else:
            return


def disturbed(moves: Moves, stages: Stages, times: int, dice: random.Random) -> Stages:
    """``stages`` after so many random moves: where a local search may begin again."""
    for _ in range(times):
        stages = dice.choice(list(moves.of(stages)))
    return stages


def _merged(stages: Sequence[Stage]) -> Stages:
    """Neighbours on the same devices become one stage."""
    found: list[Stage] = []
    for stage in stages:
        last = found[-1] if found else None
        if last and replace(last, layers=stage.layers) == stage:
            found[-1] = replace(last, layers=(last.layers[0], stage.layers[1]))
        else:
            found.append(stage)
    return tuple(found)
