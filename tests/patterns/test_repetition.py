"""Repetitions: enumeration, MadPipe's patterns, known optima, and rejected ones."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from profiles import examples
from repetition_oracle import is_possible

from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.patterns.block_placements import (
    k_shape,
    m_shape,
    nn_shape,
    v_shape,
    x_shape,
)
from stagewright.formulations.patterns.pattern import PatternProblem
from stagewright.formulations.patterns.repetition import (
    Holding,
    Repetition,
    RepetitionProblem,
    Room,
)
from stagewright.formulations.patterns.repetition_bounds import pace_bounds
from stagewright.formulations.plans.memory import Kept
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.solvers.patterns.pattern import best_pattern
from stagewright.solvers.patterns.repetition import best_repetition

LIMITS = Limits(seconds=120.0)
MOST_STARTS = 200_000  # what is enumerated in a second


@st.composite
def tiny(draw, most_blocks=4):
    """Up to four blocks of 1 to 3 ticks on two resources, any order, and a room on resource 0."""
    n = draw(st.integers(2, most_blocks))
    seconds = draw(st.lists(st.integers(1, 3), min_size=n, max_size=n))
    resources = draw(st.lists(st.sampled_from([(0,), (0,), (1,), (0, 1)]), min_size=n, max_size=n))
    pairs = [(i, j) for j in range(n) for i in range(j)]
    before = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=len(pairs)))
    plain = RepetitionProblem(
        tuple(f"b{i}" for i in range(n)), tuple(map(float, seconds)), tuple(resources),
        tuple(sorted(before)),
    )  # fmt: skip
    on_first = [i for i in range(n) if 0 in resources[i]]
    possible = [(i, j) for i in on_first for j in on_first if plain.path_seconds(i, j) is not None]
    if not possible:
        return plain
    held = draw(st.lists(st.sampled_from(possible), unique=True, max_size=3))
    amounts = draw(st.lists(st.integers(1, 3), min_size=len(held), max_size=len(held)))
    holdings = tuple(Holding(*pair, float(a)) for pair, a in zip(held, amounts, strict=True))
    capacity = draw(st.integers(1, 6))
    return replace(plain, rooms=(Room("device 0", float(capacity), holdings),))


def scaled(problem, factor):
    return replace(problem, seconds=tuple(factor * one for one in problem.seconds))


@examples(200)
@given(tiny())
def test_the_least_period_of_one_microbatch_equals_enumeration(problem):
    _compare(problem, 1)


@examples(60)
@given(tiny(most_blocks=3))
def test_the_least_period_of_two_microbatches_equals_enumeration(problem):
    _compare(problem, 2)


def _compare(problem, length):
    """The answer's period is possible in fine enough ticks, and one tick less is not."""
    answer = best_repetition(problem, LIMITS, (length,))
    total = length * int(sum(problem.seconds))
    copies = length * len(problem.seconds)
    if answer.status is Status.INFEASIBLE:
        assume((2 * total) ** (copies - 1) <= MOST_STARTS)
        assert not is_possible(problem, length, total)
        return
    assert answer.status is Status.OPTIMAL
    assert answer.pace == problem.evaluate(answer.repetition) == answer.bound
    period = Fraction(answer.pace * length).limit_denominator(total)
    fine = scaled(problem, period.denominator)
    assume((2 * period.numerator) ** (copies - 1) <= MOST_STARTS)
    assert is_possible(fine, length, period.numerator)
    assert not is_possible(fine, length, period.numerator - 1)
    assert all(one.seconds <= answer.pace * (1 + 1e-9) for one in pace_bounds(problem))


def chain(forward, backward, memory):
    """A stage per device, whole backwards, and at most ``memory`` microbatches of a stage."""
    stages, last = len(forward), 2 * len(forward) - 1
    return RepetitionProblem(
        tuple(f"b{i}" for i in range(2 * stages)),
        (*forward, *reversed(backward)),
        tuple((s,) for s in (*range(stages), *reversed(range(stages)))),
        tuple((i, i + 1) for i in range(last)),
        tuple(
            Room(f"device {s}", float(limit), (Holding(s, last - s, 1.0),))
            for s, limit in enumerate(memory)
        ),
    )


@pytest.mark.parametrize("stages", [2, 3, 4, 6])
def test_1f1b_reaches_the_load_with_one_microbatch_per_stage(stages):
    """1F1B: period F + B, and stage s keeps S - s microbatches (MadPipe section 4.1)."""
    ones, twos = (1.0,) * stages, (2.0,) * stages
    answer = best_repetition(chain(ones, twos, range(stages, 0, -1)), LIMITS)
    assert (answer.pace, answer.is_general) == (3.0, True)
    for s in range(stages - 1):  # one microbatch less anywhere is too few for any schedule
        less = [stages - r - (r == s) for r in range(stages)]
        assert pace_bounds(chain(ones, twos, less))[0].seconds > 3


def test_longer_repetitions_need_less_memory():
    """Three microbatches, one after the other, pass four stages of 4 s in 16 s. For k = 1 two of
    the stages must be in a group (MadPipe, Proposition 1): 8 s."""
    problem = chain((1.0,) * 4, (3.0,) * 4, (3,) * 4)
    one = best_repetition(problem, LIMITS, (1,))
    assert (one.pace, one.bound, one.status, one.is_general) == (8, 8, Status.OPTIMAL, False)
    more = best_repetition(problem, LIMITS, (1, 2, 3))
    assert (more.pace, more.is_general) == (pytest.approx(16 / 3), True)
    assert [one.length for one in more.bounds] == [1, 2, 3]


