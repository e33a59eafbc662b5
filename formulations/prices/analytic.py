"""Analytic profiles: costs of models from operation counts and what kernels reach of the peaks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from stagewright.formulations.prices.computing import (
    PrecisionName,
    Processor,
    computed,
    layer_cost,
    precision_named,
)
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.devices import Accelerator, accelerator, require_arithmetic
from stagewright.graphs.machines.rates import RateSet, rates_for
from stagewright.graphs.models import traits
from stagewright.graphs.models.architecture import Architecture
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.graphs.models.language import Attention
from stagewright.graphs.models.named import named_model
from stagewright.graphs.models.shards import LayerShare, LayerSplit, share_of, shares_of

ALL_EXPERTS = "all experts on the device"
OPTIMIZERS = {0: "SGD", 1: "SGD with momentum", 2: "Adam"}  # by numbers of state per parameter


def analytic_model(
    name: str,
    microbatch_size: int | Sequence[int] | None = None,
    device: str | Accelerator | Sequence[str | Accelerator] = "v100",
    *,
    rates: RateSet | str | None = None,
    precision: PrecisionName = "fp32",
    attention: Attention = "fused",
    tied_copies: bool = True,
    optimizer_state: int = 2,
    **sizes: int,
) -> Chain:
    """A named model with computed, not measured, costs.

    Times, kept activations and states are those that layouts have (``prices.computing``) for one
    device: each operation takes the larger of FLOPs over reached FLOP/s and bytes over reached
    memory bandwidth, and its launch. See ``graphs.models.operations`` for the counts of gradients
    and kept activations. The optimizer step is bound by memory traffic: in fp32 it reads weights,
    gradients and state and writes weights and state, in 16 bits it works on fp32 masters.

    A table that several layers use (logits tied to the embedding) counts in each of them: every
    later stage that uses it holds a copy, with its gradient and its state, and updates it. If a
    plan has two of these layers in one stage, the copy is counted twice, which overestimates
    memory. The all-reduce of the table's gradient between the stages is not counted.

    Parameters
    ----------
    name
        One of ``models.MODELS``, or ``bert-N``.
    microbatch_size
        Samples; by default the model's usual number. Of several, all have costs and the largest is
        the planned one.
    device
        A device of ``devices.ACCELERATORS`` or the user's own; several for a mixed cluster.
    rates
        What kernels reach, on all devices: a rate set, its name or its file; None: the newest of
        each kind of device, or of the nearest.
    precision
        ``fp32``; ``tf32``: the same with products and convolutions at TF32's peak, as torch has
        them with ``allow_tf32`` (by default of convolutions alone); or ``fp16`` and ``bf16``:
        weights, gradients and activations of 2 bytes, and an optimizer that keeps masters of the
        weights and its state in fp32 (Adam: 12 bytes per parameter). ``fp8`` is bf16 with the
        matrix products (not convolutions) in 8 bits.
    attention
        ``fused``: one kernel that keeps no matrix of scores and recomputes them in the backward,
        or ``materialized``. It does not apply to vision models.
    tied_copies
        False: a table that several layers use counts in the first of them only, as on one device.
    optimizer_state
        Numbers per parameter: SGD 0, with momentum 1, Adam 2.
    sizes
        The model's sizes, such as ``layers``, ``hidden``, ``sequence``.

    Raises
    ------
    InputError
        If the model, the device or a size is unknown or out of range.
    """
    model = named_model(name)
    if attention not in get_args(Attention):
        raise InputError(f"attention must be fused or materialized, got {attention!r}")
    samples = model.microbatch_size if microbatch_size is None else microbatch_size
    return _chain(
        name,
        sizes,
        # Not all of a layer's work need be proportional to the samples.
        lambda size: ({one.name: share_of(one) for one in model.layers(size, sizes, attention)}, 1),
        _Training(_devices(device, rates), precision, samples, tied_copies, optimizer_state),
        assumed=[f"{attention} attention"] if model.attends else [],
    )


def architecture_model(
    architecture: Architecture,
    sequence: int,
    microbatch_size: int | Sequence[int] = 1,
    device: str | Accelerator | Sequence[str | Accelerator] = "v100",
    *,
    rates: RateSet | str | None = None,
    precision: PrecisionName = "fp32",
    tied_copies: bool = True,
    optimizer_state: int = 2,
) -> Chain:
    """A transformer with computed, not measured, costs: embedding, blocks, head.

    Tokens are spread evenly over a layer's experts, all of which are on the device: their weights,
    gradients and optimizer state count in full. Attention is fused. The other assumptions and
    parameters are those of :func:`analytic_model`. Raises InputError if the device is unknown, or a
    size is out of range. ``architecture``: for example of ``importers.hf_config.read_hf_config``.
    ``sequence``: tokens in a sample.
    """
    if architecture.tower is not None and architecture.tower.is_encoder:
        raise InputError(
            f"{architecture.name} has {traits.ENCODER_DECODER}: a chain of layers hands on one "
            "output each, and blocks of a decoder take the encoder's too; use train-plan"
        )
    assumed = ["fused attention"]
    if architecture.experts is not None:
        assumed += ["tokens spread evenly over the experts", ALL_EXPERTS]
    assumed += traits.remarks_on(architecture, sequence)
    names = ["embedding", *(f"block{i}" for i in range(architecture.layers)), "head"]
    layers = shares_of(architecture, sequence, LayerSplit()).every
    return _chain(
        architecture.name,
        {"layers": architecture.layers, "hidden": architecture.hidden, "sequence": sequence},
        lambda size: (dict(zip(names, layers, strict=True)), size),
        _Training(
            _devices(device, rates), precision, microbatch_size, tied_copies, optimizer_state
        ),
        assumed=assumed,
    )


@dataclass(frozen=True, slots=True)
class _Training:
    """How a model is trained: on which devices, in which types and microbatches."""

    devices: Sequence[tuple[Accelerator, RateSet]]
    precision: PrecisionName
    microbatch_size: int | Sequence[int]
    tied_copies: bool
    optimizer_state: int

    @property
    def sizes(self) -> list[int]:
        """The microbatch sizes, ascending."""
        asked = self.microbatch_size
        every = sorted({asked} if isinstance(asked, int) else set(asked))
        if not every or every[0] < 1:
            raise InputError(f"microbatch_size must be at least 1, got {asked}")
        return every

    @property
    def processors(self) -> list[Processor]:
        """The devices with their types of numbers."""
        if self.optimizer_state not in OPTIMIZERS:
            raise InputError(f"optimizer_state must be 0, 1 or 2, got {self.optimizer_state!r}")
        numbers = precision_named(self.precision)
        masters = numbers.weight_bytes < 4
        numbers = replace(
            numbers,
            # A plan's gradients have the type of its weights.
            gradient_bytes=numbers.weight_bytes,
            optimizer_bytes=4 * (self.optimizer_state + masters),
        )
        for card, _ in self.devices:
            require_arithmetic(card, self.precision)
        return [Processor(card, rates.reached, numbers) for card, rates in self.devices]


def _devices(
    device: str | Accelerator | Sequence[str | Accelerator], rates: RateSet | str | None
) -> list[tuple[Accelerator, RateSet]]:
    """Every device with its rates."""
    kinds = [device] if isinstance(device, str | Accelerator) else device
    found = [(card, rates_for(card, rates)) for card in map(accelerator, kinds)]
    if not found:
        raise InputError("an analytic profile needs at least one device")
    for _, of in found:
        if of.anchor is not None:
            raise InputError(
                f"rates {of.name} are of the timed layers of {of.anchor.model}, for layouts of it; "
                "choose others, or plan from a profile"
            )
    return found


def _chain(
    name: str,
    sizes: Mapping[str, int],
    shares_of_size: Callable[[int], tuple[Mapping[str, LayerShare], int]],
    training: _Training,
    *,
    assumed: Sequence[str],
) -> Chain:
    """The chain of a model's layers, of which a microbatch has a number of shares."""
    processors, samples = training.processors, training.sizes
    by_size = {size: shares_of_size(size) for size in samples}
    shares, _ = by_size[samples[-1]]
    numbers = processors[0].precision
    stated = [
        f"{one.card}, {training.precision} peak {one.peak_flops / 1e12:g} TFLOP/s, rates {rates}"
        for one, (_, rates) in zip(processors, training.devices, strict=True)
    ]
    stated += assumed
    if any(share.tied_parameters for share in shares.values()):
        where = "copied to every layer that uses them"
        stated.append(f"tied weights {where if training.tied_copies else 'in their first layer'}")
    stated += _stated_numbers(training.precision)
    stated.append(f"update by {OPTIMIZERS[training.optimizer_state]}")
    chosen = ",".join(f"{size}={value}" for size, value in sizes.items())
    layers = []
    for layer, share in shares.items():
        own = share if training.tied_copies else replace(share, tied_parameters=0.0)
        parameters = own.parameters + own.expert_parameters + own.tied_parameters
        costs = [
            _cost(one, every[layer], count, parameters, size)
            for one in processors
            for size, (every, count) in by_size.items()
        ]
        layers.append(Layer(layer, parameters * numbers.weight_bytes, tuple(costs)))
    return Chain(
        f"{name}({chosen})" if chosen else name,
        f"analytic: {'; '.join(stated)}",
        samples[-1],
        tuple(layers),
        numbers.state_factor(),
    )


def _stated_numbers(precision: PrecisionName) -> list[str]:
    """Phrases that name the number types of a precision below fp32; empty for fp32."""
    if precision == "fp32":
        return []
    if precision == "tf32":
        return ["matrix products and convolutions in TF32, all else in fp32"]
    kept = "bf16" if precision == "fp8" else precision
    products = [f"matrix products in fp8, convolutions in {kept}"] if precision == "fp8" else []
    return [
        *products,
        f"weights, gradients and activations in {kept}, masters and optimizer state in fp32",
    ]


def _cost(
    processor: Processor, share: LayerShare, count: int, parameters: float, size: int
) -> LayerCost:
    forward, inputs, weights = computed(processor, share, count).alone(processor, share)
    return layer_cost(
        processor,
        share,
        count,
        microbatch_size=size,
        device_kind=processor.card.name,
        forward_seconds=forward,
        input_gradient_seconds=inputs,
        weight_gradient_seconds=weights,
        update_seconds=processor.update_seconds(parameters),
    )
