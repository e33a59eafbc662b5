import csv
from itertools import pairwise, permutations, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples, slow_after

from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.forms.models import Convex
from stagewright.formulations.pipelines.jobshop import (
    LOAD,
    LONGEST_JOB,
    ByDisjunctions,
    JobShop,
    JobShopByIntervals,
    JobShopSchedule,
    static_bound,
)
from stagewright.formulations.pipelines.jobshop_text import parse_jobshop
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.solvers.backends.backend import BACKENDS, solve
from stagewright.solvers.pipelines.jobshop import RULES, dispatch, solve_jobshop

DATA = Path(__file__).parents[3] / "shared" / "data" / "jobshop"
LIMITS = Limits(seconds=30, threads=2)

FT06 = """
# Fisher and Thompson (1963), 6 jobs on 6 machines
6 6
2 1  0 3  1 6  3 7  5 3  4 6
1 8  2 5  4 10 5 10 0 10 3 4
2 5  3 4  5 8  0 9  1 1  4 7
1 5  0 5  2 5  3 3  4 8  5 9   # a comment
2 9  1 3  4 5  5 4  0 3  3 1

1 3  3 3  5 9  0 10 4 4  2 1
"""

# Two jobs that cross: machine 0 is busy for 7 in any order.
CROSSING = JobShop((((0, 3), (1, 2)), ((1, 2), (0, 4))))
# A job that comes back to machine 0, and one of a single step.
RETURNING = JobShop((((0, 2), (1, 5), (0, 1)), ((0, 4),)))


def brute_force(problem):
    """The best makespan over every choice of machines, and every order on every machine."""
    flat = product(*(choice for steps in problem.choices for choice in steps))
    return min(map(best_order, {regrouped(problem, pairs) for pairs in flat}))


def regrouped(problem, pairs):
    """The job shop in which every step is on the machine of its pair."""
    rest = iter(pairs)
    return JobShop(tuple(tuple(next(rest) for _ in steps) for steps in problem.jobs))


def best_order(problem):
    steps = [(j, k) for j, job in enumerate(problem.jobs) for k in range(len(job))]
    machines = sorted({problem.jobs[j][k][0] for j, k in steps})
    orders = [
        list(permutations(step for step in steps if problem.jobs[step[0]][step[1]][0] == machine))
        for machine in machines
    ]
    lengths = (longest_path(problem, steps, chosen) for chosen in product(*orders))
    return min(length for length in lengths if length is not None)


def longest_path(problem, steps, orders):
    before = {step: [] for step in steps}
    for j, k in steps:
        if k > 0:
            before[j, k].append((j, k - 1))
    for order in orders:
        for one, other in pairwise(order):
            before[other].append(one)
    ends = {}
    while len(ends) < len(steps):
        free = [s for s in steps if s not in ends and all(b in ends for b in before[s])]
        if not free:
            return None
        for j, k in free:
            start = max((ends[b] for b in before[j, k]), default=0)
            ends[j, k] = start + problem.jobs[j][k][1]
    return max(ends.values())


shops = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=3),
    min_size=1,
    max_size=3,
).map(lambda jobs: JobShop(tuple(map(tuple, jobs))))

choices = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 9)),
    min_size=1,
    max_size=2,
    unique_by=lambda it: it[0],
)
flexible_shops = st.lists(
    st.lists(choices.map(tuple), min_size=1, max_size=3), min_size=1, max_size=2
).map(lambda jobs: JobShop(tuple(map(tuple, jobs))))
FLEXIBLE = JobShop(((((0, 3), (1, 5)), ((1, 2),)), (((0, 4),),)))


# The problem


def test_evaluate_gives_the_makespan():
    assert CROSSING.evaluate(((0, 3), (0, 3))) == 7
    assert RETURNING.evaluate(((0, 2, 7), (2,))) == 8


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (((0, 2), (0, 3)), "job 0, step 1 starts at 2, ready at 3"),
        (((0, 3), (0, 2)), "machine 0: job 1, step 1 starts before job 0, step 0 ends"),
        (((-1, 3), (0, 3)), "job 0, step 0 starts at -1, ready at 0"),
        (((0, 3), (0,)), "one start time per step"),
        (((0, 3),), "one start time per step"),
    ],
)
def test_evaluate_names_the_broken_rule(starts, message):
    with pytest.raises(InvalidPlan, match=message):
        CROSSING.evaluate(starts)


