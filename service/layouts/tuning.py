"""Tuning of layouts by trials: the requests, the answer, and who answers."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from time import monotonic, sleep
from typing import Annotated, Self

from pydantic import Field, model_validator

from stagewright.executor.measuring.trials import (
    DOCUMENT,
    EXIT,
    Running,
    changing,
    current,
    folders,
    launch,
    trials_in,
    write_trial,
)
from stagewright.formulations.forms.answers import Deadline, StopToken, is_stopped
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.parallelism.trials import (
    MARGIN,
    Candidate,
    Claim,
    Outcome,
    Trial,
    Tuning,
    save_tuning,
)
from stagewright.graphs.documents.documents import to_json
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import counted, format_seconds
from stagewright.service.answers import CARRIED, Answer, Finite
from stagewright.service.layouts.requests import LayoutRequest
from stagewright.service.layouts.searching import PROVED_BY, Searches, plan_class
from stagewright.service.options import Option
from stagewright.service.requests import Request
from stagewright.solvers.parallelism.refining import work_alike
from stagewright.solvers.parallelism.space import Space
from stagewright.solvers.parallelism.tree import compiled_walk
from stagewright.solvers.parallelism.tuner import Corrected, Standing, standing_of

BROKEN = 3
"""Layouts in a row whose runs fail alike: then it is the launch that fails."""
_SECONDS_A_LOOK = 0.05
"""Between two looks at running processes."""


class TuneRequest(Request):
    """Find the layouts that are worth a trial, and the first ones to try."""

    problem: TrainingProblem
    space: Space = Space()
    framework: Annotated[str, Option("--for", form="FRAMEWORK")] = "megatron"
    """What trains: megatron, megatron-bridge, nemo, torchtitan, deepspeed, accelerate, axolotl,
    trl, transformers, nnscaler."""
    candidates: int = Field(default=300, ge=1, le=2000)
    """The most layouts to correct; about all others there is a bound."""
    parallel: int = Field(default=1, ge=1, le=64)
    """Trials at the same time, on as many groups of machines."""
    time_limit: float = 60.0
    """Time limit of the search in seconds."""

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

    def said_class(self) -> str:
        """What the tuning's claims speak of."""
        found = plan_class(self.layouts())
        return f"{found}; of those whose ranks do the same work at other places the first"


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
    return _answer(tuning, standing_of(tuning, request.parallel))


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
        space=request.said_class(),
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
    return _answer(tuning, standing_of(tuning, request.parallel))


# --- A tuning in a folder ------------------------------------------------------------------------


def start_in(root: Path, request: TuneRequest, ended: StopToken | None = None) -> Tuning:
    """The tuning in a folder: the one that is there if it is of the same request, else a new one.

    Raises
    ------
    InputError
        If the folder has another tuning.
    """
    if (root / DOCUMENT).exists():
        tuning = current(root)
        mine = (to_json(request.problem), request.framework, request.said_class())
        if mine != (to_json(tuning.problem), tuning.framework, tuning.space):
            raise InputError(f"{root} has a tuning of another problem; name another folder")
        return tuning
    tuning = tuning_of(request, ended)
    if is_stopped(ended):
        raise InputError(f"{root}: stopped before the candidates were found; nothing is written")
    try:
        root.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"{root}: {error.strerror}") from None
    save_tuning(tuning, root / DOCUMENT)
    return tuning


def read_in(root: Path, trials: list[Trial], parallel: int = 1) -> TuneAnswer:
    """Add trials, and what the folders' logs tell, to the tuning in a folder; write the next."""
    with changing(root):
        before = current(root)
        tuning = before.with_trials([*trials_in(root, before.problem), *trials])
        standing = standing_of(tuning, parallel)
        answer = _answer(tuning, standing)
        assert answer.document is not None
        if to_json(answer.document) != to_json(before):
            save_tuning(answer.document, root / DOCUMENT)
    for one in () if answer.stop else standing.next:
        write_trial(root, tuning, one.layout, compiled_walk())
    return answer


