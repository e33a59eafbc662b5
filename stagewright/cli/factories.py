"""Functions of the user's code, given as ``PACKAGE:FACTORY``, and optimizers given as text."""

import ast
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    import torch

    from stagewright.executor.training.stages.learning_rates import ParameterGroups, RateSchedule
    from stagewright.executor.training.training import NamedOptimizer

EXAMPLE = "examples.models:transformer"
OF_TORCHAO = ("adam4bit", "adam8bit", "adamfp8", "adamw4bit", "adamw8bit", "adamwfp8")


def load_factory(text: str, option: str) -> Callable[..., Any]:
    """The function that ``text`` names, for example ``examples.models:transformer``.

    Packages are searched in the current folder first. Exceptions of the function become an
    InputError that names ``option``.

    Raises
    ------
    InputError
        If there is no such module or function.
    """
    package, _, path = text.partition(":")
    if not package or not path:
        raise InputError(f"{option} {text!r} names no PACKAGE:FUNCTION, for example {EXAMPLE}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    found = _find(package, path, option)

    @functools.wraps(found, updated=())
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return found(*args, **kwargs)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"{option}: {text!r} raised {_told(error)}") from error

    return guarded


def _find(package: str, path: str, option: str) -> Callable[..., Any]:
    found: Any = _import(package, option)
    for name in path.split("."):
        if not hasattr(found, name):
            raise InputError(f"{option}: {package!r} ({_place(package)}) has no {path!r}")
        found = getattr(found, name)
    if not callable(found):
        kind = type(found).__name__
        raise InputError(f"{option}: {path!r} is of type {kind}; name a function that returns it")
    function: Callable[..., Any] = found
    return function


def _import(package: str, option: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name and (package == error.name or package.startswith(f"{error.name}.")):
            raise InputError(
                f"{option}: there is no module {error.name!r} in the current folder or installed"
            ) from None
        raise InputError(f"{option}: importing {package!r} raised {_told(error)}") from error
    except Exception as error:  # the user's module may raise anything when it is imported
        raise InputError(f"{option}: importing {package!r} raised {_told(error)}") from error


def _place(package: str) -> str:
    return getattr(sys.modules[package], "__file__", None) or "a folder"


def _told(error: BaseException) -> str:
    """The error in one line, with the one that it was first raised from."""
    told = f"{type(error).__name__}: {' '.join(str(error).split())}"
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return told if cause is error else f"{told} (from {_told(cause)})"


def parse_optimizer(text: str) -> "NamedOptimizer":
    """Read ``adamw:lr=1e-3,betas=(0.9,0.95)``.

    Raises
    ------
    InputError
        If torch has no such optimizer, or the optimizer has no such argument or value.
    """
    name, _, listed = text.partition(":")
    arguments = _parse_arguments(
        f"--optimizer {text}", listed, "NAME:KEY=VALUE,KEY=VALUE", "adamw:lr=1e-3,betas=(0.9,0.95)"
    )
    return _named_optimizer(name, arguments, f"--optimizer {text}")


def _named_optimizer(name: str, arguments: Mapping[str, Any], place: str) -> "NamedOptimizer":
    from stagewright.executor.training.training import NamedOptimizer

    kind = _optimizer_kind(name, place)
    allowed = list(inspect.signature(kind).parameters)[1:]  # the first is the parameters
    for argument in arguments:
        if argument not in allowed:
            raise InputError(f"{place}: {name} has no {argument!r}; one of {', '.join(allowed)}")
    choice = NamedOptimizer(name, kind, arguments)
    _require_accepted(choice, place)
    return choice


def parse_groups(texts: Sequence[str] | None, optimizer: "NamedOptimizer") -> "ParameterGroups":
    """Read ``norm|bias:weight_decay=0`` and others: arguments of the optimizer by pattern.

    With ``optimizer=adamw`` they are those of another one.

    Raises
    ------
    InputError
        If one is not of this form, or the optimizer refuses its arguments.
    """
    from stagewright.executor.training.training import NamedOptimizer

    groups: dict[str, dict[str, Any]] = {}
    for text in texts or ():
        place = f"--parameter-group {text}"
        pattern, _, listed = text.rpartition(":")  # a pattern may contain colons
        arguments = _parse_arguments(
            place, listed, "REGEX:KEY=VALUE,KEY=VALUE", "norm|bias:weight_decay=0"
        )
        if not (pattern and arguments):
            raise InputError(f"{place}: write REGEX:KEY=VALUE, e.g. norm|bias:weight_decay=0")
        if pattern in groups:
            raise InputError(f"{place}: {pattern!r} is given twice; put its arguments together")
        if "optimizer" in arguments:
            other = arguments.pop("optimizer")
            groups[pattern] = {"optimizer": _named_optimizer(str(other), arguments, place)}
            continue
        both = {**optimizer.arguments, **arguments}
        _require_accepted(NamedOptimizer(optimizer.name, optimizer.kind, both), place)
        groups[pattern] = arguments
    return groups


def parse_schedule(text: str, steps: int) -> "RateSchedule":
    """Read ``cosine:warmup=100,min=0.1``; the total is ``steps`` unless it is given.

    Raises
    ------
    InputError
        If it is not of this form.
    """
    from stagewright.executor.training.stages.learning_rates import RateSchedule

    kind, _, listed = text.partition(":")
    place = f"--lr-schedule {text}"
    arguments = _parse_arguments(place, listed, "KIND:KEY=VALUE,KEY=VALUE", "cosine:warmup=100")
    for key, value in arguments.items():
        if key not in ("warmup", "min", "total"):
            raise InputError(f"{place}: there is no {key!r}; one of warmup, min, total")
        if not isinstance(value, (int, float) if key == "min" else int):
            raise InputError(f"{place}: {key} must be a number{' of steps' * (key != 'min')}")
    try:
        return RateSchedule(kind, **{"total": steps, **arguments})
    except InputError as error:
        raise InputError(f"--lr-{error}") from None


def _require_accepted(choice: "NamedOptimizer", place: str) -> None:
    """Refuse arguments that the optimizer's class does not take."""
    import torch

    try:
        choice([torch.nn.Parameter(torch.zeros(1, 1))])
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{place}: {error}") from None


def _parse_arguments(place: str, listed: str, form: str, example: str) -> dict[str, Any]:
    """The keyword arguments in ``listed``, with Python literals as values."""
    try:
        call = ast.parse(f"f({listed})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        return {
            str(one.arg): one.value.id
            if one.arg == "optimizer" and isinstance(one.value, ast.Name)
            else ast.literal_eval(one.value)
            for one in call.keywords
        }
    except (ValueError, SyntaxError):
        raise InputError(
            f"{place}: write {form} with values as in Python, e.g. {example}"
        ) from None


def _optimizer_kind(name: str, place: str) -> "type[torch.optim.Optimizer]":
    """An optimizer by its lower-case name: of torch, or of torchao with states in few bits.

    LBFGS evaluates the loss itself, so that it is none of them.
    """
    import torch

    module: Any = torch.optim
    if name in OF_TORCHAO:
        try:
            module = importlib.import_module("torchao.optim")
        except ImportError:
            raise InputError(f"{place}: {name} is of torchao: pip install torchao") from None
    kinds = {
        key.lower(): kind
        for key, kind in vars(module).items()
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and key not in ("Optimizer", "LBFGS")
    }
    if name not in kinds:
        known = ", ".join(sorted(kinds.keys() | {*OF_TORCHAO}))
        raise InputError(f"{place}: {name!r} is not known; one of {known}")
    return kinds[name]
