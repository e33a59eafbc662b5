"""A layout as a pipeline plan: its times and memory against the layout's estimate, and refusals."""

import random
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_problems import GPT2, LLAMA, MIXTRAL, QWEN2, make_problem
from profiles import UNSHRUNK, examples

from stagewright.executor.simulation.simulate import simulate
from stagewright.formulations.checking.check import check
from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.layout import Layout, parse_layout
from stagewright.formulations.parallelism.lowering import carried_out, lowered, require_expressible
from stagewright.formulations.parallelism.schedules import Schedule
from stagewright.formulations.parallelism.training import (
    TrainingProblem,
)
from stagewright.formulations.plans.actions import COMPUTE, parse_action
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.plans.plan_class import SHARDS
from stagewright.formulations.plans.timing import reduce_seconds, update_seconds
from stagewright.formulations.prices.analytic import architecture_model
from stagewright.formulations.prices.computing import Precision
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import ServerLinks
from stagewright.graphs.machines.fabric import Fabric, Level, cluster_of, fabric_of
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.service.layouts.problems import training_problem
from stagewright.solvers.planners.steps.reporting import with_certificate

SMALL = replace(LLAMA, layers=8, hidden=512, vocabulary=4096)
ARCHITECTURES = (SMALL, replace(QWEN2, layers=8, full_layers=frozenset(range(3))))
FREE = 1e19  # bytes per second


def random_case(seed: int, *, free: bool, zero: bool = False) -> tuple[TrainingProblem, Layout]:
    """A layout that a plan can express; ``free``: all but tensor exchanges take no time.

    With ``zero``, two replicas divide the optimizer's state, gradients or weights.
    """
    draw = random.Random(seed)
    pipeline, tensor = draw.choice((1, 2, 4)), draw.choice((1, 2, 4))
    layout = Layout(
        pipeline,
        tensor,
        data=draw.choice((1, 1, 2)),
        microbatch=draw.choice((1, 2)),
        chunks=draw.choice((1, 2)) if pipeline > 1 else 1,
        schedule=draw.choice(("1f1b", "zero-bubble")) if pipeline > 1 else "1f1b",
        placement=draw.choice(("data-inside", "pipeline-inside")),
    )
    other: Schedule = "zb-h2" if layout.chunks == 1 else "zbv"
    if pipeline > 1 and draw.random() < 0.4:
        layout = replace(layout, schedule=other)
    if zero:
        layout = replace(layout, data=2, zero=draw.choice((1, 2, 3)))
    precision = draw.choice((Precision(), Precision(4, 4, 4, 8), Precision(2, 2, 2, 12)))
    problem = make_problem(
        draw.choice(ARCHITECTURES), layout, draw.choice((4, 8)), precision=precision,
        fused_gradients=draw.random() < 0.5,
    )  # fmt: skip
    if free:
        levels = (Level("server", layout.tensor, 1e11), Level("all", layout.ranks, FREE))
        problem = replace(problem, fabric=replace(problem.fabric, levels=levels))
    return problem, layout


@pytest.mark.parametrize("seed", range(50))
def test_plan_and_train_plan_give_the_same_seconds_for_the_same_division(seed: int) -> None:
    """Of what both can say (docs/layouts.md), with exchanges after computations, as plans have it.

    Where the plan divides no layers, with the costs of ``stagewright model`` too.
    """
    draw = random.Random(seed)
    precision, sequence = draw.choice(("fp32", "bf16", "fp8")), draw.choice((128, 1024))
    layout = Layout(1, microbatch=draw.choice((1, 2)))
    if draw.random() < 0.5:
        schedule, pipeline = draw.choice(("1f1b", "zero-bubble")), draw.choice((2, 4, 8))
        chunks = draw.choice((1, 2))
        layout = replace(layout, pipeline=pipeline, chunks=chunks, schedule=schedule)
    else:
        tensor, data = draw.choice((1, 2)), draw.choice((1, 2, 4))
        zero = draw.choice((0, 1, 3)) if data > 1 else 0
        layout = replace(layout, tensor=tensor, data=data, zero=zero)
    # With learned positions the first stage has the longest step of the optimizer.
    of = replace(draw.choice(ARCHITECTURES), layers=16, positions=4096)
    microbatches, samples = draw.choice((8, 16)), layout.data * layout.microbatch
    fabric = fabric_of_kind("h100", layout.ranks)
    if layout.zero == 3:  # a plan's layers are gathered one by one, each with its latency
        fabric = replace(fabric, levels=(replace(fabric.levels[0], latency_seconds=0.0),))
    problem = training_problem(
        of, fabric, sequence=sequence, precision=precision,
        batch=samples * microbatches, framework="plan", overlap=False,
    )  # fmt: skip
    seconds = evaluate(problem, layout).seconds
    asked, plan = lowered(problem, layout)
    assert plan.predicted is not None
    assert plan.predicted.iteration_seconds == pytest.approx(seconds, rel=1e-9)
    if layout.tensor == 1:
        sizes = [layout.microbatch, samples]
        own = architecture_model(of, sequence, sizes, "h100", precision=precision)
        plan = carried_out(replace(asked, chain=own), problem, layout)
        assert plan.predicted is not None
        assert plan.predicted.iteration_seconds == pytest.approx(seconds, rel=1e-9)
        for one, other in zip(own.layers, asked.chain.layers, strict=True):
            assert one.parameter_bytes == other.parameter_bytes
            assert one.costs[-1].saved_bytes == other.costs[-1].saved_bytes
        state = "optimizer_bytes_per_parameter_byte"
        assert getattr(own, state) == getattr(asked.chain, state)


