"""Schedules between two losses: rules, damage, and a plain checker that says the same."""

import copy
import json
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from language_check import evaluate
from language_instances import random_instance, random_stages
from language_prices import Instance
from plans import elaborate, small_problem, valid_plan
from profiles import examples, slow_after

from benchmarks.backward_first import backward_first_plan
from stagewright.executor.simulation.simulate import simulate
from stagewright.formulations.checking.check import check, predict, require_valid
from stagewright.formulations.pipelines.bounds.every_plan import (
    LOAD,
    PATH,
    copies_bound,
    layer_bound,
    priced_load_bound,
)
from stagewright.formulations.plans.actions import COMPUTE, Action, ActionKind, parse_action
from stagewright.formulations.plans.assembly import certify
from stagewright.formulations.plans.memory import (
    kept_bytes,
    stage_static_bytes,
    static_bytes,
    waiting_bytes,
)
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound, PipelinePlan, Stage, load_plan, save_plan
from stagewright.formulations.plans.plan_class import (
    EVERY_BACKWARD_FIRST,
    EVERY_FINITE,
    EVERY_PLAN,
    class_of,
)
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.machines.cluster import Cluster, Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
UPDATE = ActionKind.UPDATE

Damage = Callable[[PipelinePlan], PipelinePlan]


def row(text: str) -> list[Action]:
    return [parse_action(word) for word in text.split()]


# --- By hand ----------------------------------------------------------------------------------


def layers(*seconds: tuple[float, float, float], update: float = 0.0, size: float = 1e9) -> Chain:
    """Layers by the seconds of F, I, W for one of two samples; both save 1 GB."""
    made = tuple(
        Layer(
            f"l{i}",
            size,
            (
                LayerCost(
                    2, 2 * forward, 1e9, 0.0, input_gradient_seconds=2 * of_input,
                    weight_gradient_seconds=2 * of_weights, update_seconds=update,
                ),
            ),
        )
        for i, (forward, of_input, of_weights) in enumerate(seconds)
    )  # fmt: skip
    return Chain("layers", "test", 2, made, optimizer_bytes_per_parameter_byte=0.0)


def two_replicas(chain: Chain, microbatches: int = 1) -> tuple[PipelineProblem, list[Stage]]:
    """Two devices whose all-reduce of a layer takes a second, and a stage per layer on both."""
    cluster = uniform_servers(1, 2, Link(chain.layers[0].parameter_bytes), memory_bytes=1e12)
    stages = [Stage((i, i + 1), ("s0g0", "s0g1")) for i in range(len(chain))]
    return PipelineProblem(chain, cluster, microbatches), stages


def in_both(problem: PipelineProblem, stages: list[Stage], text: str, *order: int) -> PipelinePlan:
    orders = {name: row(text) for name in ("s0g0", "s0g1")}
    return backward_first_plan(problem, "test", stages, orders, order or None)


def starts(plan: PipelinePlan) -> dict[str, float]:
    return {entry.action: entry.start_seconds for entry in plan.actions}


def test_three_layers_by_hand() -> None:
    """The first layer's all-reduce is hidden by the second's weight gradient."""
    problem, stages = two_replicas(layers(*[(1.0, 1.0, 1.0)] * 3))
    plain = in_both(problem, stages, "2I0 2W0 1I0 1W0 0I0 0W0 0F0 1F0 2F0")
    assert starts(plain)["0REDUCE_GRAD"] == pytest.approx(6)
    assert starts(plain)["0F0"] == pytest.approx(7)
    assert plain.predicted.iteration_seconds == pytest.approx(10)
    turned = in_both(problem, stages, "2I0 2W0 1I0 0I0 0W0 1W0 0F0 1F0 2F0", 2, 0, 1)
    assert starts(turned)["0REDUCE_GRAD"] == pytest.approx(5)
    assert starts(turned)["0F0"] == pytest.approx(6)
    assert starts(turned)["1F0"] == pytest.approx(7)
    assert turned.predicted.iteration_seconds == pytest.approx(9)
    assert turned.predicted.bubble == pytest.approx(0)
    assert class_of(turned).schedules == ("backward-first",)


