"""The weights of one stage on one rank: versions, gradient, optimizer; and the seeds of a run."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stagewright.executor.capture.twins import twin
from stagewright.executor.training.stages.learning_rates import (
    FlatGradients,
    Gradients,
    LearningRates,
    MakeOptimizer,
    MakeSchedule,
    ParameterGroups,
    ReleasedGradients,
    optimizer_of,
)


def layer_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """The seed of one layer's forward pass, 63 bits; the same in every process."""
    return _hashed(f"{seed} {step} {microbatch} {layer}")


def operator_seed(seed: int, step: int, name: str) -> int:
    """The seed under which the operator called ``name`` draws in a step, 63 bits."""
    return _hashed(f"{seed} {step} {name}")


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


_BUCKET_BYTES = 25_000_000  # of an all-reduce, as in torch's own data parallelism


class Weights:
    """Parameters that are trained, in versions; the newest belongs to the optimizer.

    Gradients of all versions are summed up in flat tensors, which are kept; or, if they are
    ``released``, which needs a single version on one device, in those that autograd makes, until
    the update. Those of parameters that other stages have too (``tied``) are separate: they are
    summed up over all of these stages' devices. Parameters have their ``primary`` names. With
    ``two_gradients`` the next gradient is summed up in one set of flat tensors while the other one
    is reduced, until its update. Learning rates follow the ``schedule`` with every step, which has
    so many ``updates``.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        primary: Mapping[str, str],
        tied: Collection[str],
        make_optimizer: MakeOptimizer,
        versions: int,
        *,
        groups: ParameterGroups = MappingProxyType({}),
        schedule: MakeSchedule | None = None,
        updates: int = 1,
        two_gradients: bool = False,
        released: bool = False,
    ) -> None:
        by_name = {
            primary[name]: one
            for module in modules
            for name, one in module.named_parameters(remove_duplicate=False)
            if one.requires_grad
        }
        self.names, parameters = list(by_name), list(by_name.values())
        self._places = _places(modules, parameters)
        self.releases = released
        places = {i for i, name in enumerate(self.names) if name in tied}
        self._gradients = self._make_gradients(parameters, places)
        self._reduced = FlatGradients(parameters, places) if two_gradients else self._gradients
        self.held = dict.fromkeys(range(versions), parameters)
        self.newest = versions - 1
        self._stash: int | None = None
        self._reductions: list[dist.Work] = []
        self._watched: Collection[str] = ()
        self._norms: dict[str, Tensor] = {}
        self.optimizer = None
        stepped = self.stepped()
        if stepped:
            self.optimizer = optimizer_of(make_optimizer, stepped, groups)
        self.rates = None
        if self.optimizer is not None and schedule is not None:
            self.rates = LearningRates(self.optimizer, schedule, updates)
        self._gradients.receive(parameters)

    def _make_gradients(
        self, parameters: Sequence[nn.Parameter], tied: Collection[int]
    ) -> Gradients:
        if self.releases:
            return ReleasedGradients(parameters, tied)
        return FlatGradients(parameters, tied)

    def stepped(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer steps, by name: the newest version."""
        return self.parameters(self.newest)

    def leave_out(self, trained: Collection[str]) -> None:
        """Give no gradient to parameters that are not ``trained``: the optimizer skips them."""
        left_out = {i for i, name in enumerate(self.names) if name not in trained}
        for gradients in (self._gradients, self._reduced):
            gradients.leave_out(left_out)
        self._gradients.receive(self.held[self.newest])

    def watch(self, names: Collection[str]) -> None:
        """Keep the norms of the gradients of ``names`` that the next update takes."""
        self._watched = names

    def take_norms(self) -> dict[str, Tensor]:
        """The norms that were kept, in 64 bits, by name; empty if none were."""
        norms, self._norms = self._norms, {}
        return norms

    def use(self, version: int) -> None:
        """Compute on ``version`` from now on."""
        parameters = self.held[version]
        for module, key, i in self._places:
            module._parameters[key] = parameters[i]

    def stash(self, version: int) -> None:
        """Keep ``version``, the newest, next to the one that the next update makes."""
        self._stash = version

    def drop(self, version: int) -> None:
        """Drop a version of the weights that is no longer used."""
        del self.held[version]

    def reduce(self, group: dist.ProcessGroup | None, share: float = 1.0) -> None:
        """Begin to sum ``share`` of the gradients up over the stage's devices, if there are more.

        With ``two_gradients``, later gradients belong to the next update.
        """
        if self._reduced is not self._gradients:
            self._gradients, self._reduced = self._reduced, self._gradients
            for parameters in self.held.values():
                self._gradients.receive(parameters)
        for flat in self._reduced.parts if group is not None else ():
            if share != 1.0:
                flat.mul_(share)
            for bucket in flat.split(max(1, _BUCKET_BYTES // flat.itemsize)):
                self._reductions.append(dist.all_reduce(bucket, group=group, async_op=True))

    def reductions(self) -> list[dist.Work]:
        """The all-reduces that were begun for the next update."""
        return list(self._reductions)

    def wait(self) -> None:
        """Wait for the stage's all-reduces of gradients."""
        for work in self._reductions:
            work.wait()

    def squares(self) -> float:
        """The squared norm of the gradients that the next update takes, without tied ones."""
        norms = [torch.linalg.vector_norm(one, dtype=torch.float64) for one in self._reduced.parts]
        return float(sum(norm.square() for norm in norms))

    @property
    def gradient_bytes(self) -> int:
        """Bytes that an all-reduce sums up."""
        return sum(part.nbytes for part in self._gradients.parts)

    @property
    def state_bytes(self) -> int:
        """Bytes that the optimizer keeps, without single numbers such as those of steps."""
        kept = self.optimizer.state.values() if self.optimizer else ()
        every = (one for state in kept for one in state.values() if isinstance(one, Tensor))
        return sum(_bytes(one) for one in every if one.dim())

    def update(self, factor: float | Tensor | None = 1.0) -> None:
        """Step the optimizer, once the gradients are there, by ``factor`` times them.

        The new version is the newest; without a factor it has the weights of the one before.
        """
        self.wait()
        self._reductions.clear()
        if self._watched:
            self._norms = self._norms_of(self._watched)
            self._watched = ()
        if factor is not None and (isinstance(factor, Tensor) or factor != 1.0):
            self._reduced.scale(factor)
        if self._stash is None:
            parameters = self.held.pop(self.newest)
        else:
            parameters = self._copied()
            self._stash = None
        self.newest += 1
        self.held[self.newest] = parameters
        self._reduced.hand_over(parameters)
        if self.optimizer is not None and factor is not None:
            self.optimizer.step()
        if self.rates is not None:
            self.rates.updated()
        self._reduced.clear()
        self._gradients.receive(parameters)
        self.use(self.newest)

    def _norms_of(self, names: Collection[str]) -> dict[str, Tensor]:
        return {
            name: torch.linalg.vector_norm(one, dtype=torch.float64)
            for name, one in zip(self.names, self._reduced.views, strict=True)
            if name in names and one is not None
        }

    def _copied(self) -> list[nn.Parameter]:
        """The newest version once more, for the optimizer; microbatches in flight keep the old.

        New objects and not new data: autograd saves a parameter itself, and would compute on
        whatever data that has by the time of the backward.
        """
        old = self.held[self.newest]
        new = [twin(one, one.detach().clone()) for one in old]
        if self.optimizer is None:
            return new
        newer = dict(zip(map(id, old), new, strict=True))
        for group in self.optimizer.param_groups:
            group["params"] = [newer[id(one)] for one in group["params"]]
        for one in old:
            if one in self.optimizer.state:
                self.optimizer.state[newer[id(one)]] = self.optimizer.state.pop(one)
        return new

    def begin(self) -> None:
        """Number the versions from 0 again, for the next iteration."""
        self.held = dict(enumerate(self.held[version] for version in sorted(self.held)))
        self.newest = len(self.held) - 1

    def load(self, tensors: Mapping[str, Tensor], *, buffered: bool) -> None:
        """Load the optimizer's state, and the weights before the last update."""
        for name, one in self.stepped().items():
            prefix = f"optimizer.{name}."
            kept = {
                # A copy, as stages that share a parameter are given the same tensors; a number of
                # steps stays on the CPU, where the optimizer keeps it.
                key.removeprefix(prefix): self._share_of(name, value).to(
                    one.device if value.dim() else "cpu", copy=True
                )
                for key, value in tensors.items()
                if key.startswith(prefix)
            }
            if self.optimizer is not None:
                self.optimizer.state.pop(one, None)
                if kept:
                    self.optimizer.state[one] = kept
        if buffered:
            self.held[0] = [
                twin(one, tensors.get(f"previous.{name}", one.detach()).to(one, copy=True))
                for name, one in self.parameters(self.newest).items()
            ]
            self._gradients.receive(self.held[0])

    def _share_of(self, name: str, value: Tensor) -> Tensor:
        """The device's part of a tensor with the shape of parameter ``name``."""
        return value

    def fill(self, name: str, one: Tensor, value: Tensor) -> None:
        """Copy a value into ``one``, a parameter or buffer of the stage."""
        one.copy_(value)

    def values(self) -> dict[str, Tensor]:
        """The newest version, whole."""
        return {name: one.detach() for name, one in self.parameters(self.newest).items()}

    def states(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's whole state of every parameter."""
        kept = self.optimizer.state if self.optimizer is not None else {}
        return {name: _tensors(kept.get(one, {})) for name, one in self.stepped().items()}

    def gradient(self, name: str) -> Tensor | None:
        """The gradient that the next update takes of a parameter: a view."""
        return self._reduced.views[self.names.index(name)]

    def parameters(self, version: int) -> dict[str, nn.Parameter]:
        """The parameters in a version, by name."""
        return dict(zip(self.names, self.held[version], strict=True))


class TiedSums:
    """Sums over stages of the gradients of parameters that they share.

    They are made while the next gradients are summed up, for one update at a time: a rank gives a
    stage's gradient of an update after the stage's update before it.

    ``weights``: of this rank's stages. ``sharing``: per parameter, this rank's stages that have it.
    ``groups``: per parameter, the processes that have it, where there are several.
    """

    def __init__(
        self,
        weights: Mapping[int, Weights],
        sharing: Mapping[str, Collection[int]],
        groups: Mapping[str, dist.ProcessGroup],
    ) -> None:
        self._weights, self._sharing, self._groups = weights, sharing, groups
        self._given: dict[str, set[int]] = {name: set() for name in sharing}
        self._sums: dict[str, Tensor] = {}
        self._works: dict[str, dist.Work] = {}

    def give(self, stage: int) -> None:
        """A stage's gradients are complete; with the rank's last one the sum over ranks begins."""
        for name in self._names(stage):
            self._given[name].add(stage)
            if self._given[name] == set(self._sharing[name]):
                self._given[name].clear()
                self._begin(name)

    def take(self, stage: int) -> None:
        """Wait for the sums and put them in the place of a stage's own gradients."""
        for name in self._names(stage):
            work = self._works.pop(name, None)
            if work is not None:
                work.wait()
            gradient = self._weights[stage].gradient(name)
            if gradient is not None:
                gradient.copy_(self._sums[name])

    def _names(self, stage: int) -> list[str]:
        return [name for name, stages in self._sharing.items() if stage in stages]

    def _begin(self, name: str) -> None:
        own = [self._weights[s].gradient(name) for s in self._sharing[name]]
        found = [one for one in own if one is not None]
        if found:
            self._sums[name] = torch.stack(found).sum(0)
            if name in self._groups:
                group = self._groups[name]
                self._works[name] = dist.all_reduce(self._sums[name], group=group, async_op=True)


def _tensors(kept: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of an optimizer's state of a parameter, without entries not used yet."""
    return {key: torch.as_tensor(one) for key, one in kept.items() if one is not None}


def _bytes(one: Tensor) -> int:
    """Bytes in memory, also of a tensor that is made of others, such as one in 8 bits."""
    if not is_traceable_wrapper_subclass(one):
        return one.nbytes
    return sum(_bytes(getattr(one, name)) for name in one.__tensor_flatten__()[0])


def _places(
    modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter]
) -> list[tuple[nn.Module, str, int]]:
    """Every module and attribute that holds a parameter, and its position in ``parameters``."""
    position = {id(one): i for i, one in enumerate(parameters)}
    return [
        (module, key, position[id(one)])
        for module in {id(m): m for root in modules for m in root.modules()}.values()
        for key, one in module._parameters.items()
        if one is not None and id(one) in position
    ]
