"""The space of layouts as a tree, whose parts have lower bounds; see ``search``."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.exchanges import send_seconds
from stagewright.formulations.parallelism.layer_times import LayerTime, share_time
from stagewright.formulations.parallelism.layout import Layout, Placement, Schedule
from stagewright.formulations.parallelism.parts import Parts, shares
from stagewright.formulations.parallelism.pipeline_time import Walk, walk
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.models.shards import Recompute, Share, Shares, Split
from stagewright.solvers.parallelism.divisions import Table, divisions
from stagewright.solvers.parallelism.space import Space, chosen


@cache
def compiled_walk() -> Walk:
    """The schedule's walk, compiled."""
    from numba import njit

    made: Walk = njit(cache=True)(walk)
    return made


SOME: Recompute = "full"

Part = Callable[[], "Iterator[Child]"]
Child = tuple[float, Part]
"""A part of the space: the bound on its layouts' time, and what divides it further."""


@dataclass(frozen=True, slots=True)
class _Work:
    """(L + 2,) seconds of every layer on a microbatch; ``weight`` is a part of ``total``."""

    total: Floats
    forward: Floats
    weight: Floats


@dataclass(frozen=True, slots=True)
class _Choice:
    """What steps 1 to 3 have chosen, before the division."""

    split: Split
    samples: int
    recompute: Recompute
    schedule: Schedule
    data: Ints
    microbatches: Ints


