"""BPPM for a given number of stages as a mixed-integer program (SPP section IV-B), for small cases.

It is independent of the recurrence and cross-checks it. A plan is a path: stage, channel, stage,
..., stage. Stages are numbered n = N ... 1, counted from the end of the pipeline.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stagewright.formulations.forms.models import LinearProgram, sparse_rows
from stagewright.formulations.pipelines.bppm import BalancedPartition, StageChoice
from stagewright.formulations.plans.memory import in_flight_limit
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError

Rows = list[dict[int, float]]
Place = tuple[int, int, int, int]


class _StageColumn(NamedTuple):
    """1 if stage ``n`` has layers [a, b) on the devices order[i:j]."""

    n: int
    a: int
    b: int
    i: int
    j: int


class _ChannelColumn(NamedTuple):
    """1 if stage ``n`` on order[h:i] ends before layer ``l`` and order[i:j] has the next stage."""

    n: int
    l: int
    h: int
    i: int
    j: int


@dataclass(frozen=True, slots=True)
class ByAssignment:
    """One binary per possible stage, one variable per possible channel, and the bottleneck W.

    Columns are the stages, the channels, and W in units of the slowest stage, which keeps the
    coefficients of the rows near 1; the objective is in seconds.
    """

    stages: int

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise InputError(f"stages must be at least 1, got {self.stages}")

    def apply(self, question: BalancedPartition) -> LinearProgram:
        """The program; infeasible if no partition into ``stages`` stages fits in memory."""
        stages = list(_stage_columns(question, self.stages))
        channels = list(_channel_columns(question, self.stages))
        taken = np.array([_stage_seconds(question, stage) for stage in stages])
        passed = np.array([_channel_seconds(question, channel) for channel in channels])
        unit = float(taken.max(initial=0.0)) or 1.0
        size = len(stages) + len(channels)
        flow = [*_one_path(stages, self.stages), *_links(stages, channels, self.stages)]
        loads = _loads([stage.n for stage in stages], taken / unit, 0, size)
        loads += _loads([channel.n for channel in channels], passed / unit, len(stages), size)
        right = np.r_[1.0, np.zeros(len(flow) - 1)]
        return LinearProgram(
            cost=np.r_[np.zeros(size), unit],
            matrix=sparse_rows([*flow, *loads], size + 1),
            row_lower=np.r_[right, np.full(len(loads), -np.inf)],
            row_upper=np.r_[right, np.zeros(len(loads))],
            lower=np.zeros(size + 1),
            upper=np.r_[np.ones(size), np.inf],
            # With binary stages, only the channels between them have flow.
            integral=np.arange(size + 1) < len(stages),
        )

    def invert(self, question: BalancedPartition, values: Floats) -> tuple[StageChoice, ...]:
        """The stages whose binaries are 1, first to last."""
        columns = list(_stage_columns(question, self.stages))
        chosen = [stage for stage, value in zip(columns, values, strict=False) if value > 0.5]
        return tuple(
            StageChoice(stage.a, stage.b, question.order[stage.i : stage.j])
            for stage in sorted(chosen, key=lambda stage: -stage.n)
        )


def _stage_columns(question: BalancedPartition, stages: int) -> Iterator[_StageColumn]:
    """Every stage that leaves a layer and a device for each other stage and fits in memory.

    The n-th stage from the end holds min(M, n) microbatches in flight, or min(warm_up, n) if given.
    """
    problem = question.problem
    for n in range(stages, 0, -1):
        for a, b in _spans(len(problem.chain), stages, n):
            for i, j in _device_spans(question, stages, n):
                limit = in_flight_limit(problem, a, b, question.order[i:j])
                if limit >= min(question.warm_up or problem.microbatches, n):
                    yield _StageColumn(n, a, b, i, j)


def _spans(total: int, stages: int, n: int) -> Iterator[tuple[int, int]]:
    """The [start, stop) of ``total`` for stage n that leave one for each stage before and after."""
    before, after = stages - n, n - 1
    starts = [0] if before == 0 else range(before, total - after)
    for start in starts:
        stops = [total] if after == 0 else range(start + 1, total - after + 1)
        yield from ((start, stop) for stop in stops if stop > start)


def _device_spans(question: BalancedPartition, stages: int, n: int) -> Iterator[tuple[int, int]]:
    """As :func:`_spans`, but spans of the devices, in whole units."""
    unit = question.unit
    for i, j in _spans(len(question.order) // unit, stages, n):
        yield unit * i, unit * j


def _channel_columns(question: BalancedPartition, stages: int) -> Iterator[_ChannelColumn]:
    layers = len(question.problem.chain)
    for n in range(stages, 1, -1):
        before, after = stages - n, n - 1
        for l in range(before + 1, layers - after + 1):
            for h, i in _device_spans(question, stages, n):
                after_it = _device_spans(question, stages, n - 1)
                for _, j in (span for span in after_it if span[0] == i):
                    yield _ChannelColumn(n, l, h, i, j)


def _stage_seconds(question: BalancedPartition, stage: _StageColumn) -> float:
    """M times forward and backward, all-reduce and update: a stage's entry in W(l, xi, r, i)."""
    problem, devices = question.problem, question.order[stage.i : stage.j]
    computed = sum(problem.compute_seconds(stage.a, stage.b, devices))
    return problem.microbatches * computed + problem.finish_seconds(stage.a, stage.b, devices)


