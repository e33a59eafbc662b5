"""Learning rates that change from step to step, by the schedulers of torch.optim."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import cos, isfinite, pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from stagewright.graphs.documents.errors import InputError

ParameterGroups = Mapping[str, Mapping[str, Any]]
"""Arguments of the optimizer by regular expression.

A parameter belongs to the first expression that is found in its name (``re.search``); parameters
that match none have the optimizer's own arguments. One with several names has the first of them.
"""


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


def grouped(
    names: Sequence[str], parameters: Sequence[nn.Parameter], groups: ParameterGroups
) -> list[Any]:
    """An optimizer's argument: the parameters, or a mapping for each group and for the rest.

    Every stage has all groups, in the same order, some of them without parameters.
    """
    if not groups:
        return list(parameters)
    patterns = [_compiled(pattern) for pattern in groups]
    made: list[dict[str, Any]] = [{"params": []}]
    made += [{**arguments, "params": []} for arguments in groups.values()]
    for name, one in zip(names, parameters, strict=True):
        found = (i for i, pattern in enumerate(patterns, 1) if pattern.search(name))
        made[next(found, 0)]["params"].append(one)
    return made


def require_arguments(optimizer: torch.optim.Optimizer, groups: ParameterGroups) -> None:
    """Refuse arguments that the optimizer would not read."""
    for pattern, arguments in groups.items():
        for key in arguments:
            if key not in optimizer.defaults:
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
