"""The description of the service (OpenAPI): schemas, examples, and links between operations."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Response
from pydantic import TypeAdapter

from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.service.http.problems import MEDIA_TYPE, Problem
from stagewright.service.jobs.kinds import KINDS

PLACE = "#/components/schemas/{model}"
Responses = dict[int | str, dict[str, Any]]
PROBLEMS = {
    401: "No token, or one that nobody has.",
    403: "The token's scope does not allow it, or the request comes from another site.",
    404: "There is no such job, or it does not have what is asked for.",
    408: "The body takes too long.",
    409: "The request contradicts what is stored.",
    413: "The body is too large.",
    422: "The request is not valid; the detail names the place.",
    429: "Too many requests, or queued jobs.",
    503: "The store does not answer.",
}
FIELDS = {"chain": "model", "cluster": "cluster"}
"""The fields of requests that may name an upload, and the kind that this has."""
_UPLOAD = {
    "type": "object",
    "properties": {"upload": {"type": "string"}},
    "required": ["upload"],
    "additionalProperties": False,
}
GUARDED = (401, 403, 422, 429, 503)
PAGE = files("stagewright.service.http.page")
_OF_KINDS = "x-kinds"
_TAKES = {"JobView": {"job", "first", "second"}, "UploadView": {"upload"}}
"""The parameters that take the id of what an answer describes."""


class Application(FastAPI):
    """An application that describes documents and problems too."""

    def openapi(self) -> dict[str, Any]:
        """The document, with the schemas and examples to which the routes refer, and links."""
        if not self.openapi_schema:
            found = super().openapi()
            found["components"]["schemas"] |= _components()
            found["components"] |= {"examples": _examples(), "links": _linked(found["paths"])}
            service = getattr(self.state, "service", None)
            if service is not None and service.proxies.identity_header is not None:
                _add_proxy(found, service.proxies.identity_header)
        return super().openapi()


def of_kinds(*names: str) -> dict[str, Any]:
    """That jobs of these kinds alone have what a route answers, for its ``openapi_extra``."""
    return {_OF_KINDS: list(names)}


def sent(schema: Mapping[str, Any], *examples: str, media_type: str = "application/json") -> Any:
    """What a route is sent, for its ``openapi_extra``; examples are those of `_examples`."""
    shown = {one: {"$ref": f"#/components/examples/{one}"} for one in examples}
    content = {media_type: {"schema": schema} | ({"examples": shown} if shown else {})}
    return {"requestBody": {"required": True, "content": content}}


def _add_proxy(described: dict[str, Any], header: str) -> None:
    """Say that a trusted proxy names the user, where a token does else."""
    described["components"]["securitySchemes"]["Proxy"] = {
        "type": "apiKey", "in": "header", "name": header,
        "description": "The user who signed in; it is read of requests of trusted proxies alone.",
    }  # fmt: skip
    for path in described["paths"].values():
        for operation in path.values():
            if "security" in operation:
                operation["security"] = [{"Token": []}, {"Proxy": []}]


def response_of(name: str, media_type: str) -> type[Response]:
    """A response of a media type, which the description of a route names."""
    return type(name, (Response,), {"media_type": media_type})


JsonText = response_of("JsonText", "application/json")  # a JSON value that is a text already
Png = response_of("Png", "image/png")
Zip = response_of("Zip", "application/zip")
Html = response_of("Html", "text/html")
Events = response_of("Events", "text/event-stream")


def refused(*statuses: int) -> Responses:
    """With what a route may refuse, for its ``responses``."""
    content = {MEDIA_TYPE: {"schema": reference(Problem)}}
    return {
        status: {"description": PROBLEMS[status], "content": content} | _headers(status)
        for status in statuses
    }


def answered(schema: Mapping[str, Any]) -> Responses:
    """A JSON value of a schema, for the ``responses`` of a route that has its text."""
    return {200: {"content": {"application/json": {"schema": schema}}}}


def reference(kind: type) -> dict[str, str]:
    """The place of the schema of a request, a document or a problem."""
    return {"$ref": PLACE.format(model=kind.__name__)}


def _headers(status: int) -> dict[str, Any]:
    names = {401: "WWW-Authenticate", 429: "Retry-After", 503: "Retry-After"}
    if status not in names:
        return {}
    return {"headers": {names[status]: {"schema": {"type": "string"}}}}


@cache
def _components() -> dict[str, Any]:
    requests = [form for one in KINDS.values() for form in one.forms]
    kinds: list[Any] = [*requests, PipelinePlan, Problem]
    found = TypeAdapter.json_schemas(
        [(kind.__name__, "validation", TypeAdapter(kind)) for kind in kinds], ref_template=PLACE
    )[1]
    schemas: dict[str, Any] = found["$defs"]
    for one in requests:
        fields = schemas[one.__name__]["properties"]
        for name in FIELDS.keys() & fields:
            fields[name] = {"anyOf": [fields[name], _UPLOAD]}
    return schemas


@cache
def _examples() -> dict[str, Any]:
    """A request of each kind, which the page shows too, and documents to upload."""
    values: dict[str, Any] = {
        kind: json.loads(PAGE.joinpath(f"example-{kind}.json").read_text("utf-8")) for kind in KINDS
    }
    plan, layout = values["plan"], values["train-plan"]
    topology = "\tGPU0\tGPU1\nGPU0\t X \tNV1\nGPU1\tNV1\t X \n"  # of nvidia-smi
    values |= {"model": plan["chain"], "cluster": plan["cluster"], "topology": topology}
    values["config"] = layout["config"]
    return {name: {"value": value} for name, value in values.items()}


def _linked(paths: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Link each answer that describes a job or an upload to the operations that take its id."""
    operations = {one["operationId"]: one for calls in paths.values() for one in calls.values()}
    taking: dict[str, dict[str, Any]] = {view: {} for view in _TAKES}
    for view, names in _TAKES.items():
        for name, one in operations.items():
            given = [each["name"] for each in one.get("parameters", ()) if each["required"]]
            if taken := names.intersection(given):
                values = dict.fromkeys(sorted(taken), "$response.body#/id")
                taking[view][name] = {"operationId": name, "parameters": values}
    for name, one in operations.items():
        for view, response in _views(one):
            response["links"] = {
                then: {"$ref": f"#/components/links/{then}"}
                for then in taking[view]
                if _may_follow(name, operations[then])
            }
    return {name: link for links in taking.values() for name, link in links.items()}


def _views(operation: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The responses that describe a job or an upload, and which."""
    for response in operation["responses"].values():
        schema = response.get("content", {}).get("application/json", {}).get("schema", {})
        view = schema.get("$ref", "").rpartition("/")[2]
        if view in _TAKES:
            yield view, response


def _may_follow(name: str, then: Mapping[str, Any]) -> bool:
    """Whether an operation may be one on what `name` answers: of all jobs, or of its kind."""
    return _OF_KINDS not in then or name.removeprefix("submit-") in then[_OF_KINDS]