def _channel_seconds(question: BalancedPartition, channel: _ChannelColumn) -> float:
    """M times the transfers in both directions: a channel's entry in W(l, xi, r, i)."""
    h, i, j = channel.h, channel.i, channel.j
    sent = question.problem.transfer_seconds(channel.l, question.order[h:i], question.order[i:j])
    return question.problem.microbatches * sum(sent)


def _one_path(stages: Sequence[_StageColumn], count: int) -> Rows:
    """The path leaves the source once, into a first stage."""
    return [{x: 1.0 for x, stage in enumerate(stages) if stage.n == count}]


def _links(stages: Sequence[_StageColumn], channels: Sequence[_ChannelColumn], count: int) -> Rows:
    """Flow conservation at every node of the network.

    There are two kinds of nodes: after stage n and before stage n - 1. The cut and the devices of
    the stage determine the channels at the node.
    """
    out = _balance(
        stages, channels, lambda s: (s.n, s.b, s.i, s.j), lambda c: (c.n, c.l, c.h, c.i), end=1
    )
    into = _balance(
        stages,
        channels,
        lambda s: (s.n, s.a, s.i, s.j),
        lambda c: (c.n - 1, c.l, c.i, c.j),
        end=count,
    )
    return out + into


def _balance(
    stages: Sequence[_StageColumn],
    channels: Sequence[_ChannelColumn],
    of_stage: Callable[[_StageColumn], Place],
    of_channel: Callable[[_ChannelColumn], Place],
    end: int,
) -> Rows:
    """A row per node: its stages minus its channels. Stage ``end`` has none on that side."""
    rows: dict[Place, dict[int, float]] = {}
    for x, stage in enumerate(stages):
        if stage.n != end:
            rows.setdefault(of_stage(stage), {})[x] = 1.0
    for y, channel in enumerate(channels, start=len(stages)):
        rows.setdefault(of_channel(channel), {})[y] = -1.0
    return list(rows.values())


def _loads(numbers: Sequence[int], seconds: Floats, offset: int, bottleneck: int) -> Rows:
    """For every n, W is at least the time of the chosen column; ``numbers`` are the columns' n."""
    rows: dict[int, dict[int, float]] = {}
    for x, (n, time) in enumerate(zip(numbers, seconds.tolist(), strict=True), start=offset):
        rows.setdefault(n, {bottleneck: -1.0})[x] = time
    return list(rows.values())
