"""Routes of what can be made of a job's plan: the document, a picture, files of frameworks."""

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from stagewright.executor.export import FORMATS
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.units import MAX_DEVICES
from stagewright.service.exporting import export
from stagewright.service.http.guard import Readable, Reader, Serving, own_job
from stagewright.service.http.openapi import (
    GUARDED,
    Html,
    JsonText,
    Png,
    Zip,
    answered,
    of_kinds,
    reference,
    refused,
)
from stagewright.service.http.uploads import ID, own_trace
from stagewright.service.jobs.kinds import KINDS, parse_request
from stagewright.service.jobs.records import ServiceJob
from stagewright.service.pipelines.requests import CompareRequest, PlanRequest
from stagewright.service.whole_answers import carried_document

if TYPE_CHECKING:
    from stagewright.executor.export.options import FormatOptions
    from stagewright.formulations.operators.plan import OperatorPlan

PLACE, LAYOUTS = "place", "train-plan"  # the kinds whose plans are of operators, and layouts
FILES = {LAYOUTS: "layout", "calibrate": "rates", "tune": "tuning", "tune-read": "tuning"}
"""The names of documents that are no plans, by kind of job."""
PLANS = [
    reference(PipelinePlan),
    *(
        {"type": "object", "title": name}
        for name in ("OperatorPlan", "LayoutPlan", "RateSet", "Tuning")
    ),
]
router = APIRouter(prefix="/v1", responses=refused(*GUARDED, 404))


@router.get(
    "/jobs/{job}/plan",
    responses=answered({"anyOf": PLANS}),
    openapi_extra=of_kinds("plan", PLACE, *FILES),
)
def read_plan(job: Readable) -> Response:
    """The best plan so far; a placement, layout, rate set or tuning when its job has ended."""
    carried = _carried(job)
    text = _document(job) if carried is None else documents.to_json(carried)
    return _file(JsonText(text), f"{FILES.get(job.kind, 'plan')}.json")


@router.get(
    "/jobs/{job}/trace",
    responses=answered({"type": "object"}),
    openapi_extra=of_kinds("plan", PLACE),
)
def read_trace(job: Readable) -> Response:
    """The plan's timeline as a Chrome trace, which Perfetto shows."""
    from stagewright.executor.drawing import operators
    from stagewright.executor.drawing.chrome import chrome_trace

    placed = _placement(job)
    text = chrome_trace(_plan(job)) if placed is None else operators.chrome_trace(placed)
    return _file(JsonText(text), "trace.json")


@router.get("/jobs/{job}/timeline.html", response_class=Html, openapi_extra=of_kinds("plan", PLACE))
def read_page(job: Readable) -> Response:
    """The plan's page, which needs nothing else: timeline, cluster, memory, bounds and stages."""
    from stagewright.executor.drawing import operators
    from stagewright.executor.drawing.page import page

    placed = _placement(job)
    if placed is not None:
        return _file(Html(operators.page(placed)), "timeline.html")
    return _file(Html(page(_plan(job), _request(job).cluster)), "timeline.html")


@router.get("/jobs/{job}/timeline.png", response_class=Png, openapi_extra=of_kinds("plan", PLACE))
def draw_timeline(job: Readable) -> Response:
    """The plan's timeline."""
    from stagewright.executor.drawing import operators
    from stagewright.executor.drawing.charts.chart import png

    placed = _placement(job)
    return Png(png(_plan(job)) if placed is None else operators.png(placed))


@router.get("/jobs/{job}/timeline", openapi_extra=of_kinds("plan"))
def read_timeline(job: Readable) -> dict[str, Any]:
    """What the page of the plan shows: why it is slow, timeline, cluster, memory and bounds."""
    from stagewright.executor.drawing.page import page_object

    return page_object(_plan(job), _request(job).cluster)


@router.get(
    "/jobs/{job}/figures", openapi_extra=of_kinds(*(kind for kind in KINDS if kind != "plan"))
)
def read_figures(job: Readable) -> dict[str, Any]:
    """What the page shows of an answer of another kind: numbers, tables, timelines, charts."""
    from stagewright.service.http.figures import figures

    if job.answer is None or not job.has_ended or job.kind == "plan":
        raise HTTPException(404, "there is no answer" if job.answer is None else "it is a plan")
    request = parse_request(job.kind, job.request)
    return figures(job.kind, request, json.loads(job.answer)).table()


