"""Published schedules as plans, checked, lowered and simulated; copies in both directions."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, reduce
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from language_check import evaluate, peak_bytes
from plans import small_problem
from profiles import examples
from program_text import parse_program
from strategies import hard_problem

from stagewright.executor.drawing.timeline import timeline
from stagewright.executor.export.options import FormatOptions
from stagewright.executor.export.torch_pipelining import schedule as torch_csv
from stagewright.executor.programs.lower import lower
from stagewright.executor.programs.memory import Footprint
from stagewright.executor.programs.program import InvalidProgram, Program
from stagewright.executor.programs.verification.verify import verify
from stagewright.executor.simulation.simulate import simulate
from stagewright.formulations.checking.check import check, predict
from stagewright.formulations.forms.answers import Limits, Status, silent
from stagewright.formulations.pipelines.grouped_stages import scheduling_of
from stagewright.formulations.pipelines.windows import order_of_times
from stagewright.formulations.plans.actions import WEIGHT_RULES, B, F, I, W, parse_action
from stagewright.formulations.plans.assembly import assemble, assemble_pattern
from stagewright.formulations.plans.memory import stage_static_bytes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import (
    PipelinePlan,
    Schedule,
    ScheduledAction,
    Stage,
    save_plan,
)
from stagewright.formulations.schedules.order import Order
from stagewright.formulations.schedules.planned import copies_of
from stagewright.formulations.schedules.published.kinds import (
    KINDS,
    OPTIMAL,
    ScheduleChoice,
    Sizes,
    schedule_of,
)
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import save_cluster
from stagewright.graphs.models.chain import LayerCost, save_model
from stagewright.solvers.pipelines.scheduling import solve_schedule
from stagewright.solvers.planners.order import in_order, plan_order
from stagewright.solvers.planners.steps.proposal import (
    Choices,
    NoPlan,
    PeriodicProposal,
    cost_of,
    proposal_of,
)
from stagewright.solvers.planning import plan

LIMITS = Limits(1.0)
BOTH = ("chimera", "dualpipe")
VERSIONS = {"pipedream": "stash", "1f1b-rr": "stash", "2bw": "double-buffer"}
REPLICATED = ScheduleChoice("1f1b-rr", replicas=(2, 1, 1))


@cache
def problem(devices: int, memory_bytes: float = 16e9) -> PipelineProblem:
    """Uneven layers on two kinds of devices and links, with both parts of backwards and updates."""
    return small_problem(16, devices, 8, memory_bytes, parts=True, updates=True)


def planned(asked: PipelineProblem, choice: ScheduleChoice) -> PipelinePlan | NoPlan:
    found = plan_order(asked, LIMITS, silent, Choices(order=choice))
    if isinstance(found, NoPlan):
        return found
    if isinstance(found, PeriodicProposal):
        return assemble_pattern(asked, "order", found.stages, found.pattern)
    return assemble(asked, "order", found.stages, found.starts, WEIGHT_RULES[found.weights])


@cache
def plan_of(kind: str, devices: int) -> PipelinePlan:
    choice = REPLICATED if kind == "replicated" else ScheduleChoice(kind)
    found = planned(problem(devices), choice)
    assert isinstance(found, PipelinePlan)
    return found


EVERY = [(kind, devices) for kind in (*KINDS, OPTIMAL) for devices in (2, 4)]
EVERY.append(("replicated", 4))
FINITE = [(kind, devices) for kind, devices in EVERY if kind != "2bw"]


@pytest.mark.parametrize(("kind", "devices"), EVERY)
def test_every_kind_is_a_valid_plan_that_is_drawn(kind, devices):
    found = plan_of(kind, devices)
    assert check(problem(devices), found) == ()
    assert len({name for stage in found.stages for name in stage.devices}) == devices
    assert found.weights == VERSIONS.get(kind, "flush")
    assert {row.group for row in timeline(found)} >= {"device", "channel"}


@pytest.mark.parametrize(("kind", "devices"), FINITE)
def test_the_plan_has_the_order_and_its_program_is_verified(kind, devices):
    found = plan_of(kind, devices)
    program = lower(found)
    verify(found, program)
    if kind in (OPTIMAL, "replicated") or KINDS[kind].depends_on_times:
        return
    order = schedule_of(kind, Sizes(devices, 8, ScheduleChoice(kind).count))
    computed = {
        tuple(one.action for one in row if str(one.action.kind) in "FBIW") for row in program.rows
    }
    assert computed == set(order.rows)


@pytest.mark.parametrize(("kind", "devices"), FINITE)
def test_no_action_waits_longer_than_its_order_asks(kind, devices):
    """The simulator starts every action of the order as early as it can."""
    found = plan_of(kind, devices)
    outcome = simulate(problem(devices), found)
    begun = {(one.action, one.device): one.start_seconds for one in outcome.actions}
    for one in found.actions:
        if parse_action(one.action).microbatch is not None:
            assert one.start_seconds == pytest.approx(begun[one.action, one.device], abs=1e-9)


@pytest.mark.parametrize(("kind", "devices"), FINITE)
def test_the_plain_checker_of_the_tests_finds_the_same(kind, devices, tmp_path):
    found = plan_of(kind, devices)
    if found.weights not in ("flush", "double-buffer"):
        pytest.skip("the plain checker does not know versions of every microbatch")
    documents = *documents_of(problem(devices), tmp_path), document_of(found, tmp_path)
    _, broken = evaluate(*documents)
    assert broken == []
    peaks = found.predicted.peak_memory_bytes
    assert peak_bytes(*documents) == pytest.approx([peaks[f"g{v}"] for v in range(devices)])


def documents_of(asked: PipelineProblem, folder: Path):
    save_model(asked.chain, folder / "model.json")
    save_cluster(asked.cluster, folder / "cluster.json")
    read = [json.loads((folder / f"{name}.json").read_text()) for name in ("model", "cluster")]
    return *read, asked.microbatches


def document_of(found: PipelinePlan, folder: Path):
    save_plan(found, folder / "plan.json")
    return json.loads((folder / "plan.json").read_text())


@pytest.mark.parametrize(("kind", "devices"), EVERY)
def test_torch_gets_a_file_or_a_reason(kind, devices):
    found = plan_of(kind, devices)
    reasons = {
        "2bw": "the plan is periodic",
        "pipedream": "weights 'stash': a schedule file of torch updates once per iteration",
        "1f1b-rr": "weights 'stash'",
        "replicated": "stage 0: its 2 devices take microbatches in turn",
        **dict.fromkeys(BOTH, "stage 0: its 2 devices take microbatches in turn"),
    }
    if kind in reasons:
        with pytest.raises(InputError, match=reasons[kind]):
            torch_csv(found, FormatOptions())
        return
    (text,) = torch_csv(found, FormatOptions()).values()
    words = text.replace("\n", ",").split(",")
    computed = {
        one.action for one in found.actions if parse_action(one.action).kind in tuple("FBIW")
    }
    assert sorted(filter(None, words)) == sorted(computed)


@examples(40)
@given(st.data())
def test_any_kind_on_any_problem(data):
    asked = data.draw(hard_problem(4, 4, 6))
    kind = data.draw(st.sampled_from([*KINDS, OPTIMAL]))
    choice = ScheduleChoice(kind)
    try:
        found = planned(asked, choice)
    except InputError:
        assume(False)
    if isinstance(found, NoPlan):
        assert "short" in found.reason or "does not fit" in found.reason
    else:
        assert check(asked, found) == ()
        if not found.is_periodic:
            verify(found, lower(found))
            require_no_later(asked, found)


def require_no_later(asked: PipelineProblem, found: PipelinePlan) -> None:
    """The simulated order, with that of every half-duplex channel, is valid and never later."""
    actions = simulate(asked, found).actions
    for one, planned_one in zip(actions, found.actions, strict=True):
        assert one.finish_seconds <= planned_one.finish_seconds * (1 + 1e-9)
    again = replace(found, predicted=None, certificate=None, schedule=Schedule(actions))
    assert check(asked, again) == ()


# --- Copies in both directions ----------------------------------------------------------------


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("devices", [2, 4])
def test_both_directions_are_copies_that_take_turns(kind, devices):
    stages = plan_of(kind, devices).stages
    assert [stage.replication for stage in stages] == ["round-robin"] * devices
    assert [stage.devices for stage in stages] == [stage.devices[::-1] for stage in stages[::-1]]


def test_both_copies_of_a_stage_count_in_memory():
    asked, found = problem(4), plan_of("chimera", 4)
    for name, peak in found.predicted.peak_memory_bytes.items():
        own = [stage for stage in found.stages if name in stage.devices]
        assert len(own) == 2
        assert peak > sum(stage_static_bytes(asked, stage) for stage in own)
    most = max(found.predicted.peak_memory_bytes.values())
    for memory, rules in ((most, set()), (0.999 * most, {"memory"})):
        other = problem(4, memory)
        again = replace(found, digest=other.digest, predicted=None)
        assert {one.rule for one in check(other, again)} == rules


def edited(found: PipelinePlan, change: Callable[[ScheduledAction], ScheduledAction | None]):
    actions = (change(one) for one in found.actions)
    return replace(
        found, predicted=None, schedule=Schedule(tuple(one for one in actions if one is not None))
    )


def of_action(text: str, change: Callable[[ScheduledAction], ScheduledAction | None]):
    return lambda found: edited(found, lambda one: change(one) if one.action == text else one)


def with_stage(s: int, **changes):
    def damaged(found: PipelinePlan) -> PipelinePlan:
        stages = list(found.stages)
        stages[s] = replace(stages[s], **changes)
        return replace(found, predicted=None, stages=tuple(stages))

    return damaged


def later(one: ScheduledAction, seconds: float) -> ScheduledAction:
    return replace(
        one, start_seconds=one.start_seconds + seconds, finish_seconds=one.finish_seconds + seconds
    )


def before_the_other_copy(found: PipelinePlan) -> PipelinePlan:
    """The all-reduce of stage 0 when the first of its copies is done."""
    ends = Counter()
    for one in found.actions:
        action = parse_action(one.action)
        if action.stage == 0 and action.kind in ("B", "W"):
            ends[one.device] = max(ends[one.device], one.finish_seconds)
    assert len({*ends.values()}) == 2
    start = next(one.start_seconds for one in found.actions if one.action == "0REDUCE_GRAD")
    return of_action("0REDUCE_GRAD", lambda one: later(one, min(ends.values()) - start))(found)


def both_at_once(found: PipelinePlan) -> PipelinePlan:
    """The all-reduces of stages 0 and 3, which are on the same devices, at one time."""
    starts = {one.action: one.start_seconds for one in found.actions}
    latest = max(starts["0REDUCE_GRAD"], starts["3REDUCE_GRAD"])
    moved = edited(
        found, lambda one: later(one, latest - one.start_seconds) if "REDUCE" in one.action else one
    )
    return edited(moved, lambda one: later(one, 1.0) if "UPDATE" in one.action else one)


DAMAGES = {
    "a microbatch in the other direction": (
        "unexpected", of_action("1F0", lambda one: replace(one, device="g2"))),
    "a stage turned round": ("unexpected", with_stage(1, devices=("g2", "g1"))),
    "one direction only": ("unexpected", with_stage(0, devices=("g0",), replication="split")),
    "split in place of turns": ("missing", with_stage(0, replication="split")),
    "no all-reduce": ("missing", of_action("2REDUCE_GRAD", lambda one: None)),
    "an all-reduce of one copy": (
        "endpoints",
        of_action("0REDUCE_GRAD", lambda one: replace(one, sources=("g0",), targets=("g0",)))),
    "an all-reduce with a copy of another stage": (
        "endpoints",
        of_action("0REDUCE_GRAD",
                  lambda one: replace(one, sources=("g0", "g1"), targets=("g0", "g1")))),
    "an all-reduce before the other copy": ("dependency", before_the_other_copy),
    "two all-reduces of a device at once": ("overlap", both_at_once),
    "an update of one copy": (
        "missing",
        lambda found: edited(
            found, lambda one: None if (one.action, one.device) == ("1UPDATE", "g2") else one)),
    "a transfer in the other direction": (
        "endpoints",
        of_action("0SEND_F0", lambda one: replace(one, sources=("g3",), targets=("g2",)))),
    "weights of every microbatch": ("weights", lambda found: replace(found, weights="stash")),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("kind", BOTH)
def test_broken_copies_are_found(kind, name):
    found = plan_of(kind, 4)
    names = [stage.devices for stage in found.stages]
    assert names == [("g0", "g3"), ("g1", "g2"), ("g2", "g1"), ("g3", "g0")]
    rule, damage = DAMAGES[name]
    assert rule in {one.rule for one in check(problem(4), damage(found))}


def replaced(rank: int, old: str, new: str):
    """A row with the first ``old`` replaced by ``new``."""

    def damage(program: Program) -> Program:
        rows = str(program).split("\n")
        assert old in rows[rank]
        rows[rank] = rows[rank].replace(old, new, 1).replace(",,", ",").strip(",")
        return parse_program("\n".join(rows), program.devices)

    return damage


def in_sequence(*damages):
    return lambda program: reduce(lambda found, damage: damage(found), damages, program)


PROGRAM_DAMAGES = {
    "a microbatch of the other direction": ("does not run on g0", replaced(0, "0F2", "0F3")),
    "no all-reduce on one copy": ("0 all-reduces", replaced(1, "0REDUCE_GRAD", "")),
    "all-reduces in another order": (
        "collective 0 of ranks", in_sequence(
            replaced(1, "3REDUCE_GRAD", ""),
            replaced(1, "0REDUCE_GRAD", "0REDUCE_GRAD,3REDUCE_GRAD"))),
    "an update of one copy is missing": ("need 1 times", replaced(0, "3UPDATE", "")),
    "a transfer to the other direction": ("transfer", replaced(0, "0SEND_F0>2", "0SEND_F0>3")),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAM_DAMAGES)
@pytest.mark.parametrize("kind", BOTH)
def test_broken_programs_of_copies_are_found(kind, name):
    found = plan_of(kind, 4)
    program = lower(found)
    assert program.devices == ("g0", "g3", "g1", "g2")
    message, damage = PROGRAM_DAMAGES[name]
    with pytest.raises(InvalidProgram, match=message):
        verify(found, damage(program))


@pytest.mark.parametrize("kind", BOTH)
def test_the_verifier_counts_the_bytes_of_both_copies(kind):
    found = plan_of(kind, 4)
    program = lower(found)
    sizes = [Footprint(100.0 + 10 * s, 0.0, 0.0) for s in range(4)]
    verify(found, program, sizes, [230.0] * 4)
    with pytest.raises(InvalidProgram, match=r"rank 0 \(g0\) needs .* 1 bytes short"):
        verify(found, program, sizes, [229.0] * 4)


def test_copies_that_do_not_take_turns_are_refused():
    order = schedule_of("chimera", Sizes(2, 4))
    names = {0: 0, 1: 2, 2: 1, 3: 3}  # microbatches 0 and 1 go down, 2 and 3 up
    rows = tuple(
        tuple(replace(one, microbatch=names[one.microbatch]) for one in row) for row in order.rows
    )
    with pytest.raises(InputError, match="stage 0: microbatch 1 is on device 0; the copies"):
        copies_of(Order(rows, (0, 0, 1, 1)))


# --- Timetables -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["optimal", "gpipe", "1f1b", "pe"])
def test_a_timetable_and_its_order_are_plans(kind):
    """The times themselves make a plan, and so does their order."""
    asked = small_problem(8, 4, 6)
    stages = tuple(Stage((2 * v, 2 * v + 2), (f"g{v}",)) for v in range(4))
    scheduling = scheduling_of(asked, stages)
    times = solve_schedule(scheduling, kind, LIMITS).timetable
    exact = proposal_of(asked, stages, times)
    ordered = in_order(asked, stages, order_of_times(scheduling, times))
    for proposal in (exact, ordered):
        found = assemble(asked, "by hand", proposal.stages, proposal.starts)
        assert check(asked, found) == ()
        verify(found, lower(found))
    assert cost_of(asked, exact) == pytest.approx(times.makespan(scheduling))
    rows = [
        tuple(one.action for one in row if str(one.action.kind) in "FB")
        for row in lower(assemble(asked, "by hand", ordered.stages, ordered.starts)).rows
    ]
    assert rows == list(order_of_times(scheduling, times).rows)


# --- What is asked for ------------------------------------------------------------------------


def test_versions_of_replicas_become_a_flush_with_a_note():
    result = plan(problem(4), "auto", LIMITS, choices=Choices(order=REPLICATED))
    assert result.planner == result.plan.planner == "order"
    assert "weights 'flush' in place of 1f1b-rr's 'stash'" in result.reason
    assert [len(stage.devices) for stage in result.plan.stages] == [2, 1, 1]


def test_1f1b_without_a_choice():
    result = plan(problem(2), "order", LIMITS)
    assert result.status is Status.FEASIBLE
    assert [stage.devices for stage in result.plan.stages] == [("g0",), ("g1",)]


def test_devices_that_a_kind_cannot_use_are_left_over():
    asked = small_problem(16, 3, 8, parts=True)
    result = plan(asked, "auto", LIMITS, choices=Choices(order=ScheduleChoice("chimera")))
    assert "on 2 of 3 devices: Chimera needs an even number of devices, got 3" in result.reason
    few = replace(problem(4), microbatches=4)
    result = plan(few, "auto", LIMITS, choices=Choices(order=ScheduleChoice("dualpipe")))
    assert "on 2 of 4 devices: DualPipe needs at least 8 microbatches" in result.reason


@pytest.mark.parametrize("kind", ["interleaved", "zbv", "dualpipe", "1f1b"])
def test_memory_that_is_short_is_the_answer_no(kind):
    peak = max(plan_of(kind, 4).predicted.peak_memory_bytes.values())
    result = plan(
        problem(4, 0.3 * peak), "order", LIMITS, choices=Choices(order=ScheduleChoice(kind))
    )
    assert (result.plan, result.status) == (None, Status.INFEASIBLE)
    assert "bytes short" in result.reason


@pytest.mark.parametrize("kind", ["zb1p", "zb2p", "zbv"])
def test_schedules_for_any_memory_stay_within_it(kind):
    wide = plan_of(kind, 4)
    peaks = wide.predicted.peak_memory_bytes
    static = {
        name: sum(stage_static_bytes(problem(4), one) for one in wide.stages if name in one.devices)
        for name in peaks
    }
    least = max(static[name] + 0.6 * (peaks[name] - static[name]) for name in peaks)
    assert least < max(peaks.values())
    found = planned(problem(4, least), ScheduleChoice(kind))
    assert isinstance(found, PipelinePlan)
    assert max(found.predicted.peak_memory_bytes.values()) <= least
    assert found.predicted.iteration_seconds >= wide.predicted.iteration_seconds - 1e-9


@pytest.mark.parametrize("kind", ["chimera", "zbv", "2bw", OPTIMAL])
def test_stages_recompute_if_asked(kind):
    choices = Choices("full", order=ScheduleChoice(kind))
    result = plan(problem(4), "order", LIMITS, choices=choices)
    assert {stage.recompute for stage in result.plan.stages} == {"full"}
    assert check(problem(4), result.plan) == ()
    lean, rich = result.plan.predicted, plan_of(kind, 4).predicted
    assert sum(lean.peak_memory_bytes.values()) < sum(rich.peak_memory_bytes.values())


@pytest.mark.parametrize(
    ("choice", "placed"),
    [
        (ScheduleChoice(OPTIMAL, 3), "012301230123"),
        (ScheduleChoice(OPTIMAL, placement="V"), "01233210"),
        (ScheduleChoice(OPTIMAL, 4, placement="wave"), "0123321001233210"),
        (ScheduleChoice("interleaved"), "01230123"),
        (ScheduleChoice("hanayo", 4), "0123321001233210"),
    ],
)
def test_placements(choice, placed):
    found = planned(problem(4), choice)
    assert [stage.devices for stage in found.stages] == [(f"g{v}",) for v in placed]
    assert check(problem(4), found) == ()


@examples(10)
@given(
    st.tuples(*[st.integers(1, 6)] * 4), st.sampled_from(("1f1b", "zb-h1", "zbv", "interleaved"))
)
def test_orders_pay_for_their_own_kind_of_backwards(times, kind):
    """Whatever the parts take beside the whole; `plan` holds the cost above all bounds."""
    forward, whole, *parts = (1e-3 * one for one in times)
    known = problem(2)
    cost = LayerCost(4, forward, 1e6, 0.0, whole, *parts)
    layers = tuple(replace(one, costs=(cost,)) for one in known.chain.layers[:4])
    found = plan(
        replace(known, chain=replace(known.chain, layers=layers, microbatch_size=4)),
        "order", LIMITS, choices=Choices(order=ScheduleChoice(kind)),
    )  # fmt: skip
    seconds = Counter[str]()
    for one in found.plan.actions:
        seconds[parse_action(one.action).kind] += one.finish_seconds - one.start_seconds
    split = KINDS[kind].is_split
    assert seconds[F] == pytest.approx(4 * 8 * forward)
    assert seconds[B] == pytest.approx(0 if split else 4 * 8 * whole)
    assert [seconds[I], seconds[W]] == pytest.approx([4 * 8 * one * split for one in parts])
    assert found.bound <= found.cost * (1 + 1e-9)


PUBLISHED = [
    (1, "line", "zb-h2"),
    (2, "V", "zbv"),
    (2, "V", "dualpipev"),
    (2, "loop", "looped-bfs"),
]


@pytest.mark.parametrize(("chunks", "placement", "kind"), PUBLISHED)
def test_the_optimal_order_is_not_slower_than_a_published_one(chunks, placement, kind):
    best = planned(problem(2), ScheduleChoice(OPTIMAL, chunks, placement=placement))
    other = planned(problem(2), ScheduleChoice(kind))
    assert [one.devices for one in best.stages] == [one.devices for one in other.stages]
    assert best.predicted.iteration_seconds <= other.predicted.iteration_seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (("zbw",), "unknown schedule 'zbw'; known are optimal, gpipe, 1f1b"),
        (("zbv", 3), "zbv has 2 stages per device, got 3"),
        (("interleaved", 0), "chunks must be at least 1, got 0"),
        (("1f1b", None, (2, 1)), "1f1b has no replicas; 1f1b-rr has"),
        (("1f1b-rr", None, (2, 0)), "replicas must be at least 1, got 0"),
        (("zbv", None, (), "V"), "zbv has its own placement, V; only optimal can be placed"),
        (("optimal", 3, (), "wave"), "placement wave has an even number of stages per device"),
        (("optimal", 2, (), "circle"), "placement must be one of line, loop, V, wave"),
    ],
)
def test_wrong_choices_are_refused(choice, message):
    with pytest.raises(InputError, match=message):
        ScheduleChoice(*choice)


def test_what_a_problem_does_not_allow_is_refused_in_one_line():
    whole = small_problem(8, 4, 8)
    for asked, choice, message in (
        (whole, ScheduleChoice("zbv"), "zbv splits backwards, but layer 'layer0' has only"),
        (small_problem(3, 1, 4), ScheduleChoice("hanayo", 4), "hanayo on 1 devices has 4 stages"),
        (whole, ScheduleChoice("1f1b-rr", replicas=(3, 2)), "replicas 3, 2 are 5 devices"),
        (small_problem(2, 2, 4), ScheduleChoice(OPTIMAL, 3), "optimal on 1 devices has 3 stages"),
    ):
        with pytest.raises(InputError, match=message):
            plan(asked, "auto", LIMITS, choices=Choices(order=choice))
    with pytest.raises(InputError, match="'spp' does not support a given schedule: use order"):
        plan(whole, "spp", LIMITS, choices=Choices(order=ScheduleChoice()))


def test_the_certificate_holds_for_a_plan_in_both_directions():
    result = plan(problem(4), "auto", LIMITS, choices=Choices(order=ScheduleChoice("dualpipe")))
    assert predict(problem(4), result.plan) == result.plan.predicted
    assert result.bound <= result.cost
