"""1F1B*: groups, the pattern, Proposition 1, and the period that nothing undercuts (MadPipe 4.1).

The numbers that it is held against come from enumerations in `periodic_oracles`.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf, isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st
from periodic_oracles import (
    Line,
    brute_force_contiguous,
    brute_force_period,
    faults,
    first_free,
    in_flight,
    least_1f1b,
    naive_check,
    naive_groups,
    pattern_line,
    peak,
)
from profiles import examples

from stagewright.formulations.checking.check import check
from stagewright.formulations.patterns.one_f_one_b import (
    groups,
    least_period,
    one_f_one_b_star,
    period_bound,
)
from stagewright.formulations.patterns.pattern import Pattern, PatternProblem
from stagewright.formulations.patterns.pattern_problems import pattern_problem
from stagewright.formulations.plans.assembly import assemble_pattern
from stagewright.formulations.plans.memory import Kept
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost

AMPLE = 1e3
FREE = Kept(1.0)


def alone(
    forward: Sequence[float],
    backward: Sequence[float],
    there: Sequence[float] = (),
    back: Sequence[float] = (),
    microbatches: int = 64,
) -> PatternProblem:
    """Stages with a device each, a byte per microbatch and ample memory."""
    count = len(forward)
    none = (0.0,) * (count - 1)
    return PatternProblem(
        forward=tuple(forward),
        backward=tuple(backward),
        there=tuple(there) or none,
        back=tuple(back) or none,
        devices=tuple(range(count)),
        kept=(FREE,) * count,
        room_bytes=(AMPLE,) * count,
        reduce=(0.0,) * count,
        microbatches=microbatches,
    )


def items_of(problem: PatternProblem) -> list[float]:
    """Stages and links by turns, forth and back."""
    stages = [f + b for f, b in zip(problem.forward, problem.backward, strict=True)]
    links = [f + b for f, b in zip(problem.there, problem.back, strict=True)]
    return [one for pair in zip(stages, [*links, 0.0], strict=True) for one in pair][:-1]


@st.composite
def pattern_problems(
    draw: st.DrawFn, devices: Sequence[Sequence[int]], reduced: bool = False, stashed: bool = False
) -> PatternProblem:
    """Whole seconds and bytes, few of either, so that ties and tight memory are common.

    If ``stashed``, weights change after every microbatch.
    """
    where = draw(st.sampled_from(devices))
    count = len(where)

    def transfers() -> tuple[float, ...]:
        """Shorter or longer than their gradients', which take time where they do."""
        return tuple(x and float(draw(st.integers(1, 3))) for x in there)

    def several(least: int, most: int, number: int) -> tuple[float, ...]:
        return tuple(float(draw(st.integers(least, most))) for _ in range(number))

    links = [a != b for a, b in pairwise(where)]
    there = tuple(x * used for x, used in zip(several(0, 3, count - 1), links, strict=True))
    kept = zip(several(0, 3, count), several(0, 2, count), strict=True)
    return PatternProblem(
        forward=several(1, 4, count),
        backward=several(1, 4, count),
        there=there,
        back=transfers(),
        devices=tuple(where),
        kept=tuple(Kept(*one) for one in kept),
        room_bytes=several(2, 9, max(where) + 1),
        reduce=several(0, 5, count) if reduced else (0.0,) * count,
        microbatches=draw(st.integers(1, 5)),
        version_bytes=several(0, 3, count) if stashed else (),
        follows_first_stage=stashed and draw(st.booleans()),
    )


ALONE = ((0,), (0, 1), (0, 1), (0, 1, 2), (0, 1, 2))
SHARED = ((0, 0), (0, 1, 1), (0, 0, 1), (0, 0, 0))


# --- Drawn examples --------------------------------------------------------------------------

THREE_GROUPS = """
stage 0  F F B B B B . .
stage 1  B B F F . . . .
stage 2  . . . . F B B B
stage 3  . B B B . F . .
stage 4  B . . . . . F B
"""


