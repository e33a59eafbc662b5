"""The checker accepts valid plans and rejects plans broken in every way we can think of."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import (
    elaborate,
    made_up_certificate,
    make_stages,
    needs_of,
    scheduled,
    small_problem,
    valid_plan,
)
from profiles import examples, slow_but

from stagewright.formulations.checking.check import check, predict, require_valid
from stagewright.formulations.checking.order import Violation
from stagewright.formulations.plans.actions import COMPUTE, Action, ActionKind, parse_action
from stagewright.formulations.plans.memory import in_flight_limit, stage_static_bytes, static_bytes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import (
    Bound,
    Guarantee,
    PipelinePlan,
    ScheduledAction,
    Stage,
)
from stagewright.formulations.plans.plan_class import EVERY_PLAN
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost

MICROBATCHES = 5
LAYERS = 7
BARE = ("REDUCE_GRAD", "UPDATE")
Damage = Callable[[PipelinePlan], PipelinePlan | None]

# Per plan: where the stages end, replicas, how they share, order of microbatches, in-flight limits.
# g7 is idle in all of them, stage 1 is alone on its device, stage 0 or 2 splits its microbatches.
BASES: dict[str, tuple[Any, ...]] = {
    "split": ((2, 4, 7), (2, 1, 3), ("split",) * 3, None, None),
    "one in flight": ((2, 4, 7), (2, 1, 3), ("split",) * 3, None, (1, 1, 1)),
    "round-robin": ((2, 5, 7), (3, 1, 2), ("round-robin", "split", "split"), None, None),
    "mixed": ((3, 5, 7), (2, 1, 3), ("split", "split", "round-robin"), None, (3, 2, 2)),
    "shuffled": ((2, 4, 6, 7), (2, 1, 2, 2), ("split",) * 3 + ("round-robin",), (3, 0, 4, 1, 2),
                 None),
}  # fmt: skip


@cache
def problem() -> PipelineProblem:
    return small_problem(LAYERS, 8, MICROBATCHES)


@cache
def base(name: str) -> PipelinePlan:
    cuts, replicas, ways, order, in_flight = BASES[name]
    stages = make_stages(cuts, replicas, ways)
    plan = valid_plan(problem(), stages, order=order, in_flight=in_flight)
    return with_figures(problem(), plan)


def with_figures(given_problem: PipelineProblem, plan: PipelinePlan) -> PipelinePlan:
    """The right figures, and a made-up but consistent certificate."""
    figures = predict(given_problem, plan)
    certificate = made_up_certificate(given_problem, plan, figures.iteration_seconds)
    return replace(plan, predicted=figures, certificate=certificate)


def entries(plan: PipelinePlan, text: str) -> list[ScheduledAction]:
    return [entry for entry in plan.actions if entry.action == text]


def with_entries(plan: PipelinePlan, actions: list[ScheduledAction]) -> PipelinePlan:
    return replace(plan, schedule=replace(plan.schedule, actions=tuple(actions)))


def edited(plan: PipelinePlan, text: str, **changes: Any) -> PipelinePlan:
    """Every entry of action ``text`` with ``changes``."""
    assert entries(plan, text)
    return with_entries(
        plan, [replace(e, **changes) if e.action == text else e for e in plan.actions]
    )


def moved(plan: PipelinePlan, text: str, start: float) -> PipelinePlan:
    """Action ``text`` at another time, as long as before."""
    entry = entries(plan, text)[0]
    length = entry.finish_seconds - entry.start_seconds
    return edited(plan, text, start_seconds=start, finish_seconds=start + length)


def exchanged(plan: PipelinePlan, one: str, other: str) -> PipelinePlan:
    """Two actions of a stage that took each other's place."""
    names = {one: other, other: one}
    return with_entries(
        plan, [replace(e, action=names.get(e.action, e.action)) for e in plan.actions]
    )


def start_of(plan: PipelinePlan, text: str) -> float:
    return entries(plan, text)[0].start_seconds


def one_changed(plan: PipelinePlan, text: str, device: str, **changes: Any) -> PipelinePlan:
    return with_entries(
        plan,
        [
            replace(e, **changes) if (e.action, e.device) == (text, device) else e
            for e in plan.actions
        ],
    )


def dropped(text: str) -> Damage:
    return lambda plan: with_entries(plan, [e for e in plan.actions if e.action != text])


def doubled(text: str) -> Damage:
    return lambda plan: with_entries(plan, [*plan.actions, *entries(plan, text)])


def added(text: str, **changes: Any) -> Damage:
    """One more action, made from 1F0."""
    return lambda plan: with_entries(
        plan, [*plan.actions, replace(entries(plan, "1F0")[0], action=text, **changes)]
    )


def renamed(text: str, name: str) -> Damage:
    return lambda plan: edited(plan, text, action=name)


def changed(text: str, **changes: Any) -> Damage:
    return lambda plan: edited(plan, text, **changes)


def stretched(text: str, factor: float) -> Damage:
    def damage(plan: PipelinePlan) -> PipelinePlan:
        entry = entries(plan, text)[0]
        length = entry.finish_seconds - entry.start_seconds
        return edited(plan, text, finish_seconds=entry.start_seconds + factor * length)

    return damage


def put_at_start_of(text: str, other: str) -> Damage:
    return lambda plan: moved(plan, text, start_of(plan, other))


def restaged(s: int, **changes: Any) -> Damage:
    """Stage ``s`` (from the end if negative) with ``changes``."""

    def damage(plan: PipelinePlan) -> PipelinePlan:
        stages = list(plan.stages)
        stages[s] = replace(stages[s], **changes)
        return replace(plan, stages=tuple(stages))

    return damage


def relayered(s: int, start: int, stop: int) -> Damage:
    """Stage ``s`` with its first and last layer shifted."""
    return lambda plan: restaged(
        s, layers=(plan.stages[s].layers[0] + start, plan.stages[s].layers[1] + stop)
    )(plan)


def split_stage(plan: PipelinePlan) -> tuple[int, Stage]:
    """A stage whose devices split each microbatch."""
    stages = enumerate(plan.stages)
    return next((s, x) for s, x in stages if x.replication == "split" and len(x.devices) > 1)


def one_replica_missing(plan: PipelinePlan) -> PipelinePlan:
    s, stage = split_stage(plan)
    gone = (f"{s}F1", stage.devices[1])
    return with_entries(plan, [e for e in plan.actions if (e.action, e.device) != gone])


def replicas_apart(plan: PipelinePlan) -> PipelinePlan:
    s, stage = split_stage(plan)
    entry = entries(plan, f"{s}B1")[0]
    return one_changed(
        plan, f"{s}B1", stage.devices[1],
        start_seconds=entry.start_seconds + 1e-3, finish_seconds=entry.finish_seconds + 1e-3,
    )  # fmt: skip


def out_of_turn(plan: PipelinePlan) -> PipelinePlan | None:
    """A whole microbatch on the next device of its round-robin stage."""
    for s, stage in enumerate(plan.stages):
        if stage.replication == "round-robin":
            return edited(plan, f"{s}F0", device=stage.devices[1])
    return None


