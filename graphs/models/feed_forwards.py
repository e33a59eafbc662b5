"""What a block has beside its mixer: a feed-forward, or experts of which a router chooses some."""

from dataclasses import replace

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.operations import (
    LayerOperation,
    dense,
    elementwise,
    feed_forward,
    require_sizes,
)

Operators = dict[str, LayerOperation]


@documents.record
class FeedForward:
    """Two linear layers, or if ``gated`` act(gate) * up, then down; a ``relu`` keeps its output."""

    width: int
    gated: bool = True
    bias: bool = False
    relu: bool = False

    def __post_init__(self) -> None:
        require_sizes(self)


@documents.record
class Experts:
    """Feed-forwards, by default ``gated``, of which a router chooses some for every token.

    ``shared_width`` is the width of all shared experts together, which every token passes through
    (None: there are none); with ``shared_gate`` their output is scaled by a learned gate. The
    ``dense_layers`` (counted from 0) have the plain feed-forward instead. ``bias`` is of the
    experts that are chosen, ``router_bias`` one number per expert.
    """

    number: int
    per_token: int
    width: int
    shared_width: int | None = None
    shared_gate: bool = False
    dense_layers: frozenset[int] = frozenset()
    bias: bool = False
    router_bias: bool = False
    gated: bool = True

    def __post_init__(self) -> None:
        require_sizes(self)
        if self.per_token > self.number:
            raise InputError(f"{self.per_token} experts per token, but there are {self.number}")


def fed(name: str, of: FeedForward, hidden: int, rows: int, experts: int = 1) -> Operators:
    """The operators of a feed-forward, or of several experts, on ``rows`` tokens."""
    return feed_forward(
        name, rows, hidden, of.width, gated=of.gated, bias=of.bias, experts=experts, relu=of.relu
    )


def mixture(of: Experts, hidden: int, rows: int) -> Operators:
    """Tokens are spread evenly over the experts; each is copied to those chosen for it."""
    chosen, width = rows * of.per_token, rows * hidden
    each = FeedForward(of.width, gated=of.gated, bias=of.bias)
    return {
        "router": dense(rows, hidden, of.number, bias=of.router_bias),
        "routing": elementwise(rows * of.number, saved=rows * of.number),
        "dispatch": elementwise(chosen * hidden),
        **fed("experts", each, hidden, chosen, of.number),
        "combine": elementwise(width, operands=of.per_token, saved=chosen * hidden),
        **_shared(of, hidden, rows),
    }


def _shared(of: Experts, hidden: int, rows: int) -> Operators:
    if of.shared_width is None:
        return {}
    width = rows * hidden
    found = fed("shared", FeedForward(of.shared_width, gated=of.gated), hidden, rows)
    if of.shared_gate:
        found["shared score"] = dense(rows, hidden, 1, bias=False)
        found["shared scale"] = elementwise(width, saved=width)
    for name in ("shared in", "shared score"):  # the router counts the input that they keep
        if name in found:
            found[name] = replace(found[name], saved=0.0)
    found["shared sum"] = elementwise(width, operands=2)
    return found
