"""List schedules of any finite structure, and the search over structures."""

import random
from itertools import pairwise
from pathlib import Path
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import small_problem
from profiles import UNSHRUNK, examples
from strategies import hard_problem

import stagewright
from stagewright.executor.simulation.simulate import simulate
from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, Progress, silent
from stagewright.formulations.pipelines.bounds.devices import load_bound, quick_device_bound
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.plan_class import SHARED_SPLIT
from stagewright.formulations.plans.structure import Structure, misfit, work_of
from stagewright.graphs.machines.cluster import Device, Link, from_matrix, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.pipelines.structures.scheduling import best_schedule, rules_for
from stagewright.solvers.planners.balanced import plan_balanced
from stagewright.solvers.planners.general import StructureSearch, plan_general
from stagewright.solvers.planners.grouped import GroupedSearch
from stagewright.solvers.planners.steps.proposal import (
    Choices,
    NoPlan,
    Proposal,
    class_of_proposal,
    cost_of,
)
from stagewright.solvers.planners.steps.proposal import cost_of as cost
from stagewright.solvers.planners.structures.arrangements import pipelines
from stagewright.solvers.planners.structures.moves import StructureMoves

PROOFS = Path(__file__).parents[3] / "shared" / "data" / "proofs"
MS, MB = 1e-3, 1e6

numbers = st.integers


@st.composite
def problems(draw: st.DrawFn) -> PipelineProblem:
    """Tiny problems of every kind: two kinds, parts of backwards, updates, hosts, little memory."""
    samples = draw(st.sampled_from((1, 2, 4)))
    in_parts = draw(st.booleans())
    layers = tuple(
        Layer(
            f"layer{i}",
            draw(st.sampled_from((0, 4, 40))) * MB,
            tuple(_cost(draw, samples, in_parts, kind) for kind in ("a", "b")),
        )
        for i in range(draw(numbers(1, 4)))
    )
    chain = Chain("random", "measured: drawn", samples, layers, draw(st.sampled_from((0.0, 2.0))))
    count = draw(numbers(1, 3))
    memory = draw(st.sampled_from((1e12, 400 * MB, 200 * MB, 100 * MB)))
    devices = [
        Device(
            name=f"d{v}",
            kind=draw(st.sampled_from("ab")),
            memory_bytes=memory,
            host_bytes_per_second=draw(st.sampled_from((1e9, 8e9))),
        )
        for v in range(count)
    ]
    rates = [[draw(st.sampled_from((1e9, 4e9))) for _ in range(count)] for _ in range(count)]
    return PipelineProblem(chain, from_matrix(devices, rates, 0.0), draw(numbers(1, 5)))


def _cost(draw: st.DrawFn, samples: int, in_parts: bool, kind: str) -> LayerCost:
    forward, backward = draw(numbers(1, 9)) * MS, draw(numbers(1, 9)) * MS
    parts = {"input_gradient_seconds": backward, "weight_gradient_seconds": forward}
    return LayerCost(
        microbatch_size=samples,
        forward_seconds=forward,
        saved_bytes=draw(numbers(0, 20)) * MB,
        output_bytes=draw(numbers(0, 6)) * MB,
        device_kind=kind,
        **(parts if in_parts else {"backward_seconds": backward}),
    )


@st.composite
def structures(draw: st.DrawFn, problem: PipelineProblem) -> Structure:
    """Any cuts, any devices, any flags that the rules allow."""
    layers = len(problem.chain)
    cuts = sorted({0, layers, *draw(st.sets(numbers(1, layers)))})
    names = [device.name for device in problem.cluster.devices]
    parts = problem.layer_with_whole_backward(0, layers) is None
    stages, split = [], []
    for start, stop in pairwise(cuts):
        devices = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        kind = "split"
        if len(devices) > 1 and draw(st.booleans()):
            kind = "round-robin"
        if kind == "split":
            devices = devices[: problem.most_replicas(start, stop)]
        way = draw(st.sampled_from(("none", "full", "layer", "offload")))
        offload = way == "offload"
        recompute = "none" if offload else way
        stages.append(Stage((start, stop), tuple(devices), kind, recompute, offload))
        split.append(parts and not offload and draw(st.booleans()))
    return Structure(tuple(stages), tuple(split))