TIMES = st.lists(st.integers(1, 9), min_size=2, max_size=4)


@examples(25)
@given(st.data())
def test_equals_madpipes_patterns(data):
    """Chains with whole backwards, k = 1: the pattern of MadPipe's integer program."""
    forward = data.draw(TIMES)
    size = len(forward)
    backward, saved = (
        data.draw(st.lists(st.integers(1, 9), min_size=size, max_size=size)) for _ in range(2)
    )
    devices = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    devices = [sorted(set(devices)).index(d) for d in devices]
    count = 1 + max(devices)
    least = [sum(a for a, d in zip(saved, devices, strict=True) if d == v) for v in range(count)]
    room = [one + data.draw(st.integers(0, 20)) for one in least]
    zero = (0.0,) * (size - 1)
    pattern = PatternProblem(
        tuple(map(float, forward)), tuple(map(float, backward)), zero, zero, tuple(devices),
        tuple(Kept(float(a), 0.0) for a in saved), tuple(map(float, room)), (0.0,) * size, 100,
    )  # fmt: skip
    last = 2 * size - 1
    problem = RepetitionProblem(
        tuple(f"b{i}" for i in range(2 * size)),
        (*pattern.forward, *reversed(pattern.backward)),
        tuple((d,) for d in (*devices, *reversed(devices))),
        tuple((i, i + 1) for i in range(last)),
        tuple(
            Room(
                f"device {v}",
                float(room[v]),
                tuple(Holding(s, last - s, float(saved[s])) for s in pattern.stages_on(v)),
            )
            for v in range(count)
        ),
    )
    theirs = best_pattern(pattern, LIMITS)
    ours = best_repetition(problem, LIMITS, (1,))
    assert theirs.status is Status.OPTIMAL
    assert ours.status is Status.OPTIMAL
    assert ours.pace == pytest.approx(theirs.period, rel=1e-5)


@pytest.mark.parametrize(
    ("build", "memory", "pace"),
    [(v_shape, 4, 4), (x_shape, 4, 8), (m_shape, 6, 6), (k_shape, 6, 6), (nn_shape, 6, 8)],
)
def test_tessels_placements_run_without_a_bubble(build, memory, pace):
    """As Tessel's own repetends do with these memories."""
    answer = best_repetition(build(4, float(memory)), LIMITS)
    assert (answer.pace, answer.is_general) == (pace, True)


@examples(50)
@given(st.lists(st.floats(0.1, 3.0), min_size=2, max_size=3), st.floats(1.0, 3.0))
def test_any_times_and_amounts(forward, capacity):
    """Twice the times are twice the period; the bound is below it."""
    problem = chain(forward, forward, (capacity,) * len(forward))
    answer = best_repetition(problem, LIMITS, (1,))
    assert answer.status is Status.OPTIMAL
    assert answer.general.seconds <= answer.pace * (1 + 1e-9)
    twice = best_repetition(scaled(problem, 2.0), LIMITS, (1,))
    assert twice.pace == pytest.approx(2 * answer.pace, rel=1e-5)


ONE = chain((1.0,), (2.0,), (1,))
TWO = chain((1.0,), (2.0,), (2,))


@pytest.mark.parametrize(
    ("problem", "repetition", "message"),
    [
        (ONE, Repetition(3.0, ((0.0,),)), "needs 2 starts"),
        (ONE, Repetition(0.0, ((0.0, 1.0),)), "positive period"),
        (ONE, Repetition(3.0, ((0.0, 0.5),)), "before b0 ends"),
        (ONE, Repetition(2.5, ((0.0, 1.0),)), "runs into"),
        (ONE, Repetition(3.0, ((0.0, 4.0),)), "device 0 holds 2"),
        (TWO, Repetition(6.0, ((0.0, 4.0), (1.0, 3.0))), "runs into"),
    ],
)
def test_wrong_repetitions_are_rejected(problem, repetition, message):
    with pytest.raises(InvalidPlan, match=message):
        problem.evaluate(repetition)


def test_right_repetitions_are_accepted():
    assert ONE.evaluate(Repetition(3.0, ((0.0, 1.0),))) == 3
    assert TWO.evaluate(Repetition(3.0, ((0.0, 4.0),))) == 3
    assert TWO.evaluate(Repetition(6.0, ((0.0, 2.0), (1.0, 4.0)))) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": (1.0, 0.0)}, "b1 must take a positive time"),
        ({"resources": ((), ())}, "occupies a resource"),
        ({"before": ((1, 0),)}, "pairs i < j"),
        ({"names": ("b0",)}, "one name, time and list"),
        ({"before": ()}, "no path"),
        ({"resources": ((0,), (1,))}, "a resource that all its blocks occupy"),
        ({"rooms": (Room("r", 1.0, (Holding(0, 2, 1.0),)),)}, "unknown blocks"),
        ({"rooms": (Room("r", 1.0, (Holding(0, 1, -1.0),)),)}, "an amount of -1"),
    ],
)
def test_wrong_problems_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        replace(ONE, **change)


def test_a_wrong_length_is_refused():
    with pytest.raises(InputError, match="lengths must be at least 1"):
        best_repetition(ONE, LIMITS, (0,))


def test_what_never_fits_is_infeasible():
    answer = best_repetition(chain((1.0,), (2.0,), (0.5,)), LIMITS)
    assert (answer.status, answer.repetition) == (Status.INFEASIBLE, None)
