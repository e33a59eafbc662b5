"""What the library says of options of the command line, in the names that requests have."""

import re
from dataclasses import fields

from stagewright.executor.export.options import FormatOptions

# Of requests; other options are of commands, which a message names too.
_FIELDS = {
    "--for": "runtime",
    "--order": "order",
    "--planner": "planner",
    "--share": "assumed_share",
}
_EXPORT = {f"--{one.name.replace('_', '-')}": one.name for one in fields(FormatOptions)}
_NAMES = _FIELDS | _EXPORT | {"--model": "chain", "--to": "to"}
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def in_fields(message: str) -> str:
    """The message, with fields and parameters of requests where it has their options."""
    return _OPTION.sub(lambda found: _NAMES.get(found[0], found[0]), message)
