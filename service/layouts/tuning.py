"""Tuning of layouts by trials: the answer, and who answers."""

from collections.abc import Iterator
from dataclasses import replace
from time import monotonic
from typing import Annotated

from pydantic import Field

from stagewright.formulations.forms.answers import Deadline, StopToken
from stagewright.formulations.parallelism.trials import (
    MARGIN,
    Candidate,
    Claim,
    Outcome,
    Trial,
    Tuning,
)
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import counted, format_seconds
from stagewright.service.answers import CARRIED, Answer, Finite
from stagewright.service.layouts.requests import TuneRequest
from stagewright.service.layouts.searching import PROVED_BY, Searches, plan_class
from stagewright.service.requests import Request
from stagewright.solvers.parallelism.refining import work_alike
from stagewright.solvers.parallelism.tuner import Corrected, Standing, standing_of


class TuneReadRequest(Request):
    """Add trials to a tuning, and say what they tell."""

    tuning: Tuning
    trials: tuple[Trial, ...] = ()
    parallel: int = Field(default=1, ge=1, le=64)
    """Trials at the same time, on as many groups of machines."""


class TriedRow(Answer):
    """A layout that was tried, with what was predicted before any trial."""

    layout: str
    outcome: Outcome
    seconds: Finite
    predicted_seconds: Finite
    memory_bytes: Finite
    place: str


class OpenRow(Answer):
    """A layout that was not tried: its time as corrected by the trials, with the range of 9 of 10.

    ``gain`` is the part of the best time that it may save, at the low end of the range; ``fits``
    how likely it fits.
    """

    layout: str
    predicted_seconds: float
    seconds: float
    seconds_low: float
    seconds_high: float
    gain: Finite
    fits: float


class TuneAnswer(Answer):
    """How a tuning stands.

    No layout of the ``plan_class`` is faster than ``best`` by more than 2 %, unless its time is
    less than its corrected one by more than the factor ``off``. Of the ``runs`` trials, each
    corrected by the others, ``wrong`` were off by more; of the ``rates_runs`` that were left out of
    the rates' fit, ``rates_wrong`` are of models that are off by more on average. With ``stop``
    that is likely enough: by the model, the ``chance`` of such a layout is at most 1 %. ``open``
    are the layouts that may still win, ``next`` those to try now. ``left_out`` candidates do not
    fit, as runs have shown.
    """

    said: str
    stop: bool
    best: TriedRow | None
    tried: tuple[TriedRow, ...]
    open: tuple[OpenRow, ...]
    next: tuple[OpenRow, ...]
    chance: Finite
    off: Finite
    wrong: int
    runs: int
    rates: str
    rates_runs: int
    rates_wrong: int
    left_out: int
    candidates: int
    rest_seconds: Finite
    plan_class: str
    proved_by: str
    broken: str | None = None
    document: Annotated[Tuning | None, CARRIED] = None


def tune(request: TuneRequest, ended: StopToken | None = None) -> TuneAnswer:
    """The candidates, with a bound on all other layouts, and the first ones to try.

    Raises
    ------
    InputError
        If no layout of the space obeys the rules, or may fit.
    """
    tuning = tuning_of(request, ended)
    return answer_of(tuning, standing_of(tuning, request.parallel))


def said_class(request: TuneRequest) -> str:
    """What a tuning's claims speak of."""
    found = plan_class(request.layouts())
    return f"{found}; of those whose ranks do the same work at other places the first"


def tuning_of(request: TuneRequest, ended: StopToken | None = None) -> Tuning:
    """A tuning before its first trial."""
    asked, problem = request.layouts(), request.problem
    asked.require_problem()
    searches, stop = Searches(asked), Deadline(monotonic() + request.time_limit, ended)
    found = searches.search(
        problem,
        request.candidates,
        memory_bytes=problem.fabric.memory_bytes / problem.rates.memory.low,
        alike=work_alike,
        stop=stop,
    )
    # A layout of which it is not proved that none is between it and the one before is no candidate,
    # but for the first.
    best = found.best[: max(1, found.fastest)]
    if not best:
        raise InputError(f"no layout fits: {searches.nothing()}; train-plan says what is missing")
    is_all = len(best) == len(found.best) < request.candidates and not stop.is_set()
    rest = best[-1].seconds if found.fastest else found.bound
    return Tuning(
        problem=problem,
        framework=request.framework,
        space=said_class(request),
        proved_by=PROVED_BY,
        candidates=tuple(Candidate(one.layout, one.seconds, one.peak_bytes) for one in best),
        rest_seconds=None if is_all else rest,
    )


