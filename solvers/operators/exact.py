"""Optimal placement and order by constraint programming, from the best that is known.

Times are ticks, rounded down, and so are bytes. The starts of a plan, rounded down, keep all rules
of the model, so that its bound holds for the problem itself.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter

import numpy as np
from ortools.sat.python import cp_model

from stagewright.formulations.forms.answers import Answer, Bounded, Limits, Status, settled, silent
from stagewright.formulations.forms.models import exact_unit, in_ticks, tick
from stagewright.formulations.operators.bounds import CP_SAT, shortage, windows
from stagewright.formulations.operators.check import BOUND_ROUNDING
from stagewright.formulations.operators.plan import OperatorBound
from stagewright.formulations.operators.problem import GraphTimes, OperatorProblem
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Ints
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.solvers.backends.cpsat import run_model
from stagewright.solvers.operators.insertion import by_devices, timetable
from stagewright.solvers.operators.ranks import arrays_of, bounds_of
from stagewright.solvers.operators.search import (
    Tell,
    best_list_schedule,
    is_roomy,
    search,
    shortest,
    to_nobody,
)

MEMORY_UNITS = 2**20  # of the largest memory, for bytes without a common unit
Literal = cp_model.IntVar


@dataclass
class Model:
    """The model of ``problem``; ``best`` is a known timetable, ``lower`` a proved bound."""

    problem: OperatorProblem
    best: GraphTimes | None
    lower: float

    def __post_init__(self) -> None:
        problem = self.problem
        self.model = cp_model.CpModel()
        self.is_roomy = is_roomy(problem)
        m = len(problem.devices)
        every = np.arange(m)
        travel = problem.transfer_seconds(
            np.arange(len(problem.maker))[:, None, None], every[:, None], every
        )
        times = np.concatenate([problem.seconds.ravel(), travel.ravel()])
        longest = float(problem.seconds.max(axis=1).sum() + travel.max(axis=(1, 2)).sum() * m)
        self.unit = tick(times, longest if self.best is None else self.best.end) or 1.0
        self.is_exact = exact_unit(times, longest) is not None
        most = longest if self.best is None else self.best.end
        self.horizon = int(in_ticks(np.array([most]), self.unit)[0])
        self.work = in_ticks(problem.seconds, self.unit).astype(np.int64)
        self.travel = in_ticks(travel, self.unit).astype(np.int64)
        self._place_and_start()
        if problem.contention == "none" and self.is_roomy:
            self.sent: dict[tuple[int, int], tuple[Literal, Literal]] = {}
            self._wait_for_inputs()
        else:
            self.sent = {pair: self._transfer(*pair) for pair in self._pairs()}
            self._arrive()
        if problem.contention == "exclusive":
            self._send_in_turn()
        if not self.is_roomy:
            self._limit_memory()
        self._objective()
        if self.best is not None:
            self._hint(self.best)

    def solve(self, limits: Limits) -> Answer[Ints]:
        """CP-SAT's answer within ``limits``; its values are read by :meth:`timetable`."""
        transfers = [variable for pair in self.sent.values() for variable in pair]
        places = [literal for row in self.place for literal in row]
        columns = [*self.start, *places, *transfers]
        return run_model(self.model, columns, cp_model.CpSolver(), limits, silent, perf_counter())

    def timetable(self, values: Ints) -> GraphTimes:
        """The timetable of an answer; by its order alone if ticks are not exact."""
        n, m = self.work.shape
        groups = len(self.place)
        places = values[n : n + groups * m].reshape(groups, m)
        device = places.argmax(axis=1)[self.problem.group]
        start = values[:n]
        ends = start + self.work[np.arange(n), device]
        order = np.lexsort((np.arange(n), ends, start))
        if not self.is_exact or (self.is_roomy and not self.sent):
            return by_devices(self.problem, order, device)
        sent_start = np.full((len(self.problem.maker), m), np.nan)
        rows = values[n + groups * m :].reshape(-1, 2)
        for pair, (sent, is_sent) in zip(self.sent, rows.tolist(), strict=True):
            if is_sent:
                sent_start[pair] = sent * self.unit
        begin = (start * self.unit).astype(float)
        return timetable(arrays_of(self.problem), device, begin, sent_start)

    def _place_and_start(self) -> None:
        """One device per group, and one operator at a time on it."""
        problem, model = self.problem, self.model
        n, m = self.work.shape
        heads, tails = (in_ticks(one, self.unit).astype(np.int64) for one in windows(problem))
        self.place = [
            [model.new_bool_var("") for _ in range(m)] for _ in range(len(problem.group_bytes))
        ]
        for row in self.place:
            model.add_exactly_one(row)
        last = self.horizon - tails - self.work.min(axis=1)
        self.start = [model.new_int_var(int(heads[i]), int(last[i]), "") for i in range(n)]
        self.end = [
            self.start[i] + cp_model.LinearExpr.weighted_sum(self._places(i), self.work[i].tolist())
            for i in range(n)
        ]
        for d in range(m):
            model.add_no_overlap(
                model.new_optional_fixed_size_interval_var(
                    self.start[i], int(self.work[i, d]), self._places(i)[d], ""
                )
                for i in np.flatnonzero(self.work[:, d]).tolist()
            )
        if self._is_symmetric:
            model.add(self.place[self._anchor][0] == 1)

    def _places(self, i: int) -> list[Literal]:
        return self.place[self.problem.group[i]]

    @cached_property
    def _anchor(self) -> int:
        """The group with the most work, which is fixed on the first device if devices are alike."""
        return int(np.argmax(np.bincount(self.problem.group, self.work[:, 0])))

    @cached_property
    def _is_symmetric(self) -> bool:
        """Whether devices can be exchanged."""
        problem = self.problem
        apart = ~np.eye(len(problem.devices), dtype=bool)
        rows = (problem.latency[apart], problem.seconds_per_byte[apart], problem.memory)
        return bool(
            (problem.seconds == problem.seconds[:, :1]).all()
            and all((row == row[:1]).all() for row in rows)
        )

    def _wait_for_inputs(self) -> None:
        """Constraints without contention and memory: a wait per pair of operators and devices."""
        maker, reader, tensor = self.problem.edges
        waits: dict[tuple[int, int], Ints] = {}
        for i, j, t in zip(maker.tolist(), reader.tolist(), tensor.tolist(), strict=True):
            waits[i, j] = np.maximum(waits.get((i, j), 0), self.travel[t])
        m = len(self.problem.devices)
        apart = ~np.eye(m, dtype=bool)
        for (i, j), wait in waits.items():
            self.model.add(self.start[j] >= self.end[i])
            if self.problem.group[i] == self.problem.group[j] or not wait.any():
                continue
            here, there = self._places(i), self._places(j)
            if len({*wait[apart].tolist()}) == 1:
                is_cut = self.model.new_bool_var("")
                for d in range(m):
                    self.model.add_bool_or([here[d].negated(), there[d], is_cut])
                late = self.start[j] >= self.end[i] + int(wait[apart][0])
                self.model.add(late).only_enforce_if(is_cut)
                continue
            for d, e in np.argwhere(apart).tolist():
                late = self.start[j] >= self.end[i] + int(wait[d, e])
                self.model.add(late).only_enforce_if(here[d], there[e])

    def _pairs(self) -> list[tuple[int, int]]:
        """(tensor, device) of every transfer that there can be."""
        read = np.flatnonzero(np.diff(self.problem.first_reader))
        return [(t, e) for t in read.tolist() for e in range(len(self.problem.devices))]

    def _readers(self, t: int) -> list[int]:
        first = self.problem.first_reader
        found: list[int] = self.problem.reader[first[t] : first[t + 1]].tolist()
        return found

    def _transfer(self, t: int, e: int) -> tuple[Literal, Literal]:
        """Start of the transfer of tensor t to device e, and whether there is one."""
        i = int(self.problem.maker[t])
        begin = self.model.new_int_var(0, self.horizon, "")
        is_sent = self.model.new_bool_var("")
        readers = [self._places(j)[e] for j in self._readers(t)]
        for is_there in readers:
            self.model.add_bool_or([self._places(i)[e], is_there.negated(), is_sent])
        self.model.add_bool_or([*readers, is_sent.negated()])
        self.model.add_implication(is_sent, self._places(i)[e].negated())
        self.model.add(begin >= self.end[i]).only_enforce_if(is_sent)
        self.model.add(begin == 0).only_enforce_if(is_sent.negated())
        return begin, is_sent

    def _arrival(self, t: int, e: int) -> cp_model.LinearExprT:
        """When the transfer of tensor t to device e ends."""
        sources = self._places(int(self.problem.maker[t]))
        return self.sent[t, e][0] + cp_model.LinearExpr.weighted_sum(
            sources, self.travel[t, :, e].tolist()
        )

    def _arrive(self) -> None:
        """An operator starts after the ends of its makers, and of the transfers to its device."""
        maker, reader, _ = self.problem.edges
        for i, j in zip(maker.tolist(), reader.tolist(), strict=True):
            self.model.add(self.start[j] >= self.end[i])
        for (t, e), (_, is_sent) in self.sent.items():
            for j in self._readers(t):
                late = self.start[j] >= self._arrival(t, e)
                self.model.add(late).only_enforce_if(is_sent, self._places(j)[e])

    def _send_in_turn(self) -> None:
        """One transfer at a time from device d to device e."""
        m = len(self.problem.devices)
        for d, e in np.argwhere(~np.eye(m, dtype=bool)).tolist():
            rows = []
            for (t, target), (begin, is_sent) in self.sent.items():
                if target == e and self.travel[t, d, e]:
                    is_here = self._places(int(self.problem.maker[t]))[d]
                    both = self.model.new_bool_var("")
                    self.model.add_bool_or([is_sent.negated(), is_here.negated(), both])
                    self.model.add_implication(both, is_sent)
                    self.model.add_implication(both, is_here)
                    size = int(self.travel[t, d, e])
                    rows.append(
                        self.model.new_optional_fixed_size_interval_var(begin, size, both, "")
                    )
            self.model.add_no_overlap(rows)

    def _limit_memory(self) -> None:
        """State, tensors on the devices of their makers, and copies, at every moment."""
        problem = self.problem
        amounts = np.concatenate([problem.group_bytes, problem.held_bytes, problem.sent_bytes])
        most = float(problem.memory.max())
        unit = exact_unit(np.r_[amounts, problem.memory], most) or most / MEMORY_UNITS

        def units(value: float) -> int:
            return int(in_ticks(np.array([value]), unit)[0])

        for d in range(len(problem.devices)):
            held, demands = [], []
            for g, amount in enumerate(problem.group_bytes.tolist()):
                held.append(
                    self.model.new_optional_fixed_size_interval_var(
                        0, self.horizon + 1, self.place[g][d], ""
                    )
                )
                demands.append(units(amount))
            for t, i in enumerate(problem.maker.tolist()):
                held.append(self._interval(self.start[i], self._last(t, d), self._places(i)[d]))
                demands.append(units(problem.held_bytes[t]))
            for (t, e), (begin, is_sent) in self.sent.items():
                if e == d:
                    held.append(self._interval(begin, self._copy_last(t, d), is_sent))
                    demands.append(units(problem.sent_bytes[t]))
            self.model.add_cumulative(held, demands, units(problem.memory[d]))

    def _interval(
        self, begin: cp_model.LinearExprT, end: Literal, is_present: Literal
    ) -> cp_model.IntervalVar:
        size = self.model.new_int_var(0, self.horizon, "")
        return self.model.new_optional_interval_var(begin, size, end, is_present, "")

    def _last(self, t: int, d: int) -> Literal:
        """The end of the last use of tensor t on its maker's device d."""
        i = int(self.problem.maker[t])
        last = self.model.new_int_var(0, self.horizon, "")
        self.model.add(last >= self.end[i]).only_enforce_if(self._places(i)[d])
        self._after_readers(last, t, d)
        for e in range(len(self.problem.devices)):
            if (t, e) in self.sent and e != d:
                late = last >= self._arrival(t, e)
                self.model.add(late).only_enforce_if(self.sent[t, e][1], self._places(i)[d])
        return last

    def _copy_last(self, t: int, d: int) -> Literal:
        last = self.model.new_int_var(0, self.horizon, "")
        self._after_readers(last, t, d)
        return last

    def _after_readers(self, last: Literal, t: int, d: int) -> None:
        for j in self._readers(t):
            self.model.add(last >= self.end[j]).only_enforce_if(self._places(j)[d])

    def _objective(self) -> None:
        """The makespan, at least the known bound and the work of every device."""
        least = int(np.floor(self.lower / self.unit))
        self.makespan = self.model.new_int_var(min(least, self.horizon), self.horizon, "makespan")
        _, tails = windows(self.problem)
        after = in_ticks(tails, self.unit).astype(np.int64).tolist()
        for end, tail in zip(self.end, after, strict=True):
            self.model.add(self.makespan >= end + tail)
        n, m = self.work.shape
        for d in range(m):
            here = [self._places(i)[d] for i in range(n)]
            load = cp_model.LinearExpr.weighted_sum(here, self.work[:, d].tolist())
            self.model.add(self.makespan >= load)
        self.model.minimize(self.makespan)

    def _hint(self, best: GraphTimes) -> None:
        device = best.device.copy()
        if self._is_symmetric:  # exchange two devices, so that the anchor is on the first
            there = device[np.flatnonzero(self.problem.group == self._anchor)[0]]
            swap = np.arange(len(self.problem.devices))
            swap[[0, there]] = there, 0
            device = swap[device]
        for i, begin in enumerate(in_ticks(best.start, self.unit).astype(np.int64).tolist()):
            self.model.add_hint(self.start[i], begin)
        for g, d in {*zip(self.problem.group.tolist(), device.tolist(), strict=True)}:
            for e, literal in enumerate(self.place[g]):
                self.model.add_hint(literal, int(e == d))
        self.model.add_hint(self.makespan, self.horizon)


