"""Weights, gradients and optimizer state of one rank; the time of their exchange and update."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from stagewright.formulations.parallelism.cut import Layers
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.prices.collectives import (
    all_reduce_seconds,
    gather_seconds,
    link_seconds,
)
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.groups import ends, links
from stagewright.graphs.models.shards import LayerShare


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a rank: those shared by the stage's data ranks, and those of its experts.

    ``largest`` are the parameters of its largest layer.
    """

    shared: float
    expert: float
    largest: float


@dataclass(frozen=True, slots=True)
class Held:
    """All parameters of a rank and those that are trained, in so many ``layers``."""

    every: Parameters
    trained: Parameters
    layers: int


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of a rank."""

    weights: float
    gradients: float
    optimizer: float


@lru_cache(maxsize=1 << 14)
def held(layers: Layers, *, tied: bool) -> Held:
    """The parameters of a rank's layers; with ``tied`` it holds a copy of the embedding's table."""
    number = [n for _, _, n in layers]
    every = [
        (one.parameters + (one.tied_parameters if tied else 0), one.expert_parameters)
        for one, _, _ in layers
    ]
    trained = [
        (
            one.parameters - one.frozen_parameters + (one.trained_tied_parameters if tied else 0),
            one.expert_parameters - one.frozen_expert_parameters,
        )
        for one, _, _ in layers
    ]
    return Held(_summed(every, number), _summed(trained, number), sum(number))


def _summed(each: Sequence[tuple[float, float]], number: Sequence[int]) -> Parameters:
    return Parameters(
        shared=sum(shared * n for (shared, _), n in zip(each, number, strict=True)),
        expert=sum(expert * n for (_, expert), n in zip(each, number, strict=True)),
        largest=max(shared + expert for shared, expert in each),
    )


def groups(layout: Layout) -> tuple[int, int]:
    """Ranks with equal shared parameters, and with equal experts."""
    shared = layout.context * layout.data * layout.form.copies
    return shared, layout.tensor * shared // layout.expert


MASTER_BYTES = 4
"""Of a weight in fp32, which the optimizer steps."""


@dataclass(frozen=True, slots=True)
class StateRule:
    """Bytes of a parameter's states, and whether each state is divided among its equal ranks."""

    weights: tuple[float, bool]
    gradients: tuple[float, bool]
    optimizer: tuple[float, bool]


def state_rule(
    problem: TrainingProblem, zero: int, *, offload: bool, in_pipeline: bool
) -> StateRule:
    """How a rank keeps states at a stage of ZeRO, in a pipeline or not."""
    precision, memory = problem.precision, problem.memory
    is_whole = memory.whole_in_pipelines and in_pipeline
    divides_weights = zero == 3 and not is_whole
    weights, optimizer = precision.weight_bytes, precision.optimizer_bytes
    if memory.float_masters and divides_weights and weights < MASTER_BYTES <= optimizer:
        weights, optimizer = MASTER_BYTES, optimizer - MASTER_BYTES
    return StateRule(
        weights=(weights, divides_weights),
        gradients=(precision.gradient_bytes, zero >= 2 and not is_whole),
        optimizer=(0 if offload else optimizer, zero >= 1),
    )


def states(problem: TrainingProblem, layout: Layout, of: Held) -> States:
    """Bytes of a rank's states; ZeRO divides states among the ranks with equal parameters.

    Frozen weights have no other state, and no master.
    """
    rule = state_rule(
        problem, layout.zero, offload=layout.offload_optimizer, in_pipeline=layout.pipeline > 1
    )
    frozen = _part(layout, of.every, rule.weights[1]) - _part(layout, of.trained, rule.weights[1])
    each = (rule.weights, rule.gradients, rule.optimizer)
    found = [size * _part(layout, of.trained, is_divided) for size, is_divided in each]
    return States(found[0] + frozen * problem.precision.weight_bytes, *found[1:])


def _part(layout: Layout, of: Parameters, is_divided: bool) -> float:
    """Parameters that a rank keeps, if ranks with equal ones divide them or not."""
    shared, expert = groups(layout) if is_divided else (1, 1)
    return of.shared / shared + of.expert / expert


@dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds of exchanges among data ranks.

    ``gradients`` and ``weights`` come once per iteration, ``each_forward`` and ``each_backward``
    with every microbatch. Of the latter, the first layer's weights (``alone_forward``) and the last
    layer's gradients (``alone_backward``) have nothing to run beside, once per iteration.
    """

    gradients: float = 0.0
    weights: float = 0.0
    each_forward: float = 0.0
    each_backward: float = 0.0
    alone_forward: float = 0.0
    alone_backward: float = 0.0


def exchange(problem: TrainingProblem, layout: Layout, of: Held) -> Exchange:
    """The exchanges of a rank's parameters among the ranks with equal ones."""
    if not problem.charges("data exchange"):
        return Exchange()
    precision = problem.precision
    gradients = _gather(problem, layout, of.trained, precision.gradient_bytes)
    gathered = of.every if layout.zero == 3 else of.trained
    weights = _gather(problem, layout, gathered, precision.weight_bytes)
    if layout.zero == 0:
        return Exchange(gradients=2 * gradients)
    if layout.zero == 1:
        return Exchange(gradients=gradients, weights=weights)
    if layout.zero == 2:
        return Exchange(
            weights=weights, each_backward=gradients, alone_backward=gradients / of.layers
        )
    return Exchange(
        each_forward=weights,
        each_backward=weights + gradients,
        alone_forward=weights / of.layers,
        alone_backward=gradients / of.layers,
    )


def _gather(problem: TrainingProblem, layout: Layout, of: Parameters, bytes_each: int) -> float:
    """One reduce-scatter or all-gather of a rank's parameters."""
    seconds = 0.0
    if of.shared:
        shared = links(problem.fabric, layout.data_group)
        seconds += gather_seconds(shared, of.shared * bytes_each)
    if of.expert:
        expert = links(problem.fabric, layout.expert_group)
        seconds += gather_seconds(expert, of.expert * bytes_each)
    return seconds


def tied_seconds(problem: TrainingProblem, layout: Layout, head: LayerShare) -> float:
    """The sum of a tied table's gradients, which ranks with the first and the last stage have."""
    if layout.pipeline == 1 or layout.form.in_v or not problem.charges("data exchange"):
        return 0.0
    moved = head.trained_tied_parameters * problem.precision.gradient_bytes
    if not moved:
        return 0.0
    return all_reduce_seconds(ends(problem.fabric, *layout.pipeline_group[0]), moved)


def update_seconds(problem: TrainingProblem, layout: Layout, of: Held) -> float:
    """The optimizer's step, in the device's memory, or over the link to the host.

    Raises
    ------
    InputError
        If the optimizer is offloaded and the bandwidth to the host is not known.
    """
    if not problem.charges("optimizer step"):
        return 0.0
    precision, number = problem.precision, _part(layout, of.trained, layout.zero > 0)
    if layout.offload_optimizer:
        host = problem.fabric.host_bytes_per_second
        if host is None:
            raise InputError("an offloaded optimizer needs the devices' bandwidth to the host")
        return link_seconds(number * max(precision.gradient_bytes, precision.weight_bytes), host)
    return problem.processor.update_seconds(number)
