"""Orders of the computations of given stages on groups of devices, which may share groups.

The computations get their times from a makespan problem; then all-reduces and optimizer steps
follow as the checker prices them. One problem has no turns of all-reduces: a bound on it is one on
every plan of the stages. The others have some order of the all-reduces.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from time import monotonic

import numpy as np

from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, OnProgress
from stagewright.formulations.pipelines.bounds.server_relaxation import levels_of
from stagewright.formulations.pipelines.grouped_stages import (
    GroupedStages,
    is_grouped,
    relaxed_schedule,
)
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound, Stage
from stagewright.formulations.plans.plan_class import SHARED_SPLIT, SHARED_WHOLE
from stagewright.formulations.plans.structure import Structure, ending_starts
from stagewright.formulations.plans.timing import Blocks
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.pipelines.rows.search import RowSearch, compile_row_kernels
from stagewright.solvers.pipelines.scheduling import solve_schedule
from stagewright.solvers.pipelines.structures.scheduling import blocks_of_starts
from stagewright.solvers.pipelines.structures.state import (
    BACKWARD,
    FORWARD,
    SEND_B,
    SEND_F,
    WEIGHTS,
)
from stagewright.solvers.planners.steps.proposal import NoPlan, Proposal, cost_of, structure_of

WINDOW = 4  # stages that are rebuilt together
STEPS = 3  # changes of a window in one rebuild
PLACEMENTS = 0.25  # of the rebuilds exchange devices only
_FARTHEST = 3  # layers by which a cut moves


@dataclass(slots=True)
class _Part:
    """A stage of a window; it keeps the replication and the memory mode of stage ``like``."""

    like: int
    layers: int
    devices: list[str]


Parts = list[_Part]


@dataclass
class Rebuilding:
    """Rebuilds of structures, drawn from ``rng``.

    A window of neighbouring stages gets other cuts, devices or both; or devices change places in
    the whole plan. The rebuilt structure need not fit in memory, or have samples for all replicas.
    """

    problem: PipelineProblem
    rng: random.Random

    def __post_init__(self) -> None:
        devices, kinds = self.problem.cluster.devices, self.problem.kinds
        groups = [level.home for level in levels_of(self.problem.cluster)]
        if len(kinds) > 1:
            groups.append(tuple(kinds.index(one.kind) for one in devices))
        self._names = tuple(one.name for one in devices)
        # The server of every device, per level of links; its kind.
        self._groups = [dict(zip(self._names, group, strict=True)) for group in groups]

    def rebuilt(self, structure: Structure) -> Structure:
        """The structure after one random rebuild; it may be the same."""
        if self.rng.random() < PLACEMENTS:
            return self._exchanged(structure)
        count = len(structure.stages)
        size = self.rng.randint(1, min(WINDOW, count))
        first = self.rng.randint(0, count - size)
        window = structure.stages[first : first + size]
        parts = [
            _Part(first + i, one.layers[1] - one.layers[0], list(one.devices))
            for i, one in enumerate(window)
        ]
        changes = (
            self._shift, self._give, self._merge, self._split, self._deal, self._swap, self._use,
            self._even,
        )  # fmt: skip
        used = {name for one in structure.stages for name in one.devices}
        idle = [name for name in self._names if name not in used]
        for _ in range(self.rng.randint(1, STEPS)):
            self.rng.choice(changes)(parts, idle)
        return self._assembled(structure, first, size, parts)

    def _assembled(self, structure: Structure, first: int, size: int, parts: Parts) -> Structure:
        stages, start = [], structure.stages[first].layers[0]
        for part in parts:
            like, stop = structure.stages[part.like], start + part.layers
            stages.append(
                replace(
                    like,
                    layers=(start, stop),
                    devices=tuple(part.devices),
                    replication=like.replication if len(part.devices) > 1 else "split",
                )
            )
            start = stop
        split = tuple(
            structure.split[part.like] and self._splits(stage)
            for part, stage in zip(parts, stages, strict=True)
        )
        return Structure(
            (*structure.stages[:first], *stages, *structure.stages[first + size :]),
            (*structure.split[:first], *split, *structure.split[first + size :]),
        )

    def _splits(self, stage: Stage) -> bool:
        return self.problem.layer_with_whole_backward(*stage.layers) is None and not stage.offload

    def _pair(self, parts: Parts) -> tuple[_Part, _Part] | None:
        """Two neighbours, in random order."""
        if len(parts) < 2:
            return None
        i = self.rng.randrange(len(parts) - 1)
        pair = [parts[i], parts[i + 1]]
        self.rng.shuffle(pair)
        return pair[0], pair[1]

    def _shift(self, parts: Parts, idle: list[str]) -> None:
        """Move layers over a cut."""
        if pair := self._pair(parts):
            one, other = pair
            by = min(self.rng.randint(1, _FARTHEST), other.layers - 1)
            one.layers, other.layers = one.layers + by, other.layers - by

    def _give(self, parts: Parts, idle: list[str]) -> None:
        """Move a device to a neighbour."""
        if (pair := self._pair(parts)) and len(pair[1].devices) > 1:
            name = self.rng.choice(pair[1].devices)
            if name not in pair[0].devices:
                pair[1].devices.remove(name)
                pair[0].devices.append(name)

    def _merge(self, parts: Parts, idle: list[str]) -> None:
        if len(parts) > 1:
            i = self.rng.randrange(len(parts) - 1)
            other = parts.pop(i + 1)
            parts[i].layers += other.layers
            parts[i].devices = list(dict.fromkeys(parts[i].devices + other.devices))

    def _split(self, parts: Parts, idle: list[str]) -> None:
        """Cut a stage in two; the second has some of its devices, or an idle one."""
        i = self.rng.randrange(len(parts))
        part = parts[i]
        if part.layers == 1 or (len(part.devices) == 1 and not idle):
            return
        if len(part.devices) > 1:
            half = self.rng.randint(1, len(part.devices) - 1)
            part.devices, devices = part.devices[:half], part.devices[half:]
        else:
            devices = [idle.pop(self.rng.randrange(len(idle)))]
        layers = self.rng.randint(1, part.layers - 1)
        parts.insert(i + 1, _Part(part.like, part.layers - layers, devices))
        part.layers = layers

    def _deal(self, parts: Parts, idle: list[str]) -> None:
        """Deal the devices of the window again, those of a server one after the other."""
        groups = self.rng.choice(self._groups)
        pool = [name for part in parts for name in part.devices]
        self.rng.shuffle(pool)
        order = list({groups[name]: None for name in pool})
        pool.sort(key=lambda name: order.index(groups[name]))
        ends = list(accumulate(len(part.devices) for part in parts))
        for part, end in zip(parts, ends, strict=True):
            part.devices = pool[end - len(part.devices) : end]

    def _swap(self, parts: Parts, idle: list[str]) -> None:
        """Exchange the devices of two stages."""
        one, other = self.rng.choice(parts), self.rng.choice(parts)
        one.devices, other.devices = other.devices, one.devices

    def _use(self, parts: Parts, idle: list[str]) -> None:
        """Use an idle device, or leave one idle."""
        part = self.rng.choice(parts)
        if idle and self.rng.random() < 0.5:
            part.devices.append(idle.pop(self.rng.randrange(len(idle))))
        elif len(part.devices) > 1:
            idle.append(part.devices.pop(self.rng.randrange(len(part.devices))))

    def _even(self, parts: Parts, idle: list[str]) -> None:
        """Share the layers of two neighbours anew."""
        if pair := self._pair(parts):
            both = pair[0].layers + pair[1].layers
            pair[0].layers = self.rng.randint(1, both - 1)
            pair[1].layers = both - pair[0].layers

    def _exchanged(self, structure: Structure) -> Structure:
        """Devices change places: two of them, or all of a stage with others of one server."""
        groups = self.rng.choice(self._groups)
        stage = self.rng.choice(structure.stages)
        if self.rng.random() < 0.5:
            one, other = self.rng.choice(stage.devices), self.rng.choice(self._names)
            return _renamed(structure, {one: other, other: one})
        home = groups[self.rng.choice(self._names)]
        out = [name for name in stage.devices if groups[name] != home]
        there = [n for n in self._names if groups[n] == home and n not in stage.devices]
        self.rng.shuffle(there)
        pairs = list(zip(out, there, strict=False))
        return _renamed(structure, dict(pairs) | {other: one for one, other in pairs})


def _renamed(structure: Structure, names: dict[str, str]) -> Structure:
    """The structure with other devices in the places of some."""
    stages = tuple(
        replace(one, devices=tuple(names.get(name, name) for name in one.devices))
        if any(name in names for name in one.devices)
        else one
        for one in structure.stages
    )
    return replace(structure, stages=stages)


RULES = 100  # tried for each order of all-reduces
BEST = 2  # orders of all-reduces for which the schedule is then solved
TIGHT = 1e-6  # relative; an order this near to its bound is not improved


def reorder(
    problem: PipelineProblem, known: Proposal, limits: Limits, on_progress: OnProgress
) -> Proposal | NoPlan:
    """The stages of ``known`` in the best order found, with a bound on all orders; never slower."""
    if not is_grouped(known.stages) or any(stage.offload for stage in known.stages):
        return NoPlan("only split stages on groups of devices are reordered", proved=False)
    compile_row_kernels()
    search = _Reordering(problem, known, limits)
    search.run()
    proved = () if search.bound is None else (search.bound,)
    return replace(search.best, bounds=(*known.bounds, *proved))


@dataclass
class _Reordering:
    """The best order so far, and the best bound on all orders."""

    problem: PipelineProblem
    best: Proposal
    limits: Limits
    began: float = field(default_factory=monotonic)
    bound: Bound | None = None

    def __post_init__(self) -> None:
        structure = structure_of(self.best)
        self.parts = any(structure.split)
        self.grouped = GroupedStages.of(self.problem, structure)
        self.relaxed = relaxed_schedule(self.problem, structure.stages, self.parts)
        self.cost = cost_of(self.problem, self.best)

    def run(self) -> None:
        """Try rules for every order of all-reduces, then solve the best ones and the relaxation."""
        tried = sorted(self._tried(), key=lambda entry: entry[0])[:BEST]
        known: dict[MakespanProblem, Timetable | None]
        known = {scheduling: times for _, scheduling, times in tried}
        if self.relaxed is not None and self.relaxed not in known:
            known[self.relaxed] = None
        for number, (scheduling, times) in enumerate(known.items()):
            left = self._left() / (len(known) - number)
            if left > 0 and not self._is_proved():
                self._solve(scheduling, times, left)

    def _tried(self) -> Iterator[tuple[float, MakespanProblem, Timetable]]:
        for scheduling in self.grouped.problems():
            if self._left() > 0:
                rows = RowSearch(scheduling, self.limits.seed)
                rows.first()
                rows.try_rules(RULES)
                times = rows.timetable()
                yield self._consider(times), scheduling, times

    def _solve(self, scheduling: MakespanProblem, times: Timetable | None, seconds: float) -> None:
        limits = replace(self.limits, seconds=seconds)
        solved = solve_schedule(scheduling, "optimal", limits, incumbent=times)
        assert solved.timetable is not None
        if times is not None:
            self._consider(solved.timetable)
        if scheduling == self.relaxed:
            plans = SHARED_SPLIT if self.parts else SHARED_WHOLE
            self.bound = Bound(solved.bound, solved.proved_by, "schedule", plans)

    def _consider(self, times: Timetable) -> float:
        found = replace(self.best, starts=grouped_starts(self.grouped, times))
        seconds = cost_of(self.problem, found)
        if seconds < self.cost and is_valid(self.problem, found):
            self.best, self.cost = found, seconds
        return seconds

    def _is_proved(self) -> bool:
        return self.bound is not None and self.cost <= self.bound.seconds * (1 + TIGHT)

    def _left(self) -> float:
        return self.limits.left(monotonic() - self.began)


def is_valid(problem: PipelineProblem, found: Proposal) -> bool:
    """Whether the checker accepts the plan."""
    return not check(problem, assemble(problem, "reordered", found.stages, found.starts))


def grouped_starts(grouped: GroupedStages, times: Timetable) -> Blocks:
    """The start times of all actions of a timetable."""
    work, endings = grouped.work, grouped.endings
    starts: Floats = np.full_like(work.seconds, np.nan)
    starts[FORWARD], starts[BACKWARD] = times.forward, times.backward
    if times.weight_gradient is not None:
        starts[WEIGHTS] = times.weight_gradient
    sent = work.channel[:-1] >= 0
    starts[SEND_F, :-1] = np.where(sent, times.send_forward, np.nan)
    starts[SEND_B, 1:] = np.where(sent, times.send_backward, np.nan)
    reduces, updates, _ = ending_starts(work, endings, starts)
    return blocks_of_starts(work, starts, reduces, updates)
