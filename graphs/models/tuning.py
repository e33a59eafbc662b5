"""Which weights of a transformer are trained: all, those of some layers, or adapters (LoRA).

A frozen weight has neither gradient nor optimizer state. Its product keeps no input, and the
gradient of that input still costs a product, but not before the first weight that is trained: what
comes before it has no backward at all. An adapter (Hu et al. 2022) adds B A x to a product of the
input x, with A of ``rank`` rows and B of ``rank`` columns, both in the type of the weights.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_count
from stagewright.graphs.models.operations import LayerOperation, dense, elementwise

if TYPE_CHECKING:
    from stagewright.graphs.models.architecture import Architecture, Operators
    from stagewright.graphs.models.mixers import AnyAttention

_MAX_RANK = 1 << 16

MEGATRON_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Megatron-Bridge's default (``peft/lora.py``)."""

PEFT_TARGETS = ("q_proj", "v_proj")
"""PEFT's default for Llama, Mistral, Qwen2 and most others (``utils/constants.py``)."""

ALIASES = {
    "linear_proj": "o_proj", "output_proj": "o_proj", "linear_fc2": "down_proj",
    "linear_q": "q_proj", "linear_k": "k_proj", "linear_v": "v_proj",
    "linear_fc1_gate": "gate_proj", "linear_fc1_up": "up_proj",
    "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj",
    "linear_q_down_proj": "q_a_proj", "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa", "linear_kv_up_proj": "kv_b_proj",
}  # fmt: skip
"""Names of Megatron-Bridge and torchtune, and PEFT's for the same layer."""


@documents.record
class Tuning:
    """The frozen layers, and the adapters.

    With a ``rank`` all weights are frozen but for adapters of the ``targets``, of which frozen
    ``blocks`` (counted from 0) have none. Targets have PEFT's names, or those of Megatron's fused
    layers: ``linear_qkv``, ``linear_fc1``. Adapters are divided among the ``ranks`` of a tensor
    group: A by its rows and B by its outputs, or with a product whose inputs are divided A by its
    inputs (Megatron-Bridge, ``ParallelLinearAdapter``).
    """

    embedding: bool = False
    head: bool = False
    blocks: frozenset[int] = frozenset()
    rank: int | None = None
    targets: frozenset[str] = frozenset()
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.rank is not None:
            if self.rank < 1:
                raise InputError(f"LoRA rank must be at least 1, got {self.rank}")
            require_count(self.rank, "LoRA rank", _MAX_RANK)
        if (self.rank is None) != (not self.targets):
            raise InputError("a LoRA rank and targets belong together")

    def is_frozen(self, part: str) -> bool:
        """Whether the ``embedding`` or the ``head`` is frozen."""
        return self.rank is not None or bool(getattr(self, part))

    def first_trained(self, blocks: int) -> int:
        """The first block with trained weights: -1 for the embedding, ``blocks`` for the head."""
        if not self.is_frozen("embedding"):
            return -1
        return next((one for one in range(blocks) if one not in self.blocks), blocks)


def tuned_with(
    architecture: "Architecture",
    *,
    lora: int | None = None,
    targets: str | None = None,
    frozen: str | None = None,
    framework: str | None = None,
) -> "Architecture":
    """The architecture with LoRA adapters and frozen layers, from the words of users.

    ``targets``: names separated by commas; None for the default of the ``framework``. ``frozen``:
    for example ``embedding,head,blocks.0-15``. Raises InputError for another name.
    """
    if targets is not None and lora is None:
        raise InputError("lora_targets without lora: give the rank of the adapters too")
    known = target_names(architecture)
    if lora is None:
        names: frozenset[str] = frozenset()
    elif targets is None:
        default = PEFT_TARGETS if framework in ("accelerate", "deepspeed") else MEGATRON_TARGETS
        names = frozenset(ALIASES.get(one, one) for one in default) & known
    else:
        names = frozenset(ALIASES.get(one, one) for one in targets.split(","))
    if lora is None and frozen is None:
        return architecture
    if lora is not None and not known:
        raise InputError(f"LoRA: {architecture.name} has no targets; recurrences have none")
    architecture = _decoder_alone(architecture)
    tuning = Tuning(rank=lora, targets=names)
    if frozen is not None:
        tuning = _with_frozen(tuning, frozen, architecture.layers)
    return replace(architecture, tuning=tuning)


def _decoder_alone(of: "Architecture") -> "Architecture":
    """The decoder, whose weights may be trained in part; the rest is left out."""
    tower = of.tower
    has_text = of.diffusion is not None and of.diffusion.text is not None
    if has_text or (tower is not None and tower.is_encoder):
        raise InputError(
            f"LoRA or frozen layers of {of.name}: they are not priced of models with an encoder or "
            "a text"
        )
    rest = {"the tower for images": tower, "multi-token prediction": of.next_tokens}
    names = [of.left_out, *(name for name, part in rest.items() if part is not None)]
    return replace(
        of,
        layers=of.layers - (0 if tower is None else tower.layers),
        tower=None,
        next_tokens=None,
        left_out=" and ".join(filter(None, names)) or None,
    )


