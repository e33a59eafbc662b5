"""One layer at one microbatch size: the times of its computations, and the bytes that it keeps."""

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stagewright.executor.capture.draws import SavedStorages
from stagewright.executor.capture.layers import LayeredModel
from stagewright.executor.capture.loss_graph import require_from_outputs
from stagewright.executor.capture.split_backward import split_layer
from stagewright.executor.capture.split_layer import (
    CannotSplit,
    Saved,
    SavedForWeights,
    SplitLayer,
)
from stagewright.executor.measuring.machine import MeasuringMachine, Seconds
from stagewright.executor.training.losses import Loss, read_loss
from stagewright.executor.training.stages.division import add_gradient
from stagewright.graphs.documents.errors import InputError

Values = tuple[Tensor, ...]


LayerTimes = tuple[Seconds, Seconds, Seconds, Seconds, Seconds]
"""Of a forward and a whole backward, then of a forward, I and W of a backward in two parts."""


class _Flight(NamedTuple):
    """What a forward by pieces keeps for its backward."""

    saved: Saved
    outputs: Values
    loss: Values | None


@dataclass(frozen=True, slots=True, eq=False)
class LayerRun:
    """A layer with its inputs and the pieces of it; ``loss`` is that of the last one's outputs."""

    module: nn.Module
    inputs: Values
    pieces: SplitLayer | None
    loss: Callable[[Values], Values] | None
    autocast: torch.dtype | None

    def forward(self) -> Values:
        """The outputs, or the loss."""
        outputs: Values = self.module(*self.inputs)
        return outputs if self.loss is None else self.loss(outputs)

    def cast(self) -> torch.autocast:
        """The context of mixed precision."""
        mixed, device = self.autocast is not None, self.inputs[0].device.type
        return torch.autocast(device, self.autocast, enabled=mixed, cache_enabled=False)

    def whole_forward(self, machine: MeasuringMachine) -> tuple[Seconds, Values]:
        """Seconds of a forward, and its outputs."""
        with self.cast():
            return machine.timed(self.forward)

    def whole_backward(self, machine: MeasuringMachine, outputs: Values) -> Seconds:
        """Seconds of the whole backward of ``outputs``."""
        roots = [value for value in outputs if value.requires_grad]
        gradients = [torch.randn_like(value) for value in roots]
        return (
            machine.timed(lambda: torch.autograd.backward(roots, gradients))[0]
            if roots
            else _nothing
        )

    def forward_in_two(
        self, machine: MeasuringMachine, pieces: SplitLayer
    ) -> tuple[Seconds, "_Flight"]:
        """Seconds of a forward by ``pieces``, and what it keeps."""

        def work() -> _Flight:
            values, saved = pieces.forward(
                [*self.module.parameters()], [*self.module.buffers()], self.inputs
            )
            outputs = _leaves(values, [one is not None for one in pieces.output_layouts])
            with self.cast():
                return _Flight(saved, outputs, self.loss and self.loss(outputs))

        return machine.timed(work)

    def input_gradient(
        self, machine: MeasuringMachine, pieces: SplitLayer, flight: "_Flight"
    ) -> tuple[Seconds, SavedForWeights]:
        """Seconds of I, with that of the loss, and what W needs."""
        known = [torch.randn_like(one) if one.requires_grad else None for one in flight.outputs]

        def work() -> SavedForWeights:
            given = known if flight.loss is None else _gradients(flight.loss, flight.outputs)
            return pieces.input_gradient(flight.saved, given)[1]

        seconds, saved = machine.timed(work)
        return seconds if any(pieces.input_gradients) else _nothing, saved

    def weight_gradient(
        self, machine: MeasuringMachine, pieces: SplitLayer, saved: SavedForWeights
    ) -> Seconds:
        """Seconds of W."""

        def work() -> None:
            found = pieces.weight_gradient(saved)
            for one, gradient in zip(self.module.parameters(), found, strict=True):
                if gradient is not None:
                    add_gradient(one, gradient)

        seconds, _ = machine.timed(work)
        return seconds if any(pieces.weight_gradients) else _nothing

    def bytes(self) -> tuple[int, int]:
        """Bytes that autograd keeps from forward to backward, and bytes of the layer's outputs."""
        kept = SavedStorages([*self.module.parameters(), *self.module.buffers()])
        with torch.autograd.graph.saved_tensors_hooks(kept.add, lambda saved: saved), self.cast():
            results = self.forward()
        return sum(kept.sizes.values()), sum(value.nbytes for value in results)


