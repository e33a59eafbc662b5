"""A rank's share of a run of placed operators: states, names in checkpoints, inputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stagewright.executor.capture.steps.factories import share_of
from stagewright.executor.capture.steps.step import CapturedStep
from stagewright.executor.programs.operators.placed import PlacedGraph
from stagewright.executor.training.operators.matching import replica_of, replicas_of
from stagewright.executor.training.ranks.rank import Place
from stagewright.graphs.documents.errors import InputError

MODEL, OTHER = "model.", "state."  # what the keys of a checkpoint start with


@dataclass(frozen=True, eq=False)
class States:
    """A rank's states.

    Attributes
    ----------
    values
        By the number of their operator; steps change them.
    first
        The states of the first replica, where every replica has states of its own.
    keys
        The keys in a checkpoint by number: ``model.PATH`` of parameters and buffers, ``state.PATH``
        of the rest. Replicas have the same keys.
    paths
        The first path of every parameter and buffer in the model's state dict, by each of its
        paths.
    """

    values: Mapping[int, Tensor]
    first: frozenset[int]
    keys: Mapping[int, str]
    paths: Mapping[str, str]

    @classmethod
    def of(
        cls, place: Place, placed: PlacedGraph, model: nn.Module, step: CapturedStep
    ) -> "States":
        """Copies of the states of ``step`` that are placed on this rank."""
        paths = _paths(model, step)
        saved = set(paths.values())
        keys = {
            name: f"{MODEL if path in saved else OTHER}{path}" for path, name in step.names.items()
        }
        own = {
            n: node.name
            for n, node in enumerate(placed.nodes)
            if node.role == "state" and placed.rank[n] == place.number
        }
        single = {n: name.partition("@")[0] for n, name in own.items()}
        return cls(
            {n: step.states[name].to(place.device, copy=True) for n, name in single.items()},
            frozenset(n for n, name in own.items() if replica_of(name) == 0),
            {n: keys[name] for n, name in single.items()},
            paths,
        )

    def saved(self) -> dict[str, Tensor]:
        """The tensors that this rank writes to a checkpoint; each key is written by one rank."""
        return {self.keys[n]: self.values[n] for n in sorted(self.first)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a checkpoint's tensors into states; raises InputError if a tensor is missing."""
        for n, key in self.keys.items():
            if key not in tensors:
                raise InputError(f"the checkpoint has no {key!r}")
            self.values[n].copy_(tensors[key])

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """Parameters and buffers of the rank by their first path."""
        return {
            key.removeprefix(MODEL): value
            for key, value in self.saved().items()
            if key.startswith(MODEL)
        }


def _paths(model: nn.Module, step: CapturedStep) -> dict[str, str]:
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    first = {id(one): path for path, one in reversed(named) if path in step.names}
    keys = model.state_dict().keys()
    return {path: first[id(one)] for path, one in named if path in keys}


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of a mini-batch that a rank reads.

    Attributes
    ----------
    kinds
        Shape and type of every tensor of a replica's share.
    leaves
        Replica and number of the tensor by the number of the operator.
    """

    replicas: int
    device: torch.device
    kinds: tuple[tuple[torch.Size, torch.dtype], ...]
    leaves: Mapping[int, tuple[int, int]]

    @classmethod
    def of(cls, place: Place, placed: PlacedGraph, batch: tuple[Any, Any]) -> "Inputs":
        """The share of this rank for mini-batches like ``batch``."""
        replicas = replicas_of(placed.plan)
        share = tree_leaves(share_of(batch, replicas, 0))
        return cls(
            replicas,
            place.device,
            tuple((one.shape, one.dtype) for one in share),
            {
                n: (
                    replica_of(node.name),
                    int(node.name.partition("@")[0].removeprefix("input_")),
                )
                for n, node in enumerate(placed.nodes)
                if node.role == "input" and placed.rank[n] == place.number
            },
        )

    def read(self, batch: tuple[Any, Any]) -> dict[int, Tensor]:
        """The tensors by operator; raises InputError if one is not as planned."""
        shares = [
            tree_leaves(share_of(batch, self.replicas, number)) for number in range(self.replicas)
        ]
        found = tuple((one.shape, one.dtype) for one in shares[0])
        if found != self.kinds:
            of = " for a replica" if self.replicas > 1 else ""
            raise InputError(
                f"the mini-batch has {_shown(found)}{of}, the plan is of {_shown(self.kinds)}"
            )
        return {n: shares[r][i].to(self.device) for n, (r, i) in self.leaves.items()}


def _shown(kinds: tuple[tuple[torch.Size, torch.dtype], ...]) -> str:
    return ", ".join(f"{list(shape)} {str(kind).removeprefix('torch.')}" for shape, kind in kinds)