def test_a_step_that_takes_time_precedes_its_own_stage_only() -> None:
    problem, stages = two_replicas(layers(*[(1.0, 1.0, 1.0)] * 2, update=0.5))
    plan = in_both(problem, stages, "1I0 1W0 0I0 0W0 0F0 1F0")
    found = starts(plan)
    assert (found["0REDUCE_GRAD"], found["0UPDATE"]) == pytest.approx((4, 5))
    assert (found["0F0"], found["1UPDATE"], found["1F0"]) == pytest.approx((5.5, 6.5, 7))
    early = in_both(problem, stages, "1I0 1W0 0I0 1UPDATE 0W0 0UPDATE 0F0 1F0")
    assert starts(early)["1UPDATE"] == pytest.approx(3)


def test_all_activations_are_held_at_the_loss() -> None:
    """Of 3 microbatches of 1 GB in 2 layers; a stage frees as it goes, and takes as it goes."""
    chain = layers(*[(1.0, 1.0, 1.0)] * 2, size=1e9)
    cluster = uniform_servers(1, 1, Link(1e9), memory_bytes=1e12)
    problem = PipelineProblem(chain, cluster, 3)
    stages = [Stage((0, 2), ("s0g0",))]
    plan = backward_first_plan(problem, "test", stages, {"s0g0": row("0B2 0B0 0B1 0F0 0F1 0F2")})
    assert plan.predicted.peak_memory_bytes["s0g0"] == static_bytes(problem, 0, 2, 1) + 6e9


@pytest.mark.parametrize(
    ("text", "waiting"),
    [
        # Layer 1, the last, has no buffer for the gradient of its output; layer 0's holds one.
        ("1I0 1W0 0I0 0W0 1I1 1W1 0I1 0W1 1I2 1W2 0I2 0W2", 1),
        ("1I0 0I0 1W0 0W0 1I1 0I1 1W1 0W1 1I2 0I2 1W2 0W2", 1),
        ("1I0 1I1 1I2 1W0 1W1 1W2 0I0 0W0 0I1 0W1 0I2 0W2", 3),
        ("1I0 1I1 1I2 0I0 0I1 0I2 1W0 0W0 1W1 0W1 1W2 0W2", 5),
    ],
)
def test_output_gradients_wait_in_memory(text: str, waiting: int) -> None:
    """Gradients of 1 GB of 3 microbatches; activations of 1 kB."""
    costs = LayerCost(1, 1.0, 1e3, 1e9, input_gradient_seconds=1.0, weight_gradient_seconds=1.0)
    chain = Chain("m", "test", 1, tuple(Layer(f"l{i}", 1e3, (costs,)) for i in range(2)), 0.0)
    cluster = uniform_servers(1, 1, Link(1e9), memory_bytes=1e12)
    problem = PipelineProblem(chain, cluster, 3)
    stages = [Stage((i, i + 1), ("s0g0",)) for i in range(2)]
    order = row(f"{text} 0F0 1F0 0F1 1F1 0F2 1F2")
    plan = backward_first_plan(problem, "test", stages, {"s0g0": order})
    static = sum(stage_static_bytes(problem, stage) for stage in stages)
    peak = plan.predicted.peak_memory_bytes["s0g0"]
    assert peak - static == pytest.approx(waiting * 1e9, abs=1e4)


@examples(30)
@given(elaborate(begins="backward"))
def test_without_recomputation_no_order_holds_more_than_at_the_loss(
    case: tuple[PipelineProblem, PipelinePlan],
) -> None:
    """A stage's next forwards follow all its backwards: it never holds more than M microbatches.

    The gradients that wait for a W come on top.
    """
    given_problem, plan = case
    peaks = predict(given_problem, plan).peak_memory_bytes
    for device, peak in peaks.items():
        at_the_loss = working = 0.0
        for stage in (stage for stage in plan.stages if device in stage.devices):
            kept = kept_bytes(given_problem, stage, split_backward=True)
            mine = sum(device in stage.runners(m) for m in range(plan.microbatches))
            at_the_loss += stage_static_bytes(given_problem, stage) + mine * kept.saved_bytes
            working += mine * (kept.working_bytes + sum(waiting_bytes(given_problem, stage)))
        assert at_the_loss * (1 - 1e-12) <= peak <= (at_the_loss + working) * (1 + 1e-12)


