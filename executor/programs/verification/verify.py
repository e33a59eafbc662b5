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

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product, zip_longest

from stagewright.executor.programs.memory import Footprint, require_memory
from stagewright.executor.programs.program import (
    Families,
    Instruction,
    InvalidProgram,
    PeriodicProgram,
    Program,
    ProgramWork,
    Row,
    moved_action,
    plan_devices,
    stages_on,
)
from stagewright.executor.programs.verification.progress import PipelineProgress
from stagewright.executor.programs.verification.transfers import (
    require_same_sides,
    require_transfers,
    require_versions,
    versions_at_first_stage,
    wanted_transfers,
)
from stagewright.formulations.plans.actions import (
    COMPUTE,
    OF_OPERATORS,
    REDUCE,
    UPDATE,
    VERSIONED,
    Action,
    B,
    F,
    I,
    W,
    parse_action,
)
from stagewright.formulations.plans.plan import PipelinePlan


def require_computations(work: ProgramWork, program: Program, rank: int, row: Row) -> None:
    """Each of the rank's microbatches has one F, and one B or one I and one W; nothing else."""
    plan, counts = work.plan, Counter(one.action for one in row)
    for action, count in counts.items():
        _require_belongs(work, program.devices[rank], rank, action)
        if action.kind in COMPUTE and count > 1:
            raise InvalidProgram(f"rank {rank}: {action} appears {count} times")
    for s, m in product(stages_on(plan, program.devices[rank]), range(work.microbatches)):
        if program.devices[rank] in plan.runners(s, m):
            kinds = tuple(k for k in COMPUTE if Action(s, k, m) in counts)
            if kinds not in ((F, B), (F, I, W)):
                found = ", ".join(f"{s}{k}{m}" for k in kinds) or "nothing"
                raise InvalidProgram(
                    f"rank {rank}: stage {s} must work on microbatch {m} by {s}F{m} and "
                    f"{s}B{m}, or by {s}F{m}, {s}I{m} and {s}W{m}; found: {found}"
                )


def _require_belongs(work: ProgramWork, device: str, rank: int, action: Action) -> None:
    """The stage of ``action``, and its microbatch, are the rank's."""
    plan, s, m = work.plan, action.stage, action.microbatch
    if action.kind in OF_OPERATORS:
        raise InvalidProgram(f"rank {rank}: {action} belongs to programs of placed operators")
    if not 0 <= s < len(plan.stages):
        raise InvalidProgram(f"rank {rank}: {action}: there are only {len(plan.stages)} stages")
    runners = plan.stages[s].devices
    if m is not None and action.kind not in VERSIONED:
        if not 0 <= m < work.microbatches:
            raise InvalidProgram(
                f"rank {rank}: {action}: there are only {work.microbatches} microbatches"
            )
        runners = plan.runners(s, m)
    if device not in runners:
        raise InvalidProgram(f"rank {rank}: {action} does not run on {device}")


def require_updates(work: ProgramWork, device: str, rank: int, row: Row) -> None:
    """Every gradient reaches the weights: once an iteration, or once a round of backwards."""
    plan, every_round = work.plan, work.plan.weight_rule.updates_every_round
    backwards = Counter(one.action.stage for one in row if one.action.kind in (B, W))
    stages = {s: _Gradients(work, backwards[s], work.is_shared(s)) for s in stages_on(plan, device)}
    for one in row:
        found = stages[one.action.stage]
        if not found.may_follow(one.action):
            count = found.reduced if one.action.kind is REDUCE else found.updated
            raise InvalidProgram(
                f"rank {rank}: {one}, number {count} of its stage, comes after "
                f"{found.ready} of {found.backwards} backwards and {found.reduced} all-reduces"
            )
    for s, found in stages.items():
        wanted = backwards[s] if every_round else work.iterations
        reductions = wanted if found.is_shared else 0
        if found.updated != wanted or found.reduced != reductions:
            raise InvalidProgram(
                f"rank {rank}: with {plan.weights!r}, {backwards[s]} backwards need {wanted} times "
                f"{s}{UPDATE} and {reductions} times {s}{REDUCE}; found: {found.updated} and "
                f"{found.reduced}"
            )


