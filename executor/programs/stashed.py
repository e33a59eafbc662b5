"""Versions of the weights in a periodic program where they change after every microbatch.

A microbatch uses the newest version at its forward, or with vertical sync as many updates as the
first stage has made at its own forward of it. A version is kept for as long as a microbatch needs
it: one in flight, or with vertical sync one that has begun on the first stage alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from stagewright.executor.programs.pattern_order import ShiftedOperation
from stagewright.executor.programs.program import (
    SENDS,
    Instruction,
    ProgramRows,
    Rows,
    plan_devices,
    stages_on,
)
from stagewright.formulations.plans.actions import (
    COMPUTE,
    REDUCE,
    UPDATE,
    Action,
    ActionKind,
    B,
    F,
    Operation,
    W,
)
from stagewright.formulations.plans.plan import PipelinePlan

State = tuple[int, int, tuple[int, ...], tuple[tuple[int, int], ...]]


@dataclass(slots=True)
class _StageVersions:
    """A stage's versions on a rank, by their number of updates; ``held[-1]`` is the newest.

    ``of`` are the versions of the microbatches in flight, ``forwards`` is the number of forwards
    that have begun.
    """

    used: int = 0
    forwards: int = 0
    held: list[int] = field(default_factory=lambda: [0])
    of: dict[int, int] = field(default_factory=dict)

    def relative(self, microbatches: int) -> State:
        """All version numbers, less a number of microbatches, each of which makes a version."""
        return (
            self.used - microbatches,
            self.forwards - microbatches,
            tuple(one - microbatches for one in self.held),
            tuple((m - microbatches, one - microbatches) for m, one in self.of.items()),
        )


class StashedWalk:
    """The weights of all ranks' stages, iteration by iteration; ``order`` is that of a period."""

    def __init__(self, plan: PipelinePlan, order: Sequence[ShiftedOperation]) -> None:
        self.plan, self.iteration = plan, 0
        self._stages = [
            {s: _StageVersions() for s in stages_on(plan, d)} for d in plan_devices(plan)
        ]
        at = {one.operation: (one.shift, i) for i, one in enumerate(order)}
        self._ends = {s: W if Operation(s, W) in at else B for s in range(len(plan.stages))}
        (ends, last), (begins, first) = at[Operation(0, self._ends[0])], at[Operation(0, F)]
        self._in_flight = ends - begins + (last > first)  # on the first stage at a forward

    def relative(self) -> list[dict[int, State]]:
        """The versions, relative to the next iteration."""
        microbatches = self.iteration * self.plan.microbatches
        return [
            {s: one.relative(microbatches) for s, one in stages.items()} for stages in self._stages
        ]

    def through(self, rows: Rows, *, to_the_end: bool = False) -> ProgramRows:
        """``rows`` with all-reduces, updates and versions; ``to_the_end`` nothing comes after."""
        stop = (self.iteration + 1) * self.plan.microbatches if to_the_end else None
        return tuple(
            tuple(self._through(row, stages, stop))
            for row, stages in zip(rows, self._stages, strict=True)
        )

    def _through(
        self, row: Iterable[Instruction], stages: dict[int, _StageVersions], stop: int | None
    ) -> Iterator[Instruction]:
        for s, versions in stages.items():
            yield from self._dropped(s, versions, stop)  # what was kept for later iterations
        due: list[int] = []
        for one in row:
            s, kind, m = one.action.stage, one.action.kind, one.action.microbatch
            if kind not in SENDS:  # the sends of a backward come before its update
                yield from self._updates(due, stages, stop)
                due = []
            if kind in COMPUTE:
                assert m is not None
                yield from self._used(s, stages[s], m)
            yield one
            if kind is self._ends[s]:
                assert m is not None
                del stages[s].of[m]
                yield from self._dropped(s, stages[s], stop)
                due.append(s)
        yield from self._updates(due, stages, stop)

    def _used(self, s: int, versions: _StageVersions, m: int) -> Iterator[Instruction]:
        """A microbatch uses one version from its forward on."""
        if m not in versions.of:
            versions.of[m] = self._required(versions, m)
            versions.forwards += 1
        if versions.used != versions.of[m]:
            versions.used = versions.of[m]
            yield Instruction(Action(s, ActionKind.USE, versions.used))

    def _required(self, versions: _StageVersions, m: int) -> int:
        if self.plan.weight_rule.follows_first_stage:
            return max(0, m + 1 - self._in_flight)
        return versions.held[-1]

    def _is_needed(self, versions: _StageVersions, version: int, stop: int | None) -> bool:
        if version in versions.of.values():
            return True
        following = versions.forwards
        if not self.plan.weight_rule.follows_first_stage or following == stop:
            return False
        return version >= self._required(versions, following)

    def _dropped(self, s: int, versions: _StageVersions, stop: int | None) -> Iterator[Instruction]:
        for version in versions.held[:-1]:
            if not self._is_needed(versions, version, stop):
                versions.held.remove(version)
                yield Instruction(Action(s, ActionKind.DROP, version))

    def _updates(
        self, due: Iterable[int], stages: dict[int, _StageVersions], stop: int | None
    ) -> Iterator[Instruction]:
        for s in due:
            versions = stages[s]
            newest = versions.held[-1]
            if len(self.plan.stages[s].devices) > 1:
                yield Instruction(Action(s, REDUCE))
            if self._is_needed(versions, newest, stop):
                yield Instruction(Action(s, ActionKind.STASH, newest))
            else:
                versions.held.remove(newest)
            yield Instruction(Action(s, UPDATE))
            versions.held.append(newest + 1)
            versions.used = newest + 1
