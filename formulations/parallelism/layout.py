"""A parallel layout: degrees, microbatch, schedule, recomputation, ZeRO and placement."""

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import groupby
from typing import Literal

from stagewright.formulations.parallelism.schedules import (
    FORMS,
    Schedule,
    ScheduleForm,
    require_stages,
)
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_MICROBATCHES, require_count
from stagewright.graphs.machines.fabric import MAX_GPUS
from stagewright.graphs.machines.groups import Group
from stagewright.graphs.models.modules import MODULES, OFFLOAD, joined, require_recompute
from stagewright.graphs.models.shards import LayerSplit, Recompute

Placement = Literal["data-inside", "pipeline-inside"]
"""Which dimension has its ranks nearer together; tensor and context ranks are always nearest."""

_NUMBERED = {
    "p": "pipeline",
    "t": "tensor",
    "c": "context",
    "d": "data",
    "e": "expert",
    "b": "microbatch",
    "v": "chunks",
    "zero": "zero",
    "blocks": "recompute_blocks",
    "offload": "offload_blocks",
    "first": "first_blocks",
    "last": "last_blocks",
}
_BY_STAGE = {"stages": "blocks_by_stage", "again": "recomputed_by_stage"}
_PLAIN: dict[str, tuple[str, object]] = {
    "none": ("recompute", "none"),
    "selective": ("recompute", "selective"),
    "full": ("recompute", "full"),
    **{one: ("schedule", one) for one in FORMS if one != "1f1b"},
    "sp": ("sequence_parallel", True),
    "offload": ("offload_optimizer", True),
    "pipeline-inside": ("placement", "pipeline-inside"),
}


