"""Bounds, loads and schedules of structures, for a search that compares many of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.pipelines.bounds import quick_bound
from stagewright.formulations.pipelines.device_bounds import quick_device_bound
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.memory import in_flight_limit
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.structure import (
    Structure,
    device_loads,
    misfit,
    work_of,
)
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.pipelines.forward_backward import improve
from stagewright.solvers.pipelines.list_scheduling import list_schedule
from stagewright.solvers.pipelines.structure_rules import rules_for
from stagewright.solvers.pipelines.structure_scheduling import best_schedule
from stagewright.solvers.planners.moves import is_runnable
from stagewright.solvers.planners.proposal import Proposal, proposal_of

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
    """Prices of split stages on disjoint devices, with whole backwards and all activations kept.

    Times of stages and transfers are remembered, as most structures differ in a few stages.
    """

    problem: PipelineProblem
    limits: Limits
    _stages: dict[Stage, tuple[float, float, float, int]] = field(default_factory=dict)
    _sends: dict[object, tuple[float, float]] = field(default_factory=dict)

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
        known = [self._stages.get(one) or self._stage(one) for one in stages]
        forward, backward, finish, limits = zip(*known, strict=True)
        if min(limits) < 1:
            return None
        sends = [self._send(one, other) for one, other in pairwise(stages)]
        there, back = zip(*sends, strict=True) if sends else ((), ())
        return MakespanProblem(
            self.problem.microbatches, forward, backward, there, back, finish, limits
        )

    def _stage(self, stage: Stage) -> tuple[float, float, float, int]:
        """Forward, backward and ending in seconds, and the in-flight limit."""
        place = (*stage.layers, [self.problem.cluster.index[name] for name in stage.devices])
        limit = in_flight_limit(self.problem, *place)
        found = (0.0, 0.0, 0.0, limit)
        if limit:
            seconds = self.problem.compute_seconds(*place)
            found = (*seconds, self.problem.finish_seconds(*place), limit)
        self._stages[stage] = found
        return found

    def _send(self, one: Stage, other: Stage) -> tuple[float, float]:
        key = one.layers[1], one.devices, other.devices
        if key not in self._sends:
            index = self.problem.cluster.index
            groups = [[index[name] for name in stage.devices] for stage in (one, other)]
            self._sends[key] = self.problem.transfer_seconds(one.layers[1], *groups)
        return self._sends[key]

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
        if misfit(self.problem, structure, work) is not None:
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
