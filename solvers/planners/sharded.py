"""A plan whose replicated stages divide their state, from one whose replicas keep all of it.

No planner searches over shards: they are put into a plan that was found without, whose order is
kept if it is still valid, and scheduled again if that is shorter. So a plan that would fit only
with shards is not found, and nothing is proved about the result.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from stagewright.formulations.checking.check import require_valid
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.formulations.plans.plan_class import Shards
from stagewright.formulations.plans.structure import Structure, misfit, work_of
from stagewright.formulations.plans.timing import split_backwards
from stagewright.formulations.plans.weight_rules import FLUSH
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import format_bytes, format_seconds
from stagewright.solvers.planners.warm_start import Retiming


def sharded(
    problem: PipelineProblem, given: PipelinePlan, shards: Shards, over: Callable[[], bool]
) -> tuple[PipelinePlan, str]:
    """``given`` with ``shards`` in its replicated stages, checked; and a note on what changed.

    ``over`` ends the search for a shorter schedule. Stages keep all of their state where they
    cannot divide it: the note names them.

    Raises
    ------
    InputError
        If the plan is not finite with ``flush`` weights, or does not fit with shards.
    """
    if given.spans_steps or given.weight_rule != FLUSH:
        raise InputError(
            f"shards {shards!r} need a finite schedule that begins with the forwards, and weights "
            f"'flush'; the planner {given.planner!r} made another: use auto, spp, general or order"
        )
    stages = tuple(_with_shards(stage, shards) for stage in given.stages)
    if stages == given.stages:
        return given, f"no stage divides its state: {_why_not(given.stages)}"
    parts = zip(split_backwards(given), stages, strict=True)
    split = tuple(bool(row.any()) and one.shards != "weights" for row, one in parts)
    structure = Structure(stages, split)
    work, endings, _ = work_of(problem, structure)
    short = misfit(problem, structure, work)
    if short is not None:
        raise InputError(f"the plan does not fit with shards {shards!r}: {short}")
    found = Retiming(problem, given, structure, work, endings).best(over)
    plan = assemble(problem, given.planner, stages, found.starts)
    require_valid(problem, plan)
    return plan, "; ".join(_notes(given, plan))


def _with_shards(stage: Stage, shards: Shards) -> Stage:
    able = stage.replicas > 1 and (shards == "optimizer" or stage.replication == "split")
    plain = shards == "optimizer" or not stage.offload  # a run does not gather and offload
    return replace(stage, shards=shards) if able and plain else stage


def _why_not(stages: Sequence[Stage]) -> str:
    if all(stage.replicas == 1 for stage in stages):
        return "none has replicas"
    return "its replicas take turns, or it offloads"


def _notes(before: PipelinePlan, after: PipelinePlan) -> Iterator[str]:
    numbers = [str(s) for s, stage in enumerate(after.stages) if stage.shards != "none"]
    assert before.predicted is not None
    assert after.predicted is not None
    kind = next(stage.shards for stage in after.stages if stage.shards != "none")
    yield f"stages with shards {kind}: {', '.join(numbers)}"
    without, found = (
        f"{format_seconds(one.iteration_seconds)} and at most "
        f"{format_bytes(max(one.peak_memory_bytes.values()))} on a device"
        for one in (before.predicted, after.predicted)
    )
    yield f"an iteration takes {found}, without shards {without}"
