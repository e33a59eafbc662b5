"""Whether a model still captures to the planned graph, and the inputs of each replica."""

from stagewright.executor.capture.steps.document import selected
from stagewright.executor.capture.steps.step import CapturedStep
from stagewright.executor.programs.operators.placed import PlacedGraph, Value, place_graph
from stagewright.formulations.operators.plan import OperatorPlan
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.models.operators.data_parallel import Weights, data_parallel


def replicas_of(plan: OperatorPlan) -> int:
    """The replicas of the model that a plan trains; see ``graphs.models.data_parallel``."""
    inputs = [one.operator for one in plan.operators if one.role == "input"]
    return max(replica_of(name) for name in inputs) + 1 if inputs else 1


def replica_of(name: str) -> int:
    """The replica of the operator ``name``."""
    return int(name.partition("@")[2] or 0)


def planned_graph(plan: OperatorPlan, step: CapturedStep) -> PlacedGraph:
    """The captured step of one replica as the graph that was planned.

    Raises
    ------
    InputError
        If it is another graph; times and lines may differ.
    InvalidPlan
        If the plan does not place every operator once.
    """
    graph = data_parallel(step.graph, replicas_of(plan), _weights_of(plan))
    if graph.structure() == plan.structure:
        return place_graph(plan, graph)
    try:
        place_graph(plan, graph)
        fault = "shapes, types or orders differ"
    except InvalidPlan as error:
        fault = str(error)
    raise InputError(
        f"model, mini-batch, loss and optimizer are not those of {plan.model!r} as it was planned "
        f"({fault}); capture and plan them, or give the same (unless told, `capture` takes the "
        "optimizer adamw and `run` sgd)"
    )


def _weights_of(plan: OperatorPlan) -> Weights:
    if any(one.role == "state" and "@" in one.operator for one in plan.operators):
        return "mirrored"
    return "accumulated" if any("@sum" in one.operator for one in plan.operators) else "shared"


def losses(step: CapturedStep, placed: PlacedGraph) -> list[Value]:
    """The values of the replicas' losses."""
    *_, output = step.module.graph.nodes
    node, number = selected(output.args[0][0])
    return [
        _value(placed, node.name, number, replica) for replica in range(replicas_of(placed.plan))
    ]


def _value(placed: PlacedGraph, name: str, number: int, replica: int) -> Value:
    """An output of the captured graph in the placed one: copied or joined."""
    for one in (f"{name}@{replica}", name):
        if one in placed.number:
            return placed.number[one], number
        if f"{one}/join{number}" in placed.number:
            return placed.number[f"{one}/join{number}"], 0
    raise AssertionError(f"{name} is in the graph")
