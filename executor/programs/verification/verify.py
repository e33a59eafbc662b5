"""Proof that a program carries out its plan, before any process starts.

The verifier does not know how a program was made. It proves that every computation appears exactly
once, on its rank; that both ranks of a pair have the same transfers in the same order, and the same
all-reduces; that every rank ends (a deadlock is shown as a cycle, with the position in each rank's
row); that every forward uses the version of the weights that the plan's semantics ask for, and its
backward the same; that sub-streams have what the plan has there, and end with each row; and, where
the bytes are known, that every rank stays within its memory at every instruction.

A periodic program is proved for any number of iterations. Every number up
to two of the iterations that repeat is proved by running it. A larger number has more of the
repeating iteration in between: each begins in the state of the one before, and needs nothing from
later ones, since both ends of an iteration's transfers are in it.
"""

from collections.abc import Iterator, Sequence

from stagewright.executor.programs.memory import Footprint, require_memory
from stagewright.executor.programs.program import (
    Families,
    Instruction,
    PeriodicProgram,
    Program,
    Row,
    moved_action,
    plan_devices,
)
from stagewright.executor.programs.verification.progress import PipelineProgress
from stagewright.executor.programs.verification.transfers import (
    require_same_sides,
    require_transfers,
    wanted_transfers,
)
from stagewright.executor.programs.verification.updates import (
    require_computations,
    require_same_reductions,
    require_updates,
    require_updates_at_end,
)
from stagewright.executor.programs.verification.versions import (
    require_versions,
    versions_at_first_stage,
)
from stagewright.executor.programs.work import InvalidProgram, ProgramWork
from stagewright.formulations.plans.actions import (
    REDUCE,
    UPDATE,
    VERSIONED,
    Action,
    I,
    W,
    parse_action,
)
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


def verify(
    plan: PipelinePlan,
    program: Program | PeriodicProgram,
    footprints: Sequence[Footprint] | None = None,
    memory_bytes: Sequence[float] | None = None,
    families: Families = (),
) -> None:
    """Prove that ``program`` carries out ``plan``.

    Raises InvalidProgram with the first violation found. ``program``: a periodic one for a plan
    that spans steps. ``footprints``: per stage, if known. ``memory_bytes``: per rank; only together
    with ``footprints``. ``families``: stages whose updates depend on each other's gradients: they
    share a parameter, or the norm of all gradients is clipped.
    """
    _require_ranks(plan, program)
    require_streams(plan, program)
    for part, work in _whole(plan, program, families):
        for rank, row in enumerate(part.rows):
            require_computations(work, part, rank, row)
            require_updates(work, part.devices[rank], rank, row)
        require_same_reductions(plan, part)
        if isinstance(program, Program):
            require_updates_at_end(part, families)
        require_transfers(part, wanted_transfers(work, part))
        PipelineProgress(work, part).to_the_end()
        at_first_stage = versions_at_first_stage(part)
        for rank, row in enumerate(part.rows):
            require_versions(work, rank, row, at_first_stage)
        if footprints is not None and memory_bytes is not None:
            require_memory(plan, part, footprints, memory_bytes)


def _whole(
    plan: PipelinePlan, program: Program | PeriodicProgram, families: Families
) -> Iterator[tuple[Program, ProgramWork]]:
    """Programs from an empty pipeline to an empty one, each with its work."""
    if isinstance(program, Program):
        yield program, ProgramWork(plan)
        return
    for iterations in range(1, len(program.segments) + 2):
        parts = [*map(program.segment, range(iterations)), program.drain(iterations)]
        for i, rows in enumerate(parts):
            _require_closed(Program(program.devices, rows), min(i + 1, iterations), plan)
        yield program.unrolled(iterations), ProgramWork(plan, iterations, families)


def _require_closed(part: Program, given: int, plan: PipelinePlan) -> None:
    """Require both ends of an iteration's transfers, and known microbatches, in the iteration."""
    for rank, row in enumerate(part.rows):
        for one in row:
            m = one.action.microbatch
            if one.action.kind not in VERSIONED and (m or 0) >= given * plan.microbatches:
                raise InvalidProgram(
                    f"rank {rank}: {one} is done when {given} mini-batches of "
                    f"{plan.microbatches} microbatches are given"
                )
    require_same_sides(part)


def _require_ranks(plan: PipelinePlan, program: Program | PeriodicProgram) -> None:
    devices = plan_devices(plan)
    parts = [program.rows] if isinstance(program, Program) else program.segments + program.drains
    for rows in parts:
        if program.devices != devices or len(rows) != len(devices):
            raise InvalidProgram(
                f"the plan runs on {', '.join(devices)}, the program has {len(rows)} rows for "
                f"{', '.join(program.devices)}"
            )
