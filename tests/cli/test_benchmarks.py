"""The benchmarks run, and what they claim of quality holds on their small cases."""

import re
from itertools import combinations, pairwise

import numpy as np
import pytest
from profiles import slow_after

from benchmarks import (
    anytime,
    anytime_members,
    madpipe,
    periodic,
    pipedream,
    report,
    spp,
)
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.patterns.pattern_problems import static_bytes
from stagewright.formulations.plans.memory import kept_bytes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.machines.devices import accelerator
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.planners.steps.proposal import Choices
from stagewright.solvers.planning import plan


def test_every_problem_of_the_spp_benchmark_builds():
    for case in spp.PRINTED:
        problem = spp.table3_problem(case)
        assert len(problem.cluster) in (4, 8)
    for sweep in spp.SWEEPS:
        for point in sweep.points:
            assert len(sweep.problem(point).cluster) == 32


def test_testbed_of_1080ti_is_that_of_the_paper():
    cluster = spp.testbed("1080ti")
    assert [len(server) for server in cluster.servers] == [2, 2, 2, 2]
    assert cluster.bandwidth[0, 1] == 16e9
    assert cluster.bandwidth[0, 2] == 6.25e9
    assert cluster.devices[0].memory_bytes == accelerator("1080ti").memory_bytes == 11e9


def test_simulated_cluster_keeps_the_printed_ranges_and_the_seed():
    cluster = spp.simulated_cluster()
    gbps = cluster.bandwidth / spp.GBPS
    assert [len(server) for server in cluster.servers] == [4] * 8
    inside = [gbps[server[0], server[1]] for server in cluster.servers]
    assert all(96 <= speed <= 128 for speed in inside[:3])
    assert all(160 <= speed <= 200 for speed in inside[3:])
    assert 32 <= gbps[:4, 4:].min() <= gbps[:4, 4:].max() <= 40
    assert (gbps == gbps.T).all()
    assert spp.simulated_cluster() == cluster


@pytest.mark.slow
@pytest.mark.parametrize("case", spp.PRINTED, ids="-".join)
def test_spp_is_never_slower_than_a_baseline(case: tuple[str, str]):
    assert spp.slower_than(spp.compare(spp.table3_problem(case))) == []


def test_speedups_are_those_of_the_paper():
    spp_seconds, dp_seconds, *_ = spp.PRINTED["vgg19", "1080ti"]
    assert report.percent(dp_seconds / spp_seconds - 1) == "60.2%"


def test_exact_bounds_spp_from_below():
    problem = spp.table3_problem(("vgg19", "v100"))
    exact, heuristic = (plan(problem, name, Limits(10)) for name in ("exact", "spp"))
    assert exact.bound <= exact.cost * (1 + 1e-9) <= heuristic.cost * (1 + 1e-6)