# --- The rules --------------------------------------------------------------------------------


@cache
def problem() -> PipelineProblem:
    return small_problem(4, 4, 3, parts=True, updates=True)


@cache
def base() -> PipelinePlan:
    """A stage that is replicated, two that share a device, one recomputes; some backwards split."""
    stages = [
        Stage((0, 1), ("g0", "g1"), "round-robin"),
        Stage((1, 2), ("g2",)),
        Stage((2, 3), ("g0", "g3"), recompute="full"),
        Stage((3, 4), ("g2",)),
    ]
    split = {(s, m) for s, m in product(range(4), range(3)) if (s + m) % 2}
    plan = valid_plan(problem(), stages, split=split, begins="backward")
    return replace(plan, predicted=predict(problem(), plan))


def start_of(plan: PipelinePlan, text: str) -> float:
    return starts(plan)[text]


def moved(text: str, to: Callable[[PipelinePlan], float]) -> Damage:
    def damage(plan: PipelinePlan) -> PipelinePlan:
        change = to(plan) - start_of(plan, text)
        entries = tuple(
            replace(
                one,
                start_seconds=one.start_seconds + change,
                finish_seconds=one.finish_seconds + change,
            )
            if one.action == text
            else one
            for one in plan.actions
        )
        return replace(plan, predicted=None, schedule=replace(plan.schedule, actions=entries))

    return damage


def at(seconds: float) -> Callable[[PipelinePlan], float]:
    return lambda plan: seconds


def at_start_of(other: str) -> Callable[[PipelinePlan], float]:
    return lambda plan: start_of(plan, other)


def end_of(plan: PipelinePlan) -> float:
    return max(one.finish_seconds for one in plan.actions)


def staged(s: int, **changes: Any) -> Damage:
    def damage(plan: PipelinePlan) -> PipelinePlan:
        stages = list(plan.stages)
        stages[s] = replace(stages[s], **changes)
        return replace(plan, stages=tuple(stages))

    return damage


def begun_forward(plan: PipelinePlan) -> PipelinePlan:
    return replace(plan, schedule=replace(plan.schedule, begins="forward"))


DAMAGES: dict[str, tuple[str, Damage]] = {
    "stashed weights": ("weights", lambda plan: replace(plan, weights="stash")),
    "two versions": ("weights", lambda plan: replace(plan, weights="double-buffer")),
    "offloaded": ("offload", staged(1, offload=True)),
    "called forward first": ("dependency", begun_forward),
    "forward at the loss": ("dependency", moved("0F0", lambda plan: 0.0)),
    "forward with its update": ("dependency", moved("1F0", at_start_of("1UPDATE"))),
    "forward with its all-reduce": ("dependency", moved("0F1", at_start_of("0REDUCE_GRAD"))),
    "update with its all-reduce": ("dependency", moved("2UPDATE", at_start_of("2REDUCE_GRAD"))),
    "all-reduce at the loss": ("dependency", moved("2REDUCE_GRAD", lambda plan: 0.0)),
    "all-reduce after the forwards": ("dependency", moved("0REDUCE_GRAD", end_of)),
    "update after the forwards": ("dependency", moved("1UPDATE", end_of)),
    "backward after the forwards": ("dependency", moved("1B1", end_of)),
    "weight gradient after the forwards": ("dependency", moved("0W1", end_of)),
    "weight gradient with its input gradient": ("dependency", moved("1W0", at_start_of("1I0"))),
    "backward before its gradient": ("dependency", moved("1B1", lambda plan: 0.0)),
    "forward before its input": ("dependency", moved("3F1", at_start_of("2F1"))),
    "send before its forward": ("dependency", moved("2SEND_F1", lambda plan: 0.0)),
    "two backwards at once": ("overlap", moved("3B1", at_start_of("3I0"))),
    "forward of one stage, backward of another": (
        "overlap", moved("3I2", at_start_of("3I0"))),
    "two all-reduces of a device": ("overlap", moved("2REDUCE_GRAD", at_start_of("0REDUCE_GRAD"))),
    "more memory than there is": ("memory", lambda plan: plan),
    "memory understated": ("predicted", lambda plan: replace(plan, predicted=replace(
        plan.predicted, peak_memory_bytes=dict.fromkeys(plan.predicted.peak_memory_bytes, 1.0)))),
}  # fmt: skip


