"""Strict reading and atomic writing of the project's JSON documents.

A document is one frozen dataclass with the fields ``format`` and ``version``; pydantic checks it
against the annotations and its ``__post_init__`` against the rules between fields.
"""

import contextlib
import io
import json
import os
import re
import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, dataclass_transform

from pydantic import ConfigDict, Discriminator, TypeAdapter, ValidationError
from pydantic_core import from_json

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_type

# The first bytes of files that are no text, what they are, and what would be right.
_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", "gzip; unpack it (gunzip)"),
    (b"\x28\xb5\x2f\xfd", "Zstandard; unpack it (zstd -d)"),
    (b"BZh", "bzip2; unpack it (bunzip2)"),
    (b"\xfd7zXZ", "xz; unpack it (unxz)"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes, too"),
    (b"\x89PNG", "a PNG picture"),
    (b"%PDF", "a PDF"),
    (b"\x89HDF", "HDF5"),
    (b"PAR1", "Parquet"),
    (b"\x80", "binary, such as a pickle"),
    (b"\xff\xfe", "UTF-16; save it as UTF-8"),
    (b"\xfe\xff", "UTF-16; save it as UTF-8"),
)

# Outside of strings, which the first alternative skips; nothing is known after an open one.
FOREIGN = re.compile(
    r'"(?:[^"\\]|\\.)*"|(?P<open>")|(?P<comment>//|/\*|#)|(?P<comma>,(?=\s*[]}]))|(?P<quote>\')'
    r"|(?P<word>\b(?:None|True|False)\b)",
    re.DOTALL,
)
_OF_PYTHON = {"None": "null", "True": "true", "False": "false"}


def not_text(data: bytes) -> str:
    """The complaint about a file that is not text in UTF-8."""
    for signature, known in _SIGNATURES:
        if data.startswith(signature):
            return f"not a text file in UTF-8, but {known}"
    return "not a text file (UTF-8 expected)"


def not_json(text: str, error: ValueError) -> str:
    """The complaint about a text for which a JSON parser raised ``error``."""
    begins = text.lstrip()[:200]
    if not begins:
        return "not a complete JSON document: the file is empty"
    if "\0" in begins:
        return "not a complete JSON document, but text of another encoding; save it as UTF-8"
    if begins.startswith("<"):
        what = "an HTML page" if re.search("(?i)<(!doctype )?html", begins) else "XML or HTML"
        return f"not a complete JSON document, but {what}; get the file itself"
    if re.match(r"---\s|[\w-]+:(\s|$)", begins):
        return "not a complete JSON document, but YAML as it seems; convert it to JSON"
    foreign = _foreign(text)
    return f"not a complete JSON document ({error})" + (f": {foreign}" if foreign else "")


def _foreign(text: str) -> str | None:
    """The first syntax that is no JSON (a comment, a quote), with its line; None without any."""
    found = next((one for one in FOREIGN.finditer(text) if one.lastgroup), None)
    if found is None or found.lastgroup == "open":
        return None
    line, what = text.count("\n", 0, found.start()) + 1, found[0]
    return {
        "comment": f"JSON has no comments; delete {what} in line {line}",
        "comma": f"JSON has no comma before }} or ]; delete the one in line {line}",
        "quote": f"strings of JSON have double quotes; write them for ' in line {line}",
        "word": f"write {_OF_PYTHON.get(what)} for {what} in line {line}",
    }[str(found.lastgroup)]


T = TypeVar("T")

STANDARD_OUTPUT = 1  # its file descriptor

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
"""Configuration that every document's dataclass carries as ``__pydantic_config__``."""


@dataclass_transform(frozen_default=True)
def record(of: type[T]) -> type[T]:
    """A part of a document: a frozen dataclass with slots, which is read strictly."""
    of.__pydantic_config__ = STRICT  # type: ignore[attr-defined]
    return dataclass(frozen=True, slots=True)(of)


_MAKES_MODEL = "`stagewright model` makes a model of it"


