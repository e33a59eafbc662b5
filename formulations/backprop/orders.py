"""Priorities of operations: the published orders as one rank per operation, the least first."""

from collections.abc import Callable

import numpy as np

from stagewright.formulations.backprop.problem import BackpropProblem, Operation
from stagewright.graphs.documents.arrays import Ints

# Of keys: what runs first. Forwards wait for all gradients on their device, unless these are late.
GRADIENTS, DELAYED, FORWARDS = range(3)

Key = Callable[[Operation], tuple[float, ...]]


def conventional(problem: BackpropProblem) -> Ints:
    """Layer by layer: both gradients of a layer before the previous layer's (figure 3a)."""
    return reverse_first_k(problem, 0)


def reverse_first_k(problem: BackpropProblem, k: int) -> Ints:
    """Algorithm 2: weight gradients of layers 1 to ``k`` come last, in the order of layers."""

    def key(one: Operation) -> tuple[float, ...]:
        if one.kind == "dW" and one.layer <= k:
            return (DELAYED, one.layer, one.microbatch)
        return (GRADIENTS, one.microbatch, -_level(one), _turn(one))

    return _ranks(problem, key)


def fast_forward(problem: BackpropProblem, k: int = 0) -> Ints:
    """Gradient fast-forwarding: output gradients first (section 5.2.1).

    Weight gradients of layers 1 to ``k`` come last, in the order of layers (section 6).
    """

    def key(one: Operation) -> tuple[float, ...]:
        if one.kind == "dW":
            reversed_ = one.layer <= k
            layer = one.layer if reversed_ else -one.layer
            return (DELAYED, reversed_, layer, one.microbatch)
        return (GRADIENTS, one.microbatch, -_level(one), _turn(one))

    return _ranks(problem, key)


def critical_path(problem: BackpropProblem) -> Ints:
    """List scheduling: the longest path to the end of the window first."""
    order = np.lexsort((problem.heads, -(problem.tails + problem.seconds)))
    return _inverse(order)


def _level(one: Operation) -> float:
    """The layer whose gradients the operation serves: a second run serves the next layer's."""
    return one.layer + 0.5 if one.kind == "R" else one.layer


def _turn(one: Operation) -> int:
    return {"dW": 0, "dO": 1}.get(one.kind, 0)


def _ranks(problem: BackpropProblem, gradients: Key) -> Ints:
    """Ranks by key; synchronisations in the order of layers, forwards after all gradients."""

    def key(one: Operation) -> tuple[float, ...]:
        if one.kind in ("F", "S[F]"):
            return (FORWARDS, one.microbatch, one.layer)
        if one.kind == "S[dW]":
            return (FORWARDS, -1, one.layer)
        return gradients(one)

    keys = [key(one) for one in problem.operations]
    return _inverse(np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64))


def _inverse(order: Ints) -> Ints:
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = np.arange(len(order))
    return ranks
