"""Searches on the stages of a plan, and published seeds: never worse, valid, within limits."""

import math
import random
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles import brute_force_joint
from plans import long_problem
from profiles import by_profile, examples
from strategies import hard_problem

from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, Progress, silent
from stagewright.formulations.pipelines.bounds.stages import schedule_bounds
from stagewright.formulations.pipelines.bppm import makespan_problem
from stagewright.formulations.pipelines.grouped_stages import choices_of
from stagewright.formulations.plans.assembly import assemble, certify
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound, Stage
from stagewright.formulations.plans.plan_class import EVERY_FINITE, SHARED_SPLIT
from stagewright.formulations.plans.structure import Structure, work_of
from stagewright.formulations.schedules.published.kinds import ScheduleChoice
from stagewright.graphs.machines.cluster import Device, Link, from_matrix, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.pipelines.every_plan import every_plan_bounds
from stagewright.solvers.pipelines.structures.scheduling import Priority, best_schedule
from stagewright.solvers.planners.baselines.pipedream import plan_dp, plan_gpipe
from stagewright.solvers.planners.general import plan_general
from stagewright.solvers.planners.order import plan_order
from stagewright.solvers.planners.published import PublishedSearch
from stagewright.solvers.planners.steps.proposal import (
    Choices,
    NoPlan,
    Proposal,
    class_of_proposal,
    cost_of,
)
from stagewright.solvers.planners.structures import refine as search
from stagewright.solvers.planners.structures.refine import PlainPrices, refine
from stagewright.solvers.planners.structures.reordering import Rebuilding, reorder
from stagewright.solvers.planning import plan
from stagewright.solvers.proofs import prove

ROUNDING = 1 + 1e-9
LIMITS = Limits(seconds=60.0)


@pytest.mark.parametrize("name", ["gpipe", "general"])
@examples(20)
@given(st.data())
def test_never_worse_and_every_reported_plan_is_valid(name, data):
    problem = data.draw(hard_problem(4, 4, 4))
    if name == "gpipe":
        known = plan_gpipe(problem, LIMITS, silent)
    else:  # any sharing, replication, split backwards, memory mode
        known = plan_general(problem, Limits(0.1), silent, Choices("auto", True))
    assume(isinstance(known, Proposal))
    of_problem, of_stages = (
        Bound(0.0, "no argument", scope, EVERY_FINITE) for scope in ("problem", "schedule")
    )
    known = replace(known, bounds=(of_problem, of_stages))
    steps: list[Progress] = []
    refined = refine(problem, known, Limits(1.0), steps.append)
    costs = [cost_of(problem, known), *(step.objective for step in steps)]
    assert costs == sorted(costs, reverse=True)
    assert cost_of(problem, refined) == pytest.approx(costs[-1])
    assert refined is known or refined.guarantees == ()
    assert of_problem in refined.bounds
    assert (of_stages in refined.bounds) == (refined.stages == known.stages)
    for one in (refined, *(step.best() for step in steps)):
        assert check(problem, assemble(problem, "refined", one.stages, one.starts)) == ()


def tiny(seed: int) -> PipelineProblem:
    """Four layers, three devices of two kinds, uneven links."""
    rng = random.Random(seed)
    layers = tuple(
        Layer(f"l{i}", rng.choice((0.0, 4e6)), tuple(
            LayerCost(4, rng.randint(1, 5) * 1e-3, 1e6, rng.choice((1e5, 4e6)),
                      rng.randint(1, 9) * 1e-3, device_kind=kind)
            for kind in "ab"
        ))
        for i in range(4)
    )  # fmt: skip
    devices = [Device(f"d{v}", "aab"[v], 1e9) for v in range(3)]
    links = [[rng.choice((1e9, 1e10)) for _ in devices] for _ in devices]
    return PipelineProblem(Chain("tiny", "drawn", 4, layers, 2.0), from_matrix(devices, links), 2)


@pytest.mark.usefixtures("usual_searches")
def test_often_reaches_the_optimum_of_tiny_problems():
    """From the plan of a dynamic program; list schedules of the best stages may be longer."""
    count, reached, before = by_profile(6, 12), 0, 0
    for seed in range(count):
        problem = tiny(seed)
        least = brute_force_joint(problem)
        known = plan_dp(problem, LIMITS, silent)
        refined = cost_of(problem, refine(problem, known, LIMITS, silent))
        assert refined >= least / ROUNDING
        before += cost_of(problem, known) <= least * ROUNDING
        reached += refined <= least * ROUNDING
    assert before < count / 2
    assert reached >= count * 10 / 12


