"""Priorities of operations: the published orders as one rank per operation, the least first."""

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np

from stagewright.formulations.backprop.problem import BackpropOperation, BackpropProblem
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.arrays import Ints
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_LAYERS, require_count

Training = Literal["data", "pipeline", "single"]


@documents.record
class OutOfOrder:
    """The method of training, and its parameter.

    Attributes
    ----------
    training
        ``data``: all devices share every layer. ``pipeline``: groups of layers go around the
        devices (modulo allocation). ``single``: the only device runs weight gradients in a
        sub-stream.
    reversed_layers
        ``data``: k of reverse first-k scheduling; None: the best order found.
    group
        ``pipeline``: layers of a group; None: the best number found.
    """

    training: Training = "data"
    reversed_layers: int | None = None
    group: int | None = None

    def __post_init__(self) -> None:
        if self.training not in get_args(Training):
            known = ", ".join(get_args(Training))
            raise InputError(f"training must be one of {known}, got {self.training!r}")
        if self.reversed_layers is not None and self.training != "data":
            raise InputError("k is for data parallelism: give training 'data', or no k")
        if self.group is not None:
            if self.training != "pipeline":
                raise InputError(
                    "groups of layers are for pipelines: give training 'pipeline', or no group"
                )
            require_count(self.group, "group", MAX_LAYERS)
        k = self.reversed_layers
        if k is not None and not (isinstance(k, int) and 0 <= k <= MAX_LAYERS):
            raise InputError(f"k must be from 0 to the number of layers, got {k!r}")


# Of keys: what runs first. Forwards wait for all gradients on their device, unless these are late.
GRADIENTS, DELAYED, FORWARDS = range(3)

Key = Callable[[BackpropOperation], tuple[float, ...]]


def conventional(problem: BackpropProblem) -> Ints:
    """Layer by layer: both gradients of a layer before the previous layer's (figure 3a)."""
    return reverse_first_k(problem, 0)


def reverse_first_k(problem: BackpropProblem, k: int) -> Ints:
    """Algorithm 2: weight gradients of layers 1 to ``k`` come last, in the order of layers."""

    def key(one: BackpropOperation) -> tuple[float, ...]:
        if one.kind == "dW" and one.layer <= k:
            return (DELAYED, one.layer, one.microbatch)
        return (GRADIENTS, one.microbatch, -_level(one), _turn(one))

    return _ranks(problem, key)


def fast_forward(problem: BackpropProblem, k: int = 0) -> Ints:
    """Gradient fast-forwarding: output gradients first (section 5.2.1).

    Weight gradients of layers 1 to ``k`` come last, in the order of layers (section 6).
    """

    def key(one: BackpropOperation) -> tuple[float, ...]:
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


def _level(one: BackpropOperation) -> float:
    """The layer whose gradients the operation serves: a second run serves the next layer's."""
    return one.layer + 0.5 if one.kind == "R" else one.layer


def _turn(one: BackpropOperation) -> int:
    return {"dW": 0, "dO": 1}.get(one.kind, 0)


def _ranks(problem: BackpropProblem, gradients: Key) -> Ints:
    """Ranks by key; synchronisations by layer, optimizer steps and forwards after all gradients."""

    def key(one: BackpropOperation) -> tuple[float, ...]:
        if one.kind in ("F", "S[F]"):
            return (FORWARDS, one.microbatch, one.layer)
        if one.kind == "S[dW]":
            return (FORWARDS, -1, one.layer)
        if one.kind == "U":  # before its own layer's forwards, after those of the layers below
            return (FORWARDS, 0, one.layer - 0.5)
        return gradients(one)

    keys = [key(one) for one in problem.operations]
    return _inverse(np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64))


def _inverse(order: Ints) -> Ints:
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = np.arange(len(order))
    return ranks
