"""Published workloads of operators divided by ``divide``, against every division of tiny ones.

The definition is that of the published files, not of parts: operators with their colour classes
and passes, and the loads of ip.py of dnn-partitioning. Nothing of the formulation is used.
"""

import json
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from stagewright import divide, load_partition_problem

FEW = st.integers(0, 4)
KINDS = {"accelerator": 0, "host": 1}


@st.composite
def workloads(draw, most):
    """A file: some forward operators, then backward ones, with a class, an orphan's or none.

    Some of the amounts may be larger than others by more than the digits of a float.
    """
    n = draw(st.integers(1, most))
    forward = draw(st.integers(1, n))
    colours, unit = st.sampled_from([None, 0, 1, 2]), draw(st.sampled_from([0.25, 1]))
    far = st.sampled_from([1, 1, draw(st.sampled_from([1, 1e6, 1e12, 1e27]))])
    nodes = [
        {
            "id": 7 * i + 3,
            "supportedOnFpga": 1,
            "fpgaLatency": draw(FEW) / 2 * draw(far),
            "cpuLatency": float(draw(FEW) * draw(far)),
            "size": unit * draw(st.integers(0, 3)) * draw(far),
            "isBackwardNode": int(i >= forward),
            "colorClass": draw(colours),
        }
        for i in range(n)
    ]
    costs = [draw(st.integers(0, 3)) / 2 * draw(far) for _ in range(n)]
    edges = [
        {"sourceId": nodes[a]["id"], "destId": nodes[b]["id"], "size": 1, "cost": costs[a]}
        for b in range(n)
        for a in range(b)
        if draw(st.integers(0, 2)) == 0
    ]
    return {
        "nodes": draw(st.permutations(nodes)),
        "edges": draw(st.permutations(edges)),
        "maxFPGAs": draw(st.integers(1, 3)),
        "maxCPUs": draw(st.integers(0, 1)),
        "maxSizePerFPGA": unit * draw(st.sampled_from([1e9, 6, 4, 3])),
    }


def divisions(items, most):
    """All divisions of items into at most that many sets."""
    if not items:
        yield []
        return
    for rest in divisions(items[1:], most):
        for i, one in enumerate(rest):
            yield [*rest[:i], [*items[0], *one], *rest[i + 1 :]]
        if len(rest) < most:
            yield [items[0], *rest]


def classes_of(file):
    """The operators that must be together."""
    by_colour = {}
    for node in file["nodes"]:
        colour = node["colorClass"]
        key = ("alone", node["id"]) if colour is None else ("class", colour)
        by_colour.setdefault(key, []).append(node["id"])
    return list(by_colour.values())


def is_ordered(file, sets):
    """Whether an order of the sets has no forward edge back, and no orphan's backward edge forth.

    An orphan is a backward operator whose class has no forward one.
    """
    home = {v: i for i, its in enumerate(sets) for v in its}
    back = {node["id"] for node in file["nodes"] if node["isBackwardNode"]}
    led = {node["colorClass"] for node in file["nodes"] if node["id"] not in back} - {None}
    orphans = {v["id"] for v in file["nodes"] if v["id"] in back and v["colorClass"] not in led}
    arcs = set()
    for edge in file["edges"]:
        a, b = edge["sourceId"], edge["destId"]
        if not {a, b} & back:
            arcs.add((home[a], home[b]))
        elif {a, b} <= back and {a, b} & orphans:
            arcs.add((home[b], home[a]))
    left = set(range(len(sets)))
    while left:
        first = {i for i in left if not any(b == i and a in left - {i} for a, b in arcs)}
        if not first:
            return False
        left -= first
    return True


def loads(file, its, kind, replicas, bandwidth):
    """Forward and backward load of a set in milliseconds; None if it does not fit."""
    own, total = set(its), [0.0, 0.0]
    nodes = {node["id"]: node for node in file["nodes"]}
    held = sum(nodes[v]["size"] for v in own)
    if kind == 0 and held > file["maxSizePerFPGA"]:
        return None
    for v in own:
        latency = nodes[v]["cpuLatency" if kind else "fpgaLatency"]
        total[nodes[v]["isBackwardNode"]] += latency
    if kind == 0:  # hosts have all tensors already
        crossing = {
            (edge["sourceId"], edge["cost"])
            for edge in file["edges"]
            if (edge["sourceId"] in own) != (edge["destId"] in own)
        }
        for v, cost in crossing:
            total[nodes[v]["isBackwardNode"]] += cost
    ring = 2 * (replicas - 1) * held / bandwidth * 1e3
    return total[0] / replicas, (total[1] + ring) / replicas


