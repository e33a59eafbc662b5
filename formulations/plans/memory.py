"""Bytes that a device holds for its stages: the only module that computes memory.

States (weights, gradients, optimizer state) by weight rule and number of devices; buffers at the
boundaries of a stage; and activations per microbatch in flight. Formulations and kernels take
these numbers or arrays. *When* the bytes are held is decided there and in the checker.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.plans.actions import FLUSH, WeightRule
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.shards import of_shard, share_count, state_bytes
from stagewright.graphs.documents.arrays import Floats


def state_factor(
    problem: PipelineProblem, devices: int, rule: WeightRule = FLUSH, overlapping: bool = False
) -> float:
    """Bytes of weights, gradients and optimizer state per parameter byte.

    ``devices``: number of replicas of the stage, with either replication. Each holds the full
    state. ``overlapping``: whether the next iteration begins before this one's gradients are used
    (periodic plans).
    """
    gradients = 1 + (overlapping and _gradients_wait(problem, devices))
    return rule.versions + gradients + problem.chain.optimizer_bytes_per_parameter_byte


def state_factors(problem: PipelineProblem, most: int) -> Floats:
    """The factors with one version of the weights, by number of devices; shape (most + 1,)."""
    return np.array([state_factor(problem, max(devices, 1)) for devices in range(most + 1)])


def least_state_factor(problem: PipelineProblem) -> float:
    """The smallest factor of any plan: one version of the weights, on all devices."""
    return state_factor(problem, len(problem.cluster))


def version_bytes(problem: PipelineProblem, start: int, stop: int) -> float:
    """Bytes of one more version of the weights of layers [start, stop)."""
    return problem.gradient_bytes(start, stop)


def _buffer_bytes(problem: PipelineProblem, boundary: int, shares: int) -> float:
    """Bytes of the buffers between layers ``boundary`` - 1 and ``boundary``.

    One activation and one gradient, for the largest of ``shares`` shares of a microbatch; 0 at
    both ends of the chain.
    """
    if not 0 < boundary < len(problem.chain):
        return 0.0
    return 2 * problem.share_bytes(problem.boundary_bytes(boundary), shares)


def buffers_per_boundary(problem: PipelineProblem, shares: int) -> Floats:
    """Buffer bytes of every boundary, shape (L + 1,)."""
    return np.array([_buffer_bytes(problem, l, shares) for l in range(len(problem.chain) + 1)])


def static_bytes(
    problem: PipelineProblem,
    start: int,
    stop: int,
    devices: int,
    shares: int | None = None,
    rule: WeightRule = FLUSH,
    overlapping: bool = False,
) -> float:
    """Bytes that a device of the stage always holds: states, and buffers on each side.

    ``devices``, ``rule``, ``overlapping``: as in :func:`state_factor`. ``shares``: number of
    devices that split a microbatch (default: all).
    """
    factor = state_factor(problem, devices, rule, overlapping)
    buffers = sum(_buffer_bytes(problem, side, shares or devices) for side in (start, stop))
    return factor * problem.gradient_bytes(start, stop) + buffers


def stage_static_bytes(
    problem: PipelineProblem, stage: Stage, rule: WeightRule = FLUSH, overlapping: bool = False
) -> float:
    """As :func:`static_bytes`, of a plan's stage, without weights that are gathered for a while."""
    shard, shares = of_shard(problem, stage), share_count(stage)
    if stage.shards != "none":
        return state_bytes(problem, stage) + sum(
            _buffer_bytes(shard, side, shares) for side in stage.layers
        )
    return static_bytes(shard, *stage.layers, stage.replicas, shares, rule, overlapping)


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that a device of a stage keeps per microbatch.

    Attributes
    ----------
    saved_bytes
        From the start of its forward to the end of its backward.
    working_bytes
        Recomputed activations, in addition, from the start of the backward to its end.
    offloaded_bytes
        Moved to host memory after the forward, and back when the backward starts.
    """

    saved_bytes: float
    working_bytes: float = 0.0
    offloaded_bytes: float = 0.0


def kept_bytes(problem: PipelineProblem, stage: Stage, split_backward: bool = False) -> Kept:
    """Bytes that ``stage`` keeps; ``split_backward``: its backwards are I and W.

    With ``recompute="layer"``, a whole backward recomputes one layer at a time.
    """
    start, stop = stage.layers
    problem, shares = of_shard(problem, stage), share_count(stage)
    saved = problem.saved_bytes(start, stop, shares)
    if stage.offload:
        return Kept(0.0, offloaded_bytes=saved)
    if stage.recompute == "none":
        return Kept(saved)
    inputs = problem.inputs_per_layer(shares)[start:stop]
    if stage.recompute == "full":
        return Kept(float(inputs[0]), saved)
    largest = float(problem.saved_per_layer(shares)[start:stop].max())
    return Kept(float(inputs.sum()), saved if split_backward else largest)


def waiting_bytes(problem: PipelineProblem, stage: Stage) -> tuple[float, float]:
    """Bytes of output gradients of a microbatch that wait from I to W.

    Returns those of layers within the stage, and those of its last layer, for which there is a
    buffer for one microbatch unless it is the model's last layer.
    """
    start, stop = stage.layers
    problem, shares = of_shard(problem, stage), share_count(stage)
    within = problem.inputs_per_layer(shares)[start + 1 : stop].sum()
    return float(within), problem.share_bytes(problem.boundary_bytes(stop), shares)


def kept_tables(
    saved: NDArray[Any], inputs: NDArray[Any], recompute: Sequence[str]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Saved and working bytes of layers [k, l), as in :func:`kept_bytes`.

    Parameters
    ----------
    saved
        Bytes of layers [k, l) at [l, k], shape (L + 1, L + 1), in any unit.
    inputs
        Bytes of every layer's input, shape (L,).
    recompute
        R choices among ``none`` and ``full``.

    Returns
    -------
    Both at [r, l, k], shape (R, L + 1, L + 1).
    """
    first = np.broadcast_to(np.append(inputs, 0), saved.shape)
    kept = {"none": (saved, np.zeros_like(saved)), "full": (first, saved)}
    chosen = [kept[choice] for choice in recompute]
    return np.array([one[0] for one in chosen]), np.array([one[1] for one in chosen])


def in_flight_limit(
    problem: PipelineProblem,
    start: int,
    stop: int,
    devices: Sequence[int],
    shares: int | None = None,
) -> int:
    """How many microbatches fit in the memory of the smallest device; 0 if not even one.

    Also 0 if a microbatch has too few samples. ``shares`` is the number of devices that split a
    microbatch (default: all).
    """
    parts = shares or len(devices)
    if parts > problem.most_replicas(start, stop):
        return 0
    free = float(problem.memory_bytes[list(devices)].min())
    free -= static_bytes(problem, start, stop, len(devices), parts)
    saved = problem.saved_bytes(start, stop, parts)
    if free < 0 or saved > free:
        return 0
    return problem.microbatches if saved == 0 else int(min(problem.microbatches, free // saved))


def _gradients_wait(problem: PipelineProblem, devices: int) -> bool:
    """Whether a stage's gradients wait, for an all-reduce or a pause, while the next accumulate."""
    return devices > 1 or any(problem.update_per_layer(kind).any() for kind in problem.kinds)
