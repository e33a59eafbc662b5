"""FLOPs, memory traffic and kept elements of operations, feed-forwards and layers.

Conventions: a multiply-add is two FLOPs, and only matrix products and convolutions have any; the
moved elements of an operation are those it reads and writes, once each. A tensor that autograd
keeps for the backward is counted once, at the operation that reads it (at a softmax: that writes
it); dropout masks take one byte per element. The gradient with respect to each operand of a
product costs as much as the forward; that of any other operation costs its forward once, and the
gradients of its few weights (a norm's) are free. Fused attention is one operation, see
:func:`fused_attention`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_count

MAX_SIZE = 10**9  # of anything that is counted: far above any model, products fit in a float


def require_sizes(record: object) -> None:
    """Every integer of a dataclass is from 1 to MAX_SIZE; zero is spelled None."""
    for one in fields(record):  # type: ignore[arg-type]
        value = getattr(record, one.name)
        if isinstance(value, int) and not isinstance(value, bool):
            require_number(value, one.name)


def require_number(value: int, name: str) -> None:
    """Raise InputError unless a size is from 1 to MAX_SIZE."""
    if value < 1:
        raise InputError(f"{name} must be at least 1, got {value}")
    require_count(value, name, MAX_SIZE)


Kind = Literal["matmul", "attention", "convolution", "memory", "loss"]


@dataclass(frozen=True, slots=True)
class LayerOperation:
    """One operation on a microbatch; counts are elements unless the name says bytes.

    ``tied_parameters`` are shared with an earlier layer; ``frozen`` weights are not trained.
    ``saved_bytes`` are kept in addition to the ``saved`` elements, at any precision: masks,
    indices, statistics. ``input_gradients`` and ``weight_gradients`` are the costs of the two parts
    of the backward as multiples of the forward. ``unmasked`` is the part of an attention's scores
    that the mask leaves; its FLOPs are of all.
    """

    kind: Kind
    flops: float
    moved: float
    parameters: float = 0.0
    tied_parameters: float = 0.0
    saved: float = 0.0
    saved_bytes: float = 0.0
    input_gradients: float = 1.0
    weight_gradients: float = 0.0
    unmasked: float = 1.0
    frozen: bool = False

    @property
    def training_flops(self) -> float:
        """FLOPs of forward and backward, without what the backward repeats of the forward."""
        return self.flops * (1 + min(2, self.input_gradients) + self.weight_gradients)


@dataclass(frozen=True, slots=True)
class LayerWork:
    """One layer: its operations, and its output elements.

    ``differentiable`` is false where the layer's input has no gradient (images, tokens): then the
    whole backward is weight gradient.
    """

    name: str
    operations: tuple[LayerOperation, ...]
    output: float
    differentiable: bool = True

    @property
    def flops(self) -> float:
        """FLOPs of the forward."""
        return sum(operation.flops for operation in self.operations)

    @property
    def parameters(self) -> float:
        """Number of parameters, each counted in the first layer that uses it."""
        return sum(operation.parameters for operation in self.operations)

    @property
    def tied_parameters(self) -> float:
        """Number of parameters shared with an earlier layer."""
        return sum(operation.tied_parameters for operation in self.operations)


def dense(
    rows: int, inputs: int, outputs: int, *, bias: bool = True, tied: bool = False, experts: int = 1
) -> LayerOperation:
    """A linear layer on ``rows`` vectors; ``tied`` weights are those of an earlier layer.

    Of several ``experts`` each has its weights and an equal part of the vectors; with fewer vectors
    than experts, only as many experts are read.
    """
    weights = inputs * outputs
    return LayerOperation(
        "matmul",
        2.0 * rows * weights,
        rows * inputs + min(experts, rows) * weights + rows * outputs,
        parameters=0 if tied else experts * (weights + (outputs if bias else 0)),
        tied_parameters=weights if tied else 0,
        saved=rows * inputs,
        weight_gradients=1,
    )


def feed_forward(
    name: str,
    rows: int,
    hidden: int,
    width: int,
    *,
    gated: bool,
    bias: bool,
    experts: int = 1,
    relu: bool = False,
) -> dict[str, LayerOperation]:
    """Linear layer, activation, linear layer; act(gate) * up keeps gate, its activation and up.

    A ``relu`` keeps nothing but its output, the input of the second linear layer.
    """
    inner, wide = rows * width, (2 if gated else 1) * width
    found = {
        f"{name} in": dense(rows, hidden, wide, bias=bias, experts=experts),
        f"{name} activation": elementwise(inner, saved=0.0 if relu else inner),
    }
    if gated:
        found[f"{name} gate"] = elementwise(inner, operands=2, saved=2 * inner)
    found[f"{name} out"] = dense(rows, width, hidden, bias=bias, experts=experts)
    return found


def product(batch: int, rows: int, inner: int, columns: int) -> LayerOperation:
    """``batch`` products of two activations, (rows, inner) times (inner, columns)."""
    operands = batch * (rows * inner + inner * columns)
    return LayerOperation(
        "matmul",
        2.0 * batch * rows * inner * columns,
        operands + batch * rows * columns,
        saved=operands,
        input_gradients=2,
    )


def fused_attention(
    batch: int,
    heads: int,
    sequence: int,
    head: int,
    *,
    bias: bool = False,
    key_heads: int | None = None,
    value: int | None = None,
    window: int | None = None,
    causal: bool = False,
    chunked: bool = False,
    keys: int | None = None,
) -> LayerOperation:
    """Scores, softmax, dropout and weighted values in one kernel (FlashAttention, 2022).

    Queries, keys and values are kept, and a log-sum-exp per row in fp32, but no matrix of scores
    (the output counts where the projection reads it). The backward recomputes the scores: five
    products, where the forward has two. A ``bias`` is a matrix of the scores' size, which is read
    and kept. Keys and values have ``key_heads`` heads (None: as many as queries), values the size
    ``value`` (None: that of the keys). Every token attends to all, or to ``window``, the
    last or those of its ``chunked`` part; a ``causal`` mask leaves a part of the scores (in a
    window: of its band), but FLOPs count as in the thesis's section 4.5, where it saves nothing.
    Of another sequence there are ``keys`` tokens.
    """
    value = head if value is None else value
    rows, key_rows = batch * heads * sequence, batch * (key_heads or heads) * (keys or sequence)
    inputs = rows * head + key_rows * (head + value)
    added = rows * sequence if bias else 0
    seen = min(keys or sequence, window or keys or sequence)
    return LayerOperation(
        "attention",
        2.0 * rows * seen * (head + value),
        inputs + rows * value + added,
        saved=inputs + added,
        saved_bytes=4 * rows,
        input_gradients=(3 * head + 2 * value) / (head + value),
        unmasked=1.0 - seen / (2 * (seen if chunked else sequence)) if causal else 1.0,
    )


def embedding(rows: int, entries: int, width: int, *, tied: bool = False) -> LayerOperation:
    """A look-up of ``rows`` vectors in a table, ``tied`` if shared with an earlier layer.

    The ids have no gradient.
    """
    return LayerOperation(
        "memory",
        0.0,
        2 * rows * width,
        parameters=0 if tied else entries * width,
        tied_parameters=entries * width if tied else 0,
        input_gradients=0,
        weight_gradients=1,
    )


def norm(elements: int, width: int, *, passes: int = 2, bias: bool = True) -> LayerOperation:
    """Layer norm (read, write) or, with 3 passes, batch norm (read, read again, write).

    Without ``bias`` it is an RMS norm, of one parameter per element of a vector.
    """
    parameters = (2 if bias else 1) * width
    return LayerOperation("memory", 0.0, passes * elements, parameters=parameters, saved=elements)


def elementwise(
    elements: float, *, operands: int = 1, saved: float = 0.0, saved_bytes: float = 0.0
) -> LayerOperation:
    """Any operation that reads ``operands`` tensors and writes one."""
    return LayerOperation(
        "memory", 0.0, (operands + 1) * elements, saved=saved, saved_bytes=saved_bytes
    )


def dropout(elements: float) -> LayerOperation:
    """Dropout, with its mask."""
    return elementwise(elements, saved_bytes=elements)


def loss(scores: float) -> LayerOperation:
    """Softmax and cross-entropy of logits, in fp32 (Korthikanti et al. 2022, section 4.3)."""
    return LayerOperation("loss", 0.0, 2 * scores, saved_bytes=4 * scores)


def layer(
    name: str, output: float, operations: Sequence[LayerOperation], *, differentiable: bool = True
) -> LayerWork:
    """A layer of ``operations``."""
    return LayerWork(name, tuple(operations), output, differentiable)


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
