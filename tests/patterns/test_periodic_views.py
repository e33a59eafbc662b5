"""Periodic plans are simulated, drawn and summed up as runs, and refused where they do not fit."""

import json
from collections import Counter
from dataclasses import replace
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import matplotlib.image
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import colours, drawings
from periodic_plans import periodic, placed_plan, plan_by_hand, stages_on
from plans import small_problem
from profiles import examples
from typer.testing import CliRunner, Result

from stagewright.cli import app
from stagewright.executor.drawing.charts.chart import png
from stagewright.executor.drawing.chrome import chrome_trace
from stagewright.executor.drawing.colours import BAND_COLOUR
from stagewright.executor.drawing.page import in_flight, page, summarise
from stagewright.executor.drawing.periods import drawn, finish_seconds, iteration_seconds, phases
from stagewright.executor.drawing.timeline import headline, timeline
from stagewright.executor.export import FORMATS, export
from stagewright.executor.export.options import FormatOptions
from stagewright.executor.measuring.compare import compare, correct, measured_plan
from stagewright.executor.programs.trace import Trace, TracedStep, load_trace, save_trace
from stagewright.executor.simulation.simulate import Deadlock, simulate
from stagewright.formulations.checking.check import check
from stagewright.formulations.plans.actions import ActionKind
from stagewright.formulations.plans.memory import static_bytes
from stagewright.formulations.plans.periodic import steady_microbatches, unroll_run
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PeriodicSchedule, PipelinePlan, save_plan
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import save_cluster
from stagewright.graphs.models.chain import save_model

pytestmark = pytest.mark.real

Case = tuple[PipelineProblem, PipelinePlan]

LAUNCHERS = ("torchrun", "slurm", "kubernetes")


@pytest.fixture(scope="module")
def shared() -> Case:
    """Stages 0 and 2 share g0, and so the link to g1; stage 3 is on two devices."""
    problem = small_problem(6, 6, 4, memory_bytes=64e9)
    stages = stages_on([2, 3, 4, 6], ["g0", "g1", "g0", "g3+g4"])
    return problem, placed_plan(problem, stages)


def pattern_of(plan: PipelinePlan) -> PeriodicSchedule:
    assert isinstance(plan.schedule, PeriodicSchedule)
    return plan.schedule


def moved(plan: PipelinePlan, action: str, start: float, shift: int) -> PipelinePlan:
    """The plan with an operation at another time."""
    actions = tuple(
        replace(one, start_seconds=start, shift=shift) if one.action == action else one
        for one in pattern_of(plan).actions
    )
    return replace(plan, schedule=replace(pattern_of(plan), actions=actions), predicted=None)


# --- Runs -------------------------------------------------------------------------------------


def test_a_run_has_every_action_once_and_reduces_at_the_end_of_every_iteration(
    shared: Case,
) -> None:
    _, plan = shared
    run = unroll_run(plan, 11)
    counts = Counter((one.action, one.device) for one in run.actions)
    assert {counts[f"{s}F{m}", "g0"] for s in (0, 2) for m in range(11)} == {1}
    reductions = [one for one in run.actions if one.action == "3REDUCE_GRAD"]
    ends = {one.action: one.finish_seconds for one in run.actions}
    # Iterations of 4 microbatches that end with the run.
    starts = [one.start_seconds for one in reductions]
    assert starts == pytest.approx([ends["3B2"], ends["3B6"], ends["3B10"]])


@examples(12)
@given(periodic())
def test_what_follows_directly_begins_at_that_instant(case: Case) -> None:
    """No rounding lets a microbatch begin before the other has ended."""
    _, plan = case
    for device in {one.device for one in pattern_of(plan).actions}:
        found = sorted(
            (one.start_seconds, one.finish_seconds)
            for one in unroll_run(plan, 9).actions
            if one.device == device and one.sources is None
        )
        for (_, end), (start, _) in pairwise(found):
            assert start >= end


# --- Simulation -------------------------------------------------------------------------------


