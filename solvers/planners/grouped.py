"""Search over pipelines whose stages share groups of devices, each scheduled by rows.

A structure is the cuts of the layers and the group of each stage. Its makespan problem is bounded,
then solved by a short search, forward and backward, or for the rows of the groups if memory is
limited. The best structures are varied: rounds begin at another group, layers with most of a
stage's parameters become stages with all-reduces of their own, cuts and stages move. It finds
orders that list schedules do not, for fewer structures.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from time import monotonic

import numpy as np

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.pipelines.bounds.devices import load_bound
from stagewright.formulations.pipelines.bounds.stages import quick_bound
from stagewright.formulations.pipelines.grouped_stages import GroupedStages, is_grouped, splits
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.structure import Structure, misfit
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.pipelines.forward_backward import improve
from stagewright.solvers.pipelines.list_scheduling import best_list_schedule
from stagewright.solvers.pipelines.rows.search import RowSearch, compile_row_kernels
from stagewright.solvers.planners.steps.planner import PlanSearch
from stagewright.solvers.planners.steps.proposal import NoPlan, Proposal, cost_of, structure_of
from stagewright.solvers.planners.structures.arrangements import balanced_pipelines
from stagewright.solvers.planners.structures.reordering import grouped_starts

RULES = 30  # tried for each structure with limited memory
PASSES = (5, 40)  # without improvement, after which a search without limits of memory ends
NEAR = 1.03  # relative
STARTS = 4  # structures that are varied
SHIFTS = (1, -1, 2, -2)
TURNS = (1, 2, -1)  # of the groups of later rounds
MOST = 0.5  # share of a stage's parameters for which a layer may be a stage of its own


def can_vary(stages: Sequence[Stage]) -> bool:
    """Whether the search takes such stages: on groups of devices, without offloading."""
    return is_grouped(stages) and not any(one.offload for one in stages)


@dataclass
class GroupedSearch(PlanSearch):
    """Scores of structures and the best plan, kept from one run to the next."""

    scores: dict[Structure, float] = field(default_factory=dict)
    bounds: dict[Structure, float] = field(default_factory=dict)  # of seeds
    moves: dict[Structure, Iterator[Structure]] = field(default_factory=dict)  # of those varied
    begun: set[Structure] = field(default_factory=set)  # all that were ever varied

    def __post_init__(self) -> None:
        self.rng = random.Random(self.limits.seed)
        self.balanced = balanced_pipelines(self.problem)

    def run(self, every: Sequence[Proposal], limits: Limits) -> Proposal | NoPlan:
        """The best plan found within ``limits``, never worse than the known ones on groups.

        Seeds and these plans are scored, then the best ones are varied in turn.
        """
        compile_row_kernels()
        self.limits, self.began = limits, monotonic()
        known = [one for one in every if can_vary(one.stages)]
        for one in known:
            seconds = cost_of(self.problem, one)
            if seconds < self.cost:
                self.best, self.cost = one, seconds
        starts = [self._of(one.stages, any(structure_of(one).split)) for one in known]
        self._score_all([*starts, *self.seeds])
        every_seed = (*self.moves, *starts, *self.bounds)
        new = [one for one in every_seed if one in self.moves or self._is_new(one)]
        climbers = sorted(dict.fromkeys(new), key=self.scores.__getitem__)[:STARTS]
        self.moves = {one: self.moves.get(one) or self._neighbours(one) for one in climbers}
        self.begun.update(climbers)
        while self.moves and not self._over():
            for start in list(self.moves):
                self._vary(start)
        if self.best is None:
            return NoPlan("no stages on groups of devices were found to fit", proved=False)
        return replace(self.best, notes=(f"{len(self.scores)} structures examined",))

    def _score_all(self, seeds: Sequence[Structure]) -> None:
        """Score seeds for half of the time, those with the least bounds first."""
        for seed in dict.fromkeys(seeds):
            if seed not in self.bounds and not self._over():
                self.bounds[seed] = self._bound(seed)
        for seed in sorted(self.bounds, key=self.bounds.__getitem__):
            if seed not in self.scores and self.left() >= self.limits.seconds / 2:
                self._score(seed, self.cost)

    def _is_new(self, one: Structure) -> bool:
        """Whether the structure has a score and was never varied."""
        return one in self.scores and one not in self.begun

    def _vary(self, start: Structure) -> None:
        """Try the next neighbour of ``start``, which takes its place if it is better."""
        found = next((one for one in self.moves[start] if one not in self.scores), None)
        if found is None:
            del self.moves[start]
        elif self._score(found, self.scores[start]) < self.scores[start]:
            del self.moves[start]
            self.moves[found] = self._neighbours(found)
            self.begun.add(found)

    def _over(self) -> bool:
        return self.left() <= 0

    @cached_property
    def seeds(self) -> tuple[Structure, ...]:
        """Balanced pipelines on groups of devices, with split backwards where layers allow."""
        every = copy(self.balanced)
        return tuple(self._of(one.stages, True) for one in every if can_vary(one.stages))

    def _of(self, stages: Sequence[Stage], is_split: bool) -> Structure:
        stages = tuple(stages)
        return Structure(
            stages, splits(self.problem, stages) if is_split else (False,) * len(stages)
        )

    def _problems(self, structure: Structure) -> tuple[GroupedStages, list[MakespanProblem]]:
        """The makespan problems of a structure, the one with all-reduces in parallel first."""
        grouped = GroupedStages.of(self.problem, structure)
        return grouped, [*grouped.problems()]

    def _bound(self, structure: Structure) -> float:
        """A bound from the loads of devices; inf if the structure does not fit."""
        fits = misfit(self.problem, structure) is None
        return load_bound(self.problem, structure) if fits else float("inf")

    def _score(self, structure: Structure, ceiling: float) -> float:
        """The cost of the best rows found in a short search; a bound if that is above a ceiling."""
        score = self._bound(structure)
        if score < ceiling:
            grouped, problems = self._problems(structure)
            score = quick_bound(problems[0]) if problems else float("inf")
        if score < ceiling:
            # The all-reduces in the order that promises most.
            times = self._times(min(problems[1:] or problems, key=quick_bound), ceiling)
            found = Proposal(structure.stages, grouped_starts(grouped, times))
            score = cost_of(self.problem, found)
            if score < self.cost:
                self.keep(found, score)
        self.scores[structure] = score
        return score

    def _times(self, scheduling: MakespanProblem, ceiling: float) -> Timetable:
        """A short search for the rows, or forward and backward if memory is no limit.

        It is longer if it comes near ``ceiling``.
        """
        if scheduling.memory:
            rows = RowSearch(scheduling, self.limits.seed)
            rows.first()
            rows.try_rules(RULES)
            return rows.timetable()
        times, target = best_list_schedule(scheduling)[1], quick_bound(scheduling)
        for passes in PASSES:
            left = replace(self.limits, seconds=self.left())
            times = improve(scheduling, times, target, left, passes)
            if times.makespan(scheduling) > NEAR * ceiling:
                break
        return times

    def _neighbours(self, structure: Structure) -> Iterator[Structure]:
        """Parts of backwards or whole ones, other rounds, then cuts and groups in random order."""
        stages, is_split = structure.stages, any(structure.split)
        yield self._of(stages, not is_split)
        groups = list(dict.fromkeys(stage.devices for stage in stages))
        parameters = np.array(self.problem.chain.parameter_bytes)
        for found in (*_parted(stages, parameters), *_turned(stages, groups)):
            yield self._of(found, is_split)
        last = len(stages) - 1
        changes: list[Callable[[], Stages | None]] = [
            partial(_shifted, stages, s, by) for s in range(last) for by in SHIFTS
        ]
        changes += [
            partial(_placed, stages, s, group)
            for s, stage in enumerate(stages)
            for group in groups
            if group != stage.devices
        ]
        changes += [
            partial(_swapped, stages, s, t) for s in range(last + 1) for t in range(s + 1, last + 1)
        ]
        changes += [
            partial(_divided, stages, s, at, group)
            for s, stage in enumerate(stages)
            for at in range(stage.layers[0] + 1, stage.layers[1])
            for group in groups
        ]
        changes += [partial(_joined, stages, s) for s in range(last)]
        self.rng.shuffle(changes)
        for change in changes:
            changed = change()
            if changed is not None:
                structure = self._of(changed, is_split)
                if _fits(self.problem, structure):
                    yield structure


Stages = tuple[Stage, ...]


def _fits(problem: PipelineProblem, structure: Structure) -> bool:
    """Whether every microbatch has enough samples for the replicas."""
    return all(
        len(stage.devices) <= problem.most_replicas(*stage.layers) for stage in structure.stages
    )


def _parted(stages: Stages, parameters: Floats) -> Iterator[Stages]:
    """The stages, with the layers that have most of a stage's parameters on their own.

    Other layers' weight gradients can then be computed during their all-reduces.
    """
    parted: list[Stage] = []
    for stage in stages:
        first, stop = stage.layers
        own = parameters[first:stop]
        heavy = first + int(own.argmax())
        cuts = {first, stop}
        if own.max() > MOST * own.sum():
            cuts |= {heavy, heavy + 1}
        parted += [replace(stage, layers=layers) for layers in pairwise(sorted(cuts))]
    if len(parted) > len(stages):
        yield tuple(parted)


def _turned(stages: Stages, groups: Sequence[tuple[str, ...]]) -> Iterator[Stages]:
    """The stages, with the groups of some round and all later ones turned by a few places.

    A round ends where all groups have had a stage since its begin. If every round begins at the
    same group, the one with the first layers is also the first to end its forwards in the last
    round, and the last to begin its backwards.
    """
    begins, seen = [], set[tuple[str, ...]]()
    for s, stage in enumerate(stages):
        if len(seen) == len(groups) and stage.devices != stages[s - 1].devices:
            begins.append(s)
            seen.clear()
        seen.add(stage.devices)
    for begin in begins[::-1]:
        for by in TURNS:
            if by % len(groups):
                place = {group: groups[(g + by) % len(groups)] for g, group in enumerate(groups)}
                later = [replace(one, devices=place[one.devices]) for one in stages[begin:]]
                yield (*stages[:begin], *later)


def _shifted(stages: Stages, s: int, by: int) -> Stages | None:
    one, other = stages[s : s + 2]
    border = one.layers[1] + by
    if not one.layers[0] < border < other.layers[1]:
        return None
    one = replace(one, layers=(one.layers[0], border))
    return (*stages[:s], one, replace(other, layers=(border, other.layers[1])), *stages[s + 2 :])


def _placed(stages: Stages, s: int, group: tuple[str, ...]) -> Stages:
    return (*stages[:s], replace(stages[s], devices=group), *stages[s + 1 :])


def _swapped(stages: Stages, s: int, t: int) -> Stages | None:
    one, other = stages[s].devices, stages[t].devices
    return None if one == other else _placed(_placed(stages, s, other), t, one)


def _joined(stages: Stages, s: int) -> Stages | None:
    """Stages s and s + 1 as one, if they are on the same group."""
    one, other = stages[s : s + 2]
    if one.devices != other.devices:
        return None
    joined = replace(one, layers=(one.layers[0], other.layers[1]))
    return (*stages[:s], joined, *stages[s + 2 :])


def _divided(stages: Stages, s: int, at: int, group: tuple[str, ...]) -> Stages:
    """Stage s in two parts, the later one on a group."""
    first, stop = stages[s].layers
    one = replace(stages[s], layers=(first, at))
    other = replace(stages[s], layers=(at, stop), devices=group)
    return (*stages[:s], one, other, *stages[s + 1 :])
