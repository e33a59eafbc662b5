"""The fastest finite plan whose stages have equal or disjoint devices, by brute force.

All cuts into stages, all groups of devices, and all recomputation and offloading where memory is
short are enumerated in the order of a lower bound; CP-SAT finds the best schedule of each structure
that may still win, and its order is timed again without rounding. All replicas split microbatches.
Costs are the checker's; nothing of the bounds on these plans is used.

Weights: only ``flush``. A finite plan with ``double-buffer`` is one of ``flush`` with more memory.
In a plan with ``stash`` (with vertical sync or not) every backward contains the optimizer's step;
without these steps, but for one UPDATE after the last, it is a ``flush`` plan of the same time.
"""

from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise, product

import numpy as np
from group_schedule import Model

from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.memory import kept_bytes, stage_static_bytes
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.timing import compute_seconds, empty_blocks

MODES = (("none", False), ("full", False), ("layer", False), ("none", True))


@dataclass(frozen=True, slots=True)
class Priced:
    """A stage with its seconds per microbatch and per iteration, and its bytes."""

    stage: Stage
    forward: float
    backward: float
    parts: tuple  # seconds of I and of W, or None if backwards stay whole
    choice: bool  # whether a whole backward may be better than I and W in turn
    reduce: float
    update: float
    static: float
    memory: float
    saved: float
    working: tuple  # of B, of I and W
    offloaded: float
    offload: float

    @property
    def gradient(self):
        """Seconds until the gradient leaves, at least."""
        return min(self.backward, self.parts[0]) if self.parts else self.backward

    @property
    def work(self):
        """Seconds of a microbatch on each device, at least."""
        whole = self.backward
        return self.forward + (min(whole, sum(self.parts)) if self.parts else whole)

    @property
    def finish(self):
        return self.reduce + self.update

    def key(self):
        """All that schedules depend on."""
        return tuple(getattr(self, name) for name in self.__slots__ if name != "stage")


def priced(problem, stage, split):
    """The costs of ``stage``; with ``split`` its backwards may be divided."""
    group = [problem.cluster.index[name] for name in stage.devices]
    forward, backward = compute_seconds(problem, stage, group)
    whole, parted = kept_bytes(problem, stage), kept_bytes(problem, stage, True)
    parts, choice = None, False
    if split and not stage.offload and problem.layer_with_whole_backward(*stage.layers) is None:
        of_input, of_weights = problem.gradient_seconds(*stage.layers, group)
        parts = of_input + (forward if stage.recompute != "none" else 0.0), of_weights
        longer = sum(parts) > backward * (1 + 1e-12)
        choice = longer or parted.working_bytes > whole.working_bytes
    return Priced(
        stage=stage,
        forward=forward,
        backward=backward,
        parts=parts,
        choice=choice,
        reduce=problem.reduce_seconds(*stage.layers, group),
        update=problem.update_seconds(*stage.layers, group),
        static=stage_static_bytes(problem, stage),
        memory=float(min(problem.memory_bytes[group])),
        saved=whole.saved_bytes,
        working=(whole.working_bytes, parted.working_bytes),
        offloaded=whole.offloaded_bytes,
        offload=(problem.offload_seconds(*stage.layers, group) or 0.0) if stage.offload else 0.0,
    )


# Structures.


