"""A better order for stages on shared devices: never slower, valid, within memory."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from profiles import examples
from strategies import hard_problem

from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, silent
from stagewright.formulations.plans.assembly import assemble, certify
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.plan_class import SHARED_SPLIT
from stagewright.formulations.plans.structure import Structure, work_of
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.pipelines.every_plan import every_plan_bounds
from stagewright.solvers.pipelines.structures.scheduling import Priority, best_schedule
from stagewright.solvers.planners.general import plan_general
from stagewright.solvers.planners.steps.proposal import Choices, NoPlan, Proposal, cost_of
from stagewright.solvers.planners.structures.reordering import reorder
from stagewright.solvers.proofs import prove

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
