"""Every rule of a timetable of operators, from its definition (see :mod:`problem`)."""

from typing import TYPE_CHECKING

import numpy as np

from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE, running_peak
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.errors import InvalidPlan

if TYPE_CHECKING:
    from stagewright.formulations.operators.problem import GraphTimes, OperatorProblem


def evaluate(problem: "OperatorProblem", timetable: "GraphTimes") -> float:
    """The end of the last operator; raises InvalidPlan with the first broken rule."""
    _require_values(problem, timetable)
    slack = RELATIVE_TOLERANCE * timetable.end
    _require_groups(problem, timetable)
    _require_work(problem, timetable, slack)
    _require_transfers(problem, timetable, slack)
    _require_inputs(problem, timetable, slack)
    for d, device in enumerate(problem.devices):
        own = np.flatnonzero(timetable.device == d)
        clash = _overlap(timetable.start[own], timetable.finish[own], slack)
        if clash is not None:
            i, j = (problem.names[own[k]] for k in clash)
            raise InvalidPlan(f"device {device}: {j} starts while {i} runs")
    if problem.contention == "exclusive":
        _require_one_transfer_at_a_time(problem, timetable, slack)
    for device, peak, limit in zip(
        problem.devices, peaks(problem, timetable), problem.memory.tolist(), strict=True
    ):
        if peak > limit * (1 + RELATIVE_TOLERANCE):
            raise InvalidPlan(f"device {device}: {peak:g} bytes in memory, the limit is {limit:g}")
    return timetable.end


def peaks(problem: "OperatorProblem", timetable: "GraphTimes") -> tuple[float, ...]:
    """The most bytes on each device at any time.

    What ends frees its memory before others start.
    """
    m = len(problem.devices)
    state = np.bincount(timetable.device, problem.state_bytes, minlength=m)
    changes: list[list[tuple[float, float]]] = [[] for _ in range(m)]
    for device, amount, first, last in _held(problem, timetable):
        if last > first and amount > 0:
            changes[device] += [(first, amount), (last, -amount)]
    slack = RELATIVE_TOLERANCE * timetable.end
    return tuple(state[d] + running_peak(changes[d], slack) for d in range(m))


def _held(
    problem: "OperatorProblem", timetable: "GraphTimes"
) -> list[tuple[int, float, float, float]]:
    """(device, bytes, from, to) of every tensor and every copy."""
    home = timetable.device[problem.maker]
    last = {(t, int(home[t])): timetable.finish[problem.maker[t]] for t in range(len(home))}
    for _, reader, t in zip(*(column.tolist() for column in problem.edges), strict=True):
        place = (t, int(timetable.device[reader]))
        last[place] = max(last.get(place, 0.0), timetable.finish[reader])
    held = []
    for t, target, start, finish in zip(
        timetable.sent.tolist(),
        timetable.target.tolist(),
        timetable.sent_start.tolist(),
        timetable.sent_finish.tolist(),
        strict=True,
    ):
        held.append((target, float(problem.sent_bytes[t]), start, float(last[t, target])))
        place = (t, int(home[t]))
        last[place] = max(last[place], finish)
    for t, device in enumerate(home.tolist()):
        first = float(timetable.start[problem.maker[t]])
        held.append((device, float(problem.held_bytes[t]), first, float(last[t, device])))
    return held


def _require_values(problem: "OperatorProblem", timetable: "GraphTimes") -> None:
    n, m, k = len(problem.names), len(problem.devices), len(timetable.sent)
    rows = (timetable.device, timetable.start, timetable.finish)
    if any(row.shape != (n,) for row in rows):
        raise InvalidPlan(f"{n} devices, starts and finishes needed")
    sent = (timetable.target, timetable.sent_start, timetable.sent_finish)
    if any(row.shape != (k,) for row in sent):
        raise InvalidPlan(f"{k} targets, starts and finishes of transfers needed")
    times = np.concatenate([*rows[1:], *sent[1:]])
    if not (np.isfinite(times).all() and (times >= 0).all()):
        raise InvalidPlan("a time is negative or not finite")
    for values, most, what in (
        (timetable.device, m, "device"),
        (timetable.target, m, "device"),
        (timetable.sent, len(problem.maker), "tensor"),
    ):
        wrong = values[(values < 0) | (values >= most)]
        if len(wrong):
            raise InvalidPlan(f"there is no {what} {wrong[0]}")


