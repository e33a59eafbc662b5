"""A model as a chain of layers with measured or computed costs."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_amount, require_positive

MAX_LAYER_BYTES = 1e18  # an exabyte
MAX_LAYER_SECONDS = 1e5  # a day per layer and microbatch: the times must be in milliseconds


def require_kernel_share(share: float, name: str) -> None:
    """Refuse a kernel's share of a device's multiprocessors that is not above 0 and at most 1."""
    if not 0 < share <= 1:
        raise InputError(f"{name} must be above 0 and at most 1, got {share:g}")


@documents.record
class LayerCost:
    """Costs of one layer on one kind of device at one microbatch size.

    ``device_kind`` None means any device: the source does not say where it was measured. The
    backward time is that of a whole backward (``backward_seconds``), or of its two parts, input
    gradient and weight gradient, or all three: parts may take longer than the whole, which is
    their sum if it is not given. ``saved_bytes`` are kept from the forward to the backward,
    ``output_bytes`` are sent to the next layer (and returned as a gradient). ``update_seconds`` is
    the time of the optimizer step on the layer's parameters (None: not known, counted as 0); it
    does not depend on the microbatch size. The shares are the fractions of the device's
    multiprocessors that the kernels occupy (None: not known, counted as 1: nothing runs beside).

    ``tensor`` devices (None: one) compute the layer together, each with a shard of it: the times
    are those of all of them, collectives included, ``saved_bytes`` and ``shard_parameter_bytes``
    those of each. ``output_bytes`` are the whole output's, which each of them holds.
    """

    microbatch_size: int
    forward_seconds: float
    saved_bytes: float
    output_bytes: float
    backward_seconds: float | None = None
    input_gradient_seconds: float | None = None
    weight_gradient_seconds: float | None = None
    update_seconds: float | None = None
    device_kind: str | None = None
    forward_share: float | None = None
    input_gradient_share: float | None = None
    weight_gradient_share: float | None = None
    tensor: int | None = None
    shard_parameter_bytes: float | None = None

    def __post_init__(self) -> None:
        if self.microbatch_size < 1:
            raise InputError(f"microbatch_size must be at least 1, got {self.microbatch_size}")
        self._require_backward()
        if self.tensor is not None and self.tensor < 2:
            raise InputError(f"tensor must be at least 2, or left out, got {self.tensor}")
        if (self.tensor is None) != (self.shard_parameter_bytes is None):
            raise InputError("give tensor and shard_parameter_bytes together, or neither")
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, float | int):
                _require_cost(value, name)
                if name.endswith("_share"):
                    require_kernel_share(value, name)

    def _require_backward(self) -> None:
        one = (self.input_gradient_seconds is None) != (self.weight_gradient_seconds is None)
        if one or (self.backward_seconds is None and not self.has_parts):
            raise InputError(
                "give backward_seconds, or both input_gradient_seconds and "
                "weight_gradient_seconds, or all three"
            )

    @property
    def has_parts(self) -> bool:
        """Whether the times of the two parts of the backward are given."""
        return self.input_gradient_seconds is not None

    @property
    def degree(self) -> int:
        """The tensor degree: on how many devices the layer is computed together."""
        return self.tensor or 1

    @property
    def shares(self) -> tuple[float | None, float | None, float | None]:
        """Kernel shares of forward, input gradient and weight gradient; None where not known."""
        return self.forward_share, self.input_gradient_share, self.weight_gradient_share

    @property
    def total_backward_seconds(self) -> float:
        """Time of the whole backward B, I + W if it is not given."""
        if self.backward_seconds is not None:
            return self.backward_seconds
        assert self.input_gradient_seconds is not None
        assert self.weight_gradient_seconds is not None
        return self.input_gradient_seconds + self.weight_gradient_seconds


def _require_cost(value: float, name: str) -> None:
    """Refuse what no layer takes: a microbatch of a day, sizes whose sums are no numbers."""
    require_amount(value, name)
    if name.endswith("_seconds") and value > MAX_LAYER_SECONDS:
        raise InputError(f"{name} is {value:g} s for one microbatch: times are seconds")
    if name.endswith("_bytes") and value > MAX_LAYER_BYTES:
        raise InputError(f"{name} is {value:g} bytes: are the sizes in bytes?")


@documents.record
class Layer:
    """One layer: its parameters and costs, one entry per tensor degree, device kind and size.

    ``min_samples`` is the least number of samples the layer can be run on (None: one); batch
    normalisation over a single value per channel, for example, is undefined.
    """

    name: str
    parameter_bytes: float
    costs: tuple[LayerCost, ...]
    min_samples: int | None = None

    def __post_init__(self) -> None:
        if self.min_samples is not None and self.min_samples < 1:
            raise InputError(
                f"layer {self.name!r}: min_samples must be at least 1, got {self.min_samples}"
            )
        _require_cost(self.parameter_bytes, f"layer {self.name!r}: parameter_bytes")
        if not self.costs:
            raise InputError(f"layer {self.name!r} has no costs")
        measured = [(cost.degree, cost.device_kind, cost.microbatch_size) for cost in self.costs]
        if len(set(measured)) < len(measured):
            raise InputError(f"layer {self.name!r}: two costs for one device kind and size")
        updates = {(cost.degree, cost.device_kind, cost.update_seconds) for cost in self.costs}
        if len(updates) > len({(degree, kind) for degree, kind, _ in updates}):
            raise InputError(
                f"layer {self.name!r}: update_seconds must be the same at every microbatch size"
            )
        self._require_degrees()

    def _require_degrees(self) -> None:
        """Every degree has the same device kinds, and shards of one size."""
        kinds = _kinds(self.costs_at(1))
        for degree in self.degrees:
            costs = self.costs_at(degree)
            if _kinds(costs) != kinds:
                raise InputError(
                    f"layer {self.name!r}: tensor degree {degree} has costs for "
                    f"{_shown(_kinds(costs))}, degree 1 for {_shown(kinds) or 'none'}: every "
                    f"degree needs the same kinds"
                )
            if len({cost.shard_parameter_bytes for cost in costs}) > 1:
                raise InputError(
                    f"layer {self.name!r}: shard_parameter_bytes must be the same in all costs of "
                    f"tensor degree {degree}"
                )
            self._require_shard(degree, costs[0].shard_parameter_bytes)

    def _require_shard(self, degree: int, shard: float | None) -> None:
        """Every parameter is whole on each of ``degree`` devices, or divided among them."""
        least, most = self.parameter_bytes / degree, self.parameter_bytes
        if shard is not None and not least * (1 - 1e-9) <= shard <= most * (1 + 1e-9):
            raise InputError(
                f"layer {self.name!r}: shard_parameter_bytes at tensor degree {degree} must be "
                f"from {least:g} (all is divided) to {most:g} (nothing is), got {shard:g}"
            )

    @property
    def degrees(self) -> tuple[int, ...]:
        """The tensor degrees for which there are costs, ascending."""
        return tuple(sorted({cost.degree for cost in self.costs}))

    def costs_at(self, degree: int) -> tuple[LayerCost, ...]:
        """The costs of a tensor degree; empty if there are none."""
        return tuple(cost for cost in self.costs if cost.degree == degree)


@documents.record
class Chain:
    """A model: layers in the order of the forward.

    ``microbatch_size`` (samples) is the planned size; ``source`` says where the costs come from
    ("analytic: ...", "measured: ..."). ``optimizer_bytes_per_parameter_byte`` is the optimizer's
    state: 0 for plain SGD, 1 for momentum, 2 for Adam. ``reference_seconds`` tell how fast the
    machine was at that time: those of a small computation that ``run --trace`` times, too (None:
    not known).
    """

    name: str
    source: str
    microbatch_size: int
    layers: tuple[Layer, ...]
    optimizer_bytes_per_parameter_byte: float = 2.0
    reference_seconds: float | None = None
    format: Literal["stagewright-model"] = "stagewright-model"
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        if not self.layers:
            raise InputError(f"model {self.name!r} has no layers")
        if self.microbatch_size < 1:
            raise InputError(f"microbatch_size must be at least 1, got {self.microbatch_size}")
        require_amount(
            self.optimizer_bytes_per_parameter_byte, "optimizer_bytes_per_parameter_byte"
        )
        require_positive(self.reference_seconds, "reference_seconds")
        names = [layer.name for layer in self.layers]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"two layers are named {twice!r}")
        kinds = _kinds(self.layers[0].costs)
        for layer in self.layers:
            if _kinds(layer.costs) != kinds:
                raise InputError(
                    f"layer {layer.name!r} has costs for {_shown(_kinds(layer.costs))}, "
                    f"layer {names[0]!r} for {_shown(kinds)}: every layer needs the same kinds"
                )
        for layer in self.layers[:-1]:
            _require_whole_outputs(layer)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def parameter_bytes(self) -> Floats:
        """Parameter bytes per layer, shape (L,)."""
        return np.array([layer.parameter_bytes for layer in self.layers], dtype=float)

    @property
    def min_samples(self) -> NDArray[np.int64]:
        """The least number of samples per layer, shape (L,)."""
        return np.array([layer.min_samples or 1 for layer in self.layers], dtype=np.int64)

    def digest(self) -> str:
        """A SHA-256 of everything that a plan of this chain depends on."""
        return hashlib.sha256(documents.to_json(self).encode()).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class ChainCosts:
    """Costs per layer on one device kind at one number of samples; every array has shape (L,)."""

    forward_seconds: Floats
    backward_seconds: Floats
    saved_bytes: Floats
    output_bytes: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """A chain's costs on one device kind, to be interpolated at any number of samples.

    ``sizes`` are 0 and each layer's measured microbatch sizes, ascending, rows padded with inf,
    shape (L, n + 1); ``values`` the four costs of ChainCosts at these sizes, (4, L, n + 1).
    """

    sizes: Floats
    values: Floats

    def at(self, samples: int) -> ChainCosts:
        """Costs for ``samples`` samples.

        Between measured sizes the costs are interpolated linearly; below the smallest they are
        proportional to the number of samples, which with a single measured size is SPP's
        assumption p/k (section III-B and its footnote 2). ``samples`` is at most the planned size,
        which :func:`profile_on` requires to be within the measured ones.
        """
        rows = np.arange(len(self.sizes))
        above = np.maximum(1, (self.sizes < samples).sum(axis=1))
        low, high = self.sizes[rows, above - 1], self.sizes[rows, above]
        share = np.clip((samples - low) / (high - low), 0.0, 1.0)
        below_values, above_values = self.values[:, rows, above - 1], self.values[:, rows, above]
        return ChainCosts(*(below_values + share * (above_values - below_values)))


def profile_on(chain: Chain, device_kind: str) -> Profile:
    """The costs of every layer on ``device_kind``, or else the costs for any kind.

    Raises InputError if the chain has no costs for ``device_kind``, or its microbatch size is
    outside the sizes for which a layer has costs.
    """
    per_layer = [_costs_for(chain, layer, device_kind) for layer in chain.layers]
    for layer, costs in zip(chain.layers, per_layer, strict=True):
        _require_measured(chain, layer.name, costs)
    longest = max(len(costs) for costs in per_layer)
    sizes = np.full((len(per_layer), longest + 1), np.inf)
    values = np.zeros((4, len(per_layer), longest + 1))
    sizes[:, 0] = 0.0
    for i, costs in enumerate(per_layer):
        for k, cost in enumerate(costs, start=1):
            sizes[i, k] = cost.microbatch_size
            values[:, i, k] = (
                cost.forward_seconds,
                cost.total_backward_seconds,
                cost.saved_bytes,
                cost.output_bytes,
            )
    return Profile(sizes, values)


def update_seconds_on(chain: Chain, device_kind: str) -> Floats:
    """Seconds of the optimizer step per layer on ``device_kind``, shape (L,); 0 if not known."""
    per_layer = [_costs_for(chain, layer, device_kind)[0].update_seconds for layer in chain.layers]
    return np.array([seconds or 0.0 for seconds in per_layer])


def shares_on(chain: Chain, device_kind: str, samples: int, unknown: float) -> Floats:
    """Shares of a device that each layer's kernels occupy for ``samples`` samples, shape (3, L).

    Rows are forward, input gradient and weight gradient. Between two measured sizes the larger
    share counts; what a layer does not state is ``unknown``.
    """
    found = np.empty((3, len(chain)))
    for i, layer in enumerate(chain.layers):
        costs = _costs_for(chain, layer, device_kind)
        above = next(k for k, cost in enumerate(costs) if cost.microbatch_size >= samples)
        exact = costs[above].microbatch_size == samples
        near = costs[above if exact else max(0, above - 1) : above + 1]
        stated = [[unknown if one is None else one for one in cost.shares] for cost in near]
        found[:, i] = np.max(stated, axis=0)
    return found


def load_model(path: str | os.PathLike[str]) -> Chain:
    """Read a model document; raises InputError, with one line, if it is not valid."""
    return documents.read(Chain, path)


def save_model(chain: Chain, path: str | os.PathLike[str]) -> None:
    """Write a model document atomically."""
    documents.write(Chain, chain, path)


def _require_whole_outputs(layer: Layer) -> None:
    """Require that a layer's output bytes do not depend on the number of devices computing it."""
    sent = {(cost.device_kind, cost.microbatch_size): cost for cost in layer.costs_at(1)}
    for cost in layer.costs:
        whole = sent.get((cost.device_kind, cost.microbatch_size), cost)
        if cost.output_bytes != whole.output_bytes:
            raise InputError(
                f"layer {layer.name!r}: output_bytes at tensor degree {cost.degree} must be "
                f"{whole.output_bytes:g} as at degree 1, got {cost.output_bytes:g}: every device "
                f"holds and sends the whole output"
            )


