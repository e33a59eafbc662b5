"""The description of the service (OpenAPI): schemas of what is sent, answered and refused."""

from collections.abc import Mapping
from functools import cache
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


class Application(FastAPI):
    """An application that describes documents and problems too."""

    def openapi(self) -> dict[str, Any]:
        """The document, with the schemas to which the routes refer."""
        found = super().openapi()
        found["components"]["schemas"] |= _components()
        service = getattr(self.state, "service", None)
        if service is not None and service.proxies.identity_header is not None:
            _add_proxy(found, service.proxies.identity_header)
        return found


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
