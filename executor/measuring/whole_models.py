"""A user's model, with all that its measurement depends on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stagewright.executor.capture.exported.exporting import Example
from stagewright.executor.capture.layers import LayeredModel
from stagewright.executor.capture.shapes import values_of
from stagewright.executor.capture.tracing import capture
from stagewright.executor.measuring.machine import Machine
from stagewright.executor.measuring.profiling import measure_layers
from stagewright.executor.measuring.together import (
    GroupMachine,
    divide,
    group_of,
    mean_of_ranks,
    with_degree,
)
from stagewright.executor.training.data.batches import (
    require_as_many,
    require_samples,
    typed_inputs,
)
from stagewright.executor.training.losses import Loss
from stagewright.executor.training.stages.initialise import Model
from stagewright.executor.training.stages.weights import MakeOptimizer
from stagewright.graphs.models.chain import Chain

SEED = 0


def captured_by_size(
    make: Callable[[], Model],
    inputs: Any,
    sizes: Sequence[int],
    takes_loss: bool,
    *,
    device: torch.device,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
) -> dict[int, LayeredModel]:
    """The layers of a new model on ``device`` for microbatches of ``sizes`` of ``inputs``.

    They share their parameters, of type ``dtype``. ``takes_loss`` as in `Example`.

    Raises
    ------
    InputError
        If the model cannot be captured, or ``inputs`` have fewer samples.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        made = make()
    for module in [made] if isinstance(made, nn.Module) else made:
        module.to(device=device, dtype=dtype)
    given, signature = typed_inputs(inputs, dtype)
    require_as_many(given, ())
    require_samples(given, sizes)
    example = Example(given, signature, takes_loss, device, dtype, autocast)
    found: dict[int, LayeredModel] = {}
    for size in sorted(set(sizes), reverse=True):
        same = next(iter(found.values()), None)
        if same is not None and not same.guards:  # traced, for all sizes
            found[size] = same
            continue
        found[size] = capture(made, example.first(size))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """A model to measure; `measure_layers` describes the fields.

    ``make`` makes the module, ``dtype`` is the type of its parameters. ``takes_loss`` as in
    `Example`.
    """

    make: Callable[[], Model]
    name: str
    batch: tuple[Any, Any]
    sizes: Sequence[int]
    loss: Loss
    takes_loss: bool
    optimizer: MakeOptimizer
    clips: bool
    rounds: int
    machine: Machine
    dtype: torch.dtype
    autocast: torch.dtype | None

    def measure(self, on_progress: Callable[[str], None] = lambda _: None) -> Chain:
        """The costs of whole layers."""
        on_progress("making the model")
        return self._measured(self._captured(), self.machine, on_progress)

    def measure_degree(self, degree: int) -> Chain:
        """Costs of whole layers and of layers divided among ``degree`` ranks; all ranks call this.

        Raises
        ------
        InputError
            If the model does not say how it is divided, or a run would refuse to divide it.
        """
        group, captured = group_of(degree), self._captured()
        whole = mean_of_ranks(self._measured(captured, self.machine))
        own = self.machine
        together = GroupMachine(own.device, own.threads, own.device_kind, group)
        given, _ = typed_inputs(self.batch[0], self.dtype)
        divide(captured, {size: values_of(given, size) for size in captured}, together)
        divided = mean_of_ranks(self._measured(captured, together), degree)
        return with_degree(whole, divided, degree)

    def _captured(self) -> dict[int, LayeredModel]:
        return captured_by_size(
            self.make,
            self.batch[0],
            self.sizes,
            self.takes_loss,
            device=self.machine.device,
            dtype=self.dtype,
            autocast=self.autocast,
        )

    def _measured(
        self,
        captured: Mapping[int, LayeredModel],
        machine: Machine,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> Chain:
        return measure_layers(
            captured,
            self.batch,
            self.sizes,
            machine=machine,
            loss=self.loss,
            rounds=self.rounds,
            autocast=self.autocast,
            name=self.name,
            optimizer=self.optimizer,
            clips=self.clips,
            on_progress=on_progress,
        )
