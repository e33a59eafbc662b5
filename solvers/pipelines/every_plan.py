"""The bounds of :mod:`every_plan`, with the best prices computed by HiGHS."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.backprop.streams_bound import TWO_STREAMS, two_streams_bound
from stagewright.formulations.pipelines.bounds.every_plan import (
    COPIES,
    LAYER,
    LAYER_PATH,
    LOAD,
    PATH,
    copies_bound,
    layer_bound,
    layer_path_bound,
    path_bound,
    price_program,
    priced_load_bound,
)
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound
from stagewright.formulations.plans.plan_class import (
    EVERY_BACKWARD_FIRST,
    EVERY_FINITE,
    EVERY_PLAN,
    ONE_STREAM,
    WHOLE_FINITE,
)
from stagewright.solvers.backends.backend import solve


@lru_cache(maxsize=8)
def every_plan_bounds(problem: PipelineProblem) -> tuple[Bound, ...]:
    """Bounds on every plan of tensor degree 1 without shards, and on some classes of plans.

    Every layer of ``problem`` must fit in memory.
    """
    prices = best_prices(problem)
    witness = tuple(prices.tolist())
    # If no kernel leaves room beside it, a second stream gains nothing: the bounds are the same.
    every = (EVERY_PLAN, ONE_STREAM) if problem.knows_shares else (EVERY_PLAN,)
    beside = two_streams_bound(problem) if problem.knows_shares else None
    single = () if beside is None else (beside,)
    return (
        *(Bound(seconds, TWO_STREAMS, "problem", EVERY_BACKWARD_FIRST) for seconds in single),
        *(
            bound
            for plans in every
            for bound in (
                Bound(
                    priced_load_bound(problem, prices, plans.streams),
                    LOAD,
                    "problem",
                    plans,
                    witness,
                ),
                Bound(layer_bound(problem, plans.streams), LAYER, "problem", plans),
                Bound(copies_bound(problem, plans.streams), COPIES, "problem", plans),
            )
        ),
        *(
            Bound(bound(problem, not plans.split_backward), name, "problem", plans)
            for name, bound in ((PATH, path_bound), (LAYER_PATH, layer_path_bound))
            for plans in (EVERY_FINITE, WHOLE_FINITE)
        ),
    )


def best_prices(problem: PipelineProblem) -> NDArray[np.float64]:
    """Prices of a second on each kind of device for the best load bound.

    The bound is recomputed from the prices in floats, so HiGHS's tolerances do not affect it.
    """
    kinds = len(problem.kinds)
    found = solve(price_program(problem), "highs").values if kinds > 1 else None
    return np.ones(kinds) if found is None else np.maximum(found[:kinds], 0.0)
