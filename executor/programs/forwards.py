"""The forwards of a plan alone, as evaluation needs them."""

from dataclasses import replace

from stagewright.executor.programs.lower import computations
from stagewright.executor.programs.program import Program, plan_devices
from stagewright.executor.programs.transfers import (
    with_early_receives,
    with_early_sends,
    with_transfers,
)
from stagewright.executor.programs.verification.progress import PipelineProgress
from stagewright.executor.programs.verification.transfers import require_same_sides
from stagewright.executor.programs.work import Work
from stagewright.formulations.plans.actions import Action, ActionKind
from stagewright.formulations.plans.plan import PipelinePlan, Schedule, ScheduledAction


def forwards_of(plan: PipelinePlan, microbatches: int) -> PipelinePlan:
    """The stages of ``plan`` with a schedule of forwards, microbatch after microbatch.

    Times are counted in forwards: each takes one, and waits for none but the one before it.
    """
    actions = tuple(
        ScheduledAction(device, str(Action(s, ActionKind.FORWARD, m)), m + s, m + s + 1)
        for m in range(microbatches)
        for s, stage in enumerate(plan.stages)
        for device in stage.runners(m)
    )
    return replace(
        plan,
        microbatches=microbatches,
        schedule=Schedule(actions),
        weights="flush",
        predicted=None,
        certificate=None,
    )


def lower_forwards(plan: PipelinePlan) -> Program:
    """The program of a plan of forwards, in which no rank waits for itself.

    Raises
    ------
    InvalidProgram
        If one would, against what is said here.
    """
    rows = with_transfers(plan, computations(plan))
    rows = with_early_receives(plan, with_early_sends(plan, rows))
    program = Program(plan_devices(plan), tuple(map(tuple, rows)))
    require_same_sides(program)
    PipelineProgress(Work(plan), program).to_the_end()
    return program
