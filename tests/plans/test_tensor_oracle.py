"""Plans with tensor degrees against plain arithmetic, and such plans broken at random."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from profiles import UNSHRUNK, examples
from tensor_oracle import REDUCE, UPDATE, Links, TensorOracle

from stagewright.executor.simulation.simulate import simulate
from stagewright.formulations.checking.certificates import gap
from stagewright.formulations.checking.check import check, require_valid
from stagewright.formulations.pipelines.bounds.every_plan import LOAD, priced_load_bound
from stagewright.formulations.plans.actions import COMPUTE, Action, parse_action
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import (
    Bound,
    Certificate,
    PipelinePlan,
    ScheduledAction,
    Stage,
)
from stagewright.formulations.plans.plan_class import EVERY_PLAN
from stagewright.formulations.plans.timing import empty_blocks
from stagewright.graphs.machines.cluster import Cluster, Device, Link, ServerLinks, from_matrix
from stagewright.graphs.models.chain import Chain, Layer, LayerCost

GB = 1e9
NUMBERS = st.integers(1, 9)
Times = dict[Action, tuple[float, float]]


@st.composite
def chains(draw: st.DrawFn, layers: int, kinds: list[str]) -> Chain:
    """Costs at degrees 1, 2 and 4 that have nothing to do with each other."""
    size = draw(st.sampled_from([4, 6]))

    def cost(kind: str, t: int, output: float, shard: float, step: bool) -> LayerCost:
        values = [float(draw(NUMBERS)) for _ in range(4)]
        return LayerCost(
            size, values[0], values[3] * 1e6, output,
            input_gradient_seconds=values[1], weight_gradient_seconds=values[2],
            update_seconds=draw(NUMBERS) / 4 if step else None, device_kind=kind,
            **({} if t == 1 else {"tensor": t, "shard_parameter_bytes": shard}),
        )  # fmt: skip

    found = []
    for i in range(layers):
        output, step = draw(NUMBERS) * 1e6, draw(st.booleans())
        whole = draw(NUMBERS) * 1e6
        shards = {t: whole / t + draw(NUMBERS) / 9 * whole * (1 - 1 / t) for t in (1, 2, 4)}
        costs = [cost(kind, t, output, shards[t], step) for kind in kinds for t in (1, 2, 4)]
        found.append(Layer(f"l{i}", shards[1], tuple(costs)))
    state = draw(st.sampled_from([0.0, 1.0, 2.0]))
    return Chain("random", "test", size, tuple(found), optimizer_bytes_per_parameter_byte=state)


@st.composite
def clusters(draw: st.DrawFn, kinds: list[str]) -> tuple[Cluster, Links]:
    """Eight devices: two servers, or any links."""
    names = [f"d{i}" for i in range(8)]
    devices = [Device(name, kinds[i // 4 % len(kinds)], 1e12) for i, name in enumerate(names)]
    pairs = [(one, other) for one in names for other in names if one != other]
    if draw(st.booleans()):
        intra, inter = draw(NUMBERS) * 1e6 + 1e7, draw(NUMBERS) * 1e6
        late = draw(st.sampled_from([0.0, 0.25]))
        server = {name: i // 4 for i, name in enumerate(names)}
        links = {
            (a, b): (intra, late) if server[a] == server[b] else (inter, 2 * late) for a, b in pairs
        }
        parts = tuple(names[:4]), tuple(names[4:])
        known = ServerLinks(parts, Link(intra, late), Link(inter, 2 * late))
        return Cluster("servers", tuple(devices), known), links
    # Relayed links are as wide as the widest path; no path is wider than a direct one of 5 to 9.
    width = {pair: float(draw(st.integers(5, 9))) * 1e6 for pair in pairs}
    rows = [[width.get((a, b)) for b in names] for a in names]
    late = draw(st.sampled_from([0.0, 0.125]))
    cluster = from_matrix(devices, rows, late)
    bandwidth, latency = cluster.pairs.block(range(8), range(8))
    index = cluster.index
    return cluster, {
        (a, b): (float(bandwidth[index[a], index[b]]), float(latency[index[a], index[b]]))
        for a, b in pairs
    }


@st.composite
def cases(
    draw: st.DrawFn, whole: bool = False, sharded: bool = False
) -> tuple[PipelineProblem, TensorOracle, Times, PipelinePlan]:
    """A problem, its oracle, the times of a plan and the plan; with a group if ``sharded``."""
    layers = draw(st.integers(1, 4))
    kinds = draw(st.sampled_from([["v"], ["v", "w"]]))
    chain, (cluster, links) = draw(chains(layers, kinds)), draw(clusters(kinds))
    problem = PipelineProblem(chain, cluster, draw(st.integers(1, 4)))
    inner = draw(st.sets(st.integers(1, layers - 1), max_size=2)) if layers > 1 else set()
    stages = [
        draw(a_stage(span, [2, 4] if sharded and not span[0] else [1, 2, 4]))
        for span in pairwise([0, *sorted(inner), layers])
    ]
    split = [False if whole else draw(st.booleans()) for _ in stages]
    oracle = TensorOracle(problem, stages, links, split)
    times = oracle.schedule(lambda waiting: draw(st.sampled_from(waiting)))
    return problem, oracle, times, planned(problem, stages, times)


@st.composite
def a_stage(draw: st.DrawFn, layers: tuple[int, int], degrees: list[int]) -> Stage:
    """One to four groups, each within a half of the devices, in any order."""
    t = draw(st.sampled_from(degrees))
    halves = [draw(st.permutations(range(4))), draw(st.permutations(range(4, 8)))]
    groups = [half[i : i + t] for half in halves for i in range(0, 4, t)]
    chosen = draw(st.permutations(groups))[: draw(st.integers(1, min(4, len(groups))))]
    devices = tuple(f"d{v}" for group in chosen for v in group)
    way = draw(st.sampled_from(["split", "round-robin"]))
    return Stage(layers, devices, way, draw(st.sampled_from(["none", "full", "layer"])), tensor=t)


def planned(problem: PipelineProblem, stages: list[Stage], times: Times) -> PipelinePlan:
    starts = empty_blocks(len(stages), problem.microbatches)
    for action, (start, _) in times.items():
        if action.microbatch is None:
            starts[action.kind][action.stage] = start
        else:
            starts[action.kind][action.stage, action.microbatch] = start
    return assemble(problem, "test", stages, starts)


@examples(150)
@given(cases())
def test_times(case: Any) -> None:
    """Every action, the iteration and the simulation; bytes and endpoints of the exchanges."""
    problem, oracle, times, plan = case
    assert check(problem, plan) == ()
    entries: dict[Action, list[Any]] = {}
    for one in plan.actions:
        entries.setdefault(parse_action(one.action), []).append(one)
    assert entries.keys() == times.keys()
    for action, (start, end) in times.items():
        found = entries[action]
        for one in found:
            assert (one.start_seconds, one.finish_seconds) == pytest.approx((start, end))
            assert one.bytes == pytest.approx(oracle.carried(action))
        if action.kind in (*COMPUTE, UPDATE):
            members = oracle.members(action.stage, action.microbatch)
            assert sorted(one.device for one in found) == sorted(members)
    total = max(end for _, end in times.values())
    assert plan.predicted is not None
    assert plan.predicted.iteration_seconds == pytest.approx(total)
    assert require_valid(problem, plan) == pytest.approx(total)
    simulated = simulate(problem, plan)
    assert simulated.iteration_seconds == pytest.approx(total)
    busy = {
        name: sum(
            end - start
            for a, (start, end) in times.items()
            if a.kind in (*COMPUTE, UPDATE) and name in oracle.members(a.stage, a.microbatch)
        )
        for stage in oracle.stages
        for name in stage.devices
    }
    idle = 1 - sum(busy.values()) / len(busy) / total
    assert plan.predicted.bubble == pytest.approx(idle, abs=1e-9)
    volumes: dict[str, float] = {}
    for action in times:
        if (volume := oracle.carried(action)) is not None:
            s = action.stage
            left = s if action.kind.value == "SEND_F" else s - 1
            key = str(s) if action.kind is REDUCE else f"{left}-{left + 1}"
            volumes[key] = volumes.get(key, 0.0) + volume
    assert plan.predicted.link_bytes == pytest.approx(volumes)


@examples(100)
@given(cases(whole=True))
def test_memory(case: Any) -> None:
    """The peak of every device; the plan fits in exactly that, and in no byte less."""
    problem, oracle, times, plan = case
    peaks = {
        one.name: oracle.peak(one.name, times)
        for one in problem.cluster.devices
        if any(one.name in stage.devices for stage in oracle.stages)
    }
    assert plan.predicted is not None
    assert plan.predicted.peak_memory_bytes == pytest.approx(peaks, rel=1e-12)
    most = max(peaks.values())
    fits = replace(problem, memory_limit_bytes=most * (1 + 1e-12))
    assert check(fits, planned(fits, list(oracle.stages), times)) == ()
    less = replace(problem, memory_limit_bytes=most - 1)
    found = check(less, planned(less, list(oracle.stages), times))
    assert {one.rule for one in found} == {"memory"}


# --- Broken plans ---------------------------------------------------------------------------------

Draw = Callable[[st.SearchStrategy[Any]], Any]


def with_entries(plan: PipelinePlan, entries: list[ScheduledAction]) -> PipelinePlan:
    return replace(plan, schedule=replace(plan.schedule, actions=tuple(entries)))


def changed(wanted: Callable[[ScheduledAction], bool], change: Callable[..., Any]) -> Any:
    """One of the entries that are ``wanted``, changed; None if the plan has none."""

    def damage(draw: Draw, plan: PipelinePlan) -> PipelinePlan | None:
        every = list(plan.actions)
        numbers = [i for i, one in enumerate(every) if wanted(one)]
        if not numbers:
            return None
        i = draw(st.sampled_from(numbers))
        return with_entries(plan, every[:i] + change(draw, every[i]) + every[i + 1 :])

    return damage


def any_entry(_: ScheduledAction) -> bool:
    return True


def exchanges(one: ScheduledAction) -> bool:
    return one.sources is not None


def computes(one: ScheduledAction) -> bool:
    return one.sources is None


def several(field: str) -> Callable[[ScheduledAction], bool]:
    return lambda one: len(getattr(one, field) or ()) > 1


def moved(one: ScheduledAction, by: float) -> ScheduledAction:
    times = one.start_seconds + by, one.finish_seconds + by
    return replace(one, start_seconds=times[0], finish_seconds=times[1])


def swapped(draw: Draw, names: tuple[str, ...]) -> tuple[str, ...]:
    """Two neighbours in each other's place."""
    i = draw(st.integers(0, len(names) - 2))
    return (*names[:i], names[i + 1], names[i], *names[i + 2 :])


