"""Commands from typed models: the fields of a request, and those of a command's own, are options.

A command is a function of an :class:`Asked` request, of its own :class:`CommandOptions`, or both.
An option of its own takes the place of the request's field with the same name.
"""

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import typer
from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from stagewright.cli.completing import completion
from stagewright.cli.outputs import Named, Writes, writing
from stagewright.cli.pages import Page
from stagewright.graphs.documents.errors import InputError
from stagewright.service.options import Option

if TYPE_CHECKING:
    from stagewright.service.requests import Request

R = TypeVar("R", bound="Request")
Run = TypeVar("Run", bound=Callable[..., int])

_COMMON = ("stagewright.cli.options", "stagewright.service.requests")
"""The modules of options that many commands have."""

WORDS = (int, float, str, bool, Path)
"""What an option may be of; and choices, and lists of these."""


class CommandOptions(BaseModel):
    """The options of a command that no request has."""

    model_config = ConfigDict(
        frozen=True, arbitrary_types_allowed=True, use_attribute_docstrings=True, defer_build=True
    )


@dataclass(frozen=True, slots=True)
class _Shown:
    """Which fields of a request are options, and under which headings options are."""

    only: frozenset[str]
    without: frozenset[str]
    headings: Mapping[str, str]


_SHOWN: dict[Callable[..., int], _Shown] = {}


def command(
    *, only: str = "", without: str = "", headings: Mapping[str, str] | None = None
) -> Callable[[Run], Run]:
    """Say of a command which fields of its request are options, by default all with a value.

    ``headings`` have the fields whose options a help page shows after the others. Names of fields
    are separated by spaces.
    """
    by_field = {
        name: heading for heading, names in (headings or {}).items() for name in names.split()
    }

    def keep(run: Run) -> Run:
        _SHOWN[run] = _Shown(frozenset(only.split()), frozenset(without.split()), by_field)
        return run

    return keep


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of a model that is an option of a command."""

    name: str
    info: FieldInfo
    rank: tuple[int, ...] = ()  # of the option on the help page
    heading: str | None = None

    @property
    def option(self) -> Option:
        """The declared properties of the option."""
        return next((one for one in self.info.metadata if isinstance(one, Option)), Option())

    @property
    def is_argument(self) -> bool:
        """Whether it is an argument."""
        return bool(self.option.names) and not self.option.names[0].startswith("-")

    @property
    def shown(self) -> str:
        """The name on the command line: ``--save-prices`` or ``PLAN``."""
        return (self.option.names or (f"--{self.name.replace('_', '-')}",))[0].split("/")[0]

    @property
    def is_read(self) -> bool:
        """Whether the field's value is made of a text or a file."""
        return self.option.of_text is not None or self.option.of_file is not None

    @property
    def default(self) -> Any:
        """The option's value where it is not given."""
        return self.option.default if self.is_read else self.info.default

    def read(self, given: Any) -> Any:
        """The field's value, made of the option's text or file if need be."""
        if self.option.of_file is not None:
            return self.option.of_file(given)
        return given if self.option.of_text is None else self.option.of_text(given, self.shown)

    @property
    def writes(self) -> Writes | None:
        """How the command writes the file that the option names; None if it reads it."""
        return next((one for one in self.info.metadata if isinstance(one, Writes)), None)

    def files(self, values: dict[str, Any]) -> Iterator[tuple[Named, Writes | None]]:
        """The files that the option names; of those to be written, how."""
        writes = self.writes
        if writes is None and not self.option.may_be_file and Path not in _parts(self.kind):
            return
        if writes is not None:
            values[self.name] = writes.path(values[self.name])
        given = values[self.name]
        for one in given if isinstance(given, list) else [given]:
            if one is not None:
                yield Named(self.shown, Path(one)), writes

    @property
    def kind(self) -> Any:
        """The type of the option's value."""
        option = self.option
        kind: Any = self.info.annotation
        if option.of_file is not None:
            kind = Path
        elif option.of_text is not None or (option.form and _is_choice(kind)):
            kind = str
        is_optional = not self.info.is_required() and self.default is None
        return kind | None if is_optional and NoneType not in get_args(kind) else kind

    def require_known(self, text: str | None) -> str | None:
        """Refuse a text that is none of those there are."""
        if text is not None and text not in self.option.known:
            raise typer.BadParameter(f"{text!r} is none of {', '.join(self.option.known)}")
        return text

    def parameter(self) -> inspect.Parameter:
        """The parameter from which typer makes the option."""
        option, kind = self.option, self.kind
        limits: dict[str, Any] = {}
        for one in self.info.metadata if int in _parts(kind) else ():
            limits |= {"min": one.ge} if hasattr(one, "ge") else {}
            limits |= {"max": one.le} if hasattr(one, "le") else {}
        required = self.info.is_required()
        made: Any = partial(
            typer.Argument if self.is_argument else typer.Option,
            help=" ".join((self.info.description or "").split()),
            metavar=option.form,
            envvar=option.env,
            rich_help_panel=self.heading,
            case_sensitive=False,
            show_default=not required,
            autocompletion=completion(self.shown),
            callback=self.require_known if option.known else None,
            **limits,
        )
        if self.is_argument:
            info = made(metavar=option.form or option.names[0])
        elif kind == bool | None:
            info = made(f"{self.shown}/--no-{self.shown[2:]}")
        else:
            info = made(*(option.names or (self.shown,)))
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[kind, info],
            default=inspect.Parameter.empty if required else self.default,
        )


