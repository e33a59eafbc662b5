"""Planners without memory savings, extended to plans with one memory mode for all stages."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic

from stagewright.formulations.forms.answers import Limits, OnProgress, Progress, silent
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.structure import Structure, misfit, work_of
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.pipelines.structures.scheduling import Priority, best_schedule
from stagewright.solvers.planners.steps.planner import ANY_RECOMPUTATION, PlannerOptions
from stagewright.solvers.planners.steps.proposal import (
    Choices,
    MemoryMode,
    NoPlan,
    Proposal,
    cost_of,
    with_memory_mode,
)

_PlanFunction = Callable[[PipelineProblem, Limits, OnProgress], Proposal | NoPlan]

UNIFORM_OPTIONS = PlannerOptions(ANY_RECOMPUTATION, offload=True)
RULES = (Priority(1.0), Priority(1.5), Priority(2.0), Priority())


@dataclass(frozen=True, slots=True)
class UniformPlanner:
    """A planner without memory savings, which is extended to one memory mode for all stages."""

    name: str
    summary: str
    source: str
    search: _PlanFunction
    options: PlannerOptions = UNIFORM_OPTIONS

    def propose(
        self, problem: PipelineProblem, choices: Choices, limits: Limits, on_progress: OnProgress
    ) -> Proposal | NoPlan:
        """The fastest of the plans with the same memory mode of ``choices`` in all stages."""
        began = monotonic()
        attempts = [
            (mode, priced) for mode in choices.uniform_modes for priced in _priced(problem, mode)
        ]
        answers = []
        for i, (mode, priced) in enumerate(attempts):
            left = limits.left(monotonic() - began)
            share = replace(limits, seconds=left / (len(attempts) - i))
            if mode == "none":
                answers.append(self.search(problem, share, on_progress))
                continue
            # The search has the costs of another problem, so only the final plan is reported.
            answer = _with_less(problem, self.search(priced, share, silent), mode)
            if isinstance(answer, Proposal):
                seconds = cost_of(problem, answer)
                on_progress(Progress(monotonic() - began, seconds, 0.0, partial(replace, answer)))
            answers.append(answer)
        found = [answer for answer in answers if isinstance(answer, Proposal)]
        return min(found, key=lambda one: cost_of(problem, one)) if found else answers[0]


def _priced(problem: PipelineProblem, mode: MemoryMode) -> tuple[PipelineProblem, ...]:
    """Problems without memory savings that approximate stages with mode ``mode``.

    An offloaded microbatch takes no memory between its forward and its backward, and as much as a
    kept one during them. So stages are planned as if they kept nothing, and as if everything.
    """
    if mode == "none":
        return (problem,)
    if mode == "offload":
        return (_with_costs(problem, lambda _, cost: replace(cost, saved_bytes=0.0)), problem)
    return (_recomputed_layers(problem),)


def _with_less(
    problem: PipelineProblem, answer: Proposal | NoPlan, mode: MemoryMode
) -> Proposal | NoPlan:
    """The stages of ``answer``, all with mode ``mode``, in an order that fits in memory."""
    name = "offloading" if mode == "offload" else "recomputation"
    if isinstance(answer, NoPlan):
        return NoPlan(f"with {name}: {answer.reason}", proved=False)
    stages = tuple(with_memory_mode(stage, mode) for stage in answer.stages)
    structure = Structure.whole(stages)
    work, endings, _ = work_of(problem, structure)
    short = misfit(problem, structure)
    if short is not None:
        return NoPlan(f"with {name}: {short}", proved=False)
    # The planner's memory model is approximate, so the stages are scheduled again.
    found = best_schedule(work, endings, RULES)
    assert found is not None  # every structure that fits has a schedule
    return Proposal(stages, found.starts, notes=answer.notes)


def _recomputed_layers(problem: PipelineProblem) -> PipelineProblem:
    """The problem whose layers keep only their input and recompute the rest in B or I."""
    chain = problem.chain
    return _with_costs(problem, lambda i, cost: _recomputed(chain, i, cost))


def _with_costs(
    problem: PipelineProblem, changed: Callable[[int, LayerCost], LayerCost]
) -> PipelineProblem:
    layers = tuple(
        replace(layer, costs=tuple(changed(i, cost) for cost in layer.costs_at(1)))
        for i, layer in enumerate(problem.chain.layers)
    )
    return replace(problem, chain=replace(problem.chain, layers=layers))


def _recomputed(chain: Chain, i: int, cost: LayerCost) -> LayerCost:
    kept = 0.0 if i == 0 else _output_bytes(chain.layers[i - 1], cost)
    later = {
        name: seconds + cost.forward_seconds
        for name in ("backward_seconds", "input_gradient_seconds")
        if (seconds := getattr(cost, name)) is not None
    }
    return replace(cost, saved_bytes=kept, **later)


def _output_bytes(layer: Layer, like: LayerCost) -> float:
    """Output bytes of ``layer``, scaled to the microbatch size of ``like``."""
    return max(
        cost.output_bytes * like.microbatch_size / cost.microbatch_size
        for cost in layer.costs_at(1)
    )
