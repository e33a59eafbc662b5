"""A tuning in a folder: begun, read, and carried on by runs until no other is worth one."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from time import sleep

from stagewright.executor.measuring.trials import (
    DOCUMENT,
    EXIT,
    Running,
    changing,
    current,
    folders,
    launch,
    trial_in,
    trials_in,
    write_trial,
)
from stagewright.formulations.forms.answers import StopToken, is_stopped
from stagewright.formulations.parallelism.trials import Trial, Tuning, save_tuning
from stagewright.graphs.documents.documents import to_json
from stagewright.graphs.documents.errors import InputError
from stagewright.service.layouts.tuning import (
    TuneAnswer,
    TuneRequest,
    answer_of,
    said_class,
    tuning_of,
)
from stagewright.solvers.parallelism.tree import compiled_walk
from stagewright.solvers.parallelism.tuner import standing_of

BROKEN = 3
"""Layouts in a row whose runs fail alike: then it is the launch that fails."""
_NOT_FOUND = ("126", "127")
"""Exit codes of the shell for a command that it cannot start."""
_SECONDS_A_LOOK = 0.05
"""Between two looks at running processes."""


def start_in(root: Path, request: TuneRequest, ended: StopToken | None = None) -> Tuning:
    """The tuning in a folder: the one that is there if it is of the same request, else a new one.

    Raises
    ------
    InputError
        If the folder has another tuning.
    """
    if (root / DOCUMENT).exists():
        tuning = current(root)
        mine = (to_json(request.problem), request.framework, said_class(request))
        if mine != (to_json(tuning.problem), tuning.framework, tuning.space):
            raise InputError(f"{root} has a tuning of another problem; name another folder")
        if tuning.rest_seconds is None or request.candidates <= len(tuning.candidates):
            return tuning
        return _with_more(root, request, ended)
    tuning = tuning_of(request, ended)
    if is_stopped(ended):
        raise InputError(f"{root}: stopped before the candidates were found; nothing is written")
    try:
        root.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"{root}: {error.strerror}") from None
    save_tuning(tuning, root / DOCUMENT)
    return tuning


def _with_more(root: Path, request: TuneRequest, ended: StopToken | None) -> Tuning:
    """The tuning in a folder with as many candidates as are asked now, and its trials."""
    found = tuning_of(request, ended)
    with changing(root):
        tuning = current(root)
        if is_stopped(ended) or len(found.candidates) <= len(tuning.candidates):
            return tuning
        tuning = found.with_trials(tuning.trials)
        save_tuning(tuning, root / DOCUMENT)
    return tuning


def read_in(root: Path, trials: list[Trial], parallel: int = 1) -> TuneAnswer:
    """Add trials, and what the folders' logs tell, to the tuning in a folder; write the next."""
    with changing(root):
        before = current(root)
        tuning = before.with_trials([*trials_in(root, before.problem), *trials])
        standing = standing_of(tuning, parallel)
        answer = answer_of(tuning, standing)
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
        known = current(self.root).trials
        answer = read_in(self.root, [])
        assert answer.document is not None
        for trial in answer.document.trials:
            if trial not in known:  # of an earlier call that was ended
                self.on_trial(answer, trial)
        while not is_stopped(stop):
            # A run that another process started, and that still goes on, is waited for.
            going = not answer.stop and not self._is_broken
            left -= self._start(int(min(left, self.parallel))) if going and left > 0 else 0
            if not self.running:
                break
            ended = [one for one in self.running if one.has_ended]
            self.running = [one for one in self.running if one not in ended]
            for one in ended:
                answer = self._read(one) or answer
            if not ended:
                sleep(_SECONDS_A_LOOK)
        if self._is_broken:
            return self._broken()
        return read_in(self.root, [])

    @property
    def _is_broken(self) -> bool:
        """Whether it is the launch that fails: its command was not found, or all runs crash."""
        return len(self.crashed) >= BROKEN or any(self._not_found(one) for one in self.crashed)

    def _not_found(self, trial: Trial) -> bool:
        end = self.root / trial.place / EXIT
        return end.exists() and end.read_text(encoding="utf-8").strip() in _NOT_FOUND

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
        trial = trial_in(self.root, current(self.root).problem, run.folder, run.layout)
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
        what = "the command was not found"
        if len(self.crashed) >= BROKEN:
            what = f"{BROKEN} layouts in a row have crashed"
        why = (
            f"{what}: it is the launch that fails, not the layouts; see {logs[-1]}; their "
            "crashes are not counted"
        )
        for folder in logs:
            (folder / EXIT).unlink(missing_ok=True)
        answer = answer_of(tuning, standing_of(tuning, self.parallel))
        return answer.model_copy(update={"broken": why})
