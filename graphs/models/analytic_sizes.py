"""Sizes of the layers that were profiled, from the model's architecture.

Profiles count an embedding, the blocks and a head, as Metis' do; or the last norm apart from the
head, as Sailor's of Llama 3.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.architecture import Architecture
from stagewright.graphs.models.language import Attention
from stagewright.graphs.models.layer_profiles import LayerProfiles, LayerSizes
from stagewright.graphs.models.shards import LayerShare, LayerSplit, shares_of

NORM = "norm"


def with_sizes(
    profiles: LayerProfiles,
    architecture: Architecture,
    *,
    sequence: int,
    precision: str = "fp32",
    attention: Attention = "fused",
) -> LayerProfiles:
    """The profiles with the sizes of their layers at every measured tensor degree.

    ``sequence`` are the tokens of a sample, ``precision`` is fp32, fp16 or bf16. Raises InputError
    if the architecture has another number of layers, or a degree does not divide it.
    """
    element_bytes = 4 if precision == "fp32" else 2
    degrees = {one.tensor for one in profiles.measured}
    sizes = tuple(
        layer_sizes(architecture, profiles.layers, sequence, tensor, element_bytes, attention)
        for tensor in sorted(degrees)
    )
    return replace(profiles, sizes=sizes, precision=precision)


def layer_sizes(
    architecture: Architecture,
    layers: int,
    sequence: int,
    tensor: int,
    element_bytes: int,
    attention: Attention,
) -> LayerSizes:
    """Parameters and activations of each of ``layers`` profiled layers on one of ``tensor`` ranks.

    Tensor parallelism without sequence parallelism; nothing is recomputed. A tied head counts the
    copy of the table that its stage keeps. Raises InputError: see :func:`with_sizes`.
    """
    shares = shares_of(architecture, sequence, LayerSplit(tensor=tensor), attention).every
    if layers == len(shares) + 1:
        shares = (*shares[:-1], *_norm_apart(shares[-1]))
    if layers != len(shares):
        raise InputError(
            f"the profiles have {layers} layers, but the configuration {architecture.layers} "
            f"blocks: with embedding and head {len(shares)}, with the last norm apart "
            f"{len(shares) + 1}"
        )
    hidden = float(sequence * architecture.hidden * element_bytes)
    logits = float(sequence * architecture.vocabulary * element_bytes)
    return LayerSizes(
        tensor,
        parameters=tuple(_parameters(one) for one in shares),
        saved_bytes=tuple(one.saved_bytes(element_bytes, "none") for one in shares),
        output_bytes=tuple(chain([hidden] * (layers - 1), [logits])),
    )


def _parameters(one: LayerShare) -> float:
    return float(one.parameters + one.expert_parameters + one.tied_parameters)


def _norm_apart(head: LayerShare) -> Iterable[LayerShare]:
    """Separate layers for the last norm and for the head without that norm."""
    norm = head.operators[NORM]
    rest = {name: one for name, one in head.operators.items() if name != NORM}
    yield replace(
        head, operators={NORM: norm}, parameters=float(norm.parameters), tied_parameters=0.0
    )
    yield replace(head, operators=rest, parameters=head.parameters - norm.parameters)
