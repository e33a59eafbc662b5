"""Stages whose replicas divide their state: times, memory, links, both checkers."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import elaborate, part_of, require_exact_memory, small_problem, valid_plan
from profiles import examples
from program_text import parse_program

from stagewright.executor.drawing.timeline import timeline
from stagewright.executor.export import export
from stagewright.executor.programs.lower import lower
from stagewright.executor.programs.program import InvalidProgram, plan_devices
from stagewright.executor.programs.verification.verify import verify
from stagewright.executor.simulation.simulate import simulate
from stagewright.formulations.checking.check import check, predict, require_valid
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.plans.actions import REDUCE, UPDATE, B, F
from stagewright.formulations.plans.memory import stage_static_bytes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Stage, load_plan, save_plan
from stagewright.formulations.plans.plan_class import EVERY_PLAN, SHARDS, class_of
from stagewright.formulations.plans.shards import gathered_bytes
from stagewright.formulations.plans.timing import durations
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.planners.steps.proposal import Choices
from stagewright.solvers.planning import plan as planned

GROUP = ("s0g0", "s0g1", "s0g2", "s0g3")


def tiny() -> PipelineProblem:
    """Layers of 8 MB and 4 bytes, and of 16 MB, on four devices with links of 1 MB/s."""
    layers = tuple(
        Layer(name, size, (LayerCost(4, 4.0, 64.0, 32.0, 8.0, update_seconds=3.0),))
        for name, size in (("a", 8e6 + 4), ("b", 16e6))
    )
    chain = Chain("tiny", "test", 4, layers)
    return PipelineProblem(chain, uniform_servers(1, 4, Link(1e6, 0.5), memory_bytes=1e9), 3)


def stage(shards: Any, **changes: Any) -> Stage:
    return Stage((0, 2), GROUP, **{"shards": shards, **changes})


class TestByHand:
    """Parts of 6,000,001 bytes, or of 2,000,001 and 4,000,000, in whole units of 16 bytes.

    A round of the ring is three steps, each of a part: 3 * (6.000016 + 0.5) seconds for the stage,
    3 * (6.000016 + 2 * 0.5) layer by layer.
    """

    WHOLE, OWN = 24e6 + 4, 6e6 + 16

    def test_optimizer(self) -> None:
        found = durations(tiny(), [stage("optimizer")])
        assert found[F][0].tolist() == durations(tiny(), [stage("none")])[F][0].tolist()
        assert found[REDUCE][0, 0] == pytest.approx(19.500048)
        assert found[UPDATE][0, 0] == pytest.approx(6 * self.OWN / self.WHOLE + 19.500048)
        # Weights and gradients, and a part of Adam's two moments.
        assert stage_static_bytes(tiny(), stage("optimizer")) == 2 * self.WHOLE + 2 * self.OWN

    def test_gradients(self) -> None:
        """Scattered layer by layer in W, or in B; weights are gathered in the update."""
        whole, found = durations(tiny(), [stage("none")]), durations(tiny(), [stage("gradients")])
        assert found[F][0, 0] == whole[F][0, 0]
        assert found[B][0, 0] == pytest.approx(whole[B][0, 0] + 21.000048)
        assert np.isnan(found[REDUCE][0, 0])
        assert found[UPDATE][0, 0] == pytest.approx(6 * self.OWN / self.WHOLE + 21.000048)
        assert stage_static_bytes(tiny(), stage("gradients")) == self.WHOLE + 3 * self.OWN
        assert gathered_bytes(tiny(), stage("gradients")) == 16e6

    def test_weights(self) -> None:
        whole = durations(tiny(), [stage("none")])
        for recompute, rounds in (("none", 2), ("layer", 2), ("full", 3)):
            found = durations(tiny(), [stage("weights", recompute=recompute)])
            again = whole[F][0, 0] if recompute != "none" else 0.0
            assert found[F][0, 0] == pytest.approx(whole[F][0, 0] + 21.000048)
            assert found[B][0, 0] == pytest.approx(whole[B][0, 0] + again + rounds * 21.000048)
            assert np.isnan(found[REDUCE][0, 0])
            assert found[UPDATE][0, 0] == pytest.approx(6 * self.OWN / self.WHOLE)
        assert stage_static_bytes(tiny(), stage("weights")) == 4 * self.OWN
        assert gathered_bytes(tiny(), stage("weights")) == 32e6

    def test_a_plan(self) -> None:
        """Per iteration the stage's bytes go around once with REDUCE, as an all-reduce does."""
        problem = tiny()
        for shards, rounds, memory in (
            ("none", 2, 4 * self.WHOLE),
            ("optimizer", 2, 2 * self.WHOLE + 2 * self.OWN),
            ("gradients", 3 + 1, self.WHOLE + 3 * self.OWN + 16e6),
            ("weights", 3 * 3, 4 * self.OWN + 32e6),
        ):
            plan = valid_plan(problem, [stage(shards)], in_flight=[1])
            found = predict(problem, plan)
            assert check(problem, plan) == ()
            assert found.link_bytes == {"0": rounds / 2 * self.WHOLE}
            assert set(found.peak_memory_bytes.values()) == {memory + 2 * 64 / 4}

    def test_one_layer_at_a_time_is_gathered_on_a_device(self) -> None:
        problem = tiny()
        stages = [replace(stage("weights"), layers=span) for span in ((0, 1), (1, 2))]
        found = predict(problem, valid_plan(problem, stages, in_flight=[1, 1]))
        buffers = 2 * 2 * 32 / 4  # of both stages, at their boundary
        memory = 4 * self.OWN + 32e6 + 2 * 64 / 4 + buffers
        assert set(found.peak_memory_bytes.values()) == {memory}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"devices": ("a",), "shards": "optimizer"}, "needs several replicas, the stage has one"),
        ({"devices": ("a", "b"), "tensor": 2, "shards": "weights"}, "needs several replicas"),
        ({"devices": ("a", "b"), "replication": "round-robin", "shards": "weights"},
         "those of a round-robin stage compute at different times: use replication 'split'"),
    ],
)  # fmt: skip
def test_stages_that_cannot_be_divided(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Stage((0, 1), **given)


@examples(60)
@given(elaborate(zero=True))
def test_both_checkers_take_a_right_plan(case: tuple[PipelineProblem, PipelinePlan]) -> None:
    problem, plan = case
    assert check(problem, plan) == ()
    found = simulate(problem, plan)
    assert found.actions == plan.actions
    assert found.iteration_seconds == require_valid(problem, plan)


@examples(40)
@given(elaborate(zero=True, sharded=True))
def test_lowered_plans_are_right(case: tuple[PipelineProblem, PipelinePlan]) -> None:
    problem, plan = case
    assert check(problem, plan) == ()
    program = lower(plan)
    verify(plan, program)
    assert parse_program(str(program), plan_devices(plan)) == program


@examples(60)
@given(st.lists(st.floats(1, 1e9), min_size=1, max_size=5), st.integers(2, 4), st.floats(2, 6))
def test_shards_never_need_more_memory(sizes: list[float], count: int, of_optimizer: float) -> None:
    """But for the padding; of sharded weights where an optimizer keeps as much as Adam does."""
    cost = LayerCost(4, 1.0, 1.0, 1.0, 1.0)
    layers = tuple(Layer(str(i), size, (cost,)) for i, size in enumerate(sizes))
    chain = Chain("m", "test", 4, layers, of_optimizer)
    problem = PipelineProblem(chain, uniform_servers(1, 4, Link(1e9)), 1)
    stages = {kind: Stage((0, len(sizes)), GROUP[:count], shards=kind) for kind in SHARDS}
    need = {
        kind: stage_static_bytes(problem, one) + gathered_bytes(problem, one)
        for kind, one in stages.items()
    }
    own = part_of(sum(sizes), count)
    assert need["optimizer"] == pytest.approx(2 * sum(sizes) + of_optimizer * own)
    assert need["optimizer"] <= need["none"] + 16 * of_optimizer
    padding = 16 * (2 + of_optimizer) * len(sizes) + 2 * 16 * count
    assert need["weights"] <= need["none"] * (1 + 1e-12) + padding


# --- Broken plans ---------------------------------------------------------------------------------


def base() -> tuple[PipelineProblem, PipelinePlan]:
    """Round-robin replicas that shard their optimizer, then replicas that shard their weights."""
    problem = small_problem(4, 6, 3, updates=True, parts=True)
    stages = [
        Stage((0, 2), ("g0", "g1"), "round-robin", shards="optimizer"),
        Stage((2, 4), ("g3", "g4"), recompute="full", shards="weights"),
    ]
    plan = valid_plan(problem, stages)
    return problem, replace(plan, predicted=predict(problem, plan))


def restaged(s: int, **changes: Any) -> Callable[[PipelinePlan], PipelinePlan]:
    def change(plan: PipelinePlan) -> PipelinePlan:
        stages = list(plan.stages)
        stages[s] = replace(stages[s], **changes)
        return replace(plan, stages=tuple(stages))

    return change


def edited(text: str, **changes: Any) -> Callable[[PipelinePlan], PipelinePlan]:
    def change(plan: PipelinePlan) -> PipelinePlan:
        actions = tuple(
            replace(one, **changes) if one.action == text else one for one in plan.actions
        )
        assert actions != plan.actions
        return replace(plan, schedule=replace(plan.schedule, actions=actions))

    return change


def split_in_two(plan: PipelinePlan) -> PipelinePlan:
    halves = [
        part
        for one in plan.actions
        for part in (
            [replace(one, action="1I0"), replace(one, action="1W0")]
            if one.action == "1B0"
            else [one]
        )
    ]
    return replace(plan, schedule=replace(plan.schedule, actions=tuple(halves)))


@pytest.mark.parametrize(
    ("damage", "rule"),
    {
        "whole optimizer state": (restaged(0, shards="none"), "duration"),
        "weights kept whole": (restaged(1, shards="optimizer"), "missing"),
        "no shards of weights": (restaged(1, shards="none"), "missing"),
        "another recomputation": (restaged(1, recompute="layer"), "duration"),
        "unknown shards": (restaged(0, shards="all"), "shards"),
        "stashed weights": (lambda plan: replace(plan, weights="stash"), "shards"),
        "parts of a backward": (split_in_two, "duration"),
        "an update without its gather": (edited("0UPDATE", finish_seconds=9.0), "duration"),
    }.values(),
)  # fmt: skip
def test_broken_plans_are_rejected(damage: Any, rule: str) -> None:
    problem, plan = base()
    assert check(problem, plan) == ()
    assert rule in {one.rule for one in check(problem, damage(plan))}


@pytest.mark.parametrize("s", [0, 1])
def test_predictions_without_shards_are_rejected(s: int) -> None:
    problem, plan = base()
    whole = list(plan.stages)
    whole[s] = replace(whole[s], shards="none")
    other = predict(problem, valid_plan(problem, whole))
    assert plan.predicted is not None
    for field in ("peak_memory_bytes", "link_bytes"):
        wrong = replace(plan.predicted, **{field: getattr(other, field)})
        if wrong != plan.predicted:
            found = {one.rule for one in check(problem, replace(plan, predicted=wrong))}
            assert found == {"predicted"}


def test_memory_counts_shards() -> None:
    require_exact_memory(*base())


# --- Programs -------------------------------------------------------------------------------------


def test_weights_are_reduced_within_backwards() -> None:
    _, plan = base()
    texts = str(lower(plan))
    assert "0REDUCE_GRAD" in texts
    assert "1REDUCE_GRAD" not in texts


def test_an_all_reduce_and_a_gathering_update_have_one_order() -> None:
    """Two stages on the same devices: who is late with one may not begin the other before."""
    problem = small_problem(4, 2, 2, updates=True)
    pair = ("g0", "g1")
    stages = [
        Stage(span, pair, "round-robin", shards="optimizer") for span in pairwise((0, 1, 2, 4))
    ]
    plan = valid_plan(problem, stages)
    program = lower(plan)
    verify(plan, program)
    row = program.rows[0]
    at = {str(one): i for i, one in enumerate(row)}
    first, last = at["1UPDATE"], at["0REDUCE_GRAD"]
    moved = [*row[:first], row[last], *row[first:last], *row[last + 1 :]]
    swapped = replace(program, rows=(tuple(moved), *program.rows[1:]))
    message = r"collective \d of ranks 0 and 1 is 0REDUCE_GRAD on rank 0 and 1UPDATE on rank 1"
    with pytest.raises(InvalidProgram, match=message):
        verify(plan, swapped)


def test_late_replicas_delay_what_all_take_part_in() -> None:
    problem, plan = base()
    found = simulate(problem, plan, stragglers={"g1": 3.0, "g3": 2.0})
    spans = {
        (one.action, one.device): (one.start_seconds, one.finish_seconds) for one in found.actions
    }
    assert spans["0UPDATE", "g0"] == spans["0UPDATE", "g1"]
    assert spans["1B2", "g3"] == spans["1B2", "g4"]


# --- Documents, proofs, pictures ------------------------------------------------------------------


def test_documents_keep_the_shards(tmp_path: Any) -> None:
    _, plan = base()
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


def test_no_bound_speaks_of_plans_with_shards() -> None:
    problem, plan = base()
    assert class_of(plan).shards == ("optimizer", "weights")
    assert not EVERY_PLAN.contains(class_of(plan))
    assert replace(EVERY_PLAN, shards=SHARDS).contains(class_of(plan))
    with pytest.raises(InputError, match="stage 0 shards its optimizer state: planners make"):
        planned(problem, "auto", Limits(seconds=5), choices=Choices(start=plan))


def test_exports_refuse_shards_by_name() -> None:
    _, plan = base()
    with pytest.raises(InputError, match="stage 0 shards its optimizer state: the files for torch"):
        export(plan, "torch-csv")
    with pytest.raises(InputError, match="stage 1 shards its weights"):
        export(restaged(0, shards="none")(plan), "torch-csv")


def test_the_timeline_names_the_shards() -> None:
    _, plan = base()
    rows = [row.name for row in timeline(plan) if row.group == "device"]
    assert rows[0] == "g0 · stage 0 (round-robin, shards optimizer)"
    assert rows[-1] == "g4 · stage 1 (shards weights, recompute full)"
