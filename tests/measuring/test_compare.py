"""Traces keep what ranks recorded, and a comparison is exact arithmetic on them."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from random import Random

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import make_stages, scheduled, small_problem, valid_plan
from profiles import examples
from typer.testing import CliRunner, Result

from stagewright.cli import app
from stagewright.executor.drawing.charts.chart import png, stacked_png
from stagewright.executor.drawing.colours import KIND_COLOURS
from stagewright.executor.drawing.periods import finish_seconds
from stagewright.executor.measuring.compare import Comparison, compare, correct, measured_plan
from stagewright.executor.measuring.pairs import Pair
from stagewright.executor.programs.trace import (
    RankAction,
    Trace,
    TracedStep,
    load_trace,
    merge,
    save_trace,
    traced_step,
)
from stagewright.formulations.checking.check import predict
from stagewright.formulations.plans.actions import COMPUTE, ActionKind, parse_action
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import (
    PipelinePlan,
    Schedule,
    ScheduledAction,
    Stage,
    load_plan,
    save_plan,
)
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.chain import Chain, Layer, LayerCost, load_model, save_model

PROBLEM = small_problem()
PLAN = valid_plan(PROBLEM, make_stages((2, 4, 6), (2, 1, 3), ("split", "split", "round-robin")))

# Two stages, one microbatch, the backward of stage 1 in two parts.
SPLIT_BACKWARD = PipelinePlan(
    "0", "test", "two", "c", 1, (Stage((0, 1), ("a",)), Stage((1, 3), ("b",))),
    Schedule((
        ScheduledAction("a", "0F0", 0.0, 1.0),
        ScheduledAction("a", "0SEND_F0", 1.0, 2.0, ("a",), ("b",), 8.0),
        ScheduledAction("b", "1F0", 2.0, 4.0),
        ScheduledAction("b", "1I0", 4.0, 6.0),
        ScheduledAction("b", "1SEND_B0", 6.0, 6.0, ("b",), ("a",), 8.0),
        ScheduledAction("b", "1W0", 6.0, 9.0),
        ScheduledAction("a", "0B0", 6.0, 8.0),
    )),
)  # fmt: skip


def made_step(plan: PipelinePlan, number: int, factor: float) -> TracedStep:
    """A step in which everything takes ``factor`` times as long as planned."""
    actions = tuple(
        replace(
            timed,
            start_seconds=timed.start_seconds * factor,
            finish_seconds=timed.finish_seconds * factor,
        )
        for timed in plan.actions
    )
    return TracedStep(number, finish_seconds(plan) * factor, 0.25 * factor, actions, 1 / factor)


def made_trace(plan: PipelinePlan, factors: Sequence[float]) -> Trace:
    steps = tuple(made_step(plan, i, factor) for i, factor in enumerate(factors))
    devices = {device for stage in plan.stages for device in stage.devices}
    return Trace(plan.digest, plan.model, "a desk", "gloo", len(devices), "float32", steps)


def changed(trace: Trace, durations: dict[str, float]) -> Trace:
    """``trace`` with other durations of some actions, wherever they run."""
    steps = [
        replace(
            step,
            actions=tuple(
                replace(
                    timed,
                    finish_seconds=timed.start_seconds
                    + durations.get(timed.action, timed.finish_seconds - timed.start_seconds),
                )
                for timed in step.actions
            ),
        )
        for step in trace.steps
    ]
    return replace(trace, steps=tuple(steps))


def ranks_of(plan: PipelinePlan) -> dict[str, int]:
    devices = dict.fromkeys(device for stage in plan.stages for device in stage.devices)
    return {device: rank for rank, device in enumerate(devices)}


def taken_apart(plan: PipelinePlan) -> Iterator[RankAction]:
    """The records with which the ranks would report that all went as planned."""
    ranks = ranks_of(plan)
    for timed in plan.actions:
        action, start, finish = (
            parse_action(timed.action),
            timed.start_seconds,
            timed.finish_seconds,
        )
        if action.kind in COMPUTE:
            yield RankAction(ranks[timed.device], timed.action, start, finish)
            continue
        assert timed.sources is not None
        assert timed.targets is not None
        assert timed.bytes is not None
        if action.kind is ActionKind.REDUCE:
            for device in timed.sources:
                yield RankAction(ranks[device], timed.action, start, finish, None, timed.bytes)
            continue
        forth = action.kind is ActionKind.SEND_FORWARD
        stage = action.stage + (1 if forth else -1)
        receipt = f"{stage}RECV_{'F' if forth else 'B'}{action.microbatch}"
        share = timed.bytes / len(timed.sources) / len(timed.targets)
        for source in timed.sources:
            for target in timed.targets:
                one, other = ranks[source], ranks[target]
                yield RankAction(one, timed.action, start, start, other, share)
                yield RankAction(other, receipt, finish, finish, one, share)


# The ranks' records


@examples(25)
@given(scheduled(waits=True), st.randoms(use_true_random=False))
def test_merging_what_ranks_report_gives_the_plans_actions(
    case: tuple[PipelineProblem, PipelinePlan], random: Random
) -> None:
    _, plan = case
    records = list(taken_apart(plan))
    random.shuffle(records)
    merged = {(timed.device, timed.action): timed for timed in merge(plan, records)}
    assert len(merged) == len(plan.actions)
    for timed in plan.actions:
        found = merged[timed.device, timed.action]
        assert found.bytes == pytest.approx(timed.bytes)
        assert replace(found, bytes=timed.bytes) == timed


def test_messages_of_two_replicas_to_three_are_one_transfer() -> None:
    stages = make_stages((3, 6), (2, 3), ("split", "split"))
    plan = replace(PLAN, microbatches=1, stages=tuple(stages))
    records = [
        RankAction(0, "0F0", 0.0, 1.0),
        RankAction(1, "0F0", 0.0, 1.5),
        *(RankAction(0, "0SEND_F0", 1.0 + i, 4.0, 2 + i, 10.0) for i in range(3)),
        *(RankAction(1, "0SEND_F0", 1.5 + i, 9.0, 2 + i, 10.0) for i in range(3)),
        *(RankAction(2 + i, "1RECV_F0", 0.1, 5.0 + i, 0, 10.0) for i in range(3)),
        *(RankAction(2 + i, "1RECV_F0", 0.1, 4.0 + i, 1, 10.0) for i in range(3)),
        RankAction(2, "1SEND_B0", 8.0, 8.5, 0, 30.0),
        RankAction(4, "1SEND_B0", 8.2, 8.5, 1, 30.0),
        RankAction(0, "0RECV_B0", 7.0, 9.0, 2, 30.0),
        RankAction(1, "0RECV_B0", 7.0, 9.5, 4, 30.0),
        RankAction(3, "1REDUCE_GRAD", 10.0, 12.0, None, 64.0),
        RankAction(2, "1REDUCE_GRAD", 10.5, 12.5, None, 64.0),
        RankAction(4, "1REDUCE_GRAD", 11.0, 12.0, None, 64.0),
        RankAction(0, "0UPDATE", 13.0, 13.5),
        RankAction(1, "0UPDATE", 13.0, 13.25),
        RankAction(1, "0UPDATE", 14.0, 14.5),
    ]
    two, three = ("g0", "g1"), ("g2", "g3", "g4")
    assert traced_step(plan, 7, records, loss=0.5) == TracedStep(
        7,
        12.5,
        0.75,
        (
            ScheduledAction("g0", "0F0", 0.0, 1.0),
            ScheduledAction("g1", "0F0", 0.0, 1.5),
            ScheduledAction("g0", "0SEND_F0", 1.0, 7.0, two, three, 60.0),
            ScheduledAction("g2", "1SEND_B0", 8.0, 9.5, three, two, 60.0),
            ScheduledAction("g2", "1REDUCE_GRAD", 10.0, 12.5, three, three, 64.0),
            ScheduledAction("g1", "0UPDATE", 13.0, 13.25),
            ScheduledAction("g0", "0UPDATE", 13.0, 13.5),
            ScheduledAction("g1", "0UPDATE", 14.0, 14.5),
        ),
        0.5,
    )


def test_an_update_after_every_backward_is_a_part_of_it() -> None:
    plan = replace(SPLIT_BACKWARD, weights="stash")
    records = [
        RankAction(1, "1I0", 1.0, 2.0),
        RankAction(1, "1W0", 2.0, 3.0),
        RankAction(1, "1UPDATE", 3.5, 4.0),
        RankAction(1, "1W1", 5.0, 6.0),
        RankAction(1, "1UPDATE", 6.0, 6.25),
    ]
    step = traced_step(plan, 0, records)
    found = [(one.action, one.start_seconds, one.finish_seconds) for one in step.actions]
    assert found == [("1I0", 1.0, 2.0), ("1W0", 2.0, 3.5), ("1W1", 5.0, 6.25)]
    assert (step.iteration_seconds, step.update_seconds) == (6.25, 0.75)


def test_nothing_is_received_before_it_is_sent() -> None:
    records = [RankAction(0, "0SEND_F0", 2.0, 2.1, 1), RankAction(1, "1RECV_F0", 0.0, 1.999, 0)]
    (transfer,) = merge(SPLIT_BACKWARD, records)
    assert (transfer.start_seconds, transfer.finish_seconds, transfer.bytes) == (2.0, 2.0, None)


@pytest.mark.parametrize(
    ("record", "missing"),
    [
        (RankAction(0, "0SEND_F0", 0.0, 1.0, 1), "transfer 0SEND_F0 has no record of its receipt"),
        (RankAction(0, "0RECV_B0", 0.0, 1.0, 1), "transfer 1SEND_B0 has no record of its sending"),
    ],
)
def test_half_a_transfer_is_refused(record: RankAction, missing: str) -> None:
    with pytest.raises(InputError, match=missing):
        merge(SPLIT_BACKWARD, [record])


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), None])
def test_a_loss_that_is_no_number_is_left_out(loss: float | None, tmp_path: Path) -> None:
    step = traced_step(SPLIT_BACKWARD, 0, [RankAction(0, "0F0", 0.0, 1.0)], loss)
    trace = replace(made_trace(SPLIT_BACKWARD, [1.0]), steps=(step,))
    save_trace(trace, tmp_path / "trace.json")
    assert load_trace(tmp_path / "trace.json").steps[0].loss is None


# The document


def test_the_same_trace_comes_back(tmp_path: Path) -> None:
    trace = made_trace(PLAN, [3.0, 1.0, 1 / 3])
    save_trace(trace, tmp_path / "trace.json")
    assert load_trace(tmp_path / "trace.json") == trace
    data = json.loads((tmp_path / "trace.json").read_text())
    assert (data["format"], data["version"]) == ("stagewright-trace", 1)
    for step in data["steps"]:  # as before there were traces of periodic plans
        step.pop("iterations", None)
    (tmp_path / "older.json").write_text(json.dumps(data))
    assert load_trace(tmp_path / "older.json") == trace


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (["version"], 2, "version 2 is not known"),
        (["format"], "stagewright-plan", "expected a 'stagewright-trace' document"),
        (["world_size"], 0, "world_size must be at least 1, got 0"),
        (["steps"], [], "a trace needs at least one step"),
        (["steps", 1, "step"], 0, "step 0 comes after step 0"),
        (["steps", 0, "step"], -1, "step must be at least 0, got -1"),
        (["steps", 0, "iteration_seconds"], -1.0, "step 0: iteration_seconds must be finite"),
        (["steps", 0, "update_seconds"], "1 s", "steps[0].update_seconds"),
        (["steps", 0, "iterations"], 0, "step 0: iterations must be from 1 to the number of"),
        (["steps", 0, "iterations"], 8, "the number of actions, 7, got 8"),
        (["steps", 0, "actions", 0, "finish_seconds"], -1.0, "step 0: 0F0 on 'a' lasts from 0 to"),
        (["steps", 0, "seconds"], 1.0, "steps[0].seconds: unknown field"),
    ],
)
def test_faults_are_one_line(
    place: list[str | int], value: object, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    save_trace(made_trace(SPLIT_BACKWARD, [1.0, 1.0]), path)
    data = json.loads(path.read_text())
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=re.escape(message)) as refusal:
        load_trace(path)
    assert "\n" not in str(refusal.value)


# Comparison


def ratios(comparison: Comparison) -> list[float | None]:
    pairs = [one.seconds for one in comparison.kinds]
    for stage in comparison.stages:
        pairs += [stage.forward_seconds, stage.backward_seconds]
    return [pair.ratio for pair in (*pairs, comparison.iteration_seconds)]


@examples(25)
@given(scheduled(waits=True), st.sampled_from([1.0, 2.0, 0.5]))
def test_times_in_proportion_give_that_ratio_everywhere(
    case: tuple[PipelineProblem, PipelinePlan], factor: float
) -> None:
    _, plan = case
    comparison = compare(plan, made_trace(plan, [9.0, factor, factor]))
    assert set(ratios(comparison)) == {factor}
    assert all(stage.busy.ratio == pytest.approx(1.0) for stage in comparison.stages)
    planned = comparison.update_seconds.predicted
    assert comparison.update_seconds == Pair(planned, 0.25 * factor)


def test_a_plan_without_jitter_is_compared_with_its_own_figures() -> None:
    comparison = compare(PLAN, made_trace(PLAN, [1.0]))
    stage = PLAN.stages[0]
    seconds = PROBLEM.compute_seconds(*stage.layers, (0, 1))
    first = comparison.stages[0]
    assert (first.forward_seconds.predicted, first.backward_seconds.predicted) == pytest.approx(
        seconds
    )
    bubble = predict(PROBLEM, PLAN).bubble
    devices = np.array([len(one.devices) for one in comparison.stages])
    busy = np.array([one.busy.predicted for one in comparison.stages])
    assert (busy * devices).sum() / devices.sum() == pytest.approx(1 - bubble)


def test_the_first_of_three_steps_is_warm_up_and_medians_count() -> None:
    comparison = compare(SPLIT_BACKWARD, made_trace(SPLIT_BACKWARD, [50.0, 2.0, 1.0, 4.0]))
    assert comparison.iteration_seconds == Pair(9.0, 18.0)
    assert (comparison.least_seconds, comparison.most_seconds) == (9.0, 36.0)
    assert (comparison.steps, comparison.update_seconds) == (3, Pair(0.0, 0.5))
    assert set(ratios(comparison)) == {2.0, None}  # None: a transfer that was to take no time
    both = compare(SPLIT_BACKWARD, made_trace(SPLIT_BACKWARD, [3.0, 1.0]))
    assert (both.iteration_seconds, both.steps) == (Pair(9.0, 18.0), 2)


def test_every_figure_of_a_small_plan() -> None:
    durations = {"0F0": 3.0, "1I0": 1.0, "1W0": 6.0, "1SEND_B0": 0.5}
    comparison = compare(SPLIT_BACKWARD, changed(made_trace(SPLIT_BACKWARD, [1.0]), durations))
    kinds = {one.kind.value: (one.count, one.seconds) for one in comparison.kinds}
    assert kinds == {
        "F": (2, Pair(1.5, 2.5)),
        "B": (1, Pair(2.0, 2.0)),
        "I": (1, Pair(2.0, 1.0)),
        "W": (1, Pair(3.0, 6.0)),
        "SEND_F": (1, Pair(1.0, 1.0)),
        "SEND_B": (1, Pair(0.0, 0.5)),
    }
    one, two = comparison.stages
    assert (one.forward_seconds, one.backward_seconds) == (Pair(1.0, 3.0), Pair(2.0, 2.0))
    assert (two.forward_seconds, two.backward_seconds) == (Pair(2.0, 2.0), Pair(5.0, 7.0))
    assert (one.busy, two.busy) == (Pair(3 / 9, 5 / 9), Pair(7 / 9, 1.0))


def test_a_split_microbatch_takes_as_long_as_on_its_slowest_device() -> None:
    trace = made_trace(PLAN, [1.0])
    slow = tuple(
        replace(timed, finish_seconds=timed.start_seconds + 7.0)
        if (timed.device, parse_action(timed.action).kind) == ("g1", ActionKind.FORWARD)
        else timed
        for timed in trace.steps[0].actions
    )
    comparison = compare(PLAN, replace(trace, steps=(replace(trace.steps[0], actions=slow),)))
    assert comparison.stages[0].forward_seconds.measured == pytest.approx(7.0)
    assert comparison.stages[2].forward_seconds.ratio == 1.0


def test_the_measured_plan_is_the_step_of_median_time() -> None:
    trace = made_trace(PLAN, [9.0, 3.0, 1.0, 2.0])
    measured = measured_plan(PLAN, trace)
    assert measured.actions == trace.steps[3].actions
    assert measured.stages == PLAN.stages
    even = made_trace(PLAN, [9.0, 3.0, 1.0, 2.0, 4.0])
    assert measured_plan(PLAN, even).actions == even.steps[3].actions


def test_a_trace_of_another_plan_is_refused() -> None:
    trace = made_trace(PLAN, [1.0, 1.0])
    with pytest.raises(InputError, match="digest 'ffff', the plan is for 'small' with digest"):
        compare(PLAN, replace(trace, digest="ffff"))
    short = replace(trace.steps[1], actions=trace.steps[1].actions[1:])
    first = trace.steps[1].actions[0]
    lacking = replace(trace, steps=(trace.steps[0], short))
    message = f"step 1 of the trace lacks {first.action} on '{first.device}', which the plan has"
    for refusing in (compare, measured_plan):
        with pytest.raises(InputError, match=message):
            refusing(PLAN, lacking)
    shorter = replace(PLAN, schedule=Schedule(PLAN.schedule.actions[1:]))
    message = f"step 0 of the trace has {first.action} on '{first.device}', unlike the plan"
    with pytest.raises(InputError, match=message):
        compare(shorter, trace)


# Correction


def test_a_corrected_model_predicts_what_was_measured() -> None:
    trace = made_trace(PLAN, [5.0, 2.0, 2.0])
    chain = correct(PROBLEM.chain, PLAN, trace)
    assert chain.source == "test, corrected by a measured run on a desk"
    again = PipelineProblem(chain, PROBLEM.cluster, PROBLEM.microbatches)
    for start, stop in ((0, 2), (1, 5), (0, 6)):
        twice = np.array(PROBLEM.compute_seconds(start, stop, (0, 2))) * 2
        assert again.compute_seconds(start, stop, (0, 2)) == pytest.approx(twice.tolist())
    trace = replace(made_trace(PLAN, [1.0]), reference_seconds=2e-3)
    chain = correct(PROBLEM.chain, PLAN, trace)
    assert chain == replace(PROBLEM.chain, source=chain.source, reference_seconds=2e-3)


def test_a_correction_leaves_out_what_messages_add() -> None:
    """Computations measured without the plan's time for messages: the layers are as they were."""
    own = replace(PROBLEM.cluster, message_seconds=1e-3, message_bytes_per_second=1e9)
    problem = replace(PROBLEM, cluster=own)
    plan = valid_plan(problem, PLAN.stages)
    alone = replace(PLAN, digest=plan.digest)
    trace = replace(made_trace(alone, [1.0]), digest=plan.digest)
    assert finish_seconds(plan) > finish_seconds(PLAN)
    layers = correct(problem.chain, plan, trace).layers
    for layer, known in zip(layers, problem.chain.layers, strict=True):
        for one, other in zip(layer.costs, known.costs, strict=True):
            assert one.forward_seconds == pytest.approx(other.forward_seconds)
            assert one.total_backward_seconds == pytest.approx(other.total_backward_seconds)


