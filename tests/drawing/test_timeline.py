"""Drawings and traces show every action of a plan, at its time, and nothing else."""

import json
import re
import struct
from collections import Counter
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import colours, drawings
from plans import elaborate, made_up_certificate, make_stages, scheduled, small_problem, valid_plan
from profiles import examples

import stagewright
from stagewright.executor.drawing.charts.chart import png
from stagewright.executor.drawing.chrome import chrome_trace
from stagewright.executor.drawing.colours import CRITICAL_COLOUR, IDLE_COLOUR, KIND_COLOURS
from stagewright.executor.drawing.page import in_flight, page, summarise
from stagewright.executor.drawing.timeline import (
    merges_stages,
    numbering,
    row_note,
    shorten_devices,
    stages_name,
    timeline,
)
from stagewright.formulations.checking.check import predict
from stagewright.formulations.plans.actions import ON_DEVICE, ActionKind, parse_action
from stagewright.formulations.plans.memory import static_bytes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import (
    Guarantee,
    PipelinePlan,
    Schedule,
    ScheduledAction,
    Stage,
)
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost


def certified(problem: PipelineProblem, plan: PipelinePlan) -> PipelinePlan:
    predicted = predict(problem, plan)
    cost = predicted.iteration_seconds
    promise = Guarantee("Lemma 1", 2 * cost, cost, True, "always", plan.stages)
    certificate = replace(made_up_certificate(problem, plan, cost), guarantees=(promise,))
    return replace(plan, predicted=predicted, certificate=certificate)


@pytest.fixture(scope="module")
def plan() -> PipelinePlan:
    """Stages 0 and 2 are replicated; there are all kinds of actions."""
    problem = small_problem(microbatches=5, parts=True)
    stages = make_stages((2, 4, 6), (2, 1, 3), ("split", "split", "round-robin"))
    return certified(problem, valid_plan(problem, stages, split=[(0, 1), (2, 3)]))


@pytest.fixture(scope="module")
def wide_plan() -> PipelinePlan:
    problem = small_problem(devices=72)
    stages = make_stages((3, 6), (66, 6), ("round-robin", "split"))
    return certified(problem, valid_plan(problem, stages))


@examples(30)
@given(st.one_of(scheduled(waits=True), elaborate(waits=True)))
def test_every_action_is_drawn_once_on_its_row(case: tuple[PipelineProblem, PipelinePlan]) -> None:
    _, plan = case
    rows = timeline(plan)
    drawn = Counter(
        (row.name.split(" ·")[0], str(block.action), block.start_seconds, block.finish_seconds)
        for row in rows
        for block in row.blocks
        if row.group == "device"
    )
    computed = Counter(
        (timed.device, timed.action, timed.start_seconds, timed.finish_seconds)
        for timed in plan.actions
        if parse_action(timed.action).kind in ON_DEVICE
    )
    assert drawn == computed
    assert sum(len(row.blocks) for row in rows) == len(plan.actions)
    groups = [row.group for row in rows]
    assert groups == sorted(groups, key=("device", "channel", "reduce").index)


def test_a_channel_carries_both_directions(plan: PipelinePlan) -> None:
    channels = {row.name: row.blocks for row in timeline(plan) if row.group == "channel"}
    assert list(channels) == ["channel 0-1", "channel 1-2"]
    carried = {str(block.action) for block in channels["channel 1-2"]}
    assert carried == {f"{end}{m}" for end in ("1SEND_F", "2SEND_B") for m in range(5)}
    assert channels["channel 0-1"][0].detail == "40 MB, g0-1 to g2"


def test_many_devices_are_drawn_as_one_row_per_stage(wide_plan: PipelinePlan) -> None:
    assert merges_stages(wide_plan)
    names = [row.name for row in timeline(wide_plan) if row.group == "device"]
    assert names == ["stage 0 (round-robin) · 66 devices", "stage 1 · 6 devices"]
    assert len(timeline(wide_plan, max_device_rows=None)) > 72
    assert row_note(wide_plan) == "one row per stage (72 devices)"
    # A page has a row for each, and folds those that are the same.
    lanes = [lane for lane in drawings(page(wide_plan))[0]["lanes"] if lane["group"] == "device"]
    assert sorted(len(lane["members"]) for lane in lanes) == [1] * 4 + [6, 62]


def test_a_device_names_all_its_stages() -> None:
    problem = small_problem()
    stages = [Stage((0, 2), ("g0", "g1")), Stage((2, 4), ("g1",)), Stage((4, 6), ("g0", "g2"))]
    plan = valid_plan(problem, stages)
    assert [row.name for row in timeline(plan) if row.group == "device"] == [
        "g0 · stages 0, 2", "g1 · stages 0, 1", "g2 · stage 2",
    ]  # fmt: skip
    merged = [row for row in timeline(plan, max_device_rows=1) if row.group == "device"]
    assert [row.name for row in merged] == ["stages 0, 2 · 3 devices", "stage 1 · 1 device"]
    assert {str(block.action) for block in merged[0].blocks} >= {"0F0", "2F0"}
    assert "stages 0, 2" in page(certified(problem, plan))


