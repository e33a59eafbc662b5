"""No plan is faster than the server bound: every structure of random tiny instances is tried.

Independent of the relaxation. All cuts, groups of devices, replications and memory modes are
enumerated, pruned by their longest path and largest load. What is left is scheduled by list
schedules, and the fastest schedule is a plan that the checker accepts.
"""

import math
import random
from dataclasses import dataclass
from itertools import combinations, permutations, product

import pytest
from profiles import slow_after

from stagewright.formulations.checking.check import check
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.memory import kept_bytes, stage_static_bytes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.plan_class import DISJOINT_SPLIT, DISJOINT_WHOLE, class_of
from stagewright.formulations.plans.structure import Structure, misfit, work_of
from stagewright.formulations.plans.timing import compute_seconds
from stagewright.graphs.machines.cluster import Device, from_matrix
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.pipelines.servers.relaxation import (
    ServerBounds,
    is_server_bound,
    server_bound,
)
from stagewright.solvers.pipelines.structures.scheduling import best_schedule, rules_for

SECONDS = 60.0
ROUNDING = 1e-9
NEAR = 1.02  # plans that take longer than that many times the bound are not searched for
MS, MB = 1e-3, 1e6


# Instances.


def random_problem(seed):
    """Three or four devices in two or three servers: links, kinds, memory and profiles vary."""
    draw = random.Random(seed)
    names = [f"d{v}" for v in range(draw.choice((3, 3, 4)))]
    cut = draw.randint(1, len(names) - 1)
    servers = [names[:cut], names[cut:]]
    if len(servers[1]) > 1 and draw.random() < 0.3:
        servers[1:] = [servers[1][:1], servers[1][1:]]
    chain = _chain(draw)
    memory = _memory(draw, chain)
    host = draw.choice((None, 2e9, 2e10))
    devices = [
        Device(name, kind, memory[draw.randrange(2)], host_bytes_per_second=host)
        for name, kind in zip(names, _kinds(draw, servers), strict=True)
    ]
    home = [s for s, server in enumerate(servers) for _ in server]
    cluster = from_matrix(devices, *_links(draw, home), servers=servers)
    return PipelineProblem(chain, cluster, draw.choice((1, 2, 3, 3, 4, 6, 9)))


def _kinds(draw, servers):
    way = draw.choice(("one", "one", "of servers", "of devices"))
    for server in servers:
        kind = draw.choice("ab")
        for _ in server:
            yield {"one": "a", "of servers": kind, "of devices": draw.choice("ab")}[way]


def _links(draw, home):
    """Bandwidths and latencies: two levels, at times with a third or uneven in the directions."""
    near, far = draw.choice(((1e10, 1e9), (1e10, 3e8), (5e9, 2e9), (1e9, 1e9)))
    uneven = draw.choice(((1.0,), (1.0,), (0.5, 1.0, 2.0), (0.1, 1.0)))
    delays = draw.choice(((0.0, 0.0), (0.0, MS), (0.1 * MS, 3 * MS), (2 * MS, 10 * MS)))
    order = range(len(home))
    same = [[home[i] == home[j] for j in order] for i in order]
    bandwidth = [[(near if one else far) * draw.choice(uneven) for one in row] for row in same]
    return bandwidth, [[delays[0] if one else delays[1] for one in row] for row in same]


def _chain(draw):
    samples = draw.choice((1, 2, 3, 4, 6, 7))
    sizes = sorted({samples, *draw.sample(range(1, samples + 1), draw.randint(1, samples))})
    heavy, wide = draw.choice((0, 1, 10, 100)), draw.choice((0, 1, 10))
    updates = draw.choice((0, 0, 5, 100))
    layers = []
    for i in range(draw.choice((1, 2, 3, 3))):
        costs = [
            cost for kind in "ab" for cost in _costs(draw, samples, sizes, kind, wide, updates)
        ]
        least = min(samples, draw.choice((1, 1, 1, 2, 3)))
        layers.append(Layer(f"l{i}", draw.randint(0, 20) * heavy * MB, tuple(costs), least))
    return Chain("m", "random", samples, tuple(layers), draw.choice((0.0, 1.0, 2.0)))


def _costs(draw, samples, sizes, kind, wide, updates):
    """Costs that need not be proportional to the samples, and may be zero."""
    forward, backward = draw.randint(0, 20) * MS, draw.randint(0, 40) * MS
    saved, output = draw.randint(0, 20) * MB, draw.randint(0, 20) * wide * MB
    step = draw.randint(0, updates) * MS
    for size in sizes:
        share = size / samples
        part = 1.0 if size == samples else draw.choice((share, math.sqrt(share), 1.0, 1.3))
        yield LayerCost(
            size, forward * part, saved * part, output * share, backward * part,
            update_seconds=step or None, device_kind=kind,
        )  # fmt: skip


def _memory(draw, chain):
    """Ample, or too little for all of the model with all its microbatches."""
    if draw.random() < 0.5:
        return [1e12, 1e12]
    static = sum(chain.parameter_bytes) * (2 + chain.optimizer_bytes_per_parameter_byte)
    kept = sum(max(cost.saved_bytes for cost in layer.costs) for layer in chain.layers)
    sent = max(cost.output_bytes for layer in chain.layers for cost in layer.costs)
    shares = [draw.choice((0.4, 0.6, 1.0)), draw.choice((0.3, 0.6, 1.0, 2.0))]
    short = static * shares[0] + kept * shares[1] + 4 * sent + MB
    return [short, draw.choice((short, 2 * short))]


