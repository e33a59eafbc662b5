"""Joint partition, replication and mapping as a search tree of prefixes with lower bounds.

A prefix is the first stages of a plan; its children append one stage. Every contiguous partition
with every choice of disjoint device sets (devices may stay idle, stages split their microbatches)
is reached once, up to symmetries of the cluster. A bound holds for all schedules of all plans below
the prefix. Notation as in :mod:`bounds`: head, round trip, tail.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stagewright.formulations.pipelines.bounds.relaxation import Relaxation, relax
from stagewright.formulations.pipelines.bppm import StageChoice, range_sums
from stagewright.formulations.plans.memory import in_flight_limit
from stagewright.formulations.plans.pipeline import PipelineProblem, remembered
from stagewright.formulations.prices.collectives import all_reduce_pace, paced_seconds
from stagewright.graphs.documents.arrays import Floats

Devices = tuple[int, ...]

JOINT_SEARCH = "joint branch and bound with CP-SAT"
MARGIN = 1e-9  # relative; differences of prefix sums are rounded


class PrefixStage(NamedTuple):
    """The times of a stage in a prefix.

    ``sends`` is the time of a microbatch on the previous channel, in both directions; ``head``,
    ``tail`` and ``limit`` (in flight, at most M) as in
    :mod:`stagewright.formulations.pipelines.bounds.stages`.
    """

    forward: float
    backward: float
    sends: float
    limit: int
    head: float
    tail: float


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The first stages of a plan, and a lower ``bound`` on all plans with these first stages.

    ``taken[c]`` lists the number of devices of class c in each stage.
    """

    stages: tuple[StageChoice, ...]
    placed: tuple[PrefixStage, ...]
    taken: tuple[tuple[int, ...], ...]
    bound: float

    @property
    def layers(self) -> int:
        """The number of layers placed."""
        return self.stages[-1].stop if self.stages else 0


class Rest(NamedTuple):
    """Lower bounds for the layers from l on, on at most d devices; entries [d, l].

    All three follow the same recursion over the next stage of the relaxed problem
    (:mod:`relaxation`); inf if nothing fits.

    Attributes
    ----------
    path
        Forward and backward of one microbatch, shape (V + 1, L + 1).
    fill
        The largest, over stages and channels, of forward and backward of one microbatch through
        the stages before, plus M microbatches on the stage or channel.
    reduced
        The forward path to a stage, plus M microbatches on it, its all-reduce and its update.
    """

    path: Floats
    fill: Floats
    reduced: Floats


