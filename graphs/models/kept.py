"""What the operators of a layer keep of a forward for the backward, as software stacks have it."""

from typing import TYPE_CHECKING

from stagewright.graphs.machines.stack_memory import StackMemory
from stagewright.graphs.models.architecture import Architecture, GroupedAttention
from stagewright.graphs.models.mixers import AnyMixer
from stagewright.graphs.models.operations import LayerOperation
from stagewright.graphs.models.recurrences import RECURRENT, inputs_of

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
