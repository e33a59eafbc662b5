"""Plans and mutated plans: the checker accepts what a reading of the rules by plain loops does."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.operators.check import check
from stagewright.formulations.operators.plan import OperatorPlan, Transfer, digest_of
from stagewright.graphs.machines.cluster import MIN_MEMORY, Link, uniform_servers
from stagewright.graphs.models.operators.step_graph import Node, StepGraph
from stagewright.solvers.operators.planning import plan_operators
from tests.shared.random_steps import graphs

EPSILON = 1e-9  # seconds; all times here are whole multiples of 1 us
SECONDS_PER_BYTE, LATENCY = 1e-9, 1e-6


def divided(graph: StepGraph, plan: OperatorPlan) -> dict[str, Node]:
    """The operators after the plan's splits, by name."""
    nodes = {node.name: node for node in graph.nodes}
    for choice in plan.splits:
        nodes = _one_divided(nodes, choice.operator, choice.dimension, choice.parts)
    return nodes


def _one_divided(nodes, name, dimension, parts):
    whole = nodes[name]
    split = next(one for one in whole.splits if one.dimension == dimension)
    measured = next((one for one in split.measured if one.parts == parts), None)
    reads = {source for node in nodes.values() for source in node.inputs}
    joined = [k for k, one in enumerate(whole.outputs) if one.bytes > 0 or (name, k) in reads]
    pieces = [f"{name}/{p}" for p in range(parts)]
    made = [
        *(_cut(nodes, whole, k, parts, measured) for k, one in enumerate(split.inputs) if one == 0),
        *(_part(whole, split, p, parts, measured) for p in range(parts)),
        *(_join(whole, k, pieces, measured) for k in joined),
    ]
    result = {}
    for key, node in nodes.items():
        if key == name:
            result |= {one.name: one for one in made}
            continue
        inputs = tuple((f"{s}/join{k}", 0) if s == name else (s, k) for s, k in node.inputs)
        after = [one for s in node.after for one in (pieces if s == name else [s])]
        result[key] = replace(node, inputs=inputs, after=tuple(after))
    return result


def _cut(nodes, whole, k, parts, measured):
    source, number = whole.inputs[k]
    one = nodes[source].outputs[number]
    return replace(
        whole,
        name=f"{whole.name}/cut{k}",
        inputs=(whole.inputs[k],),
        outputs=(replace(one, bytes=one.bytes / parts),) * parts,
        seconds=measured.cuts[k] if measured else {},
        splits=(),
    )


def _part(whole, split, p, parts, measured):
    seconds = {kind: one / parts for kind, one in whole.seconds.items()}
    if measured:
        seconds = {kind: max(one, measured.part.get(kind, 0.0)) for kind, one in seconds.items()}
    inputs = [
        source if axis is None else (f"{whole.name}/cut{k}", p)
        for k, (source, axis) in enumerate(zip(whole.inputs, split.inputs, strict=True))
    ]
    outputs = [
        one if axis is None else replace(one, bytes=one.bytes / parts)
        for one, axis in zip(whole.outputs, split.outputs, strict=True)
    ]
    return replace(
        whole,
        name=f"{whole.name}/{p}",
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        seconds=seconds,
        splits=(),
    )


def _join(whole, k, pieces, measured):
    return replace(
        whole,
        name=f"{whole.name}/join{k}",
        inputs=tuple((piece, k) for piece in pieces),
        outputs=(whole.outputs[k],),
        seconds=measured.joins[k] if measured else {},
        after=(),
        splits=(),
    )


def is_valid(graph: StepGraph, cluster, plan: OperatorPlan) -> bool:
    """Every rule of docs/operators.md, read over names."""
    nodes = divided(graph, plan)
    if Counter(one.operator for one in plan.operators) != Counter(nodes.keys()):
        return False
    placed = {one.operator: one for one in plan.operators}
    kinds = {device.name: device.kind for device in cluster.devices}
    if any(one.device not in kinds for one in (*plan.operators, *plan.transfers)):
        return False
    if any(one.start_seconds < 0 for one in (*plan.operators, *plan.transfers)):
        return False
    for name, one in placed.items():
        takes = nodes[name].seconds.get(kinds[one.device], 0.0)
        if abs(one.finish_seconds - one.start_seconds - takes) > EPSILON:
            return False
        host = nodes[name].beside
        if host is not None and placed[host].device != one.device:
            return False
    return (
        _runs_alone(plan.operators, lambda one: one.device)
        and _arrives(nodes, placed, plan)
        and (
            plan.contention == "none"
            or _runs_alone(plan.transfers, lambda one: (placed[one.operator].device, one.device))
        )
        and all(
            most(nodes, placed, plan, device.name) <= device.memory_bytes * (1 + 1e-9)
            for device in cluster.devices
        )
    )