def told_by(fields: Mapping[str, str], otherwise: str) -> Discriminator:
    """Discriminator of union members by a field that one alone has; errors name one member.

    ``fields`` gives the member of each of these fields, ``otherwise`` the member without them.
    """

    def tag(value: Any) -> str:
        given = value if isinstance(value, dict) else getattr(value, "__dataclass_fields__", ())
        return next((name for field, name in fields.items() if field in given), otherwise)

    return Discriminator(tag)


def format_name(kind: type[Any]) -> str:
    """The format of documents of type ``kind``: the default of its field."""
    return str(kind.__dataclass_fields__["format"].default)


def parse(kind: type[T], text: str | bytes, place: str) -> T:
    """Read one document of type ``kind``; ``place`` (a file name) starts every message.

    Raises InputError in one line: truncated or malformed JSON, another format or version, unknown
    fields, wrong types, or a broken rule, with the path of the field.
    """
    try:
        # pydantic refuses deep nesting, on which the json module recurses, and lone surrogates;
        # only the json module reports duplicate keys.
        data = from_json(text)
        json.loads(text, object_pairs_hook=_require_single_keys)
    except InputError as error:
        raise InputError(f"{place}: {error}") from None
    except ValueError as error:
        raise InputError(f"{place}: {not_json(_decoded(text), error)}") from None
    expected, version = format_name(kind), kind.__dataclass_fields__["version"].default  # type: ignore[attr-defined]
    if not isinstance(data, dict) or data.get("format") != expected:
        raise InputError(f"{place}: expected a {expected!r} document, found {_shown(data)}")
    if data.get("version") != version or type(data["version"]) is not int:  # true == 1
        raise InputError(
            f"{place}: version {data.get('version')!r} is not known; this release reads {version}"
        )
    try:
        # From JSON, because only then do strict types accept an array for a tuple.
        return _adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        raise InputError(f"{place}: {first_problem(error, data)}") from None


def _shown(data: Any) -> str:
    """The kind of document that was found in place of the expected kind, for messages."""
    if not isinstance(data, dict):
        return repr(type(data).__name__)
    if "format" not in data and "model_type" in data:
        return f"a Hugging Face config.json: {_MAKES_MODEL}"
    return repr(data.get("format"))


def _decoded(text: str | bytes) -> str:
    return text if isinstance(text, str) else text.decode(errors="replace")


def _require_single_keys(pairs: list[tuple[str, Any]]) -> None:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InputError(f"the field {twice!r} appears twice in one object")


def read(kind: type[T], path: str | os.PathLike[str]) -> T:
    """Read the document at ``path``; see :func:`parse`."""
    return parse(kind, read_text(path), str(path))


def format_of(path: str | os.PathLike[str]) -> str | None:
    """The format that the document at ``path`` says it has; None if it says none."""
    text = read_text(path)
    try:
        data = from_json(text)
    except ValueError:
        return None
    found = data.get("format") if isinstance(data, dict) else None
    return found if isinstance(found, str) else None


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of the file at ``path``, without the mark (BOM) with which some programs begin it.

    Unreadable files raise InputError in one line, which says what they are instead.
    """
    name = file_name(path)
    try:
        data = Path(name).read_bytes()
    except IsADirectoryError:
        known = os.path.isfile(os.path.join(name, "config.json"))
        said = f" with a config.json: {_MAKES_MODEL}" if known else "; name a file in it"
        raise InputError(f"{name} is a folder{said}") from None
    except OSError as error:
        raise InputError(f"{name}: {error.strerror}") from None
    try:
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig").read()
    except UnicodeDecodeError:
        raise InputError(f"{name}: {not_text(data)}") from None


def file_name(path: str | os.PathLike[str]) -> str:
    """``path`` as text; raises InputError if it cannot be a file name."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path) or "\0" in str(path):
        raise InputError(f"{reprlib.repr(path)} is not a file name")
    return os.fsdecode(path)


def to_json(document: Any) -> str:
    """The JSON text of a dataclass document, without its unset (None) fields.

    So None must be the default of every field that may be None. Numbers are written so that reading
    them back gives the same floats.
    """
    plain = _adapter(type(document)).dump_python(document, mode="json", exclude_none=True)
    return json.dumps(plain, indent=1, allow_nan=False) + "\n"