@given(st.data())
@examples(40, print_blob=False, phases=UNSHRUNK)
def test_every_rule_makes_valid_schedules(data: st.DataObject) -> None:
    problem = data.draw(problems())
    structure = data.draw(structures(problem))
    work, endings, _ = work_of(problem, structure)
    if misfit(problem, structure) is not None:
        return
    bound = quick_device_bound(work, endings)
    assert load_bound(problem, structure) <= bound * (1 + 1e-9)
    for rule in data.draw(st.lists(st.sampled_from(rules_for(work)), min_size=1, max_size=5)):
        found = best_schedule(work, endings, (rule,))
        assert found is not None
        plan = assemble(problem, "list", structure.stages, found.starts)
        assert not check(problem, plan)
        assert plan.predicted is not None
        cost = plan.predicted.iteration_seconds
        assert cost == pytest.approx(found.seconds, rel=1e-9)
        assert cost == pytest.approx(
            cost_of(problem, Proposal(structure.stages, found.starts)), rel=1e-9
        )
        assert bound <= cost * (1 + 1e-9)


@given(st.data())
@examples(30, phases=UNSHRUNK)
def test_replaying_a_found_plan_takes_no_longer(data: st.DataObject) -> None:
    problem = data.draw(problems())
    structure = data.draw(structures(problem))
    work, endings, _ = work_of(problem, structure)
    if misfit(problem, structure) is None:
        found = best_schedule(work, endings, rules_for(work))
        assert found is not None
        plan = assemble(problem, "list", structure.stages, found.starts)
        assert not check(problem, plan)
        assert simulate(problem, plan).iteration_seconds <= found.seconds * (1 + 1e-9)


@given(problems(), numbers(0, 5))
@examples(20, phases=UNSHRUNK)
def test_neighbours_keep_the_rules(problem: PipelineProblem, seed: int) -> None:
    moves = StructureMoves(problem, Choices(recompute="auto", offload=True))
    device = problem.cluster.devices[0].name
    structure = Structure.whole([Stage((0, len(problem.chain)), (device,))])
    shuffle = random.Random(seed)
    for _ in range(5):
        found = list(moves.neighbours(structure, shuffle))
        for one in found:
            layers = [bound for stage in one.stages for bound in stage.layers]
            assert layers[0] == 0
            assert layers[-1] == len(problem.chain)
            assert layers[1:-1:2] == layers[2:-1:2]
            assert len(one.split) == len(one.stages)
        structure = found[-1] if found else structure


@given(problems())
@examples(10, phases=UNSHRUNK)
def test_the_search_finds_valid_plans(problem: PipelineProblem) -> None:
    answer = plan_general(problem, Limits(0.3), silent, Choices("auto", True))
    if isinstance(answer, Proposal):
        plan = assemble(problem, "general", answer.stages, answer.starts)
        assert not check(problem, plan)


def test_a_search_without_time_goes_on_by_a_step_in_every_run() -> None:
    problem = small_problem()
    search = StructureSearch(problem, Limits(60.0), silent, Choices().any_mode)
    for _ in range(300):
        found = search.run([], Limits(0.0))
    assert search.is_seeded
    assert isinstance(found, Proposal)
    longest = 0.4473  # seconds of the plan that 2,000 steps find, and seconds of search no better
    assert cost_of(problem, found) <= longest * 1.11


# What the planners of disjoint, split stages with whole backwards could not find.
CASES = {
    "interleaved": (2, 10.001), "roundrobin": (3, 4.0011), "iw": (2, 7.001),
    "infeasible": (2, 10.001), "crash2": (3, None), "crash128": (3, None),
}  # fmt: skip


@pytest.mark.skipif(not PROOFS.is_dir(), reason="the example problems are not here")
@pytest.mark.parametrize("name", CASES)
def test_plans_beyond_disjoint_split_stages(name: str) -> None:
    chain = stagewright.load_model(PROOFS / f"{name}.model.json")
    cluster = stagewright.load_cluster(PROOFS / f"{name}.cluster.json")
    microbatches, most = CASES[name]
    result = stagewright.plan(chain, cluster, microbatches, time_limit=5)
    assert result.plan is not None
    assert not stagewright.check(result.plan, chain, cluster)
    if most is not None:
        assert result.cost <= most * MS