def test_the_undamaged_plan_is_valid() -> None:
    assert check(problem(), base()) == ()
    assert require_valid(problem(), base()) == end_of(base())


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_rejected(name: str) -> None:
    rule, damage = DAMAGES[name]
    broken, given_problem = damage(base()), problem()
    if rule == "memory":
        given_problem = small_problem(4, 4, 3, 7e8, parts=True, updates=True)
        broken = replace(broken, digest=given_problem.digest)
    assert rule in {violation.rule for violation in check(given_problem, broken)}


def test_no_part_may_be_missing_doubled_or_late() -> None:
    """Every action of the plan, each broken in every way that the rules can see."""
    plan, end = base(), end_of(base())
    for entry in plan.actions:
        rest = tuple(one for one in plan.actions if one is not entry)
        for actions in (rest, (*plan.actions, entry)):
            other = replace(plan.schedule, actions=actions)
            assert check(problem(), replace(plan, schedule=other))
        if parse_action(entry.action) != Action(3, F, 2):  # nothing follows a last forward
            late = moved(entry.action, lambda plan: end)(plan)
            later = {str(v.rule) for v in check(problem(), late)}
            last = entry.action.startswith("3F")
            assert last or later & {"dependency", "overlap"}, entry.action


@examples(40)
@given(elaborate(waits=True, begins="backward"))
def test_nothing_is_in_progress_when_the_last_forward_ends(
    case: tuple[PipelineProblem, PipelinePlan],
) -> None:
    """The window can be repeated: its length is the time from loss to loss."""
    given_problem, plan = case
    last = len(plan.stages) - 1
    ends = [e.finish_seconds for e in plan.actions if e.action.startswith(f"{last}F")]
    assert max(ends) == pytest.approx(end_of(plan))
    assert predict(given_problem, plan).iteration_seconds == pytest.approx(max(ends))


# --- A plain checker says the same ------------------------------------------------------------


