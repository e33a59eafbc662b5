"""The published JSON Schemas: one for every document, and documents keep them."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from documentation import EXAMPLES, ROOT, require_schema
from jsonschema import Draft202012Validator, ValidationError
from plans import make_stages, small_problem, valid_plan

from stagewright.executor.clusters.report import ClusterReport, JobOutcome, Placed, Share
from stagewright.executor.programs.trace import MeasuredMemory, Trace, TracedStep
from stagewright.formulations.checking.check import predict
from stagewright.formulations.clusters.allocation_plan import AllocationPlan
from stagewright.formulations.clusters.allocation_plan import Share as PlannedShare
from stagewright.formulations.plans.plan import PipelinePlan, ScheduledAction
from stagewright.graphs.documents.documents import to_json
from stagewright.graphs.models.cost_book import Computed, CostBook
from stagewright.graphs.models.step_graph import Node, Output, Split, StepGraph
from stagewright.graphs.workloads.pool import Accelerator, Pool
from stagewright.service.schemas import DOCUMENTS, json_schema

FILES = ("profiles", "clusters", "devices", "jobs", "prices", "layers")
ROOMS = ("graphs", "formulations", "executor")


def plan() -> PipelinePlan:
    problem = small_problem()
    made = valid_plan(problem, make_stages((2, 4, 6), (2, 1, 3), ("split",) * 3))
    return replace(made, predicted=predict(problem, made))


def graph() -> StepGraph:
    data = Node("x", "placeholder", "input", outputs=(Output(8.0, (8,)),))
    splits = (Split("batch", 8, (0,), (0,)),)
    twice = Node("y", "aten.mul", "forward", (("x", 0),), (Output(8.0),), {"a": 1.0}, splits=splits)
    return StepGraph("small", "test", 8, (data, twice))


def trace() -> Trace:
    step = TracedStep(0, 1.0, 0.0, (ScheduledAction("g0", "0F0", 0.0, 1.0),), 0.5)
    memory = MeasuredMemory("resident", {"g0": 1e9})
    return Trace("0", "small", "here", "gloo", 1, "float32", (step,), memory)


def report() -> ClusterReport:
    jobs = (JobOutcome("a", "done", 8, 2.0), JobOutcome("b", "waiting", 3))
    return ClusterReport(jobs, ((Placed(("a",), "v100", (0,), False),),), ())


MADE = (
    plan(),
    graph(),
    trace(),
    report(),
    replace(report(), shares=(Share("a", "v100", 0.5, 0.4),)),
    CostBook((Computed("y", "v100", 2, 1.0),)),
    Pool((Accelerator("v100", 8, 4, 2.48), Accelerator("k80", 2))),
    AllocationPlan("0", "max-min", (PlannedShare(("a", "b"), "v100", 0.5),), objective=0.5),
)
DOCUMENT = {
    **{path.name: path.read_text() for kind in FILES for path in (EXAMPLES / kind).glob("*.json")},
    **{f"{type(one).__name__}{i}": to_json(one) for i, one in enumerate(MADE)},
}
OF_PAGES = {"layout", "profiled-plan", "operators"}  # commands in the documentation write them


@pytest.fixture(params=DOCUMENT.values(), ids=DOCUMENT)
def document(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(json.loads(request.param))


def test_a_document_keeps_its_schema(document: dict[str, Any]) -> None:
    assert require_schema(document) in DOCUMENTS


def test_other_documents_do_not(document: dict[str, Any]) -> None:
    """Unknown and missing fields, and values of another type, are against the schema."""
    schema = json_schema(document["format"].removeprefix("stagewright-"))
    wrong = [{**document, "more": 1}]
    for key in schema["required"]:
        wrong += [{**document, key: {"other": "type"}}, {**document}]
        del wrong[-1][key]
    for one in wrong:
        with pytest.raises(ValidationError):
            Draft202012Validator(schema).validate(one)


def test_examples_are_of_every_kind() -> None:
    of_examples = {require_schema(json.loads(text)) for text in DOCUMENT.values()}
    assert of_examples | OF_PAGES == set(DOCUMENTS)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_schema_is_one_of_json_schema(name: str) -> None:
    schema = json_schema(name)
    Draft202012Validator.check_schema(schema)
    assert schema["properties"]["format"]["const"] == f"stagewright-{name}"
    assert {"format", "version"} <= set(schema["required"])
    assert schema["additionalProperties"] is False


def test_every_format_has_a_schema() -> None:
    """All but the header of a checkpoint, which is for the executor alone."""
    code = "".join(file.read_text() for room in ROOMS for file in (ROOT / room).rglob("*.py"))
    formats = set(re.findall(r'^FORMAT: Literal\["stagewright-([\w-]+)"\]', code, re.MULTILINE))
    assert formats - {"checkpoint"} == set(DOCUMENTS)
