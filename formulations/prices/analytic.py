"""Analytic profiles: costs of models from operation counts and a device's peaks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from stagewright.formulations.prices.updates import memory_seconds, update_bytes
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.devices import Accelerator, accelerator, require_arithmetic
from stagewright.graphs.models.architecture import Architecture
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.graphs.models.language import Attention
from stagewright.graphs.models.named import named_model
from stagewright.graphs.models.operations import LayerOperation, LayerWork

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
FULL = ("fp32", "tf32")
"""Precisions in which all is kept in fp32."""

OPTIMIZERS = {0: "SGD", 1: "SGD with momentum", 2: "Adam"}  # by numbers of state per parameter


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The achieved fraction of a device's peaks: matrix products, convolutions, memory traffic.

    With the defaults and materialized attention a V100 in fp32 trains BERT-large (384 tokens) at 10
    sequences and ResNet-50 at 345 images per second; NVIDIA publishes 9.85 and 367
    (DeepLearningExamples, one V100 of a DGX-1). The fraction of convolutions is higher because fast
    algorithms save multiplications.
    """

    matmul: float = 0.5
    convolution: float = 0.75
    memory: float = 0.75

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not 0 < getattr(self, name) <= 1:
                raise InputError(
                    f"efficiency: {name} must be in (0, 1], got {getattr(self, name):g}"
                )


def analytic_model(
    name: str,
    microbatch_size: int | Sequence[int] | None = None,
    device: str | Accelerator | Sequence[str | Accelerator] = "v100",
    *,
    efficiency: Efficiency | None = None,
    precision: Precision = "fp32",
    attention: Attention = "fused",
    tied_copies: bool = True,
    optimizer_state: int = 2,
    **sizes: int,
) -> Chain:
    """A named model with computed, not measured, costs.

    Each operation takes the larger of FLOPs over achieved FLOP/s and bytes over achieved memory
    bandwidth; launch times are not counted. See ``graphs.models.operations`` for the counts of
    gradients and kept activations. The optimizer step is bound by memory traffic: in fp32 it reads
    weights, gradients and state and writes weights and state, in 16 bits it works on fp32 masters.

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
    efficiency
        The achieved fractions of the peaks.
    precision
        ``fp32``; ``tf32``: the same with products and convolutions at TF32's peak, as torch has
        them with ``allow_tf32`` (by default of convolutions alone); or ``fp16`` and ``bf16``:
        weights, gradients and activations of 2 bytes, and an optimizer that keeps masters of the
        weights and its state in fp32 (Adam: 12 bytes per parameter). ``fp8`` is bf16 with the
        matrix products (attention's too, not convolutions) at the peak of 8 bits; making the 8-bit
        operands takes no time.
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
    rates = _rates(device, precision, efficiency, optimizer_state)
    return _chain(
        name,
        sizes,
        lambda samples: model.layers(samples, sizes, attention),
        _require_sizes(model.microbatch_size if microbatch_size is None else microbatch_size),
        rates,
        assumed=[f"{attention} attention"] if model.attends else [],
        tied_copies=tied_copies,
    )


def architecture_model(
    architecture: Architecture,
    sequence: int,
    microbatch_size: int | Sequence[int] = 1,
    device: str | Accelerator | Sequence[str | Accelerator] = "v100",
    *,
    efficiency: Efficiency | None = None,
    precision: Precision = "fp32",
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
    rates = _rates(device, precision, efficiency, optimizer_state)
    assumed = ["roofline of every operator", "fused attention"]
    if not architecture.encoder:
        assumed.append("causal masks save no FLOPs")
    if architecture.experts is not None:
        assumed += ["tokens spread evenly over the experts", "all experts on the device"]
    if architecture.left_out is not None:
        assumed.append(f"without {architecture.left_out}")
    return _chain(
        architecture.name,
        {"layers": architecture.layers, "hidden": architecture.hidden, "sequence": sequence},
        lambda samples: architecture.works(samples, sequence),
        _require_sizes(microbatch_size),
        rates,
        assumed=assumed,
        tied_copies=tied_copies,
    )


@dataclass(frozen=True, slots=True)
class Rates:
    """The achieved rates of one device at one precision."""

    card: Accelerator
    precision: Precision
    efficiency: Efficiency
    optimizer_state: int

    def __str__(self) -> str:
        return (
            f"{self.card}, {self.precision} peak {self.peak_flops / 1e12:g} TFLOP/s at "
            f"{self.efficiency.matmul:.0%} (matmul) and {self.efficiency.convolution:.0%} "
            f"(convolution), memory {self.card.memory_bytes_per_second / 1e9:g} GB/s at "
            f"{self.efficiency.memory:.0%}"
        )

    @property
    def peak_flops(self) -> float:
        """FLOP/s of matrix products at this precision."""
        if self.precision == "fp8" and self.card.fp8_flops is not None:
            return self.card.fp8_flops
        return self.convolution_flops

    @property
    def convolution_flops(self) -> float:
        """FLOP/s of convolutions at this precision: in fp8 those of bf16."""
        if self.precision == "tf32" and self.card.tf32_flops is not None:
            return self.card.tf32_flops
        return self.card.fp32_flops if self.precision == "fp32" else self.card.fp16_flops

    @property
    def element_bytes(self) -> int:
        """Bytes of a number at this precision."""
        return 4 if self.precision in FULL else 2

    @property
    def state_bytes_per_parameter_byte(self) -> float:
        """The optimizer's state, with fp32 masters where the weights have 16 bits."""
        if self.precision in FULL:
            return float(self.optimizer_state)
        return 2.0 * (1 + self.optimizer_state)

    def moving_seconds(self, moved_bytes: float) -> float:
        """Time to read or write ``moved_bytes``."""
        return memory_seconds(moved_bytes, self.card, self.efficiency.memory)

    def update_seconds(self, parameter_bytes: float) -> float:
        """Time of the optimizer step.

        In fp32 it moves 7 times the weights' bytes with Adam, 5 with momentum, 3 with SGD. In 16
        bits it reads the masters in place of the weights.
        """
        state, masters = self.state_bytes_per_parameter_byte, self.precision not in FULL
        passes = update_bytes(1, 1, state, masters=masters)
        return self.moving_seconds(passes * parameter_bytes)

    def seconds(self, operation: LayerOperation) -> float:
        """Forward time of one operation (a roofline)."""
        memory = self.moving_seconds(operation.moved * self.element_bytes)
        if operation.kind == "memory":
            return memory
        reached: float = getattr(self.efficiency, operation.kind)
        products = operation.kind == "matmul"
        peak = self.peak_flops if products else self.convolution_flops
        return max(operation.flops / (peak * reached), memory)


