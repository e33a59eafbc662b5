"""YAML of plain data with all strings quoted, so that no name is read as another type."""

import math
from typing import Any

import yaml


class _Quoted(str):
    """A string that is always written in double quotes."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(
    _Quoted,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style='"'),
)


def to_yaml(value: dict[str, Any]) -> str:
    """One document, in ASCII.

    Examples
    --------
    >>> print(to_yaml({"size": 2, "names": ["a", "b: c"]}), end="")
    size: 2
    names:
    - "a"
    - "b: c"
    """
    return yaml.dump(
        _quoted(value), Dumper=_Dumper, sort_keys=False, width=math.inf, allow_unicode=False
    )


def _quoted(value: Any) -> Any:
    """The same data with all strings except keys quoted."""
    if isinstance(value, dict):
        return {key: _quoted(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_quoted(entry) for entry in value]
    return _Quoted(value) if isinstance(value, str) else value
