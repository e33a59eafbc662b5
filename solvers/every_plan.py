"""The bounds of :mod:`stagewright.formulations.every_plan`, with the best prices by HiGHS."""

import numpy as np

from stagewright.formulations.every_plan import LOAD, load_bound, price_program
from stagewright.formulations.pipeline import PipelineProblem
from stagewright.formulations.plan import Bound
from stagewright.formulations.plan_class import EVERY_PLAN
from stagewright.solvers.backend import solve


def every_plan_bounds(problem: PipelineProblem) -> tuple[Bound, ...]:
    """Bounds on every plan that the checker accepts."""
    kinds = len(problem.kinds)
    prices = np.ones(kinds)
    if kinds > 1:
        found = solve(price_program(problem), "highs").values
        # The bound is computed again from the prices, whatever HiGHS's tolerances made of them.
        prices = prices if found is None else np.maximum(found[:kinds], 0.0)
    seconds = load_bound(problem, prices)
    return (Bound(seconds, LOAD, "problem", EVERY_PLAN, tuple(prices.tolist())),)
