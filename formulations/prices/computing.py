"""Computation: seconds and bytes of a layer's operators on one device.

Layouts, the analytic profiles of plans and captured operators take their times from here: products
by their FLOPs, other kernels by the bytes that they move, at the part of a device's peaks that a
rate set says. Exchanges with other devices are in `collectives`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from stagewright.formulations.prices.collectives import Amount, link_seconds
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.devices import Accelerator
from stagewright.graphs.machines.rates import Reached
from stagewright.graphs.machines.stack_memory import PLAIN, StackMemory
from stagewright.graphs.models.chain import LayerCost
from stagewright.graphs.models.operations import LayerOperation
from stagewright.graphs.models.shards import LayerKind, LayerShare, Recompute
from stagewright.graphs.models.tuning import is_adapter

PrecisionName = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]


@documents.record
class Precision:
    """Bytes of a number of each kind; the defaults are Megatron-LM's mixed precision with Adam.

    ``optimizer_bytes`` are per parameter: the fp32 master of the weight and two moments.
    """

    activation_bytes: int = 2
    weight_bytes: int = 2
    gradient_bytes: int = 4
    optimizer_bytes: int = 12
    fp8_products: bool = False
    tf32_products: bool = False

    @property
    def updated_bytes(self) -> float:
        """Bytes per parameter that the optimizer's step moves.

        It reads gradients and state and writes state and weights; without masters of the weights in
        the state it reads the weights too.
        """
        weights = self.weight_bytes * (1 if self.weight_bytes < 4 else 2)
        return self.gradient_bytes + 2 * self.optimizer_bytes + weights

    def state_factor(self, times: int = 1) -> float:
        """Bytes next to a weight and a gradient of its size; smaller gradients count as large.

        What gradients take in addition counts ``times``.
        """
        weight, gradient = self.weight_bytes, max(self.weight_bytes, self.gradient_bytes)
        return (times * (gradient - weight) + self.optimizer_bytes) / weight

    def __post_init__(self) -> None:
        for name in ("activation_bytes", "weight_bytes", "gradient_bytes"):
            if getattr(self, name) not in (1, 2, 4):
                raise InputError(f"{name} must be 1, 2 or 4, got {getattr(self, name)}")
        if not 0 <= self.optimizer_bytes <= 16:
            raise InputError(f"optimizer_bytes must be from 0 to 16, got {self.optimizer_bytes}")


MIXED = Precision()
"""bf16 or fp16, with sums of gradients and the optimizer in fp32."""


def precision_named(name: str) -> Precision:
    """Precision by its name: fp16, bf16, fp8 (products in 8 bits, weights in bf16), fp32, tf32.

    tf32 is fp32 with matrix products on tensor cores, as with torch's ``allow_tf32``.

    Raises InputError if the name is another.
    """
    if name in ("fp16", "bf16"):
        return MIXED
    if name == "fp8":
        return Precision(fp8_products=True)
    if name in ("fp32", "tf32"):
        is_tf32 = name == "tf32"
        return Precision(
            activation_bytes=4, weight_bytes=4, optimizer_bytes=8, tf32_products=is_tf32
        )
    raise InputError(f"precision must be fp32, tf32, fp16, bf16 or fp8, got {name!r}")


Price = Literal[
    "matrix products", "attention", "memory-bound kernels", "sums of gradients",
    "tensor exchange", "context exchange", "expert exchange", "pipeline transfers",
    "data exchange", "optimizer step", "activation offload",
]  # fmt: skip
"""What a switch makes free: prices that are no constant of a rate set."""


@dataclass(frozen=True, eq=False, slots=True)
class Processor:
    """A device that computes layers: its peaks, what its kernels reach, and the types of numbers.

    With ``fused_gradients`` the products of the weights' gradients add to the sum over microbatches
    themselves; else another kernel does. ``memory`` is what the software keeps. Where layers were
    timed, ``measured_bytes`` are by how much more each kind kept than is counted, and
    ``update_seconds_each`` the optimizer's step of one parameter. ``free`` prices are zero,
    to see what they add.
    """

    card: Accelerator
    reached: Reached
    precision: Precision = MIXED
    fused_gradients: bool = True
    memory: StackMemory = PLAIN
    measured_bytes: Mapping[LayerKind, float] = field(default_factory=dict)
    update_seconds_each: float | None = None
    free: frozenset[Price] = frozenset()

    @property
    def peak_flops(self) -> float:
        """FLOP/s of matrix products at this precision."""
        if self.precision.fp8_products and self.card.fp8_flops is not None:
            return self.card.fp8_flops
        return self.half_peak_flops

    @property
    def half_peak_flops(self) -> float:
        """FLOP/s of products that are not in 8 bits: in the type of the activations."""
        if self.precision.tf32_products and self.card.tf32_flops is not None:
            return self.card.tf32_flops
        return (
            self.card.fp32_flops if self.precision.activation_bytes == 4 else self.card.fp16_flops
        )

    def moving_seconds(self, moved: Amount) -> Amount:
        """Time of a kernel that reads or writes so many bytes."""
        return link_seconds(moved, self.card.memory_bytes_per_second * self.reached.memory)

    def update_seconds(self, parameters: Amount) -> Amount:
        """The optimizer's step of so many parameters."""
        if self.update_seconds_each is not None:
            return parameters * self.update_seconds_each
        return self.moving_seconds(parameters * self.precision.updated_bytes)

    def saved_bytes(self, share: LayerShare, recompute: Recompute) -> float:
        """Bytes that a layer's forward keeps of a sample for the backward."""
        return _saved_bytes(self, share, recompute)

    def gradient_of_loss(self, share: LayerShare) -> float:
        """Bytes of a sample's large gradients that a layer's backward begins with."""
        memory = self.memory
        return share.gradient_bytes * memory.loss_gradient_bytes / 4 * (1 + memory.slack)

    def sum_seconds(self, share: LayerShare) -> float:
        """A kernel that adds a microbatch's gradients to their sum: reads both, writes one."""
        if self.fused_gradients or "sums of gradients" in self.free:
            return 0.0
        precision = self.precision
        frozen = share.frozen_parameters + share.frozen_expert_parameters
        trained = share.parameters + share.expert_parameters - frozen
        parameters = trained + share.trained_tied_parameters
        moved = precision.weight_bytes + 2 * precision.gradient_bytes
        return self.moving_seconds(parameters * moved)


