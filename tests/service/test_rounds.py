"""Trainings planned by their own measurements on pretended machines; orders timed again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from stagewright.executor.programs.trace import Trace, TracedStep
from stagewright.formulations.pipelines.windows import timetable_of_order
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.machines.cluster import Cluster, Link, from_matrix, uniform_servers
from stagewright.graphs.machines.parts import with_slower_links
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.service.pipelines.requests import PlanRequest
from stagewright.service.pipelines.rounds import PipelineRounds
from stagewright.service.schedules.requests import ScheduleRequest
from stagewright.service.schedules.scheduling import schedule
from stagewright.solvers.planners.steps.warm_start import in_its_order

BANDWIDTH = 1e12


def chain_of(*seconds: float) -> Chain:
    layers = [
        Layer(f"l{i}", 4.0, costs=(LayerCost(1, one, 8.0, 1e9, 2 * one),))
        for i, one in enumerate(seconds)
    ]
    return Chain("net", "measured: by hand", 1, tuple(layers))


def pair_of_devices(bandwidth: float = BANDWIDTH) -> Cluster:
    return uniform_servers(1, 2, Link(bandwidth, 1e-6))


class Machine:
    """What really happens: other times of layers, other links."""

    def __init__(self, chain: Chain, cluster: Cluster, microbatches: int) -> None:
        self.problem = PipelineProblem(chain, cluster, microbatches)
        self.seconds: list[float] = []

    def measure(self, plan: PipelinePlan) -> Trace:
        run = in_its_order(self.problem, plan)
        assert run is not None
        self.seconds.append(max(one.finish_seconds for one in run.actions))
        steps = [TracedStep(i, self.seconds[-1], 0.0, tuple(run.actions)) for i in range(3)]
        return Trace(plan.digest, plan.model, "a desk", "gloo", 2, "float32", tuple(steps))


def rounds_of(chain: Chain, **more: object) -> PipelineRounds:
    asked = {"chain": chain, "cluster": pair_of_devices(), "microbatches": 4, "planner": "spp"}
    return PipelineRounds(PlanRequest(**asked | more), tolerance=0.01)


def test_links_that_are_slow_make_it_one_stage() -> None:
    rounds = rounds_of(chain_of(1, 1, 1, 1))
    machine = Machine(chain_of(1, 1, 1, 1), pair_of_devices(1e8), 4)
    found = list(rounds.run(rounds.start(), machine.measure))
    assert [len(one.plan.stages) for one in found] == [2, 1]
    assert [one.is_kept for one in found] == [True, True]
    assert machine.seconds == [pytest.approx(91.0, rel=0.1), pytest.approx(48.0)]


def test_a_model_that_is_twice_as_slow_keeps_its_plan() -> None:
    rounds = rounds_of(chain_of(1, 2, 3, 1))
    machine = Machine(chain_of(2, 4, 6, 2), pair_of_devices(), 4)
    found = list(rounds.run(rounds.start(), machine.measure))
    assert len(found) == 1
    for layer, known in zip(machine.problem.chain.layers, found[0].costs.chain.layers, strict=True):
        assert known.costs[0].forward_seconds == pytest.approx(layer.costs[0].forward_seconds)


@given(
    st.lists(st.floats(0.1, 4.0), min_size=2, max_size=5),
    st.lists(st.floats(0.2, 5.0), min_size=5, max_size=5),
    st.floats(1e8, 1e12),
)
@examples(200, quick=10)
def test_the_best_measured_plan_is_kept(
    seconds: list[float], factors: list[float], bandwidth: float
) -> None:
    rounds = rounds_of(chain_of(*seconds))
    true = [one * by for one, by in zip(seconds, factors, strict=False)]
    machine = Machine(chain_of(*true), pair_of_devices(bandwidth), 4)
    found = list(rounds.run(rounds.start(), machine.measure))
    assert [one.seconds.measured for one in found] == pytest.approx(machine.seconds)
    kept = [one.number for one in found if one.is_kept]
    assert machine.seconds[kept[-1]] == min(machine.seconds)
    if len(found) < rounds.most:
        # By all that was learned, no plan is faster than the best run, but for what was tried.
        plan = rounds.planned(found[-1].costs)
        assert plan is None or rounds.work(plan) in [rounds.work(one.plan) for one in found]


def test_slow_links() -> None:
    servers = uniform_servers(2, 1, Link(BANDWIDTH, 1e-6), Link(BANDWIDTH / 8, 1e-5))
    matrix = from_matrix(servers.devices, servers.bandwidth, servers.latency.tolist())
    for cluster in (servers, matrix):
        slow = with_slower_links(cluster, 4.0)
        assert slow.bandwidth[0, 1] == BANDWIDTH / 32
        assert slow.latency[0, 1] == 4e-5
        assert with_slower_links(slow, 0.25).links == cluster.links


KINDS = ("gpipe", "1f1b", "pe", "interleaved", "zb-h1", "zb1p", "zbv", "v-half", "optimal")


@examples(100)
@given(st.data())
def test_generated_orders_have_their_times_and_optimal_ones_stay_valid(data):
    kind = data.draw(st.sampled_from(KINDS))
    stages = data.draw(st.integers(2, 3))
    microbatches = stages * data.draw(st.integers(1, 2))

    def times(most, count=stages):
        drawn = data.draw(st.lists(st.integers(1, most), min_size=count, max_size=count))
        return tuple(map(float, drawn))

    request = ScheduleRequest.of(
        microbatches=microbatches,
        forward=times(4),
        backward=times(5),
        weight_gradient=times(4),
        transfers=times(8, 1),  # as slow as computations, or slower
        kind=kind,
        time_limit=1.0,
    )
    answer = schedule(request)
    order = answer.timed.order
    timed, times_again = timetable_of_order(answer.problem, order)
    assert answer.problem.evaluate(times_again) == pytest.approx(timed.makespan())
    assert timed.makespan() >= answer.bound * (1 - 1e-9)
    if kind != "optimal":
        assert timed.makespan() == answer.makespan
        assert timed.starts == answer.timed.starts