def test_each_stage_and_direction_is_corrected_by_its_own_ratio() -> None:
    whole = LayerCost(840, 1.0, 0.0, 0.0, backward_seconds=2.0)
    parts = LayerCost(
        1, 1.0, 0.0, 0.0, input_gradient_seconds=2.0, weight_gradient_seconds=3.0
    )  # fmt: skip
    layers = (Layer("a", 0.0, (parts,)), Layer("b", 0.0, (whole,)), Layer("c", 0.0, (parts,)))
    chain = Chain("two", "test", 840, layers)
    durations = {"0F0": 3.0, "0B0": 1.0, "1F0": 1.0, "1I0": 1.0, "1W0": 9.0}
    trace = changed(made_trace(SPLIT_BACKWARD, [1.0]), durations)
    first, second, third = (
        layer.costs[0] for layer in correct(chain, SPLIT_BACKWARD, trace).layers
    )
    assert first == replace(
        parts, forward_seconds=3.0, input_gradient_seconds=1.0, weight_gradient_seconds=1.5
    )
    assert second == replace(whole, forward_seconds=0.5, backward_seconds=4.0)
    assert third == replace(
        parts, forward_seconds=0.5, input_gradient_seconds=1.0, weight_gradient_seconds=9.0
    )


def test_another_model_is_not_corrected() -> None:
    trace = made_trace(PLAN, [1.0])
    for chain in (small_problem(layers=5).chain, replace(PROBLEM.chain, name="other")):
        with pytest.raises(InputError, match="give the model that was planned"):
            correct(chain, PLAN, trace)


