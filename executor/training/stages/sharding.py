"""Which layers of a stage are divided among the devices of a tensor group, and how.

A module of the model says so itself by an attribute ``tp_plan``, the name that transformers uses:
a mapping from patterns of its own parts' names to

- ``colwise``: a linear layer by output features; ``colwise/3``: of three layers side by side in
  one, such as query, key and value, each;
- ``rowwise``: a linear layer by input features, with the sum over the group; an embedding by rows;
- ``colwise_rep``: by output features, which are joined for all devices;
- ``divide``: a number, such as a count of heads, that is smaller on each device.

All other parameters are whole on every device, which computes with them what the others do.
"""

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from stagewright.executor.capture.layers import CapturedLayer
from stagewright.executor.capture.twins import twin
from stagewright.executor.training.stages.parallel_layers import (
    ColumnLinear,
    JoinedColumnLinear,
    RowEmbedding,
    RowLinear,
    TensorGroup,
)
from stagewright.graphs.documents.errors import InputError

DIVIDE = "divide"
COLUMNS = re.compile(r"colwise(?:/([1-9]\d*))?")

# Of gradients that should be equal, by kernels that may add up in another order: a part that is
# missing changes more. What is small beside all of them may be rounding alone.
SAME, NOTHING = 1e-2, 1e-6


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor is divided: each of ``parts`` in dimension ``dim``, into equal pieces."""

    dim: int
    parts: int = 1

    def pieces(self, whole: Tensor, degree: int) -> list[Tensor]:
        """The piece of every device.

        Raises
        ------
        InputError
            If the parts do not divide.
        """
        size = whole.size(self.dim)
        if size % (self.parts * degree):
            of = "" if self.parts == 1 else f" in {self.parts} parts"
            raise InputError(f"{size} features{of} do not divide among {degree} devices")
        cut = [part.chunk(degree, self.dim) for part in whole.chunk(self.parts, self.dim)]
        return [torch.cat(own, self.dim) for own in zip(*cut, strict=True)]

    def joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """The inverse of :meth:`pieces`."""
        cut = [piece.chunk(self.parts, self.dim) for piece in pieces]
        return torch.cat([one for part in zip(*cut, strict=True) for one in part], self.dim)


@dataclass(frozen=True, slots=True)
class Style:
    """A way to divide a kind of module: the class of its parts, and the cuts of its parameters."""

    divided: type[nn.Module]
    kind: type[nn.Module]
    cuts: Mapping[str, Cut]
    sizes: tuple[str, ...] = ()  # the attributes that say how long the divided dimension is


def _styles(text: str) -> Iterator[Style]:
    """The ways that a style of a plan names, by the kinds of modules that they are for."""
    if columns := COLUMNS.fullmatch(text):
        cut = Cut(0, int(columns[1] or 1))
        yield Style(ColumnLinear, nn.Linear, {"weight": cut, "bias": cut}, ("out_features",))
    elif text == "colwise_rep":
        cuts = {"weight": Cut(0), "bias": Cut(0)}
        yield Style(JoinedColumnLinear, nn.Linear, cuts, ("out_features",))
    elif text == "rowwise":
        yield Style(RowLinear, nn.Linear, {"weight": Cut(1)}, ("in_features",))
        yield Style(RowEmbedding, nn.Embedding, {"weight": Cut(0)}, ("num_embeddings",))


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


def shard_stage(
    s: int,
    layers: Sequence[CapturedLayer],
    primary: Mapping[str, str],
    group: TensorGroup,
    *,
    quiet: bool,
) -> Sharding:
    """Divide the layers of stage ``s`` in place; this device keeps its own parts.

    Layers that stay whole are named in a warning, unless ``quiet``.

    Raises
    ------
    InputError
        If no layer says how it is divided, or one names what it has not or what does not divide.
    """
    names = {
        id(one): primary[name]
        for layer in layers
        for name, one in layer.module.named_parameters(remove_duplicate=False)
    }
    division = _Division(group, _uses(layers), names)
    divided = [layer for layer in layers if _divide(layer, division)]
    if not divided:
        raise InputError(
            f"stage {s} has tensor degree {group.degree}, but none of its layers "
            f"({', '.join(layer.name for layer in layers)}) says how it is divided: give a module "
            "in them a tp_plan, or plan tensor degree 1"
        )
    whole = [layer.name for layer in layers if layer not in divided and _has_parameters(layer)]
    if whole and not quiet:
        warnings.warn(
            f"stage {s}: each of {group.degree} devices computes all of the layers "
            f"{', '.join(whole)}, which have no tp_plan",
            stacklevel=2,
        )
    return Sharding(group, division.cuts)


def _has_parameters(layer: CapturedLayer) -> bool:
    return next(layer.module.parameters(), None) is not None


def _uses(layers: Sequence[CapturedLayer]) -> Counter[int]:
    """In how many modules each parameter is registered, by its id."""
    modules = {id(part): part for layer in layers for part in layer.module.modules()}
    return Counter(
        id(one) for part in modules.values() for one in part._parameters.values() if one is not None
    )


class _Division:
    """The parameters of a stage that have been divided so far: ``cuts`` by their names."""

    def __init__(self, group: TensorGroup, uses: Counter[int], names: Mapping[int, str]) -> None:
        self.group, self.uses, self.names = group, uses, names
        self.cuts: dict[str, Cut] = {}
        self.done: set[int] = set()  # modules, which several layers may have
        self.numbers: set[tuple[int, str]] = set()  # of modules, by their ids

    def divide(self, module: nn.Module, style: Style) -> None:
        """Keep this device's part of ``module``."""
        degree, place = self.group.degree, self.group.position
        for field, cut in style.cuts.items():
            if field not in module._parameters:
                raise InputError(f"its {field} is not a parameter, but computed from others")
            one = module._parameters[field]
            if one is None:
                continue
            if self.uses[id(one)] > 1:
                raise InputError("its parameter is used in several modules")
            own = cut.pieces(one.detach(), degree)[place].clone()
            module._parameters[field] = twin(one, own)
            self.cuts[self.names[id(one)]] = cut
        for size in style.sizes:
            setattr(module, size, getattr(module, size) // degree)
        module.__class__ = style.divided
        vars(module)["tensor_group"] = self.group


def _divide(layer: CapturedLayer, division: _Division) -> bool:
    """Divide what the plans of a layer's modules name; whether there is such a plan."""
    found = False
    for path, module in list(layer.module.named_modules()):
        plan = getattr(module, "tp_plan", None)
        if plan is None:
            continue
        found = True
        if id(module) in division.done:
            continue
        division.done.add(id(module))
        place = f"tp_plan of {type(module).__name__} {path!r}"
        if not isinstance(plan, Mapping):
            raise InputError(f"{place}: must map names to styles, got a {type(plan).__name__}")
        if wrong := [one for one in (*plan, *plan.values()) if not isinstance(one, str)]:
            raise InputError(f"{place}: must map names to styles, got {wrong[0]!r} among them")
        for pattern, style in plan.items():
            act = _divide_numbers if style == DIVIDE else _divide_modules
            act(module, pattern, style, division, place)
    return found


def _divide_modules(
    module: nn.Module, pattern: str, style: str, division: _Division, place: str
) -> None:
    ways = list(_styles(style))
    if not ways:
        raise InputError(
            f"{place}: {style!r} is not a style; there are colwise, colwise/N, colwise_rep, "
            f"rowwise and {DIVIDE}"
        )
    found = [(name, one) for name, one in module.named_modules() if fnmatchcase(name, pattern)]
    if not found:
        raise InputError(f"{place}: {pattern!r} names no module in it")
    for name, one in found:
        way = next((way for way in ways if type(one) is way.kind), None)
        if way is None or _is_special(one):
            kinds = " or ".join(way.kind.__name__ for way in ways)
            raise InputError(
                f"{place}: {name!r} is a {type(one).__name__}; {style} divides a plain {kinds}"
            )
        try:
            division.divide(one, way)
        except InputError as error:
            raise InputError(f"{place}: {name!r}: {error}") from None


def _is_special(module: nn.Module) -> bool:
    """Whether an embedding does more than look up rows."""
    names = ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")
    return any(getattr(module, name, None) not in (None, False) for name in names)


def _divide_numbers(
    module: nn.Module, pattern: str, style: str, division: _Division, place: str
) -> None:
    path, _, field = pattern.rpartition(".")
    owners = [one for name, one in module.named_modules() if fnmatchcase(name, path)]
    found = [one for one in owners if isinstance(vars(one).get(field), int)]
    if not found:
        raise InputError(f"{place}: {pattern!r} is not a whole number of a module in it")
    for one in found:
        if (id(one), field) in division.numbers:
            raise InputError(f"{place}: {pattern!r} names a number that is divided already")
        division.numbers.add((id(one), field))
        value, degree = getattr(one, field), division.group.degree
        if value % degree:
            raise InputError(
                f"{place}: {pattern!r} is {value}, which does not divide among {degree} devices"
            )
        setattr(one, field, value // degree)
