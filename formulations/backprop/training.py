"""The common problem for each training method; what a method lacks takes no time (section 2).

Layers are numbered from 1. Every device has a main stream, with two streams a sub-stream for the
weight gradients, a link for the synchronisation of its weight gradients, and a link to each device
that it sends to.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from stagewright.formulations.backprop.problem import (
    NO_RESOURCE,
    BackpropOperation,
    BackpropProblem,
    BackpropTensor,
    Kind,
    Resource,
)
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_LAYERS, MAX_MICROBATCHES, require_count


@dataclass(frozen=True, slots=True)
class Layers:
    """Seconds and bytes of L layers for one microbatch.

    Attributes
    ----------
    forward, output_gradient, weight_gradient
        Seconds; the first layer's output gradient is usually 0, as nothing needs it.
    saved
        Bytes of each layer's input, held until both its gradients have ended; empty for none.
    gradient
        Bytes of the gradient of each layer's output, held for as long; empty for none.
    kept
        Whether each layer's input stays in memory after the forward. If not, the previous layer's
        forward runs again before the layer's gradients. Empty for all.
    """

    forward: tuple[float, ...]
    output_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    saved: tuple[float, ...] = ()
    gradient: tuple[float, ...] = ()
    kept: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        require_count(self.count, "layers", MAX_LAYERS)
        for name in ("saved", "gradient"):
            if not getattr(self, name):
                object.__setattr__(self, name, (0.0,) * self.count)
        if not self.kept:
            object.__setattr__(self, "kept", (True,) * self.count)
        for name in ("output_gradient", "weight_gradient", "saved", "gradient", "kept"):
            _require_size(getattr(self, name), self.count, name)
        if not self.kept[0]:
            raise InputError("kept[0] must be true: the first layer's input cannot be recomputed")

    @property
    def count(self) -> int:
        """The number of layers L."""
        return len(self.forward)


def single_device(layers: Layers) -> BackpropProblem:
    """One device, whose weight gradients run in the sub-stream.

    The streams do not slow each other; see :mod:`overlap` for a model in which they do.
    """
    return training(layers, (0,) * layers.count)


def data_parallel(
    layers: Layers,
    sync: Sequence[float],
    chunk_seconds: float = math.inf,
    memory: float | None = None,
    after_backward: bool = False,
) -> BackpropProblem:
    """One device of a group that synchronises each layer's weight gradient in ``sync`` seconds.

    ``after_backward``: no synchronisation starts before all gradients have ended.
    """
    return training(
        layers,
        (0,) * layers.count,
        sync=sync,
        chunk_seconds=chunk_seconds,
        memory=_alone(memory),
        after_backward=after_backward,
    )


def training(
    layers: Layers,
    device: Sequence[int],
    microbatches: int = 1,
    send: Sequence[float] = (),
    sync: Sequence[float] = (),
    streams: int = 1,
    chunk_seconds: float = math.inf,
    memory: Sequence[float] = (),
    after_backward: bool = False,
    back: Sequence[float] = (),
    channels: bool = False,
    update: Sequence[float] = (),
) -> BackpropProblem:
    """Layers on devices, as in cross-layer model, pipeline and combined parallelism.

    Parameters
    ----------
    device
        The device of each layer, L values.
    send
        Seconds of a transfer between layers i and i + 1 (i from 1), either way, L - 1 values; used
        where their devices differ. Empty: transfers take no time.
    sync
        Seconds of the synchronisation of each layer's weight gradient, L values; empty for none.
    chunk_seconds
        Of the links for synchronisation: see :class:`Resource`.
    memory
        Bytes per device; empty for no limits.
    back
        Seconds of the transfers of gradients, L - 1 values; empty: as ``send``.
    channels
        Whether every pair of neighbouring layers has a link of its own for both directions, as in
        plans, in place of a link for each pair of devices and direction.
    update
        Seconds of the optimizer step of each layer, between its synchronisation and its forwards,
        L values; empty for none, as in the paper.
    """
    require_count(microbatches, "microbatches", MAX_MICROBATCHES)
    send, sync = send or (0.0,) * (layers.count - 1), sync or (0.0,) * layers.count
    update = update or (0.0,) * layers.count
    back = back or send
    for values, size, name in (
        (device, layers.count, "device"),
        (send, layers.count - 1, "send"),
        (back, layers.count - 1, "back"),
        (sync, layers.count, "sync"),
        (update, layers.count, "update"),
    ):
        _require_size(values, size, name)
    if streams not in (1, 2):
        raise InputError(f"streams must be 1 or 2, got {streams}")
    links = tuple(send), tuple(back), channels
    draft = _Draft(layers, tuple(device), *links, tuple(sync), streams, chunk_seconds)
    for m in range(microbatches):
        draft.backward(m)
    draft.synchronise(microbatches, after_backward)
    draft.update(update)
    for m in range(microbatches):
        draft.forward(m)
    draft.hold(microbatches)
    return BackpropProblem(
        tuple(draft.operations),
        tuple(draft.resources),
        tuple(draft.before),
        tuple(draft.tensors),
        tuple(memory),
    )


@dataclass
class _Draft:
    """The parts of a problem as they are added."""

    layers: Layers
    device: tuple[int, ...]
    send: tuple[float, ...]
    back: tuple[float, ...]
    channels: bool
    sync: tuple[float, ...]
    streams: int
    chunk_seconds: float
    operations: list[BackpropOperation] = field(default_factory=list)
    resources: list[Resource] = field(default_factory=list)
    before: list[tuple[int, int]] = field(default_factory=list)
    tensors: list[BackpropTensor] = field(default_factory=list)
    index: dict[tuple[str, int, int], int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    def add(
        self, kind: Kind, layer: int, m: int, place: str, seconds: float, after: Sequence[int]
    ) -> int:
        i = len(self.operations)
        chunk = self.chunk_seconds if place.startswith("sync") else math.inf
        if seconds > 0 and place not in self.numbers:
            self.numbers[place] = len(self.resources)
            self.resources.append(Resource(place, chunk))
        resource = self.numbers[place] if seconds > 0 else NO_RESOURCE
        self.operations.append(BackpropOperation(kind, layer, m, resource, float(seconds)))
        self.index[kind, layer, m] = i
        self.before += [(j, i) for j in after]
        return i

    def main(self, layer: int) -> str:
        return f"main {self.device[layer - 1]}"

    def sub(self, layer: int) -> str:
        return f"{'sub' if self.streams == 2 else 'main'} {self.device[layer - 1]}"

    def link(self, sender: int, receiver: int) -> str:
        """The link that a transfer between two neighbouring layers takes."""
        if self.channels:
            return f"channel {min(sender, receiver)}"
        return f"link {self.device[sender - 1]}-{self.device[receiver - 1]}"

    def crosses(self, layer: int) -> bool:
        """Whether the next layer is on another device."""
        return self.device[layer - 1] != self.device[layer]

    def backward(self, m: int) -> None:
        layers = self.layers
        loss = self.add("loss", layers.count + 1, m, "", 0.0, ())
        ready = [loss]
        for i in range(2, layers.count + 1):
            if not layers.kept[i - 1]:
                after = [loss] if layers.kept[i - 2] else [self.index["R", i - 2, m]]
                if self.crosses(i - 1):
                    raise InputError(f"kept[{i - 1}] must be true: the input is another device's")
                self.add("R", i - 1, m, self.main(i), layers.forward[i - 2], after)
        for i in range(layers.count, 0, -1):
            if i < layers.count and self.crosses(i):
                seconds = self.back[i - 1]
                ready = [self.add("S[dO]", i + 1, m, self.link(i + 1, i), seconds, ready)]
            again = [] if layers.kept[i - 1] else [self.index["R", i - 1, m]]
            after = [*ready, *again]
            self.add("dW", i, m, self.sub(i), layers.weight_gradient[i - 1], after)
            seconds = layers.output_gradient[i - 1]
            ready = [self.add("dO", i, m, self.main(i), seconds, after)]

    def synchronise(self, microbatches: int, after_backward: bool) -> None:
        """One synchronisation per layer, of the sum over all microbatches."""
        kinds = ("dO", "dW")
        every = [j for (kind, _, _), j in self.index.items() if kind in kinds]
        for i in range(self.layers.count, 0, -1):
            own = [self.index["dW", i, m] for m in range(microbatches)]
            place = f"sync {self.device[i - 1]}"
            self.add("S[dW]", i, 0, place, self.sync[i - 1], every if after_backward else own)

    def update(self, seconds: Sequence[float]) -> None:
        """One optimizer step for each layer that has one."""
        for i, step in enumerate(seconds, start=1):
            if step > 0:
                self.add("U", i, 0, self.main(i), step, [self.index["S[dW]", i, 0]])

    def forward(self, m: int) -> None:
        ready: list[int] = []
        for i, seconds in enumerate(self.layers.forward, start=1):
            if i > 1 and self.crosses(i - 1):
                sent = self.send[i - 2]
                ready = [self.add("S[F]", i - 1, m, self.link(i - 1, i), sent, ready)]
            updated = self.index.get(("U", i, 0), self.index["S[dW]", i, 0])
            after = [*ready, updated]
            ready = [self.add("F", i, m, self.main(i), seconds, after)]

    def hold(self, microbatches: int) -> None:
        for m in range(microbatches):
            for i in range(1, self.layers.count + 1):
                if self.layers.saved[i - 1] > 0:
                    self._hold_input(i, m)
                if self.layers.gradient[i - 1] > 0:
                    self._hold_gradient(i, m)

    def _hold_input(self, i: int, m: int) -> None:
        """Keep a layer's input, from before the window or its second run, and the next input."""
        index, home, amount = self.index, self.device[i - 1], self.layers.saved[i - 1]
        used = (index["dO", i, m], index["dW", i, m])
        is_kept = self.layers.kept[i - 1]
        first = index["loss", self.layers.count + 1, m] if is_kept else index["R", i - 1, m]
        made = index.get(("S[F]", i - 1, m), index["F", max(1, i - 1), m])
        until = () if is_kept else (index["F", i, m],)
        self.tensors += [
            BackpropTensor(home, amount, first, used),
            BackpropTensor(home, amount, made, until),
        ]

    def _hold_gradient(self, i: int, m: int) -> None:
        """Keep the gradient of a layer's output on its device and, while sent, on the next."""
        index, home, amount = self.index, self.device[i - 1], self.layers.gradient[i - 1]
        used = (index["dO", i, m], index["dW", i, m])
        made = index["dO", i + 1, m] if i < self.layers.count else index["loss", i + 1, m]
        sent = index.get(("S[dO]", i + 1, m))
        if sent is None:
            self.tensors.append(BackpropTensor(home, amount, made, used))
        else:
            self.tensors.append(BackpropTensor(self.device[i], amount, made, (sent,)))
            self.tensors.append(BackpropTensor(home, amount, sent, used))


def _alone(memory: float | None) -> tuple[float, ...]:
    return () if memory is None else (memory,)


def _require_size(values: Sequence[object], size: int, name: str) -> None:
    if len(values) != size:
        raise InputError(f"{name} needs {size} values, got {len(values)}")
