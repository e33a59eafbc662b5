"""Errors as ``application/problem+json`` (RFC 9457), in one line with the place in the document."""

from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.service.http.limits import TooLargeError, TooManyError
from stagewright.service.http.rates import seconds_to_wait
from stagewright.service.jobs.store import ConflictError

MEDIA_TYPE = "application/problem+json"


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

    def unprocessable(_: Request, error: Exception) -> JSONResponse:
        return problem(422, str(error))

    def conflict(_: Request, error: Exception) -> JSONResponse:
        return problem(409, str(error))

    def too_large(_: Request, error: Exception) -> JSONResponse:
        return problem(413, str(error))

    def too_many(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, TooManyError)
        return problem(429, str(error), {"Retry-After": seconds_to_wait(error.seconds)})

    def of_http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return problem(error.status_code, str(error.detail), error.headers)

    def of_parameters(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        return problem(422, f"{place}: {first['msg']}")

    def unavailable(_: Request, error: Exception) -> JSONResponse:
        return problem(503, "the store does not answer; try again", {"Retry-After": "2"})

    app.add_exception_handler(InputError, unprocessable)
    app.add_exception_handler(InvalidPlan, unprocessable)
    app.add_exception_handler(ConflictError, conflict)
    app.add_exception_handler(TooLargeError, too_large)
    app.add_exception_handler(TooManyError, too_many)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(RequestValidationError, of_parameters)
    app.add_exception_handler(SQLAlchemyError, unavailable)