def _require_groups(problem: "OperatorProblem", timetable: "GraphTimes") -> None:
    first: dict[int, int] = {}
    for i, group in enumerate(problem.group.tolist()):
        j = first.setdefault(group, i)
        if timetable.device[i] != timetable.device[j]:
            raise InvalidPlan(f"{problem.names[i]} is not on the device of {problem.names[j]}")


def _require_work(problem: "OperatorProblem", timetable: "GraphTimes", slack: float) -> None:
    right = problem.seconds[np.arange(len(problem.names)), timetable.device]
    runs = timetable.finish - timetable.start
    wrong = np.flatnonzero(np.abs(runs - right) > slack)
    if len(wrong):
        i = int(wrong[0])
        raise InvalidPlan(f"{problem.names[i]} runs for {runs[i]:g} s of {right[i]:g} s")


def _require_transfers(problem: "OperatorProblem", timetable: "GraphTimes", slack: float) -> None:
    """Each tensor goes once to every other device that reads it, after its maker."""
    maker, reader, tensor = problem.edges
    home, there = timetable.device[maker], timetable.device[reader]
    needed = {*zip(tensor[home != there].tolist(), there[home != there].tolist(), strict=True)}
    listed = [*zip(timetable.sent.tolist(), timetable.target.tolist(), strict=True)]
    for pair in listed:
        if pair not in needed:
            raise InvalidPlan(f"{_transfer(problem, *pair)} is not read there, or sent twice")
        needed.remove(pair)
    for pair in sorted(needed):
        raise InvalidPlan(f"{_transfer(problem, *pair)} is missing")
    makers = problem.maker[timetable.sent]
    early = np.flatnonzero(timetable.sent_start < timetable.finish[makers] - slack)
    right = problem.transfer_seconds(timetable.sent, timetable.device[makers], timetable.target)
    runs = timetable.sent_finish - timetable.sent_start
    wrong = np.flatnonzero(np.abs(runs - right) > slack)
    for k in early.tolist():
        raise InvalidPlan(f"{_transfer(problem, *listed[k])} starts before the tensor is made")
    for k in wrong.tolist():
        raise InvalidPlan(f"{_transfer(problem, *listed[k])} takes {runs[k]:g} s of {right[k]:g} s")


def _transfer(problem: "OperatorProblem", tensor: int, target: int) -> str:
    maker, output = problem.names[problem.maker[tensor]], problem.output[tensor]
    return f"the transfer of output {output} of {maker} to {problem.devices[target]}"


def _require_inputs(problem: "OperatorProblem", timetable: "GraphTimes", slack: float) -> None:
    maker, reader, tensor = problem.edges
    arrival = {
        (t, device): finish
        for t, device, finish in zip(
            timetable.sent.tolist(),
            timetable.target.tolist(),
            timetable.sent_finish.tolist(),
            strict=True,
        )
    }
    for i, j, t in zip(maker.tolist(), reader.tolist(), tensor.tolist(), strict=True):
        ready = arrival.get((t, int(timetable.device[j])), float(timetable.finish[i]))
        if timetable.start[j] < ready - slack:
            raise InvalidPlan(
                f"{problem.names[j]} starts before it has output {problem.output[t]} of "
                f"{problem.names[i]}"
            )


def _require_one_transfer_at_a_time(
    problem: "OperatorProblem", timetable: "GraphTimes", slack: float
) -> None:
    source = timetable.device[problem.maker[timetable.sent]]
    channel = source * len(problem.devices) + timetable.target
    for c in np.unique(channel).tolist():
        own: Ints = np.flatnonzero(channel == c)
        clash = _overlap(timetable.sent_start[own], timetable.sent_finish[own], slack)
        if clash is not None:
            one = own[clash[1]]
            name = _transfer(problem, int(timetable.sent[one]), int(timetable.target[one]))
            raise InvalidPlan(f"{name} starts while another one of the same pair of devices runs")


def _overlap(start: Floats, finish: Floats, slack: float) -> tuple[int, int] | None:
    """Two intervals of positive length that overlap; None if no two do."""
    own = np.flatnonzero(finish > start)
    own = own[np.lexsort((finish[own], start[own]))]
    early = np.flatnonzero(start[own[1:]] < finish[own[:-1]] - slack)
    return (int(own[early[0]]), int(own[early[0] + 1])) if len(early) else None
