"""Local search over allocations in which every device may have several stages.

MadPipe's dynamic program allows only one such device. Allocations are compared by a lower bound on
the iteration from loads, memory and updates
(:func:`~stagewright.formulations.patterns.one_f_one_b.iteration_bound`); patterns are not solved.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, product
from time import perf_counter
from typing import Literal

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.patterns.one_f_one_b import allows, iteration_bound
from stagewright.formulations.patterns.pattern import PatternProblem
from stagewright.formulations.patterns.pattern_problems import PatternProblems
from stagewright.formulations.plans.plan import Stage

Stages = tuple[Stage, ...]
Names = tuple[str, ...]

STEPS = (-2, -1, 1, 2)  # layers by which a boundary moves
MARGIN = 1e-9  # relative; less is no improvement
LONGEST = 1e15  # seconds; an iteration so long that every stage is in group 1


@dataclass(frozen=True, slots=True)
class AllocationMoves:
    """The moves of the local search, on device groups ``groups`` and with memory modes ``modes``.

    ``modes`` are "none", "full" (recomputation) and "offload".
    """

    groups: tuple[Names, ...]
    modes: tuple[str, ...] = ("none",)

    def shuffled(self, stages: Stages, rng: random.Random) -> Iterator[Stages]:
        """Yield the neighbours of ``stages`` in random order.

        Their number is about layers^2 / 2 times groups.
        """
        moves = list(self._moves(stages))
        rng.shuffle(moves)
        for move in moves:
            one = _merged(move())
            offloading = [stage.devices for stage in one if stage.offload]
            if one != stages and len(set(offloading)) == len(offloading):
                yield one

    def _moves(self, stages: Stages) -> Iterator[Callable[[], Stages]]:
        layers = stages[-1].layers[1]
        for s, step in product(range(len(stages) - 1), STEPS):
            yield partial(_shifted, stages, s, step)
        for (start, stop), group in product(combinations(range(layers + 1), 2), self.groups):
            yield partial(_reassigned, stages, start, stop, group)
        for s, r in combinations(range(len(stages)), 2):
            yield partial(_swapped, stages, s, r)
        if len(self.modes) > 1:
            for s, mode in product(range(len(stages)), self.modes):
                yield partial(_treated, stages, s, mode)


def _shifted(stages: Stages, s: int, step: int) -> Stages:
    """Move the boundary after stage s by ``step`` layers, if possible."""
    (start, cut), (_, stop) = stages[s].layers, stages[s + 1].layers
    if not start < cut + step < stop:
        return stages
    left = replace(stages[s], layers=(start, cut + step))
    right = replace(stages[s + 1], layers=(cut + step, stop))
    return (*stages[:s], left, right, *stages[s + 2 :])


def _reassigned(stages: Stages, start: int, stop: int, group: Names) -> Stages:
    """Move a range of layers to one group."""
    before, after = _cut(stages, 0, start), _cut(stages, stop, stages[-1].layers[1])
    template = next(stage for stage in stages if stage.layers[1] > start)
    return (*before, replace(template, layers=(start, stop), devices=group), *after)


def _swapped(stages: Stages, s: int, r: int) -> Stages:
    """Exchange the devices of two stages."""
    swapped = list(stages)
    swapped[s] = replace(stages[s], devices=stages[r].devices)
    swapped[r] = replace(stages[r], devices=stages[s].devices)
    return tuple(swapped)


def _treated(stages: Stages, s: int, mode: str) -> Stages:
    """Change the memory mode of a stage."""
    recompute: Literal["none", "full"] = "full" if mode == "full" else "none"
    changed = replace(stages[s], recompute=recompute, offload=mode == "offload")
    return (*stages[:s], changed, *stages[s + 1 :])


def improve_allocation(
    figures: PatternProblems,
    moves: AllocationMoves,
    stages: Stages,
    target_seconds: float,
    limits: Limits,
) -> Iterator[tuple[Stages, PatternProblem, float]]:
    """Hill climbing from ``stages`` by the lower bound on the iteration.

    It takes the first improvement in random order and ends in a local optimum, at
    ``target_seconds``, or at the time limit.

    Yields
    ------
    tuple
        Stages, their scheduling problem, and its bound in seconds.
    """
    began, rng = perf_counter(), random.Random(limits.seed)
    best = iteration_bound(figures.of(stages))
    while best > target_seconds:
        for one in moves.shuffled(stages, rng):
            if limits.left(perf_counter() - began) <= 0:
                return
            asked = figures.of(one)
            if allows(asked, asked.period_of(min(best * (1 - MARGIN), LONGEST))):
                stages, best = one, iteration_bound(asked)
                yield stages, asked, best
                break
        else:
            return


def disturbed(moves: AllocationMoves, stages: Stages, times: int, rng: random.Random) -> Stages:
    """Apply ``times`` random moves to ``stages``, as a start of another local search."""
    for _ in range(times):
        stages = next(moves.shuffled(stages, rng), stages)
    return stages


def interleaved(
    figures: PatternProblems, groups: Sequence[Names], rounds: int, there_and_back: bool
) -> Stages:
    """Equal shares of the work, assigned to the groups cyclically in ``rounds`` rounds.

    With ``there_and_back`` every second round is in reverse order.
    """
    layers = len(figures.problem.chain)
    whole = [Stage((layer, layer + 1), groups[0]) for layer in range(layers)]
    work = [sum(figures.seconds(stage)) for stage in whole]
    order: list[Names] = []
    for round_ in range(rounds):
        order += groups[::-1] if there_and_back and round_ % 2 else groups
    ends = [sum(work) * (i + 1) / len(order) for i in range(len(order))]
    done, middles = 0.0, []
    for seconds in work:
        middles.append(done + seconds / 2)
        done += seconds
    owners = [sum(end <= middle for end in ends) for middle in middles]
    return _merged(
        [
            replace(stage, devices=order[min(owner, len(order) - 1)])
            for stage, owner in zip(whole, owners, strict=True)
        ]
    )


def _cut(stages: Stages, start: int, stop: int) -> Stages:
    """Restrict ``stages`` to layers [start, stop)."""
    parts = ((stage, max(start, stage.layers[0]), min(stop, stage.layers[1])) for stage in stages)
    return tuple(replace(stage, layers=(low, high)) for stage, low, high in parts if low < high)


def _merged(stages: Sequence[Stage]) -> Stages:
    """Merge consecutive stages on the same devices."""
    found: list[Stage] = []
    for stage in stages:
        last = found[-1] if found else None
        if last and replace(last, layers=stage.layers) == stage:
            found[-1] = replace(last, layers=(last.layers[0], stage.layers[1]))
        else:
            found.append(stage)
    return tuple(found)