def computed(plan: PipelinePlan) -> float:
    """The end of the last computation of a microbatch."""
    timed = [(parse_action(one.action).kind, one.finish_seconds) for one in plan.actions]
    return max(finish for kind, finish in timed if kind in COMPUTE)


def shares_of_memory(plan: PipelinePlan, found: Estimate) -> list[float]:
    """The plan's peaks over the estimate's, without the reserve, by position in the pipeline."""
    assert plan.predicted is not None
    peaks = plan.predicted.peak_memory_bytes
    return [
        peaks[stage.devices[0]] / (memory.total - memory.reserve)
        for stage, memory in zip(plan.stages, found.memory, strict=False)
    ]


def require_lowered(asked: PipelineProblem, plan: PipelinePlan) -> float:
    """The plan is valid, and lasts as long when its order is simulated; its seconds."""
    assert check(asked, plan) == ()
    assert plan.predicted is not None
    seconds = plan.predicted.iteration_seconds
    assert simulate(asked, plan).iteration_seconds == pytest.approx(seconds, rel=1e-9)
    return seconds


def updates_of_ranks(asked: PipelineProblem, plan: PipelinePlan) -> list[float]:
    """Seconds of the optimizer's steps on the devices of every position in the pipeline."""
    found: dict[tuple[str, ...], float] = {}
    for stage in plan.stages:
        found[stage.devices] = found.get(stage.devices, 0.0) + update_seconds(asked, stage)
    return list(found.values())


@examples(200, quick=25, phases=UNSHRUNK)
@given(seed=st.integers(0, 2**32))
def test_computations_end_when_the_estimate_says(seed: int) -> None:
    """Where transfers are free the pipelines are the same; what follows is on every stage."""
    problem, layout = random_case(seed, free=True)
    found = evaluate(problem, layout)
    asked, plan = lowered(problem, layout)
    seconds = require_lowered(asked, plan)
    assert computed(plan) == pytest.approx(found.pipeline_seconds, rel=1e-9)
    # An update is on the device that computes last, or on one that has ended before it.
    by_rank = updates_of_ranks(asked, plan)
    assert max(by_rank) == pytest.approx(found.update_seconds, rel=1e-9)
    reduces = sum(reduce_seconds(asked, stage) for stage in plan.stages)
    assert found.pipeline_seconds + min(by_rank) <= seconds * (1 + 1e-9)
    assert seconds <= (found.pipeline_seconds + max(by_rank) + reduces) * (1 + 1e-9)


@examples(200, quick=25, phases=UNSHRUNK)
@given(seed=st.integers(0, 2**32))
def test_differences_over_real_links(seed: int) -> None:
    """Transfers carry t times what the estimate sends, and wait for their channel.

    Between d replicas each pair exchanges a d-th, over the slowest of all their links.
    """
    problem, layout = random_case(seed, free=False)
    found = evaluate(problem, layout)
    asked, plan = lowered(problem, layout)
    seconds = require_lowered(asked, plan)
    ratio = computed(plan) / found.pipeline_seconds
    if layout.data == 1:
        assert 1 - 1e-9 <= ratio <= (1.001 if layout.tensor == 1 else 1.3)
    assert 0.9 <= ratio <= 1.5
    # Nothing of the all-reduces is hidden behind a backward of the same stage.
    reduces = [reduce_seconds(asked, stage) for stage in plan.stages]
    assert seconds <= computed(plan) + sum(reduces) + found.update_seconds * (1 + 1e-9)