# Structures.


@dataclass(frozen=True, slots=True)
class Option:
    """A stage with the least seconds of a microbatch, the largest load, and what follows it."""

    stage: Stage
    forward: float
    backward: float
    load: float
    finish: float


class Structures:
    """All stages of disjoint devices, those of split replicas alone unless ``wide``."""

    def __init__(self, problem, wide):
        self.problem, self.wide = problem, wide
        self.names = [device.name for device in problem.cluster.devices]
        size = len(problem.chain)
        self.options = {
            span: [self.priced(stage) for stage in self.stages(span) if self.fits(stage)]
            for span in combinations(range(size + 1), 2)
        }
        self.sends = {}

    def stages(self, span):
        for count in range(1, len(self.names) + 1):
            if count <= self.problem.most_replicas(*span):
                for group in combinations(self.names, count):
                    yield from self.variants(Stage(span, group))
            if self.wide and 1 < count <= self.problem.microbatches:
                for group in permutations(self.names, count):
                    yield from self.variants(Stage(span, group, "round-robin"))

    def variants(self, stage):
        yield stage
        if self.wide and not self.fits(stage, self.problem.microbatches):
            parts = stage.layers, stage.devices, stage.replication
            yield from (Stage(*parts, recompute) for recompute in ("full", "layer"))
            if all(one.host_bytes_per_second for one in self.problem.cluster.devices):
                yield Stage(*parts, offload=True)

    def fits(self, stage, count=1):
        kept = kept_bytes(self.problem, stage)
        need = stage_static_bytes(self.problem, stage) + kept.working_bytes
        need += count * (kept.saved_bytes + kept.offloaded_bytes)
        return need <= min(self.problem.memory_bytes[v] for v in self.positions(stage.devices))

    def positions(self, names):
        return [self.problem.cluster.index[name] for name in names]

    def priced(self, stage):
        problem, group = self.problem, self.positions(stage.devices)
        lanes = [
            compute_seconds(problem, stage, self.positions(stage.runners(m)))
            for m in range(stage.turns)
        ]
        load = max(
            len(range(turn, problem.microbatches, stage.turns)) * sum(lane)
            for turn, lane in enumerate(lanes)
        )
        finish = problem.finish_seconds(*stage.layers, group)
        return Option(stage, *map(min, zip(*lanes, strict=True)), load, finish)

    def below(self, most, chosen=(), there=0.0, back=0.0, bound=0.0):
        """The structures with a longest path and loads below ``most``, with that lower bound."""
        start = chosen[-1].stage.layers[1] if chosen else 0
        if start == len(self.problem.chain):
            yield bound, tuple(option.stage for option in chosen)
            return
        used = {name for option in chosen for name in option.stage.devices}
        for stop in range(start + 1, len(self.problem.chain) + 1):
            for option in self.options[start, stop]:
                if used & set(option.stage.devices):
                    continue
                sent = self.sent(chosen[-1].stage, option.stage) if chosen else (0.0, 0.0)
                to, fro = there + sent[0], back + sent[1]
                path = to + option.forward + option.backward + fro
                least = max(bound, path, to + option.load + max(fro, option.finish))
                if least < most:
                    further = to + option.forward, fro + option.backward
                    yield from self.below(most, (*chosen, option), *further, least)

    def sent(self, front, behind):
        """The least seconds of a transfer between two stages, and back."""
        key = front.layers[1], front.lanes, behind.lanes
        if key not in self.sends:
            pairs = product(map(self.positions, front.lanes), map(self.positions, behind.lanes))
            times = [self.problem.transfer_seconds(key[0], *pair) for pair in pairs]
            self.sends[key] = tuple(map(min, zip(*times, strict=True)))
        return self.sends[key]


def fastest_plan(problem, wide, most):
    """The fastest plan by list schedules below ``most`` seconds, or None."""
    best, found = None, Structures(problem, wide).below(most)
    for least, stages in sorted(found, key=lambda entry: entry[0]):
        if least >= most * (1 - ROUNDING):
            break
        structure = Structure.whole(stages)
        work, endings, _ = work_of(problem, structure)
        if misfit(problem, structure) is None:
            schedule = best_schedule(work, endings, rules_for(work), most, least)
            if schedule is not None:
                most, best = schedule.seconds, (stages, schedule.starts)
    return None if best is None else assemble(problem, "oracle", *best)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("seed", slow_after(12, range(100)))
def test_no_plan_is_faster_than_the_bound(seed, wide):
    problem = random_problem(seed)
    plans = DISJOINT_WHOLE if wide else DISJOINT_SPLIT
    bound = server_bound(problem, math.inf, SECONDS, plans)
    assert is_server_bound(problem, min(bound, 1e6), plans)  # infinite if no plan fits
    plan = fastest_plan(problem, wide, bound * NEAR)
    if plan is None:
        return
    assert not check(problem, plan)
    assert plans.contains(class_of(plan))
    cost = plan.predicted.iteration_seconds
    assert bound <= cost * (1 + ROUNDING)
    assert not is_server_bound(problem, cost * (1 + 1e-6), plans)  # sharper than the bound
    assert server_bound(problem, cost, SECONDS, plans) <= cost * (1 + ROUNDING)
    if not wide:
        searched = ServerBounds(problem)
        raised = searched.branch(math.inf, SECONDS)
        assert bound * (1 - ROUNDING) <= raised <= cost * (1 + ROUNDING)
        assert not searched.proves_by_branching(cost * (1 + 1e-6), SECONDS)
