"""YAML text of plain data; every string is quoted, so that no name can be read as anything else."""

from collections.abc import Iterator
from typing import Any


def to_yaml(value: dict[str, Any]) -> str:
    """One document.

    Examples
    --------
    >>> print(to_yaml({"size": 2, "names": ["a", "b: c"]}), end="")
    size: 2
    names:
      - "a"
      - "b: c"
    """
    return "".join(f"{line}\n" for line in _lines(value))


def quoted(text: str) -> str:
    """``text`` on one line and in ASCII, in YAML's double quotes."""

    def escaped(c: str) -> str:
        return c if " " <= c <= "~" and c not in '"\\' else f"\\U{ord(c):08x}"

    return f'"{"".join(map(escaped, text))}"'


def _lines(value: dict[str, Any] | list[Any]) -> Iterator[str]:
    if isinstance(value, dict):
        for key, entry in value.items():
            if isinstance(entry, dict | list):
                yield f"{key}:"
                yield from (f"  {line}" for line in _lines(entry))
            else:
                yield f"{key}: {_scalar(entry)}"
        return
    for entry in value:
        first, *rest = _lines(entry) if isinstance(entry, dict | list) else [_scalar(entry)]
        yield f"- {first}"
        yield from (f"  {line}" for line in rest)


def _scalar(value: str | int) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else quoted(value)