def read_trials(request: TuneReadRequest) -> TuneAnswer:
    """How a tuning stands after more trials.

    Raises
    ------
    InputError
        If trials of one layout contradict each other, or a layout breaks a rule of the problem.
    """
    tuning = request.tuning.with_trials(request.trials)
    return answer_of(tuning, standing_of(tuning, request.parallel))


# --- The answer ----------------------------------------------------------------------------------


def answer_of(tuning: Tuning, standing: Standing) -> TuneAnswer:
    """How a tuning stands, as users are told; the document has the claim."""
    claim, measured = standing.claim, tuning.measured
    best = min(measured.values(), default=None)
    tried = tuple(_tried(tuning, one) for one in tuning.trials)
    first = None if claim is None else str(claim.best)
    rates_runs, rates_wrong = _of_rates(tuning, claim)
    return TuneAnswer(
        said=_said(tuning, standing, rates_runs, rates_wrong),
        stop=claim is not None and claim.stop,
        best=next((one for one in tried if one.layout == first and one.seconds), None),
        tried=tried,
        open=tuple(_open_rows(standing.open, best)),
        next=tuple(_open_rows(standing.next, best)),
        chance=None if claim is None else claim.chance,
        off=None if claim is None else claim.off,
        wrong=0 if claim is None else claim.wrong,
        runs=0 if claim is None else claim.runs,
        rates=str(tuning.problem.rates),
        rates_runs=rates_runs,
        rates_wrong=rates_wrong,
        left_out=standing.left_out,
        candidates=len(tuning.candidates),
        rest_seconds=tuning.rest_seconds,
        plan_class=tuning.space,
        proved_by=tuning.proved_by,
        document=replace(tuning, claim=claim),
    )


def _tried(tuning: Tuning, trial: Trial) -> TriedRow:
    predicted = {one.layout: one.seconds for one in tuning.candidates}
    return TriedRow(
        layout=str(trial.layout),
        outcome=trial.outcome,
        seconds=trial.seconds,
        predicted_seconds=predicted.get(trial.layout),
        memory_bytes=trial.memory_bytes,
        place=trial.place,
    )


def _open_rows(some: tuple[Corrected, ...], best: float | None) -> Iterator[OpenRow]:
    for one in some:
        yield OpenRow(
            layout=str(one.layout),
            predicted_seconds=one.predicted,
            seconds=one.seconds,
            seconds_low=one.low,
            seconds_high=one.high,
            gain=None if best is None else 1 - one.low / best,
            fits=one.fit,
        )


def _of_rates(tuning: Tuning, claim: Claim | None) -> tuple[int, int]:
    """Runs that were left out of the rates' fit; and those of models that are off by more."""
    errors = tuning.problem.rates.errors
    runs = sum(one.runs for one in errors)
    if claim is None or claim.off is None:
        return runs, 0
    return runs, sum(one.runs for one in errors if one.error > claim.off - 1)


def _said_of_end(tuning: Tuning, claim: Claim | None) -> str:
    """What is said where no candidate is left, and layouts beyond them may be worth a trial."""
    said = "end: none of the candidates fits and runs, as far as the trials tell"
    if claim is not None:
        said = (
            "end: every candidate that fits was tried; one beyond them is faster by more than "
            f"{MARGIN:.0%} with a chance of at most {claim.chance:.1%}"
        )
    if tuning.rest_seconds is None:
        return f"{said}; the class has no other layout"
    return f"{said}; more --candidates than {len(tuning.candidates)} in the first command go on"


def _said(tuning: Tuning, standing: Standing, rates_runs: int, rates_wrong: int) -> str:
    """What the trials tell, in a sentence."""
    claim = standing.claim
    if not standing.next and (claim is None or not claim.stop):
        return _said_of_end(tuning, claim)
    if claim is None:
        return "nothing is measured yet"
    if claim.off is None:
        return "stop: every layout of the class that fits was tried"
    if not claim.stop:
        some = counted(len(standing.open), "layout", "layouts")
        said = f"go on: {some} may be faster than {format_seconds(claim.seconds)} by more than "
        likely = f"; how likely one is: at most {claim.chance:.0%}" if claim.chance < 1 else ""
        return f"{said}{MARGIN:.0%}{likely}"
    said = (
        f"stop: no layout of the class that fits is faster by more than {MARGIN:.0%} "
        f"unless its prices are off by more than {claim.off - 1:.1%}, which happened in "
        f"{claim.wrong} of {counted(claim.runs, 'run', 'runs')} here, each predicted by the others"
    )
    if rates_runs:
        said += (
            f"; of the {rates_runs} runs left out of {tuning.problem.rates.name}, {rates_wrong} "
            "are of models that are off by more on average"
        )
    return said
