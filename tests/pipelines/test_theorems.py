"""What papers prove and planners claim, and the bounds of every plan, on random tiny instances."""

from dataclasses import replace
from itertools import combinations
from math import inf

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from makespan_oracle import brute_force_makespan
from oracles import (
    all_stages,
    balanced_partitions,
    bottleneck,
    brute_force_joint,
    lemma1_bound,
    lemma2_factor,
    pe_reference,
    prm_table,
    theorem1_factor,
)
from plans import scaled
from profiles import examples
from strategies import PROBLEMS, hard_problem, paper_problem, random_cluster, random_makespan

from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.pipelines.bounds.relaxation import relax
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan_class import DISJOINT_SPLIT, class_of
from stagewright.graphs.machines.cluster import Device, Link, from_matrix, uniform_servers
from stagewright.graphs.machines.ordering import recursive_device_order
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.pipelines.list_scheduling import list_schedule
from stagewright.solvers.pipelines.relaxation import (
    PRECISION,
    fill_and_drain_bound,
    relaxed_load_bound,
)
from stagewright.solvers.pipelines.scheduling import solve_schedule
from stagewright.solvers.planning import plan

KINDS = ("pe", "gpipe", "1f1b", "eager")
PLANNERS = ("spp", "dp", "gpipe", "pipedream", "hetpipe", "auto")
LIMITS = Limits(seconds=10.0)
SHORT = Limits(seconds=1.0)  # what the portfolio searches beyond the class takes any time
SLACK = 1 + 1e-9  # sums of floats
TICKS = 1e-6  # relative: exact planners count in integer ticks

quick = examples(60, derandomize=True)
slow = examples(12, derandomize=True)


class TestDeviceOrder:
    @quick
    @given(random_cluster(max_devices=5))
    def test_every_split_is_a_minimum_cut(self, cluster):
        """SPP algorithm 2."""
        order = recursive_device_order(cluster)
        assert sorted(order) == list(range(len(cluster)))
        assert splits_by_minimum_cuts(cluster.bandwidth, order)


def splits_by_minimum_cuts(bandwidth, order):
    if len(order) == 1:
        return True

    def cut(part):
        return sum(bandwidth[i, j] for i in part for j in order if j not in part)

    least = min(cut(part) for k in range(1, len(order)) for part in combinations(order, k))
    return any(
        cut(order[:k]) <= least * SLACK
        and splits_by_minimum_cuts(bandwidth, order[:k])
        and splits_by_minimum_cuts(bandwidth, order[k:])
        for k in range(1, len(order))
    )


class TestListSchedules:
    @examples(200, parent=quick)
    @given(random_makespan(max_stages=5, max_microbatches=10, limited=False))
    def test_lemma1(self, problem):
        timetable = list_schedule(problem, "pe")
        assert problem.evaluate(timetable) <= lemma1_bound(problem) * SLACK

    @quick
    @given(random_makespan(max_stages=5, max_microbatches=10, limited=False, tie_free=True))
    def test_pe_is_algorithm_1(self, problem):
        timetable = list_schedule(problem, "pe")
        assert problem.evaluate(timetable) == pytest.approx(pe_reference(problem))

    @quick
    @given(random_makespan(), st.sampled_from(KINDS))
    def test_never_better_than_the_optimum(self, problem, kind):
        timetable = list_schedule(problem, kind)
        if timetable is not None:  # the order needs more in flight than is allowed
            assert problem.evaluate(timetable) * SLACK >= brute_force_makespan(problem)

    @pytest.mark.parametrize("kind", KINDS)
    @examples(20, parent=quick)
    @given(random_makespan(limited=False))
    def test_every_kind_runs_without_limits(self, kind, problem):
        assert list_schedule(problem, kind) is not None


class TestOptimalSchedule:
    @pytest.mark.parametrize(
        ("stages", "microbatches", "forward", "backward", "transfer", "in_flight"),
        [
            (2, 3, 2, 3, 4, (3, 3)),  # channels decide
            (3, 3, 3, 5, 2, (3, 2, 1)),
            (3, 4, 1, 2, 0, (2, 2, 1)),
            (4, 3, 2, 4, 1, (3, 3, 2, 1)),
        ],
    )
    def test_by_hand(self, stages, microbatches, forward, backward, transfer, in_flight):
        sends = (float(transfer),) * (stages - 1)
        problem = MakespanProblem(
            microbatches,
            (float(forward),) * stages,
            (float(backward),) * stages,
            sends,
            sends,
            (0.0,) * stages,
            in_flight,
        )
        answer = solve_schedule(problem, "optimal", LIMITS)
        assert answer.status is Status.OPTIMAL
        assert answer.cost == pytest.approx(brute_force_makespan(problem))

    @slow
    @given(random_makespan())
    def test_random(self, problem):
        answer = solve_schedule(problem, "optimal", LIMITS)
        assert answer.timetable is not None
        optimum = brute_force_makespan(problem)
        assert problem.evaluate(answer.timetable) == pytest.approx(optimum, rel=TICKS)
        assert answer.bound <= optimum * SLACK


