"""Plans that all offload, or get shards: valid, less memory, and what is proved of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import small_problem
from profiles import examples
from strategies import hard_problem

from stagewright.executor.simulation.simulate import simulate
from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, Progress, Status
from stagewright.formulations.plans.memory import static_bytes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan_class import DISJOINT_SPLIT, class_of
from stagewright.formulations.schedules.published.kinds import ScheduleChoice
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.planners.steps.planner import PlannerOptions, require_honoured
from stagewright.solvers.planners.steps.proposal import Choices
from stagewright.solvers.planners.structures.uniform import UNIFORM_OPTIONS
from stagewright.solvers.planning import PLANNERS, Result, plan

LIMITS = Limits(seconds=0.5)  # spp takes all of it
NAMED = tuple(name for name, one in PLANNERS.items() if one.options is UNIFORM_OPTIONS)
OFFLOAD = Choices(offload=True)
GB = 1e9


def hosted(problem: PipelineProblem, rate: float) -> PipelineProblem:
    """The problem on devices whose link to the host is known."""
    devices = tuple(replace(one, host_bytes_per_second=rate) for one in problem.cluster.devices)
    return replace(problem, cluster=replace(problem.cluster, devices=devices))


def chain_of(layers: int, saved: float) -> Chain:
    """Equal layers of 3 s without parameters, each keeps ``saved`` bytes of a microbatch."""
    cost = LayerCost(1, 1.0, saved, 0.0, 2.0)
    return Chain("equal", "by hand", 1, tuple(Layer(f"l{i}", 0.0, (cost,)) for i in range(layers)))


def saving(memory: float, rate: float = 100 * GB) -> PipelineProblem:
    """Four layers of 1 GB on four devices, six microbatches."""
    cluster = uniform_servers(1, 4, Link(10 * GB), memory_bytes=memory)
    return hosted(PipelineProblem(chain_of(4, GB), cluster, 6), rate)


def test_the_named_planners() -> None:
    assert set(NAMED) == {"spp", "servers", "exact", "dp", "gpipe", "pipedream", "hetpipe"}


@pytest.mark.parametrize("planner", NAMED)
@examples(10, derandomize=True)
@given(data=st.data())
def test_every_stage_offloads_in_a_valid_plan(planner: str, data: st.DataObject) -> None:
    problem = hosted(data.draw(hard_problem(3, 3, 3)), data.draw(st.sampled_from((1e8, 1e12))))
    result = plan(problem, planner, LIMITS, choices=OFFLOAD)
    if result.plan is None:
        assert result.reason
        return
    assert check(problem, result.plan) == ()
    assert all(stage.offload for stage in result.plan.stages)
    assert class_of(result.plan).offload
    assert result.plans.contains(class_of(result.plan))
    assert not DISJOINT_SPLIT.contains(result.plans)
    assert result.bound <= result.cost


@pytest.mark.parametrize("planner", ["spp", "exact", "hetpipe"])
def test_where_memory_is_short_offloading_is_faster(planner: str) -> None:
    """Two microbatches of a layer fit: the first devices of a pipeline want three and four."""
    problem = saving(2.1 * GB)
    plain, away = (plan(problem, planner, LIMITS, choices=one) for one in (None, OFFLOAD))
    assert away.cost < plain.cost
    assert away.cost == pytest.approx(27, abs=1)  # (6 + 3) microbatches of 3 s


def test_a_plan_that_fits_with_offloading_alone() -> None:
    """GPipe keeps all six microbatches of its layer, 6 GB."""
    problem = saving(2.1 * GB)
    assert plan(problem, "gpipe", LIMITS).plan is None
    plain = plan(saving(100 * GB), "gpipe", LIMITS).plan
    away = plan(problem, "gpipe", LIMITS, choices=OFFLOAD).plan
    assert check(problem, away) == ()
    assert max(plain.predicted.peak_memory_bytes.values()) == 6 * GB
    assert max(away.predicted.peak_memory_bytes.values()) <= 2.1 * GB


def test_a_microbatch_alone_must_fit() -> None:
    for planner in NAMED:
        assert plan(saving(0.9 * GB), planner, LIMITS, choices=OFFLOAD).plan is None
    assert plan(saving(1.1 * GB), "gpipe", LIMITS, choices=OFFLOAD).plan is not None


def test_with_recomputation_allowed_the_faster_wins() -> None:
    """A fast link to the host beats computing again, a slow one does not."""
    both = Choices("full", offload=True)
    fast = plan(saving(2.1 * GB, 100 * GB), "spp", LIMITS, choices=both).plan
    slow = plan(saving(2.1 * GB, 0.1 * GB), "spp", LIMITS, choices=both).plan
    assert all(stage.offload for stage in fast.stages)
    assert {stage.recompute for stage in slow.stages} == {"full"}


@pytest.mark.parametrize("planner", [name for name, one in PLANNERS.items() if one.options.offload])
def test_a_device_without_a_known_host_is_named(planner: str) -> None:
    problem = saving(100 * GB)
    *known, other = problem.cluster.devices
    devices = (*known, replace(other, host_bytes_per_second=None))
    unknown = replace(problem, cluster=replace(problem.cluster, devices=devices))
    with pytest.raises(InputError, match=f"host_bytes_per_second .* {other.name!r} has none"):
        plan(unknown, planner, choices=OFFLOAD)


def test_only_costs_of_plans_are_reported() -> None:
    """What the planner takes stages to cost that keep nothing is no plan's cost."""
    steps: list[Progress] = []
    problem = saving(2.1 * GB, 0.5 * GB)
    result = plan(problem, "spp", LIMITS, steps.append, OFFLOAD)
    assert min(step.objective for step in steps if step.objective is not None) == result.cost


def test_what_is_not_honoured_is_refused_with_who_does() -> None:
    """A planner honours nothing unless its options say so."""
    plain = replace(PLANNERS["spp"], options=PlannerOptions())
    for choices, what in (
        (OFFLOAD, "offloading"),
        (Choices("full"), "recompute 'full'"),
        (Choices(group_size=1), "a group size"),
        (Choices(period_seconds=1.0), "a period"),
        (Choices(backend="highs"), "a backend"),
    ):
        with pytest.raises(InputError, match=f"'spp' does not support {what}: use .*madpipe"):
            require_honoured(plain, choices, PLANNERS.values())


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
