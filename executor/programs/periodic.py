"""Lowering of periodic plans: the rows of an iteration during which the pipeline stays full.

1. `pattern_order`: the operations of a period in one order, each with its index shift. That order,
   repeated, is the order of the whole run, without times and their rounding.
2. `in_periods`: the instructions of some periods, rank by rank. An iteration has as many periods as
   microbatches; the drain has the periods after the last microbatch. As the rows are cut from one
   order, both ranks of a pair have a transfer in the same iteration, in the same order.
3. `with_early_sends`, `with_early_receives`: within the iteration. Nothing is posted for a
   mini-batch that is not known yet.
4. `_WeightsWalk`: all-reduces, updates, and versions of the weights. `StashedWalk` where they
   change after every microbatch.

Plans between two losses: the passes of `lower` make the rows of the plan's window. The forwards in
them are those of the next mini-batch. A run begins with its first forwards, repeats the window, and
drains with the last backwards; both are the window without the rest. All of a mini-batch's
transfers in a direction are in one part, so both ranks of a pair have them in the same order there.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import permutations

from stagewright.executor.programs.lower import (
    lower,
    position_of_update,
    without_updates,
)
from stagewright.executor.programs.program import (
    SENDS,
    Families,
    Instruction,
    PeriodicProgram,
    Program,
    ProgramRows,
    Rows,
    moved,
    plan_devices,
    received,
    stages_on,
    transfers,
    updates_of_iteration,
)
from stagewright.executor.programs.stashed import ShiftedOperation, StashedWalk, pattern_order
from stagewright.executor.programs.transfers import (
    starts,
    with_early_receives,
    with_early_sends,
)
from stagewright.formulations.plans.actions import COMPUTE, FLUSH, Action, ActionKind, F, Operation
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.errors import InvalidPlan

AHEAD = (F, ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD)
"""The kinds of action that a window has for the mini-batch of its second loss."""


def lower_backward_first(plan: PipelinePlan, families: Families = ()) -> PeriodicProgram:
    """The program that carries out a plan between two losses for any number of mini-batches.

    Raises InvalidPlan if the order in the plan contradicts its dependencies, its weights are not
    'flush', or an update needs the gradients of other stages. ``families``: stages whose updates
    depend on each other's gradients; there may be none.
    """
    _require_own_updates(plan, families)
    rows = with_late_updates(plan, without_updates(plan))
    first, last = _part(rows, ahead=True), _part(rows, ahead=False)
    window = tuple(tuple(_ahead(plan, one) for one in row) for row in rows)
    m = plan.microbatches
    following = tuple(tuple(moved(one, 1, m) for one in row) for row in last)
    return PeriodicProgram(plan_devices(plan), m, (first, window), (last, following))


def with_late_updates(plan: PipelinePlan, rows: Rows) -> Rows:
    """Add optimizer steps: each step where the plan has it, or else as late as allowed.

    That is before the rank's first forward of the stage or of a later one, so that all-reduces in
    flight overlap with what comes before.
    """
    start, out = starts(plan), []
    for device, row in zip(plan_devices(plan), rows, strict=True):
        with_steps = list(row)
        for s in stages_on(plan, device):
            step = Action(s, ActionKind.UPDATE)
            at = _latest_position(with_steps, s)
            if step in start:
                at = min(at, position_of_update(with_steps, s, start, start[step]))
            with_steps.insert(at, Instruction(step))
        out.append(with_steps)
    return out


def _latest_position(row: Collection[Instruction], stage: int) -> int:
    forwards = (
        i for i, one in enumerate(row) if one.action.kind is F and one.action.stage >= stage
    )
    return next(forwards, len(row))


def _require_own_updates(plan: PipelinePlan, families: Families) -> None:
    if plan.weight_rule != FLUSH:
        raise InvalidPlan(f"{plan.weights!r} weights, a plan between two losses needs 'flush'")
    for family in families:
        names = ", ".join(map(str, sorted(family)))
        raise InvalidPlan(
            f"the updates of stages {names} need each other's gradients, but in a plan that begins "
            "with the backwards a stage's next forward waits for its own update alone"
        )


def _part(rows: Rows, *, ahead: bool) -> ProgramRows:
    """The window's rows with the forwards alone, or without them."""
    return tuple(tuple(one for one in row if (one.action.kind in AHEAD) == ahead) for row in rows)


def _ahead(plan: PipelinePlan, one: Instruction) -> Instruction:
    """An instruction of the window with its microbatch as counted over mini-batches."""
    return moved(one, int(one.action.kind in AHEAD), plan.microbatches)


