"""Routes of uploaded documents, and what requests that name them ask for."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, HTTPException, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from stagewright.executor.programs.trace import Trace
from stagewright.formulations.prices.analytic import architecture_model
from stagewright.formulations.prices.computing import PrecisionName
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import parse_bytes
from stagewright.graphs.importers.hf_config import parse_hf_config
from stagewright.graphs.importers.machine_lists import listed_server
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.machines.devices import GENERIC
from stagewright.graphs.machines.rates import published_rates
from stagewright.graphs.machines.topology import server_of
from stagewright.graphs.models.chain import Chain
from stagewright.service.http.guard import Reader, Service, Serving, Submitter
from stagewright.service.http.limits import RequestLimits
from stagewright.service.http.openapi import (
    FIELDS,
    GUARDED,
    JsonText,
    Responses,
    answered,
    refused,
    sent,
)
from stagewright.service.http.views import canonical
from stagewright.service.jobs.store import PAGE
from stagewright.service.jobs.uploads import Upload, Uploads

NAME = 200  # characters at most
_MOST_TOKENS = 100_000_000  # in a sample
SIZES = 32  # of microbatches at most
ID = "^[0-9a-f]{64}$"
router = APIRouter(prefix="/v1/uploads", responses=refused(*GUARDED, 404))
Route = TypeVar("Route", bound=Callable[..., Any])
UploadId = Annotated[str, Path(pattern=ID)]


class Kind(StrEnum):
    """The kinds of documents that users upload."""

    MODEL = "model"
    CLUSTER = "cluster"
    TRACE = "trace"


class UploadView(BaseModel):
    """An uploaded document; ``created`` is seconds since 1970."""

    model_config = ConfigDict(frozen=True)

    id: str
    kind: Kind
    name: str
    created: float


class UploadPage(BaseModel):
    """Uploads, the newest first; ``next`` is the ``before`` of the next page, None on the last."""

    uploads: tuple[UploadView, ...]
    next: str | None


KNOWN: Responses = {200: {"model": UploadView, "description": "It is kept already."}}


@dataclass(frozen=True, slots=True)
class SentDocument:
    """A document that a user sends to be stored, and the name that the user gives to it."""

    text: bytes
    user: str
    name: str | None
    service: Service
    response: Response

    async def kept(self, kind: Kind, document: Callable[[], bytes]) -> UploadView:
        """Store the document that is made of what was sent, in a thread."""
        return await run_in_threadpool(self._keep, kind, document)

    def _keep(self, kind: Kind, made: Callable[[], bytes]) -> UploadView:
        self.service.limits.require_small(self.text)
        document = made()
        own = _name_of(kind, document)
        shown = own if self.name is None else self.name
        shown = "".join(filter(str.isprintable, shown))[:NAME]
        uploads, most = Uploads(self.service.store), self.service.limits.uploads
        found, new = uploads.add(self.user, kind, shown, canonical(document), most)
        self.response.status_code = 201 if new else 200
        root = self.service.proxies.root_path
        self.response.headers["Location"] = f"{root}/v1/uploads/{found.id}"
        return _view(found)


async def _sent(
    request: Request,
    response: Response,
    caller: Submitter,
    service: Serving,
    name: Annotated[str | None, Query(max_length=NAME)] = None,
) -> SentDocument:
    return SentDocument(await service.limits.body(request), caller.user, name, service, response)


Received = Annotated[SentDocument, Depends(_sent)]


def _route(path: str, media_type: str, schema: str, *examples: str) -> Callable[[Route], Route]:
    """A route that stores the document which a user sends."""
    return router.post(
        path,
        status_code=201,
        responses=KNOWN | refused(408, 409, 413),
        openapi_extra=sent({"type": schema}, *examples, media_type=media_type),
    )


@_route("/topology", "text/plain", "string", "topology")
async def upload_topology(
    sent: Received,
    device: Annotated[str, Query(max_length=NAME, examples=["v100"])],
    memory: Annotated[str | None, Query(max_length=20)] = None,
    pcie: Annotated[int, Query(ge=3, le=5)] = 3,
) -> UploadView:
    """Keep the server that ``nvidia-smi topo -m``, ``rocm-smi --showtopo`` or ``lstopo`` prints.

    ``device`` is the kind of its devices, ``memory`` that of each where the kind is not known, such
    as 80GB; ``pcie`` is the generation of PCIe.
    """

    def made() -> bytes:
        size = None if memory is None else parse_bytes(memory, "memory")
        found = server_of(
            listed_server(_utf8(sent.text), "the topology"),
            kind=device,
            memory_bytes=size,
            pcie=pcie,
        )
        return documents.to_json(found).encode()

    return await sent.kept(Kind.CLUSTER, made)


class ConfiguredTraining(BaseModel):
    """How a configured model is trained, as ``stagewright model`` takes it.

    ``sequence``: tokens in a sample; ``device``: kinds, separated by commas; ``microbatch_size``:
    samples, several where all have costs; ``optimizer_state``: numbers per parameter; ``rates``: a
    rate set of the package by name, by default that of each kind or of the nearest.
    """

    model_config = ConfigDict(frozen=True)

    sequence: int = Field(ge=1, le=_MOST_TOKENS)
    device: str = Field(GENERIC, max_length=NAME)
    microbatch_size: list[int] = Field([1], max_length=SIZES)
    precision: PrecisionName = "fp32"
    optimizer_state: int = Field(2, ge=0, le=2)
    rates: str | None = Field(None, max_length=NAME)

    def model(self, config: str, limits: RequestLimits) -> Chain:
        """The model that the text of a ``config.json`` describes, with computed costs."""
        architecture = parse_hf_config(config, "config")
        limits.require_layers(architecture)
        return architecture_model(
            architecture,
            self.sequence,
            sorted(set(self.microbatch_size)),
            [kind.strip() for kind in self.device.split(",")],
            precision=self.precision,
            optimizer_state=self.optimizer_state,
            rates=None if self.rates is None else published_rates(self.rates).name,
        )


@_route("/config", "application/json", "object", "config")
async def upload_config(
    sent: Received, training: Annotated[ConfiguredTraining, Query()]
) -> UploadView:
    """Keep the model that a Hugging Face ``config.json`` describes, with computed costs."""

    def made() -> bytes:
        model = training.model(_utf8(sent.text), sent.service.limits)
        return documents.to_json(model).encode()

    return await sent.kept(Kind.MODEL, made)


@_route("/{kind}", "application/json", "object", "model", "cluster")
async def upload(kind: Kind, sent: Received) -> UploadView:
    """Keep a model, a cluster or a measured trace, for requests that name it."""
    return await sent.kept(kind, lambda: sent.text)


@router.get("")
def list_uploads(
    caller: Reader,
    service: Serving,
    before: Annotated[str | None, Query(pattern=ID)] = None,
    kind: Kind | None = None,
    limit: Annotated[int, Query(ge=1, le=PAGE)] = 20,
) -> UploadPage:
    """Your newest uploads; ``before`` is the ``next`` of the page before."""
    found = Uploads(service.store).page(caller.user, before=before, kind=kind, limit=limit + 1)
    last = found[limit - 1].id if len(found) > limit else None
    return UploadPage(uploads=tuple(map(_view, found[:limit])), next=last)


@router.get("/{upload}", responses=answered({"type": "object"}))
def read_upload(upload: UploadId, caller: Reader, service: Serving) -> Response:
    """An uploaded document."""
    return JsonText(_own_upload(service, caller.user, upload)[1])


@router.delete("/{upload}", status_code=204)
def discard_upload(upload: UploadId, caller: Submitter, service: Serving) -> None:
    """Delete an uploaded document; jobs that were made of it have it."""
    if not Uploads(service.store).discard(caller.user, upload):
        raise _no_upload(upload)


def _own_upload(service: Service, user: str, upload: str) -> tuple[Upload, str]:
    """An upload of a user, and its text."""
    found = Uploads(service.store).get(user, upload)
    if found is None:
        raise _no_upload(upload)
    return found


def own_trace(service: Service, user: str, upload: str) -> Trace:
    """A trace that a user has uploaded."""
    found, text = _own_upload(service, user, upload)
    if found.kind != Kind.TRACE:
        raise InputError(f"trace: upload {upload!r} is a {found.kind}, not a trace")
    return documents.parse(Trace, text, found.name)


def resolved(service: Service, user: str, text: bytes) -> bytes:
    """The text of a request, with the documents of the uploads that it names."""
    if b'"upload"' not in text:
        return text
    try:
        body = json.loads(text)
    except ValueError:
        return text  # what is wrong with it is said where it is parsed
    if not isinstance(body, dict):
        return text
    for field, kind in FIELDS.items():
        named = body.get(field)
        if isinstance(named, dict) and named.keys() == {"upload"}:
            body[field] = json.loads(_named(service, user, field, kind, named["upload"]))
    return json.dumps(body).encode()


def _named(service: Service, user: str, field: str, kind: str, upload: Any) -> str:
    """The text of the uploaded document that a field of a request names."""
    found = None
    if isinstance(upload, str) and upload.isalnum():
        found = Uploads(service.store).get(user, upload)
    if found is None:
        raise InputError(f"{field}.upload: there is no upload {upload!r}")
    if found[0].kind != kind:
        raise InputError(f"{field}.upload: {upload!r} is a {found[0].kind}, not a {kind}")
    return found[1]


def _no_upload(upload: str) -> HTTPException:
    return HTTPException(404, f"there is no upload {upload!r}")


def _name_of(kind: Kind, text: bytes) -> str:
    """The name that a document gives itself; raises InputError if it is not valid."""
    if kind is Kind.MODEL:
        _require_costs(text)
        return documents.parse(Chain, text, kind).name
    if kind is Kind.CLUSTER:
        return documents.parse(Cluster, text, kind).name
    return documents.parse(Trace, text, kind).model


def _require_costs(text: bytes) -> None:
    """Refuse a Hugging Face configuration that is sent as a model, and name the right route."""
    try:
        found = json.loads(text)
    except ValueError:
        return  # what is wrong with it is said where it is parsed
    if isinstance(found, dict) and "model_type" in found and "format" not in found:
        raise InputError(
            "model: a Hugging Face configuration has no costs: send it to "
            "/v1/uploads/config?sequence=TOKENS"
        )


def _view(found: Upload) -> UploadView:
    return UploadView(id=found.id, kind=Kind(found.kind), name=found.name, created=found.created)


def _utf8(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise InputError("the body is no text in UTF-8") from None
