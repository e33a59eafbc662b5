"""Backwards in two parts, for profiles that know only their sum."""

import math
from dataclasses import replace

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.chain import Chain, LayerCost


def split_backwards(chain: Chain, share: float) -> tuple[Chain, int]:
    """The chain with two times for every backward, and the number of layers that had only one.

    Parameters
    ----------
    share
        Of a whole backward's time that is taken for the input gradient, between 0 and 1. It is an
        assumption, so that ``source`` names it; measured parts stay as they are.

    Raises
    ------
    InputError
        If ``share`` is not between 0 and 1.
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
    if whole is None:
        return cost
    first = share * whole
    return replace(
        cost,
        backward_seconds=None,
        input_gradient_seconds=first,
        weight_gradient_seconds=whole - first,
    )
