"""Computed, not measured, times of captured operators on named devices."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

from stagewright.executor.capture.steps.document import bytes_of, is_view, operators, results_of
from stagewright.executor.capture.steps.step import CapturedStep
from stagewright.formulations.prices.analytic import Efficiency, Rates
from stagewright.graphs.machines.devices import Accelerator, accelerator
from stagewright.graphs.models.operations import Kind, LayerOperation
from stagewright.graphs.models.operators.step_graph import StepGraph

aten = torch.ops.aten
_FLOPS = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        aten._scaled_dot_product_flash_attention
    ],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}
_CONVOLUTIONS = (aten.convolution, aten.convolution_backward)


def with_analytic_seconds(step: CapturedStep, kinds: Sequence[str | Accelerator]) -> StepGraph:
    """The step's graph with times on devices, named or the user's own, in single precision.

    As in ``formulations.prices.analytic``, an operator takes the larger of FLOPs over achieved
    FLOP/s and bytes over achieved memory bandwidth; launch times are not counted. FLOPs are torch's
    (``torch.utils.flop_counter``), a multiply-add is two. Bytes are those of all inputs and
    outputs; views, states and inputs take no time. Raises InputError if a device is not known.
    """
    rates = [Rates(accelerator(kind), "fp32", Efficiency(), 0) for kind in kinds]
    works = [operation(node, rates[0].element_bytes) for node in operators(step.module.graph)]
    nodes = tuple(
        replace(node, seconds=node.seconds | {one.card.name: one.seconds(work) for one in rates})
        for node, work in zip(step.graph.nodes, works, strict=True)
    )
    assumed = "; ".join(map(str, rates))
    return replace(step.graph, nodes=nodes, source=f"analytic: {assumed}")


def operation(node: fx.Node, element_bytes: int) -> LayerOperation:
    """FLOPs and moved elements of an operator."""
    packet: Any = getattr(node.target, "overloadpacket", None)
    moved = moved_bytes(node) / element_bytes
    if packet not in _FLOPS:
        return LayerOperation("memory", 0.0, moved)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    flops = float(_FLOPS[packet](*args, **kwargs, out_val=node.meta["val"]))
    kind: Kind = "convolution" if packet in _CONVOLUTIONS else "matmul"
    return LayerOperation(kind, flops, moved)


def moved_bytes(node: fx.Node) -> float:
    """Bytes that an operator reads and writes; of a table only the rows that are looked up."""
    if node.op == "placeholder" or is_view(node):
        return 0.0
    values = fx.node.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    read = [one for one in tree_flatten(values)[0] if isinstance(one, Tensor)]
    written = [one for one in results_of(node) if one is not None]
    if node.target is aten.embedding.default:
        read[0] = written[0]
    return sum(map(bytes_of, [*read, *written]))
