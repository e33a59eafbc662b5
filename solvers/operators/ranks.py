"""Ranks of operators: the longest ways to the end and from the beginning."""

from typing import Any

import numpy as np
from numba import njit

from stagewright.formulations.operators.problem import OperatorProblem
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.operators.arrays import Arrays


def transfers(problem: OperatorProblem, statistic: Any) -> Floats:
    """``statistic`` (np.max, np.mean) of each tensor's times over all pairs of devices, (T,)."""
    apart = ~np.eye(len(problem.devices), dtype=bool)
    if not apart.any():
        return np.zeros(len(problem.maker))
    pairs = np.array([problem.latency[apart], problem.seconds_per_byte[apart]])
    if statistic is np.mean:
        latency, rate = pairs.mean(axis=1)
        mean: Floats = latency + problem.sent_bytes * rate
        return mean
    links = np.unique(pairs, axis=1)
    found: Floats = statistic(links[0] + np.multiply.outer(problem.sent_bytes, links[1]), axis=1)
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


def followers(problem: OperatorProblem, i: int) -> Ints:
    """The operators that read from operator i."""
    first, last = problem.first_output[i], problem.first_output[i + 1]
    begin, end = problem.first_reader[first], problem.first_reader[last]
    return np.unique(problem.reader[begin:end])
