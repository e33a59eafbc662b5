"""Plans as documents: read back, checked, broken in every way; splits; infeasible steps."""

from dataclasses import replace

import pytest

from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.operators.check import check, problem_of, require_valid
from stagewright.formulations.operators.plan import (
    SplitChoice,
    load_operator_plan,
    save_operator_plan,
)
from stagewright.formulations.operators.splitting import choices_of, split_graph
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.operators.step_graph import (
    Node,
    Output,
    Split,
    StepGraph,
    data_parallel,
)
from stagewright.solvers.operators.os_dpos import os_dpos
from stagewright.solvers.operators.planning import PLANNERS, plan_operators

CLUSTER = uniform_servers(1, 2, Link(1e9, 1e-6), kind="a")
LIMITS = Limits(seconds=30)


def step():
    """x -> y (reads parameter w, 4 ms, can be split) -> z (1 ms); gradient and update of w."""
    batch = Output(1e5)
    return StepGraph(
        "small",
        "test",
        8,
        (
            Node("w", "parameter", "state", outputs=(Output(4e4),), state_bytes=1.2e5),
            Node("x", "placeholder", "input", outputs=(batch,)),
            Node(
                "y", "mm", "forward", (("x", 0), ("w", 0)), (batch,), {"a": 4e-3},
                splits=(Split("batch", 8, (0, None), (0,)), Split("channel", 6, (None, 1), (1,))),
            ),
            Node("z", "sum", "forward", (("y", 0),), (Output(4.0),), {"a": 1e-3}),
            Node(
                "g", "mm", "backward", (("x", 0), ("z", 0)), (Output(4e4),), {"a": 3e-3},
                splits=(Split("batch", 8, (0, None), (None,)),),
            ),
            Node("u", "add_", "update", (("w", 0), ("g", 0)), (), {"a": 1e-4}, beside="w"),
        ),
    )  # fmt: skip


@pytest.fixture(scope="module")
def plan():
    found = plan_operators(step(), CLUSTER, "os-dpos", limits=LIMITS).plan
    assert found.splits
    assert found.transfers
    return found


@pytest.mark.parametrize("contention", ["none", "exclusive"])
@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_makes_a_checked_plan(planner, contention, tmp_path):
    found = plan_operators(step(), CLUSTER, planner, contention, LIMITS)
    assert check(step(), CLUSTER, found.plan) == ()
    save_operator_plan(found.plan, tmp_path / "plan.json")
    assert load_operator_plan(tmp_path / "plan.json") == found.plan
    stated = found.plan.certificate
    assert (found.status is Status.OPTIMAL) == (stated.gap <= 1e-9)
    assert found.plan.planner == planner


@pytest.mark.parametrize("planner", PLANNERS)
def test_progress_is_between_bound_and_first_plan(planner):
    news = []
    found = plan_operators(step(), CLUSTER, planner, limits=LIMITS, on_progress=news.append).plan
    assert news
    for one in news:
        assert one.bound == found.certificate.any_splits_seconds
        assert one.objective >= found.certificate.cost_seconds * (1 - 1e-9)


def test_search_is_optimal_here_and_splits_are_shorter():
    whole = plan_operators(step(), CLUSTER, "search", limits=LIMITS)
    assert whole.status is Status.OPTIMAL
    assert whole.plan.certificate.cost_seconds == pytest.approx(8.1e-3)
    split = plan_operators(step(), CLUSTER, "os-dpos", limits=LIMITS).plan
    assert split.certificate.cost_seconds < whole.plan.certificate.cost_seconds
    # The bound over any splits holds for it, the critical path of the whole graph does not.
    assert whole.plan.certificate.any_splits_seconds <= split.certificate.cost_seconds
    assert whole.plan.certificate.bound_seconds > split.certificate.cost_seconds


@pytest.mark.parametrize("weights", ["shared", "mirrored"])
def test_replicas_have_a_device_each(weights):
    graph = data_parallel(step(), 2, weights)
    found = plan_operators(graph, CLUSTER, "data-parallel", limits=LIMITS).plan
    homes = {one.operator: one.device for one in found.operators}
    for name, device in homes.items():
        assert device == ("s0g1" if name.endswith("@1") else "s0g0")
    assert len(homes) == len(graph)


def test_os_dpos_is_never_worse_than_dpos():
    found = os_dpos(step(), CLUSTER)
    plain = plan_operators(step(), CLUSTER, "dpos").plan
    assert found.timetable.end <= plain.certificate.cost_seconds
    assert found.tried > len(found.splits) > 0
    assert os_dpos(step(), uniform_servers(1, 1, Link(1e9), kind="a")).splits == ()


def first(items, **changes):
    return (replace(items[0], **changes), *items[1:])