@documents.record
class Layout:
    """p x t x c x d ranks (thesis 4.3.1, with context parallelism).

    ``expert`` ranks of the t x c x d that hold equal layers share the experts. ``microbatch`` is
    samples per replica, ``chunks`` stages of the pipeline on every rank (v, thesis 4.2.2).
    With ``recompute_blocks`` only so many blocks of every stage, the first ones, are recomputed.
    The activations of the first ``offload_blocks`` are in host memory between forward and backward.
    ``first_blocks`` and ``last_blocks`` are the blocks of the first and the last stage, None for as
    many as in the others. ``zero`` is ZeRO's stage (Rajbhandari et al. 2020): 1 divides the
    optimizer's state over the data ranks, 2 the gradients, 3 the weights too (FSDP).
    """

    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    microbatch: int = 1
    chunks: int = 1
    schedule: Schedule = "1f1b"
    recompute: Recompute = "none"
    recompute_blocks: int | None = None
    sequence_parallel: bool = False
    zero: int = 0
    offload_optimizer: bool = False
    placement: Placement = "data-inside"
    first_blocks: int | None = None
    last_blocks: int | None = None
    blocks_by_stage: tuple[int, ...] | None = None
    recomputed_by_stage: tuple[int, ...] | None = None
    offload_blocks: int = 0

    def __post_init__(self) -> None:
        for name in ("pipeline", "tensor", "context", "data", "expert", "microbatch", "chunks"):
            value = getattr(self, name)
            if value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
            most = MAX_MICROBATCHES if name == "microbatch" else MAX_GPUS
            require_count(value, name, most)
        require_recompute(self.recompute)
        if self.zero not in range(4):
            raise InputError(f"zero must be 0, 1, 2 or 3, got {self.zero}")
        if self.sequence_parallel and self.tensor == 1:
            raise InputError("sequence parallelism needs a tensor degree of at least 2")
        shared = self.tensor * self.context * self.data
        if shared % self.expert:
            raise InputError(
                f"expert degree {self.expert} does not divide the {shared} ranks (t x c x d) that "
                "hold equal layers"
            )
        if self.placement == "pipeline-inside" and self.tensor * self.context % self.expert:
            raise InputError(
                f"expert degree {self.expert} with the placement pipeline-inside must divide the "
                f"{self.tensor * self.context} ranks (t x c) that are next to each other"
            )
        self._require_schedule()
        self._require_offload()
        self._require_ends()
        self._require_stages()

    def _require_schedule(self) -> None:
        require_stages(self.schedule, self.pipeline, self.chunks)
        blocks = self.recompute_blocks
        if blocks is not None and (self.recompute != "full" or blocks < 1):
            raise InputError(
                f"recompute_blocks must be at least 1 and needs recompute full, got {blocks} with "
                f"{self.recompute}"
            )

    def _require_offload(self) -> None:
        """The rules of Megatron Core's ``cpu_offloading``."""
        blocks = self.offload_blocks
        if blocks < 0 or (blocks and (self.pipeline > 1 or self.recompute != "none")):
            raise InputError(
                f"offload_blocks must be at least 0, and needs pipeline 1 and recompute none, got "
                f"{blocks} with pipeline {self.pipeline} and recompute {self.recompute}"
            )

    def _require_ends(self) -> None:
        for name, value in (("first_blocks", self.first_blocks), ("last_blocks", self.last_blocks)):
            if value is not None and (value < 0 or self.pipeline == 1):
                raise InputError(f"{name} needs a pipeline and at least 0 blocks, got {value}")

    def _require_stages(self) -> None:
        for name in _BY_STAGE.values():
            counts = getattr(self, name)
            if counts is not None and (len(counts) != self.stages or min(counts) < 0):
                raise InputError(
                    f"{name} needs {self.stages} numbers (pipeline x chunks), each at least 0, got "
                    f"{_runs(counts)}"
                )
        if self.blocks_by_stage is not None and 0 in self.blocks_by_stage[1:-1]:
            raise InputError(
                "blocks_by_stage needs at least 1 block between the first and the last"
            )
        ends = (self.first_blocks, self.last_blocks)
        if self.blocks_by_stage is not None and ends != (None, None):
            raise InputError("blocks_by_stage has the ends too; leave out first and last blocks")
        if self.recomputed_by_stage is None:
            return
        if self.recompute == "none" or self.recompute_blocks is not None:
            raise InputError(
                "recomputed_by_stage needs recompute selective or full, without recompute_blocks"
            )

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.pipeline * self.tensor * self.context * self.data

    @property
    def stages(self) -> int:
        """Stages of the pipeline, on all its ranks together."""
        return self.pipeline * self.chunks

    @property
    def form(self) -> ScheduleForm:
        """What sets the schedule apart."""
        return FORMS[self.schedule]

    @property
    def positions(self) -> int:
        """The number of pipeline ranks of one copy of the stages."""
        return self.pipeline // self.form.copies

    @property
    def split(self) -> LayerSplit:
        """The degrees by which a layer is divided."""
        return LayerSplit(self.tensor, self.context, self.expert, self.sequence_parallel)

    @property
    def treatment(self) -> Recompute:
        """What is done with the activations of a stage's first blocks, if with any."""
        return OFFLOAD if self.offload_blocks else self.recompute

    @property
    def data_stride(self) -> int:
        """Distance of the ranks of one data group; context ranks have the same weights."""
        inside = self.pipeline if self.placement == "pipeline-inside" else 1
        return self.tensor * self.context * inside

    @property
    def pipeline_stride(self) -> int:
        """Distance of the ranks of neighbouring stages."""
        inside = self.data if self.placement == "data-inside" else 1
        return self.tensor * self.context * inside

    @property
    def _copies(self) -> Group:
        """The two ranks with the same stages, as far apart as they are on average."""
        return ((self.pipeline_stride * (self.pipeline // 2), 2),) * (self.form.copies - 1)

    @property
    def data_group(self) -> Group:
        """The ranks with equal parameters, but for those of experts."""
        return ((self.tensor, self.context), (self.data_stride, self.data), *self._copies)

    @property
    def expert_group(self) -> Group:
        """The ranks with equal experts."""
        if self.placement == "data-inside":
            ranks = self.tensor * self.context * self.data
            return ((self.expert, ranks // self.expert), *self._copies)
        inside = self.tensor * self.context // self.expert
        return ((self.expert, inside), (self.data_stride, self.data), *self._copies)

    @property
    def pipeline_group(self) -> Group:
        """The ranks of a pipeline."""
        return ((self.pipeline_stride, self.pipeline),)

    def microbatches(self, batch: int) -> int:
        """Microbatches of an iteration of ``batch`` samples, per replica.

        Raises
        ------
        InputError
            If the batch is no multiple of the samples of all replicas' microbatches.
        """
        samples = self.data * self.microbatch
        if batch % samples:
            below = batch // samples * samples
            near = f"{below} or {below + samples}" if below else f"{samples}"
            raise InputError(
                f"a batch of {batch} is no multiple of data x microbatch = {self.data} x "
                f"{self.microbatch}; the nearest are {near}"
            )
        return batch // samples

    def blocks_of_stages(self, blocks: int) -> tuple[int, ...]:
        """The number of blocks of every stage.

        Raises
        ------
        InputError
            If the blocks cannot be divided evenly over the stages between the chosen ends, or those
            of every stage are not as many as the model has.
        """
        if self.blocks_by_stage is not None:
            if sum(self.blocks_by_stage) != blocks:
                raise InputError(
                    f"blocks_by_stage {_runs(self.blocks_by_stage)} are "
                    f"{sum(self.blocks_by_stage)} blocks; the model has {blocks}"
                )
            return self.blocks_by_stage
        if self.stages == 1:
            return (blocks,)
        ends = (self.first_blocks, self.last_blocks)
        free = self.stages - sum(one is not None for one in ends)
        left = blocks - sum(one or 0 for one in ends)
        if left < free or (left % free if free else left):
            raise InputError(_uneven(self.stages, blocks, ends))
        each = left // free if free else 0
        middle = [each] * (self.stages - 2)
        first, last = (each if one is None else one for one in ends)
        return (first, *middle, last)

    def treated_of_stages(self, blocks: int) -> tuple[int, ...]:
        """How many blocks of every stage, the first ones, have the ``treatment``."""
        if self.offload_blocks:
            return (self.offload_blocks,)
        return self.recomputed_of_stages(blocks)

    def recomputed_of_stages(self, blocks: int) -> tuple[int, ...]:
        """How many blocks of every stage, the first ones, are recomputed.

        Raises InputError as `blocks_of_stages`, or if more are recomputed than a stage has.
        """
        has = self.blocks_of_stages(blocks)
        if self.recompute == "none":
            return (0,) * len(has)
        if self.recomputed_by_stage is None:
            most = blocks if self.recompute_blocks is None else self.recompute_blocks
            return tuple(min(most, count) for count in has)
        for stage, (again, count) in enumerate(zip(self.recomputed_by_stage, has, strict=True)):
            if again > count:
                raise InputError(
                    f"recomputed_by_stage: stage {stage} recomputes {again} blocks and has {count}"
                )
        return self.recomputed_by_stage

    def differences(self, other: "Layout") -> Iterator[str]:
        """The fields in which another layout differs, such as ``tensor 8 -> 4``."""
        for one in fields(self):
            mine, others = (getattr(layout, one.name) for layout in (self, other))
            if mine != others:
                said = ("not set" if value is None else value for value in (mine, others))
                yield f"{one.name} {' -> '.join(map(str, said))}"

    def __str__(self) -> str:
        """The layout in words that :func:`parse_layout` reads; default values are left out."""
        shown = ("pipeline", "tensor", "data", "microbatch")
        changed = [one.name for one in fields(self) if getattr(self, one.name) != one.default]
        words = [
            f"{word}{getattr(self, name)}"
            for word, name in _NUMBERED.items()
            if name in shown or name in changed
        ]
        by_stage = [
            f"{word}{_runs(getattr(self, name))}"
            for word, name in _BY_STAGE.items()
            if name in changed
        ]
        return " ".join(
            words
            + by_stage
            + ([self.recompute] if self.recompute != "none" else [])
            + [
                word
                for word, (name, value) in _PLAIN.items()
                if name in changed and name != "recompute" and getattr(self, name) == value
            ]
        )


def _uneven(stages: int, blocks: int, ends: tuple[int | None, int | None]) -> str:
    if ends == (None, None):
        near = [n for n in range(1, blocks + 1) if blocks % n == 0]
        below = max(n for n in near if n <= stages)
        above = min((n for n in near if n >= stages), default=None)
        close = f"{below}" if above is None else f"{below} or {above}"
        return (
            f"{blocks} blocks cannot be divided evenly over {stages} stages (pipeline x chunks); "
            f"the nearest numbers of stages are {close}, or give first and last blocks"
        )
    first, last = ends
    return (
        f"{blocks} blocks cannot be divided over {stages} stages with {first} blocks in the first "
        f"and {last} in the last: the others must have equally many, at least 1"
    )


def _runs(counts: tuple[int, ...]) -> str:
    """``9-10x3`` for 9, 10, 10, 10."""
    runs = [(count, len(list(equal))) for count, equal in groupby(counts)]
    return "-".join(f"{count}x{n}" if n > 1 else f"{count}" for count, n in runs)


_WORD = re.compile(r"([a-z]+)(\d+)")
_OF_STAGES = re.compile(r"([a-z]+)(\d+(?:x\d+)?(?:-\d+(?:x\d+)?)*)")


def parse_layout(text: str) -> Layout:
    """The layout of words such as ``p8 t8 d2 b1 v3 full sp zero1``; inverse of ``str``.

    Raises
    ------
    InputError
        If a word is not known or appears twice.
    """
    found: dict[str, object] = {}
    for word in re.split(r"[\s,]+", text.strip()):
        name, value = _meaning(word)
        if name in found:
            raise InputError(f"layout {text!r}: {name} appears twice")
        found[name] = value
    return replace(Layout(), **found)  # type: ignore[arg-type]


def _meaning(word: str) -> tuple[str, object]:
    if word in _PLAIN:
        return _PLAIN[word]
    modules = word.split("+")
    if set(modules) & set(MODULES):
        recompute = joined(modules) if set(modules) <= set(MODULES) else word
        require_recompute(recompute)
        return "recompute", recompute
    found = _OF_STAGES.fullmatch(word)
    if found is not None and found[1] in _BY_STAGE:
        return _BY_STAGE[found[1]], tuple(_counts(word, found[2]))
    found = _WORD.fullmatch(word)
    if found is None or found[1] not in _NUMBERED:
        by_stage = [f"{one}N-NxTIMES" for one in _BY_STAGE]
        known = ", ".join([*(f"{one}N" for one in _NUMBERED), *by_stage, *_PLAIN])
        known += f", modules such as {MODULES[2]}+{MODULES[3]} ({', '.join(MODULES)})"
        raise InputError(f"layout word {word!r} is not known; known are {known}")
    return _NUMBERED[found[1]], int(found[2])


def _counts(word: str, runs: str) -> Iterator[int]:
    """The inverse of :func:`_runs`."""
    for run in runs.split("-"):
        count, _, times = run.partition("x")
        n = int(times or 1)
        require_count(n, f"the stages of {word}", MAX_GPUS)
        for _ in range(n):
            yield int(count)
