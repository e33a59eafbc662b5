"""Planner ``pipedream-async``: weights that change after every microbatch, in periodic plans."""

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from periodic_oracles import brute_force_period, naive_check
from profiles import examples

import stagewright
from stagewright.executor.simulation.simulate import simulate
from stagewright.formulations.backprop.orders import OutOfOrder
from stagewright.formulations.checking.check import check
from stagewright.formulations.checking.proofs import verdicts
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.patterns.pattern_problems import pattern_problem
from stagewright.formulations.plans.actions import STASH, STASH_VERTICAL_SYNC
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.formulations.schedules.published.kinds import ScheduleChoice
from stagewright.formulations.schedules.runtimes import torch_runtime
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.service.pipelines import planning
from stagewright.solvers.planners.steps.proposal import Choices
from stagewright.solvers.planning import Result, plan

MB = 1e6


def problem_of(
    seconds: list[float],
    devices: int,
    memory: float = 1e6,
    saved: float = 3.0,
    weights: float = 1.0,
    bandwidth: float = 1e12,
    microbatches: int = 4,
) -> PipelineProblem:
    """Layers of F and twice as long B; bytes in megabytes, SGD."""
    layers = tuple(
        Layer(f"l{i}", weights * MB, (LayerCost(8, one, saved * MB, MB, 2 * one),))
        for i, one in enumerate(seconds)
    )
    cluster = uniform_servers(1, devices, Link(bandwidth), memory_bytes=memory * MB)
    return PipelineProblem(Chain("small", "by hand", 8, layers, 0.0), cluster, microbatches)


def planned(problem: PipelineProblem, **choices: Any) -> Result:
    return plan(problem, "pipedream-async", Limits(5.0), choices=Choices(**choices))


def plan_of(problem: PipelineProblem, **choices: Any) -> PipelinePlan:
    found = planned(problem, **choices).plan
    assert found is not None
    assert check(problem, found) == ()
    return found


@pytest.mark.parametrize("vertical_sync", [False, True])
def test_versions_of_a_straight_pipeline(vertical_sync: bool) -> None:
    """PipeDream: stage s of n has n - s microbatches in flight, and as many versions.

    With vertical sync every stage has the versions of the first. Buffers are on both sides of a
    boundary, an activation and a gradient.
    """
    n, weights, saved = 5, 7.0, 3.0
    problem = problem_of([1.0] * n, n, weights=weights, saved=saved, bandwidth=1e30, microbatches=1)
    found = plan_of(problem, vertical_sync=vertical_sync, group_size=1)
    assert [stage.layers for stage in found.stages] == [(s, s + 1) for s in range(n)]
    assert found.weight_rule == (STASH_VERTICAL_SYNC if vertical_sync else STASH)
    assert found.predicted is not None
    assert found.predicted.iteration_seconds == pytest.approx(3.0)
    # More microbatches are in flight than in two iterations: none waits for an update.
    assert simulate(problem, found).iteration_seconds == pytest.approx(3.0)
    for s, stage in enumerate(found.stages):
        old = n - 1 if vertical_sync else n - 1 - s
        bytes_ = found.predicted.peak_memory_bytes[stage.devices[0]] / MB
        buffers = 2 * ((s > 0) + (s < n - 1))
        assert bytes_ == pytest.approx((2 + old) * weights + (n - s) * saved + buffers), s


@st.composite
def problems(draw: st.DrawFn) -> PipelineProblem:
    seconds = draw(st.lists(st.sampled_from([0.5, 1.0, 1.0, 2.0]), min_size=1, max_size=4))
    return problem_of(
        seconds,
        draw(st.integers(1, 3)),
        memory=draw(st.sampled_from([1e6, 40.0, 25.0, 18.0])),
        saved=draw(st.sampled_from([0.0, 2.0, 5.0])),
        weights=draw(st.sampled_from([0.0, 1.0, 3.0])),
        bandwidth=draw(st.sampled_from([1e12, 4 * MB])),
        microbatches=draw(st.sampled_from([1, 4])),
    )


def straight(problem: PipelineProblem) -> Iterator[list[Stage]]:
    """All partitions, a device for each stage."""
    layers, devices = len(problem.chain), problem.cluster.devices
    for count in range(1, min(layers, len(devices)) + 1):
        for cuts in combinations(range(1, layers), count - 1):
            parts = pairwise([0, *cuts, layers])
            yield [Stage(part, (devices[s].name,)) for s, part in enumerate(parts)]