def _with_frozen(tuning: Tuning, text: str, layers: int) -> Tuning:
    blocks: set[int] = set()
    for part in text.split(","):
        name, _, which = part.strip().partition(".")
        first, _, last = which.partition("-")
        if name == "embedding" and not which:
            tuning = replace(tuning, embedding=True)
        elif name == "head" and not which:
            tuning = replace(tuning, head=True)
        elif name == "blocks" and first.isdecimal() and (last or first).isdecimal():
            last = last or first
            if not int(first) <= int(last) < layers:
                raise InputError(f"frozen {part!r}: blocks are 0 to {layers - 1}, in this order")
            blocks |= {*range(int(first), int(last) + 1)}
        else:
            raise InputError(f"frozen {part!r}: write for example embedding,head,blocks.0-15")
    return replace(tuning, blocks=frozenset(blocks))


def require_tuning(of: "Architecture", tuning: Tuning) -> None:
    """Refuse a tuning that the model cannot have, or that trains nothing."""
    known = target_names(of)
    for name in sorted(tuning.targets - known):
        raise InputError(f"LoRA target {name!r}: {of.name} has {', '.join(sorted(known))}")
    for index in range(of.layers) if tuning.rank is not None else ():
        own = {name for one in _products(of, index).values() for name in one.parts}
        if not tuning.targets & own:
            has = f"its targets are {', '.join(sorted(own))}" if own else "recurrences have none"
            raise InputError(f"LoRA: block {index} of {of.name} has none of the targets; {has}")
    if tuning.is_frozen("head") and tuning.first_trained(of.layers) == of.layers:
        raise InputError("all weights are frozen: nothing is trained")
    if of.tied and tuning.is_frozen("embedding") != tuning.is_frozen("head"):
        raise InputError(f"{of.name}'s head uses the embedding's table: freeze both, or neither")


@dataclass(frozen=True, slots=True)
class _Product:
    """A product of a block: its inputs, and the outputs of each part that can have an adapter.

    ``divides``: which of them tensor parallelism divides; with "nothing" the product is whole.
    """

    inputs: int
    parts: Mapping[str, int]
    divides: str = "outputs"


def target_names(of: "Architecture") -> frozenset[str]:
    """The targets that adapters of the model's blocks can have."""
    kinds = {of.parts(index): index for index in range(of.layers)}
    return frozenset(
        name for index in kinds.values() for one in _products(of, index).values()
        for name in one.parts
    )  # fmt: skip


def _products(of: "Architecture", index: int) -> dict[str, _Product]:
    """The products of a block that adapters may be added to."""
    parts = of.parts(index)
    found: dict[str, _Product] = {}
    if parts.attention is not None:
        found = dict(_attention_products(parts.attention, of.hidden))
    if parts.feed_forward is not None:
        plain = parts.feed_forward
        found |= _fed(of, "feed-forward", plain.width, plain.gated)
    experts = parts.experts
    if experts is None:
        return found
    found |= _fed(of, "experts", experts.width, experts.gated, "nothing", "nothing")
    if experts.shared_width is not None:
        found |= _fed(of, "shared", experts.shared_width, experts.gated)
    return found


def _fed(
    of: "Architecture", name: str, width: int, gated: bool, ahead: str = "outputs",
    back: str = "inputs",
) -> dict[str, _Product]:  # fmt: skip
    parts = {"up_proj": width, "linear_fc1": (2 if gated else 1) * width}
    if gated:
        parts["gate_proj"] = width
    return {
        f"{name} in": _Product(of.hidden, parts, ahead),
        f"{name} out": _Product(width, {"down_proj": of.hidden}, back),
    }


def _attention_products(attention: "AnyAttention", hidden: int) -> Iterator[tuple[str, _Product]]:
    from stagewright.graphs.models.architecture import GroupedAttention

    if isinstance(attention, GroupedAttention):
        size, heads, keys = attention.head_size, attention.heads, attention.key_value_heads
        parts = {"q_proj": heads * size, "k_proj": keys * size, "v_proj": keys * size}
        parts["linear_qkv"] = (heads + 2 * keys) * size
        yield "query, key, value", _Product(hidden, parts)
        yield "output", _Product(heads * size, {"o_proj": hidden}, "inputs")
        return
    queries, rank = attention.heads * attention.key_size, attention.query_rank
    down = {"kv_a_proj_with_mqa": attention.key_value_rank + attention.rotary_size}
    yield (
        "latent",
        _Product(
            hidden,
            down | ({"q_proj": queries} if rank is None else {"q_a_proj": rank}),
            "nothing",
        ),
    )
    if rank is not None:
        yield "query", _Product(rank, {"q_b_proj": queries})
    keys = attention.heads * (attention.plain_size + attention.value_size)
    yield "key, value", _Product(attention.key_value_rank, {"kv_b_proj": keys})
    back = _Product(attention.heads * attention.value_size, {"o_proj": hidden}, "inputs")
    yield "output", back


