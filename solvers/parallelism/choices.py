"""Recomputation and schedule: bounds on the time of all their pipelines, of all microbatches.

Rank r computes nothing before the stages 0 to r - 1 have done their first forward. Its last
backward (or input gradient) is of a stage with at least r stages before it, whose follow, and rank
0 then exchanges its gradients. So an iteration takes at least these and all that rank r computes,
without its weight gradients where backwards are split. Its first backward comes when the first
microbatch has passed all stages and come back. Until then rank r has done the forwards of its
warm-up and one more; the rest, and its exchange, follow.

Arrays are by division, by (division, rank), or by entry.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.schedules import FORMS, Schedule
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.models.modules import OFFLOAD
from stagewright.graphs.models.shards import Recompute
from stagewright.solvers.parallelism.bounds import Bounds, Keeping
from stagewright.solvers.parallelism.family import LayerParameters, SplitLayerWork


@dataclass(frozen=True, eq=False)
class Choice:
    """The choices of the steps before the pipeline is divided.

    Layers recompute at least ``least`` and at most ``recompute``.
    """

    bounds: Bounds
    recompute: Recompute
    least: Recompute
    schedule: Schedule

    @cached_property
    def work(self) -> SplitLayerWork:
        """(sizes, L + 2) shortest times of the layers."""
        return self.works(self.least, self.schedule)

    @cached_property
    def longest(self) -> SplitLayerWork:
        """The longest times of the layers, which show all of their exchange."""
        shown: Schedule = "zero-bubble" if FORMS[self.schedule].is_split else "1f1b"
        return self.works(self.recompute, shown)

    def works(self, recompute: Recompute, schedule: Schedule) -> SplitLayerWork:
        """(sizes, L + 2) times of the layers."""
        sizes = self.bounds.sized.sizes
        every = [self.bounds.family.work(one, recompute, schedule) for one in sizes]
        return SplitLayerWork(
            np.stack([one.total for one in every]),
            np.stack([one.forward for one in every]),
            np.stack([one.weight for one in every]),
        )

    @cached_property
    def filled(self) -> Floats:
        """Two bounds per rank: its work with the way there and back, up to the rank's own end.

        The first lasts until the first rank's last (input) gradient, the second until the rank's
        own last computation. Hops are not among them.
        """
        of, work, table = self.bounds, self.work, self.bounds.table
        m = of.sized.of_rank
        returned = work.total - work.weight
        there = table.before(returned) + m * table.by_rank(returned)
        done = table.sum_by_rank(of.sized.first_forwards * table.by_entry(work.forward))
        first = work.forward.sum(axis=1)[table.size[of.of]] + table.after(returned - work.forward)
        return np.array((there, first - done + m * table.by_rank(work.total)))

    @cached_property
    def seconds(self) -> Floats:
        """A bound for every division under any ZeRO stage; infinite for a division not allowed."""
        most = self.bounds.table.most(np.max(self.filled + self.bounds.hops(None), axis=0))
        return np.where(self.bounds.allowed, most, np.inf)

    def again(self, fewest: Ints) -> Floats:
        """Seconds of every entry to recompute the fewest blocks for a microbatch."""
        table = self.bounds.table
        repeated, sizes = self.bounds.family.repeated_seconds, self.bounds.sized.sizes
        once = np.array([repeated(one, self.schedule) for one in sizes])[table.size]
        of = table.division_of_entry
        found: Floats = once[of] * np.minimum(table.blocks, fewest[of])
        return found

    def with_keeping(self, keeping: Keeping, again: Floats | None) -> Floats:
        """The bound for every division, with the time of ZeRO, the update and recomputation."""
        bounds, table = self.bounds, self.bounds.table
        after = self._after(keeping)
        there, here = self.filled + bounds.hops(keeping.placement)
        each = self._waiting(keeping, again)
        if each is not None:
            more = bounds.sized.of_rank * table.sum_by_rank(each)
            there, here = there + more + table.sum_before(each), here + more
        pipeline = table.most(there) + after[table.first_rank]
        ends = np.maximum(pipeline, table.most(here + after))
        found: Floats = ends + table.most(bounds.update(keeping))
        return found

    def _waiting(self, keeping: Keeping, again: Floats | None) -> Floats | None:
        """Seconds of every entry that recomputation and ZeRO's exchanges add to a microbatch.

        What pairs hide is not known by stage, and so not what ZeRO's exchanges add to the rest.
        """
        if keeping.zero < 2 or FORMS[self.schedule].pairs:
            return again
        bounds, table, problem = self.bounds, self.bounds.table, self.bounds.problem
        repeated = 0.0 if again is None else again
        family, sizes = bounds.family, problem.precision
        rates = bounds.rates(keeping.placement)[:, table.rank_of_entry]
        gradients = self._each_gather(family.trained, rates, sizes.gradient_bytes)
        weights = np.zeros_like(gradients)
        if keeping.zero == 3:
            weights = self._each_gather(family.parameters, rates, sizes.weight_bytes)
        if not problem.overlap:
            alone: Floats = repeated + 2 * weights + gradients
            return alone
        forward = table.by_entry(self.work.forward)
        backward = table.by_entry(self.work.total - self.work.weight) - forward + repeated
        return repeated + self._seen(forward, weights) + self._seen(backward, weights + gradients)

    def _seen(self, work: Floats, moved: Floats) -> Floats:
        """By how much an exchange beside work makes it longer; see ``StageCosts.beside``."""
        contention = self.bounds.problem.reached.contention
        found: Floats = np.maximum(moved - work, 0.0) + contention * np.minimum(work, moved)
        return found

    def _each_gather(self, of: LayerParameters, rates: Floats, bytes_each: float) -> Floats:
        """Seconds of every entry to gather its parameters."""
        return self._gather(of.each(self.bounds.table.by_entry), rates, bytes_each)

    @staticmethod
    def _gather(of: LayerParameters, rates: Floats, bytes_each: float) -> Floats:
        """Seconds of gathering parameters."""
        start, per_byte, expert_start, expert_per_byte, _ = rates
        starts = np.where(of.shared > 0, start, 0.0) + np.where(of.expert > 0, expert_start, 0.0)
        each = of.shared * per_byte + of.expert * expert_per_byte
        found: Floats = starts + each * bytes_each
        return found

    def _after(self, keeping: Keeping) -> Floats:
        """Every rank's exchange of gradients and weights, beside the ``longest`` possible work."""
        problem, layers = self.bounds.problem, self._layers
        bounds, sizes = self.bounds, problem.precision
        rates = bounds.rates(keeping.placement)
        gradients = self._gather(bounds.trained, rates, sizes.gradient_bytes)
        gathered = bounds.held if keeping.zero == 3 else bounds.trained
        weights = self._gather(gathered, rates, sizes.weight_bytes)
        alone: Floats = rates[4].copy()
        if keeping.zero >= 2 and problem.overlap:
            forward, backward = self._forward_and_backward(self.work)
            alone += np.minimum(gradients / layers, backward)
            alone += np.minimum(weights / layers, forward) * (keeping.zero == 3)
        if keeping.zero == 3:
            return alone
        gradients = {0: 2, 1: 1, 2: 0}[keeping.zero] * gradients
        weights = min(keeping.zero, 1) * weights
        if not problem.overlap:
            return alone + gradients + weights
        first, last = self._longest
        seen: Floats = np.maximum(gradients - last, gradients / layers)
        return alone + seen + np.maximum(weights - first, weights / layers)

    @cached_property
    def _layers(self) -> Floats:
        return self.bounds.table.by_rank(np.ones(self.bounds.table.layers + 2))

    def _forward_and_backward(self, work: SplitLayerWork) -> tuple[Floats, Floats]:
        forward = self.bounds.table.by_rank(work.forward)
        return forward, self.bounds.table.by_rank(work.total) - forward

    @cached_property
    def _longest(self) -> tuple[Floats, Floats]:
        return self._forward_and_backward(self.longest)

    def layout(self, division: int, keeping: Keeping) -> Layout:
        """The layout of a division."""
        table, split = self.bounds.table, self.bounds.family.split
        ends = int(table.first[division]), int(table.last[division])
        copies = FORMS[self.schedule].copies
        return Layout(
            pipeline=int(table.pipeline[division]) * copies,
            tensor=split.tensor,
            context=split.context,
            data=int(self.bounds.sized.data[division]) // copies,
            expert=split.expert,
            microbatch=int(self.bounds.sized.samples[division]),
            chunks=int(table.chunks[division]) // copies,
            schedule=self.schedule,
            recompute=self.recompute,
            sequence_parallel=split.sequence_parallel,
            zero=keeping.zero,
            offload_optimizer=keeping.offload,
            placement=keeping.placement,
            first_blocks=None if table.is_even[division] else ends[0],
            last_blocks=None if table.is_even[division] else ends[1],
        )


