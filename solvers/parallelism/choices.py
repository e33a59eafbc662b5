"""A microbatch, its recomputation and schedule: bounds on the time of all their pipelines."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stagewright.formulations.parallelism.layout import Layout, Schedule
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.models.shards import Recompute
from stagewright.solvers.parallelism.bounds import Bounds, Keeping
from stagewright.solvers.parallelism.family import Work


@dataclass(frozen=True, eq=False)
class Choice:
    """The choices of the steps before the pipeline is divided.

    Layers recompute at least ``least`` and at most ``recompute``.
    """

    bounds: Bounds
    recompute: Recompute
    least: Recompute
    schedule: Schedule

    @property
    def samples(self) -> int:
        """The number of samples of a microbatch."""
        return self.bounds.sized.samples

    @cached_property
    def work(self) -> Work:
        """The shortest times of the layers."""
        return self.bounds.family.work(self.samples, self.least, self.schedule)

    @cached_property
    def longest(self) -> Work:
        """The longest times of the layers."""
        return self.bounds.family.work(self.samples, self.recompute, self.schedule)

    @cached_property
    def filled(self) -> tuple[Floats, Floats]:
        """Two bounds per rank: its work with the way there and back, up to the rank's own end.

        The first lasts until the first rank's last (input) gradient, the second until the rank's
        own last computation.
        """
        of, work, table = self.bounds, self.work, self.bounds.table
        m = of.sized.of_rank
        returned = work.total - work.weight
        there = table.before(returned) + 2 * of.hops + m * table.by_rank(returned)
        done = table.sum_by_rank(of.sized.first_forwards * table.by_entry(work.forward))
        first = float(work.forward.sum()) + table.after(returned - work.forward)
        return there, first - done + m * table.by_rank(work.total)

    @cached_property
    def seconds(self) -> Floats:
        """A bound for every division under any ZeRO stage; infinite for a division not allowed."""
        most = self.bounds.table.most(np.maximum(*self.filled))
        return np.where(self.bounds.allowed, most, np.inf)

    def again(self, fewest: Ints) -> Floats:
        """Seconds of every entry to recompute the fewest blocks for a microbatch."""
        table = self.bounds.table
        once = self.bounds.family.repeated_seconds(self.samples, self.schedule)
        found: Floats = once * np.minimum(table.blocks, fewest[table.division_of_entry])
        return found

    def with_keeping(self, keeping: Keeping, again: Floats | None) -> Floats:
        """The bound for every division, with the time of ZeRO, the update and recomputation."""
        bounds, table = self.bounds, self.bounds.table
        after = self._after(keeping)
        there, here = self.filled
        each = self._waiting(keeping, again)
        if each is not None:
            more = bounds.sized.of_rank * table.sum_by_rank(each)
            there, here = there + more, here + more
        pipeline = table.most(there) + after[table.first_rank]
        ends = np.maximum(pipeline, table.most(here + after))
        found: Floats = ends + table.most(bounds.update(keeping))
        return found

    def _waiting(self, keeping: Keeping, again: Floats | None) -> Floats | None:
        """Seconds of every entry that recomputation and ZeRO's exchanges add to a microbatch."""
        if keeping.zero < 2:
            return again
        table, problem = self.bounds.table, self.bounds.problem
        repeated = 0.0 if again is None else again
        gradients = self._each_gather * problem.precision.gradient_bytes + self._each_start
        weights = self._each_gather * problem.precision.weight_bytes + self._each_start
        weights = weights * (keeping.zero == 3)
        if not problem.overlap:
            alone: Floats = repeated + 2 * weights + gradients
            return alone
        forward = table.by_entry(self.work.forward)
        backward = table.by_entry(self.work.total - self.work.weight) - forward + repeated
        seen: Floats = np.maximum(weights - forward, 0.0)
        return repeated + seen + np.maximum(weights + gradients - backward, 0.0)

    @cached_property
    def _each_start(self) -> Floats:
        start, _, expert_start, _ = self.bounds.rates[:, self.bounds.table.rank_of_entry]
        found: Floats = start + np.where(self._each_expert > 0, expert_start, 0.0)
        return found

    @cached_property
    def _each_gather(self) -> Floats:
        _, per_byte, _, expert_per_byte = self.bounds.rates[:, self.bounds.table.rank_of_entry]
        shared = self.bounds.table.by_entry(self.bounds.family.parameters)
        found: Floats = shared * per_byte + self._each_expert * expert_per_byte
        return found

    @cached_property
    def _each_expert(self) -> Floats:
        return self.bounds.table.by_entry(self.bounds.family.expert_parameters)

    def _after(self, keeping: Keeping) -> Floats:
        """Every rank's exchange of gradients and weights, beside the ``longest`` possible work."""
        problem, layers = self.bounds.problem, self._layers
        gradients, weights = self._gathers
        alone = np.zeros(len(layers))
        if keeping.zero >= 2 and problem.overlap:
            forward, backward = self._forward_and_backward(self.work)
            alone += np.minimum(gradients / layers, backward)
            alone += np.minimum(weights / layers, forward) * (keeping.zero == 3)
        if keeping.zero == 3:
            return alone
        gradients = {0: 2, 1: 1, 2: 0}[keeping.zero] * gradients
        weights = min(keeping.zero, 1) * weights
        if not problem.overlap:
            return gradients + weights
        first, last = self._longest
        seen: Floats = np.maximum(gradients - last, gradients / layers)
        return alone + seen + np.maximum(weights - first, weights / layers)

    @cached_property
    def _layers(self) -> Floats:
        return self.bounds.table.by_rank(np.ones(len(self.work.total)))

    def _forward_and_backward(self, work: Work) -> tuple[Floats, Floats]:
        forward = self.bounds.table.by_rank(work.forward)
        return forward, self.bounds.table.by_rank(work.total) - forward

    @cached_property
    def _longest(self) -> tuple[Floats, Floats]:
        return self._forward_and_backward(self.longest)

    @cached_property
    def _gathers(self) -> tuple[Floats, Floats]:
        """Gatherings of every rank's gradients and weights, in the placement where quicker."""
        bounds, precision = self.bounds, self.bounds.problem.precision
        start, per_byte, expert_start, expert_per_byte = bounds.rates
        start = start + np.where(bounds.expert > 0, expert_start, 0.0)
        each = bounds.shared * per_byte + bounds.expert * expert_per_byte
        return start + each * precision.gradient_bytes, start + each * precision.weight_bytes

    def layout(self, division: int, keeping: Keeping) -> Layout:
        """The layout of a division."""
        table, split = self.bounds.table, self.bounds.family.split
        ends = int(table.first[division]), int(table.last[division])
        return Layout(
            pipeline=int(table.pipeline[division]),
            tensor=split.tensor,
            context=split.context,
            data=int(self.bounds.sized.data[division]),
            expert=split.expert,
            microbatch=self.samples,
            chunks=int(table.chunks[division]),
            schedule=self.schedule,
            recompute=self.recompute,
            sequence_parallel=split.sequence_parallel,
            zero=keeping.zero,
            offload_optimizer=keeping.offload,
            first_blocks=None if table.is_even[division] else ends[0],
            last_blocks=None if table.is_even[division] else ends[1],
        )


