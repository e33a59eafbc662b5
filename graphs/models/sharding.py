"""A chain whose layers several devices compute together (tensor parallelism): one device's share.

Linear layers are divided by columns or by rows among the devices of a group (Shoeybi et al.,
Megatron-LM, 2019, section 3). Costs are per degree and not derived from those of one device: how
kernels and collectives scale is measured, or computed where the layer's operators are known.
"""

from dataclasses import replace

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.chain import Chain, Layer


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