class Tree:
    """The space, and the best layouts found in it."""

    def __init__(
        self, problem: TrainingProblem, space: Space, keep: int, memory_bytes: float | None
    ) -> None:
        self.problem, self.space, self.keep = problem, space, keep
        self.memory = problem.fabric.memory_bytes if memory_bytes is None else memory_bytes
        self.best: list[Estimate] = []
        self.examined = 0
        self._tables: dict[int, Table] = {}

    @property
    def worst(self) -> float:
        """The time from which a layout is not among the best."""
        return self.best[-1].seconds if len(self.best) == self.keep else math.inf

    def families(self) -> Iterator[Child]:
        """Step 1."""
        for split in self.space.families(self.problem):
            work = self._work(split, self.problem.batch, "none")
            yield self._spread(split, self.problem.batch, work), self._of_split(split)

    def _of_split(self, split: Split) -> Part:
        """Step 2."""

        def parts() -> Iterator[Child]:
            for samples in chosen(self.space.microbatch, self.problem.batch):
                for recompute in self._recomputes:
                    # Recomputation of some blocks takes at least as long as that of none.
                    least = "none" if recompute == SOME else recompute
                    work = self._work(split, samples, least)
                    bound = self._spread(split, samples, work)
                    yield bound, self._of_work(split, samples, recompute, work)

        return parts

    @cached_property
    def _recomputes(self) -> tuple[Recompute, ...]:
        """The choices of step 2; ``SOME`` is as many blocks as necessary, from none or one on."""
        every = self.space.recomputes(self.problem)
        if SOME not in every or not self.space.partial:
            return every
        return tuple(one for one in every if one != "none")

    @property
    def _least_blocks(self) -> int:
        return 0 if "none" in self.space.recompute else 1

    def _times(
        self, split: Split, samples: int, recompute: Recompute
    ) -> Callable[[Share], LayerTime]:
        return lambda share: share_time(self.problem, share, split, samples, recompute)

    def _work(self, split: Split, samples: int, recompute: Recompute) -> _Work:
        of, times = shares(self.problem, split), self._times(split, samples, recompute)
        return _Work(
            total=_by_layer(of, lambda share: times(share).forward + times(share).backward),
            forward=_by_layer(of, lambda share: times(share).forward),
            weight=_by_layer(of, lambda share: times(share).weight),
        )

    def _spread(self, split: Split, samples: int, work: _Work) -> float:
        """All work spread evenly over the ranks: each replica has B / d samples and p ranks."""
        replicas = self.problem.fabric.devices / (split.tensor * split.context)
        return float(work.total.sum()) * self.problem.batch / samples / replicas

    def _table(self, split: Split) -> Table:
        """The divisions for the devices that are left beside t and c."""
        left = self.problem.fabric.devices // (split.tensor * split.context)
        if left not in self._tables:
            blocks = self.problem.architecture.layers
            pipelines = [one for one in chosen(self.space.pipeline, left) if one <= blocks + 2]
            self._tables[left] = Table(divisions(blocks, pipelines, self.space.chunks))
        return self._tables[left]

    def _of_work(self, split: Split, samples: int, recompute: Recompute, work: _Work) -> Part:
        """Step 3."""

        def parts() -> Iterator[Child]:
            table = self._table(split)
            if not table.every:
                return
            data = self.problem.fabric.devices // (split.tensor * split.context) // table.pipeline
            m = self.problem.batch // (samples * data)
            for schedule in self.space.schedules:
                choice = _Choice(split, samples, recompute, schedule, data, m)
                yield from self._of_choice(choice, table, work)

        return parts

    def _of_choice(self, choice: _Choice, table: Table, work: _Work) -> Iterator[Child]:
        allowed = self._allowed(choice, table)
        room = self._room(choice, table)
        fewest = None
        if choice.recompute == SOME and self.space.partial:
            fewest = self._fewest(choice, table, room)
            fits = fewest <= table.most_blocks
        else:
            kept = self._activations(choice, table, choice.recompute)
            fits = table.most(kept - room) <= 0
        bounds = self._filled(choice, table, work, fewest)
        for i in np.flatnonzero(allowed & fits & (bounds < self.worst)):
            layout = Layout(
                pipeline=int(table.pipeline[i]),
                tensor=choice.split.tensor,
                context=choice.split.context,
                data=int(choice.data[i]),
                expert=choice.split.expert,
                microbatch=choice.samples,
                chunks=int(table.chunks[i]),
                schedule=choice.schedule,
                recompute=choice.recompute,
                sequence_parallel=choice.split.sequence_parallel,
                first_blocks=table.every[i].ends[0],
                last_blocks=table.every[i].ends[1],
            )
            some = None if fewest is None else (int(fewest[i]), int(table.most_blocks[i]))
            yield float(bounds[i]), self._of_division(layout, some)

    def _allowed(self, choice: _Choice, table: Table) -> Bools:
        """The rules that do not follow from the choice of the values."""
        split, data, m = choice.split, choice.data, choice.microbatches
        whole = self.problem.batch % (choice.samples * data) == 0
        in_groups = (table.chunks == 1) | (m % table.pipeline == 0)
        shared = split.tensor * split.context * data % split.expert == 0
        wanted = np.isin(data, self.space.data) if self.space.data else np.full(len(data), True)
        bubbles = (table.pipeline > 1) | (choice.schedule == "1f1b")
        found: Bools = whole & (m > 0) & in_groups & shared & wanted & bubbles
        return found

    def _filled(self, choice: _Choice, table: Table, work: _Work, fewest: Ints | None) -> Floats:
        """The bound of step 3 for every division; ``fewest`` blocks of a stage are recomputed."""
        of, rank = table.division_of_rank, table.rank
        m, hops = choice.microbatches[of], self._hops(choice, table)[of] * rank
        again = np.zeros(len(rank))
        if fewest is not None:
            times = self._times(choice.split, choice.samples, "full")
            kinds = shares(self.problem, choice.split).kinds
            once = min(times(kind).repeated for kind in kinds)
            blocks = np.minimum(table.blocks, fewest[table.division_of_entry])
            again = once * table.sum_by_rank(blocks.astype(np.float64))
        split = choice.schedule == "zero-bubble"
        returned = work.total - work.weight if split else work.total
        all_work = m * (table.by_rank(work.total) + again)
        there = table.before(returned) + 2 * hops + m * (table.by_rank(returned) + again)
        return table.most(np.maximum(there, self._returning(choice, table, work) + all_work))

    def _returning(self, choice: _Choice, table: Table, work: _Work) -> Floats:
        """When every rank's first backward can begin, less its forwards until then.

        See ``Parts.least_seconds``; hops are left out.
        """
        split = choice.schedule == "zero-bubble"
        gradient = work.total - work.forward - (work.weight if split else 0.0)
        done = table.first_forwards(choice.microbatches, split)
        own = table.sum_by_rank(done * table.by_entry(work.forward))
        return float(work.forward.sum()) + table.after(gradient) - own

    def _hops(self, choice: _Choice, table: Table) -> Floats:
        """From stage to stage, for the nearer of the placements."""
        split, fabric = choice.split, self.problem.fabric
        width = shares(self.problem, split).kinds[0].width / split.tensor
        moved = choice.samples * width * self.problem.precision.activation_bytes
        inside = split.tensor * split.context
        near = {
            p: min(send_seconds(fabric, stride, p, moved) for stride in (inside, inside * d))
            for p, d in zip(table.pipeline.tolist(), choice.data.tolist(), strict=True)
        }
        return np.array([near[p] for p in table.pipeline.tolist()])

    def _activations(self, choice: _Choice, table: Table, recompute: Recompute) -> Floats:
        """What every rank keeps at least, in bytes."""
        of, size = shares(self.problem, choice.split), self.problem.precision.activation_bytes
        saved = _by_layer(of, lambda one: choice.samples * one.saved_bytes(size, recompute))
        flying = table.in_flight(choice.microbatches, choice.schedule == "zero-bubble")
        return table.sum_by_rank(flying * table.by_entry(saved))

    def _fewest(self, choice: _Choice, table: Table, room: Floats) -> Ints:
        """A lower bound on the blocks of every stage that must be recomputed."""
        of, size = shares(self.problem, choice.split), self.problem.precision.activation_bytes
        each = max(
            choice.samples * (one.saved_bytes(size, "none") - one.saved_bytes(size, "full"))
            for one in of.kinds
        )
        flying = table.in_flight(choice.microbatches, choice.schedule == "zero-bubble")
        short = self._activations(choice, table, "none") - room
        low = np.full(len(table.every), self._least_blocks)
        high = table.most_blocks + 1
        while (low < high).any():
            middle = (low + high) // 2
            blocks = np.minimum(table.blocks, middle[table.division_of_entry])
            freed = each * table.sum_by_rank(flying * blocks)
            enough = table.most(short - freed) <= 0
            low, high = np.where(enough, low, middle + 1), np.where(enough, middle, high)
            high = np.maximum(low, high)
        return low

    def _room(self, choice: _Choice, table: Table) -> Floats:
        """What every rank has for activations at most: with the most that ZeRO and offload save."""
        precision, of = self.problem.precision, shares(self.problem, choice.split)
        zero = max(self.space.zero)
        kept = precision.optimizer_bytes * (True not in self.space.offload)
        ranks = choice.split.context * choice.data
        shared = table.by_rank(_by_layer(of, lambda one: one.parameters))
        expert = table.by_rank(_by_layer(of, lambda one: one.expert_parameters))
        experts = np.maximum(1, choice.split.tensor * ranks // choice.split.expert)
        part = shared / ranks[table.division_of_rank] + expert / experts[table.division_of_rank]
        held = np.zeros(len(part))
        for bytes_each, stage in (
            (precision.weight_bytes, 3),
            (precision.gradient_bytes, 2),
            (kept, 1),
        ):
            held += bytes_each * (part if zero >= stage else shared + expert)
        room: Floats = self.memory - self.problem.reserve_bytes - held
        return room

    def _of_division(self, layout: Layout, some: tuple[int, int] | None) -> Part:
        """Step 4; ``some`` are the fewest and the most blocks of a stage to recompute."""

        def parts() -> Iterator[Child]:
            for zero, offload in itertools.product(self.space.zero, self.space.offload):
                if zero and layout.data * layout.context == 1:
                    continue  # nothing to divide by: the same as without
                one = replace(layout, zero=zero, offload_optimizer=offload)
                fitting = self._fitting(one, some)
                if fitting is None:
                    continue
                for placement in self._placements(layout):
                    placed = replace(fitting, placement=placement)
                    yield self._parts(placed).least_seconds, self._of_layout(placed, some)

        return parts

    def _fitting(self, layout: Layout, some: tuple[int, int] | None) -> Layout | None:
        """The layout, if it may fit, with the fewest recomputed blocks with which it does."""
        if some is None:
            return layout if self._may_fit(layout) else None
        low, high = some
        if not self._may_fit(_recomputed(layout, high, high)):
            return None
        most = high
        while low < high:
            middle = (low + high) // 2
            if self._may_fit(_recomputed(layout, middle, most)):
                high = middle
            else:
                low = middle + 1
        return _recomputed(layout, low, most)

    def _may_fit(self, layout: Layout) -> bool:
        return self._parts(layout).least_bytes <= self.memory

    def _parts(self, layout: Layout) -> Parts:
        """The parts of a layout; of the last one if they differ in ZeRO and the like alone."""
        plain = replace(layout, zero=0, offload_optimizer=False, placement="data-inside")
        if self._last is None or self._last.layout != plain:
            self._last = Parts(self.problem, plain)
        return self._last.varied(layout)

    _last: Parts | None = None

    def _placements(self, layout: Layout) -> tuple[Placement, ...]:
        alone = layout.data == 1 or layout.pipeline == 1
        if alone or layout.expert > layout.tensor * layout.context:
            return ("data-inside",)
        return self.space.placements

    def _of_layout(self, layout: Layout, some: tuple[int, int] | None) -> Part:
        """Step 5."""

        def parts() -> Iterator[Child]:
            found = evaluate(self.problem, layout, compiled_walk())
            self.examined += 1
            if found.peak_bytes <= self.memory:
                if found.seconds < self.worst:
                    several = [*self.best, found]
                    self.best = sorted(several, key=lambda one: one.seconds)[: self.keep]
            elif some is not None and _blocks(layout, some[1]) < some[1]:
                more = _recomputed(layout, _blocks(layout, some[1]) + 1, some[1])
                yield self._parts(more).least_seconds, self._of_layout(more, some)

        return parts


def _recomputed(layout: Layout, blocks: int, most: int) -> Layout:
    """The layout that recomputes so many blocks of every stage, of which it has ``most``."""
    if blocks == 0:
        return replace(layout, recompute="none", recompute_blocks=None)
    return replace(layout, recompute="full", recompute_blocks=None if blocks == most else blocks)


def _blocks(layout: Layout, most: int) -> int:
    """The inverse of :func:`_recomputed`."""
    if layout.recompute == "none":
        return 0
    return most if layout.recompute_blocks is None else layout.recompute_blocks


def _by_layer(of: Shares, quantity: Callable[[Share], float]) -> Floats:
    """(L + 2,) a quantity of every layer."""
    kinds = np.array([quantity(kind) for kind in of.kinds])
    return np.concatenate(([quantity(of.embedding)], kinds[list(of.blocks)], [quantity(of.head)]))