@examples(100, quick=20, phases=UNSHRUNK)
@given(seed=st.integers(0, 2**32))
def test_memory(seed: int) -> None:
    """The estimate's, and the buffers at the ends of stages.

    With zero bubbles the gradients of logits wait for the weights' gradients, where the estimate
    counts one.
    """
    problem, layout = random_case(seed, free=False)
    found = evaluate(problem, layout)
    _, plan = lowered(problem, layout)
    shares = shares_of_memory(plan, found)
    if layout.pipeline == 1:
        assert shares == [pytest.approx(1.0, rel=1e-9)]
    least = 0.9 if layout.chunks > 1 else 1 - 1e-9  # chunks' peaks come at different times
    most = 1.2 if layout.schedule == "1f1b" else 1.5
    assert all(least <= share <= most for share in shares)


@examples(100, quick=20, phases=UNSHRUNK)
@given(seed=st.integers(0, 2**32))
def test_layouts_with_zero(seed: int) -> None:
    """Memory is the estimate's, but for what is gathered for a layer and the buffers.

    Where transfers are free so are gathers: the computations end when the estimate says.
    """
    problem, layout = random_case(seed, free=True, zero=True)
    found = evaluate(problem, layout)
    asked, plan = lowered(problem, layout)
    require_lowered(asked, plan)
    assert {stage.shards for stage in plan.stages} == {SHARDS[layout.zero]}
    assert computed(plan) == pytest.approx(found.pipeline_seconds, rel=1e-6)
    by_rank = updates_of_ranks(asked, plan)
    assert max(by_rank) == pytest.approx(found.update_seconds, rel=1e-4)
    if layout.pipeline == 1 and layout.zero == 1:
        assert shares_of_memory(plan, found) == [pytest.approx(1.0, rel=1e-6)]


def test_devices_are_those_of_the_ranks() -> None:
    """Rank of (pipeline k, replica i, shard j), in servers of 4."""
    problem = make_problem(SMALL, Layout(2, 2, data=2))
    levels = (Level("server", 4, 4e11), Level("all", 8, 5e10))
    problem = replace(problem, fabric=Fabric("h100", 80e9, levels))
    _, plan = lowered(problem, parse_layout("p2 t2 d2 b1"))
    assert [stage.devices for stage in plan.stages] == [
        ("s0g0", "s0g1", "s0g2", "s0g3"),
        ("s1g0", "s1g1", "s1g2", "s1g3"),
    ]
    _, plan = lowered(problem, parse_layout("p2 t2 d2 b1 pipeline-inside"))
    assert [stage.devices for stage in plan.stages] == [
        ("s0g0", "s0g1", "s1g0", "s1g1"),
        ("s0g2", "s0g3", "s1g2", "s1g3"),
    ]
    _, plan = lowered(problem, parse_layout("p2 t4 d1 b1 v2 first0 last2"))
    assert [stage.layers for stage in plan.stages] == [(0, 1), (1, 4), (4, 7), (7, 10)]
    assert plan.stages[0].devices == plan.stages[2].devices
    assert {stage.tensor for stage in plan.stages} == {4}


def test_recomputed_blocks_are_recomputed_from_their_inputs() -> None:
    """The plan recomputes embedding and head too, which is all that it takes more."""
    layout = parse_layout("p1 t2 d1 b1 full")
    problem = make_problem(SMALL, layout, microbatches=4)
    asked, plan = lowered(problem, layout)
    assert [stage.recompute for stage in plan.stages] == ["layer"]
    ends = asked.at(2).costs("h100", 1).forward_seconds[[0, -1]].sum()
    expected = evaluate(problem, layout).pipeline_seconds + 4 * float(ends)
    assert computed(plan) == pytest.approx(expected, rel=1e-9)


def test_stages_may_differ_in_blocks_and_recomputation() -> None:
    layout = parse_layout("p2 t1 d1 b1 stages3-5 again3-0 full")
    _, plan = lowered(make_problem(SMALL, layout, microbatches=4), layout)
    assert [stage.layers for stage in plan.stages] == [(0, 4), (4, 10)]
    assert [stage.recompute for stage in plan.stages] == ["layer", "none"]


