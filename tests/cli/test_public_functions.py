"""Every public function with every public type: an answer, or one line that says what is right."""

import importlib
import inspect
import pkgutil
import re
import sys
from types import SimpleNamespace

import pytest
from layout_problems import LLAMA

import stagewright
from stagewright import service
from stagewright.formulations.clusters.allocation_plan import AllocationPlan
from stagewright.formulations.operators.plan import OperatorPlan
from stagewright.formulations.parallelism.document import LayoutPlan
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.profiles.document import ProfiledDocument
from stagewright.formulations.parallelism.profiles.pipelines import ProfiledProblem
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.front.results import PlanResult
from stagewright.graphs.machines.cluster import Cluster, Device, Link, MatrixLinks
from stagewright.graphs.machines.devices import Accelerator
from stagewright.graphs.machines.fabric import Fabric
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.graphs.machines.rates import RateSet
from stagewright.graphs.models.architecture import Architecture
from stagewright.graphs.models.chain import Chain
from stagewright.graphs.models.layer_profiles import LayerProfiles
from stagewright.graphs.models.operators.step_graph import StepGraph
from stagewright.graphs.workloads.jobs import Throughputs, Workload
from stagewright.graphs.workloads.pool import Pool
from stagewright.graphs.workloads.prices import Market
from stagewright.service.answers import Answer
from stagewright.service.schemas import DOCUMENTS
from stagewright.solvers.clusters.policies import AllocationResult
from stagewright.solvers.parallelism.space import Space

FUNCTIONS = [
    name for name in stagewright.__all__ if not isinstance(getattr(stagewright, name), type)
]
TAKEN = {
    "allocation": {AllocationPlan}, "architecture": {Architecture}, "chain": {Chain},
    "cluster": {Cluster}, "fabric": {Fabric, Cluster}, "first": {PipelinePlan, LayoutPlan},
    "graph": {StepGraph}, "inter": {Link}, "intra": {Link}, "jobs": {Workload}, "market": {Market},
    "plan": {PipelinePlan}, "pool": {Pool}, "profiles": {LayerProfiles}, "reference": {Throughputs},
    "second": {PipelinePlan, LayoutPlan}, "start": {PipelinePlan}, "trace": {DOCUMENTS["trace"]},
    "workload": {Workload},
}  # fmt: skip
"""What is taken where, by the names of parameters."""
TAKEN_BY = {
    ("analytic_model", "device"): {Accelerator},
    ("analytic_model", "rates"): {RateSet},
    ("calibrate", "config"): {Architecture},
    ("check_placement", "plan"): {OperatorPlan},
    ("check_profiled_plan", "plan"): {ProfiledDocument},
    ("divide", "workload"): {Workload},  # and of two other projects; refused by the request
    ("export", "plan"): {PipelinePlan, LayoutPlan},
    ("fabric_of_kind", "kind"): {Accelerator},
    ("frontier", "space"): {Space},
    ("jobshop", "jobs"): set(),
    ("memory", "config"): {Architecture},
    ("memory", "layout"): {Layout, LayoutPlan},
    ("profiled_train_plan", "problem"): {ProfiledProblem},
    ("save_allocation", "plan"): {AllocationPlan},
    ("save_layout", "plan"): {LayoutPlan},
    ("save_model", "model"): {Chain},
    ("save_operator_plan", "plan"): {OperatorPlan},
    ("save_profiled_plan", "plan"): {ProfiledDocument},
    ("save_tuning", "tuning"): {DOCUMENTS["tuning"]},
    ("train_plan", "config"): {Architecture},
    ("train_plan", "explain"): {Layout},
    ("train_plan", "problem"): {TrainingProblem},
    ("train_plan", "space"): {Space},
    ("training_problem", "rates"): {RateSet},
    ("tune", "problem"): {TrainingProblem},
    ("tune", "space"): {Space},
    ("tune_read", "tuning"): {DOCUMENTS["tuning"]},
}
"""Where a function differs."""


def answers(kind=Answer):
    """All types of answers of the service, without those of their rows."""
    for one in pkgutil.iter_modules(service.__path__):
        importlib.import_module(f"{service.__name__}.{one.name}")
    return {kind, *(one for sub in kind.__subclasses__() for one in answers(sub))}


