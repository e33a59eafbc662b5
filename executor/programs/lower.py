"""Lowering: a plan becomes a program per rank, by small passes.

1. `computations`: every rank's computations in the plan's order.
2. `with_transfers`: sends after the computation that makes their values, receives before the one
   that needs them. All ranks' rows are cut from one order of the whole iteration, so both ranks of
   a pair have their transfers in the same order, and no rank waits for itself.
3. `with_early_sends`, `with_early_receives`: transfers are posted before the computations that they
   may overlap.
4. `with_reductions`: the all-reduce of a stage after its last backward, in the plan's order.
5. `with_updates`: the optimizer's steps, where the plan has them.
6. `with_versions`: which version of the weights a computation uses, and which are kept for it.
"""

from stagewright.executor.programs.program import (
    Families,
    Instruction,
    Program,
    Rows,
    plan_devices,
)
from stagewright.executor.programs.transfers import (
    with_early_receives,
    with_early_sends,
    with_transfers,
)
from stagewright.executor.programs.updates import with_reductions, with_updates
from stagewright.executor.programs.versions import with_versions
from stagewright.formulations.plans.actions import (
    COMPUTE,
    Action,
    along_way,
    parse_action,
)
from stagewright.formulations.plans.plan import PipelinePlan, ScheduledAction
from stagewright.graphs.documents.errors import InvalidPlan


def lower(plan: PipelinePlan, families: Families = ()) -> Program:
    """The program that carries out one iteration of ``plan``.

    Parameters
    ----------
    families
        Stages whose updates depend on each other's gradients.

    Raises
    ------
    InvalidPlan
        If the order in the plan contradicts its dependencies, or its weights cannot be kept as it
        asks. `verify` finds everything else.
    """
    rows = computations(plan)
    rows = with_transfers(plan, rows)
    rows = with_early_sends(plan, rows)
    rows = with_early_receives(plan, rows)
    rows = with_reductions(plan, rows)
    rows = with_updates(plan, rows, families)
    rows = with_versions(plan, rows)
    return Program(plan_devices(plan), tuple(map(tuple, rows)))


def computations(plan: PipelinePlan) -> Rows:
    """Every rank's computations, by their start in the plan."""
    rank = {name: r for r, name in enumerate(plan_devices(plan))}
    rows: Rows = [[] for _ in rank]
    entries = [(parse_action(entry.action), entry) for entry in plan.actions]

    def in_time(pair: tuple[Action, ScheduledAction]) -> tuple[float, float, int, int]:
        action, entry = pair
        met = along_way(action, backward_first=plan.is_backward_first)
        return (entry.start_seconds, entry.finish_seconds, *met)

    for action, entry in sorted(entries, key=in_time):
        if action.kind in COMPUTE:
            if entry.device not in rank:
                raise InvalidPlan(f"{action} runs on {entry.device!r}, which is in no stage")
            rows[rank[entry.device]].append(Instruction(action, stream=entry.stream))
    return rows