MOST = 60  # operators
EVALUATIONS = 800_000  # of the search before


@dataclass(frozen=True, slots=True, eq=False)
class OperatorResult(Bounded):
    """A checked timetable and all bounds; ``bound`` is the best of them, in seconds.

    ``timetable`` and ``cost`` are None if nothing within the memory was found; then ``reason`` says
    why if that is proved. ``source`` names the method that found the timetable.
    """

    timetable: GraphTimes | None
    cost: float | None
    bound: float
    bounds: tuple[OperatorBound, ...]
    status: Status
    source: str
    reason: str
    seconds: float


def solve_exactly(
    problem: OperatorProblem, limits: Limits, tell: Tell = to_nobody
) -> OperatorResult:
    """The best timetable within ``limits``: list schedules, search, then CP-SAT.

    Of problems of more than ``MOST`` operators only the first two. ``tell`` is called with the
    seconds of the best so far.
    """
    began = perf_counter()
    bounds = bounds_of(problem)
    short = shortage(problem)
    if short is not None:
        return _result(None, bounds, Status.INFEASIBLE, "none", began, short.reason)
    lower = max(bound.seconds for bound in bounds)
    source, best = best_list_schedule(problem)
    found = search(problem, EVALUATIONS, limits, best, lower, tell)
    if found is not best:
        source, best = "search", found
    is_open = best is None or best.end > lower * (1 + RELATIVE_TOLERANCE)
    if len(problem.names) > MOST or not is_open:
        return _result(best, bounds, limits.status(found=best is not None), source, began)
    seconds = limits.left(perf_counter() - began)
    model = Model(problem, best, lower)
    answer = model.solve(replace(limits, seconds=seconds))
    if answer.status is Status.INFEASIBLE:
        if best is not None:
            raise InvalidPlan(f"{CP_SAT} finds no plan, {source} found one of {best.end} s")
        return _result(None, bounds, answer.status, "none", began, f"proved by {CP_SAT}")
    bounds = (*bounds, OperatorBound(max(0.0, answer.bound * model.unit), CP_SAT, "these splits"))
    if answer.values is not None:
        found = shortest(problem, [best, model.timetable(answer.values)])
        if found is not best:
            source, best = CP_SAT, found
    return _result(best, bounds, limits.status(found=best is not None), source, began)


def _result(
    timetable: GraphTimes | None,
    bounds: tuple[OperatorBound, ...],
    status: Status,
    source: str,
    began: float,
    reason: str = "",
) -> OperatorResult:
    """The result, optimal if cost and bound are equal; a bound above the cost is an error."""
    cost = None if timetable is None else timetable.end
    bound = max(one.seconds for one in bounds)
    if cost is not None:
        if bound > cost * (1 + BOUND_ROUNDING):
            raise InvalidPlan(f"the timetable takes {cost} s, below the bound of {bound} s")
        bound = min(bound, cost)
        status = settled(status, cost, bound)
    seconds = perf_counter() - began
    return OperatorResult(timetable, cost, bound, bounds, status, source, reason, seconds)
