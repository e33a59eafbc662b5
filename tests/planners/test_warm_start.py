"""A search from a given plan: where its stages go, its times, and what is refused."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from plans import make_stages, small_problem, valid_plan
from profiles import examples
from strategies import hard_problem

from stagewright.executor.simulation.simulate import simulate
from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, silent
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.machines.parts import first_devices
from stagewright.graphs.models.chain import Chain
from stagewright.solvers.planners.replanning import replan
from stagewright.solvers.planners.steps.proposal import Choices, Proposal, cost_of
from stagewright.solvers.planners.steps.warm_start import mapped_stages, warm_start
from stagewright.solvers.planning import plan

ROUNDING = 1 + 1e-9
LIMITS = Limits(seconds=60.0)

quick = examples(25, derandomize=True)


def slower(chain: Chain, factors: tuple[float, ...]) -> Chain:
    """The chain with other forward times."""
    layers = tuple(
        replace(
            layer,
            costs=tuple(replace(c, forward_seconds=c.forward_seconds * by) for c in layer.costs),
        )
        for layer, by in zip(chain.layers, factors, strict=True)
    )
    return replace(chain, layers=layers)


def servers(count: int, devices: int = 2, memory: float = 16e9):
    return uniform_servers(count, devices, Link(1e10), Link(1e9), kind="fast", memory_bytes=memory)


@quick
@given(st.data())
def test_never_worse_than_the_order_of_the_given_plan_with_the_present_times(data):
    problem = data.draw(hard_problem(4, 4, 3))
    before = plan(problem, "general", Limits(0.3)).plan
    assume(before is not None)
    factor = st.floats(0.5, 2.0)
    count = len(problem.chain)
    factors = tuple(data.draw(st.lists(factor, min_size=count, max_size=count)))
    changed = replace(problem, chain=slower(problem.chain, factors))
    answer = warm_start(changed, before, Choices(), LIMITS)
    simulated = simulate(changed, replace(before, digest=changed.digest)).iteration_seconds
    assert isinstance(answer, Proposal)
    assert cost_of(changed, answer) <= simulated * ROUNDING
    found = plan(changed, "auto", Limits(0.2), choices=Choices(start=before))
    assert found.cost <= simulated * ROUNDING
    assert check(changed, found.plan) == ()


@pytest.mark.parametrize("replication", ["split", "round-robin"])
def test_an_unchanged_problem_keeps_the_plan_or_improves_it(replication):
    problem = small_problem()
    stages = make_stages((2, 4, 6), (2, 1, 3), (replication, "split", replication))
    before = valid_plan(problem, stages)
    cost = max(one.finish_seconds for one in before.actions)
    answer = warm_start(problem, before, Choices(), LIMITS)
    assert answer.stages == before.stages
    assert cost_of(problem, answer) <= cost * ROUNDING


def test_stages_keep_their_devices_and_get_free_ones_for_those_that_left():
    """Server 1 leaves; its stage moves to the free server 2, whose first device is used up last."""
    chain = small_problem().chain
    stages = (
        Stage((0, 2), ("s0g0", "s0g1")),
        Stage((2, 4), ("gone0", "gone1"), recompute="full"),
        Stage((4, 6), ("s1g0",)),
    )
    mapped = mapped_stages(PipelineProblem(chain, servers(3), 4), stages)
    assert mapped[0] == stages[0]
    assert mapped[2] == stages[2]
    assert mapped[1].recompute == "full"
    assert mapped[1].layers == (2, 4)
    # s1g1 is next to the third stage, inside its server; then any free device.
    assert mapped[1].devices[0] == "s1g1"
    assert mapped[1].devices[1] in ("s2g0", "s2g1")


def test_without_free_devices_stages_shrink_and_join():
    chain = small_problem().chain
    problem = PipelineProblem(chain, servers(1), 4)
    stages = (
        Stage((0, 1), ("a",)),
        Stage((1, 2), ("s0g0", "b"), "round-robin"),
        Stage((2, 4), ("c", "d")),
        Stage((4, 6), ("s0g1",)),
    )
    assert mapped_stages(problem, stages) == (Stage((0, 4), ("s0g0",)), Stage((4, 6), ("s0g1",)))
    gone = tuple(replace(stage, devices=(f"x{s}",)) for s, stage in enumerate(stages))
    mapped = mapped_stages(problem, gone)
    assert [stage.layers for stage in mapped] == [(0, 1), (1, 6)]
    assert {stage.devices for stage in mapped} == {("s0g0",), ("s0g1",)}


def test_a_plan_for_other_devices_and_microbatches_is_scheduled_again():
    chain = small_problem().chain
    before = plan(PipelineProblem(chain, servers(3), 4), "spp", LIMITS).plan
    changed = PipelineProblem(chain, servers(2), 6)
    result = plan(changed, "auto", Limits(0.5), choices=Choices(start=before))
    assert check(changed, result.plan) == ()
    given_attempt = result.attempts[0]
    assert given_attempt.planner == "given"
    assert given_attempt.reason.startswith("the given plan, scheduled again; ")
    assert result.cost <= given_attempt.cost_seconds


def test_stages_are_spread_over_devices_that_are_added(counting_clock):
    """Eight equal layers on one of two servers: with both, half the time is in reach."""
    layers = small_problem().chain.layers
    cost = replace(layers[0].costs[0], forward_seconds=1.0, backward_seconds=2.0)
    equal = tuple(replace(layers[0], name=f"l{l}", costs=(cost,)) for l in range(8))
    chain = replace(small_problem().chain, layers=equal)
    before = PipelineProblem(chain, servers(1), 8)
    known = plan(before, "gpipe", LIMITS).plan
    found = replan(replace(before, cluster=servers(2)), known, Choices(), Limits(0.5), silent)
    assert len({name for stage in found.stages for name in stage.devices}) == 4
    assert found.notes[0] == "the given plan in its order"
    cost = cost_of(replace(before, cluster=servers(2)), found)
    assert cost < 0.7 * known.predicted.iteration_seconds


@quick
@given(st.data())
def test_a_plan_near_the_given_one_is_valid_and_never_worse(counting_clock, data):
    problem = data.draw(hard_problem(4, 4, 3))
    devices = data.draw(st.integers(1, len(problem.cluster)))
    before = plan(
        replace(problem, cluster=first_devices(problem.cluster, devices)), "general", Limits(0.2)
    ).plan
    assume(before is not None)
    first = warm_start(problem, before, Choices(), LIMITS)
    found = replan(problem, before, Choices(), Limits(0.2), silent)
    if isinstance(first, Proposal):
        assert cost_of(problem, found) <= cost_of(problem, first) * ROUNDING
        assert check(problem, assemble(problem, "given", found.stages, found.starts)) == ()
    else:
        assert found == first


def test_a_plan_that_no_longer_fits_saves_memory_or_is_left_out():
    problem = small_problem()
    before = plan(problem, "spp", LIMITS).plan
    peak = max(before.predicted.peak_memory_bytes.values())
    for share, choices in ((0.8, Choices()), (0.8, Choices(recompute="none"))):
        changed = replace(problem, memory_limit_bytes=share * peak)
        answer = warm_start(changed, before, choices, LIMITS)
        if isinstance(answer, Proposal):
            result = plan(changed, "general", Limits(0.3), choices=replace(choices, start=before))
            assert check(changed, result.plan) == ()
            assert result.cost <= cost_of(changed, answer) * ROUNDING
        else:
            assert "does not fit" in answer.reason
    assert (
        "does not fit"
        in warm_start(replace(problem, memory_limit_bytes=2e6), before, Choices(), LIMITS).reason
    )


def test_a_periodic_plan_gives_its_stages():
    problem = small_problem()
    before = plan(problem, "1f1b-star", LIMITS).plan
    answer = warm_start(problem, before, Choices(), LIMITS)
    assert answer.stages == before.stages


def test_other_layers_are_refused_in_one_line():
    problem = small_problem()
    before = plan(problem, "dp", LIMITS).plan
    layers = problem.chain.layers
    fewer = replace(problem, chain=replace(problem.chain, layers=layers[:-1]))
    other = replace(layers[2], name="other")
    renamed = replace(problem.chain, layers=(*layers[:2], other, *layers[3:]))
    for changed, message in (
        (fewer, "is for 6 layers, model .* has 5"),
        (replace(problem, chain=renamed), "layer 2 of the given plan is .*, of model .* 'other'"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            plan(changed, "auto", LIMITS, choices=Choices(start=before))
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="does not support a given plan to start from: use"):
        plan(problem, "spp", LIMITS, choices=Choices(start=before))
