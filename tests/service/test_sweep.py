"""Sweeps: every row is the plan of its combination alone, whichever engine makes it."""

import subprocess
import sys
import threading
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from itertools import product

import pytest

import stagewright
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.machines.parts import first_devices, with_memory
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.service import engines
from stagewright.service.pipelines import launching, planning
from stagewright.service.pipelines.requests import PlanRequest
from stagewright.service.pipelines.sweeping import SweepRequest, SweepRow, pieces_of

LAYERS = (3.0, 1.0, 2.0, 4.0)
CHAIN = Chain(
    "made up",
    "made up",
    4,
    tuple(
        Layer(f"l{i}", 1e7, (LayerCost(4, s, 2e6, 3e6, backward_seconds=2 * s),))
        for i, s in enumerate(LAYERS)
    ),
)
CLUSTER = uniform_servers(2, 2, Link(1e9), Link(1e8), memory_bytes=1e12)
SIZES = {"devices": (1, 3), "memory_bytes": (1e12, 8e7), "microbatches": (2, 4)}


def without_time(rows: "tuple[SweepRow, ...]") -> list[dict[str, object]]:
    return [row.json_object() | {"wall_seconds": 0.0} for row in rows]


def swept(**options):
    found = stagewright.sweep(CHAIN, CLUSTER, planners=("dp", "pipedream"), **SIZES, **options)
    assert found.status == "done"
    return found


SCRIPT = """
import stagewright
print("the script runs")
cluster = stagewright.uniform_servers(1, 2, stagewright.Link(100e9), memory_bytes=1e12)
found = stagewright.sweep(
    stagewright.analytic_model("vgg19"), cluster, devices=[1, 2], microbatches=[2],
    planners=["dp"], workers=2,
)
print(all(row.cost_seconds for row in found.rows))
"""


@pytest.mark.real
def test_a_script_needs_no_main_of_its_own(tmp_path):
    script = tmp_path / "sweeps.py"
    script.write_text(SCRIPT)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert (ended.stdout.split("\n"), ended.stderr) == (["the script runs", "True", ""], "")


def test_every_row_is_the_plan_of_its_combination():
    told = []
    answer = swept(workers=1, on_row=told.append)
    assert told == list(answer.rows)
    combinations = product(*SIZES.values(), ("dp", "pipedream"))
    for row, (devices, memory, microbatches, planner) in zip(
        answer.rows, combinations, strict=True
    ):
        assert (row.devices, row.memory_bytes, row.microbatches) == (devices, memory, microbatches)
        cluster = with_memory(first_devices(CLUSTER, devices), memory)
        alone = stagewright.plan(CHAIN, cluster, microbatches, planner)
        assert (row.planner, row.status) == (planner, alone.status)
        assert (row.cost_seconds, row.bound_seconds) == (alone.cost, alone.bound)
        if alone.plan is None:
            assert row.samples_per_second is None
            continue
        assert alone.cost is not None
        assert row.samples_per_second == pytest.approx(4 * microbatches / alone.cost)
        assert row.replicas == "-".join(str(len(one.devices)) for one in alone.plan.stages)
    assert {row.status for row in answer.rows} >= {"feasible", "infeasible"}
    best = max(row.samples_per_second or 0.0 for row in answer.rows)
    assert answer.best is not None
    assert answer.rows[answer.best].samples_per_second == best


@pytest.mark.real
def test_processes_give_what_this_process_gives():
    assert without_time(swept(workers=2).rows) == without_time(swept(workers=1).rows)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_ray_gives_what_this_process_gives():
    assert without_time(swept(engine="ray").rows) == without_time(swept(workers=1).rows)


def test_a_stopped_sweep_keeps_its_rows():
    stop = threading.Event()
    answer = stagewright.sweep(
        CHAIN, CLUSTER, (2, 3, 4), planners=("dp",), workers=1,
        on_row=lambda _: stop.set(), stop=stop,
    )  # fmt: skip
    assert answer.status == "interrupted"
    first, *rest = answer.rows
    assert first.cost_seconds is not None
    assert [row.microbatches for row in rest] == [3, 4]
    assert all((row.status, row.cost_seconds) == ("interrupted", None) for row in rest)
    assert answer.best == 0


