"""Groups of an optimizer's parameters, by patterns of the model's own names."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stagewright.graphs.documents.errors import InputError

ParameterGroups = Mapping[str, Mapping[str, Any]]
"""Arguments of the optimizer by regular expression.

A parameter belongs to the first expression that is found in its name (``re.search``); parameters
that match none have the optimizer's own arguments. One with several names has the first of them.
"""


def require_groups(groups: ParameterGroups, names: Sequence[str]) -> None:
    """Refuse groups without any of the trained parameters ``names`` of the whole model."""
    left = set(names)
    for pattern in groups:
        expression = _compiled(pattern)
        if not any(map(expression.search, names)):
            raise InputError(
                f"group {pattern!r} matches no trained parameter; the names are like "
                f"{', '.join(names[:3]) or 'none'}"
            )
        own = {name for name in left if expression.search(name)}
        if not own:
            raise InputError(
                f"group {pattern!r}: all parameters that it matches are in groups before it"
            )
        left -= own


def grouped(
    names: Sequence[str], parameters: Sequence[nn.Parameter], groups: ParameterGroups
) -> list[Any]:
    """An optimizer's argument: the parameters, or a mapping for each group and for the rest.

    Every stage has all groups, in the same order, some of them without parameters.
    """
    if not groups:
        return list(parameters)
    patterns = [_compiled(pattern) for pattern in groups]
    made: list[dict[str, Any]] = [{"params": []}]
    made += [{**arguments, "params": []} for arguments in groups.values()]
    for name, one in zip(names, parameters, strict=True):
        found = (i for i, pattern in enumerate(patterns, 1) if pattern.search(name))
        made[next(found, 0)]["params"].append(one)
    return made


def require_arguments(optimizer: torch.optim.Optimizer, groups: ParameterGroups) -> None:
    """Refuse arguments that the optimizer would not read."""
    for pattern, arguments in groups.items():
        for key in arguments:
            if key not in optimizer.defaults:
                raise InputError(
                    f"group {pattern!r}: {type(optimizer).__name__} has no {key!r} for a group; "
                    f"one of {', '.join(optimizer.defaults)}"
                )


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InputError(f"group {pattern!r} is no regular expression: {error}") from None