def tuned_end(of: "Architecture", part: str, operators: "Operators") -> "Operators":
    """The operators of the ``embedding`` or the ``head``."""
    tuning = of.tuning
    if tuning is None or not tuning.is_frozen(part):
        is_first = tuning is not None and tuning.first_trained(of.layers) == of.layers
        return _cut(operators, list(operators)) if is_first and part == "head" else operators
    if part == "embedding":
        return {name: without_backward(one) for name, one in operators.items()}
    return {name: _frozen(one) for name, one in operators.items()}


def tuned_block(of: "Architecture", index: int, rows: int, operators: "Operators") -> "Operators":
    """The operators of a block, with adapters after the products that have some."""
    tuning = of.tuning
    if tuning is None:
        return operators
    first = tuning.first_trained(of.layers)
    if index < first:
        return {name: without_backward(one) for name, one in operators.items()}
    if index in tuning.blocks:
        operators = {name: _frozen(one) for name, one in operators.items()}
    elif tuning.rank is not None:
        operators = _adapted(of, tuning, index, rows, operators)
    return _cut(operators, _in_order(operators)) if index == first else operators


def _adapted(
    of: "Architecture", tuning: Tuning, index: int, rows: int, operators: "Operators"
) -> "Operators":
    """The frozen operators of a block, and its adapters."""
    products = _products(of, index)
    found: Operators = {}
    is_first = index == tuning.first_trained(of.layers)
    for name, one in operators.items():
        added: Operators = {}
        for part in sorted(
            tuning.targets & products[name].parts.keys() if name in products else ()
        ):
            number = of.experts.number if of.experts and name.startswith("experts") else 1
            each = rows * of.experts.per_token if of.experts and number > 1 else rows
            added |= _adapter(tuning, f"{name} lora {part}", products[name], part, each, number)
        # Of a product that has a backward the attention keeps the inputs, used or not.
        keeps = name == "output" and not (is_first and added)
        for place, adapter in enumerate([one for one in added if one.endswith(" A")]):
            if keeps or place:  # all adapters of a product have one input
                added[adapter] = replace(added[adapter], saved=0.0)
        is_first = is_first and not added
        found |= {name: _frozen(one, keeps=keeps)} | added
    return found


def _adapter(
    tuning: Tuning, name: str, product: _Product, part: str, rows: int, experts: int
) -> "Operators":
    """The two products of an adapter on a rank, and the sum with the product beside them."""
    assert tuning.rank is not None
    rank = outer = tuning.rank
    outputs = product.parts[part]
    if product.divides == "outputs":
        rank //= tuning.ranks
    elif product.divides == "inputs":
        outputs //= tuning.ranks
    return {
        f"{name} A": dense(rows, product.inputs, rank, bias=False, experts=experts),
        f"{name} B": dense(rows, outer, outputs, bias=False, experts=experts),
        f"{name} added": elementwise(rows * outputs, operands=2),
    }


def is_adapter(name: str) -> bool:
    """Whether an operator of that name belongs to an adapter."""
    return " lora " in name


def _frozen(one: LayerOperation, *, keeps: bool = False) -> LayerOperation:
    """The operator without a gradient of its weights, for which a product keeps its inputs."""
    if not one.parameters + one.tied_parameters:
        return one
    saved = one.saved if keeps or one.kind != "matmul" else 0.0
    return replace(one, weight_gradients=0.0, saved=saved, frozen=True)


def without_backward(one: LayerOperation) -> LayerOperation:
    """The operator of a layer before which, and in which until it, nothing is trained."""
    return replace(_frozen(one), input_gradients=0.0, saved=0.0, saved_bytes=0.0)


def _in_order(operators: "Operators") -> list[str]:
    """A block's operators as they run: norms but for the first come after the attention."""
    later = [one for one in operators if one.startswith("norm ") and one != "norm 1"]
    rest = [one for one in operators if one not in later]
    at = rest.index("attention sum") + 1 if "attention sum" in rest else 0
    return [*rest[:at], *later, *rest[at:]]


def _cut(operators: "Operators", order: list[str]) -> "Operators":
    """The operators of the first layer that is trained: the first trained one ends the backward."""
    last = next(
        place
        for place, name in enumerate(order)
        if not operators[name].frozen
        and operators[name].parameters + operators[name].tied_parameters
    )
    found = dict(operators)
    for name in order[:last]:
        found[name] = without_backward(found[name])
    beside = order[last].rpartition(" lora ")[0]
    for name in order[last:]:
        if name == order[last] or (beside and name.startswith(beside) and name.endswith(" A")):
            found[name] = replace(found[name], input_gradients=0.0)
    return found
