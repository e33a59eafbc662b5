"""A captured model by the stages of a plan: the tensors of each, and those that stages share."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stagewright.executor.capture.layers import BETWEEN, CapturedLayer, LayeredModel
from stagewright.executor.capture.shapes import LayerTrace, Value, propagate
from stagewright.executor.capture.signature import Signature
from stagewright.executor.capture.twins import twins
from stagewright.executor.training.model_checks import listed_stages
from stagewright.executor.training.ranks.rank import Rank
from stagewright.executor.training.sharding.parallel_layers import TensorGroup
from stagewright.executor.training.sharding.sharding import Sharding, shard_layers
from stagewright.executor.training.stages.initialise import place
from stagewright.executor.training.stages.weights import Weights
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.errors import InputError


class StagedModel:
    """The layers of ``own`` stages, and the names of all layers.

    ``names``: all names of each parameter and buffer; ``primary`` maps each name to the first.
    ``stages_of``: by first name, the stages that have it. ``trained``: first names of parameters
    that are trained, of all stages. ``tied``, ``shared_buffers``: first names of parameters, and of
    buffers, that several stages have. ``modules``: per stage its layers. Each has its own copy of
    shared tensors, also on one rank. ``shardings``: per stage that `shard` has divided.
    """

    def __init__(self, plan: PipelinePlan, model: LayeredModel, own: Sequence[int]) -> None:
        self._plan = plan
        self.names = [*model.parameters_by_name(), *model.buffers_by_name()]
        self.primary = {name: names[0] for names in self.names for name in names}
        self.stages_of = self._find_stages(model)
        parameters = model.parameters_by_name().items()
        self.trained = [names[0] for names, one in parameters if one.requires_grad]
        buffers = {self.primary[names[0]] for names in model.buffers_by_name()}
        shared = sorted(name for name, found in self.stages_of.items() if len(found) > 1)
        self.shared_buffers = [name for name in shared if name in buffers]
        self.tied = [name for name in shared if name in self.trained]
        self.modules: dict[int, list[CapturedLayer]] = {}
        self._own_layers = {i for s in own for i in range(*plan.stages[s].layers)}
        self._model = self._split(model, own)
        self.layers = self._model.layers
        self.shardings: dict[int, Sharding] = {}

    def result(self, values: tuple[Tensor, ...]) -> Any:
        """The model's result, of the last layer's tensors."""
        return self._model.result(values)

    def sized(self, inputs: Sequence[tuple[int, ...]]) -> Sequence[CapturedLayer]:
        """The layers for inputs of these shapes; see `LayeredModel.sized`.

        Of sharded layers, of layers whose weights are not there, and of several versions of the
        weights, there are those alone that the model was first captured for.
        """
        gathered = any(self._plan.stages[s].shards == "weights" for s in self.modules)
        if self.shardings or gathered or self._plan.weight_rule.versions > 1:
            self._model.require_sizes(inputs)
            return self.layers
        return self._model.sized(inputs).layers

    def traces(
        self,
        layers: Sequence[CapturedLayer],
        inputs: Sequence[Value],
        device: torch.device,
        autocast: torch.dtype | None,
    ) -> tuple[LayerTrace, ...]:
        """The result of `propagate` for all layers, of which some may be divided."""
        try:
            return propagate(layers, inputs, device, autocast)
        except InputError as error:
            if not self.shardings:
                raise
            raise InputError(
                f"{error}; layers of stage {listed_stages(sorted(self.shardings))} are divided: "
                "does the tp_plan name every layer of a pair, and the numbers that the code reads?"
            ) from error

    def in_evaluation(self, inputs: Sequence[tuple[int, ...]]) -> LayeredModel:
        """The model in evaluation for inputs of these shapes, with the tensors that it has now.

        Raises InputError if it was not captured for that, or cannot be for these shapes.
        """
        found = self._model.evaluation
        if found is None:
            raise InputError(
                "the model was not captured for evaluation: make the executor with evaluates=True"
            )
        if self.shardings:
            found.require_sizes(inputs)
        else:
            found = found.sized(inputs)
        return self._model.computing(found, "in evaluation")

    def require_divisible(self) -> None:
        """Refuse to divide the samples of a microbatch where the model fixes their number."""
        self._model.require_divisible()

    def require_called(self, signature: Signature) -> None:
        """Refuse inputs that are given otherwise than the model was captured for."""
        self._model.require_called(signature)

    def _find_stages(self, model: LayeredModel) -> dict[str, list[int]]:
        stages: dict[str, set[int]] = {}
        for s, stage in enumerate(self._plan.stages):
            for layer in model.layers[slice(*stage.layers)]:
                for name in _tensors_of(layer):
                    stages.setdefault(self.primary[name], set()).add(s)
        return {name: sorted(found) for name, found in stages.items()}

    def _split(self, model: LayeredModel, own: Sequence[int]) -> LayeredModel:
        layers = list(model.layers)
        stages = [layers[slice(*self._plan.stages[s].layers)] for s in own]
        uses = Counter(key for stage in stages for key in _ids(stage))
        shared = {key for key, count in uses.items() if count > 1}
        for s in own:
            start, stop = self._plan.stages[s].layers
            if self.modules:
                copies = twins([layer.module for layer in layers[start:stop]], shared)
                layers[start:stop] = [
                    CapturedLayer(layer.name, module)
                    for layer, module in zip(layers[start:stop], copies, strict=True)
                ]
            self.modules[s] = layers[start:stop]
        return replace(model, layers=tuple(layers))

    def shard(self, rank: Rank, groups: Mapping[int, TensorGroup]) -> None:
        """Divide the layers of each stage in ``groups`` among its tensor group, in place.

        They are on the host until then: the device need not hold them whole.
        """
        for s, group in groups.items():
            is_first = rank.number == rank.first(s)
            self.shardings[s] = shard_layers(
                f"stage {s}", self.modules[s], self._model, self.primary, group, quiet=not is_first
            )
        if groups:
            place(self._model, self._own_layers, rank.device, None)

    def watch(self, weights: Mapping[int, Weights]) -> None:
        """Let divided stages note the next gradients of parameters that each device has whole."""
        for s, sharding in self.shardings.items():
            weights[s].watch(set(weights[s].names) - sharding.cuts.keys())

    def require_same_gradients(self, weights: Mapping[int, Weights]) -> None:
        """Refuse noted gradients that differ among a group's devices; every device calls this."""
        for s in sorted(self.shardings):
            self.shardings[s].require_same(s, weights[s].take_norms())

    def tensors(self, s: int, weights: Weights) -> dict[str, Tensor]:
        """Parameters, in their newest version, and buffers of a stage, by their first names."""
        found: dict[str, Tensor] = {}
        for layer in self.modules[s]:
            for name, one in _tensors_of(layer).items():
                found.setdefault(self.primary[name], one)
        return found | weights.parameters(weights.newest)

    def buffers(self, s: int) -> dict[str, Tensor]:
        """The persistent buffers of a stage, by their first names."""
        found: dict[str, Tensor] = {}
        for layer in self.modules[s]:
            parameters = dict(layer.module.named_parameters(remove_duplicate=False))
            for name, one in _tensors_of(layer).items():
                if name not in parameters:
                    found.setdefault(self.primary[name], one)
        return found

    def holders(self, name: str) -> set[str]:
        """The devices of all stages that have a parameter."""
        return {v for s in self.stages_of[name] for v in self._plan.stages[s].devices}

    def require_constant_buffers(self, trace: Sequence[LayerTrace]) -> None:
        """Refuse a buffer that a layer may change in one stage while another stage has it too."""
        for layer, found in zip(self.layers, trace, strict=True):
            own = {self.primary[name] for name in _tensors_of(layer)} if found.changes else set()
            for name in self.shared_buffers:
                if name in own:
                    raise InputError(
                        f"layer {layer.name!r} changes its buffers, of which {name!r} is used in "
                        f"stages {listed_stages(self.stages_of[name])}; "
                        "put its layers into one stage"
                    )


def _ids(layers: Sequence[CapturedLayer]) -> set[int]:
    """The ids of all parameters and buffers of ``layers``."""
    modules = [layer.module for layer in layers]
    return {id(one) for module in modules for one in (*module.parameters(), *module.buffers())}


def _tensors_of(layer: CapturedLayer) -> dict[str, Tensor]:
    """Parameters and persistent buffers of a layer, under all their names in the model."""
    state = layer.module.state_dict(keep_vars=True)
    return {
        name: one
        for name, one in state.items()
        if isinstance(one, Tensor) and not name.startswith(BETWEEN)
    }
