"""Runs of plans of operators: what was predicted, and what was measured."""

from typing import TYPE_CHECKING, Annotated, Any

from stagewright.executor.programs.trace import Trace
from stagewright.formulations.operators.plan import OperatorPlan
from stagewright.service.answers import CARRIED, Answer
from stagewright.service.pipelines.answers import IterationAnswer, PairAnswer, fields_of
from stagewright.service.requests import Request

if TYPE_CHECKING:
    from stagewright.executor.measuring.operator_runs import OperatorComparison, TotalTimes
else:  # carried, not validated: their libraries are slow to import
    OperatorComparison = TotalTimes = Any


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

    found, run = compare_operators(request.plan, request.trace), request.trace
    return PlacementCompareAnswer(
        machine=run.machine,
        backend=run.backend,
        world_size=run.world_size,
        dtype=run.dtype,
        steps=found.steps,
        iteration_seconds=IterationAnswer(
            **fields_of(found.iteration_seconds), least=found.least_seconds, most=found.most_seconds
        ),
        kinds=_totals(found.kinds),
        devices=_totals(found.devices),
        comparison=found,
    )


def _totals(found: dict[str, TotalTimes]) -> dict[str, TotalAnswer]:
    return {
        name: TotalAnswer(count=one.count, seconds=PairAnswer(**fields_of(one.seconds)))
        for name, one in found.items()
    }
