"""Strict reading and atomic writing of the project's JSON documents.

A document is one frozen dataclass with the fields ``format`` and ``version``; pydantic checks it
against the annotations and its ``__post_init__`` against the rules between fields.
"""

import json
import os
import reprlib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import from_json

from stagewright.graphs.errors import InputError

T = TypeVar("T")

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
"""Configuration that every document's dataclass carries as ``__pydantic_config__``."""


def parse(kind: type[T], text: str | bytes, place: str, format_name: str, version: int) -> T:
    """Read one document of type ``kind``; ``place`` (a file name) starts every message.

    Raises
    ------
    InputError
        One line: truncated or malformed JSON, another format or version, unknown fields,
        wrong types, or a broken rule, with the path of the field.
    """
    try:
        # The json module recurses into deep nesting and lets lone surrogates pass; once that is
        # ruled out, it is the one that tells of a key that stands twice.
        data = from_json(text)
        json.loads(text, object_pairs_hook=_require_single_keys)
    except InputError as error:
        raise InputError(f"{place}: {error}") from None
    except ValueError as error:
        raise InputError(f"{place}: not a complete JSON document ({error})") from None
    if not isinstance(data, dict) or data.get("format") != format_name:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise InputError(f"{place}: expected a {format_name!r} document, found {found!r}")
    if data.get("version") != version or type(data["version"]) is not int:  # true == 1
        raise InputError(
            f"{place}: version {data.get('version')!r} is not known; this release reads {version}"
        )
    try:
        # From JSON, because only then do strict types take an array for a tuple.
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        raise InputError(f"{place}: {first_problem(error)}") from None


def _require_single_keys(pairs: list[tuple[str, Any]]) -> None:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InputError(f"the field {twice!r} stands twice in one object")


def read(kind: type[T], path: str | os.PathLike[str], format_name: str, version: int) -> T:
    """Read the document at ``path``; see :func:`parse`."""
    return parse(kind, read_text(path), str(path), format_name, version)


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of the file at ``path``; unreadable files raise InputError in one line."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a text file (UTF-8 expected)") from None


def to_json(document: Any) -> str:
    """The JSON text of a dataclass document, without its unset (None) fields.

    Numbers are written so that reading them back gives the same floats.
    """
    plain = TypeAdapter(type(document)).dump_python(document, mode="json", exclude_none=True)
    return json.dumps(plain, indent=1, allow_nan=False) + "\n"


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` to ``path`` atomically: the old file or the whole new one, never a part."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write ``data`` to ``path`` atomically, as :func:`write_text` does."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)


def first_problem(error: ValidationError) -> str:
    """The first problem as ``field.path[3]: message, got value``, and how many more there are."""
    problems = error.errors(include_url=False, include_context=False)
    first = problems[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        message = "unknown field"
    elif first["type"] == "missing":
        message = "missing field"
    elif first["type"] != "value_error" and isinstance(first["input"], str | int | float):
        message += f", got {reprlib.repr(first['input'])}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{place.lstrip('.')}: {message}{more}" if place else f"{message}{more}"