def test_rows_name_the_features_of_their_stages() -> None:
    stages = [
        Stage((0, 2), ("g0", "g1"), "round-robin", recompute="layer"),
        Stage((2, 4), ("g2",), offload=True),
        Stage((4, 6), ("g1",)),
    ]
    plan = replace(valid_plan(small_problem(), [Stage(s.layers, s.devices) for s in stages]),
                   stages=tuple(stages))  # fmt: skip
    assert [row.name for row in timeline(plan) if row.group == "device"] == [
        "g0 · stage 0 (round-robin, recompute layer)",
        "g1 · stages 0 (round-robin, recompute layer), 2",
        "g2 · stage 1 (offload)",
    ]


@pytest.mark.parametrize(
    ("stages", "name"),
    [
        ([3], "stage 3"),
        ([0, 1], "stages 0, 1"),
        ([0, 1, 2, 4, 6, 7, 8], "stages 0-2, 4, 6-8"),
        ([0, 1, "2 (offload)", 3, 4, 5], "stages 0, 1, 2 (offload), 3-5"),
    ],
)
def test_stages_in_a_row_are_named_by_the_ends(stages: list[int | str], name: str) -> None:
    assert stages_name(stages) == name


@pytest.mark.parametrize(
    ("microbatches", "shared", "meaning", "labels"),
    [
        (2, False, "stage.microbatch", {"0.0", "0.1", "1.0", "1.1"}),
        (2, True, "stage.microbatch", {"0.0", "0.1", "1.0", "1.1"}),
        (1, True, "stages", {"0", "1"}),
    ],
)
def test_numbers_in_blocks_tell_actions_apart(
    microbatches: int, shared: bool, meaning: str, labels: set[str]
) -> None:
    problem = replace(small_problem(updates=True), microbatches=microbatches)
    plan = valid_plan(problem, [Stage((0, 3), ("g0",)), Stage((3, 6), ("g0" if shared else "g1",))])
    assert numbering(plan) == meaning
    blocks = [block for row in timeline(plan) if row.group == "device" for block in row.blocks]
    assert {block.label for block in blocks} == {*labels, ""}
    text = page(certified(problem, plan))
    assert f"numbers: {meaning}" in text


@examples(30)
@given(st.one_of(scheduled(waits=True), elaborate(waits=True)))
def test_in_flight_counts_what_has_started_and_not_ended(
    case: tuple[PipelineProblem, PipelinePlan],
) -> None:
    _, plan = case
    # Between two losses a microbatch is in flight before its backward ends and after its forward.
    between = any if plan.is_backward_first else all
    for s, (times, counts) in enumerate(in_flight(plan)):
        assert (np.diff(times) > 0).all()
        spans = [
            {
                parse_action(timed.action).kind: timed
                for timed in plan.actions
                if timed.device == plan.stages[s].devices[0]
                and parse_action(timed.action).stage == s
                and parse_action(timed.action).microbatch == m
            }
            for m in range(plan.microbatches)
        ]
        for instant in np.unique(times):
            alive = sum(
                between(
                    (
                        span[ActionKind.FORWARD].start_seconds <= instant,
                        instant < _backward_end(span),
                    )
                )
                for span in spans
                if ActionKind.FORWARD in span
            )
            assert counts[times <= instant][-1] == alive
        assert counts[-1] == (sum(map(bool, spans)) if plan.is_backward_first else 0)


def _backward_end(span: dict[ActionKind, ScheduledAction]) -> float:
    last = span.get(ActionKind.BACKWARD) or span[ActionKind.WEIGHT_GRADIENT]
    return last.finish_seconds


def test_the_summary_gives_the_cost_models_figures() -> None:
    problem = small_problem()
    stages = make_stages((2, 6), (2, 1), ("split", "split"))
    plan = valid_plan(problem, stages)
    first = summarise(replace(plan, predicted=predict(problem, plan)))[0]
    assert first.layers == (0, 2)
    seconds = problem.compute_seconds(0, 2, (0, 1))
    assert (first.forward_seconds, first.backward_seconds) == pytest.approx(seconds)
    memory = static_bytes(problem, 0, 2, 2) + first.in_flight * problem.saved_bytes(0, 2, 2)
    assert first.peak_memory_bytes == pytest.approx(memory)
    assert summarise(plan)[0].peak_memory_bytes is None


