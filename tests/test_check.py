"""The checker accepts valid plans and rejects plans broken in every way we can think of."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import make_stages, scheduled, small_problem, valid_plan

from stagewright.formulations.actions import ActionKind, parse_action
from stagewright.formulations.check import Violation, check, predict, require_valid
from stagewright.formulations.pipeline import PipelineProblem
from stagewright.formulations.plan import (
    Bound,
    Certificate,
    Guarantee,
    InvalidPlan,
    PipelinePlan,
    Schedule,
    ScheduledAction,
    Stage,
)
from stagewright.graphs.chain import Chain, Layer, LayerCost
from stagewright.graphs.cluster import Link, uniform_servers

MICROBATCHES = 5
LAYERS = 7
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
    """A valid plan, with the right figures and a made-up but consistent certificate."""
    cuts, replicas, ways, order, in_flight = BASES[name]
    stages = make_stages(cuts, replicas, ways)
    plan = valid_plan(problem(), stages, order=order, in_flight=in_flight)
    figures = predict(problem(), plan)
    cost = figures.iteration_seconds
    certificate = Certificate(
        cost_seconds=cost,
        bound_seconds=cost / 2,
        gap=0.5,
        proved_by="busiest device",
        schedule_bound_seconds=0.9 * cost,
        schedule_gap=(cost - 0.9 * cost) / cost,
        schedule_proved_by="critical path",
        bounds=(
            Bound(cost / 4, "busiest channel", "problem"),
            Bound(cost / 2, "busiest device", "problem"),
            Bound(0.9 * cost, "critical path", "schedule"),
        ),
        guarantees=(Guarantee("Theorem 1", 2 * cost, cost, True),),
    )
    return replace(plan, predicted=figures, certificate=certificate)


def entries(plan: PipelinePlan, text: str) -> list[ScheduledAction]:
    return [entry for entry in plan.schedule.actions if entry.action == text]


def with_entries(plan: PipelinePlan, actions: list[ScheduledAction]) -> PipelinePlan:
    return replace(plan, schedule=Schedule(tuple(actions)))


def edited(plan: PipelinePlan, text: str, **changes: Any) -> PipelinePlan:
    """Every entry of action ``text`` with ``changes``."""
    assert entries(plan, text)
    return with_entries(
        plan,
        [replace(e, **changes) if e.action == text else e for e in plan.schedule.actions],
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
        plan, [replace(e, action=names.get(e.action, e.action)) for e in plan.schedule.actions]
    )


def start_of(plan: PipelinePlan, text: str) -> float:
    return entries(plan, text)[0].start_seconds


def one_changed(plan: PipelinePlan, text: str, device: str, **changes: Any) -> PipelinePlan:
    return with_entries(
        plan,
        [
            replace(e, **changes) if (e.action, e.device) == (text, device) else e
            for e in plan.schedule.actions
        ],
    )


def dropped(text: str) -> Damage:
    return lambda plan: with_entries(plan, [e for e in plan.schedule.actions if e.action != text])


def doubled(text: str) -> Damage:
    return lambda plan: with_entries(plan, [*plan.schedule.actions, *entries(plan, text)])


def added(text: str, **changes: Any) -> Damage:
    """One more action, made from 1F0."""
    return lambda plan: with_entries(
        plan, [*plan.schedule.actions, replace(entries(plan, "1F0")[0], action=text, **changes)]
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
    return with_entries(plan, [e for e in plan.schedule.actions if (e.action, e.device) != gone])


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
            for e in plan.schedule.actions
        ],
    )


def last_stage(text: str, other: str) -> Damage:
    """On the last stage: action ``text`` moved to the start of ``other``."""

    def damage(plan: PipelinePlan) -> PipelinePlan:
        s = len(plan.stages) - 1
        return moved(plan, f"{s}{text}", start_of(plan, f"{s}{other}"))

    return damage


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
        more = Bound(seconds * plan.certificate.cost_seconds, "someone", scope)
        return certified(bounds=(*plan.certificate.bounds, more))(plan)

    return damage


def headline(prefix: str) -> Damage:
    """A better headline bound than any listed, with the gap that follows from it."""

    def damage(plan: PipelinePlan) -> PipelinePlan:
        cost = plan.certificate.cost_seconds
        return certified(**{f"{prefix}bound_seconds": 0.95 * cost, f"{prefix}gap": 0.05})(plan)

    return damage


def schedule_bound_as_problem_bound(plan: PipelinePlan) -> PipelinePlan:
    c = plan.certificate
    return certified(
        bound_seconds=c.schedule_bound_seconds, gap=c.schedule_gap, proved_by=c.schedule_proved_by
    )(plan)


def weak_headline(plan: PipelinePlan) -> PipelinePlan:
    """A headline bound that is listed, but is not the best."""
    weak = plan.certificate.bounds[0]
    return certified(bound_seconds=weak.seconds, proved_by=weak.proved_by, gap=0.75)(plan)


def scaled_cost(plan: PipelinePlan) -> PipelinePlan:
    return certified(cost_seconds=0.9 * plan.certificate.cost_seconds)(plan)


def guarantee(factor: float, holds: bool) -> Damage:
    def damage(plan: PipelinePlan) -> PipelinePlan:
        cost = plan.certificate.cost_seconds
        return certified(guarantees=(Guarantee("Lemma 1", factor * cost, cost, holds),))(plan)

    return damage


NAN = math.nan

# Name of the damage: (the rule that must be reported, the damage).
DAMAGES: dict[str, tuple[str, Damage]] = {
    "digest of another problem": ("digest", lambda plan: replace(plan, digest="0" * 64)),
    "more microbatches": (
        "microbatches", lambda plan: replace(plan, microbatches=MICROBATCHES + 1)),
    "unknown weight semantics": ("weights", lambda plan: replace(plan, weights="stash")),
    "layer gap": ("layers", relayered(0, 0, -1)),
    "layer overlap": ("layers", relayered(1, -1, 0)),
    "first layer missing": ("layers", relayered(0, 1, 0)),
    "last layer missing": ("layers", lambda plan: replace(plan, stages=plan.stages[:-1])),
    "a layer too many": ("layers", relayered(-1, 0, 1)),
    "stages in reverse": ("layers", lambda plan: replace(plan, stages=plan.stages[::-1])),
    "device in two stages": ("devices", restaged(1, devices=("g0",))),
    "device twice in a stage": ("devices", restaged(0, devices=("g0", "g0"))),
    "unknown device": ("devices", renamed_device),
    "unknown replication": ("devices", restaged(0, replication="mirror")),
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
    "link bytes understated": ("predicted", table_entry("link_bytes", "0-1", 1.0)),
    "link left out": ("predicted", table_entry("link_bytes", "0", None)),
    "cost forged": ("certificate", scaled_cost),
    "cost NaN": ("certificate", certified(cost_seconds=NAN)),
    "gap forged": ("certificate", certified(gap=0.0)),
    "gap rounded off": ("certificate", certified(gap=0.5 - 1e-6)),
    "schedule gap forged": ("certificate", certified(schedule_gap=0.0)),
    "bound above the cost": ("certificate", bound(1.01, "schedule")),
    "negative bound": ("certificate", bound(-1, "problem")),
    "bound NaN": ("certificate", bound(NAN, "problem")),
    "bound that nobody proved": ("certificate", headline("")),
    "schedule bound that nobody proved": ("certificate", headline("schedule_")),
    "bound proved by another": ("certificate", certified(proved_by="an oracle")),
    "schedule bound sold as the problem's": ("certificate", schedule_bound_as_problem_bound),
    "bound that is not the best": ("certificate", weak_headline),
    "guarantee said to hold": ("certificate", guarantee(0.5, True)),
    "guarantee said to fail": ("certificate", guarantee(2, False)),
}  # fmt: skip


def cases() -> Iterator[Any]:
    """Every damage on every plan to which it applies."""
    for name, (rule, damage) in DAMAGES.items():
        for plan_name in BASES:
            broken = damage(base(plan_name))
            if broken is not None:
                yield pytest.param(rule, broken, id=f"{name} in {plan_name}")


@pytest.mark.parametrize("name", BASES)
def test_the_undamaged_plans_are_valid(name: str) -> None:
    assert check(problem(), base(name)) == ()
    ends = [entry.finish_seconds for entry in base(name).schedule.actions]
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
        needs.append((problem().static_bytes(*size), problem().saved_bytes(*size)))
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
    need = problem().static_bytes(0, LAYERS, 1) + 3 * problem().saved_bytes(0, LAYERS, 1)
    for memory, valid in ((need, True), (need - 1, False)):
        tight = small_problem(LAYERS, 8, MICROBATCHES, memory)
        plan = valid_plan(tight, stages, in_flight=[3])
        # The naive scheduler prefers backwards; hold them back so that three are in flight.
        gpipe = three_in_flight(tight, plan)
        assert (check(tight, gpipe) == ()) is valid
        assert (tight.in_flight_limit(0, LAYERS, [0]) >= 3) is valid


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
        Layer(f"l{i}", 1e6, (LayerCost(1, 1.0 + i, 3e6, 1e9, 2.0 + 2 * i),)) for i in range(2)
    )
    cluster = uniform_servers(1, 2, Link(1e9), memory_bytes=16e9)
    by_hand = PipelineProblem(Chain("hand", "test", 1, layers), cluster, 2)
    stages = [Stage((0, 1), ("s0g0",)), Stage((1, 2), ("s0g1",))]
    plan = valid_plan(by_hand, stages, in_flight=(2, 1))
    starts = {entry.action: entry.start_seconds for entry in plan.schedule.actions}
    assert starts == {
        "0F0": 0, "0F1": 1, "0SEND_F0": 1, "0SEND_F1": 2, "1F0": 2, "1B0": 4, "1F1": 8,
        "1SEND_B0": 8, "0B0": 9, "1B1": 10, "1SEND_B1": 14, "0B1": 15,
    }  # fmt: skip
    found = predict(by_hand, plan)
    assert found.iteration_seconds == 17
    assert found.bubble == pytest.approx(1 - (2 * 3 + 2 * 6) / (2 * 17))
    # Weights, gradients and two optimizer states, 2 GB of buffers, then 3 MB per microbatch.
    assert found.peak_memory_bytes == {
        "s0g0": 4e6 + 2e9 + 2 * 3e6,
        "s0g1": 4e6 + 2e9 + 1 * 3e6,
    }
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
        (e for e in plan.schedule.actions if "SEND" in e.action and e.sources[0] in "g0g1g2"),
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
    with pytest.raises(InvalidPlan, match="missing: 1F2: does not stand on g2"):
        predict(problem(), dropped("1F2")(base("split")))


def peak_by_instants(given_problem: PipelineProblem, plan: PipelinePlan) -> dict[str, float]:
    """Peak memory per device, by counting at the start of every forward."""
    peaks = {}
    for stage in plan.stages:
        size = (*stage.layers, len(stage.runners(0)))
        for device in stage.devices:
            mine = [e for e in plan.schedule.actions if e.device == device]
            begins = [e.start_seconds for e in mine if parse_action(e.action).kind == "F"]
            ends = [e.finish_seconds for e in mine if parse_action(e.action).kind == "B"]
            most = max(
                (sum(b <= t for b in begins) - sum(e <= t for e in ends) for t in begins),
                default=0,
            )
            peaks[device] = given_problem.static_bytes(*size)
            peaks[device] += most * given_problem.saved_bytes(*size)
    return peaks


@settings(max_examples=60, deadline=None)
@given(scheduled(waits=True))
def test_valid_plans_pass(case: tuple[PipelineProblem, PipelinePlan]) -> None:
    given_problem, plan = case
    found = predict(given_problem, plan)
    assert check(given_problem, replace(plan, predicted=found)) == ()
    assert found.peak_memory_bytes == pytest.approx(peak_by_instants(given_problem, plan))
    moves = [e for e in plan.schedule.actions if e.bytes is not None]
    assert sum(found.link_bytes.values()) == pytest.approx(sum(e.bytes for e in moves))
    busy = sum(e.finish_seconds - e.start_seconds for e in plan.schedule.actions if e.bytes is None)
    used = sum(len(stage.devices) for stage in plan.stages)
    assert found.bubble == pytest.approx(1 - busy / (used * found.iteration_seconds))


@settings(max_examples=60, deadline=None)
@given(scheduled(), st.data())
def test_nothing_can_start_earlier_in_a_tight_plan(
    case: tuple[PipelineProblem, PipelinePlan], data: st.DataObject
) -> None:
    """By less than the shortest action, so that it cannot jump ahead in the order."""
    given_problem, plan = case
    texts = sorted({e.action for e in plan.schedule.actions if e.start_seconds > 0})
    text = data.draw(st.sampled_from(texts))
    shortest = min(e.finish_seconds - e.start_seconds for e in plan.schedule.actions)
    start = start_of(plan, text) - shortest * data.draw(st.floats(1e-3, 0.999))
    rules = {violation.rule for violation in check(given_problem, moved(plan, text, start))}
    assert rules & {"dependency", "overlap"}


@settings(max_examples=60, deadline=None)
@given(scheduled(), st.data())
def test_nothing_can_end_after_what_follows_it_starts(
    case: tuple[PipelineProblem, PipelinePlan], data: st.DataObject
) -> None:
    given_problem, plan = case
    last = len(plan.stages) - 1
    follower = {}
    for entry in plan.schedule.actions:
        action = parse_action(entry.action)
        s, m = action.stage, action.microbatch
        match action.kind:
            case ActionKind.FORWARD:
                follower[entry.action] = f"{s}SEND_F{m}" if s < last else f"{s}B{m}"
            case ActionKind.SEND_FORWARD:
                follower[entry.action] = f"{s + 1}F{m}"
            case ActionKind.SEND_BACKWARD:
                follower[entry.action] = f"{s - 1}B{m}"
            case ActionKind.BACKWARD if s > 0:
                follower[entry.action] = f"{s}SEND_B{m}"
    text = data.draw(st.sampled_from(sorted(follower)))
    entry = entries(plan, text)[0]
    room = start_of(plan, follower[text]) - entry.finish_seconds
    late = entry.start_seconds + room + data.draw(st.floats(1e-6, 1))
    violations = check(given_problem, moved(plan, text, late))
    assert ("dependency", follower[text]) in {(v.rule, v.place) for v in violations}