# Drawing


def test_both_timelines_are_drawn_above_each_other() -> None:
    measured = measured_plan(PLAN, made_trace(PLAN, [1.5]))
    data = stacked_png((PLAN, measured), ("predicted", "measured"))
    pixels = matplotlib.image.imread(BytesIO(data))[:, :, :3]
    single = matplotlib.image.imread(BytesIO(png(PLAN)))
    assert pixels.shape[0] > 1.5 * single.shape[0]
    assert pixels.shape[1] == single.shape[1]
    halves = np.array_split((pixels * 255).round().astype(int), 2)
    colour = list(bytes.fromhex(KIND_COLOURS[ActionKind.FORWARD][1:]))
    ends = [np.flatnonzero((half == colour).all(axis=2).any(axis=0)) for half in halves]
    left, right = ends[0].min(), ends[0].max()
    # On one time axis, the measured forwards end 1.5 times as far to the right.
    assert ends[1].min() == pytest.approx(left, abs=3)
    assert ends[1].max() - left == pytest.approx(1.5 * (right - left), rel=0.03)


# The command


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with model.json, plan.json, and trace.json with twice the planned times."""
    save_model(PROBLEM.chain, tmp_path / "model.json")
    save_plan(PLAN, tmp_path / "plan.json")
    save_trace(made_trace(PLAN, [9.0, 2.0, 2.0]), tmp_path / "trace.json")
    return tmp_path


def test_the_command_prints_tables_and_the_ratio(files: Path) -> None:
    result = run(files / "plan.json", files / "trace.json")
    assert (result.exit_code, result.stderr) == (0, ""), result.exception
    assert "6 ranks on a desk, gloo, float32" in result.stdout
    assert re.search(
        r"^predicted \S+ m?s, measured \S+ m?s \(median of 2 steps, \S+ m?s to \S+ m?s\): "
        r"measured / predicted = 2\.000$",
        result.stdout,
        re.MULTILINE,
    )
    for kind in ("F", "B", "SEND_F", "SEND_B", "REDUCE_GRAD"):
        assert re.search(rf"^ ?{kind} .* 2\.000", result.stdout, re.MULTILINE)
    assert "the machine was" not in result.stdout


def test_drift_of_the_machine_is_told_apart(files: Path) -> None:
    """A small computation took 1.25 ms beside the profile; everything twice as long as planned."""
    plan, trace = files / "plan.json", files / "trace.json"
    save_plan(replace(load_plan(plan), reference_seconds=1.25e-3), plan)
    for seconds, words, ratio in (
        (2e-3, "60.00% slower than when it was profiled (the same small computation", "1.250"),
        (1e-3, "20.00% faster than", "2.500"),
        (1.251e-3, "as fast as when it was profiled", "1.998"),
    ):
        save_trace(replace(load_trace(trace), reference_seconds=seconds), trace)
        (line,) = [one for one in run(plan, trace).stdout.splitlines() if "the machine was" in one]
        assert f"the machine was {words}" in line
        assert line.endswith(f"at equal speed measured / predicted = {ratio}")


def test_the_command_writes_a_picture_and_a_model(files: Path) -> None:
    result = run(
        files / "plan.json", files / "trace.json", "--png", files / "both.png",
        "--model", files / "model.json", "--corrected", files / "corrected.json", "--json",
    )  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, ""), result.exception
    document = json.loads(result.stdout)
    assert document["files"] == [str(files / "both.png"), str(files / "corrected.json")]
    assert document["iteration_seconds"]["ratio"] == 2.0
    assert (document["reference_seconds"], document["equal_speed_ratio"]) == (None, None)
    assert document["kinds"]["F"]["count"] == 3 * PROBLEM.microbatches
    assert [stage["backward_seconds"]["ratio"] for stage in document["stages"]] == [2.0] * 3
    assert (files / "both.png").read_bytes().startswith(b"\x89PNG")
    corrected = load_model(files / "corrected.json")
    assert corrected == correct(PROBLEM.chain, PLAN, load_trace(files / "trace.json"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan.json", "plan.json"], "expected a 'stagewright-trace' document"),
        (["plan.json", "trace.json", "--model", "model.json"], "--model and --corrected together"),
        (["plan.json", "trace.json", "--png", "none/both.png"], "does not exist"),
        (["plan.json", "none.json"], "No such file or directory"),
    ],
)
def test_the_command_refuses_in_one_line(
    arguments: list[str], message: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