def require_updates_at_end(program: Program, families: Families) -> None:
    """Updates of a family's stages come after everything else on every rank."""
    together = set().union(*families)
    for rank, row in enumerate(program.rows):
        before: Instruction | None = None
        for one in row:
            if before is not None and one.action.kind not in (UPDATE, *VERSIONED):
                raise InvalidProgram(
                    f"rank {rank}: {before} needs the gradients of other stages, "
                    f"it must come after {one}"
                )
            if one.action.kind is UPDATE and one.action.stage in together:
                before = one


@dataclass(slots=True)
class _Gradients:
    """A stage's gradients on one rank: how many were summed up, reduced and used by an update."""

    work: ProgramWork
    backwards: int
    is_shared: bool
    ready: int = 0
    latest: int = 0  # iteration of a gradient in the sum
    reduced: int = 0
    updated: int = 0

    def may_follow(self, action: Action) -> bool:
        """Count the next action; whether it is valid here.

        While an all-reduce is in flight, the next iteration's gradients are summed up in a second
        set of tensors where iterations overlap; there is no third.
        """
        rule = self.work.plan.weight_rule
        every_round = rule.updates_every_round
        if action.kind in (B, W):
            self.ready += 1
            self.latest = max(self.latest, self.work.iteration(action.microbatch))
        elif action.kind is REDUCE:
            self.reduced += 1
            return self._are_of(self.reduced, every_round) and self.reduced == self.updated + 1
        elif action.kind is UPDATE:
            self.updated += 1
            overlaps = self.is_shared and rule.staleness > 0
            is_reduced = not self.is_shared or self.reduced == self.updated
            return is_reduced and (overlaps or self._are_of(self.updated, every_round))
        return True

    def _are_of(self, count: int, every_round: bool) -> bool:
        """Whether exactly the backwards of the first ``count`` iterations, or rounds, are in.

        A gradient of a later one would be missing in its own update.
        """
        if every_round:
            return self.ready == count
        each = self.backwards // self.work.iterations
        return self.ready == count * each and self.latest < count


def require_same_reductions(plan: PipelinePlan, program: Program) -> None:
    """Any two ranks see the collectives that they share in the same order.

    These are all-reduces of gradients, computations of a tensor group, or with sharded gradients or
    weights of all replicas, with collectives within them, and updates that end with an all-gather.
    """
    collective = [
        [one.action for one in row if _is_joint(plan, one.action)] for row in program.rows
    ]
    for a, b in combinations([rank for rank, found in enumerate(collective) if found], 2):
        names = program.devices[a], program.devices[b]
        sides = [[one for one in collective[r] if _is_of(plan, one, names)] for r in (a, b)]
        for i, (here, there) in enumerate(zip_longest(*sides)):
            if here != there:
                raise InvalidProgram(
                    f"collective {i} of ranks {a} and {b} is {here or 'missing'} on rank {a} and "
                    f"{there or 'missing'} on rank {b}"
                )


def _is_joint(plan: PipelinePlan, action: Action) -> bool:
    stage = plan.stages[action.stage]
    return action.kind is REDUCE or (
        action.kind in (*COMPUTE, UPDATE) and stage.joint(action.kind) > 1
    )


def _is_of(plan: PipelinePlan, action: Action, devices: tuple[str, str]) -> bool:
    """Whether both devices take part in the same of the action's collectives."""
    stage = plan.stages[action.stage]
    if not set(devices) <= set(stage.devices):
        return False
    one, other = (stage.devices.index(name) for name in devices)
    if action.kind in COMPUTE:
        size = stage.joint(action.kind)
        return one // size == other // size
    return one % stage.tensor == other % stage.tensor


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
