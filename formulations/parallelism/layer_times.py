"""Forward and backward times of a transformer's layers on one rank."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.prices.collectives import (
    all_reduce_seconds,
    all_to_all_seconds,
    send_seconds,
)
from stagewright.formulations.prices.updates import memory_seconds
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
    returned += max(0.0, 2 * once.circulated - once.hidden_back)
    if recompute == "full" and share.is_block:
        repeated += sent + once.routing
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
    attends: Floats
    cast: Floats
    logits: Floats
    products: Floats
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
        attends=np.array([name == "attention" for name in share.operators]),
        logits=np.array(
            [one.moved / 2 * (name == "loss") for name, one in share.operators.items()]
        ),
        products=np.array(
            [
                (share.experts if name.startswith("experts") else 1.0) * (one.flops > 0)
                for name, one in share.operators.items()
            ]
        ),
        cast=np.array(
            [one.flops > 0 and one.parameters + one.tied_parameters > 0 for one in operators]
        ),
        inputs=int(np.count_nonzero(input_part)),
        weights=int(np.count_nonzero(weight_part)),
    )


@dataclass(frozen=True, eq=False, slots=True)
class _Once:
    """Seconds that depend on neither recomputation nor schedule.

    The forward of every operator, and the ``routing`` of tokens by the host; sums of forwards, of
    gradients of inputs (``projected``: of those with weights) and of weights; one tensor reduction,
    the way to the experts and back, the ring of keys and values, and the attention beside which
    that is ``hidden`` (and its backward).
    """

    seconds: tuple[float, ...]
    routing: float
    forward: float
    input: float
    projected: float
    weight: float
    reduction: float
    routed: float
    circulated: float
    hidden: float
    hidden_back: float


@lru_cache(maxsize=1 << 15)
def _once(problem: TrainingProblem, share: LayerShare, split: LayerSplit, samples: int) -> _Once:
    kernels = _kernels(share)
    reached = problem.reached
    plain = _seconds(problem, share, kernels, samples, split.context)
    cast = _cast_seconds(problem, share, kernels, samples)
    seconds, inputs = plain + cast, plain * kernels.input_part + cast
    if reached.attention is not None and reached.attention_backward is not None:
        slower = reached.attention / reached.attention_backward
        inputs = np.where(kernels.attends, inputs * slower, inputs)
    routing = (reached.expert_seconds + reached.each_expert_seconds * share.experts) * bool(
        share.experts
    )
    fabric, size = problem.fabric, problem.precision.activation_bytes
    tensor, expert = (links(fabric, ((1, k),)) for k in (split.tensor, split.expert))
    return _Once(
        seconds=tuple(seconds.tolist()),
        routing=routing,
        forward=float(seconds.sum()) + routing,
        input=float(inputs.sum()) + routing,
        projected=float((inputs * (kernels.weight_part > 0)).sum()),
        weight=float(np.maximum(plain * kernels.weight_part, _sums(problem, kernels)).sum())
        + reached.each_expert_seconds * share.experts,
        reduction=problem.charges("tensor exchange")
        * all_reduce_seconds(tensor, samples * share.width * size),
        routed=problem.charges("expert exchange")
        * 2
        * (1 - reached.expert_overlap)
        * all_to_all_seconds(
            expert,
            samples * share.dispatched * size,
            share.copies if reached.once_per_unit else None,
        ),
        circulated=_circulation(problem, share, split, samples),
        hidden=_attention_seconds(share, seconds),
        hidden_back=_attention_seconds(share, inputs),
    )


def _seconds(
    problem: TrainingProblem, share: LayerShare, kernels: _Kernels, samples: int, context: int
) -> Floats:
    """The forward of every operator: products by their FLOPs, the others by their bytes.

    Making the operands of 8 bits is not among them.
    """
    reached = problem.reached
    moved = (kernels.fixed + samples * kernels.moved) * problem.precision.activation_bytes
    if reached.logit_bytes is not None:
        loss = samples * kernels.logits * reached.logit_bytes
        moved = np.where(kernels.logits > 0, loss, moved)
    traffic = memory_seconds(moved, problem.card, reached.memory)
    flops, half, rate = samples * kernels.flops, reached.half_flops, _product_rate(problem, share)
    products = problem.charges("matrix products") * (flops + kernels.products * half) / rate
    if reached.attention is not None:
        # A ring has a kernel for the keys of every context rank.
        seen, half = share.unmasked * flops, context * reached.attention_half_flops
        if not reached.context_balanced:
            seen *= min(2.0 - 1.0 / context, 1.0 / share.unmasked)
        rate = problem.half_peak_flops * reached.attention
        products = np.where(kernels.attends, (seen + half) / rate, products)
    traffic *= problem.charges("memory-bound kernels")
    seconds: Floats = np.maximum(products, traffic)
    if not problem.charges("attention"):
        seconds[kernels.attends] = 0.0
    return seconds + reached.launch_seconds


def _has_8_bits(problem: TrainingProblem, share: LayerShare) -> bool:
    """Whether the products of a layer are in 8 bits."""
    return problem.precision.fp8_products and (share.is_block or problem.reached.fp8_head)


def _product_rate(problem: TrainingProblem, share: LayerShare) -> float:
    """FLOP/s that large products of a layer reach."""
    reached = problem.reached
    if _has_8_bits(problem, share):
        return problem.peak_flops * (reached.fp8_matmul or reached.matmul)
    return problem.half_peak_flops * reached.matmul


def _cast_seconds(
    problem: TrainingProblem, share: LayerShare, kernels: _Kernels, samples: int
) -> Floats:
    """Seconds in which a forward's inputs, or a backward's gradients, are made 8 bits wide."""
    if not _has_8_bits(problem, share):
        return np.zeros_like(kernels.moved)
    # Inputs and outputs are about as many.
    elements = np.where(kernels.cast, samples * kernels.moved / 2, 0.0)
    reached = problem.reached
    return memory_seconds(elements * reached.cast_bytes, problem.card, reached.memory)


def _weights(one: LayerOperation) -> float:
    return one.parameters + one.tied_parameters if one.kind == "matmul" else 0.0


def _sums(problem: TrainingProblem, kernels: _Kernels) -> Floats:
    """Least seconds of a weight gradient's product: reading and writing the sum of gradients."""
    weights = kernels.fixed
    if not problem.fused_gradients or not problem.charges("sums of gradients"):
        return np.zeros_like(weights)
    reached, moved = problem.reached, 2 * problem.precision.gradient_bytes * weights
    launches = np.where(weights > 0, reached.launch_seconds, 0.0)
    seconds: Floats = memory_seconds(moved, problem.card, reached.memory) + launches
    return seconds


def _accumulation(problem: TrainingProblem, share: LayerShare) -> float:
    """A kernel that adds the gradients of a microbatch to their sum: reads both, writes one."""
    if problem.fused_gradients or not problem.charges("sums of gradients"):
        return 0.0
    precision = problem.precision
    parameters = share.parameters + share.expert_parameters + share.tied_parameters
    moved = parameters * (precision.weight_bytes + 2 * precision.gradient_bytes)
    return memory_seconds(moved, problem.card, problem.reached.memory)


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
    sent = (split.context - 1) * send_seconds(context, moved)
    return problem.charges("context exchange") * sent


def _attention_seconds(share: LayerShare, seconds: Floats) -> float:
    names = ("attention", "scores", "weighted values")
    return float(sum(t for t, name in zip(seconds, share.operators, strict=True) if name in names))
