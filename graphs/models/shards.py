"""One rank's share of a transformer's layers under tensor, context and expert parallelism.

Tensor parallelism divides heads, widths and vocabulary (Megatron-LM: Shoeybi et al. 2019, section
3); sequence parallelism divides the other operators of a block too (Korthikanti et al. 2022,
section 4.2.2). Context parallelism divides the tokens of a sequence; every token attends to the
whole of it. Experts stay whole: a rank has an equal part of them, and routes its own tokens.
"""

from collections.abc import Collection, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, TypeAlias

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.stack_memory import PLAIN, StackMemory
from stagewright.graphs.models.architecture import (
    Architecture,
    LatentAttention,
    Operators,
    times,
)
from stagewright.graphs.models.language import Attention
from stagewright.graphs.models.mixers import AnyAttention
from stagewright.graphs.models.modules import OFFLOAD, freed, modules_of, repeated
from stagewright.graphs.models.operations import (
    LayerWork,
)
from stagewright.graphs.models.rank_operators import (
    DIVIDED_INPUTS,
    elements_by_operator,
    is_repeated,
    kept_bytes,
    materialized,
    place_experts,
    scaled,
    sequence_split,
)
from stagewright.graphs.models.splits import narrow, require_split

LayerKind = Literal["embedding", "dense", "experts", "head"]

Recompute: TypeAlias = str
"""None, selective, full or modules: see ``models/modules.py``."""


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """How the layers of a replica are divided; ``expert`` ranks share the experts of a layer."""

    tensor: int = 1
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class LayerShare:
    """A layer's work on one rank for one sample; all but weights is proportional to samples.

    ``expert_parameters`` are those of the rank's experts, ``parameters`` all others, and
    ``tied_parameters`` belong to an earlier layer if that is on the same rank; the first two are
    trained but for ``frozen_expert_parameters`` and ``frozen_parameters``. ``width`` are the
    elements of the hidden states of the rank's tokens, ``input`` those of the layer's input as it
    is kept. Exchanges: ``reductions`` of the hidden states over the tensor ranks in the forward and
    in the backward (with sequence parallelism reduce-scatters and all-gathers, which move as much);
    ``circulated`` are the elements of keys and values of one context rank, ``dispatched`` those
    that go to the experts and come back, of which the rank has ``experts`` and every token takes
    ``copies``. ``gradient_bytes`` are those of a large gradient that the backward begins with: of
    the logits. Where selective recomputation is by operator it
    keeps ``kept_by_operator`` elements beside the input. ``handed_on`` are elements that go along
    with the layer's output to the next one. A stage keeps elements ``kept_once`` for all its blocks
    of tower or decoder, whose name comes first.
    """

    operators: Operators
    parameters: float
    width: float
    input: float
    expert_parameters: float = 0.0
    tied_parameters: float = 0.0
    frozen_parameters: float = 0.0
    frozen_expert_parameters: float = 0.0
    reductions: tuple[float, float] = (0, 0)
    circulated: float = 0.0
    dispatched: float = 0.0
    gradient_bytes: float = 0.0
    experts: int = 0
    copies: int = 1
    is_block: bool = True
    differentiable: bool = True
    kept_by_operator: float | None = None
    handed_on: float = 0.0
    kept_once: tuple[str, float] = ("", 0.0)

    @property
    def has_backward(self) -> bool:
        """Whether anything in the layer or before it is trained."""
        return any(one.input_gradients or one.weight_gradients for one in self.operators.values())

    @property
    def trained_tied_parameters(self) -> float:
        """The tied parameters, if the table is trained."""
        every = self.operators.values()
        return sum(one.tied_parameters for one in every if not one.frozen)

    @property
    def kind(self) -> LayerKind:
        """Which layer of a transformer it is."""
        if not self.is_block:
            return "head" if self.differentiable else "embedding"
        return "experts" if self.experts else "dense"

    def saved_bytes(
        self,
        element_bytes: float,
        recompute: Recompute,
        memory: StackMemory = PLAIN,
        *,
        fp8: bool = False,
    ) -> float:
        """Bytes that a sample's forward keeps for the backward; only blocks recompute or offload.

        ``memory`` is what the stack keeps, ``fp8`` whether products are in 8 bits.
        """
        if not self.has_backward or (recompute == OFFLOAD and self.is_block):
            return 0.0
        if recompute == "full" and self.is_block:
            return self.input * element_bytes * (1 + memory.slack)
        if recompute == "selective" and self.kept_by_operator is not None:
            fused = self.operators.get("attention")
            statistics = 0.0 if fused is None else fused.saved_bytes
            kept = (self.input + self.kept_by_operator) * element_bytes + statistics
            return kept * (1 + memory.slack)
        modules = ("core_attn",) if recompute == "selective" else modules_of(recompute)
        none = freed((*memory.always, *modules), self.operators)
        kept = sum(
            kept_bytes(name, one, element_bytes, memory, fp8)
            for name, one in self.operators.items()
            if name not in none
        )
        if "attention" in none:  # but for its statistics
            kept += self.operators["attention"].saved_bytes
        return kept * (1 + memory.slack)

    def repeated(self, recompute: Recompute, always: Collection[str] = ()) -> tuple[str, ...]:
        """The operators whose forward runs again, but for those of modules that ``always`` do."""
        if not self.is_block or recompute == "none" or not self.has_backward:
            return ()
        if recompute == "full":
            return tuple(self.operators)
        if recompute == "selective" and self.kept_by_operator is not None:
            return tuple(name for name, one in self.operators.items() if is_repeated(name, one))
        modules = ("core_attn",) if recompute == "selective" else modules_of(recompute)
        return tuple(repeated([one for one in modules if one not in always], self.operators))