def other_pair(plan: PipelinePlan) -> PipelinePlan | None:
    """A transfer between the endpoints of another microbatch."""
    for s in range(len(plan.stages) - 1):
        one, other = entries(plan, f"{s}SEND_F0")[0], entries(plan, f"{s}SEND_F1")[0]
        if (one.sources, one.targets) != (other.sources, other.targets):
            return edited(plan, one.action, sources=other.sources, targets=other.targets)
    return None


def renamed_device(plan: PipelinePlan) -> PipelinePlan:
    """An unknown device, used consistently."""
    old = plan.stages[1].devices
    moved_stage = restaged(1, devices=("elsewhere",))(plan)
    return with_entries(
        moved_stage,
        [
            replace(
                e,
                device="elsewhere" if e.device in old else e.device,
                sources=("elsewhere",) if e.sources == old else e.sources,
                targets=("elsewhere",) if e.targets == old else e.targets,
            )
            for e in plan.actions
        ],
    )


def last_stage(text: str, other: str) -> Damage:
    """On the last stage: action ``text`` moved to the start of ``other``."""

    def damage(plan: PipelinePlan) -> PipelinePlan:
        s = len(plan.stages) - 1
        return moved(plan, f"{s}{text}", start_of(plan, f"{s}{other}"))

    return damage


def another_layer(**changes: Any) -> Damage:
    """The second layer with ``changes``."""
    return lambda plan: replace(
        plan, layers=(plan.layers[0], replace(plan.layers[1], **changes), *plan.layers[2:])
    )


def extra_last_send(plan: PipelinePlan) -> PipelinePlan:
    s = len(plan.stages) - 1
    return added(f"{s}SEND_F0")(plan)


def late_and_overlapping(plan: PipelinePlan) -> PipelinePlan:
    """One absurdly late action must not excuse an overlap by a wider tolerance."""
    return put_at_start_of("1B0", "1B1")(moved(plan, "0REDUCE_GRAD", 1e15))


def figures(**changes: Any) -> Damage:
    return lambda plan: replace(plan, predicted=replace(plan.predicted, **changes))


def scaled_figure(name: str, factor: float) -> Damage:
    return lambda plan: figures(**{name: factor * getattr(plan.predicted, name)})(plan)


def table_entry(table: str, key: str, value: float | None) -> Damage:
    """A value of a table in the figures changed, or taken out if ``value`` is None."""

    def damage(plan: PipelinePlan) -> PipelinePlan:
        values = {**getattr(plan.predicted, table), key: value}
        kept = {name: found for name, found in values.items() if found is not None}
        return figures(**{table: kept})(plan)

    return damage


def certified(**changes: Any) -> Damage:
    return lambda plan: replace(plan, certificate=replace(plan.certificate, **changes))


def bound(seconds: float, scope: str) -> Damage:
    """One more bound, of ``seconds`` times the cost."""

    def damage(plan: PipelinePlan) -> PipelinePlan:
        more = Bound(seconds * plan.certificate.cost_seconds, "someone", scope, EVERY_PLAN)
        return certified(bounds=(*plan.certificate.bounds, more))(plan)

    return damage


def headline(prefix: str) -> Damage:
    """A better headline bound than any listed, with the gap that follows from it."""

    def damage(plan: PipelinePlan) -> PipelinePlan:
        cost = plan.certificate.cost_seconds
        return certified(**{f"{prefix}bound_seconds": 0.95 * cost, f"{prefix}gap": 0.05})(plan)

    return damage


def schedule_bound_as_problem_bound(plan: PipelinePlan) -> PipelinePlan | None:
    c = plan.certificate
    if c.schedule_proved_by == c.proved_by:
        return None
    return certified(
        bound_seconds=c.schedule_bound_seconds, gap=c.schedule_gap, proved_by=c.schedule_proved_by
    )(plan)


def weak_headline(prefix: str) -> Damage:
    """A headline bound that is listed, but is not the best."""

    def damage(plan: PipelinePlan) -> PipelinePlan:
        c = plan.certificate
        weak = c.bounds[0].seconds
        gap = (c.cost_seconds - weak) / c.cost_seconds
        return certified(**{f"{prefix}bound_seconds": weak, f"{prefix}gap": gap})(plan)

    return damage


def bound_of_a_class_without_the_plan(plan: PipelinePlan) -> PipelinePlan:
    """The headline is moved to a class that the plan is not in."""
    c = plan.certificate
    other = replace(EVERY_PLAN, schedules=("periodic",))
    stolen = Bound(c.bound_seconds, c.proved_by, "problem", other)
    return certified(plans=other, bounds=(*c.bounds, stolen))(plan)


def scaled_cost(plan: PipelinePlan) -> PipelinePlan:
    return certified(cost_seconds=0.9 * plan.certificate.cost_seconds)(plan)


def guarantee(factor: float, holds: bool) -> Damage:
    def damage(plan: PipelinePlan) -> PipelinePlan:
        cost = plan.certificate.cost_seconds
        return certified(
            guarantees=(Guarantee("Lemma 1", factor * cost, cost, holds, "always", plan.stages),)
        )(plan)

    return damage


NAN = math.nan

