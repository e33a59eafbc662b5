"""Pattern problems of given stages; times and bytes are computed once per stage."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from stagewright.formulations.patterns.one_f_one_b import iteration_bound, pattern_load_bound
from stagewright.formulations.patterns.pattern import PatternProblem
from stagewright.formulations.plans.actions import DOUBLE_BUFFER, WeightRule
from stagewright.formulations.plans.memory import (
    Kept,
    kept_bytes,
    stage_static_bytes,
    version_bytes,
)
from stagewright.formulations.plans.pipeline import PipelineProblem, remembered
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.shards import of_shard
from stagewright.formulations.plans.timing import (
    compute_seconds,
    message_seconds,
    offload_seconds,
    reduce_seconds,
    transfer_seconds,
    update_seconds,
)
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError


def pattern_problem(
    problem: PipelineProblem, stages: Sequence[Stage], rule: WeightRule = DOUBLE_BUFFER
) -> PatternProblem:
    """The scheduling problem for given stages and devices.

    Two stages have either the same devices, in the same order, or disjoint ones.
    """
    return PatternProblems(problem, rule).of(stages)


def load_seconds(problem: PipelineProblem, stages: Sequence[Stage], rule: WeightRule) -> float:
    """A lower bound on the iteration of patterns of ``stages``: the load of a device or a link.

    The period that leaves time for offloading does not count: other patterns may need less.
    """
    asked = pattern_problem(problem, [replace(one, offload=False) for one in stages], rule)
    return asked.iteration_seconds(pattern_load_bound(asked))


def memory_seconds(problem: PipelineProblem, stages: Sequence[Stage], rule: WeightRule) -> float:
    """The same bound by loads and by what 1F1B* keeps in memory; no stage may offload."""
    return iteration_bound(pattern_problem(problem, stages, rule))


class _Figures(NamedTuple):
    """Times and bytes of a stage in any pattern problem."""

    forward: float
    backward: float
    reduce: float
    update: float
    static_bytes: float
    version_bytes: float
    kept: Kept
    members: tuple[int, ...]  # indices of its devices
    least_seconds: float


@dataclass(frozen=True)
class PatternProblems:
    """Makes pattern problems for many choices of stages; caches times and bytes per stage.

    Under a ``rule`` by which weights change after every microbatch, all-reduces and updates are
    parts of the backwards.
    """

    problem: PipelineProblem
    rule: WeightRule = DOUBLE_BUFFER

    def of(self, stages: Sequence[Stage]) -> PatternProblem:
        """The problem of ``stages``, as :func:`pattern_problem`."""
        groups = list(dict.fromkeys(stage.devices for stage in stages))
        _require_one_offload(stages)
        found = [self._of_stage(stage) for stage in stages]
        sent = [self._transfer(*pair) for pair in pairwise(stages)]
        own = self._messages(stages)
        static, updates = dict.fromkeys(groups, 0.0), dict.fromkeys(groups, 0.0)
        for stage, figures in zip(stages, found, strict=True):
            static[stage.devices] += figures.static_bytes
            updates[stage.devices] += figures.update
        return PatternProblem(
            tuple((own[0] + [one.forward for one in found]).tolist()),
            tuple((own[1] + [one.backward for one in found]).tolist()),
            tuple(there for there, _ in sent),
            tuple(back for _, back in sent),
            tuple(groups.index(stage.devices) for stage in stages),
            tuple(figures.kept for figures in found),
            tuple(_memory(self.problem, names) - total for names, total in static.items()),
            tuple(figures.reduce for figures in found),
            self.problem.microbatches,
            max(one.least_seconds + more for one, more in zip(found, own.max(axis=0), strict=True)),
            max(updates.values()),
            tuple(figures.version_bytes for figures in found)
            if self.rule.updates_every_round
            else (),
            self.rule.follows_first_stage,
        )

    def seconds(self, stage: Stage) -> tuple[float, float]:
        """Forward and backward time of a stage, including recomputation."""
        return self._of_stage(stage)[:2]

    def _of_stage(self, stage: Stage) -> _Figures:
        if stage not in self._known:
            problem, index = self.problem, self.problem.cluster.index
            members = tuple(index[name] for name in stage.devices)
            forward, backward = compute_seconds(problem, stage, members)
            reduce, update = reduce_seconds(problem, stage), update_seconds(problem, stage)
            if self.rule.updates_every_round:
                backward, reduce, update = backward + reduce + update, 0.0, 0.0
            self._known[stage] = _Figures(
                forward,
                backward,
                reduce,
                update,
                static_bytes(problem, stage, self.rule),
                version_bytes(of_shard(problem, stage), *stage.layers),
                kept_bytes(problem, stage),
                members,
                _least_seconds(problem, stage, members, max(forward, backward)),
            )
        return self._known[stage]

    def _transfer(self, one: Stage, other: Stage) -> tuple[float, float]:
        if one.devices == other.devices:
            if one.tensor != other.tensor:
                raise InputError(
                    f"in a pattern, neighbouring stages on the devices {', '.join(one.devices)} "
                    f"need one tensor degree, got {one.tensor} and {other.tensor}"
                )
            return 0.0, 0.0
        key = (one.layers[1], one.devices, one.tensor, other.devices, other.tensor)
        if key not in self._transfers:
            mine, theirs = self._of_stage(one).members, self._of_stage(other).members
            self._transfers[key] = transfer_seconds(self.problem, one, other, mine, theirs)
        return self._transfers[key]

    def _messages(self, stages: Sequence[Stage]) -> Floats:
        """Time for messages in each stage's forward and in its backward, shape (2, S)."""
        if self.problem.cluster.message_seconds is None:
            return np.zeros((2, len(stages)))
        return np.array(message_seconds(stages, 1, self.problem.message_seconds))[:, :, 0]

    @cached_property
    def _known(self) -> dict[Stage, _Figures]:
        return {}

    @cached_property
    def _transfers(
        self,
    ) -> dict[tuple[int, tuple[str, ...], int, tuple[str, ...], int], tuple[float, float]]:
        return {}