def _costs_for(chain: Chain, layer: Layer, device_kind: str) -> Sequence[LayerCost]:
    """The layer's costs on ``device_kind``, else those for any kind, by ascending size."""
    for kind in (device_kind, None):
        found = [cost for cost in layer.costs_at(1) if cost.device_kind == kind]
        if found:
            return sorted(found, key=lambda cost: cost.microbatch_size)
    raise InputError(
        f"model {chain.name!r} has costs for {_shown(_kinds(layer.costs))}, "
        f"the cluster has a device of kind {device_kind!r}"
    )


def _require_measured(chain: Chain, name: str, costs: Sequence[LayerCost]) -> None:
    """Require that the planned microbatch size is within the measured sizes."""
    smallest, largest = costs[0].microbatch_size, costs[-1].microbatch_size
    if not smallest <= chain.microbatch_size <= largest:
        sizes = f"{smallest}" if smallest == largest else f"{smallest} to {largest}"
        raise InputError(
            f"model {chain.name!r}: microbatch_size is {chain.microbatch_size}, layer {name!r} has "
            f"costs for {sizes} samples: costs are not extrapolated; measure that size too, or "
            f"plan another one"
        )


def _kinds(costs: Sequence[LayerCost]) -> set[str | None]:
    return {cost.device_kind for cost in costs}


def _shown(kinds: set[str | None]) -> str:
    return ", ".join(sorted(repr(kind) if kind else "any device" for kind in kinds))
