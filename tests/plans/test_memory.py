"""Memory is priced in one place: a change there reaches planners, bounds and checker."""

import pytest

from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.plans import memory
from stagewright.formulations.plans.actions import (
    DOUBLE_BUFFER,
    FLUSH,
    STASH,
    STASH_VERTICAL_SYNC,
    WEIGHT_RULES,
)
from stagewright.formulations.plans.memory import Kept, kept_bytes, state_factor, static_bytes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.planners.steps.proposal import Choices
from stagewright.solvers.planning import PLANNERS, plan

SEARCHES = ("spp", "exact", "auto", "general")  # take seconds to say that nothing fits
LIMITS = Limits(seconds=5.0)
WEIGHTS = 1e9  # bytes of the parameters of all layers


def problem_with(memory_bytes: float, update: float = 0.0) -> PipelineProblem:
    """Two layers on two devices; optimizer states of twice the parameters."""
    cost = LayerCost(8, 1.0, 1e6, 1e3, 2.0, update_seconds=update)
    layers = tuple(Layer(f"l{i}", WEIGHTS / 2, (cost,)) for i in range(2))
    cluster = uniform_servers(1, 2, Link(1e12), memory_bytes=memory_bytes)
    return PipelineProblem(Chain("two", "made up", 8, layers, 2.0), cluster, 2)


def sharded(problem, devices, rule=FLUSH, overlapping=False):
    """State_factor with the optimizer's state sharded over the devices of a stage (ZeRO-1)."""
    gradients = 1 + (overlapping and _gradients_wait(problem, devices))  # noqa: F821
    states = problem.chain.optimizer_bytes_per_parameter_byte / devices
    return rule.versions + gradients + states


def without_states(problem, devices, rule=FLUSH, overlapping=False):
    """State_factor with gradients in place and no optimizer's state."""
    gradients = overlapping and _gradients_wait(problem, devices)  # noqa: F821
    return rule.versions + gradients


def test_states_by_weight_rule_and_devices():
    still, updated = problem_with(1e12), problem_with(1e12, update=0.1)
    for rule, versions in ((FLUSH, 1), (STASH, 1), (STASH_VERTICAL_SYNC, 1), (DOUBLE_BUFFER, 2)):
        assert state_factor(still, 1, rule) == versions + 1 + 2
        assert state_factor(still, 2, rule) == versions + 1 + 2
    # In a periodic plan gradients wait for an all-reduce, or for the pause with the updates.
    assert state_factor(still, 1, DOUBLE_BUFFER, overlapping=True) == 2 + 1 + 2
    assert state_factor(still, 2, DOUBLE_BUFFER, overlapping=True) == 2 + 2 + 2
    assert state_factor(updated, 1, DOUBLE_BUFFER, overlapping=True) == 2 + 2 + 2


def test_rules_by_name():
    assert {rule.name for rule in WEIGHT_RULES.values()} == WEIGHT_RULES.keys()
    assert [name for name, rule in WEIGHT_RULES.items() if not rule.may_overlap] == ["flush"]
    assert [name for name, rule in WEIGHT_RULES.items() if not rule.keeps_versions] == ["flush"]


def test_buffers_are_on_both_sides_of_a_stage():
    problem = problem_with(1e12)
    whole, half = static_bytes(problem, 0, 2, 1), static_bytes(problem, 0, 1, 1)
    assert whole == 4 * WEIGHTS
    assert half == 2 * WEIGHTS + 2 * 1e3
    assert static_bytes(problem, 0, 1, 2) == 2 * WEIGHTS + 1e3  # half of a microbatch


@pytest.mark.parametrize(
    ("options", "split", "kept"),
    [
        ({}, False, Kept(2e6)),
        ({"recompute": "full"}, False, Kept(0.0, 2e6)),
        ({"recompute": "layer"}, False, Kept(1e3, 1e6)),
        ({"recompute": "layer"}, True, Kept(1e3, 2e6)),
        ({"offload": True}, False, Kept(0.0, 0.0, 2e6)),
    ],
)
def test_what_a_stage_keeps(options, split, kept):
    stage = Stage((0, 2), ("s0g0",), **options)
    assert kept_bytes(problem_with(1e12), stage, split) == kept


@pytest.mark.parametrize(
    ("planner", "choices", "tight"),
    [
        ("dp", Choices(), 3.1),
        ("1f1b-star", Choices(group_size=2), 5.1),
        ("madpipe", Choices(group_size=2), 5.1),
    ],
)
def test_sharded_optimizer_states_are_a_change_in_one_place(planner, choices, tight, monkeypatch):
    """What fits only with sharded states is planned, checked and bounded once they are priced.

    Two devices that split all layers hold 4 bytes per parameter byte (6 in a periodic plan), one
    less if the states of 2 are sharded.
    """
    # Equal problems would share the bounds that were computed before the change.
    before, after = problem_with(tight * WEIGHTS), problem_with(tight * WEIGHTS * (1 - 1e-9))
    assert plan(before, planner, LIMITS, choices=choices).status is Status.INFEASIBLE
    monkeypatch.setattr(memory.state_factor, "__code__", sharded.__code__)
    result = plan(after, planner, LIMITS, choices=choices)
    assert result.plan is not None
    assert check(after, result.plan) == ()
    assert result.bound <= result.cost
    peaks = result.plan.predicted.peak_memory_bytes
    assert all((tight - 0.1) * WEIGHTS <= peak <= tight * WEIGHTS for peak in peaks.values())


@pytest.mark.parametrize(
    "planner",
    [pytest.param(name, marks=pytest.mark.slow if name in SEARCHES else ()) for name in PLANNERS],
)
def test_every_planner_takes_its_bytes_from_there(planner, monkeypatch):
    """Without optimizer states, and gradients in place, smaller devices do."""
    problem = problem_with(1.1 * WEIGHTS)
    assert plan(problem, planner, LIMITS).status is Status.INFEASIBLE
    monkeypatch.setattr(memory.state_factor, "__code__", without_states.__code__)
    result = plan(problem_with(1.1 * WEIGHTS), planner, LIMITS)
    assert result.plan is not None
    assert check(problem, result.plan) == ()