# Name of the damage: (the rule that must be reported, the damage).
DAMAGES: dict[str, tuple[str, Damage]] = {
    "digest of another problem": ("digest", lambda plan: replace(plan, digest="0" * 64)),
    "more microbatches": (
        "microbatches", lambda plan: replace(plan, microbatches=MICROBATCHES + 1)),
    "unknown weight semantics": ("weights", lambda plan: replace(plan, weights="mirror")),
    "all-reduces at the end of updates after every microbatch": (
        "unexpected", lambda plan: (
            None if any(one.turns > 1 for one in plan.stages) else replace(plan, weights="stash"))),
    "updates after every microbatch by turns": (
        "weights", lambda plan: replace(
            restaged(0, devices=("g0", "g1"), replication="round-robin")(plan), weights="stash")),
    "another layer's name": ("layers", another_layer(name="layer9")),
    "another layer's size": ("layers", another_layer(parameter_bytes=1.0)),
    "a layer too few": ("layers", lambda plan: replace(plan, layers=plan.layers[1:])),
    "layers without end": ("layers", lambda plan: replace(plan, layers=plan.layers * 2)),
    "layer gap": ("layers", relayered(0, 0, -1)),
    "layer overlap": ("layers", relayered(1, -1, 0)),
    "first layer missing": ("layers", relayered(0, 1, 0)),
    "last layer missing": ("layers", lambda plan: replace(plan, stages=plan.stages[:-1])),
    "a layer too many": ("layers", relayered(-1, 0, 1)),
    "stages in reverse": ("layers", lambda plan: replace(plan, stages=plan.stages[::-1])),
    "another stage's device": ("missing", restaged(1, devices=("g0",))),
    "device twice in a stage": ("devices", restaged(0, devices=("g0", "g0"))),
    "unknown device": ("devices", renamed_device),
    "unknown replication": ("devices", restaged(0, replication="mirror")),
    "unknown recomputation": ("recompute", restaged(1, recompute="some")),
    "recomputation that takes no time": ("duration", restaged(1, recompute="full")),
    "dropped forward": ("missing", dropped("1F2")),
    "dropped backward": ("missing", dropped("0B0")),
    "dropped forward transfer": ("missing", dropped("0SEND_F1")),
    "dropped backward transfer": ("missing", dropped("1SEND_B1")),
    "dropped reduce": ("missing", dropped("0REDUCE_GRAD")),
    "no actions": ("missing", lambda plan: with_entries(plan, [])),
    "doubled forward": ("twice", doubled("0F1")),
    "doubled backward": ("twice", doubled("1B1")),
    "doubled forward transfer": ("twice", doubled("1SEND_F2")),
    "doubled backward transfer": ("twice", doubled("2SEND_B2")),
    "doubled reduce": ("twice", doubled("0REDUCE_GRAD")),
    "repeated at the end": ("twice", added("1F0", start_seconds=9.0, finish_seconds=9.01)),
    "one replica missing": ("missing", one_replica_missing),
    "on an idle device too": ("unexpected", added("1F0", device="g7")),
    "moved to another stage's device": ("unexpected", changed("1F1", device="g0")),
    "moved to an unknown device": ("unexpected", changed("1B1", device="elsewhere")),
    "out of turn": ("unexpected", out_of_turn),
    "transfer led by another device": ("unexpected", changed("0SEND_F0", device="g7")),
    "microbatch out of range": ("unexpected", renamed("1F4", f"1F{MICROBATCHES}")),
    "microbatch of another": ("missing", renamed("1F1", "1F2")),
    "stage out of range": ("unexpected", added("9F0")),
    "no action at all": ("unexpected", added("1X0")),
    "no text": ("unexpected", added("")),
    "zeros in front": ("unexpected", renamed("1F1", "1F01")),
    "digits of another script": ("unexpected", renamed("1F1", "1F\u0661")),
    "forward without a microbatch": ("unexpected", added("1F")),
    "reduce of a microbatch": ("unexpected", added("0REDUCE_GRAD0")),
    "send from the last stage": ("unexpected", extra_last_send),
    "send back from the first stage": ("unexpected", added("0SEND_B0")),
    "reduce of a single device": ("unexpected", added("1REDUCE_GRAD")),
    "receive": ("unexpected", added("1RECV_F0")),
    "update": ("unexpected", added("1UPDATE")),
    "switch of versions": ("unexpected", added("1USE0")),
    "a part of a backward": ("missing", renamed("1B1", "1W1")),
    "a part beside the whole backward": ("unexpected", added("1I0")),
    "forward called backward": ("twice", renamed("1F1", "1B1")),
    "negative start": ("times", changed("0F0", start_seconds=-1e-3)),
    "NaN start": ("times", changed("0F1", start_seconds=NAN)),
    "NaN finish": ("times", changed("1SEND_F1", finish_seconds=NAN)),
    "infinite finish": ("times", changed("0REDUCE_GRAD", finish_seconds=math.inf)),
    "finish before start": ("times", stretched("1B1", -1)),
    "replicas at different times": ("replicas", replicas_apart),
    "wrong sources": ("endpoints", changed("0SEND_F0", sources=("g7",))),
    "wrong targets": ("endpoints", changed("0SEND_F0", targets=("g7",))),
    "no endpoints": ("endpoints", changed("1SEND_B0", sources=None, targets=None)),
    "another pair's transfer": ("endpoints", other_pair),
    "one replica not reduced": ("endpoints", changed("0REDUCE_GRAD", targets=("g0",))),
    "endpoints on a computation": ("endpoints", changed("1F0", targets=("g0",))),
    "bytes on a computation": ("endpoints", changed("1F0", bytes=0.0)),
    "fewer bytes": ("bytes", changed("0SEND_F0", bytes=1.0)),
    "no bytes": ("bytes", changed("1SEND_B0", bytes=None)),
    "fewer bytes reduced": ("bytes", changed("0REDUCE_GRAD", bytes=1.0)),
    "shorter forward": ("duration", stretched("0F1", 0.99)),
    "longer backward": ("duration", stretched("1B1", 1.01)),
    "shorter transfer": ("duration", stretched("0SEND_F1", 0.99)),
    "instant transfer back": ("duration", stretched("1SEND_B1", 0)),
    "shorter reduce": ("duration", stretched("0REDUCE_GRAD", 0.5)),
    "two forwards at once": ("overlap", put_at_start_of("1F1", "1F0")),
    "forward during a backward": ("overlap", put_at_start_of("1F4", "1B0")),
    "backward during a forward": ("overlap", put_at_start_of("1B4", "1F0")),
    "both directions at once": ("overlap", put_at_start_of("0SEND_F0", "1SEND_B0")),
    "transfer back too soon on a channel": ("overlap", put_at_start_of("1SEND_B4", "0SEND_F4")),
    "overlap excused by a late action": ("overlap", late_and_overlapping),
    "forward before its input": ("dependency", lambda plan: moved(plan, "1F0", 0.0)),
    "send before the forward": ("dependency", put_at_start_of("0SEND_F0", "0F0")),
    "forward while its input arrives": ("dependency", put_at_start_of("1F2", "0SEND_F2")),
    "last backward with its forward": ("dependency", last_stage("B1", "F1")),
    "backward before its gradient": ("dependency", put_at_start_of("0B1", "1SEND_B1")),
    "send back before the backward": ("dependency", put_at_start_of("1SEND_B3", "1B3")),
    "reduce too early": ("dependency", put_at_start_of("0REDUCE_GRAD", "0B4")),
    "reduce at the start": ("dependency", put_at_start_of("0REDUCE_GRAD", "0F0")),
    "microbatches exchanged on a device": (
        "dependency", lambda plan: exchanged(plan, "1F0", "1F4")),
    "microbatches exchanged on a channel": (
        "dependency", lambda plan: exchanged(plan, "1SEND_B0", "1SEND_B3")),
    "forward and backward exchanged": ("dependency", lambda plan: exchanged(plan, "1F0", "1B0")),
    "iteration understated": ("predicted", scaled_figure("iteration_seconds", 0.99)),
    "iteration NaN": ("predicted", figures(iteration_seconds=NAN)),
    "bubble understated": ("predicted", scaled_figure("bubble", 0.99)),
    "memory understated": ("predicted", table_entry("peak_memory_bytes", "g1", 1e6)),
    "memory of a device left out": ("predicted", table_entry("peak_memory_bytes", "g1", None)),
    "memory of an idle device": ("predicted", table_entry("peak_memory_bytes", "g7", 0.0)),
    "capacity overstated": ("predicted", table_entry("capacity_bytes", "g1", 1e12)),
    "capacity of a device left out": ("predicted", table_entry("capacity_bytes", "g1", None)),
    "link bytes understated": ("predicted", table_entry("link_bytes", "0-1", 1.0)),
    "link left out": ("predicted", table_entry("link_bytes", "0", None)),
    "cost forged": ("certificate", scaled_cost),
    "cost NaN": ("certificate", certified(cost_seconds=NAN)),
    "gap forged": ("certificate", certified(gap=0.0)),
    "gap rounded off": ("certificate", lambda plan: certified(
        gap=plan.certificate.gap - 1e-6)(plan)),
    "gap to every plan forged": ("certificate", certified(every_gap=0.0)),
    "schedule gap forged": ("certificate", certified(schedule_gap=0.0)),
    "bound above the cost": ("certificate", bound(1.01, "schedule")),
    "negative bound": ("certificate", bound(-1, "problem")),
    "bound NaN": ("certificate", bound(NAN, "problem")),
    "bound that nobody proved": ("certificate", headline("")),
    "schedule bound that nobody proved": ("certificate", headline("schedule_")),
    "bound proved by another": ("certificate", certified(proved_by="an oracle")),
    "schedule bound sold as the problem's": ("certificate", schedule_bound_as_problem_bound),
    "bound of a class without the plan": ("certificate", bound_of_a_class_without_the_plan),
    "bound that is not the best": ("certificate", weak_headline("")),
    "bound on every plan that is not the best": ("certificate", weak_headline("every_")),
    "bound on every plan that nobody proved": ("certificate", headline("every_")),
    "guarantee said to hold": ("certificate", guarantee(0.5, True)),
    "guarantee said to fail": ("certificate", guarantee(2, False)),
}  # fmt: skip


