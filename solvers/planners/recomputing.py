"""Planners of stages that keep everything, asked for plans that recompute."""

from collections.abc import Callable
from dataclasses import replace
from time import monotonic

from stagewright.formulations.forms.answers import Limits, OnProgress
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan_class import RECOMPUTE, Recompute
from stagewright.formulations.plans.structure import Structure, misfit, work_of
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.pipelines.structure_scheduling import Rule, best_schedule
from stagewright.solvers.planners.proposal import NoPlan, Proposal, Recomputation, cost_of

Planner = Callable[[PipelineProblem, Limits, OnProgress], Proposal | NoPlan]


def plan_recomputing(
    run: Planner,
    problem: PipelineProblem,
    limits: Limits,
    on_progress: OnProgress,
    asked: Recomputation,
) -> Proposal | NoPlan:
    """A planner's plan whose stages all recompute as ``asked``; for ``auto`` the fastest."""
    began = monotonic()
    if asked == "none":
        return run(problem, limits, on_progress)
    ways: tuple[Recompute, ...] = RECOMPUTE if asked == "auto" else (asked,)
    answers = []
    for i, way in enumerate(ways):
        left = limits.left(monotonic() - began)
        share = replace(limits, seconds=left / (len(ways) - i))
        answers.append(_planned(run, problem, share, on_progress, way))
    found = [answer for answer in answers if isinstance(answer, Proposal)]
    return min(found, key=lambda one: cost_of(problem, one)) if found else answers[0]


def _planned(
    run: Planner,
    problem: PipelineProblem,
    limits: Limits,
    on_progress: OnProgress,
    way: Recompute,
) -> Proposal | NoPlan:
    if way == "none":
        return run(problem, limits, on_progress)
    answer = run(recomputed_layers(problem), limits, on_progress)
    if isinstance(answer, NoPlan):
        return NoPlan(f"with recomputation: {answer.reason}", proved=False)
    stages = tuple(replace(stage, recompute=way) for stage in answer.stages)
    structure = Structure.whole(stages)
    work, endings, _ = work_of(problem, structure)
    short = misfit(problem, structure, work)
    if short is not None:
        return NoPlan(f"with recomputation: {short}", proved=False)
    # Memory is not quite the planner's: the order is made again, 1F1B where that is shorter.
    found = best_schedule(work, endings, (Rule(1.0), Rule(1.5), Rule(2.0), Rule()))
    assert found is not None  # whatever fits has a schedule
    return Proposal(stages, found.starts, notes=answer.notes)


def recomputed_layers(problem: PipelineProblem) -> PipelineProblem:
    """The problem whose layers keep their input alone, and compute the rest again in B or I."""
    chain = problem.chain
    layers = tuple(
        replace(layer, costs=tuple(_recomputed(chain, i, cost) for cost in layer.costs))
        for i, layer in enumerate(chain.layers)
    )
    return replace(problem, chain=replace(chain, layers=layers))


def _recomputed(chain: Chain, i: int, cost: LayerCost) -> LayerCost:
    kept = 0.0 if i == 0 else _output_bytes(chain.layers[i - 1], cost)
    again = cost.forward_seconds
    if cost.backward_seconds is not None:
        return replace(cost, saved_bytes=kept, backward_seconds=cost.backward_seconds + again)
    assert cost.input_gradient_seconds is not None  # the one or the other
    return replace(
        cost, saved_bytes=kept, input_gradient_seconds=cost.input_gradient_seconds + again
    )


def _output_bytes(layer: Layer, like: LayerCost) -> float:
    """Bytes that ``layer`` hands on at the microbatch size of ``like``, in proportion."""
    return max(
        cost.output_bytes * like.microbatch_size / cost.microbatch_size for cost in layer.costs
    )
