"""A trace in which one cause is inflated is explained by that cause, and by how much exactly."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from periodic_plans import plan_by_hand
from plans import elaborate, scheduled
from profiles import examples
from typer.testing import CliRunner

from stagewright.cli import app
from stagewright.executor.measuring.causes import (
    BETWEEN,
    KINDS,
    PLANNED_WAITS,
    WAITING,
    Explanation,
)
from stagewright.executor.measuring.compare import compare
from stagewright.executor.measuring.pairs import Pair
from stagewright.executor.programs.trace import (
    MeasuredMemory,
    MemoryKind,
    Trace,
    TracedStep,
    load_trace,
    save_trace,
)
from stagewright.executor.simulation.run import planned_run
from stagewright.executor.simulation.simulate import execute, simulate
from stagewright.formulations.checking.check import predict
from stagewright.formulations.plans.actions import Action, ActionKind
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import (
    PipelinePlan,
    Predicted,
    Schedule,
    ScheduledAction,
    Stage,
    save_plan,
)
from stagewright.graphs.documents.errors import InputError

F, B = ActionKind.FORWARD, ActionKind.BACKWARD

# Two stages, two microbatches, 1F1B; transfers of 1 s.
PLAN = PipelinePlan(
    "0", "test", "two", "c", 2, (Stage((0, 1), ("a",)), Stage((1, 2), ("b",))),
    Schedule((
        ScheduledAction("a", "0F0", 0.0, 1.0),
        ScheduledAction("a", "0SEND_F0", 1.0, 2.0, ("a",), ("b",), 8.0),
        ScheduledAction("a", "0F1", 1.0, 2.0),
        ScheduledAction("b", "1F0", 2.0, 3.0),
        ScheduledAction("a", "0SEND_F1", 2.0, 3.0, ("a",), ("b",), 8.0),
        ScheduledAction("b", "1B0", 3.0, 5.0),
        ScheduledAction("b", "1F1", 5.0, 6.0),
        ScheduledAction("b", "1SEND_B0", 5.0, 6.0, ("b",), ("a",), 8.0),
        ScheduledAction("a", "0B0", 6.0, 8.0),
        ScheduledAction("b", "1B1", 6.0, 8.0),
        ScheduledAction("b", "1SEND_B1", 8.0, 9.0, ("b",), ("a",), 8.0),
        ScheduledAction("a", "0B1", 9.0, 11.0),
    )),
)  # fmt: skip


def step_of(plan: PipelinePlan, factor: Callable[[Action, str], float]) -> TracedStep:
    """The step in which actions take ``factor`` times as long, each as soon as it can be."""
    run = planned_run(plan, plan.microbatches)
    factors = [factor(a, one.device) for a, one in zip(run.actions, plan.actions, strict=True)]
    seconds = [value * by for value, by in zip(run.seconds, factors, strict=True)]
    found = execute(replace(run, seconds=seconds))
    actions = tuple(
        replace(one, start_seconds=start, finish_seconds=end)
        for one, start, end in zip(plan.actions, found.starts, found.ends, strict=True)
    )
    return TracedStep(0, max(found.ends), 0.0, actions)


def trace_of(plan: PipelinePlan, *steps: TracedStep, backend: str = "gloo") -> Trace:
    numbered = tuple(replace(one, step=i) for i, one in enumerate(steps))
    return Trace(plan.digest, plan.model, "a desk", backend, 2, "float32", numbered)


def explained(plan: PipelinePlan, *steps: TracedStep, backend: str = "gloo") -> Explanation:
    found = compare(plan, trace_of(plan, *steps, backend=backend)).explanation
    assert found is not None
    return found


def seconds_of(found: Explanation) -> dict[str, float]:
    return {one.name: one.seconds for one in found.causes}


@examples(60)
@given(elaborate(), st.sampled_from([*KINDS]), st.sampled_from([3.0, 1.5, 0.5]))
def test_the_only_cause_accounts_for_all(
    case: tuple[PipelineProblem, PipelinePlan], name: str, by: float
) -> None:
    _, plan = case
    step = step_of(plan, lambda action, _: by if action.kind in KINDS[name] else 1.0)
    planned = max(one.finish_seconds for one in plan.actions)
    difference = step.iteration_seconds - planned
    found = explained(plan, step)
    shares = seconds_of(found)
    rounding = 1e-9 * planned
    waits = shares.pop(PLANNED_WAITS, 0.0)  # an action may wait in the plan for an equal one
    assert shares.pop(name, 0.0) + waits == pytest.approx(difference, abs=rounding)
    assert list(shares.values()) == pytest.approx([0.0] * len(shares), abs=rounding)
    assert found.rest_seconds == pytest.approx(0.0, abs=rounding)
    if abs(difference) > 2 * rounding and not waits:
        assert found.largest is not None
        assert found.largest.name == name
        assert found.largest.work is not None
        assert found.largest.work.ratio == pytest.approx(by)


@examples(40)
@given(scheduled(waits=True), st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=7, max_size=7))
def test_causes_and_the_rest_add_up_and_a_late_start_is_between_actions(
    case: tuple[PipelineProblem, PipelinePlan], factors: list[float]
) -> None:
    _, plan = case
    by_kind = dict(zip(ActionKind, factors + [1.0] * len(ActionKind), strict=False))
    step = step_of(plan, lambda action, _: by_kind[action.kind])
    late = replace(
        step,
        iteration_seconds=step.iteration_seconds + 0.25,
        actions=tuple(
            replace(one, start_seconds=one.start_seconds + 0.25,
                    finish_seconds=one.finish_seconds + 0.25)
            for one in step.actions
        ),
    )  # fmt: skip
    pair = compare(plan, trace_of(plan, late)).iteration_seconds
    found = explained(plan, late)
    total = sum(seconds_of(found).values()) + found.rest_seconds
    assert total == pytest.approx(pair.measured - pair.predicted)
    assert seconds_of(found)[BETWEEN] == pytest.approx(0.25)


def test_a_slow_stage_is_named_with_what_it_adds() -> None:
    step = step_of(PLAN, lambda action, _: 1.5 if (action.stage, action.kind) == (1, B) else 1.0)
    found = explained(PLAN, step)
    assert found.largest is not None
    assert (found.largest.name, found.largest.seconds) == ("backwards", 2.0)
    assert found.largest.work == Pair(8.0, 10.0)
    assert [(one.stage, one.seconds, one.work) for one in found.largest.stages] == [
        (0, 0.0, Pair(4.0, 4.0)),
        (1, 2.0, Pair(4.0, 6.0)),
    ]


def test_causes_that_hide_each_other_leave_a_rest() -> None:
    """Forwards of stage 0 and transfers both delay stage 1; the later one would do alone."""
    slow = {"0F1": 6.0, "0SEND_F1": 4.0}
    step = step_of(PLAN, lambda action, _: slow.get(str(action), 1.0))
    found = explained(PLAN, step)
    # 0F1 ends at 7, 0SEND_F1 at 11 and 1F1 at 12, six seconds later than planned; alone 8 and 6.
    assert step.iteration_seconds == 17.0
    assert seconds_of(found) == {
        "forwards": 3.0, "backwards": 0.0, "transfers": 1.0, BETWEEN: 0.0,
    }  # fmt: skip
    assert found.rest_seconds == 2.0


def test_time_without_a_core_is_not_blamed_on_the_computation() -> None:
    step = step_of(PLAN, lambda action, _: 2.0 if str(action) == "1B1" else 1.0)
    waits = tuple(1.5 if one.action == "1B1" else 0.0 for one in step.actions)
    waiting = replace(step, waited_seconds=waits)
    found = explained(PLAN, waiting)
    shares = seconds_of(found)
    assert (shares[WAITING], shares["backwards"], found.rest_seconds) == (1.5, 0.5, 0.0)
    assert found.without_waits_seconds == step.iteration_seconds - 1.5
    assert found.largest is not None
    assert (found.largest.name, found.largest.work) == (WAITING, None)
    assert WAITING not in seconds_of(explained(PLAN, step))
    slower = replace(trace_of(PLAN, waiting), reference_seconds=2.0)  # which is no wait either
    whole = compare(replace(PLAN, reference_seconds=1.0), slower)
    at_speed = (step.iteration_seconds - 1.5) / whole.iteration_seconds.predicted / 2
    assert whole.equal_speed_ratio == pytest.approx(at_speed)


def test_a_receiver_that_comes_late_is_no_slow_message() -> None:
    """With NCCL a message seems to last until its receiver comes to it."""

    def seen(step: TracedStep) -> TracedStep:
        """``step`` with messages that end just before the computation that needs them."""
        begins = {one.action: one.start_seconds for one in step.actions}
        needing = {"0SEND_F1": "1F1", "1SEND_B0": "0B0"}
        return replace(
            step,
            actions=tuple(
                replace(one, finish_seconds=begins[needing[one.action]])
                if one.action in needing
                else one
                for one in step.actions
            ),
        )

    slow = step_of(PLAN, lambda action, _: 3.0 if str(action) == "1B0" else 1.0)
    found = explained(PLAN, seen(slow), backend="nccl")
    assert seconds_of(found) == {
        "forwards": 0.0, "backwards": 4.0, "transfers": 0.0, BETWEEN: 0.0
    }  # fmt: skip
    late = step_of(PLAN, lambda action, _: 9.0 if str(action) == "0SEND_F1" else 1.0)
    found = explained(PLAN, seen(late), backend="nccl")
    assert seconds_of(found)["transfers"] == late.iteration_seconds - 11.0 > 0


def test_waiting_for_a_slow_rank_is_no_slow_sum() -> None:
    plan = PipelinePlan(
        "0", "test", "one", "c", 1, (Stage((0, 1), ("a", "b")),),
        Schedule((
            *(ScheduledAction(name, "0F0", 0.0, 1.0) for name in "ab"),
            *(ScheduledAction(name, "0B0", 1.0, 3.0) for name in "ab"),
            ScheduledAction("a", "0REDUCE_GRAD", 3.0, 4.0, ("a", "b"), ("a", "b"), 8.0),
        )),
    )  # fmt: skip
    slow = step_of(plan, lambda action, device: 2.0 if (action.kind, device) == (B, "b") else 1.0)
    entered = replace(
        slow,
        actions=tuple(
            replace(one, start_seconds=3.0) if "REDUCE" in one.action else one
            for one in slow.actions
        ),
    )
    assert seconds_of(explained(plan, entered)) == {
        "forwards": 0.0, "backwards": 2.0, "all-reduces": 0.0, BETWEEN: 0.0,
    }  # fmt: skip


def test_waits_that_the_order_does_not_need_are_a_cause() -> None:
    entries = [
        replace(one, finish_seconds=12.0, start_seconds=10.0) if one.action == "0B1" else one
        for one in PLAN.actions
    ]
    plan = replace(PLAN, schedule=Schedule(tuple(entries)))
    found = explained(plan, step_of(plan, lambda *_: 1.0))
    assert found.largest is not None
    assert (found.largest.name, found.largest.seconds) == (PLANNED_WAITS, -1.0)


def test_steps_of_the_middle_half_count() -> None:
    steps = [
        step_of(PLAN, lambda action, _, by=by: by if action.kind is F else 1.0)  # type: ignore[misc]
        for by in (9.0, 1.0, 2.0, 3.0, 90.0)  # the first is a warm-up
    ]
    found = explained(PLAN, *steps)
    assert found.largest is not None
    assert found.largest.work == Pair(4.0, 10.0)


def test_a_plan_that_lacks_actions_is_still_compared() -> None:
    short = replace(PLAN, schedule=Schedule(PLAN.actions[:-1]))
    step = TracedStep(0, 9.0, 0.0, short.actions)
    assert compare(short, trace_of(short, step)).explanation is None


# Periodic plans


def run_of(problem: PipelineProblem, plan: PipelinePlan, update: float = 0.0) -> Trace:
    """The trace of the simulated order, with updates that long."""
    found = simulate(problem, replace(plan, digest=problem.digest))
    assert found.periodic is not None
    iterations = found.periodic.microbatches // plan.microbatches
    actions = found.actions
    step = TracedStep(0, 1.0, update * iterations, actions, None, iterations)
    return trace_of(plan, step)


def test_a_period_is_explained_by_a_replay_of_its_run() -> None:
    """The order of this plan takes 3 s per microbatch, its pattern 4 s."""
    problem, plan = plan_by_hand()
    found = compare(plan, run_of(problem, plan)).explanation
    assert found is not None
    assert {name: one for name, one in seconds_of(found).items() if one} == {PLANNED_WAITS: -4.0}
    layers = tuple(
        replace(layer, costs=tuple(replace(one, backward_seconds=5.0) for one in layer.costs))
        for layer in problem.chain.layers
    )
    slower = replace(problem, chain=replace(problem.chain, layers=layers))
    found = compare(plan, run_of(slower, plan)).explanation
    assert found is not None
    assert found.largest is not None
    base = compare(plan, run_of(problem, plan)).iteration_seconds.measured
    slow = compare(plan, run_of(slower, plan)).iteration_seconds.measured
    assert (found.largest.name, found.largest.seconds) == ("backwards", pytest.approx(slow - base))
    assert found.largest.work == Pair(4 * 3 * 2.0, 4 * 3 * 5.0)
    assert found.rest_seconds == pytest.approx(0.0)


def test_updates_lengthen_the_iterations_of_a_periodic_plan() -> None:
    problem, plan = plan_by_hand()
    found = compare(plan, run_of(problem, plan, update=0.5)).explanation
    assert found is not None
    shares = seconds_of(found)
    # The made trace has no time for them, so that they are missing between the actions.
    assert (shares["updates"], shares[BETWEEN]) == (0.5, -0.5)


# Memory, and what is printed


def with_memory(trace: Trace, **peaks: float) -> Trace:
    return replace(trace, memory=MeasuredMemory("resident", peaks))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with plan.json, and trace.json in which the backwards of stage 1 are slow."""
    step = step_of(PLAN, lambda action, _: 1.5 if (action.stage, action.kind) == (1, B) else 1.0)
    save_plan(PLAN, tmp_path / "plan.json")
    save_trace(with_memory(trace_of(PLAN, step), a=3e6, b=1e6), tmp_path / "trace.json")
    return tmp_path


