"""Where a cause is: its device is named. Traces of other plans are refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from plans import make_stages, small_problem, valid_plan
from typer.testing import CliRunner

from stagewright.cli import app
from stagewright.executor.drawing.timeline import headline
from stagewright.executor.measuring.causes import BETWEEN, WAITING, TimeCause
from stagewright.executor.measuring.compare import compare
from stagewright.executor.programs.trace import Trace, TracedStep, save_trace
from stagewright.executor.simulation.run import planned_run
from stagewright.executor.simulation.simulate import execute
from stagewright.formulations.plans.plan import (
    PipelinePlan,
    Predicted,
    Schedule,
    ScheduledAction,
    Stage,
    save_plan,
)
from stagewright.graphs.documents.errors import InputError

# Stage 0 on two devices, stage 1 on one; two microbatches, all forwards first. Tenths of seconds
# leave differences of rounding.
PLAN = PipelinePlan(
    "0", "test", "two", "c", 2, (Stage((0, 1), ("a", "b")), Stage((1, 2), ("c",))),
    Schedule((
        ScheduledAction("a", "0F0", 0.0, 0.1),
        ScheduledAction("b", "0F0", 0.0, 0.1),
        ScheduledAction("a", "0SEND_F0", 0.1, 0.2, ("a", "b"), ("c",), 8.0),
        ScheduledAction("a", "0F1", 0.1, 0.2),
        ScheduledAction("b", "0F1", 0.1, 0.2),
        ScheduledAction("c", "1F0", 0.2, 0.3),
        ScheduledAction("a", "0SEND_F1", 0.2, 0.3, ("a", "b"), ("c",), 8.0),
        ScheduledAction("c", "1F1", 0.3, 0.4),
        ScheduledAction("c", "1B0", 0.4, 0.6),
        ScheduledAction("c", "1SEND_B0", 0.6, 0.7, ("c",), ("a", "b"), 8.0),
        ScheduledAction("c", "1B1", 0.6, 0.8),
        ScheduledAction("a", "0B0", 0.7, 0.9),
        ScheduledAction("b", "0B0", 0.7, 0.9),
        ScheduledAction("c", "1SEND_B1", 0.8, 0.9, ("c",), ("a", "b"), 8.0),
        ScheduledAction("a", "0B1", 0.9, 1.1),
        ScheduledAction("b", "0B1", 0.9, 1.1),
        ScheduledAction("a", "0REDUCE_GRAD", 1.1, 1.2, ("a", "b"), ("a", "b"), 8.0),
    )),
)  # fmt: skip

Seconds = Callable[[ScheduledAction], float]


def nothing(_: ScheduledAction) -> float:
    return 0.0


def trace_of(plan: PipelinePlan, more: Seconds = nothing, late: Seconds = nothing) -> Trace:
    """The plan as it runs with actions that last ``more`` seconds longer, and begin so ``late``."""
    run = planned_run(plan, plan.microbatches)
    pairs = list(zip(plan.actions, run.seconds, strict=True))
    seconds = [value + more(one) + late(one) for one, value in pairs]
    found = execute(replace(run, seconds=seconds))
    actions = tuple(
        replace(one, start_seconds=start + late(one), finish_seconds=end)
        for one, start, end in zip(plan.actions, found.starts, found.ends, strict=True)
    )
    step = TracedStep(0, max(found.ends), 0.0, actions)
    return Trace(plan.digest, plan.model, "a desk", "gloo", 3, "float32", (step,))


def on(device: str, action: str, seconds: float = 1.0) -> Seconds:
    return lambda one: seconds if (one.device, one.action) == (device, action) else 0.0


def largest(trace: Trace) -> TimeCause:
    """The largest cause; no other one accounts for anything."""
    found = compare(PLAN, trace).explanation
    assert found is not None
    assert found.largest is not None
    others = [one.seconds for one in found.causes if one is not found.largest]
    assert [*others, found.rest_seconds] == [0.0] * (len(others) + 1)
    return found.largest


def shares(cause: TimeCause) -> dict[str, float]:
    """The devices that account for something."""
    every = {one.device: one.seconds for one in cause.devices}
    assert sorted(every) == ["a", "b", "c"]
    return {name: one for name, one in every.items() if abs(one) > 1e-9}


@pytest.mark.parametrize(("device", "action"), [("a", "0F0"), ("b", "0F0"), ("c", "1F0")])
def test_a_rank_that_starts_late_is_named(device: str, action: str) -> None:
    cause = largest(trace_of(PLAN, late=on(device, action)))
    assert (cause.name, cause.seconds) == (BETWEEN, pytest.approx(1.0))
    assert shares(cause) == {device: pytest.approx(1.0)}


@pytest.mark.parametrize("name", ["forwards", WAITING])
def test_the_replica_that_is_slow_is_named(name: str) -> None:
    trace = trace_of(PLAN, more=on("b", "0F0"))
    if name == WAITING:
        (step,) = trace.steps
        waits = tuple(on("b", "0F0")(one) for one in step.actions)
        trace = replace(trace, steps=(replace(step, waited_seconds=waits),))
    cause = largest(trace)
    assert (cause.name, cause.seconds) == (name, pytest.approx(1.0))
    assert shares(cause) == {"b": pytest.approx(1.0)}


def test_transfers_and_all_reduces_are_of_no_single_device() -> None:
    for action in ("0SEND_F0", "0REDUCE_GRAD"):
        assert largest(trace_of(PLAN, more=on("a", action))).devices == ()


def test_a_run_as_planned_has_no_causes_of_rounding() -> None:
    found = compare(PLAN, trace_of(PLAN)).explanation
    assert found is not None
    assert found.largest is None
    assert {one.seconds for one in found.causes} == {found.rest_seconds} == {0.0}


def shown(folder: Path, trace: Trace, plan: PipelinePlan = PLAN) -> str:
    save_plan(plan, folder / "plan.json")
    save_trace(trace, folder / "trace.json")
    arguments = ["compare", str(folder / "plan.json"), str(folder / "trace.json")]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.exception
    return result.stdout


def test_the_command_says_where(tmp_path: Path) -> None:
    for case, told in (
        (trace_of(PLAN, late=on("c", "1F0")), "+1 s of +1 s per iteration; on c alone: +1 s"),
        (trace_of(PLAN, more=on("b", "0F0")), "as predicted: +1 s alone; on b alone: +1 s"),
        (trace_of(PLAN, more=on("c", "1F0")), "1 take 6.0 times as long as predicted: +1 s alone"),
    ):
        assert shown(tmp_path, case).rstrip().endswith(told)


def test_slow_transfers_are_between_two_stages(tmp_path: Path) -> None:
    plan = valid_plan(small_problem(), make_stages((2, 4, 6), (1, 1, 1), ("split",) * 3))
    trace = trace_of(plan, lambda one: 5.0 if one.action.startswith("2SEND_B") else 0.0)
    last = shown(tmp_path, trace, plan).splitlines()[-1]
    assert "; those between stages 1 and 2 take " in last


def test_replicas_that_are_equally_slow_are_not_told_apart(tmp_path: Path) -> None:
    text = shown(tmp_path, trace_of(PLAN, lambda one: 1.0 if one.action == "0F0" else 0.0))
    assert text.rstrip().endswith("+1 s alone")
    assert " on a alone" not in text


def test_tables_fit_80_columns(tmp_path: Path) -> None:
    text = shown(tmp_path, trace_of(PLAN, lambda _: 0.1234))
    assert max(len(line) for line in text.splitlines() if line.startswith(" ")) <= 80


def test_a_trace_of_another_order_is_refused() -> None:
    swapped = {"1F1": "1B0", "1B0": "1F1"}
    found = tuple(
        replace(one, action=swapped.get(one.action, one.action)) if one.device == "c" else one
        for one in PLAN.actions
    )
    other = replace(PLAN, schedule=Schedule(found))
    step = TracedStep(0, 1.2, 0.0, other.actions)
    trace = Trace("0", "test", "a desk", "gloo", 3, "float32", (step,))
    assert compare(other, trace).iteration_seconds.ratio == pytest.approx(1.0)
    with pytest.raises(InputError, match=r"step 0 of the trace has 1B0 before 1F1 on 'c'"):
        compare(PLAN, trace)


def test_an_action_of_another_spelling_is_refused() -> None:
    with pytest.raises(InputError, match="'9Q0' is not an action"):
        TracedStep(0, 1.0, 0.0, (ScheduledAction("a", "9Q0", 0.0, 1.0),))


def test_the_time_of_an_iteration_is_shown_without_a_certificate() -> None:
    plan = replace(PLAN, predicted=Predicted(1.2, 0.0, {}, {}))
    assert "1.2 s per iteration" in headline(plan)
    assert "per iteration" not in headline(PLAN)
