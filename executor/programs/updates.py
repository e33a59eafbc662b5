"""Passes of lowering: all-reduces and the optimizer's steps."""

from collections.abc import Container, Iterable, Iterator, Mapping
from math import inf

from stagewright.executor.programs.program import (
    SENDS,
    Families,
    Instruction,
    Rows,
    plan_devices,
    stages_on,
)
from stagewright.executor.programs.transfers import starts
from stagewright.formulations.plans.actions import COMPUTE, Action, ActionKind
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.errors import InvalidPlan

B = ActionKind.BACKWARD
W = ActionKind.WEIGHT_GRADIENT


def with_reductions(plan: PipelinePlan, rows: Rows) -> Rows:
    """Add the all-reduce of every stage with several replicas after its last backward on a rank.

    The sends of that backward come before it. It is in the sub-stream if a weight gradient of the
    stage is: the main stream does not wait. Ranks have the all-reduces that they share in one
    order, the plan's, and so among computations that have collectives within them: a replica whose
    last backward is early, or that has no microbatch, waits for those that the plan begins before
    the all-reduce. Where a stage's weights change within the iteration, there is one after every
    backward.
    """
    shared = {s for s, stage in enumerate(plan.stages) if stage.reduces}
    if plan.weight_rule.updates_every_round:
        return [list(_after_backwards(row, ActionKind.REDUCE, shared)) for row in rows]
    start = starts(plan)
    order = sorted(shared, key=lambda s: (start[Action(s, ActionKind.REDUCE)], s))
    out = [list(row) for row in rows]
    for device, row in zip(plan_devices(plan), out, strict=True):
        last = 0
        for s in (s for s in order if device in plan.stages[s].devices):
            begin = start[Action(s, ActionKind.REDUCE)]
            ends = [
                i + 1
                for i, one in enumerate(row)
                if _ends_backward(one, s)
                or (_is_joint(plan, one.action) and start[one.action] < begin)
            ]
            last = max([last, *ends])
            while last < len(row) and row[last].action.kind in SENDS:
                last += 1
            stream = next((one.stream for one in row if one.stream and one.action.stage == s), None)
            row.insert(last, Instruction(Action(s, ActionKind.REDUCE), stream=stream))
            last += 1
    return out


def with_updates(plan: PipelinePlan, rows: Rows, families: Families = ()) -> Rows:
    """Add the optimizer's steps: where the plan has them, or after every round of backwards.

    A round is a microbatch, or as many as the stage's devices take in turn: one for each device. A
    step that is not in the plan, or that needs the gradients of a family, is at the iteration's
    end. All-reduces that the plan begins after a step with an all-gather come after it, so that
    ranks have both in one order.
    """
    if plan.weight_rule.updates_every_round:
        _require_whole_rounds(plan)
        every = range(len(plan.stages))
        return [list(_after_backwards(row, ActionKind.UPDATE, every)) for row in rows]
    together, start = set().union(*families), starts(plan)
    planned = {
        s: inf if s in together else start.get(Action(s, ActionKind.UPDATE), inf)
        for s in range(len(plan.stages))
    }
    out = []
    for device, row in zip(plan_devices(plan), rows, strict=True):
        due = sorted(stages_on(plan, device), key=lambda s: (planned[s], s))
        before = [(position_of_update(row, s, start, planned[s]), s) for s in due]
        whole = [
            one
            for i in range(len(row) + 1)
            for one in (
                *(Instruction(Action(s, ActionKind.UPDATE)) for at, s in before if at == i),
                *row[i : i + 1],
            )
        ]
        for s in (s for s in due if plan.stages[s].shards == "optimizer"):
            whole = _with_later_reductions(whole, Action(s, ActionKind.UPDATE), planned[s], start)
        out.append(whole)
    return out


def _with_later_reductions(
    row: list[Instruction], update: Action, seconds: float, start: Mapping[Action, float]
) -> list[Instruction]:
    """``row`` with the all-reduces that begin at ``seconds`` or later after the ``update``."""
    at = [one.action for one in row].index(update)
    late = [
        one
        for one in row[:at]
        if one.action.kind is ActionKind.REDUCE and start[one.action] >= seconds
    ]
    return [*(one for one in row[:at] if one not in late), row[at], *late, *row[at + 1 :]]


def position_of_update(
    row: list[Instruction], stage: int, start: Mapping[Action, float], seconds: float
) -> int:
    """The position in ``row`` of the first computation that an update at ``seconds`` precedes."""
    own = (i for i, one in enumerate(row) if _ends_backward(one, stage) or _reduces(one, stage))
    for i in range(max(own, default=-1) + 1, len(row)):
        if row[i].action.kind in COMPUTE and start[row[i].action] >= seconds:
            return i
    return len(row)


def _reduces(instruction: Instruction, stage: int) -> bool:
    return instruction.action == Action(stage, ActionKind.REDUCE)


def _require_whole_rounds(plan: PipelinePlan) -> None:
    for s, stage in enumerate(plan.stages):
        turns = stage.turns
        if plan.microbatches % turns:
            raise InvalidPlan(
                f"stage {s}: {turns} devices take turns and update together, so that with "
                f"{plan.weights!r} the microbatches must be a multiple of {turns}, "
                f"got {plan.microbatches}"
            )


def require_equal_turns(plan: PipelinePlan) -> None:
    """Refuse a plan whose stages update after different numbers of microbatches."""
    first = plan.stages[0].turns
    for s, stage in enumerate(plan.stages):
        if stage.turns != first:
            raise InvalidPlan(
                f"stage {s} takes turns among {stage.turns}, stage 0 among {first}: with "
                "'stash+vertical-sync' every stage must make a version as often as the first"
            )


def _is_joint(plan: PipelinePlan, action: Action) -> bool:
    return action.kind in COMPUTE and plan.stages[action.stage].joint > 1


def _ends_backward(instruction: Instruction, stage: int) -> bool:
    return instruction.action.stage == stage and instruction.action.kind in (B, W)


def _after_backwards(
    row: Iterable[Instruction], kind: ActionKind, stages: Container[int]
) -> Iterator[Instruction]:
    """``row`` with an action of ``kind`` after every backward of ``stages``.

    The sends of the backward, and the all-reduce for an update, come before it.
    """
    due: list[Instruction] = []
    for instruction in row:
        if instruction.action.kind not in (*SENDS, ActionKind.REDUCE):
            yield from due
            due = []
        yield instruction
        s = instruction.action.stage
        if s in stages and _ends_backward(instruction, s):
            due.append(Instruction(Action(s, kind)))
    yield from due
