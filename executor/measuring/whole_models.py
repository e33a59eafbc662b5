"""A user's model, with all that its measurement depends on.

Measuring by several ranks at once: each the same layers, or a shard of each layer.

The layers of a tensor degree are divided as in a run, by the model's own ``tp_plan``, and are
measured one by one as whole ones are, collectives included. All devices of a group begin together,
and the slowest counts. A rank that waits for another uses no processor time, so that elapsed time
is measured: other work of the machine is in it.
"""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from stagewright.executor.capture.exported.exporting import Example
from stagewright.executor.capture.layers import LayeredModel
from stagewright.executor.capture.python_state import made_plain
from stagewright.executor.capture.self_check import ExampleStep, require_same_step
from stagewright.executor.capture.shapes import Value, propagate, values_of
from stagewright.executor.capture.tracing import capture
from stagewright.executor.measuring.machine import MeasuringMachine, Seconds, rounded, typical
from stagewright.executor.measuring.profiling import measure_layers
from stagewright.executor.training.data.batches import (
    mapped_batch,
    require_as_many,
    require_samples,
    typed_inputs,
)
from stagewright.executor.training.losses import Loss
from stagewright.executor.training.model_checks import require_no_divided_draws
from stagewright.executor.training.sharding.parallel_layers import TensorGroup
from stagewright.executor.training.sharding.sharding import shard_layers
from stagewright.executor.training.stages.initialise import Model
from stagewright.executor.training.stages.learning_rates import MakeOptimizer, ParameterGroups
from stagewright.graphs.documents.errors import InputError, Notice
from stagewright.graphs.models.chain import Chain, Layer, LayerCost


@dataclass(frozen=True, slots=True)
class GroupMachine(MeasuringMachine):
    """A machine measured by a tensor group, whose devices begin each layer together."""

    group: TensorGroup | None = None

    @property
    def clock(self) -> str:
        """The kind of time that is measured."""
        return "elapsed time"

    def timed(self, work: Callable[[], Any]) -> tuple[Seconds, Any]:
        """The seconds that ``work`` takes, and its result; all ranks of the group call this."""
        assert self.group is not None
        self._synchronise()
        dist.barrier(self.group.processes)
        start = time.perf_counter()
        result = work()
        self._synchronise()
        seconds = time.perf_counter() - start
        return lambda: seconds, result

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def group_of(degree: int) -> TensorGroup:
    """The tensor group of this rank: of all ranks every ``degree`` consecutive ones are one.

    Raises InputError if the ranks are no whole number of groups.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % degree:
        raise InputError(f"--ranks {world} are no groups of --tensor {degree}")
    made = [dist.new_group(list(range(i, i + degree))) for i in range(0, world, degree)]
    return TensorGroup(made[rank // degree], rank % degree, range(degree))


def divide(
    models: Mapping[int, LayeredModel], inputs: Mapping[int, Sequence[Value]], machine: GroupMachine
) -> None:
    """Divide the layers of a model among the group, in place.

    ``models`` are those captured for each number of samples, of the same modules, ``inputs`` what
    they take. Raises InputError if a run would refuse to divide them.
    """
    assert machine.group is not None
    model = models[max(models)]
    primary = {name: names[0] for names in model.parameters_by_name() for name in names}
    quiet = machine.group.position > 0
    shard_layers("the model", model.layers, model, primary, machine.group, quiet=quiet)
    for size, one in models.items():
        traces = propagate(one.layers, inputs[size], machine.device, None)
        require_no_divided_draws("the model", one.layers, traces)


def with_degree(whole: Chain, divided: Chain, degree: int) -> Chain:
    """``whole`` with the costs of its layers ``divided`` among ``degree`` devices."""
    layers = [
        replace(
            layer,
            costs=(
                *layer.costs,
                *(
                    replace(cost, tensor=degree, shard_parameter_bytes=shard.parameter_bytes)
                    for cost in shard.costs
                ),
            ),
        )
        for layer, shard in zip(whole.layers, divided.layers, strict=True)
    ]
    measured = divided.source.removeprefix("measured: ")
    source = f"{whole.source}; divided among {degree} of them: {measured}"
    return replace(whole, source=source, layers=tuple(layers))


def mean_of_ranks(chain: Chain, degree: int = 1) -> Chain:
    """The mean of all ranks' simultaneous measurements; all ranks call this function.

    Of ``degree`` ranks that measured together, the slowest counts.
    """
    every: list[Chain] = [chain] * dist.get_world_size()
    dist.all_gather_object(every, chain)
    groups = [_combined(every[i : i + degree], max) for i in range(0, len(every), degree)]
    mean = _combined(groups, np.mean)
    return replace(mean, source=f"{mean.source}, by {len(every)} ranks at once")


def _combined(chains: Sequence[Chain], way: Callable[[Sequence[float]], float]) -> Chain:
    """The first rank's costs, with times combined over all ranks."""
    layers = [
        _combined_layer(same, way) for same in zip(*(one.layers for one in chains), strict=True)
    ]
    reference = typical((one.reference_seconds for one in chains), way)
    return replace(chains[0], layers=tuple(layers), reference_seconds=reference)


