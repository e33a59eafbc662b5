"""Errors as ``application/problem+json`` (RFC 9457), in one line with the place in the document."""

from collections.abc import Callable, Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.service.http.limits import TooLargeError, TooManyError, TooSlowError
from stagewright.service.http.rates import seconds_to_wait
from stagewright.service.jobs.store import ConflictError

MEDIA_TYPE = "application/problem+json"


STATUSES: dict[type[Exception], int] = {
    InputError: 422, InvalidPlan: 422, ConflictError: 409, TooLargeError: 413, TooSlowError: 408,
}  # fmt: skip
"""Errors whose text is what is told."""
UNSAID: tuple[tuple[type[Exception], int, str, dict[str, str]], ...] = (
    (SQLAlchemyError, 503, "the store does not answer; try again", {"Retry-After": "2"}),
    (ClientDisconnect, 400, "the body ends too early", {}),
    (Exception, 500, "an error of the service itself; its log says more", {}),
)
Handler = Callable[[Request, Exception], JSONResponse]


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
    for kind, status in STATUSES.items():
        app.add_exception_handler(kind, _saying(status))
    app.add_exception_handler(TooManyError, _too_many)
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(RequestValidationError, _of_parameters)
    for kind, status, detail, headers in UNSAID:
        app.add_exception_handler(kind, _unsaid(status, detail, headers))


def _saying(status: int) -> Handler:
    return lambda _, error: problem(status, str(error))


def _unsaid(status: int, detail: str, headers: Mapping[str, str]) -> Handler:
    return lambda _, __: problem(status, detail, headers)


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