def test_ends_at_its_limits(monkeypatch):
    problem = long_problem()
    known = plan_gpipe(problem, LIMITS, silent)
    looks = []
    real = PlainPrices.__call__
    monkeypatch.setattr(
        PlainPrices, "__call__", lambda self, one: looks.append(one) or real(self, one)
    )
    token = threading.Event()
    token.set()
    assert refine(problem, known, Limits(60.0, stop=token), silent) is known
    assert refine(problem, known, LIMITS, silent, attempts=0) is known
    looks.clear()
    refine(problem, known, LIMITS, silent, attempts=30)
    assert len(looks) <= 31
    ticks = iter(range(10_000))
    monkeypatch.setattr(search, "monotonic", lambda: float(next(ticks)))
    looks.clear()
    refine(problem, known, Limits(20.0), silent)
    assert len(looks) <= 21


def test_the_same_seed_gives_the_same_plan():
    problem = tiny(1)
    known = plan_dp(problem, LIMITS, silent)
    one, other = (refine(problem, known, LIMITS, silent, 500) for _ in range(2))
    assert one.stages == other.stages


@examples(20)
@given(st.data())
def test_rebuilds_cover_the_layers_and_devices_stay_disjoint(data):
    problem = data.draw(hard_problem(5, 4, 2))
    known = plan_gpipe(problem, LIMITS, silent)
    assume(isinstance(known, Proposal))
    structure = Structure.whole(known.stages)
    moves = Rebuilding(problem, random.Random(data.draw(st.integers(0, 99))))
    prices = PlainPrices(problem, LIMITS)
    names = {one.name for one in problem.cluster.devices}
    for _ in range(30):
        structure = moves.rebuilt(structure)
        stages = structure.stages
        cuts = [0, *(stage.layers[1] for stage in stages)]
        assert [stage.layers for stage in stages] == [*pairwise(cuts)]
        assert cuts[-1] == len(problem.chain)
        used = [name for stage in stages for name in stage.devices]
        assert len({*used} & names) == len(used)
        priced, scheduling = (
            prices(structure),
            makespan_problem(problem, choices_of(problem, stages)),
        )
        assert (priced is None) == (scheduling is None)
        if priced is not None:
            seconds, made = priced.schedule(float("inf"))
            best = max(one.seconds for one in schedule_bounds(scheduling))
            assert priced.bound <= best * ROUNDING
            assert best <= seconds * ROUNDING
            assert cost_of(problem, made()) == pytest.approx(seconds)


MODES = ("none", "full", "layer")


def published(problem: PipelineProblem, ceiling: float) -> Proposal | NoPlan:
    return PublishedSearch(problem, Limits(), silent).run(ceiling, MODES, Limits(10.0))


@examples(40)
@given(st.data())
def test_seeds_are_valid_plans(data):
    problem = data.draw(hard_problem(6, 4, 4))
    search = PublishedSearch(problem, Limits(), silent)
    for seconds in (0.02, 0.2):
        found = search.run(math.inf, MODES, Limits(seconds))
    if isinstance(found, NoPlan):
        assert not found.proved
        return
    assert SHARED_SPLIT.contains(class_of_proposal(found))
    assert check(problem, assemble(problem, "published", found.stages, found.starts)) == ()


def equal_layers(memory: float = 1e12) -> PipelineProblem:
    """Eight layers with F = I = W = 1 on four devices, without transfers that take time."""
    cost = LayerCost(1, 1.0, 1e6, 1.0, input_gradient_seconds=1.0, weight_gradient_seconds=1.0)
    chain = Chain("equal", "by hand", 1, tuple(Layer(f"l{i}", 1.0, (cost,)) for i in range(8)))
    return PipelineProblem(chain, uniform_servers(1, 4, Link(1e15), memory_bytes=memory), 8)


@pytest.mark.parametrize("kind", ["interleaved-zb", "zbv", "v-half", "hanayo", "zb-h2"])
def test_no_slower_than_the_published_order(kind):
    problem = equal_layers()
    found = published(problem, math.inf)
    given_order = plan_order(problem, Limits(10.0), silent, Choices(order=ScheduleChoice(kind)))
    assert cost_of(problem, found) <= cost_of(problem, given_order) * (1 + 1e-9)


def test_what_cannot_be_better_is_left_out():
    problem = equal_layers()
    found = published(problem, math.inf)
    least = 8 * 2 * 3.0 + 3.0  # load of the last device, after the way of one microbatch
    assert cost_of(problem, found) == pytest.approx(least)
    assert isinstance(published(problem, least), NoPlan)


