"""Layers that are divided in one way: their times, sizes and rates of exchange."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any

import numpy as np

from stagewright.formulations.parallelism.layer_times import alike, share_time
from stagewright.formulations.parallelism.layout import Layout, Placement
from stagewright.formulations.parallelism.parts import shares
from stagewright.formulations.parallelism.schedules import FORMS, Schedule
from stagewright.formulations.parallelism.states import tied_seconds
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.prices.collectives import gather_seconds, pace
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.machines.fabric import Fabric
from stagewright.graphs.machines.groups import GroupWays, ends, links
from stagewright.graphs.models.shards import LayerShare, LayerSplit, Recompute, Shares


@dataclass(frozen=True, slots=True)
class SplitLayerWork:
    """(L + 2,) seconds of every layer on a microbatch; of ``total``, ``weight`` is put off."""

    total: Floats
    forward: Floats
    weight: Floats


@dataclass(frozen=True, eq=False, slots=True)
class LayerParameters:
    """Parameters of layers or ranks: ``expert`` of their experts, ``shared`` all others."""

    shared: Floats
    expert: Floats

    @property
    def all(self) -> Floats:
        """Of experts and others."""
        found: Floats = self.shared + self.expert
        return found

    def each(self, of: Callable[[Floats], Floats]) -> "LayerParameters":
        """Another form of both."""
        return LayerParameters(of(self.shared), of(self.expert))


def _places(of: Shares) -> Ints:
    """For every layer, the index of the layer's share."""
    kinds = len(of.kinds)
    return np.array([kinds, *of.blocks, kinds + 1])


@lru_cache(maxsize=1 << 14)
def _work(
    problem: TrainingProblem,
    of: Shares,
    split: LayerSplit,
    samples: int,
    recompute: Recompute,
    schedule: Schedule,
) -> SplitLayerWork:
    """The times of all layers in problems that are alike."""
    off, hides = FORMS[schedule].is_split, FORMS[schedule].pairs
    every = (*of.kinds, of.embedding, of.head)
    times = [share_time(problem, one, split, samples, recompute, off) for one in every]
    rows = [
        (
            one.forward + one.backward - 2 * hides * one.dispatched,
            one.forward - hides * one.dispatched,
            one.weight,
        )
        for one in times
    ]
    return SplitLayerWork(*np.array(rows).T[:, _places(of)])


@lru_cache(maxsize=1 << 14)
def _repeated_seconds(
    problem: TrainingProblem,
    of: Shares,
    split: LayerSplit,
    samples: int,
    kinds: tuple[Recompute, ...],
    off: bool,
) -> float:
    """The least that recomputation adds to a backward in problems that are alike."""
    return min(
        share_time(problem, one, split, samples, kind, off).backward
        - share_time(problem, one, split, samples, "none", off).backward
        for one in of.kinds
        for kind in kinds
    )


@lru_cache(maxsize=1 << 12)
def _hop_rate(of: GroupWays) -> tuple[float, float]:
    """Latency and seconds per byte of a hop over the way with the least bandwidth."""
    rates = ((pace(way.pair_bytes_per_second), way.latency_seconds) for way in of.ways)
    per_byte, start = max(rates, default=(0.0, 0.0))
    return start, per_byte


@lru_cache(maxsize=1 << 12)
def _gather_rate(of: GroupWays) -> tuple[float, float]:
    """Latency and seconds per byte of an all-gather over the slowest way."""
    size = 1e9
    if len(of.ways) > 1:
        slowest = max(of.ways, key=lambda way: gather_seconds(GroupWays(of.size, (way,)), size))
        of = GroupWays(of.size, (slowest,))
    one, two = gather_seconds(of, size), gather_seconds(of, 2 * size)
    return max(0.0, 2 * one - two), (two - one) / size