@examples(60)
@given(problems(), st.booleans())
def test_plans_are_valid_and_their_bounds_hold(
    problem: PipelineProblem, vertical_sync: bool
) -> None:
    """Of its stages a plan has the least period that any order of turns gives."""
    result = planned(problem, vertical_sync=vertical_sync)
    rule = STASH_VERTICAL_SYNC if vertical_sync else STASH
    least = min(brute_force_period(pattern_problem(problem, s, rule)) for s in straight(problem))
    assert (result.plan is None) == (least == math.inf)
    if result.plan is None:
        assert result.status is Status.INFEASIBLE
        return
    found = result.plan
    assert found.weight_rule == rule
    assert naive_check(problem, replace(found, certificate=None)) == []
    assert check(problem, found) == ()
    assert found.predicted is not None
    assert found.certificate is not None
    iteration = found.predicted.iteration_seconds
    own = brute_force_period(pattern_problem(problem, found.stages, rule))
    assert iteration == pytest.approx(problem.microbatches * own)
    assert simulate(problem, found).iteration_seconds == pytest.approx(iteration)
    for bound in found.certificate.bounds:
        most = iteration if bound.scope == "schedule" else problem.microbatches * least
        assert bound.seconds <= most * (1 + 1e-9), bound.proved_by
    assert {one.verdict for one in verdicts(problem, found)} == {"verified"}


def test_replicas_sum_their_gradients_up_in_every_backward() -> None:
    """A backward ends with the all-reduce, and every microbatch's bytes are on the links."""
    problem = problem_of([1.0], 2, bandwidth=4 * MB)
    found = plan_of(problem, group_size=2)
    (backward,) = {one.seconds for one in found.schedule.actions if one.action == "0B"}
    assert backward == pytest.approx(2.0 / 2 + 2 * (2 - 1) / 2 * 1 / 4)
    assert {one.action for one in found.schedule.actions} == {"0F", "0B"}
    assert found.predicted is not None
    assert found.predicted.link_bytes == {"0": 4 * MB}


def test_memory_decides_between_the_partitions() -> None:
    """One stage has one version and one microbatch; a straight pipeline has more of both."""
    ample = plan_of(problem_of([1.0] * 4, 2, saved=4.0, weights=1.0), group_size=1)
    assert len(ample.stages) == 2
    tight = problem_of([1.0] * 4, 2, memory=24.5, saved=4.0, weights=1.0)
    found = plan_of(tight, group_size=1)
    assert found.predicted is not None
    assert max(found.predicted.peak_memory_bytes.values()) <= 24.5 * MB
    assert found.predicted.iteration_seconds > ample.predicted.iteration_seconds  # type: ignore[union-attr]


def test_what_is_missing_is_named() -> None:
    result = planned(problem_of([1.0] * 4, 2, memory=5.0))
    assert result.plan is None
    assert "bytes short" in result.reason


def test_vertical_sync_is_for_this_planner() -> None:
    with pytest.raises(InputError, match="'spp' does not support vertical sync"):
        plan(problem_of([1.0], 1), "spp", Limits(1.0), choices=Choices(vertical_sync=True))


def test_layers_without_time_have_no_period() -> None:
    with pytest.raises(InputError, match="the layers take no time"):
        planned(problem_of([0.0, 0.0], 2))


def test_python_passes_every_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of([1.0] * 4, 2)
    made = plan_of(problem)
    choices = Choices(
        "full", True, 2, 0.5, made, "highs", ScheduleChoice("1f1b"), OutOfOrder("data"), 64, True,
        "optimizer",
    )  # fmt: skip
    passed = [one for one in fields(Choices) if one.name != "runtime"]  # plan has its own
    assert all(getattr(choices, one.name) != one.default for one in passed)
    seen = []

    class StoppedError(Exception): ...

    def answer(request: Any, *_: Any) -> Any:
        seen.append(request)
        raise StoppedError

    monkeypatch.setattr(planning, "plan", answer)
    with pytest.raises(StoppedError):
        stagewright.plan(problem.chain, problem.cluster, choices=choices)
    with pytest.raises(InputError, match="give runtime='megatron' or the like to plan"):
        stagewright.plan(problem.chain, problem.cluster, choices=Choices(runtime=torch_runtime(4)))
    for one in passed:
        assert getattr(seen[0], one.name) == getattr(choices, one.name), one.name