def _rates(
    device: str | Accelerator | Sequence[str | Accelerator],
    precision: Precision,
    efficiency: Efficiency | None,
    optimizer_state: int,
) -> list[Rates]:
    """The rates of every device."""
    if precision not in get_args(Precision):
        raise InputError(f"precision must be fp32, tf32, fp16, bf16 or fp8, got {precision!r}")
    if optimizer_state not in OPTIMIZERS:
        raise InputError(f"optimizer_state must be 0, 1 or 2, got {optimizer_state!r}")
    kinds = [device] if isinstance(device, str | Accelerator) else device
    cards = [accelerator(kind) for kind in kinds]
    if not cards:
        raise InputError("an analytic profile needs at least one device")
    for card in cards:
        require_arithmetic(card, precision)
    return [Rates(card, precision, efficiency or Efficiency(), optimizer_state) for card in cards]


def _require_sizes(asked: int | Sequence[int]) -> list[int]:
    """The microbatch sizes, ascending."""
    every = sorted({asked} if isinstance(asked, int) else set(asked))
    if not every or every[0] < 1:
        raise InputError(f"microbatch_size must be at least 1, got {asked}")
    return every


def _chain(
    name: str,
    sizes: Mapping[str, int],
    works_of: Callable[[int], Sequence[LayerWork]],
    microbatch_sizes: Sequence[int],
    rates: Sequence[Rates],
    *,
    assumed: Sequence[str],
    tied_copies: bool,
) -> Chain:
    """The chain of a model's layers, which ``works_of`` gives for a number of samples."""
    by_size = {samples: works_of(samples) for samples in microbatch_sizes}
    works = by_size[microbatch_sizes[-1]]
    counted = [work.parameters + tied_copies * work.tied_parameters for work in works]
    layers = zip(counted, zip(*by_size.values(), strict=True), strict=True)
    stated = [*map(str, rates), *assumed]
    if any(work.tied_parameters for work in works):
        where = "copied to every layer that uses them" if tied_copies else "in their first layer"
        stated.append(f"tied weights {where}")
    stated += _stated_numbers(rates[0].precision)
    stated.append(f"update by {OPTIMIZERS[rates[0].optimizer_state]}")
    chosen = ",".join(f"{size}={value}" for size, value in sizes.items())
    return Chain(
        f"{name}({chosen})" if chosen else name,
        f"analytic: {'; '.join(stated)}",
        microbatch_sizes[-1],
        tuple(
            _layer(number, dict(zip(microbatch_sizes, one, strict=True)), rates)
            for number, one in layers
        ),
        optimizer_bytes_per_parameter_byte=rates[0].state_bytes_per_parameter_byte,
    )


def _stated_numbers(precision: Precision) -> list[str]:
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


def _layer(parameters: float, works: Mapping[int, LayerWork], rates: Sequence[Rates]) -> Layer:
    """A layer with its costs at every size, whose numbers of samples are the keys."""
    parameter_bytes = parameters * rates[0].element_bytes
    costs = tuple(
        _cost(work, parameter_bytes, samples, rate)
        for rate in rates
        for samples, work in works.items()
    )
    return Layer(next(iter(works.values())).name, parameter_bytes, costs)


def _cost(work: LayerWork, parameter_bytes: float, samples: int, rate: Rates) -> LayerCost:
    times = [(rate.seconds(operation), operation) for operation in work.operations]
    inputs = sum(seconds * operation.input_gradients for seconds, operation in times)
    weights = sum(seconds * operation.weight_gradients for seconds, operation in times)
    if not work.differentiable:
        inputs, weights = 0.0, inputs + weights
    saved = sum(
        operation.saved * rate.element_bytes + operation.saved_bytes
        for operation in work.operations
    )
    return LayerCost(
        microbatch_size=samples,
        forward_seconds=sum(seconds for seconds, _ in times),
        saved_bytes=saved,
        output_bytes=work.output * rate.element_bytes,
        input_gradient_seconds=inputs,
        weight_gradient_seconds=weights,
        device_kind=rate.card.name,
        update_seconds=rate.update_seconds(parameter_bytes),
    )