@pytest.mark.slow
def test_auto_bounds_all_orders_of_its_plan():
    """Backwards are split here, and no plan of whole ones is as fast."""
    result = plan(equal_layers(memory=8e6), "auto", Limits(8.0))
    assert "published" in [one.planner for one in result.attempts]
    (order,) = (
        one
        for one in result.plan.certificate.bounds
        if (one.scope, one.plans) == ("schedule", SHARED_SPLIT)
    )
    assert order.seconds == pytest.approx(result.cost)


MB = 1e6


@examples(20)
@given(st.data())
def test_never_slower_and_valid(data):
    problem = data.draw(hard_problem(4, 4, 4))
    known = plan_general(problem, Limits(0.1), silent, Choices("auto", True))
    assume(isinstance(known, Proposal))
    found = reorder(problem, known, Limits(0.3), silent)
    if isinstance(found, NoPlan):
        assert not found.proved
        return
    assert cost_of(problem, found) <= cost_of(problem, known)
    assert check(problem, assemble(problem, "reordered", found.stages, found.starts)) == ()


def looped(memory: float, parameters: float = 0.0) -> tuple[PipelineProblem, Structure]:
    """Six equal layers looped over two devices, with I and W; F saves 10 MB."""
    cost = LayerCost(1, 1.0, 10 * MB, MB, input_gradient_seconds=1.0, weight_gradient_seconds=1.0)
    chain = Chain(
        "loop", "by hand", 1, tuple(Layer(f"l{i}", parameters, (cost,)) for i in range(6))
    )
    cluster = uniform_servers(2, 1, Link(10 * MB), Link(10 * MB), memory_bytes=memory)
    names = [device.name for device in cluster.devices]
    stages = tuple(Stage((i, i + 1), (names[i % 2],)) for i in range(6))
    return PipelineProblem(chain, cluster, 4), Structure(stages, (True,) * 6)


def scheduled(problem: PipelineProblem, structure: Structure, rule: Priority) -> Proposal:
    """The list schedule of one rule."""
    work, endings, _ = work_of(problem, structure)
    found = best_schedule(work, endings, [rule])
    assert found is not None
    return Proposal(structure.stages, found.starts)


@pytest.mark.parametrize("memory", [1000 * MB, 70 * MB])
def test_a_loop_gets_shorter(memory):
    problem, structure = looped(memory)
    known = scheduled(problem, structure, Priority(math.inf, "WBF", "broad", "newest"))
    found = reorder(problem, known, Limits(10.0), silent)
    assert isinstance(found, Proposal)
    assert cost_of(problem, found) < cost_of(problem, known)
    assert check(problem, assemble(problem, "reordered", found.stages, found.starts)) == ()


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "verified"), (1.01, "refuted")])
def test_the_bound_on_all_orders_is_proved_again(factor, verdict):
    problem, structure = looped(1000 * MB)
    known = scheduled(problem, structure, Priority(math.inf, "WBF", "broad", "newest"))
    found = reorder(problem, known, Limits(10.0), silent)
    assert isinstance(found, Proposal)
    (bound,) = found.bounds
    assert (bound.scope, bound.plans) == ("schedule", SHARED_SPLIT)
    assert bound.seconds == pytest.approx(cost_of(problem, found), rel=1e-6)
    plan = assemble(problem, "reordered", found.stages, found.starts)
    certified = certify(problem, plan, [*every_plan_bounds(problem), bound], ())
    forged = replace(bound, seconds=factor * bound.seconds)
    stated = replace(certified.certificate, bounds=(forged,))
    (again,) = prove(problem, replace(certified, certificate=stated), Limits(10.0))
    assert again.verdict == verdict


def test_one_microbatch_at_a_time_stays_in_order():
    problem, structure = looped(40 * MB)
    known = scheduled(problem, structure, Priority())
    found = reorder(problem, known, Limits(0.5), silent)
    assert isinstance(found, Proposal)
    assert cost_of(problem, found) <= cost_of(problem, known)


def test_stages_that_overlap_in_part_are_not_reordered():
    cost = LayerCost(2, 1.0, MB, MB, backward_seconds=1.0)
    chain = Chain("two", "by hand", 2, tuple(Layer(f"l{i}", MB, (cost,)) for i in range(2)))
    problem = PipelineProblem(chain, uniform_servers(1, 2, Link(MB), Link(MB)), 2)
    one, two = (device.name for device in problem.cluster.devices)
    structure = Structure((Stage((0, 1), (one, two)), Stage((1, 2), (one,))), (False, False))
    found = reorder(problem, scheduled(problem, structure, Priority()), Limits(1.0), silent)
    assert isinstance(found, NoPlan)
    assert not found.proved