class LayerFamily:
    """The layers for one split; arrays are by layer, (L + 2,) with the ends, or by pipeline."""

    def __init__(self, problem: TrainingProblem, split: LayerSplit) -> None:
        self.problem, self.split = problem, split
        self.shares = shares(problem, split)
        self.replica = split.tensor * split.context
        self.left = problem.fabric.devices // self.replica
        self._alike = alike(problem, split)
        self._saved: dict[Recompute, Floats] = {}
        self._rates_of: dict[tuple[int, Schedule], Floats] = {}

    @cached_property
    def every(self) -> tuple[LayerShare, ...]:
        """The different shares of layers: blocks by kind, embedding, head."""
        return (*self.shares.kinds, self.shares.embedding, self.shares.head)

    def by_layer(self, quantity: Callable[[LayerShare], float]) -> Floats:
        """A quantity of every layer."""
        found: Floats = np.array([quantity(one) for one in self.every])[_places(self.shares)]
        return found

    def work(
        self, samples: int, recompute: Recompute, schedule: Schedule = "1f1b"
    ) -> SplitLayerWork:
        """The times of all layers, each with the least that the schedule shows of its exchange.

        Of schedules without pairs they are shortest with 1F1B.
        """
        return _work(self._alike, self.shares, self.split, samples, recompute, schedule)

    def least_work(
        self, samples: int, recompute: Recompute, schedules: Iterable[Schedule]
    ) -> float:
        """The least seconds of all layers: with whole backwards, but for what pairs hide."""
        pairs: list[Schedule] = [one for one in schedules if FORMS[one].pairs]
        every = (self.work(samples, recompute, one) for one in ("1f1b", *pairs[:1]))
        return min(float(one.total.sum()) for one in every)

    def frontier(
        self, samples: int, sets: Iterable[Recompute], schedules: Iterable[Schedule]
    ) -> list[Recompute]:
        """The sets of modules without those for which another frees as much of every block, faster.

        A layout with the other has no higher peak, since a block's backward holds no more again
        than the block frees, and takes no longer.
        """
        found: list[tuple[Recompute, Floats]] = []
        for one in sets:
            kept = [self.problem.processor.saved_bytes(share, one) for share in self.shares.kinds]
            works = [self.work(samples, one, schedule).total for schedule in schedules]
            price = np.array([*kept, *(float(t) for work in works for t in work[self.firsts])])
            if not any((other <= price).all() for _, other in found):
                found = [(name, other) for name, other in found if not (price <= other).all()]
                found.append((one, price))
        return [one for one, _ in found]

    @cached_property
    def firsts(self) -> list[int]:
        """The first layer of every kind of blocks."""
        return [1 + self.shares.blocks.index(kind) for kind in range(len(self.shares.kinds))]

    def repeated_seconds(
        self, samples: int, schedule: Schedule, kinds: Sequence[Recompute] = ("full",)
    ) -> float:
        """The least seconds by which recomputation of these kinds makes a backward longer."""
        off = FORMS[schedule].is_split
        return _repeated_seconds(self._alike, self.shares, self.split, samples, (*kinds,), off)

    def can_divide_experts(self, data: Ints, schedule: Schedule) -> Bools:
        """Whether so many replicas, copies among them, divide the experts evenly."""
        ranks = self.replica * data // FORMS[schedule].copies
        found: Bools = ranks % self.split.expert == 0
        return found

    def divided(self, of: "LayerParameters", data: Ints) -> Floats:
        """The part of parameters of every one of the ranks that have them all, if they divide them.

        These are context ranks and so many replicas.
        """
        ranks = self.split.context * data
        experts = np.maximum(1, self.split.tensor * ranks // self.split.expert)
        found: Floats = of.shared / ranks + of.expert / experts
        return found

    def are_alone(self, data: Ints) -> Bools:
        """Whether no two ranks of so many replicas have the same parameters."""
        found: Bools = self.split.context * data == 1
        if self.problem.architecture.experts is not None:
            found = found & (self.replica * data <= self.split.expert)
        return found

    @cached_property
    def parameters(self) -> "LayerParameters":
        """Parameters of every layer."""
        return LayerParameters(
            self.by_layer(lambda one: one.parameters),
            self.by_layer(lambda one: one.expert_parameters),
        )

    @cached_property
    def trained(self) -> "LayerParameters":
        """Parameters of every layer that are trained."""
        if self.problem.architecture.tuning is None:
            return self.parameters
        return LayerParameters(
            self.by_layer(lambda one: one.parameters - one.frozen_parameters),
            self.by_layer(lambda one: one.expert_parameters - one.frozen_expert_parameters),
        )

    def saved(self, recompute: Recompute) -> Floats:
        """Bytes that every layer keeps of a sample."""
        if recompute not in self._saved:
            self._saved[recompute] = self.by_layer(
                lambda one: self.problem.processor.saved_bytes(one, recompute)
            )
        return self._saved[recompute]

    @cached_property
    def freed(self) -> float:
        """Bytes of a sample that the recomputation of a block frees at the most."""
        return max(self._freed)

    @property
    def least_freed(self) -> float:
        """Bytes of a sample that the recomputation of any block frees."""
        return min(self._freed)

    @cached_property
    def _freed(self) -> list[float]:
        saved = self.problem.processor.saved_bytes
        return [saved(one, "none") - saved(one, "full") for one in self.shares.kinds]

    def rates(self, pipelines: Ints, schedule: Schedule, placement: Placement | None) -> Floats:
        """(7, pipelines) start and time per byte in a placement; without one, each at the least.

        Of a hop to the next stage, and of gathering shared and experts' parameters; and the seconds
        that the first and the last rank take to sum the gradients of a tied table.
        """
        distinct, place = np.unique(pipelines, return_inverse=True)
        every = [self.rates_of(one, schedule) for one in distinct.tolist()]
        if placement is None:
            rows = [one.min(axis=0) for one in every]
        else:
            rows = [one[-(placement == "pipeline-inside")] for one in every]
        found: Floats = np.array(rows)[place].T
        return found

    def hop_seconds(
        self,
        pipelines: Ints,
        samples: Ints | int,
        schedule: Schedule,
        placement: Placement | None = None,
    ) -> Floats:
        """Seconds from a rank to the next, for pipelines of so many ranks."""
        start, per_byte = self.rates(pipelines, schedule, placement)[:2]
        found: Floats = start + per_byte * self.sent_bytes(samples)
        return found

    def sent_bytes(self, samples: Ints | int) -> Any:
        """Bytes that a rank sends to the next stage."""
        width = self.shares.sent / self.split.tensor
        return samples * width * self.problem.precision.activation_bytes

    def rates_of(self, pipeline: int, schedule: Schedule) -> Floats:
        """(placements, 7) the same of a pipeline: nearer data ranks, then nearer stages if it can.

        Those of schedules with one copy of the stages are alike.
        """
        key: tuple[int, Schedule] = (pipeline, schedule if FORMS[schedule].copies > 1 else "1f1b")
        if key not in self._rates_of:
            charges, head = self.problem.charges, self.shares.head
            charged = [charges("pipeline transfers")] * 2 + [charges("data exchange")] * 4
            ranks = pipeline * FORMS[schedule].copies
            placed = placed_rates(self.problem.fabric, self.split, self.left, ranks, key[1])
            rows = [(*rates, tied_seconds(self.problem, one, head)) for one, rates in placed]
            self._rates_of[key] = np.array(rows) * [*charged, True]
        return self._rates_of[key]


def simply_placed(problem: TrainingProblem, layout: Layout) -> Layout:
    """The layout with its data ranks nearer if all its links are those of nearer stages too."""
    if layout.placement == "data-inside":
        return layout
    fabric, simple = problem.fabric, replace(layout, placement="data-inside")
    ways = (
        (
            links(fabric, one.data_group),
            links(fabric, one.expert_group),
            links(fabric, one.pipeline_group),
            ends(fabric, *one.pipeline_group[0]),
        )
        for one in (layout, simple)
    )
    return layout if next(ways) != next(ways) else simple


@lru_cache(maxsize=1 << 14)
def placed_rates(
    fabric: Fabric, split: LayerSplit, left: int, pipeline: int, schedule: Schedule
) -> list[tuple[Layout, tuple[float, ...]]]:
    """The placements that are possible, and their rates of hops and gathers."""
    replica, data = split.tensor * split.context, left // pipeline
    one = Layout(
        pipeline=pipeline,
        tensor=split.tensor,
        context=split.context,
        data=data,
        expert=split.expert if replica * data % split.expert == 0 else 1,
        schedule=schedule,
    )
    placed = [one, *([] if replica % one.expert else [replace(one, placement="pipeline-inside")])]
    found = []
    for one in placed:
        gathers = [
            _gather_rate(links(fabric, group)) for group in (one.data_group, one.expert_group)
        ]
        found.append((one, (*_hop_rate(links(fabric, one.pipeline_group)), *chain(*gathers))))
    return found
