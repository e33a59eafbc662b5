"""Planner ooo on a single device: Algorithm 1 in plans, against both usual orders."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from streams import device_problem

from stagewright.executor.drawing.chrome import chrome_trace
from stagewright.executor.drawing.page import page
from stagewright.executor.drawing.timeline import timeline
from stagewright.executor.programs.periodic import lower_backward_first
from stagewright.executor.programs.verification.verify import verify
from stagewright.executor.simulation.simulate import simulate
from stagewright.formulations.backprop.models import TWO_STREAMS
from stagewright.formulations.backprop.orders import OutOfOrder
from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.plans.plan_class import EVERY_PLAN
from stagewright.graphs.documents.errors import InputError
from stagewright.service.pipelines.requests import PlanRequest
from stagewright.solvers.planners.one_device import one_device_proposals
from stagewright.solvers.planners.steps.proposal import Choices
from stagewright.solvers.planning import plan

SINGLE = Choices(out_of_order=OutOfOrder("single"))


def planned(problem, seconds=5.0):
    return plan(problem, "ooo", Limits(seconds), choices=SINGLE)


def problem_of(layers=5, share=0.5, **options):
    return device_problem([(1.0, 1.0, 1.0)] * layers, [(share,) * 3] * layers, **options)


@st.composite
def devices(draw):
    count = draw(st.integers(1, 6))
    seconds = st.integers(0, 4).map(float)
    shares = st.sampled_from([None, 0.25, 0.5, 0.75, 1.0])
    return device_problem(
        draw(st.lists(st.tuples(seconds, seconds, seconds), min_size=count, max_size=count)),
        draw(st.lists(st.tuples(shares, shares, shares), min_size=count, max_size=count)),
        draw(st.lists(st.sampled_from([0.0, 0.5]), min_size=count, max_size=count)),
        draw(st.integers(1, 3)),
        assumed=draw(st.sampled_from([None, 0.4])),
    )


@examples(40)
@given(devices())
def test_plans_are_valid_and_run_as_planned(problem):
    found = planned(problem)
    assert check(problem, found.plan) == ()
    verify(found.plan, lower_backward_first(found.plan))
    assert found.bound <= found.cost * (1 + 1e-9)
    one = simulate(problem, found.plan)
    assert one.iteration_seconds == pytest.approx(found.cost)
    for mine, planned_ in zip(one.actions, found.plan.actions, strict=True):
        times = planned_.start_seconds, planned_.finish_seconds
        assert (mine.start_seconds, mine.finish_seconds) == pytest.approx(times)
    # At most one stream at a time is no better.
    whole = replace(problem, assumed_share=None)
    chain = whole.chain
    layers = tuple(
        replace(layer, costs=tuple(replace(
            cost, forward_share=None, input_gradient_share=None, weight_gradient_share=None)
            for cost in layer.costs))
        for layer in chain.layers
    )  # fmt: skip
    alone = planned(replace(whole, chain=replace(chain, layers=layers)))
    assert found.cost <= alone.cost * (1 + 1e-9)
    assert not alone.plan.uses_two_streams
    assert alone.gap == pytest.approx(0, abs=1e-9)


def test_half_of_the_device_for_every_kernel_hides_all_but_one_weight_gradient():
    found = planned(problem_of())
    assert (found.cost, found.bound, found.proved_by) == (11, 11, TWO_STREAMS)
    assert found.plan.uses_two_streams
    assert "one stream takes 15 s" in found.reason
    every = [one for one in found.plan.certificate.bounds if one.plans == EVERY_PLAN]
    assert max(one.seconds for one in every) == 10
    assert any(
        one.seconds == 15 and one.plans.streams == 1 for one in found.plan.certificate.bounds
    )


def test_algorithm_1_is_better_than_the_usual_order():
    """Late weight gradients suit the forwards, which leave most of the device."""
    times = [(2.0, 1.0, 2.0)] * 6
    shares = [(0.1, 0.9, 0.9)] * 6
    found = planned(device_problem(times, shares))
    assert found.reason.startswith("two streams, ")
    assert "in the usual order" in found.reason.split("(")[1]
    assert found.cost < 24


def test_the_local_search_asks_before_every_step_whether_its_time_is_over():
    asked = []

    def ended():
        asked.append(1)
        return len(asked) > 3

    problem = device_problem([(2.0, 1.0, 2.0)] * 6, [(0.1, 0.9, 0.9)] * 6)
    assert [one for one in one_device_proposals(problem, ended) if one.sub_ends is not None]
    assert 4 <= len(asked) <= 5


def test_without_shares_there_is_one_stream_and_a_note():
    found = planned(problem_of(share=None))
    assert found.cost == 15
    assert not found.plan.uses_two_streams
    assert "forward_share" in found.reason
    assert "--share" in found.reason


def test_assumed_shares_are_named_and_belong_to_the_plan():
    problem = problem_of(share=None, assumed=0.5)
    found = planned(problem)
    assert found.cost == 11
    assert "shares are assumed, not measured: 0.5 where the profile has none" in found.reason
    assert found.plan.assumed_share == 0.5
    other = {one.rule for one in check(replace(problem, assumed_share=0.6), found.plan)}
    assert other == {"digest"}
    assert planned(problem_of(share=0.5, assumed=1.0)).cost == 11  # stated shares count


def test_whole_backwards_stay_in_the_main_stream():
    problem = problem_of(2)
    cost = replace(
        problem.chain.layers[0].costs[0], backward_seconds=2.0, input_gradient_seconds=None,
        weight_gradient_seconds=None,
    )  # fmt: skip
    layers = tuple(replace(layer, costs=(cost,)) for layer in problem.chain.layers)
    found = planned(replace(problem, chain=replace(problem.chain, layers=layers)))
    assert found.cost == 6
    assert "2 of 2 layers have whole backwards, the first is 'l0'" in found.reason


def test_memory_that_is_short_is_named():
    found = planned(problem_of(memory=2e7))
    assert found.plan is None
    assert "bytes short" in found.reason


def test_what_is_not_for_a_single_device_is_refused():
    with pytest.raises(InputError, match="the cluster has 2: use data or pipeline"):
        planned(problem_of(devices=2))
    with pytest.raises(InputError, match="k is for data parallelism"):
        OutOfOrder("single", reversed_layers=1)
    with pytest.raises(InputError, match="groups of layers are for pipelines"):
        OutOfOrder("single", group=1)
    for share in (0.0, 1.5, -1.0):
        with pytest.raises(InputError, match="above 0 and at most 1"):
            problem_of(assumed=share)
        with pytest.raises(InputError, match="forward_share must be"):
            problem_of(share=share)
    problem = problem_of(share=None)
    request = {"chain": problem.chain, "cluster": problem.cluster, "assumed_share": 0.5}
    with pytest.raises(InputError, match="for training on a single device only"):
        PlanRequest.of(**request, planner="ooo", out_of_order=OutOfOrder("data"))
    asked = PlanRequest.of(**request, planner="ooo", out_of_order=OutOfOrder("single"))
    assert asked.problem.assumed_share == 0.5


def test_jitter_changes_the_rates():
    """Every kernel twice as long as half of the device: also the rates are the same."""
    problem = problem_of(share=0.75, updates=(0.5,) * 5)
    found = planned(problem)
    slow = simulate(problem, found.plan, stragglers={"s0g0": 2.0})
    assert slow.iteration_seconds == pytest.approx(2 * found.cost)
    runs = [simulate(problem, found.plan, jitter=0.2, seed=seed) for seed in range(20)]
    ends = [one.iteration_seconds for one in runs]
    assert len(set(ends)) == 20
    assert sum(ends) / 20 == pytest.approx(found.cost, rel=0.1)
    for one in runs:
        assert one.slack_seconds == {"s0g0": 0}
        assert 0 <= one.idle_seconds["s0g0"] < one.iteration_seconds


def test_both_streams_are_drawn():
    found = planned(problem_of(share=0.75))
    names = [row.name for row in timeline(found.plan)]
    assert names == ["s0g0 · main · stages 0-4", "s0g0 · sub"]
    main, sub = timeline(found.plan)
    beside = {entry.action for entry in found.plan.actions if entry.stream == "sub"}
    assert {str(block.action) for block in sub.blocks} == beside
    assert beside < {f"{s}W0" for s in range(5)}
    assert {block.label for block in main.blocks} == set("01234")
    threads = json.loads(chrome_trace(found.plan))["traceEvents"]
    assert {one["args"]["name"] for one in threads if one["name"] == "thread_name"} == {*names}
    assert "numbers: stages" in page(found.plan)
    assert 0 <= found.plan.predicted.bubble < 1