def drawn(line: Line, columns: int) -> str:
    """A row per stage, a column per second of a period."""
    rows = []
    for s in range(line.stages):
        row = ["."] * columns
        for kind in "FB":
            op = line.ops[s, kind]
            for second in range(int(op.start), int(op.start + op.seconds)):
                row[second % columns] = kind
        rows.append(f"stage {s}  {' '.join(row)}")
    return "\n" + "\n".join(rows) + "\n"


def test_three_groups_as_in_figure_3() -> None:
    """Groups {4, 3}, {2, 1}, {0}: in each, backwards follow the forwards without a gap."""
    problem = alone((2, 2, 1, 1, 1), (4, 2, 3, 3, 2))
    pattern = one_f_one_b_star(problem, 8.0)
    assert groups(problem, 8.0) == (3, 2, 2, 1, 1)
    assert drawn(pattern_line(problem, pattern), 8) == THREE_GROUPS
    computed = [x for x, job in zip(pattern.starts, problem.jobs, strict=True) if job.seconds]
    assert computed == [0, 2, 4, 5, 6, 7, 9, 13, 16, 18]  # 0F, ..., 4F, 4B, ..., 0B


def test_a_transfer_is_an_item_like_a_stage() -> None:
    """Stages of 3 s and links of 2 s: in 4 s each is a group of its own, in 5 s two are one."""
    problem = alone((1, 1, 1), (2, 2, 2), (1, 1), (1, 1))
    assert groups(problem, 4.0) == (5, 3, 1)
    assert groups(problem, 5.0) == (3, 2, 1)
    assert groups(problem, 8.0) == (2, 1, 1)
    assert groups(problem, 13.0) == (1, 1, 1)


# --- The pattern -----------------------------------------------------------------------------


@st.composite
def with_period(
    draw: st.DrawFn, devices: Sequence[Sequence[int]] = ALONE
) -> tuple[PatternProblem, float]:
    """Stages alone on their devices with ample memory, and a period in which every item fits.

    Sums of consecutive items, at which groups change, are common.
    """
    drawn_problem = draw(pattern_problems(devices))
    room = (AMPLE,) * len(drawn_problem.room_bytes)
    problem = replace(drawn_problem, kept=(FREE,) * len(room), room_bytes=room, microbatches=8)
    items = items_of(problem)
    sums = [sum(items[i:j]) for j in range(len(items) + 1) for i in range(j)]
    least = max(items)
    period = draw(st.sampled_from([t for t in sums if t >= least]))
    return problem, max(least, period + draw(st.sampled_from([0.0, 0.0, 0.5, -0.5])))


@examples(100)
@given(with_period(((0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3, 4))))
def test_the_pattern_is_valid_and_keeps_what_the_groups_say(
    given_problem: tuple[PatternProblem, float],
) -> None:
    problem, period = given_problem
    expected = naive_groups(items_of(problem), period)
    assert expected is not None
    assert list(groups(problem, period)) == expected[::2]
    pattern = one_f_one_b_star(problem, period)
    assert problem.evaluate(pattern) == period
    line = pattern_line(problem, pattern)
    assert faults(line) == []
    assert [in_flight(line, s) for s in range(line.stages)] == expected[::2]


@examples(40)
@given(with_period())
def test_no_pattern_of_the_period_keeps_fewer(given_problem: tuple[PatternProblem, float]) -> None:
    """Proposition 1, stage by stage, by all patterns that there are."""
    problem, period = given_problem
    for s, kept in enumerate(groups(problem, period)):
        room = [AMPLE] * len(problem.room_bytes)
        room[s] = kept
        assert brute_force_period(replace(problem, room_bytes=tuple(room))) <= period
        room[s] = kept - 1.0
        assert brute_force_period(replace(problem, room_bytes=tuple(room))) > period


