"""The layers of a plan as the modules of a decoder: embedding, numbered blocks, norm, head.

A layer is recognised by the last part of its name, with any prefix: ``wte`` or ``embedding``,
``layers.0``, ``h.0`` or ``block0``, ``norm`` or ``ln_f``, ``head``, ``lm_head``, ``logits`` or
``output``. Blocks count up by one from 0 or 1. Frameworks that cut by names silently drop modules
that no stage names, so layers that are not recognised are refused.
"""

import re
from collections.abc import Mapping, Sequence

from stagewright.graphs.documents.errors import InputError

Stages = Sequence[Sequence[str]]

_MEANING = "an embedding ('embedding'), numbered blocks ('layers.0'), and an output ('head')"
CURE = "use such names for the model's layers, or export to torch-csv or deepspeed"
_ROLES = {  # in the order in which they follow one another
    "embedding": re.compile(r"(.*[._])?(embed\w*|\w*embeddings?|wte|wpe|drop)"),
    "block": re.compile(r"(.*[._])?(blocks?|layers?|h)[._]?(?P<number>\d+)"),
    "norm": re.compile(r"(.*[._])?(\w*norm(_f)?|ln_f)"),
    "pooler": re.compile(r"(.*[._])?pooler"),
    "head": re.compile(r"(.*[._])?(\w*head|logits|output)"),
    "loss": re.compile(r"(.*[._])?loss"),
}
_ORDER = list(_ROLES)


def modules(stages: Stages, names: Mapping[str, str], framework: str) -> list[list[str]]:
    """Per stage the framework's modules, of which ``names`` gives one by role.

    ``{}`` in a name is the block's number, from 0. Layers with one name are one module, which must
    be on one stage; a role without a name is refused, an empty name is left out. Raises InputError
    with the layer that is not recognised, has no module, is out of order, or cuts a module.
    """
    roles = _roles([layer for layers in stages for layer in layers], names, framework)
    found: list[list[str]] = []
    module, blocks = "", 0
    for s, layers in enumerate(stages):
        found.append([])
        for layer in layers:
            role = roles[layer]
            last, module = module, names[role].format(blocks)
            blocks += role == "block"
            if not module or module in found[-1]:
                continue
            if module == last:
                raise InputError(
                    f"stage {s} begins with layer {layer!r}: {framework} has the whole {role} on "
                    "one stage"
                )
            found[-1].append(module)
    _require_ends(found, stages, names, framework)
    return found


def _roles(layers: Sequence[str], names: Mapping[str, str], framework: str) -> dict[str, str]:
    """The role of each layer; roles must be in their order, and blocks count up."""
    found: dict[str, str] = {}
    before, block = _ORDER[0], None
    for layer in layers:
        role, number = _told(layer, framework)
        if role not in names:
            raise InputError(
                f"layer {layer!r} has no module in {framework}, which has {_MEANING}; {CURE}"
            )
        if _ORDER.index(role) < _ORDER.index(before):
            raise InputError(f"layer {layer!r} is out of order: {framework} has {_MEANING}")
        if number is not None:
            wanted = min(number, 1) if block is None else block + 1
            if number != wanted:
                raise InputError(
                    f"layer {layer!r} should be number {wanted}: blocks count up by one from 0 or "
                    f"1, and {framework} would lose those between"
                )
            block = number
        found[layer], before = role, role
    return found


def _told(layer: str, framework: str) -> tuple[str, int | None]:
    """The role of a layer, and the number of a block."""
    for role, pattern in _ROLES.items():
        match = pattern.fullmatch(layer)
        if match is not None:
            return role, int(match["number"]) if role == "block" else None
    raise InputError(f"layer {layer!r} is not recognised: {framework} has {_MEANING}; {CURE}")


def _require_ends(
    found: list[list[str]], stages: Stages, names: Mapping[str, str], framework: str
) -> None:
    for s, modules_ in enumerate(found):
        if not modules_:
            layers = ", ".join(map(repr, stages[s]))
            raise InputError(f"stage {s} has no module of {framework}, only {layers}")
    if names["embedding"] not in found[0] or names["head"] not in found[-1]:
        raise InputError(
            f"layers {stages[0][0]!r} to {stages[-1][-1]!r}: {framework} has {_MEANING}, and "
            "neither end can be missing"
        )