B = ActionKind.BACKWARD
W = ActionKind.WEIGHT_GRADIENT
REDUCE, UPDATE = ActionKind.REDUCE, ActionKind.UPDATE


def lower_periodic(plan: PipelinePlan, families: Families = ()) -> PeriodicProgram:
    """The program that carries out a periodic ``plan`` for any number of iterations.

    Iterations are lowered until one begins in the state of the one before, shifted by an iteration:
    from there on they repeat. Raises InvalidPlan if the pattern contradicts its dependencies, or
    two versions of the weights are too few. `verify` finds everything else. ``families``: stages
    that have a parameter in common: their gradients are summed up over all of them.
    """
    _require_weights(plan)
    order, m = pattern_order(plan), plan.microbatches
    last = max(one.shift for one in order)
    every_round = plan.weight_rule.updates_every_round
    walk = StashedWalk(plan, order) if every_round else _WeightsWalk(plan, order, families)
    segments: list[ProgramRows] = []
    drains: list[ProgramRows] = []
    while True:
        i, before = len(segments), walk.relative()
        rows = in_periods(plan, order, range(i * m, (i + 1) * m), (i + 1) * m)
        rest = in_periods(plan, order, range((i + 1) * m, (i + 1) * m + last), (i + 1) * m)
        segments.append(walk.through(_with_early_transfers(plan, rows, rest)))
        drains.append(deepcopy(walk).through(_with_early_transfers(plan, rest), to_the_end=True))
        walk.iteration += 1
        if i * m >= last and walk.relative() == before:
            made = updates_of_iteration(plan)
            return PeriodicProgram(plan_devices(plan), m, tuple(segments), tuple(drains), made)


def lower_any(plan: PipelinePlan, families: Families = ()) -> Program | PeriodicProgram:
    """The program of a plan, by `lower`, `lower_backward_first` or `lower_periodic`."""
    if plan.is_periodic:
        return lower_periodic(plan, families)
    if plan.is_backward_first:
        return lower_backward_first(plan, families)
    return lower(plan, families)


def _require_weights(plan: PipelinePlan) -> None:
    if not plan.weight_rule.may_overlap:
        raise InvalidPlan(
            f"{plan.weights!r} weights, a periodic plan needs 'double-buffer', 'stash' or "
            "'stash+vertical-sync'"
        )
    for s, stage in enumerate(plan.stages):
        if stage.turns > 1:
            raise InvalidPlan(
                f"stage {s} is 'round-robin': in a periodic plan all devices of a stage do every "
                "microbatch, use 'split'"
            )


def in_periods(
    plan: PipelinePlan, order: Iterable[ShiftedOperation], periods: range, stop: int
) -> Rows:
    """Computations and transfers of ``periods``, of the microbatches before ``stop``."""
    rank = {name: r for r, name in enumerate(plan_devices(plan))}
    rows: Rows = [[] for _ in rank]
    order = tuple(order)
    for period in periods:
        for operation, shift in order:
            if 0 <= period - shift < stop:
                action = operation.of(period - shift)
                for device, instruction in _instructions(plan, rank, action):
                    rows[rank[device]].append(instruction)
    return rows


def _instructions(
    plan: PipelinePlan, rank: dict[str, int], action: Action
) -> Iterator[tuple[str, Instruction]]:
    """The instructions of a plan's action on each of its devices."""
    if action.kind in COMPUTE:
        yield from ((device, Instruction(action)) for device in plan.stages[action.stage].devices)
        return
    for sender, receiver in transfers(plan, action):
        yield sender, Instruction(action, rank[receiver])
        yield receiver, Instruction(received(action), rank[sender])


def _with_early_transfers(plan: PipelinePlan, rows: Rows, following: Rows | None = None) -> Rows:
    return with_early_receives(plan, with_early_sends(plan, rows), following)


@dataclass(slots=True)
class _Weights:
    """A stage's weights on a rank, and the version in use.

    Three counts of iterations: those whose backwards are done, those whose all-reduce has begun,
    and those that the weights have been updated by. After u updates there are versions u and
    u + 1.
    """

    ended: int = 0
    reduced: int = 0
    updated: int = 0
    used: int = 1


