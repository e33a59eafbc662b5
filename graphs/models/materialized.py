"""Attention in several kernels, which keep matrices of scores, in place of a fused one."""

from dataclasses import replace

from stagewright.graphs.models.architecture import LatentAttention, Operators
from stagewright.graphs.models.mixers import AnyAttention
from stagewright.graphs.models.operations import dropout, elementwise, product
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
