"""The published JSON Schemas: one for every document, and documents keep them."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from documentation import EXAMPLES, ROOT, require_schema
from jsonschema import Draft202012Validator, ValidationError
from plans import make_stages, small_problem, valid_plan

from stagewright.executor.clusters.report import ClusterReport, JobOutcome, Placed, Share
from stagewright.executor.programs.trace import MeasuredMemory, Trace, TracedStep
from stagewright.executor.training.checkpoint import Header
from stagewright.formulations.checking.check import predict
from stagewright.formulations.clusters.allocation_plan import AllocationPlan
from stagewright.formulations.clusters.allocation_plan import Share as PlannedShare
from stagewright.formulations.plans.plan import PipelinePlan, ScheduledAction
from stagewright.graphs.documents.documents import parse, to_json
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.timed_layers import TimedCollective, TimedLayers, TimedUpdate
from stagewright.graphs.machines.anchors import TimedLayer, TimedModel
from stagewright.graphs.machines.rates import rates_of
from stagewright.graphs.models.architecture import Architecture, FeedForward, GroupedAttention
from stagewright.graphs.models.operators.cost_book import Computed, CostBook
from stagewright.graphs.models.operators.step_graph import Node, Output, Split, StepGraph
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


def timed() -> TimedLayers:
    tiny = Architecture("tiny", 1, 8, 8, GroupedAttention(1, 1, 8), FeedForward(8))
    return TimedLayers(
        TimedModel(tiny, 8, "h100", 2), rates_of("h100"), "plan", "1 x H100", "torch 2",
        (TimedLayer("dense", 1, 1, False, 1, False, 1.0, 1.0, 1.0, 0.9, 1.1, 8.0),),
        TimedUpdate(8, 1.0), (TimedCollective("all-reduce", 2, 8, 1.0),),
    )  # fmt: skip


def report() -> ClusterReport:
    jobs = (JobOutcome("a", "done", 8, 2.0), JobOutcome("b", "waiting", 3))
    return ClusterReport(jobs, ((Placed(("a",), "v100", (0,), False),),), ())


MADE = (
    plan(),
    graph(),
    trace(),
    report(),
    replace(report(), shares=(Share("a", "v100", 0.5, 0.4, 2.0, None),)),
    rates_of("h100"),
    timed(),
    CostBook((Computed("y", "v100", 2, 1.0),)),
    Pool((Accelerator("v100", 8, 4, 2.48), Accelerator("k80", 2))),
    AllocationPlan("0", "max-min", (PlannedShare(("a", "b"), "v100", 0.5),), objective=0.5),
)
DOCUMENT = {
    **{path.name: path.read_text() for kind in FILES for path in (EXAMPLES / kind).glob("*.json")},
    **{f"{type(one).__name__}{i}": to_json(one) for i, one in enumerate(MADE)},
}
SMALLEST = {
    json.loads(text)["format"]: text for text in sorted(DOCUMENT.values(), key=len, reverse=True)
}
# Commands of pages write them.
OF_PAGES = {"layout", "profiled-plan", "operators", "round", "tuning"}


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
    formats = set(re.findall(r'^    format: Literal\["stagewright-([\w-]+)"\]', code, re.MULTILINE))
    assert formats - {"checkpoint"} == set(DOCUMENTS)


def members(annotation: Any) -> Iterator[Any]:
    """An annotation and all that is within it."""
    yield annotation
    for one in get_args(annotation) if get_origin(annotation) is not Literal else ():
        yield from members(one)


def records(kind: type, found: dict[type, dict[str, Any]]) -> dict[type, dict[str, Any]]:
    """The dataclasses within a document, with the annotations of their fields."""
    if kind not in found:
        found[kind] = get_type_hints(kind)
        for annotation in found[kind].values():
            for one in members(annotation):
                if isinstance(one, type) and is_dataclass(one):
                    records(one, found)
    return found


@pytest.mark.parametrize("kind", [*DOCUMENTS.values(), Header])
def test_what_may_be_none_is_none_where_it_is_not_written(kind: type) -> None:
    """None is left out of documents, so it must be what an absent field is read as."""
    for record, hints in records(kind, {}).items():
        for one in fields(record):
            if NoneType in get_args(hints[one.name]):
                assert one.default is None, f"{record.__name__}.{one.name}"
        inner = [part for annotation in hints.values() for part in members(annotation)]
        maps = [get_args(part)[1] for part in inner if get_origin(part) in (dict, Mapping)]
        assert not any(NoneType in members(one) for one in maps)


def without_one(value: Any) -> Iterator[Any]:
    """The value with each of its set optional fields None, at any depth."""
    if isinstance(value, tuple):
        for index, one in enumerate(value[:2]):
            for other in without_one(one):
                yield (*value[:index], other, *value[index + 1 :])
    elif is_dataclass(value) and not isinstance(value, type):
        hints = get_type_hints(type(value))
        for field in fields(value):
            old = getattr(value, field.name)
            changed = [*without_one(old)]
            if old is not None and NoneType in get_args(hints[field.name]):
                changed.append(None)
            for new in changed:
                with suppress(InputError):  # a rule between fields
                    yield replace(value, **{field.name: new})


@pytest.mark.parametrize("name", SMALLEST)
def test_documents_are_read_as_they_are_written(name: str) -> None:
    """With all that they hold, and with each optional field None."""
    text = SMALLEST[name]
    kind = DOCUMENTS[name.removeprefix("stagewright-")]
    whole = parse(kind, text, "file")
    for one in (whole, *without_one(whole)):
        assert parse(kind, to_json(one), "file") == one