def _runs_alone(intervals, resource) -> bool:
    """Whether no two that take time overlap on a resource."""
    taking = [one for one in intervals if one.finish_seconds - one.start_seconds > EPSILON]
    return not any(
        resource(one) == resource(two)
        and one.start_seconds < two.finish_seconds - EPSILON
        and two.start_seconds < one.finish_seconds - EPSILON
        for i, one in enumerate(taking)
        for two in taking[:i]
    )


def _wanted(nodes, placed) -> set[tuple[str, int, str]]:
    """(maker, output, other device) of all that is read elsewhere; orders are a last output."""
    found = set()
    for name, node in nodes.items():
        for source, number in node.inputs:
            found.add((source, number, placed[name].device))
        for source in node.after:
            found.add((source, len(nodes[source].outputs), placed[name].device))
    return {one for one in found if placed[one[0]].device != one[2]}


def _bytes(nodes, source, number) -> float:
    outputs = nodes[source].outputs
    return outputs[number].bytes if number < len(outputs) else 0.0


def _arrives(nodes, placed, plan) -> bool:
    """Whether what is read elsewhere is sent once, in time, and all start after their inputs."""
    sent = Counter((one.operator, one.output, one.device) for one in plan.transfers)
    if sent != Counter(_wanted(nodes, placed)):
        return False
    for one in plan.transfers:
        takes = LATENCY + _bytes(nodes, one.operator, one.output) * SECONDS_PER_BYTE
        if abs(one.finish_seconds - one.start_seconds - takes) > EPSILON:
            return False
        if one.start_seconds < placed[one.operator].finish_seconds - EPSILON:
            return False
    at = {(one.operator, one.output, one.device): one.finish_seconds for one in plan.transfers}
    reads = (
        (placed[name], source, number)
        for name, node in nodes.items()
        for source, number in (*node.inputs, *((s, len(nodes[s].outputs)) for s in node.after))
    )
    return all(
        one.start_seconds
        >= at.get((source, number, one.device), placed[source].finish_seconds) - EPSILON
        for one, source, number in reads
    )


def most(nodes, placed, plan, device) -> float:
    """The most bytes on a device at the middle of any two neighbouring times."""
    state = sum(nodes[name].state_bytes for name, one in placed.items() if one.device == device)
    held = []
    for name, node in nodes.items():
        for number, output in enumerate(node.outputs):
            readers = [r for r, other in nodes.items() if (name, number) in other.inputs]
            ends = [placed[r].finish_seconds for r in readers if placed[r].device == device]
            copies = [t for t in plan.transfers if (t.operator, t.output) == (name, number)]
            if placed[name].device == device and node.role != "state":
                ends += [placed[name].finish_seconds, *(t.finish_seconds for t in copies)]
                held.append((placed[name].start_seconds, max(ends), output.bytes))
            for copy in copies:
                if copy.device == device:
                    held.append((copy.start_seconds, max(ends), output.bytes))
    times = sorted({time for first, last, _ in held for time in (first, last)})
    middles = [(a + b) / 2 for a, b in pairwise(times) if b - a > EPSILON]
    return state + max(
        (sum(size for first, last, size in held if first < now < last) for now in middles),
        default=0.0,
    )


@st.composite
def cases(draw):
    graph = draw(graphs())
    cluster = uniform_servers(
        1, draw(st.integers(1, 3)), Link(1 / SECONDS_PER_BYTE, LATENCY), kind="a"
    )
    contention = draw(st.sampled_from(["none", "exclusive"]))
    planner = draw(st.sampled_from(["heft", "dpos", "os-dpos", "os-dpos", "m-etf", "search"]))
    plan = plan_operators(graph, cluster, planner, contention, Limits(seconds=60)).plan
    return graph, cluster, plan


@st.composite
def mutated(draw, plan, cluster):
    """The plan with up to three changes."""
    devices = [device.name for device in cluster.devices]
    for _ in range(draw(st.integers(1, 3))):
        plan = draw(st.sampled_from([moved, shifted, exchanged, resent]))(draw, plan, devices)
    return plan


def _at(draw, items):
    return draw(st.integers(0, len(items) - 1))


def _with(items, i, *new):
    return (*items[:i], *new, *items[i + 1 :])