def test_a_run_by_hand() -> None:
    """The order allows a period of 3 s, what each device has to do; the plan has one of 4 s.

    Microbatch 0 has nothing to wait for: 1 1 1 1 1 2 1 2 1 seconds until 0B begins. When 0F has
    ended for the last time, its device still does 5 backwards, the last of them 1 s late.
    """
    problem, plan = plan_by_hand()
    found = simulate(problem, plan)
    run = found.periodic
    assert run is not None
    assert run.period_seconds == 3
    assert found.iteration_seconds == 4 * 3
    assert run.warm_up_seconds == 11
    assert found.idle_seconds == {"s0g0": 0, "s0g1": 0, "s0g2": 0}
    assert min(found.slack_seconds.values()) == 0
    ends = {one.action: one.finish_seconds for one in found.actions}
    last = run.microbatches - 1
    assert run.drain_seconds == ends[f"0B{last}"] - ends[f"0F{last}"]


@examples(20)
@given(periodic())
def test_without_jitter_nothing_is_later_than_planned(case: Case) -> None:
    problem, plan = case
    found = simulate(problem, plan)
    assert found.periodic is not None
    period = pattern_of(plan).period_seconds
    assert found.periodic.period_seconds <= period * (1 + 1e-9)
    assert found.iteration_seconds <= iteration_seconds(plan) * (1 + 1e-9)
    planned = unroll_run(plan, found.periodic.microbatches).actions
    assert len(found.actions) == len(planned)
    for ran, one in zip(found.actions, planned, strict=True):
        assert (ran.action, ran.device) == (one.action, one.device)
        assert ran.start_seconds <= one.start_seconds + 1e-9 * one.finish_seconds
    assert min(found.idle_seconds.values()) >= 0
    busiest = min(found.idle_seconds, key=found.idle_seconds.__getitem__)
    work = sum(
        one.seconds
        for one in pattern_of(plan).actions
        if one.device == busiest and one.sources is None
    )
    left = plan.microbatches * (found.periodic.period_seconds - work)
    assert found.idle_seconds[busiest] == pytest.approx(left, abs=1e-9)


def test_a_straggler_sets_the_period(shared: Case) -> None:
    problem, plan = shared
    found = simulate(problem, plan, stragglers={"g1": 3.0})
    assert found.periodic is not None
    work = 3 * sum(problem.compute_seconds(2, 3, [1]))
    assert work <= found.periodic.period_seconds <= 1.02 * work  # it waits for transfers at most
    assert found.slack_seconds["g1"] == pytest.approx(0, abs=1e-9)
    assert found.idle_seconds["g4"] > 0


def test_jitter_costs_throughput_and_comes_from_the_seed() -> None:
    problem, plan = plan_by_hand()
    runs = [simulate(problem, plan, jitter=0.3, seed=seed) for seed in range(5)]
    assert simulate(problem, plan, jitter=0.3, seed=0) == runs[0]
    assert all(run.periodic and run.periodic.period_seconds > 3 for run in runs)


def test_the_forward_waits_for_the_update_that_it_computes_on(shared: Case) -> None:
    """With an iteration of one microbatch, the all-reduce is in every second one's way."""
    problem, _ = shared
    single = replace(problem, microbatches=1)
    stages = stages_on([2, 3, 4, 6], ["g0", "g1", "g2", "g3+g4"])
    plan = placed_plan(single, stages, 2.0)
    found = simulate(single, plan)
    last = {}
    reductions = [one for one in found.actions if one.action == "3REDUCE_GRAD"]
    for one in found.actions:
        last[one.action] = one
    for i, one in enumerate(reductions[:-2]):
        assert last[f"3F{i + 2}"].start_seconds >= one.finish_seconds


@pytest.mark.parametrize("microbatches", [2, 3, 4, 5])
def test_an_order_for_more_versions_than_there_are_is_a_deadlock(microbatches: int) -> None:
    """0B ends 19 s after 0F began, which needs m + 1 periods of 4 s: an iteration of 4.

    Of 3 microbatches, 0F6 must wait for the update after 0B2, and stands before it.
    """
    problem, plan = plan_by_hand()
    other = replace(problem, microbatches=microbatches)
    shorter = replace(plan, microbatches=microbatches, digest=other.digest, predicted=None)
    broken = {one.rule for one in check(other, shorter)}
    if microbatches < 4:
        assert broken == {"versions"}
        with pytest.raises(Deadlock, match=rf"0F{2 * microbatches} on s0g0"):
            simulate(other, shorter)
    else:
        assert broken == set()
        assert simulate(other, shorter).periodic is not None


