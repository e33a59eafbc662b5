"""Names, order, useless devices and useless memory change no answer; on a clock that counts."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from plans import small_problem
from profiles import examples
from strategies import hard_problem, random_cluster

from stagewright.formulations.checking.proofs import verdicts
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.pipelines.bounds.every_plan import without_useless
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.structure import Structure, misfit
from stagewright.graphs.documents.units import MIN_MEMORY
from stagewright.graphs.machines.canonical import canonical_order, reordered
from stagewright.graphs.machines.cluster import Cluster, Device, Link, MatrixLinks, ServerLinks
from stagewright.solvers.planning import plan

quick = examples(12, derandomize=True)


def renamed(cluster: Cluster, names: list[str]) -> Cluster:
    """The cluster with the n-th device named ``names[n]``."""
    name = dict(zip((one.name for one in cluster.devices), names, strict=True))
    links = cluster.links
    groups = {
        field: tuple(tuple(name[one] for one in group) for group in known)
        for field in ("servers", "racks")
        if (known := getattr(links, field, None)) is not None
    }
    devices = tuple(replace(one, name=name[one.name]) for one in cluster.devices)
    return replace(cluster, devices=devices, links=replace(links, **groups))


def shuffled(cluster: Cluster, order: list[int]) -> Cluster:
    """The devices in another order; written out, not by the function under test."""
    devices = tuple(cluster.devices[v] for v in order)
    links = cluster.links
    if isinstance(links, MatrixLinks):
        late = links.latency_seconds
        links = replace(
            links,
            bandwidth_bytes_per_second=tuple(
                tuple(links.bandwidth_bytes_per_second[i][j] for j in order) for i in order
            ),
            latency_seconds=late
            if isinstance(late, float)
            else tuple(tuple(late[i][j] for j in order) for i in order),
        )
    else:
        links = replace(links, servers=tuple(one[::-1] for one in links.servers[::-1]))
    return replace(cluster, devices=devices, links=links)


def canonical(cluster: Cluster) -> Cluster:
    """The cluster in canonical order, its devices numbered."""
    found = reordered(cluster, canonical_order(cluster))
    return renamed(found, [f"d{n}" for n in range(len(found))])


@st.composite
def server_cluster(draw: st.DrawFn) -> Cluster:
    """Up to 3 servers of up to 3 devices, of two sizes of memory, perhaps in two racks."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    names = [[f"s{s}g{g}" for g in range(size)] for s, size in enumerate(sizes)]
    devices = tuple(
        Device(name, "v100", draw(st.sampled_from((1e9, 2e9)))) for row in names for name in row
    )
    racks = inter_rack = None
    if len(sizes) == 3 and draw(st.booleans()):
        racks, inter_rack = (tuple(names[0]), (*names[1], *names[2])), Link(1e8)
    links = ServerLinks(tuple(map(tuple, names)), Link(4e9), Link(1e9), racks, inter_rack)
    return Cluster("drawn", devices, links)


@quick
@given(st.data())
def test_every_order_of_a_cluster_has_one_canonical_form(data):
    cluster = data.draw(server_cluster() | random_cluster(4, latency=True, symmetric=False))
    expected = canonical(cluster)
    for order in itertools.islice(itertools.permutations(range(len(cluster))), 24):
        other = shuffled(cluster, list(order))
        assert canonical(renamed(other, [f"x{v}" for v in order])) == expected


def test_a_ring_has_one_canonical_form_from_every_device_and_in_both_directions():
    bandwidth = [[1e9 if abs(i - j) in (1, 7) else None for j in range(8)] for i in range(8)]
    devices = tuple(Device(f"g{v}", "v100", 1e9) for v in range(8))
    ring = Cluster("ring", devices, MatrixLinks(tuple(map(tuple, bandwidth))))
    rotations = [[(v + by) % 8 for v in range(8)] for by in range(8)]
    found = {canonical(shuffled(ring, order[::way])) for order in rotations for way in (1, -1)}
    assert len(found) == 1


def with_useless(cluster: Cluster) -> Cluster:
    """One more device, the first one, with the least memory that a device may have."""
    links = cluster.links
    assert isinstance(links, MatrixLinks)
    size, late = len(cluster), links.latency_seconds
    first = (None, *[1e9] * size)
    rows = (first, *((1e9, *row) for row in links.bandwidth_bytes_per_second))
    if not isinstance(late, float):
        late = ((0.0,) * (size + 1), *((0.0, *row) for row in late))
    device = Device("a useless one", cluster.devices[0].kind, MIN_MEMORY)
    return replace(cluster, devices=(device, *cluster.devices), links=MatrixLinks(rows, late))