def cases() -> Iterator[Any]:
    """Every damage on every plan to which it applies; quick on two of them, in turn."""
    for turn, (name, (rule, damage)) in enumerate(DAMAGES.items()):
        hit = [(one, broken) for one in BASES if (broken := damage(base(one))) is not None]
        for (plan_name, broken), mark in zip(hit, slow_but(2, turn, len(hit)), strict=True):
            yield pytest.param(rule, broken, id=f"{name} in {plan_name}", marks=mark)


@pytest.mark.parametrize("name", BASES)
def test_the_undamaged_plans_are_valid(name: str) -> None:
    assert check(problem(), base(name)) == ()
    ends = [entry.finish_seconds for entry in base(name).actions]
    assert require_valid(problem(), base(name)) == max(ends)


@pytest.mark.parametrize(("rule", "broken"), list(cases()))
def test_damage_is_rejected(rule: str, broken: PipelinePlan) -> None:
    violations = check(problem(), broken)
    assert rule in {violation.rule for violation in violations}
    assert all("\n" not in str(violation) for violation in violations)
    with pytest.raises(InvalidPlan, match=r"^\w+: .+: .+"):
        require_valid(problem(), broken)


@pytest.mark.parametrize("name", ["out of turn", "another pair's transfer"])
def test_damage_of_some_plans_only_is_really_tried(name: str) -> None:
    assert any(DAMAGES[name][1](base(plan)) is not None for plan in BASES)


@pytest.mark.parametrize("name", [name for name in BASES if name != "one in flight"])
def test_memory_is_exceeded_by_another_order(name: str) -> None:
    """The same stages with room for one microbatch only, and an order that keeps several."""
    cuts, replicas, ways, order, _ = BASES[name]
    stages = make_stages(cuts, replicas, ways)
    needs = []
    for stage in stages:
        size = (*stage.layers, len(stage.runners(0)))
        needs.append((static_bytes(problem(), *size), problem().saved_bytes(*size)))
    memory = max(static + saved for static, saved in needs)
    tight = small_problem(LAYERS, 8, MICROBATCHES, memory)
    assert check(tight, valid_plan(tight, stages, order=order)) == ()
    greedy = valid_plan(tight, stages, order=order, in_flight=[MICROBATCHES] * len(stages))
    violations = check(tight, greedy)
    assert {violation.rule for violation in violations} == {"memory"}
    peaks = predict(tight, greedy).peak_memory_bytes
    over = {device: peak - memory for device, peak in peaks.items() if peak > memory}
    assert {violation.place for violation in violations} == {f"device {name}" for name in over}
    for violation in violations:
        short = over[violation.place.removeprefix("device ")]
        assert violation.message.endswith(f"{short:.0f} bytes short")


def test_memory_to_the_last_byte() -> None:
    """What `in_flight_limit` lets in fits; with a byte less it does not."""
    stages = make_stages((LAYERS,), (1,), ("split",))
    need = static_bytes(problem(), 0, LAYERS, 1) + 3 * problem().saved_bytes(0, LAYERS, 1)
    for memory, valid in ((need, True), (need - 1, False)):
        tight = small_problem(LAYERS, 8, MICROBATCHES, memory)
        plan = valid_plan(tight, stages, in_flight=[3])
        # The naive scheduler prefers backwards; hold them back so that three are in flight.
        gpipe = three_in_flight(tight, plan)
        assert (check(tight, gpipe) == ()) is valid
        assert (in_flight_limit(tight, 0, LAYERS, [0]) >= 3) is valid


def three_in_flight(tight: PipelineProblem, plan: PipelinePlan) -> PipelinePlan:
    order = ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2", "0F3", "0F4", "0B3", "0B4"]
    now = 0.0
    for text in order:
        plan = moved(plan, text, now)
        now = entries(plan, text)[0].finish_seconds
    return plan


def test_figures_by_hand() -> None:
    """Two stages, microbatches a and b; F 1 and 2 s, B 2 and 4 s (capitals), transfers 1 s.

    device 0   ab.......AA....BB
    channel    .ab.....A.....B..
    device 1   ..aaAAAAbbBBBB...
    """
    layers = tuple(
        Layer(f"l{i}", 1e6, (LayerCost(840, 1.0 + i, 3e6, 1e9, 2.0 + 2 * i),)) for i in range(2)
    )
    cluster = uniform_servers(1, 2, Link(1e9), memory_bytes=16e9)
    by_hand = PipelineProblem(Chain("hand", "test", 840, layers), cluster, 2)
    stages = [Stage((0, 1), ("s0g0",)), Stage((1, 2), ("s0g1",))]
    plan = valid_plan(by_hand, stages, in_flight=(2, 1))
    starts = {entry.action: entry.start_seconds for entry in plan.actions}
    assert starts == {
        "0F0": 0, "0F1": 1, "0SEND_F0": 1, "0SEND_F1": 2, "1F0": 2, "1B0": 4, "1F1": 8,
        "1SEND_B0": 8, "0B0": 9, "1B1": 10, "1SEND_B1": 14, "0B1": 15,
    }  # fmt: skip
    found = predict(by_hand, plan)
    assert found.iteration_seconds == 17
    assert found.bubble == pytest.approx(1 - (2 * 3 + 2 * 6) / (2 * 17))
    # Weights, gradients and two optimizer states, 2 GB of buffers, then 3 MB per microbatch.
    assert found.peak_memory_bytes == {"s0g0": 4e6 + 2e9 + 2 * 3e6, "s0g1": 4e6 + 2e9 + 1 * 3e6}
    assert found.link_bytes == {"0-1": 4e9}


