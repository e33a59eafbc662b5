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
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from stagewright.executor.capture.layers import CapturedLayer, LayeredModel, TensorPlan, class_of
from stagewright.executor.capture.twins import twin
from stagewright.executor.training.sharding.parallel_layers import (
    DIVIDE,
    SAME,
    SUMMED,
    WHOLE,
    ColumnConv1D,
    ColumnLinear,
    DivisionWay,
    SummedGradient,
    TensorCut,
    TensorGroup,
    require_style,
    ways_of,
)
from stagewright.graphs.documents.errors import InputError, Notice, naming


@dataclass(slots=True)
class _Divided:
    """A parameter's own piece, and in how many modules it is so far."""

    own: nn.Parameter
    cut: TensorCut
    modules: int = 0


class DividedLayers:
    """The layers of a stage that are divided by plans; ``cuts`` by the names of parameters.

    ``every`` are the names of the model's modules, ``primary`` the first name of each parameter.
    What a plan names and the model has not is told by ``warn``, where that is its architecture's
    plan.
    """

    def __init__(
        self,
        layers: Sequence[CapturedLayer],
        primary: Mapping[str, str],
        every: Collection[str],
        group: TensorGroup,
        warn: Callable[[str], None],
    ) -> None:
        self._modules = {
            name: one
            for layer in layers
            for name, one in layer.module.named_modules(remove_duplicate=False)
            if name
        }
        self._names = {
            id(one): primary[name]
            for layer in layers
            for name, one in layer.module.named_parameters(remove_duplicate=False)
        }
        self._uses = _uses(layers)
        self._elsewhere = set(every) - self._modules.keys()
        self._group, self._warn = group, warn
        self._pieces: dict[int, _Divided] = {}
        self._numbers: set[tuple[int, str]] = set()  # of modules, by their ids
        self.cuts: dict[str, TensorCut] = {}

    def apply(self, plan: TensorPlan) -> None:
        """Divide the modules that ``plan`` names.

        Raises InputError if it names what it cannot divide.
        """
        with naming(plan):
            _require_rules(plan)
            for pattern, style in plan.rules.items():
                if style == DIVIDE:
                    self._divide_numbers(plan, pattern)
                else:
                    self._apply_style(plan, pattern, style)

    def require_whole(self) -> None:
        """Refuse parameters that are divided in some of their modules only."""
        for key, one in self._pieces.items():
            if one.modules < self._uses[key]:
                raise InputError(
                    f"parameter {self._names[key]!r} is used in several modules, of which a "
                    "tp_plan divides some and not all: let it divide all in the same way, or none"
                )

    def _found(self, plan: TensorPlan, pattern: str) -> list[tuple[str, nn.Module]]:
        """The modules of the stage that ``pattern`` names, each once."""
        found: dict[int, tuple[str, nn.Module]] = {}
        for name, one in self._modules.items():
            inner = plan.inner(name)
            if inner is not None and fnmatchcase(inner, pattern):
                found.setdefault(id(one), (name, one))
        return list(found.values())

    def _is_elsewhere(self, plan: TensorPlan, pattern: str) -> bool:
        every = (plan.inner(name) for name in self._elsewhere)
        return any(inner is not None and fnmatchcase(inner, pattern) for inner in every)

    def _apply_style(self, plan: TensorPlan, pattern: str, style: str) -> None:
        found = self._found(plan, pattern)
        if not found and not self._is_elsewhere(plan, pattern):
            if not plan.is_of_architecture:
                raise InputError(f"{pattern!r} names no module in it")
            self._warn(f"{plan}: {pattern!r} names no module in it")
        for name, one in found:
            try:
                if style == SUMMED:
                    self._sum_gradients(one)
                elif style != WHOLE:
                    self._divide(name, one, style)
            except InputError as error:
                raise InputError(f"{plan.inner(name)!r}{error}") from None

    def _divide(self, name: str, module: nn.Module, style: str) -> None:
        """Keep this device's part of ``module``."""
        ways = ways_of(style)
        way = next((one for one in ways if class_of(module) == one.kind), None)
        if way is None or _is_special(module):
            kinds = " or ".join(one.kind.rpartition(".")[2] for one in ways)
            raise InputError(f" is a {type(module).__name__}; {style} divides a plain {kinds}")
        self._require_whole_heads(name, module, way)
        for field, cut in way.cuts.items():
            if field not in module._parameters:
                raise InputError(f": its {field} is not a parameter, but computed from others")
            one = module._parameters[field]
            if one is not None:
                module._parameters[field] = self._piece(one, cut)
        setattr(module, way.size, getattr(module, way.size) // self._group.degree)
        module.__class__ = way.divided
        vars(module)["tensor_group"] = self._group

    def _require_whole_heads(self, name: str, module: nn.Module, way: DivisionWay) -> None:
        """Refuse to cut through a head of an attention that says how long its heads are."""
        parent = self._modules.get(name.rpartition(".")[0])
        length = vars(parent).get("head_dim") if parent is not None else None
        if way.divided not in (ColumnLinear, ColumnConv1D) or not isinstance(length, int):
            return
        heads, rest = divmod(getattr(module, way.size), way.parts * max(1, length))
        if not rest and heads % self._group.degree:
            raise InputError(
                f": {heads} heads of {length} features do not divide among {self._group.degree} "
                "devices"
            )

    def _piece(self, one: nn.Parameter, cut: TensorCut) -> nn.Parameter:
        """The own piece of a parameter, the same in all modules that use it."""
        found = self._pieces.get(id(one))
        if found is None:
            try:
                pieces = cut.pieces(one.detach(), self._group.degree)
            except InputError as error:
                raise InputError(f": {error}") from None
            own = twin(one, pieces[self._group.position].clone())
            found = self._pieces[id(one)] = _Divided(own, cut)
            self.cuts[self._names[id(one)]] = cut
        if found.cut != cut:
            raise InputError(
                ": its parameter is used in several modules, which are divided in different ways"
            )
        found.modules += 1
        return found.own

    def _sum_gradients(self, module: nn.Module) -> None:
        """Sum gradients of whole parameters over the devices, each of which computes a part.

        An example is the norm of every head, if each device has some of the heads.
        """
        for one in module._parameters.values():
            if one is not None and one.requires_grad:
                if self._uses[id(one)] > 1:
                    raise InputError(": its parameter is used in several modules")
                one.register_hook(SummedGradient(self._group, self._names[id(one)]))

    def _divide_numbers(self, plan: TensorPlan, pattern: str) -> None:
        path, _, field = pattern.rpartition(".")
        owners = [one for _, one in self._found(plan, path)]
        found = [one for one in owners if isinstance(vars(one).get(field), int)]
        if not found and not self._is_elsewhere(plan, path):
            raise InputError(f"{pattern!r} is not a whole number of a module in it")
        for one in found:
            if (id(one), field) in self._numbers:
                raise InputError(f"{pattern!r} names a number that is divided already")
            self._numbers.add((id(one), field))
            value, degree = getattr(one, field), self._group.degree
            if value % degree:
                raise InputError(
                    f"{pattern!r} is {value}, which does not divide among {degree} devices"
                )
            setattr(one, field, value // degree)


def _require_rules(plan: TensorPlan) -> None:
    if not isinstance(plan.rules, Mapping):
        raise InputError(f"must map names to styles, got a {type(plan.rules).__name__}")
    if wrong := [one for one in (*plan.rules, *plan.rules.values()) if not isinstance(one, str)]:
        raise InputError(f"must map names to styles, got {wrong[0]!r} among them")
    for pattern, style in plan.rules.items():
        require_style(pattern, style)


def _uses(layers: Sequence[CapturedLayer]) -> Counter[int]:
    """In how many modules each parameter is registered, by its id."""
    modules = {id(part): part for layer in layers for part in layer.module.modules()}
    return Counter(
        id(one) for part in modules.values() for one in part._parameters.values() if one is not None
    )


def _is_special(module: nn.Module) -> bool:
    """Whether an embedding does more than look up rows."""
    names = ("max_norm", "scale_grad_by_freq", "sparse")
    return any(getattr(module, name, None) not in (None, False) for name in names)


NOTHING = 1e-6  # what is so small beside all gradients may be rounding alone


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """The shards of a stage on one device of a ``group``: ``cuts`` by names of parameters."""

    group: TensorGroup
    cuts: Mapping[str, TensorCut]

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
        this device's gradients; all of the group call it. Raises InputError if those of the other
        devices differ: the copies would become different parameters.
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
    such as "stage 0". Raises InputError if no layer has a plan of division, or a plan names unknown
    or indivisible tensors.
    """

    def warn(message: str) -> None:
        if not quiet:
            warnings.warn(message, Notice, stacklevel=2)

    division = DividedLayers(layers, primary, _names(model), group, warn)
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
