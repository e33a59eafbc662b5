"""What every request is: documents and numbers that travel in JSON, checked when they are built.

From Python wrong arguments raise InputError in one line; an HTTP service validates the same models
from a body.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import from_json

from stagewright.formulations.forms.answers import Limits, StopToken, require_limits
from stagewright.graphs.documents.arguments import require_kind
from stagewright.graphs.documents.documents import first_problem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import is_finite


class Option:
    """The option, or the argument, of a field.

    Parameters
    ----------
    names
        Of the option, such as ``--output`` and ``-o``; a name without dashes is an argument's. By
        default the field's name.
    form
        What a value looks like, such as ``SIZE``. A choice with a form may be any text: the request
        refuses a wrong one.
    of_text, of_file
        Makes the field's value of the option's text and its name, or of the file that it names.
    known
        The texts that there are; any text by default.
    may_be_file
        Whether the text may name a file.
    default
        The text where the option is not given; without it the field has its own default then.
    env
        A variable of the environment that has the value where the option is not given.
    """

    def __init__(
        self,
        *names: str,
        form: str | None = None,
        of_text: Callable[[str, str], Any] | None = None,
        of_file: Callable[[Any], Any] | None = None,
        known: Sequence[str] = (),
        may_be_file: bool = False,
        default: str | None = None,
        env: str | None = None,
    ) -> None:
        self.names, self.form, self.known = names, form, known
        self.of_text, self.of_file = of_text, of_file
        self.may_be_file, self.default, self.env = may_be_file, default, env


def itself(text: str, _: str) -> str:
    """The text as it is."""
    return text


def number_or_auto(text: str, option: str) -> int | None:
    """A number; None for ``auto``."""
    if text == "auto":
        return None
    if not text.isdecimal():
        raise InputError(f"{option} must be auto or a number, got {text!r}")
    return int(text)


def listed(read: Callable[[str, str], Any]) -> Callable[[str, str], tuple[Any, ...]]:
    """A function that reads values separated by commas, each by ``read``."""

    def values(text: str, option: str) -> tuple[Any, ...]:
        parts = [part.strip() for part in text.split(",")]
        if not all(parts):
            raise InputError(f"{option} {text!r} has an empty entry")
        return tuple(read(part, option) for part in parts)

    return values


def whole(text: str, option: str) -> int:
    """A whole number of a list."""
    try:
        return int(text)
    except ValueError:
        raise InputError(
            f"{option}: {text!r} is no whole number; write for example 4,8,16"
        ) from None


def one_or_several(text: str, option: str) -> int | tuple[int, ...]:
    """A number, or numbers such as ``8,24,64``, or ``8-64``: each twice the one before."""
    first, dash, last = text.partition("-")
    found = [whole(part, option) for part in ([first, last] if dash else text.split(","))]
    if min(found) < 1:
        raise InputError(f"{option} must be at least 1, got {min(found)}")
    if dash and found[0] > found[1]:
        raise InputError(f"{option} {text!r} goes down; write for example 8-1024")
    if dash:
        doublings = range((found[1] // found[0]).bit_length())
        found = [*(found[0] << n for n in doublings), found[1]]
    numbers = tuple(sorted(set(found)))
    return numbers[0] if len(numbers) == 1 else numbers


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """Numbers separated by commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{option} must be whole numbers such as 2,1,1, got {text!r}") from None


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
