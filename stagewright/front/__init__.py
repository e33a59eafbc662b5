"""Functions for users of Python: arguments to requests, answers to plain objects.

A function's arguments have the names of its request's fields, and are passed on as they are. The
signatures are written out, not made of the requests: editors, mypy and the reference read them.
"""

from collections.abc import Mapping
from typing import Any


def fields_of(arguments: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """The fields of a request: a function's arguments except ``others``, with tuples for lists."""
    return {name: _as_tuples(given) for name, given in arguments.items() if name not in others}


def _as_tuples(values: Any) -> Any:
    return tuple(map(_as_tuples, values)) if isinstance(values, list | tuple) else values