class Structures:
    """All stages of split replicas whose devices are equal or disjoint."""

    def __init__(self, problem, split):
        self.problem, self.split = problem, split
        self.names = [device.name for device in problem.cluster.devices]
        self.twins = self._twins()
        self.hosted = {one.name for one in problem.cluster.devices if one.host_bytes_per_second}
        self.prices, self.sends = {}, {}

    def _twins(self):
        """Per device the first one that it may change places with."""
        cluster, memory = self.problem.cluster, self.problem.memory_bytes
        about = [
            (one.kind, size, one.host_bytes_per_second)
            for one, size in zip(cluster.devices, memory, strict=True)
        ]
        links = [cluster.bandwidth, cluster.latency]

        def alike(v, w):
            order = np.arange(len(about))
            order[[v, w]] = w, v
            same = all(np.array_equal(one, one[np.ix_(order, order)]) for one in links)
            return same and about[v] == about[w]

        return [next(v for v in range(w + 1) if alike(v, w)) for w in range(len(about))]

    def groups(self, used):
        """Groups of unused devices; of devices that are alike, the first ones."""
        free = [v for v, name in enumerate(self.names) if name not in used]
        for count in range(1, len(free) + 1):
            for group in combinations(free, count):
                others = [v for v in free if v not in group]
                pairs = product(group, others)
                if all(v < w for v, w in pairs if self.twins[v] == self.twins[w]):
                    yield tuple(self.names[v] for v in group)

    def price(self, stage):
        if stage not in self.prices:
            self.prices[stage] = priced(self.problem, stage, self.split)
        return self.prices[stage]

    def sent(self, front, behind):
        """Seconds of a transfer between two stages, and back; none on the same devices."""
        key = front.layers[1], front.devices, behind.devices
        if key[1] == key[2]:
            return 0.0, 0.0
        if key not in self.sends:
            ends = [[self.problem.cluster.index[name] for name in group] for group in key[1:]]
            self.sends[key] = self.problem.transfer_seconds(key[0], *ends)
        return self.sends[key]

    def below(self, most):
        """(lower bound, stages) of all structures with a bound below ``most``, one of each kind."""
        seen = set()
        for plain in self._cuts(most, (), 0.0, 0.0):
            for stages in self._modes(plain):
                line = [self.price(stage) for stage in stages]
                sends = tuple(self.sent(*pair) for pair in pairwise(stages))
                devices = [stage.devices for stage in stages]
                places = tuple(devices.index(group) for group in devices)
                key = tuple(one.key() for one in line), sends, places
                least = least_seconds(self.problem.microbatches, line, sends)
                if key not in seen and least < most:
                    seen.add(key)
                    yield least, stages

    def _cuts(self, most, chosen, there, back):
        """All stages, with a way of one microbatch and loads below ``most``."""
        start, size = chosen[-1].layers[1] if chosen else 0, len(self.problem.chain)
        if start == size:
            yield chosen
            return
        groups = list(dict.fromkeys(stage.devices for stage in chosen))
        used = {name for group in groups for name in group}
        for stop in range(start + 1, size + 1):
            for group in [*groups, *self.groups(used)]:
                if len(group) > self.problem.most_replicas(start, stop):
                    continue
                stage = Stage((start, stop), group)
                one = self.price(stage)
                to, fro = self.sent(chosen[-1], stage) if chosen else (0.0, 0.0)
                way = there + to + one.forward, back + fro + one.gradient
                mine = [self.price(each) for each in (*chosen, stage) if each.devices == group]
                load = sum(each.work * self.problem.microbatches + each.update for each in mine)
                static = sum(each.static for each in mine)
                if max(sum(way), load) < most and static <= one.memory:
                    yield from self._cuts(most, (*chosen, stage), *way)

    def _modes(self, stages):
        """The stages with recomputation and offloading, where they do not fit without."""
        choices = []
        for stage in stages:
            mine = [self.price(each) for each in stages if each.devices == stage.devices]
            need = sum(each.static + each.saved * self.problem.microbatches for each in mine)
            ways = MODES if need > mine[0].memory else MODES[:1]
            if not self.hosted.issuperset(stage.devices):
                ways = [way for way in ways if not way[1]]
            choices.append([Stage(stage.layers, stage.devices, "split", *way) for way in ways])
        return product(*choices)


def least_seconds(microbatches, line, sends):
    """A lower bound: the ways of a microbatch, and every group's load with what surrounds it."""
    pairs = list(zip(line, sends, strict=False))  # all stages but the last
    heads = [0.0, *accumulate(one.forward + to for one, (to, _) in pairs)]
    back = [0.0, *accumulate(one.gradient + fro for one, (_, fro) in pairs)]
    turn = heads[-1] + line[-1].forward
    least = 0.0
    for s, one in enumerate(line):
        rest = back[-1] - back[s] + line[-1].gradient - one.gradient  # of the later stages
        least = max(least, turn + rest + one.work - one.forward + one.finish)
    least = max(least, turn + back[-1] + line[-1].gradient)
    for group in {one.stage.devices for one in line}:
        own = [s for s, one in enumerate(line) if one.stage.devices == group]
        load = sum(line[s].work * microbatches for s in own)
        tail = min(max(line[s].finish, back[s] * (line[s].parts is None)) for s in own)
        updates = sum(line[s].update for s in own)
        least = max(least, heads[own[0]] + load + max(tail, updates))
    return least


# Plans.


def fastest_plan(problem, split, most, seconds=5.0):
    """The fastest plan that takes less than ``most`` seconds, or None; and the open structures."""
    everything = Structures(problem, split)
    best, unknown = None, 0
    for least, stages in sorted(everything.below(most), key=lambda entry: entry[0]):
        if least >= most * (1 - 1e-9):
            break
        plan = scheduled(everything, stages, most, seconds)
        if plan == "open":
            unknown += 1
        elif plan is not None and plan.predicted.iteration_seconds < most:
            best, most = plan, plan.predicted.iteration_seconds
    return best, unknown


def scheduled(everything, stages, most, seconds):
    """The fastest plan of ``stages``; None: none below ``most``, "open": none found in time."""
    problem = everything.problem
    line = [everything.price(stage) for stage in stages]
    sends = [everything.sent(*pair) for pair in pairwise(stages)]
    starts = Model(problem, line, sends, most).solve(seconds)
    if starts is None or starts == "open":
        return starts
    return assemble(problem, "oracle", stages, _blocks(problem, stages, starts))


def _blocks(problem, stages, starts):
    blocks = empty_blocks(len(stages), problem.microbatches)
    for (kind, s, m), start in starts.items():
        blocks[kind][s, m] = start
    return blocks
