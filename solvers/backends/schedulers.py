"""``Intervals`` on every backend: directly, or as a mixed-integer program."""

import math

from stagewright.formulations.forms.answers import Answer, Limits, OnProgress, silent
from stagewright.formulations.forms.disjunctive import by_disjunctions, starts_of
from stagewright.formulations.forms.models import Intervals, LinearProgram
from stagewright.graphs.documents.arrays import Ints
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.backends.backend import BACKENDS, Backend, solve

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
