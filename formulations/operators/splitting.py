"""Graphs whose operators are divided into parts (FastT, section 5.2, SplitOperation)."""

from collections.abc import Sequence
from dataclasses import replace

from stagewright.formulations.operators.plan import SplitChoice
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.operators.step_graph import (
    DividedTimes,
    Node,
    Output,
    Split,
    StepGraph,
)


def split_graph(graph: StepGraph, splits: Sequence[SplitChoice]) -> StepGraph:
    """``graph`` after all ``splits``, one after the other; raises InputError if one does not fit.

    Operator x becomes its parts x/0, x/1, ...; an input that is cut passes x/cut0 (the number of
    the input), and an output x/join0, which concatenates or adds; an output without bytes that
    nobody reads, like the gradient of an input that needs none, has no join. Cuts and joins have
    no time unless it was measured, and a part takes its share of the operator's: see Split.times.
    """
    for choice in splits:
        graph = _split(graph, choice)
    return graph


def choices_of(graph: StepGraph, node: Node, most: int) -> list[SplitChoice]:
    """The ways to divide ``node`` into 2 to ``most`` equal parts."""
    if _reason(graph, node) is not None:
        return []
    return [
        SplitChoice(node.name, one.dimension, parts)
        for one in node.splits
        for parts in range(2, most + 1)
        if one.size % parts == 0
    ]


def _split(graph: StepGraph, choice: SplitChoice) -> StepGraph:
    if choice.operator not in graph.index:
        raise InputError(f"splits: there is no operator {choice.operator!r}")
    at = graph.index[choice.operator]
    node = graph.nodes[at]
    reason = _reason(graph, node)
    if reason is not None:
        raise InputError(f"splits: operator {node.name!r} {reason}")
    split = next((one for one in node.splits if one.dimension == choice.dimension), None)
    if split is None:
        raise InputError(f"splits: operator {node.name!r} has no dimension {choice.dimension!r}")
    if choice.parts < 2 or split.size % choice.parts:
        raise InputError(
            f"splits: operator {node.name!r} has {split.size} along {choice.dimension}, which "
            f"cannot be divided into {choice.parts} equal parts"
        )
    times = split.times(node.seconds, choice.parts)
    made = [
        *_cuts(node, split, graph, times),
        *_parts(node, split, times),
        *_joins(node, split, graph, times),
    ]
    later = (_read_joins(other, node.name, choice.parts) for other in graph.nodes[at + 1 :])
    return replace(graph, nodes=(*graph.nodes[:at], *made, *later))


def _reason(graph: StepGraph, node: Node) -> str | None:
    """Why a node cannot be split."""
    if node.state_bytes or node.beside is not None:
        return "has a state or a fixed device, so it cannot be split"
    if node.name in graph.hosts:
        return "has another one beside it, so it cannot be split"
    if any(output.shared for output in node.outputs):
        return "has an output in the memory of its input, so it cannot be split"
    return None


def _cuts(node: Node, split: Split, graph: StepGraph, times: DividedTimes) -> list[Node]:
    """A node per input that is cut (lines 20 to 23)."""
    return [
        Node(
            f"{node.name}/cut{k}",
            "cut",
            node.role,
            (node.inputs[k],),
            (Output(_output(graph, node.inputs[k]).bytes / times.parts),) * times.parts,
            times.cuts[k],
            after=node.after,
        )
        for k, axis in enumerate(split.inputs)
        if axis is not None
    ]


def _output(graph: StepGraph, source: tuple[str, int]) -> Output:
    name, number = source
    return graph.nodes[graph.index[name]].outputs[number]


def _parts(node: Node, split: Split, times: DividedTimes) -> list[Node]:
    """The parts of a divided operator (lines 17 to 19); inputs that are not divided stay whole."""
    outputs = tuple(
        Output(output.bytes if axis is None else output.bytes / times.parts)
        for output, axis in zip(node.outputs, split.outputs, strict=True)
    )
    return [
        Node(
            f"{node.name}/{part}",
            node.operator,
            node.role,
            tuple(
                source if axis is None else (f"{node.name}/cut{k}", part)
                for k, (source, axis) in enumerate(zip(node.inputs, split.inputs, strict=True))
            ),
            outputs,
            times.part,
            line=node.line,
            after=node.after,
        )
        for part in range(times.parts)
    ]


def _joins(node: Node, split: Split, graph: StepGraph, times: DividedTimes) -> list[Node]:
    """A node per output that concatenates or adds (lines 24 to 27)."""
    read = {number for other in graph.nodes for name, number in other.inputs if name == node.name}
    return [
        Node(
            f"{node.name}/join{k}",
            "add" if axis is None else "concatenate",
            node.role,
            tuple((f"{node.name}/{part}", k) for part in range(times.parts)),
            (output,),
            times.joins[k],
        )
        for k, (output, axis) in enumerate(zip(node.outputs, split.outputs, strict=True))
        if output.bytes or k in read
    ]


def _read_joins(other: Node, name: str, parts: int) -> Node:
    """``other`` with the joins in place of the outputs of ``name``, and after all its parts."""
    inputs = tuple(
        (f"{name}/join{number}", 0) if source == name else (source, number)
        for source, number in other.inputs
    )
    every = tuple(f"{name}/{part}" for part in range(parts))
    after = (every if one == name else (one,) for one in other.after)
    return replace(other, inputs=inputs, after=tuple(one for each in after for one in each))
