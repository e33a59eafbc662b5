"""The static bounds with the prices of devices that make the bound by load the largest."""

import numpy as np
from scipy import sparse

from stagewright.formulations.forms.answers import Status
from stagewright.formulations.forms.models import LinearProgram
from stagewright.formulations.operators.bounds import static_bounds
from stagewright.formulations.operators.plan import OperatorBound
from stagewright.formulations.operators.problem import OperatorProblem
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.backends.backend import solve

_WORST = 1e6  # times the least time of an operator: a solver rounds what a longer one leaves


def bounds_of(problem: OperatorProblem) -> tuple[OperatorBound, ...]:
    """All static bounds."""
    return static_bounds(problem, load_prices(problem))


def load_prices(problem: OperatorProblem) -> Floats:
    """Prices of the devices, which sum to 1, for the largest cost of all work.

    Devices with the same times form a kind and have the same price.
    """
    seconds, kind, count = np.unique(
        problem.seconds, axis=1, return_inverse=True, return_counts=True
    )
    return np.asarray(best_prices(seconds, count.astype(float))[kind.ravel()], dtype=float)


def best_prices(seconds: Floats, count: Floats) -> Floats:
    """Prices of a device of each kind for the largest cost of all work; all devices' sum to 1.

    ``seconds`` of operators on a device of each kind, shape (n, kinds), and the ``count`` of
    devices of each. Any prices give a bound, so that a solve that fails costs quality only.
    """
    equal = np.full(len(count), 1 / count.sum())
    if len(count) == 1:
        return equal
    seconds = np.minimum(seconds, _WORST * seconds.min(axis=1, keepdims=True))
    answer = solve(_dual(seconds / (seconds.max() or 1.0), count))
    if answer.status is not Status.OPTIMAL or answer.values is None:
        return equal
    price = np.maximum(0.0, answer.values[-len(count) :])
    return np.asarray(price / (price @ count), dtype=float)


def _dual(seconds: Floats, count: Floats) -> LinearProgram:
    """Columns u, price: most sum u with u_i <= seconds_ik price_k, sum count_k price_k = 1."""
    n, kinds = seconds.shape
    rows = np.arange(n * kinds)
    cheaper = sparse.hstack(
        [
            sparse.csr_array((np.ones(n * kinds), (rows, rows // kinds)), shape=(n * kinds, n)),
            sparse.csr_array((-seconds.ravel(), (rows, rows % kinds)), shape=(n * kinds, kinds)),
        ]
    )
    total = sparse.hstack([sparse.csr_array((1, n)), sparse.csr_array(count[None, :])])
    return LinearProgram(
        cost=np.r_[-np.ones(n), np.zeros(kinds)],
        matrix=sparse.csr_array(sparse.vstack([cheaper, total])),
        row_lower=np.r_[np.full(n * kinds, -np.inf), 1.0],
        row_upper=np.r_[np.zeros(n * kinds), 1.0],
        lower=np.zeros(n + kinds),
        upper=np.full(n + kinds, np.inf),
        integral=np.zeros(n + kinds, dtype=bool),
    )
