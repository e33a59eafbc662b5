"""The problem: train a transformer on a fabric with a global batch, as fast as possible."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

from pydantic import ConfigDict

from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.prices.updates import update_bytes
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_MICROBATCHES, require_amount, require_count
from stagewright.graphs.machines.devices import Accelerator, require_arithmetic
from stagewright.graphs.machines.fabric import Fabric
from stagewright.graphs.machines.rates import RateSet, Reached, Spread
from stagewright.graphs.machines.stack_memory import PLAIN, StackMemory
from stagewright.graphs.models.architecture import MAX_SIZE, Architecture
from stagewright.graphs.models.language import Attention
from stagewright.graphs.models.shards import LayerShare, Recompute
from stagewright.graphs.models.splits import require_split


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of a number of each kind; the defaults are Megatron-LM's mixed precision with Adam.

    ``optimizer_bytes`` are per parameter: the fp32 master of the weight and two moments.
    """

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    activation_bytes: int = 2
    weight_bytes: int = 2
    gradient_bytes: int = 4
    optimizer_bytes: int = 12
    fp8_products: bool = False

    @property
    def updated_bytes(self) -> float:
        """Bytes per parameter that the optimizer's step moves."""
        held = self.weight_bytes, self.gradient_bytes, self.optimizer_bytes
        return update_bytes(*held, masters=self.weight_bytes < 4)

    def __post_init__(self) -> None:
        for name in ("activation_bytes", "weight_bytes", "gradient_bytes"):
            if getattr(self, name) not in (1, 2, 4):
                raise InputError(f"{name} must be 1, 2 or 4, got {getattr(self, name)}")
        if not 0 <= self.optimizer_bytes <= 16:
            raise InputError(f"optimizer_bytes must be from 0 to 16, got {self.optimizer_bytes}")


def precision_named(name: str) -> Precision:
    """Mixed precision by its name: fp16, bf16, fp8 (products in 8 bits, weights in bf16); fp32.

    Raises InputError if the name is another.
    """
    if name in ("fp16", "bf16"):
        return Precision()
    if name == "fp8":
        return Precision(fp8_products=True)
    if name == "fp32":
        return Precision(activation_bytes=4, weight_bytes=4, optimizer_bytes=8)
    raise InputError(f"precision must be fp32, fp16, bf16 or fp8, got {name!r}")


@dataclass(frozen=True, eq=False)
class TrainingProblem:
    """A model, its batch and the machines.

    ``overlap`` says whether the exchange of gradients and of ZeRO's weights runs beside the
    computation, as far as that lasts; ``overlap_tensor`` whether a layer's tensor exchange in the
    backward runs beside its products. With ``fused_gradients`` the products of the weights'
    gradients add to the sum over microbatches themselves; else another kernel does. Megatron-LM has
    these two since September 2021 and February 2022. ``reserve_bytes`` of every device are not for
    the plan (the driver, the allocator, the communication library); ``memory`` is what the software
    keeps of what is for the plan.
    """

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    architecture: Architecture
    sequence: int
    batch: int
    fabric: Fabric
    rates: RateSet
    precision: Precision = Precision()
    attention: Attention = "fused"
    overlap: bool = True
    overlap_tensor: bool = True
    fused_gradients: bool = True
    reserve_bytes: float = 2e9
    memory: StackMemory = PLAIN

    def __post_init__(self) -> None:
        require_count(self.sequence, "sequence", MAX_SIZE)
        require_count(self.batch, "batch", MAX_SIZE)
        require_amount(self.reserve_bytes, "reserve_bytes")
        if self.precision.fp8_products:
            require_arithmetic(self.card, "fp8")

    @cached_property
    def card(self) -> Accelerator:
        """The device's peaks."""
        return self.fabric.card

    @property
    def reached(self) -> Reached:
        """What kernels reach of the device's peaks."""
        return self.rates.reached

    @property
    def spread(self) -> Spread:
        """Measured over predicted seconds, at the least and at the most."""
        return self.rates.dense if self.architecture.experts is None else self.rates.experts

    @property
    def peak_flops(self) -> float:
        """FLOP/s of matrix products at this precision."""
        if self.precision.fp8_products and self.card.fp8_flops is not None:
            return self.card.fp8_flops
        return self.half_peak_flops

    @property
    def half_peak_flops(self) -> float:
        """FLOP/s of matrix products that are not in 8 bits: in the type of the activations."""
        return (
            self.card.fp32_flops if self.precision.activation_bytes == 4 else self.card.fp16_flops
        )

    def charges(self, _: "Price") -> bool:
        """Whether a price is not zero: only :class:`SwitchedProblem` has some that are."""
        return True

    def saved_bytes(self, share: LayerShare, recompute: Recompute) -> float:
        """Bytes that a layer's forward keeps of a sample for the backward."""
        precision = self.precision
        return share.saved_bytes(
            precision.activation_bytes, recompute, self.memory, fp8=precision.fp8_products
        )

    def gradient_of_loss(self, share: LayerShare) -> float:
        """Bytes of a sample's large gradients that a layer's backward begins with."""
        memory = self.memory
        return share.gradient_bytes * memory.loss_gradient_bytes / 4 * (1 + memory.slack)

    @cached_property
    def model_flops(self) -> float:
        """FLOPs of an iteration without recomputation: three times the forward's FLOPs."""
        of, sequence = self.architecture, self.sequence
        kinds = {of.kind(index): index for index in range(of.layers)}
        blocks = {kind: of.block(index, 1, sequence) for kind, index in kinds.items()}
        layers = [of.embedding(sequence), of.head(sequence)]
        layers += [blocks[of.kind(index)] for index in range(of.layers)]
        return 3 * self.batch * sum(one.flops for layer in layers for one in layer.values())


