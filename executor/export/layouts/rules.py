"""Rules of frameworks on layouts: each rule once, with its place in the framework's code.

Search, explanations and exports ask the same rules. Those that several frameworks have are here,
the others beside the exports.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.architecture import GroupedAttention
from stagewright.graphs.models.modules import modules_of
from stagewright.graphs.models.traits import DIFFUSION, NEXT_TOKENS, every_trait

Require: TypeAlias = Callable[[TrainingProblem, Layout, str], None]
"""Raises InputError, in one line with what would do, of a layout for a framework of that name."""


@dataclass(frozen=True, slots=True)
class FrameworkRule:
    """A rule of a framework on layouts; ``source``: release and file of the framework's code.

    ``of_problem``: the model or the precision alone is asked, whatever the layout.
    """

    source: str
    require: Require
    of_problem: bool = False


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework that trains by layouts: its rules, and the files of a layout that keeps them."""

    name: str
    rules: tuple[FrameworkRule, ...]
    files: Callable[[TrainingProblem, Layout], dict[str, str]]

    def broken(
        self, problem: TrainingProblem, layout: Layout
    ) -> Iterator[tuple[FrameworkRule, str]]:
        """The rules that a layout breaks, each with the fault and the rule's source."""
        for rule in self.rules:
            try:
                rule.require(problem, layout, self.name)
            except InputError as error:
                yield rule, f"{error} ({rule.source})"

    def require_problem(self, problem: TrainingProblem) -> None:
        """Raise for the first rule that all layouts break.

        Raises InputError with the rule, what would do, and the rule's source.
        """
        for rule, wrong in self.broken(problem, Layout()):
            if rule.of_problem:
                raise InputError(wrong)

    def require(self, problem: TrainingProblem, layout: Layout) -> None:
        """Raise for the first rule that a possible layout breaks.

        Raises InputError with the rule, what would do, and the rule's source.
        """
        for _, wrong in self.broken(problem, layout):
            raise InputError(wrong)


def refuse_encoder(problem: TrainingProblem, _: Layout, framework: str) -> None:
    """Refuse a layout of an encoder."""
    if problem.architecture.encoder:
        raise InputError(
            f"an encoder ({problem.architecture.name}): {framework} trains decoders; deepspeed and "
            "accelerate take any model of transformers"
        )


def refuse_traits(problem: TrainingProblem, _: Layout, framework: str) -> None:
    """Refuse a model with anything that a plain Llama or GPT lacks, but for further tokens."""
    for what in (one for one in every_trait(problem.architecture) if one != NEXT_TOKENS):
        raise InputError(
            f"{problem.architecture.name} has {what}: an export to {framework} cannot say it; "
            "export to nemo or megatron-bridge, whose recipes bring the model, or to accelerate"
        )


def refuse_others_than_transformers(problem: TrainingProblem, _: Layout, framework: str) -> None:
    """Refuse what no module of transformers has."""
    of = problem.architecture
    if of.diffusion is not None:
        raise InputError(
            f"{of.name} has {DIFFUSION}: exports to {framework} train models of transformers; "
            "start it with a script of your own"
        )
    if of.next_tokens is not None:
        raise InputError(
            f"{of.name} has {NEXT_TOKENS}: {framework} trains the module of transformers, which "
            "has no such blocks; set num_nextn_predict_layers to 0, or export to megatron or "
            "megatron-bridge"
        )


def refuse_one_byte(problem: TrainingProblem, _: Layout, framework: str) -> None:
    """Refuse activations of one byte."""
    if problem.precision.activation_bytes == 1:
        raise InputError(
            f"activations of 1 byte: {framework} keeps them in 2 or 4 bytes; set activation_bytes 2"
        )


def refuse_fp8(problem: TrainingProblem, _: Layout, framework: str) -> None:
    """Raise for products in fp8."""
    if problem.precision.fp8_products:
        raise InputError(
            f"products in fp8: {framework} takes them from the model's conversion, not from this "
            "configuration; set fp8_products false, or export to megatron"
        )


def refuse_tuning(problem: TrainingProblem, _: Layout, framework: str) -> None:
    """Refuse adapters and frozen layers."""
    if problem.architecture.tuning is not None:
        raise InputError(
            f"LoRA or frozen layers: {framework} takes none from its configuration; export LoRA to "
            "megatron-bridge or accelerate"
        )


def require_adapters(problem: TrainingProblem, of: Collection[str], framework: str) -> None:
    """Refuse frozen layers beside which there are no adapters, and adapters of other targets."""
    tuning = problem.architecture.tuning
    if tuning is None:
        return
    if tuning.rank is None or tuning.embedding or tuning.head:
        raise InputError(
            f"frozen layers without LoRA: {framework} takes only adapters from its configuration; "
            "give --lora, or freeze them in your own script"
        )
    others = sorted(tuning.targets - set(of))
    if others:
        raise InputError(
            f"LoRA of {', '.join(others)}: {framework} adapts {', '.join(sorted(of))} together"
        )


