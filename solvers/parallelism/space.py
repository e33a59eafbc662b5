"""The layouts that a search considers."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

import numpy as np

from stagewright.formulations.parallelism.cut import Layers, stage_layers
from stagewright.formulations.parallelism.estimate import Estimate
from stagewright.formulations.parallelism.layout import Layout, Placement
from stagewright.formulations.parallelism.parts import Parts, shares
from stagewright.formulations.parallelism.pipeline_time import StageCosts, Walk
from stagewright.formulations.parallelism.schedules import (
    FORMS,
    USUAL,
    Schedule,
    order_codes,
    stages_of_ranks,
)
from stagewright.formulations.parallelism.states import tied_seconds
from stagewright.formulations.parallelism.training import (
    TrainingProblem,
    has_selective,
    require_activation_offload,
)
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_count
from stagewright.graphs.machines.rates import Feature
from stagewright.graphs.models.modules import EVERY_SET, OFFLOAD, WHOLE, useful_sets
from stagewright.graphs.models.shards import LayerSplit, Recompute
from stagewright.graphs.models.splits import require_split

Counts = Callable[[int], Sequence[int]]
"""Of so many blocks of a stage, how many may be recomputed, ascending."""


def least_place(counts: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The place of the first count that fits, if all after it do; None if none fits.

    The ends are asked first: mostly nothing needs to be recomputed, or even all is too little.
    """
    if fits(counts[0]):
        return 0
    if not fits(counts[-1]):
        return None
    return bisect_left(counts, True, lo=1, hi=len(counts) - 1, key=fits)


@dataclass(frozen=True, slots=True)
class StageOption:
    """A stage with some blocks: seconds of a microbatch, of its exchange and of its update.

    ``returned`` is the backward without ``weight``, the part that is put off.
    """

    recomputed: int
    forward: float
    returned: float
    weight: float
    reduction: float
    update: float


class StageOptions:
    """The options of a layout's stages, whatever blocks and recomputation the layout itself has.

    More recomputed blocks take longer and free memory, so that the fewest that fit are taken.
    """

    def __init__(
        self, problem: TrainingProblem, layout: Layout, memory: float, counts: Counts, walk: Walk
    ) -> None:
        self.problem, self.layout, self.memory, self.counts = problem, layout, memory, counts
        self.shares = shares(problem, layout.split)
        self.costs = StageCosts(problem, layout, self.shares)
        self.stages, self.blocks = layout.pipeline, problem.architecture.layers
        self.is_uniform = len(self.shares.kinds) == 1
        self.microbatches = layout.microbatches(problem.batch)
        parts = Parts(problem, divided_evenly(layout, self.blocks))
        self.hop, self.hops, self.paired = parts.hop, parts.hops, parts.paired
        self.sending = parts.sending_seconds
        self.tied = tied_seconds(problem, layout, self.shares.head)
        # The order is the same whatever the times, and so is what is kept.
        self.codes = order_codes(layout.schedule, self.stages, 1, self.microbatches)
        self.stage_of = stages_of_ranks(self.stages, 1, in_v=False)
        ones, none = np.ones(self.stages), np.zeros(self.stages)
        self.kept = walk(
            self.codes, self.stage_of, self.microbatches, ones, ones, ones, self.paired, none, ones
        )[1]
        self._options: dict[tuple[int, int, int], StageOption | None] = {}
        self._starts: dict[tuple[int, ...], int] = {}
        self._bytes: dict[_Key, tuple[float, float]] = {}
        self._seconds: dict[_Key, tuple[float, float, float, float, float]] = {}

    def option(self, stage: int, start: int, count: int) -> StageOption | None:
        """The stage with the blocks from ``start`` on; None if they do not fit."""
        # Stages with equal blocks, wherever these begin, are one.
        blocks = self.shares.blocks[start : start + count]
        key = stage, self._starts.setdefault(blocks, start), count
        if key not in self._options:
            self._options[key] = self._option(*key)
        return self._options[key]

    def _option(self, stage: int, start: int, count: int) -> StageOption | None:
        counts = self.counts(count)
        ends = stage == 0, stage == self.stages - 1
        kept = float(self.kept[stage])
        place = least_place(
            counts, lambda again: self._peak((*ends, start, count, again), kept) <= self.memory
        )
        if place is None:
            return None
        key = (*ends, start, count, counts[place])
        if key not in self._seconds:
            self._seconds[key] = self._times(self._layers(key))
        forward, returned, weight, reduction, update = self._seconds[key]
        tied = self.tied if any(ends) and self.stages > 1 else 0.0
        return StageOption(counts[place], forward, returned, weight, reduction + tied, update)

    def _layers(self, key: "_Key") -> Layers:
        first, last, start, count, again = key
        own = self.shares.blocks[start : start + count]
        return stage_layers(self.shares, own, again, self.layout.treatment, first=first, last=last)

    def _peak(self, key: "_Key", kept: float) -> float:
        """Bytes of a stage that keeps so many forwards."""
        if key not in self._bytes:
            layers = self._layers(key)
            self._bytes[key] = self.costs.memory(layers, 0.0).total, self.costs.saved(layers)
        fixed, saved = self._bytes[key]
        return fixed + kept * saved

    def _times(self, layers: Layers) -> tuple[float, float, float, float, float]:
        costs, (forward, backward) = self.costs, self.costs.seconds(layers)
        weight = costs.put_off(layers)
        return forward, backward - weight, weight, costs.reduction(layers), costs.update(layers)


