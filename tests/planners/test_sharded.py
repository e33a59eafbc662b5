"""Shards that are put into plans that planners found without them."""

from dataclasses import replace

import pytest
from plans import small_problem

from stagewright.executor.simulation.simulate import simulate
from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.plans.memory import static_bytes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.schedules.published.kinds import ScheduleChoice
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.solvers.planners.steps.proposal import Choices
from stagewright.solvers.planning import Result, plan


def one_server() -> PipelineProblem:
    """Four devices that best take every layer together."""
    problem = small_problem(4, 4, 4, updates=True)
    devices = uniform_servers(1, 4, Link(1e12), memory_bytes=16e9, kind="fast")
    return PipelineProblem(problem.chain, devices, 4)


def planned(problem: PipelineProblem, planner: str, **choices: object) -> Result:
    return plan(problem, planner, Limits(seconds=1.5), choices=Choices(**choices))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("planner", "shards"), [("spp", "gradients"), ("spp", "weights"), ("general", "optimizer")]
)
def test_replicated_stages_divide_their_state(planner: str, shards: str) -> None:
    problem = one_server()
    whole, found = planned(problem, planner), planned(problem, planner, shards=shards)
    assert whole.plan is not None
    assert found.plan is not None
    assert check(problem, found.plan) == ()
    assert simulate(problem, found.plan).iteration_seconds == pytest.approx(found.cost)
    kinds = {stage.shards for stage in found.plan.stages if stage.replicas > 1}
    assert kinds == {shards}
    assert found.plan.certificate is None
    assert (found.status, found.bound, found.gap) == (Status.FEASIBLE, None, None)
    assert f"shards {shards} on stage" in found.reason
    assert whole.plan.predicted is not None
    assert found.plan.predicted is not None
    before, after = (one.predicted.peak_memory_bytes for one in (whole.plan, found.plan))
    sharing = {name for stage in found.plan.stages if stage.replicas > 1 for name in stage.devices}
    for name, size in after.items():
        assert size < before[name] if name in sharing else size == before[name]


@pytest.mark.parametrize("shards", ["optimizer", "gradients", "weights"])
def test_what_fits_only_with_shards_is_found(shards: str) -> None:
    """All layers on four devices, of which none has room for two moments of every number."""
    problem = one_server()
    whole = problem.gradient_bytes(0, len(problem.chain))
    room = 3.2 * whole + problem.saved_bytes(0, len(problem.chain), 4)
    tight = replace(problem, memory_limit_bytes=room)
    without = planned(tight, "dp")
    assert without.plan is None
    found = planned(tight, "dp", shards=shards)
    assert found.plan is not None
    assert check(tight, found.plan) == ()
    assert [stage.shards for stage in found.plan.stages] == [shards]
    assert "without shards no plan was found" in found.reason
    nothing = planned(replace(problem, memory_limit_bytes=2e7), "dp", shards=shards)
    assert nothing.plan is None
    assert nothing.reason.endswith("nor was a plan with shards found")


@pytest.mark.parametrize("shards", ["optimizer", "weights"])
def test_plans_of_smaller_states_without_replicas_are_no_answer(shards: str) -> None:
    """Layers that take whole microbatches only, of which one is a byte too large for a device."""
    problem = one_server()
    layers = tuple(replace(one, min_samples=4) for one in problem.chain.layers)
    problem = replace(problem, chain=replace(problem.chain, layers=layers))
    room = max(
        static_bytes(problem, l, l + 1, 1) + problem.saved_bytes(l, l + 1, 1)
        for l in range(len(layers))
    )
    fits = planned(replace(problem, memory_limit_bytes=room), "spp", shards=shards)
    assert fits.plan is not None
    assert check(replace(problem, memory_limit_bytes=room), fits.plan) == ()
    found = planned(replace(problem, memory_limit_bytes=room - 1), "spp", shards=shards)
    assert found.plan is None
    assert found.reason.endswith("nor was a plan with shards found")


def test_a_plan_that_does_not_fit_with_shards_keeps_its_state() -> None:
    """What plain SGD saves is less than the whole layer takes beside its part."""
    problem = one_server()
    one = replace(
        problem.chain, layers=problem.chain.layers[:1], optimizer_bytes_per_parameter_byte=0.0
    )
    problem = replace(problem, chain=one)
    room = static_bytes(problem, 0, 1, 4) + problem.saved_bytes(0, 1, 4)
    tight = replace(problem, memory_limit_bytes=room)
    found = planned(tight, "dp", shards="weights")
    assert found.plan is not None
    assert check(tight, found.plan) == ()
    assert found.plan.certificate is not None
    assert found.reason.startswith("no stage divides its state: with shards weights the plan does")


def test_a_chosen_microbatch_is_kept() -> None:
    problem = one_server()
    found = planned(problem, "2bw-flush", batch=24, shards="optimizer")
    assert found.plan is not None
    size = found.plan.microbatch_size
    assert size is not None
    of = replace(problem, microbatches=found.plan.microbatches, microbatch_size=size)
    assert check(of, found.plan) == ()
    assert "optimizer" in {stage.shards for stage in found.plan.stages}


def test_replicas_in_turn_keep_their_weights() -> None:
    problem = small_problem(4, 4, 4)
    order = ScheduleChoice("1f1b-rr", replicas=(2, 1, 1))
    found = planned(problem, "order", order=order, shards="optimizer")
    assert found.plan is not None
    assert [stage.shards for stage in found.plan.stages] == ["optimizer", "none", "none"]
    kept = planned(problem, "order", order=order, shards="weights")
    assert kept.plan is not None
    assert {stage.shards for stage in kept.plan.stages} == {"none"}
    assert kept.reason.startswith("no stage divides its state: its replicas take turns")
    assert kept.plan.certificate is not None  # it is the plan that was found


def test_plans_without_replicas_stay() -> None:
    problem = replace(small_problem(4, 1, 2))
    found = planned(problem, "spp", shards="optimizer")
    assert found.plan is not None
    assert found.reason.startswith("no stage divides its state: none has replicas")


def test_plans_that_overlap_have_no_shards() -> None:
    with pytest.raises(InputError, match=r"shards 'optimizer' need a finite schedule .* use auto"):
        planned(one_server(), "pipedream-async", shards="optimizer")
    known = "none, optimizer, gradients, weights"
    with pytest.raises(InputError, match=f"shards must be one of {known}, got 'z'"):
        Choices(shards="z")  # type: ignore[arg-type]