@lru_cache(maxsize=1 << 13)
def _saved_bytes(processor: Processor, share: LayerShare, recompute: Recompute) -> float:
    precision = processor.precision
    counted = share.saved_bytes(
        precision.activation_bytes, recompute, processor.memory, fp8=precision.fp8_products
    )
    is_input = recompute == "full" and share.is_block
    return counted if is_input else counted * processor.measured_bytes.get(share.kind, 1.0)


@dataclass(frozen=True, eq=False, slots=True)
class _Kernels:
    """A layer's operators as arrays: FLOPs, elements and parts of gradients.

    ``moved`` of them are proportional to the samples, ``fixed`` are not; so many have a gradient of
    their ``inputs`` and of their ``weights``. ``unmasked`` is not 0 for fused attention.
    """

    flops: Floats
    moved: Floats
    fixed: Floats
    input_part: Floats
    weight_part: Floats
    unmasked: Floats
    convolves: Floats
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
        unmasked=np.array([one.unmasked * (one.kind == "attention") for one in operators]),
        convolves=np.array([one.kind == "convolution" for one in operators]),
        logits=np.array([one.moved / 2 * (one.kind == "loss") for one in operators]),
        products=np.array(
            [
                (share.experts if name.startswith("experts") else 1.0)
                * (one.flops > 0 and not is_adapter(name))
                for name, one in share.operators.items()
            ]
        ),
        cast=np.array(
            [
                one.kind == "matmul" and _weights(one) > 0 and not is_adapter(name)
                for name, one in share.operators.items()
            ]
        ),
        inputs=int(np.count_nonzero(input_part)),
        weights=int(np.count_nonzero(weight_part)),
    )


def _weights(one: LayerOperation) -> float:
    """The weights that a product reads."""
    return one.parameters + one.tied_parameters if one.kind in ("matmul", "convolution") else 0.0


@dataclass(frozen=True, eq=False, slots=True)
class Computed:
    """Seconds of a layer that depend on neither recomputation, schedule nor exchanges.

    The forward of every operator, and the ``routing`` of tokens by the host; sums of forwards, of
    gradients of inputs (``projected``: of those with weights) and of weights; the attention,
    ``attended``, and its backward. The host takes ``started`` to start the kernels of forward,
    gradients of inputs and of weights. ``waited`` is what exchanges add to a forward and a
    backward, None where that was not timed.
    """

    seconds: tuple[float, ...]
    routing: float
    forward: float
    input: float
    projected: float
    weight: float
    attended: float
    attended_back: float
    started: tuple[float, float, float]
    waited: tuple[float, float] | None = None

    @property
    def whole(self) -> float:
        """The forward and all gradients."""
        return self.forward + self.input + self.weight

    def alone(self, processor: Processor, share: LayerShare) -> tuple[float, float, float]:
        """Forward, gradients of inputs and of weights of a layer that exchanges nothing.

        Each lasts at least as long as the host takes to start its kernels one after the other. All
        of a backward is of weights where the input has no gradient.
        """
        own = (self.forward, self.input, self.weight)
        forward, inputs, weights = map(max, own, self.started)
        weights += processor.sum_seconds(share)
        return (
            (forward, inputs, weights) if share.differentiable else (forward, 0.0, inputs + weights)
        )


