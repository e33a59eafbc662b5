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
from stagewright.formulations.prices.computing import Processor, computed, precision_named
from stagewright.graphs.machines.devices import Accelerator, accelerator
from stagewright.graphs.machines.rates import rates_of
from stagewright.graphs.models.operations import Kind, LayerOperation, LayerWork
from stagewright.graphs.models.operators.step_graph import StepGraph
from stagewright.graphs.models.shards import share_of

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

    An operator takes what ``prices.computing`` says at the device's newest rates. FLOPs are torch's
    (``torch.utils.flop_counter``), a multiply-add is two. Bytes are those of all inputs and
    outputs; views, states and inputs take no time. Raises InputError if a device is not known.
    """
    cards = [accelerator(kind) for kind in kinds]
    rates = [rates_of(card) for card in cards]
    numbers = precision_named("fp32")
    works = [operation(node, numbers.weight_bytes) for node in operators(step.module.graph)]
    share = share_of(LayerWork("step", tuple(works), 0.0))
    found = [
        computed(Processor(card, one.reached, numbers), share, 1).seconds
        for card, one in zip(cards, rates, strict=True)
    ]
    nodes = tuple(
        replace(
            node,
            seconds=node.seconds
            | {card.name: one * (work.moved > 0) for card, one in zip(cards, each, strict=True)},
        )
        for node, work, *each in zip(step.graph.nodes, works, *found, strict=True)
    )
    assumed = [f"{card}, fp32, rates {one}" for card, one in zip(cards, rates, strict=True)]
    return replace(step.graph, nodes=nodes, source="analytic: " + "; ".join(assumed))


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
