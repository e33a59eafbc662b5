"""Bounds on plans of a tensor degree, beside pipelines on all kinds of groups of few devices."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from random import Random

import pytest
from profiles import slow_after

from stagewright.formulations.checking.check import check
from stagewright.formulations.checking.proofs import verdicts
from stagewright.formulations.pipelines.bounds.every_plan import (
    LAYER,
    LOAD,
    PATH,
    why_nothing_fits,
    without_useless,
)
from stagewright.formulations.pipelines.bounds.server_relaxation import SERVERS
from stagewright.formulations.pipelines.bounds.tensor_groups import best_groups, on_devices
from stagewright.formulations.plans.actions import Action, ActionKind
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound, PipelinePlan, Stage
from stagewright.formulations.plans.plan_class import (
    DISJOINT_SPLIT,
    DISJOINT_WHOLE,
    SHARED_SPLIT,
    SHARED_WHOLE,
    PlanClass,
    class_of,
)
from stagewright.formulations.schedules.order import Order
from stagewright.formulations.schedules.planned import starts_to_the_end
from stagewright.graphs.machines.cluster import Cluster, Device, Link, ServerLinks, from_matrix
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.planners.steps.reporting import ClassBounds, with_certificate

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
NAMES = tuple("abcdef")
DEGREE = 2
SEEDS, SAMPLE = 6, 8


def drawn(seed: int) -> PipelineProblem:
    """Two to four layers on two servers, or one, of unequal memory and, in half, links."""
    rng = Random(seed)
    kinds = rng.choice([("v",), ("v", "w")])

    def cost(kind: str, size: int, shard: float | None, output: float, step: float) -> LayerCost:
        first, *back = (rng.randint(1, 9) * size for _ in range(3))
        return LayerCost(
            size, first, rng.randint(1, 9) * 1e6, output, input_gradient_seconds=back[0],
            weight_gradient_seconds=back[1], update_seconds=step, device_kind=kind,
            **({} if shard is None else {"tensor": DEGREE, "shard_parameter_bytes": shard}),
        )  # fmt: skip

    layers = []
    for i in range(rng.randint(2, 4)):
        output, whole, step = rng.randint(1, 20) * 1e6, rng.randint(1, 20) * 1e6, rng.randint(0, 4)
        shards = (None, whole / DEGREE)
        costs = [
            cost(kind, size, one, output, step)
            for kind in kinds
            for size in (1, 2)
            for one in shards
        ]
        layers.append(Layer(f"l{i}", whole, tuple(costs)))
    names = NAMES[: rng.choice([4, 6])]
    kind_of = [kinds[i // 2 % len(kinds)] for i in range(len(names))]
    memory = [rng.choice([90e6, 150e6, 1e9]) for _ in names]
    devices = tuple(map(Device, names, kind_of, memory))
    servers = rng.choice([(names,), (names[:2], names[2:]), (names[:4], names[4:] or names[:0])])
    servers = tuple(one for one in servers if one)
    if rng.random() < 0.5:
        links = ServerLinks(servers, Link(20e6, 0.1), Link(5e6, 0.5))
        cluster = Cluster("drawn", devices, links, rng.choice([None, 0.5]), rng.choice([None, 0.2]))
    else:
        width = [[rng.choice([2e6, 8e6, 30e6]) for _ in names] for _ in names]
        late = [[rng.choice([0.0, 0.5, 2.0]) for _ in names] for _ in names]
        cluster = from_matrix(devices, width, late, servers=servers)
    return PipelineProblem(Chain("drawn", "test", 2, tuple(layers)), cluster, rng.randint(1, 3))


def groups_of(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """Every pair of devices of a server and kind, in both orders."""
    for server in cluster.servers:
        for pair in permutations(server, DEGREE):
            if len({cluster.devices[v].kind for v in pair}) == 1:
                yield tuple(cluster.devices[v].name for v in pair)


def replicas_of(problem: PipelineProblem) -> list[tuple[str, ...]]:
    """The devices of a stage: one or more groups, of which the first is in order."""
    groups = list(groups_of(problem.cluster))
    found = [one for one in groups if list(one) == sorted(one)]
    for one, other in combinations(groups, 2):
        if list(one) == sorted(one) and not set(one) & set(other):
            found.append(one + other)
    return found


def pipelines(problem: PipelineProblem) -> Iterator[tuple[Stage, ...]]:
    """All cuts, on all groups with none in common, or the same."""
    layers, places = len(problem.chain), replicas_of(problem)
    for count in range(1, min(layers, 3) + 1):
        for cuts in combinations(range(1, layers), count - 1):
            ends = (0, *cuts, layers)
            for chosen in _chosen(places, count):
                yield tuple(
                    Stage((ends[s], ends[s + 1]), devices, tensor=DEGREE)
                    for s, devices in enumerate(chosen)
                )


def _chosen(places: Sequence[tuple[str, ...]], count: int) -> Iterator[tuple[tuple[str, ...], ...]]:
    if not count:
        yield ()
        return
    for rest in _chosen(places, count - 1):
        for one in places:
            if all(set(one) == set(other) or not set(one) & set(other) for other in rest):
                yield (*rest, one)


def an_order(stages: Sequence[Stage], microbatches: int, rule: str, split: bool) -> Order:
    """Computations one by one, as soon as those before them are done, by a rule."""
    kinds = (F, I, W) if split else (F, B)
    left = [Action(s, kind, m) for kind in kinds for s in range(len(stages))
            for m in range(microbatches)]  # fmt: skip
    rows: dict[frozenset[str], list[Action]] = {frozenset(one.devices): [] for one in stages}
    done: set[Action] = set()
    while left:
        ready = [one for one in left if _before(one, len(stages), split) <= done]
        chosen = min(ready, key=lambda one: RULES[rule](one.kind, one.stage, one.microbatch))
        rows[frozenset(stages[chosen.stage].devices)].append(chosen)
        done.add(chosen)
        left.remove(chosen)
    return Order(tuple(map(tuple, rows.values())))


def _before(one: Action, stages: int, split: bool) -> set[Action]:
    s, kind, m = one.stage, one.kind, one.microbatch
    if kind is F:
        return {Action(s - 1, F, m)} if s else set()
    if kind is W:
        return {Action(s, I, m)}
    back = I if split else B
    return {Action(s, F, m)} | ({Action(s + 1, back, m)} if s < stages - 1 else set())


RULES: dict[str, Callable[[ActionKind, int, int], tuple[int, ...]]] = {
    "forwards first": lambda kind, s, m: ((F, B, I, W).index(kind), m, s),
    "backwards first": lambda kind, s, m: ((B, I, F, W).index(kind), m, s),
    "microbatches in turn": lambda kind, s, m: (m, (B, I, W, F).index(kind), s),
}


def planned(problem: PipelineProblem, stages: tuple[Stage, ...]) -> Iterator[PipelinePlan]:
    """The stages' plans by some orders that fit."""
    for rule in RULES:
        for split in (False, True):
            order = an_order(stages, problem.microbatches, rule, split)
            starts = starts_to_the_end(problem, stages, order)
            plan = assemble(problem, "test", stages, starts)
            if not check(problem, plan):
                yield plan


