"""A chain whose layers several devices compute together (tensor parallelism): one device's share.

Linear layers are divided by columns or by rows among the devices of a group (Shoeybi et al.,
Megatron-LM, 2019, section 3). Costs are per degree and not derived from those of one device: how
kernels and collectives scale is measured, or computed where the layer's operators are known.
"""

import math
from dataclasses import replace

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.chain import Chain, Layer, LayerCost


def split_backwards(chain: Chain, share: float) -> tuple[Chain, int]:
    """The chain with two times for every backward, and the number of layers that had only one.

    Raises InputError if ``share`` is not between 0 and 1. ``share``: of a whole backward's time
    that is taken for the input gradient, between 0 and 1. It is an assumption, so that ``source``
    names it; measured parts stay as they are.
    """
    if not (math.isfinite(share) and 0 < share < 1):
        raise InputError(
            f"the input gradient's share of a backward must be between 0 and 1, got {share:g}"
        )
    layers = tuple(
        replace(layer, costs=tuple(_split(cost, share) for cost in layer.costs))
        for layer in chain.layers
    )
    changed = sum(new != old for new, old in zip(layers, chain.layers, strict=True))
    if not changed:
        return chain, 0
    note = f"assumed: input gradients take {share:g} of the backward in {changed} layers"
    return replace(chain, layers=layers, source=f"{chain.source}; {note}"), changed


def _split(cost: LayerCost, share: float) -> LayerCost:
    whole = cost.backward_seconds
    if whole is None or cost.has_parts:
        return cost
    first = share * whole
    return replace(
        cost,
        backward_seconds=None,
        input_gradient_seconds=first,
        weight_gradient_seconds=whole - first,
    )


def shard_chain(chain: Chain, degree: int) -> Chain:
    """The chain on one of ``degree`` devices: the costs at that degree, and shards of parameters.

    Layers without costs at that degree stay as they are; see :func:`require_degree`.
    """
    return replace(chain, layers=tuple(_shard(layer, degree) for layer in chain.layers))


def require_degree(chain: Chain, start: int, stop: int, degree: int) -> None:
    """Raise InputError if one of layers [start, stop) has no costs at a tensor degree."""
    for layer in chain.layers[start:stop]:
        if degree not in layer.degrees:
            known = ", ".join(map(str, layer.degrees))
            raise InputError(
                f"layer {layer.name!r} has no cost at tensor degree {degree}; "
                f"it has costs at {known}: profile --tensor measures others"
            )


def _shard(layer: Layer, degree: int) -> Layer:
    costs = layer.costs_at(degree)
    if degree == 1 or not costs:
        return replace(layer, costs=layer.costs_at(1))
    parameter_bytes = costs[0].shard_parameter_bytes
    assert parameter_bytes is not None  # costs of several devices have it
    whole = tuple(replace(cost, tensor=None, shard_parameter_bytes=None) for cost in costs)
    return replace(layer, parameter_bytes=parameter_bytes, costs=whole)