def of(**changes: Any) -> Callable[..., list[ScheduledAction]]:
    """An entry with some fields changed, by a value or a function of the entry."""

    def change(_: Draw, one: ScheduledAction) -> list[ScheduledAction]:
        values = {key: value(one) if callable(value) else value for key, value in changes.items()}
        return [replace(one, **values)]

    return change


def elsewhere(draw: Draw, one: ScheduledAction) -> list[ScheduledAction]:
    others = [f"d{i}" for i in range(8) if f"d{i}" != one.device]
    return [replace(one, device=draw(st.sampled_from(others)))]


def sooner(draw: Draw, plan: PipelinePlan) -> PipelinePlan:
    """A whole action half a second sooner: no action of these plans waits longer than it must."""
    text = draw(st.sampled_from(plan.actions)).action
    every = [moved(one, -0.5) if one.action == text else one for one in plan.actions]
    return with_entries(plan, every)


def another_degree(draw: Draw, plan: PipelinePlan) -> PipelinePlan | None:
    s = draw(st.integers(0, len(plan.stages) - 1))
    stage = plan.stages[s]
    known = [t for t in (1, 2, 4) if t != stage.tensor and not len(stage.devices) % t]
    if not known:
        return None
    stages = list(plan.stages)
    stages[s] = replace(stage, tensor=draw(st.sampled_from(known)))
    return replace(plan, stages=tuple(stages))


