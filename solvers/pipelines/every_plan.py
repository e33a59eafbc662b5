"""The bounds of :mod:`every_plan`, with the best prices computed by HiGHS."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.pipelines.every_plan import (
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
from stagewright.formulations.plans.plan_class import EVERY_FINITE, EVERY_PLAN, WHOLE_FINITE
from stagewright.solvers.backends.backend import solve


@lru_cache(maxsize=8)
def every_plan_bounds(problem: PipelineProblem) -> tuple[Bound, ...]:
    """Bounds on every plan that the checker accepts, and on every finite one.

    Every layer of ``problem`` must fit in memory.
    """
    prices = best_prices(problem)
    load = priced_load_bound(problem, prices)
    return (
        Bound(load, LOAD, "problem", EVERY_PLAN, tuple(prices.tolist())),
        Bound(layer_bound(problem), LAYER, "problem", EVERY_PLAN),
        Bound(copies_bound(problem), COPIES, "problem", EVERY_PLAN),
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
