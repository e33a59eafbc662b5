"""The tasks of given stages and the machines that run them, for bounds on their schedules.

Stages may share devices, take turns, recompute or offload, and split their backwards. A task is one
computation or transfer of a microbatch, an all-reduce or an optimizer step. A machine is a device,
a channel, or the all-reduces of a device: it runs one task at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm

import numpy as np

from stagewright.formulations.pipelines.blocks import numbering
from stagewright.formulations.plans.actions import ActionKind
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.structure import Endings, Structure, Work, work_of
from stagewright.formulations.plans.timing import durations
from stagewright.graphs.documents.arrays import Bools, Floats, Ints

ROUNDING = 1e-9  # relative; the checker may count bytes in another order
BUSY = 0.2  # of the largest load of a machine
PAIRS = 300_000


@dataclass(frozen=True, eq=False)
class Tasks:
    """The tasks of S stages and M microbatches: rows, then all-reduces, then optimizer steps.

    The rows are those of :func:`numbering`, M tasks each: the way of a microbatch, and then the
    weight gradients, which take no time where backwards are whole.

    Attributes
    ----------
    seconds
        Of all tasks, shape ((5 S - 2) M + 2 S,).
    turns
        Microbatches m and m + ``turns`` run on the same devices in every stage.
    limits
        How many microbatches fit in memory where the stage runs this one, shape (S, M).
    machines
        The tasks of every machine that take time.
    """

    stages: int
    microbatches: int
    seconds: Floats
    turns: int
    limits: Ints
    machines: tuple[Ints, ...]

    def rows(self, values: Floats) -> Floats:
        """A view of the values of the rows, shape (5 S - 2, M)."""
        return values[: -2 * self.stages].reshape(-1, self.microbatches)

    def endings(self, values: Floats) -> tuple[Floats, Floats]:
        """Views of the values of the all-reduces and of the optimizer steps, shape (S,)."""
        return values[-2 * self.stages : -self.stages], values[-self.stages :]

    @cached_property
    def busy(self) -> tuple[tuple[Ints, Bools], ...]:
        """The machines whose pairs of tasks are looked at, with the pairs; none if too many."""
        loads = [float(self.seconds[own].sum()) for own in self.machines]
        least = BUSY * max(loads, default=0.0)
        busy = [own for own, load in zip(self.machines, loads, strict=True) if load >= least]
        if sum(len(own) ** 2 for own in busy) > PAIRS:
            return ()
        return tuple((own, self._follows(own)) for own in busy)

    def _follows(self, own: Ints) -> Bools:
        """Whether task ``own[j]`` follows ``own[i]`` in every schedule, at [j, i].

        A task of microbatch m follows all that comes before it on the way of microbatches m, m -
        ``turns``, ... An ending follows all that comes before the backwards of its stage.
        """
        _, backward, weight = numbering(self.stages)
        row, m = np.divmod(own, self.microbatches)
        is_weight, is_ending = (weight[0] <= row) & (row <= weight[-1]), row > weight[-1]
        stage = np.where(is_weight, row - weight[0], -1)
        first = (weight[-1] + 1) * self.microbatches
        stage[is_ending] = (own[is_ending] - first) % self.stages
        reach = np.where(stage < 0, row, backward[stage])[:, None]
        apart = m[:, None] - m
        in_time = is_ending[:, None] | ((apart >= 0) & (apart % self.turns == 0))
        before = np.where(stage < 0, row <= reach, is_weight & (stage == stage[:, None]))
        np.fill_diagonal(before, False)
        return np.asarray(in_time & before)


def tasks_of(work: Work, endings: Endings) -> Tasks:
    """The tasks of a structure."""
    stages, count = work.lane.shape
    forward, backward, weight = numbering(stages)
    rows = np.zeros((5 * stages - 2, count))
    rows[forward], rows[backward], rows[weight] = work.seconds[:3]
    rows[forward[:-1] + 1] = work.seconds[3, :-1]
    rows[backward[1:] + 1] = work.seconds[4, 1:]
    after = np.nan_to_num(endings.reduce), np.nan_to_num(endings.update)
    seconds = np.concatenate([rows.ravel(), *after])
    machines = {tuple(own[seconds[own] > 0].tolist()) for own in _machines(work, endings)}
    return Tasks(
        stages=stages,
        microbatches=count,
        seconds=seconds,
        turns=lcm(*np.bincount(work.stage).tolist()),
        limits=_limits(work),
        machines=tuple(np.array(own) for own in sorted(machines) if own),
    )


def tasks_of_stages(problem: PipelineProblem, stages: Sequence[Stage], parts: bool) -> Tasks:
    """The tasks of stages that may split their backwards where they can, if ``parts``."""
    return tasks_of(*work_of_stages(problem, stages, parts))


def work_of_stages(
    problem: PipelineProblem, stages: Sequence[Stage], parts: bool
) -> tuple[Work, Endings]:
    """The work of stages that may split their backwards where they can, if ``parts``.

    A backward that may be split is an input gradient, and a weight gradient for the rest of the
    time of a whole backward, which on unlike devices may be less than the weight gradient takes.
    """
    split = can_split(problem, stages) if parts else (False,) * len(stages)
    work, endings, _ = work_of(problem, Structure(tuple(stages), split))
    whole = durations(problem, stages)[ActionKind.BACKWARD]
    seconds = work.seconds.copy()
    seconds[2] = np.minimum(seconds[2], np.maximum(whole - seconds[1], 0.0))
    return replace(work, seconds=seconds), endings


def can_split(problem: PipelineProblem, stages: Sequence[Stage]) -> tuple[bool, ...]:
    """Which stages may split their backwards."""
    return tuple(
        not one.offload and problem.layer_with_whole_backward(*one.layers) is None for one in stages
    )


def _machines(work: Work, endings: Endings) -> Iterator[Ints]:
    """The tasks of every device, its all-reduces, and every channel."""
    stages, count = work.lane.shape
    number = np.arange((5 * stages - 2) * count).reshape(-1, count)
    rows = np.stack(numbering(stages))
    for v, lanes in enumerate(work.places):
        own = np.flatnonzero([v in group for group in endings.devices])
        computed = [
            number[rows[:, s]][:, work.lane[s] == n].ravel()
            for n, s in zip(lanes, work.stage[lanes], strict=True)
        ]
        yield np.concatenate([*computed, number.size + stages + own])
        yield number.size + own
    forward, backward, _ = rows
    for channel in range(int(work.channel.max()) + 1):
        s, m = np.nonzero(work.channel == channel)
        yield np.concatenate([number[forward[s] + 1, m], number[backward[s + 1] + 1, m]])


def _limits(work: Work) -> Ints:
    """How many microbatches fit at once on a lane, for every stage and microbatch.

    If all backwards are whole, what a microbatch keeps for a stage is held together with what it
    keeps for the earlier stages of the device.
    """
    count, whole = work.lane.shape[1], not work.split.any()
    always = np.bincount(work.stage) == 1  # stages that run every microbatch on the same devices
    most = np.full(len(work.stage), count)
    for n, s in enumerate(work.stage):
        for v in work.members[n]:
            earlier = [o for o in work.places[v] if work.stage[o] < s and always[work.stage[o]]]
            size = work.kept[n] + (work.kept[earlier].sum() if whole else 0.0)
            if size > 0:
                most[n] = min(most[n], int(work.room[v] * (1 + ROUNDING) // size))
    return np.asarray(np.maximum(most, 1)[work.lane])
