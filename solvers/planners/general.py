"""Search over all finite plans: any mapping and replication, split backwards, memory savings.

Initial structures are those of known plans and balanced pipelines; where no plan is known, also
pipelines that recompute as little as memory asks for. The best of them are varied, then improved
by hill climbing with restarts. A structure is scheduled only if its lower bound is below the best
cost.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import chain
from time import monotonic
from typing import NamedTuple

import numpy as np

from stagewright.formulations.forms.answers import Limits, OnProgress, Progress
from stagewright.formulations.pipelines.bounds.devices import load_bound, quick_device_bound
from stagewright.formulations.pipelines.bounds.every_plan import why_nothing_fits
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan_class import EVERY_FINITE, EVERY_PLAN
from stagewright.formulations.plans.structure import (
    Endings,
    Structure,
    Work,
    misfit,
    short_bytes,
    work_of,
)
from stagewright.formulations.plans.timing import Blocks
from stagewright.solvers.pipelines.every_plan import every_plan_bounds
from stagewright.solvers.pipelines.structures.scheduling import (
    EQUAL,
    FIRST_RULES,
    Priority,
    best_schedule,
    rules_for,
)
from stagewright.solvers.planners.steps.planner import (
    ANY_RECOMPUTATION,
    PlannerOptions,
    SearchPlanner,
)
from stagewright.solvers.planners.steps.proposal import (
    Choices,
    NoPlan,
    Proposal,
    cost_of,
    structure_of,
)
from stagewright.solvers.planners.steps.warm_start import warm_start
from stagewright.solvers.planners.structures.arrangements import balanced_pipelines
from stagewright.solvers.planners.structures.moves import StructureMoves
from stagewright.solvers.planners.structures.recomputing import recomputing_pipelines

STARTS = 6  # structures that hill climbing starts from
_KICKS = 3  # random moves between a local optimum and the next start
_RESTARTS = 12  # restarts without improvement after which the search ends
SLACK = 1.25  # seeds that cost more than this times the best are not varied
_ACTIONS_SECONDS = 1e-5  # approximate time to schedule a microbatch at a stage
NEAR = 1.03  # structures below this times the best cost are scheduled by all rules


@dataclass(frozen=True, slots=True)
class Score:
    """The quality of a structure, smaller is better: missing bytes, seconds, memory, stages."""

    short: float
    seconds: float
    fullest: float
    stages: int

    def beats(self, other: "Score") -> bool:
        """Whether this one is better by more than rounding."""
        if self.short != other.short or self.short > 0:
            return self.short < other.short
        if abs(self.seconds - other.seconds) > EQUAL * other.seconds:
            return self.seconds < other.seconds
        return (round(self.fullest, 9), self.stages) < (round(other.fullest, 9), other.stages)


class _BoundedWork(NamedTuple):
    """The work of a structure that fits in memory, and a bound on its schedules."""

    work: Work
    endings: Endings
    bound: float


NOTHING = Score(math.inf, math.inf, math.inf, 0)


def plan_general(
    problem: PipelineProblem,
    limits: Limits,
    on_progress: OnProgress,
    choices: Choices | None = None,
    known: Sequence[Proposal] = (),
) -> Proposal | NoPlan:
    """The best plan found, never worse than the ``known`` ones."""
    reason = why_nothing_fits(problem)
    if reason is not None:
        return NoPlan(reason, plans=EVERY_PLAN)
    search = StructureSearch(problem, limits, on_progress, (choices or Choices()).any_mode)
    return search.run(known, limits)


@dataclass
class StructureSearch:
    """Scores of structures and the best plan; a run goes on where the one before it ended.

    ``limits`` are of all runs together, then those of the present one.
    """

    problem: PipelineProblem
    limits: Limits
    on_progress: OnProgress
    choices: Choices
    began: float = field(default_factory=monotonic)
    best: Score = NOTHING
    structure: Structure | None = None
    starts: Blocks | None = None
    reason: str = "no structure was tried"
    scores: dict[Structure, Score] = field(default_factory=dict)
    seeds: dict[Structure, None] = field(default_factory=dict)  # known ones, to climb from
    is_seeded: bool = False
    wins: Counter[Priority] = field(default_factory=Counter)  # rules with more wins are tried first

    def __post_init__(self) -> None:
        self.rng = random.Random(self.limits.seed)
        self.moves = StructureMoves(self.problem, self.choices)
        self.balanced = balanced_pipelines(self.problem)
        self.end = self.began + self.limits.seconds
        self.steps: Iterator[bool] = self._search()
        self.enough = max(
            bound.seconds
            for bound in every_plan_bounds(self.problem)
            if bound.plans.contains(EVERY_FINITE)
        )

    def run(self, known: Sequence[Proposal], limits: Limits) -> Proposal | NoPlan:
        """Search on within ``limits``, also from the ``known`` plans."""
        self.limits, self.began = limits, monotonic()
        before = self.structure
        self._begin_with(known)
        if self.is_seeded and self.structure is not None and self.structure != before:
            self.steps = chain(self._climb(self.structure), self.steps)
        for is_at_end in self.steps:
            if is_at_end or self._over():
                break
        return self._answer()

    def _answer(self) -> Proposal | NoPlan:
        if self.structure is None or self.starts is None:
            return NoPlan(self.reason, proved=False)
        notes = (f"{len(self.scores)} structures examined",)
        return Proposal(self.structure.stages, self.starts, notes=notes)

    def _begin_with(self, known: Sequence[Proposal]) -> None:
        for one in known:
            structure, seconds = structure_of(one), cost_of(self.problem, one)
            self.seeds[structure] = None
            score = Score(0.0, seconds, math.inf, len(one.stages))
            if score.beats(self.best):
                self.best, self.structure, self.starts = score, structure, one.starts

    def _left(self) -> float:
        return self.limits.left(monotonic() - self.began)

    def _over(self) -> bool:
        return self._left() <= 0 or self.best.seconds <= self.enough * (1 + EQUAL)

    def _search(self) -> Iterator[bool]:
        """The steps of the search, without end; True: without new seeds there is little left."""
        if not self.seeds:  # no other search came first, or none found a plan
            recomputing = recomputing_pipelines(self.problem, self.choices.recomputations)
            yield from self._try_all(recomputing)
        varied = (one for seed in [*self.seeds] for one in self.moves.variants(seed))
        yield from self._try_all(chain(varied, copy(self.balanced)))
        yield from self._try_all(self.moves.relieved(copy(self.balanced)))
        for seed in self._promising(STARTS):
            yield from self._try_all(self.moves.variants(seed))
        if not math.isfinite(self.best.seconds):
            for seed in list(self.scores):
                yield from self._try_all(self.moves.variants(seed))
        self.is_seeded = True
        for start in dict.fromkeys([*self._promising(STARTS), *self.seeds]):
            yield from self._climb(start)
        while True:
            yield from self._restart()
            yield True

    def _try_all(self, structures: Iterable[Structure]) -> Iterator[bool]:
        """Score the structures, those with the least bounds first.

        The bound from loads is replaced by a closer one before a structure is scheduled.
        """
        entries: list[tuple[float, int, Structure, _BoundedWork | str | None]] = []
        seen: set[Structure] = set()
        for structure in structures:
            is_new = structure not in self.scores and structure not in seen
            if is_new and self.moves.allows(structure):
                seen.add(structure)
                heappush(entries, (load_bound(self.problem, structure), len(seen), structure, None))
            yield False
        while entries:
            bound, number, structure, known = heappop(entries)
            ceiling = self.best.seconds * SLACK
            if ceiling <= bound < math.inf:
                self.scores[structure] = Score(0.0, math.inf, math.inf, len(structure.stages))
                continue
            if known is None:
                known = self._bounded(structure)
                bound = math.inf if isinstance(known, str) else known.bound
                heappush(entries, (bound, number, structure, known))
            else:
                self.scores[structure] = self._scheduled(structure, ceiling, known)
            yield False

    def _promising(self, count: int) -> list[Structure]:
        """The ``count`` best structures so far."""
        ranked = sorted(
            self.scores, key=lambda one: (self.scores[one].short, self.scores[one].seconds)
        )
        return [one for one in ranked if self.scores[one].seconds < math.inf][:count] or (
            ranked[:count]
        )

    def _score(self, structure: Structure, ceiling: float) -> Score:
        """The structure's score, with the shortest list schedule if that is below ``ceiling``."""
        if structure not in self.scores:
            self.scores[structure] = self._scheduled(structure, ceiling)
        return self.scores[structure]

    def _scheduled(
        self, structure: Structure, ceiling: float, known: _BoundedWork | str | None = None
    ) -> Score:
        count = len(structure.stages)
        if count * self.problem.microbatches * _ACTIONS_SECONDS > self.end - monotonic():
            return Score(0.0, math.inf, math.inf, count)
        if known is None and load_bound(self.problem, structure) >= ceiling:
            return Score(0.0, math.inf, math.inf, count)
        known = known or self._bounded(structure)
        if isinstance(known, str):
            if self.structure is None and self.reason:
                self.reason = known
            short = float(np.maximum(short_bytes(self.problem, structure), 0.0).sum())
            return Score(max(short, 1.0), math.inf, math.inf, count)
        work, endings, bound = known
        if bound >= ceiling:
            return Score(0.0, math.inf, math.inf, count)
        rules = sorted(rules_for(work), key=lambda rule: -self.wins[rule])
        near = self.best.seconds * NEAR
        found = best_schedule(work, endings, rules, max(ceiling, near), bound, near, self._cuts)
        if found is None:
            return Score(0.0, math.inf, math.inf, count)
        self.wins[found.rule] += 1
        score = Score(0.0, found.seconds, found.fullest, count)
        if score.beats(self.best):
            self.best, self.structure, self.starts = score, structure, found.starts
            made = partial(Proposal, structure.stages, found.starts)
            elapsed = monotonic() - self.began
            self.on_progress(Progress(elapsed, found.seconds, self.enough, made))
        return score

    def _bounded(self, structure: Structure) -> _BoundedWork | str:
        """The work and its bound; why the structure does not fit if it does not."""
        problem = misfit(self.problem, structure)
        if problem is not None:
            return problem
        work, endings, _ = work_of(self.problem, structure)
        return _BoundedWork(work, endings, quick_device_bound(work, endings))

    def _cuts(self, rule: int) -> bool:
        """Whether a structure's rules end before this one; a short turn leaves it the first."""
        late = monotonic() > self.end or self.limits.stopped()
        return late or (rule >= FIRST_RULES and self._over())

    def _climb(self, structure: Structure) -> Iterator[bool]:
        """Climb to a local optimum."""
        score = self.scores.get(structure, NOTHING)
        queue = self._unseen(structure)
        while (neighbour := next(queue, None)) is not None:
            found = self._score(neighbour, score.seconds * (1 + 3 * EQUAL))
            if found.beats(score):
                structure, score = neighbour, found
                queue = self._unseen(structure)
            yield False

    def _unseen(self, structure: Structure) -> Iterator[Structure]:
        for neighbour in self.moves.neighbours(structure, self.rng):
            if neighbour not in self.scores:
                yield neighbour

    def _restart(self) -> Iterator[bool]:
        """Climb from random structures near the best, until there is no more improvement."""
        idle = 0
        while idle < _RESTARTS:
            before = self.best
            start = self.structure or next(iter(self._promising(1)), None)
            if start is None:
                return
            for _ in range(_KICKS):
                start = next(self.moves.neighbours(start, self.rng), start)
            self._score(start, math.inf)
            yield from self._climb(start)
            idle = 0 if self.best.beats(before) else idle + 1
            yield False


def plan_from_start(
    problem: PipelineProblem, limits: Limits, on_progress: OnProgress, choices: Choices
) -> Proposal | NoPlan:
    """The best plan found, from the given plan if there is one."""
    began, known = monotonic(), []
    if choices.start is not None:
        first = warm_start(problem, choices.start, choices, limits)
        known = [first] if isinstance(first, Proposal) else []
    left = replace(limits, seconds=limits.left(monotonic() - began))
    return plan_general(problem, left, on_progress, choices, known)


PLANNER = SearchPlanner(
    "general",
    "local search over all finite plans: several stages on a device, any replication, I and W, "
    "recomputation, offloading",
    "list schedules within memory",
    plan_from_start,
    PlannerOptions(ANY_RECOMPUTATION, offload=True, start=True),
)