def _combined_layer(layers: Sequence[Layer], way: Callable[[Sequence[float]], float]) -> Layer:
    costs = zip(*(one.costs for one in layers), strict=True)
    return replace(layers[0], costs=tuple(_combined_cost(same, way) for same in costs))


def _combined_cost(
    costs: Sequence[LayerCost], way: Callable[[Sequence[float]], float]
) -> LayerCost:
    names = [name for name in LayerCost.__dataclass_fields__ if name.endswith("_seconds")]
    times: dict[str, Any] = {
        name: rounded(float(way([getattr(one, name) for one in costs])))
        for name in names
        if getattr(costs[0], name) is not None
    }
    return replace(costs[0], **times)


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
    like: LayeredModel | None = None,
) -> dict[int, LayeredModel]:
    """The layers of a new model on ``device`` for microbatches of ``sizes`` of ``inputs``.

    They share their parameters, of type ``dtype``. ``takes_loss`` as in `Example`, ``like`` as in
    `capture`. Raises
    InputError if the model cannot be captured, or ``inputs`` have fewer samples.
    """
    made = _made(make, device, dtype)
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
        found[size] = capture(made, example.first(size), like)
    return found


def _made(make: Callable[[], Model], device: torch.device, dtype: torch.dtype) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        made: Model = made_plain(make())
    for module in [made] if isinstance(made, nn.Module) else made:
        module.to(device=device, dtype=dtype)
    return made


def check_capture(
    make: Callable[[], Model],
    captured: LayeredModel,
    batch: tuple[Any, Any],
    size: int,
    loss: Loss,
    takes_loss: bool,
    *,
    device: torch.device,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
) -> None:
    """Refuse layers of a model, made as by `captured_by_size`, that compute something else.

    The loss and the gradients of a microbatch of ``size`` are those of the model as ``make`` makes
    it. A list of modules is not captured, and not checked.
    """
    plain = _made(make, device, dtype)
    if not isinstance(plain, nn.Module):
        return
    inputs, targets = batch
    given, signature = typed_inputs(inputs, dtype)
    require_same_step(
        plain,
        captured,
        ExampleStep(
            tuple(one[:size].to(device) for one in given),
            mapped_batch(targets, lambda one: one[:size].to(device)),
            signature,
            takes_loss,
            loss,
            autocast,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """A model to measure; `measure_layers` describes the fields.

    ``make`` makes the module, ``dtype`` is the type of its parameters. ``takes_loss`` as in
    `Example`. ``is_checked``: the captured layers' step is compared with the module's own.
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
    machine: MeasuringMachine
    dtype: torch.dtype
    autocast: torch.dtype | None
    is_checked: bool = True
    groups: ParameterGroups = field(default_factory=dict)

    def measure(self, on_progress: Callable[[str], None] = lambda _: None) -> Chain:
        """The costs of whole layers."""
        on_progress("making the model")
        captured = self._captured()
        for note in captured[max(captured)].notes:
            warnings.warn(note, Notice, stacklevel=2)
        if self.is_checked:
            on_progress("comparing a step with the model's own")
            self._check(captured, min(captured))
        return self._measured(captured, self.machine, on_progress)

    def _check(self, captured: Mapping[int, LayeredModel], size: int) -> None:
        try:
            check_capture(
                self.make,
                captured[size],
                self.batch,
                size,
                self.loss,
                self.takes_loss,
                device=self.machine.device,
                dtype=self.dtype,
                autocast=self.autocast,
            )
        except InputError:
            raise
        except Exception as error:  # of the model's code, of any kind
            reason = str(error).partition("\n")[0]
            raise InputError(f"the model does not run on {size} samples: {reason}") from error

    def measure_degree(self, degree: int) -> Chain:
        """Costs of whole layers and of layers divided among ``degree`` ranks; all ranks call this.

        Raises InputError if the model does not say how it is divided, or a run would refuse to
        divide it.
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
        machine: MeasuringMachine,
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
            groups=self.groups,
            clips=self.clips,
            on_progress=on_progress,
        )