@dataclass(frozen=True, eq=False, slots=True)
class Shares:
    """The shares of a model's layers: ``blocks[i]`` is an index into ``kinds``."""

    embedding: LayerShare
    kinds: tuple[LayerShare, ...]
    blocks: tuple[int, ...]
    head: LayerShare

    @property
    def every(self) -> tuple[LayerShare, ...]:
        """The shares in the order of the layers."""
        return (self.embedding, *(self.kinds[kind] for kind in self.blocks), self.head)

    @property
    def widest(self) -> float:
        """The most elements of hidden states of a rank's tokens in a block."""
        return max(one.width for one in self.kinds)

    @property
    def sent(self) -> float:
        """The most elements that a stage hands on to the next."""
        return max(one.width + one.handed_on for one in self.kinds)


def share_of(work: LayerWork) -> LayerShare:
    """A whole layer of a named model, from its operations on a microbatch, as if on one sample."""
    gradients = sum(one.saved_bytes for one in work.operations if one.kind == "loss")
    return LayerShare(
        operators={str(number): one for number, one in enumerate(work.operations)},
        parameters=work.parameters,
        width=work.output,
        input=0.0,
        tied_parameters=work.tied_parameters,
        gradient_bytes=gradients,
        is_block=not gradients,
        differentiable=work.differentiable,
    )


def shares_of(
    architecture: Architecture,
    sequence: int,
    split: LayerSplit,
    attention: Attention = "fused",
    *,
    by_operator: bool = False,
) -> Shares:
    """The shares of all layers for sequences of ``sequence`` tokens.

    ``by_operator`` says whether selective recomputation repeats operators (torchtitan), not the
    attention alone.

    Raises InputError: see :func:`require_split`; or if there are fewer learned positions than
    tokens.
    """
    architecture.require_sequence(sequence)
    require_split(architecture, sequence, split)
    beside = architecture.tower or architecture.diffusion
    if by_operator and beside is not None:
        raise InputError(
            f"{architecture.name} has an encoder, a tower or patches of latents: recomputation by "
            "operator (torchtitan) is not priced of it; choose another framework"
        )
    if attention == "materialized" and architecture.diffusion is not None:
        architecture.diffusion.require_fused(architecture.name)
    plain = replace(split, expert=1)  # of which all but blocks with experts are the same
    of_head = plain if architecture.next_tokens is None else split
    found: dict[Hashable, int] = {}
    blocks: list[int] = []
    kinds: list[LayerShare] = []
    for index in range(architecture.layers):
        kind = architecture.kind(index)
        if kind not in found:
            found[kind] = len(kinds)
            own = split if architecture.is_sparse(index) else plain
            block = _block(architecture, index, sequence, own, attention)
            if by_operator:
                chain, place = narrow(architecture, own.tensor).chain(index)
                kept = elements_by_operator(chain, place, own) * block.width / chain.hidden
                block = replace(block, kept_by_operator=kept)
            kinds.append(block)
        blocks.append(found[kind])
    return Shares(
        embedding=_embedding(architecture, sequence, plain),
        kinds=tuple(kinds),
        blocks=tuple(blocks),
        head=_head(architecture, sequence, of_head, attention),
    )


def share_of_kind(
    architecture: Architecture, sequence: int, split: LayerSplit, kind: LayerKind
) -> LayerShare:
    """The share of the first layer of a kind. Raises InputError as :func:`require_split`."""
    every = shares_of(architecture, sequence, split).every
    return next(one for one in every if one.kind == kind)