@lru_cache(maxsize=1 << 15)
def computed(processor: Processor, share: LayerShare, samples: int, context: int = 1) -> Computed:
    """A layer's operators on ``samples``, of sequences that ``context`` ranks share."""
    kernels, reached = _kernels(share), processor.reached
    plain = _seconds(processor, share, kernels, samples, context)
    cast = _cast_seconds(processor, share, kernels, samples)
    seconds, inputs = plain + cast, plain * kernels.input_part + cast
    if reached.attention is not None and reached.attention_backward is not None:
        slower = reached.attention / reached.attention_backward
        inputs = np.where(kernels.unmasked > 0, inputs * slower, inputs)
    each = reached.each_expert_seconds * share.experts
    routing = reached.expert_seconds * bool(share.experts) + each
    dispatch = reached.dispatch_seconds
    return Computed(
        seconds=tuple(seconds.tolist()),
        routing=routing,
        forward=float(seconds.sum()) + routing,
        input=float(inputs.sum()) + routing,
        projected=float((inputs * (kernels.weight_part > 0) * kernels.cast).sum()),
        weight=float(np.maximum(plain * kernels.weight_part, _sums(processor, kernels)).sum())
        + each,
        attended=_attention_seconds(share, seconds),
        attended_back=_attention_seconds(share, inputs),
        started=(
            len(share.operators) * dispatch,
            kernels.inputs * dispatch,
            kernels.weights * dispatch,
        ),
    )


def layer_cost(processor: Processor, share: LayerShare, samples: int, **rest: Any) -> LayerCost:
    """A layer's costs, with the ``rest`` of the fields: kind of device, seconds, tensor degree.

    The microbatch has ``samples`` of those of which the share is, one by default. The gradient of
    the logits is kept while the head's backward is there.
    """
    size = processor.precision.activation_bytes
    kept = processor.saved_bytes(share, "none") + processor.gradient_of_loss(share)
    made = share.gradient_bytes or (share.width + share.handed_on) * size
    counted = {"microbatch_size": samples} | rest
    return LayerCost(saved_bytes=samples * kept, output_bytes=samples * made, **counted)


def _seconds(
    processor: Processor, share: LayerShare, kernels: _Kernels, samples: int, context: int
) -> Floats:
    """The forward of every operator: products by their FLOPs, the others by their bytes.

    Making the operands of 8 bits is not among them. An adapter's products are so narrow that their
    bytes last longer than what products of usual widths lose at their ends.
    """
    reached, free, peak = processor.reached, processor.free, processor.half_peak_flops
    moved = (kernels.fixed + samples * kernels.moved) * processor.precision.activation_bytes
    if reached.logit_bytes is not None:
        loss = samples * kernels.logits * reached.logit_bytes
        moved = np.where(kernels.logits > 0, loss, moved)
    traffic = processor.moving_seconds(moved)
    flops, half, rate = samples * kernels.flops, reached.half_flops, _product_rate(processor, share)
    products = ("matrix products" not in free) * (flops + kernels.products * half) / rate
    products = np.where(kernels.convolves, flops / (peak * reached.convolution), products)
    if reached.attention is not None:
        # A ring has a kernel for the keys of every context rank.
        unmasked, half = kernels.unmasked, context * reached.attention_half_flops
        if not reached.context_balanced:
            unmasked = np.minimum(unmasked * (2.0 - 1.0 / context), unmasked > 0)
        attended = (unmasked * flops + half) / (peak * reached.attention)
        products = np.where(unmasked > 0, attended, products)
    if "memory-bound kernels" in free:
        traffic = np.zeros_like(traffic)
    seconds: Floats = np.maximum(products, traffic)
    if "attention" in free:
        seconds[kernels.unmasked > 0] = 0.0
    return seconds + reached.launch_seconds


def _has_8_bits(processor: Processor, share: LayerShare) -> bool:
    """Whether the products of a layer are in 8 bits."""
    return processor.precision.fp8_products and (share.is_block or processor.reached.fp8_head)


def _product_rate(processor: Processor, share: LayerShare) -> float:
    """FLOP/s that large products of a layer reach."""
    reached = processor.reached
    if _has_8_bits(processor, share):
        return processor.peak_flops * (reached.fp8_matmul or reached.matmul)
    return processor.half_peak_flops * reached.matmul


def _cast_seconds(
    processor: Processor, share: LayerShare, kernels: _Kernels, samples: int
) -> Floats:
    """Seconds in which a forward's inputs, or a backward's gradients, are made 8 bits wide."""
    if not _has_8_bits(processor, share):
        return np.zeros_like(kernels.moved)
    # Inputs and outputs are about as many.
    elements = np.where(kernels.cast, samples * kernels.moved / 2, 0.0)
    return processor.moving_seconds(elements * processor.reached.cast_bytes)


def _sums(processor: Processor, kernels: _Kernels) -> Floats:
    """Least seconds of a weight gradient's product: reading and writing the sum of gradients."""
    weights = kernels.fixed * (kernels.weight_part > 0)
    if not processor.fused_gradients or "sums of gradients" in processor.free:
        return np.zeros_like(weights)
    reached, moved = processor.reached, 2 * processor.precision.gradient_bytes * weights
    launches = np.where(weights > 0, reached.launch_seconds, 0.0)
    seconds: Floats = processor.moving_seconds(moved) + launches
    return seconds


def _attention_seconds(share: LayerShare, seconds: Floats) -> float:
    names = ("attention", "scores", "weighted values")
    return float(sum(t for t, name in zip(seconds, share.operators, strict=True) if name in names))