@pytest.mark.parametrize(
    ("starts", "machines", "message"),
    [
        (((0, 3), (3,)), None, "a machine for every step"),
        (((0, 3), (3,)), ((0, 1),), "one start time per step, and one machine"),
        (((0, 3), (3,)), ((2, 1), (0,)), "job 0, step 0 is on machine 2, may be: 0, 1"),
        (((0, 3), (2,)), ((0, 1), (0,)), "machine 0: job 1, step 0 starts before job 0"),
        (((0, 3), (0,)), ((1, 1), (0,)), "job 0, step 1 starts at 3, ready at 5"),
    ],
)
def test_evaluate_names_the_broken_rule_of_a_choice(starts, machines, message):
    assert FLEXIBLE.evaluate(((0, 5), (0,)), ((1, 1), (0,))) == 7
    with pytest.raises(InvalidPlan, match=message):
        FLEXIBLE.evaluate(starts, machines)


def test_a_step_without_duration_may_not_lie_inside_another():
    problem = JobShop((((0, 4),), ((0, 0),)))
    assert problem.evaluate(((0,), (4,))) == 4
    with pytest.raises(InvalidPlan, match="machine 0"):
        problem.evaluate(((0,), (2,)))


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ((), "at least one job"),
        (((),), "job 0 needs at least one step"),
        ((((0, 1), (1, -2)),), "job 0, step 1: .* got 1, -2"),
        ((((0, 2**53), (1, 1)),), "add up to"),
        (((((0, 1), (1, 2**53)), (1, 1)),), "add up to"),
        (((((0, 1), (0, 2)),),), "job 0, step 0 has machine 0 twice"),
        ((((),),), "job 0, step 0 needs a machine"),
    ],
)
def test_bad_shops_are_refused(jobs, message):
    with pytest.raises(InputError, match=message):
        JobShop(jobs)


# The text format


def test_parse_reads_comments_and_blank_lines():
    problem = parse_jobshop(FT06, "ft06.txt")
    assert len(problem.jobs) == 6
    assert problem.jobs[3] == ((1, 5), (0, 5), (2, 5), (3, 3), (4, 8), (5, 9))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.txt: empty"),
        ("# only a comment\n", "x.txt: empty"),
        ("2\n0 1\n", "line 1: expected the numbers of jobs and machines, got '2'"),
        ("0 3\n", "line 1: expected the numbers of jobs and machines"),
        ("2 x\n", "line 1: 'x' is not an integer"),
        ("2 1\n0 1\n", "line 2: the first line announces 2 jobs, the file has 1"),
        ("1 1\n0 1\n0 1\n", "line 3: the first line announces 1 jobs, the file has 2"),
        ("# c\n1 2\n\n0 1 1\n", "line 4: expected 2 pairs of machine and duration, got 3 numbers"),
        ("1 2\n0 1 2 1\n", r"line 2: machine 2 is not in 0 \.\.\. 1"),
        ("1 2\n0 1 -1 1\n", "line 2: machine -1"),
        ("1 2\n0 1 1 -5\n", "line 2: duration -5 is negative"),
        ("1 2\n0 1 1 2.5\n", "line 2: '2.5' is not an integer"),
        ("1 1\n0 9007199254740993\n", "x.txt: the durations add up to"),
        ("2 2 1 2 7 7\nTimes\n3 2\n", "line 3: 2 jobs have 2 lines of durations and 2 of machines"),
        ("1 2 1 2 7 7\n3 2\n1\n", "line 3: expected 2 numbers, got 1"),
        ("1 2 1 2 7 7\n3 2\n1 3\n", r"line 3: machine 3 is not in 1 \.\.\. 2"),
        ("1 2 1\n1 2 1 3\n", "line 2: ends before the last step's machines and durations"),
        ("1 2 1\n1 1 1 3 4\n", "line 2: 1 numbers after the last step"),
        ("1 2 1\n1 1 0 3\n", r"line 2: machine 0 is not in 1 \.\.\. 2"),
        ("1 2 1\n1 0\n", "x.txt: job 0, step 0 needs a machine"),
        ("1 2 1\n-1\n", "x.txt: job 0 needs at least one step"),
        ("instance a\n1 1\n0 1\ninstance b\n1 1\n0 1\n", "2 instances, .* --instance: a, b"),
        ("instance a\n1 1\n0 1\ninstance a\n", "line 4: a second instance 'a'"),
    ],
)
def test_every_fault_is_one_line_with_its_place(text, message):
    with pytest.raises(InputError, match=message) as caught:
        parse_jobshop(text, "x.txt")
    assert str(caught.value).startswith("x.txt")
    assert "\n" not in str(caught.value)


