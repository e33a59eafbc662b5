"""Forward and backward times of a transformer's layers on one rank."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from stagewright.formulations.parallelism.states import (
    all_reduce_seconds,
    all_to_all_seconds,
    send_seconds,
)
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.machines.groups import links
from stagewright.graphs.models.operations import LayerOperation
from stagewright.graphs.models.shards import LayerShare, LayerSplit, Recompute


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of one layer on a microbatch.

    ``weight`` is the part of the backward that is put off, where it is split: the weight gradients.
    ``repeated`` is what recomputation adds to the backward, ``exchange`` the part of the rest of
    both that waits for communication.
    """

    forward: float
    backward: float
    weight: float = 0.0
    repeated: float = 0.0
    exchange: float = 0.0


def share_time(
    problem: TrainingProblem,
    share: LayerShare,
    split: LayerSplit,
    samples: int,
    recompute: Recompute,
    put_off: bool,
) -> LayerTime:
    """:func:`layer_time`, remembered; a layer that sends nothing to experts has it once for all."""
    if not share.dispatched and split.expert > 1:
        split = replace(split, expert=1)
    return _layer_time(problem, share, split, samples, recompute, put_off)


def layer_time(
    problem: TrainingProblem,
    share: LayerShare,
    split: LayerSplit,
    samples: int,
    recompute: Recompute,
    put_off: bool,
) -> LayerTime:
    """The times of a layer on a microbatch of ``samples``; weight gradients may be ``put_off``.

    The backward costs what the operations' gradients do, and the forward of what is repeated. The
    forward, the weights' gradients and the rest of the backward each last at least as long as the
    host takes to start their kernels one after the other.
    """
    kernels, once = _kernels(share), _once(problem, share, split, samples)
    again = share.repeated(recompute)
    repeated = sum(
        t for t, name in zip(once.seconds, share.operators, strict=True) if name in again
    )
    dispatch = problem.reached.dispatch_seconds
    weights = max(once.weight, kernels.weights * dispatch)
    # The weights' gradients that are put off hide no exchange.
    beside = 0.0 if put_off else weights
    if split.sequence_parallel and not put_off:
        # The inputs' gradients of the projections, beside which their inputs are gathered again.
        beside += once.projected
    sent, returned = _exchanges(problem, share, split, once, beside)
    sent += max(0.0, once.circulated - once.hidden)
    returned += max(0.0, 2 * once.circulated - 2 * once.hidden)
    if recompute == "full" and share.is_block:
        repeated += sent
    inputs = once.input + returned + repeated
    weights += _accumulation(problem, share)
    return LayerTime(
        forward=max(once.forward + sent, len(share.operators) * dispatch),
        backward=max(inputs, (kernels.inputs + len(again)) * dispatch) + weights,
        weight=weights if put_off else 0.0,
        repeated=repeated,
        exchange=sent + returned,
    )


_layer_time = lru_cache(maxsize=1 << 16)(layer_time)


@dataclass(frozen=True, eq=False, slots=True)
class _Kernels:
    """A layer's operators as arrays: FLOPs, elements and parts of gradients.

    ``moved`` of them are proportional to the samples, ``fixed`` are not; so many have a gradient of
    their ``inputs`` and of their ``weights``.
    """

    flops: Floats
    moved: Floats
    fixed: Floats
    input_part: Floats
    weight_part: Floats
    inputs: int
    weights: int


@lru_cache(maxsize=1 << 13)
def _kernels(share: LayerShare) -> _Kernels:
    operators = share.operators.values()
    fixed = np.array([_weights(one) for one in operators])
    input_part = np.array([one.input_gradients for one in operators])
    weight_part = np.array([one.weight_gradients for one in operators])
    return _Kernels(
        flops=np.array([one.flops for one in operators]),
        moved=np.array([one.moved for one in operators]) - fixed,
        fixed=fixed,
        input_part=input_part,
        weight_part=weight_part,
        inputs=int(np.count_nonzero(input_part)),
        weights=int(np.count_nonzero(weight_part)),
    )


@dataclass(frozen=True, eq=False, slots=True)
class _Once:
    """Seconds that depend on neither recomputation nor schedule.

    The forward of every operator; sums of forwards, of gradients of inputs (``projected``: of those
    with weights) and of weights; one tensor reduction, the way to the experts and back, the ring of
    keys and values, and the attention beside which that is ``hidden``.
    """

    seconds: tuple[float, ...]
    forward: float
    input: float
    projected: float
    weight: float
    reduction: float
    routed: float
    circulated: float
    hidden: float