def test_transfers_between_the_same_devices_share_their_link(shared: Case) -> None:
    """In either direction and of all stages."""
    problem, plan = shared
    found = simulate(problem, plan, jitter=0.5)
    sent = sorted(
        (one.start_seconds, one.finish_seconds)
        for one in found.actions
        if one.sources and set(one.sources) | set(one.targets or ()) == {"g0", "g1"}
    )
    assert found.periodic is not None
    assert len(sent) == 4 * found.periodic.microbatches
    for (_, end), (start, _) in pairwise(sent):
        assert start >= end - 1e-9


# --- Drawings ---------------------------------------------------------------------------------


def test_the_picture_has_warm_up_whole_periods_and_drain() -> None:
    _, plan = plan_by_hand()
    shown = phases(plan)
    assert shown is not None
    assert (shown.first, shown.last) == (4, 7)  # 0B lags 4 periods behind
    assert [name for name, _, _ in shown.spans] == [
        "warm-up", "period 4", "period 5", "period 6", "period 7", "drain",
    ]  # fmt: skip
    assert shown.spans[0] == ("warm-up", 0.0, 16.0)
    assert shown.spans[-1] == ("drain", 32.0, 47.0)
    assert shown.headings[0] == ("period 4 s", 20.0, 24.0)
    assert finish_seconds(plan) == 7 * 4 + 19
    assert iteration_seconds(plan) == 16


@examples(12)
@given(periodic())
def test_whole_periods_repeat_each_other(case: Case) -> None:
    _, plan = case
    shown = phases(plan)
    assert shown is not None

    def work(begin: float, end: float) -> float:
        spans = (
            min(one.finish_seconds, end) - max(one.start_seconds, begin)
            for one in drawn(plan).actions
            if "REDUCE" not in one.action
        )
        return sum(seconds for seconds in spans if seconds > 0)

    # What crosses a period's end was begun one period earlier as well.
    whole = [work(begin, end) for name, begin, end in shown.spans if name.startswith("period")]
    assert len(whole) >= 4
    assert whole[1:] == pytest.approx([whole[1]] * (len(whole) - 1))


def test_transfers_over_one_link_have_one_row(shared: Case) -> None:
    _, plan = shared
    names = [row.name for row in timeline(plan)]
    assert names == [
        "g0 · stages 0, 2", "g1 · stage 1", "g3 · stage 3", "g4 · stage 3",
        "channel 0-1, 1-2", "channel 2-3", "all-reduce 3",
    ]  # fmt: skip


@examples(12)
@given(periodic())
def test_in_flight_is_what_the_memory_was_planned_for(case: Case) -> None:
    problem, plan = case
    assert plan.predicted is not None
    for s, (line, (times, counts)) in enumerate(zip(summarise(plan), in_flight(plan), strict=True)):
        assert line.in_flight == counts.max()
        assert counts[-1] == 0
        assert (times[1:] > times[:-1]).all()
        shares = len(line.devices)
        if line.shares_with or shares > 1:
            continue
        start, stop = line.layers
        static = static_bytes(problem, start, stop, 1) + problem.gradient_bytes(start, stop)
        memory = static + line.in_flight * problem.saved_bytes(start, stop, 1)
        assert line.peak_memory_bytes == pytest.approx(memory), s


def test_the_summary_says_what_the_pattern_is_like(shared: Case) -> None:
    _, plan = plan_by_hand()
    lines = summarise(plan)
    assert [line.in_flight for line in lines] == [5, 3, 1]
    assert [line.shifts for line in lines] == [(0, 4), (0, 2), (1, 1)]
    assert [line.shares_with for line in lines] == [(), (), ()]
    assert [line.shares_with for line in summarise(shared[1])] == [(2,), (), (0,), ()]
    assert "period 4 s" in headline(plan)