@remembered
def _memory(problem: PipelineProblem, names: tuple[str, ...]) -> float:
    return min(float(problem.memory_bytes[problem.cluster.index[name]]) for name in names)


def static_bytes(problem: PipelineProblem, stage: Stage, rule: WeightRule = DOUBLE_BUFFER) -> float:
    """Resident bytes of a stage on a device: the rule's versions, gradients, buffers.

    MadPipe section 3: 3 W + 2 (a_(k-1) + a_l). In addition the optimizer state and, where gradients
    wait for an all-reduce or an update while the next ones are accumulated, one more gradient.
    Offloading adds two microbatches: one being written to the host and one read back.
    """
    static = stage_static_bytes(problem, stage, rule, overlapping=rule.staleness > 0)
    return static + (2 * kept_bytes(problem, stage).offloaded_bytes if stage.offload else 0.0)


def _least_seconds(
    problem: PipelineProblem, stage: Stage, members: Sequence[int], longest: float
) -> float:
    """The least period with time to offload after the forward and to fetch before the backward.

    Then at most one microbatch is being written to the host at a time, and at most one is being
    read back or used.
    """
    if not stage.offload:
        return 0.0
    seconds = offload_seconds(problem, stage, members)
    if seconds is None:
        raise InputError(
            f"offloading needs host_bytes_per_second of the devices {', '.join(stage.devices)} in "
            "the cluster"
        )
    return longest + seconds


def _require_one_offload(stages: Sequence[Stage]) -> None:
    """Refuse two offloading stages on a device: sharing its link to the host is not modelled."""
    offloading = [stage.devices for stage in stages if stage.offload]
    if len(set(offloading)) < len(offloading):
        raise InputError("a device can offload only one of its stages")
