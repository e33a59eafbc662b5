"""Pipelines on unequal groups of devices that recompute as little as their memory asks for.

Groups are the first devices of SPP's order, and split every microbatch or take them in turn. The
first layers of a group recompute, as few as let its microbatches in flight fit. They are a stage of
their own on the same devices: when they are computed again, the backward of the rest has ended. A
dynamic program over the layers, from the last to the first, finds the cuts and groups whose slowest
group is fastest, as BPPM does without recomputation.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from stagewright.formulations.pipelines.bppm import prefix_sums, range_sums
from stagewright.formulations.plans.memory import buffers_per_boundary, state_factor
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.plan_class import Recompute, Replication
from stagewright.formulations.plans.structure import Structure, can_split
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.machines.ordering import recursive_device_order
from stagewright.solvers.planners.structures.arrangements import stage_seconds

FLIGHTS = (1.0, 0.75, 0.5, 0.25)  # microbatches in flight, as shares of those of 1F1B
SIZES = (1, 2, 4, 8, 16)  # of groups, in units
MOST_UNITS = 16  # of devices
MOST_CUTS = 64  # places between layers where groups begin

_Group = tuple[tuple[int, ...], bool]  # devices, and whether they take microbatches in turn
_Best = tuple[Floats, Ints]
"""Of the layers from every place on: seconds of the slowest group, and for the first group its
units, whether it is round-robin, the mode of its first layers, and the places where these and the
group end; shapes (P,) and (5, P)."""


def recomputing_pipelines(
    problem: PipelineProblem, modes: Sequence[Recompute]
) -> Iterator[Structure]:
    """The pipelines of every number of groups, with more and with fewer microbatches in flight."""
    search = _Search(problem, [mode for mode in modes if mode != "none"])
    for flight in FLIGHTS:
        for stages in search.pipelines(flight):
            yield Structure.whole(stages)
            yield Structure(stages, can_split(problem, stages))


class _Search:
    """The dynamic program. Tables of layers have the axes start, cut and stop, by place."""

    def __init__(self, problem: PipelineProblem, modes: Sequence[Recompute]) -> None:
        count, self.order = len(problem.chain), recursive_device_order(problem.cluster)
        self.problem, self.modes = problem, modes
        self.unit = -(-len(self.order) // MOST_UNITS)
        self.units = len(self.order) // self.unit
        self.places = np.linspace(0, count, min(count, MOST_CUTS) + 1).astype(np.int64)
        self.alike: dict[tuple[object, ...], _Group] = {}
        # Clusters of many kinds have many groups, each with tables of some megabytes.
        self.bytes_of = lru_cache(maxsize=16)(self._bytes_of)
        self.fitting = lru_cache(maxsize=256)(self._fitting)

    def pipelines(self, flight: float) -> Iterator[tuple[Stage, ...]]:
        """The pipelines with ``flight`` times the microbatches in flight of 1F1B."""
        places = len(self.places)
        chosen, none = np.zeros((5, places), np.int64), np.full(places, np.inf)
        rest = [[(np.append(none[1:], 0.0), chosen)] * (self.units + 1)]
        for groups in range(1, min(self.units, places - 1) + 1):
            count = min(self.problem.microbatches, math.ceil(flight * groups))
            used = range(1, self.units + 1)
            rest.append([(none, chosen), *(self._best(one, count, rest[-1]) for one in used)])
            if math.isfinite(rest[-1][-1][0][0]):
                yield tuple(self._stages(rest))

    def _best(self, used: int, count: int, rest: list[_Best]) -> _Best:
        """The best first groups on the last ``used`` units, before those of ``rest``."""
        found = [
            self._first(used, size, turns, count, rest[used - size])
            for size in SIZES
            if size <= used
            for turns in (False, True)[: 1 + (1 < size * self.unit <= self.problem.microbatches)]
        ]
        seconds = np.array([one for one, _ in found])
        which, every = seconds.argmin(axis=0), np.arange(len(self.places))
        return seconds[which, every], np.array([one for _, one in found])[which, :, every].T

    def _first(self, used: int, size: int, turns: bool, count: int, rest: _Best) -> _Best:
        """The best first group of ``size`` units."""
        devices = self._devices(used, size)
        kinds = sorted(self.problem.cluster.devices[v].kind for v in devices)
        room = float(self.problem.memory_bytes[list(devices)].min())
        group = self.alike.setdefault((turns, *kinds), (devices, turns))
        held = -(-count // len(devices)) if turns else count
        seconds, modes, cuts = self.fitting(group, room, held)
        slowest = np.maximum(seconds, rest[0])
        stop, every = slowest.argmin(axis=1), np.arange(len(self.places))
        sizes, turned = np.full_like(stop, size), np.full_like(stop, turns)
        chosen = np.array([sizes, turned, modes[every, stop], cuts[every, stop], stop])
        return slowest[every, stop], chosen

    def _devices(self, used: int, size: int) -> tuple[int, ...]:
        """The first ``size`` of the last ``used`` units."""
        first = (self.units - used) * self.unit
        return self.order[first : first + size * self.unit]

    def _fitting(self, group: _Group, room: float, count: int) -> tuple[Floats, Ints, Ints]:
        """Least seconds, modes and cuts with ``count`` microbatches in ``room`` bytes, (P, P)."""
        seconds, static, every = self.bytes_of(group)
        found = np.array([
            np.where(static + (count - 1) * kept + alone <= room, seconds, np.inf)
            for kept, alone in every
        ])  # fmt: skip
        best = found.min(axis=(0, 2))
        modes = found.min(axis=2).argmin(axis=0)
        start, stop = np.indices(best.shape)
        return best, modes, found[modes, start, :, stop].argmin(axis=2)

    def _bytes_of(self, group: _Group) -> tuple[Floats, Floats, list[tuple[Floats, Floats]]]:
        """Seconds per microbatch, and bytes of states and buffers; by mode those of a microbatch.

        The latter are kept from its forward to its backward, and the most that it ever holds.
        """
        (devices, turns), problem, at = group, self.problem, self.places
        shares, some = 1 if turns else len(devices), np.triu(np.ones((len(at), len(at)), bool), 1)
        plain, again = (
            np.where(some, stage_seconds(problem, devices, turns, one)[np.ix_(at, at)], np.inf)
            for one in (False, True)
        )
        np.fill_diagonal(plain, 0.0)
        np.fill_diagonal(again, 0.0)
        seconds = (again if self.modes else np.where(some, np.inf, again))[:, :, None] + plain
        seconds[np.arange(len(at)), :, np.arange(len(at))] = np.inf
        of_layer, input_of = problem.saved_per_layer(shares), problem.inputs_per_layer(shares)
        states = problem.chain.parameter_bytes * state_factor(problem, len(devices))
        saved, inputs, static = (
            np.where(some, range_sums(prefix_sums(one)[at]), 0.0)
            for one in (of_layer, input_of, states)
        )
        buffers = buffers_per_boundary(problem, shares)[at]
        inner = 2 * buffers[:, None] * some[:, :, None] * some
        largest = np.append(0.0, np.maximum.reduceat(of_layer, at[:-1]))
        of_mode = {
            "full": (np.append(input_of, 0.0)[at][:, None] * some, saved),
            "layer": (inputs, np.maximum.accumulate(largest * some, axis=1)),
        }
        every = []
        for first, working in (of_mode[mode] for mode in self.modes or ("full",)):
            kept = first[:, :, None] + saved
            every.append((kept, np.maximum(kept, (first + working)[:, :, None])))
        return seconds, static[:, None, :] + buffers[:, None, None] + inner + buffers, every

    def _stages(self, rest: list[list[_Best]]) -> Iterator[Stage]:
        """The stages of the best pipeline with as many groups as ``rest`` has."""
        names = [one.name for one in self.problem.cluster.devices]
        start, used = 0, self.units
        for tables in rest[:0:-1]:
            size, turns, mode, cut, stop = tables[used][1][:, start].tolist()
            group = tuple(names[v] for v in self._devices(used, size))
            kind: Replication = "round-robin" if turns else "split"
            if cut > start:
                yield Stage(self._layers(start, cut), group, kind, self.modes[mode])
            if stop > cut:
                yield Stage(self._layers(cut, stop), group, kind)
            start, used = stop, used - size

    def _layers(self, start: int, stop: int) -> tuple[int, int]:
        return int(self.places[start]), int(self.places[stop])