@lru_cache(maxsize=1024)
def _block(
    architecture: Architecture, index: int, sequence: int, split: LayerSplit, attention: Attention
) -> LayerShare:
    tokens, narrowed = sequence // split.context, narrow(architecture, split.tensor)
    operators = narrowed.block(index, 1, tokens)
    parts, (chain, _), attended = narrowed.parts(index), narrowed.chain(index), sequence
    if parts.attention is not None:
        # Every token attends to the whole sequence, of which the rank has a part of the queries.
        core = scaled(narrowed.block(index, 1, sequence)["attention"], 1 / split.context)
        operators["attention"] = core
    if architecture.tower is not None and index < architecture.tower.layers:
        images, attended = architecture.tower.sequences(1, sequence)
        tokens = images * attended
    if architecture.diffusion is not None:
        attended = tokens = tokens + architecture.diffusion.beside
    if parts.attention is not None and attention == "materialized":
        operators = materialized(
            operators, parts.attention, tokens, attended, drops=narrowed.dropout
        )
    routed = 0.0
    if architecture.is_sparse(index):
        routed = place_experts(architecture, index, tokens, operators, split)
    operators = sequence_split(operators, split)
    width = tokens * chain.hidden
    reduced = bool(parts.mixers) + bool(parts.feed_forward or "shared in" in operators)
    back = sum(one in operators and operators[one].input_gradients > 0 for one in DIVIDED_INPUTS)
    share = LayerShare(
        operators=operators,
        parameters=_parameters(operators, expert=False),
        width=float(width),
        input=width / (split.tensor if split.sequence_parallel else 1),
        expert_parameters=_parameters(operators, expert=True),
        frozen_parameters=_parameters(operators, expert=False, frozen=True),
        frozen_expert_parameters=_parameters(operators, expert=True, frozen=True),
        reductions=(reduced, back),
        circulated=_keys_and_values(parts.attention, tokens),
        dispatched=routed,
        experts=_experts_of_rank(architecture, index, split),
        copies=architecture.experts.per_token if architecture.experts else 1,
    )
    return _beside(share, narrowed, index, sequence, split)


def _beside(
    share: LayerShare, narrowed: Architecture, index: int, sequence: int, split: LayerSplit
) -> LayerShare:
    """The share of a block, with what it keeps and hands on for an encoder, a tower or a text."""
    tower = narrowed.tower or narrowed.diffusion
    if tower is None:
        return share
    scores, received = tower.kept_once(narrowed, index, sequence)
    divided = split.tensor if split.sequence_parallel else 1
    forward, back = share.reductions
    if "cross output" in share.operators:  # and the gradient of the encoder's outputs
        forward, back = forward + 1, back + received / share.width
    return replace(
        share,
        reductions=(forward, back),
        handed_on=tower.handed_on(narrowed, index, sequence),
        kept_once=("tower" if index < tower.layers else "decoder", scores + received / divided),
    )


def _experts_of_rank(architecture: Architecture, index: int, split: LayerSplit) -> int:
    of = architecture.experts
    return of.number // split.expert if of and architecture.is_sparse(index) else 0


def _keys_and_values(of: AnyAttention | None, tokens: int) -> float:
    if of is None:
        return 0.0
    if isinstance(of, LatentAttention):
        return float(tokens * of.heads * (of.key_size + of.value_size))
    return float(tokens * of.key_value_heads * 2 * of.head_size)


@lru_cache(maxsize=1024)
def _embedding(architecture: Architecture, sequence: int, split: LayerSplit) -> LayerShare:
    tokens, narrowed = sequence // split.context, narrow(architecture, split.tensor)
    operators = sequence_split(narrowed.embedding(1, tokens), split)
    beside = architecture.tower or architecture.diffusion
    return LayerShare(
        operators=operators,
        parameters=_parameters(operators),
        frozen_parameters=_parameters(operators, frozen=True),
        width=float(tokens * architecture.hidden),
        input=0.0,
        reductions=(1, 0),
        handed_on=0.0 if beside is None else beside.width(architecture, sequence),
        is_block=False,
        differentiable=False,
    )


@lru_cache(maxsize=1024)
def _head(
    architecture: Architecture, sequence: int, split: LayerSplit, attention: Attention
) -> LayerShare:
    tokens, narrowed = sequence // split.context, narrow(architecture, split.tensor)
    operators = sequence_split(narrowed.head(1, tokens), split)
    width = tokens * architecture.hidden
    share = LayerShare(
        operators=operators,
        parameters=_parameters(operators),
        frozen_parameters=_parameters(operators, frozen=True),
        tied_parameters=sum(one.tied_parameters for one in operators.values()),
        width=float(width),
        input=width / (split.tensor if split.sequence_parallel else 1),
        reductions=(0, 1),
        gradient_bytes=operators["loss"].saved_bytes / (1 + (architecture.next_tokens or 0)),
        is_block=False,
    )
    if architecture.next_tokens is None:
        return share
    last = _block(architecture, architecture.layers - 1, sequence, split, attention)
    return _with_next_tokens(share, last, architecture.next_tokens)


def _with_next_tokens(head: LayerShare, block: LayerShare, number: int) -> LayerShare:
    """The head's share with so many blocks that predict further tokens."""
    operators = head.operators | times(block.operators, number)
    forward, back = block.reductions
    return replace(
        head,
        operators=operators,
        parameters=_parameters(operators, expert=False),
        expert_parameters=_parameters(operators, expert=True),
        reductions=(number * (forward + 1), head.reductions[1] + number * back),
        circulated=number * block.circulated,
        dispatched=number * block.dispatched,
        experts=block.experts,
        copies=block.copies,
    )


def _parameters(operators: Operators, *, expert: bool | None = None, frozen: bool = False) -> float:
    """Parameters of all operators; of experts alone, or of all others; of frozen ones alone."""
    return sum(
        one.parameters
        for name, one in operators.items()
        if expert in (None, name.startswith("experts")) and (one.frozen or not frozen)
    )
