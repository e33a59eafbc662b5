"""The simulator: cases by hand, its rules, and published figures."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from strategies_allocation import Case, random_case
from tokens import After

from stagewright.executor.clusters.rates import Outage, outages
from stagewright.executor.clusters.simulation import Allocate, ClusterState, simulate_cluster
from stagewright.executor.clusters.timeline import ClusterRules, ClusterTimeline
from stagewright.executor.drawing.charts.cluster import (
    MAX_NAMED_JOBS,
    draw_jct_cdf,
    draw_rounds,
    draw_utilisation,
    looks,
)
from stagewright.formulations.clusters.allocation import (
    Allocation,
    AllocationProblem,
    allocation_of_shares,
)
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.gavel import read_throughputs, read_trace
from stagewright.graphs.workloads.jobs import Job, PairRate, Rate, Throughputs
from stagewright.graphs.workloads.pool import parse_pool
from stagewright.solvers.clusters.policies import allocate

DATA = Path(__file__).parents[3] / "shared" / "data" / "gavel"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the traces are not beside the checkout")

ONE = parse_pool("v100=1@3.6")
UNIT = Throughputs((Rate("m", 1, "v100", 1.0), Rate("n", 1, "v100", 1.0)))


def equal(problem: AllocationProblem) -> Allocation:
    """Every job the same part of every accelerator."""
    counts, workers = problem.table.counts, problem.table.workers
    part = counts[[worker.accelerator for worker in workers]] / len(problem)
    part = part / max(1.0, part.sum())
    return allocation_of_shares(np.where(problem.rates > 0, part, 0.0))


def completions(timeline: ClusterTimeline) -> list[float | None]:
    return [outcome.completion_seconds for outcome in timeline.jobs]


def by_policy(name: str) -> Allocate:
    def run(problem: AllocationProblem) -> Allocation:
        found = allocate(problem, name).allocation
        assert found is not None
        return found

    return run


def test_one_job_by_hand() -> None:
    timeline = simulate_cluster([Job("a", "m", 1000.0)], UNIT, ONE, equal)
    assert completions(timeline) == [1000.0]
    assert [one.end_seconds for one in timeline.rounds] == [360.0, 720.0, 1000.0]
    assert timeline.makespan_seconds == timeline.seconds == 1000.0
    assert timeline.utilisation == 1.0
    assert timeline.dollars == pytest.approx(1.0)
    assert timeline.fairness() == pytest.approx([1.0])
    assert (timeline.renewals, timeline.renewable) == (2, 2)


@examples(30)
@given(random_case(space_sharing=False), st.integers(0, 99))
def test_a_policy_knows_a_rate_once_a_job_has_run_at_it(case: Case, seed: int) -> None:
    rng, true = random.Random(seed), case.workload.throughputs
    wrong = [
        replace(one, steps_per_second=one.steps_per_second * rng.choice((0.5, 1.0, 3.0)))
        for one in true.alone
    ]
    rules = ClusterRules(round_seconds=1.0, reset_seconds=2.0, placement=False)
    seen: list[AllocationProblem] = []
    when: list[float] = []

    def policy(problem: AllocationProblem) -> Allocation:
        seen.append(problem)
        return by_policy("max-min")(problem)

    def run(predicted: Throughputs | None) -> ClusterTimeline:
        return simulate_cluster(
            case.workload.jobs, true, case.pool, policy, rules, predicted=predicted,
            keep_assignments=True, on_progress=lambda state: when.append(state.seconds),
        )  # fmt: skip

    plain = run(None)
    truth = seen[0].table.alone
    same = run(true)
    assert completions(same) == completions(plain)
    assert plain.corrected == same.corrected == ()
    seen.clear()
    when.clear()
    learned = run(Throughputs(tuple(wrong)))
    jobs = case.workload.jobs
    for problem, now in zip(seen, when, strict=True):
        ran = np.zeros(truth.shape, dtype=bool)
        for one in learned.rounds:
            for it in one.assignments if one.end_seconds <= now else ():
                ran[problem.table.index[jobs[it.jobs[0]].kind], it.worker] = True
        assert (problem.table.alone[ran] == truth[ran]).all()
        assert (problem.table.alone[~ran] == seen[0].table.alone[~ran]).all()


@pytest.mark.parametrize("rules", [ClusterRules(), ClusterRules(ideal=True)])
def test_a_stopped_simulation_is_the_beginning_of_the_whole(rules: ClusterRules) -> None:
    jobs = [Job(name, "m", 500.0 * number) for number, name in enumerate("abc", 1)]
    whole = simulate_cluster(jobs, UNIT, ONE, equal, rules)
    for rounds in range(len(whole.rounds)):
        found = simulate_cluster(jobs, UNIT, ONE, equal, rules, stop=After(rounds))
        assert found.interrupted
        assert found.rounds == whole.rounds[:rounds]
        ends = [one if one and one <= found.seconds else None for one in completions(whole)]
        assert completions(found) == ends[: len(found.jobs)]
    assert not simulate_cluster(
        jobs, UNIT, ONE, equal, rules, stop=After(len(jobs) ** 9)
    ).interrupted


def test_two_jobs_take_turns() -> None:
    jobs = [Job("a", "m", 720.0), Job("b", "m", 900.0, weight=5.0)]
    timeline = simulate_cluster(jobs, UNIT, ONE, equal, keep_assignments=True)
    assert [one.assignments[0].jobs[0] for one in timeline.rounds] == [0, 1, 0, 1, 1]
    assert completions(timeline) == [1080.0, 1620.0]
    assert timeline.mean_jct_seconds() == 1350.0
    assert timeline.mean_jct_seconds(weight=5.0) == 1620.0
    assert timeline.mean_jct_seconds(range(1)) == 1080.0
    # Job a has half of the cluster all along: alone on it, 720 steps take 1,440 s.
    assert timeline.fairness(range(1)) == pytest.approx([1080 / 1440])
    assert timeline.resets[1].mean_deviation == pytest.approx(1 / 6)


def test_moves_by_hand() -> None:
    """A restart of 40 s in rounds of 360 s: leases of 800 s at least, the first 40 s lost in each.

    a: 320 + 360 + 360 steps, then b the same, then a its last 60.
    """
    jobs = [Job("a", "m", 1100.0, restart_seconds=40.0), Job("b", "m", 720.0, restart_seconds=40.0)]
    timeline = simulate_cluster(jobs, UNIT, ONE, equal, keep_assignments=True)
    assert [one.assignments[0].jobs[0] for one in timeline.rounds] == [0, 0, 0, 1, 1, 1, 0]
    assert completions(timeline) == [1840.0 + 40.0 + 60.0, 1080.0 + 760.0]
    longer = [Job("a", "m", 100.0, restart_seconds=800.0)]  # more than two rounds
    assert completions(simulate_cluster(longer, UNIT, ONE, equal)) == [900.0]


def test_moves_gain_more_than_they_cost() -> None:
    """No allocation of a simulation is worth less, moves paid, than if all that run stayed."""
    rng = random.Random(1)
    rates = [
        Rate(model, count, name, rng.uniform(1, 3) * count**0.8)
        for model, count, name in product("abc", (1, 2, 4), ("v100", "k80"))
    ]
    jobs = [
        Job(str(n), rng.choice("abc"), rng.uniform(2e3, 2e4), arrival_seconds=200.0 * n,
            counts=(1, 2, 4), restart_seconds=rng.choice((20.0, 90.0)))
        for n in range(12)
    ]  # fmt: skip
    run, asked = by_policy("max-throughput"), list[int]()

    def watched(problem: AllocationProblem) -> Allocation:
        found, there = run(problem), np.flatnonzero(problem.current >= 0)
        part = problem.rates / problem.rates.max(axis=1, keepdims=True)
        value = part[found.job, found.worker] * found.share
        left = np.full(len(problem), np.inf)
        left[there] = problem.steps[there] / problem.rates[there, problem.current[there]]
        lease = np.minimum(np.maximum(600.0, 20 * problem.restart_seconds), left)
        cost = value * (problem.restart_seconds / (lease + problem.restart_seconds))[found.job]
        moved = found.worker != problem.current[found.job]
        stay = part[there, problem.current[there]].sum()
        assert value.sum() - cost[moved].sum() >= stay - 1e-6
        asked.append(len(there))
        return found

    rules = ClusterRules(reset_seconds=600.0)
    simulate_cluster(jobs, Throughputs(tuple(rates)), parse_pool("v100=4,k80=4"), watched, rules)
    assert max(asked) > 1


def test_jobs_choose_among_counts() -> None:
    """On 1, 2 and 4 a job makes 1, 2 and 3 steps a second.

    Beside each other for 360 s on 2 each, b has 4 for 240 s more: no other way is as short.
    """
    rates = Throughputs(tuple(Rate("m", n, "v100", r) for n, r in ((1, 1.0), (2, 2.0), (4, 3.0))))
    jobs = [Job("a", "m", 720.0, counts=(1, 2, 4)), Job("b", "m", 1440.0, counts=(1, 2, 4))]
    four = parse_pool("v100=4")
    rules = ClusterRules(reset_seconds=360.0)
    timeline = simulate_cluster(jobs, rates, four, by_policy("makespan"), rules)
    assert timeline.makespan_seconds == pytest.approx(600.0)
    assert completions(simulate_cluster(jobs[1:], rates, four, by_policy("max-min"))) == [480.0]


def test_rounds_are_of_whole_steps() -> None:
    """0.75 steps a second: 7 in a round of 10 s, which ends after 9 1/3 s."""
    slow = Throughputs((Rate("m", 1, "v100", 0.75),))
    timeline = simulate_cluster(
        [Job("a", "m", 15.0)], slow, ONE, equal, ClusterRules(round_seconds=10.0)
    )
    assert [one.end_seconds for one in timeline.rounds] == pytest.approx([28 / 3, 56 / 3, 20.0])
    slower = Throughputs((Rate("m", 1, "v100", 0.01),))
    timeline = simulate_cluster(
        [Job("a", "m", 0.5)], slower, ONE, equal, ClusterRules(round_seconds=10.0)
    )
    assert timeline.makespan_seconds == pytest.approx(50.0)


def test_jobs_wait_for_the_next_allocation() -> None:
    """Allocated at 0 and, as the first counts for none, at 360; then not before 720 + 1,920."""
    seen: list[tuple[str, ...]] = []

    def watched(problem: AllocationProblem) -> Allocation:
        seen.append(problem.names)
        return equal(problem)

    jobs = [Job("a", "m", 9000.0), Job("b", "m", 360.0, arrival_seconds=100.0)]
    jobs.append(Job("c", "m", 360.0, arrival_seconds=400.0))
    timeline = simulate_cluster(jobs, UNIT, parse_pool("v100=3"), watched)
    assert [reset.seconds for reset in timeline.resets] == [0.0, 360.0, 2520.0, 4680.0]
    assert seen == [("a",), ("a", "b"), ("a", "c"), ("a",)]
    assert completions(timeline) == [9000.0, 720.0, 2880.0]


def test_policies_see_how_long_jobs_have_been_here() -> None:
    seen: list[AllocationProblem] = []

    def watched(problem: AllocationProblem) -> Allocation:
        seen.append(problem)
        return equal(problem)

    jobs = [Job("a", "m", 2000.0, slo_seconds=3000.0)]
    jobs.append(Job("b", "m", 100.0, arrival_seconds=100.0, slo_seconds=10.0))
    timeline = simulate_cluster(jobs, UNIT, parse_pool("v100=2"), watched)
    second = seen[1]
    assert second.elapsed_seconds.tolist() == [360.0, 260.0]
    assert second.deadline_seconds.tolist() == [2640.0, -250.0]
    assert second.steps.tolist() == [1640.0, 100.0]
    assert second.isolated_seconds.tolist() == [360.0, 0.0]
    assert timeline.slo_violations == 1


def test_shared_accelerators() -> None:
    pairs = Throughputs(UNIT.alone, (PairRate(("m", "n"), 1, "v100", (0.8, 0.5)),))

    def together(problem: AllocationProblem) -> Allocation:
        if len(problem) == 1:
            return equal(problem)
        first = int(problem.kind[0] > problem.kind[1])
        return Allocation(np.array([first]), np.array([1 - first]), np.zeros(1, int), np.ones(1))

    jobs = [Job("a", "n", 180.0), Job("b", "m", 400.0)]
    timeline = simulate_cluster(jobs, pairs, ONE, together, ClusterRules(space_sharing=True))
    assert completions(timeline) == [360.0, pytest.approx(472.0)]  # 400 - 288 steps alone
    assert timeline.busy_seconds == (pytest.approx(472.0),)


def test_placement() -> None:
    """Both of a server, twice as fast as one on each of two servers."""
    rates = Throughputs((Rate("m", 2, "v100", 2.0, 1.0), Rate("m", 1, "v100", 1.0, 1.0)))
    jobs = [Job("wide", "m", 1440.0, 2), Job("a", "m", 720.0), Job("b", "m", 720.0)]
    timeline = simulate_cluster(
        jobs,
        rates,
        parse_pool("v100=2x2"),
        by_policy("water-filling"),
        ClusterRules(placement=True),
        keep_assignments=True,
    )
    assert completions(timeline) == [720.0, 720.0, 720.0]
    places = {one.jobs[0]: one.accelerators for one in timeline.rounds[0].assignments}
    assert places[0] in ((0, 1), (2, 3))
    assert timeline.busy_seconds == (4 * 720.0,)


def test_a_failure_costs_the_round_and_the_repair() -> None:
    failures = [Outage(500.0, 1500.0, 0, 0)]
    timeline = simulate_cluster([Job("a", "m", 1000.0)], UNIT, ONE, equal, failures=failures)
    assert completions(timeline) == [1500.0 + 640.0]
    assert timeline.rounds[1].end_seconds == 720.0  # lost
    later = [Outage(1000.0, 1500.0, 0, 0)]
    timeline = simulate_cluster([Job("a", "m", 1000.0)], UNIT, ONE, equal, failures=later)
    assert completions(timeline) == [1000.0]


def test_policies_see_only_accelerators_in_order() -> None:
    counts: list[int] = []

    def watched(problem: AllocationProblem) -> Allocation:
        counts.append(int(problem.table.counts[0]))
        return equal(problem)

    wide = Throughputs((*UNIT.alone, Rate("m", 2, "v100", 1.0)))
    jobs = [Job("wide", "m", 1000.0, 2), Job("a", "m", 5000.0)]
    failures = [Outage(100.0, 4000.0, 0, 0), Outage(200.0, 3000.0, 0, 0)]
    timeline = simulate_cluster(jobs, wide, parse_pool("v100=2"), watched, failures=failures)
    assert counts[:2] == [2, 1]
    assert timeline.jobs[0].completion_seconds is not None
    assert timeline.jobs[0].completion_seconds > 4000.0


def test_outages_are_seeded() -> None:
    def first(seed: int) -> list[Outage]:
        drawn = outages(parse_pool("v100=3,k80=1"), 4000.0, 60.0, seed)
        return [next(drawn) for _ in range(2000)]

    found = first(1)
    assert found == first(1) != first(2)
    assert found[-1].start_seconds / 2000 == pytest.approx(1000.0, rel=0.1)
    assert all(one.end_seconds == one.start_seconds + 60 for one in found)
    on_first = sum(one.accelerator == 0 for one in found) / 2000
    assert on_first == pytest.approx(0.75, abs=0.05)


def test_ideal_sharing() -> None:
    rules = ClusterRules(ideal=True, reset_seconds=1.0)
    jobs = [Job("a", "m", 100.0), Job("b", "m", 300.0), Job("c", "m", 50.0, arrival_seconds=500.0)]
    timeline = simulate_cluster(jobs, UNIT, ONE, equal, rules)
    assert completions(timeline) == pytest.approx([200.0, 400.0, 550.0])
    assert timeline.busy_seconds == (pytest.approx(450.0),)
    assert timeline.utilisation == pytest.approx(450 / 550)


def without_end() -> Iterator[Job]:
    number = 0
    while True:
        yield Job(str(number), "m", 500.0, arrival_seconds=400.0 * number)
        number += 1


def test_a_window_ends_the_simulation() -> None:
    stands: list[ClusterState] = []
    timeline = simulate_cluster(
        without_end(),
        UNIT,
        parse_pool("v100=2"),
        equal,
        ClusterRules(shuffle_seed=5),
        window=range(3, 6),
        on_progress=stands.append,
    )
    assert len(timeline.durations(range(3, 6))) == 3
    assert timeline.jobs[-1].completion_seconds is None
    assert math.isnan(timeline.jobs[-1].fairness)
    assert [stand.seconds for stand in stands] == [reset.seconds for reset in timeline.resets]
    assert stands[-1].arrived > stands[0].arrived == 1


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(InputError, match="'x' on 1 accelerators cannot run"):
        simulate_cluster([Job("a", "x", 1.0)], UNIT, ONE, equal)

    def nothing(problem: AllocationProblem) -> Allocation:
        return allocation_of_shares(np.zeros_like(problem.rates))

    with pytest.raises(InputError, match=r"no job can run.* waiting: 'a'"):
        simulate_cluster([Job("a", "m", 1.0)], UNIT, ONE, nothing, ClusterRules(fill=False))
    with pytest.raises(InputError, match="round_seconds"):
        ClusterRules(round_seconds=0.0)


def test_pictures(tmp_path: Path) -> None:
    """Every job is named in that of the rounds, and looks different."""
    jobs = [Job(f"job{n}", "m", 400.0, arrival_seconds=100.0 * n) for n in range(24)]
    pool = parse_pool("v100=2")
    timeline = simulate_cluster(jobs, UNIT, pool, equal, keep_assignments=True)
    draw_rounds(timeline, tmp_path / "rounds.svg")
    draw_utilisation(timeline, tmp_path / "busy.png")
    draw_jct_cdf(timeline, "equal", tmp_path / "jct.pdf")
    picture = (tmp_path / "rounds.svg").read_text()
    assert picture.count("<path") > len(timeline.rounds)
    assert all(f"<!-- {n}  job{n} -->" in picture for n in range(24))
    assert len({looks(n) for n in range(MAX_NAMED_JOBS)}) == MAX_NAMED_JOBS >= 48
    assert (tmp_path / "busy.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "jct.pdf").read_bytes().startswith(b"%PDF")
    bare = simulate_cluster(jobs, UNIT, pool, equal)
    with pytest.raises(InputError, match="keep_assignments"):
        draw_rounds(bare, tmp_path / "rounds.svg")
    with pytest.raises(InputError, match=r"must be one of \.png"):
        draw_utilisation(timeline, tmp_path / "busy.gif")


@needs_data
@pytest.mark.parametrize(
    ("policy", "shuffle_seed", "hours"), [("las", 5, 5.55), ("max-min", None, 4.06)]
)
def test_published_completion_times(policy: str, shuffle_seed: int | None, hours: float) -> None:
    jobs: Sequence[Job] = read_trace(DATA / "traces" / "max_min_fairness.trace")
    table = read_throughputs(DATA / "simulation_throughputs.json")
    timeline = simulate_cluster(
        jobs,
        table.of((job.model, job.scale) for job in jobs),
        parse_pool("v100=8,p100=16,k80=24"),
        by_policy(policy),
        ClusterRules(shuffle_seed=shuffle_seed),
    )
    assert timeline.mean_jct_seconds() / 3600 == pytest.approx(hours, rel=0.03)


def test_rounds_without_an_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagewright.executor.clusters.timeline.MOST_ROUNDS", 3)
    jobs = [Job("a", "m", 100.0)]
    assert (
        simulate_cluster(jobs, UNIT, ONE, equal, ClusterRules(round_seconds=50.0)).makespan_seconds
        > 0
    )
    with pytest.raises(InputError, match=r"more than 3 rounds of 10 s: choose longer rounds"):
        simulate_cluster(jobs, UNIT, ONE, equal, ClusterRules(round_seconds=10.0))
