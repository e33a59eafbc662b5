"""The weights of a stage whose replicas divide its state.

Collectives are torch's own on flat tensors; on gloo and NCCL both take one tensor as the whole and
its part, so that nothing is copied.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stagewright.executor.capture.twins import twin
from stagewright.executor.training.stages.division import Flat, Piece, PieceGradients, divided
from stagewright.executor.training.stages.learning_rates import (
    OPTIMIZER,
    Gradients,
    MakeOptimizer,
    ParameterGroups,
)
from stagewright.executor.training.stages.weights import Weights
from stagewright.graphs.documents.errors import InputError

WEIGHT = "weight"


class DividedWeights(Weights):
    """Weights of which this replica steps its part, among those of ``group``.

    They are brought to ``device``. What is asked whole of parts, all replicas bring to the one at
    place ``first`` of the group.
    """

    _keeps_weights = True

    def __init__(
        self,
        modules: Sequence[nn.Module],
        primary: Mapping[str, str],
        make_optimizer: MakeOptimizer,
        group: dist.ProcessGroup,
        first: int,
        device: torch.device,
        *,
        groups: ParameterGroups = MappingProxyType({}),
        **options: Any,
    ) -> None:
        self._modules, self._group, self._first, self._device = modules, group, first, device
        self._flats: list[Flat] = []
        self._whole: list[Tensor] = []  # the weights, one tensor for each flat
        self._parts: list[Tensor] = []  # this replica's parts of them
        self._pieces: dict[str, tuple[Piece, nn.Parameter, Tensor]] = {}  # with their gradients
        self._users: Counter[int] = Counter()  # of gathered weights

        others = {
            pattern: {**own, OPTIMIZER: _of_pieces(own[OPTIMIZER])} if OPTIMIZER in own else own
            for pattern, own in groups.items()
        }
        made = _of_pieces(make_optimizer)
        super().__init__(modules, primary, (), made, 1, groups=others, **options)
        move(modules, device)  # what is not divided

    def _divide(self, parameters: Sequence[nn.Parameter], units: Sequence[Collection[int]]) -> None:
        size, place = dist.get_world_size(self._group), dist.get_rank(self._group)
        self._flats = divided(parameters, units, size, place)

    def _filled(self, flat: Flat, parameters: Sequence[nn.Parameter]) -> Tensor:
        """A flat tensor of all numbers of a unit, which becomes the parameters' memory."""
        whole = flat.zeros(self._device)
        for i, view in flat.views(whole, parameters):
            view.copy_(parameters[i].detach())
            parameters[i].data = view
        return whole

    def _parts_of(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        return [flat.own(whole) for flat, whole in zip(self._flats, wholes, strict=True)]

    def update(self, factor: float | Tensor | None = 1.0) -> None:
        """Step the optimizer on this replica's part; whole weights are gathered from all parts."""
        super().update(factor)
        if self._keeps_weights:
            for part, whole in zip(self._parts, self._whole, strict=True):
                dist.all_gather_single(whole, part, group=self._group)

    def _gradients_of(
        self,
        parameters: Sequence[nn.Parameter],
        own: Sequence[Tensor],
        whole: Sequence[Tensor] = (),
    ) -> PieceGradients:
        """The pieces of the parts, with their gradients in ``own``.

        They are rows of numbers; only a parameter that is a number stays one, with its state.
        """
        for flat, weights, gradients in zip(self._flats, self._parts, own, strict=True):
            for piece in flat.pieces():
                of = parameters[piece.parameter]
                at = slice(piece.at, piece.at + piece.stop - piece.start) if of.dim() else piece.at
                name = self.names[piece.parameter]
                self._pieces[name] = piece, twin(of, weights[at]), gradients[at]
        views = [
            view
            for flat, one in zip(self._flats, whole, strict=False)
            for view in flat.views(one, parameters)
        ]
        return PieceGradients(own, [*self._pieces.values()], len(parameters), whole, views)

    def stepped(self) -> dict[str, nn.Parameter]:
        """The pieces of parameters in the part of this replica, by their names."""
        return {name: one for name, (_, one, _) in self._pieces.items()}

    def squares_by_name(self, names: Collection[str]) -> Tensor:
        """The squared norms of the gradients of this replica's pieces; 0 without one."""
        nothing = torch.zeros((), dtype=torch.float64, device=self._device)
        found = [
            torch.linalg.vector_norm(self._pieces[name][2], dtype=torch.float64).square()
            if name in self._pieces
            else nothing
            for name in names
        ]
        return torch.stack(found) if found else nothing

    def _norms_of(self, names: Collection[str]) -> dict[str, Tensor]:
        """Norms of whole gradients, summed over the pieces of all replicas."""
        own = [name for name in self.names if name in names]
        squares = self.squares_by_name(own)
        dist.all_reduce(squares, group=self._group)
        return dict(zip(own, squares.sqrt(), strict=True)) if own else {}

    def _share_of(self, name: str, value: Tensor) -> Tensor:
        piece = self._pieces[name][0]
        return value.flatten()[piece.start : piece.stop] if value.dim() else value

    def states(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state of every parameter: whole on the first replica, else empty.

        All replicas call it. It is made on the host, as the first device may have no room for it.
        """
        own = super().states()
        return {name: self._brought(name, own.get(name, {})) for name in self.names}

    def _brought(self, name: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors of a parameter's state, joined from the replicas' pieces."""
        copies = {key: one.detach().to("cpu", copy=True) for key, one in own.items()}
        size, place = dist.get_world_size(self._group), dist.get_rank(self._group)
        shares: list[dict[str, Tensor]] | None = [{}] * size if place == self._first else None
        dist.gather_object(copies, shares, group=self._group, group_dst=self._first)
        found = [share for share in shares or [] if share]
        if not found:
            return {}
        shape = self.held[self.newest][self.names.index(name)].shape
        return {
            key: torch.cat([share[key] for share in found]).view(shape) if one.dim() else one
            for key, one in found[0].items()
        }


class OptimizerShards(DividedWeights):
    """Whole weights and gradients, and the optimizer's state of this replica's part (ZeRO-1)."""

    def _make_gradients(
        self, parameters: Sequence[nn.Parameter], tied: Collection[int]
    ) -> Gradients:
        self._divide(parameters, [range(len(parameters))])
        self._whole = [self._filled(flat, parameters) for flat in self._flats]
        self._parts = self._parts_of(self._whole)
        self._sums = [flat.zeros(self._device) for flat in self._flats]
        return self._gradients_of(parameters, self._parts_of(self._sums), self._sums)

    def reduce(self, group: dist.ProcessGroup | None, share: float = 1.0) -> None:
        """Begin to sum gradients over the replicas; each replica gets the sums of its own part."""
        assert group is self._group
        assert share == 1.0
        for part, whole in zip(self._parts_of(self._sums), self._sums, strict=True):
            work = dist.reduce_scatter_single(part, whole, group=group, async_op=True)
            self._reductions.append(work)

    @property
    def gradient_bytes(self) -> int:
        """Bytes that a reduce-scatter sums up, without padding."""
        return sum(sum(flat.sizes) * flat.dtype.itemsize for flat in self._flats)


class GradientShards(DividedWeights):
    """Whole weights, a part of gradients and optimizer state (ZeRO-2), divided layer by layer."""

    def _make_gradients(
        self, parameters: Sequence[nn.Parameter], tied: Collection[int]
    ) -> Gradients:
        position = {id(one): i for i, one in enumerate(parameters)}
        layers = [
            {position[id(one)] for one in module.parameters() if id(one) in position}
            for module in self._modules
        ]
        self._divide(parameters, [sorted(one) for one in _first_uses(layers)])
        for flat in self._flats:
            self._whole.append(self._filled(flat, parameters))
            self._parts.append(self._part(flat, self._whole[-1]))
        self._sizes = [whole.nbytes for whole in self._whole]
        self._of_layer = [
            [i for i, flat in enumerate(self._flats) if not own.isdisjoint(flat.members)]
            for own in layers
        ]
        return self._gradients_of(parameters, [torch.zeros_like(one) for one in self._parts])

    def _part(self, flat: Flat, whole: Tensor) -> Tensor:
        return flat.own(whole)

    @property
    def static_bytes(self) -> int:
        """Bytes of weights and gradients, with those of a whole layer while its backward runs."""
        return sum(self._sizes) + sum(part.nbytes for part in self._parts) + self._largest()

    def _largest(self) -> int:
        return max((sum(self._sizes[i] for i in own) for own in self._of_layer), default=0)

    def in_memory(self, layer: int) -> AbstractContextManager[None]:
        """Have memory for the whole weights of a layer of the stage."""
        return nullcontext()

    def gathered(self, layer: int) -> AbstractContextManager[None]:
        """Have the whole weights of a layer of the stage; all replicas are at it."""
        return nullcontext()

    def are_among(self, tensors: Iterable[Tensor], layer: int) -> bool:
        """Whether some of the ``tensors`` are weights of a layer, or views of them."""
        own = {self._whole[i].untyped_storage()._cdata for i in self._of_layer[layer]}
        return any(one.untyped_storage()._cdata in own for one in tensors)

    @contextmanager
    def summed(self, layer: int, *, gathers: bool = True) -> Iterator[None]:
        """Have the whole gradients of a layer, which are then summed up over the replicas.

        Its weights too, if it ``gathers``.
        """
        parameters, wholes = self.held[self.newest], dict[int, Tensor]()
        with self.gathered(layer) if gathers else nullcontext():
            for i in self._of_layer[layer]:
                wholes[i] = self._flats[i].zeros(self._device)
                for at, view in self._flats[i].views(wholes[i], parameters):
                    parameters[at].grad = view
            yield
            self._gradients.receive(parameters)
        for i, whole in wholes.items():
            own = self._flats[i].own(whole)
            dist.reduce_scatter_single(own, whole, group=self._group)
            self._gradients.parts[i].add_(own)


class WeightShards(GradientShards):
    """A part of weights, gradients and optimizer state (ZeRO-3), divided layer by layer.

    The parameters of the modules are views of flat tensors whose memory is there only while a layer
    computes; what autograd has saved of them is so too.
    """

    _keeps_weights = False

    def _part(self, flat: Flat, whole: Tensor) -> Tensor:
        part = flat.own(whole).clone()
        whole.untyped_storage().resize_(0)
        return part

    @property
    def static_bytes(self) -> int:
        """Bytes of weights and gradients: parts, and a whole layer while its backward runs."""
        return 2 * (sum(part.nbytes for part in self._parts) + self._largest())

    @contextmanager
    def in_memory(self, layer: int, *, gathers: bool = False) -> Iterator[None]:
        """Have memory for the whole weights of a layer of the stage."""
        for i in self._of_layer[layer]:
            if not self._users[i]:
                self._whole[i].untyped_storage().resize_(self._sizes[i])
                if gathers:
                    dist.all_gather_single(self._whole[i], self._parts[i], group=self._group)
            self._users[i] += 1
        yield
        for i in self._of_layer[layer]:
            self._users[i] -= 1
            if not self._users[i]:
                self._whole[i].untyped_storage().resize_(0)

    def gathered(self, layer: int) -> AbstractContextManager[None]:
        """Have the whole weights of a layer of the stage; all replicas are at it."""
        return self.in_memory(layer, gathers=True)

    def fill(self, name: str, one: Tensor, value: Tensor) -> None:
        """Copy a value into a buffer, or its part into this replica's."""
        if name not in self.names:
            super().fill(name, one, value)
        elif name in self._pieces:
            self._pieces[name][1].copy_(self._share_of(name, value))

    def values(self) -> dict[str, Tensor]:
        """The newest version, whole on the first replica, else nothing; all replicas call this."""
        own = self.stepped()
        found = {
            name: self._brought(name, {WEIGHT: own[name]} if name in own else {})
            for name in self.names
        }
        return {name: one[WEIGHT] for name, one in found.items() if one}


def _of_pieces(make: MakeOptimizer) -> MakeOptimizer:
    """An optimizer of pieces of parameters."""

    def made(pieces: list[Any]) -> torch.optim.Optimizer:
        try:
            return make(pieces)
        except (TypeError, ValueError) as error:
            raise InputError(
                "replicas that divide their state need an optimizer that treats every number "
                f"alone, which sees parts of parameters as rows of numbers: {error}"
            ) from error

    return made


def _first_uses(layers: Sequence[set[int]]) -> Iterator[set[int]]:
    """For each layer, the parameters that no earlier layer has."""
    seen: set[int] = set()
    for own in layers:
        yield own - seen
        seen |= own


def move(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Bring parameters and buffers to ``device``, in place."""
    for module in modules:
        for one in (*module.parameters(), *module.buffers()):
            if one.device != device:
                one.data = one.data.to(device)