_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def _adapter(kind: type[T]) -> TypeAdapter[T]:
    """Made once: pydantic takes milliseconds for the schema of a type."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def write(kind: type[T], document: T, path: str | os.PathLike[str], what: str = "the file") -> None:
    """Write a document of type ``kind`` to ``path`` atomically; ``what`` it is, for messages.

    Raises InputError if ``document`` has another type, or the file cannot be written.
    """
    require_type(document, kind, "the document")
    write_file(path, to_json(document), what)


def write_file(path: str | os.PathLike[str], content: str | bytes, what: str = "the file") -> None:
    """Write ``content`` to ``path`` atomically: a reader sees the old file or the complete new one.

    ``what`` it is, for messages. Pipes, devices and the file of standard output are written
    directly.
    """
    path = file_name(path)
    data = content.encode() if isinstance(content, str) else content
    try:
        if is_standard_output(path):
            sys.stdout.flush()
            _pour(STANDARD_OUTPUT, data)
        elif os.path.exists(path) and not os.path.isfile(path):
            _pour(path, data)
        else:
            _replace(path, data)
    except BrokenPipeError:
        raise  # the reader closed the pipe; the path is not at fault
    except OSError as error:
        raise InputError(f"{path}: {what} cannot be written: {error.strerror}") from None


def is_standard_output(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is the file of standard output, as /dev/stdout is."""
    try:
        found = os.stat(path)
        nowhere = os.path.samestat(found, os.stat(os.devnull))
        return not nowhere and os.path.samestat(found, os.fstat(STANDARD_OUTPUT))
    except OSError:
        return False


def _pour(file: int | str | os.PathLike[str], data: bytes) -> None:
    with open(file, "wb", closefd=not isinstance(file, int)) as opened:
        opened.write(data)


def _replace(path: str | os.PathLike[str], data: bytes) -> None:
    target = os.path.realpath(path)  # write the target of a link, not the link
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def flush(path: str | os.PathLike[str]) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def first_problem(error: ValidationError, document: Any = None) -> str:
    """The first problem as ``field.path[3]: message, got value``, and the number of others.

    With ``document``, the plain data that was read, the path has only fields of the document,
    without the tag by which pydantic chose the member of a union. That a document is of another
    kind comes before what it therefore lacks.
    """
    problems = error.errors(include_url=False)
    first = next((one for one in problems if one["loc"][-1:] == ("format",)), problems[0])
    path, message = list(first["loc"]), first["msg"].removeprefix("Value error, ")
    if document is not None:
        path = _without_tags(path, document, first["type"])
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        message = "unknown field"
    elif first["type"] == "missing":
        message = "missing field"
    elif first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        path, message = _about_tag(path, first["ctx"])
    elif first["type"] != "value_error" and isinstance(first["input"], str | int | float):
        message += f", got {reprlib.repr(first['input'])}"
    place = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part if part.isprintable() else ascii(part)}"
        for part in path
    )
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{place.lstrip('.')}: {message}{more}" if place else f"{message}{more}"


def _without_tags(path: Sequence[int | str], document: Any, problem: str) -> list[int | str]:
    """The parts of ``path`` that are fields or indices of ``document``, or a missing field."""
    found: list[int | str] = []
    node = document
    for position, part in enumerate(path):
        is_absent_field = problem == "missing" and position == len(path) - 1
        if isinstance(node, dict) and part not in node and not is_absent_field:
            continue
        found.append(part)
        node = _child(node, part)
    return found


def _child(node: Any, part: int | str) -> Any:
    if isinstance(node, list) and isinstance(part, int) and part < len(node):
        return node[part]
    return node.get(part) if isinstance(node, dict) else None


def _about_tag(path: Sequence[int | str], context: dict[str, Any]) -> tuple[list[int | str], str]:
    """The place of the field that selects a union's member, and the problem with it."""
    place = [*path, context["discriminator"].strip("'")]
    if "tag" not in context:
        return place, "missing field"
    tag = reprlib.repr(context["tag"])
    return place, f"must be one of {context['expected_tags']}, got {tag}"
