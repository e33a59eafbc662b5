"""The notes on what PipeDream's recurrence predicts: figures by hand."""

import pytest

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.planners.baselines.pipedream import optimum
from stagewright.solvers.planners.steps.proposal import Choices
from stagewright.solvers.planning import plan

MB = 1e6


def problem_of(memory: float, parameters: float, layers: int = 2) -> PipelineProblem:
    """Layers of F = 1 s and B = 2 s on two devices at 10 MB/s; SGD without momentum."""
    cost = LayerCost(8, 1.0, 3 * MB, 0.0, 2.0)
    chain = Chain(
        "small",
        "by hand",
        8,
        tuple(Layer(f"l{i}", parameters * MB, (cost,)) for i in range(layers)),
        0.0,
    )
    devices = uniform_servers(1, 2, Link(10 * MB), memory_bytes=memory * MB)
    return PipelineProblem(chain, devices, 4)


def reason(problem: PipelineProblem, planner: str, **choices) -> str:
    return plan(problem, planner, Limits(10.0), choices=Choices(**choices)).reason


def test_a_straight_pipeline_takes_what_is_predicted_and_its_drain():
    """3 s per microbatch; 4 of them take 15 s with the drain, 3.75 s each."""
    assert reason(problem_of(1e6, 50.0), "pipedream") == (
        "PipeDream's recurrence: 3 s per microbatch, checked: 3.75 s, of which slowest device or "
        "channel 3 s, filling, draining and waiting 750 ms"
    )


def test_an_all_reduce_after_the_backward_is_no_prediction_of_the_recurrence():
    """One layer on two devices: max(3 / 2, 10 MB / 10 MB/s) = 1.5 s; the plan takes 1.5 + 1 s."""
    problem = problem_of(1e6, 10.0, layers=1)
    assert optimum(problem).seconds == pytest.approx(1.5)
    assert reason(problem, "pipedream-async").endswith(
        "PipeDream's recurrence: 1.5 s per microbatch, checked: 2.5 s, because: all-reduce and "
        "update after the backward, shared channels +1 s"
    )


def test_an_agreement_has_no_causes():
    assert reason(problem_of(1e6, 50.0), "pipedream-async").endswith(
        "PipeDream's recurrence: 3 s per microbatch, checked: 3 s"
    )


def test_memory_makes_a_period_longer():
    """The first stage has no room for a second microbatch and its version: 6 s instead of 3."""
    assert reason(problem_of(120.0, 50.0), "pipedream-async").endswith(
        "PipeDream's recurrence: 3 s per microbatch, checked: 6 s, because: memory +3 s"
    )


def test_other_groups_than_the_recurrence_are_not_explained():
    assert "recurrence" not in reason(problem_of(1e6, 50.0), "pipedream-async", group_size=1)


def test_recomputation_is_of_the_plan_alone():
    """A forward again, 4 s for each of 4 microbatches, and a drain of 4 s."""
    assert reason(problem_of(1e6, 50.0), "pipedream", recompute="full") == (
        "PipeDream's recurrence: 3 s per microbatch, checked: 5 s, of which slowest device or "
        "channel 4 s, filling, draining and waiting 1 s"
    )
