"""Runs of plans of operators: what was predicted, and what was measured."""

from typing import TYPE_CHECKING, Annotated, Any

from stagewright.executor.programs.trace import Trace
from stagewright.formulations.operators.plan import OperatorPlan
from stagewright.service.answers import CARRIED, Answer
from stagewright.service.pipelines.answers import IterationAnswer, PairAnswer
from stagewright.service.requests import Request

if TYPE_CHECKING:
    from stagewright.executor.measuring.operator_runs import OperatorComparison
else:  # carried, not validated: their libraries are slow to import
    OperatorComparison = Any


class ComparePlacementRequest(Request):
    """Compare the prediction of a plan of operators with the trace of a run of it."""

    plan: OperatorPlan
    trace: Trace


class TotalAnswer(Answer):
    """The sum of the seconds of several operators or transfers."""

    count: int
    seconds: PairAnswer


class PlacementCompareAnswer(Answer):
    """The predictions of a plan and the measurements of a run of it.

    ``kinds`` are the roles in the step and the transfers; ``devices`` is what each computes.
    """

    status: str = "compared"
    machine: str
    backend: str
    world_size: int
    dtype: str
    steps: int
    iteration_seconds: IterationAnswer
    kinds: dict[str, TotalAnswer]
    devices: dict[str, TotalAnswer]
    comparison: Annotated[OperatorComparison, CARRIED]


def compare(request: ComparePlacementRequest) -> PlacementCompareAnswer:
    """A plan's prediction and what a run of it measured."""
    from stagewright.executor.measuring.operator_runs import compare_operators

    found = compare_operators(request.plan, request.trace)
    return PlacementCompareAnswer.of(
        found,
        request.trace,
        iteration_seconds=IterationAnswer.of(
            found.iteration_seconds, least=found.least_seconds, most=found.most_seconds
        ),
        comparison=found,
    )