@pytest.mark.parametrize(("forward", "backward"), [(0.0, 1.0), (1.0, 0.0)])
def test_what_takes_no_time_is_in_nobodys_way(forward: float, backward: float) -> None:
    problem = alone((forward,), (backward,))
    pattern = one_f_one_b_star(problem, 1.0)
    assert faults(pattern_line(problem, pattern)) == []
    assert problem.evaluate(pattern) == 1.0


# --- The least period ------------------------------------------------------------------------


@examples(100)
@given(pattern_problems(ALONE) | pattern_problems(ALONE, stashed=True))
def test_the_bound_is_the_least_period_where_every_stage_is_alone(problem: PatternProblem) -> None:
    least = brute_force_period(problem)
    assert period_bound(problem) == pytest.approx(least)
    assert least_period(problem) == pytest.approx(least)
    if isfinite(least):
        pattern = one_f_one_b_star(problem, least_period(problem))
        assert problem.evaluate(pattern) == pattern.period
        assert faults(pattern_line(problem, pattern)) == []


@examples(100)
@given(pattern_problems(ALONE, reduced=True))
def test_all_reduces_are_waited_for(problem: PatternProblem) -> None:
    least = brute_force_period(problem)
    assert least_period(problem) == pytest.approx(least)
    assert period_bound(problem) <= least * (1 + 1e-9)


@examples(60)
@given(pattern_problems(SHARED, reduced=True) | pattern_problems(SHARED, stashed=True))
def test_no_pattern_of_stages_that_share_devices_undercuts_the_bound(
    problem: PatternProblem,
) -> None:
    assert period_bound(problem) <= brute_force_period(problem) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("room", "least"), [(5.0, 3.0), (4.0, 5.0), (3.0, 5.0), (2.0, 8.0), (1.0, 13.0), (0.0, inf)]
)
def test_memory_that_binds(room: float, least: float) -> None:
    """Stages of 3 s and links of 2 s, where stage 0 keeps as many microbatches as fit.

    4 are of no use: 5 s are the first period at which it has fewer than 5.
    """
    ample = alone((1, 1, 1), (2, 2, 2), (1, 1), (1, 1))
    problem = replace(ample, room_bytes=(room, AMPLE, AMPLE))
    assert period_bound(problem) == least_period(problem) == brute_force_period(problem) == least


def test_two_versions_that_bind() -> None:
    """With one microbatch in an iteration none waits longer than two periods for its backward."""
    problem = alone((1, 1, 1), (2, 2, 2), (1, 1), (1, 1), microbatches=1)
    assert groups(problem, 8.0) == (2, 1, 1)
    assert period_bound(problem) == least_period(problem) == brute_force_period(problem) == 8.0


def chain_problem(seconds: Sequence[int], saved: int, devices: int, room: int) -> PipelineProblem:
    """Layers that keep ``saved`` megabytes, devices with so many of them; transfers take 2 s."""
    layers = tuple(
        Layer(f"l{i}", 0.0, (LayerCost(840, float(t), 1e6 * saved, 1e6, 2.0 * t),))
        for i, t in enumerate(seconds)
    )
    cluster = uniform_servers(1, devices, Link(1e6), memory_bytes=1e6 * room)
    return PipelineProblem(Chain("chain", "test", 840, layers, 0.0), cluster, 4)


@examples(25)
@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(8, 24),
)
def test_contiguous_allocations(seconds: list[int], saved: int, devices: int, room: int) -> None:
    """Over all partitions the least period is that of the enumeration, and its plan is valid."""
    problem = chain_problem(seconds, saved, devices, room)
    best = (inf, list[Stage]())
    for stages in partitions(len(seconds), devices):
        scheduling = pattern_problem(problem, stages)
        period = least_period(scheduling)
        assert period == pytest.approx(brute_force_period(scheduling))
        best = min(best, (period, stages), key=lambda one: one[0])
    period, stages = best
    assert period == pytest.approx(brute_force_contiguous(problem, devices))
    if isfinite(period):
        pattern = one_f_one_b_star(pattern_problem(problem, stages), period)
        plan = assemble_pattern(problem, "test", stages, pattern)
        assert naive_check(problem, plan) == []
        assert check(problem, plan) == ()
        assert plan.predicted is not None
        assert plan.predicted.iteration_seconds == pytest.approx(4 * period)