_Key = tuple[bool, bool, int, int, int]
"""Layers: whether with the embedding, with the head; the first block, how many, how many again."""


def divided_evenly(layout: Layout, blocks: int) -> Layout:
    """The layout with about equally many blocks in every stage, of which none is recomputed."""
    return replace(
        layout,
        recompute="none",
        recompute_blocks=None,
        recomputed_by_stage=None,
        first_blocks=None,
        last_blocks=None,
        blocks_by_stage=_even_division(layout.pipeline, blocks),
    )


def _even_division(stages: int, blocks: int) -> tuple[int, ...]:
    """About equally many blocks in every stage; with fewer blocks than stages none in the ends."""
    if blocks < stages:
        inner = (1,) * (stages - 2)
        return (0, *inner, blocks - len(inner))
    return tuple(blocks // stages + (stage < blocks % stages) for stage in range(stages))


MOST_CHUNKS = 1024
"""Stages on a pipeline rank at most: every number up to it is looked at."""


@dataclass(frozen=True, slots=True)
class Space:
    """The values that every dimension may take; None for all that divide.

    ``chunks`` is the largest number of stages on a rank. Selective recomputation is considered
    where the attention is not one fused kernel; ``modules`` are all useful sets of modules that the
    software has; ``offload`` are layouts with activations of the fewest blocks in host memory with
    which they fit, where the software can. With ``partial``, full recomputation is of the fewest
    blocks of every stage with which a layout fits, else of all. Sequence parallelism ``always`` is
    wherever the tokens of a rank can be divided. Without ``uneven`` stages are nearly even, as of
    all but few of the fastest layouts.
    """

    pipeline: tuple[int, ...] | None = None
    tensor: tuple[int, ...] | None = None
    context: tuple[int, ...] | None = None
    expert: tuple[int, ...] | None = None
    data: tuple[int, ...] | None = None
    microbatch: tuple[int, ...] | None = None
    chunks: int = 16
    schedules: tuple[Schedule, ...] = USUAL
    recompute: tuple[Recompute, ...] = (*WHOLE, EVERY_SET)
    partial: bool = True
    sequence_parallel: Literal["always", "any", "never"] = "always"
    zero: tuple[int, ...] = (0, 1, 2, 3)
    offload: tuple[bool, ...] = (False,)
    placements: tuple[Placement, ...] = get_args(Placement)
    uneven: bool = True

    def __post_init__(self) -> None:
        for name in ("pipeline", "tensor", "context", "expert", "data", "microbatch"):
            values = getattr(self, name)
            if values is not None and (not values or min(values) < 1):
                raise InputError(f"{name} needs at least one value, each at least 1")
        require_count(self.chunks, "chunks", MOST_CHUNKS)
        for name in ("schedules", "recompute", "zero", "offload", "placements"):
            if not getattr(self, name):
                raise InputError(f"{name} needs at least one value")

    def __str__(self) -> str:
        """The dimensions that are limited, in words."""
        limited = []
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "chunks":
                limited.append(f"at most {value} chunks")
            elif one.name == "partial" and "full" in self.recompute:
                said = "the fewest blocks with which a layout fits, or of all"
                limited.append(f"recomputation of {said if value else 'all blocks'}")
            elif one.name == "sequence_parallel":
                limited.append(f"{'' if value == 'any' else value + ' '}sequence parallelism")
            elif one.name == "offload" and value != one.default:
                limited.append("the optimizer's state on the device or in host memory")
            elif one.name not in ("partial", "uneven") and value != one.default:
                limited.append(f"{one.name.replace('_', ' ')} of {', '.join(map(str, value))}")
        if OFFLOAD in self.recompute:
            limited.append("activations of as few blocks in host memory, if the software can")
        return "; ".join((*limited, *(() if self.uneven else ("nearly even stages",))))

    def features(self, problem: TrainingProblem) -> tuple[Feature, ...]:
        """The features that layouts of the space may have, of those not every set has measured."""
        several = problem.fabric.devices > problem.fabric.per_server
        can: dict[Feature, bool] = {
            "ZeRO 2-3 between servers": several and max(self.zero) >= 2,
            "context parallelism": self.context is None or max(self.context) > 1,
            "experts between servers": several
            and problem.architecture.experts is not None
            and (self.expert is None or max(self.expert) > problem.fabric.per_server),
            "activation offload": self.offloads(problem),
            "schedules in a V": any(FORMS[one].in_v for one in self.schedules),
        }
        return tuple(feature for feature, may in can.items() if may)

    def pipelines(
        self, left: int, schedule: Schedule
    ) -> tuple[list[int], Callable[[int], Sequence[int]]]:
        """Pipeline degrees for ``left`` devices, of one copy, and the chunks that each may have."""
        form, data = FORMS[schedule], chosen(self.data, left)
        found = [p for p in chosen(self.pipeline, left) if left // p in data]
        if form.copies > 1:
            return [p // form.copies for p in found if p % 2 == 0 and p >= 4], lambda _: (2,)
        if form.chunks is None:
            return found, lambda p: range(1, 1 + (self.chunks if p > 1 else 1))
        only = (form.chunks,) if form.chunks <= self.chunks else ()
        return [p for p in found if p > 1], lambda _: only

    def least_bytes(self, problem: TrainingProblem) -> float:
        """Bytes of some device if all together hold the states of every parameter just once."""
        layers, sizes = shares(problem, LayerSplit()).every, problem.precision
        every = sum(one.parameters + one.expert_parameters for one in layers)
        frozen = sum(one.frozen_parameters + one.frozen_expert_parameters for one in layers)
        of_trained = sizes.gradient_bytes + sizes.optimizer_bytes * (True not in self.offload)
        states = every * sizes.weight_bytes + (every - frozen) * of_trained
        return problem.reserve_bytes + states / problem.fabric.devices

    def families(self, problem: TrainingProblem) -> Iterator[LayerSplit]:
        """How layers can be divided, by the rules of the model and the number of devices."""
        devices, architecture = problem.fabric.devices, problem.architecture
        experts = 1 if architecture.experts is None else architecture.experts.number
        for tensor in chosen(self.tensor, devices):
            for context in chosen(self.context, devices // tensor):
                for expert in chosen(self.expert, experts):
                    if devices % expert == 0:
                        yield from self._splits(problem, LayerSplit(tensor, context, expert))

    def why_none(self, problem: TrainingProblem) -> str:
        """Why there are no families: the first rule that the smallest degrees break."""
        devices, architecture = problem.fabric.devices, problem.architecture
        every = (self.tensor, self.context, self.expert)
        tensor, context, expert = (min(values) if values else 1 for values in every)
        if devices % (tensor * context):
            return f"{devices} devices are no multiple of t x c = {tensor} x {context}"
        split = LayerSplit(tensor, context, expert)
        if architecture.experts is not None and split.tensor > 1:
            split = replace(split, sequence_parallel=True)
        try:
            require_split(architecture, problem.sequence, split)
        except InputError as error:
            return str(error)
        with_schedule = ""
        if any(FORMS[one].chunks for one in self.schedules):
            with_schedule = f", with ranks and chunks that {' or '.join(self.schedules)} has"
        blocks = architecture.layers
        return (
            f"{devices} devices, {blocks} blocks: no pipeline of the space divides{with_schedule}"
        )

    def _splits(self, problem: TrainingProblem, plain: LayerSplit) -> Iterator[LayerSplit]:
        """The splits without and with sequence parallelism."""
        divided = replace(plain, sequence_parallel=True)
        can = plain.tensor > 1 and _is_allowed(problem, divided)
        if can and self.sequence_parallel != "never":
            yield divided
        if (not can or self.sequence_parallel != "always") and _is_allowed(problem, plain):
            yield plain

    def recomputes(self, problem: TrainingProblem) -> tuple[Recompute, ...]:
        """The kinds of recomputation that differ for this model's attention and software."""
        allowed = {"selective": has_selective(problem), EVERY_SET: False, OFFLOAD: False}
        found = [one for one in self.recompute if allowed.get(one, True)]
        if EVERY_SET in self.recompute:
            same = {"core_attn"} if "selective" in found else set()
            found += [one for one in _sets(problem) if one not in {*found, *same}]
        if not found and OFFLOAD in self.recompute:
            require_activation_offload(problem)
        elif not found:
            raise InputError(
                "recompute selective alone: the fused attention recomputes its scores anyway; "
                "choose none or full"
            )
        return tuple(found)

    def offloads(self, problem: TrainingProblem) -> bool:
        """Whether layouts may have activations in host memory."""
        try:
            require_activation_offload(problem)
        except InputError:
            return False
        return OFFLOAD in self.recompute


def _sets(problem: TrainingProblem) -> tuple[Recompute, ...]:
    """The sets of modules that differ on some block."""
    memory, blocks = problem.memory, shares(problem, LayerSplit()).kinds
    able = [one for one in memory.modules if one not in memory.always] if memory.modules else []
    if problem.attention != "materialized" and "core_attn" in able:
        able.remove("core_attn")
    return useful_sets(able, [one.operators for one in blocks])


def _is_allowed(problem: TrainingProblem, split: LayerSplit) -> bool:
    try:
        require_split(problem.architecture, problem.sequence, split)
    except InputError:
        return False
    return True


def chosen(values: tuple[int, ...] | None, of: int) -> tuple[int, ...]:
    """The divisors of the number ``of``; if ``values`` are given, the divisors among them."""
    if values is None:
        return divisors(of)
    return tuple(sorted(one for one in set(values) if of % one == 0))


def divisors(of: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    low = [one for one in range(1, int(of**0.5) + 1) if of % one == 0]
    return tuple(sorted({*low, *(of // one for one in low)}))


def plainest(schedule: Schedule) -> Layout:
    """A layout with the schedule and no other feature."""
    return Layout(4, chunks=FORMS[schedule].chunks or 1, schedule=schedule)


def with_recomputed(layout: Layout, blocks: int, most: int) -> Layout:
    """The layout that recomputes so many blocks of every stage, of which it has ``most``."""
    if blocks == 0:
        return replace(layout, recompute="none", recompute_blocks=None)
    return replace(layout, recompute="full", recompute_blocks=None if blocks == most else blocks)


def blocks_recomputed(layout: Layout, most: int) -> int:
    """The inverse of :func:`with_recomputed`."""
    if layout.recompute == "none":
        return 0
    return most if layout.recompute_blocks is None else layout.recompute_blocks


def simple_first(one: Estimate) -> tuple[float, int, int, str]:
    """Sort key of layouts: time, then the number of kinds of parallelism."""
    layout = one.layout
    return float(f"{one.seconds:.9g}"), layout.context, layout.expert, layout.placement
