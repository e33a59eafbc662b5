"""Named planners whose stages all offload: valid plans, less memory, and what is proved of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from strategies import hard_problem

from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, Progress
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan_class import DISJOINT_SPLIT, class_of
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.planners.steps.planner import PlannerOptions, require_honoured
from stagewright.solvers.planners.steps.proposal import Choices
from stagewright.solvers.planners.structures.uniform import UNIFORM_OPTIONS
from stagewright.solvers.planning import PLANNERS, plan

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
