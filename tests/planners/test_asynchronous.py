"""Planners `pipedream-async` and PipeDream-2BW: the best of their classes of periodic plans."""

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
from strategies import random_chain

import stagewright
from stagewright.executor.simulation.simulate import simulate
from stagewright.formulations.backprop.orders import OutOfOrder
from stagewright.formulations.checking.check import check
from stagewright.formulations.checking.proofs import verdicts
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.patterns.parallel_pipelines import Configuration, Line
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
from stagewright.solvers.planners.parallel_pipelines import RULES, PlannedPipelines
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


SIZES = (8, 4, 2, 1)
LIMITS = Limits(60.0)


def configurations(devices, layers, batch):
    for width in range(1, devices + 1):
        for depth in range(1, min(devices // width, layers) + 1):
            for size in range(1, batch + 1):
                count, rest = divmod(batch, width * size)
                if rest == 0 and depth <= count and width * size in SIZES:
                    for recompute in ("none", "full"):
                        yield Configuration(width, depth, size, count, recompute)


def slowest(chain, cuts, one):
    """The longest stage between the cuts, in seconds of a replica's share."""
    again = 2 if one.recompute == "full" else 1
    total = []
    for start, stop in pairwise(cuts):
        total.append(0.0)
        for layer in chain.layers[start:stop]:
            cost = next(cost for cost in layer.costs if cost.microbatch_size == one.microbatch_size)
            total[-1] += again * cost.forward_seconds + cost.total_backward_seconds
    return max(total)


@pytest.mark.parametrize("planner", ["2bw", "2bw-flush"])
@given(st.data())
@examples(60)
def test_the_plan_is_the_best_of_every_configuration(planner, data):
    chain = data.draw(random_chain(4, sizes=SIZES))
    servers, size = data.draw(st.sampled_from([(1, 2), (1, 3), (2, 2)]))
    memory = data.draw(st.sampled_from([0.3e9, 0.6e9, 4e9]))
    links = Link(4e9), Link(data.draw(st.sampled_from([0.5e9, 4e9])))
    cluster = uniform_servers(servers, size, *links, memory_bytes=memory)
    batch = data.draw(st.sampled_from([4, 8, 16]))
    problem = PipelineProblem(chain, cluster, 1)
    costs = PlannedPipelines(
        {
            samples: replace(problem, microbatches=batch // samples, microbatch_size=samples)
            for samples in SIZES
            if batch % samples == 0
        },
        RULES[planner],
    )
    best, count = math.inf, 0
    for one in configurations(len(cluster), len(chain), batch):
        count += 1
        seconds = costs.seconds(one)
        line = Line(one.width, one.microbatch_size, one.microbatches, one.recompute, one.depth)
        assert costs.floors(line)[-1] <= seconds * (1 + 1e-9)
        stages = costs.stages(one)
        assert all(len(stage.devices) == one.width for stage in stages)
        cuts = [stage.layers[0] for stage in stages] + [len(chain)]
        inner = combinations(range(1, len(chain)), one.depth - 1)
        balanced = min(slowest(chain, [0, *cut, len(chain)], one) for cut in inner)
        assert slowest(chain, cuts, one) == pytest.approx(balanced)
        best = min(best, seconds)
    choices = Choices(recompute="auto", batch=batch)
    found = plan(problem, planner, LIMITS, choices=choices)
    if best == math.inf:
        assert found.status is Status.INFEASIBLE
        assert f"none of {count} configurations" in found.reason
        return
    assert found.cost == pytest.approx(best)
    assert found.plan.microbatches * found.plan.microbatch_size == batch
    asked = replace(
        problem, microbatches=found.plan.microbatches, microbatch_size=found.plan.microbatch_size
    )
    assert not check(asked, found.plan)
    assert f"of {count} configurations" in found.reason


def test_replicas_are_on_one_server():
    chain = uniform_chain(6)
    cluster = uniform_servers(3, 4, Link(1e11), Link(1e8), memory_bytes=1e12)
    found = plan(PipelineProblem(chain, cluster, 8), "2bw", LIMITS, choices=Choices(group_size=4))
    server = {d.name: d.name.partition("g")[0] for d in cluster.devices}
    assert len(found.plan.stages) > 1
    for stage in found.plan.stages:
        assert len({server[name] for name in stage.devices}) == 1


def uniform_chain(layers):
    costs = tuple(LayerCost(n, 1e-3 * n, 1e5 * n, 1e5 * n, 2e-3 * n) for n in SIZES)
    return Chain("even", "test", 8, tuple(Layer(f"l{i}", 1e6, costs) for i in range(layers)), 0.0)


def test_a_batch_that_no_microbatch_divides():
    problem = PipelineProblem(uniform_chain(2), uniform_servers(1, 2, Link(1e9)), 1)
    with pytest.raises(InputError, match="the batch must be at least 1 sample, got 0"):
        plan(problem, "2bw", LIMITS, choices=Choices(batch=0))
    with pytest.raises(InputError, match="'spp' does not support a batch: use 2bw"):
        plan(problem, "spp", LIMITS, choices=Choices(batch=8))
