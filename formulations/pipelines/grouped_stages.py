"""Split stages on groups of devices, any two the same or disjoint, as makespan problems.

A makespan problem knows no all-reduces that take turns on a device. `GroupedStages.problems` states
several orders of them: what follows a stage's backwards is its own all-reduce and those after it.
`relaxed_schedule` leaves the turns out, so that a bound on it is one on every plan of the stages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stagewright.formulations.pipelines.bppm import StageChoice, makespan_problem
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.plan_class import SHARED_SPLIT, class_of_stages
from stagewright.formulations.plans.structure import (
    Endings,
    Structure,
    Work,
    can_split,
    work_of,
    work_of_stages,
)
from stagewright.graphs.documents.arrays import Floats


@dataclass(frozen=True, slots=True, eq=False)
class GroupedStages:
    """Split stages on groups of devices; ``home`` is the group of each, numbered by first use."""

    work: Work
    endings: Endings
    home: tuple[int, ...]

    @classmethod
    def of(cls, problem: PipelineProblem, structure: Structure) -> "GroupedStages":
        """The stages of a structure of class ``SHARED_SPLIT``."""
        return cls.with_work(*work_of(problem, structure)[:2])

    @classmethod
    def with_work(cls, work: Work, endings: Endings) -> "GroupedStages":
        """Stages with given times."""
        groups = list(dict.fromkeys(endings.devices))
        return cls(work, endings, tuple(groups.index(group) for group in endings.devices))

    def problems(self) -> Iterator[MakespanProblem]:
        """Problems with all-reduces in parallel and in several orders; empty without enough memory.

        What one backward recomputes has room at any time; see `splits`.
        """
        again = np.zeros(1 + max(self.home))
        np.maximum.at(again, np.array(self.home), self.work.again)
        room = np.maximum(self._room() - again, 0.0)
        for after in dict.fromkeys(map(tuple, self._after())):
            found = self._stated(after, room)
            if found is not None:
                yield found

    def relaxed(self) -> MakespanProblem | None:
        """The relaxed problem: all-reduces in parallel, no memory for recomputed activations."""
        return self._stated(tuple(next(self._after()).tolist()), np.maximum(self._room(), 0.0))

    def _stated(self, after: tuple[float, ...], room: Floats) -> MakespanProblem | None:
        """``after`` follows the backwards of each stage; ``room`` in bytes for each group."""
        work, count = self.work, self.work.lane.shape[1]
        held = np.bincount(self.home, work.kept)
        if (held > room).any():
            return None
        forward, backward, weights, there, back = work.seconds[:, :, 0]
        is_limited = bool((held * count > room).any())
        return MakespanProblem(
            microbatches=count,
            forward=tuple(forward.tolist()),
            backward=tuple(backward.tolist()),
            send_forward=_sends(there[:-1], work),
            send_backward=_sends(back[1:], work),
            reduce=after,
            in_flight=(count,) * len(self.home),
            device=self.home,
            weight_gradient=tuple(weights.tolist()) if work.split.any() else None,
            saved=tuple((kept, 0.0, kept) for kept in work.kept.tolist()) if is_limited else (),
            memory=tuple(room.tolist()) if is_limited else (),
        )

    def _after(self) -> Iterator[Floats]:
        """Seconds after the last backward of every stage: update and all-reduces.

        Parallel; else the last stages first, but for a device's longest all-reduce, which is ahead
        of some of those that the others leave to the end.
        """
        home, stages = np.array(self.home), np.arange(len(self.home))
        reduce = np.nan_to_num(self.endings.reduce)
        update = np.nan_to_num(self.endings.update)
        yield reduce + update
        for ahead in range(np.bincount(home).max()):
            after = update.copy()
            for d in range(1 + home.max()):
                queue = stages[home == d][::-1].tolist()
                longest = max(queue, key=lambda s: reduce[s])
                place = max(0, queue.index(longest) - ahead)
                queue.remove(longest)
                queue.insert(place, longest)
                after[queue] += np.cumsum(reduce[queue][::-1])[::-1]
            yield after

    def _room(self) -> Floats:
        """Bytes on each group for microbatches."""
        groups = dict(zip(self.home, self.endings.devices, strict=True))
        return np.array([self.work.room[list(groups[d])].min() for d in range(len(groups))])


def _sends(seconds: Floats, work: Work) -> tuple[float, ...]:
    """Transfer times; none between stages on one group."""
    return tuple(np.where(work.channel[:-1, 0] < 0, 0.0, seconds).tolist())


def splits(problem: PipelineProblem, stages: Sequence[Stage]) -> tuple[bool, ...]:
    """Which stages may split their backwards in `GroupedStages.problems`.

    What an input gradient recomputes is held until the weight gradient ends, for any number of
    microbatches at once, and the problems have room for one.
    """
    able = can_split(problem, stages)
    return tuple(one and stage.recompute == "none" for one, stage in zip(able, stages, strict=True))


def is_grouped(stages: Sequence[Stage]) -> bool:
    """Whether all stages are split, and any two on the same devices or on disjoint ones."""
    plans = class_of_stages(tuple(stages), False, "finite", "flush")
    same = {frozenset(stage.devices) for stage in stages}
    return SHARED_SPLIT.contains(plans) and len({stage.devices for stage in stages}) == len(same)


def scheduling_of(problem: PipelineProblem, stages: Sequence[Stage]) -> MakespanProblem | None:
    """The makespan problem of plain stages; None if a stage is not plain.

    Plain stages have split replication, tensor degree 1, no shards and disjoint devices, and keep
    all activations.
    """
    devices = [name for stage in stages for name in stage.devices]
    plain = all(
        (stage.turns, stage.tensor, stage.shards) == (1, 1, "none")
        and (stage.recompute, stage.offload) == ("none", False)
        for stage in stages
    )
    if not plain or len({*devices}) < len(devices):
        return None
    return makespan_problem(problem, choices_of(problem, stages))


def choices_of(problem: PipelineProblem, stages: Sequence[Stage]) -> tuple[StageChoice, ...]:
    """Stages with device indices in place of names."""
    index = problem.cluster.index
    return tuple(
        StageChoice(*stage.layers, tuple(index[name] for name in stage.devices)) for stage in stages
    )


def relaxed_schedule(
    problem: PipelineProblem, stages: Sequence[Stage], parts: bool
) -> MakespanProblem | None:
    """A makespan problem whose optimum no finite plan of ``stages`` undercuts.

    The plans may split all backwards that can be, if ``parts``. Transfers to the host and memory
    for what is recomputed are left out, and all-reduces of a device run in parallel. None unless
    the stages are split ones on groups of devices, with room for a microbatch.
    """
    plain = None if parts else scheduling_of(problem, stages)
    if plain is not None or not is_grouped(stages):
        return plain
    return GroupedStages.with_work(*work_of_stages(problem, stages, parts)).relaxed()
