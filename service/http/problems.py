"""Errors as ``application/problem+json`` (RFC 9457), in one line with the place in the document."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from stagewright.executor.export.options import FormatOptions
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.service.http.limits import (
    TooLargeError,
    TooManyError,
    TooSlowError,
    seconds_to_wait,
)
from stagewright.service.jobs.store import ConflictError

# Of requests; other options are of commands, which a message names too.
_FIELDS = {
    "--for": "runtime",
    "--order": "order",
    "--planner": "planner",
    "--share": "assumed_share",
}
_EXPORT = {f"--{one.name.replace('_', '-')}": one.name for one in fields(FormatOptions)}
_NAMES = _FIELDS | _EXPORT | {"--model": "chain", "--to": "to"}
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def in_fields(message: str) -> str:
    """The message, with fields and parameters of requests where it has their options."""
    return _OPTION.sub(lambda found: _NAMES.get(found[0], found[0]), message)


LOG = logging.getLogger("uvicorn.error")  # where the server's own errors go
MEDIA_TYPE = "application/problem+json"


_STATUSES: dict[type[Exception], int] = {
    InputError: 422, InvalidPlan: 422, ConflictError: 409, TooLargeError: 413, TooSlowError: 408,
}  # fmt: skip
"""Errors whose text is what is told."""
_UNSAID: tuple[tuple[type[Exception], int, str], ...] = (
    (ClientDisconnect, 400, "the body ends too early"),
    (Exception, 500, "an error of the service itself; its log says more"),
)
_Handler = Callable[[Request, Exception], JSONResponse]


class Problem(BaseModel):
    """What is wrong, in one line with the place in the document (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str


def problem(status: int, detail: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """A problem: its status, the phrase of that, and what is wrong here."""
    title = HTTPStatus(status).phrase
    told = Problem(type="about:blank", title=title, status=status, detail=detail)
    return JSONResponse(told.model_dump(), status, headers=headers, media_type=MEDIA_TYPE)


def add_handlers(app: FastAPI) -> None:
    """Answer every error of the service with a problem."""
    for kind, status in _STATUSES.items():
        app.add_exception_handler(kind, _saying(status))
    app.add_exception_handler(TooManyError, _too_many)
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(RequestValidationError, _of_parameters)
    app.add_exception_handler(SQLAlchemyError, _unavailable)
    for kind, status, detail in _UNSAID:
        app.add_exception_handler(kind, _unsaid(status, detail))


def _saying(status: int) -> _Handler:
    return lambda _, error: problem(status, in_fields(str(error)))


def _unsaid(status: int, detail: str) -> _Handler:
    return lambda _, __: problem(status, detail)


def _unavailable(_: Request, error: Exception) -> JSONResponse:
    LOG.error("the store does not answer: %s", getattr(error, "orig", error))
    return problem(503, "the store does not answer; try again", {"Retry-After": "2"})


def _too_many(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, TooManyError)
    return problem(429, str(error), {"Retry-After": seconds_to_wait(error.seconds)})


def _of_http(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return problem(error.status_code, str(error.detail), error.headers)


def _of_parameters(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return problem(422, f"{place}: {first['msg']}")
