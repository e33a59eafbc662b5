"""Ranks of operators, the longest ways to both ends, and static bounds by prices of devices."""

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from scipy import sparse

from stagewright.formulations.forms.answers import Status
from stagewright.formulations.forms.models import LinearProgram
from stagewright.formulations.operators.bounds import static_bounds
from stagewright.formulations.operators.plan import OperatorBound
from stagewright.formulations.operators.problem import OperatorProblem
from stagewright.formulations.prices.collectives import paced_seconds
from stagewright.graphs.documents.arrays import Floats, Ints
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


class Arrays(NamedTuple):
    """The fields of the same name of :class:`OperatorProblem`, and its inputs and outputs."""

    seconds: Floats
    maker: Ints
    first_reader: Ints
    reader: Ints
    first_input: Ints
    input: Ints
    first_output: Ints
    sent_bytes: Floats
    held_bytes: Floats
    latency: Floats
    seconds_per_byte: Floats
    memory: Floats
    group: Ints
    group_bytes: Floats
    exclusive: bool


def arrays_of(problem: OperatorProblem) -> Arrays:
    """The arrays of ``problem``, without copies where they are contiguous."""
    contiguous = {
        name: np.ascontiguousarray(getattr(problem, name))
        for name in Arrays._fields
        if name not in ("first_input", "input", "exclusive")
    }
    first, tensors = problem.inputs
    return Arrays(
        first_input=first, input=tensors, exclusive=problem.contention == "exclusive", **contiguous
    )


def transfers(arrays: Arrays, statistic: Any) -> Floats:
    """``statistic`` (np.max, np.mean) of each tensor's times over all pairs of devices, (T,)."""
    apart = ~np.eye(len(arrays.memory), dtype=bool)
    if not apart.any():
        return np.zeros(len(arrays.maker))
    pairs = np.array([arrays.latency[apart], arrays.seconds_per_byte[apart]])
    if statistic is np.mean:
        latency, rate = pairs.mean(axis=1)
        return paced_seconds(arrays.sent_bytes, rate, latency)
    links = np.unique(pairs, axis=1)
    every = paced_seconds(arrays.sent_bytes[:, None], links[1], links[0])
    found: Floats = statistic(every, axis=1)
    return found


@njit(cache=True)
def upward(arrays: Arrays, seconds: Floats, transfer: Floats) -> Floats:
    """rank_u (section 5.1): the longest way from the start of each operator to the end."""
    ranks = seconds.copy()
    for i in range(len(seconds) - 1, -1, -1):
        most = 0.0
        for t in range(arrays.first_output[i], arrays.first_output[i + 1]):
            for e in range(arrays.first_reader[t], arrays.first_reader[t + 1]):
                most = max(most, transfer[t] + ranks[arrays.reader[e]])
        ranks[i] += most
    return ranks


@njit(cache=True)
def downward(arrays: Arrays, seconds: Floats, transfer: Floats) -> Floats:
    """rank_d of CPOP: the longest way from the beginning to the start of each operator."""
    ranks = np.zeros(len(seconds))
    for j in range(len(seconds)):
        for e in range(arrays.first_input[j], arrays.first_input[j + 1]):
            t = arrays.input[e]
            i = arrays.maker[t]
            ranks[j] = max(ranks[j], ranks[i] + seconds[i] + transfer[t])
    return ranks


@njit(cache=True)
def longest_path(arrays: Arrays, ranks: Floats) -> Ints:
    """The path from the operator of the largest rank, always to its reader of largest rank."""
    path, length = np.empty(len(ranks), np.int64), 1
    path[0] = np.argmax(ranks)
    while True:
        i, best = path[length - 1], -1
        begin = arrays.first_reader[arrays.first_output[i]]
        end = arrays.first_reader[arrays.first_output[i + 1]]
        for e in range(begin, end):
            j = arrays.reader[e]
            if best < 0 or ranks[j] > ranks[best] or (ranks[j] == ranks[best] and j < best):
                best = j
        if best < 0:
            return path[:length].copy()
        path[length] = best
        length += 1


def followers(problem: OperatorProblem, i: int) -> Ints:
    """The operators that read from operator i."""
    first, last = problem.first_output[i], problem.first_output[i + 1]
    begin, end = problem.first_reader[first], problem.first_reader[last]
    return np.unique(problem.reader[begin:end])
