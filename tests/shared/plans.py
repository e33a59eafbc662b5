"""Small problems and valid plans for them, by a naive list scheduler that knows no planner."""

import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import get_args

import numpy as np
from hypothesis import strategies as st

from stagewright.formulations.checking.certificates import certificate
from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Progress
from stagewright.formulations.pipelines.bounds.every_plan import LOAD, priced_load_bound
from stagewright.formulations.plans.actions import COMPUTE, Action, ActionKind, Weights
from stagewright.formulations.plans.memory import in_flight_limit
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import (
    Begins,
    Bound,
    Certificate,
    PipelinePlan,
    PlannedLayer,
    Schedule,
    ScheduledAction,
    Stage,
)
from stagewright.formulations.plans.plan_class import DISJOINT_SPLIT, EVERY_PLAN, PATTERNS, class_of
from stagewright.formulations.prices.analytic import analytic_model
from stagewright.graphs.machines.cluster import Device, Link, from_matrix, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost


def made_up_certificate(problem: PipelineProblem, plan: PipelinePlan, cost: float) -> Certificate:
    """A certificate of a third of the load bound, the load bound, and a claim on the schedules."""
    prices = np.ones(len(problem.kinds))
    load = priced_load_bound(problem, prices)
    bounds = (
        Bound(load / 3, LOAD, "problem", EVERY_PLAN, tuple(prices)),
        Bound(load, LOAD, "problem", EVERY_PLAN, tuple(prices)),
        Bound(0.9 * cost, "CP-SAT", "schedule", DISJOINT_SPLIT),
        Bound(0.9 * cost, "integer program of the pattern", "schedule", PATTERNS),
    )
    return certificate(class_of(plan), cost, bounds)


F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
SEND_F, SEND_B = ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD
REDUCE, UPDATE = ActionKind.REDUCE, ActionKind.UPDATE


