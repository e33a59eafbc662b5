"""A training run as its launch file says it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from stagewright.formulations.parallelism.layout import Layout
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.architecture import Architecture


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A run of ``framework``: what it trains and how; None is what its file does not say.

    ``gradients`` is the type in which gradients are summed up, ``overlap`` whether they are
    exchanged beside computations; ``notes`` are what is priced otherwise than it runs.
    """

    framework: str
    layout: Layout
    architecture: Architecture | None = None
    batch: int | None = None
    sequence: int | None = None
    precision: str = "bf16"
    gradients: str = "fp32"
    attention: str = "fused"
    overlap: bool = True
    notes: tuple[str, ...] = ()


def data_degree(gpus: int | None, others: Mapping[str, int]) -> int:
    """The copies of the model on ``gpus`` devices of which the ``others`` degrees share one."""
    inner = prod(others.values())
    if gpus is None:
        raise InputError("the number of GPUs is not said; give --gpus")
    if gpus % inner:
        degrees = " x ".join(f"{name} {degree}" for name, degree in others.items())
        raise InputError(f"{gpus} GPUs are no multiple of {degrees} = {inner}")
    return gpus // inner


def division(blocks: Sequence[int], pipeline: int) -> dict[str, Any]:
    """A layout's chunks, and the blocks of the ends or of every stage where they differ."""
    if len(blocks) % pipeline:
        raise InputError(f"{len(blocks)} stages on {pipeline} pipeline ranks")
    found: dict[str, Any] = {"chunks": len(blocks) // pipeline}
    first, middle, last = blocks[0], {*blocks[1:-1]}, blocks[-1]
    if len({*blocks}) == 1:
        return found
    if len(middle) > 1:
        return found | {"blocks_by_stage": tuple(blocks)}
    ends = {"first_blocks": first, "last_blocks": last}
    return found | {name: one for name, one in ends.items() if one not in middle}
