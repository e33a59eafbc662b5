"""Models as the papers of the benchmarks ran them."""

from dataclasses import replace

from stagewright.formulations.prices.analytic import analytic_model
from stagewright.graphs.models.chain import Chain


def paper_model(name: str, samples: int, device: str = "v100", **sizes: int) -> Chain:
    """A named model as in 2019 to 2022.

    Attention keeps its matrices, a tied table counts once, and the optimizer's step takes no time.
    """
    chain = analytic_model(
        name, samples, device, attention="materialized", tied_copies=False, **sizes
    )
    layers = tuple(
        replace(layer, costs=tuple(replace(cost, update_seconds=None) for cost in layer.costs))
        for layer in chain.layers
    )
    return replace(chain, layers=layers)
