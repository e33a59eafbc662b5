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
            self._reassigned(stages),
            self._swapped(stages),
            self._treated(stages),
        )
        for one in map(_merged, every):
            offloading = [stage.devices for stage in one if stage.offload]
            if len(set(offloading)) == len(offloading):
                yield one

    def shuffled(self, stages: Stages, dice: random.Random) -> Iterator[Stages]:
        """Those allocations in random order."""
        found = list(self.of(stages))
        dice.shuffle(found)
        return iter(found)

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

    def _reassigned(self, stages: Stages) -> Iterator[Stages]:
        """A range of layers, cut out of its stages, goes to one group."""
        layers = stages[-1].layers[1]
        for start, stop in combinations(range(layers + 1), 2):
            before, after = _cut(stages, 0, start), _cut(stages, stop, layers)
            template = next(stage for stage in stages if stage.layers[1] > start)
            for group in self.groups:
                middle = replace(template, layers=(start, stop), devices=group)
                yield (*before, middle, *after)

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
        for one in moves.shuffled(stages, dice):
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
        stages = next(moves.shuffled(stages, dice))
    return stages


def interleaved(
    figures: PatternProblems, groups: Sequence[Names], rounds: int, there_and_back: bool
) -> Stages:
    """Equal shares of the work, dealt out to the groups in so many rounds.

    Always in the same order, or every other round backwards.
    """
    layers = len(figures.problem.chain)
    whole = [Stage((layer, layer + 1), groups[0]) for layer in range(layers)]
    work = [sum(figures.seconds(stage)) for stage in whole]
    order: list[Names] = []
    for turn in range(rounds):
        order += groups[::-1] if there_and_back and turn % 2 else groups
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
    """The parts of ``stages`` with layers [start, stop)."""
    parts = ((stage, max(start, stage.layers[0]), min(stop, stage.layers[1])) for stage in stages)
    return tuple(replace(stage, layers=(low, high)) for stage, low, high in parts if low < high)


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