def another_order(draw: Draw, plan: PipelinePlan) -> PipelinePlan | None:
    """Devices of a stage that exchanges something, in an order that no exchange knows."""
    known = [
        s
        for s, stage in enumerate(plan.stages)
        if any(
            set(one.sources) | set(one.targets or ()) >= set(stage.devices)
            and len(stage.devices) > 1
            for one in plan.actions
            if one.sources and one.action.startswith(str(s))
        )
    ]
    if not known:
        return None
    s = draw(st.sampled_from(known))
    stages = list(plan.stages)
    stages[s] = replace(stages[s], devices=swapped(draw, stages[s].devices))
    return replace(plan, stages=tuple(stages))


BROKEN: dict[str, Callable[[Draw, PipelinePlan], PipelinePlan | None]] = {
    "a member later": changed(computes, lambda _, one: [moved(one, 0.5)]),
    "a member longer": changed(computes, of(finish_seconds=lambda one: one.finish_seconds + 0.5)),
    "an exchange longer": changed(
        exchanges, of(finish_seconds=lambda one: one.finish_seconds + 0.5)
    ),
    "an action sooner": sooner,
    "another degree": another_degree,
    "another order of the devices": another_order,
    "an action missing on a device": changed(any_entry, lambda *_: []),
    "an action twice on a device": changed(any_entry, lambda _, one: [one, one]),
    "on a device that is no member": changed(computes, elsewhere),
    "led by another": changed(several("sources"), of(device=lambda one: one.sources[-1])),
    "sources in another order": changed(
        several("sources"), lambda draw, one: [replace(one, sources=swapped(draw, one.sources))]
    ),
    "targets in another order": changed(
        several("targets"), lambda draw, one: [replace(one, targets=swapped(draw, one.targets))]
    ),
    "a source less": changed(exchanges, of(sources=lambda one: one.sources[:-1])),
    "a target less": changed(exchanges, of(targets=lambda one: one.targets[:-1])),
    "a source twice": changed(exchanges, of(sources=lambda one: one.sources + one.sources[:1])),
    "no ends": changed(exchanges, of(sources=None, targets=None)),
    "ends of a computation": changed(computes, of(sources=("d0",), targets=("d1",))),
    "bytes of a computation": changed(computes, of(bytes=1.0)),
    "a byte more": changed(exchanges, of(bytes=lambda one: one.bytes + 1)),
    "half the bytes": changed(exchanges, of(bytes=lambda one: one.bytes / 2)),
    "no bytes": changed(exchanges, of(bytes=None)),
    "beside the main stream": changed(computes, of(stream="sub")),
}