class Case:
    """A random backward-first plan of tiny documents, with ample memory."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        model, cluster, microbatches = self.documents = random_instance(seed)
        for device in cluster["devices"]:
            device["memory_bytes"] = 1e12
        self.problem = PipelineProblem(
            documents.parse(Chain, json.dumps(model), "model"),
            documents.parse(Cluster, json.dumps(cluster), "cluster"),
            microbatches,
        )
        found = random_stages(seed, Instance(*self.documents))
        names = [device.name for device in self.problem.cluster.devices]
        stages = [
            Stage((s.start, s.stop), tuple(names[d] for d in s.devices), s.replication, s.recompute)
            for s in found
        ]
        known = [self.problem.layer_with_whole_backward(*stage.layers) is None for stage in stages]
        split = {
            (s, m)
            for s, m in product(range(len(stages)), range(microbatches))
            if known[s] and self.draw.random() < 0.5
        }
        self.plan = valid_plan(
            self.problem,
            stages,
            order=self.draw.sample(range(microbatches), microbatches),
            wait=lambda: self.draw.choice((0, 0, 1e-4)),
            split=split,
            begins="backward",
        )

    def verdicts(self, plan: PipelinePlan) -> tuple[bool, bool]:
        """Whether either checker finds anything."""
        document = json.loads(documents.to_json(plan))
        entries = document["schedule"]["actions"]
        known = [{k: v for k, v in entry.items() if v is not None} for entry in entries]
        document["schedule"]["actions"] = known
        return bool(check(self.problem, plan)), bool(evaluate(*self.documents, document)[1])

    def with_memory(self, share: float) -> "Case":
        """The same plan where each device has this share of its predicted peak."""
        other, peaks = copy.copy(self), predict(self.problem, self.plan).peak_memory_bytes
        model, cluster, microbatches = copy.deepcopy(self.documents)
        for device in cluster["devices"]:
            device["memory_bytes"] = max(2e6, share * peaks.get(device["name"], 1e12))
        other.documents = model, cluster, microbatches
        read = documents.parse(Cluster, json.dumps(cluster), "cluster")
        other.problem = replace(self.problem, cluster=read)
        other.plan = replace(self.plan, digest=other.problem.digest)
        return other


@pytest.mark.parametrize("seed", slow_after(6, range(100)))
def test_a_plain_checker_agrees_on_valid_plans_and_on_memory(seed: int) -> None:
    case = Case(seed)
    assert case.verdicts(case.plan) == (False, False)
    assert case.with_memory(1).verdicts(case.with_memory(1).plan) == (False, False)
    tight = case.with_memory(0.999)
    assert len({*tight.verdicts(tight.plan)}) == 1


@pytest.mark.parametrize("seed", slow_after(6, range(100)))
def test_a_plain_checker_agrees_on_moved_actions(seed: int) -> None:
    case = Case(seed)
    texts = sorted({one.action for one in case.plan.actions})
    for _ in range(6):
        one, other = case.draw.choices(texts, k=2)
        here, there = start_of(case.plan, one), start_of(case.plan, other)
        shift = case.draw.choice((-3e-4, 1e-4, 2e-3))
        for plan in (
            moved(one, at(max(0.0, here + shift)))(case.plan),
            moved(one, at(there))(case.plan),
            moved(one, at(there))(moved(other, at(here))(case.plan)),
        ):
            found, wrong = case.verdicts(plan)
            assert found == wrong, (one, other, shift, check(case.problem, plan))


@pytest.mark.parametrize("seed", slow_after(6, range(40)))
def test_bounds_on_every_plan_hold_between_losses(seed: int) -> None:
    case = Case(seed)
    cost = require_valid(case.problem, case.plan) * (1 + 1e-9)
    assert layer_bound(case.problem) <= cost
    assert copies_bound(case.problem) <= cost
    for prices in (np.ones(len(case.problem.kinds)), np.eye(len(case.problem.kinds))[0]):
        assert priced_load_bound(case.problem, prices) <= cost
    assert EVERY_PLAN.contains(class_of(case.plan))
    assert EVERY_BACKWARD_FIRST.contains(class_of(case.plan))
    assert not EVERY_FINITE.contains(class_of(case.plan))


def test_a_certificate_needs_bounds_of_its_class() -> None:
    prices = np.ones(len(problem().kinds))
    load = priced_load_bound(problem(), prices)
    everywhere = Bound(load, LOAD, "problem", EVERY_PLAN, tuple(prices))
    finite = Bound(1e3, PATH, "problem", EVERY_FINITE)  # above the cost, and not about this plan
    plan = certify(problem(), base(), [everywhere, finite], ())
    assert plan.certificate.plans == EVERY_PLAN
    assert plan.certificate.bound_seconds == load
    found = check(problem(), plan)
    assert [(one.rule, one.place) for one in found] == [("proof", "certificate.bounds[1]")]
    assert check(problem(), certify(problem(), base(), [everywhere], ())) == ()
    widened = replace(finite, seconds=load, plans=EVERY_BACKWARD_FIRST)
    refuted = check(problem(), certify(problem(), base(), [everywhere, widened], ()))
    assert "proved for every finite plan with tensor degree 1, no shards only" in str(refuted[0])


# --- Documents and the helper -----------------------------------------------------------------


def test_the_document_says_where_the_schedule_begins(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(base(), path)
    assert load_plan(path) == base()
    data = json.loads(path.read_text())
    assert data["schedule"]["begins"] == "backward"
    del data["schedule"]["begins"]
    path.write_text(json.dumps(data))
    assert not load_plan(path).is_backward_first
    data["schedule"]["begins"] = "update"
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"schedule\.begins.*'forward' or 'backward'"):
        load_plan(path)


def test_steps_that_are_not_in_the_order_do_not_make_devices_wait_for_each_other():
    """d0 computes stage 2 before its last forward of stage 1, d1 after it; both step together."""
    chain = layers((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0), update=0.5)
    cluster = uniform_servers(1, 2, Link(1e12), memory_bytes=1e12)
    stages = [
        Stage((0, 1), ("s0g0",)),
        Stage((1, 2), ("s0g0", "s0g1")),
        Stage((2, 3), ("s0g0", "s0g1"), "round-robin"),
    ]
    orders = {
        "s0g0": row("2B0 1B0 0B0 1B1 0B1 0F0 1F0 0F1 2F0 1F1"),
        "s0g1": row("2B1 1B0 1B1 1F0 1F1 2F1"),
    }
    given_problem = PipelineProblem(chain, cluster, 2)
    plan = backward_first_plan(given_problem, "test", stages, orders)
    assert check(given_problem, plan) == ()


@st.composite
def ordered(draw: st.DrawFn) -> tuple[PipelineProblem, list[Stage], dict[str, list[Action]]]:
    """A random order of all computations that obeys the dependencies, cut into rows of devices."""
    given_problem, plan = draw(elaborate(begins="backward"))
    entries = sorted(plan.actions, key=lambda e: (e.start_seconds, e.finish_seconds))
    rows: dict[str, list[Action]] = {name: [] for s in plan.stages for name in s.devices}
    for entry in entries:
        action = parse_action(entry.action)
        if action.kind in COMPUTE or (action.kind is UPDATE and draw(st.booleans())):
            rows[entry.device].append(action)
    kept = {a for own in rows.values() for a in own if a.kind is UPDATE}
    for a in kept:  # an update is in the orders of all its devices, or in none
        if not all(a in rows[name] for name in plan.stages[a.stage].devices):
            rows = {name: [one for one in own if one != a] for name, own in rows.items()}
    return given_problem, list(plan.stages), rows


@examples(60)
@given(ordered(), st.randoms(use_true_random=False))
def test_any_order_becomes_a_valid_plan_without_needless_waits(
    case: tuple[PipelineProblem, list[Stage], dict[str, list[Action]]], chance: random.Random
) -> None:
    given_problem, stages, orders = case
    shared = [s for s, stage in enumerate(stages) if len(stage.devices) > 1]
    plans = [backward_first_plan(given_problem, "test", stages, orders)]
    chance.shuffle(shared)
    with suppress(InputError):  # another order of all-reduces may be a deadlock
        plans.append(backward_first_plan(given_problem, "test", stages, orders, shared))
    for plan in plans:
        assert check(given_problem, plan) == ()
        assert simulate(given_problem, plan).actions == plan.actions
        for device, order in orders.items():
            mine = [e.action for e in plan.actions if e.device == device and e.bytes is None]
            wanted = [str(action) for action in order]
            assert sorted(wanted) == sorted(text for text in mine if text in wanted)
    if len(plans) > 1:
        begun = {s: start_of(plans[1], f"{s}REDUCE_GRAD") for s in shared}
        for device in orders:
            own = [begun[s] for s in shared if device in stages[s].devices]
            assert own == sorted(own)


@pytest.mark.parametrize(
    ("text", "order", "message"),
    [
        ("1B0 0B0 0F0", None, r"order of device 's0g0' lacks 1F0"),
        ("1B0 0B0 0F0 1F0 1F0", None, r"order of device 's0g0' has 1F0"),
        ("1B0 0B0 0F0 1F0 0UPDATE", None, r"order of device 's0g0' has 0UPDATE"),
        ("1I0 0B0 0F0 1F0", None, r"order of device 's0g0' lacks 1W0"),
        ("2B0 1B0 0B0 0F0 1F0", None, r"order of device 's0g0' has 2B0"),
        ("2W0 1B0 0B0 0F0 1F0", None, r"2W0: there are only stages 0 to 1"),
        ("0F0 1B0 0B0 1F0", None, r"wait for each other: .*0F0 waits for"),
        ("1B0 0B0 0F0 1F0", (0,), r"reductions must have the stages .* \[0, 1\], got \[0\]"),
    ],
)
def test_an_order_that_is_none_is_refused(
    text: str, order: tuple[int, ...] | None, message: str
) -> None:
    problem, stages = two_replicas(layers(*[(1.0, 1.0, 1.0)] * 2))
    with pytest.raises(InputError, match=message):
        in_both(problem, stages, text, *(order or ()))


def test_an_order_beyond_memory_names_the_device() -> None:
    problem, stages = two_replicas(layers(*[(1.0, 1.0, 1.0)] * 2))
    small = replace(problem, memory_limit_bytes=4.9e9)
    with pytest.raises(InvalidPlan, match=r"memory: device s0g0: needs 5 GB at its peak"):
        in_both(small, stages, "1B0 0B0 0F0 1F0")
