"""Lowering of plans between two losses: the rows of every rank from one loss to the next.

The passes of `lower` make the rows of the plan's window. The forwards in them are those of the next
mini-batch. A run begins with its first forwards, repeats the window, and drains with the last
backwards; both are the window without the rest. All of a mini-batch's transfers in a direction are
in one part, so both ranks of a pair have them in the same order there.
"""

from collections.abc import Collection

from stagewright.executor.programs.lower import computations, position_of_update, with_reductions
from stagewright.executor.programs.program import (
    Families,
    Instruction,
    PeriodicProgram,
    ProgramRows,
    Rows,
    moved,
    plan_devices,
    stages_on,
)
from stagewright.executor.programs.transfers import (
    starts,
    with_early_receives,
    with_early_sends,
    with_transfers,
)
from stagewright.formulations.plans.actions import FLUSH, Action, ActionKind, F
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
    rows = computations(plan)
    rows = with_transfers(plan, rows)
    rows = with_early_sends(plan, rows)
    rows = with_early_receives(plan, rows)
    rows = with_reductions(plan, rows)
    rows = with_late_updates(plan, rows)
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
