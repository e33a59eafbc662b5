"""Proof that the sub-streams of a program are those of its plan, and end with every row."""

from collections.abc import Iterator

from stagewright.executor.programs.program import (
    Instruction,
    PeriodicProgram,
    Program,
    Row,
    moved_action,
)
from stagewright.executor.programs.work import InvalidProgram
from stagewright.formulations.plans.actions import REDUCE, UPDATE, Action, I, W, parse_action
from stagewright.formulations.plans.plan import PipelinePlan


def require_streams(plan: PipelinePlan, program: Program | PeriodicProgram) -> None:
    """The plan's weight gradients, and no others, are in sub-streams, and so are their all-reduces.

    Such a weight gradient has its stage's input gradient before it and its stage's update after it
    in the same row: nothing is in flight in a sub-stream when a row ends.
    """
    planned = _planned(plan)
    parts = [program.rows] if isinstance(program, Program) else program.segments + program.drains
    for rows in parts:
        for rank, row in enumerate(rows):
            for i, one in enumerate(row):
                own = _first(one.action, plan.microbatches)
                in_plan = (program.devices[rank], own) in planned
                if one.action.kind is REDUCE:
                    in_plan = any(_adds_in_sub(other, one.action.stage) for other in row)
                if (one.stream is not None) != in_plan:
                    raise InvalidProgram(
                        f"rank {rank}: {one} must be in the {'sub-' if in_plan else 'main '}stream"
                    )
                if one.action.kind is W and in_plan:
                    _require_inside(rank, row, i)


def _planned(plan: PipelinePlan) -> set[tuple[str, Action]]:
    """Device and action of every computation that the plan has in a sub-stream."""
    if plan.is_periodic:
        return set()
    found = {
        (one.device, parse_action(one.action)) for one in plan.actions if one.stream is not None
    }
    for device, action in found:
        if not plan.is_backward_first or action.kind is not W:
            raise InvalidProgram(
                f"{action} on {device} is in the sub-stream: only weight gradients can be, in a "
                "plan that begins with the backwards"
            )
    return found


def _first(action: Action, microbatches: int) -> Action:
    """The action for the same microbatch of the first mini-batch."""
    if action.kind is not W or action.microbatch is None:
        return action
    return moved_action(action, -(action.microbatch // microbatches), microbatches)


def _adds_in_sub(one: Instruction, stage: int) -> bool:
    return one.action.kind is W and one.action.stage == stage and one.stream is not None


def _require_inside(rank: int, row: Row, i: int) -> None:
    s, m = row[i].action.stage, row[i].action.microbatch
    if Action(s, I, m) not in _actions(row[:i]):
        raise InvalidProgram(f"rank {rank}: {row[i]} in the sub-stream comes before {s}{I}{m}")
    if Action(s, UPDATE) not in _actions(row[i:]):
        raise InvalidProgram(f"rank {rank}: no {s}{UPDATE} waits for {row[i]} in the sub-stream")


def _actions(row: Row) -> Iterator[Action]:
    return (one.action for one in row)