@pytest.mark.real
def test_a_stop_reaches_the_processes():
    stop = threading.Event()
    stop.set()
    answer = stagewright.sweep(CHAIN, CLUSTER, (2, 3, 4), planners=("dp",), workers=2, stop=stop)
    assert [row.status for row in answer.rows] == ["interrupted"] * 3


def test_a_process_that_ended_is_a_row():
    request = SweepRequest.of(chain=CHAIN, cluster=CLUSTER, microbatches=(2,), planners=("dp",))
    lost: Future[SweepRow | None] = Future()
    lost.set_exception(BrokenProcessPool("a child ended"))
    row = engines._result(lost, pieces_of(request), 0)
    assert row is not None
    assert (row.status, row.microbatches, row.cost_seconds) == ("failed", 2, None)
    assert "a process ended" in row.reason


def test_exports_that_nobody_reads_are_not_tried(monkeypatch):
    tried = []
    monkeypatch.setattr(launching, "why_not", lambda plan, to, chain: tried.append(to))
    swept(workers=1)
    assert tried == []
    answer = planning.plan(PlanRequest(chain=CHAIN, cluster=CLUSTER, planner="dp"))
    assert tried == []
    assert set(answer.exports) == set(answer.json_object()["exports"]) == set(tried)


def test_what_one_planner_refuses_is_a_row():
    """The costs are of microbatches of 4 samples, of which 10 are no whole number."""
    answer = stagewright.sweep(
        CHAIN, CLUSTER, batches=(8, 10), planners=("2bw-flush", "dp"), workers=1
    )
    found = {(row.planner, row.batch): row for row in answer.rows}
    row = found["2bw-flush", 8]
    assert (row.samples, row.microbatches, row.microbatch_size) == (8, 2, 4)
    assert row.plans is not None
    assert row.plans.endswith(", in 2 microbatches of 4 samples")
    assert found["2bw-flush", 10].status == "refused"
    assert "8 or 12" in found["2bw-flush", 10].reason
    alone = stagewright.plan(CHAIN, CLUSTER, 2, "dp")
    assert found["dp", 8].cost_seconds == alone.cost
    assert found["dp", 10].status == "refused"
    with pytest.raises(InputError, match="8 or 12"):
        stagewright.sweep(CHAIN, CLUSTER, batches=(10,), planners=("dp",), workers=1)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "give one of microbatches and batches"),
        ({"microbatches": (2,), "batches": (8,)}, "give one of microbatches and batches"),
        ({"microbatches": (2, 0)}, "microbatches must be at least 1, got 0"),
        ({"microbatches": (2,), "devices": (5,)}, "devices must be 1 to 4, as cluster '2x2' has"),
        ({"microbatches": (2,), "memory_bytes": (-1.0,)}, "memory_bytes must"),
        ({"microbatches": (2,), "memory_bytes": (16.0,)}, "memory_bytes must be at least 1 MB"),
        ({"microbatches": (2,), "engine": "ray", "address": "127.0.0.1:1"}, "no Ray cluster at"),
        ({"microbatches": (2,), "planners": ("best",)}, "planners: 'best' is none of spp"),
        ({"microbatches": (2,), "planners": ()}, "planners is empty"),
        ({"microbatches": (2,), "workers": 0}, "workers must be at least 1"),
        ({"microbatches": (2,), "engine": "ray", "workers": 2}, "workers is for the engine local"),
        ({"microbatches": (2,), "address": "auto"}, "address is for the engine ray"),
        ({"microbatches": range(1, 10_002)}, "10001 plans are more than the most, 10000"),
    ],
)  # fmt: skip
def test_what_makes_no_sweep_is_refused(given, complaint):
    with pytest.raises(InputError, match=complaint):
        stagewright.sweep(CHAIN, CLUSTER, **given)