class TestPartition:
    @pytest.mark.parametrize("problems", PROBLEMS)
    @quick
    @given(st.data())
    def test_recurrence(self, problems, data):
        problem = data.draw(PROBLEMS[problems](6, 5, 6))
        order = tuple(data.draw(st.permutations(range(len(problem.cluster)))))
        found = balanced_partitions(problem, order)
        expected = {xi: w for xi, w in prm_table(problem, order).items() if w < inf}
        assert {xi: seconds for xi, (seconds, _) in found.items()} == pytest.approx(expected)
        for xi, (seconds, choices) in found.items():
            stages = [(choice.start, choice.stop, choice.devices) for choice in choices]
            assert len(stages) == xi
            assert bottleneck(problem, stages) == pytest.approx(seconds)

    @quick
    @given(paper_problem(max_devices=4))
    def test_lemma2(self, problem):
        """W_PRM <= (1 + Phi) W*, where every device is used (as the lemma's proof assumes)."""
        table = balanced_partitions(problem, recursive_device_order(problem.cluster))
        least = min(
            bottleneck(problem, stages, memory=False)
            for stages in all_stages(problem, allow_idle=False)
        )
        reached = min(seconds for seconds, _ in table.values())
        assert reached <= lemma2_factor(problem) * least * SLACK


class TestPlanners:
    @examples(25, parent=slow)
    @given(paper_problem())
    def test_theorem1(self, problem):
        """T_SPP <= (2 + (4V-4)/M)(1 + Phi) T*, for the optimum that uses every device.

        With idle devices allowed in the optimum the theorem is false: one layer with many
        parameters and two devices suffice, since SPP then has to pay the all-reduce.
        """
        cost = plan(problem, planner="spp", limits=LIMITS).cost
        optimum = brute_force_joint(problem, allow_idle=False)
        assert cost <= theorem1_factor(problem) * optimum * SLACK

    @pytest.mark.parametrize("problems", PROBLEMS)
    @slow
    @given(st.data())
    def test_exact_is_the_joint_optimum(self, problems, data):
        problem = data.draw(PROBLEMS[problems]())
        optimum = brute_force_joint(problem)
        result = plan(problem, planner="exact", limits=LIMITS)
        if optimum == inf:
            assert result.status is Status.INFEASIBLE
            assert result.plan is None
        else:
            assert result.status is Status.OPTIMAL
            assert result.cost == pytest.approx(optimum, rel=TICKS)
            assert result.bound == pytest.approx(optimum, rel=TICKS)

    @pytest.mark.parametrize("planner", PLANNERS)
    @pytest.mark.parametrize("problems", PROBLEMS)
    @examples(8, parent=slow)
    @given(st.data())
    def test_cost_is_above_and_bounds_are_below_the_optimum(self, problems, planner, data):
        problem = data.draw(PROBLEMS[problems]())
        optimum = brute_force_joint(problem)  # of disjoint split stages
        result = plan(problem, planner=planner, limits=SHORT)
        if result.plan is None:
            return
        assert result.bound <= result.cost * SLACK
        bounds = [
            bound.seconds
            for bound in result.plan.certificate.bounds
            if bound.scope == "problem" and bound.plans.contains(DISJOINT_SPLIT)
        ]
        assert max(bounds) <= optimum * (1 + TICKS)
        if DISJOINT_SPLIT.contains(class_of(result.plan)):
            assert result.cost * SLACK >= optimum


def linked(*bandwidths):
    """Three layers of 3, 6 and 3 s with 1e9 bytes between them, four microbatches."""
    layers = tuple(
        Layer(f"l{i}", 0.0, (LayerCost(1, seconds, 0.0, sent, 2 * seconds),))
        for i, (seconds, sent) in enumerate([(1.0, 1e9), (2.0, 1e9), (1.0, 0.0)])
    )
    devices = [Device(f"g{v}", "v100", 1e12) for v in range(len(bandwidths))]
    chain = Chain("worked", "measured: by hand", 1, layers)
    return PipelineProblem(chain, from_matrix(devices, [list(row) for row in bandwidths]), 4)


