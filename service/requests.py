"""What every request is: documents and numbers that travel in JSON, checked when they are built.

From Python wrong arguments raise InputError in one line; an HTTP service validates the same models
from a body.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import from_json

from stagewright.formulations.forms.answers import Limits, StopToken, require_limits
from stagewright.graphs.documents.arguments import require_kind
from stagewright.graphs.documents.documents import first_problem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import is_finite
from stagewright.service.options import Option


class Request(BaseModel):
    """Base of all requests: frozen and strict, without unknown fields.

    The text below a field is its description everywhere: in the schema, in the reference, and as
    the help of the command line's option.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, defer_build=True, use_attribute_docstrings=True
    )

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """The request of these fields.

        Raises
        ------
        InputError
            If they make no request: one line about the first that is wrong.
        """
        cls._require_types(fields)
        try:
            return cls(**fields)
        except ValidationError as error:
            raise InputError(first_problem(error)) from None

    def given(self) -> dict[str, Any]:
        """The fields, to make a request that differs in some."""
        return {name: getattr(self, name) for name in type(self).model_fields}

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """The request in a JSON text; errors as for :meth:`of`."""
        try:
            # Strict here, not only in the configuration: that does not reach into documents.
            return cls.model_validate_json(text, strict=True)
        except ValidationError as error:
            raise InputError(first_problem(error, plain_json(text))) from None

    @classmethod
    def _require_types(cls, fields: Mapping[str, Any]) -> None:
        """Refuse arguments of wrong types in the words of the rest of the library."""
        for name, value in fields.items():
            if name in cls.model_fields:
                require_kind(value, cls.model_fields[name].annotation, name)
                if isinstance(value, int | float) and not is_finite(value):
                    raise InputError(f"{name} must be finite, got {value}")


def plain_json(text: str | bytes) -> Any:
    """The JSON value of a text; None if it has none: that is said where it is parsed."""
    try:
        return from_json(text)
    except ValueError:
        return None


class SearchRequest(Request):
    """A request whose answer is searched for."""

    time_limit: float = 10.0
    """Time limit of the search in seconds."""
    threads: int = 1
    """Threads of the solvers; with one, answers are reproducible."""
    seed: int = 0
    """Seed of all random choices."""

    @classmethod
    def _require_types(cls, fields: Mapping[str, Any]) -> None:
        given = {name: cls.model_fields[name].default for name in SearchRequest.model_fields}
        given |= {name: fields[name] for name in given if name in fields}
        require_limits(Limits(given["time_limit"], given["threads"], given["seed"]))
        super()._require_types(fields)

    @model_validator(mode="after")
    def _require_limits(self) -> Self:
        self.limits()
        return self

    def limits(self, stop: StopToken | None = None) -> Limits:
        """The limits of the search; ``stop`` ends it early."""
        return require_limits(Limits(self.time_limit, self.threads, self.seed, stop))


class SolveRequest(SearchRequest):
    """A search whose backend may be named."""

    backend: Annotated[str | None, Option(form="NAME")] = None
    """Solver; default: the first that accepts the problem, cp-sat where it can."""

    def limits(self, stop: StopToken | None = None) -> Limits:
        """The limits of the search, with the backend."""
        return replace(super().limits(stop), backend=self.backend)


def require_positive(value: float, name: str, what: str = "a positive number of seconds") -> None:
    """Refuse a quantity that is not positive and finite."""
    if not 0 < value < math.inf:
        raise InputError(f"{name} must be {what}, got {value:g}")