TINY = (((0, 3), (1, 2)), ((1, 2), (0, 4)))
MATRICES = "3 2\n2 4\nMachines\n1 2\n2 1\n"
TAILLARD = "Nb of jobs, Nb of Machines, Time seed, Machine seed, Upper bound, Lower bound :\n"
COLLECTION = """ This file contains 2 instances, of 6 6 and more.
 +++++++++
 instance ft06
 +++++++++
 Fisher and Thompson 6x6 instance, alternate name (mt06)
{ft06}
 +++++++++
 instance tiny
 +++++++++
 a tiny 2x2 one
 2 2
 0 3 1 2
 1 2 0 4
 +++ EOF +++
"""


@pytest.mark.parametrize(
    "text",
    [
        "2 2\n0 3 1 2\n1 2 0 4\n",
        f"{TAILLARD}  2 2 840612802 398197754 7 7\nTimes\n{MATRICES}",
        f"2 2 840612802 398197754 7 7\nTimes\n{MATRICES}",
        f"2 2\nTimes\n{MATRICES}",
        "2 2\n3 2\n2 4\n1 2\n2 1\n",
        "2 2\n3 2\n2 4\n0 1\n1 0\n",
        "instance tiny\n+++\n of two jobs\n 2 2\n0 3 1 2\n1 2 0 4\n",
    ],
    ids=["pairs", "Taillard", "seeds", "named", "matrices", "from 0", "OR-Library"],
)
def test_every_layout_of_one_shop_is_read(text):
    assert parse_jobshop(text, "x.txt").jobs == TINY


def test_an_instance_of_a_collection_is_chosen():
    text = COLLECTION.format(ft06=FT06.strip())
    assert parse_jobshop(text, "x.txt", "tiny").jobs == TINY
    assert parse_jobshop(text, "x.txt", "ft06") == parse_jobshop(FT06, "ft06")
    several = (
        f"{TAILLARD}2 2 1 2 7 7\nTimes\n{MATRICES}{TAILLARD}1 1 1 2 7 7\nTimes\n5\nMachines\n1\n"
    )
    assert parse_jobshop(several, "x.txt", "1").jobs == TINY
    assert parse_jobshop(several, "x.txt", "2").jobs == (((0, 5),),)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("x.fjs", "2 2\n2 2 1 3 2 5 1 2 2\n1 1 1 4\n"),
        ("x.txt", "2 2 1.3\n2 2 1 3 2 5 1 2 2\n1 1 1 4\n"),
    ],
)
def test_flexible_shops_are_read(place, text):
    assert parse_jobshop(text, place).choices == FLEXIBLE.choices


# The formulations


def answers(problem):
    for name, backend in BACKENDS.items():
        if backend.accepts is Convex:
            continue
        intervals = JobShopByIntervals(problem)
        model = intervals if name == "cp-sat" else ByDisjunctions(problem)
        assert isinstance(model.apply(), backend.accepts)
        answer = solve(model.apply(), name, LIMITS)
        assert answer.status is Status.OPTIMAL
        assert answer.values is not None
        yield answer, problem.evaluate(*model.invert(answer.values))


@pytest.mark.parametrize(("problem", "optimum"), [(CROSSING, 7), (RETURNING, 8)])
def test_every_backend_reaches_the_known_optimum(problem, optimum):
    assert brute_force(problem) == optimum
    for answer, makespan in answers(problem):
        assert makespan == optimum
        assert answer.objective == pytest.approx(optimum)
        assert answer.bound == pytest.approx(optimum)


@examples(12, derandomize=True)
@given(shops)
def test_every_backend_equals_brute_force(problem):
    optimum = brute_force(problem)
    for _, makespan in answers(problem):
        assert makespan == optimum


def test_ft06_by_disjunctions():
    model = ByDisjunctions(parse_jobshop(FT06, "ft06"))
    answer = solve(model.apply(), "highs", Limits(seconds=60))
    assert answer.objective == pytest.approx(55)


def test_an_incumbent_is_hint_and_horizon():
    known = JobShopSchedule(((4, 7), (0, 7 + 2)), ((0, 1), (1, 0)))
    form = JobShopByIntervals(CROSSING, known).apply()
    assert form.hint is not None
    assert form.hint.tolist() == [4, 7, 0, 9]
    assert form.horizon == 13
    assert form.lower_bound == 7


