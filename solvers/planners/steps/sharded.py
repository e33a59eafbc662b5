"""A plan whose replicas divide their stage's state, from a plan whose replicas keep it whole.

No planner searches over shards: they are put into a plan that was found without, whose order is
kept if it is still valid, and scheduled again if that is shorter. Where nothing fits without, the
plan is found for smaller states, as if all stages had so many replicas. Nothing is proved about
the result.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from stagewright.formulations.checking.check import require_valid
from stagewright.formulations.plans.actions import FLUSH
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.formulations.plans.plan_class import Shards
from stagewright.formulations.plans.structure import Structure, misfit, work_of
from stagewright.formulations.plans.timing import split_backwards
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MIN_MEMORY, format_bytes, format_seconds
from stagewright.solvers.planners.steps.warm_start import Retiming


def sharded(
    problem: PipelineProblem,
    given: PipelinePlan,
    shards: Shards,
    over: Callable[[], bool],
    in_order: bool = False,
) -> PipelinePlan | None:
    """``given`` with ``shards`` in its replicated stages, checked; None if that does not fit.

    ``over`` ends the search for a shorter schedule; with ``in_order`` there is none. Stages keep
    all of their state where they cannot divide it. If all do, the plan is ``given``.

    Raises InputError if the plan is not finite with ``flush`` weights.
    """
    if given.spans_steps or given.weight_rule != FLUSH:
        raise InputError(
            f"shards {shards!r} need a finite schedule that begins with the forwards, and weights "
            f"'flush'; the planner {given.planner!r} made another: use auto, spp, general or order"
        )
    size = given.microbatch_size
    problem = replace(problem, microbatches=given.microbatches, microbatch_size=size)
    stages = tuple(_with_shards(stage, shards) for stage in given.stages)
    if stages == given.stages:
        return given
    structure = Structure(stages, tuple(bool(row.any()) for row in split_backwards(given)))
    work, endings, _ = work_of(problem, structure)
    if misfit(problem, structure) is not None:
        return None
    retiming = Retiming(problem, given, structure, work, endings)
    if in_order:
        kept = retiming.in_order()
        if kept is None:
            return None
        found, _ = kept
    else:
        found = retiming.best(over)
    plan = assemble(problem, given.planner, stages, found.starts)
    require_valid(problem, plan)
    return plan


def smaller_states(problem: PipelineProblem, shards: Shards) -> Iterator[PipelineProblem]:
    """The problem with the state of one of r replicas in every stage, for falling r.

    With sharded gradients or weights there is less memory by those of the largest layer.
    """
    chain, count = problem.chain, len(problem.cluster)
    states, largest = chain.optimizer_bytes_per_parameter_byte, float(chain.parameter_bytes.max())
    while count > 1:
        if shards == "optimizer":
            smaller = replace(chain, optimizer_bytes_per_parameter_byte=states / count)
            yield replace(problem, chain=smaller)
        elif shards == "gradients":
            # Whole gradients are the least beside weights: it may be more than there will be.
            part = max(0.0, (1 + states) / count - 1)
            smaller = replace(chain, optimizer_bytes_per_parameter_byte=part)
            yield from _within(replace(problem, chain=smaller), largest)
        else:
            layers = tuple(
                replace(one, parameter_bytes=one.parameter_bytes / count) for one in chain.layers
            )
            yield from _within(replace(problem, chain=replace(chain, layers=layers)), 2 * largest)
        count //= 2


def _within(problem: PipelineProblem, taken_bytes: float) -> Iterator[PipelineProblem]:
    """The problem with so much less memory, unless that leaves too little."""
    room = float(problem.memory_bytes.min()) - taken_bytes
    if room >= MIN_MEMORY:
        yield replace(problem, memory_limit_bytes=room)


def _with_shards(stage: Stage, shards: Shards) -> Stage:
    able = stage.replicas > 1 and (shards == "optimizer" or stage.replication == "split")
    plain = shards == "optimizer" or not stage.offload  # a run does not gather and offload
    return replace(stage, shards=shards) if able and plain else stage


def note_on_shards(plan: PipelinePlan | None, before: PipelinePlan | None, shards: Shards) -> str:
    """A note on the sharded state of ``plan``, beside the plan without ``shards`` if found."""
    if plan is None:
        return f"no stage divides its state: with shards {shards} the plan does not fit"
    numbers = [str(s) for s, stage in enumerate(plan.stages) if stage.shards != "none"]
    if not numbers:
        none = all(stage.replicas == 1 for stage in plan.stages)
        why = "none has replicas" if none else "its replicas take turns, or it offloads"
        return f"no stage divides its state: {why}"
    without = "no plan was found" if before is None else _figures(before)
    return (
        f"shards {shards} on stage{'s' * (len(numbers) > 1)} {', '.join(numbers)}; "
        f"an iteration takes {_figures(plan)}, "
        f"without shards {without}"
    )


def _figures(plan: PipelinePlan) -> str:
    assert plan.predicted is not None
    seconds = format_seconds(plan.predicted.iteration_seconds)
    most = format_bytes(max(plan.predicted.peak_memory_bytes.values()))
    return f"{seconds} and at most {most} on a device"
