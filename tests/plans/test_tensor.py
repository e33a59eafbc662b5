"""Stages whose layers groups of devices compute together: times, memory, order, both checkers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from periodic_plans import placed_plan
from plans import elaborate, require_exact_memory, small_problem, valid_plan
from profiles import examples

from stagewright.executor.drawing.page import summarise
from stagewright.executor.drawing.timeline import timeline
from stagewright.executor.export import export
from stagewright.executor.simulation.simulate import simulate
from stagewright.formulations.checking.check import check, predict, require_valid
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.plans.actions import ActionKind
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Stage, load_plan, save_plan
from stagewright.formulations.plans.plan_class import EVERY_PLAN, PlanClass, class_of
from stagewright.formulations.plans.shards import pairs
from stagewright.formulations.plans.timing import durations, empty_blocks
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.planners.steps.proposal import Choices
from stagewright.solvers.planning import plan as planned

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
SEND_F, SEND_B, REDUCE = ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD, ActionKind.REDUCE
MB = 1e6


def layer(name: str, parameter_bytes: float, output_bytes: float) -> Layer:
    """Four samples: 4 s and 8 s on one device, 3 s and 5 s on two that keep 60 MB each."""
    one = LayerCost(4, 4.0, 100 * MB, output_bytes, 8.0, update_seconds=1.0)
    two = LayerCost(
        4, 3.0, 60 * MB, output_bytes, 5.0, update_seconds=0.5, tensor=2,
        shard_parameter_bytes=parameter_bytes / 2 + MB,
    )  # fmt: skip
    return Layer(name, parameter_bytes, (one, two))


def tiny() -> PipelineProblem:
    """Two layers, eight devices with links of 10 MB per second."""
    chain = Chain("tiny", "test", 4, (layer("a", 20 * MB, 40 * MB), layer("b", 40 * MB, MB)))
    return PipelineProblem(chain, uniform_servers(1, 8, Link(10 * MB), memory_bytes=1e12), 1)


def names(*numbers: int) -> tuple[str, ...]:
    return tuple(f"s0g{i}" for i in numbers)


def in_sequence(problem: PipelineProblem, stages: list[Stage]) -> PipelinePlan:
    """One microbatch through two stages."""
    lasting = durations(problem, stages)
    starts, now = empty_blocks(len(stages), 1), 0.0
    for s, kind in ((0, F), (0, SEND_F), (1, F), (1, B), (1, SEND_B), (0, B)):
        starts[kind][s, 0], now = now, now + lasting[kind][s, 0]
    for s in (0, 1):
        starts[REDUCE][s] = now
        starts[ActionKind.UPDATE][s] = now + (
            lasting[REDUCE][s, 0] if stages[s].replicas > 1 else 0
        )
    return assemble(problem, "test", stages, starts)


class TestByHand:
    STAGES = (Stage((0, 1), names(0, 1, 2, 3), tensor=2), Stage((1, 2), names(4, 5), tensor=2))

    def test_groups_take_the_place_of_devices(self) -> None:
        stage = self.STAGES[0]
        assert (stage.replicas, stage.turns, stage.runners(1)) == (2, 1, names(0, 1, 2, 3))
        turned = replace(stage, replication="round-robin")
        assert (turned.turns, turned.lanes) == (2, (names(0, 1), names(2, 3)))

    def test_times(self) -> None:
        """Stage 0 halves the four samples, stage 1 has all: 20 MB go from every device of 0."""
        found = durations(tiny(), self.STAGES)
        assert [found[F][s, 0] for s in (0, 1)] == [1.5, 3.0]
        assert [found[B][s, 0] for s in (0, 1)] == [2.5, 5.0]
        assert (found[SEND_F][0, 0], found[SEND_B][1, 0]) == (2.0, 2.0)
        # The shards of layer a have 11 MB; a ring of two moves 11 MB.
        assert found[REDUCE][0, 0] == pytest.approx(1.1)
        assert np.isnan(found[REDUCE][1, 0])  # one group: nothing to sum up
        assert [found[ActionKind.UPDATE][s, 0] for s in (0, 1)] == [0.5, 0.5]

    def test_memory_and_bytes(self) -> None:
        """4 times the weights (Adam), two buffers of the boundary, and what a microbatch keeps."""
        problem = tiny()
        plan = in_sequence(problem, list(self.STAGES))
        assert check(problem, plan) == ()
        assert plan.predicted is not None
        memory = plan.predicted.peak_memory_bytes
        assert {memory[name] for name in names(0, 1, 2, 3)} == {(4 * 11 + 2 * 20 + 30) * MB}
        assert {memory[name] for name in names(4, 5)} == {(4 * 21 + 2 * 40 + 60) * MB}
        # Both devices of a group get and send all that it needs; two shards of 11 MB are reduced.
        assert plan.predicted.link_bytes == {"0-1": 2 * 2 * 40 * MB, "0": 22 * MB}
        carried = {one.action: one.bytes for one in plan.actions if one.bytes is not None}
        assert carried == {"0SEND_F0": 80 * MB, "1SEND_B0": 80 * MB, "0REDUCE_GRAD": 22 * MB}


@pytest.mark.parametrize(
    ("sending", "receiving", "expected"),
    [
        ((names(0, 1), 2), (names(2, 3), 2), {(0, 2), (1, 3)}),
        ((names(0), 1), (names(2, 3), 2), {(0, 2), (0, 3)}),
        ((names(0, 1), 2), (names(2), 1), {(0, 2)}),
        ((names(0, 1, 2, 3), 4), (names(4, 5), 2), {(0, 4), (1, 5)}),
        ((names(0, 1), 2), (names(4, 5, 6, 7), 4), {(0, 4), (1, 5), (0, 6), (1, 7)}),
        ((names(0, 1, 2, 3), 2), (names(4), 1), {(0, 4), (2, 4)}),
        ((names(0, 1), 2), (names(0, 1), 2), {(0, 0), (1, 1)}),
        ((names(0, 1), 1), (names(0, 1), 2), {(0, 0), (0, 1), (1, 0), (1, 1)}),
    ],
)
def test_who_sends_to_whom(sending: Any, receiving: Any, expected: set[tuple[int, int]]) -> None:
    one = Stage((0, 1), sending[0], tensor=sending[1])
    other = Stage((1, 2), receiving[0], tensor=receiving[1])
    found = {(int(a[3:]), int(b[3:])) for a, b in pairs(one, other, 0)}
    assert found == expected


@examples(60)
@given(elaborate(sharded=True))
def test_both_checkers_take_a_right_plan(case: tuple[PipelineProblem, PipelinePlan]) -> None:
    problem, plan = case
    assert check(problem, plan) == ()
    found = simulate(problem, plan)
    for one, other in zip(found.actions, plan.actions, strict=True):
        assert replace(one, start_seconds=0.0, finish_seconds=0.0) == replace(
            other, start_seconds=0.0, finish_seconds=0.0
        )
        seconds = other.start_seconds, other.finish_seconds
        assert (one.start_seconds, one.finish_seconds) == pytest.approx(seconds, rel=1e-12)
    assert found.iteration_seconds == pytest.approx(require_valid(problem, plan), rel=1e-12)


def base() -> tuple[PipelineProblem, PipelinePlan]:
    problem = small_problem(4, 6, 3, updates=True, degrees=(2,))
    stages = [
        Stage((0, 2), ("g0", "g1", "g3", "g4"), tensor=2),
        Stage((2, 4), ("g2", "g5"), tensor=2),
    ]
    plan = valid_plan(problem, stages)
    return problem, replace(plan, predicted=predict(problem, plan))


def restaged(s: int, **changes: Any) -> Callable[[PipelinePlan], PipelinePlan]:
    def change(plan: PipelinePlan) -> PipelinePlan:
        stages = list(plan.stages)
        stages[s] = replace(stages[s], **changes)
        return replace(plan, stages=tuple(stages))

    return change


def edited(text: str, device: str | None = None, **changes: Any) -> Any:
    def change(plan: PipelinePlan) -> PipelinePlan:
        actions = tuple(
            replace(one, **changes) if one.action == text and device in (None, one.device) else one
            for one in plan.actions
        )
        assert actions != plan.actions
        return replace(plan, schedule=replace(plan.schedule, actions=actions))

    return change


def without(text: str, device: str) -> Callable[[PipelinePlan], PipelinePlan]:
    def change(plan: PipelinePlan) -> PipelinePlan:
        actions = tuple(e for e in plan.actions if (e.action, e.device) != (text, device))
        assert len(actions) == len(plan.actions) - 1
        return replace(plan, schedule=replace(plan.schedule, actions=actions))

    return change


def of_whole_weights(plan: PipelinePlan) -> PipelinePlan:
    """Predictions as if every device had the whole weights."""
    problem, _ = base()
    assert plan.predicted is not None
    whole = problem.gradient_bytes(0, 2) - problem.at(2).gradient_bytes(0, 2)
    peaks = {n: b + 4 * whole * (n == "g0") for n, b in plan.predicted.peak_memory_bytes.items()}
    return replace(plan, predicted=replace(plan.predicted, peak_memory_bytes=peaks))


@pytest.mark.parametrize(
    ("damage", "rule"),
    {
        "a lower degree": (restaged(0, tensor=1), "bytes"),
        "one group in place of two": (restaged(0, tensor=4), "tensor"),
        "no degree in the last stage": (restaged(1, tensor=1), "missing"),
        "a group of two kinds": (restaged(0, devices=("g0", "g2", "g3", "g4")), "tensor"),
        "half a group": (without("0F1", "g1"), "missing"),
        "half a group's update": (without("0UPDATE", "g4"), "missing"),
        "a member later": (edited("1F0", "g5", start_seconds=0.9, finish_seconds=1.0), "replicas"),
        "bytes of one position": (edited("0REDUCE_GRAD", bytes=1.0), "bytes"),
        "bytes to one member": (edited("0SEND_F0", bytes=2e7), "bytes"),
        "all-reduce among one position": (
            edited("0REDUCE_GRAD", sources=("g0", "g3"), targets=("g0", "g3")), "endpoints",
        ),
        "memory without shards": (of_whole_weights, "predicted"),
    }.values(),
)  # fmt: skip
def test_broken_plans_are_rejected(damage: Any, rule: str) -> None:
    problem, plan = base()
    assert check(problem, plan) == ()
    assert rule in {one.rule for one in check(problem, damage(plan))}


def test_memory_counts_shards() -> None:
    require_exact_memory(*base())


def test_a_degree_without_costs_is_refused_by_name() -> None:
    problem, plan = base()
    found = check(problem, restaged(0, tensor=4)(plan))
    assert "layer 'layer0' has no cost at tensor degree 4; it has costs at 1, 2" in str(found[0])


def test_the_slowest_member_sets_the_pace() -> None:
    problem, plan = base()
    found = simulate(problem, plan, stragglers={"g1": 2.0})
    times = {(one.action, one.device): one for one in found.actions}
    first, mate, other = (times["0F0", name] for name in ("g0", "g1", "g3"))
    assert first.finish_seconds == mate.finish_seconds == 2 * other.finish_seconds
    for jitter in (0.1, 0.5):
        run = simulate(problem, plan, jitter=jitter, seed=3).actions
        spans = {(one.action, one.device): (one.start_seconds, one.finish_seconds) for one in run}
        for group in (("g0", "g1"), ("g3", "g4")):
            assert len({spans["0B1", name] for name in group}) == 1


def test_periodic_plans_have_groups_too() -> None:
    problem = small_problem(4, 6, 3, memory_bytes=64e9, updates=True, degrees=(2,))
    stages = [
        Stage((0, 2), ("g0", "g1", "g3", "g4"), tensor=2),
        Stage((2, 4), ("g2", "g5"), tensor=2),
    ]
    plan = placed_plan(problem, stages)
    assert check(problem, plan) == ()
    assert simulate(problem, plan).iteration_seconds <= require_valid(problem, plan) * (1 + 1e-9)
    unlike = [replace(stages[1], layers=(0, 2)), replace(stages[1], tensor=1)]
    with pytest.raises(InputError, match="neighbouring stages on the devices g2, g5 need one tens"):
        placed_plan(problem, unlike)


def test_documents_keep_the_degree(tmp_path: Any) -> None:
    problem, plan = base()
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    text = documents.to_json(problem.chain)
    assert documents.parse(Chain, text, "model") == problem.chain
    assert "tensor" not in documents.to_json(small_problem().chain)
    assert '"tensor": "any"' in documents.to_json(PlanClass(tensor="any"))


def test_no_bound_speaks_of_sharded_plans() -> None:
    _, plan = base()
    assert class_of(plan).tensor == (2,)
    assert not EVERY_PLAN.contains(class_of(plan))
    assert replace(EVERY_PLAN, tensor="any").contains(class_of(plan))
    assert not EVERY_PLAN.contains(replace(EVERY_PLAN, tensor="any"))


def test_planners_make_stages_of_degree_1() -> None:
    problem, plan = base()
    result = planned(problem, "spp", Limits(seconds=5))
    assert result.plan is not None
    assert {stage.tensor for stage in result.plan.stages} == {1}
    assert "tensor degree 1" in str(result.plan.certificate.plans)  # type: ignore[union-attr]
    with pytest.raises(InputError, match=r"stage 0 has tensor degree 2: planners make stages of"):
        planned(problem, "auto", Limits(seconds=5), choices=Choices(start=plan))
    with pytest.raises(InputError, match=r"stage 0 has tensor degree 2: the files for torch do"):
        export(plan, "torch-csv")


def test_the_timeline_names_the_group() -> None:
    _, plan = base()
    rows = [row.name for row in timeline(plan) if row.group == "device"]
    assert rows[:2] == ["g0 · stage 0 (tensor 2 with g1)", "g1 · stage 0 (tensor 2 with g0)"]
    assert rows[-1] == "g5 · stage 1 (tensor 2 with g2)"
    assert all(row.blocks for row in timeline(plan))
    assert [line.replicas for line in summarise(plan)] == [2, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor": 1}, "tensor must be at least 2, or left out, got 1"),
        ({"tensor": None}, "give tensor and shard_parameter_bytes together"),
        ({"shard_parameter_bytes": None}, "give tensor and shard_parameter_bytes together"),
    ],
)
def test_wrong_costs_are_refused(change: dict[str, Any], message: str) -> None:
    two = layer("a", 20 * MB, 40.0).costs[1]
    with pytest.raises(InputError, match=message):
        replace(two, **change)


def test_wrong_layers_are_refused() -> None:
    one, two = layer("a", 20 * MB, 40.0).costs
    with pytest.raises(InputError, match="every degree needs the same kinds"):
        Layer("a", 20 * MB, (one, replace(two, device_kind="v100")))
    other = replace(two, microbatch_size=8, shard_parameter_bytes=3.0)
    with pytest.raises(InputError, match="'a': shard_parameter_bytes must be the same"):
        Layer("a", 20 * MB, (one, two, other))
    for shard in (9.9 * MB, 20.1 * MB):
        wrong = replace(two, shard_parameter_bytes=shard)
        with pytest.raises(InputError, match=r"2 must be from 1e\+07 .* to 2e\+07 .*, got"):
            Layer("a", 20 * MB, (one, wrong))
    with pytest.raises(InputError, match="two costs for one device kind and size"):
        Layer("a", 20 * MB, (one, two, two))
    halved = Layer("a", 20 * MB, (one, replace(two, output_bytes=20.0)))
    with pytest.raises(InputError, match="output_bytes at tensor degree 2 must be 40"):
        Chain("m", "test", 4, (halved, layer("b", 2 * MB, 1.0)))
    for degree in (True, 1.0):
        with pytest.raises(InputError, match=f"tensor must be a whole number, got {degree}"):
            Stage((0, 1), names(0, 1), tensor=degree)
    with pytest.raises(InputError, match="tensor must divide the stage's 3 devices, got 2"):
        Stage((0, 1), names(0, 1, 2), tensor=2)