def test_an_incumbent_that_breaks_a_rule_is_refused():
    with pytest.raises(InvalidPlan):
        JobShopByIntervals(CROSSING, JobShopSchedule(((0, 0), (0, 0)), ((0, 1), (1, 0)))).apply()


# The assembly


@examples(60, derandomize=True)
@given(shops, st.sampled_from(RULES))
def test_rules_make_schedules_no_better_than_the_optimum(problem, rule):
    makespan = problem.evaluate(*dispatch(problem, rule))
    assert brute_force(problem) <= makespan <= problem.total
    assert JobShopByIntervals(problem).apply().lower_bound <= brute_force(problem)


@examples(40, derandomize=True)
@given(flexible_shops, st.sampled_from(RULES))
def test_flexible_shops_equal_every_choice_and_order(problem, rule):
    optimum, result = brute_force(problem), solve_jobshop(problem, LIMITS)
    assert problem.evaluate(*dispatch(problem, rule)) >= optimum
    assert static_bound(problem)[0] <= optimum
    assert (result.status, result.cost, result.bound) == (Status.OPTIMAL, optimum, optimum)
    assert problem.evaluate(*result.schedule) == optimum


@pytest.mark.parametrize(
    ("problem", "bound"),
    [
        (CROSSING, (7, "one-machine relaxation")),
        (JobShop(((((0, 3), (1, 5)), ((0, 2), (1, 2))),)), (5, LONGEST_JOB)),
        (JobShop(((((0, 2), (1, 2)),),) * 5), (5, LOAD)),
    ],
)
def test_a_bound_is_named_after_its_argument(problem, bound):
    assert static_bound(problem) == bound


def test_a_choice_of_machines_needs_cp_sat():
    with pytest.raises(InputError, match="backend 'highs' takes no choice of machines; use cp-sat"):
        solve_jobshop(FLEXIBLE, Limits(seconds=1, backend="highs"))


@examples(20, derandomize=True)
@given(shops)
def test_solve_proves_the_optimum(problem):
    result = solve_jobshop(problem, LIMITS)
    assert (result.status, result.gap) == (Status.OPTIMAL, 0)
    assert result.schedule is not None
    cost = problem.evaluate(*result.schedule)
    assert result.cost == result.bound == brute_force(problem) == cost


@pytest.mark.parametrize("backend", ["highs", "pulp-cbc", "cvxpy"])
def test_solve_proves_the_optimum_by_any_backend(backend):
    shop = JobShop((((0, 3), (1, 2), (2, 2)), ((0, 2), (2, 1), (1, 4)), ((1, 4), (2, 3), (0, 1))))
    result = solve_jobshop(shop, Limits(seconds=30, backend=backend))
    assert result.status is Status.OPTIMAL
    assert result.cost == solve_jobshop(shop, Limits(seconds=30)).cost == 11


def test_ft06():
    result = solve_jobshop(parse_jobshop(FT06, "ft06"), Limits(seconds=30, threads=1))
    assert (result.status, result.cost, result.bound) == (Status.OPTIMAL, 55, 55)
    assert result.proved_by == "CP-SAT"


def test_no_time_is_no_answer():
    result = solve_jobshop(parse_jobshop(FT06, "ft06"), Limits(seconds=0.0))
    assert (result.status, result.schedule, result.cost) == (Status.NO_ANSWER, None, None)
    assert 0 < result.bound <= 55


def test_durations_of_zero():
    result = solve_jobshop(JobShop((((0, 0),), ((0, 0), (1, 0)))), LIMITS)
    assert (result.status, result.cost, result.gap) == (Status.OPTIMAL, 0, 0)


@pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is not at hand")
@pytest.mark.parametrize(
    "name", slow_after(7, ["ft06", "la01", "la02", "la05", "la10", "la14", "la17", "ft20"])
)
def test_the_literature_optimum_is_proved(name):
    with (DATA / "optima.csv").open() as file:
        optima = {row["name"]: int(row["optimum"]) for row in csv.DictReader(file)}
    problem = parse_jobshop((DATA / f"{name}.txt").read_text(), name)
    result = solve_jobshop(problem, Limits(seconds=60, threads=2))
    assert (result.status, result.cost) == (Status.OPTIMAL, optima[name])