def partitions(layers: int, devices: int) -> list[list[Stage]]:
    """All ways to cut the layers, a device for each part."""
    found = []
    for chosen in range(2 ** (layers - 1)):
        cuts = [i for i in range(1, layers) if chosen >> (i - 1) & 1]
        if len(cuts) < devices:
            parts = pairwise([0, *cuts, layers])
            found.append([Stage(part, (f"s0g{v}",)) for v, part in enumerate(parts)])
    return found


# --- What a pattern must be ---


@st.composite
def patterns(draw: st.DrawFn) -> tuple[PatternProblem, Pattern]:
    """One operation after the other where it is free, then perhaps one of them elsewhere."""
    problem = draw(pattern_problems((*ALONE, *SHARED, (0, 1, 0), (0, 1, 2, 0)), reduced=True))
    period = float(draw(st.integers(4, 24)))
    taken: dict[int, list[tuple[float, float]]] = {}
    starts, ready = [], 0.0
    for job in problem.jobs:
        busy = taken.setdefault(job.resource, [])
        wait = draw(st.sampled_from([0.0, 0.0, 0.5, 2.0]))
        start = first_free(busy, ready + wait, job.seconds, period)
        start = ready if start is None else start
        busy.append((start, job.seconds))
        starts.append(start)
        ready = start + job.seconds
    if draw(st.booleans()):
        j = draw(st.integers(0, len(starts) - 1))
        starts[j] = max(0.0, starts[j] + draw(st.sampled_from([-1.0, -0.5, 0.5, period])))
    return problem, Pattern(period, tuple(starts))


@examples(150)
@given(patterns())
def test_evaluate_finds_something_where_there_is_something(
    given_pattern: tuple[PatternProblem, Pattern],
) -> None:
    problem, pattern = given_pattern
    line = pattern_line(problem, pattern)
    found = faults(line)
    if found:
        with pytest.raises(InvalidPlan):
            problem.evaluate(pattern)
    else:
        assert problem.evaluate(pattern) == pattern.period
        for device in range(len(problem.room_bytes)):
            assert problem.peak_bytes(pattern, device) == peak(line, device)


# --- The oracles -----------------------------------------------------------------------------


@examples(60)
@given(pattern_problems(ALONE))
def test_oracle_by_items_equals_oracle_by_turns(problem: PatternProblem) -> None:
    most = []
    for kept, room in zip(problem.kept, problem.room_bytes, strict=True):
        fitting = [
            g for g in range(12) if g * kept.saved_bytes + kept.working_bytes * (g > 0) <= room
        ]
        most += [min(max(fitting), problem.microbatches + 1), inf]
    assert brute_force_period(problem) == pytest.approx(least_1f1b(items_of(problem), most[:-1]))


def test_oracle_of_stages_that_share_a_device() -> None:
    """Room for two: 2F must wait for 0B of the microbatch before.

    From 2F to the end of 0B are 1 + 2 + 2 + 2 s, though the device works for 6 s only.
    """
    problem = PatternProblem(
        (1.0, 1.0, 1.0), (2.0, 2.0, 2.0), (0.0, 0.0), (0.0, 0.0), (0, 1, 0), (FREE,) * 3,
        (2.0, AMPLE), (0.0,) * 3, 64,
    )  # fmt: skip
    assert brute_force_period(problem) == 7.0
    assert brute_force_period(replace(problem, room_bytes=(3.0, AMPLE))) == 6.0
