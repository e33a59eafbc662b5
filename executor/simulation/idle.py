"""Idle time of the devices of a finite plan, by what they wait for."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from stagewright.executor.simulation.run import Run
from stagewright.formulations.plans.actions import REDUCE, SEND_B, SEND_F, F
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE


class IdleCause(StrEnum):
    """Why a device is idle; the values complete "the device is idle ..."."""

    FILL = "until its first computation (the pipeline fills)"
    DRAIN = "after its last computation (the pipeline drains)"
    STAGES = "waiting for computations of other devices"
    TRANSFERS = "waiting for transfers"
    REDUCE = "waiting for all-reduces"
    MEMORY = "although a forward is ready, which would hold more activations"
    PLAN = "although the next action could start"
    PERIOD = "within every period"
    PAUSE = "in the pause of every iteration, in which weights are updated"


@dataclass(frozen=True, slots=True)
class Idle:
    """An interval in which a device computes nothing."""

    device: str
    cause: IdleCause
    start_seconds: float
    finish_seconds: float

    @property
    def seconds(self) -> float:
        """Length of the interval."""
        return self.finish_seconds - self.start_seconds


def idle_spans(run: Run, before: list[list[int]], end: float) -> Iterator[Idle]:
    """The idle intervals of every device between 0 and ``end``, disjoint, in order of time.

    An interval before an action is divided: from when all that the action waits for has ended, the
    plan waits; while the transfer or all-reduce that ended last runs, the device waits for it;
    before that, for other devices. From when a later forward of the device could start, its order
    keeps the forward back, as the microbatches in flight fill memory.
    """
    reductions = _reductions(run)
    ready = {} if run.plan.is_backward_first else _ready_forwards(run)
    tolerance = RELATIVE_TOLERANCE * end
    for device, entries in run.by_device().items():
        parts = _of_device(run, before, entries, reductions[device], ready, end)
        for cause, start, finish in parts:
            if finish - start > tolerance:
                yield Idle(device, cause, start, finish)


_Part = tuple[IdleCause, float, float]


def _of_device(
    run: Run,
    before: list[list[int]],
    entries: list[int],
    reductions: Sequence[tuple[float, float]],
    ready: dict[int, float],
    end: float,
) -> Iterator[_Part]:
    actions = run.plan.actions
    ordered = sorted(entries, key=lambda i: (actions[i].start_seconds, actions[i].finish_seconds))
    forwards = _next_forwards(run, ordered, ready)
    until = 0.0
    for place, i in enumerate(ordered):
        start = actions[i].start_seconds
        if start > until:
            if place == 0:
                yield IdleCause.FILL, until, start
            else:
                yield from _gap(run, before[i], until, start, forwards[place])
        until = max(until, actions[i].finish_seconds)
    yield from _after_all(until, end, reductions)


def _gap(run: Run, before: list[int], start: float, finish: float, ready: float) -> Iterator[_Part]:
    """The parts of an interval that ends when an action starts; ``ready`` is a later forward."""
    actions = run.plan.actions
    last = max(before, key=lambda i: actions[i].finish_seconds, default=None)
    held = min(finish, max(start, ready))
    if last is None:
        yield IdleCause.PLAN, start, finish
        return
    ended = min(finish, max(start, actions[last].finish_seconds))
    began = min(ended, max(start, actions[last].start_seconds))
    kind = run.actions[last].kind
    cause = {
        SEND_F: IdleCause.TRANSFERS,
        SEND_B: IdleCause.TRANSFERS,
        REDUCE: IdleCause.REDUCE,
    }.get(kind)
    if cause is None:
        began = ended
    # What comes after ``held`` is kept back for memory, whatever the next action waits for.
    for what, a, b in (
        (IdleCause.STAGES, start, began),
        (cause or IdleCause.STAGES, began, ended),
        (IdleCause.PLAN, ended, finish),
    ):
        yield what, a, min(b, held)
    yield IdleCause.MEMORY, held, finish


def _after_all(
    start: float, end: float, reductions: Sequence[tuple[float, float]]
) -> Iterator[_Part]:
    """The parts of the time after the last computation: the device's all-reduces, and the rest."""
    at = start
    for begin, finish in reductions:
        if finish > at:
            yield IdleCause.DRAIN, at, max(at, begin)
            yield IdleCause.REDUCE, max(at, begin), finish
            at = finish
    yield IdleCause.DRAIN, at, end


def _reductions(run: Run) -> defaultdict[str, list[tuple[float, float]]]:
    """Per device its all-reduces in time."""
    found = defaultdict[str, list[tuple[float, float]]](list)
    for i, action in enumerate(run.actions):
        if action.kind is REDUCE:
            entry = run.plan.actions[i]
            for name in entry.sources or ():
                found[name].append((entry.start_seconds, entry.finish_seconds))
    for spans in found.values():
        spans.sort()
    return found


def _ready_forwards(run: Run) -> dict[int, float]:
    """When the input of every forward has arrived."""
    found = dict[int, float]()
    for s, row in enumerate(run.entries[F]):
        for m, forwards in enumerate(row):
            needed = (run.entries[SEND_F][s - 1][m] or run.entries[F][s - 1][m]) if s else []
            at = max((run.plan.actions[i].finish_seconds for i in needed), default=0.0)
            found |= dict.fromkeys(forwards, at)
    return found


def _next_forwards(run: Run, ordered: list[int], ready: dict[int, float]) -> list[float]:
    """For every action of a device, when the first later forward of another action is ready."""
    found, least = list[float](), dict[int, float]()
    for i in reversed(ordered):
        # A forward of the action's own stage is later than it, if the action is a forward.
        stage = run.actions[i].stage if run.actions[i].kind is F else None
        found.append(min((at for s, at in least.items() if s != stage), default=inf))
        if i in ready:
            s = run.actions[i].stage
            least[s] = min(ready[i], least.get(s, inf))
    return found[::-1]
