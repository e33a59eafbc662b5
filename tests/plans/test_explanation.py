"""Why a plan is slow: critical path, idle time and bottleneck against the definitions."""

from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import (
    _resources,
    elaborate,
    made_up_certificate,
    make_stages,
    needs_of,
    scheduled,
    small_problem,
    valid_plan,
)
from profiles import examples

import stagewright
from stagewright.executor.simulation.explanation import (
    explain_plan,
    explanation_sentences,
    proof_sentences,
)
from stagewright.executor.simulation.idle import IdleCause
from stagewright.formulations.checking.check import predict
from stagewright.formulations.plans.actions import (
    ON_DEVICE,
    REDUCE,
    SEND_B,
    SEND_F,
    Action,
    F,
    parse_action,
)
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Schedule, Stage
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost

Times = dict[Action, tuple[float, float]]
CLOSE = 1e-9


def times_of(plan: PipelinePlan) -> Times:
    """Start and end of every action; the devices of a stage run it together."""
    return {
        parse_action(one.action): (one.start_seconds, one.finish_seconds) for one in plan.actions
    }


def waits_for(plan: PipelinePlan, times: Times) -> dict[Action, list[Action]]:
    """All that an action waits for: what it needs, and what is before it on its resources."""
    begins = plan.schedule.begins if isinstance(plan.schedule, Schedule) else "forward"
    held = {one: set(_resources(plan.stages, one)) for one in times}
    found = {}
    for one, (start, _) in times.items():
        earlier = [
            a for a, (_, end) in times.items()
            if a != one and end <= start + CLOSE and held[a] & held[one]
        ]  # fmt: skip
        found[one] = [*needs_of(plan.stages, one, times, begins), *earlier]
    return found


@examples(60)
@given(st.one_of(scheduled(), elaborate()))
def test_the_critical_path_is_a_longest_chain(case: tuple[PipelineProblem, PipelinePlan]) -> None:
    _, plan = case
    found = explain_plan(plan)
    assert found is not None
    times = times_of(plan)
    before = waits_for(plan, times)
    # Every step starts as the one before it ends, and waits for it.
    assert found.path[0].entry.start_seconds == 0
    for one, other in pairwise(found.path):
        assert one.action in before[other.action]
        assert one.entry.finish_seconds == pytest.approx(other.entry.start_seconds)
    assert sum(step.seconds for step in found.path) == pytest.approx(found.iteration_seconds)

    @cache
    def longest(one: Action) -> float:
        begin, end = times[one]
        nearest = [a for a in before[one] if times[a] < times[one]]
        return end - begin + max((longest(a) for a in nearest), default=0.0)

    assert max(map(longest, times)) == pytest.approx(found.iteration_seconds)


@examples(60)
@given(st.one_of(scheduled(waits=True), elaborate(waits=True)))
def test_waits_of_the_plan_are_a_part_of_the_path(
    case: tuple[PipelineProblem, PipelinePlan],
) -> None:
    _, plan = case
    found = explain_plan(plan)
    assert found is not None
    assert all(step.wait_seconds >= -CLOSE for step in found.path)
    whole = sum(step.seconds + step.wait_seconds for step in found.path)
    assert whole == pytest.approx(found.iteration_seconds)


@examples(60)
@given(st.one_of(scheduled(waits=True), elaborate(waits=True)))
def test_work_and_idle_time_are_the_iteration(case: tuple[PipelineProblem, PipelinePlan]) -> None:
    _, plan = case
    found = explain_plan(plan)
    assert found is not None
    for name, busy in found.busy_seconds.items():
        idle = sum(found.idle_seconds[name].values())
        assert busy + idle == pytest.approx(found.iteration_seconds)
    spans = defaultdict(list)
    for one in found.idle:
        assert one.seconds > 0
        spans[one.device].append((one.start_seconds, one.finish_seconds))
    for name, its in spans.items():
        computed = [
            (a.start_seconds, a.finish_seconds)
            for a in plan.actions
            if a.device == name and parse_action(a.action).kind in ON_DEVICE
        ]
        for (_, end), (start, _) in pairwise(sorted(its + computed)):
            assert start >= end - CLOSE


@examples(80)
@given(scheduled(waits=True))
def test_idle_instants_have_the_cause_of_their_definition(
    case: tuple[PipelineProblem, PipelinePlan],
) -> None:
    _, plan = case
    found = explain_plan(plan)
    assert found is not None
    times = times_of(plan)
    before = waits_for(plan, times)
    for one in found.idle:
        at = (one.start_seconds + one.finish_seconds) / 2
        assert (one, one.cause) == (one, cause_at(plan, times, before, one.device, at))