def _chain(layers: int, saved: float) -> Chain:
    cost = LayerCost(1, 1 * MS, saved, 1.0, 2 * MS)
    return Chain("equal", "test", 1, tuple(Layer(f"l{i}", 0.0, (cost,)) for i in range(layers)))


def test_of_equally_fast_plans_the_one_with_less_memory() -> None:
    # A single device takes the same time in whatever order; one microbatch at a time holds least.
    problem = PipelineProblem(_chain(2, 1 * MB), uniform_servers(1, 1, Link(1e9)), 4)
    work, endings, _ = work_of(problem, Structure.whole([Stage((0, 2), ("s0g0",))]))
    found = [best_schedule(work, endings, (rule,)) for rule in rules_for(work)]
    assert len({round(one.seconds, 9) for one in found}) == 1
    assert len({one.fullest for one in found}) > 1
    for order in (rules_for(work), rules_for(work)[::-1]):
        best = best_schedule(work, endings, order)
        assert best.fullest == min(one.fullest for one in found)


def test_recomputation_where_nothing_fits_without() -> None:
    chain, cluster = _chain(4, 10 * MB), uniform_servers(1, 2, Link(1e9), memory_bytes=16 * MB)
    result = stagewright.plan(chain, cluster, 4, time_limit=2)
    assert result.plan is not None
    assert any(stage.recompute != "none" for stage in result.plan.stages)
    assert stagewright.plan(chain, cluster, 4, time_limit=2, choices=Choices("none")).plan is None


def test_as_few_first_layers_as_need_be_recompute() -> None:
    # 60 MB on 45 MB: with two layers recomputed there are 40 MB, and 20 MB when they are again.
    cluster = uniform_servers(1, 2, Link(1e9), memory_bytes=45 * MB)
    problem = PipelineProblem(_chain(6, 10 * MB), cluster, 2)
    turns = Stage((0, 6), ("s0g0", "s0g1"), "round-robin")
    start = Structure.whole([turns])
    assert misfit(problem, start) is not None
    (found,) = StructureMoves(problem, Choices("full")).relieved([start])
    assert [(one.layers, one.recompute) for one in found.stages] == [
        ((0, 2), "full"),
        ((2, 6), "none"),
    ]
    assert misfit(problem, found) is None
    assert not [*StructureMoves(problem, Choices("none")).relieved([start])]
    roomy = uniform_servers(1, 2, Link(1e9), memory_bytes=65 * MB)
    moves = StructureMoves(PipelineProblem(_chain(6, 10 * MB), roomy, 2), Choices("full"))
    assert not [*moves.relieved([start])]


def test_all_reduces_run_beside_the_backwards_of_other_stages_on_the_same_devices() -> None:
    # Of one stage the all-reduce of 6 ms follows 12 ms; of four, that of the first layer is left.
    cost = LayerCost(1, 1 * MS, 1.0, 50 * MB, 2 * MS)
    chain = Chain("equal", "test", 1, tuple(Layer(f"l{i}", 1.5 * MB, (cost,)) for i in range(4)))
    problem = PipelineProblem(chain, uniform_servers(2, 1, Link(1e9), Link(1e9)), 2)
    found = plan_general(problem, Limits(5), silent)
    assert isinstance(found, Proposal)
    assert cost_of(problem, found) == pytest.approx(13.5 * MS)


def test_every_server_may_run_a_copy_of_a_pipeline() -> None:
    cluster = uniform_servers(2, 3, Link(1e10), Link(1e9))
    problem = PipelineProblem(_chain(4, 0.0), cluster, 6)
    stages = [
        [one.devices for one in structure.stages if one.replication == "round-robin"]
        for structure in pipelines(problem, range(6))
    ]
    assert [("s0g0", "s1g0"), ("s0g1", "s1g1"), ("s0g2", "s1g2")] in stages
    assert [("s0g0", "s1g0"), ("s0g1", "s1g1", "s0g2", "s1g2")] in stages
    assert [("s0g0", "s1g0", "s0g1", "s1g1", "s0g2", "s1g2")] in stages


