"""Measure a model's costs layer by layer on one device.

Every layer runs on the outputs of the layers before it. On a CPU all run in a row, forwards and
then backwards in reverse: before its backward, the other layers and microbatches of a rank drive a
layer's weights and what it saved out of the caches. On a GPU each runs alone, which needs less
memory. Timed are its forward and its whole backward (B) by autograd, and its forward and the two
parts of its backward (I and W) by the pieces that a run makes of it, which may take longer. A cost
has one forward, the first: I takes up how much longer or shorter the forward by pieces is, or W how
much longer where no input has a gradient. Of a layer without pieces I is B, as in a run. B and W
add to gradients that are there, as in every microbatch but the first. Before each update on a CPU
other memory is used, as in a run. Rounds over all layers are repeated and medians taken, so that a
disturbance of the machine affects all layers equally. With one thread of a CPU processor time is
measured, which other processes do not affect; otherwise elapsed time. On a GPU it is that between
events in its stream: nothing waits for a layer, as in a run (`MeasuringMachine.timed`). Masks and
positions that several layers make of the same inputs are made in the first of them, as in a stage
(`made_once`); a stage that begins later makes them again, which no layer's time includes. Those of
sizes and buffers alone are made before the rounds that count, as before a run's second microbatch.

``saved_bytes`` counts every storage that autograd keeps once, without parameters and buffers. A
tensor that two neighbouring layers keep is counted in both, because a cut between them makes two
copies of it. ``output_bytes`` counts all values that pass from a layer to the next. Shared
parameters are counted in each layer that uses them. ``update_seconds`` is the update of a layer's
parameters by a separate optimizer, as in the executor. The constant overhead of an optimizer
(measured on one number) is counted once for all layers, since a stage has one optimizer for its
layers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from stagewright.executor.capture.layers import LayeredModel
from stagewright.executor.capture.loss_graph import require_no_parameters
from stagewright.executor.capture.shapes import propagate, values_of
from stagewright.executor.capture.steps.step import CapturedStep
from stagewright.executor.capture.twins import copied, made_once
from stagewright.executor.measuring.layer_times import LayerRun, loss_of, runs_of, times_of
from stagewright.executor.measuring.machine import (
    MeasuringMachine,
    Seconds,
    reference_seconds,
    rounded,
    threads,
    typical,
)
from stagewright.executor.training.data.batches import (
    mapped_batch,
    require_samples,
    tensors_of_batch,
    typed_inputs,
)
from stagewright.executor.training.losses import Loss, cross_entropy
from stagewright.executor.training.stages.learning_rates import MakeOptimizer, ParameterGroups
from stagewright.executor.training.stages.weights import Weights
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.graphs.models.operators.step_graph import StepGraph

WARM_UP = 2  # rounds
OTHER_BYTES = 16 * 2**20  # used between two updates of a layer

Values = tuple[Tensor, ...]


def measure_layers(
    model: LayeredModel | Mapping[int, LayeredModel],
    batch: tuple[Any, Any],
    microbatch_sizes: Sequence[int],
    *,
    machine: MeasuringMachine,
    loss: Loss = cross_entropy,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    groups: ParameterGroups = MappingProxyType({}),
    clips: bool = False,
    rounds: int = 9,
    autocast: torch.dtype | None = None,
    name: str = "model",
    on_progress: Callable[[str], None] = lambda _: None,
) -> Chain:
    """Measure ``model``, which is on the machine's device, with samples of ``batch``.

    ``model`` is the same layers for every size, or by size: captured for it, with the same
    parameters. ``batch`` is (inputs, targets), as of `Executor.step`. The loss is part of the last
    layer. ``autocast`` is the compute type of mixed precision, None for the parameters' type. With
    ``clips``, an update includes the norm of the gradients. Raises InputError if the batch has too
    few samples, or a run would refuse the model or the loss, or the optimizer does not accept its
    parameters.
    """
    models = model if isinstance(model, Mapping) else dict.fromkeys(microbatch_sizes, model)
    model = models[max(microbatch_sizes)]
    inputs, targets = _on_device(batch, model, machine.device)
    require_samples(inputs, microbatch_sizes)
    require_no_parameters(loss)
    for size in microbatch_sizes:  # as a run does before it starts
        propagate(models[size].layers, values_of(inputs, size), machine.device, autocast)
    measured, references = [], list[float | None]()
    with threads(machine.threads):
        for size in microbatch_sizes:
            runs = runs_of(
                models[size], _first(inputs, size), _first(targets, size), loss, autocast
            )
            together = len(runs) if machine.device.type == "cpu" else 1
            rows = [runs[i : i + together] for i in range(0, len(runs), together)]
            seconds = np.empty((WARM_UP + rounds, len(model), 5))
            for i in range(len(seconds)):
                on_progress(f"microbatch size {size}, round {i + 1} of {len(seconds)}")
                with made_once():
                    times = [one for row in rows for one in times_of(row, machine)]
                seconds[i] = [[one() for one in of_run] for of_run in times]
                references.append(reference_seconds(machine.device))
            measured.append((seconds[WARM_UP:], [run.bytes() for run in runs]))
        of_one = partial(loss_of, model, loss, _first(targets, 1))
        alone = [*runs[:-1], replace(runs[-1], loss=of_one)] if min(microbatch_sizes) > 1 else []
        least = [_min_samples(run, machine) for run in alone] or [None] * len(runs)
        on_progress("the optimizer step")
        updates, state = _measure_updates(model, optimizer, groups, clips, machine, rounds)
    costs = [
        _costs(size, machine.device_kind, times, bytes_, updates)
        for size, (times, bytes_) in zip(microbatch_sizes, measured, strict=True)
    ]
    return Chain(
        name=name,
        source=_source(machine, autocast or _dtype(model), [times for times, _ in measured]),
        microbatch_size=max(microbatch_sizes),
        layers=tuple(
            Layer(layer.name, float(_parameter_bytes(layer.module)), own, samples)
            for layer, own, samples in zip(
                model.layers, zip(*costs, strict=True), least, strict=True
            )
        ),
        optimizer_bytes_per_parameter_byte=state,
        reference_seconds=typical(references),
    )


def first_batch(batches: Any, *, keywords: bool = False) -> Any:
    """The first mini-batch of an iterable: (inputs, targets), or a dict of ``keywords``.

    Raises InputError if it is not an iterable of them.
    """
    try:
        first = next(iter(batches), None)
    except InputError:
        raise
    except Exception as error:  # the user's code may raise anything
        reason = " ".join(str(error).split())
        raise InputError(f"the data raised {type(error).__name__}: {reason}") from error
    if keywords and isinstance(first, Mapping):
        return dict(first)
    if not isinstance(first, list | tuple) or len(first) != 2:
        what = "nothing" if first is None else f"a {type(first).__name__}"
        raise InputError(f"the data's first mini-batch is {what}, not a pair (inputs, targets)")
    return first[0], first[1]


# The optimizer


def _measure_updates(
    model: LayeredModel,
    optimizer: MakeOptimizer,
    groups: ParameterGroups,
    clips: bool,
    machine: MeasuringMachine,
    rounds: int,
) -> tuple[list[float], float]:
    """Seconds of the update of each layer, and bytes of state per byte of parameters."""
    other = torch.zeros(OTHER_BYTES if machine.device.type == "cpu" else 0, dtype=torch.uint8)

    def times(weights: Weights) -> float:
        def update() -> None:
            if clips:
                weights.squares()
            weights.update(0.5 if clips else 1.0)

        measured = []
        for _ in range(WARM_UP + rounds):
            other.add_(1)  # as the other layers' gradients, drives the weights out of the caches
            measured.append(machine.timed(update)[0])
        return float(np.median([one() for one in measured][WARM_UP:]))

    number = nn.Linear(1, 1, bias=False, device=machine.device, dtype=_dtype(model))
    least = times(_weights(number, optimizer, {}))
    seconds, state = [], 0
    for layer in model.layers:
        try:
            weights = _weights(copied(layer.module, {}), optimizer, groups)
            seconds.append(times(weights) if weights.names else 0.0)
        except InputError:
            raise
        except (ValueError, RuntimeError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise InputError(
                f"the optimizer does not accept layer {layer.name!r}: {reason}"
            ) from error
        state += weights.state_bytes
    share = least / max(1, sum(one > 0 for one in seconds))
    whole = sum(_parameter_bytes(layer.module) for layer in model.layers)
    return [max(0.0, one - least) + share if one else 0.0 for one in seconds], state / (whole or 1)


def _weights(module: nn.Module, optimizer: MakeOptimizer, groups: ParameterGroups) -> Weights:
    """A layer's parameters with a separate optimizer, each by its first name."""
    first: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    primary = {name: first.setdefault(id(one), name) for name, one in named}
    return Weights([module], primary, (), optimizer, versions=1, groups=groups)