def tune_by(
    root: Path,
    command: str,
    *,
    trials: int | None = None,
    parallel: int = 1,
    stop: StopToken | None = None,
    on_trial: Callable[[TuneAnswer, Trial], None] = lambda *_: None,
) -> TuneAnswer:
    """Run trials of the tuning in a folder until no other is worth one, or there are ``trials``.

    What runs at a ``stop`` is ended, and not counted; what the folder has of an earlier call that
    was ended counts.
    """
    loop = _Loop(root, command, parallel, on_trial)
    left = inf if trials is None else float(trials)
    try:
        return loop.run(left, stop)
    finally:
        for one in loop.running:
            one.end()


class _Loop:
    """The runs in flight, and the crashes in a row."""

    def __init__(
        self,
        root: Path,
        command: str,
        parallel: int,
        on_trial: Callable[[TuneAnswer, Trial], None],
    ) -> None:
        self.root, self.command, self.parallel, self.on_trial = root, command, parallel, on_trial
        self.running: list[Running] = []
        self.crashed: list[Trial] = []

    def run(self, left: float, stop: StopToken | None) -> TuneAnswer:
        answer = read_in(self.root, [])
        while not is_stopped(stop):
            # A run that another process started, and that still goes on, is waited for.
            going = not answer.stop and len(self.crashed) < BROKEN
            left -= self._start(int(min(left, self.parallel))) if going and left > 0 else 0
            if not self.running:
                break
            ended = [one for one in self.running if one.has_ended]
            self.running = [one for one in self.running if one not in ended]
            for one in ended:
                answer = self._read(one) or answer
            if not ended:
                sleep(_SECONDS_A_LOOK)
        if len(self.crashed) >= BROKEN:
            return self._broken()
        return read_in(self.root, [])

    def _start(self, most: int) -> int:
        """Start runs up to the number at the same time; return how many were started."""
        free = min(self.parallel - len(self.running), most)
        if free <= 0:
            return 0
        tuning = current(self.root)
        pending = [one.layout for one in self.running]
        chosen = standing_of(tuning, free, pending).next
        for one in chosen:
            folder = write_trial(self.root, tuning, one.layout, compiled_walk())
            self.running.append(launch(self.command, folder, one.layout))
        return len(chosen)

    def _read(self, run: Running) -> TuneAnswer | None:
        """What a run that has ended tells; None if it was ended from outside."""
        problem = current(self.root).problem
        place = run.folder.relative_to(self.root).as_posix()
        told = trials_in(self.root, problem)
        trial = next((one for one in told if one.place == place), None)
        if trial is None:
            return None
        answer = read_in(self.root, [])
        self.crashed = [*self.crashed, trial] if trial.outcome == "crashed" else []
        self.on_trial(answer, trial)
        return answer

    def _broken(self) -> TuneAnswer:
        """The answer without the crashes of a launch that does not work."""
        places = {one.place for one in self.crashed}
        with changing(self.root):
            tuning = current(self.root)
            kept = tuple(one for one in tuning.trials if one.place not in places)
            tuning = replace(tuning, trials=kept, claim=None)
            save_tuning(tuning, self.root / DOCUMENT)
        logs = [folder for folder in folders(self.root) if folder.name in places]
        why = (
            f"{BROKEN} layouts in a row have crashed: it is the launch that fails, not the "
            f"layouts; see {logs[-1]}; their crashes are not counted"
        )
        for folder in logs:
            (folder / EXIT).unlink(missing_ok=True)
        answer = _answer(tuning, standing_of(tuning, self.parallel))
        return answer.model_copy(update={"broken": why})


# --- The answer ----------------------------------------------------------------------------------


def _answer(tuning: Tuning, standing: Standing) -> TuneAnswer:
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


def _said(tuning: Tuning, standing: Standing, rates_runs: int, rates_wrong: int) -> str:
    """What the trials tell, in a sentence."""
    claim = standing.claim
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
        f"stop: no layout of the class is faster by more than {MARGIN:.0%} unless its prices are "
        f"off by more than {claim.off - 1:.1%}, which happened in {claim.wrong} of "
        f"{counted(claim.runs, 'run', 'runs')} here, each predicted by the others"
    )
    if rates_runs:
        said += (
            f"; of the {rates_runs} runs left out of {tuning.problem.rates.name}, {rates_wrong} "
            "are of models that are off by more on average"
        )
    return said
