"""A microbatch, its recomputation and schedule: bounds on the time of all their pipelines.

Lower bounds of all divisions of a pipeline at once, for layers that are divided in one way.

The arguments are those of ``Parts.least_seconds`` and ``Parts.least_bytes``. Arrays are by
division, by (division, rank), or by entry.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.schedules import FORMS, Schedule
from stagewright.formulations.parallelism.states import state_rule
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.models.modules import OFFLOAD
from stagewright.graphs.models.shards import Recompute
from stagewright.solvers.parallelism.divisions import Sized
from stagewright.solvers.parallelism.family import LayerFamily, LayerParameters, SplitLayerWork

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where states are kept: ZeRO's stage, and whether the optimizer's state is offloaded."""

    zero: int
    offload: bool


class Bounds:
    """Bounds for the layers of a family and the divisions of a microbatch."""

    def __init__(self, family: LayerFamily, sized: Sized) -> None:
        self.family, self.sized, self.table = family, sized, sized.table
        self.problem = family.problem
        self.of = self.table.division_of_rank

    @cached_property
    def allowed(self) -> Bools:
        """Divisions in which the experts can be divided evenly."""
        return self.family.can_divide_experts(self.sized.data, self.sized.schedule)

    # Memory.

    @cached_property
    def held(self) -> LayerParameters:
        """Every rank's parameters."""
        return self.family.parameters.each(self.table.by_rank)

    @cached_property
    def trained(self) -> LayerParameters:
        """Every rank's parameters that are trained."""
        if self.family.trained is self.family.parameters:
            return self.held
        return self.family.trained.each(self.table.by_rank)

    def _part(self, of: LayerParameters) -> Floats:
        """A rank's part of its parameters if ranks with equal parameters divide them."""
        split = self.family.split
        ranks = split.context * self.sized.data
        experts = np.maximum(1, split.tensor * ranks // split.expert)
        found: Floats = of.shared / ranks[self.of] + of.expert / experts[self.of]
        return found

    @cached_property
    def _trained_part(self) -> Floats:
        return self._part(self.trained)

    @cached_property
    def alone(self) -> Bools:
        """Divisions in which no two ranks have the same parameters."""
        return self.family.are_alone(self.sized.data)

    def room(self, memory: float, keeping: Keeping) -> Floats:
        """Bytes that every rank has for activations."""
        room = np.full(len(self.of), memory - self.problem.reserve_bytes)
        alone, in_pipeline = (self._states(keeping, one) for one in (False, True))
        room -= np.where(self.table.pipeline[self.of] > 1, in_pipeline, alone)
        return room

    def _states(self, keeping: Keeping, in_pipeline: bool) -> Floats:
        """Bytes of every rank's states, if all are in pipelines or none is."""
        rule = state_rule(
            self.problem, keeping.zero, offload=keeping.offload, in_pipeline=in_pipeline
        )
        part, whole = self._trained_part, self.trained.all
        each = (rule.weights, rule.gradients, rule.optimizer)
        found = sum((size * (part if one else whole) for size, one in each), np.zeros(len(whole)))
        if self.trained is self.held:
            return found
        divided = rule.weights[1]
        every = self._part(self.held) if divided else self.held.all
        frozen: Floats = every - (part if divided else whole)
        return found + frozen * self.problem.precision.weight_bytes

    def kept(self, recompute: Recompute) -> Floats:
        """Bytes of activations that every rank keeps at the least."""
        saved = self.table.by_entry(self.family.saved(recompute))
        return self.table.sum_by_rank(self.sized.flying * saved)

    def fits(self, short: Floats) -> Bools:
        """Which divisions may fit, if every rank is ``short`` of so many bytes."""
        found: Bools = self.table.most(short) <= 0
        return found

    def fewest(self, short: Floats, least: int) -> Ints:
        """A lower bound on the blocks of every stage that are recomputed, ``least`` or more.

        A block frees at most ``LayerFamily.freed`` of every sample of its stage. Where even all
        blocks are too few the number is larger than that of any stage.
        """
        table, each = self.table, self.family.freed
        needed = short * (1 - ROUNDING) / (each * np.maximum(self.sized.flying_with_blocks, 1))
        found = np.maximum(least, np.ceil(table.most(needed))).astype(np.int64)
        enough = self.fits(short - each * self.sized.flying_blocks)
        return np.where(enough, np.minimum(found, table.most_blocks), table.most_blocks + 1)

    # Time.

    @cached_property
    def rates(self) -> Floats:
        """(4, ranks) start and rate of gathering shared and experts' parameters, at the least."""
        found: Floats = self.family.rates(self.table.pipeline, self.sized.schedule)[2:, self.of]
        return found

    @cached_property
    def hops(self) -> Floats:
        """Seconds from the first rank to every other, for the nearer of the placements."""
        found: Floats = self.hop_seconds(self.table.pipeline)[self.of] * self.table.rank
        return found

    def hop_seconds(self, pipelines: Ints) -> Floats:
        """Seconds from a rank to the next, for pipelines of so many ranks."""
        start, per_byte = self.family.rates(pipelines, self.sized.schedule)[:2]
        width = self.family.shares.sent / self.family.split.tensor
        moved = self.sized.samples * width * self.problem.precision.activation_bytes
        found: Floats = start + per_byte * moved
        return found

    def update(self, keeping: Keeping) -> Floats:
        """Seconds of every rank's update; none where the optimizer is offloaded."""
        if keeping.offload:
            return np.zeros(len(self.of))
        number = self._trained_part if keeping.zero else self.trained.all
        return self.problem.processor.update_seconds(number)


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
    def work(self) -> SplitLayerWork:
        """The shortest times of the layers."""
        return self.bounds.family.work(self.samples, self.least, self.schedule)

    @cached_property
    def longest(self) -> SplitLayerWork:
        """The longest times of the layers, which show all of their exchange."""
        shown: Schedule = "zero-bubble" if FORMS[self.schedule].is_split else "1f1b"
        return self.bounds.family.work(self.samples, self.recompute, shown)

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
        """Seconds of every entry that recomputation and ZeRO's exchanges add to a microbatch.

        What pairs hide is not known by stage, and so not what ZeRO's exchanges add to the rest.
        """
        if keeping.zero < 2 or FORMS[self.schedule].pairs:
            return again
        table, problem = self.bounds.table, self.bounds.problem
        repeated = 0.0 if again is None else again
        family, sizes = self.bounds.family, problem.precision
        gradients = self._each_gather(family.trained, sizes.gradient_bytes)
        weights = np.zeros_like(gradients)
        if keeping.zero == 3:
            weights = self._each_gather(family.parameters, sizes.weight_bytes)
        if not problem.overlap:
            alone: Floats = repeated + 2 * weights + gradients
            return alone
        forward = table.by_entry(self.work.forward)
        backward = table.by_entry(self.work.total - self.work.weight) - forward + repeated
        seen: Floats = np.maximum(weights - forward, 0.0)
        return repeated + seen + np.maximum(weights + gradients - backward, 0.0)

    def _each_gather(self, of: LayerParameters, bytes_each: float) -> Floats:
        """Seconds of every entry to gather its parameters."""
        table = self.bounds.table
        return self._gather(of.each(table.by_entry), self._entry_rates, bytes_each)

    @cached_property
    def _entry_rates(self) -> Floats:
        found: Floats = self.bounds.rates[:, self.bounds.table.rank_of_entry]
        return found

    @staticmethod
    def _gather(of: LayerParameters, rates: Floats, bytes_each: float) -> Floats:
        """Seconds of gathering parameters, in the placement where quicker."""
        start, per_byte, expert_start, expert_per_byte = rates
        starts = np.where(of.shared > 0, start, 0.0) + np.where(of.expert > 0, expert_start, 0.0)
        each = of.shared * per_byte + of.expert * expert_per_byte
        found: Floats = starts + each * bytes_each
        return found

    def _after(self, keeping: Keeping) -> Floats:
        """Every rank's exchange of gradients and weights, beside the ``longest`` possible work."""
        problem, layers = self.bounds.problem, self._layers
        bounds, sizes = self.bounds, problem.precision
        gradients = self._gather(bounds.trained, bounds.rates, sizes.gradient_bytes)
        gathered = bounds.held if keeping.zero == 3 else bounds.trained
        weights = self._gather(gathered, bounds.rates, sizes.weight_bytes)
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
            microbatch=self.samples,
            chunks=int(table.chunks[division]) // copies,
            schedule=self.schedule,
            recompute=self.recompute,
            sequence_parallel=split.sequence_parallel,
            zero=keeping.zero,
            offload_optimizer=keeping.offload,
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
    choice: Choice, keeping: Keeping, room: Floats, least: int | None, worst: float, differs: Bools
) -> DividedChoice | None:
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
    return _ordered(choice, keeping, fewest, again, fits & differs, worst)


def divided_by_modules(
    choice: Choice, keeping: Keeping, room: Floats, modules: Recompute, worst: float, differs: Bools
) -> DividedChoice | None:
    """As :func:`divided`, with all blocks recomputing modules; or with offload, in one stage."""
    bounds, of = choice.bounds, choice.bounds.family
    if modules == OFFLOAD:
        differs = differs & (bounds.table.pipeline == 1)
    differs = differs & bounds.fits(bounds.kept(modules) - room)
    if not differs.any():
        return None
    longer = of.work(choice.samples, modules, choice.schedule).total - choice.work.total
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
    fits = fits & (choice.seconds < worst)
    if not fits.any():
        return None
    bound = choice.with_keeping(keeping, again)
    found = np.flatnonzero(fits & (bound < worst))
    if not len(found):
        return None
    return DividedChoice(
        choice, keeping, bound, fewest, found[np.argsort(bound[found], kind="stable")]
    )