def _min_samples(run: LayerRun, machine: MeasuringMachine) -> int | None:
    """2 for a layer that runs on several samples but not on one, such as a batch norm."""
    samples = run.inputs[0].shape[:1]
    one = tuple(value[:1] if value.shape[:1] == samples else value for value in run.inputs)
    try:
        times_of([replace(run, inputs=one, pieces=None)], machine)
    except Exception:  # the layer's code may raise anything
        return 2
    return None


# Samples


def _on_device(
    batch: tuple[Any, Any], model: LayeredModel, device: torch.device
) -> tuple[Values, Any]:
    """Inputs and targets on ``device``; floating inputs in the type of the parameters."""
    inputs, targets = (tuple(one) if isinstance(one, list) else one for one in batch)
    given, signature = typed_inputs(inputs, _dtype(model))
    model.require_called(signature)
    tensors_of_batch("targets", targets)
    if len(given) != model.input_count:
        raise InputError(
            f"the data has {len(given)} input tensors per mini-batch, the model takes "
            f"{model.input_count}"
        )
    moved = tuple(one.to(device) for one in given)
    return moved, mapped_batch(targets, lambda one: one.to(device))


def _first(value: Any, size: int) -> Any:
    """A copy of the first samples, so that the rest of the batch's storage is not counted."""
    return mapped_batch(value, lambda one: one[:size].clone())