class TestWorkedBounds:
    """What the theorems promise, by hand: a bound that is too large would never be broken."""

    def test_lemma1(self):
        # C = max(1 + 2, 2 * 4) = 8; (1 + 4/2) * 2 * 8 + 0.
        two = MakespanProblem(2, (1.0, 1.0), (2.0, 2.0), (4.0,), (4.0,), (0.0, 0.0), (2, 2))
        assert lemma1_bound(two) == 48.0

    @pytest.mark.parametrize(
        ("bandwidths", "factor"),
        [
            (((0,),), 2.0),
            (((0, 1e9), (1e9, 0)), 2 + 4 / 4),
            # p_max b_max = 6 * 2e9 = 12e9 > d_max = 2e9; Gamma = 12/3 = 4; 1/b_min - 1/b_max =
            # 0.5e-9: Phi = 12/4 * 0.5 = 1.5; (2 + 8/4) * 2.5.
            (((0, 2e9, 1e9), (2e9, 0, 1e9), (1e9, 1e9, 0)), 10.0),
        ],
    )
    def test_theorem1(self, bandwidths, factor):
        assert theorem1_factor(linked(*bandwidths)) == pytest.approx(factor)


@examples(40, derandomize=True)
@given(random_makespan())
def test_microbatches_may_keep_their_order(problem):
    """The claim on which the makespan formulation rests."""
    free_order = brute_force_makespan(problem)
    assert brute_force_makespan(problem, fifo=True) == pytest.approx(free_order)


ROUNDING = 1e-9  # relative, of sums of floats
GB = 1e9


def with_one_more_device(problem):
    """A copy of the last device, linked like it, and to it by the best link there is."""
    cluster = problem.cluster
    size = len(cluster)
    image = [*range(size), size - 1]
    bandwidth = cluster.direct_bandwidth[image][:, image]
    latency = cluster.latency[image][:, image]
    apart = cluster.direct_bandwidth[cluster.direct_bandwidth > 0]
    bandwidth[size - 1, size] = bandwidth[size, size - 1] = apart.max() if len(apart) else GB
    devices = [*cluster.devices, replace(cluster.devices[-1], name="new")]
    return PipelineProblem(
        problem.chain, from_matrix(devices, bandwidth, latency.tolist()), problem.microbatches
    )


def equal_layers(count, costs, parameters=0.0):
    layers = tuple(Layer(f"l{i}", parameters, costs) for i in range(count))
    return Chain("equal", "by hand", 840, layers)


@pytest.mark.parametrize("problems", PROBLEMS)
@examples(40, derandomize=True)
@given(st.data())
def test_never_above_the_joint_optimum(problems, data):
    problem = data.draw(PROBLEMS[problems]())
    optimum = brute_force_joint(problem)
    assume(optimum < inf)
    for incumbent in (optimum, 1.3 * optimum, 10 * optimum):
        bound = fill_and_drain_bound(problem, incumbent)
        assert relaxed_load_bound(problem) <= bound * (1 + ROUNDING)
        assert bound <= optimum * (1 + ROUNDING)


@pytest.mark.parametrize("problems", PROBLEMS)
@examples(40, derandomize=True)
@given(st.data())
def test_never_above_the_incumbent(problems, data):
    """Also where the incumbent is better than any plan can be."""
    problem = data.draw(PROBLEMS[problems](5, 5, 5))
    load = relaxed_load_bound(problem)
    for factor in (1.0, 1.01, 1.5, 4.0):
        assert fill_and_drain_bound(problem, load * factor) <= load * factor * (1 + ROUNDING)


@examples(40, derandomize=True)
@given(hard_problem(5, 4, 4), st.sampled_from((2.0, 3.0, 0.5)))
def test_twice_the_times_is_twice_the_bound(problem, factor):
    other = scaled(problem, factor)
    assert relaxed_load_bound(other) == pytest.approx(factor * relaxed_load_bound(problem))
    incumbent = 5 * relaxed_load_bound(problem)
    assert fill_and_drain_bound(other, factor * incumbent) == pytest.approx(
        factor * fill_and_drain_bound(problem, incumbent), rel=2 * PRECISION
    )


