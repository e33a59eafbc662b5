"""The server-aware relaxation: never above the joint optimum; runs are packed into servers."""

from itertools import pairwise
from math import inf
from threading import Event

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles import brute_force_joint
from plans import scaled
from profiles import examples
from strategies import PROBLEMS, hard_problem

from stagewright.formulations.forms.answers import Limits, silent
from stagewright.formulations.pipelines.bounds.server_relaxation import (
    Levels,
    Place,
    RelaxedStage,
    dual_feasible,
    levels_of,
)
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan_class import (
    DISJOINT_SPLIT,
    DISJOINT_WHOLE,
    SHARED_SPLIT,
    SHARED_WHOLE,
)
from stagewright.formulations.prices.analytic import analytic_model
from stagewright.graphs.machines.cluster import Device, Link, from_matrix, uniform_servers
from stagewright.graphs.machines.topology import dgx1
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.pipelines.relaxation import fill_and_drain_bound, relaxed_load_bound
from stagewright.solvers.pipelines.servers.relaxation import (
    ServerBounds,
    ServerTree,
    is_server_bound,
    server_bound,
)
from stagewright.solvers.pipelines.servers.search import PRECISION
from stagewright.solvers.planners.exact import exact
from stagewright.solvers.planners.servers import packed, plan_servers
from stagewright.solvers.planners.steps.proposal import NoPlan, cost_of

ROUNDING = 1e-9  # relative, of sums of floats
LONG = 60.0  # seconds
GB = 1e9
CLASSES = (DISJOINT_SPLIT, DISJOINT_WHOLE, SHARED_WHOLE, SHARED_SPLIT)

quick = examples(40, derandomize=True)