def test_the_picture_marks_a_period(shared: Case) -> None:
    _, plan = shared
    shown = colours(matplotlib.image.imread(BytesIO(png(plan))))
    assert tuple(bytes.fromhex(BAND_COLOUR[1:])) in shown
    text = page(plan)
    period = f"period {1e3 * pattern_of(plan).period_seconds:.1f} ms"
    assert "6 microbatches, from" in text
    bands = drawings(text)[0]["bands"]
    assert [band["name"] for band in bands] == [period, "warm-up", "drain"]
    assert not any(mark["name"] for mark in drawings(text)[0]["marks"])


def test_the_trace_holds_the_run_and_its_periods() -> None:
    _, plan = plan_by_hand()
    events = json.loads(chrome_trace(plan))["traceEvents"]
    found = Counter(one["cat"] for one in events if one["ph"] == "X")
    assert found["period"] == 6
    assert sum(found.values()) - 6 == len(drawn(plan).actions) == 8 * 10
    period = next(one for one in events if one["name"] == "period 5")
    assert (period["ts"], period["dur"]) == (20e6, 4e6)


def test_a_pattern_that_no_picture_holds_is_refused() -> None:
    _, plan = plan_by_hand()
    for draw in (timeline, chrome_trace, page, png, summarise):
        with pytest.raises(InputError, match="index shifts of up to 60000 periods are too many"):
            draw(moved(plan, "0B", 1.0, 60_000))


# --- Comparison with a trace ------------------------------------------------------------------


def traced(plan: PipelinePlan, iterations: int, factor: float = 1.0, step: int = 0) -> TracedStep:
    """A run in which everything takes ``factor`` times as long as planned."""
    run = unroll_run(plan, iterations * plan.microbatches)
    actions = tuple(
        replace(
            one,
            start_seconds=one.start_seconds * factor,
            finish_seconds=one.finish_seconds * factor,
        )
        for one in run.actions
    )
    update_seconds = 0.5 * iterations * factor
    finish = finish_seconds(run) * factor
    return TracedStep(step, finish, update_seconds, actions, 1.0, iterations)


def trace_of(plan: PipelinePlan, *runs: TracedStep) -> Trace:
    return Trace(plan.digest, plan.model, "a desk", "gloo", 4, "float32", runs)


def iterations_to_settle(plan: PipelinePlan) -> int:
    return 3 * steady_microbatches(pattern_of(plan)) // plan.microbatches + 2


@examples(12)
@given(periodic())
def test_a_run_in_proportion_gives_that_ratio_everywhere(case: Case) -> None:
    problem, plan = case
    enough = iterations_to_settle(plan)
    trace = trace_of(plan, traced(plan, enough, 2.0), traced(plan, 1, 2.0, enough))
    found = compare(plan, trace)
    assert found.period is not None
    schedule = pattern_of(plan)
    assert found.period.seconds.predicted == schedule.period_seconds
    assert found.period.seconds.ratio == pytest.approx(2)
    assert found.period.microbatches >= plan.microbatches
    whole = found.iteration_seconds
    assert whole.predicted == iteration_seconds(plan)
    assert (whole.ratio, found.least_seconds, found.most_seconds) == pytest.approx(
        (2, whole.measured, whole.measured)
    )
    assert (found.steps, found.update_seconds.measured) == (enough, 1.0)
    assert found.update_seconds.predicted == schedule.pause_seconds
    kinds = {one.kind: one for one in found.kinds}
    count = len(plan.stages) * plan.microbatches
    assert kinds[ActionKind.FORWARD].count == count
    for one in found.kinds:
        assert one.seconds.measured == pytest.approx(2 * one.seconds.predicted)
    assert all(one.busy.ratio == pytest.approx(1) for one in found.stages)
    corrected = correct(problem.chain, plan, trace)
    for layer, planned in zip(corrected.layers, problem.chain.layers, strict=True):
        for cost, before in zip(layer.costs, planned.costs, strict=True):
            assert cost.forward_seconds == pytest.approx(2 * before.forward_seconds)