def test_all_that_a_long_action_overlaps_is_reported() -> None:
    plan = base("split")
    backward, forward = (entries(plan, text)[0] for text in ("1B0", "1F1"))
    step = forward.finish_seconds - forward.start_seconds
    plan = moved(plan, "1F1", backward.start_seconds + 0.01 * step)
    plan = moved(plan, "1F2", backward.start_seconds + 1.02 * step)
    messages = [v.message for v in check(problem(), plan) if v.rule == "overlap"]
    assert any(message.startswith("1F1 ") for message in messages)
    assert any(message.startswith("1F2 ") for message in messages)


def test_each_pair_of_endpoints_has_its_own_channel() -> None:
    """Round-robin stages send over different pairs at the same time."""
    plan = base("round-robin")
    sends = sorted(
        (e for e in plan.actions if "SEND" in e.action and e.sources[0] in "g0g1g2"),
        key=lambda e: e.start_seconds,
    )
    overlapping = [
        (one, other)
        for i, one in enumerate(sends)
        for other in sends[i + 1 :]
        if other.start_seconds < one.finish_seconds
    ]
    assert overlapping
    assert all(one.sources != other.sources for one, other in overlapping)


def test_a_violation_prints_as_one_line() -> None:
    assert str(Violation("memory", "device g0", "3 bytes short")) == (
        "memory: device g0: 3 bytes short"
    )


def test_predict_refuses_an_incomplete_plan() -> None:
    with pytest.raises(InvalidPlan, match="missing: 1F2: is not on g2"):
        predict(problem(), dropped("1F2")(base("split")))


def spans(plan: PipelinePlan, device: str, s: int) -> dict[int, dict[str, ScheduledAction]]:
    """By microbatch and kind what ``device`` computes for stage ``s``."""
    found: dict[int, dict[str, ScheduledAction]] = {}
    for entry in plan.actions:
        action = parse_action(entry.action)
        if (entry.device, action.stage) == (device, s) and action.kind in COMPUTE:
            found.setdefault(action.microbatch, {})[action.kind] = entry
    return found


def done(span: dict[str, ScheduledAction]) -> float:
    """When a microbatch's backward ends."""
    return span["W" if "W" in span else "B"].finish_seconds


def held_for(
    given: PipelineProblem, plan: PipelinePlan, stage: Stage, span: dict[str, Any], now: float
) -> float:
    """Bytes that a microbatch keeps on a device of its stage at ``now``."""
    begun, ended = now >= span["F"].start_seconds, now >= done(span)
    copies = (not ended) + begun if plan.is_backward_first else begun and not ended
    shares = len(stage.runners(0))
    saved = [given.saved_bytes(i, i + 1, shares) for i in range(*stage.layers)]
    inputs = [given.boundary_bytes(i) / shares if i else 0.0 for i in range(*stage.layers)]
    if stage.recompute == "none":
        return copies * sum(saved)
    kept = copies * (inputs[0] if stage.recompute == "full" else sum(inputs))
    if ended or now < span["I" if "I" in span else "B"].start_seconds:
        return kept
    return kept + (max(saved) if stage.recompute == "layer" and "B" in span else sum(saved))


def waiting_for(
    given: PipelineProblem, stage: Stage, of: dict[int, dict[str, ScheduledAction]], now: float
) -> float:
    """Bytes of output gradients that wait for a W; a boundary's buffer holds one of them."""
    waiting = sum(
        "I" in span and span["I"].start_seconds <= now < span["W"].finish_seconds
        for span in of.values()
    )
    start, stop = stage.layers
    outputs = [given.boundary_bytes(i + 1) / len(stage.runners(0)) for i in range(start, stop)]
    last = waiting if stop == len(given.chain) else max(0, waiting - 1)
    return waiting * sum(outputs[:-1]) + last * outputs[-1]


def versions(plan: PipelinePlan, s: int, now: float) -> int:
    """How many versions of stage ``s``'s weights its device holds at ``now``."""
    leader = 0 if plan.weights == "stash+vertical-sync" else s
    mine, leaders = (spans(plan, plan.stages[k].devices[0], k) for k in (s, leader))

    def newest(of: dict[int, dict[str, ScheduledAction]], when: float) -> int:
        return sum(done(span) <= when for span in of.values())

    used = {m: newest(leaders, span["F"].start_seconds) for m, span in leaders.items()}
    needed = {used[m] for m, span in mine.items() if done(span) > now}
    return len({k for k in needed if k <= newest(mine, now)} | {newest(mine, now)})


def peak_by_instants(given: PipelineProblem, plan: PipelinePlan) -> dict[str, float]:
    """Peak memory per device, by adding up at every instant at which anything starts or ends."""
    instants = {e.start_seconds for e in plan.actions}
    instants |= {e.finish_seconds for e in plan.actions}
    peaks: dict[str, float] = {}
    for device in {name for stage in plan.stages for name in stage.devices}:
        stages = [(s, stage) for s, stage in enumerate(plan.stages) if device in stage.devices]
        work = {s: spans(plan, device, s) for s, _ in stages}
        for now in instants:
            need = 0.0
            for s, stage in stages:
                weights = given.gradient_bytes(*stage.layers)
                need += stage_static_bytes(given, stage)
                need += sum(held_for(given, plan, stage, span, now) for span in work[s].values())
                if plan.is_backward_first:
                    need += waiting_for(given, stage, work[s], now)
                need += weights * (plan.weights == "double-buffer")
                if plan.weights.startswith("stash"):
                    need += weights * (versions(plan, s, now) - 1)
            peaks[device] = max(need, peaks.get(device, 0.0))
    return peaks


@examples(100)
@given(st.one_of(scheduled(waits=True), elaborate(waits=True)))
def test_valid_plans_pass(case: tuple[PipelineProblem, PipelinePlan]) -> None:
    given_problem, plan = case
    found = predict(given_problem, plan)
    assert check(given_problem, replace(plan, predicted=found)) == ()
    assert found.peak_memory_bytes == pytest.approx(peak_by_instants(given_problem, plan))
    moves = [e for e in plan.actions if e.bytes is not None]
    passed = sum(e.bytes for e in moves)
    if plan.weights.startswith("stash"):  # summed up in the backwards
        sums = [one.layers for one in plan.stages if len(one.devices) > 1]
        passed += plan.microbatches * sum(given_problem.gradient_bytes(*one) for one in sums)
    assert sum(found.link_bytes.values()) == pytest.approx(passed)
    busy = sum(e.finish_seconds - e.start_seconds for e in plan.actions if e.bytes is None)
    used = len({name for stage in plan.stages for name in stage.devices})
    assert found.bubble == pytest.approx(1 - busy / (used * found.iteration_seconds))


@examples(60)
@given(elaborate())
def test_every_device_fits_with_its_peak_and_not_with_less(
    case: tuple[PipelineProblem, PipelinePlan],
) -> None:
    given_problem, plan = case
    peaks = predict(given_problem, plan).peak_memory_bytes
    for spare in (1, -1):
        devices = tuple(
            replace(
                device, memory_bytes=peaks[device.name] + spare if device.name in peaks else 1e12
            )
            for device in given_problem.cluster.devices
        )
        cluster = replace(given_problem.cluster, devices=devices)
        tight = PipelineProblem(given_problem.chain, cluster, plan.microbatches)
        violations = check(tight, replace(plan, digest=tight.digest))
        places = {f"device {name}" for name in peaks} if spare < 0 else set()
        assert {violation.place for violation in violations} == places
        assert {violation.rule for violation in violations} <= {"memory"}