def times_of(runs: Sequence[LayerRun], machine: MeasuringMachine) -> list[LayerTimes]:
    """Carry out a microbatch of both ways by layers in a row, as in a run.

    The weights of one layer are then no longer in the caches when those of the others were used. A
    layer without pieces is whole both times.
    """
    parameters = [one for run in runs for one in run.module.parameters() if one.requires_grad]
    for one in parameters:
        one.grad = torch.zeros_like(one.detach())
    try:
        whole, parts = _whole(runs, machine), _in_two(runs, machine)
    finally:
        for tensor in (*parameters, *(value for run in runs for value in run.inputs)):
            tensor.grad = None
    pairs = zip(whole, parts, strict=True)
    return [(*one, *(two or (*one, _nothing))) for one, two in pairs]


def _whole(runs: Sequence[LayerRun], machine: MeasuringMachine) -> list[tuple[Seconds, Seconds]]:
    """Seconds of the forwards and of the backwards, which come in reverse."""
    forwards, kept = zip(*(run.whole_forward(machine) for run in runs), strict=True)
    left = [*kept]
    del kept
    backwards = [run.whole_backward(machine, left.pop()) for run in reversed(runs)]
    return [*zip(forwards, reversed(backwards), strict=True)]


def _in_two(
    runs: Sequence[LayerRun], machine: MeasuringMachine
) -> list[tuple[Seconds, Seconds, Seconds] | None]:
    """Seconds of the forwards, then of I and then of W in reverse; None without pieces."""
    found: list[tuple[Seconds, Seconds, Seconds] | None] = [None] * len(runs)
    split = [(i, run, run.pieces) for i, run in enumerate(runs) if run.pieces is not None]
    ahead = [(one, one[1].forward_in_two(machine, one[2])) for one in split]
    back = [
        (i, run, pieces, forward, *run.input_gradient(machine, pieces, flight))
        for (i, run, pieces), (forward, flight) in reversed(ahead)
    ]
    for i, run, pieces, forward, of_input, saved in back:
        found[i] = forward, of_input, run.weight_gradient(machine, pieces, saved)
    return found


def runs_of(
    model: LayeredModel, values: Values, targets: Any, loss: Loss, autocast: torch.dtype | None
) -> list[LayerRun]:
    """Every layer with its inputs, which require gradients where they do in training.

    Raises InputError if a layer does not run, or a run would refuse the loss.
    """
    runs, known = [], dict[Hashable, SplitLayer | None]()
    for i, layer in enumerate(model.layers):
        of_last = partial(loss_of, model, loss, targets) if i == len(model) - 1 else None
        run = LayerRun(layer.module, values, None, of_last, autocast)
        try:
            with run.cast():
                outputs: Values = layer.module(*values)
                _require_loss(of_last, outputs)
        except InputError:
            raise
        except Exception as error:  # of shapes, types or memory, raised by torch or the module
            reason = str(error).partition("\n")[0]
            raise InputError(f"layer {layer.name!r} does not run on the data: {reason}") from error
        alike = _alike(run, outputs, layer.name)
        if alike not in known:
            known[alike] = _pieces(run, outputs, layer.name)
        runs.append(replace(run, pieces=known[alike]))
        values = _leaves(outputs, [value.requires_grad for value in outputs])
    return runs


def loss_of(model: LayeredModel, loss: Loss, targets: Any, outputs: Values) -> Values:
    """The loss of the last layer's outputs, alone."""
    return read_loss(loss(model.result(outputs), targets))[:1]


def _require_loss(of_last: Callable[[Values], Values] | None, outputs: Values) -> None:
    """Refuse a loss that a run would refuse."""
    if of_last is not None:
        leaves = _leaves(outputs, [value.requires_grad for value in outputs])
        require_from_outputs(of_last(leaves)[0], leaves)


def _alike(run: LayerRun, outputs: Values, name: str) -> Hashable:
    """What blocks have in common whose pieces take the same time; to trace each takes longer.

    Their names differ in a number, and they have the same modules and tensors of equal shapes.
    """
    modules = [(type(one).__qualname__, one.extra_repr()) for one in run.module.modules()]
    tensors = [*run.module.parameters(), *run.module.buffers(), *run.inputs, *outputs]
    shapes = [(one.shape, one.stride(), one.dtype, one.requires_grad) for one in tensors]
    return re.sub(r"\d+", "", name), *modules, *shapes


def _pieces(run: LayerRun, outputs: Values, name: str) -> SplitLayer | None:
    """The pieces of a layer as a run has them; None if it is not split."""
    given, taken = ([one.requires_grad for one in values] for values in (run.inputs, outputs))
    try:
        with run.cast():
            return split_layer(run.module, [*map(Tensor.detach, run.inputs)], given, taken, name)
    except CannotSplit:
        return None


def _leaves(values: Values, trained: Sequence[bool]) -> Values:
    return tuple(
        one.detach().requires_grad_(needed) for one, needed in zip(values, trained, strict=True)
    )


def _gradients(loss: Values, outputs: Values) -> list[Tensor | None]:
    wanted = [one for one in outputs if one.requires_grad]
    found = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
    return [next(found) if one.requires_grad else None for one in outputs]


def _nothing() -> float:
    """The seconds of no computation."""
    return 0.0