Price = Literal[
    "matrix products", "attention", "memory-bound kernels", "sums of gradients",
    "tensor exchange", "context exchange", "expert exchange", "pipeline transfers",
    "data exchange", "optimizer step",
]  # fmt: skip
"""What a switch makes free: prices that are no constant of a rate set."""


@dataclass(frozen=True, eq=False)
class SwitchedProblem(TrainingProblem):
    """A problem some of whose prices are zero, to see what these add to an iteration."""

    free: frozenset[Price] = frozenset()

    def charges(self, price: Price) -> bool:
        """Whether the price is not zero."""
        return price not in self.free


def with_stack(problem: TrainingProblem, memory: StackMemory) -> TrainingProblem:
    """The problem under a stack: what it keeps, its type of gradients, and its reserve."""
    precision = problem.precision
    if memory.gradient_bytes is not None and precision.weight_bytes < 4:
        precision = replace(precision, gradient_bytes=memory.gradient_bytes)
    return replace(problem, precision=precision, memory=memory, reserve_bytes=memory.reserve_bytes)


def has_selective(problem: TrainingProblem) -> bool:
    """Whether selective recomputation differs from none."""
    return problem.memory.by_operator or problem.attention == "materialized"


def require_layout(problem: TrainingProblem, layout: Layout) -> None:
    """Raise in one line if a rule does not hold.

    Raises InputError with the rule and, where there are some, the nearest values that work.
    """
    if layout.ranks != problem.fabric.devices:
        raise InputError(
            f"p x t x c x d = {layout.pipeline} x {layout.tensor} x {layout.context} x "
            f"{layout.data} is {layout.ranks} ranks; there are {problem.fabric.devices} devices"
        )
    require_split(problem.architecture, problem.sequence, layout.split)
    layout.recomputed_of_stages(problem.architecture.layers)
    microbatches = layout.microbatches(problem.batch)
    require_count(microbatches, "the number of microbatches", MAX_MICROBATCHES)
    if layout.chunks > 1 and microbatches % layout.pipeline:
        raise InputError(
            f"{layout.chunks} chunks per rank need a multiple of {layout.pipeline} microbatches "
            f"(the pipeline), there are {microbatches}"
        )
    if layout.recompute == "selective" and not has_selective(problem):
        raise InputError(
            "selective recomputation repeats the attention, which the fused kernel does anyway; "
            "choose none or full"
        )