def test_the_summary_adds_up_the_parts_of_a_backward() -> None:
    problem = small_problem(parts=True)
    stages = make_stages((2, 6), (1, 1), ("split", "split"))
    plan = valid_plan(problem, stages, split=[(0, m) for m in range(4)])
    backward = summarise(plan)[0].backward_seconds
    assert backward == pytest.approx(sum(problem.gradient_seconds(0, 2, [0])))


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["s0g0"], "s0g0"),
        (["s0g0", "s0g1", "s0g2", "s1g0"], "s0g0-2, s1g0"),
        (["a", "b", "a7", "a9"], "a, b, ... a9 (4 devices)"),
        (["g2", "g1"], "g2, g1"),
        (["gpu-09", "gpu-10"], "gpu-09-10"),
        ([f"s{s}g{g}" for s in range(9) for g in range(4)], "s0g0-3, s1g0-3, ... s8g0-3 (36 dev"),
    ],
)
def test_devices_are_shortened_to_ranges(names: list[str], short: str) -> None:
    assert shorten_devices(names).startswith(short)


def test_the_trace_holds_every_action_in_microseconds(plan: PipelinePlan, tmp_path: Path) -> None:
    document = json.loads(chrome_trace(plan))
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert all(isinstance(event[key], int) for event in events for key in ("pid", "tid"))
    drawn = Counter((event["name"], round(event["ts"], 6)) for event in events)
    assert drawn == Counter(
        (timed.action, round(timed.start_seconds * 1e6, 6)) for timed in plan.actions
    )
    last = max(event["ts"] + event["dur"] for event in events)
    assert last == pytest.approx(max(t.finish_seconds for t in plan.actions) * 1e6)
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in document["traceEvents"]
        if event["name"] == "thread_name"
    }
    reduce = next(event for event in events if event["name"] == "0REDUCE_GRAD")
    assert threads[reduce["pid"], reduce["tid"]] == "all-reduce 0"
    assert reduce["args"]["endpoints"] == "among g0-1"


def test_the_picture_shows_every_kind_in_its_colour(plan: PipelinePlan) -> None:
    data = png(plan)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width >= 2000
    assert height >= 400
    shown = colours(matplotlib.image.imread(BytesIO(data)))
    kinds = {parse_action(timed.action).kind for timed in plan.actions}
    assert len(kinds) == 7
    for colour in (*(KIND_COLOURS[kind] for kind in kinds), CRITICAL_COLOUR, IDLE_COLOUR):
        assert tuple(bytes.fromhex(colour[1:])) in shown, colour
    assert png(plan) == data


def test_a_plan_without_figures_is_drawn_too(plan: PipelinePlan) -> None:
    bare = replace(plan, predicted=None, certificate=None)
    assert png(bare)[1:4] == b"PNG"
    text = page(bare)
    assert "No lower bound is known" in text
    assert drawings(text)[0]["marks"] == []


def test_the_page_loads_nothing_and_is_reproducible(plan: PipelinePlan) -> None:
    text = page(plan)
    assert not re.search(r"<(script|img|iframe)[^>]*\bsrc=|<link\b", text)
    assert page(plan) == text


def test_names_cannot_break_out_of_the_page(plan: PipelinePlan) -> None:
    evil = "</script><script>alert(1)</script>"
    stages = tuple(replace(stage, devices=(evil + str(s),)) for s, stage in enumerate(plan.stages))
    actions = (ScheduledAction(evil + "0", "0F0", 0.0, 1.0),)
    hostile = replace(plan, model=evil, stages=stages, schedule=Schedule(actions))
    assert evil not in page(hostile)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (ScheduledAction("g0", "7F0", 0.0, 1.0), "7F0 has stage 7, the plan has 1 stages"),
        (ScheduledAction("g9", "0F0", 0.0, 1.0), "'g9', which is not a device of stage 0"),
        (ScheduledAction("g0", "forward", 0.0, 1.0), "'forward' is not an action"),
        (ScheduledAction("g0", "0USE0", 0.0, 1.0), "0USE0 belongs to programs, not to plans"),
    ],
)
def test_actions_that_fit_no_stage_are_refused(action: ScheduledAction, message: str) -> None:
    schedule = Schedule((action,))
    plan = PipelinePlan("0", "test", "m", "c", 1, (Stage((0, 1), ("g0",)),), schedule)
    for draw in (timeline, chrome_trace, page, png):
        with pytest.raises(InputError, match=re.escape(message)):
            draw(plan)


def test_nothing_is_written_where_the_folder_is_missing(plan: PipelinePlan, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        stagewright.show(plan, tmp_path / "none" / "plan.png")
    assert list(tmp_path.iterdir()) == []


def test_a_plan_that_takes_no_time_is_drawn(tmp_path: Path) -> None:
    cost = LayerCost(840, 0.0, 0.0, 0.0, backward_seconds=0.0)
    chain = Chain("idle", "test", 840, (Layer("only", 0.0, (cost,)),))
    result = stagewright.plan(chain, uniform_servers(1, 1, Link(1e9)), 2, "dp")
    assert result.plan is not None
    assert png(result.plan).startswith(b"\x89PNG")
