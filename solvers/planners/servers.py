"""Plans from the server-aware relaxation: its relaxed plans, packed into servers.

First come the plans near the bound, then those of a branch and bound that raises the bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from time import monotonic

from stagewright.formulations.forms.answers import Limits, OnProgress, Progress
from stagewright.formulations.pipelines.bounds.server_relaxation import (
    APART,
    RELAXED_TREE,
    SERVERS,
    WITHIN,
    Levels,
    Place,
    RelaxedStage,
    ranks_of,
)
from stagewright.formulations.pipelines.bounds.stages import schedule_bounds
from stagewright.formulations.pipelines.bppm import StageChoice, makespan_problem
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound
from stagewright.formulations.plans.plan_class import DISJOINT_SPLIT
from stagewright.graphs.documents.arrays import Ints
from stagewright.solvers.pipelines.list_scheduling import best_list_schedule
from stagewright.solvers.pipelines.scheduling import solve_schedule
from stagewright.solvers.pipelines.servers.relaxation import ServerBounds
from stagewright.solvers.pipelines.servers.search import STEPS_PER_SECOND
from stagewright.solvers.planners.steps.proposal import NoPlan, Proposal, named_stages, proposal_of
from stagewright.solvers.planners.structures.refine import refine
from stagewright.solvers.planners.structures.uniform import UniformPlanner

SERVER, RACK = 0, 1
Free = dict[int, list[int]]  # devices of each server


def packed(level: Levels, ranks: Ints, stages: Sequence[RelaxedStage]) -> tuple[StageChoice, ...]:
    """Stages on devices: first-fit decreasing of the runs, then the stages that span servers.

    ``ranks``: the rank of every device, shape (V,). A run takes devices as slow as its slowest
    stage may have; if they are too few, any others.
    """
    free: Free = {}
    for device in sorted(range(len(level.home)), key=lambda v: (-ranks[v], v)):
        free.setdefault(level.home[device], []).append(device)
    rack_of = dict(zip(level.home, level.rack, strict=True))
    chosen: dict[int, tuple[int, ...]] = {}
    for wide in _runs(stages, range(len(stages)), RACK):
        near = _rack(free, rack_of, _size(stages, wide))
        for run in _runs(stages, wide, SERVER):
            spans = _spans(stages, run, SERVER)
            devices = _take(near, ranks, _rank(stages, run), _size(stages, run), spans)
            devices.sort(key=lambda v: ranks[v])
            for s in sorted(run, key=lambda s: stages[s].rank):
                chosen[s] = tuple(sorted(devices[: stages[s].devices]))
                del devices[: stages[s].devices]
    return tuple(StageChoice(stage.start, stage.stop, chosen[s]) for s, stage in enumerate(stages))


def _runs(
    stages: Sequence[RelaxedStage], members: Sequence[int], level: int
) -> Sequence[Sequence[int]]:
    """Runs in one server or rack of the stages ``members``, in the order of packing.

    A stage that spans servers or racks is alone, and the last to be packed.
    """
    runs: list[list[int]] = []
    for s in members:
        place = stages[s].place
        if runs and place is not Place.TAKES_TURNS and APART[place] <= level:
            runs[-1].append(s)
        else:
            runs.append([s])
    return sorted(
        runs,
        key=lambda run: (
            _spans(stages, run, level), _rank(stages, run), -_size(stages, run), run
        ),
    )  # fmt: skip


def _size(stages: Sequence[RelaxedStage], run: Sequence[int]) -> int:
    return sum(stages[s].devices for s in run)


def _spans(stages: Sequence[RelaxedStage], run: Sequence[int], level: int) -> bool:
    place = stages[run[0]].place
    return place is Place.TAKES_TURNS or WITHIN[place] > level


def _rank(stages: Sequence[RelaxedStage], run: Sequence[int]) -> int:
    return max(stages[s].rank for s in run)


def _rack(free: Free, rack_of: dict[int, int], count: int) -> Free:
    """The servers of the fullest rack with ``count`` free devices, or all servers if none has."""
    racks: dict[int, Free] = {}
    for home, devices in free.items():
        racks.setdefault(rack_of[home], {})[home] = devices
    roomy = [one for one in racks.values() if sum(map(len, one.values())) >= count]
    return min(roomy, key=lambda one: sum(map(len, one.values())), default=free)


def _take(free: Free, ranks: Ints, rank: int, count: int, spans: bool) -> list[int]:
    """Remove ``count`` devices: of the fullest server that has as many, else of several servers.

    Slow devices up to ``rank`` come first, faster ones of the same server after them. A stage that
    spans servers anyway takes the smallest holes.
    """
    fits = {home: [v for v in devices if ranks[v] <= rank] for home, devices in free.items()}
    roomy = [home for home, devices in fits.items() if len(devices) >= count]
    if roomy and not spans:
        home = min(roomy, key=lambda home: (-ranks[fits[home][0]], len(free[home])))
        taken = fits[home][:count]
    else:
        homes = sorted(free, key=lambda home: len(fits[home]) * (1 if spans else -1))
        suitable = [v for home in homes for v in fits[home]]
        others = [v for home in homes for v in free[home] if ranks[v] > rank]
        taken = [*sorted(suitable, key=lambda v: -ranks[v]), *others[::-1]][:count]
    gone = {*taken}
    for devices in free.values():
        devices[:] = [v for v in devices if v not in gone]
    return taken


_BOUND_SHARE = 0.3  # of the time limit, for the bound
STEP, STEPS = 0.003, 24  # relative times above the bound at which relaxed plans are taken
_STEP_SHARE = 0.01  # of the time limit, for each of them
_TREE_SHARE = 0.5  # of the time left after the first schedules, for branch and bound
BEST = 4  # plans that are scheduled by CP-SAT
_SCHEDULE_SHARE = 0.08  # of the time limit, for each of them
WORTH_IT = 1e-6  # relative improvement


def plan_servers(
    problem: PipelineProblem, limits: Limits, on_progress: OnProgress
) -> Proposal | NoPlan:
    """The best schedule of relaxed plans near the bound, then refined."""
    return PackingSearch(problem, limits, on_progress).run(limits)


@dataclass
class _PackedCandidate:
    """Stages and their best schedule so far; ``bound`` holds for every schedule of them."""

    stages: tuple[StageChoice, ...]
    scheduling: MakespanProblem
    times: Timetable
    seconds: float
    bound: float


@dataclass
class PackingSearch:
    """The packed plans so far and the relaxation, kept from one run to the next."""

    problem: PipelineProblem
    limits: Limits
    on_progress: OnProgress
    began: float = field(default_factory=monotonic)
    bound: float = 0.0
    proof: str = SERVERS  # of the bound
    best: _PackedCandidate | None = None
    found: dict[tuple[StageChoice, ...], _PackedCandidate | None] = field(default_factory=dict)

    def run(self, limits: Limits) -> Proposal | NoPlan:
        """Search on within ``limits``."""
        self.limits, self.began = limits, monotonic()
        relaxed = self._relaxed
        self.bound = relaxed.bound(math.inf, _BOUND_SHARE * self._left(), self._consider)
        steps = _STEP_SHARE * self.limits.seconds * STEPS_PER_SECOND
        for i in range(1, STEPS + 1):
            if self._left() <= 0 or self._is_settled():
                break
            for level, plan in relaxed.near(self.bound * (1 + i * STEP), steps):
                self._consider(level, plan)
        if self.best is not None:
            self._schedule()
        bounds = [Bound(self.bound, self.proof, "problem", DISJOINT_SPLIT)]
        if not self._is_settled() and self._left() > 0:
            cost = self.best.seconds if self.best else math.inf
            seconds = _TREE_SHARE * self._left()
            self.bound = relaxed.branch(cost, seconds, self._consider, self.limits.stop)
            self.proof = RELAXED_TREE
            bounds.append(Bound(self.bound, self.proof, "problem", DISJOINT_SPLIT))
        if self.best is None:
            return NoPlan("no relaxed plan fits into the servers", False, tuple(bounds))
        self._schedule()
        known = self._proposal(self.best, tuple(bounds))
        left = replace(self.limits, seconds=self._left())
        return known if self._is_settled() else refine(self.problem, known, left, self.on_progress)

    def _consider(self, level: Levels, relaxed: tuple[RelaxedStage, ...]) -> None:
        """Pack a relaxed plan and schedule its stages, if they are new and fit in memory."""
        stages = packed(level, self._ranks, relaxed)
        if stages in self.found:
            return
        self.found[stages] = None
        scheduling = makespan_problem(self.problem, stages)
        if scheduling is None:
            return
        times = best_list_schedule(scheduling)[1]
        bound = max(one.seconds for one in schedule_bounds(scheduling))
        candidate = _PackedCandidate(stages, scheduling, times, times.makespan(scheduling), bound)
        self.found[stages] = candidate
        self._offer(candidate)

    def _schedule(self) -> None:
        """Improve the schedules of the most promising plans."""
        known = [one for one in self.found.values() if one is not None]
        for one in sorted(known, key=lambda one: (one.bound, one.seconds))[:BEST]:
            assert self.best is not None
            if one.bound >= self.best.seconds * (1 - WORTH_IT) or self._left() <= 0:
                continue
            share = min(self._left(), _SCHEDULE_SHARE * self.limits.seconds)
            limits = replace(self.limits, seconds=share)
            solved = solve_schedule(one.scheduling, "optimal", limits, incumbent=one.times)
            assert solved.timetable is not None
            assert solved.cost is not None
            one.times, one.seconds, one.bound = solved.timetable, solved.cost, solved.bound
            self._offer(one)

    def _offer(self, one: _PackedCandidate) -> None:
        if self.best is not None and one.seconds >= self.best.seconds and one is not self.best:
            return
        self.best = one
        made = partial(self._proposal, one, ())
        elapsed = monotonic() - self.began
        self.on_progress(Progress(elapsed, one.seconds, self.bound, made, DISJOINT_SPLIT))

    def _proposal(self, one: _PackedCandidate, bounds: tuple[Bound, ...]) -> Proposal:
        return proposal_of(self.problem, named_stages(self.problem, one.stages), one.times, bounds)

    def _is_settled(self) -> bool:
        return self.best is not None and self.best.seconds <= self.bound * (1 + WORTH_IT)

    def _left(self) -> float:
        return self.limits.left(monotonic() - self.began)

    @cached_property
    def _relaxed(self) -> ServerBounds:
        return ServerBounds(self.problem)

    @cached_property
    def _ranks(self) -> Ints:
        return ranks_of(self.problem)


PLANNER = UniformPlanner(
    "servers",
    "cuts and replicas of a relaxation that knows slow links, packed into servers",
    "server-aware relaxation",
    plan_servers,
)
