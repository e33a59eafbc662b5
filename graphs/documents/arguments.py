"""Arguments of functions, checked against their annotations before anything is done with them."""

import builtins
import reprlib
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from inspect import signature
from numbers import Real
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from stagewright.graphs.documents.errors import InputError

P = ParamSpec("P")
T = TypeVar("T")

_CARRIERS = ("plan", "allocation", "problem")  # fields of answers, whose values are often meant


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, which first refuses arguments of other types than its annotations say."""
    names = tuple(signature(function).parameters)
    kinds = get_type_hints(function, localns=_Unloaded(function))

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if name in kinds:
                require_kind(value, kinds[name], name)
        return function(*args, **kwargs)

    return call


class _Unloaded(dict[str, Any]):
    """Classes that a module imports for type checkers alone: an empty class by each such name.

    So a check loads nothing; :func:`_is` compares the names of classes.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.loaded = {**vars(builtins), **function.__globals__}

    def __missing__(self, name: str) -> Any:
        return self.loaded[name] if name in self.loaded else type(name, (), {})


def require_kind(value: object, annotation: Any, name: str) -> None:
    """Refuse a value of another type than an annotation says.

    Of what is within it only the elements of sequences are looked at. Raises InputError in one line
    with what would be right, and with the field of an answer that would be.
    """
    kinds = tuple(_kinds(annotation))
    if any(_is(value, kind) for kind in kinds):
        return
    wanted = [kind for kind in kinds if kind is not NoneType]
    spelled = " or ".join(dict.fromkeys(map(_spelled, wanted))).replace(" or be ", " or ")
    found = " ".join(reprlib.repr(value).split())
    carried = (one for one in _CARRIERS if any(_is(getattr(value, one, None), k) for k in wanted))
    hint = "".join(f"; give its .{one}" for one in carried)
    raise InputError(f"{name} must {spelled}, got {found} ({type(value).__name__}){hint}")


def _kinds(annotation: Any) -> Iterator[Any]:
    """The members of a union and the types of literals, or the one type."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        for one in get_args(annotation):
            yield from _kinds(one)
    elif origin is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif origin is Literal:
        yield from {type(one) for one in get_args(annotation)}
    else:
        yield annotation


def _is(value: object, annotation: Any) -> bool:
    """Whether a value has a type; no text is a sequence, and no truth value a number."""
    kind = get_origin(annotation) or annotation
    if not isinstance(kind, type):
        return True  # Any
    if kind in (int, float):
        return isinstance(value, Real if kind is float else int) and not isinstance(value, bool)
    if kind is Sequence:
        is_text = isinstance(value, str | bytes)
        return isinstance(value, Sequence) and not is_text and _holds(value, annotation)
    if getattr(kind, "_is_protocol", False):
        return all(callable(getattr(value, one, None)) for one in _methods(kind))
    return isinstance(value, kind) or kind.__name__ in {one.__name__ for one in type(value).__mro__}


def _holds(values: Sequence[object], annotation: Any) -> bool:
    """Whether all elements of a sequence have the annotated type, nested elements unchecked."""
    kinds = _elements(annotation)
    return not kinds or all(any(_is(one, kind) for kind in kinds) for one in values)


def _elements(annotation: Any) -> list[Any]:
    """The types of a sequence's elements, without type arguments."""
    return [get_origin(kind) or kind for one in get_args(annotation) for kind in _kinds(one)]


def _methods(protocol: type) -> list[str]:
    return [name for name, one in vars(protocol).items() if callable(one) and name[0] != "_"]


def _spelled(annotation: Any) -> str:
    """The requirement of an annotation in words, such as "be a whole number"."""
    kind = get_origin(annotation) or annotation
    if getattr(kind, "_is_protocol", False):
        return f"have {', '.join(_methods(kind))}()"
    name = {int: "whole number", float: "number"}.get(kind, kind.__name__)
    if kind is Sequence:
        name += " of " + " or ".join(one.__name__ for one in _elements(annotation))
    return f"be {'an' if name[0] in 'AEIOU' else 'a'} {name}"
