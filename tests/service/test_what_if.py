"""What a change of the cluster buys: plans of the changed cluster, each with its own bound."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
from plans import small_problem

import stagewright
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Cluster, Device, Link, from_matrix, uniform_servers
from stagewright.graphs.machines.parts import with_faster_links, with_one_more
from stagewright.service.engines import Engine
from stagewright.service.pipelines import planning
from stagewright.service.pipelines.answers import PlanAnswer, WhatIfRow
from stagewright.service.pipelines.requests import PlanRequest
from stagewright.service.pipelines.what_if import what_if
from stagewright.solvers.planning import plan


def servers(count: int, size: int, racks: int | None = None) -> Cluster:
    return uniform_servers(count, size, Link(20e9, 1e-5), Link(1e9, 2e-5), memory_bytes=16e9)


def problem(cluster: Cluster) -> PipelineProblem:
    chain = small_problem(layers=4).chain
    layers = tuple(
        replace(one, costs=tuple(replace(its, device_kind=None) for its in one.costs[:1]))
        for one in chain.layers
    )
    return PipelineProblem(replace(chain, layers=layers), cluster, 4)


def test_every_row_is_the_exact_plan_of_the_changed_cluster() -> None:
    asked = problem(servers(2, 1))
    found = stagewright.what_if(asked.chain, asked.cluster, 4, planner="exact", time_limit=20.0)
    more = tuple(replace(one, memory_bytes=17e9) for one in asked.cluster.devices)
    changed = {
        "1 GB more memory on every device": replace(asked.cluster, devices=more),
        "links between servers twice as fast": servers_with(2.0),
        "one more server of 1": servers(3, 1),
    }
    assert [row.change for row in found.rows] == list(changed)
    base = plan(asked, "exact").cost
    assert found.base.cost_seconds == pytest.approx(base)
    for row in found.rows:
        alone = plan(problem(changed[row.change]), "exact")
        assert row.cost_seconds == pytest.approx(alone.cost)
        assert row.saved_seconds == pytest.approx(base - alone.cost)
        assert row.most_seconds >= row.saved_seconds - 1e-12
    saved = {row.change: row.saved_seconds for row in found.rows}
    assert saved["links between servers twice as fast"] > 0
    assert saved["one more server of 1"] > 0


def servers_with(times: float) -> Cluster:
    return uniform_servers(2, 1, Link(20e9, 1e-5), Link(times * 1e9, 2e-5), memory_bytes=16e9)


def test_the_portfolio_never_says_that_a_change_costs_time() -> None:
    """It starts from the plan as things are, which every change keeps valid and no slower."""
    asked = problem(servers(2, 2))
    found = stagewright.what_if(asked.chain, asked.cluster, 4, time_limit=0.3)
    assert len(found.rows) == 4
    assert all(row.saved_seconds >= -1e-12 for row in found.rows)


@pytest.mark.parametrize(
    ("planner", "runtime"), [("auto", None), ("dp", None), ("auto", "torch-csv")]
)
def test_a_luckier_search_is_no_saving(planner, runtime, monkeypatch) -> None:
    """As things are the search finds the best plan only if it begins with one of a change.

    Planners that begin with no plan, and those for a framework, have the plan of the change priced.
    """
    asked = problem(servers(2, 1))

    def found(request: PlanRequest, stop: object = None) -> PlanAnswer:
        is_lucky = request.problem.digest != asked.digest or request.start is not None
        plain = {"start": None, "runtime": None, "planner": "exact" if is_lucky else "gpipe"}
        return planning.plan(PlanRequest.of(**(request.given() | plain)))

    best = plan(asked, "exact").cost
    assert plan(asked, "gpipe").cost > best
    monkeypatch.setattr("stagewright.service.pipelines.what_if.plan", found)
    told: list[WhatIfRow] = []
    request = PlanRequest(
        chain=asked.chain, cluster=asked.cluster, microbatches=4, planner=planner, runtime=runtime
    )
    answer = what_if(request, told.append)
    assert answer.base.cost_seconds == pytest.approx(best)
    assert (answer.base.restriction is None) == (runtime is None)
    memory, links, _ = answer.rows
    assert memory.saved_seconds == 0
    faster = plan(problem(servers_with(2.0)), "exact").cost
    assert links.saved_seconds == pytest.approx(best - faster)
    for row in (*answer.rows, *told):
        assert 0 <= row.saved_seconds <= row.most_seconds


def test_a_row_is_never_worse_than_the_plan_as_things_are(monkeypatch) -> None:
    """What only the search as things are finds is priced with the change."""
    asked = problem(servers(2, 1))

    def found(request: PlanRequest, stop: object = None) -> PlanAnswer:
        name = "exact" if request.problem.digest == asked.digest else "gpipe"
        return planning.plan(PlanRequest.of(**(request.given() | {"start": None, "planner": name})))

    monkeypatch.setattr("stagewright.service.pipelines.what_if.plan", found)
    request = PlanRequest(chain=asked.chain, cluster=asked.cluster, microbatches=4)
    memory, *others = what_if(request).rows
    assert memory.saved_seconds == 0
    assert all(row.saved_seconds >= 0 for row in others)


def test_links_are_faster_where_it_says() -> None:
    cluster = servers(2, 2)
    within, between = (with_faster_links(cluster, 2.0, one) for one in (True, False))
    for i in range(4):
        for j in range(4):
            if i == j:
                continue
            same = i // 2 == j // 2
            assert within.bandwidth[i, j] == cluster.bandwidth[i, j] * (2 if same else 1)
            assert between.bandwidth[i, j] == cluster.bandwidth[i, j] * (1 if same else 2)
    matrix = from_matrix(
        [Device(f"g{v}", "k", 1e9) for v in range(3)],
        [[0, 1e9, 2e9], [1e9, 0, 3e9], [2e9, 3e9, 0]],
        0.0,
        name="m",
    )
    assert (with_faster_links(matrix, 2.0, True).bandwidth[0, 1]) == 2e9
    with pytest.raises(InputError, match="no links between servers"):
        with_faster_links(matrix, 2.0)
    with pytest.raises(InputError, match="does not say those of another device"):
        with_one_more(matrix)


def test_one_more_is_a_copy_of_the_last() -> None:
    grown, what = with_one_more(servers(2, 2))
    assert (what, len(grown), len(grown.servers)) == ("one more server of 2", 6, 3)
    assert grown.bandwidth[4, 5] == 20e9
    assert grown.bandwidth[0, 4] == 1e9
    grown, what = with_one_more(servers(1, 2))
    assert (what, len(grown), len(grown.servers)) == ("one more device", 3, 1)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_ray_gives_what_this_process_gives() -> None:
    asked = problem(servers(2, 1))
    request = PlanRequest(chain=asked.chain, cluster=asked.cluster, planner="exact")
    told: list[WhatIfRow] = []
    there = what_if(request, told.append, engine=Engine("ray"))
    assert len(told) == 3
    assert there.rows == what_if(request).rows
