"""Balanced stages on groups of devices of one size, at every depth, within memory.

How many microbatches a stage keeps depends on the period, which depends on the cuts. So stages are
balanced for two numbers: as many as there are stages from here to the last, which 1F1B keeps, and
one, which any stages keep that fit at all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.pipelines.bppm import prefix_sums, range_sums
from stagewright.formulations.plans.memory import buffers_per_boundary, state_factor
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.formulations.plans.weight_rules import WeightRule
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.planners.periodic.device_groups import Groups
from stagewright.solvers.planners.seeds import every_balanced_cuts


@dataclass(frozen=True)
class GroupTables:
    """Seconds and bytes of layers [start, stop) on each of ``groups``, shape (L + 1, L + 1).

    ``modes`` are the recomputations that a stage may choose from.
    """

    problem: PipelineProblem
    groups: Groups
    rule: WeightRule
    modes: Sequence[Literal["none", "full"]]

    def partitions(self) -> Iterator[tuple[list[int], Groups]]:
        """Cuts into one stage per group, for the first 1, 2, ... groups, and those in order."""
        count = range(len(self.groups))
        for most in (0, 1):
            tables = [self._allowed(self._forth(g), g, most) for g in count]
            for cuts in every_balanced_cuts(tables):
                if cuts is not None:
                    yield cuts, self.groups
        # From the last stage to the first, which are on the last and the first of the groups.
        tables = [self._allowed(self._back(g), g, g + 1)[::-1, ::-1].T for g in count]
        layers = len(self.problem.chain)
        for depth, cuts in enumerate(every_balanced_cuts(tables), 1):
            if cuts is not None:
                yield [layers - cut for cut in reversed(cuts)], self.groups[:depth][::-1]

    def _forth(self, g: int) -> Floats:
        """Seconds of the slower of a stage on group ``g`` and its transfers forward."""
        if g == 0:
            return self._seconds[g]
        return np.maximum(self._seconds[g], self._sent(g - 1, g)[:, None])

    def _back(self, g: int) -> Floats:
        """Seconds of the slower of a stage on group ``g`` and its transfers backward."""
        if g == 0:
            return self._seconds[g]
        return np.maximum(self._seconds[g], self._sent(g, g - 1)[None, :])

    def _sent(self, one: int, other: int) -> Floats:
        """Seconds of the transfers at every boundary, both ways, shape (L + 1,)."""
        between = range(1, len(self.problem.chain))
        pair = self.groups[one], self.groups[other]
        return np.array(
            [0.0, *(sum(self.problem.transfer_seconds(l, *pair)) for l in between), 0.0]
        )

    @cached_property
    def _seconds(self) -> list[Floats]:
        """Forward, backward, all-reduce and update on each group.

        An all-reduce and an update are taken to be proportional to their bytes.
        """
        problem, found = self.problem, []
        parameters, layers = problem.chain.parameter_bytes, len(problem.chain)
        for group in self.groups:
            costs = [problem.costs(problem.cluster.devices[v].kind, len(group)) for v in group]
            work = np.max([one.forward_seconds + one.backward_seconds for one in costs], axis=0)
            ending = problem.reduce_seconds(0, layers, group)
            ending += problem.update_seconds(0, layers, group)
            work = work + parameters * (ending / max(float(parameters.sum()), 1.0))
            found.append(range_sums(prefix_sums(work)))
        return found

    def _allowed(self, seconds: Floats, g: int, in_flight: int) -> Floats:
        """``seconds``, inf where there is no layer, or no room for so many microbatches."""
        possible = np.triu(np.ones_like(seconds, dtype=bool), 1)
        if in_flight:
            possible &= self._fits(g, in_flight)
        return np.where(possible, seconds, np.inf)

    def _fits(self, g: int, in_flight: int) -> NDArray[np.bool_]:
        """Where states, old versions, activations and buffers fit in a group's least memory."""
        problem, count = self.problem, len(self.groups[g])
        factor = state_factor(problem, count, self.rule) + in_flight - 1
        states = factor * range_sums(prefix_sums(problem.chain.parameter_bytes))
        buffers = buffers_per_boundary(problem, count)
        static = states + buffers[:, None] + buffers[None, :]
        saved = range_sums(prefix_sums(problem.saved_per_layer(count)))
        inputs = np.append(problem.inputs_per_layer(count), 0.0)[:, None]
        # What fits but for rounding is left to the pattern.
        room = min(problem.memory_bytes[v] for v in self.groups[g]) * (1 + RELATIVE_TOLERANCE)
        every = {"none": in_flight * saved, "full": in_flight * inputs + saved}
        found: NDArray[np.bool_] = np.any(
            [static + every[mode] <= room for mode in self.modes], axis=0
        )
        return found
