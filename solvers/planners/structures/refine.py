"""Large-neighbourhood search on the stages of a plan, with the makespan as objective.

After Shaw (1998): a part of the plan is rebuilt at random, and the result kept if it is not much
worse (simulated annealing). The bottleneck is on several stages at once in good plans, so that a
rebuild of some of them changes nothing; the objective therefore includes a mean of all loads.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from time import monotonic

import numpy as np

from stagewright.formulations.forms.answers import Limits, OnProgress, Progress
from stagewright.formulations.pipelines.bounds.devices import quick_device_bound
from stagewright.formulations.pipelines.bounds.stages import quick_bound
from stagewright.formulations.pipelines.bppm import message_seconds
from stagewright.formulations.pipelines.grouped_stages import scheduling_of
from stagewright.formulations.pipelines.joint import stage_numbers
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.actions import ActionKind
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.structure import Structure, device_loads, misfit, work_of
from stagewright.formulations.plans.timing import positions, transfers
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.pipelines.forward_backward import improve
from stagewright.solvers.pipelines.list_scheduling import list_schedule
from stagewright.solvers.pipelines.structures.scheduling import best_schedule, rules_for
from stagewright.solvers.planners.steps.proposal import Proposal, cost_of, proposal_of, structure_of
from stagewright.solvers.planners.structures.moves import is_runnable
from stagewright.solvers.planners.structures.reordering import Rebuilding

PASSES = 10  # of forward-backward improvement without success, for one schedule
NEAR = 1.02  # times the ceiling; longer list schedules are not improved
TIGHT = 1e-6  # relative; a schedule this near to its bound is not improved

_Scheduled = tuple[float, Callable[[], Proposal]]


@dataclass(frozen=True, slots=True, eq=False)
class Priced:
    """A structure that fits in memory.

    Attributes
    ----------
    bound
        A lower bound on its iteration time.
    loads
        Seconds that its devices and channels are busy in an iteration.
    schedule
        From a ceiling in seconds to the iteration time of a good schedule and the plan; None if the
        time is not below the ceiling.
    """

    bound: float
    loads: Floats
    schedule: Callable[[float], _Scheduled | None]


@dataclass(frozen=True)
class PlainPrices:
    """Prices of split stages on disjoint devices, with whole backwards and all activations kept."""

    problem: PipelineProblem
    limits: Limits

    def __call__(self, structure: Structure) -> Priced | None:
        """The priced structure; None if it does not fit in memory."""
        scheduling = self._scheduling(structure.stages)
        if scheduling is None:
            return None
        stages = np.add(scheduling.forward, scheduling.backward) * scheduling.microbatches
        sends = np.add(scheduling.send_forward, scheduling.send_backward)
        loads = np.concatenate([stages + scheduling.reduce, sends * scheduling.microbatches])
        bound = quick_bound(scheduling)
        return Priced(bound, loads, partial(self._schedule, structure.stages, scheduling, bound))

    def _scheduling(self, stages: Sequence[Stage]) -> MakespanProblem | None:
        """As ``makespan_problem``."""
        places = [(*one.layers, tuple(positions(self.problem, one)[0])) for one in stages]
        known = [stage_numbers(self.problem, *place) for place in places]
        limits, forward, backward, finish = zip(*known, strict=True)
        if min(limits) < 1:
            return None
        ends = [(stage.layers[1], len(stage.devices)) for stage in stages]
        messages = message_seconds(self.problem, ends)
        forward, backward = (tuple(np.add(one, messages).tolist()) for one in (forward, backward))
        sends = [transfers(self.problem, *ends)[0] for ends in pairwise(stages)]
        _, _, there, back = zip(*sends, strict=True) if sends else ((),) * 4
        return MakespanProblem(
            self.problem.microbatches, forward, backward, there, back, finish, limits
        )

    def _schedule(
        self, stages: tuple[Stage, ...], scheduling: MakespanProblem, bound: float, ceiling: float
    ) -> _Scheduled | None:
        """The best eager schedule, improved if it is near the ceiling."""
        times = list_schedule(scheduling, "eager")
        assert times is not None  # the rule keeps every limit
        seconds = times.makespan(scheduling)
        if ceiling <= seconds < NEAR * ceiling and seconds > bound * (1 + TIGHT):
            times = improve(scheduling, times, bound, self.limits, PASSES)
            seconds = times.makespan(scheduling)
        if seconds >= ceiling:
            return None
        return seconds, partial(proposal_of, self.problem, stages, times)


@dataclass(frozen=True)
class StructurePrices:
    """Prices of any structures."""

    problem: PipelineProblem

    def __call__(self, structure: Structure) -> Priced | None:
        """The priced structure; None if it breaks a rule or does not fit in memory."""
        if not self._is_allowed(structure):
            return None
        work, endings, _ = work_of(self.problem, structure)
        if misfit(self.problem, structure) is not None:
            return None
        bound = quick_device_bound(work, endings)

        def schedule(ceiling: float) -> _Scheduled | None:
            found = best_schedule(work, endings, rules_for(work), ceiling, bound, ceiling * NEAR)
            if found is None:
                return None
            return found.seconds, partial(Proposal, structure.stages, found.starts)

        return Priced(bound, device_loads(work), schedule)

    def _is_allowed(self, structure: Structure) -> bool:
        index = self.problem.cluster.index
        for stage, split in zip(structure.stages, structure.split, strict=True):
            devices = [index[name] for name in stage.devices]
            if (
                not is_runnable(self.problem, stage)
                or (split and self.problem.layer_with_whole_backward(*stage.layers) is not None)
                or (stage.offload and not self.problem.offload_seconds(*stage.layers, devices))
            ):
                return False
        return True


WORTH_IT = 1e-9  # relative improvement; less is rounding
CYCLE = 60  # rebuilds per layer from the best plan on, while the temperature falls to zero
_CYCLES = 6  # without improvement, after which the search ends
_HOT = 0.005  # first temperature, relative to the time of the best plan
_REMEMBERED = 2000  # prices of structures: of few layers, rebuilds find the same ones again
_REHEAT = 2.0  # ratio of the first temperatures of a cycle and the one before
LOADS = 0.6  # weight of the mean load in the objective
_POWER = 4  # of that mean


def refine(
    problem: PipelineProblem,
    known: Proposal,
    limits: Limits,
    on_progress: OnProgress,
    attempts: float = math.inf,
) -> Proposal:
    """The best plan found near ``known``, which is returned if none is better.

    Stages keep the replication and the memory mode of the stages that they come from. Split stages
    on disjoint devices stay so. ``attempts`` limits the number of structures examined.
    """
    search = _Refinement(problem, known, limits, on_progress)
    search.run(attempts)
    if search.steps == 0:
        return known
    notes = (*known.notes, f"stages refined in {search.steps} steps")
    made = search.made()
    same = made.stages == known.stages
    bounds = tuple(one for one in known.bounds if same or one.scope == "problem")
    return replace(made, bounds=bounds, notes=notes)


@dataclass
class _Refinement:
    """The best structure so far (``seconds``), and the one that is rebuilt (``value``)."""

    problem: PipelineProblem
    known: Proposal
    limits: Limits
    on_progress: OnProgress
    steps: int = 0

    def __post_init__(self) -> None:
        self.began = monotonic()
        self.rng = random.Random(self.limits.seed)
        self.moves = Rebuilding(self.problem, self.rng)
        self.best = structure_of(self.known)
        parts = ~np.isnan(self.known.starts[ActionKind.INPUT_GRADIENT])
        plain = not parts.any() and scheduling_of(self.problem, self.best.stages) is not None
        self.price: Callable[[Structure], Priced | None] = lru_cache(_REMEMBERED)(
            PlainPrices(self.problem, self.limits) if plain else StructurePrices(self.problem)
        )
        self.seconds = cost_of(self.problem, self.known)
        self.made: Callable[[], Proposal] = partial(replace, self.known)

    def run(self, attempts: float) -> None:
        """Examine the neighbours of every better plan, and random rebuilds from the best on."""
        current, queue = self.best, _neighbours(self.best)
        priced = self.price(self.best)
        lowest = value = self._value(priced, self.seconds) if priced else math.inf
        cycle = CYCLE * len(self.problem.chain)
        since = examined = 0
        while examined < attempts and since < _CYCLES * cycle and self._left() > 0:
            examined, since = examined + 1, since + 1
            if since % cycle == 0:
                current, value = self.best, lowest
            following = next(queue, None)
            one = following or self.moves.rebuilt(current)
            priced = self.price(one) if one != current else None
            if priced is None:
                continue
            seconds = self._seconds(one, priced)
            found = self._value(priced, seconds)
            if one is self.best:
                current, lowest, value = one, found, found
                since, queue = 0, _neighbours(one)
            elif following is None and found <= value + self._rise(since / cycle):
                current, value = one, found

    def _left(self) -> float:
        return self.limits.left(monotonic() - self.began)

    def _rise(self, cycles: float) -> float:
        """A random rise of the objective that is accepted, ``cycles`` after the best plan."""
        heat = _HOT * _REHEAT ** int(cycles) * (1 - cycles % 1)
        return heat * self.seconds * self.rng.expovariate(1.0)

    def _value(self, priced: Priced, seconds: float) -> float:
        """The objective: the plan's time and the mean of its loads."""
        mean = float((priced.loads**_POWER).mean() ** (1 / _POWER))
        return (1 - LOADS) * seconds + LOADS * mean

    def _seconds(self, one: Structure, priced: Priced) -> float:
        """The bound of a plan, or its time if that may be the best."""
        ceiling = self.seconds * (1 - WORTH_IT)
        found = priced.schedule(ceiling) if priced.bound < ceiling else None
        if found is None:
            return max(priced.bound, self.seconds if priced.bound < ceiling else 0.0)
        self.best, (self.seconds, self.made) = one, found
        self.steps += 1
        self.on_progress(Progress(monotonic() - self.began, self.seconds, 0.0, self.made))
        return self.seconds