def _dtype(model: LayeredModel) -> torch.dtype:
    types = (parameter.dtype for parameter in model.parameters_by_name().values())
    return next((one for one in types if one.is_floating_point), torch.get_default_dtype())


def _parameter_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


# The document


def _costs(
    size: int, kind: str, times: Floats, bytes_: Sequence[tuple[int, int]], updates: Sequence[float]
) -> list[LayerCost]:
    """The medians of ``times``, shape (rounds, layers, 5), as costs of the layers."""
    costs = []
    for (forward, whole, in_two, of_input, of_weights), (saved, output), update in zip(
        np.median(times, axis=0), bytes_, updates, strict=True
    ):
        further = in_two - forward
        costs.append(
            LayerCost(
                microbatch_size=size,
                forward_seconds=rounded(forward),
                backward_seconds=rounded(whole),
                input_gradient_seconds=rounded(max(0.0, of_input + further) if of_input else 0.0),
                weight_gradient_seconds=rounded(
                    of_weights + (0.0 if of_input else max(0.0, further))
                ),
                update_seconds=rounded(update),
                saved_bytes=float(saved),
                output_bytes=float(output),
                device_kind=kind,
            )
        )
    return costs


def _source(machine: MeasuringMachine, dtype: torch.dtype, measured: Sequence[Floats]) -> str:
    spread = np.concatenate([_spread(times[:, :, :2]) for times in measured])
    return (
        f"measured: layer by layer with torch {torch.__version__}, "
        f"{str(dtype).removeprefix('torch.')}, on {machine}, {date.today()}; "
        f"medians of {len(measured[0])} rounds, "
        f"interquartile range {np.median(spread):.0%} of the median for the typical layer, "
        f"{spread.max():.0%} for the worst"
    )


def _spread(times: Floats) -> Floats:
    """Interquartile range over the median of each time, flat; 0 where the median is 0."""
    low, middle, high = np.percentile(times, [25, 50, 75], axis=0)
    spread: Floats = np.divide(high - low, middle, out=np.zeros_like(low), where=middle > 0)
    return spread.ravel()


class _Timing(fx.Interpreter):
    """Times every operator once per run."""

    def __init__(self, module: fx.GraphModule, machine: MeasuringMachine) -> None:
        super().__init__(module)
        self.machine = machine
        self.seconds: dict[str, Seconds] = {}

    def run_node(self, n: fx.Node) -> Any:
        if not isinstance(n.target, torch._ops.OpOverload):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        target = n.target
        self.seconds[n.name], result = self.machine.timed(lambda: target(*args, **kwargs))
        return result


def measure_operators(
    step: CapturedStep,
    batch: tuple[Any, Any],
    machine: MeasuringMachine,
    *,
    rounds: int = 9,
    on_progress: Callable[[str], None] = lambda _: None,
) -> StepGraph:
    """The step's graph with the median time of every operator in ``rounds`` steps.

    The states of ``step`` are real tensors; they stay as they are. The clock's time and, for views,
    the call's are included: on a processor no operator is free.
    """
    states = tree_map_only(Tensor, lambda one: one.to(machine.device, copy=True), step.states)
    inputs = [one.to(machine.device) for one in tree_leaves(batch)]
    timing = _Timing(step.module, machine)
    found: list[dict[str, float]] = []
    with threads(machine.threads), torch.no_grad():
        for i in range(WARM_UP + rounds):
            on_progress(f"step {i + 1} of {WARM_UP + rounds}")
            timing.run(*states.values(), *inputs)
            found.append({name: one() for name, one in timing.seconds.items()})
    medians = {
        name: rounded(float(np.median([one[name] for one in found[WARM_UP:]])))
        for name in timing.seconds
    }
    nodes = tuple(
        replace(node, seconds=node.seconds | {machine.device_kind: medians.get(node.name, 0.0)})
        for node in step.graph.nodes
    )
    return replace(
        step.graph,
        nodes=nodes,
        source=f"measured: {machine}, torch {torch.__version__}, median of {rounds}",
    )