class _WeightsWalk:
    """The weights of all ranks' stages, iteration by iteration.

    Iteration i computes on version i. Its update makes version i + 2 from i + 1, and drops version
    i, which no computation needs any more. It comes after the last backward, or, where gradients
    are summed up over devices or stages, as late as possible: before the first forward of iteration
    i + 2, or the next all-reduce.

    If that comes before another stage of the family has its gradients of iteration i, it waits for
    the update: the other stage is at most m + 1 periods later, so that it has no gradients of
    iteration i + 2 yet.
    """

    def __init__(
        self, plan: PipelinePlan, order: Sequence[ShiftedOperation], families: Families
    ) -> None:
        self.plan, self.iteration = plan, 0
        devices = plan_devices(plan)
        self._shared = {s for s, stage in enumerate(plan.stages) if stage.replicas > 1}
        self._shared.update(*families)
        self._stages = [
            {s: _Weights() for s, stage in enumerate(plan.stages) if name in stage.devices}
            for name in devices
        ]
        at = {one.operation: (one.shift, i) for i, one in enumerate(order)}
        self._ends = {s: W if Operation(s, W) in at else B for s in range(len(plan.stages))}
        ends = {s: at[Operation(s, kind)] for s, kind in self._ends.items()}
        self._ahead = {
            s
            for family in families
            for s, other in permutations(family, 2)
            if (ends[other][0] - plan.microbatches, ends[other][1]) > ends[s]
        }

    def relative(self) -> list[dict[int, tuple[int, int, int, int]]]:
        """The counts of the weights, relative to the next iteration."""
        i = self.iteration
        return [
            {
                s: (one.ended - i, one.reduced - i, one.updated - i, one.used - i)
                for s, one in stages.items()
            }
            for stages in self._stages
        ]

    def through(self, rows: Rows, *, to_the_end: bool = False) -> ProgramRows:
        """``rows`` with all-reduces, updates and versions; all of them ``to_the_end``.

        Raises InvalidPlan if an iteration begins before the update that makes its weights.
        """
        return tuple(
            tuple(self._through(row, stages, to_the_end))
            for row, stages in zip(rows, self._stages, strict=True)
        )

    def _through(
        self, row: Iterable[Instruction], stages: dict[int, _Weights], to_the_end: bool
    ) -> Iterator[Instruction]:
        due: list[int] = []
        for one in row:
            if one.action.kind not in SENDS:  # the sends of a backward come before its update
                yield from self._ended(due, stages)
                due = []
            if one.action.kind in COMPUTE:
                yield from self._before(one.action, stages[one.action.stage])
            yield one
            if self._ends_iteration(one.action):
                due.append(one.action.stage)
        yield from self._ended(due, stages)
        if to_the_end:
            # First the gradients that other ranks wait for.
            late = [(s, one) for s, one in stages.items() if one.ended > one.reduced]
            for s, weights in (*late, *stages.items()):
                yield from _late_update(s, weights)

    def _ends_iteration(self, action: Action) -> bool:
        m, count = action.microbatch, self.plan.microbatches
        return action.kind is self._ends[action.stage] and m is not None and (m + 1) % count == 0

    def _before(self, action: Action, weights: _Weights) -> Iterator[Instruction]:
        """A computation of iteration i needs version i in use."""
        assert action.microbatch is not None
        s, iteration = action.stage, action.microbatch // self.plan.microbatches
        if iteration > weights.updated + 1:
            yield from _late_update(s, weights)
        if iteration > weights.updated + 1:
            raise InvalidPlan(
                f"stage {s} begins iteration {iteration} by {action} before it has ended iteration "
                f"{weights.updated}: two versions of its weights are too few"
            )
        if weights.used != iteration:
            yield Instruction(Action(s, ActionKind.USE, iteration))
            weights.used = iteration

    def _ended(self, due: Iterable[int], stages: dict[int, _Weights]) -> Iterator[Instruction]:
        """The instructions after the last backward of an iteration."""
        for s in due:
            weights = stages[s]
            if s not in self._shared:
                weights.reduced += 1
            elif weights.reduced == weights.updated:
                yield from _reduction(s, weights)
            weights.ended += 1
            if s not in self._shared or (weights.ended > weights.reduced and s not in self._ahead):
                yield from _late_update(s, weights)  # frees its gradient


def _late_update(s: int, weights: _Weights) -> Iterator[Instruction]:
    """The update whose all-reduce is in flight, if there is one; then the next all-reduce."""
    if weights.reduced > weights.updated:
        yield Instruction(Action(s, ActionKind.DROP, weights.updated))
        yield Instruction(Action(s, ActionKind.STASH, weights.updated + 1))
        yield Instruction(Action(s, UPDATE))
        weights.updated += 1
        weights.used = weights.updated + 1
    if weights.ended > weights.reduced:
        yield from _reduction(s, weights)


def _reduction(s: int, weights: _Weights) -> Iterator[Instruction]:
    yield Instruction(Action(s, REDUCE))
    weights.reduced += 1
