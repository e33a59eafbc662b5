"""The joint reference against enumeration, and what it says when it is stopped or nothing fits."""

from collections.abc import Iterable
from itertools import permutations
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from makespan_oracle import brute_force_makespan
from oracles import all_stages, brute_force_joint
from profiles import examples
from strategies import PROBLEMS

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.pipelines.bppm import makespan_problem
from stagewright.formulations.pipelines.joint import JointPlanning, Prefix
from stagewright.formulations.plans.memory import in_flight_limit
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.machines.cluster import Cluster, Device, Link, from_matrix, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers import best_first
from stagewright.solvers.best_first import PRECISION
from stagewright.solvers.planners import exact as module
from stagewright.solvers.planners.exact import ExactAnswer, exact, plan_exact
from stagewright.solvers.planners.spp import plan_spp
from stagewright.solvers.planners.steps.proposal import NoPlan, Proposal, cost_of

LIMITS = Limits(seconds=60.0)
ROUNDING = 1e-9  # relative, of sums of floats
MS, MB, GB = 1e-3, 1e6, 1e9


slow = examples(25, derandomize=True)


def chain(
    times: Iterable[tuple[float, float]], output: float = 0.0, parameters: float = 100 * MB
) -> Chain:
    """Layers with (forward, backward) in milliseconds."""
    costs = [
        LayerCost(840, forward_seconds=f * MS, backward_seconds=b * MS, saved_bytes=0.0,
                  output_bytes=output)
        for f, b in times
    ]  # fmt: skip
    layers = [Layer(f"l{i}", parameters, (cost,)) for i, cost in enumerate(costs)]
    return Chain("test", "measured: by hand", 840, tuple(layers), 1.0)


def pair(memory: float = 16 * GB) -> Cluster:
    """Two devices; a megabyte takes a millisecond."""
    return uniform_servers(1, 2, Link(GB), memory_bytes=memory)


def contended() -> PipelineProblem:
    """The optimum is 220 ms; the static bounds say 215, the best list schedule 229."""
    return PipelineProblem(chain([(4, 30), (1, 33)], output=21 * MB), pair(), 4)


def cost(problem: PipelineProblem, answer: ExactAnswer) -> float:
    """The checked time of the answer's plan."""
    assert answer.stages is not None
    assert answer.timetable is not None
    used = [v for stage in answer.stages for v in stage.devices]
    assert len(set(used)) == len(used)
    edges = [(stage.start, stage.stop) for stage in answer.stages]
    assert [start for start, _ in edges] == [0, *(stop for _, stop in edges[:-1])]
    assert edges[-1][1] == len(problem.chain)
    scheduling = makespan_problem(problem, answer.stages)
    assert scheduling is not None
    return scheduling.evaluate(answer.timetable)


def leaves(tree: JointPlanning) -> list[Prefix]:
    """All whole plans of the tree."""
    whole, waiting = [], [tree.root]
    while waiting:
        prefix = waiting.pop()
        if prefix.layers == len(tree.problem.chain):
            whole.append(prefix)
        else:
            waiting += tree.children(prefix)
    return whole


def canonical(cluster: Cluster, plan: Iterable[tuple[int, int, tuple[int, ...]]]) -> tuple:
    """The least of the plan's images under the cluster's symmetries."""
    stages, size = list(plan), len(cluster)
    look = [(device.kind, device.memory_bytes) for device in cluster.devices]
    images = []
    for image in permutations(range(size)):
        grid = np.ix_(image, image)
        if (
            [look[v] for v in image] == look
            and np.array_equal(cluster.bandwidth[grid], cluster.bandwidth)
            and np.array_equal(cluster.latency[grid], cluster.latency)
        ):
            moved = [(a, b, tuple(sorted(image[v] for v in devices))) for a, b, devices in stages]
            images.append(tuple(moved))
    return min(images)