@lru_cache(maxsize=1 << 15)
def _once(problem: TrainingProblem, share: LayerShare, split: LayerSplit, samples: int) -> _Once:
    kernels = _kernels(share)
    seconds = _seconds(problem, kernels, samples)
    inputs = seconds * kernels.input_part
    fabric, size = problem.fabric, problem.precision.activation_bytes
    tensor, expert = (links(fabric, ((1, k),)) for k in (split.tensor, split.expert))
    return _Once(
        seconds=tuple(seconds.tolist()),
        forward=float(seconds.sum()),
        input=float(inputs.sum()),
        projected=float((inputs * (kernels.weight_part > 0)).sum()),
        weight=float(np.maximum(seconds * kernels.weight_part, _sums(problem, kernels)).sum()),
        reduction=all_reduce_seconds(tensor, samples * share.width * size),
        routed=2 * all_to_all_seconds(expert, samples * share.dispatched * size),
        circulated=_circulation(problem, share, split, samples),
        hidden=_attention_seconds(share, seconds),
    )


def _seconds(problem: TrainingProblem, kernels: _Kernels, samples: int) -> Floats:
    """The forward of every operator: products by their FLOPs, the others by their bytes."""
    reached, card = problem.reached, problem.card
    flops = samples * kernels.flops
    moved = kernels.fixed + samples * kernels.moved
    traffic = (
        moved * problem.precision.activation_bytes / (card.memory_bytes_per_second * reached.memory)
    )
    products = np.where(flops > 0, flops + reached.half_flops, 0.0) / (
        problem.peak_flops * reached.matmul
    )
    seconds: Floats = np.maximum(products, traffic) + reached.launch_seconds
    return seconds


def _weights(one: LayerOperation) -> float:
    return one.parameters + one.tied_parameters if one.kind == "matmul" else 0.0


def _sums(problem: TrainingProblem, kernels: _Kernels) -> Floats:
    """Least seconds of a weight gradient's product: reading and writing the sum of gradients."""
    weights = kernels.fixed
    if not problem.fused_gradients:
        return np.zeros_like(weights)
    rate = problem.card.memory_bytes_per_second * problem.reached.memory
    moved = 2 * problem.precision.gradient_bytes * weights
    seconds: Floats = moved / rate + np.where(weights > 0, problem.reached.launch_seconds, 0.0)
    return seconds


def _accumulation(problem: TrainingProblem, share: LayerShare) -> float:
    """A kernel that adds the gradients of a microbatch to their sum: reads both, writes one."""
    if problem.fused_gradients:
        return 0.0
    precision = problem.precision
    parameters = share.parameters + share.expert_parameters + share.tied_parameters
    moved = parameters * (precision.weight_bytes + 2 * precision.gradient_bytes)
    return moved / (problem.card.memory_bytes_per_second * problem.reached.memory)


def _exchanges(
    problem: TrainingProblem, share: LayerShare, split: LayerSplit, once: _Once, beside: float
) -> tuple[float, float]:
    """Tensor reductions and the way to the experts and back, as far as the device waits for them.

    In the backward the reduction of an input's gradient can run beside the gradients of the
    weights. With sequence parallelism the projections' inputs are gathered once more (Korthikanti
    et al. 2022, section 4.2.2), which can run beside the gradients of the inputs; nothing runs
    beside the gathering of the outputs' gradients. ``beside`` are the seconds of these gradients.
    """
    ahead, back = (number * once.reduction for number in share.reductions)
    seen = back / 2 if split.sequence_parallel else 0.0
    waited = max(0.0, back - beside) if problem.overlap_tensor else back
    return ahead + once.routed, seen + waited + once.routed


def _circulation(
    problem: TrainingProblem, share: LayerShare, split: LayerSplit, samples: int
) -> float:
    """Keys and values pass all context ranks in a ring, beside the attention (Liu et al. 2023)."""
    context = links(problem.fabric, ((split.tensor, split.context),))
    moved = samples * share.circulated * problem.precision.activation_bytes
    return (split.context - 1) * send_seconds(context, moved)


def _attention_seconds(share: LayerShare, seconds: Floats) -> float:
    names = ("attention", "scores", "weighted values")
    return float(sum(t for t, name in zip(seconds, share.operators, strict=True) if name in names))