def require_bytes(
    problem: TrainingProblem, known: Collection[tuple[int, int, int]], framework: str
) -> None:
    """Raise unless the bytes of weights, gradients and optimizer are among the ``known``."""
    precision = problem.precision
    found = (precision.weight_bytes, precision.gradient_bytes, precision.optimizer_bytes)
    if found not in known:
        works = " or ".join(" + ".join(map(str, one)) for one in known)
        raise InputError(
            f"{' + '.join(map(str, found))} bytes per parameter (weight, gradient, optimizer) with "
            f"activations of {precision.activation_bytes}: {framework} keeps {works}"
        )


def refuse_pipeline(_: TrainingProblem, layout: Layout, framework: str) -> None:
    """Refuse a layout with a pipeline."""
    if layout.pipeline > 1:
        raise InputError(
            f"a pipeline of {layout.pipeline}: {framework} takes no pipeline from its "
            "configuration; choose pipeline 1, or export to megatron or torchtitan"
        )


def refuse_sequence_parallel(_: TrainingProblem, layout: Layout, framework: str) -> None:
    """Refuse a layout with sequence parallelism."""
    if layout.sequence_parallel:
        raise InputError(
            f"sequence parallelism over the tensor ranks: {framework} has none; choose "
            "sequence_parallel false, or export to megatron or torchtitan"
        )


def require_whole_heads(problem: TrainingProblem, layout: Layout, framework: str) -> None:
    """Raise where tensor ranks would share a key-value head."""
    attention = problem.architecture.attention
    heads = attention.key_value_heads if isinstance(attention, GroupedAttention) else layout.tensor
    if heads % layout.tensor:
        raise InputError(
            f"tensor degree {layout.tensor} with {heads} key-value heads: {framework} gives every "
            "tensor rank equally many of its own; choose a divisor, or export to megatron"
        )


def require_context(problem: TrainingProblem, layout: Layout, framework: str) -> None:
    """Raise unless context ranks get equal parts from both ends of a sequence."""
    if layout.context > 1 and problem.sequence % (2 * layout.context):
        raise InputError(
            f"context degree {layout.context} with {problem.sequence} tokens: {framework} needs a "
            f"multiple of 2 x context = {2 * layout.context} tokens"
        )


def refuse_offload(_: TrainingProblem, layout: Layout, framework: str) -> None:
    """Raise for an offloaded optimizer."""
    if layout.offload_optimizer:
        raise InputError(
            f"an offloaded optimizer: {framework} offloads parameters and gradients with it; "
            "choose offload_optimizer false, or export to megatron or deepspeed"
        )


def refuse_selective(_: TrainingProblem, layout: Layout, framework: str) -> None:
    """Raise for recomputation of the attention alone, or of modules."""
    refuse_modules(_, layout, framework)
    if layout.recompute == "selective":
        raise InputError(
            f"selective recomputation of the attention: {framework} repeats whole layers, or other "
            "operators; choose none or full"
        )


def refuse_modules(_: TrainingProblem, layout: Layout, framework: str) -> None:
    """Raise for recomputation of modules, and for activations in host memory."""
    if layout.offload_blocks:
        raise InputError(
            f"activations of {layout.offload_blocks} blocks in host memory: {framework} takes none "
            "from its configuration; choose offload_blocks 0, or export to megatron"
        )
    if modules_of(layout.recompute):
        raise InputError(
            f"recomputation of {layout.recompute}: {framework} has no such modules; choose none or "
            "full, or export to megatron"
        )


def refuse_some_blocks(problem: TrainingProblem, layout: Layout, framework: str) -> None:
    """Raise unless all blocks of all stages are recomputed, or none."""
    blocks = layout.blocks_of_stages(problem.architecture.layers)
    again = layout.recomputed_of_stages(problem.architecture.layers)
    some = next((pair for pair in zip(again, blocks, strict=True) if 0 < pair[0] < pair[1]), None)
    if some is not None:
        raise InputError(
            "{} recomputed blocks of {} in a stage: ".format(*some)
            + f"{framework} recomputes all or none; choose full for all, or export to megatron"
        )


def refuse_recomputed_by_stage(_: TrainingProblem, layout: Layout, framework: str) -> None:
    """Raise for a number of recomputed blocks of every stage."""
    if layout.recomputed_by_stage is not None:
        raise InputError(
            f"recomputed blocks by stage: {framework} has one recomputation for all stages; choose "
            "full, with or without blocks, or export to plan, whose stages recompute all or none"
        )
