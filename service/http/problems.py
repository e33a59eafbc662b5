"""Errors as ``application/problem+json`` (RFC 9457), in one line with the place in the document."""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.service.http.limits import TooLargeError
from stagewright.service.jobs.store import ConflictError

LOG = logging.getLogger("uvicorn.error")  # where the server's own errors go
MEDIA_TYPE = "application/problem+json"


def problem(
    status: int, detail: str, headers: Mapping[str, str] | None = None, **more: Any
) -> JSONResponse:
    """A problem: its status, the phrase of that, and what is wrong here."""
    told = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status}
    return JSONResponse(
        told | {"detail": detail} | more, status, headers=headers, media_type=MEDIA_TYPE
    )


def add_handlers(app: FastAPI) -> None:
    """Answer every error of the service with a problem."""

    def unprocessable(_: Request, error: Exception) -> JSONResponse:
        return problem(422, str(error))

    def conflict(_: Request, error: Exception) -> JSONResponse:
        return problem(409, str(error))

    def too_large(_: Request, error: Exception) -> JSONResponse:
        return problem(413, str(error))

    def of_http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return problem(error.status_code, str(error.detail), error.headers)

    def of_parameters(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        return problem(422, f"{place}: {first['msg']}")

    def unavailable(_: Request, error: Exception) -> JSONResponse:
        LOG.error("the store does not answer: %s", getattr(error, "orig", error))
        return problem(503, "the store does not answer; try again", {"Retry-After": "2"})

    app.add_exception_handler(InputError, unprocessable)
    app.add_exception_handler(InvalidPlan, unprocessable)
    app.add_exception_handler(ConflictError, conflict)
    app.add_exception_handler(TooLargeError, too_large)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(RequestValidationError, of_parameters)
    app.add_exception_handler(SQLAlchemyError, unavailable)
