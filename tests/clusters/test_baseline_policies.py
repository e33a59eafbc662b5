"""The policies that others are compared with: fixed parts, AlloX, Gandiva's packing."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from strategies_allocation import Case, random_case

from stagewright.formulations.clusters.allocation import AllocationProblem, problem_of, throughput
from stagewright.formulations.clusters.policies import allox, isolated, max_min
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.workloads.jobs import Entity, Job, PairRate, Rate, Throughputs, Workload
from stagewright.graphs.workloads.pool import parse_pool
from stagewright.solvers.clusters.policies import allocate

some = examples(15, derandomize=True)
RATES = (Rate("a", 1, "v100", 4.0), Rate("a", 1, "k80", 1.0), Rate("b", 1, "v100", 3.0),
         Rate("b", 1, "k80", 2.0), Rate("a", 2, "v100", 6.0), Rate("a", 2, "k80", 0.0))  # fmt: skip


def problem(
    jobs: list[tuple[str, float]],
    pool: str = "v100=1,k80=1",
    entities: tuple[Entity, ...] = (),
    **options: bool,
) -> AllocationProblem:
    """Jobs (model, steps) of the models a and b; with entities, of each in turn."""
    names = [entity.name for entity in entities if entity.name != "root"] or [None]
    listed = tuple(
        Job(f"job {n}", model, steps, entity=names[n % len(names)])
        for n, (model, steps) in enumerate(jobs)
    )
    pair = PairRate(("a", "b"), 1, "v100", (3.6, 2.7))
    workload = Workload(listed, Throughputs(RATES, (pair,)), entities)
    return problem_of(workload, parse_pool(pool), **options)


def shares(of: AllocationProblem, policy: str) -> Floats:
    allocation = allocate(of, policy).allocation
    return allocation.dense(len(of), len(of.table.workers))


# Fixed parts.


def test_isolated_jobs_have_equal_parts_and_no_more_than_their_time():
    of = problem([("a", 1.0), ("b", 1.0)])
    assert shares(of, "isolated") == pytest.approx(np.full((2, 2), 0.5))
    result = allocate(of, "isolated")
    assert result.status is Status.OPTIMAL  # of the least throughput, by its bound
    assert result.objective == pytest.approx(1.0)
    assert result.bound == pytest.approx(1.0)  # b would have to have more of v100
    of = problem([("a", 1.0), ("b", 1.0)], "v100=6,k80=2")
    assert shares(of, "isolated") == pytest.approx(np.array([[0.75, 0.25]] * 2))


@some
@given(random_case(space_sharing=False))
def test_isolated_is_x_isolated_and_below_max_min(case: Case):
    of = case.problem
    result = allocate(of, "isolated")
    rates = throughput(of, result.allocation)
    if case.placement:
        assert (rates <= of.isolated_throughput() * (1 + 1e-9)).all()
    else:
        assert rates == pytest.approx(of.isolated_throughput())
    assert result.objective <= result.bound * (1 + 1e-9)
    assert result.bound == pytest.approx(allocate(of).objective, rel=1e-6)


def test_isolated_jobs_have_a_part_of_the_servers():
    """Three of four fill a server: a job has a third of it together, the rest spread."""
    jobs = tuple(Job(f"job {n}", "a", 1.0, 3) for n in range(3))
    rate = Rate("a", 3, "v100", 6.0, 2.0)
    of = problem_of(Workload(jobs, Throughputs((rate,))), parse_pool("v100=1x4"), placement=True)
    assert shares(of, "isolated") == pytest.approx(np.array([[1 / 3, 1 / 9]] * 3))


def test_a_static_partition_goes_down_the_tree_by_weight():
    entities = (
        Entity("root", 5.0),
        Entity("x", 3.0, parent="root"),
        Entity("y", 1.0, parent="root"),
    )
    of = replace(
        problem([("a", 1.0)] * 4, "v100=2,k80=2", entities), weight=np.array([1.0, 1, 2, 1])
    )
    expected = np.array([0.25, 0.125, 0.5, 0.125])  # job 0 and 2 are of x
    assert isolated.static_parts(of) == pytest.approx(expected)
    assert shares(of, "static-partition") == pytest.approx(
        np.outer(np.minimum(2 * expected, 0.5), [1, 1])
    )


def test_parts_that_are_not_used_are_lent_to_nobody():
    entities = (Entity("x", 3.0), Entity("idle", 1.0))
    of = problem([("a", 1.0)] * 2, "v100=8,k80=8", entities)
    of = replace(of, entity=np.zeros(2, dtype=np.int64))
    assert isolated.static_parts(of) == pytest.approx([0.375, 0.375])
    assert shares(of, "static-partition") == pytest.approx(np.full((2, 2), 0.5))


def test_an_entity_in_order_fills_its_first_jobs_time_first():
    entities = (Entity("x", 1.0, "fifo"), Entity("y", 1.0))
    of = problem([("a", 1.0)] * 6, "v100=2,k80=1", entities)  # x has one accelerator and a half
    assert isolated.static_parts(of)[::2] == pytest.approx([1 / 3, 1 / 6, 0])
    result = allocate(of, "static-partition")
    time = result.allocation.dense(6, 2).sum(axis=1)
    assert time == pytest.approx([1.0, 0.5, 0.5, 0.5, 0.0, 0.5])
    assert result.objective > 0  # of those that have a part
    assert result.objective <= result.bound


@some
@given(random_case(space_sharing=False))
def test_a_static_partition_without_entities_is_by_weight(case: Case):
    of = case.problem
    assert isolated.static_parts(of) == pytest.approx(of.weight / of.weight.sum())
    result = allocate(of, "static-partition")
    assert result.objective <= result.bound * (1 + 1e-9)


# AlloX.


def slow_allox(of: AllocationProblem) -> tuple[float, set[frozenset[tuple[int, int]]]]:
    """The least mean completion time, and who may run where first in queues that reach it.

    On each accelerator the shortest first; all assignments of jobs to accelerators.
    """
    machines = [w for w, count in enumerate(of.table.counts) for _ in range(count)]
    best, first = np.inf, []
    with np.errstate(divide="ignore"):
        seconds = of.steps[:, None] / of.rates[:, machines]
    for placed in product(range(len(machines)), repeat=len(of)):
        total, heads = 0.0, set()
        for machine, worker in enumerate(machines):
            here = sorted((seconds[j, machine], j) for j, at in enumerate(placed) if at == machine)
            total += sum(np.cumsum([time for time, _ in here]))
            heads |= {(here[0][1], worker)} if here else set()
        first.append((total, frozenset(heads)))
        best = min(best, total)
    near = {heads for total, heads in first if total <= best * (1 + 1e-9)}
    return (best + of.elapsed_seconds.sum()) / len(of), near


def test_allox_by_hand():
    """On k80 b loses least: a 1 then a 3 on v100, b 4 on k80."""
    of = problem([("a", 12.0), ("b", 8.0), ("a", 4.0)])
    result = allocate(of, "allox")
    assert result.objective == pytest.approx((1 + (1 + 3) + 4) / 3)
    assert result.gap == pytest.approx(0.0, abs=1e-9)
    assert result.allocation.dense(3, 2).tolist() == [[0, 0], [0, 1], [1, 0]]
    assert result.notes == ("2 jobs run, 1 wait",)


@some
@given(st.integers(1, 5), st.integers(1, 2), st.integers(1, 2), st.integers(0, 2**32 - 1))
def test_allox_is_the_best_of_all_queues(jobs: int, v100: int, k80: int, seed: int):
    rng = np.random.default_rng(seed)
    of = problem(
        [(str(rng.choice(["a", "b"])), float(rng.integers(1, 30))) for _ in range(jobs)],
        f"v100={v100},k80={k80}",
    )
    of = replace(of, elapsed_seconds=rng.integers(0, 9, jobs).astype(float))
    if rng.random() < 0.3:  # a does not run on k80
        alone = of.table.alone.copy()
        alone[[kind[0] == "a" for kind in of.table.kinds], 1] = 0.0
        of = replace(of, table=replace(of.table, alone=alone))
    result = allocate(of, "allox")
    best, first = slow_allox(of)
    assert result.status is Status.OPTIMAL
    assert result.objective == pytest.approx(best)
    assert result.bound == pytest.approx(best)
    running = zip(result.allocation.job.tolist(), result.allocation.worker.tolist(), strict=True)
    assert frozenset(running) in first


def test_allox_takes_jobs_of_one_accelerator():
    jobs = (Job("one", "a", 1.0), Job("two", "a", 1.0, 2))
    of = problem_of(Workload(jobs, Throughputs(RATES)), parse_pool("v100=2,k80=2"))
    with pytest.raises(InputError, match=r"job 'two': AlloX .* this one asks for 2; choose"):
        allocate(of, "allox")


def test_what_is_no_matching_is_refused():
    of = problem([("a", 12.0), ("b", 8.0)])
    asked = allox.matching(of)
    with pytest.raises(InvalidPlan, match="not matched to one place"):
        allox.queues(of, asked, np.full(len(asked.job), 0.4))


def test_allox_without_time_is_no_answer():
    rng = np.random.default_rng(0)
    of = problem([("a", float(rng.uniform(1, 50))) for _ in range(60)], "v100=7,k80=5")
    result = allocate(of, "allox", Limits(seconds=0.0))
    assert result.status is Status.NO_ANSWER
    assert result.allocation is None


# Gandiva.


def test_jobs_that_fit_are_not_packed():
    of = problem([("a", 1.0), ("b", 1.0)], space_sharing=True)
    assert shares(of, "gandiva") == pytest.approx(np.full((2, 2), 0.5))
    assert (allocate(of, "gandiva").allocation.partner < 0).all()


def test_a_useful_pair_shares_and_takes_turns_elsewhere():
    of = problem([("a", 1.0), ("b", 1.0)], "v100=1", space_sharing=True)
    allocation = allocate(of, "gandiva").allocation
    assert throughput(of, allocation) == pytest.approx([3.6, 2.7])
    of = problem([("a", 1.0), ("b", 1.0), ("a", 1.0)], space_sharing=True)
    drawn = (allocate(of, "gandiva", Limits(seed=seed)).allocation for seed in range(20))
    allocation = next(found for found in drawn if (found.partner >= 0).any())
    paired = allocation.partner >= 0
    assert paired.sum() == 1
    assert allocation.share[paired] == pytest.approx([0.5])
    turns = allocation.share[~paired]  # both of the pair on k80, the single job on both types
    assert sorted(turns) == pytest.approx([0.25, 0.25, 0.5, 0.5])


def test_a_pair_that_gains_nothing_is_given_up():
    of = problem([("a", 1.0), ("a", 1.0)], "v100=1", space_sharing=True)
    assert shares(of, "gandiva") == pytest.approx(np.full((2, 1), 0.5))


@some
@given(random_case(max_jobs=9), st.integers(0, 99))
def test_gandiva_is_valid_repeats_and_never_beats_the_bound(case: Case, seed: int):
    limits = Limits(seconds=60.0, seed=seed)
    result, again = (allocate(case.problem, "gandiva", limits) for _ in range(2))
    assert np.array_equal(result.allocation.partner, again.allocation.partner)
    assert result.objective == pytest.approx(max_min.objective(case.problem, result.allocation))
    assert result.objective <= result.bound * (1 + 1e-9)


def test_gandivas_pairs_follow_the_seed():
    of = problem([("a", 1.0), ("b", 1.0)] * 6, space_sharing=True)
    found = {
        allocate(of, "gandiva", Limits(seed=seed)).allocation.partner.tobytes() for seed in range(4)
    }
    assert len(found) > 1
