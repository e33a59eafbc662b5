"""The best layouts of a training problem, by branch and bound over all of a space.

A layout is chosen in five steps, each with a lower bound on the time of all layouts below it:

1. how layers are divided (t, c, e, sequence parallelism): the work of a sample in the largest
   microbatch, without recomputation, spread evenly over all ranks;
2. microbatch and recomputation: the same with their times, since p d = N / (t c) whatever p is;
3. pipeline, chunks, ends: for every rank r the time to reach it and to return from it, and all its
   work: fill_r + m w_r (no rank computes before its first input, and after its last backward those
   of the stages before it follow);
4. ZeRO, placement, offload: the same with ZeRO's exchanges, and in addition the sum of gradients of
   the first rank, which ends last, and the update (``Parts.least_seconds``);
5. the time of the layout itself (``estimate.evaluate``).

Nodes are taken by their bound. When the least bound is not below the k-th best time, the best k are
those of the whole space. Memory prunes at steps 3 and 5.
"""

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from stagewright.formulations.forms.answers import StopToken, is_stopped
from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.exchanges import send_seconds
from stagewright.formulations.parallelism.layer_times import layer_time
from stagewright.formulations.parallelism.layout import Layout, Placement
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


@dataclass(frozen=True)
class Found:
    """The best layouts, by time.

    No layout of the space that fits is faster than ``bound``; if ``proved``, the ``best`` are the
    fastest of the space. ``examined`` layouts were evaluated.
    """

    best: tuple[Estimate, ...]
    bound: float
    proved: bool
    examined: int
    seconds: float


Part = Callable[[], "Iterator[Child]"]
Child = tuple[float, Part]
"""A part of the space: the bound on its layouts' time, and what divides it further."""


def search(
    problem: TrainingProblem,
    space: Space | None = None,
    *,
    keep: int = 10,
    memory_bytes: float | None = None,
    stop: StopToken | None = None,
) -> Found:
    """The ``keep`` fastest layouts that fit, proved so unless ``stop`` is set first.

    ``memory_bytes`` takes the place of the devices' memory.
    """
    started = time.perf_counter()
    tree = _Tree(problem, space or Space(), keep, memory_bytes)
    numbers = itertools.count()
    heap = [(bound, next(numbers), part) for bound, part in tree.families()]
    heapq.heapify(heap)
    while heap and heap[0][0] < tree.worst and not is_stopped(stop):
        _, _, part = heapq.heappop(heap)
        for bound, inner in part():
            if bound < tree.worst:
                heapq.heappush(heap, (bound, next(numbers), inner))
    open_bound = heap[0][0] if heap else math.inf
    return Found(
        best=tuple(tree.best),
        bound=min(open_bound, tree.best[0].seconds if tree.best else math.inf),
        proved=open_bound >= tree.worst,
        examined=tree.examined,
        seconds=time.perf_counter() - started,
    )