@pytest.mark.parametrize("name", BROKEN)
@examples(60, quick=6, phases=UNSHRUNK)
@given(cases(sharded=True), st.data())
def test_broken_plans_are_rejected(name: str, case: Any, data: Any) -> None:
    """Without predictions and certificate, which would give the change away."""
    problem, plan = case[0], replace(case[3], predicted=None)
    broken = BROKEN[name](data.draw, plan)
    assume(broken is not None)
    assert broken is not None
    assert check(problem, broken)


@pytest.mark.parametrize("degrees", [(1,), (2,), (1, 2, 4), "any"])
@examples(40, quick=4, phases=UNSHRUNK)
@given(cases(sharded=True))
def test_no_certificate_covers_groups(degrees: Any, case: Any) -> None:
    """The load at degree 1, claimed for other degrees, with headlines that follow from it."""
    problem, plan = case[0], case[3]
    prices = np.ones(len(problem.kinds)) / len(problem.cluster.devices)
    cost = require_valid(problem, plan)
    load = min(priced_load_bound(problem, prices), cost)
    claimed = replace(EVERY_PLAN, tensor=degrees)
    every = Bound(load, LOAD, "problem", EVERY_PLAN, tuple(prices))
    bounds = every, replace(every, plans=claimed)
    headline = (load, gap(cost, load), LOAD)
    stated = Certificate(cost, *headline, claimed, *headline, *headline, claimed, bounds)
    assert check(problem, replace(plan, certificate=stated))