class Asked(Generic[R]):
    """The request that is made of a command's options."""

    def __init__(self, kind: type[R], fields: Mapping[str, _Field], given: dict[str, Any]) -> None:
        self.kind, self.fields, self.given = kind, fields, given

    def values(self, leave: Collection[str] = ()) -> dict[str, Any]:
        """The values of the request's fields that have options; files are read after all texts."""
        fields = [one for one in self.fields.values() if one.name not in leave]
        fields.sort(key=lambda one: one.option.of_file is not None)
        return {
            one.name: one.read(self.given[one.name])
            for one in fields
            if not (one.is_read and self.given[one.name] is None)
        }

    def request(self, options: Mapping[str, str] | None = None, /, **others: Any) -> R:
        """The request, with ``others`` in place of options or for fields without one.

        Errors that begin with a field name its option, which ``options`` has of the others.
        """
        names = {one.name: one.shown for one in self.fields.values()} | dict(options or {})
        return ask(self.kind, names, **self.values(others) | others)

    def strays(self, but: Collection[str], own: CommandOptions) -> list[str]:
        """The options with another value than their defaults, except ``but`` some."""
        mine = [(one, self.given[name]) for name, one in self.fields.items()]
        others = [
            (_Field(name, info), getattr(own, name))
            for name, info in type(own).model_fields.items()
        ]
        return [
            one.shown
            for one, value in (*mine, *others)
            if one.name not in but and value != one.default
        ]


def spelled(name: str) -> str:
    """The option that has the name of an argument."""
    return f"--{name.replace('_', '-')}"


def ask(kind: type[R], options: Mapping[str, str] | None = None, /, **fields: Any) -> R:
    """The request of ``fields``; errors that begin with a field name its option instead.

    ``options`` has the options whose name differs from the field.
    """
    try:
        return kind.of(**fields)
    except InputError as error:
        raise InputError(with_option(str(error), fields, options or {})) from None


def with_option(message: str, fields: Iterable[str], options: Mapping[str, str]) -> str:
    """``message`` with an option in place of the field that it begins with, if it does.

    An entry ``field[3]`` is "OPTION of stage 3" if ``options`` have "OPTION of stage" for
    ``field[]``.
    """
    first, _, rest = message.partition(" ")
    name, *_ = re.split(r"[\[:]", first)
    if name not in fields and name not in options:
        return message
    place = re.fullmatch(r"\w+\[(\d+)\]", first)
    if place and f"{name}[]" in options:
        return f"{options[f'{name}[]']} {place[1]} {rest}"
    return f"{options.get(name, spelled(name))}{first[len(name) :]} {rest}"


_FIELDS = re.compile(r"`(\w+)`|\b([a-z]+(?:_[a-z]+)+)\b")


@contextmanager
def spelling(*models: type[BaseModel]) -> Iterator[None]:
    """Name options in messages of the body, for fields of the models.

    That is for the field that a message begins with, those between backticks and those of several
    words.
    """
    fields = (_Field(*pair) for model in models for pair in model.model_fields.items())
    names = {one.name: one.shown for one in fields}
    try:
        yield
    except InputError as error:
        message = with_option(str(error), (), names)
        found = _FIELDS.sub(lambda word: names.get(word[1] or word[2], word[0]), message)
        raise InputError(found) from None