BROKEN = {
    "another graph": (lambda p: replace(p, digest="0"), "answers another"),
    "contention": (lambda p: replace(p, contention="exclusive"), "answers another"),
    "missing operator": (lambda p: replace(p, operators=p.operators[1:]), "not each of"),
    "twice": (lambda p: replace(p, operators=(*p.operators, p.operators[0])), "not each of"),
    "unknown operator": (
        lambda p: replace(p, operators=first(p.operators, operator="q")), "no operator 'q'"),
    "unknown device": (
        lambda p: replace(p, operators=first(p.operators, device="q")), "no device 'q'"),
    "late finish": (
        lambda p: replace(p, operators=(*p.operators[:-1], replace(p.operators[-1],
            finish_seconds=1.0))), "runs for"),
    "missing transfer": (lambda p: replace(p, transfers=p.transfers[1:]), "missing|before it has"),
    "unknown output": (
        lambda p: replace(p, transfers=first(p.transfers, output=9)), "has no output 9"),
    "early transfer": (
        lambda p: replace(p, transfers=(*p.transfers[:-1], replace(p.transfers[-1],
            start_seconds=0.0))), "before the tensor is made|takes"),
    "no splits": (lambda p: replace(p, splits=()), "not each of|no operator|unmeasured"),
    "wrong split": (
        lambda p: replace(p, splits=first(p.splits, parts=5)), "equal parts"),
    "unmeasured": (lambda p: replace(p, unmeasured=()), "unmeasured lists 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_plans_are_refused(plan, name):
    change, message = BROKEN[name]
    with pytest.raises(InvalidPlan, match=message):
        require_valid(step(), CLUSTER, change(plan))
    assert len(check(step(), CLUSTER, change(plan))) == 1


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"cost_seconds": 1e-3}, "cost_seconds"),
        ({"bound_seconds": 1e-9}, "bound_seconds"),
        ({"gap": 0.5}, "gap"),
        ({"proved_by": "luck"}, "proved_by"),
        ({"any_splits_gap": 0.9}, "any_splits_gap"),
        ({"bounds": ()}, "bounds"),
    ],
)
def test_wrong_certificates_are_found(plan, changes, place):
    wrong = replace(plan, certificate=replace(plan.certificate, **changes))
    assert f"certificate.{place}" in {one.place for one in check(step(), CLUSTER, wrong)}


def test_forged_bounds_are_refuted(plan):
    """Larger than the argument gives; of the wider class; with the prices of other devices."""
    for number, bound in enumerate(plan.certificate.bounds):
        forged = [{"seconds": bound.seconds * 1.01}]
        forged += [{"prices": (1.0,)}] if bound.prices else [{"plans": "any splits"}]
        for change in forged:
            bounds = [*plan.certificate.bounds]
            bounds[number] = replace(bound, **change)
            wrong = replace(plan, certificate=replace(plan.certificate, bounds=tuple(bounds)))
            found = {one.place for one in check(step(), CLUSTER, wrong)}
            assert f"certificate.bounds[{number}]" in found


def test_a_split_graph():
    graph = split_graph(step(), [SplitChoice("y", "batch", 2), SplitChoice("g", "batch", 4)])
    names = [node.name for node in graph.nodes]
    assert names == [
        "w", "x", "y/cut0", "y/0", "y/1", "y/join0", "z", "g/cut0", "g/0", "g/1", "g/2", "g/3",
        "g/join0", "u",
    ]  # fmt: skip
    by_name = {node.name: node for node in graph.nodes}
    assert by_name["y/1"].inputs == (("y/cut0", 1), ("w", 0))
    assert by_name["y/1"].seconds == {"a": 2e-3}
    assert by_name["y/cut0"].outputs == (Output(5e4), Output(5e4))
    assert by_name["y/join0"].operator == "concatenate"
    assert by_name["z"].inputs == (("y/join0", 0),)
    assert by_name["g/2"].outputs == (Output(4e4),)  # gradients of parts of the batch are added
    assert by_name["g/join0"].operator == "add"
    assert by_name["u"].inputs == (("w", 0), ("g/join0", 0))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (SplitChoice("q", "batch", 2), "no operator 'q'"),
        (SplitChoice("w", "batch", 2), "'w' has another one beside it|state"),
        (SplitChoice("u", "batch", 2), "'u' has a state or a fixed device"),
        (SplitChoice("z", "batch", 2), "'z' has no dimension 'batch'"),
        (SplitChoice("y", "batch", 3), "has 8 along batch, which cannot be divided into 3"),
    ],
)
def test_wrong_splits_are_refused(choice, message):
    with pytest.raises(InputError, match=message):
        split_graph(step(), [choice])


def test_choices_are_equal_parts():
    node = step().nodes[2]
    found = [(one.dimension, one.parts) for one in choices_of(step(), node, 4)]
    assert found == [("batch", 2), ("batch", 4), ("channel", 2), ("channel", 3)]
    assert choices_of(step(), step().nodes[0], 4) == []


def test_what_does_not_fit_is_infeasible():
    small = uniform_servers(1, 2, Link(1e9), kind="a", memory_bytes=1e6)
    heavy = replace(step().nodes[0], state_bytes=3e6)
    graph = replace(step(), nodes=(heavy, *step().nodes[1:]))
    for planner in ("search", "dpos"):
        found = plan_operators(graph, small, planner)
        assert (found.plan, found.status) == (None, Status.INFEASIBLE)
        assert found.reason == "the state is 3 MB, all devices together have 2 MB"


def test_unknown_planners_are_refused():
    with pytest.raises(InputError, match="unknown planner 'magic'; there are fastt, os-dpos"):
        plan_operators(step(), CLUSTER, "magic")


def test_a_plan_says_what_has_not_been_measured():
    graph = replace(step(), nodes=(*step().nodes[:3], replace(step().nodes[3], seconds={}),
        *step().nodes[4:]))  # fmt: skip
    plan = plan_operators(graph, CLUSTER, "dpos").plan
    assert plan.unmeasured == ("z",)
    assert problem_of(graph, CLUSTER, plan).unmeasured == ("z",)