def shown(folder: Path, *options: str) -> str:
    arguments = ["compare", str(folder / "plan.json"), str(folder / "trace.json"), *options]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.exception
    return result.stdout


def test_the_command_names_the_cause(files: Path) -> None:
    text = shown(files)
    assert text.rstrip().endswith(
        "largest cause: backwards take 25.00% longer than predicted: +2 s of +2 s per iteration; "
        "those of stage 1 take 50.00% longer than predicted: +2 s alone"
    )
    assert "memory" not in text
    assert "the machine was" not in text
    document = json.loads(shown(files, "--json"))
    assert document["memory"] is None
    assert document["explanation"]["largest"] == "backwards"
    causes = {one["name"]: one for one in document["explanation"]["causes"]}
    assert causes["backwards"]["seconds"] == 2.0
    assert causes["backwards"]["stages"][1]["work_seconds"]["ratio"] == 1.5


@examples(10)
@given(scheduled())
def test_memory_is_compared_per_device(case: tuple[PipelineProblem, PipelinePlan]) -> None:
    problem, plan = case
    plan = replace(plan, predicted=predict(problem, plan))
    assert plan.predicted is not None
    peaks = plan.predicted.peak_memory_bytes
    trace = trace_of(plan, step_of(plan, lambda *_: 1.0))
    assert compare(plan, trace).memory is None
    twice = with_memory(trace, **{name: 2 * one for name, one in peaks.items()})
    found = compare(plan, twice).memory
    assert found is not None
    assert found.kind == "resident"
    assert found.peak_bytes == {name: Pair(one, 2 * one) for name, one in peaks.items()}
    assert compare(plan, with_memory(trace)).memory is None
    assert compare(replace(plan, predicted=None), twice).memory is None


