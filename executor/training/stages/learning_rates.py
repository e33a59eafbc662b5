"""The gradients of a stage, its optimizer by groups of parameters, learning rates by step."""

import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import cos, isfinite, pi
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from stagewright.graphs.documents.errors import InputError


class Gradients(Protocol):
    """The gradients that an update takes.

    Those of ``tied`` parameters are summed up over other devices than those of the others.
    """

    @property
    def parts(self) -> list[Tensor]:
        """Tensors that hold all gradients but those of tied parameters."""

    @property
    def views(self) -> list[Tensor | None]:
        """Every parameter's gradient, None for those that are left out."""

    def leave_out(self, left_out: Collection[int]) -> None:
        """Give no gradient to the parameters at these positions."""

    def scale(self, factor: float | Tensor) -> None:
        """Multiply all gradients by a factor."""

    def receive(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let backwards add to these gradients."""

    def hand_over(self, parameters: Sequence[nn.Parameter]) -> None:
        """Set the gradients as ``.grad`` of the parameters, for the optimizer."""

    def clear(self) -> None:
        """Forget their values, after an update."""


class FlatGradients:
    """Flat tensors, one for each type, with a view for every parameter: all-reduces copy nothing.

    They are kept over updates.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], tied: Collection[int]) -> None:
        views: dict[int, Tensor] = {}
        made: dict[bool, list[Tensor]] = {False: [], True: []}
        for is_tied, flat in made.items():
            chosen = [(i, one) for i, one in enumerate(parameters) if (i in tied) == is_tied]
            for dtype in dict.fromkeys(one.dtype for _, one in chosen):
                same = [(i, one) for i, one in chosen if one.dtype == dtype]
                flat.append(same[0][1].new_zeros(sum(one.numel() for _, one in same)))
                parts = flat[-1].split([one.numel() for _, one in same])
                for (i, one), part in zip(same, parts, strict=True):
                    views[i] = part.view_as(one)
        self.parts, self._tied = made[False], made[True]
        self.views: list[Tensor | None] = [views[i] for i in range(len(parameters))]

    def leave_out(self, left_out: Collection[int]) -> None:
        """Give no gradient to the parameters at these positions."""
        self.views = [None if i in left_out else view for i, view in enumerate(self.views)]

    def scale(self, factor: float | Tensor) -> None:
        """Multiply all gradients by a factor."""
        for one in chain(self.parts, self._tied):
            one.mul_(factor)

    def receive(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let backwards add to the views."""
        for one, view in zip(parameters, self.views, strict=True):
            one.grad = view

    def hand_over(self, parameters: Sequence[nn.Parameter]) -> None:
        """Set the views as ``.grad``; parameters left out have zeros, as autograd gives them."""
        self.receive(parameters)

    def clear(self) -> None:
        """Set all gradients to zero."""
        for one in chain(self.parts, self._tied):
            one.zero_()


@dataclass(slots=True)
class ReleasedGradients:
    """Gradients that autograd makes in the first backward, and that the update releases."""

    parameters: Sequence[nn.Parameter]
    tied: Collection[int]
    left_out: Collection[int] = ()

    @property
    def parts(self) -> list[Tensor]:
        """The gradients of parameters that are not tied."""
        return [one for i, one in enumerate(self.views) if one is not None and i not in self.tied]

    @property
    def views(self) -> list[Tensor | None]:
        """Every gradient; zeros for a parameter without a gradient from this update's backwards."""
        for i, one in enumerate(self.parameters):
            if i in self.left_out:
                one.grad = None
            elif one.grad is None:
                one.grad = torch.zeros_like(one)
        return [one.grad for one in self.parameters]

    def leave_out(self, left_out: Collection[int]) -> None:
        """Give no gradient to the parameters at these positions."""
        self.left_out = {*self.left_out, *left_out}

    def scale(self, factor: float | Tensor) -> None:
        """Multiply all gradients by a factor."""
        for one in self.views:
            if one is not None:
                one.mul_(factor)

    def receive(self, parameters: Sequence[nn.Parameter]) -> None:
        """Do nothing before backwards, which make the gradients."""

    def hand_over(self, parameters: Sequence[nn.Parameter]) -> None:
        """Complete the gradients that backwards made with zeros, as ``.grad`` of the parameters."""
        _ = self.views

    def clear(self) -> None:
        """Release all gradients."""
        for one in self.parameters:
            one.grad = None


ParameterGroups = Mapping[str, Mapping[str, Any]]
"""Arguments of the optimizer by regular expression.

A parameter belongs to the first expression that is found in its name (``re.search``); parameters
that match none have the optimizer's own arguments. One with several names has the first of them.
With the key `OPTIMIZER` a group has another optimizer, which is made of its parameters alone.
"""

# Of parameters, or where there are groups, of mappings as torch.optim takes them.
MakeOptimizer = Callable[[list[Any]], Optimizer]

OPTIMIZER = "optimizer"


def require_groups(groups: ParameterGroups, names: Sequence[str]) -> None:
    """Refuse groups without any of the trained parameters ``names`` of the whole model."""
    left = set(names)
    for pattern in groups:
        expression = _compiled(pattern)
        if not any(map(expression.search, names)):
            raise InputError(
                f"group {pattern!r} matches no trained parameter; the names are like "
                f"{', '.join(names[:3]) or 'none'}"
            )
        own = {name for name in left if expression.search(name)}
        if not own:
            raise InputError(
                f"group {pattern!r}: all parameters that it matches are in groups before it"
            )
        left -= own


class JoinedOptimizers(Optimizer):
    """Several optimizers that step together, each with its own groups of parameters."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        super().__init__([group for one in parts for group in one.param_groups], {})
        self.parts = parts
        for one in parts:
            one.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step each of them."""
        for one in self.parts:
            one.step()


def parts_of(optimizer: Optimizer) -> Sequence[Optimizer]:
    """The optimizers that step together, or the only one."""
    return optimizer.parts if isinstance(optimizer, JoinedOptimizers) else [optimizer]


def optimizer_of(
    make: MakeOptimizer, parameters: Mapping[str, nn.Parameter], groups: ParameterGroups
) -> Optimizer:
    """The optimizer of parameters by name; every stage has all groups, in the same order.

    Raises InputError if an optimizer does not take its arguments or parameters.
    """
    if not groups:
        return _made(make, [*parameters.values()], parameters)
    patterns = {pattern: _compiled(pattern) for pattern in groups}
    members: dict[str, dict[str, nn.Parameter]] = {pattern: {} for pattern in groups}
    rest: dict[str, nn.Parameter] = {}
    for name, one in parameters.items():
        found = (members[pattern] for pattern, own in patterns.items() if own.search(name))
        next(found, rest)[name] = one
    usual = {pattern: own for pattern, own in groups.items() if OPTIMIZER not in own}
    given = [_group({}, rest), *(_group(own, members[one]) for one, own in usual.items())]
    named = rest | {name: one for pattern in usual for name, one in members[pattern].items()}
    made = [_made(make, given, named)]
    for pattern, own in groups.items():
        if pattern not in usual:
            group = _group(own, members[pattern])
            made.append(_made(own[OPTIMIZER], [group], members[pattern]))
        _require_arguments(pattern, own, made[0] if pattern in usual else made[-1])
    return made[0] if len(made) == 1 else JoinedOptimizers(made)


def _group(arguments: Mapping[str, Any], members: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """A group as torch's optimizers take it."""
    own = {key: value for key, value in arguments.items() if key != OPTIMIZER}
    return {**own, "params": [*members.values()]}


def _made(
    make: MakeOptimizer, given: list[Any], parameters: Mapping[str, nn.Parameter]
) -> Optimizer:
    """An optimizer of ``given``; an InputError names the parameter that it does not take."""
    try:
        return make(given)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, InputError):
            raise
        for name, one in parameters.items():
            try:
                make([one])
            except (TypeError, ValueError, RuntimeError) as cause:
                raise InputError(
                    f"the optimizer does not take parameter {name!r}: {cause}; give such "
                    "parameters a group with another optimizer"
                ) from error
        raise


def _require_arguments(pattern: str, arguments: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Refuse arguments of a group that its optimizer would not read."""
    for key in arguments.keys() - optimizer.defaults.keys() - {OPTIMIZER}:
        raise InputError(
            f"group {pattern!r}: {type(optimizer).__name__} has no {key!r} for a group; "
            f"one of {', '.join(optimizer.defaults)}"
        )


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InputError(f"group {pattern!r} is no regular expression: {error}") from None


MakeSchedule = Callable[[Optimizer], LRScheduler]


@dataclass(frozen=True, slots=True)
class RateSchedule:
    """Learning rates that rise in a warm-up and fall until the last step.

    In step k, counted from 0, each learning rate is the optimizer's own times a factor: (k + 1) /
    (warmup + 1) while k < ``warmup``. Then the factor falls from 1 to ``min`` at step ``total``: on
    a line, on half a cosine (Loshchilov and Hutter, ICLR 2017, equation 5), or not at all. Raises
    InputError if ``warmup`` is not from 0 to ``total`` or ``min`` not from 0 to 1.
    """

    kind: str
    total: int
    warmup: int = 0
    min: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "linear", "cosine"):
            raise InputError(
                f"schedule: {self.kind!r} is not known; one of constant, linear, cosine"
            )
        if not 0 <= self.warmup <= self.total:
            raise InputError(
                f"schedule: warmup must be from 0 to the total of {self.total} steps, got "
                f"{self.warmup}"
            )
        if not (isfinite(self.min) and 0 <= self.min <= 1):
            raise InputError(
                f"schedule: min is a fraction of the learning rate, from 0 to 1, got {self.min:g}"
            )

    def __str__(self) -> str:
        return f"{self.kind}:total={self.total},warmup={self.warmup},min={self.min:g}"

    def factor(self, step: int) -> float:
        """The factor of learning rates in ``step``, counted from 0."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        done = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + cos(pi * done)) / 2}[self.kind]
        return self.min + (1 - self.min) * left

    def __call__(self, optimizer: Optimizer) -> LRScheduler:
        """Make torch's scheduler of ``optimizer``."""
        return LambdaLR(optimizer, lambda step: self.factor(step))


class LearningRates:
    """An optimizer's scheduler, which goes on with the last of each step's ``updates``.

    A step is a mini-batch under every plan, also where each of its microbatches is an update.
    Raises InputError if ``schedule`` makes something that needs more than the number of steps.
    """

    def __init__(self, optimizer: Optimizer, schedule: MakeSchedule, updates: int) -> None:
        self._optimizer, self._updates, self._done = optimizer, updates, 0
        self._before = [_options(group) for group in optimizer.param_groups]
        self._scheduler = schedule(optimizer)
        if isinstance(self._scheduler, ReduceLROnPlateau) or not isinstance(
            self._scheduler, LRScheduler
        ):
            raise InputError(
                "schedule must make a scheduler of torch.optim.lr_scheduler that goes by the "
                f"number of steps, got {type(self._scheduler).__name__}"
            )

    def updated(self) -> None:
        """Count an update of the optimizer."""
        self._done += 1
        if self._done == self._updates:
            self._done = 0
            with warnings.catch_warnings():  # also where the first update is left out
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler")
                self._scheduler.step()

    def state(self) -> dict[str, Any]:
        """The scheduler's state, and the optimizer's options that it has changed or added."""
        changed = [
            {key: value for key, value in _options(group).items() if before.get(key) != value}
            for group, before in zip(self._optimizer.param_groups, self._before, strict=True)
        ]
        return {"scheduler": self._scheduler.state_dict(), "options": changed}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue with ``state``.

        Raises InputError if it is of another number of groups of parameters.
        """
        groups, options = self._optimizer.param_groups, state["options"]
        if len(groups) != len(options):
            raise InputError(
                f"the checkpoint's learning rates are of {len(options)} groups of parameters, this "
                f"run has {len(groups)}; give the same groups"
            )
        self._scheduler.load_state_dict(state["scheduler"])
        for group, changed in zip(groups, options, strict=True):
            for key, value in changed.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group; tensors of one number as numbers."""
    return {
        key: value.item() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def require_not_captured(schedule: MakeSchedule | None, *, captured: bool) -> None:
    """Refuse a schedule where windows are replayed."""
    if captured and schedule is not None:
        raise InputError(
            "graph: a replayed window repeats its learning rates; leave the schedule or graph out"
        )
