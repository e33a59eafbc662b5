"""Published schedules as seeds: valid, within memory, no slower than the same kinds by `order`."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from strategies import hard_problem

from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, silent
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan_class import SHARED_SPLIT
from stagewright.formulations.schedules.published.kinds import ScheduleChoice
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.planners.order import plan_order
from stagewright.solvers.planners.published import PublishedSearch
from stagewright.solvers.planners.steps.proposal import (
    Choices,
    NoPlan,
    Proposal,
    class_of_proposal,
    cost_of,
)
from stagewright.solvers.planning import plan

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
