"""Servers by kind of device, ``a100:2x4,v100:3x8``, and values by kind, ``a100=40GB,v100=16GB``."""

import re
from collections.abc import Callable, Iterable

from stagewright.graphs.documents.errors import InputError

_GROUP = re.compile(r"(?P<kind>[^:,]+):(?P<servers>\d{1,9})[xX](?P<devices>\d{1,9})")


def read_groups(text: str, option: str) -> list[tuple[str, int, int]]:
    """Kind, servers and devices of a server of every group."""
    found = []
    for part in text.split(","):
        match = _GROUP.fullmatch(part.strip())
        if match is None:
            raise InputError(
                f"{option} {part.strip()!r}: write KIND:SERVERSxGPUS, for example a100:2x4"
            )
        found.append((match["kind"], int(match["servers"]), int(match["devices"])))
    return found


def read_by_kind(
    text: str | None,
    option: str,
    parse: Callable[[str, str], float],
    kinds: Iterable[str],
    known: Callable[[str, str], str],
) -> dict[str, float]:
    """The value of each kind, from one for all ``kinds`` or several by kind; none without a text.

    ``known`` gives the kind that a text and its option name, or refuses it.
    """
    if text is None:
        return {}
    if "=" not in text:
        return dict.fromkeys(kinds, parse(text, option))
    pairs = [part.partition("=") for part in text.split(",")]
    found: dict[str, float] = {}
    for given, _, value in pairs:
        kind = known(given, option)
        if kind in found:
            raise InputError(f"{option}: {kind} is given twice; give it once")
        found[kind] = parse(value.strip(), option)
    return found
