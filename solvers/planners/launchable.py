"""Plans that a framework's runtime runs as they are: equal groups of devices in its own orders.

For every size of the groups, number of groups and schedule of the runtime, the stages are cut so
that the slowest is as fast as possible and each holds its microbatches in flight; `arrangements`
has the groups. The schedules are timed in the order of an estimate. The cuts
of the best plans are then moved layer by layer.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.forms.answers import Limits, OnProgress
from stagewright.formulations.pipelines.bounds.relaxation import FILL_AND_DRAIN, WIDE_FILL_AND_DRAIN
from stagewright.formulations.plans.actions import ActionKind
from stagewright.formulations.plans.memory import kept_bytes, stage_static_bytes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound, Stage
from stagewright.formulations.plans.plan_class import DISJOINT_SPLIT, DISJOINT_WHOLE, PlanClass
from stagewright.formulations.schedules.order import Order, placed
from stagewright.formulations.schedules.published.kinds import KINDS, Sizes, schedule_of
from stagewright.formulations.schedules.runtimes import Runtime, torch_runtime
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import counted
from stagewright.solvers.pipelines.relaxation import FillAndDrain
from stagewright.solvers.planners.order import StagedOrder, fitting, timed
from stagewright.solvers.planners.steps.planner import PlannerOptions, PlanSearch, SearchPlanner
from stagewright.solvers.planners.steps.proposal import (
    Choices,
    MemoryMode,
    NoPlan,
    Proposal,
    cost_of,
    with_memory_mode,
)
from stagewright.solvers.planners.steps.reporting import ClassBounds
from stagewright.solvers.planners.structures.arrangements import (
    arrangements,
    every_balanced_cuts,
    lengths,
    stage_seconds,
)

_CLIMBERS = 4  # plans whose cuts are moved
NEAR = 1.1  # times the best cost, below which the cuts of a plan may be moved
_ANYWAY = 5  # pipelines that are timed however short the time, if none fits
SHIFTS = (1, -1, 2, -2)
ENDS = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)  # after which nothing is kept
_NOTHING_FITS = (
    "no balanced pipeline of equal groups of devices fits in memory; `stagewright train-plan` also "
    "divides layers among devices"
)
_SPLIT_FILL = 1 / 3  # of the time to fill and drain, that ZB-H1 leaves where F, I and W are equal
SEARCHING = 0.8  # of the time limit; the rest is for the bound


def plan_launchable(
    problem: PipelineProblem, limits: Limits, on_progress: OnProgress, choices: Choices
) -> Proposal | NoPlan:
    """The best plan found for the runtime of ``choices``, with a bound on all of its plans.

    Raises InputError if no plan for the runtime has the recomputation that is asked for.
    """
    runtime = choices.runtime or torch_runtime(len(problem.chain))
    runtime.require(choices.recompute, "none")
    search = _LaunchableSearch(problem, limits, on_progress, runtime=runtime)
    search.run(choices)
    if search.best is None:
        return NoPlan(f"{runtime.name}: {search.refusal}", proved=not search.shapes)
    pipelines = counted(search.candidates, "pipeline", "pipelines")
    notes = (f"{pipelines}, {search.timed} of their cuts timed", *search.best.notes)
    bounds = _bounds(problem, runtime, search.cost, search.left() / 2)
    return replace(search.best, bounds=bounds, notes=notes)


def _bounds(
    problem: PipelineProblem, runtime: Runtime, cost: float, seconds: float
) -> tuple[Bound, ...]:
    """Lower bounds of relaxations on all plans that the runtime can run."""
    until = monotonic() + seconds
    plans = plans_of(problem, runtime)
    found = ClassBounds(problem, seconds).relaxed(plans, cost)
    for name, one, wide in (
        (FILL_AND_DRAIN, replace(plans, recompute=("none",)), False),
        (WIDE_FILL_AND_DRAIN, plans, True),
    ):
        if (DISJOINT_WHOLE if wide else DISJOINT_SPLIT).contains(one):
            left = max(0.0, until - monotonic())
            proved = FillAndDrain(problem, wide, plans.equal_groups).bound(cost, left)
            found += (Bound(proved, name, "problem", one),)
    return found


@dataclass(frozen=True, slots=True)
class _GroupCandidate:
    """A schedule on groups of devices, whose stages are not cut yet.

    ``least``: seconds that the slowest group computes at least, in an iteration. ``estimate``: the
    same, with the time in which the pipeline fills and drains.
    """

    kind: str
    chunks: int
    groups: tuple[tuple[int, ...], ...]
    mode: MemoryMode
    least: float
    estimate: float


@dataclass(frozen=True, slots=True, eq=False)
class _Pipeline:
    """A candidate with its order and its cuts."""

    candidate: _GroupCandidate
    order: Order
    cuts: tuple[int, ...]


@dataclass(kw_only=True)
class _LaunchableSearch(PlanSearch):
    runtime: Runtime
    timed: int = 0
    candidates: int = 0
    shapes: int = 0  # numbers and sizes of groups
    refusal: str = ""
    tables: dict[object, Floats] = field(default_factory=dict)

    def run(self, choices: Choices) -> None:
        """Time the candidates that may be best, then move the cuts of the best ones."""
        chosen = self.runtime.recompute
        modes = chosen if choices.recompute in (None, "auto") else choices.uniform_modes
        self.refusal = self._too_few()
        found = sorted(self._candidates(modes), key=lambda one: one.estimate)
        self.candidates = len(found)
        scores: list[tuple[float, int, _Pipeline]] = []
        for one in found:
            if self._left() <= 0 and (self.best is not None or self.timed >= _ANYWAY):
                break
            made = self._pipeline(one) if one.least < self.cost else None
            if made is not None:
                scores.append((self._time(made, NEAR * self.cost), len(scores), made))
        for cost, _, made in sorted(scores, key=lambda entry: entry[:2])[:_CLIMBERS]:
            if cost < math.inf:
                self._climb(made, cost)

    def _too_few(self) -> str:
        devices, cuts = len(self.problem.cluster), len(self.runtime.cuts)
        return (
            f"{self.runtime.needs()}; here are {counted(devices, 'device', 'devices')}, "
            f"{counted(self.problem.microbatches, 'microbatch', 'microbatches')} and "
            f"{counted(cuts, 'place', 'places')} to cut the model"
        )

    def _left(self) -> float:
        """Seconds left to search."""
        return self.left() - (1 - SEARCHING) * self.limits.seconds

    # --- Candidates ---------------------------------------------------------------------------

    def _candidates(self, modes: Sequence[MemoryMode]) -> Iterator[_GroupCandidate]:
        """The candidates on the first arrangement of devices, then as long as there is time."""
        others = []
        for r, ranks in self._sizes():
            self.shapes += 1
            first, *more = arrangements(self.problem, r, ranks)
            others += more
            yield from self._on(first, modes)
        for groups in others:
            if self._left() <= self.limits.seconds / 2:
                return
            yield from self._on(groups, modes)

    def _sizes(self) -> Iterator[tuple[int, int]]:
        """The numbers of replicas and ranks."""
        problem, runtime, size = self.problem, self.runtime, len(self.problem.cluster)
        for r in runtime.replicas(problem.chain.microbatch_size, size):
            most = runtime.most_ranks(size // r, problem.microbatches)
            for ranks in lengths(size // r, most) if most else ():
                if ranks >= runtime.least_ranks:
                    yield r, ranks

    def _on(
        self, groups: tuple[tuple[int, ...], ...], modes: Sequence[MemoryMode]
    ) -> Iterator[_GroupCandidate]:
        whole = self.problem.layer_with_whole_backward(0, len(self.problem.chain)) is not None
        for kind, chunks in self.runtime.shapes(len(groups)):
            for mode in modes if not (whole and KINDS[kind].is_split) else ():
                yield from self._candidate(kind, chunks, groups, mode)

    def _candidate(
        self, kind: str, chunks: int, groups: tuple[tuple[int, ...], ...], mode: MemoryMode
    ) -> Iterator[_GroupCandidate]:
        """The candidate; none if nothing fits, be there only one microbatch in each stage."""
        way = KINDS[kind].placement
        device = placed("loop" if way == "line" else way, len(groups), chunks)
        cuts = self._cuts(device, groups, kind, chunks, mode, [1] * len(device))
        if cuts is None:
            self.refusal = _NOTHING_FITS
            return
        seconds = [
            float(self._seconds(groups[d], mode)[k, l])
            for d, (k, l) in zip(device, pairwise(cuts), strict=True)
        ]
        load = float(np.bincount(device, seconds).max())
        fill = load * (len(groups) - 1) / chunks * (_SPLIT_FILL if KINDS[kind].is_split else 1)
        least = self.problem.microbatches * load
        yield _GroupCandidate(kind, chunks, groups, mode, least, least + fill)

    def _pipeline(self, one: _GroupCandidate) -> _Pipeline | None:
        """The candidate with its order, and cuts that leave room for the microbatches in flight."""
        try:
            sizes = Sizes(len(one.groups), self.problem.microbatches, one.chunks)
            order = schedule_of(one.kind, sizes)
        except InputError:  # the schedule does not exist for these numbers
            return None
        held = _in_flight(order)
        cuts = self._cuts(order.device, one.groups, one.kind, one.chunks, one.mode, held)
        if cuts is None:
            self.refusal = _NOTHING_FITS
            return None
        return _Pipeline(one, order, tuple(cuts))

    def _cuts(
        self,
        device: Sequence[int],
        groups: tuple[tuple[int, ...], ...],
        kind: str,
        chunks: int,
        mode: MemoryMode,
        held: Sequence[int],
    ) -> list[int] | None:
        """Balanced cuts of stages that hold so many microbatches each."""
        split = KINDS[kind].is_split
        tables = [
            self._table(groups[d], split, mode, most, chunks)
            for d, most in zip(device, held, strict=True)
        ]
        return every_balanced_cuts(tables)[-1]

    def _seconds(self, group: tuple[int, ...], mode: MemoryMode) -> Floats:
        """Seconds per microbatch of layers [k, l), inf where no stage may be; shape (L+1, L+1)."""
        key = ("seconds", self._alike(group), mode)
        if key not in self.tables:
            problem = self.problem
            seconds = stage_seconds(problem, group, round_robin=False, recomputes=mode != "none")
            allowed = np.zeros(len(problem.chain) + 1, dtype=bool)
            allowed[[0, *self.runtime.cuts, len(problem.chain)]] = True
            self.tables[key] = np.where(allowed[:, None] & allowed[None, :], seconds, np.inf)
        return self.tables[key]

    def _table(
        self, group: tuple[int, ...], split: bool, mode: MemoryMode, held: int, chunks: int
    ) -> Floats:
        """The seconds of a stage that holds ``held`` microbatches; inf where they do not fit.

        A stage has an equal share of the memory of its devices.
        """
        key = (self._alike(group), split, mode, held, chunks)
        if key not in self.tables:
            static, kept, working = self._bytes(group, split, mode)
            room = float(self.problem.memory_bytes[list(group)].min())
            fits = chunks * (static + held * kept) + working <= room
            self.tables[key] = np.where(fits, self._seconds(group, mode), np.inf)
        return self.tables[key]

    def _bytes(self, group: tuple[int, ...], split: bool, mode: MemoryMode) -> Floats:
        """Static, kept and working bytes of layers [k, l) on a group, shape (3, L + 1, L + 1)."""
        key = ("bytes", self._alike(group), split, mode)
        if key not in self.tables:
            self.tables[key] = self._priced_bytes(group, split, mode)
        return self.tables[key]

    def _priced_bytes(self, group: tuple[int, ...], split: bool, mode: MemoryMode) -> Floats:
        names = tuple(self.problem.cluster.devices[v].name for v in group)
        seconds = self._seconds(group, mode)
        found = np.zeros((3, *seconds.shape))
        for k, l in zip(*np.nonzero(np.isfinite(seconds)), strict=True):
            stage = with_memory_mode(Stage((int(k), int(l)), names), mode)
            kept = kept_bytes(self.problem, stage, split)
            static = stage_static_bytes(self.problem, stage)
            found[:, k, l] = static, kept.saved_bytes, kept.working_bytes
        return found

    def _alike(self, group: tuple[int, ...]) -> tuple[object, ...]:
        """Key of the costs of a stage on a group: kinds, number of devices, memory."""
        kinds = {self.problem.cluster.devices[v].kind for v in group}
        memory = float(self.problem.memory_bytes[list(group)].min())
        return (tuple(sorted(kinds)), len(group), memory)

    # --- Times --------------------------------------------------------------------------------

    def _time(self, one: _Pipeline, ceiling: float) -> float:
        """The cost of a pipeline; inf if it is not below the ceiling or does not fit."""
        self.timed += 1
        kind, groups, mode = one.candidate.kind, one.candidate.groups, one.candidate.mode
        names = [device.name for device in self.problem.cluster.devices]
        stages = tuple(
            with_memory_mode(Stage(layers, tuple(names[v] for v in groups[d])), mode)
            for d, layers in zip(one.order.device, pairwise(one.cuts), strict=True)
        )
        found = timed(self.problem, kind, StagedOrder(one.order, stages))
        cost = cost_of(self.problem, found) if isinstance(found, Proposal) else math.inf
        if isinstance(found, Proposal) and cost < ceiling:
            found = fitting(self.problem, kind, found)
        if not isinstance(found, Proposal):
            self.refusal = found.reason if isinstance(found, NoPlan) else self.refusal
            return math.inf
        if cost >= ceiling:
            return math.inf
        if cost < self.cost:
            self.keep(replace(found, notes=(kind, *found.notes)), cost)
        return cost

    def _climb(self, one: _Pipeline, cost: float) -> None:
        """Move one cut at a time as long as the plan becomes faster."""
        improved = True
        while improved:
            improved = False
            for cuts in self._moved(one.cuts):
                if self._left() <= 0:
                    return
                moved = replace(one, cuts=cuts)
                seconds = self._time(moved, cost)
                if seconds < cost:
                    one, cost, improved = moved, seconds, True
                    break

    def _moved(self, cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        places = (0, *self.runtime.cuts, len(self.problem.chain))
        at: NDArray[np.int64] = np.searchsorted(places, cuts)
        for s in range(1, len(cuts) - 1):
            for by in SHIFTS:
                if at[s - 1] < at[s] + by < at[s + 1]:
                    yield (*cuts[:s], places[at[s] + by], *cuts[s + 1 :])


def _in_flight(order: Order) -> list[int]:
    """The most microbatches of which each stage keeps activations, in the order's rows."""
    held, most = [0] * len(order.device), [0] * len(order.device)
    for row in order.rows:
        for action in row:
            held[action.stage] += action.kind is ActionKind.FORWARD
            held[action.stage] -= action.kind in ENDS
            most[action.stage] = max(most[action.stage], held[action.stage])
    return most


def plans_of(problem: PipelineProblem, runtime: Runtime) -> PlanClass:
    """The smallest class that contains all plans of the problem for the runtime."""
    return runtime.plans(problem.chain.microbatch_size, len(problem.cluster))


PLANNER = SearchPlanner(
    "launchable",
    "plans that a framework runs as they are (--for): equal groups of devices, its own orders",
    "the frameworks' runtimes; published schedules",
    plan_launchable,
    PlannerOptions(("none", "full", "layer", "auto"), runtime=True),
)
