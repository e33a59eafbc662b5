"""Forward and backward times of a transformer's layers on one rank."""

from dataclasses import dataclass, replace
from functools import lru_cache

from stagewright.formulations.parallelism.anchored import timed_seconds
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.prices.collectives import (
    all_reduce_seconds,
    all_to_all_seconds,
    send_seconds,
)
from stagewright.formulations.prices.computing import Computed, Processor, computed
from stagewright.graphs.machines.groups import GroupWays, links
from stagewright.graphs.models.modules import modules_of, repeats_exchange
from stagewright.graphs.models.shards import LayerShare, LayerSplit, Recompute


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of one layer on a microbatch.

    ``weight`` is the part of the backward that is put off, where it is split: the weight gradients.
    ``repeated`` is what recomputation adds to the backward, ``exchange`` the part of the rest of
    both that waits for communication; of it ``dispatched`` is in each of them for the way to the
    experts and back.
    """

    forward: float
    backward: float
    weight: float = 0.0
    repeated: float = 0.0
    exchange: float = 0.0
    dispatched: float = 0.0


def share_time(
    problem: TrainingProblem,
    share: LayerShare,
    split: LayerSplit,
    samples: int,
    recompute: Recompute,
    put_off: bool,
) -> LayerTime:
    """:func:`layer_time`, remembered, once for all degrees and treatments that change nothing."""
    if not share.dispatched and split.expert > 1:
        split = LayerSplit(split.tensor, split.context, 1, split.sequence_parallel)
    if not share.is_block:
        recompute = "none"
    return _layer_time(alike(problem, split), share, split, samples, recompute, put_off)


@lru_cache(maxsize=4096)
def alike(problem: TrainingProblem, split: LayerSplit) -> TrainingProblem:
    """The first problem in which layers take as long: of as many machines as one likes."""
    if type(problem) is not TrainingProblem or problem.rates.anchor is not None:
        return problem
    tensor, context, expert = split.tensor, split.context, split.expert
    groups = ((1, tensor),), ((tensor, context),), ((1, expert),)
    ways = tuple(links(problem.fabric, one) for one in groups)
    first = _first_alike(problem.processor, ways, overlaps=problem.overlap_tensor)
    if not first:
        first.append(problem)
    return first[0]


@lru_cache(maxsize=4096)
def _first_alike(
    processor: Processor, ways: tuple[GroupWays, ...], *, overlaps: bool
) -> list[TrainingProblem]:
    """A list for problems with equal prices of layers; at first none."""
    return []


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
    processor = problem.processor
    once = _once(problem, share, split, samples)
    start_forward, start_inputs, start_weights = once.started
    again = share.repeated(recompute, problem.memory.always)
    repeated = sum(
        t for t, name in zip(once.seconds, share.operators, strict=True) if name in again
    )
    weights = max(once.weight, start_weights)
    # The weights' gradients that are put off hide no exchange.
    beside = 0.0 if put_off else weights
    if split.sequence_parallel and not put_off:
        # The inputs' gradients of the projections, beside which their inputs are gathered again.
        beside += once.projected
    sent, returned = _exchanges(problem, share, split, samples, once, beside)
    circulated = _circulation(problem, share, split, samples)
    sent += max(0.0, circulated - once.attended)
    returned += max(0.0, 2 * circulated - once.attended_back)
    if not share.has_backward:
        return LayerTime(max(once.forward + sent, start_forward), backward=0.0, exchange=sent)
    if recompute == "full" and share.is_block:
        repeated += sent + once.routing
    elif share.is_block and repeats_exchange(modules_of(recompute), share.operators):
        reduction, routed = _each_exchange(problem, share, split, samples)
        repeated += (share.reductions[0] - 1) * reduction + routed + once.routing
    start_again = len(again) * processor.reached.dispatch_seconds
    inputs = max(once.input + returned + repeated, start_inputs + start_again)
    if problem.rates.anchor is None:  # else timed with the gradients
        weights += processor.sum_seconds(share)
    if not share.differentiable:  # tokens have no gradient
        inputs, weights = 0.0, inputs + weights
    return LayerTime(
        forward=max(once.forward + sent, start_forward),
        backward=inputs + weights,
        weight=weights if put_off else 0.0,
        repeated=repeated,
        exchange=sent + returned,
        dispatched=min(_each_exchange(problem, share, split, samples)[1], sent, returned),
    )


_layer_time = lru_cache(maxsize=1 << 16)(layer_time)


def _once(problem: TrainingProblem, share: LayerShare, split: LayerSplit, samples: int) -> Computed:
    """The computed seconds of a layer, or the timed ones where layers of the model were timed."""

    def of(share: LayerShare, split: LayerSplit, samples: int) -> Computed:
        return computed(problem.processor, share, samples, split.context)

    found = of(share, split, samples)
    if problem.rates.anchor is None:
        return found
    timed = timed_seconds(problem, share, split, samples, lambda *one: of(*one).whole)
    ahead, back = timed.forward / found.forward, timed.input / (found.input or 1.0)
    return replace(
        found,
        seconds=tuple(ahead * one for one in found.seconds),
        routing=ahead * found.routing,
        forward=timed.forward,
        input=timed.input,
        projected=back * found.projected,
        weight=timed.weight,
        attended=ahead * found.attended,
        attended_back=back * found.attended_back,
        waited=timed.waited,
    )


def _exchanges(
    problem: TrainingProblem,
    share: LayerShare,
    split: LayerSplit,
    samples: int,
    once: Computed,
    beside: float,
) -> tuple[float, float]:
    """Tensor reductions and the way to the experts and back, as far as the device waits for them.

    In the backward the reduction of an input's gradient can run beside the gradients of the
    weights. With sequence parallelism the projections' inputs are gathered once more (Korthikanti
    et al. 2022, section 4.2.2), if their weights are trained, which can run beside the gradients of
    the inputs; nothing runs beside the gathering of the outputs' gradients. ``beside`` are the
    seconds of these gradients.
    """
    reduction, routed = _each_exchange(problem, share, split, samples)
    if once.waited is not None:
        # What was timed together is divided as the computed seconds are.
        both = _uncharged_exchange(problem, share, split, samples)
        number = sum(share.reductions)
        whole = number * both[0] + 2 * both[1]
        part = (number * reduction + 2 * routed) / whole if whole else 1.0
        return part * once.waited[0], part * once.waited[1]
    ahead, back = (number * reduction for number in share.reductions)
    seen = back / 2 if split.sequence_parallel else 0.0
    if split.sequence_parallel and not once.projected:
        back /= 2  # inputs are gathered again for the gradients of weights alone
    waited = max(0.0, back - beside) if problem.overlap_tensor else back
    return ahead + routed, seen + waited + routed


def _each_exchange(
    problem: TrainingProblem, share: LayerShare, split: LayerSplit, samples: int
) -> tuple[float, float]:
    """Seconds of one tensor reduction, and of the way to the experts and back that is seen."""
    reduction, routed = _uncharged_exchange(problem, share, split, samples)
    return (
        problem.charges("tensor exchange") * reduction,
        problem.charges("expert exchange") * routed,
    )


@lru_cache(maxsize=1 << 15)
def _uncharged_exchange(
    problem: TrainingProblem, share: LayerShare, split: LayerSplit, samples: int
) -> tuple[float, float]:
    """The same seconds, whatever is free."""
    reached, size = problem.reached, problem.precision.activation_bytes
    tensor, expert = (links(problem.fabric, ((1, k),)) for k in (split.tensor, split.expert))
    reduction = all_reduce_seconds(tensor, samples * share.width * size)
    copies = share.copies if reached.once_per_unit else None
    there = all_to_all_seconds(expert, samples * share.dispatched * size, copies)
    return reduction, 2 * (1 - reached.expert_overlap) * there


@lru_cache(maxsize=1 << 15)
def _circulation(
    problem: TrainingProblem, share: LayerShare, split: LayerSplit, samples: int
) -> float:
    """Keys and values pass all context ranks in a ring, beside the attention (Liu et al. 2023)."""
    context = links(problem.fabric, ((split.tensor, split.context),))
    moved = samples * share.circulated * problem.precision.activation_bytes
    sent = (split.context - 1) * send_seconds(context, moved)
    return problem.charges("context exchange") * sent