def small_problem(
    layers: int = 6,
    devices: int = 6,
    microbatches: int = 4,
    memory_bytes: float = 16e9,
    parts: bool = False,
    updates: bool = False,
    degrees: Sequence[int] = (),
) -> PipelineProblem:
    """Uneven layers on servers of two devices; every third device is of a slower kind.

    Links are slower from a later device to an earlier one. With ``parts`` the layers know the two
    parts of their backward, with ``updates`` the optimizer's step takes time on most of them. They
    have costs at tensor degree 1 and ``degrees``.
    """
    layered = (_layer(i, parts, updates) for i in range(layers))
    chain = Chain("small", "test", 6, tuple(with_degrees(one, degrees) for one in layered))
    machines = [
        Device(f"g{v}", "slow" if v % 3 == 2 else "fast", memory_bytes) for v in range(devices)
    ]
    bandwidth = [
        [(20e9 if i // 2 == j // 2 else 5e9) * (0.8 if i > j else 1) for j in range(devices)]
        for i in range(devices)
    ]
    cluster = from_matrix(machines, bandwidth, 1e-5, name="small")
    return PipelineProblem(chain, cluster, microbatches)


def _layer(i: int, parts: bool, updates: bool) -> Layer:
    seconds, size = 0.01 * (1 + i * 7 % 5), 1e7 * (1 + i * 3 % 4)
    costs = (
        LayerCost(6, seconds, 5 * size, size, backward_seconds=2.1 * seconds, device_kind="fast"),
        LayerCost(6, 1.3 * seconds, 5 * size, size, 2.5 * seconds, device_kind="slow"),
    )
    if updates:
        step = 0.008 * (i % 3)
        costs = (replace(costs[0], update_seconds=step), replace(costs[1], update_seconds=2 * step))
    return Layer(
        f"layer{i}", 3e7 * (1 + i * 5 % 3), tuple(map(_in_parts, costs)) if parts else costs
    )


def with_degrees(layer: Layer, degrees: Sequence[int]) -> Layer:
    """The layer with costs at more tensor degrees: neither times nor bytes divide evenly."""
    more = [_at(cost, t, layer.parameter_bytes) for t in degrees for cost in layer.costs]
    return replace(layer, costs=(*layer.costs, *more))


def _at(cost: LayerCost, degree: int, parameter_bytes: float) -> LayerCost:
    part = 0.1 + 0.9 / degree
    changed = {
        name: getattr(cost, name) * part
        for name in cost.__dataclass_fields__
        if name.endswith("_seconds") and getattr(cost, name) is not None
    }
    return replace(
        cost,
        tensor=degree,
        saved_bytes=cost.saved_bytes * (0.3 + 0.7 / degree),
        shard_parameter_bytes=parameter_bytes * (0.02 + 0.98 / degree),
        **changed,
    )


def _in_parts(cost: LayerCost) -> LayerCost:
    """The input's gradient takes the time of the forward, the weights' the rest."""
    assert cost.backward_seconds is not None
    of_weights = cost.backward_seconds - cost.forward_seconds
    return replace(
        cost,
        backward_seconds=None,
        input_gradient_seconds=cost.forward_seconds,
        weight_gradient_seconds=of_weights,
    )


def make_stages(cuts: Sequence[int], replicas: Sequence[int], ways: Sequence[str]) -> list[Stage]:
    """Stages that end at ``cuts``, with the next free of the devices g0, g1, ..."""
    stages, start, taken = [], 0, 0
    for stop, count, way in zip(cuts, replicas, ways, strict=True):
        devices = tuple(f"g{v}" for v in range(taken, taken + count))
        stages.append(Stage((start, stop), devices, way))  # type: ignore[arg-type]
        start, taken = stop, taken + count
    return stages


def valid_plan(
    problem: PipelineProblem,
    stages: Sequence[Stage],
    *,
    in_flight: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
    wait: Callable[[], float] = lambda: 0.0,
    split: Collection[tuple[int, int]] = (),
    weights: Weights = "flush",
    begins: Begins = "forward",
) -> PipelinePlan:
    """Schedule, again and again, the action that can start first.

    ``in_flight`` bounds the microbatches in flight per stage (default: what the memory holds);
    ``order`` is the order in which each device starts its microbatches; every action waits
    ``wait()`` seconds longer than it must. The backwards of ``split`` (stage, microbatch) stand as
    I and W. If the schedule ``begins`` with the backwards, nothing bounds those in flight.
    """
    limits = in_flight or [_limit(problem, stage) for stage in stages]
    position = {m: i for i, m in enumerate(order or range(problem.microbatches))}
    finish: dict[Action, float] = {}
    free: dict[object, float] = {}
    waiting = _all_actions(problem, stages, split, weights)
    every = set(waiting)
    needs = {action: needs_of(stages, action, every, begins) for action in waiting}
    entries: list[ScheduledAction] = []

    def earliest(action: Action) -> float:
        taken = [free.get(resource, 0.0) for resource in _resources(stages, action)]
        return max([0.0, *taken, *(finish[before] for before in needs[action])])

    def may_start(action: Action) -> bool:
        if not all(need in finish for need in needs[action]):
            return False
        if action.kind is not F:
            return True
        s, stage = action.stage, stages[action.stage]
        mates = [m for m in position if stage.runners(m) == stage.runners(action.microbatch)]
        started = [m for m in mates if Action(s, F, m) in finish]
        ended = [m for m in mates if finish.keys() & {Action(s, B, m), Action(s, W, m)}]
        first = min(set(mates) - set(started), key=position.__getitem__)
        in_flight = 0 if begins == "backward" else len(started) - len(ended)
        return action.microbatch == first and in_flight < limits[s]

    while waiting:
        action = min(
            filter(may_start, waiting),
            key=lambda a: (earliest(a), a.kind is F, position.get(a.microbatch, 0)),
        )
        waiting.remove(action)
        start = earliest(action) + wait()
        finish[action] = start + _seconds(problem, stages, action, weights)
        for resource in _resources(stages, action):
            free[resource] = finish[action]
        entries += _entries(problem, stages, action, start, finish[action])
    return PipelinePlan(
        problem.digest, "test", problem.chain.name, problem.cluster.name,
        problem.microbatches, tuple(stages), Schedule(tuple(entries), begins), weights=weights,
        layers=tuple(PlannedLayer(e.name, e.parameter_bytes) for e in problem.chain.layers),
        message_seconds=problem.cluster.message_seconds,
        message_bytes_per_second=problem.cluster.message_bytes_per_second,
        reference_seconds=problem.chain.reference_seconds,
    )  # fmt: skip


@st.composite
def scheduled(draw: st.DrawFn, waits: bool = False) -> tuple[PipelineProblem, PipelinePlan]:
    """A problem and a valid plan for it, with needless waits if ``waits``."""
    layers = draw(st.integers(1, 5))
    inner = draw(st.sets(st.integers(1, layers - 1), max_size=3)) if layers > 1 else set()
    cuts = [*sorted(inner), layers]
    microbatches = draw(st.integers(1, 5))
    problem = small_problem(layers, 12, microbatches)
    stages = make_stages(
        cuts,
        [draw(st.integers(1, 3)) for _ in cuts],
        [draw(st.sampled_from(["split", "round-robin"])) for _ in cuts],
    )
    delays = st.sampled_from([0.0, 0.0, 0.003, 0.2])
    plan = valid_plan(
        problem,
        stages,
        order=draw(st.permutations(range(microbatches))),
        in_flight=[draw(st.integers(1, microbatches)) for _ in cuts],
        wait=(lambda: draw(delays)) if waits else (lambda: 0.0),
    )
    return problem, plan


PAIRS = (("g0", "g1"), ("g1", "g0"), ("g3", "g4"), ("g2", "g5"))
"""Pairs of devices of one kind of :func:`small_problem`."""


@st.composite
def elaborate(
    draw: st.DrawFn,
    waits: bool = False,
    begins: Begins | None = None,
    sharded: bool = False,
    zero: bool = False,
) -> tuple[PipelineProblem, PipelinePlan]:
    """As `scheduled`, with all that a finite plan can say.

    Stages share devices, whole groups or parts of them; backwards stand whole or as I and W; stages
    recompute; weights change as they may; the schedule may begin with the backwards. If
    ``sharded``, the devices of some stages are groups of two. With ``zero`` some stages shard their
    optimizer's state or their weights; weights are then ``flush``.
    """
    layers = draw(st.integers(1, 5))
    inner = draw(st.sets(st.integers(1, layers - 1), max_size=3)) if layers > 1 else set()
    bounds = [0, *sorted(inner), layers]
    microbatches = draw(st.integers(1, 5))
    problem = small_problem(
        layers,
        6 if sharded else 4,
        microbatches,
        parts=True,
        updates=draw(st.booleans()),
        degrees=(2,) if sharded else (),
    )
    if zero:
        begins = "forward"
    weights = "flush" if begins else draw(st.sampled_from(get_args(Weights)))
    if weights == "flush" and begins is None:
        begins = draw(st.sampled_from(get_args(Begins)))
    ways = ["split"] if weights.startswith("stash") else ["split", "round-robin"]
    groups = st.lists(st.sampled_from(["g0", "g1", "g2"]), min_size=1, max_size=3, unique=True)
    wide = st.lists(st.sampled_from(PAIRS), min_size=1, max_size=2, unique_by=frozenset)
    stages = []
    for layers_of in pairwise(bounds):
        tensor = draw(st.sampled_from([1, 2])) if sharded else 1
        devices = draw(groups) if tensor == 1 else [v for pair in draw(wide) for v in pair]
        how = draw(st.sampled_from(ways)), draw(st.sampled_from(["none", "full", "layer"]))
        stage = Stage(layers_of, tuple(devices), *how, tensor=tensor)
        if zero and stage.replicas > 1:
            kinds = ["none", "optimizer", "gradients", "weights"][: 4 if stage.turns == 1 else 2]
            stage = replace(stage, shards=draw(st.sampled_from(kinds)))
        stages.append(stage)
    backwards = list(product(range(len(stages)), range(microbatches)))
    delays = st.sampled_from([0.0, 0.0, 0.003, 0.2])
    plan = valid_plan(
        problem,
        stages,
        order=draw(st.permutations(range(microbatches))),
        in_flight=[draw(st.integers(1, microbatches)) for _ in stages],
        wait=(lambda: draw(delays)) if waits else (lambda: 0.0),
        split=draw(st.sets(st.sampled_from(backwards))),
        weights=weights,
        begins=begins or "forward",
    )
    return problem, plan


def _limit(problem: PipelineProblem, stage: Stage) -> int:
    devices = [problem.cluster.index[name] for name in stage.devices]
    shard, groups = problem.at(stage.tensor), devices[:: stage.tensor]
    shares = len(stage.runners(0)) // stage.tensor
    return in_flight_limit(shard, *stage.layers, groups, shares)


def _all_actions(
    problem: PipelineProblem,
    stages: Sequence[Stage],
    split: Collection[tuple[int, int]],
    weights: Weights,
) -> list[Action]:
    found, microbatches = [], problem.microbatches
    for s, m in product(range(len(stages)), range(microbatches)):
        found += [Action(s, kind, m) for kind in ((F, I, W) if (s, m) in split else (F, B))]
    for s, m in product(range(len(stages) - 1), range(microbatches)):
        one, other = stages[s], stages[s + 1]
        if one.runners(m) != other.runners(m) or one.tensor != other.tensor:
            found += [Action(s, SEND_F, m), Action(s + 1, SEND_B, m)]
    for s, stage in enumerate(stages):
        if weights.startswith("stash"):  # both are parts of the backwards
            continue
        summed = len(stage.devices) > stage.tensor and stage.shards in ("none", "optimizer")
        found += [Action(s, REDUCE)] if summed else []
        found += [Action(s, UPDATE)] if _update_seconds(problem, stage) > 0 else []
    return found


def needs_of(
    stages: Sequence[Stage], action: Action, every: Collection[Action], begins: Begins = "forward"
) -> list[Action]:
    """What ``action`` waits for, among ``every`` action of the plan."""
    s, m = action.stage, action.microbatch
    if begins == "backward" and action.kind is F:
        own = [a for a in every if a.stage == s and a.kind in (B, W, REDUCE, UPDATE)]
        return own + needs_of(stages, action, every)
    if begins == "backward" and action.kind in (B, I) and s == len(stages) - 1:
        return []
    if action.kind is REDUCE:
        return [a for a in every if a.stage == s and a.kind in (B, W)]
    if action.kind is UPDATE:
        return [a for a in every if a.stage == s and a.kind in (B, W, REDUCE)]
    gradient = (Action(s, B, m), Action(s, I, m))
    if action.kind in (B, I) and s == len(stages) - 1:
        wanted = [Action(s, F, m)]
    elif action.kind in (B, I):
        received = Action(s + 1, SEND_B, m)
        wanted = [received] if received in every else [Action(s + 1, k, m) for k in (B, I)]
    elif action.kind is F:
        received = Action(s - 1, SEND_F, m)
        wanted = [received] if received in every else [Action(s - 1, F, m)] if s > 0 else []
    else:
        wanted = {SEND_F: [Action(s, F, m)], SEND_B: gradient, W: [Action(s, I, m)]}[action.kind]
    return [need for need in wanted if need in every]


def _resources(stages: Sequence[Stage], action: Action) -> Sequence[object]:
    s, m = action.stage, action.microbatch
    if action.kind is REDUCE:
        return [("all-reduce", name) for name in stages[s].devices]
    if action.kind is UPDATE:
        return stages[s].devices
    if action.kind in COMPUTE:
        return stages[s].runners(m)
    left = s if action.kind is SEND_F else s - 1
    return [(left, stages[left].runners(m), stages[left + 1].runners(m))]


def part_of(whole: float, replicas: int) -> float:
    """The bytes of equal parts of which each is a multiple of 16 bytes."""
    return 16.0 * -(-whole // (16 * replicas))


def _round_seconds(problem: PipelineProblem, stage: Stage) -> float:
    """Every replica passes on one part after another to the next, until all have been around."""
    r, shard = len(stage.devices) // stage.tensor, problem.at(stage.tensor)
    cuts = [stage.layers]
    if stage.shards != "optimizer":
        cuts = [(i, i + 1) for i in range(*stage.layers)]
    parts = [part_of(shard.gradient_bytes(*cut), r) for cut in cuts]
    rings = [stage.devices[i :: stage.tensor] for i in range(stage.tensor)]
    slowest = [
        problem.cluster.pairs.slowest(*[[problem.cluster.index[name] for name in ring]] * 2)
        for ring in rings
    ]
    return max(
        sum((r - 1) * (part / bandwidth + latency) for part in parts if part)
        for bandwidth, latency in slowest
    )


def _reduce_seconds(problem: PipelineProblem, stage: Stage) -> float:
    if stage.shards == "optimizer":
        return _round_seconds(problem, stage)
    devices = [problem.cluster.index[name] for name in stage.devices]
    return max(
        problem.at(stage.tensor).reduce_seconds(*stage.layers, devices[i :: stage.tensor])
        for i in range(stage.tensor)
    )


def _update_seconds(problem: PipelineProblem, stage: Stage) -> float:
    shard, r = problem.at(stage.tensor), len(stage.devices) // stage.tensor
    devices = [problem.cluster.index[name] for name in stage.devices]
    seconds = shard.update_seconds(*stage.layers, devices)
    if stage.shards == "none":
        return seconds
    bytes_ = [shard.gradient_bytes(i, i + 1) for i in range(*stage.layers)]
    gather = _round_seconds(problem, stage) if stage.shards != "weights" else 0.0
    if stage.shards == "optimizer":
        return seconds * part_of(sum(bytes_), r) / sum(bytes_) + gather
    return seconds * sum(part_of(one, r) for one in bytes_) / sum(bytes_) + gather


def _seconds(
    problem: PipelineProblem, stages: Sequence[Stage], action: Action, weights: Weights
) -> float:
    stage, index = stages[action.stage], problem.cluster.index
    if action.kind is REDUCE:
        return _reduce_seconds(problem, stage)
    if action.kind in COMPUTE:
        devices = [index[name] for name in stage.runners(action.microbatch)]
        ends = action.kind in (B, W) and weights.startswith("stash")
        step = _reduce_seconds(problem, stage) + _update_seconds(problem, stage) if ends else 0.0
        own = _message_seconds(problem, stages, action)
        return _compute_seconds(problem, stage, devices)[action.kind] + step + own
    if action.kind is UPDATE:
        return _update_seconds(problem, stage)
    left = action.stage if action.kind is SEND_F else action.stage - 1
    one, other = (
        [index[name] for name in stages[s].runners(action.microbatch)] for s in (left, left + 1)
    )
    degrees = stages[left].tensor, stages[left + 1].tensor
    size, ends = problem.boundary_bytes(stages[left].layers[1]), (one, other)
    if action.kind is SEND_B:
        degrees, ends = degrees[::-1], ends[::-1]
    shares = len(one) // stages[left].tensor * (len(other) // stages[left + 1].tensor)
    part = size * -(-problem.chain.microbatch_size // shares) / problem.chain.microbatch_size
    links = problem.cluster.pairs
    # Each receiver from the member of every group that has its own place, modulo the group's size.
    return max(
        part / bandwidth + latency
        for i, sender in enumerate(ends[0])
        for j, receiver in enumerate(ends[1])
        if i % degrees[0] == j % degrees[1] % degrees[0]
        for bandwidth, latency in [links.slowest([sender], [receiver])]
    )


def _message_seconds(problem: PipelineProblem, stages: Sequence[Stage], action: Action) -> float:
    """Time for messages of the busiest device: what the action takes, and what it hands over."""
    s, m = action.stage, action.microbatch
    ways = {F: ((s - 1, s), (s, s + 1)), W: ()}.get(action.kind, ((s + 1, s), (s, s - 1)))
    total, cluster = 0.0, problem.cluster
    for source, target in ways:
        if not (0 <= source < len(stages) and 0 <= target < len(stages)):
            continue
        one, other = stages[source], stages[target]
        senders, receivers = one.runners(m), other.runners(m)
        if (senders, one.tensor) == (receivers, other.tensor):
            continue
        sent = [
            (a, b)
            for i, a in enumerate(senders)
            for j, b in enumerate(receivers)
            if i % one.tensor == j % other.tensor % one.tensor
        ]
        place = 0 if source == s else 1
        shares = len(senders) // one.tensor * (len(receivers) // other.tensor)
        samples = problem.chain.microbatch_size
        part = -(-samples // shares) / samples
        moved = part * problem.boundary_bytes(max(one.layers[0], other.layers[0]))
        seconds = (cluster.message_seconds or 0.0) + moved / (
            cluster.message_bytes_per_second or math.inf
        )
        total += seconds * max(Counter(pair[place] for pair in sent).values())
    return total


def _compute_seconds(
    problem: PipelineProblem, stage: Stage, devices: Sequence[int]
) -> dict[ActionKind, float]:
    shard, groups = problem.at(stage.tensor), devices[:: stage.tensor]
    forward, backward = shard.compute_seconds(*stage.layers, groups)
    of_input, of_weights = shard.gradient_seconds(*stage.layers, groups)
    again = forward if stage.recompute != "none" else 0.0
    found = {F: forward, I: of_input + again, W: of_weights}
    if stage.shards in ("gradients", "weights"):
        once = _round_seconds(problem, stage)
        found[W] += once  # a reduce-scatter
        if stage.shards == "weights":  # gathers
            found[F] += once
            found[I] += 2 * once if stage.recompute == "full" else once
    return found | {B: found[I] + found[W] + backward - of_input - of_weights}


def _entries(
    problem: PipelineProblem, stages: Sequence[Stage], action: Action, start: float, finish: float
) -> list[ScheduledAction]:
    stage, text = stages[action.stage], str(action)
    if action.kind is REDUCE:
        group = stage.devices
        size = stage.tensor * problem.at(stage.tensor).gradient_bytes(*stage.layers)
        return [ScheduledAction(group[0], text, start, finish, group, group, size)]
    if action.kind is UPDATE:
        return [ScheduledAction(name, text, start, finish) for name in stage.devices]
    sources = stage.runners(action.microbatch)
    if action.kind in COMPUTE:
        return [ScheduledAction(name, text, start, finish) for name in sources]
    forth = action.kind is SEND_F
    targets = stages[action.stage + (1 if forth else -1)].runners(action.microbatch)
    size = problem.boundary_bytes(stage.layers[1] if forth else stage.layers[0])
    size *= stages[action.stage + (1 if forth else -1)].tensor
    return [ScheduledAction(sources[0], text, start, finish, sources, targets, size)]


def scaled(problem: PipelineProblem, factor: float) -> PipelineProblem:
    """The same problem where every computation, transfer and all-reduce takes ``factor`` times."""
    layers = tuple(
        replace(layer, costs=tuple(_slower(cost, factor) for cost in layer.costs))
        for layer in problem.chain.layers
    )
    cluster = problem.cluster
    names = [[cluster.devices[v].name for v in server] for server in cluster.servers]
    bandwidth, latency = cluster.bandwidth / factor, (cluster.latency * factor).tolist()
    messages = (cluster.message_seconds or 0.0) * factor
    rate = cluster.message_bytes_per_second
    return PipelineProblem(
        replace(problem.chain, layers=layers),
        from_matrix(
            *(cluster.devices, bandwidth, latency),
            servers=names,
            message_seconds=messages,
            message_bytes_per_second=None if rate is None else rate / factor,
        ),
        problem.microbatches,
    )


def _slower(cost: LayerCost, factor: float) -> LayerCost:
    assert cost.backward_seconds is not None
    return replace(
        cost,
        forward_seconds=cost.forward_seconds * factor,
        backward_seconds=cost.backward_seconds * factor,
    )


def long_problem() -> PipelineProblem:
    """Bounds are not tight on two kinds of devices: no first plan is proved optimal."""
    cluster = uniform_servers(2, 4, Link(10e9), Link(1e9, 1e-5), memory_bytes=16e9)
    devices = tuple(
        replace(one, kind="v100" if i < 4 else "p100") for i, one in enumerate(cluster.devices)
    )
    chain = analytic_model("bert-large", 4, ("v100", "p100"))
    return PipelineProblem(chain, replace(cluster, devices=devices), microbatches=12)


class AtFirstPlan:
    """A token that is set once a plan was reported."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.steps: list[Progress] = []

    def __call__(self, step: Progress) -> None:
        self.steps.append(step)
        if step.objective is not None:
            self.stop.set()


def require_exact_memory(problem: PipelineProblem, plan: PipelinePlan) -> None:
    """As much memory as is predicted is enough for a valid plan; one byte less is not."""
    assert plan.predicted is not None
    most = max(plan.predicted.peak_memory_bytes.values())
    for room, broken in ((most, False), (most - 1, True)):
        limited = replace(problem, memory_limit_bytes=room)
        stated = replace(plan.predicted, capacity_bytes={})  # as it is another problem
        found = check(limited, replace(plan, digest=limited.digest, predicted=stated))
        assert bool(found) == broken
        assert {one.rule for one in found} <= {"memory"}
