"""The registry of solver backends, and the functions that call them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, overload

from stagewright.formulations.forms.answers import Answer, Limits, OnProgress, silent
from stagewright.formulations.forms.models import (
    Convex,
    Intervals,
    LinearProgram,
    by_disjunctions,
    starts_of,
)
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.errors import InputError

_DEFAULT_LIMITS = Limits()

Run = Callable[[Any, Limits, OnProgress], Answer[Any]]


class UnknownStatusError(RuntimeError):
    """A solver's status that its backend's table does not list."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to a solver: its ``name``, the type of form that it ``accepts``, how to ``run`` it.

    ``solver`` is who proves its bounds.
    """

    name: str
    solver: str
    accepts: type
    run: Run


def _late(module: str, function: str) -> Run:
    """``module.function``, imported at the first call: solver libraries are slow to import."""

    def run(form: Any, limits: Limits, on_progress: OnProgress) -> Answer[Any]:
        found: Run = getattr(import_module(f"stagewright.solvers.backends.{module}"), function)
        return found(form, limits, on_progress)

    return run


# The first backend that accepts a form is its default.
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("cp-sat", "CP-SAT", Intervals, _late("cpsat", "run")),
        Backend("highs", "HiGHS", LinearProgram, _late("highs", "run")),
        Backend("highs-ipm", "HiGHS", LinearProgram, _late("highs", "run_interior")),
        Backend("pulp-cbc", "CBC", LinearProgram, _late("pulp_milp", "run")),
        Backend("cvxpy", "HiGHS", LinearProgram, _late("cvxpy_linear", "run")),
        Backend("cvxpy-convex", "CVXPY", Convex, _late("cvxpy_linear", "run_convex")),
    )
}


@overload
def solve(
    form: Intervals,
    backend: str | None = None,
    limits: Limits = _DEFAULT_LIMITS,
    on_progress: OnProgress = silent,
) -> Answer[Ints]: ...
@overload
def solve(
    form: LinearProgram | Convex,
    backend: str | None = None,
    limits: Limits = _DEFAULT_LIMITS,
    on_progress: OnProgress = silent,
) -> Answer[Floats]: ...
def solve(
    form: Any,
    backend: str | None = None,
    limits: Limits = _DEFAULT_LIMITS,
    on_progress: OnProgress = silent,
) -> Answer[Any]:
    """Hand ``form`` to a backend and return its answer.

    ``backend``: its name; without one that of ``limits``, and without that the first that accepts
    the form.

    Raises
    ------
    InputError
        If there is no such backend, or it does not accept this kind of form.
    UnknownStatusError
        If the solver ends in a way that the backend does not know.
    """
    return _choose(form, backend or limits.backend).run(form, limits, on_progress)


def _choose(form: Any, name: str | None) -> Backend:
    fitting = [backend for backend in BACKENDS.values() if isinstance(form, backend.accepts)]
    kind = type(form).__name__
    if not fitting:
        raise InputError(f"no backend accepts {kind}")
    if name is None:
        return fitting[0]
    if name not in BACKENDS:
        raise InputError(f"unknown backend {name!r}; there are {', '.join(BACKENDS)}")
    if BACKENDS[name] not in fitting:
        raise InputError(
            f"backend {name!r} accepts {BACKENDS[name].accepts.__name__}, not {kind}; "
            f"use {' or '.join(backend.name for backend in fitting)}"
        )
    return BACKENDS[name]


ROUNDING = 1e-7  # of a bound


def scheduler(limits: Limits, choices: bool = False) -> Backend:
    """The backend of ``limits``, CP-SAT without one; for intervals with ``choices`` or without.

    Raises
    ------
    InputError
        If there is no such backend, or it takes neither intervals nor integers, or no choices.
    """
    name = limits.backend or "cp-sat"
    fitting = [
        backend.name
        for backend in BACKENDS.values()
        if backend.accepts in (Intervals, LinearProgram)
    ]
    if name not in fitting:
        known = "solves no schedules" if name in BACKENDS else "is unknown"
        raise InputError(f"backend {name!r} {known}; use {' or '.join(fitting)}")
    if choices and BACKENDS[name].accepts is not Intervals:
        raise InputError(f"backend {name!r} takes no choice of machines; use cp-sat")
    return BACKENDS[name]


def solve_intervals(
    form: Intervals, limits: Limits, on_progress: OnProgress = silent
) -> Answer[Ints]:
    """Answer ``form`` by the backend of ``limits``; the hint is only for CP-SAT.

    Raises InputError if the form has stores, spans or choices, and the backend is not CP-SAT.
    """
    backend = scheduler(limits, choices=bool(form.choices))
    if backend.accepts is Intervals:
        return solve(form, backend.name, limits, on_progress)
    if form.stores or form.spans is not None:
        raise InputError(f"backend {backend.name!r} takes neither memory nor spans; use cp-sat")
    found = solve(by_disjunctions(form), backend.name, limits, on_progress)
    return Answer(
        found.status,
        None if found.values is None else starts_of(found.values, len(form.durations)),
        found.objective,
        _whole(found.bound),
        found.seconds,
        found.backend,
        found.log,
        found.progress,
    )


def _whole(bound: float) -> float:
    """The bound rounded up to an integer, with a tolerance for the solver's rounding."""
    return math.ceil(bound - ROUNDING * max(1.0, abs(bound))) if math.isfinite(bound) else bound
