"""The problem: train a transformer on a fabric with a global batch, as fast as possible."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import ClassVar

from pydantic import ConfigDict

from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.schedules import require_microbatches
from stagewright.formulations.prices.computing import MIXED, Precision, Price, Processor
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_MICROBATCHES, require_amount, require_count
from stagewright.graphs.machines.anchors import TimedModel, require_anchored
from stagewright.graphs.machines.devices import Accelerator, require_arithmetic
from stagewright.graphs.machines.fabric import Fabric
from stagewright.graphs.machines.rates import RateSet, Reached, Spread
from stagewright.graphs.machines.stack_memory import PLAIN, STACK_MEMORY, StackMemory
from stagewright.graphs.models.architecture import Architecture, Operators
from stagewright.graphs.models.language import Attention
from stagewright.graphs.models.modules import PARTS, modules_of, repeated
from stagewright.graphs.models.operations import MAX_SIZE
from stagewright.graphs.models.shards import LayerKind, share_of_kind
from stagewright.graphs.models.splits import require_split

_processor = lru_cache(maxsize=256)(Processor)
"""One for all numbers of a kind of device, so that what it computes is remembered for all."""


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
    precision: Precision = MIXED
    attention: Attention = "fused"
    overlap: bool = True
    overlap_tensor: bool = True
    fused_gradients: bool = True
    reserve_bytes: float = PLAIN.reserve_bytes
    memory: StackMemory = PLAIN

    def __post_init__(self) -> None:
        require_count(self.sequence, "sequence", MAX_SIZE)
        require_count(self.batch, "batch", MAX_SIZE)
        require_amount(self.reserve_bytes, "reserve_bytes")
        if self.precision.fp8_products:
            require_arithmetic(self.card, "fp8")
        if self.precision.tf32_products:
            require_arithmetic(self.card, "tf32")
        if self.rates.anchor is not None:
            require_anchored(self.rates.anchor, self.timed_model)

    @property
    def timed_model(self) -> TimedModel:
        """What would be timed for it."""
        precision = self.precision
        return TimedModel(
            self.architecture,
            self.sequence,
            self.fabric.device,
            precision.activation_bytes,
            precision.fp8_products,
            self.attention,
        )

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

    @cached_property
    def processor(self) -> Processor:
        """The device as it computes this model's layers."""
        anchor, reached = self.rates.anchor, self.reached
        found = _processor(self.card, reached, self.precision, self.fused_gradients, self.memory)
        if anchor is None:
            return found
        return replace(
            found,
            reached=replace(reached, dispatch_seconds=0.0),  # a timed layer has had its host
            measured_bytes=self._measured_bytes,
            update_seconds_each=anchor.update_seconds_per_parameter,
        )

    @property
    def peak_flops(self) -> float:
        """FLOP/s of matrix products at this precision."""
        return self.processor.peak_flops

    def charges(self, _: Price) -> bool:
        """Whether a price is not zero: only :class:`SwitchedProblem` has some that are."""
        return True

    @cached_property
    def _measured_bytes(self) -> dict[LayerKind, float]:
        """Measured over counted bytes of kinds of layers: the mean over all that was timed."""
        anchor, ratios = self.rates.anchor, dict[LayerKind, list[float]]()
        counting = Processor(self.card, self.reached, self.precision, memory=self.memory)
        for one in () if anchor is None else anchor.layers:
            share = share_of_kind(self.architecture, self.sequence, one.degree, one.kind)
            counted = counting.saved_bytes(share, "none")
            if counted > 0:  # a computed embedding keeps nothing
                ratio = one.saved_bytes / one.samples / counted
                ratios.setdefault(one.kind, []).append(ratio)
        return {kind: sum(of_kind) / len(of_kind) for kind, of_kind in ratios.items()}

    @cached_property
    def model_flops(self) -> float:
        """FLOPs of an iteration without recomputation: if all is trained, thrice the forward's."""
        of, sequence = self.architecture, self.sequence
        kinds = {of.kind(index): index for index in range(of.layers)}
        blocks = {kind: of.block(index, 1, sequence) for kind, index in kinds.items()}
        layers = [of.embedding(1, sequence), of.head(1, sequence)]
        layers += [blocks[of.kind(index)] for index in range(of.layers)]
        each = (one.training_flops for layer in layers for one in layer.values())
        return self.batch * sum(each)


@dataclass(frozen=True, eq=False)
class SwitchedProblem(TrainingProblem):
    """A problem some of whose prices are zero, to see what these add to an iteration."""

    free: frozenset[Price] = frozenset()

    @cached_property
    def processor(self) -> Processor:
        """The device as it computes this model's layers, with its free prices."""
        return replace(super().processor, free=self.free)

    def charges(self, price: Price) -> bool:
        """Whether the price is not zero."""
        return price not in self.free


AGREE = 0.2
"""Two runs of the same work may differ by this part of the faster."""


@dataclass(frozen=True, eq=False)
class CalibrationRun:
    """A measured iteration; ``place`` is where it is written, such as ``runs.csv:3``."""

    place: str
    problem: TrainingProblem
    layout: Layout
    seconds: float
    memory_bytes: float | None = None


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
    require_microbatches(layout.schedule, layout.pipeline, layout.chunks, microbatches)
    for one in modules_of(layout.recompute):
        _require_module(problem, one)
    if layout.offload_blocks:
        require_activation_offload(problem, layout.offload_blocks)
    if layout.recompute == "selective" and not has_selective(problem):
        raise InputError(
            "selective recomputation repeats the attention, which the fused kernel does anyway; "
            "choose none or full"
        )


def require_activation_offload(problem: TrainingProblem, blocks: int = 1) -> None:
    """Raise unless activations of so many blocks can be in host memory.

    Raises InputError with the rule and what would do.
    """
    of, memory = problem.architecture, problem.memory
    if not memory.offloads_activations:
        able = [name for name, one in STACK_MEMORY.items() if one.offloads_activations]
        raise InputError(
            f"offloaded activations: {memory.name} has none, only {', '.join(able)}; choose "
            "offload_blocks 0"
        )
    if blocks >= of.layers:
        raise InputError(
            f"offload_blocks {blocks} of {of.layers} blocks: at most {of.layers - 1}, since the "
            "last has nothing to run beside"
        )
    again = [one for one in memory.always if any(repeated([one], b) for b in _blocks(of))]
    if again:
        raise InputError(
            f"offloaded activations with recomputation of {again[0]}, which {memory.name} is "
            "priced with: it has one or the other; choose offload_blocks 0"
        )
    if problem.fabric.host_bytes_per_second is None:
        raise InputError("offloaded activations need the devices' bandwidth to the host")


def _blocks(of: Architecture) -> list[Operators]:
    """The blocks of one token, one of each kind."""
    kinds = {of.kind(index): index for index in range(of.layers)}
    return [of.block(index, 1, 1) for index in kinds.values()]


def _require_module(problem: TrainingProblem, module: str) -> None:
    """Raise unless the software can recompute a module and some block has it."""
    of, known = problem.architecture, problem.memory.modules
    if module not in known:
        raise InputError(
            f"recomputation of the module {module}: {problem.memory.name} can recompute "
            f"{', '.join(known) or 'no modules'}; choose none or full"
        )
    has = (
        problem.attention == "materialized"
        if module == "core_attn"
        else any(repeated([module], block) for block in _blocks(of))
    )
    if not has:
        raise InputError(
            f"recomputation of the module {module}: no block has {PARTS[module]}; choose none or "
            "full"
        )
