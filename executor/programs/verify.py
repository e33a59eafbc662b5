"""Proof that a program carries out its plan, before any process starts.

Nothing here knows how a program was made. Proved are: every computation stands once and only
once, where it belongs; both ranks of a pair see the same transfers in the same order, and the same
all-reduces; every rank gets to the end (otherwise the cycle is shown, with the place in each rank's
row); every forward uses the version of the weights that the plan's semantics ask for, and its
backward the same; and, where the bytes are known, that every rank keeps within its memory at every
step.

A periodic program is proved for any number of iterations. What is proved by running it is every
number up to two of the iterations that repeat. From there on one more of them is done in between:
it begins as the one before began, only later, and needs nothing from those that follow, since each
iteration's transfers have both of their ends in it.
"""

from collections.abc import Iterator, Sequence

from stagewright.executor.programs.memory import Footprint, require_memory
from stagewright.executor.programs.program import (
    Families,
    PeriodicProgram,
    Program,
    plan_devices,
)
from stagewright.executor.programs.verify_progress import Progress
from stagewright.executor.programs.verify_transfers import require_same_sides, require_transfers
from stagewright.executor.programs.verify_updates import (
    require_computations,
    require_same_reductions,
    require_updates,
    require_updates_at_end,
)
from stagewright.executor.programs.verify_versions import require_versions, versions_at_first_stage
from stagewright.executor.programs.work import InvalidProgram, Work
from stagewright.formulations.plans.actions import VERSIONED
from stagewright.formulations.plans.plan import PipelinePlan


def verify(
    plan: PipelinePlan,
    program: Program | PeriodicProgram,
    footprints: Sequence[Footprint] | None = None,
    memory_bytes: Sequence[float] | None = None,
    families: Families = (),
) -> None:
    """Prove that ``program`` carries out ``plan``.

    Parameters
    ----------
    program
        A periodic one for a periodic plan.
    footprints
        Per stage, if known.
    memory_bytes
        Per rank; only together with ``footprints``.
    families
        Stages whose updates need something of each other's gradients: they have a parameter in
        common, or the norm of all gradients is clipped.

    Raises
    ------
    InvalidProgram
        With the first thing that is wrong.
    """
    for part, work in _whole(plan, program, families):
        _require_ranks(plan, part)
        for rank, row in enumerate(part.rows):
            require_computations(work, part, rank, row)
            require_updates(work, part.devices[rank], rank, row)
        require_same_reductions(plan, part)
        if isinstance(program, Program):
            require_updates_at_end(part, families)
        require_transfers(work, part)
        Progress(work, part).to_the_end()
        at_first_stage = versions_at_first_stage(part)
        for rank, row in enumerate(part.rows):
            require_versions(work, rank, row, at_first_stage)
        if footprints is not None and memory_bytes is not None:
            require_memory(plan, part, footprints, memory_bytes)


def _whole(
    plan: PipelinePlan, program: Program | PeriodicProgram, families: Families
) -> Iterator[tuple[Program, Work]]:
    """Programs from an empty pipeline to an empty one, and what each has to do."""
    if isinstance(program, Program):
        yield program, Work(plan)
        return
    _require_ranks(plan, program)
    for iterations in range(1, len(program.segments) + 2):
        parts = [*map(program.segment, range(iterations)), program.drain(iterations)]
        for i, rows in enumerate(parts):
            _require_closed(Program(program.devices, rows), min(i + 1, iterations), plan)
        yield program.unrolled(iterations), Work(plan, iterations, families)


def _require_closed(part: Program, given: int, plan: PipelinePlan) -> None:
    """An iteration's transfers have both ends in it, and all that is done was given by then."""
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
