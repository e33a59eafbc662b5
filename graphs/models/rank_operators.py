"""The operators of a block as one rank of a tensor, context or expert group has them.

What the operators of a layer keep of a forward for the backward, as software stacks have it.

Attention in several kernels, which keep matrices of scores, in place of a fused one.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from stagewright.graphs.machines.stack_memory import StackMemory
from stagewright.graphs.models.architecture import (
    Architecture,
    GroupedAttention,
    LatentAttention,
    Operators,
)
from stagewright.graphs.models.mixers import AnyAttention, AnyMixer
from stagewright.graphs.models.operations import LayerOperation, dropout, elementwise, product
from stagewright.graphs.models.recurrences import RECURRENT, inputs_of
from stagewright.graphs.models.tuning import without_backward


def materialized(
    operators: Operators, of: AnyAttention, tokens: int, sequence: int, *, drops: bool
) -> Operators:
    """Scores, softmax, dropout and weighted values in separate kernels, in place of a fused one."""
    key, value = (
        (of.key_size, of.value_size)
        if isinstance(of, LatentAttention)
        else (of.head_size, of.head_size)
    )
    scores = product(of.heads, tokens, key, sequence)
    weighted = product(of.heads, tokens, sequence, value)
    elements = of.heads * tokens * sequence
    values = of.heads * sequence * value
    core: Operators = {
        "scores": replace(scores, saved=scores.saved + values),
        "softmax": elementwise(elements, saved=elements if drops else 0.0),
        **({"attention mask": dropout(elements)} if drops else {}),
        "weighted values": replace(weighted, saved=weighted.saved - values),
    }
    whole = operators["attention"]
    if not whole.input_gradients:  # nothing before it is trained
        core = {name: without_backward(one) for name, one in core.items()}
    names = list(operators)
    at = names.index("attention")
    rest = _without_output(operators)
    before, after = names[:at], names[at + 1 :]
    return {name: rest[name] for name in before} | core | {name: rest[name] for name in after}


def _without_output(operators: Operators) -> Operators:
    """The operators where the attention does not keep its output: adapters of it do, if any."""
    output = operators["output"]
    if not output.frozen or not output.saved:
        return operators
    adapter = next((one for one in operators if one.startswith("output lora")), None)
    kept = {} if adapter is None else {adapter: replace(operators[adapter], saved=output.saved)}
    return operators | {"output": replace(output, saved=0.0)} | kept


if TYPE_CHECKING:
    from stagewright.graphs.models.shards import LayerSplit

_IN_FP8 = ("query, key, value", "latent", "query", "key, value", "output", " in", " out")
"""Ends of the names of products that are in 8 bits where a stack has such products: the linear
layers of a block but for the router."""

_KERNELS = ("router", "experts", "scan")
"""First words of operators whose outputs recomputation by operator does not keep."""


def kept_bytes(
    name: str, one: LayerOperation, element_bytes: float, memory: StackMemory, fp8: bool
) -> float:
    """Bytes that an operator keeps of a sample."""
    if one.kind == "loss":
        return one.saved_bytes * memory.loss_bytes / 4
    saved = one.saved
    if memory.fused_gate and one.kind == "memory" and name.endswith(" gate"):
        saved /= 2  # up, but not the activation of the gate
    if memory.weighted_gate and name == "combine":
        saved = 0.0
    if fp8 and memory.fp8_inputs and name.endswith(_IN_FP8):
        # The attention keeps its output too, as it was.
        element_bytes = element_bytes + 1 if name == "output" else 1
    return saved * element_bytes + one.saved_bytes


def is_repeated(name: str, one: LayerOperation) -> bool:
    """Whether recomputation by operator repeats an operator (torchtitan, SelectiveAC).

    It keeps the attention and every first of two products. Gate and up, of which one is repeated,
    count as one product here; the product back, which is as long, stands for it.
    """
    second = name in ("output", "query", "key, value") or name.endswith(" out")
    return one.kind in ("memory", "convolution") or second or name.startswith(_KERNELS)


def elements_by_operator(narrowed: Architecture, index: int, split: "LayerSplit") -> float:
    """Elements of a token's outputs that recomputation by operator keeps of a block (SelectiveAC).

    These are the attention's, every first of two products' in their order, and those of the
    exchanges with the experts' ranks; ``narrowed`` is the model on a tensor rank. The experts' own
    products are not kept.
    """
    hidden = narrowed.hidden / (split.tensor if split.sequence_parallel else 1)
    parts, outputs, kept = narrowed.parts(index), list[float](), 0.0
    for mixer in parts.mixers:
        products, attended = _mixer_products(mixer)
        outputs += [*products, hidden]
        kept += attended
    if parts.experts is not None:
        width, is_gated = parts.experts.shared_width, parts.experts.gated
        outputs += _fed_products(width, hidden, gated=is_gated) if width else []
        kept += 2 * parts.experts.per_token * hidden if split.expert > 1 else 0.0
    elif parts.feed_forward is not None:
        plain = parts.feed_forward
        outputs += _fed_products(plain.width, hidden, gated=plain.gated)
    return kept + sum(outputs[::2])


def _fed_products(width: int, hidden: float, *, gated: bool) -> list[float]:
    return [width, width, hidden] if gated else [width, hidden]


def _mixer_products(of: AnyMixer) -> tuple[list[float], float]:
    """Outputs of a token's products before a mixer's core, and the attention's output."""
    if isinstance(of, RECURRENT):
        return [inputs_of(of)], 0.0
    if isinstance(of, GroupedAttention):
        keys = of.key_value_heads * of.head_size
        return [of.heads * of.head_size, keys, keys], of.heads * of.head_size
    queries = [of.query_rank] if of.query_rank is not None else []
    keys = of.heads * (of.plain_size + of.value_size)
    latent = [of.heads * of.key_size, of.key_value_rank + of.rotary_size, keys]
    return [*queries, *latent], of.heads * of.value_size


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
