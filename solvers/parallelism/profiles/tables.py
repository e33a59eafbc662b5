"""Costs of the stages of profiled pipelines, at one microbatch size and number of pipelines."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from stagewright.formulations.parallelism.profiles.pipelines import (
    ProfiledProblem,
    cut_seconds,
    even_microbatches,
    pipeline_seconds,
    ring_bytes,
)
from stagewright.graphs.documents.arrays import Floats


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """The place of a stage's replicas: groups of ``tensor`` devices of ``pool``."""

    pool: int
    tensor: int


@dataclass(frozen=True, slots=True)
class TimedStage:
    """Layers [start, stop) on ``choice`` (an index), with their times."""

    start: int
    stop: int
    choice: int
    forward: float
    backward: float
    after: float  # reduction and update


class Tables:
    """Costs of stages for a search; transfers and reductions over the fastest link.

    ``devices[c]`` are those of all replicas of a stage of choice c.
    """

    def __init__(self, problem: ProfiledProblem, samples: int, data: int) -> None:
        self.problem, self.samples, self.data = problem, samples, data
        self.layers = problem.profiles.layers
        self.counts = even_microbatches(problem.batch // samples, data)
        self.microbatches = self.counts[0]
        self.choices = [one for one in choices(problem, samples) if self._has_room(one)]
        self.devices = [data * one.tensor for one in self.choices]
        times = [problem.times(one.pool, samples, one.tensor) for one in self.choices]
        self.forward = [_running(each.forward) for each in times]
        self.backward = [_running(each.backward) for each in times]
        self.update = [_running(each.update) for each in times]
        sizes = [problem.sizes(one.tensor) for one in self.choices]
        self.parameters = [_running(np.array(each.parameters)) for each in sizes]
        self.saved = [samples * np.array(each.saved_bytes) for each in sizes]
        self.kept = [_running(each) for each in self.saved]
        self._sends: dict[tuple[int, int, int], float] = {}

    def _has_room(self, one: ReplicaPlace) -> bool:
        pool = self.problem.cluster.pools[one.pool]
        return pool.servers * (pool.devices // one.tensor) >= self.data

    @cached_property
    def capacity(self) -> tuple[int, ...]:
        """Devices of each pool."""
        return tuple(pool.servers * pool.devices for pool in self.problem.cluster.pools)

    def stages(self, stop: int, choice: int, later: int, most: float) -> Iterator[TimedStage]:
        """Stages that end before ``stop`` and fit in memory, from the shortest on.

        ``later`` stages follow; a microbatch takes at most ``most`` seconds.
        """
        ahead, back, update = self.forward[choice], self.backward[choice], self.update[choice]
        in_flight = min(self.microbatches, later + 1)
        largest = 0.0
        for start in range(stop - 1, -1, -1):
            largest = max(largest, float(self.saved[choice][start]))
            forward = float(ahead[stop] - ahead[start])
            backward = float(back[stop] - back[start])
            if forward + backward > most or self._bytes(
                choice, start, stop, in_flight, largest
            ) > self.memory(choice):
                return
            after = self.reduction(choice, start, stop) + float(update[stop] - update[start])
            yield TimedStage(start, stop, choice, forward, backward, after)

    def memory(self, choice: int) -> float:
        """Bytes of memory of a device."""
        return self.problem.cluster.pools[self.choices[choice].pool].memory_bytes

    def _bytes(self, choice: int, start: int, stop: int, in_flight: int, largest: float) -> float:
        rule = self.problem.memory
        parameters = self.parameters[choice][stop] - self.parameters[choice][start]
        kept = self.kept[choice][stop] - self.kept[choice][start]
        return float(
            rule.reserve_bytes
            + rule.parameter_bytes * parameters
            + in_flight * kept
            + rule.backward_factor * largest
        )

    def reduction(self, choice: int, start: int, stop: int) -> float:
        """Least seconds of the sum of gradients: inside a server if all replicas fit in one."""
        if self.data == 1:
            return 0.0
        one = self.choices[choice]
        moved = ring_bytes(self.problem, one.tensor, slice(start, stop))
        pool = self.problem.cluster.pools[one.pool]
        inside = self.data * one.tensor <= pool.devices
        routes = [self.problem.cluster.route(one.pool, one.pool, same_server=same)
                  for same in ((False, True) if inside else (False,))]  # fmt: skip
        return min(route.reduce_seconds(moved, self.data) for route in routes)

    def send(self, one: int, other: int, cut: int) -> float:
        """Least seconds from a stage of choice ``one`` to the next, of ``other``, at ``cut``."""
        key = (one, other, cut)
        if key not in self._sends:
            self._sends[key] = self._send(self.choices[one], self.choices[other], cut)
        return self._sends[key]

    def _send(self, one: ReplicaPlace, other: ReplicaPlace, cut: int) -> float:
        pool = self.problem.cluster.pools[one.pool]
        together = one.pool == other.pool and one.tensor + other.tensor <= pool.devices
        tensor = min(one.tensor, other.tensor)
        return min(
            cut_seconds(
                self.problem,
                self.samples,
                cut,
                self.problem.cluster.route(one.pool, other.pool, same_server=same),
                tensor,
            )
            for same in ((False, True) if together else (False,))
        )

    def ideal_seconds(self, stages: Sequence[TimedStage]) -> float:
        """Seconds of an iteration in which every transfer and reduction has its fastest link."""
        sends = [self.send(one.choice, other.choice, one.stop) for one, other in pairwise(stages)]
        finish = pipeline_seconds(
            np.array([one.forward for one in stages]),
            np.array([one.backward for one in stages]),
            np.array(sends),
            self.microbatches,
        )
        return float(np.max(finish + [one.after for one in stages]))

    @cached_property
    def least_forward(self) -> Floats:
        """Least forward seconds of the first i layers, shape (L + 1,)."""
        least: Floats = np.min([np.diff(each) for each in self.forward], axis=0)
        return _running(least)

    @cached_property
    def least_backward(self) -> Floats:
        """Least backward seconds of the first i layers, shape (L + 1,)."""
        least: Floats = np.min([np.diff(each) for each in self.backward], axis=0)
        return _running(least)

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """Worth of a device of each pool: the model's layers it does in a second, at its best."""
        return tuple(
            1 / float(each.sum()) if np.isfinite(each).all() and each.sum() else 0.0
            for each in self._device_seconds
        )

    @cached_property
    def _device_seconds(self) -> list[Floats]:
        """Least device-seconds of each layer for a microbatch on each pool, shape (L,)."""
        found = [np.full(self.layers, np.inf) for _ in self.capacity]
        for one, ahead, back in zip(self.choices, self.forward, self.backward, strict=True):
            spent = one.tensor * (np.diff(ahead) + np.diff(back))
            found[one.pool] = np.minimum(found[one.pool], spent)
        return found

    @cached_property
    def least_work(self) -> Floats:
        """Least worth of the first i layers times seconds, for a microbatch, shape (L + 1,)."""
        least: Floats = np.min(
            [w * each for w, each in zip(self.weights, self._device_seconds, strict=True) if w],
            axis=0,
            initial=np.inf,
        )
        return _running(np.where(np.isfinite(least), least, 0.0))

    def worth(self, used: tuple[int, ...]) -> float:
        """The worth of all devices that are not in use."""
        return sum(
            weight * (most - taken)
            for weight, most, taken in zip(self.weights, self.capacity, used, strict=True)
        )

    def before(self, start: int, worth: float) -> tuple[float, float, float]:
        """Least seconds of the first ``start`` layers on devices of ``worth``.

        Of a microbatch's forward and backward, and of both in the slowest stage: the work is spread
        over all devices; by the weights, no division does more (weak duality).
        """
        work = self._work[start]
        even = self.data * work / worth if worth > 0 else (float("inf") if work else 0.0)
        return self._ahead[start], self._back[start], even

    @cached_property
    def _work(self) -> list[float]:
        return [float(each) for each in self.least_work]

    @cached_property
    def _ahead(self) -> list[float]:
        return [float(each) for each in self.least_forward]

    @cached_property
    def _back(self) -> list[float]:
        return [float(each) for each in self.least_backward]

    @cached_property
    def least_after(self) -> float:
        """Least seconds of the first layer's reduction and update."""
        return min(
            self.reduction(choice, 0, 1) + float(self.update[choice][1])
            for choice in range(len(self.choices))
        )

    def bound(self) -> float:
        """Least seconds of any plan: work spread evenly, and a microbatch's way."""
        if not self.choices:
            return float("inf")
        ahead, back, even = self.before(self.layers, self.worth((0,) * len(self.capacity)))
        return max(self.microbatches * even, ahead + back) + self.least_after


def choices(problem: ProfiledProblem, samples: int) -> list[ReplicaPlace]:
    """The tensor groups that were measured at a microbatch size and have known layer sizes."""
    known = {one.tensor for one in problem.profiles.sizes}
    return [
        ReplicaPlace(number, tensor)
        for number, pool in enumerate(problem.cluster.pools)
        for tensor in problem.profiles.degrees(pool.device_kind)
        if tensor in known
        and tensor <= pool.devices
        and samples in problem.profiles.microbatch_sizes(pool.device_kind, tensor)
    ]


def _running(values: Floats) -> Floats:
    """Sums of the first i values, shape (L + 1,)."""
    return np.concatenate([[0.0], np.cumsum(values)])