def test_the_period_is_that_of_the_middle_of_a_run() -> None:
    """The order of this plan takes 3 s per microbatch, its pattern 4 s."""
    problem, plan = plan_by_hand()
    run = simulate(problem, plan)
    assert run.periodic is not None
    iterations = run.periodic.microbatches // plan.microbatches
    step = TracedStep(0, run.iteration_seconds, 0.0, run.actions, None, iterations)
    found = compare(plan, trace_of(plan, step))
    assert found.period is not None
    assert (found.period.seconds.predicted, found.period.seconds.measured) == (4, 3)
    assert found.period.microbatches == (72 - 3 * 7 - 1) // 4 * 4  # whole iterations
    assert (found.least_seconds, found.most_seconds) == (12, 12)
    assert found.iteration_seconds.measured == 12


def test_the_first_iteration_warms_the_machine_up() -> None:
    problem, plan = plan_by_hand()
    runs = [traced(plan, 1, factor, step) for step, factor in enumerate((9.0, 1.0, 2.0))]
    corrected = correct(problem.chain, plan, trace_of(plan, *runs))
    assert [layer.costs[0].forward_seconds for layer in corrected.layers] == [1.5, 1.5, 1.5]


@examples(12)
@given(periodic(), st.integers(1, 12))
def test_the_end_of_the_longest_run_is_drawn(case: Case, iterations: int) -> None:
    _, plan = case
    shorter = traced(plan, 1, step=iterations + 1)
    end = measured_plan(plan, trace_of(plan, traced(plan, iterations + 1, 3.0), shorter))
    assert end.microbatches == min(drawn(plan).microbatches, (iterations + 1) * plan.microbatches)
    planned = unroll_run(plan, end.microbatches)
    names = [Counter((one.device, one.action) for one in one.actions) for one in (end, planned)]
    assert names[0] == names[1]
    assert min(one.start_seconds for one in end.actions) == 0
    assert finish_seconds(end) == pytest.approx(3 * finish_seconds(planned))
    assert png(end).startswith(b"\x89PNG")


def test_a_trace_of_another_kind_is_refused(shared: Case) -> None:
    problem, plan = shared
    finite = unroll_run(plan, plan.microbatches)
    run = traced(plan, 40)
    step = replace(traced(plan, 1), iterations=None)
    for refusing in (compare, measured_plan, lambda *both: correct(problem.chain, *both)):
        message = "step 0 of the trace is of a finite plan, this one is periodic: give the plan"
        with pytest.raises(InputError, match=message):
            refusing(plan, trace_of(plan, step))
        message = "step 0 of the trace is of a periodic plan, this one is finite: give the plan"
        with pytest.raises(InputError, match=message):
            refusing(finite, trace_of(plan, run))
        with pytest.raises(InputError, match=r"step 0 of the trace lacks \d"):
            refusing(plan, trace_of(plan, replace(run, iterations=41)))
        with pytest.raises(InputError, match=r"step 0 of the trace has \d"):
            refusing(plan, trace_of(plan, replace(run, iterations=39)))


def test_runs_too_short_for_their_period_are_refused(shared: Case) -> None:
    _, plan = shared
    enough = iterations_to_settle(plan)
    compare(plan, trace_of(plan, traced(plan, enough)))
    short = trace_of(plan, traced(plan, enough - 1), traced(plan, 1, step=enough))
    message = f"no more than {enough - 1} iterations .*: train on at least {enough} in a row"
    with pytest.raises(InputError, match=message):
        compare(plan, short)


# --- Commands and export ----------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path, shared: Case) -> list[str]:
    problem, plan = shared
    save_plan(plan, tmp_path / "plan.json")
    save_model(problem.chain, tmp_path / "model.json")
    save_cluster(problem.cluster, tmp_path / "cluster.json")
    inputs = ["--model", str(tmp_path / "model.json"), "--cluster", str(tmp_path / "cluster.json")]
    return [str(tmp_path / "plan.json"), *inputs]


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(map(str, arguments)))