def test_a_tied_table_is_in_both_layers() -> None:
    layout = parse_layout("p2 t1 d1 b1")
    asked, plan = lowered(make_problem(GPT2, layout), layout)
    first, *_, last = asked.chain.layers
    assert last.parameter_bytes > 2 * GPT2.vocabulary * GPT2.hidden
    assert first.parameter_bytes > 2 * GPT2.vocabulary * GPT2.hidden
    assert plan.layers is not None
    assert [one.name for one in plan.layers][:2] == ["embedding", "blocks.0"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("p1 t1 c2 d1 b1", "a pipeline plan that runs has no context degree 2; choose c1"),
        (
            "p1 t2 d1 b1 sp",
            "a pipeline plan that runs has no sequence parallelism; choose a layout without",
        ),
        (
            "p1 t1 d2 b1 offload",
            "a pipeline plan that runs has no offloaded optimizer; choose a layout",
        ),
        (
            "p2 t1 d1 b1 full blocks1",
            "a pipeline plan that runs has no recomputation of 1 of a stage's 4",
        ),
        (
            "p2 t1 d1 b1 full stages3-5 again0-2",
            "a pipeline plan that runs has no recomputation of 2 of a stage's 5",
        ),
    ],
)
def test_what_a_plan_cannot_say_is_refused(words: str, message: str) -> None:
    layout = parse_layout(words)
    with pytest.raises(InputError, match=re.escape(message)):
        lowered(make_problem(SMALL, layout), layout)


def test_refusals_that_depend_on_the_model() -> None:
    layout = parse_layout("p1 t1 d2 b1")
    with pytest.raises(InputError, match="has no experts; choose a model without them"):
        lowered(make_problem(MIXTRAL, layout), layout)
    divided = parse_layout("p2 t2 d1 b1")
    with pytest.raises(InputError, match="no divided stages that share a tied table; choose t1"):
        lowered(make_problem(GPT2, divided), divided)
    sharded = parse_layout("p2 t1 d2 b1 zero1")
    with pytest.raises(InputError, match="no stages with shards that share a tied table; choose"):
        lowered(make_problem(GPT2, sharded), sharded)
    selective = parse_layout("p1 t1 d1 b1 selective")
    problem = make_problem(SMALL, selective, attention="materialized")
    with pytest.raises(InputError, match="no recomputation of selective; choose none or full"):
        lowered(problem, selective)
    require_expressible(problem, parse_layout("p1 t1 d1 b1 full blocks8"))


def test_a_layout_that_does_not_fit_is_refused() -> None:
    layout = parse_layout("p1 t1 d1 b1")
    problem = make_problem(SMALL, layout)
    small = replace(problem, fabric=replace(problem.fabric, memory_bytes=2.1e9))
    with pytest.raises(InputError, match="does not fit as a pipeline plan: device s0g0 needs"):
        lowered(small, layout)


@pytest.mark.parametrize(
    "levels",
    [
        (Level("server", 4, 1e11, 1e-6),),
        (Level("server", 2, 1e11, 1e-6), Level("rack", 8, 1e10, 2e-6)),
        (Level("server", 2, 1e11), Level("rack", 4, 1e10), Level("cluster", 12, 1e9, 5e-6)),
    ],
)
def test_a_fabric_and_its_cluster(levels: tuple[Level, ...]) -> None:
    fabric = Fabric("h100", 80e9, levels, 5e10)
    cluster = cluster_of(fabric)
    assert isinstance(cluster.links, ServerLinks)
    assert fabric_of(cluster) == fabric


@pytest.mark.parametrize("text", ["p2 t2 d1 b1", "p2 t1 d2 b1", "p2 t2 d2 b1 stages3-5"])
def test_a_layouts_plan_has_bounds_of_its_degree(text: str) -> None:
    layout = parse_layout(text)
    asked, plan = lowered(make_problem(SMALL, layout, microbatches=4), layout)
    proof = with_certificate(asked, plan, 2.0).certificate
    assert proof is not None
    assert proof.plans.tensor == (layout.tensor,)
    assert 0 < proof.bound_seconds <= proof.cost_seconds
    assert not check(asked, replace(plan, certificate=proof))
