"""Ranks of operators: the longest ways to the end and from the beginning."""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from stagewright.formulations.operators.problem import OperatorProblem
from stagewright.formulations.prices.collectives import paced_seconds
from stagewright.graphs.documents.arrays import Floats, Ints


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
