"""What the formats share: number types, nodes, and the text of Python files."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.architecture import Architecture

Fields: TypeAlias = dict[str, object]
NumberType = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True, slots=True)
class Code:
    """An expression of Python, written as it is."""

    text: str

    def __repr__(self) -> str:
        return self.text


def number_type(problem: TrainingProblem, framework: str) -> NumberType:
    """The type of activations and products; bf16 where the device has it.

    Raises
    ------
    InputError
        If activations have one byte.
    """
    size = problem.precision.activation_bytes
    if size == 1:
        raise InputError(
            f"activations of 1 byte: {framework} keeps them in 2 or 4 bytes; set activation_bytes 2"
        )
    if size == 4:
        return "fp32"
    return "bf16" if problem.card.has_bf16 else "fp16"


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


def refuse_fp8(problem: TrainingProblem, framework: str) -> None:
    """Raise for products in fp8."""
    if problem.precision.fp8_products:
        raise InputError(
            f"products in fp8: {framework} takes them from the model's conversion, not from this "
            "configuration; set fp8_products false, or export to megatron"
        )


def refuse_encoder(architecture: Architecture, framework: str) -> None:
    """Raise for an encoder."""
    if architecture.encoder:
        raise InputError(
            f"an encoder ({architecture.name}): {framework} trains decoders; deepspeed and "
            "accelerate take any model of transformers"
        )


def refuse_pipeline(layout: Layout, framework: str) -> None:
    """Raise for a pipeline."""
    if layout.pipeline > 1:
        raise InputError(
            f"a pipeline of {layout.pipeline}: {framework} takes no pipeline from its "
            "configuration; choose pipeline 1, or export to megatron or torchtitan"
        )


def refuse_selective(layout: Layout, framework: str, repeats: str) -> None:
    """Raise for recomputation of the attention alone."""
    if layout.recompute == "selective":
        raise InputError(
            f"selective recomputation of the attention: {framework} {repeats}; choose none or full"
        )


def refuse_some_blocks(problem: TrainingProblem, layout: Layout, framework: str) -> None:
    """Raise unless all blocks of all stages are recomputed, or none."""
    blocks = layout.blocks_of_stages(problem.architecture.layers)
    again = layout.recomputed_of_stages(problem.architecture.layers)
    refuse_recomputed_by_stage(layout, framework)
    some = next((pair for pair in zip(again, blocks, strict=True) if 0 < pair[0] < pair[1]), None)
    if some is not None:
        raise InputError(
            "{} recomputed blocks of {} in a stage: ".format(*some)
            + f"{framework} recomputes all or none; choose full for all, or export to megatron"
        )


def refuse_recomputed_by_stage(layout: Layout, framework: str) -> None:
    """Raise for a number of recomputed blocks of every stage."""
    if layout.recomputed_by_stage is not None:
        raise InputError(
            f"recomputed blocks by stage: {framework} has one recomputation for all stages; choose "
            "full, with or without blocks, or export to plan, whose stages recompute all or none"
        )


def nodes(problem: TrainingProblem) -> tuple[int, int]:
    """Servers, and devices of each."""
    each = problem.fabric.levels[0].devices
    return problem.fabric.devices // each, each


def launch(problem: TrainingProblem) -> str:
    """The beginning of the command that starts all ranks."""
    count, each = nodes(problem)
    return f"torchrun --nnodes={count} --nproc-per-node={each}"


def comment(*lines: str) -> str:
    """Lines of a comment of bash; none of ``lines`` may have a line break."""
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def left_out(architecture: Architecture) -> tuple[str, ...]:
    """A remark on what the planned model lacks."""
    if architecture.left_out is None:
        return ()
    return (f"The plan has not counted: {architecture.left_out!r}.",)


def assignments(target: str, fields: Fields) -> str:
    """Lines of a function's body that set attributes of ``target``."""
    return "".join(f"    {target}.{name} = {value!r}\n" for name, value in fields.items())
