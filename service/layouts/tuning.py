"""Tuning of layouts by trials: the answer, and who answers."""

from collections.abc import Iterator
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from stagewright.formulations.forms.answers import Deadline, Status, StopToken
from stagewright.formulations.parallelism.layout import parse_layout
from stagewright.formulations.parallelism.training import TrainingProblem
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
from stagewright.service.answers import (
    CARRIED,
    Answer,
    AnswerTable,
    Finite,
    NotebookAnswer,
    ShownAnswer,
)
from stagewright.service.layouts.requests import LayoutRequest, frameworks
from stagewright.service.options import Option
from stagewright.service.requests import Request
from stagewright.solvers.parallelism.space import Space

if TYPE_CHECKING:
    from stagewright.solvers.parallelism.tuner import Corrected, Standing

TOLD = "trials"
"""Where a trial is written that is but a line of a request."""


class TuneSearch(Request):
    """What is tried, of any problem."""

    framework: Annotated[
        str,
        Option("--for", form="FRAMEWORK"),
        Field(json_schema_extra=lambda schema: schema.update(examples=frameworks()[:-1])),
    ] = "megatron"
    """What trains: megatron, megatron-bridge, nemo, torchtitan, deepspeed, accelerate, axolotl,
    trl, transformers, nnscaler."""
    candidates: int = Field(default=300, ge=1, le=2000)
    """The most layouts to correct; about all others there is a bound."""
    parallel: int = Field(default=1, ge=1, le=64)
    """Trials at the same time, on as many groups of machines."""
    time_limit: float = 60.0
    """Time limit of the search in seconds."""


class TuneRequest(TuneSearch):
    """Find the layouts that are worth a trial, and the first ones to try."""

    problem: TrainingProblem
    space: Space = Space()

    @model_validator(mode="after")
    def _require_launches(self) -> Self:
        if self.framework == "plan":
            raise InputError(
                "framework plan has no launch files to try: use stagewright run and compare"
            )
        self.layouts()
        return self

    def layouts(self) -> LayoutRequest:
        """The search for the candidates."""
        return LayoutRequest.of(
            problem=self.problem,
            space=replace(self.space, uneven=False),
            framework=self.framework,
            time_limit=self.time_limit,
            by_stage=False,
        )


def _trial(given: Any) -> Any:
    """The trial of a line such as "p2 t4 d1 b1: 9.1"; anything else as it is."""
    if not isinstance(given, str):
        return given
    layout, colon, what = (part.strip() for part in given.rpartition(":"))
    failed: Outcome | None = next((one for one in get_args(Outcome)[1:] if one == what), None)
    try:
        seconds = None if failed and colon else float(what.removesuffix("s") if colon else "")
    except ValueError:
        raise InputError(
            f"{given!r} is no trial: give a layout, a colon, and its seconds, `out of memory` or "
            '`crashed`, for example "p2 t4 d1 b1: 9.1"'
        ) from None
    return Trial(parse_layout(layout), failed or "measured", TOLD, seconds)


class TuneReadRequest(Request):
    """Add trials to a tuning, and say what they tell."""

    tuning: Tuning
    """The tuning.json of an earlier answer, or of the folder of ``stagewright tune``."""
    trials: tuple[Annotated[Trial, BeforeValidator(_trial, str | Trial)], ...] = ()
    """A line for each run, its layout, a colon, and its seconds, out of memory or crashed:
    p2 t4 d1 b1: 9.1. Of a layout the last line counts."""
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