class _Tree:
    """The space as a tree, and the best layouts found in it."""

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
                for recompute in self.space.recomputes(self.problem):
                    work = self._work(split, samples, recompute)
                    bound = self._spread(split, samples, work)
                    yield bound, self._of_work(split, samples, recompute, work)

        return parts

    def _work(self, split: Split, samples: int, recompute: Recompute) -> Floats:
        """(L + 2,) seconds of forward and backward of every layer on a microbatch."""
        of = shares(self.problem, split)

        def one(share: Share) -> float:
            times = layer_time(self.problem, share, split, samples, recompute)
            return times.forward + times.backward

        kinds = np.array([one(kind) for kind in of.kinds])
        return np.concatenate(([one(of.embedding)], kinds[list(of.blocks)], [one(of.head)]))

    def _spread(self, split: Split, samples: int, work: Floats) -> float:
        """All work spread evenly over the ranks: each replica has B / d samples and p ranks."""
        replicas = self.problem.fabric.devices / (split.tensor * split.context)
        return float(work.sum()) * self.problem.batch / samples / replicas

    def _table(self, split: Split) -> Table:
        """The divisions for the devices that are left beside t and c."""
        left = self.problem.fabric.devices // (split.tensor * split.context)
        if left not in self._tables:
            blocks = self.problem.architecture.layers
            pipelines = [one for one in chosen(self.space.pipeline, left) if one <= blocks + 2]
            self._tables[left] = Table(divisions(blocks, pipelines, self.space.chunks))
        return self._tables[left]

    def _of_work(self, split: Split, samples: int, recompute: Recompute, work: Floats) -> Part:
        """Step 3."""

        def parts() -> Iterator[Child]:
            table = self._table(split)
            if not table.every:
                return
            data = self.problem.fabric.devices // (split.tensor * split.context) // table.pipeline
            m = self.problem.batch // (samples * data)
            allowed = self._allowed(split, samples, table, data)
            pairs = dict(zip(table.pipeline.tolist(), data.tolist(), strict=True))
            near = {p: self._hop(split, samples, p, d) for p, d in pairs.items()}
            hops = np.array([near[p] for p in table.pipeline.tolist()])
            of = table.division_of_rank
            filled = table.before(work) + 2 * table.rank * hops[of]
            bounds = table.most(filled + m[of] * table.by_rank(work))
            fits = self._least_memory(split, samples, recompute, table, data, m) <= self.memory
            for i in np.flatnonzero(allowed & fits & (bounds < self.worst)):
                layout = Layout(
                    pipeline=int(table.pipeline[i]),
                    tensor=split.tensor,
                    context=split.context,
                    data=int(data[i]),
                    expert=split.expert,
                    microbatch=samples,
                    chunks=int(table.chunks[i]),
                    recompute=recompute,
                    sequence_parallel=split.sequence_parallel,
                    first_blocks=table.every[i].ends[0],
                    last_blocks=table.every[i].ends[1],
                )
                yield float(bounds[i]), self._of_division(layout)

        return parts

    def _allowed(self, split: Split, samples: int, table: Table, data: Ints) -> Bools:
        """The rules that do not follow from the choice of the values."""
        whole = self.problem.batch % (samples * data) == 0
        m = self.problem.batch // (samples * data)
        in_groups = (table.chunks == 1) | (m % table.pipeline == 0)
        shared = split.tensor * split.context * data % split.expert == 0
        wanted = np.isin(data, self.space.data) if self.space.data else np.full(len(data), True)
        found: Bools = whole & (m > 0) & in_groups & shared & wanted
        return found

    def _hop(self, split: Split, samples: int, pipeline: int, data: int) -> float:
        """The nearer of the placements."""
        width = shares(self.problem, split).kinds[0].width / split.tensor
        moved = samples * width * self.problem.precision.activation_bytes
        inside = split.tensor * split.context
        fabric = self.problem.fabric
        return min(
            send_seconds(fabric, stride, pipeline, moved) for stride in (inside, inside * data)
        )

    def _least_memory(
        self, split: Split, samples: int, recompute: Recompute, table: Table, data: Ints, m: Ints
    ) -> Floats:
        """A lower bound on the peak of every division: the most that ZeRO and offload can save."""
        precision, of = self.problem.precision, shares(self.problem, split)
        size, zero = precision.activation_bytes, max(self.space.zero)
        saved = _by_layer(of, lambda one: samples * one.saved_bytes(size, recompute))
        kept = precision.optimizer_bytes * (True not in self.space.offload)
        ranks = split.context * data
        own = [
            table.by_rank(_by_layer(of, lambda one: one.parameters)),
            table.by_rank(_by_layer(of, lambda one: one.expert_parameters)),
        ]
        copies = (ranks, np.maximum(1, split.tensor * ranks // split.expert))
        held_bytes = np.zeros(len(table.rank))
        for number, by in zip(own, copies, strict=True):
            part = number / by[table.division_of_rank]
            for bytes_each, stage in (
                (precision.weight_bytes, 3),
                (precision.gradient_bytes, 2),
                (kept, 1),
            ):
                held_bytes += bytes_each * (part if zero >= stage else number)
        activations = table.sum_by_rank(table.in_flight(m) * table.by_entry(saved))
        return table.most(held_bytes + activations) + self.problem.reserve_bytes

    def _of_division(self, layout: Layout) -> Part:
        """Step 4."""

        def parts() -> Iterator[Child]:
            first = Parts(self.problem, layout)
            for zero, offload in itertools.product(self.space.zero, self.space.offload):
                if zero and layout.data * layout.context == 1:
                    continue  # nothing to divide by: the same as without
                one = replace(layout, zero=zero, offload_optimizer=offload)
                if first.varied(one).least_bytes > self.memory:
                    continue
                for placement in self._placements(layout):
                    placed = replace(one, placement=placement)
                    yield first.varied(placed).least_seconds, self._of_layout(placed)

        return parts

    def _placements(self, layout: Layout) -> tuple[Placement, ...]:
        if (
            layout.data == 1
            or layout.pipeline == 1
            or layout.expert > layout.tensor * layout.context
        ):
            return ("data-inside",)
        return self.space.placements

    def _of_layout(self, layout: Layout) -> Part:
        """Step 5."""

        def parts() -> Iterator[Child]:
            found = evaluate(self.problem, layout, compiled_walk())
            self.examined += 1
            if found.peak_bytes <= self.memory and found.seconds < self.worst:
                self.best = sorted([*self.best, found], key=lambda one: one.seconds)[: self.keep]
            return iter(())

        return parts


def _by_layer(of: Shares, quantity: Callable[[Share], float]) -> Floats:
    """(L + 2,) a quantity of every layer."""
    kinds = np.array([quantity(kind) for kind in of.kinds])
    return np.concatenate(([quantity(of.embedding)], kinds[list(of.blocks)], [quantity(of.head)]))