@examples(60)
@given(st.one_of(scheduled(), elaborate()), st.data())
def test_nothing_can_start_earlier_in_a_tight_plan(
    case: tuple[PipelineProblem, PipelinePlan], data: st.DataObject
) -> None:
    """By less than the shortest action, so that it cannot jump ahead in the order."""
    given_problem, plan = case
    texts = sorted({e.action for e in plan.actions if e.start_seconds > 0})
    text = data.draw(st.sampled_from(texts))
    shortest = min(e.finish_seconds - e.start_seconds for e in plan.actions)
    start = start_of(plan, text) - shortest * data.draw(st.floats(1e-3, 0.999))
    rules = {violation.rule for violation in check(given_problem, moved(plan, text, start))}
    assert rules & {"dependency", "overlap"}


@examples(60)
@given(st.one_of(scheduled(), elaborate()), st.data())
def test_nothing_can_end_after_what_follows_it_starts(
    case: tuple[PipelineProblem, PipelinePlan], data: st.DataObject
) -> None:
    given_problem, plan = case
    every = {parse_action(entry.action) for entry in plan.actions}
    pairs = [
        (str(need), str(action))
        for action in sorted(every)
        if action.kind not in BARE  # reported for the last backward only
        for need in needs_of(plan.stages, action, every, plan.schedule.begins)
    ]
    text, follower = data.draw(st.sampled_from(pairs))
    entry = entries(plan, text)[0]
    room = start_of(plan, follower) - entry.finish_seconds
    late = entry.start_seconds + room + data.draw(st.floats(1e-6, 1))
    violations = check(given_problem, moved(plan, text, late))
    broken = {v.place for v in violations if v.rule == "dependency"}
    after = {follower}
    if plan.is_backward_first and parse_action(follower).kind is ActionKind.FORWARD:
        # A forward after its stage's own backwards: named is what comes in between, if anything.
        s = parse_action(follower).stage
        after |= {str(Action(s, kind)) for kind in BARE}
    assert broken & after


@examples(60)
@given(elaborate(), st.data())
def test_no_action_can_be_left_out_doubled_or_renamed(
    case: tuple[PipelineProblem, PipelinePlan], data: st.DataObject
) -> None:
    given_problem, plan = case
    entry = data.draw(st.sampled_from(plan.actions))
    action = parse_action(entry.action)
    rest = [e for e in plan.actions if e is not entry]
    other = replace(action, stage=len(plan.stages))
    if action.microbatch is not None:
        stages = st.integers(0, len(plan.stages) - 1)
        kinds = st.sampled_from([kind for kind in ActionKind if str(kind) not in (*BARE, "RUN")])
        names = st.builds(Action, stages, kinds, st.integers(0, plan.microbatches - 1))
        other = data.draw(names.filter(lambda drawn: drawn != action))
    for broken in (rest, [*rest, entry, entry], [*rest, replace(entry, action=str(other))]):
        assert check(given_problem, with_entries(plan, broken))


def rich_stage(start: int, stop: int, devices: str, **options: Any) -> Stage:
    return Stage((start, stop), tuple(devices.split()), **options)


ALL = frozenset((s, m) for s in range(4) for m in range(MICROBATCHES))
SOME = frozenset((s, m) for s, m in ALL if (s + m) % 2)

# Stages, in-flight limits, backwards in parts, weights. g7 is idle in all of them.
RICH: dict[str, tuple[list[Stage], tuple[int, ...], frozenset[tuple[int, int]], str]] = {
    "zero bubble": (
        [rich_stage(0, 2, "g0"), rich_stage(2, 4, "g1"), rich_stage(4, 7, "g2")],
        (3, 2, 2), ALL, "flush"),
    "vee": (
        [rich_stage(0, 2, "g0", recompute="full"), rich_stage(2, 4, "g1"),
         rich_stage(4, 5, "g1", recompute="layer"), rich_stage(5, 7, "g0", recompute="layer")],
        (4, 3, 2, 1), SOME, "flush"),
    "groups": (
        [rich_stage(0, 2, "g0 g1"), rich_stage(2, 4, "g0 g1", recompute="full"),
         rich_stage(4, 7, "g1 g2", recompute="layer")],
        (3, 2, 1), SOME, "double-buffer"),
    "turns": (
        [rich_stage(0, 3, "g0 g1", replication="round-robin"),
         rich_stage(3, 7, "g0 g1", replication="round-robin", recompute="full")],
        (2, 2), frozenset({(0, 1)}), "double-buffer"),
    "stash": (
        [rich_stage(0, 2, "g0", recompute="full"), rich_stage(2, 4, "g1"), rich_stage(4, 7, "g2")],
        (3, 2, 1), SOME, "stash"),
    "vertical sync": (
        [rich_stage(0, 2, "g0"), rich_stage(2, 4, "g1"), rich_stage(4, 7, "g2")],
        (3, 2, 1), SOME, "stash+vertical-sync"),
}  # fmt: skip


@cache
def rich_problem() -> PipelineProblem:
    return small_problem(LAYERS, 8, MICROBATCHES, parts=True)


@cache
def rich(name: str) -> PipelinePlan:
    stages, in_flight, split, weights = RICH[name]
    plan = valid_plan(
        rich_problem(), stages, in_flight=in_flight, split=split, weights=weights,  # type: ignore[arg-type]
    )  # fmt: skip
    return with_figures(rich_problem(), plan)


def texts_of(plan: PipelinePlan, kind: str) -> list[str]:
    found = (parse_action(entry.action) for entry in plan.actions)
    return [str(action) for action in found if action.kind == kind]


def first_of(kind: str, damage: Callable[[str], Damage]) -> Damage:
    """``damage`` of the plan's first action of ``kind``, if it has any."""

    def broken(plan: PipelinePlan) -> PipelinePlan | None:
        texts = texts_of(plan, kind)
        return damage(texts[0])(plan) if texts else None

    return broken


def as_kind(text: str, kind: str) -> str:
    action = parse_action(text)
    return str(Action(action.stage, ActionKind(kind), None if kind in BARE else action.microbatch))


def also(text: str, kind: str, **changes: Any) -> Damage:
    """Beside every entry of ``text`` one of another kind."""
    return lambda plan: with_entries(
        plan,
        [
            *plan.actions,
            *(replace(e, action=as_kind(text, kind), **changes) for e in entries(plan, text)),
        ],
    )


def handed_over(damage: Callable[[PipelinePlan, int, int], PipelinePlan]) -> Damage:
    """``damage`` of the first stage and microbatch that is not sent on."""

    def broken(plan: PipelinePlan) -> PipelinePlan | None:
        for s, m in product(range(len(plan.stages) - 1), range(MICROBATCHES)):
            if not entries(plan, f"{s}SEND_F{m}"):
                return damage(plan, s, m)
        return None

    return broken