class TuneAnswer(NotebookAnswer):
    """How a tuning stands.

    No layout of the ``plan_class`` is faster than ``best`` by more than 2 %, unless its time is
    less than its corrected one by more than the factor ``off``. Of the ``runs`` trials, each
    corrected by the others, ``wrong`` were off by more; of the ``rates_runs`` that were left out of
    the rates' fit, ``rates_wrong`` are of models that are off by more on average. With ``stop``
    that is likely enough: by the model, the ``chance`` of such a layout is at most 1 %. ``open``
    are the layouts that may still win, ``next`` those to try now. ``left_out`` candidates do not
    fit, as runs have shown. ``status`` is "feasible" if the search for candidates was cut short.
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
    status: Status = Status.OPTIMAL
    document: Annotated[Tuning | None, CARRIED] = None

    def shown(self) -> ShownAnswer:
        """What a notebook shows; a frame has what was tried, what is next, and what is open."""
        from stagewright.service.layouts.told.measured import standing_lines, tuned_tables

        rows = [{"state": one.outcome, **one.model_dump(exclude={"outcome"})} for one in self.tried]
        upcoming = {one.layout for one in self.next}
        rows += [
            {"state": "next" if one.layout in upcoming else "open", **one.model_dump()}
            for one in self.open
        ]
        table = next(tuned_tables(self), AnswerTable("", (), ()))
        return ShownAnswer([*standing_lines(self)], table, rows)


def require_problem(request: TuneRequest) -> None:
    """Refuse a model or a precision of which the framework can express no layout."""
    request.layouts().require_problem()


def tune(request: TuneRequest, stop: StopToken | None = None) -> TuneAnswer:
    """The candidates, with a bound on all other layouts, and the first ones to try.

    Raises
    ------
    InputError
        If no layout of the space obeys the rules, or may fit.
    """
    from stagewright.solvers.parallelism.tuner import standing_of

    tuning = tuning_of(request, stop)
    answer = answer_of(tuning, standing_of(tuning, request.parallel))
    is_cut = len(tuning.candidates) < request.candidates and tuning.rest_seconds is not None
    return answer.model_copy(update={"status": Status.FEASIBLE}) if is_cut else answer


def said_class(request: TuneRequest) -> str:
    """What a tuning's claims speak of."""
    from stagewright.service.layouts.searching import plan_class

    found = plan_class(request.layouts())
    return f"{found}; of those whose ranks do the same work at other places the first"


def tuning_of(request: TuneRequest, ended: StopToken | None = None) -> Tuning:
    """A tuning before its first trial."""
    from stagewright.service.layouts.searching import PROVED_BY, Searches
    from stagewright.solvers.parallelism.refining import work_alike

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
    if not best and stop.is_set():
        raise InputError("the search was ended before it found a layout that may fit")
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


def with_trials(request: TuneReadRequest) -> Tuning:
    """The tuning with the trials; InputError if they contradict each other, or break a rule."""
    return request.tuning.with_trials(request.trials)


def read_trials(request: TuneReadRequest, stop: StopToken | None = None) -> TuneAnswer:
    """How a tuning stands after more trials.

    Raises
    ------
    InputError
        If trials of one layout contradict each other, or a layout breaks a rule of the problem.
    """
    from stagewright.solvers.parallelism.tuner import standing_of

    tuning = with_trials(request)
    return answer_of(tuning, standing_of(tuning, request.parallel))


# --- The answer ----------------------------------------------------------------------------------


def answer_of(tuning: Tuning, standing: "Standing") -> TuneAnswer:
    """How a tuning stands, as users are told; the document has the claim."""
    claim, measured = standing.claim, tuning.measured
    best = min(measured.values(), default=None)
    tried = tuple(_tried(tuning, one) for one in tuning.trials)
    first, stop = None if claim is None else str(claim.best), claim is not None and claim.stop
    rates_runs, rates_wrong = _of_rates(tuning, claim)
    return TuneAnswer(
        said=_said(tuning, standing, rates_runs, rates_wrong),
        stop=stop,
        best=next((one for one in tried if one.layout == first and one.seconds), None),
        tried=tried,
        open=tuple(_open_rows(standing.open, best)),
        next=() if stop else tuple(_open_rows(standing.next, best)),
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


def _open_rows(some: "tuple[Corrected, ...]", best: float | None) -> Iterator[OpenRow]:
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


def _said(tuning: Tuning, standing: "Standing", rates_runs: int, rates_wrong: int) -> str:
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
            f"; before any correction the rates are off by more, on average, for the models of "
            f"{rates_wrong} of the {rates_runs} runs left out of their fit"
        )
    return said
