"""The least makespan of tiny problems by listing every order of every device and channel.

Microbatches may overtake each other. Any number of stages on a device, whole or split backwards.
Shares no code with a scheduler or a bound; the answer is a timetable, which the problem evaluates.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable


@dataclass(frozen=True)
class Job:
    """How far a microbatch is: the steps done on its way, and weight gradients still to do."""

    done: int
    waiting: tuple[int, ...]  # stages whose weight gradient has not started
    ready: float
    waiting_since: tuple[float, ...]
    starts: tuple[tuple[str, int, float], ...]  # kind, stage or channel, start

    def times(self) -> tuple[float, ...]:
        return self.ready, *self.waiting_since


@dataclass(frozen=True)
class State:
    """Jobs in a canonical order; when each device and channel is free; the makespan so far."""

    jobs: tuple[Job, ...]
    free: tuple[tuple[str, float], ...]
    makespan: float

    def times(self) -> np.ndarray:
        own = [time for job in self.jobs for time in job.times()]
        return np.array([*own, *(time for _, time in self.free), self.makespan])


def optimal_timetable(problem: MakespanProblem) -> Timetable:
    """A timetable of least makespan."""
    return _timetable(problem, _best(problem, fifo=False))


def brute_force_makespan(problem: MakespanProblem, fifo: bool = False) -> float:
    """The least makespan; with ``fifo`` every block does the microbatches in one order."""
    return _best(problem, fifo).makespan


def _best(problem: MakespanProblem, fifo: bool) -> State:
    way = _way(problem)
    names = {machine for _, _, machine, _ in way if machine}
    free = tuple((name, 0.0) for name in sorted(names))
    states = [State((Job(0, (), 0.0, (), ()),) * problem.microbatches, free, 0.0)]
    last: list[State] = []
    while states:
        reached: dict[tuple, list[State]] = {}
        for state in states:
            for following in _steps(problem, way, state, fifo):
                key = tuple((job.done, job.waiting) for job in following.jobs)
                reached.setdefault(key, []).append(following)
        last, states = states, [s for group in reached.values() for s in _undominated(group)]
    return min(last, key=lambda state: state.makespan)


def _way(problem: MakespanProblem) -> list[tuple[str, int, str, float]]:
    """(kind, stage or channel, machine, duration) in the order of a microbatch."""
    stages = range(problem.stages)
    there: list[tuple[str, int, str, float]] = []
    back: list[tuple[str, int, str, float]] = []
    for s in stages:
        device = f"device {problem.device[s]}"
        there.append(("F", s, device, problem.forward[s]))
        back.append(("B", s, device, problem.backward[s]))
        if s + 1 < problem.stages:
            channel = f"channel {s}" if problem.device[s] != problem.device[s + 1] else ""
            other = f"{channel} back" if channel and problem.duplex == "full" else channel
            there.append(("SF", s, channel, problem.send_forward[s]))
            back.append(("SB", s, other, problem.send_backward[s]))
    return there + back[::-1]


def _steps(problem: MakespanProblem, way: list, state: State, fifo: bool) -> Iterator[State]:
    tried = set()
    for j, job in enumerate(state.jobs):
        if fifo and j > 0 and state.jobs[j - 1].done <= job.done:
            continue
        if (job.done, job.waiting, job.times()) in tried:
            continue  # the same microbatch under another name
        tried.add((job.done, job.waiting, job.times()))
        if job.done < len(way) and _has_room(problem, state, way[job.done]):
            yield _advance(problem, way, state, j)
        for k in range(len(job.waiting)):
            yield _weight_gradient(problem, state, j, k)


def _has_room(problem: MakespanProblem, state: State, step: tuple) -> bool:
    """Whether the stage may start another forward; its device's order is that of the steps."""
    kind, s, *_ = step
    if kind != "F":
        return True
    if problem.memory and not _fits(problem, state, s):
        return False
    final = "B" if problem.weight_gradient is None else "W"
    done = [{start[:2] for start in job.starts} for job in state.jobs]
    flying = sum(("F", s) in one and (final, s) not in one for one in done)
    return flying < problem.in_flight[s]


def _fits(problem: MakespanProblem, state: State, s: int) -> bool:
    """Whether the device's memory has room for a forward of stage s after the steps so far."""
    used = problem.saved[s][0]
    for job in state.jobs:
        for kind, at, _ in job.starts:
            if kind not in "FBW" or problem.device[at] != problem.device[s]:
                continue
            taken, early, late = problem.saved[at]
            back = taken if problem.weight_gradient is None else early
            used += {"F": taken, "B": -back, "W": -late}[kind]
    return used <= problem.memory[problem.device[s]] + 1e-9


def _advance(problem: MakespanProblem, way: list, state: State, j: int) -> State:
    job = state.jobs[j]
    kind, s, machine, duration = way[job.done]
    free = dict(state.free)
    start = max(job.ready, free.get(machine, 0.0))
    end = start + duration
    if machine:
        free[machine] = end
    waiting, since, makespan = job.waiting, job.waiting_since, state.makespan
    if kind == "B" and problem.weight_gradient is not None:
        waiting, since = (*waiting, s), (*since, end)
    elif kind == "B":
        makespan = max(makespan, end + problem.reduce[s])
    moved = Job(job.done + 1, waiting, end, since, (*job.starts, (kind, s, start)))
    return _replaced(state, j, moved, free, makespan)


def _weight_gradient(problem: MakespanProblem, state: State, j: int, k: int) -> State:
    assert problem.weight_gradient is not None
    job = state.jobs[j]
    s, free = job.waiting[k], dict(state.free)
    device = f"device {problem.device[s]}"
    start = max(job.waiting_since[k], free[device])
    free[device] = end = start + problem.weight_gradient[s]
    moved = Job(
        job.done,
        job.waiting[:k] + job.waiting[k + 1 :],
        job.ready,
        job.waiting_since[:k] + job.waiting_since[k + 1 :],
        (*job.starts, ("W", s, start)),
    )
    return _replaced(state, j, moved, free, max(state.makespan, end + problem.reduce[s]))


def _replaced(state: State, j: int, job: Job, free: dict[str, float], makespan: float) -> State:
    jobs = [*state.jobs[:j], job, *state.jobs[j + 1 :]]
    jobs.sort(key=lambda job: (-job.done, job.waiting, job.times()))
    return State(tuple(jobs), tuple(sorted(free.items())), makespan)


def _undominated(states: list[State]) -> list[State]:
    kept: list[tuple[np.ndarray, State]] = []
    for state in sorted(states, key=lambda state: float(state.times().sum())):
        times = state.times()
        if not any((known <= times).all() for known, _ in kept):
            kept.append((times, state))
    return [state for _, state in kept]


def _timetable(problem: MakespanProblem, state: State) -> Timetable:
    found = {
        kind: np.zeros((problem.stages - (kind in ("SF", "SB")), problem.microbatches))
        for kind in ("F", "B", "W", "SF", "SB")
    }
    for m, job in enumerate(state.jobs):
        for kind, place, start in job.starts:
            found[kind][place, m] = start
    split = problem.weight_gradient is not None
    last = (
        found["W"] + np.array(problem.weight_gradient)[:, None]
        if split
        else (found["B"] + np.array(problem.backward)[:, None])
    )
    return Timetable(
        forward=found["F"],
        backward=found["B"],
        send_forward=found["SF"],
        send_backward=found["SB"],
        reduce=last.max(axis=1),
        weight_gradient=found["W"] if split else None,
    )
