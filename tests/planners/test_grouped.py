"""Stages that share groups of devices: valid plans within memory, never slower than known ones."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from strategies import hard_problem

import stagewright
from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, silent
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan_class import SHARED_SPLIT
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.planners.general import plan_general
from stagewright.solvers.planners.grouped import GroupedSearch
from stagewright.solvers.planners.steps.proposal import Choices, NoPlan, Proposal, class_of_proposal
from stagewright.solvers.planners.steps.proposal import cost_of as cost

EXAMPLES = Path(__file__).parents[2] / "examples"
MB = 1e6


@examples(30)
@given(st.data())
def test_plans_are_valid_and_never_slower(data):
    problem = data.draw(hard_problem(4, 4, 4))
    given_plan = plan_general(problem, Limits(0.05), silent, Choices("auto", True))
    known = [given_plan] if isinstance(given_plan, Proposal) else []
    found = GroupedSearch(problem, Limits(0.1), silent).run(known, Limits(0.1))
    if isinstance(found, NoPlan):
        assert not found.proved
        return
    plans = class_of_proposal(found)
    assert SHARED_SPLIT.contains(plans)
    assert check(problem, assemble(problem, "grouped", found.stages, found.starts)) == ()
    if known and SHARED_SPLIT.contains(class_of_proposal(known[0])):
        assert (
            cost(problem, found) <= cost(problem, known[0]) or class_of_proposal(known[0]).offload
        )


def test_a_loop_in_two_directions_is_found():
    """Four layers of 3 s on two devices: four stages, I and W, and no device waits long."""
    cost_of_layer = LayerCost(
        1, 1.0, MB, MB, input_gradient_seconds=1.0, weight_gradient_seconds=1.0
    )
    chain = Chain(
        "loop", "by hand", 1, tuple(Layer(f"l{i}", MB, (cost_of_layer,)) for i in range(4))
    )
    cluster = uniform_servers(2, 1, Link(1e15), Link(1e15), memory_bytes=1000 * MB)
    found = GroupedSearch(PipelineProblem(chain, cluster, 4), Limits(2.0), silent).run(
        [], Limits(2.0)
    )
    assert isinstance(found, Proposal)
    # Each device computes for 24 s; the second one begins after the first layer.
    assert cost(PipelineProblem(chain, cluster, 4), found) <= 25.0 + 1e-6


@pytest.mark.slow
def test_rounds_turn_and_a_large_all_reduce_is_hidden():
    """Rounds that begin at the same group, with the embedding in a stage of two layers: 141 ms."""
    model = stagewright.load_model(EXAMPLES / "profiles" / "bert-large.v100.json")
    cluster = stagewright.load_cluster(EXAMPLES / "clusters" / "v100-8x4.json")
    problem = PipelineProblem(model, cluster, 8)
    found = GroupedSearch(problem, Limits(30.0), silent).run([], Limits(30.0))
    assert isinstance(found, Proposal)
    assert cost(problem, found) < 0.127
