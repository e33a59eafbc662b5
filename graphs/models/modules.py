"""Modules of a block that are recomputed, as Megatron Core has them: ``recompute_modules``.

What each repeats and frees is read in core/transformer (transformer_layer.py, attention.py,
multi_latent_attention.py, moe/moe_layer.py, moe/experts.py) at d98e8a6. Without an effect, and so
never in a set of the search, are modules that a block does not have; the attention's core, where
one fused kernel repeats its scores anyway; and norms that Transformer Engine fuses with the product
that follows: all but those before latent attention and before experts.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import combinations

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.architecture import Operators

CORE = ("scores", "softmax", "attention mask", "weighted values")
"""The attention without its projections, which selective recomputation repeats (Korthikanti et al.
2022, section 5). All that it keeps are queries, keys and values, which count at the scores."""

_EXPERTS = ("routing", "dispatch", "experts", "combine", "shared")
"""First words of the operators of experts behind the router."""

PARTS = {
    "core_attn": "attention in several kernels",
    "mla_up_proj": "latent attention",
    "moe_act": "experts",
    "layernorm": "latent attention or experts",
    "mlp": "a feed-forward without experts",
    "moe": "experts",
}
"""The part of a block that each module needs to have an effect."""

MODULES = tuple(PARTS)
"""All modules, in the order in which a set names them."""

WHOLE = ("none", "selective", "full")
"""Recomputation that is not of modules."""


EVERY_SET, OFFLOAD = "modules", "offload"
"""Of a space: all sets of modules; activations in host memory, where nothing is recomputed."""


def modules_of(recompute: str) -> tuple[str, ...]:
    """The modules of a kind of recomputation such as ``layernorm+moe``; none of :data:`WHOLE`."""
    return () if recompute in WHOLE else tuple(recompute.split("+"))


def require_recompute(recompute: str, place: str = "recompute", others: Sequence[str] = ()) -> None:
    """Raise InputError unless it is one of :data:`WHOLE` or modules in their order.

    ``others`` are words that the place takes too.
    """
    modules = modules_of(recompute)
    unknown = [one for one in modules if one not in MODULES]
    if unknown:
        raise InputError(
            f"{place}: {unknown[0]!r} is none of {', '.join((*WHOLE, *others))} and of the "
            f"modules {', '.join(MODULES)}, which + joins"
        )
    if recompute not in WHOLE and recompute != joined(modules):
        raise InputError(f"{place} {recompute!r}: write {joined(modules)}")


def joined(modules: Collection[str]) -> str:
    """The kind of recomputation of modules, each named once and in order."""
    return "+".join(one for one in MODULES if one in modules)


def repeated(modules: Collection[str], block: Operators) -> frozenset[str]:
    """The operators of a block whose forward runs again."""
    return frozenset(name for one in modules for name in _effect(one, block)[0] if name in block)


def freed(modules: Collection[str], block: Operators) -> frozenset[str]:
    """The operators of a block that keep nothing."""
    return frozenset(name for one in modules for name in _effect(one, block)[1] if name in block)


def repeats_exchange(modules: Collection[str], block: Operators) -> bool:
    """Whether the exchanges of a block's feed-forward, or of its experts, run again."""
    return ("moe" if "router" in block else "mlp") in modules


def _effect(module: str, block: Operators) -> tuple[list[str], list[str]]:
    """What a module repeats, and what then keeps nothing."""
    is_sparse, is_latent = "router" in block, "latent" in block
    if module == "core_attn":
        return [*CORE], [*CORE[1:]]
    if module == "mla_up_proj" and is_latent:
        return ["query", "key, value", "rotary"], ["attention"]
    if module == "moe_act" and is_sparse:
        return ["experts activation", "experts gate"], ["experts out"]
    if module == "layernorm":
        found = [("norm 1", "latent", is_latent), ("norm 2", "router", is_sparse)]
        return [norm for norm, _, has in found if has], [after for _, after, has in found if has]
    if module == "mlp" and not is_sparse:
        inner = [one for one in block if one.startswith("feed-forward") and not _is_sum(one)]
        return [*inner, "norm 2"], inner
    if module == "moe" and is_sparse:
        behind = [one for one in block if one.startswith(_EXPERTS) and not _is_sum(one)]
        return ["router", *behind], behind
    return [], []


def _is_sum(name: str) -> bool:
    return name.endswith(" sum")


def useful_sets(available: Collection[str], blocks: Collection[Operators]) -> tuple[str, ...]:
    """Sets of modules with different effects on the blocks, the smallest of each effect."""
    return tuple(joined(one) for one in _different(frozenset(available), tuple(blocks)) if one)


def _different(
    available: frozenset[str], blocks: tuple[Operators, ...]
) -> Iterator[tuple[str, ...]]:
    seen = set()
    for number in range(len(available) + 1):
        for modules in combinations(sorted(available), number):
            effect = tuple((repeated(modules, one), freed(modules, one)) for one in blocks)
            if effect not in seen:
                seen.add(effect)
                yield modules
