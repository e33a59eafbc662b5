"""Measured times of a model's layers by device kind, microbatch size and tensor degree.

Sizes of the layers come from the model's architecture. Profiles count an embedding, the blocks and
a head, as Metis' do; or the last norm apart from the head, as Sailor's of Llama 3.
"""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import numpy as np

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_LAYERS, require_amount, require_count
from stagewright.graphs.models.architecture import Architecture
from stagewright.graphs.models.chain import MAX_LAYER_SECONDS
from stagewright.graphs.models.language import Attention
from stagewright.graphs.models.shards import LayerShare, LayerSplit, shares_of


@documents.record
class LayerSizes:
    """Parameters and activations of each layer on one of ``tensor`` ranks, in forward order.

    ``parameters`` are numbers of elements; ``saved_bytes`` are kept from the forward to the
    backward for every sample, ``output_bytes`` are the whole output of a sample (not a rank's part
    of it).
    """

    tensor: int
    parameters: tuple[float, ...]
    saved_bytes: tuple[float, ...]
    output_bytes: tuple[float, ...]

    def __post_init__(self) -> None:
        require_count(self.tensor, "tensor", 1 << 20)
        names = ("parameters", "saved_bytes", "output_bytes")
        _require_layers(self, f"tensor degree {self.tensor}", names)


_MAX_DEGREE = 1 << 12
_PRECISIONS = ("fp32", "fp16", "bf16")


@documents.record
class Measured:
    """Seconds of every layer for a microbatch on a group of ``tensor`` devices of one kind.

    Exchanges within the group are part of the times. ``update_seconds`` are the optimizer's step
    on a rank's parameters of the layer.
    """

    device_kind: str
    microbatch_size: int
    tensor: int
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        require_count(self.microbatch_size, f"{self.place}: microbatch_size", 1 << 20)
        require_count(self.tensor, f"{self.place}: tensor", _MAX_DEGREE)
        names = ("forward_seconds", "backward_seconds", "update_seconds")
        _require_layers(self, self.place, names, MAX_LAYER_SECONDS)

    @property
    def place(self) -> str:
        """The kind, tensor degree and microbatch of the measurement, for messages."""
        return (
            f"{self.device_kind}, microbatches of {self.microbatch_size}, tensor degree "
            f"{self.tensor}"
        )


def _require_layers(
    of: object, place: str, names: tuple[str, ...], most_seconds: float = math.inf
) -> None:
    """Refuse fields of other lengths than the first has, and values that cannot be."""
    layers = len(getattr(of, names[0]))
    for name in names:
        values = getattr(of, name)
        if len(values) != layers:
            raise InputError(f"{place}: {name} has {len(values)} layers, {names[0]} {layers}")
        for layer, value in enumerate(values):
            require_amount(value, f"{place}: {name}[{layer}]")
            if value > most_seconds:
                raise InputError(f"{place}: {name}[{layer}] is {value:g} s: times are seconds")


@dataclass(frozen=True, slots=True, eq=False)
class LayerTimes:
    """Seconds per layer, shape (L,) each."""

    forward: Floats
    backward: Floats
    update: Floats


