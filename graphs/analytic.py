"""Analytic profiles: costs of named models from operation counts and a device's peaks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stagewright.graphs.chain import Chain, Layer, LayerCost
from stagewright.graphs.devices import Accelerator, accelerator
from stagewright.graphs.errors import InputError
from stagewright.graphs.models import named_model
from stagewright.graphs.models.operations import LayerWork, Operation

Precision = Literal["fp32", "fp16"]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What is reached of a device's peaks: by matrix products, convolutions, and memory traffic.

    With the defaults a V100 in fp32 trains BERT-large (384 tokens) at 10 sequences and ResNet-50
    at 345 images per second; NVIDIA publishes 9.85 and 367 (DeepLearningExamples, one V100 of a
    DGX-1). A convolution reaches more as fast algorithms save multiplications.
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
    microbatch_size: int | None = None,
    device: str | Sequence[str] = "v100",
    *,
    efficiency: Efficiency | None = None,
    precision: Precision = "fp32",
    **sizes: int,
) -> Chain:
    """A named model with computed, not measured, costs.

    Each operation takes the larger of its FLOPs over what the device reaches of its peak, and its
    bytes over what it reaches of its memory's bandwidth; launch times are not counted. See
    ``models.operations`` for what is counted as the gradients and as kept for the backward.

    Parameters
    ----------
    name
        One of ``models.MODELS``, or ``bert-N``.
    microbatch_size
        Samples; by default the model's usual number.
    device
        A device of ``devices.ACCELERATORS``, or several for a mixed cluster.
    efficiency
        What is reached of the peaks.
    precision
        ``fp32``, or ``fp16``: weights, gradients and activations of 2 bytes, and an optimizer
        that keeps 12 bytes per parameter (Adam with fp32 master weights).
    sizes
        The model's sizes, such as ``layers``, ``hidden``, ``sequence``.

    Raises
    ------
    InputError
        If the model, the device or a size is unknown or out of range.
    """
    model = named_model(name)
    samples = model.microbatch_size if microbatch_size is None else microbatch_size
    if samples < 1:
        raise InputError(f"microbatch_size must be at least 1, got {samples}")
    if precision not in ("fp32", "fp16"):
        raise InputError(f"precision must be fp32 or fp16, got {precision!r}")
    cards = [accelerator(kind) for kind in ([device] if isinstance(device, str) else device)]
    if not cards:
        raise InputError("an analytic profile needs at least one device")
    rates = [_Rates(card, precision, efficiency or Efficiency()) for card in cards]
    chosen = ",".join(f"{size}={value}" for size, value in sizes.items())
    return Chain(
        f"{name}({chosen})" if chosen else name,
        "analytic: " + "; ".join(str(rate) for rate in rates),
        samples,
        tuple(_layer(work, samples, rates) for work in model.layers(samples, sizes)),
        optimizer_bytes_per_parameter_byte=2.0 if precision == "fp32" else 6.0,
    )


@dataclass(frozen=True, slots=True)
class _Rates:
    """What one device reaches at one precision."""

    card: Accelerator
    precision: Precision
    efficiency: Efficiency

    def __str__(self) -> str:
        return (
            f"{self.card.name}, {self.precision} peak {self.peak_flops / 1e12:g} TFLOP/s at "
            f"{self.efficiency.matmul:.0%} (matmul) and {self.efficiency.convolution:.0%} "
            f"(convolution), memory {self.card.memory_bytes_per_second / 1e9:g} GB/s at "
            f"{self.efficiency.memory:.0%}"
        )

    @property
    def peak_flops(self) -> float:
        return self.card.fp32_flops if self.precision == "fp32" else self.card.fp16_flops

    @property
    def element_bytes(self) -> int:
        return 4 if self.precision == "fp32" else 2

    def seconds(self, operation: Operation) -> float:
        """Forward time of one operation (a roofline)."""
        moving = operation.moved * self.element_bytes
        memory = moving / (self.card.memory_bytes_per_second * self.efficiency.memory)
        if operation.kind == "memory":
            return memory
        reached: float = getattr(self.efficiency, operation.kind)
        return max(operation.flops / (self.peak_flops * reached), memory)


def _layer(work: LayerWork, samples: int, rates: Sequence[_Rates]) -> Layer:
    costs = tuple(_cost(work, samples, rate) for rate in rates)
    return Layer(work.name, work.parameters * rates[0].element_bytes, costs)


def _cost(work: LayerWork, samples: int, rate: _Rates) -> LayerCost:
    times = [(rate.seconds(operation), operation) for operation in work.operations]
    inputs = sum(seconds * operation.input_gradients for seconds, operation in times)
    weights = sum(seconds * operation.weight_gradients for seconds, operation in times)
    if not work.differentiable:
        inputs, weights = 0.0, inputs + weights
    masks = sum(operation.mask_bytes for operation in work.operations)
    saved = sum(operation.saved for operation in work.operations)
    return LayerCost(
        microbatch_size=samples,
        forward_seconds=sum(seconds for seconds, _ in times),
        saved_bytes=saved * rate.element_bytes + masks,
        output_bytes=work.output * rate.element_bytes,
        input_gradient_seconds=inputs,
        weight_gradient_seconds=weights,
        device_kind=rate.card.name,
    )