class ExportParameters(BaseModel):
    """Options of an export; each is for some formats. See `stagewright export`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: str | None = Field(None, max_length=2000)
    partition_only: bool = False
    per_server: int | None = Field(None, ge=1, le=MAX_DEVICES)
    image: str | None = Field(None, max_length=500)
    cpus: int | None = Field(None, ge=1, le=100_000)
    time: str | None = Field(None, max_length=20)


@router.get("/jobs/{job}/export/{to}", response_class=Zip, openapi_extra=of_kinds("plan", LAYOUTS))
def export_plan(
    job: Readable,
    to: Annotated[str, Path(examples=list(FORMATS))],
    options: Annotated[ExportParameters, Query()],
) -> Response:
    """The files for a framework, or a script that launches, as a ZIP archive."""
    layout = _carried(job) if job.kind == LAYOUTS else None
    plan = _plan(job) if layout is None else layout
    return _zip(export(plan, to, _options(job, to, options)), to)


@router.get(
    "/jobs/{job}/tuning.zip", response_class=Zip, openapi_extra=of_kinds("tune", "tune-read")
)
def read_tuning(job: Readable) -> Response:
    """The folder of a tuning, as `stagewright tune` writes it: its document, the next layouts."""
    from stagewright.executor.measuring.trials import DOCUMENT, trial_files
    from stagewright.formulations.parallelism.layout import parse_layout
    from stagewright.solvers.parallelism.tree import compiled_walk

    tuning = _carried(job)
    if FILES.get(job.kind) != "tuning" or tuning is None:
        raise HTTPException(404, "the job has no tuning" + ("" if job.has_ended else " yet"))
    files = {DOCUMENT: documents.to_json(tuning)}
    for one in json.loads(job.answer or "")["next"]:
        files |= trial_files(tuning, parse_layout(one["layout"]), compiled_walk())
    return _zip(files, "tuning")


@router.get("/jobs/{job}/round.zip", response_class=Zip, openapi_extra=of_kinds("rounds"))
def read_round(job: Readable) -> Response:
    """The first round as a folder, as `stagewright rounds --to` writes it."""
    answer = json.loads(job.answer or "{}") if job.has_ended else {}
    if job.kind != "rounds" or not answer.get("launch"):
        raise HTTPException(404, "the job has no launch files" + ("" if job.has_ended else " yet"))
    return _zip(answer["launch"]["files"], "round")


def _zip(files: Mapping[str, str], name: str) -> Response:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return _file(Zip(packed.getvalue()), f"{name}.zip")


def _options(job: ServiceJob, to: str, given: ExportParameters) -> "FormatOptions":
    """The options, with the model and the cluster that the plan was asked for."""
    from stagewright.executor.export.options import FormatOptions

    if job.kind == LAYOUTS:
        return FormatOptions(**given.model_dump())
    request = _request(job)
    allowed = FORMATS[to].options if to in FORMATS else ()
    own: dict[str, Any] = {"model": request.chain, "cluster": request.cluster}
    if given.per_server is not None:
        del own["cluster"]  # one of both says where the servers are
    chosen = {name: value for name, value in own.items() if name in allowed}
    return FormatOptions(**chosen, **given.model_dump())


@router.get("/jobs/{job}/comparison", openapi_extra=of_kinds("plan"))
def compare_with_run(
    job: Readable, trace: Annotated[str, Query(pattern=ID)], caller: Reader, service: Serving
) -> dict[str, Any]:
    """The plan's prediction and what a run of it measured, from its uploaded trace.

    What ``compare --json`` prints, with the ``measured`` timeline as the page draws it.
    """
    from stagewright.executor.drawing.lanes import plan_drawing, table
    from stagewright.executor.measuring.compare import measured_plan
    from stagewright.service.pipelines.plans import compare

    plan, run = _plan(job), own_trace(service, caller.user, trace)
    answer = compare(CompareRequest.of(plan=plan, trace=run))
    measured = table(plan_drawing(measured_plan(plan, run), None))
    return answer.json_object() | {"measured": {"timeline": measured}}


@router.get("/diff", openapi_extra=of_kinds("plan"))
def diff(first: str, second: str, caller: Reader, service: Serving) -> dict[str, Any]:
    """How the plan of the second job differs from that of the first."""
    from stagewright.executor.simulation.difference import differ

    one, other = (_plan(own_job(job, caller, service)) for job in (first, second))
    return asdict(differ(one, other))


def _placement(job: ServiceJob) -> "OperatorPlan | None":
    """The plan of operators that a job has found; None of other kinds."""
    found: OperatorPlan | None = _carried(job) if job.kind == PLACE else None
    return found


def _carried(job: ServiceJob) -> Any:
    """The document that the answer of a job carries; None if it is not there."""
    is_there = job.answer is not None and job.has_ended
    return carried_document(json.loads(job.answer or "")) if is_there else None


def _document(job: ServiceJob) -> str:
    if job.kind == PLACE and job.cost is not None and job.has_ended:
        raise HTTPException(404, "the job's plan is one of operators, not of a pipeline")
    if job.document is None:
        raise HTTPException(404, "the job has no plan" + ("" if job.has_ended else " yet"))
    return job.document


def _plan(job: ServiceJob) -> PipelinePlan:
    return documents.parse(PipelinePlan, _document(job), "plan")


def _request(job: ServiceJob) -> PlanRequest:
    """The request of a job that plans a pipeline."""
    request = parse_request(job.kind, job.request)
    assert isinstance(request, PlanRequest)  # no other kind has such a plan
    return request


def _file(response: Response, name: str) -> Response:
    response.headers["Content-Disposition"] = f'attachment; filename="{name}"'
    return response