def cause_at(
    plan: PipelinePlan, times: Times, before: dict[Action, list[Action]], device: str, at: float
) -> IdleCause:
    """Why a device is idle at an instant."""
    own = [
        a for a in times
        if device in _resources(plan.stages, a) and a.kind in ON_DEVICE
    ]  # fmt: skip
    later = sorted((a for a in own if times[a][0] >= at), key=lambda a: times[a])
    if not later:
        sums = [a for a in times if a.kind is REDUCE and device in plan.stages[a.stage].devices]
        return IdleCause.REDUCE if any(runs(times[a], at) for a in sums) else IdleCause.DRAIN
    if len(later) == len(own):
        return IdleCause.FILL
    following = later[0]
    for a in later[1:]:
        arrived = all(times[need][1] <= at for need in needs_of(plan.stages, a, times))
        if a.kind is F and arrived and (following.kind, following.stage) != (F, a.stage):
            return IdleCause.MEMORY
    last = max(before[following], key=lambda a: times[a][1])
    if times[last][1] <= at:
        return IdleCause.PLAN
    waited = {SEND_F: IdleCause.TRANSFERS, SEND_B: IdleCause.TRANSFERS, REDUCE: IdleCause.REDUCE}
    return waited.get(last.kind, IdleCause.STAGES) if runs(times[last], at) else IdleCause.STAGES


def runs(span: tuple[float, float], at: float) -> bool:
    """Whether an action runs at an instant."""
    return span[0] <= at < span[1]


def test_sentences_name_the_bottleneck_and_what_is_proved() -> None:
    problem = small_problem(microbatches=5)
    plan = valid_plan(problem, make_stages((1, 6), (2, 1), ("split", "split")))
    predicted = predict(problem, plan)
    certificate = made_up_certificate(problem, plan, predicted.iteration_seconds)
    plan = replace(plan, predicted=predicted, certificate=certificate)
    found = explain_plan(plan)
    assert found is not None
    assert found.device.devices == ("g2",)
    text = " ".join((*explanation_sentences(plan, found), *proof_sentences(plan)))
    share = found.busy_seconds["g2"] / found.iteration_seconds
    assert f"The bottleneck is stage 1 (g2): it works for {share:.1%} of the" in text
    assert "computing on stage 1" in text
    mean = sum(found.busy_seconds.values()) / 3
    uneven = f"the busiest {found.busy_seconds['g2'] / mean:.2f} times as long."
    assert uneven in text
    balanced = replace(found, busy_seconds=dict.fromkeys(found.busy_seconds, 1.0))
    assert "the busiest" not in " ".join(explanation_sentences(plan, balanced))
    assert "is a lower bound for every plan" in text
    assert f"at most {certificate.gap:.2%} can be saved there" in text


def test_a_channel_can_be_the_bottleneck() -> None:
    layers = tuple(
        Layer(f"l{i}", 0.0, (LayerCost(1, 0.01, 0.0, 1e9, backward_seconds=0.02),))
        for i in range(2)
    )
    problem = PipelineProblem(Chain("m", "t", 1, layers), uniform_servers(1, 2, Link(1e9)), 3)
    devices = [*problem.cluster.index]
    plan = valid_plan(problem, [Stage((0, 1), (devices[0],)), Stage((1, 2), (devices[1],))])
    found = explain_plan(plan)
    assert found is not None
    assert (found.bottleneck.kind, found.bottleneck.stages) == ("channel", (0, 1))
    first = explanation_sentences(plan, found)[0]
    assert first.startswith("The bottleneck is the channel between stages 0 and 1, in use for")


def test_a_period_is_explained_by_the_loads_of_an_iteration() -> None:
    problem = small_problem(microbatches=6)
    result = stagewright.plan(problem.chain, problem.cluster, 6, "madpipe")
    plan = result.plan
    assert plan is not None
    assert plan.is_periodic
    assert plan.predicted is not None
    found = explain_plan(plan)
    assert found is not None
    assert found.path == found.idle == ()
    used = len(found.busy_seconds)
    idle = sum(sum(each.values()) for each in found.idle_seconds.values())
    assert idle / used / found.iteration_seconds == pytest.approx(plan.predicted.bubble, abs=0.02)
    assert {cause for each in found.idle_seconds.values() for cause in each} == {IdleCause.PERIOD}
    assert "it works for 100.0% of" in explanation_sentences(plan, found)[0]


def test_a_schedule_that_lacks_actions_is_not_explained() -> None:
    problem = small_problem()
    plan = valid_plan(problem, [Stage((0, 6), ("g0",))])
    fewer = replace(plan, schedule=Schedule(plan.actions[1:]))
    assert explain_plan(fewer) is None
    assert explanation_sentences(fewer, None) == ()
    assert next(proof_sentences(fewer)).startswith("No lower bound is known")


def test_the_end_of_a_run_of_several_iterations_is_not_explained() -> None:
    """An update among the computations of later microbatches, as asynchronous plans have it."""
    plan = valid_plan(small_problem(updates=True), [Stage((0, 6), ("g0",))])
    assert explain_plan(plan) is not None
    last = max(one.start_seconds for one in plan.actions if "B" in one.action)
    moved = tuple(
        replace(one, start_seconds=last - 1e-3, finish_seconds=last) if "UP" in one.action else one
        for one in plan.actions
    )
    assert moved != plan.actions
    assert explain_plan(replace(plan, schedule=Schedule(moved))) is None