@pytest.mark.parametrize("planner", ["spp", "gpipe", "pipedream", "hetpipe", "exact", "dp"])
@pytest.mark.parametrize("way", ["full", "layer"])
def test_planners_recompute_everywhere(planner: str, way: str) -> None:
    chain, cluster = _chain(4, 1 * MB), uniform_servers(1, 2, Link(1e9))
    chain = Chain(chain.name, chain.source, 1, chain.layers)
    plan = stagewright.plan(chain, cluster, 4, planner, 2, choices=Choices(way)).plan
    assert plan is not None
    assert {stage.recompute for stage in plan.stages} == {way}
    forwards = sum(stage.layers[1] - stage.layers[0] for stage in plan.stages)
    assert forwards == 4
    plain = stagewright.plan(chain, cluster, 4, planner, 2).plan
    assert plan.predicted.iteration_seconds > plain.predicted.iteration_seconds


def test_what_a_planner_cannot_do_is_refused_with_those_that_can() -> None:
    chain, cluster = _chain(2, 1.0), uniform_servers(1, 2, Link(1e9))
    for planner, choices, able in (
        ("spp", Choices(group_size=1), "madpipe"),
        ("madpipe", Choices("layer"), "general"),
        ("auto", Choices(period_seconds=1.0), "madpipe"),
    ):
        with pytest.raises(stagewright.InputError, match=able):
            stagewright.plan(chain, cluster, 2, planner, choices=choices)
    with pytest.raises(stagewright.InputError, match="none, full, layer, auto"):
        Choices("yes")


EXAMPLES = Path(__file__).parents[2] / "examples"


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
        1, 1.0, 1e6, 1e6, input_gradient_seconds=1.0, weight_gradient_seconds=1.0
    )
    chain = Chain(
        "loop", "by hand", 1, tuple(Layer(f"l{i}", 1e6, (cost_of_layer,)) for i in range(4))
    )
    cluster = uniform_servers(2, 1, Link(1e15), Link(1e15), memory_bytes=1000 * 1e6)
    found = GroupedSearch(PipelineProblem(chain, cluster, 4), Limits(2.0), silent).run(
        [], Limits(2.0)
    )
    assert isinstance(found, Proposal)
    # Each device computes for 24 s; the second one begins after the first layer.
    assert cost(PipelineProblem(chain, cluster, 4), found) <= 25.0 + 1e-6


def test_backwards_in_parts_are_the_first_change():
    """Where no layer is divided among devices, no pipeline on all devices is a seed."""
    layer = LayerCost(1, 1.0, 1e6, 1e6, input_gradient_seconds=1.0, weight_gradient_seconds=1.0)
    chain = Chain("parts", "by hand", 1, tuple(Layer(f"l{i}", 1e6, (layer,)) for i in range(4)))
    problem = PipelineProblem(chain, uniform_servers(2, 4, Link(1e15), Link(1e15)), 8)
    whole, stop = plan_balanced(problem, Limits(), silent), Event()
    assert isinstance(whole, Proposal)
    assert cost(problem, whole) == pytest.approx(8 * 3 + 3 * 3)

    def ends(step: Progress) -> None:
        if step.objective is not None and step.objective < 32:
            stop.set()

    search = GroupedSearch(problem, Limits(stop=stop), ends)
    found = search.run([whole], Limits(stop=stop))
    assert len(search.scores) == 2
    # The last device computes for 24 s, after the first microbatch's forwards on the others.
    assert cost(problem, found) == pytest.approx(8 * 3 + 3)


@pytest.mark.slow
def test_rounds_turn_and_a_large_all_reduce_is_hidden():
    """Rounds that begin at the same group, with the embedding in a stage of two layers: 141 ms."""
    model = stagewright.load_model(EXAMPLES / "profiles" / "bert-large.v100.json")
    cluster = stagewright.load_cluster(EXAMPLES / "clusters" / "v100-8x4.json")
    problem = PipelineProblem(model, cluster, 8)
    found = GroupedSearch(problem, Limits(30.0), silent).run([], Limits(30.0))
    assert isinstance(found, Proposal)
    assert cost(problem, found) < 0.127
