"""Periodic plans: what the checker accepts, and that it rejects them broken in every way.

Plans come from a naive generator, the verdicts beside the checker's from `naive_check`.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from periodic_oracles import (
    Key,
    chain_of,
    expected_ops,
    figures,
    first_free,
    in_flight,
    line_of,
    naive_check,
    peak,
)
from plans import made_up_certificate, small_problem
from profiles import examples, slow_but

from stagewright.formulations.checking.check import check, predict, require_valid
from stagewright.formulations.plans.actions import WEIGHT_RULES, Weights
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import (
    Bound,
    Guarantee,
    PeriodicAction,
    PeriodicSchedule,
    PipelinePlan,
    PlannedLayer,
    Stage,
)
from stagewright.formulations.plans.plan_class import EVERY_PLAN
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost

Damage = Callable[[PipelinePlan], PipelinePlan | None]
AMPLE = 16e9


# --- Plans -----------------------------------------------------------------------------------


def plan_of(
    problem: PipelineProblem,
    stages: Sequence[Stage],
    period: float,
    starts: Mapping[Key, float],
    weights: Weights = "double-buffer",
) -> PipelinePlan:
    """The plan with these starts for microbatch 0."""
    actions = []
    split = {s for s, kind in starts if kind == "W"}
    for (s, kind), op in expected_ops(problem, stages, split, weights).items():
        shift = math.floor(starts[s, kind] / period + 1e-12)
        start = max(0.0, starts[s, kind] - shift * period)
        actions += [
            PeriodicAction(
                name, f"{s}{kind}", start, shift, op.seconds, op.sources, op.targets, op.bytes
            )
            for name in op.devices
        ]
    return PipelinePlan(
        problem.digest, "test", problem.chain.name, problem.cluster.name, problem.microbatches,
        tuple(stages), PeriodicSchedule(period, tuple(actions)), weights=weights,
        layers=tuple(PlannedLayer(e.name, e.parameter_bytes) for e in problem.chain.layers),
    )  # fmt: skip


def placed(
    problem: PipelineProblem,
    stages: Sequence[Stage],
    period: float,
    wait: Callable[[], float] = lambda: 0.0,
    split: Collection[int] = (),
    weights: Weights = "double-buffer",
) -> dict[Key, float] | None:
    """Every operation in its turn as soon as its devices or link are free, ``wait()`` later.

    Gradients of weights come when all else has its place.
    """
    ops = expected_ops(problem, stages, split, weights)
    taken: dict[object, list[tuple[float, float]]] = {}
    starts: dict[Key, float] = {}
    ready = 0.0
    for key in [*chain_of(len(stages), ops), *((s, kind) for s, kind in ops if kind == "W")]:
        op = ops[key]
        if key[1] == "W":
            ready = starts[key[0], "I"] + ops[key[0], "I"].seconds
        busy = [span for name in op.resources for span in taken.get(name, [])]
        start = first_free(busy, ready + wait(), op.seconds, period)
        if start is None:
            return None
        for name in op.resources:
            taken.setdefault(name, []).append((start, op.seconds))
        starts[key], ready = start, start + op.seconds
    lasts = [(s, "W" if s in split else "B") for s, kind in ops if kind == "REDUCE_GRAD"]
    until: dict[str, float] = {}
    for s, kind in sorted(lasts, key=lambda last: starts[last] + ops[last].seconds):
        one = ops[s, "REDUCE_GRAD"]
        ready = starts[s, kind] + ops[s, kind].seconds
        free = max(until.get(str(name), 0.0) for name in one.resources)
        starts[s, "REDUCE_GRAD"] = max(ready, free) + wait()
        until |= {str(name): starts[s, "REDUCE_GRAD"] + one.seconds for name in one.resources}
    return starts


def built(
    stages: Sequence[Stage],
    layers: int,
    stretch: float = 1.0,
    spare: int = 0,
    wait: Callable[[], float] = lambda: 0.0,
    split: Collection[int] = (),
    weights: Weights = "double-buffer",
) -> tuple[PipelineProblem, PipelinePlan]:
    """A valid plan: the period is ``stretch`` times the largest load, or more if that fails.

    An iteration has ``spare`` microbatches more than two versions of the weights need.
    """
    problem = small_problem(layers, 6, 1, parts=True)
    ops = expected_ops(problem, stages, split, weights)
    loads: dict[object, float] = {}
    for op in (op for (_, kind), op in ops.items() if kind != "REDUCE_GRAD"):
        for name in op.resources:
            loads[name] = loads.get(name, 0.0) + op.seconds
    period = stretch * max(loads.values())
    while (starts := placed(problem, stages, period, wait, split, weights)) is None:
        period *= 1.3
    ends = {key: starts[key] + op.seconds for key, op in ops.items()}
    trips = [end - starts[s, "F"] for (s, _), end in ends.items() if (s, "F") in starts]
    reduces = [key for key in ops if key[1] == "REDUCE_GRAD"]
    summing = max((ends[key] for key in reduces), default=0.0)
    summing -= min((starts[key] for key in reduces), default=0.0)
    needed = [math.ceil(t / period - 1e-9) - 1 for t in trips]
    needed += [math.ceil(summing / period - 1e-9)]
    microbatches = max(1, *needed) if weights == "double-buffer" else 1
    problem = small_problem(layers, 6, microbatches + spare, parts=True)
    return problem, plan_of(problem, stages, period, starts, weights)


def with_memory(
    problem: PipelineProblem, plan: PipelinePlan, memory_bytes: float
) -> tuple[PipelineProblem, PipelinePlan]:
    """The same problem on devices with so much memory, and the plan for it."""
    machines = tuple(replace(d, memory_bytes=memory_bytes) for d in problem.cluster.devices)
    other = replace(problem, cluster=replace(problem.cluster, devices=machines))
    return other, replace(plan, digest=other.digest)


def needed_bytes(problem: PipelineProblem, plan: PipelinePlan) -> float:
    """The most that any device keeps."""
    line = line_of(problem, plan)
    memory = problem.cluster.devices[0].memory_bytes
    return max(memory - room + peak(line, name) for name, (room, _) in line.memory.items())


def by_hand() -> tuple[PipelineProblem, PipelinePlan]:
    """Two stages and their link; a column is half a second, three operations go over the end.

    ```
    s0g0  B . . F F B B B
    link  < . . . . > > <
    s0g1  F B B B B . . F
    ```
    """
    layers = tuple(Layer(f"l{i}", 1e6, (LayerCost(840, 1.0, 1e6, 1e9, 2.0),)) for i in range(2))
    cluster = uniform_servers(1, 2, Link(1e9), memory_bytes=AMPLE)
    problem = PipelineProblem(Chain("two", "test", 840, layers), cluster, 2)
    stages = [Stage((i, i + 1), (f"s0g{i}",)) for i in range(2)]
    starts = {
        (0, "F"): 1.5, (0, "SEND_F"): 2.5, (1, "F"): 3.5, (1, "B"): 4.5, (1, "SEND_B"): 7.5,
        (0, "B"): 10.5,
    }  # fmt: skip
    return problem, plan_of(problem, stages, 4.0, starts)


def stages_on(names: Sequence[str], recompute: Sequence[str] = ("none",) * 3) -> list[Stage]:
    """Three stages of two layers on these devices, several as in ``g0+g1``."""
    return [
        Stage((2 * s, 2 * s + 2), tuple(name.split("+")), recompute=again)  # type: ignore[arg-type]
        for s, (name, again) in enumerate(zip(names, recompute, strict=True))
    ]


BASES = {
    "straight": stages_on(("g0", "g1", "g2")),
    "shared": stages_on(("g0", "g1", "g0")),
    "split": stages_on(("g0+g1", "g2", "g3+g4")),
    "neighbours": stages_on(("g0", "g0", "g1")),
    "recomputed": stages_on(("g0+g1", "g2", "g0+g1"), ("none", "full", "layer")),
}
LAYERS = 6


@cache
def base(name: str) -> tuple[PipelineProblem, PipelinePlan]:
    problem, plan = built(BASES[name], LAYERS)
    return problem, with_figures(problem, plan)


def with_figures(problem: PipelineProblem, plan: PipelinePlan) -> PipelinePlan:
    """The right figures, and a made-up but consistent certificate."""
    known = figures(problem, plan)
    certificate = made_up_certificate(problem, plan, known.iteration_seconds)
    return replace(plan, predicted=known, certificate=certificate)


# --- Damages ---------------------------------------------------------------------------------


def schedule_of(plan: PipelinePlan) -> PeriodicSchedule:
    assert isinstance(plan.schedule, PeriodicSchedule)
    return plan.schedule


def entries(plan: PipelinePlan, text: str) -> list[PeriodicAction]:
    return [entry for entry in schedule_of(plan).actions if entry.action == text]


def with_actions(plan: PipelinePlan, actions: Sequence[PeriodicAction]) -> PipelinePlan:
    return replace(plan, schedule=replace(schedule_of(plan), actions=tuple(actions)))


def edited(plan: PipelinePlan, text: str, **changes: Any) -> PipelinePlan | None:
    """Every entry of action ``text`` with ``changes``; None if there is none."""
    if not entries(plan, text):
        return None
    actions = schedule_of(plan).actions
    return with_actions(plan, [replace(e, **changes) if e.action == text else e for e in actions])


def changed(text: str, **changes: Any) -> Damage:
    return lambda plan: edited(plan, text, **changes)


def later(plan: PipelinePlan, periods: int) -> PipelinePlan:
    """Everything so many periods later."""
    actions = schedule_of(plan).actions
    return with_actions(plan, [replace(e, shift=e.shift + periods) for e in actions])


def shifted(text: str, by: int) -> Damage:
    """Action ``text`` so many periods later, or all else where its shift would be negative."""

    def damage(plan: PipelinePlan) -> PipelinePlan | None:
        if not (found := entries(plan, text)):
            return None
        lacking = max(0, -found[0].shift - by)
        return edited(later(plan, lacking), text, shift=found[0].shift + lacking + by)

    return damage


def put_with(text: str, other: str) -> Damage:
    """Action ``text`` at the time of ``other`` in the period, in the same period as it was."""

    def damage(plan: PipelinePlan) -> PipelinePlan | None:
        found = entries(plan, other)
        return edited(plan, text, start_seconds=found[0].start_seconds) if found else None

    return damage


def put_on(text: str, other: str) -> Damage:
    """Action ``text`` at the time of ``other`` for every microbatch."""

    def damage(plan: PipelinePlan) -> PipelinePlan | None:
        if not (found := entries(plan, other)):
            return None
        return edited(plan, text, start_seconds=found[0].start_seconds, shift=found[0].shift)

    return damage


def same_resource(text: str, other: str) -> Damage:
    """As `put_with`, of two actions that are done by the same devices."""

    def damage(plan: PipelinePlan) -> PipelinePlan | None:
        one, two = entries(plan, text), entries(plan, other)
        if not one or not two:
            return None
        ends = [
            (frozenset(e.sources or ()) | frozenset(e.targets or (e.device,)), e.device)
            for e in (one[0], two[0])
        ]
        return put_with(text, other)(plan) if ends[0][0] == ends[1][0] else None

    return damage


def lasting(text: str, factor: float) -> Damage:
    def damage(plan: PipelinePlan) -> PipelinePlan | None:
        found = entries(plan, text)
        return edited(plan, text, seconds=factor * found[0].seconds) if found else None

    return damage


def dropped(text: str) -> Damage:
    def damage(plan: PipelinePlan) -> PipelinePlan | None:
        left = [e for e in schedule_of(plan).actions if e.action != text]
        return with_actions(plan, left) if entries(plan, text) else None

    return damage


def doubled(text: str) -> Damage:
    def damage(plan: PipelinePlan) -> PipelinePlan | None:
        more = entries(plan, text)
        return with_actions(plan, [*schedule_of(plan).actions, *more]) if more else None

    return damage


def added(text: str, **changes: Any) -> Damage:
    """One more action, made from 1F."""
    return lambda plan: with_actions(
        plan, [*schedule_of(plan).actions, replace(entries(plan, "1F")[0], action=text, **changes)]
    )


def first_replica(text: str, **changes: Any) -> Damage:
    """The first device of a stage that splits does something by itself."""

    def damage(plan: PipelinePlan) -> PipelinePlan | None:
        if len(found := entries(plan, text)) < 2:
            return None
        actions = schedule_of(plan).actions
        return with_actions(plan, [replace(e, **changes) if e is found[0] else e for e in actions])

    return damage


def replica_dropped(plan: PipelinePlan) -> PipelinePlan | None:
    found = entries(plan, "0B")
    left = [e for e in schedule_of(plan).actions if e is not found[-1]]
    return with_actions(plan, left) if len(found) > 1 else None


def replica_moved(plan: PipelinePlan) -> PipelinePlan | None:
    return first_replica("0F", shift=entries(plan, "0F")[0].shift + 1)(plan)


def period_times(factor: float) -> Damage:
    """Starts as they are, where they still lie within the period."""

    def damage(plan: PipelinePlan) -> PipelinePlan:
        period = factor * schedule_of(plan).period_seconds
        actions = tuple(
            replace(e, start_seconds=min(e.start_seconds, math.nextafter(period, 0)))
            for e in schedule_of(plan).actions
        )
        return replace(plan, schedule=PeriodicSchedule(period, actions))

    return damage


def restaged(s: int, **changes: Any) -> Damage:
    def damage(plan: PipelinePlan) -> PipelinePlan:
        stages = list(plan.stages)
        stages[s] = replace(stages[s], **changes)
        return replace(plan, stages=tuple(stages))

    return damage


def round_robin(plan: PipelinePlan) -> PipelinePlan | None:
    several = len(plan.stages[0].devices) > 1
    return restaged(0, replication="round-robin")(plan) if several else None


def recomputed_for_nothing(plan: PipelinePlan) -> PipelinePlan:
    other = "none" if plan.stages[1].recompute == "full" else "full"
    return restaged(1, recompute=other)(plan)


def wrong_end(plan: PipelinePlan) -> PipelinePlan | None:
    """1SEND_F to the device of stage 0, where that is not the one of stage 2."""
    if plan.stages[0].devices == plan.stages[2].devices:
        return None
    return edited(plan, "1SEND_F", targets=plan.stages[0].devices)


def figure(**changes: Any) -> Damage:
    return lambda plan: replace(plan, predicted=replace(plan.predicted, **changes))  # type: ignore[type-var]


def figure_times(name: str, factor: float) -> Damage:
    return lambda plan: figure(**{name: factor * getattr(plan.predicted, name)})(plan)


def entry_of(table: str, position: int, factor: float | None) -> Damage:
    """A value of a table in the figures times ``factor``, or taken out if that is None."""

    def damage(plan: PipelinePlan) -> PipelinePlan:
        values = dict(getattr(plan.predicted, table))
        key = sorted(values)[position]
        value = values.pop(key)
        return figure(**{table: values if factor is None else {**values, key: factor * value}})(
            plan
        )

    return damage


def idle_device_counted(plan: PipelinePlan) -> PipelinePlan | None:
    assert plan.predicted is not None
    return figure(peak_memory_bytes={**plan.predicted.peak_memory_bytes, "g5": 0.0})(plan)


def certified(**changes: Any) -> Damage:
    return lambda plan: replace(plan, certificate=replace(plan.certificate, **changes))  # type: ignore[type-var]


def bound_above_the_cost(plan: PipelinePlan) -> PipelinePlan:
    assert plan.certificate is not None
    more = Bound(1.01 * plan.certificate.cost_seconds, "someone", "schedule", EVERY_PLAN)
    return certified(bounds=(*plan.certificate.bounds, more))(plan)  # type: ignore[return-value]


def cost_of_a_period(plan: PipelinePlan) -> PipelinePlan | None:
    """The period sold as the iteration; None where an iteration is one period."""
    period = schedule_of(plan).period_seconds
    assert plan.certificate is not None
    is_same = plan.certificate.cost_seconds == period
    return None if is_same else certified(cost_seconds=period)(plan)


# Name of the damage: (the rule that must be reported, the damage).
DAMAGES: dict[str, tuple[str, Damage]] = {
    "digest of another problem": ("digest", lambda plan: replace(plan, digest="0" * 64)),
    "more microbatches": (
        "microbatches", lambda plan: replace(plan, microbatches=plan.microbatches + 1)),
    "flush": ("weights", lambda plan: replace(plan, weights="flush")),
    "round-robin": ("devices", round_robin),
    "layer gap": ("layers", restaged(1, layers=(3, 4))),
    "layer overlap": ("layers", restaged(1, layers=(1, 4))),
    "a stage too few": ("layers", lambda plan: replace(plan, stages=plan.stages[:-1])),
    "another layer's name": (
        "layers", lambda plan: replace(plan, layers=plan.layers[::-1])),
    "unknown device": ("devices", restaged(1, devices=("elsewhere",))),
    "device twice in a stage": ("devices", restaged(1, devices=("g0", "g0"))),
    "a stage on another device": ("missing", restaged(1, devices=("g5",))),
    "recomputation that takes no time": ("duration", recomputed_for_nothing),
    "no actions": ("missing", lambda plan: with_actions(plan, ())),
    "dropped forward": ("missing", dropped("1F")),
    "dropped backward": ("missing", dropped("0B")),
    "dropped transfer": ("missing", dropped("1SEND_F")),
    "dropped transfer back": ("missing", dropped("2SEND_B")),
    "dropped reduce": ("missing", dropped("0REDUCE_GRAD")),
    "one replica missing": ("missing", replica_dropped),
    "doubled forward": ("twice", doubled("0F")),
    "doubled backward": ("twice", doubled("2B")),
    "doubled transfer": ("twice", doubled("1SEND_F")),
    "doubled reduce": ("twice", doubled("2REDUCE_GRAD")),
    "on an idle device too": ("unexpected", added("1F", device="g5")),
    "on another device": ("unexpected", changed("1B", device="g5")),
    "on an unknown device": ("unexpected", changed("1B", device="elsewhere")),
    "stage out of range": ("unexpected", added("9F")),
    "an action with a microbatch": ("unexpected", added("1F0")),
    "no action at all": ("unexpected", added("1X")),
    "no text": ("unexpected", added("")),
    "receive": ("unexpected", added("1RECV_F")),
    "update": ("unexpected", added("1UPDATE")),
    "stash of a version": ("unexpected", added("1STASH")),
    "send from the last stage": ("unexpected", added("2SEND_F")),
    "send back from the first stage": ("unexpected", added("0SEND_B")),
    "reduce of a single device": ("unexpected", added("1REDUCE_GRAD")),
    "a part beside the whole backward": ("unexpected", added("1I")),
    "forward called backward": ("twice", changed("1F", action="1B")),
    "transfer led by another device": ("unexpected", changed("1SEND_F", device="g5")),
    "wrong sources": ("endpoints", changed("1SEND_F", sources=("g5",))),
    "wrong targets": ("endpoints", changed("2SEND_B", targets=("g5",))),
    "targets of another stage": ("endpoints", wrong_end),
    "no endpoints": ("endpoints", changed("2SEND_B", sources=None, targets=None)),
    "one replica not reduced": ("endpoints", changed("0REDUCE_GRAD", targets=("g0",))),
    "endpoints on a computation": ("endpoints", changed("1F", targets=("g0",))),
    "bytes on a computation": ("endpoints", changed("1F", bytes=0.0)),
    "fewer bytes": ("bytes", changed("1SEND_F", bytes=1.0)),
    "no bytes": ("bytes", changed("2SEND_B", bytes=None)),
    "fewer bytes reduced": ("bytes", changed("0REDUCE_GRAD", bytes=1.0)),
    "shorter forward": ("duration", lasting("0F", 0.99)),
    "longer backward": ("duration", lasting("1B", 1.01)),
    "instant transfer": ("duration", lasting("1SEND_F", 0)),
    "shorter reduce": ("duration", lasting("0REDUCE_GRAD", 0.5)),
    "longer reduce": ("duration", lasting("2REDUCE_GRAD", 1.5)),
    "one replica slower": ("replicas", first_replica("0F", seconds=0.03)),
    "one replica on another microbatch": ("replicas", replica_moved),
    "one replica at another time": ("replicas", first_replica("0B", start_seconds=0.0)),
    "forward during a backward": ("overlap", put_with("1F", "1B")),
    "backward during a forward": ("overlap", put_with("1B", "1F")),
    "both directions at once": ("overlap", put_with("1SEND_F", "2SEND_B")),
    "two stages of a device at once": ("overlap", same_resource("0F", "2F")),
    "two boundaries of a link at once": ("overlap", same_resource("0SEND_F", "1SEND_F")),
    "period too short for the loads": ("overlap", period_times(0.9)),
    "forward a period too early": ("dependency", shifted("1F", -1)),
    "forward a period too late": ("dependency", shifted("1F", 1)),
    "last forward after its backward": ("dependency", shifted("2F", 1)),
    "last backward before its forward": ("dependency", shifted("2B", -1)),
    "transfer a period too early": ("dependency", shifted("1SEND_F", -1)),
    "transfer a period too late": ("dependency", shifted("1SEND_F", 1)),
    "transfer back a period too early": ("dependency", shifted("2SEND_B", -1)),
    "transfer back a period too late": ("dependency", shifted("2SEND_B", 1)),
    "backward a period too early": ("dependency", shifted("0B", -1)),
    "transfer with its forward": ("dependency", put_on("1SEND_F", "1F")),
    "forward with its transfer": ("dependency", put_on("2F", "1SEND_F")),
    "backward with its forward": ("dependency", put_on("2B", "2F")),
    "transfer back with its backward": ("dependency", put_on("2SEND_B", "2B")),
    "reduce with the backward": ("dependency", put_on("0REDUCE_GRAD", "0B")),
    "reduce a period too early": ("dependency", shifted("2REDUCE_GRAD", -1)),
    "first forward ten periods early": ("versions", shifted("0F", -10)),
    "reduce ten periods late": ("versions", shifted("0REDUCE_GRAD", 10)),
    "iteration understated": ("predicted", figure_times("iteration_seconds", 0.99)),
    "iteration NaN": ("predicted", figure(iteration_seconds=math.nan)),
    "bubble overstated": ("predicted", figure(bubble=0.999)),
    "memory understated": ("predicted", entry_of("peak_memory_bytes", 0, 0.99)),
    "memory of a device left out": ("predicted", entry_of("peak_memory_bytes", 0, None)),
    "memory of an idle device": ("predicted", idle_device_counted),
    "link bytes understated": ("predicted", entry_of("link_bytes", -1, 0.5)),
    "link left out": ("predicted", entry_of("link_bytes", 0, None)),
    "cost forged": ("certificate", certified(cost_seconds=1e-3)),
    "cost of a period": ("certificate", cost_of_a_period),
    "gap forged": ("certificate", certified(gap=0.0)),
    "schedule gap forged": ("certificate", certified(schedule_gap=0.2)),
    "bound above the cost": ("certificate", bound_above_the_cost),
    "bound proved by another": ("certificate", certified(proved_by="an oracle")),
    "guarantee said to hold": (
        "certificate", certified(guarantees=(Guarantee("Lemma 1", 1e-6, 1.0, True, "", ()),))),
}  # fmt: skip


def cases() -> Iterator[Any]:
    """Every damage on every plan to which it applies; quick on two of them, in turn."""
    for turn, (name, (rule, damage)) in enumerate(DAMAGES.items()):
        tried = [(one, problem, damage(plan)) for one in BASES for problem, plan in [base(one)]]
        hit = [each for each in tried if each[2] is not None]
        marks = slow_but(2, turn, len(hit))
        for (plan_name, problem, broken), mark in zip(hit, marks, strict=True):
            yield pytest.param(rule, problem, broken, id=f"{name} in {plan_name}", marks=mark)


@pytest.mark.parametrize(("rule", "problem", "broken"), list(cases()))
def test_damage_is_rejected(rule: str, problem: PipelineProblem, broken: PipelinePlan) -> None:
    violations = check(problem, broken)
    assert rule in {violation.rule for violation in violations}
    assert all("\n" not in str(violation) for violation in violations)
    with pytest.raises(InvalidPlan, match=r"^\w+: .+: .+"):
        require_valid(problem, broken)


def test_every_damage_is_tried() -> None:
    tried = {case.id.rsplit(" in ", 1)[0] for case in cases()}
    assert tried == set(DAMAGES)


# --- What is valid ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", BASES)
def test_the_undamaged_plans_are_valid(name: str) -> None:
    problem, plan = base(name)
    assert check(problem, plan) == ()
    assert naive_check(problem, plan) == []
    period = schedule_of(plan).period_seconds
    assert require_valid(problem, plan) == pytest.approx(plan.microbatches * period)


def test_operations_may_go_over_the_end_of_the_period() -> None:
    problem, plan = by_hand()
    over = [e.action for e in schedule_of(plan).actions if e.start_seconds + e.seconds > 4.0]
    assert sorted(over) == ["0B", "1F", "1SEND_B"]
    assert check(problem, plan) == ()
    assert naive_check(problem, plan) == []
    assert [in_flight(line_of(problem, plan), s) for s in (0, 1)] == [3, 1]
    assert require_valid(problem, plan) == 8.0
    # 9 of 12 s of the two devices are asked for; 1 MB of weights is kept 3 + 2 times.
    predicted = predict(problem, plan)
    assert predicted.bubble == pytest.approx(1 / 4)
    assert predicted.peak_memory_bytes == {"s0g0": 5e6 + 2e9 + 3e6, "s0g1": 5e6 + 2e9 + 1e6}
    assert predicted.link_bytes == {"0-1": 4e9}


@pytest.mark.parametrize("periods", [1, 2, 30])
def test_when_the_first_microbatch_begins_does_not_matter(periods: int) -> None:
    problem, plan = by_hand()
    assert naive_check(problem, later(plan, periods)) == []
    assert check(problem, later(plan, periods)) == ()


@pytest.mark.parametrize("name", BASES)
def test_memory_to_the_last_byte(name: str) -> None:
    problem, plan = base(name)
    need = needed_bytes(problem, plan)
    for spare in (1, -1):
        tight = with_memory(problem, replace(plan, certificate=None), need + spare)
        rules = {violation.rule for violation in check(*tight)}
        assert rules == (set() if spare > 0 else {"memory"})
        assert bool(naive_check(*tight)) == bool(rules)


@pytest.mark.parametrize("name", ["straight", "split", "recomputed"])
def test_an_iteration_of_a_microbatch_less_needs_a_third_version(name: str) -> None:
    problem, plan = base(name)
    fewer = replace(problem, microbatches=plan.microbatches - 1)
    other = replace(
        plan, digest=fewer.digest, microbatches=fewer.microbatches, predicted=None, certificate=None
    )
    assert {violation.rule for violation in check(fewer, other)} == {"versions"}
    assert naive_check(fewer, other)


@pytest.mark.parametrize(("reduce_seconds", "valid"), [(2.0, True), (2.5, True), (2.6, False)])
def test_gradients_are_reduced_before_the_next_are(reduce_seconds: float, valid: bool) -> None:
    """One stage on two devices, a period of 2.5 s: the update may come 5 s after the forward."""
    layer = Layer("l", 1e9, (LayerCost(2, 0.8, 0.0, 0.0, 1.6), LayerCost(840, 0.4, 0.0, 0.0, 0.8)))
    cluster = uniform_servers(1, 2, Link(1e9 / reduce_seconds))
    problem = PipelineProblem(Chain("one", "test", 2, (layer,)), cluster, 1)
    stages = [Stage((0, 1), ("s0g0", "s0g1"))]
    starts = {(0, "F"): 0.0, (0, "B"): 0.4, (0, "REDUCE_GRAD"): 1.2}
    plan = plan_of(problem, stages, 2.5, starts)
    assert schedule_of(plan).actions[-1].seconds == pytest.approx(reduce_seconds)
    assert (check(problem, plan) == ()) == valid
    assert (naive_check(problem, plan) == []) == valid


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start_seconds": 4.0}, "start_seconds"),
        ({"start_seconds": -0.5}, "start_seconds"),
        ({"start_seconds": math.nan}, "start_seconds"),
        ({"seconds": -1.0}, "start_seconds"),
        ({"seconds": math.inf}, "start_seconds"),
        ({"shift": -1}, "shift"),
        ({"shift": 10**6}, "shift"),
    ],
)
def test_times_outside_the_period_cannot_be_written(changes: Any, message: str) -> None:
    _, plan = by_hand()
    with pytest.raises(InputError, match=rf"actions\[0\], 0F: {message}"):
        edited(plan, "0F", **changes)


@pytest.mark.parametrize("period", [0.0, -1.0, math.inf, math.nan])
def test_no_period(period: float) -> None:
    with pytest.raises(InputError, match="period_seconds must be positive"):
        PeriodicSchedule(period, ())


# --- What the checker says is what the definitions say ---------------------------------------

GROUPS = ("g0", "g1", "g2", "g3+g4")


@st.composite
def periodic_plans(draw: st.DrawFn) -> tuple[PipelineProblem, PipelinePlan]:
    """A valid plan of up to four stages on any devices; its figures are not written."""
    layers = draw(st.integers(1, 5))
    inner = draw(st.sets(st.integers(1, layers - 1), max_size=3)) if layers > 1 else set()
    stages = [
        Stage(
            part,
            tuple(draw(st.sampled_from(GROUPS)).split("+")),
            recompute=draw(st.sampled_from(("none", "none", "full", "layer"))),
        )
        for part in pairwise([0, *sorted(inner), layers])
    ]
    waits = draw(st.sampled_from([(0.0,), (0.0, 0.003), (0.0, 0.02, 0.1)]))
    problem, plan = built(
        stages,
        layers,
        draw(st.sampled_from([1.0, 1.05, 1.5, 4.0])),
        draw(st.integers(0, 1)),
        lambda: draw(st.sampled_from(waits)),
        [s for s in range(len(stages)) if draw(st.integers(0, 3)) == 0],
        draw(st.sampled_from(("double-buffer", "double-buffer", "stash", "stash+vertical-sync"))),
    )
    if draw(st.booleans()):
        problem, plan = with_memory(problem, plan, needed_bytes(problem, plan) + 1)
    return problem, plan


@examples(30)
@given(periodic_plans())
def test_valid_plans_are_accepted(given_plan: tuple[PipelineProblem, PipelinePlan]) -> None:
    problem, plan = given_plan
    assert naive_check(problem, plan) == []
    assert check(problem, plan) == ()
    figured = replace(plan, predicted=predict(problem, plan))
    assert naive_check(problem, figured) == []
    assert check(problem, with_figures(problem, plan)) == ()


@st.composite
def disturbed(draw: st.DrawFn) -> tuple[PipelineProblem, PipelinePlan]:
    """A plan with one thing changed, which may do no harm."""
    problem, plan = draw(periodic_plans())
    schedule = schedule_of(plan)
    text = draw(st.sampled_from(sorted({e.action for e in schedule.actions})))
    other = draw(st.sampled_from(sorted({e.action for e in schedule.actions})))
    moves = st.sampled_from([-0.3, -0.01, -1e-4, 1e-4, 0.01, 0.3])
    period = schedule.period_seconds
    found = entries(plan, text)[0]

    def moved() -> PipelinePlan | None:
        start = found.shift * period + found.start_seconds + draw(moves) * period
        shift = math.floor(start / period)
        if shift < 0:
            return None
        inside = min(max(0.0, start - shift * period), math.nextafter(period, 0))
        return edited(plan, text, shift=shift, start_seconds=inside)

    def exchanged() -> PipelinePlan | None:
        two = entries(plan, other)[0]
        once = edited(plan, text, shift=two.shift, start_seconds=two.start_seconds)
        assert once is not None
        return edited(once, other, shift=found.shift, start_seconds=found.start_seconds)

    ways: list[Callable[[], PipelinePlan | None]] = [
        moved,
        exchanged,
        lambda: shifted(text, draw(st.sampled_from([-2, -1, 1, 2])))(plan),
        lambda: put_with(text, other)(plan),
        lambda: lasting(text, draw(st.sampled_from([0.5, 0.999, 1.001, 2.0])))(plan),
        lambda: period_times(draw(st.sampled_from([0.8, 0.999, 1.001, 1.5])))(plan),
        lambda: draw(st.sampled_from([dropped, doubled]))(text)(plan),
        lambda: edited(plan, text, action=other),
        lambda: first_replica(text, start_seconds=0.0)(plan),
        lambda: replace(plan, weights=draw(st.sampled_from(tuple(WEIGHT_RULES)))),
    ]
    changed_plan = draw(st.sampled_from(ways))() or plan
    first = min((e.shift for e in schedule_of(changed_plan).actions), default=0)
    return problem, later(changed_plan, -first)


@examples(100)
@given(disturbed(), st.sampled_from(["", "memory", "microbatches"]))
def test_the_checker_finds_something_where_there_is_something(
    given_plan: tuple[PipelineProblem, PipelinePlan], besides: str
) -> None:
    problem, plan = given_plan
    if besides == "memory":
        memory = min(device.memory_bytes for device in problem.cluster.devices)
        problem, plan = with_memory(problem, plan, memory - 2)
    if besides == "microbatches" and plan.microbatches > 1:
        problem = replace(problem, microbatches=plan.microbatches - 1)
        plan = replace(plan, digest=problem.digest, microbatches=problem.microbatches)
    violations, found = check(problem, plan), naive_check(problem, plan)
    assert bool(violations) == bool(found), (list(map(str, violations)), found)