def command_of(run: Callable[..., int], name: str, **page: Any) -> TyperCommand:
    """The command that a function runs."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    parts, fields = dict(_parts_of(run)), fields_of(run)

    def start(**values: Any) -> int:
        files = [file for one in fields for file in one.files(values)]
        with writing(files, values.get("as_json", False)):
            return run(**{part: _made(kind, fields, values, part) for part, kind in parts.items()})

    contexts = [
        inspect.Parameter(part, inspect.Parameter.KEYWORD_ONLY, annotation=kind)
        for part, kind in parts.items()
        if kind is typer.Context
    ]
    parameters = [*contexts, *(one.parameter() for one in fields)]
    start.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    start.__annotations__ = {one.name: one.annotation for one in parameters}
    app.command(name, cls=Page, **page)(start)
    made = typer.main.get_command(app)
    assert isinstance(made, TyperCommand)
    return made


def fields_of(run: Callable[..., int]) -> list[_Field]:
    """The fields that are options of a command, in the order of its help page."""
    return sorted(_fields(run, dict(_parts_of(run))), key=lambda one: one.rank)


def _made(kind: Any, fields: list[_Field], values: dict[str, Any], part: str) -> Any:
    """An argument of a command's function, from the values of its options."""
    if kind is typer.Context:
        return values[part]
    model = get_args(kind)[0] if get_origin(kind) is Asked else kind
    mine = {one.name: one for one in fields if model.model_fields.get(one.name) is one.info}
    given = {name: values[name] for name in mine}
    if model is not kind:
        return Asked(model, mine, given)
    read = {
        name: one.read(given[name]) if one.is_read and given[name] is not None else given[name]
        for name, one in mine.items()
    }
    return model.model_construct(**read)


def _parts_of(run: Callable[..., int]) -> Iterator[tuple[str, Any]]:
    """The parameters of a command's function, by name."""
    hints = get_type_hints(run)
    yield from ((name, hints[name]) for name in inspect.signature(run).parameters)


def _fields(run: Callable[..., int], parts: Mapping[str, Any]) -> Iterator[_Field]:
    """The fields that are options; those of the request before those of the command."""
    shown = _SHOWN.get(run, _Shown(frozenset(), frozenset(), {}))
    models = [
        (get_args(kind)[0], True) if get_origin(kind) is Asked else (kind, False)
        for kind in parts.values()
        if kind is not typer.Context
    ]
    own = {name for model, asked in models if not asked for name in model.model_fields}
    for model, asked in models:
        for name, info in model.model_fields.items():
            if name in shown.without or (asked and (name in own or not _is_spelled(info))):
                continue
            if asked and shown.only and name not in shown.only:
                continue
            heading = shown.headings.get(name)
            below = 0 if heading is None else [*shown.headings.values()].index(heading) + 1
            rank = (below, not info.is_required(), *_rank(model, name))
            yield _Field(name, info, rank, heading)


def _rank(model: type[BaseModel], name: str) -> tuple[int, ...]:
    """The place of a model's field on a help page: what many commands have comes last."""
    classes = [one for one in model.__mro__ if name in inspect.get_annotations(one)]
    owner = classes[-1]
    is_common = owner.__module__ in _COMMON
    return (
        2 * is_common + issubclass(model, CommandOptions),
        model.__mro__.index(owner),
        [*owner.__annotations__].index(name),
    )


def _is_spelled(info: FieldInfo) -> bool:
    """Whether a field's value can be given on a command line."""
    if any(isinstance(one, Option) for one in info.metadata):
        return True
    return all(part in WORDS or get_origin(part) is Literal for part in _parts(info.annotation))


def _is_choice(kind: Any) -> bool:
    """Whether values of a type are one of several."""
    return any(get_origin(part) is Literal for part in _parts(kind))


def _parts(kind: Any) -> tuple[Any, ...]:
    """The types of a union without None, of a list its entries'; else the type itself."""
    if get_origin(kind) in (Union, UnionType, list):
        return tuple(part for one in get_args(kind) if one is not NoneType for part in _parts(one))
    return (kind,)