@pytest.mark.parametrize(
    ("kind", "what"),
    [("resident", "resident memory above that"), ("allocated", "torch has allocated")],
)
def test_the_command_says_what_memory_it_is(kind: MemoryKind, what: str, files: Path) -> None:
    plan = replace(PLAN, predicted=Predicted(11.0, 0.0, {"a": 2e6, "b": 2e6}, {}))
    save_plan(plan, files / "plan.json")
    trace = load_trace(files / "trace.json")
    memory = MeasuredMemory(kind, {"a": 3e6, "b": 1e6})
    save_trace(replace(trace, memory=memory), files / "trace.json")
    text = shown(files)
    assert what in text
    assert re.search(r"^ ?a +2 MB +3 MB +1\.500", text, re.MULTILINE)
    assert json.loads(shown(files, "--json"))["memory"]["peak_bytes"]["b"]["ratio"] == 0.5


def test_traces_with_memory_and_waits_come_back_and_older_ones_load(tmp_path: Path) -> None:
    step = step_of(PLAN, lambda *_: 1.0)
    step = replace(step, waited_seconds=(0.5,) * len(step.actions))
    trace = replace(with_memory(trace_of(PLAN, step), a=1.0), reference_seconds=1e-3)
    path = tmp_path / "trace.json"
    save_trace(trace, path)
    assert load_trace(path) == trace
    data = json.loads(path.read_text())
    del data["memory"], data["reference_seconds"], data["steps"][0]["waited_seconds"]
    path.write_text(json.dumps(data))
    assert load_trace(path) == trace_of(PLAN, replace(step, waited_seconds=None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["steps"][0]["waited_seconds"].pop(), "a number for each of the 12 actions"),
        (lambda d: d["steps"][0]["waited_seconds"].__setitem__(1, -1.0), "of 0SEND_F0 on 'a'"),
        (lambda d: d["memory"]["peak_bytes"].update(a=-1.0), "memory: peak_bytes of 'a'"),
        (lambda d: d["memory"].update(kind="guessed"), "memory.kind"),
        (lambda d: d.update(reference_seconds=0.0), "reference_seconds must be finite and above"),
    ],
)
def test_faults_are_one_line(
    change: Callable[[dict[str, object]], object], message: str, tmp_path: Path
) -> None:
    step = step_of(PLAN, lambda *_: 1.0)
    step = replace(step, waited_seconds=(0.0,) * len(step.actions))
    path = tmp_path / "trace.json"
    save_trace(with_memory(trace_of(PLAN, step), a=1.0), path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=re.escape(message)) as refusal:
        load_trace(path)
    assert "\n" not in str(refusal.value)