def bounds_of(problem: PipelineProblem) -> list[Bound]:
    """All bounds on plans of the degree, as large as they get."""
    known = ClassBounds(without_useless(best_groups(problem, DEGREE)))
    classes = DISJOINT_SPLIT, DISJOINT_WHOLE, SHARED_WHOLE, SHARED_SPLIT
    found = [*known.every, *(one for plans in classes for one in known.relaxed(plans, 1e6))]
    return [own for one in found if (own := on_devices(one, DEGREE)) is not None]


@pytest.mark.parametrize("seed", slow_after(4, range(SEEDS)))
def test_no_plan_is_below_a_bound(seed: int) -> None:
    problem = drawn(seed)
    if why_nothing_fits(best_groups(problem, DEGREE)):
        assert not any(plan for one in pipelines(problem) for plan in planned(problem, one))
        return
    bounds = bounds_of(problem)
    assert {LOAD, LAYER, PATH, SERVERS} <= {one.proved_by for one in bounds}
    best: dict[PlanClass, PipelinePlan] = {}
    every = list(pipelines(problem))
    for stages in Random(seed).sample(every, min(len(every), SAMPLE)):
        for plan in planned(problem, stages):
            plans, cost = class_of(plan), cost_of(plan)
            for one in bounds:
                if one.plans.contains(plans):
                    assert one.seconds <= cost * (1 + 1e-9), (one, stages)
            if cost < cost_of(best.get(plans, plan)) or plans not in best:
                best[plans] = plan
    for plan in best.values():
        certified = with_certificate(problem, plan, 1.0)
        assert certified.certificate is not None
        assert check(problem, certified) == ()
        assert {one.verdict for one in verdicts(problem, certified)} <= {"verified", "claimed"}
        raised = tuple(
            replace(one, seconds=cost_of(plan) * 1.01) if one.proved_by == LAYER else one
            for one in certified.certificate.bounds
        )
        forged = replace(certified, certificate=replace(certified.certificate, bounds=raised))
        assert check(problem, forged)


def cost_of(plan: PipelinePlan) -> float:
    assert plan.predicted is not None
    return plan.predicted.iteration_seconds
