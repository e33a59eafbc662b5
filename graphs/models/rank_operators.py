"""The operators of a block as one rank of a tensor, context or expert group has them."""

from dataclasses import replace
from typing import TYPE_CHECKING

from stagewright.graphs.models.architecture import Architecture, Operators
from stagewright.graphs.models.operations import LayerOperation

if TYPE_CHECKING:
    from stagewright.graphs.models.shards import LayerSplit

_WHOLE = ("norm", "dropout", "sum", "router", "routing", "dispatch", "combine", "experts")
"""Operators that tensor parallelism leaves whole, by a word of their names; with sequence
parallelism each rank has its tokens."""

DIVIDED_INPUTS = (
    "query, key, value", "latent", "recurrent in", "feed-forward in", "shared in", "cross query",
)  # fmt: skip
"""Products whose inputs sequence parallelism keeps divided, and gathers; without it, the gradients
of these inputs are summed over the tensor ranks."""


def place_experts(
    architecture: Architecture, index: int, tokens: int, operators: Operators, split: "LayerSplit"
) -> float:
    """Put the rank's experts into ``operators``; the elements that it routes.

    With tensor parallelism the tokens are divided among the tensor ranks before they are routed.
    """
    experts = architecture.experts
    assert experts is not None
    whole = architecture.block(index, 1, tokens)
    local = replace(
        architecture,
        experts=replace(
            experts,
            number=experts.number // split.expert,
            per_token=min(experts.per_token, experts.number // split.expert),
        ),
    ).block(index, 1, tokens)
    for name in whole:
        if name in ("router", "routing", "dispatch", "combine"):
            operators[name] = whole[name]
        elif name.startswith("experts"):
            # As many tokens as without expert parallelism, but only the weights of some experts.
            weights = local[name].parameters
            operators[name] = replace(
                whole[name],
                moved=whole[name].moved - whole[name].parameters + weights,
                parameters=weights,
            )
    per_rank = split.tensor if split.sequence_parallel else 1
    return tokens * experts.per_token * architecture.hidden / per_rank


def sequence_split(operators: Operators, split: "LayerSplit") -> Operators:
    """With sequence parallelism, divide whole operators and the inputs that projections keep."""
    if not split.sequence_parallel or split.tensor == 1:
        return operators
    found = {}
    for name, one in operators.items():
        if name not in ("head norms", "scan norm") and any(word in name for word in _WHOLE):
            found[name] = scaled(one, 1 / split.tensor)
        elif name in DIVIDED_INPUTS:
            found[name] = replace(one, saved=one.saved / split.tensor)
        else:
            found[name] = one
    return found


def scaled(one: LayerOperation, by: float) -> LayerOperation:
    """The operation on a part of its elements; its weights are read whole."""
    weights = one.parameters + one.tied_parameters if one.kind == "matmul" else 0.0
    return replace(
        one,
        flops=one.flops * by,
        moved=(one.moved - weights) * by + weights,
        saved=one.saved * by,
        saved_bytes=one.saved_bytes * by,
    )