def moved(draw, plan, devices):
    """One operator on another device; with its transfers, or without."""
    i = _at(draw, plan.operators)
    others = [name for name in devices if name != plan.operators[i].device] or devices
    one = replace(plan.operators[i], device=draw(st.sampled_from(others)))
    plan = replace(plan, operators=_with(plan.operators, i, one))
    if draw(st.booleans()):
        kept = (t for t in plan.transfers if t.operator != one.operator or t.device != one.device)
        plan = replace(plan, transfers=tuple(kept))
    return plan


def shifted(draw, plan, devices):
    """An operator or a transfer, or all of them, earlier or later; or one that lasts longer."""
    step = draw(st.integers(1, 12)) * draw(st.sampled_from([0.5e-3, -0.5e-3]))

    def later(one):
        start = max(0.0, one.start_seconds + step)
        ended = max(start, one.finish_seconds + step)
        return replace(one, start_seconds=start, finish_seconds=ended)

    what = draw(st.sampled_from(["operator", "transfer", "all", "longer"]))
    if what == "all":
        return replace(
            plan,
            operators=tuple(map(later, plan.operators)),
            transfers=tuple(map(later, plan.transfers)),
        )
    field = "transfers" if what == "transfer" and plan.transfers else "operators"
    rows = getattr(plan, field)
    i = _at(draw, rows)
    one = later(rows[i])
    if what == "longer":
        one = replace(one, start_seconds=min(rows[i].start_seconds, one.finish_seconds))
    return replace(plan, **{field: _with(rows, i, one)})


def exchanged(draw, plan, devices):
    """Two operators exchange their places in time, or in devices."""
    i, j = draw(st.permutations(range(len(plan.operators))))[:2]
    one, two = plan.operators[i], plan.operators[j]
    if draw(st.booleans()):
        pair = replace(one, device=two.device), replace(two, device=one.device)
    else:
        first, second = sorted((one, two), key=lambda each: each.start_seconds)
        length = second.finish_seconds - second.start_seconds
        begun, ended = first.start_seconds, second.finish_seconds
        late = ended - (first.finish_seconds - first.start_seconds)
        if late < 0:
            return plan
        new = {
            second.operator: replace(second, start_seconds=begun, finish_seconds=begun + length),
            first.operator: replace(first, start_seconds=late, finish_seconds=ended),
        }
        pair = new[one.operator], new[two.operator]
    rows = list(plan.operators)
    rows[i], rows[j] = pair
    return replace(plan, operators=tuple(rows))


def resent(draw, plan, devices):
    """A transfer dropped, made twice, to another device, or of another operator."""
    if not plan.transfers:
        one = plan.operators[0]
        wrong = Transfer(one.operator, 0, devices[-1], 0.0, LATENCY)
        return replace(plan, transfers=(wrong,))
    i = _at(draw, plan.transfers)
    one = plan.transfers[i]
    changed = draw(
        st.sampled_from(
            [
                (),
                (one, one),
                (replace(one, device=draw(st.sampled_from(devices))),),
                (replace(one, operator=plan.operators[_at(draw, plan.operators)].operator),),
                (replace(one, output=one.output + 1),),
            ]
        )
    )
    return replace(plan, transfers=_with(plan.transfers, i, *changed))


def accepted(graph, cluster, plan) -> bool:
    return not any(one.rule == "rules" for one in check(graph, cluster, plan))


@examples(200, quick=50)
@given(cases(), st.data(), st.integers(-1, 1))
def test_the_checker_refuses_what_breaks_a_rule_and_nothing_else(case, data, more):
    graph, cluster, plan = case
    assert is_valid(graph, cluster, plan)
    wrong = data.draw(mutated(plan, cluster))
    assert accepted(graph, cluster, wrong) == is_valid(graph, cluster, wrong)
    peaks = peaks_of(graph, cluster, plan)
    assert plan.peak_memory_bytes == pytest.approx(peaks)
    limit = max(MIN_MEMORY, max(peaks.values()) + more * 1e4)
    tight = replace(
        cluster, devices=tuple(replace(device, memory_bytes=limit) for device in cluster.devices)
    )
    plan = replace(plan, digest=digest_of(graph, tight, plan.contention))
    assert accepted(graph, tight, plan) == (max(peaks.values()) <= limit)


def peaks_of(graph, cluster, plan):
    """Bytes of the tensors of every device at the time when they are most."""
    nodes = divided(graph, plan)
    placed = {one.operator: one for one in plan.operators}
    return {device.name: most(nodes, placed, plan, device.name) for device in cluster.devices}