def sent_in_memory(plan: PipelinePlan, s: int, m: int) -> PipelinePlan:
    group = plan.stages[s].runners(m)
    return also(
        f"{s}F{m}", "SEND_F",
        sources=group, targets=group, bytes=rich_problem().boundary_bytes(plan.stages[s].layers[1]),
    )(plan)  # fmt: skip


def gradient(plan: PipelinePlan, s: int, m: int) -> str:
    return f"{s}I{m}" if entries(plan, f"{s}I{m}") else f"{s}B{m}"


def of_two_stages_at_once(plan: PipelinePlan) -> PipelinePlan | None:
    """A forward of one stage while its device begins the backward of another."""
    for s, stage in enumerate(plan.stages):
        for t, other in enumerate(plan.stages):
            if s != t and stage.runners(0)[0] == other.runners(0)[0]:
                return moved(plan, f"{s}F0", start_of(plan, gradient(plan, t, 0)))
    return None


def reduce_before_the_last_weights(plan: PipelinePlan) -> PipelinePlan | None:
    for text in texts_of(plan, "REDUCE_GRAD"):
        s = parse_action(text).stage
        parts = [w for w in texts_of(plan, "W") if parse_action(w).stage == s]
        if parts:
            return moved(plan, text, max(start_of(plan, w) for w in parts))
    return None


def recomputation(recompute: str) -> Damage:
    """The first stage of another kind said to forget this, its actions as before."""

    def damage(plan: PipelinePlan) -> PipelinePlan | None:
        for s, stage in enumerate(plan.stages):
            if (stage.recompute == "none") != (recompute == "none"):
                return restaged(s, recompute=recompute)(plan)
        return None

    return damage


def whole_memory(plan: PipelinePlan) -> PipelinePlan | None:
    """Whole stages kept in memory said to be kept layer by layer."""
    for s, stage in enumerate(plan.stages):
        if stage.recompute == "full" and s > 0:
            return restaged(s, recompute="layer")(plan)
    return None


def other_weights(*weights: str) -> Damage:
    """Other semantics, figures as before; not where the new ones may need as much memory."""
    return lambda plan: None if plan.weights in weights else replace(plan, weights=weights[0])


RICH_DAMAGES: dict[str, tuple[str, Damage]] = {
    "no weight gradient": ("missing", first_of("W", dropped)),
    "no input gradient": ("missing", first_of("I", dropped)),
    "weight gradient twice": ("twice", first_of("W", doubled)),
    "whole backward beside its parts": ("unexpected", first_of("I", lambda t: also(t, "B"))),
    "whole backward for the input's": ("missing", first_of(
        "I", lambda t: renamed(t, as_kind(t, "B")))),
    "weight gradient before the input's": ("dependency", first_of(
        "W", lambda t: put_at_start_of(t, as_kind(t, "I")))),
    "shorter weight gradient": ("duration", first_of("W", lambda t: stretched(t, 0.99))),
    "longer input gradient": ("duration", first_of("I", lambda t: stretched(t, 1.01))),
    "weight gradient on another device": ("unexpected", first_of(
        "W", lambda t: changed(t, device="g7"))),
    "gradient sent before it is there": ("dependency", first_of(
        "SEND_B", lambda t: lambda plan: moved(
            plan, t, start_of(plan, gradient(plan, parse_action(t).stage,
                                             parse_action(t).microbatch or 0))))),
    "activations not sent": ("missing", first_of("SEND_F", dropped)),
    "gradients not sent": ("missing", first_of("SEND_B", dropped)),
    "sent to itself": ("unexpected", handed_over(sent_in_memory)),
    "sent back to itself": ("unexpected", handed_over(
        lambda plan, s, m: also(f"{s + 1}F{m}", "SEND_B")(plan))),
    "before what is handed over": ("dependency", handed_over(
        lambda plan, s, m: moved(plan, f"{s + 1}F{m}", start_of(plan, f"{s}F{m}")))),
    "before the gradient is handed over": ("dependency", handed_over(
        lambda plan, s, m: moved(
            plan, gradient(plan, s, m), start_of(plan, gradient(plan, s + 1, m))))),
    "two stages at once": ("overlap", of_two_stages_at_once),
    "reduce before the last weight gradient": ("dependency", reduce_before_the_last_weights),
    "nothing recomputed": ("duration", recomputation("none")),
    "all recomputed in no time": ("duration", recomputation("full")),
    "layers recomputed in no time": ("duration", recomputation("layer")),
    "more kept than said": ("predicted", whole_memory),
    "versions forgotten": ("predicted", other_weights("flush")),
    "versions doubled": ("predicted", other_weights("double-buffer")),
}  # fmt: skip


def rich_cases() -> Iterator[Any]:
    for name, (rule, damage) in RICH_DAMAGES.items():
        for plan_name in RICH:
            broken = damage(rich(plan_name))
            if broken is not None:
                yield pytest.param(rule, broken, id=f"{name} in {plan_name}")


@pytest.mark.parametrize("name", RICH)
def test_the_undamaged_rich_plans_are_valid(name: str) -> None:
    assert check(rich_problem(), rich(name)) == ()
    assert rich(name).predicted.peak_memory_bytes == pytest.approx(
        peak_by_instants(rich_problem(), rich(name))
    )


@pytest.mark.parametrize(("rule", "broken"), list(rich_cases()))
def test_damage_to_rich_plans_is_rejected(rule: str, broken: PipelinePlan) -> None:
    violations = check(rich_problem(), broken)
    assert rule in {violation.rule for violation in violations}
    assert all("\n" not in str(violation) for violation in violations)


@pytest.mark.parametrize("name", RICH_DAMAGES)
def test_damage_to_rich_plans_is_really_tried(name: str) -> None:
    assert any(RICH_DAMAGES[name][1](rich(plan)) is not None for plan in RICH)


def two_by_hand(
    weights: str = "flush", parts: bool = False, **options: Any
) -> tuple[PipelineProblem, PipelinePlan]:
    """The plan of `test_figures_by_hand`, where a microbatch saves half of a layer's weights.

    Stage 1 has ``options``; ``parts`` makes I a quarter of its backward.
    """
    sizes = [{"backward_seconds": 2.0}, {"backward_seconds": 4.0}]
    if parts:
        sizes[1] = {"input_gradient_seconds": 1.0, "weight_gradient_seconds": 3.0}
    layers = tuple(
        Layer(f"l{i}", 1e6, (LayerCost(840, 1.0 + i, 0.5e6, 1e9, **size),))
        for i, size in enumerate(sizes)
    )
    cluster = uniform_servers(1, 2, Link(1e9), memory_bytes=16e9)
    by_hand = PipelineProblem(Chain("hand", "test", 840, layers), cluster, 2)
    stages = [Stage((0, 1), ("s0g0",)), Stage((1, 2), ("s0g1",), **options)]
    plan = valid_plan(
        by_hand, stages, in_flight=(2, 1), weights=weights,  # type: ignore[arg-type]
        split=[(1, 0), (1, 1)] if parts else (),
    )  # fmt: skip
    assert check(by_hand, plan) == ()
    return by_hand, plan