@dataclass(frozen=True, slots=True)
class Divided:
    """The divisions of a choice that may fit, in the ``order`` of their bounds."""

    choice: Choice
    keeping: Keeping
    bound: Floats
    fewest: Ints | None
    order: Ints

    def some(self, division: int) -> tuple[int, int] | None:
        """The fewest and the most blocks of a stage to recompute; None if that is not chosen."""
        if self.fewest is None:
            return None
        most = self.choice.bounds.table.most_blocks
        return int(self.fewest[division]), int(most[division])


def divided(
    choice: Choice, keeping: Keeping, room: Floats, least: int | None, worst: float, differs: Bools
) -> Divided | None:
    """The divisions with ``room`` for activations and a bound below ``worst``; None if none is.

    At least ``least`` blocks of a stage are recomputed; with None all are as the choice says. Only
    divisions that ``differs`` marks are considered.
    """
    bounds, fewest, again = choice.bounds, None, None
    if least is not None:
        fewest = bounds.fewest(bounds.kept("none") - room, least)
        again = choice.again(fewest)
        fits = fewest <= bounds.table.most_blocks
    else:
        fits = bounds.fits(bounds.kept(choice.recompute) - room)
    fits &= differs & (choice.seconds < worst)
    if not fits.any():
        return None
    bound = choice.with_keeping(keeping, again)
    found = np.flatnonzero(fits & (bound < worst))
    if not len(found):
        return None
    return Divided(choice, keeping, bound, fewest, found[np.argsort(bound[found], kind="stable")])
