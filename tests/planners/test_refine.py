"""The search on the stages of a plan: never worse, within its limits, often at the optimum."""

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
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound
from stagewright.formulations.plans.plan_class import EVERY_FINITE
from stagewright.formulations.plans.structure import Structure
from stagewright.graphs.machines.cluster import Device, from_matrix
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.planners.baselines.simple import plan_dp, plan_gpipe
from stagewright.solvers.planners.general import plan_general
from stagewright.solvers.planners.steps.proposal import Choices, Proposal, cost_of
from stagewright.solvers.planners.structures import refine as search
from stagewright.solvers.planners.structures.refine import PlainPrices, refine
from stagewright.solvers.planners.structures.reordering import Rebuilding

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