def _neighbours(structure: Structure) -> Iterator[Structure]:
    """A border moved, stages merged, cut in two, or with a device less."""
    stages, split = structure.stages, structure.split
    for s, stage in enumerate(stages):
        if s + 1 < len(stages):
            for pair in _across(stage, stages[s + 1]):
                yield Structure(
                    (*stages[:s], *pair, *stages[s + 2 :]),
                    (*split[:s], *split[s : s + len(pair)], *split[s + 2 :]),
                )
        for halves in _cuts(stage):
            yield Structure(
                (*stages[:s], *halves, *stages[s + 1 :]),
                (*split[: s + 1], split[s], *split[s + 1 :]),
            )
        if len(stage.devices) > 1:
            for fewer in (stage.devices[:-1], stage.devices[1:]):
                changed = replace(stage, devices=fewer)
                yield Structure((*stages[:s], changed, *stages[s + 1 :]), split)


def _across(one: Stage, other: Stage) -> Iterator[tuple[Stage, ...]]:
    """Two neighbouring stages with their border moved, or merged."""
    start, stop = one.layers[0], other.layers[1]
    for shift in (1, -1, 2, -2):
        border = one.layers[1] + shift
        if start < border < stop:
            yield replace(one, layers=(start, border)), replace(other, layers=(border, stop))
    devices = one.devices + other.devices
    for split in (len(one.devices) + 1, len(one.devices) - 1):
        if 0 < split < len(devices):
            yield replace(one, devices=devices[:split]), replace(other, devices=devices[split:])
    yield (replace(one, layers=(start, stop), devices=devices),)


def _cuts(stage: Stage) -> Iterator[tuple[Stage, Stage]]:
    """The stage split into two, about evenly in layers and devices."""
    (start, stop), half = stage.layers, len(stage.devices) // 2
    for border in {(start + stop) // 2, (start + stop) // 2 + 1} if half else ():
        if start < border < stop:
            yield (
                replace(stage, layers=(start, border), devices=stage.devices[:half]),
                replace(stage, layers=(border, stop), devices=stage.devices[half:]),
            )