def test_sweep_by_stages():
    problem = spp.bert(microbatches=2, servers=(2, 2))
    rows = spp.by_stages(problem)
    assert [row.stages for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row.bottleneck_seconds <= row.seconds <= row.pe_seconds
    results = spp.compare(problem)
    figures = {sweep.figure: dict.fromkeys(sweep.points, results) for sweep in spp.SWEEPS}
    trends = spp.trends(figures, rows)
    assert {row[0] for row in trends} == {"6-10", 6, 7, 9, 10, 11}
    assert len(spp.sweeps_table(figures).rows) == sum(len(sweep.points) for sweep in spp.SWEEPS)


@pytest.mark.slow
@pytest.mark.skipif(not pipedream.DATA.is_dir(), reason=pipedream.MISSING)
def test_planners_on_a_measured_profile():
    rows = pipedream.planners_table(("alexnet",), 1.0).rows
    assert len(rows) == len(pipedream.clusters())
    # HetPipe's microbatches go round whole: no plan of SPP's class, and at times faster.
    assert {row[-1] for row in rows} <= {"none", "hetpipe"}


def small_network(memory_bytes: float, bandwidth: float, seed: int = 0) -> PipelineProblem:
    """Six layers, of which the early ones hand on the most, on four devices."""
    draw = np.random.default_rng(seed)
    layers = tuple(
        Layer(
            f"l{i}",
            float(draw.uniform(0, 2e7)),
            (LayerCost(840, draw.uniform(1, 9), 0.0, (7 - i) * 1e7, draw.uniform(1, 9)),),
        )
        for i in range(6)
    )
    chain = madpipe.keeps_inputs(Chain("small", "test", 840, layers), 3e7)
    cluster = uniform_servers(1, 4, Link(bandwidth), memory_bytes=memory_bytes)
    return PipelineProblem(chain, cluster, 8)


@pytest.mark.covering
@pytest.mark.parametrize("memory", [4e8, 5e8, 6e8, 8e8, 1e10])
@pytest.mark.parametrize("bandwidth", [5e6, 1e9])
@pytest.mark.parametrize("seed", [0, 1])
def test_pipedreams_partition_is_the_best_of_all(memory: float, bandwidth: float, seed: int):
    problem = small_network(memory, bandwidth, seed)
    layers, devices = problem.chain.layers, 4
    outputs = [layer.costs[0].output_bytes for layer in layers]
    inputs = [3e7, *outputs[:-1]]
    ends = [0.0, *outputs[:-1], 0.0]  # what crosses a cut; nothing before the first layer
    seconds = [
        layer.costs[0].forward_seconds + layer.costs[0].total_backward_seconds for layer in layers
    ]

    def period(cuts: tuple[int, ...], limit: float) -> float:
        worst = max((2 * outputs[cut - 1] / bandwidth for cut in cuts[1:-1]), default=0.0)
        for start, stop in pairwise(cuts):
            kept = 3 * sum(layer.parameter_bytes for layer in layers[start:stop])
            kept += devices * sum(inputs[start:stop]) + 2 * (ends[start] + ends[stop])
            worst = max(worst, sum(seconds[start:stop]) if kept <= limit else np.inf)
        return worst

    partitions = [
        (0, *cuts, len(layers))
        for count in range(devices)
        for cuts in combinations(range(1, len(layers)), count)
    ]
    loads = madpipe.stage_loads(problem)
    anywhere = madpipe.balanced_partition(problem, loads)
    assert anywhere.period == pytest.approx(min(period(cuts, np.inf) for cuts in partitions))
    fitting = madpipe.balanced_partition(
        problem, np.where(madpipe.fits_by_estimate(problem), loads, np.inf)
    )
    best = min(period(cuts, memory) for cuts in partitions)
    if fitting is None:
        assert best == np.inf
    else:
        assert fitting.period == pytest.approx(best)
        chosen = (0, *(stage.layers[1] for stage in fitting.stages))
        assert period(chosen, memory) == pytest.approx(best)
        names = [device.name for device in problem.cluster.devices]
        assert [stage.devices for stage in fitting.stages] == [
            (name,) for name in names[: len(fitting.stages)]
        ]


def test_memory_keeps_pipedream_from_its_prediction():
    roomy, tight = (madpipe.pipedream(small_network(memory, 1e9)) for memory in (1e10, 5e8))
    assert roomy.achieved == pytest.approx(roomy.predicted)
    assert tight.achieved > roomy.achieved
    assert madpipe.pipedream(small_network(1e8, 1e9)) == madpipe.Periods(None, None)


@pytest.mark.parametrize("seed", slow_after(1, range(3)))
def test_madpipes_gap_is_that_of_its_certificate(seed):
    asked = small_network(5e8, 1e9, seed)
    planned = madpipe.madpipe(asked)
    found = plan(asked, "madpipe", madpipe.LIMITS, choices=Choices(group_size=1))
    assert planned.bound * asked.microbatches == pytest.approx(found.bound, rel=1e-6)
    assert planned.gap == pytest.approx(found.gap, abs=1e-6)


def test_networks_of_the_madpipe_study_keep_what_the_paper_counts():
    problem = madpipe.problem(madpipe.Case("resnet50", 2, 16, 12e9))
    image, conv1 = (8 * elements * 4 for elements in (3 * 1000**2, 64 * 500**2))
    stage = Stage((0, 2), ("s0g0",))
    assert kept_bytes(problem, stage).saved_bytes == image + conv1
    weights, pool1 = (64 * 3 * 49 + 2 * 64) * 4, conv1 / 4
    assert static_bytes(problem, stage) == 3 * weights + 2 * pool1
    assert len(madpipe.SWEEP) == 4 * 7 * 14 * 2


@pytest.mark.slow
def test_madpipe_is_ahead_where_memory_is_scarce():
    outcome = madpipe.compare(madpipe.Case("resnet50", 2, 8, 12e9))
    periods = outcome.madpipe.periods
    assert outcome.madpipe.bound <= periods.predicted <= periods.achieved
    assert outcome.ratio > 1.1
    madpipe.require_never_slower([outcome])


@pytest.mark.slow
def test_periodic_tables_hold_what_they_claim_and_have_their_files():
    tables = {table.name: table for table in periodic.tables(quick=True)}
    assert all((report.RESULTS / f"{name}.csv").exists() for name in tables)
    (allocation,) = tables["periodic-allocation-quality"].rows
    *_, gap, contiguous, _, grid = allocation
    assert gap == "exact"
    assert min(float(contiguous), float(grid)) >= 1
    for row in tables["periodic-pattern-time"].rows:
        assert not any(cell.startswith("no") for cell in row[1:])
    for *_, gap, contiguous, special, planner in tables["periodic-joint-quality"].rows:
        assert (gap, planner) == ("0.00%", "1.000")
        assert min(float(contiguous), float(special)) >= 1


def test_memory_binds_in_the_cases_of_periodic_planning():
    for case in periodic.ALLOCATIONS.sweep[:6]:
        problem = case.build()
        roomy = periodic.tight_problem(problem.chain, case.devices, 1000.0)
        tight_period, roomy_period = map(periodic.contiguous_period, (problem, roomy))
        assert tight_period > 1.2 * roomy_period


def test_what_stages_allow_is_what_the_search_says():
    problem = periodic.tight_problem(periodic.random_chain(8, seed=1), 3, 2.5)
    question = periodic.allocation_of(problem, 0)
    answer = periodic.least_period(question)
    assert periodic.allowed_seconds(question, answer.stages) == answer.period
    cramped = periodic.tight_problem(problem.chain, 3, 0.9)
    assert periodic.allowed_seconds(periodic.allocation_of(cramped, 0), answer.stages) is None


def test_merged_layers_are_the_same_network():
    network = periodic.network("resnet50")
    chain = periodic.merged(network, 10)
    assert len(chain) == 10
    assert chain.parameter_bytes.sum() == network.parameter_bytes.sum()
    for name in ("forward_seconds", "total_backward_seconds", "saved_bytes"):
        whole, parts = (
            sum(getattr(layer.costs[0], name) for layer in one.layers) for one in (network, chain)
        )
        assert parts == pytest.approx(whole)
    assert chain.layers[-1].costs[0].output_bytes == network.layers[-1].costs[0].output_bytes


@pytest.mark.slow
def test_the_course_of_an_instance_goes_down_to_its_bound():
    now, both = anytime.tables(quick=True)
    assert len(now.rows) == 2
    assert [row[0] for row in both.rows] == ["before"] * 3 + ["now"] * 3
    for row in now.rows:
        first, *_, last = (float(cell) for cell in row[anytime.GAPS :])
        assert 0 <= last <= first <= 100


def test_anytime_has_sixty_instances_of_every_size():
    sizes = {len(problem.cluster) for problem in anytime.instances().values()}
    assert len(anytime.instances()) == 60
    assert (min(sizes), max(sizes)) == (4, 1024)


def test_integrals_of_a_course():
    """No plan for 1 s, twice the best for 4 s, then the best and its bound for 5 s."""
    course = anytime.Course(((0.0, None, 1.0), (1.0, 4.0, 1.0), (5.0, 2.0, 2.0)))
    assert course.integrals(best=2.0) == pytest.approx((0.1 + 0.4 * 0.5, 0.5 * 0.5))
    assert [course.gap(seconds) for seconds in (0.5, 1.0, 9.0)] == [1.0, 0.75, 0.0]


def test_promises_are_learnt_from_courses(monkeypatch):
    """One member alone halves the cost; it has no turn in time before its promise is learnt."""
    monkeypatch.setattr(anytime_members, "others", lambda: {"one": anytime.drawn(100)})
    monkeypatch.setattr(anytime_members, "TRIES", 200)
    monkeypatch.setattr(anytime_members, "TIMES", (0.75,))
    begin, better = (0.1, 2.0, 1.0), (0.3, 1.0, 1.0)
    found = {one: anytime.Course((begin,)) for one in anytime_members.NAMES}
    found["servers"] = anytime.Course((begin, better))
    learnt, problem = anytime_members.fitted({"one": found}), anytime.drawn(100)
    costs = [
        anytime_members.simulated(problem, found, known, 0.75)
        for known in (anytime_members.PROMISES, learnt)
    ]
    assert costs == [2.0, 1.0]


def test_every_table_of_results_is_on_one_page():
    pages = "".join(page.read_text() for page in report.PAGES.glob("*.md"))
    shown = re.findall(r"^\[([\w-]+)\]\(../../benchmarks/results/\1.csv\)$", pages, re.MULTILINE)
    assert sorted(shown) == sorted(file.stem for file in report.RESULTS.iterdir())


def test_table_as_markdown():
    table = report.Table("t", "Title", ("a", "b"), ((1.23456, None),))
    assert str(table).splitlines() == [
        "**Title**",
        "",
        "| a | b |",
        "| --- | --- |",
        "| 1.235 | - |",
    ]


def test_table_is_written_as_data(tmp_path):
    report.write(report.Table("t", "Title", ("a, b", "c"), ((1.23456, None),)), tmp_path)
    assert (tmp_path / "t.csv").read_text() == f'# Title\n# {report.machine()}\n"a, b",c\n1.235,-\n'