def answered(*arguments: object) -> str:
    result = run(*arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.exception
    return result.stdout


def test_simulate_says_how_the_run_is(files: list[str]) -> None:
    told = json.loads(answered("simulate", *files, "--json"))
    assert told["iteration_seconds"] == pytest.approx(4 * told["period_seconds"])
    assert told["slowdown"] <= 1
    assert min(told[f"{part}_seconds"] for part in ("warm_up", "drain")) > 0
    text = answered("simulate", *files, "--straggler", "g1=3")
    assert "period 469.5 ms per microbatch once the pipeline is full, planned 204.6 ms" in text
    assert "warm-up" in text
    assert "drain" in text


def test_show_prints_the_pattern(files: list[str]) -> None:
    text = answered("show", files[0])
    for words in (
        "period 204.6 ms, a microbatch each: 818.4 ms per iteration of 4", "index shifts",
        "F 0, B 2", "stage 2", "1.78 GB",
    ):  # fmt: skip
        assert words in text
    told = json.loads(answered("show", files[0], "--json"))
    assert told["period_seconds"] == pytest.approx(0.2046)
    assert "valid, 818.4 ms per iteration" in answered("check", *files)


def test_show_draws_it(files: list[str], tmp_path: Path) -> None:
    wanted = [("--png", "a.png"), ("--html", "a.html"), ("--trace", "a.json")]
    answered("show", files[0], *(part for f, n in wanted for part in (f, tmp_path / n)))
    assert all((tmp_path / name).stat().st_size > 1000 for _, name in wanted)


def test_it_is_laid_beside_a_trace(files: list[str], tmp_path: Path, shared: Case) -> None:
    trace = trace_of(shared[1], traced(shared[1], 12, 2.0))
    save_trace(trace, tmp_path / "trace.json")
    assert load_trace(tmp_path / "trace.json") == trace
    beside = files[0], tmp_path / "trace.json"
    drawing = ["--png", tmp_path / "a.png", *files[1:3], "--corrected", tmp_path / "model2.json"]
    text = answered("compare", *beside, *drawing)
    assert "predicted period 204.6 ms, measured 409.2 ms (mean of " in text
    (headline,) = (line for line in text.splitlines() if line.startswith("predicted period"))
    assert "818.4 ms" not in headline
    assert "of +818.4 ms per iteration" in text
    assert "1.637 s to 1.637 s per iteration): measured / predicted = 2.000" in text
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads(answered("compare", *beside, "--json"))
    assert told["period_seconds"]["ratio"] == pytest.approx(2)
    assert told["period_seconds"]["microbatches"] > 4
    assert told["steps"] == 11


def test_the_command_refuses_a_trace_of_another_kind_in_one_line(
    files: list[str], tmp_path: Path, shared: Case
) -> None:
    _, plan = shared
    save_plan(unroll_run(plan, plan.microbatches), tmp_path / "finite.json")
    step = replace(traced(plan, 1), iterations=None)
    for name, one in ((files[0], step), (tmp_path / "finite.json", traced(plan, 12))):
        save_trace(trace_of(plan, one), tmp_path / "trace.json")
        result = run("compare", name, tmp_path / "trace.json")
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert "give the plan that was run" in " ".join(result.stderr.split())


@pytest.mark.parametrize("partition_only", [False, True])
@pytest.mark.parametrize("to", sorted(set(FORMATS) - set(LAUNCHERS)))
def test_frameworks_that_drain_refuse_it(to: str, partition_only: bool, shared: Case) -> None:
    options = FormatOptions(partition_only=partition_only and to != "torch-csv")
    with pytest.raises(InputError, match=r"the plan is periodic: .* finite schedule") as caught:
        export(shared[1], to, options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("to", LAUNCHERS)
def test_launch_scripts_start_it(to: str, shared: Case) -> None:
    image = "image" if to == "kubernetes" else None
    files = export(shared[1], to, FormatOptions(command="stagewright run plan.json", image=image))
    assert all("stagewright" in text for text in files.values())


def test_export_ends_with_2(files: list[str], tmp_path: Path) -> None:
    target = tmp_path / "schedule.csv"
    result = run("export", files[0], "--to", "torch-csv", "-o", target)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert not target.exists()