@examples(40, derandomize=True)
@given(paper_problem(5, 4, 4))
def test_more_devices_never_raise_it(problem):
    more = with_one_more_device(problem)
    assert relaxed_load_bound(more) <= relaxed_load_bound(problem) * (1 + ROUNDING)
    incumbent = 5 * relaxed_load_bound(problem)
    bound = fill_and_drain_bound(problem, incumbent)
    assert fill_and_drain_bound(more, incumbent) <= bound * (1 + 2 * PRECISION)


def test_by_hand_load():
    """4 layers of 3 s, 5 microbatches, 3 devices."""
    problem = PipelineProblem(
        equal_layers(4, (LayerCost(840, 1.0, 0.0, 0.0, 2.0),)), uniform_servers(1, 3, Link(GB)), 5
    )
    assert relaxed_load_bound(problem) == pytest.approx(5 * 12 / 3)


def test_by_hand_slow_network():
    """Two layers of 3 s, 100 GB of parameters each and a boundary of 100 GB, at 1 GB/s.

    Neither sharing nor cutting pays: one device does all, 4 x 6 s.
    """
    cost = LayerCost(840, 1.0, 0.0, 100 * GB, 2.0)
    chain = equal_layers(2, (cost,), 100 * GB)
    cluster = uniform_servers(1, 2, Link(GB), memory_bytes=1e13)
    problem = PipelineProblem(chain, cluster, 4)
    assert relaxed_load_bound(problem) == pytest.approx(12.0)
    assert fill_and_drain_bound(problem, 24.0) == pytest.approx(24.0, rel=2 * PRECISION)
    assert fill_and_drain_bound(problem, 100.0) == pytest.approx(24.0, rel=2 * PRECISION)


def test_by_hand_fill_and_drain():
    """Nothing to send, an all-reduce that never pays: two stages of 3 s, 4 microbatches.

    The last stage waits for the first one's forward, and its last backward for the way back.
    """
    cost = LayerCost(840, 1.0, 0.0, 0.0, 2.0)
    chain = equal_layers(2, (cost,), 100 * GB)
    problem = PipelineProblem(chain, uniform_servers(1, 2, Link(GB), memory_bytes=1e13), 4)
    assert brute_force_joint(problem) == pytest.approx(15.0)
    assert fill_and_drain_bound(problem, 100.0) == pytest.approx(15.0, rel=2 * PRECISION)


def test_by_hand_channel():
    """Two layers that no device holds both, 10 s for a boundary, 4 microbatches.

    The channel works for 80 s, and waits for the first forward of 1 s; the relaxation does not see
    the last backward of 2 s.
    """
    cost = LayerCost(840, 1.0, 0.0, 10 * GB, 2.0)
    cluster = uniform_servers(1, 2, Link(GB), memory_bytes=500 * GB)
    problem = PipelineProblem(equal_layers(2, (cost,), 100 * GB), cluster, 4)
    assert brute_force_joint(problem) == pytest.approx(83.0)
    assert fill_and_drain_bound(problem, 200.0) == pytest.approx(81.0, rel=2 * PRECISION)


def test_an_incumbent_at_the_load_is_optimal():
    problem = PipelineProblem(
        equal_layers(4, (LayerCost(840, 1.0, 0.0, 0.0, 2.0),)), uniform_servers(1, 3, Link(GB)), 5
    )
    assert fill_and_drain_bound(problem, 20.0) == pytest.approx(20.0)


def test_the_relaxation_takes_the_best_of_everything():
    """The quickest kind, the widest link, the least latency, the largest memory."""
    costs = (
        LayerCost(840, 1.0, 5.0, 7.0, 2.0, device_kind="fast"),
        LayerCost(840, 3.0, 5.0, 7.0, 1.0, device_kind="slow"),
    )
    chain = equal_layers(2, costs, 11.0)
    devices = [Device("a", "fast", 2e9), Device("b", "slow", 3e9)]
    cluster = from_matrix(devices, [[0, 1 * GB], [4 * GB, 0]], [[0.0, 0.2], [0.1, 0.0]])
    form = relax(PipelineProblem(chain, cluster, 3))
    assert form.forward[1].tolist() == [0.0, 1.0, 2.0]
    assert form.backward[1].tolist() == [0.0, 1.0, 2.0]
    assert form.forward[2].tolist() == [0.0, 0.5, 1.0]
    assert form.parameters.tolist() == [0.0, 11.0, 22.0]
    assert form.boundary.tolist() == [0.0, 7.0, 0.0]
    assert (form.memory, form.seconds_per_byte, form.latency) == (3e9, 1 / (4 * GB), 0.1)