@st.composite
def server_problems(draw):
    """Two or three levels of links, 3 to 6 devices of one to four kinds, tight memory."""
    groups = draw(st.sampled_from([(2, 2), (1, 2), (3, 1), (2, 2, 1), (1, 1, 2), (2, 2, 2)]))
    home = [s for s, size in enumerate(groups) for _ in range(size)]
    rack = [s // 2 for s in home]
    fast, slow, slowest = (draw(st.sampled_from([1, 3, 10, 40])) * GB for _ in range(3))
    links = [
        [0.0 if u == v else fast if home[u] == home[v] else slow if rack[u] == rack[v] else slowest
         for v in range(len(home))]
        for u in range(len(home))
    ]  # fmt: skip
    memory = draw(st.sampled_from([1e12, 60e9, 30e9]))
    kinds = draw(st.sampled_from(["a", "ab", "abcd"]))
    number = draw(st.sampled_from([home, range(len(home))]))
    devices = [Device(f"d{v}", kinds[number[v] % len(kinds)], memory) for v in range(len(home))]
    seconds = st.floats(0.1, 4.0)
    samples = draw(st.integers(1, 4))

    def cost(kind):
        return LayerCost(
            samples, draw(seconds), draw(st.floats(0, 8 * GB)), draw(st.floats(0, 8 * GB)),
            draw(seconds), update_seconds=draw(st.sampled_from([0.0, 0.5])), device_kind=kind,
        )  # fmt: skip

    layers = tuple(
        Layer(f"l{i}", draw(st.floats(0, 5 * GB)), tuple(cost(kind) for kind in kinds))
        for i in range(draw(st.integers(2, 4)))
    )
    chain = Chain("drawn", "by hand", samples, layers)
    return PipelineProblem(chain, from_matrix(devices, links), draw(st.integers(1, 4)))


@pytest.mark.parametrize("problems", PROBLEMS)
@quick
@given(st.data())
def test_never_above_the_joint_optimum(problems, data):
    problem = data.draw(PROBLEMS[problems]())
    optimum = brute_force_joint(problem)
    assume(optimum < inf)
    for plans in CLASSES:
        for incumbent in (optimum, 1.3 * optimum):
            bound = server_bound(problem, incumbent, LONG, plans)
            assert relaxed_load_bound(problem) <= bound * (1 + ROUNDING)
            assert bound <= optimum * (1 + ROUNDING)


@quick
@given(server_problems())
def test_never_above_the_optimum_on_servers(problem):
    answer = exact(problem, Limits(seconds=20))
    assume(answer.complete)
    bound = server_bound(problem, inf, LONG)
    assert bound <= answer.bound_seconds * (1 + 1e-6)
    assert server_bound(problem, inf, LONG, DISJOINT_WHOLE) <= answer.bound_seconds * (1 + 1e-6)
    raised = ServerBounds(problem).branch(inf, LONG)
    assert bound * (1 - ROUNDING) <= raised <= answer.bound_seconds * (1 + 1e-6)


@quick
@given(hard_problem(5, 4, 4), st.sampled_from((2.0, 3.0, 0.5)))
def test_twice_the_times_is_twice_the_bound(problem, factor):
    other = server_bound(scaled(problem, factor), inf, LONG)
    assert other == pytest.approx(factor * server_bound(problem, inf, LONG), rel=3 * PRECISION)


@quick
@given(server_problems())
def test_a_bound_is_verified_and_more_is_not(problem):
    for plans in CLASSES:
        bound = server_bound(problem, inf, LONG, plans)
        assume(bound < inf)
        assert is_server_bound(problem, bound, plans)
        assert not is_server_bound(problem, bound * (1 + 3 * PRECISION), plans)


@quick
@given(server_problems())
def test_plans_are_never_below_the_bound(problem):
    answer = plan_servers(problem, Limits(seconds=2), silent)
    if isinstance(answer, NoPlan):
        return
    cost = cost_of(problem, answer)
    assert answer.bounds[0].seconds <= cost * (1 + ROUNDING)
    taken = [name for stage in answer.stages for name in stage.devices]
    assert len({*taken}) == len(taken)


# Of each layer: MB of its parameters, then on each kind of device MB that are kept and sent and
# milliseconds forward and backward, the last three and kept ones by 3, 2 and 1 samples.
FULL_RACK = [
    (40, {"a": (19, 12, (11, 28), (3, 34), (1, 10)), "b": (7, 5, (18, 27), (8, 8), (10, 7))}),
    (120, {"a": (13, 4, (2, 31), (1, 17), (6, 36)), "b": (28, 9, (10, 30), (19, 31), (20, 32))}),
    (40, {"a": (23, 10, (13, 36), (15, 37), (15, 11)), "b": (19, 3, (8, 27), (15, 5), (20, 1))}),
    (40, {"a": (9, 10, (9, 4), (16, 27), (10, 39)), "b": (0, 12, (1, 12), (15, 29), (13, 3))}),
]


def test_a_rack_has_no_room_where_its_server_has():
    """A server of two in a rack of three: a third stage in the rack leaves room for none."""
    layers = [
        Layer(
            f"layer{i}",
            size * 1e6,
            tuple(
                LayerCost(
                    n, f / 1e3, n / 3 * kept * 1e6, n / 3 * sent * 1e6, b / 1e3, device_kind=k
                )
                for k, (kept, sent, *times) in kinds.items()
                for n, (f, b) in zip((3, 2, 1), times, strict=True)
            ),
        )
        for i, (size, kinds) in enumerate(FULL_RACK)
    ]
    memory = ("a", 458.5), ("a", 530.5), ("b", 518.5), ("b", 310.5)
    devices = tuple(Device(f"gpu{i}", of, mb * 1e6) for i, (of, mb) in enumerate(memory))
    bandwidth = np.full((4, 4), 0.25 * GB)
    bandwidth[0, 1], bandwidth[1, 0], bandwidth[3, :2] = 4 * GB, GB, GB
    latency = np.array([[0, 3, 0, 1], [1, 1, 1, 3], [0, 1, 0, 1], [3, 1, 1, 0]]) / 1e3
    chain = Chain("full rack", "test", 3, tuple(layers), optimizer_bytes_per_parameter_byte=0.0)
    problem = PipelineProblem(chain, from_matrix(devices, bandwidth, latency.tolist()), 2)
    for _ in range(20):  # what the search read past its tables differed from call to call
        noise = [np.full(count, value) for count in range(1, 4000, 200) for value in (0.3, np.nan)]
        del noise
        assert server_bound(problem, inf, LONG) == pytest.approx(0.1919921, rel=1e-6)
    assert exact(problem, Limits(seconds=20)).bound_seconds == pytest.approx(0.21125)


def test_slow_links_between_servers_raise_the_bound():
    """bert-large on 8 servers of 4: 198 ms, where the best link everywhere gives 168 ms."""
    cluster = uniform_servers(8, 4, Link(12 * GB), Link(1.25 * GB))
    problem = PipelineProblem(analytic_model("bert-large", 4), cluster, 8)
    plain = fill_and_drain_bound(problem, 100.0)
    bound = server_bound(problem, inf, LONG)
    answer = plan_servers(problem, Limits(seconds=8), silent)
    assert not isinstance(answer, NoPlan)
    assert bound > 1.1 * plain
    assert cost_of(problem, answer) <= 1.04 * bound


def test_uniform_links_have_one_server():
    """On equal links the relaxation proves no less than filling and draining."""
    cluster = uniform_servers(1, 8, Link(GB))
    problem = PipelineProblem(analytic_model("vgg16", 8), cluster, 4)
    (level,) = levels_of(cluster)
    assert (level.groups.tolist(), level.rooms.tolist()) == ([1, 1], [8, 8])
    plain = fill_and_drain_bound(problem, 100.0)
    assert server_bound(problem, inf, LONG) >= plain * (1 - 3 * PRECISION)


def test_levels_of_clusters():
    assert [one.home for one in levels_of(uniform_servers(2, 2, Link(2 * GB), Link(GB)))] == [
        (0, 0, 1, 1)
    ]
    assert len(tuple(levels_of(dgx1()))) >= 1
    three = np.array([[0, 9, 3, 1], [9, 0, 3, 1], [3, 3, 0, 1], [1, 1, 1, 0.0]]) * GB
    devices = [Device(f"d{v}", "a", 1e9) for v in range(4)]
    (found,) = levels_of(from_matrix(devices, three))
    assert (found.home, found.rack) == ((0, 0, 1, 2), (0, 0, 0, 1))
    assert found.seconds_per_byte == pytest.approx((1 / 9 / GB, 1 / 3 / GB, 1 / GB))
    assert (found.groups.tolist(), found.rooms.tolist()) == ([3, 2], [2, 3])


def test_four_kinds_of_links_are_two_relaxations():
    def link(u, v):
        paces = ((8, 2), (4, 4), (2, 8), (1, 16))
        return next(pace for pace, size in paces if u // size == v // size) * GB

    links = [[0.0 if u == v else link(u, v) for v in range(16)] for u in range(16)]
    devices = [Device(f"d{v}", "a", 1e9) for v in range(16)]
    shapes = [(*one.groups, *one.rooms) for one in levels_of(from_matrix(devices, links))]
    assert shapes == [(4, 2, 4, 8), (8, 4, 2, 4)]


@given(st.integers(1, 12), st.sampled_from([1, 2]), st.data())
def test_dual_feasible_functions(room, k, data):
    """Numbers that fit into a server count at most one server."""
    values = dual_feasible(room, k)
    left, total = room, 0.0
    while left > 0:
        size = data.draw(st.integers(1, left))
        left -= size
        total += values[size]
    assert total <= 1 + 1e-12
    assert (np.diff(values) >= 0).all()


def test_runs_are_packed_into_servers():
    level = Levels((0, 0, 0, 0, 1, 1, 1, 1), (0,) * 8, (0.0, 1.0, 1.0), (0.0,) * 3)
    relaxed = (
        RelaxedStage(0, 1, 2, Place.NEW, 0),
        RelaxedStage(1, 2, 1, Place.SAME, 0),
        RelaxedStage(2, 3, 2, Place.SPANS, 0),
        RelaxedStage(3, 4, 3, Place.NEW, 0),
    )
    stages = packed(level, np.zeros(8, np.int64), relaxed)
    homes = [{level.home[v] for v in stage.devices} for stage in stages]
    assert homes[0] == homes[1] != homes[3]
    assert len(homes[0]) == len(homes[3]) == 1
    assert len(homes[2]) == 2
    assert [(one.start, one.stop) for one in stages] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    devices = [v for stage in stages for v in stage.devices]
    assert len({*devices}) == 8


def test_runs_of_a_rack_are_packed_into_one_rack():
    """The first two runs share a rack, and so do the last two stages, one of which spans."""
    level = Levels((0, 0, 1, 1, 2, 2, 3, 3), (0, 0, 0, 0, 1, 1, 1, 1), (0.0, 1.0, 2.0), (0.0,) * 3)
    relaxed = (
        RelaxedStage(0, 1, 1, Place.NEW, 0),
        RelaxedStage(1, 2, 2, Place.NEAR, 0),
        RelaxedStage(2, 3, 3, Place.SPANS, 0),
        RelaxedStage(3, 4, 1, Place.NEAR, 0),
    )
    stages = packed(level, np.zeros(8, np.int64), relaxed)
    racks = [{level.rack[v] for v in stage.devices} for stage in stages]
    assert racks[0] == racks[1] != racks[2] == racks[3]
    assert all(len(rack) == 1 for rack in racks)
    assert len({level.home[v] for v in stages[1].devices}) == 1
    assert len({v for stage in stages for v in stage.devices}) == 7


def test_stages_take_the_slowest_devices_of_their_rank():
    level = Levels((0, 0, 1, 1, 2, 2), (0,) * 6, (0.0, 1.0, 1.0), (0.0,) * 3)
    relaxed = (
        RelaxedStage(0, 1, 2, Place.NEW, 1),
        RelaxedStage(1, 2, 1, Place.NEW, 1),
        RelaxedStage(2, 3, 1, Place.SAME, 0),
        RelaxedStage(3, 4, 2, Place.NEW, 0),
    )
    stages = packed(level, np.array([0, 0, 1, 1, 0, 1]), relaxed)
    assert [stage.devices for stage in stages] == [(2, 3), (5,), (4,), (0, 1)]


def test_only_as_many_fast_devices_are_used_as_there_are():
    """One device of four is twice as fast as the others, and no link takes time."""
    layers = tuple(
        Layer(f"l{i}", 0.0, tuple(LayerCost(1, t, 0.0, 0.0, t, device_kind=kind)
                                  for kind, t in (("a", 0.5), ("b", 1.0))))
        for i in range(5)
    )  # fmt: skip
    chain = Chain("equal", "by hand", 1, layers)
    links = [[0.0 if u == v else GB for v in range(4)] for u in range(4)]
    devices = [Device(f"d{v}", "abbb"[v], 1e12) for v in range(4)]
    problem = PipelineProblem(chain, from_matrix(devices, links), 16)
    # The fast device has two layers, the others one each: 32 s of work, and 6 s of the others'.
    assert server_bound(problem, inf, LONG) == pytest.approx(38.0, rel=PRECISION)
    assert exact(problem, Limits(seconds=20)).bound_seconds == pytest.approx(38.0)


def test_a_stopped_tree_proves_nothing():
    problem = PipelineProblem(analytic_model("vgg16", 8), uniform_servers(1, 8, Link(GB)), 4)
    ((_, search),) = ServerBounds(problem).searches
    low = server_bound(problem, inf, LONG) / 2
    stop = Event()
    tree = ServerTree(search, lambda _: None, stop)
    assert tree.proves(low, inf)
    stop.set()
    assert not tree.proves(low, inf)
    assert tree.raised(low, inf, inf) == low


def test_the_search_gives_up_after_its_steps():
    cluster = uniform_servers(4, 4, Link(12 * GB), Link(1.25 * GB))
    problem = PipelineProblem(analytic_model("vgg16", 32), cluster, 8)
    ((_, search),) = ServerBounds(problem).searches
    bound = server_bound(problem, inf, LONG)
    found = search.answer(bound * 1.1, np.inf)
    assert [one.stop for one, _ in pairwise(found.plan)] == [
        two.start for _, two in pairwise(found.plan)
    ]
    stopped = search.answer(bound * 1.1, 0)
    assert not stopped.plan
    assert not stopped.proves


@pytest.mark.parametrize("plans", CLASSES)
def test_without_work_the_bound_is_zero(plans):
    layers = tuple(Layer(f"l{i}", GB, (LayerCost(2, 0.0, 1.0, GB, 0.0),)) for i in range(3))
    problem = PipelineProblem(
        Chain("idle", "by hand", 2, layers), uniform_servers(2, 2, Link(GB), Link(GB / 2)), 3
    )
    assert server_bound(problem, inf, LONG, plans) == 0.0
    assert server_bound(problem, 1.0, LONG, plans) == 0.0


@pytest.mark.parametrize("plans", CLASSES)
def test_of_no_plan_every_time_is_a_bound(plans):
    cost = LayerCost(2, 1.0, 1.0, GB, 1.0)
    chain = Chain("large", "by hand", 2, (Layer("a", GB, (cost,)), Layer("b", 1e15, (cost,))))
    problem = PipelineProblem(chain, uniform_servers(2, 2, Link(GB), Link(GB / 2)), 3)
    assert server_bound(problem, inf, LONG, plans) == inf
    assert server_bound(problem, 7.0, LONG, plans) == 7.0
    assert is_server_bound(problem, inf, plans)