@dataclass(frozen=True)
class JointPlanning:
    """The search tree of all plans of ``problem``."""

    problem: PipelineProblem

    @cached_property
    def root(self) -> Prefix:
        """The empty prefix; its bound holds for every plan of the tree."""
        size = len(self.problem.cluster)
        bound = max(float(table[size, 0]) for table in self.rest)
        return Prefix((), (), tuple(() for _ in self.classes), bound)

    @cached_property
    def classes(self) -> tuple[tuple[int, ...], ...]:
        """Classes of interchangeable devices."""
        classes: list[list[int]] = []
        for v in range(len(self.problem.cluster)):
            home = next((c for c in classes if _can_trade(self.problem, c[:1], [v])), None)
            if home is None:
                classes.append([v])
            else:
                home.append(v)
        return tuple(tuple(members) for members in classes)

    @cached_property
    def like(self) -> tuple[int, ...]:
        """Per class the first class that is interchangeable with it (identical servers)."""
        first: list[int] = []
        for c, members in enumerate(self.classes):
            pairs = (d for d in range(c) if _can_trade(self.problem, self.classes[d], members))
            first.append(next(pairs, c))
        return tuple(first)

    @cached_property
    def relaxed(self) -> Relaxation:
        """The relaxed problem: the best link, kind and memory everywhere."""
        return relax(self.problem)

    @cached_property
    def rest(self) -> Rest:
        """Bounds on the layers after a prefix."""
        return _rest(self.relaxed, len(self.problem.cluster))

    def children(
        self, prefix: Prefix, over: Callable[[], bool] = lambda: False
    ) -> Iterator[Prefix]:
        """Yield the prefixes with one more stage that can be completed, until ``over``."""
        layers = len(self.problem.chain)
        most = self.problem.most_replicas(prefix.layers, prefix.layers + 1)
        for counts in self._counts(prefix.taken, most):
            if over():
                return
            taken = tuple((*c, n) for c, n in zip(prefix.taken, counts, strict=True))
            devices = self._devices(prefix.taken, counts)
            for stop in range(prefix.layers + 1, layers + 1):
                child = self._child(prefix, StageChoice(prefix.layers, stop, devices), taken)
                if child is not None and child.bound < np.inf:
                    yield child

    def _counts(self, taken: tuple[tuple[int, ...], ...], most: int) -> Iterator[tuple[int, ...]]:
        """Yield the numbers of devices of every class for the next stage, 1 to ``most`` in total.

        Of interchangeable classes with equal use so far, an earlier class gives at least as many.
        """
        twins = [
            next((d for d in reversed(range(c)) if self._alike(taken, c, d)), None)
            for c in range(len(taken))
        ]
        left = [len(c) - sum(used) for c, used in zip(self.classes, taken, strict=True)]

        def choose(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
            c = len(chosen)
            if c == len(left):
                if any(chosen):
                    yield chosen
                return
            twin = twins[c]
            few = left[c] if twin is None else min(left[c], chosen[twin])
            for count in range(min(few, most - sum(chosen)) + 1):
                yield from choose((*chosen, count))

        return choose(())

    def _alike(self, taken: tuple[tuple[int, ...], ...], c: int, d: int) -> bool:
        return self.like[c] == self.like[d] and taken[c] == taken[d]

    def _devices(
        self, taken: tuple[tuple[int, ...], ...], counts: Sequence[int]
    ) -> tuple[int, ...]:
        """The first unused devices of every class."""
        chosen = [
            members[sum(used) : sum(used) + count]
            for members, used, count in zip(self.classes, taken, counts, strict=True)
        ]
        return tuple(sorted(v for members in chosen for v in members))

    def _child(
        self, prefix: Prefix, stage: StageChoice, taken: tuple[tuple[int, ...], ...]
    ) -> Prefix | None:
        """``prefix`` with one more stage; None if the stage cannot hold a microbatch."""
        limit, forward, backward, finish = stage_numbers(
            self.problem, stage.start, stage.stop, stage.devices
        )
        if limit < 1:
            return None
        there = back = head = 0.0
        tail = finish
        if prefix.stages:
            last = prefix.placed[-1]
            ends = prefix.stages[-1].devices, stage.devices
            there, back = _transfer_seconds(self.problem, stage.start, *ends)
            head = last.head + last.forward + there
            tail = max(finish, back + last.backward + last.tail)
        one = PrefixStage(forward, backward, there + back, limit, head, tail)
        placed = (*prefix.placed, one)
        unused = len(self.problem.cluster) - sum(map(sum, taken))
        bound = max(prefix.bound, self._bound(placed, stage.stop, len(stage.devices), unused))
        return Prefix((*prefix.stages, stage), placed, taken, bound)

    def _bound(self, placed: Sequence[PrefixStage], stop: int, senders: int, unused: int) -> float:
        """The largest bound from placed stages, channels, and the remaining layers."""
        last, total = placed[-1], self.problem.microbatches
        path = bound = 0.0
        if stop < len(self.problem.chain):
            if unused == 0:
                return np.inf
            form = self.relaxed
            share = float(form.boundary[stop]) / (senders * unused)
            send = paced_seconds(share, form.seconds_per_byte, form.latency)
            path = 2 * send + float(self.rest.path[unused, stop])
            around = last.head + last.forward + last.backward + last.tail
            bound = max(
                around + 2 * send * total,
                around + 2 * send + float(self.rest.fill[unused, stop]),
                last.head + last.forward + send + float(self.rest.reduced[unused, stop]),
            )
        trip = path  # from the end of a stage's forward to the start of its backward
        for stage, before in zip(placed[::-1], (*placed[-2::-1], None), strict=True):
            trip += stage.forward
            bound = max(bound, _stage_bound(stage, trip, total))
            if before is not None:
                around = before.head + before.forward + before.backward + before.tail
                bound = max(bound, around + total * stage.sends)
            trip += stage.backward + stage.sends
        return bound


def _stage_bound(stage: PrefixStage, trip: float, total: int) -> float:
    """The bounds by warm-up and drain and by in-flight slots, as in :mod:`bounds`."""
    limit = min(stage.limit, total)
    warm_up = max(0.0, trip - limit * stage.forward)
    drain = max(0.0, trip - stage.forward - (limit - 1) * stage.backward)
    idle = warm_up + drain if total > limit else max(warm_up, drain)
    load = total * (stage.forward + stage.backward) + idle
    slots = -(-total // limit) * (trip + stage.backward)
    return stage.head + max(load, slots) + stage.tail


def _can_trade(problem: PipelineProblem, ones: Sequence[int], others: Sequence[int]) -> bool:
    """Whether swapping these devices pairwise leaves the cluster unchanged."""
    if len(ones) != len(others):
        return False
    swapped = np.arange(len(problem.cluster))
    swapped[list(ones)], swapped[list(others)] = others, ones
    devices, cluster = problem.cluster.devices, problem.cluster
    identical = all(
        (devices[u].kind, devices[u].memory_bytes) == (devices[v].kind, devices[v].memory_bytes)
        for u, v in zip(ones, others, strict=True)
    )
    return identical and all(
        np.array_equal(matrix, matrix[np.ix_(swapped, swapped)])
        for matrix in (cluster.bandwidth, cluster.latency)
    )


@remembered
def stage_numbers(
    problem: PipelineProblem, start: int, stop: int, devices: Devices
) -> tuple[int, float, float, float]:
    """The in-flight limit of a stage; its forward, its backward, and what follows, in seconds."""
    place = start, stop, devices
    times = problem.compute_seconds(*place)
    return in_flight_limit(problem, *place), *times, problem.finish_seconds(*place)


_transfer_seconds = remembered(PipelineProblem.transfer_seconds)


class _StageTimes(NamedTuple):
    """Times of a stage of layers [l, l') on r devices, entries [l, l']; inf where it does not fit.

    ``compute`` is the time of forward and backward, ``load`` is M times ``compute``, and
    ``reduced`` adds the all-reduce and the optimizer step to ``load``.
    """

    forward: Floats
    compute: Floats
    load: Floats
    reduced: Floats


def _rest(form: Relaxation, devices: int) -> Rest:
    """Compute the tables for d = 0 .. ``devices``; the next stage has r devices and ends at l'."""
    replicas, layers = form.forward.shape[0] - 1, form.forward.shape[1] - 1
    stages = {r: _stages(form, r) for r in range(1, replicas + 1)}
    rest = Rest(*(np.full((devices + 1, layers + 1), np.inf) for _ in range(3)))
    for table in rest:
        table[:, layers] = 0.0
    for d in range(1, devices + 1):
        for r in range(1, min(d, replicas) + 1):
            rows = _next_stage(form, rest, stages[r], r, d - r)
            for table, row in zip(rest, rows, strict=True):
                np.minimum(table[d, :layers], row[:layers], out=table[d, :layers])
    return rest


def _next_stage(
    form: Relaxation, rest: Rest, stages: _StageTimes, r: int, others: int
) -> tuple[Floats, Floats, Floats]:
    """Rows of :class:`Rest` for a next stage of r devices, with at most ``others`` after it."""
    # The channel after the stage (none after the last layer); without devices the rest is inf.
    receivers = min(max(others, 1), form.forward.shape[0] - 1)
    shares = form.share_bytes(form.boundary, r * receivers)
    send = paced_seconds(shares, form.seconds_per_byte, form.latency)
    send[-1] = 0.0
    rest_fill = np.maximum(2 * form.microbatches * send, 2 * send + rest.fill[others])
    path = stages.compute + (2 * send + rest.path[others])
    fill = np.maximum(stages.load, stages.compute + rest_fill)
    reduced = np.maximum(stages.reduced, stages.forward + (send + rest.reduced[others]))
    return path.min(axis=1), fill.min(axis=1), reduced.min(axis=1)


def _stages(form: Relaxation, r: int) -> _StageTimes:
    forward = range_sums(form.forward[r])
    parameters = range_sums(form.parameters)
    needed = form.state_factor[r] * parameters + range_sums(form.saved[r])
    fits = np.triu(needed <= form.memory * (1 + MARGIN), 1)
    fits &= form.first[r][None, :] <= np.arange(len(form.parameters))[:, None]
    compute = np.where(fits, forward + range_sums(form.backward[r]), np.inf)
    load = form.microbatches * compute
    ring = paced_seconds(parameters, *all_reduce_pace(r, form.seconds_per_byte, form.latency))
    return _StageTimes(forward, compute, load, load + ring + range_sums(form.update))
