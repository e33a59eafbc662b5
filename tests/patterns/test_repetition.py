"""Repetitions: enumeration, MadPipe's patterns, known optima, and rejected ones."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from repetition_oracle import is_possible

from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.patterns.repetition import (
    Holding,
    Repetition,
    RepetitionProblem,
    Room,
)
from stagewright.formulations.patterns.repetition_bounds import pace_bounds
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.solvers.patterns.repetition import best_repetition

LIMITS = Limits(seconds=60.0)


@st.composite
def tiny(draw, most_blocks=4):
    """Up to four blocks of 1 to 3 ticks on two resources, any order, and a room on resource 0."""
    n = draw(st.integers(2, most_blocks))
    seconds = draw(st.lists(st.integers(1, 3), min_size=n, max_size=n))
    resources = draw(
        st.lists(st.sampled_from([(0,), (0,), (1,), (0, 1)]), min_size=n, max_size=n)
    )
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
    if answer.status is Status.INFEASIBLE:
        assert not is_possible(problem, length, total)
        return
    assert answer.status is Status.OPTIMAL
    assert answer.pace == problem.evaluate(answer.repetition) == answer.bound
    period = Fraction(answer.pace * length).limit_denominator(total)
    fine = scaled(problem, period.denominator)
    assert is_possible(fine, length, period.numerator)
    assert not is_possible(fine, length, period.numerator - 1)
    assert all(one.seconds <= answer.pace * (1 + 1e-9) for one in pace_bounds(problem))