@documents.record
class LayerProfiles:
    """All measurements of one model; ``sizes`` by tensor degree, where they are known.

    ``precision`` is that of the training that was measured: fp32, fp16 or bf16.
    """

    name: str
    source: str
    measured: tuple[Measured, ...]
    sizes: tuple[LayerSizes, ...] = ()
    precision: str = "fp32"
    format: Literal["stagewright-layer-profiles"] = "stagewright-layer-profiles"
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        if not self.measured:
            raise InputError(f"profiles of {self.name!r} have no measurements")
        if self.precision not in _PRECISIONS:
            raise InputError(f"precision must be {', '.join(_PRECISIONS)}, got {self.precision!r}")
        keys = [(one.device_kind, one.microbatch_size, one.tensor) for one in self.measured]
        if len(set(keys)) < len(keys):
            twice = next(one for one, key in zip(self.measured, keys, strict=True)
                         if keys.count(key) > 1)  # fmt: skip
            raise InputError(f"{twice.place}: measured twice")
        degrees = [one.tensor for one in self.sizes]
        if len(set(degrees)) < len(degrees):
            raise InputError(f"profiles of {self.name!r}: two sizes for one tensor degree")
        require_count(self.layers, "layers", MAX_LAYERS)
        for one in self.measured:
            self._require_layers(len(one.forward_seconds), one.place)
        for one in self.measured:
            self._require_time(one)
        for size in self.sizes:
            self._require_layers(len(size.parameters), f"sizes at tensor degree {size.tensor}")

    def _require_layers(self, count: int, place: str) -> None:
        if count != self.layers:
            first = self.measured[0].place
            raise InputError(f"{place}: {count} layers, but {first}: {self.layers}")

    def _require_time(self, one: Measured) -> None:
        times = self.times(one.device_kind, one.microbatch_size, one.tensor)
        if not times.forward.any() and not times.backward.any():
            raise InputError(f"{one.place}: the layers take no time")

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.measured[0].forward_seconds)

    @property
    def device_kinds(self) -> tuple[str, ...]:
        """The kinds of devices, sorted."""
        return tuple(sorted({one.device_kind for one in self.measured}))

    def microbatch_sizes(self, device_kind: str, tensor: int) -> tuple[int, ...]:
        """The sizes that were measured on such a group, ascending."""
        return tuple(
            sorted(
                one.microbatch_size
                for one in self.measured
                if (one.device_kind, one.tensor) == (device_kind, tensor)
            )
        )

    def degrees(self, device_kind: str) -> tuple[int, ...]:
        """The tensor degrees that were measured on a kind, ascending."""
        return tuple(sorted({one.tensor for one in self.measured
                             if one.device_kind == device_kind}))  # fmt: skip

    def times(self, device_kind: str, microbatch_size: int, tensor: int) -> LayerTimes:
        """The times of a microbatch: the least times measured at its size and at larger sizes.

        A smaller microbatch takes no longer than a larger one, which could hold it. Where the
        profile says otherwise, the launch of kernels was measured, slower in one run than in
        another. Raises InputError if that size was not measured on such a group: times are not
        extrapolated.
        """
        found = [
            one
            for one in self.measured
            if (one.device_kind, one.tensor) == (device_kind, tensor)
            and one.microbatch_size >= microbatch_size
        ]
        exact = [one for one in found if one.microbatch_size == microbatch_size]
        if not exact:
            raise InputError(self._unmeasured(device_kind, microbatch_size, tensor))
        return LayerTimes(
            np.min([one.forward_seconds for one in found], axis=0),
            np.min([one.backward_seconds for one in found], axis=0),
            np.array(exact[0].update_seconds),
        )

    def _unmeasured(self, device_kind: str, microbatch_size: int, tensor: int) -> str:
        asked = f"profiles of {self.name!r}: microbatches of {microbatch_size} on {tensor} devices"
        if device_kind not in self.device_kinds:
            return f"{asked} of kind {device_kind!r}: measured are {_listed(self.device_kinds)}"
        sizes = self.microbatch_sizes(device_kind, tensor)
        if not sizes:
            degrees = _listed(self.degrees(device_kind))
            return f"{asked} of kind {device_kind!r}: measured are tensor degrees {degrees}"
        return f"{asked} of kind {device_kind!r} are not measured, only those of {_listed(sizes)}"

    def sizes_at(self, tensor: int) -> LayerSizes:
        """The sizes of layers at a tensor degree. Raises InputError if they are not known."""
        for one in self.sizes:
            if one.tensor == tensor:
                return one
        known = _listed([one.tensor for one in self.sizes]) or "none"
        raise InputError(
            f"profiles of {self.name!r}: sizes of layers at tensor degree {tensor} are not known "
            f"(known: {known})"
        )


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def load_layer_profiles(path: str | os.PathLike[str]) -> LayerProfiles:
    """Read a document of layer profiles; raises InputError, with one line, if it is not valid."""
    return documents.read(LayerProfiles, path)


def save_layer_profiles(profiles: LayerProfiles, path: str | os.PathLike[str]) -> None:
    """Write a document of layer profiles atomically."""
    documents.write(LayerProfiles, profiles, path)


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