def two_fast_two_slow() -> Cluster:
    """Two devices of each of two kinds, and links that differ by direction."""
    devices = [Device(f"g{v}", "ab"[v // 2], 16 * GB) for v in range(4)]
    bandwidth = np.full((4, 4), GB)
    bandwidth[:2, 2:] = 4 * GB
    return from_matrix(devices, bandwidth)


CLUSTERS = {
    "one server": uniform_servers(1, 4, Link(GB)),
    "two servers": uniform_servers(2, 2, Link(4 * GB), Link(GB)),
    "four servers": uniform_servers(4, 1, Link(4 * GB), Link(GB)),
    "two kinds": two_fast_two_slow(),
}


class TestTree:
    @pytest.mark.parametrize("cluster", CLUSTERS)
    def test_every_plan_once_up_to_symmetry(self, cluster):
        problem = PipelineProblem(chain([(1, 2)] * 4), CLUSTERS[cluster], 2)
        found = [
            canonical(problem.cluster, ((s.start, s.stop, s.devices) for s in leaf.stages))
            for leaf in leaves(JointPlanning(problem))
        ]
        every = {canonical(problem.cluster, plan) for plan in all_stages(problem, allow_idle=True)}
        assert len(set(found)) == len(found)
        assert set(found) == every

    @pytest.mark.parametrize("problems", PROBLEMS)
    @slow
    @given(st.data())
    def test_every_plan_that_fits(self, problems, data):
        problem = data.draw(PROBLEMS[problems]())
        found = {
            canonical(problem.cluster, ((s.start, s.stop, s.devices) for s in leaf.stages))
            for leaf in leaves(JointPlanning(problem))
        }
        assert found == {
            canonical(problem.cluster, plan)
            for plan in all_stages(problem, allow_idle=True)
            if all(in_flight_limit(problem, *stage) > 0 for stage in plan)
        }

    @pytest.mark.parametrize("problems", PROBLEMS)
    @slow
    @given(st.data())
    def test_bounds_are_below_every_schedule(self, problems, data):
        """Bounds never fall along a branch: those of the leaves speak for all prefixes."""
        problem = data.draw(PROBLEMS[problems](max_layers=3, max_devices=3))
        tree = JointPlanning(problem)
        for leaf in leaves(tree):
            scheduling = makespan_problem(problem, leaf.stages)
            assert tree.root.bound <= leaf.bound
            assert leaf.bound <= brute_force_makespan(scheduling) * (1 + ROUNDING)

    def test_bounds_of_a_forced_partition(self):
        """Memory asks for a stage per layer: 25 ms there, 4 x 34 ms, 51 ms back. With transfers
        of 30 ms the channel decides: 34 ms of stage 0 around 4 x 60 ms.
        """
        problem = PipelineProblem(contended().chain, pair(500 * MB), 4)
        assert JointPlanning(problem).root.bound == pytest.approx(212 * MS)
        slower = PipelineProblem(chain([(4, 30), (1, 33)], output=30 * MB), pair(550 * MB), 4)
        assert JointPlanning(slower).root.bound == pytest.approx((34 + 4 * 60) * MS)


class TestOptimum:
    @pytest.mark.parametrize("problems", PROBLEMS)
    @examples(40, parent=slow)
    @given(st.data())
    def test_brute_force(self, problems, data):
        problem = data.draw(PROBLEMS[problems]())
        optimum = brute_force_joint(problem)
        answer = exact(problem, LIMITS)
        assert answer.complete
        if optimum == inf:
            assert answer.stages is None
            assert answer.bound_seconds == inf
            return
        assert cost(problem, answer) == answer.cost_seconds
        assert optimum * (1 - PRECISION) <= answer.bound_seconds <= answer.cost_seconds
        assert answer.cost_seconds == pytest.approx(optimum, rel=2 * PRECISION)

    def test_known(self):
        """Layers of 1 + 2 ms, two microbatches: 9 ms in a pipeline, 12 ms on one device, and with
        data parallelism an all-reduce of 200 ms behind the 6 ms.
        """
        problem = PipelineProblem(chain([(1, 2)] * 2), pair(), 2)
        answer = exact(problem, LIMITS)
        assert answer.cost_seconds == pytest.approx(9 * MS)
        assert answer.bound_seconds == pytest.approx(9 * MS)
        assert [(s.start, s.stop, s.devices) for s in answer.stages] == [(0, 1, (0,)), (1, 2, (1,))]

    def test_idle_device_is_better(self):
        problem = PipelineProblem(chain([(1, 2)]), pair(), 2)
        answer = exact(problem, LIMITS)
        assert answer.cost_seconds == pytest.approx(6 * MS)
        assert [s.devices for s in answer.stages] == [(0,)]

    def test_schedule_needs_a_proof(self):
        answer = exact(contended(), LIMITS)
        assert answer.proofs > 0
        assert cost(contended(), answer) == pytest.approx(220 * MS)
        assert answer.bound_seconds == pytest.approx(220 * MS, rel=2 * PRECISION)

    def test_open_schedules_get_another_turn(self, monkeypatch):
        monkeypatch.setattr(best_first, "FIRST_SECONDS", 1e-6)
        answer = exact(contended(), LIMITS)
        assert answer.proofs > 1
        assert answer.complete
        assert answer.cost_seconds == pytest.approx(220 * MS)

    def test_eight_layers_on_two_servers(self):
        times = [(5, 11), (7, 13), (3, 8), (12, 20), (9, 21), (4, 9), (6, 14), (8, 17)]
        cluster = uniform_servers(2, 2, Link(4 * GB), Link(GB))
        problem = PipelineProblem(chain(times, output=8 * MB), cluster, 4)
        answer = exact(problem, LIMITS)
        assert answer.complete
        spp = plan_spp(problem, LIMITS, lambda _: None)
        assert isinstance(spp, Proposal)
        assert cost(problem, answer) <= cost_of(problem, spp)
        assert answer.bound_seconds >= answer.cost_seconds * (1 - 2 * PRECISION)


class TestStopped:
    def test_at_once(self):
        answer = exact(contended(), Limits(seconds=0.0))
        assert not answer.complete
        assert answer.stages is None
        assert 0 < answer.bound_seconds <= 220 * MS

    def test_before_a_proof(self, monkeypatch):
        """CP-SAT gets no time, and the search is stopped when it has asked twice."""
        monkeypatch.setattr(best_first, "FIRST_SECONDS", 0.0)
        search = module._PlanSearch(contended(), LIMITS, lambda _: None, inf)
        monkeypatch.setattr(search, "_left", lambda: 60.0 if search.proofs < 2 else 0.0)
        assert not search.run()
        assert search.best is not None
        assert 215 * MS * (1 - ROUNDING) <= search.bound() <= 220 * MS

    def test_progress_bounds_are_below_the_optimum(self):
        steps = []
        exact(contended(), LIMITS, steps.append)
        assert len(steps) >= 2
        assert [s.objective for s in steps] == sorted((s.objective for s in steps), reverse=True)
        assert all(0 < step.bound <= 220 * MS * (1 + ROUNDING) for step in steps)

    def test_too_large_for_the_tables(self, monkeypatch):
        monkeypatch.setattr(module, "STEPS", 1)
        answer = exact(contended(), LIMITS)
        assert not answer.complete
        assert answer.stages is None
        assert 0 < answer.bound_seconds <= 220 * MS


class TestIncumbent:
    def test_nothing_is_better(self):
        answer = exact(contended(), LIMITS, incumbent_seconds=220 * MS)
        assert answer.complete
        assert answer.stages is None
        assert answer.bound_seconds == pytest.approx(220 * MS, rel=2 * PRECISION)

    def test_something_is_better(self):
        answer = exact(contended(), LIMITS, incumbent_seconds=221 * MS)
        assert cost(contended(), answer) == pytest.approx(220 * MS)


class TestPlanner:
    def test_keeps_spp_where_it_is_optimal(self):
        problem = PipelineProblem(chain([(1, 2)] * 2), pair(), 2)
        proposal = plan_exact(problem, LIMITS, lambda _: None)
        assert isinstance(proposal, Proposal)
        assert [stage.layers for stage in proposal.stages] == [(0, 1), (1, 2)]
        (bound,) = proposal.bounds
        assert bound.scope == "problem"
        assert bound.seconds == pytest.approx(9 * MS, rel=2 * PRECISION)

    def test_improves_on_spp(self):
        proposal = plan_exact(contended(), LIMITS, lambda _: None)
        assert isinstance(proposal, Proposal)
        assert cost_of(contended(), proposal) == pytest.approx(220 * MS)

    def test_nothing_fits(self):
        """Two layers, each with 390 MB of weights and states, on one device of 500 MB."""
        cluster = uniform_servers(1, 1, Link(GB), memory_bytes=500 * MB)
        problem = PipelineProblem(chain([(1, 2)] * 2, parameters=130 * MB), cluster, 2)
        answer = exact(problem, LIMITS)
        assert (answer.stages, answer.complete, answer.bound_seconds) == (None, True, inf)
        refusal = plan_exact(problem, LIMITS, lambda _: None)
        assert isinstance(refusal, NoPlan)
        assert refusal.proved
