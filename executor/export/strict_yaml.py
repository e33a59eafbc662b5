"""YAML of plain data in which every string is quoted: no name can be read as anything else."""

import math
from typing import Any

import yaml


class _Quoted(str):
    """A string that is written in double quotes, whatever is in it."""


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
    """The same data, all strings but the keys quoted."""
    if isinstance(value, dict):
        return {key: _quoted(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_quoted(entry) for entry in value]
    return _Quoted(value) if isinstance(value, str) else value
