"""Planners of stages that keep everything, asked for plans whose stages all keep less."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic

from stagewright.formulations.forms.answers import Limits, OnProgress, Progress, silent
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.structure import Structure, misfit, work_of
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.pipelines.structure_rules import Rule
from stagewright.solvers.pipelines.structure_scheduling import best_schedule
from stagewright.solvers.planners.planner import ANY_RECOMPUTATION, Options
from stagewright.solvers.planners.proposal import (
    Choices,
    MemoryWay,
    NoPlan,
    Proposal,
    cost_of,
    with_way,
)

Search = Callable[[PipelineProblem, Limits, OnProgress], Proposal | NoPlan]

UNIFORM_OPTIONS = Options(ANY_RECOMPUTATION, offload=True)
RULES = (Rule(1.0), Rule(1.5), Rule(2.0), Rule())


@dataclass(frozen=True, slots=True)
class UniformPlanner:
    """A planner whose stages keep everything; asked to keep less, all of them do so alike."""

    name: str
    summary: str
    source: str
    search: Search
    options: Options = UNIFORM_OPTIONS

    def propose(
        self, problem: PipelineProblem, choices: Choices, limits: Limits, on_progress: OnProgress
    ) -> Proposal | NoPlan:
        """The fastest of the plans whose stages all keep less in one of the ways of ``choices``."""
        return plan_alike(self.search, problem, limits, on_progress, choices.uniform_ways)


def plan_alike(
    search: Search,
    problem: PipelineProblem,
    limits: Limits,
    on_progress: OnProgress,
    ways: tuple[MemoryWay, ...],
) -> Proposal | NoPlan:
    """The plan of ``search`` whose stages all save memory in one of ``ways``, the fastest."""
    began = monotonic()
    attempts = [(way, priced) for way in ways for priced in _priced(problem, way)]
    answers = []
    for i, (way, priced) in enumerate(attempts):
        left = limits.left(monotonic() - began)
        share = replace(limits, seconds=left / (len(attempts) - i))
        if way == "none":
            answers.append(search(problem, share, on_progress))
            continue
        # What the search reports are costs of another problem: only the final plan's is told.
        answer = _with_less(problem, search(priced, share, silent), way)
        if isinstance(answer, Proposal):
            seconds = cost_of(problem, answer)
            on_progress(Progress(monotonic() - began, seconds, 0.0, partial(replace, answer)))
        answers.append(answer)
    found = [answer for answer in answers if isinstance(answer, Proposal)]
    return min(found, key=lambda one: cost_of(problem, one)) if found else answers[0]


def _priced(problem: PipelineProblem, way: MemoryWay) -> tuple[PipelineProblem, ...]:
    """Problems of stages that keep everything whose plans suit stages that keep less.

    Between its forward and its backward an offloaded microbatch takes no memory, during them as
    much as one that is kept: stages are planned as if they kept nothing, and as if everything.
    """
    if way == "none":
        return (problem,)
    if way == "offload":
        return (unsaved_layers(problem), problem)
    return (recomputed_layers(problem),)


def _with_less(
    problem: PipelineProblem, answer: Proposal | NoPlan, way: MemoryWay
) -> Proposal | NoPlan:
    """The stages of ``answer``, all in the way given, in an order that fits."""
    name = "offloading" if way == "offload" else "recomputation"
    if isinstance(answer, NoPlan):
        return NoPlan(f"with {name}: {answer.reason}", proved=False)
    stages = tuple(with_way(stage, way) for stage in answer.stages)
    structure = Structure.whole(stages)
    work, endings, _ = work_of(problem, structure)
    short = misfit(problem, structure, work)
    if short is not None:
        return NoPlan(f"with {name}: {short}", proved=False)
    # Memory is not quite the planner's: the order is made again, 1F1B where that is shorter.
    found = best_schedule(work, endings, RULES)
    assert found is not None  # whatever fits has a schedule
    return Proposal(stages, found.starts, notes=answer.notes)


def recomputed_layers(problem: PipelineProblem) -> PipelineProblem:
    """The problem whose layers keep their input alone, and compute the rest again in B or I."""
    chain = problem.chain
    return _with_costs(problem, lambda i, cost: _recomputed(chain, i, cost))


def unsaved_layers(problem: PipelineProblem) -> PipelineProblem:
    """The problem whose layers keep nothing for their backward."""
    return _with_costs(problem, lambda _, cost: replace(cost, saved_bytes=0.0))


def _with_costs(
    problem: PipelineProblem, changed: Callable[[int, LayerCost], LayerCost]
) -> PipelineProblem:
    layers = tuple(
        replace(layer, costs=tuple(changed(i, cost) for cost in layer.costs))
        for i, layer in enumerate(problem.chain.layers)
    )
    return replace(problem, chain=replace(problem.chain, layers=layers))


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