@dataclass(frozen=True, slots=True)
class DividedChoice:
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
    choice: Choice,
    placed: Sequence[tuple[Keeping, Bools]],
    room: Floats,
    least: int | None,
    worst: float,
) -> Iterator[DividedChoice | None]:
    """The divisions with ``room`` for activations and a bound below ``worst``; None if none is.

    At least ``least`` blocks of a stage are recomputed; with None all are as the choice says. Of
    every placement only the divisions that are marked are considered.
    """
    bounds, fewest, again = choice.bounds, None, None
    if least is not None:
        fewest = bounds.fewest(bounds.kept("none") - room, least)
        again = choice.again(fewest)
        fits = fewest <= bounds.table.most_blocks
    else:
        fits = bounds.fits(bounds.kept(choice.recompute) - room)
    for keeping, differs in placed:
        yield _ordered(choice, keeping, fewest, again, fits & differs, worst)


def divided_by_modules(
    choice: Choice, keeping: Keeping, room: Floats, modules: Recompute, worst: float, differs: Bools
) -> DividedChoice | None:
    """As :func:`divided`, with all blocks recomputing modules; or with offload, in one stage."""
    bounds = choice.bounds
    if modules == OFFLOAD:
        differs = differs & (bounds.table.pipeline == 1)
    differs = differs & bounds.fits(bounds.kept(modules) - room)
    if not differs.any():
        return None
    longer = choice.works(modules, choice.schedule).total - choice.work.total
    again = bounds.table.by_entry(longer)
    return _ordered(choice, keeping, None, again, differs, worst)


def _ordered(
    choice: Choice,
    keeping: Keeping,
    fewest: Ints | None,
    again: Floats | None,
    fits: Bools,
    worst: float,
) -> DividedChoice | None:
    """The divisions with a bound below ``worst``, in the order of their bounds."""
    if not fits.any():
        return None
    bound = choice.with_keeping(keeping, again)
    found = np.flatnonzero(fits & (bound < worst))
    if not len(found):
        return None
    return DividedChoice(
        choice, keeping, bound, fewest, found[np.argsort(bound[found], kind="stable")]
    )