@pytest.mark.parametrize(
    ("weights", "first", "second"),
    [
        ("flush", 2 * 0.5e6, 0.5e6),
        # Microbatch 1 needs version 0 on device 0 when microbatch 0 has gone from it.
        ("stash", 0.5e6 + 1e6, 0.5e6),
        # On device 1 too, where it starts when version 1 is there.
        ("stash+vertical-sync", 0.5e6 + 1e6, 0.5e6 + 1e6),
        ("double-buffer", 2 * 0.5e6 + 1e6, 0.5e6 + 1e6),
    ],
)
def test_versions_by_hand(weights: str, first: float, second: float) -> None:
    by_hand, plan = two_by_hand(weights)
    static = 4e6 + 2e9
    peaks = predict(by_hand, plan).peak_memory_bytes
    assert peaks == {"s0g0": static + first, "s0g1": static + second}


def test_a_pipeline_of_three_keeps_three_two_and_one_versions() -> None:
    """PipeDream's weight stashing: as many as microbatches are in flight."""
    layers = tuple(Layer(f"l{i}", 1e6, (LayerCost(840, 1.0, 0, 0, 2.0),)) for i in range(3))
    cluster = uniform_servers(1, 3, Link(1e9))
    three = PipelineProblem(Chain("c", "test", 840, layers), cluster, 8)
    stages = [Stage((i, i + 1), (f"s0g{i}",)) for i in range(3)]
    plan = valid_plan(three, stages, in_flight=(3, 2, 1), weights="stash")
    states, peaks = 3e6, predict(three, plan).peak_memory_bytes
    assert peaks == {f"s0g{i}": states + (3 - i) * 1e6 for i in range(3)}


def test_parts_and_recomputation_by_hand() -> None:
    """Of stage 1: I 1 s, W 3 s, a forward of 2 s again; the input of 1 GB is kept."""
    for recompute, again, kept in (("none", 0.0, 0.5e6), ("full", 2.0, 0.5e6 + 1e9)):
        by_hand, plan = two_by_hand(parts=True, recompute=recompute)
        lasting = {e.action: e.finish_seconds - e.start_seconds for e in plan.actions}
        assert (lasting["1I0"], lasting["1W0"]) == (1 + again, 3)
        # The gradient leaves when I ends.
        assert start_of(plan, "1SEND_B0") == 4 + 1 + again
        assert predict(by_hand, plan).peak_memory_bytes["s0g1"] == 4e6 + 2e9 + kept


def test_layer_by_layer_keeps_one_layers_activations() -> None:
    """A stage of three layers that save 3, 5 and 4 MB and pass on 1 MB each."""
    layers = tuple(
        Layer(f"l{i}", 1e6, (LayerCost(840, 1.0, saved, 1e6, None, 1.0, 1.0),))
        for i, saved in enumerate((3e6, 5e6, 4e6))
    )
    cluster = uniform_servers(1, 1, Link(1e9))
    for split, during in (((), 5e6), ([(0, 0)], 3e6 + 5e6 + 4e6)):
        alone = PipelineProblem(Chain("c", "test", 840, layers), cluster, 1)
        plan = valid_plan(alone, [Stage((0, 3), ("s0g0",), recompute="layer")], split=split)
        assert predict(alone, plan).iteration_seconds == 3 + 3 + 6
        assert predict(alone, plan).peak_memory_bytes["s0g0"] == 3 * 4e6 + 2 * 1e6 + during


def test_a_layer_that_knows_only_its_whole_backward_is_named() -> None:
    known = small_problem(LAYERS, 8, MICROBATCHES, parts=True)
    layers = (*known.chain.layers[:5], *problem().chain.layers[5:])
    given_problem = replace(known, chain=replace(known.chain, layers=layers))
    stages = make_stages((2, 4, 7), (1, 1, 1), ("split",) * 3)
    sound = valid_plan(given_problem, stages, split=[(0, 1), (1, 2)])
    assert check(given_problem, sound) == ()
    (violation,) = check(given_problem, valid_plan(given_problem, stages, split=[(2, 0)]))
    assert str(violation).startswith("parts: stage 2: layer 'layer5' has only the time of")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (restaged(0, recompute="some"), "recompute: stage 0: recompute 'some'"),
        (lambda plan: replace(plan, weights="mirror"), "use one of 'flush', 'stash', "),
        (lambda plan: replace(plan, weights="stash"),
         "unexpected: 0REDUCE_GRAD on g0: a stage without replicas has nothing to reduce, others "
         "may do it in the backward"),
        (lambda plan: replace(restaged(0, replication="round-robin")(plan), weights="stash"),
         "stage 0: 'stash' on 2 devices in turn needs an all-reduce per round"),
        (also("0F0", "UPDATE"), "the optimizer step takes no time here"),
        (also("0F0", "SEND_F", sources=("g0", "g1"), targets=("g0", "g1"), bytes=1.0),
         "the same devices run this microbatch in both stages"),
        (also("0I1", "B"), "the backward is split into I and W"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_rich_plan(damage: Damage, message: str) -> None:
    broken = damage(rich("groups"))
    assert broken is not None
    assert any(message in str(violation) for violation in check(rich_problem(), broken))


@pytest.mark.parametrize("devices", [["g0"], ["g0", "g1"], ["g0", "g1", "g3"]])
def test_the_parts_of_a_backward_add_up(devices: list[str]) -> None:
    """On devices of one kind, for the share of a microbatch that each of them has."""
    at = [rich_problem().cluster.index[name] for name in devices]
    parts = rich_problem().gradient_seconds(1, 4, at)
    assert sum(parts) == pytest.approx(rich_problem().compute_seconds(1, 4, at)[1])
    assert parts[0] == pytest.approx(rich_problem().compute_seconds(1, 4, at)[0])


def test_only_the_turns_of_other_devices_pass_a_boundary() -> None:
    """Even microbatches stay on g0, odd ones come from g1."""
    stages = [rich_stage(0, 3, "g0 g1", replication="round-robin"), rich_stage(3, 7, "g0")]
    plan = valid_plan(rich_problem(), stages, in_flight=(2, 2))
    assert check(rich_problem(), plan) == ()
    assert texts_of(plan, "SEND_F") == ["0SEND_F1", "0SEND_F3"]
    passed = predict(rich_problem(), plan).link_bytes
    assert passed["0-1"] == 4 * rich_problem().boundary_bytes(3)


@pytest.mark.parametrize("weights", ["flush", "stash"])
def test_rounding_is_no_second_microbatch_in_flight(weights: str) -> None:
    """A forward that starts 0.1 ns before the backward that makes room for it has ended."""
    by_hand, plan = two_by_hand(weights)
    early = moved(plan, "1F1", 8 - 1e-10)
    assert check(by_hand, early) == ()
    peaks = (predict(by_hand, each).peak_memory_bytes for each in (plan, early))
    assert next(peaks) == next(peaks)


def test_older_documents_without_capacities_are_valid() -> None:
    older = figures(capacity_bytes={})(base(next(iter(BASES))))
    assert check(problem(), older) == ()
