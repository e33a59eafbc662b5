"""Docstrings as the site's renderer reads them: no roles, and parameters one by one."""

import re
from typing import Any

import griffe

SHARED = re.compile(r"^(?P<names>\w+(?:, \w+)+)\n(?P<text>(?:    .*(?:\n|$))+)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """An extension of griffe, which reads the code."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Write out what the renderer does not know."""
        if obj.docstring is not None:
            text = re.sub(r":(?:func|class|meth|mod|attr|data):`~?", "`", obj.docstring.value)
            # Of parameters that share a line it takes the first one's type for all of them.
            obj.docstring.value = SHARED.sub(_one_by_one, text)


def _one_by_one(shared: re.Match[str]) -> str:
    text = shared["text"].rstrip("\n")
    return "".join(f"{name}\n{text}\n" for name in shared["names"].split(", "))
