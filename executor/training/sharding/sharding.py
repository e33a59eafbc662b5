"""The division of a stage's layers among the devices of a tensor group.

A module of the model says so itself by an attribute ``tp_plan``, the name that transformers uses:
a mapping from patterns of its own parts' names to

- ``colwise``: a linear layer by output features; ``colwise/3``: of three layers side by side in
  one, such as query, key and value, each;
- ``rowwise``: a linear layer by input features, with the sum over the group; an embedding by rows;
- ``colwise_rep``: by output features, which are joined for all devices; ``rowwise_rep``: by input
  features, of an input that all devices have whole;
- ``replicated_with_grad_allreduce``: a module that is whole on every device and used for a part of
  its values, whose gradients are summed up;
- ``divide``: a number, such as a count of heads, that is smaller on each device.

All other parameters are whole on every device, which computes with them what the others do. The
plan of a model of transformers is taken as it stands (`TensorPlan`).
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stagewright.executor.capture.layers import CapturedLayer, LayeredModel
from stagewright.executor.training.sharding.division import Division
from stagewright.executor.training.sharding.parallel_layers import SAME, TensorGroup
from stagewright.executor.training.sharding.styles import Cut
from stagewright.graphs.documents.errors import InputError, Notice

NOTHING = 1e-6  # what is so small beside all gradients may be rounding alone


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """The shards of a stage on one device of a ``group``: ``cuts`` by names of parameters."""

    group: TensorGroup
    cuts: Mapping[str, Cut]

    def whole(self, name: str, own: Tensor) -> Tensor:
        """The whole tensor of which every device has a piece; all of the group call it."""
        if name not in self.cuts or not own.dim():
            return own
        return self.cuts[name].joined(self.group.every(own))

    def own(self, name: str, whole: Tensor) -> Tensor:
        """The piece of this device."""
        if name not in self.cuts or not whole.dim():
            return whole
        return self.cuts[name].pieces(whole, self.group.degree)[self.group.position]

    def require_same(self, s: int, norms: Mapping[str, Tensor]) -> None:
        """Refuse parameters of stage ``s`` whose copies get different gradients.

        Every device must compute with a whole parameter what the others do. ``norms`` are those of
        this device's gradients; all of the group call it.

        Raises
        ------
        InputError
            If those of the other devices differ: the copies would become different parameters.
        """
        if not norms:
            return
        every = torch.stack(self.group.every(torch.stack(list(norms.values()))))
        least, most = every.amin(0), every.amax(0)
        for name, low, high in zip(norms, least.tolist(), most.tolist(), strict=True):
            if high - low > SAME * high + NOTHING * float(most.max()):
                raise InputError(
                    f"parameter {name!r} of stage {s} is whole on each of {self.group.degree} "
                    f"devices, but its gradients there differ (norms {low:.3g} to {high:.3g}): the "
                    "layers around it are divided; let their tp_plan divide its module too, or "
                    "none of them"
                )


def shard_layers(
    where: str,
    layers: Sequence[CapturedLayer],
    model: LayeredModel,
    primary: Mapping[str, str],
    group: TensorGroup,
    *,
    quiet: bool,
) -> Sharding:
    """Divide some ``layers`` of ``model`` in place; this device keeps its own parts.

    Layers that stay whole are named in a warning, unless ``quiet``. ``where`` names them together,
    such as "stage 0".

    Raises
    ------
    InputError
        If no layer has a plan of division, or a plan names unknown or indivisible tensors.
    """

    def warn(message: str) -> None:
        if not quiet:
            warnings.warn(message, Notice, stacklevel=2)

    division = Division(layers, primary, _names(model), group, warn)
    for plan in model.plans:
        division.apply(plan)
    division.require_whole()
    divided = [layer for layer in layers if is_divided(layer)]
    if not divided:
        raise InputError(
            f"{where} has tensor degree {group.degree}, but none of its layers "
            f"({', '.join(layer.name for layer in layers)}) says how it is divided: give a module "
            "in them a tp_plan, or plan tensor degree 1"
        )
    whole = [layer.name for layer in layers if layer not in divided and _has_parameters(layer)]
    if whole:
        warn(
            f"{where}: each of {group.degree} devices computes all of the layers "
            f"{', '.join(whole)}, which no tp_plan divides"
        )
    return Sharding(group, division.cuts)


def is_divided(layer: CapturedLayer) -> bool:
    """Whether devices have parts of a layer."""
    return any("tensor_group" in vars(part) for part in layer.module.modules())


def _has_parameters(layer: CapturedLayer) -> bool:
    return next(layer.module.parameters(), None) is not None


def _names(model: LayeredModel) -> set[str]:
    """Names of all modules of a model."""
    every = (layer.module.named_modules(remove_duplicate=False) for layer in model.layers)
    return {name for found in every for name, _ in found if name}