@pytest.mark.parametrize("planner", ["general", "spp"])
@quick
@given(st.data())
def test_answers_do_not_depend_on_names_order_useless_devices_and_memory(
    counting_clock, planner, data
):
    problem = data.draw(hard_problem(4, 3, 3))
    layers = problem.chain.layers
    heavy = tuple(replace(one, parameter_bytes=one.parameter_bytes + MIN_MEMORY) for one in layers)
    problem = replace(problem, chain=replace(problem.chain, layers=heavy))
    limits = Limits(0.3)
    found = plan(problem, planner, limits)
    assume(found.plan is not None)
    order = data.draw(st.permutations(range(len(problem.cluster))))
    other = with_useless(renamed(shuffled(problem.cluster, order), [f"x{v}" for v in order]))
    changed = replace(problem, cluster=other)
    again = plan(changed, planner, limits)
    assert (again.cost, again.bound, again.proved_by) == (found.cost, found.bound, found.proved_by)
    assert "refuted" not in {one.verdict for one in verdicts(changed, again.plan)}


@quick
@given(st.data())
def test_memory_beyond_what_a_plan_can_use_changes_no_answer(counting_clock, data):
    problem = data.draw(hard_problem(3, 3, 2))
    costs = []
    for memory in (1e12, 1e13):
        devices = tuple(replace(one, memory_bytes=memory) for one in problem.cluster.devices)
        ample = replace(problem, cluster=replace(problem.cluster, devices=devices))
        found = plan(replace(ample, memory_limit_bytes=None), "general", Limits(0.3))
        costs.append((found.cost, found.bound, found.plan.stages))
    assert costs[0] == costs[1]


@quick
@given(st.data())
def test_no_stage_fits_on_a_device_that_is_left_out(data):
    """Every stage on it, alone or with others that have room, by all ways to save memory."""
    problem = data.draw(hard_problem(3, 3, 2))
    small, *others = problem.cluster.devices
    assume(others)
    share = data.draw(st.sampled_from((0.2, 0.5, 0.9)))
    memory = max(MIN_MEMORY, share * float(problem.saved_per_layer(1).max()))
    devices = (
        replace(small, memory_bytes=memory),
        *(replace(one, memory_bytes=1e12) for one in others),
    )
    cluster = replace(problem.cluster, devices=devices)
    problem = replace(problem, cluster=cluster, memory_limit_bytes=None)
    assume(small.name not in without_useless(problem).cluster.index)
    for used in ((small.name,), *((small.name, one.name) for one in others)):
        for start, stop in itertools.combinations(range(len(problem.chain) + 1), 2):
            for mode in ("none", "full", "layer"):
                assert not fits(problem, used, (start, stop), mode)


def fits(
    problem: PipelineProblem, devices: tuple[str, ...], layers: tuple[int, int], mode: str
) -> bool:
    """Whether there is a plan with this stage, and all other layers on the last device."""
    bounds = sorted({0, *layers, len(problem.chain)})
    stages = tuple(
        Stage(one, devices, recompute=mode)
        if one == layers
        else Stage(one, (problem.cluster.devices[-1].name,))
        for one in itertools.pairwise(bounds)
    )
    if len(devices) > problem.most_replicas(*layers):
        return False
    structure = Structure.whole(stages)
    return misfit(problem, structure) is None


def test_a_negligible_device_does_not_spoil_the_plan(counting_clock):
    """A device of a kind that is 100 times slower; the bound stays one on all devices."""
    problem = small_problem(layers=6, devices=4)
    layers = problem.chain.layers
    slow = tuple(
        replace(
            one,
            costs=(*one.costs, *(
                replace(
                    cost,
                    device_kind="old",
                    forward_seconds=100 * cost.forward_seconds,
                    backward_seconds=100 * cost.backward_seconds,
                )
                for cost in one.costs if cost.device_kind == "fast"
            )),
        )
        for one in layers
    )  # fmt: skip
    problem = replace(problem, chain=replace(problem.chain, layers=slow))
    alone = plan(problem, "general", Limits(0.05))
    cluster = with_useless(problem.cluster)
    device = replace(cluster.devices[0], memory_bytes=16e9, kind="old")
    changed = replace(problem, cluster=replace(cluster, devices=(device, *cluster.devices[1:])))
    found = plan(changed, "general", Limits(0.08))
    assert device.name in found.reason
    assert found.cost <= alone.cost * 1.001
    assert found.bound <= alone.bound * (1 + 1e-9)
    assert "refuted" not in {one.verdict for one in verdicts(changed, found.plan)}