PUBLIC = {*DOCUMENTS.values(), *(one for many in (TAKEN | TAKEN_BY).values() for one in many)}
EMPTY = [object.__new__(kind) for kind in {*PUBLIC, PlanResult, AllocationResult, object}]
EMPTY += [kind.model_construct() for kind in answers() if kind.__name__.endswith("Answer")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_does_not_belong_somewhere_is_refused_in_one_line(name):
    function = getattr(stagewright, name)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        taken = TAKEN_BY.get((name, parameter.name), TAKEN.get(parameter.name, set()))
        for value in EMPTY if taken else EMPTY[::20]:
            if type(value) not in taken:
                with pytest.raises(stagewright.InputError) as caught:
                    function(**{parameter.name: value})
                told = str(caught.value)
                assert told.startswith(f"{parameter.name} must "), told
                assert "\n" not in told
                assert type(value).__name__ in told


@pytest.fixture(scope="module")
def layout_answer():
    servers = stagewright.uniform_servers(1, 2, Link(4e11), kind="h100", memory_bytes=80e9)
    problem = stagewright.training_problem(LLAMA, servers, sequence=1024, batch=8)
    return stagewright.train_plan(problem, framework="megatron", by_stage=False)


def test_a_layout_is_exported(layout_answer, tmp_path):
    plan = layout_answer.plan
    path, *_ = stagewright.export(plan, "megatron", tmp_path / "megatron")
    assert "--num-layers" in path.read_text()
    with pytest.raises(stagewright.InputError, match="--per-server does not apply to a layout"):
        stagewright.export(plan, "megatron", tmp_path / "x", per_server=2)
    with pytest.raises(stagewright.InputError, match=r"PipelinePlan or a LayoutPlan, .*\.plan$"):
        stagewright.export(layout_answer, "megatron", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_configuration_is_planned_as_its_problem_is(layout_answer, monkeypatch):
    machines = {"server_bandwidth": "400GB/s", "memory": 80e9}
    words = {"device": "h100", "gpus": 2, "sequence": 1024} | machines
    answer = stagewright.train_plan(
        config=LLAMA, framework="megatron", by_stage=False, global_batch=8, tensor=[1, 2], **words
    )
    assert answer.rows[0].layout == layout_answer.rows[0].layout
    assert len(repr(answer).splitlines()) <= 5
    assert str(answer.plan.layout) in repr(answer)
    assert f"<td>{answer.rows[-1].loses_by}</td>" in answer._repr_html_()
    frame = SimpleNamespace(DataFrame=lambda rows: [row["seconds"] for row in rows])
    monkeypatch.setitem(sys.modules, "pandas", frame)
    assert answer.to_frame() == [row.seconds for row in answer.rows]
    peaks = [one.total_bytes for one in stagewright.memory(answer.plan).ranks]
    assert peaks == [one.total for one in answer.plan.memory]
    of_layout = stagewright.memory(
        answer.rows[0].layout, LLAMA, framework="megatron", sequence=1024, memory="80GB"
    )
    assert of_layout.peak_bytes == pytest.approx(answer.rows[0].peak_bytes)
    assert "fits in the whole range" in repr(of_layout)
    slower = {"layout": answer.rows[0].layout, "seconds": 1.1 * answer.rows[0].seconds}
    rates = stagewright.calibrate([slower], LLAMA, global_batch=8, framework="megatron", **words)
    assert rates.rows[0].after_seconds == pytest.approx(slower["seconds"], rel=1e-3)
    assert repr(rates).startswith("from ")
    words |= {"config": LLAMA, "global_batch": 8, "by_stage": False}
    said = stagewright.train_plan(**words, mtbf="2000h", checkpoint_bandwidth="1GB/s", repair=3600)
    failures = stagewright.Failures(7.2e6, 1e9, repair_seconds=3600)
    assert stagewright.train_plan(**words, failures=failures).failures == said.failures
    assert f"goodput {said.failures.goodput:.2%}" in repr(said)


TWO = {"config": LLAMA, "device": "h100", "gpus": 2, "sequence": 1024, "global_batch": 8}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "train_plan needs a problem, or a config"),
        ({"config": LLAMA}, "give `device` and `gpus`"),
        ({"config": LLAMA, "gpu": 2}, "gpu: unknown field"),
        ({"config": LLAMA, "device": "h100", "gpus": 2}, "sequence is missing"),
        ({"config": LLAMA, "device": "h100", "gpus": 2, "memory": "80"}, "memory '80' has no unit"),
        ({**TWO, "spares": 1}, "`spares`: needs `mtbf`"),
        ({**TWO, "mtbf": "9h"}, "mtbf needs `checkpoint_bandwidth`"),
    ],
)
def test_what_a_configuration_lacks_is_said_by_its_field(given, message):
    with pytest.raises(stagewright.InputError, match=f"^{re.escape(message)}"):
        stagewright.train_plan(**given)


def test_equal_servers_are_a_fabric(layout_answer):
    def asked(machines):
        return stagewright.training_problem(LLAMA, machines, sequence=1024, batch=8)

    assert layout_answer.plan.problem.fabric.devices == 2
    kinds = [Device(name, "h100", 80e9) for name in "abc"]
    matrix = MatrixLinks(((None, 1e9, 2e9), (1e9, None, 1e9), (2e9, 1e9, None)))
    with pytest.raises(stagewright.InputError, match="equal servers of equal devices"):
        asked(Cluster("three", tuple(kinds), matrix))
    assert asked(fabric_of_kind("h100", 2)).fabric.devices == 2


def test_values_of_another_kind_are_named():
    with pytest.raises(stagewright.InputError, match="microbatch_size must be a whole number or a"):
        stagewright.analytic_model("vgg19", [0.5])
    with pytest.raises(
        stagewright.InputError, match="planners must be a Sequence of str, got 'dp'"
    ):
        stagewright.sweep(planners="dp")
    with pytest.raises(stagewright.InputError, match=r"stop must have is_set\(\), got 3 \(int\)"):
        stagewright.train_plan(stop=3)
    with pytest.raises(stagewright.InputError, match="bandwidth_bytes_per_second must be a number"):
        stagewright.Link("25GB/s")
    with pytest.raises(TypeError, match="missing 2 required positional arguments"):
        stagewright.plan()
