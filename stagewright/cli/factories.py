"""Functions of the user's code for a command, given as ``PACKAGE:FACTORY``."""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from stagewright.graphs.documents.errors import InputError

EXAMPLE = "examples.models:transformer"


def load_factory(text: str, option: str) -> Callable[..., Any]:
    """The function that ``text`` names, for example ``examples.models:transformer``.

    Packages are searched in the current folder first. Exceptions of the function become an
    InputError that names ``option``.

    Raises
    ------
    InputError
        If there is no such module or function.
    """
    package, _, path = text.partition(":")
    if not package or not path:
        raise InputError(f"{option} {text!r} names no PACKAGE:FUNCTION, for example {EXAMPLE}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    found = _find(package, path, option)

    @functools.wraps(found, updated=())
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return found(*args, **kwargs)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"{option}: {text!r} raised {_told(error)}") from error

    return guarded


def _find(package: str, path: str, option: str) -> Callable[..., Any]:
    found: Any = _import(package, option)
    for name in path.split("."):
        if not hasattr(found, name):
            raise InputError(f"{option}: {package!r} ({_place(package)}) has no {path!r}")
        found = getattr(found, name)
    if not callable(found):
        kind = type(found).__name__
        raise InputError(f"{option}: {path!r} is of type {kind}; name a function that returns it")
    function: Callable[..., Any] = found
    return function


def _import(package: str, option: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name and (package == error.name or package.startswith(f"{error.name}.")):
            raise InputError(
                f"{option}: there is no module {error.name!r} in the current folder or installed"
            ) from None
        raise InputError(f"{option}: importing {package!r} raised {_told(error)}") from error
    except Exception as error:  # the user's module may raise anything when it is imported
        raise InputError(f"{option}: importing {package!r} raised {_told(error)}") from error


def _place(package: str) -> str:
    return getattr(sys.modules[package], "__file__", None) or "a folder"


def _told(error: BaseException) -> str:
    """The error in one line, with the one that it was first raised from."""
    told = f"{type(error).__name__}: {' '.join(str(error).split())}"
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return told if cause is error else f"{told} (from {_told(cause)})"
