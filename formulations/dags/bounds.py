"""Lower bounds on the largest load of every partition, contiguous or not."""

import numpy as np

from stagewright.formulations.dags.problem import DagProblem
from stagewright.graphs.documents.arrays import Floats


def priced_load(problem: DagProblem, prices: Floats) -> float:
    """The least price of all work, divided by the price of a second of all devices.

    ``prices`` of a second on a device of each pool, not negative. With a largest load of T seconds
    at most T times the price of all devices is spent, and each part costs at least its cheapest
    pool.
    """
    paid = np.maximum(0.0, prices)
    counts = np.array([pool.count for pool in problem.pools], dtype=float)
    used = counts > 0
    if not (total := float(paid @ counts)):
        return 0.0
    return float((problem.seconds * paid)[:, used].min(axis=1).sum()) / total


def heaviest_part(problem: DagProblem) -> float:
    """The longest time of a part on its fastest device, on the number of replicas that suits it."""
    used = [k for k, pool in enumerate(problem.pools) if pool.count]
    fastest = problem.seconds[:, used].min(axis=1)
    exchange = np.zeros_like(fastest) if problem.exchange is None else problem.exchange
    replicas = np.arange(1, problem.most_replicas + 1)[:, None]
    return float(((fastest + 2 * (replicas - 1) * exchange) / replicas).min(axis=0).max())