def cost_of(pairs, phases):
    if phases:
        return max(f for f, _ in pairs) + max(b for _, b in pairs)
    return max(f + b for f, b in pairs)


def least(file, most=1, bandwidth=inf, phases=False, any_sets=False):
    """The least cost of all divisions, in milliseconds."""
    pools = (file["maxFPGAs"], file["maxCPUs"])
    homes = [(kind, r) for kind in (0, 1) for r in range(1, min(pools[kind], most) + 1)]
    best = inf

    def place(sets, left, pairs):
        nonlocal best
        if pairs and cost_of(pairs, phases) >= best:
            return
        if not sets:
            best = cost_of(pairs, phases)
            return
        for kind, replicas in homes:
            pair = loads(file, sets[0], kind, replicas, bandwidth)
            if replicas <= left[kind] and pair is not None:
                rest = tuple(n - replicas * (k == kind) for k, n in enumerate(left))
                place(sets[1:], rest, [*pairs, pair])

    for sets in divisions(classes_of(file), sum(pools)):
        if any_sets or is_ordered(file, sets):
            place(sets, pools, [])
    return best


def cost_of_answer(file, found, most, bandwidth, phases, any_sets):
    """The cost of the sets that were found, after all rules; in milliseconds."""
    sets = [[int(name.removeprefix("node")) for name in one.nodes] for one in found.sets]
    assert sorted(v for its in sets for v in its) == sorted(node["id"] for node in file["nodes"])
    for members in classes_of(file):
        assert sum(bool({*members} & {*its}) for its in sets) == 1
    assert any_sets or is_ordered(file, sets)
    for kind, count in enumerate((file["maxFPGAs"], file["maxCPUs"])):
        assert sum(s.replicas for s in found.sets if KINDS[s.device] == kind) <= count
    assert all(1 <= one.replicas <= most for one in found.sets)
    pairs = [
        loads(file, its, KINDS[one.device], one.replicas, bandwidth)
        for its, one in zip(sets, found.sets, strict=True)
    ]
    assert None not in pairs
    return cost_of(pairs, phases)


def compare(file, folder, most=1, bandwidth=inf, phases=False, any_sets=False):
    path = folder / "workload.json"
    path.write_text(json.dumps(file))
    found = divide(
        load_partition_problem(path),
        replicas=most,
        bandwidth_bytes_per_second=bandwidth if most > 1 else None,
        objective="phases" if phases else "load",
        any_sets=any_sets,
        time_limit=60,
    )
    right = least(file, most, bandwidth, phases, any_sets)
    near = pytest.approx(right, rel=1e-7, abs=1e-9)
    assert found.bound_seconds is None or found.bound_seconds * 1e3 <= right * (1 + 1e-9) + 1e-9
    if right == inf or found.sets is None:
        assert (found.sets, right, found.status.value) == (None, inf, "infeasible")
        return
    cost = cost_of_answer(file, found, most, bandwidth, phases, any_sets)
    assert found.cost_seconds * 1e3 == pytest.approx(cost, rel=1e-12, abs=1e-9)
    assert cost >= right * (1 - 1e-7)
    if found.status.value == "optimal":
        assert cost == near
        assert found.bound_seconds * 1e3 == near
    else:
        assert found.status.value == "feasible"


@examples(150)
@given(file=workloads(6))
def test_contiguous_sets_equal_every_division(file, tmp_path):
    compare(file, tmp_path)


@examples(75)
@given(file=workloads(5), most=st.integers(2, 3), bandwidth=st.sampled_from([1e3, 4e3, 1e12]))
def test_replicas_equal_every_division(file, most, bandwidth, tmp_path):
    compare(file, tmp_path, most, bandwidth)


@examples(75)
@given(file=workloads(5), most=st.integers(1, 2))
def test_passes_apart_equal_every_division(file, most, tmp_path):
    compare(file, tmp_path, most, 4e3, phases=True)


@examples(60)
@given(file=workloads(5))
def test_any_sets_equal_every_division(file, tmp_path):
    compare(file, tmp_path, any_sets=True)
