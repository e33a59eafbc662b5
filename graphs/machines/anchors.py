"""Anchors: the layers of one model as they were timed on one server, in place of computed times."""

from collections.abc import Sequence
from math import log

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_amount, require_bandwidth, require_count
from stagewright.graphs.models.architecture import Architecture
from stagewright.graphs.models.language import Attention
from stagewright.graphs.models.operations import MAX_SIZE
from stagewright.graphs.models.shards import LayerKind, LayerSplit


@documents.record
class TimedModel:
    """What was timed: a model at a sequence length, on a kind of device, with types of numbers."""

    architecture: Architecture
    sequence: int
    device: str
    activation_bytes: int
    fp8_products: bool = False
    attention: Attention = "fused"

    def __str__(self) -> str:
        numbers = "fp32" if self.activation_bytes == 4 else "16 bits"
        return (
            f"{self.architecture.name} ({self.architecture.layers} blocks of "
            f"{self.architecture.hidden}), sequence {self.sequence}, on {self.device}, in "
            f"{'fp8' if self.fp8_products else numbers}, {self.attention} attention"
        )


@documents.record
class TimedLayer:
    """Seconds of a layer at degrees and a number of samples, of the slowest rank.

    With ``exchanges`` they are of ranks that exchanged what the layer exchanges; without, of one
    rank's part alone. ``input_seconds`` and ``weight_seconds`` are the gradients of inputs and of
    weights. ``low`` and ``high`` are a tenth and nine tenths of the repetitions over their median.
    """

    kind: LayerKind
    tensor: int
    expert: int
    sequence_parallel: bool
    samples: int
    exchanges: bool
    forward_seconds: float
    input_seconds: float
    weight_seconds: float
    low: float
    high: float
    saved_bytes: float

    def __post_init__(self) -> None:
        for name in ("tensor", "expert", "samples"):
            require_count(getattr(self, name), name, MAX_SIZE)
        for name in ("input_seconds", "weight_seconds", "saved_bytes"):
            require_amount(getattr(self, name), name)
        if not self.forward_seconds > 0:
            raise InputError(f"forward_seconds must be above 0, got {self.forward_seconds:g}")
        if not 0 < self.low <= 1 <= self.high:
            raise InputError(f"low and high must be about 1, got {self.low:g} and {self.high:g}")

    @property
    def degree(self) -> LayerSplit:
        """How the layer was divided."""
        return LayerSplit(self.tensor, 1, self.expert, self.sequence_parallel)


@documents.record
class Anchor:
    """The timed layers of a model, the optimizer's step, and the links inside a server.

    ``server_bytes_per_second`` is None if one rank alone was timed.
    """

    model: TimedModel
    layers: tuple[TimedLayer, ...]
    update_seconds_per_parameter: float
    server_bytes_per_second: float | None = None
    server_latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        require_amount(self.update_seconds_per_parameter, "update_seconds_per_parameter")
        require_amount(self.server_latency_seconds, "server_latency_seconds")
        if self.server_bytes_per_second is not None:
            require_bandwidth(self.server_bytes_per_second, "server_bytes_per_second")
        for kind in sorted(layer_kinds(self.model.architecture)):
            if not any(one.kind == kind and not one.exchanges for one in self.layers):
                raise InputError(f"layers: no {kind} was timed alone")

    def at(self, kind: LayerKind, split: LayerSplit, *, exchanges: bool) -> tuple[TimedLayer, ...]:
        """The timings of a layer divided so, ascending in samples; none if it was not timed."""
        found = [
            one
            for one in self.layers
            if (one.kind, one.degree, one.exchanges) == (kind, split, exchanges)
        ]
        return tuple(sorted(found, key=lambda one: one.samples))

    def nearest(self, kind: LayerKind, split: LayerSplit) -> LayerSplit:
        """The degrees nearest to ``split`` at which a layer was timed alone."""

        def distance(one: LayerSplit) -> tuple[float, bool]:
            tensor, expert = one.tensor / split.tensor, one.expert / split.expert
            differs = one.sequence_parallel != split.sequence_parallel
            return abs(log(tensor)) + abs(log(expert)), differs

        alone = {one.degree for one in self.layers if one.kind == kind and not one.exchanges}
        return min(sorted(alone, key=str), key=distance)


def layer_kinds(of: Architecture) -> tuple[LayerKind, ...]:
    """The kinds of layers that a transformer has."""
    sparse = {of.is_sparse(index) for index in range(of.layers)}
    blocks: dict[LayerKind, bool] = {"dense": False in sparse, "experts": True in sparse}
    return ("embedding", "head", *(kind for kind, has in blocks.items() if has))


def require_anchored(anchor: Anchor, given: TimedModel) -> None:
    """Refuse rates of timed layers for another model, sequence, device or type of numbers."""
    if given != anchor.model:
        same = str(given) == str(anchor.model)
        raise InputError(
            f"rates are of the timed layers of {anchor.model}; this is "
            f"{'another model of that name and size' if same else given}: time its layers with "
            "stagewright anchor"
        )


def between(samples: Sequence[int], at: int) -> tuple[int, int, float]:
    """Positions of two of the ascending ``samples``, and the second's weight, to interpolate.

    Outside of the samples both are the nearest.
    """
    after = next((i for i, one in enumerate(samples) if one >= at), len(samples) - 1)
    before = after if samples[after] <= at else max(0, after - 1)
    if before == after:
        return after, after, 0.0
    return before, after, (at - samples[before]) / (samples[after] - samples[before])
