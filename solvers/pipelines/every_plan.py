"""The bounds of :mod:`every_plan`, with the best prices computed by HiGHS."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.backprop.models import TWO_STREAMS, two_streams_bound
from stagewright.formulations.pipelines.bounds import devices
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
    without_useless,
)
from stagewright.formulations.pipelines.bounds.memory_of_plans import (
    MEMORY_LOAD,
    MEMORY_PATH,
    memory_load_bound,
    memory_path_bound,
)
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound, Stage
from stagewright.formulations.plans.plan_class import (
    EVERY_BACKWARD_FIRST,
    EVERY_FINITE,
    EVERY_PLAN,
    ONE_STREAM,
    WHOLE_FINITE,
    PlanClass,
)
from stagewright.formulations.plans.structure import can_split
from stagewright.solvers.backends.backend import solve

PRECISION = 1e-3  # relative


def device_bounds(
    problem: PipelineProblem, stages: Sequence[Stage], plans: PlanClass, cost: float, seconds: float
) -> tuple[Bound, ...]:
    """Bounds on all schedules of ``stages``, and on the schedules with whole backwards.

    ``cost`` is the time of a schedule in the class ``plans``. Targets below it are tried for
    ``seconds``.
    """
    ends = monotonic() + seconds
    classes = [EVERY_FINITE, WHOLE_FINITE] if any(can_split(problem, stages)) else [EVERY_FINITE]
    found = []
    for one in classes:
        tasks = devices.tasks_of_stages(problem, stages, one.split_backward)
        known = _largest_bound(tasks, cost if one.contains(plans) else 0.0, ends)
        found.append(Bound(known, devices.EDGE_FINDING, "schedule", one))
    return tuple(found)


def _largest_bound(tasks: devices.Tasks, cost: float, ends: float) -> float:
    """The largest target found that no schedule attains; ``cost`` is the time of a schedule."""
    window = devices.window_of(tasks)
    low = devices.machine_bound(tasks, window)
    high, target = cost, cost * (1 - devices.SLACK)
    while high - low > PRECISION * cost and monotonic() < ends:
        if devices.is_refuted(tasks, target, window):
            low = target
        else:
            high = target
        target = (low + high) / 2
    return low


@lru_cache(maxsize=8)
def every_plan_bounds(problem: PipelineProblem) -> tuple[Bound, ...]:
    """Bounds on every plan of tensor degree 1 without shards, and on some classes of plans.

    Every layer of ``problem`` must fit in memory.
    """
    problem = without_useless(problem)
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
        *_memory_bounds(problem),
    )


def _memory_bounds(problem: PipelineProblem) -> Iterator[Bound]:
    """The bounds from memory that exceed those without it, on plans that do not offload."""
    offload = any(one.host_bytes_per_second is not None for one in problem.cluster.devices)
    plans = replace(EVERY_FINITE, offload=False) if offload else EVERY_FINITE
    load, path = memory_load_bound(problem), memory_path_bound(problem)
    if load > priced_load_bound(problem, np.ones(len(problem.kinds))) * (1 + PRECISION):
        yield Bound(load, MEMORY_LOAD, "problem", plans)
    if path > path_bound(problem, False) * (1 + PRECISION):
        yield Bound(path, MEMORY_PATH, "problem", plans)


def best_prices(problem: PipelineProblem) -> NDArray[np.float64]:
    """Prices of a second on each kind of device for the best load bound.

    The bound is recomputed from the prices in floats, so HiGHS's tolerances do not affect it.
    """
    kinds = len(problem.kinds)
    found = solve(price_program(problem), "highs").values if kinds > 1 else None
    return np.ones(kinds) if found is None else np.maximum(found[:kinds], 0.0)
