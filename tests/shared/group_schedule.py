"""The best schedule of given stages on equal or disjoint groups of devices, by CP-SAT."""

import math
from dataclasses import dataclass, field
from itertools import product

from ortools.sat.python import cp_model

from stagewright.formulations.plans.actions import ActionKind as Kind

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT
SEND_F, SEND_B, REDUCE, UPDATE = Kind.SEND_FORWARD, Kind.SEND_BACKWARD, Kind.REDUCE, Kind.UPDATE
TICKS = 1e7  # in the seconds of all actions in turn


@dataclass
class Tasks:
    """The tasks of a structure: seconds, what must end before, and what they occupy."""

    seconds: dict = field(default_factory=dict)
    after: dict = field(default_factory=dict)
    places: dict = field(default_factory=dict)

    def add(self, key, seconds, place, *after):
        self.seconds[key], self.places[key], self.after[key] = seconds, place, after


def tasks_of(microbatches, line, sends, ways):
    """All tasks, keyed (kind, stage, microbatch); ``ways``: how the backwards are divided."""
    tasks = Tasks()
    for s, one in enumerate(line):
        for m in range(microbatches):
            _add_forward(tasks, line, sends, s, m)
            _add_backward(tasks, line, sends, s, m, ways)
        after = [(kind, s, m) for m in range(microbatches) for kind in LAST[ways[s]]]
        if len(one.stage.devices) > 1:
            tasks.add((REDUCE, s, 0), one.reduce, ("reduce", one.stage.devices), *after)
            after = [(REDUCE, s, 0)]
        if one.update > 0:
            tasks.add((UPDATE, s, 0), one.update, ("device", one.stage.devices), *after)
    return tasks


LAST = {"whole": (B,), "parts": (W,), "any": (B, W)}
PASSES_ON = {"whole": (B,), "parts": (I,), "any": (B, I)}


def _is_sent(line, s):
    """Whether stage s sends to the next one."""
    return 0 <= s < len(line) - 1 and line[s].stage.devices != line[s + 1].stage.devices


def _add_forward(tasks, line, sends, s, m):
    """F and its transfer; microbatches are equal, so they pass every stage in their order."""
    come = [(SEND_F if _is_sent(line, s - 1) else F, s - 1, m)] if s else []
    earlier = [(F, s, m - 1)] if m else []
    tasks.add((F, s, m), line[s].forward, ("device", line[s].stage.devices), *come, *earlier)
    if _is_sent(line, s):
        tasks.add((SEND_F, s, m), sends[s][0], ("channel", s), (F, s, m))


def _add_backward(tasks, line, sends, s, m, ways):
    """B, or I and W, and the transfer of the gradient."""
    one, place = line[s], ("device", line[s].stage.devices)
    before = [(kind, s, m - 1) for kind in PASSES_ON[ways[s]] if m]
    if s == len(line) - 1:
        before += [(F, s, m)]
    elif _is_sent(line, s):
        before += [(SEND_B, s + 1, m)]
    else:
        before += [(kind, s + 1, m) for kind in PASSES_ON[ways[s + 1]]]
    if ways[s] != "parts":
        tasks.add((B, s, m), one.backward, place, *before)
    if ways[s] != "whole":
        tasks.add((I, s, m), one.parts[0], place, *before)
        tasks.add((W, s, m), one.parts[1], place, (I, s, m))
    if _is_sent(line, s - 1):
        own = [(kind, s, m) for kind in PASSES_ON[ways[s]]]
        tasks.add((SEND_B, s, m), sends[s - 1][1], ("channel", s - 1), *own)


class Model:
    """The best schedule of a structure as a model of CP-SAT, in whole ticks, rounded up."""

    def __init__(self, problem, line, sends, most):
        self.problem, self.line, self.sends = problem, line, sends
        count = problem.microbatches
        self.ways = ["any" if one.choice else "parts" if one.parts else "whole" for one in line]
        self.tasks = tasks_of(count, line, sends, self.ways)
        moved = 2 * count * sum(one.offload for one in line)
        self.tick = (sum(self.tasks.seconds.values()) + moved) / TICKS
        self.horizon = math.floor(min(most / self.tick, TICKS + len(self.tasks.seconds)))
        self.model = cp_model.CpModel()
        self.makespan = self.model.new_int_var(0, self.horizon, "")
        self.start, self.end, self.taken, self.interval = {}, {}, {}, {}
        self._add_tasks()
        self._add_memory()
        self.model.minimize(self.makespan)

    def ticks(self, seconds):
        return math.ceil(seconds / self.tick - 1e-4)  # less is rounding

    def variable(self, low=0):
        return self.model.new_int_var(low, self.horizon, "")

    def _add_tasks(self):
        model, whole = self.model, {}
        for s, m in product(range(len(self.line)), range(self.problem.microbatches)):
            whole[s, m] = model.new_bool_var("") if self.ways[s] == "any" else None
        places = {}
        for key, seconds in self.tasks.seconds.items():
            kind, size, start = key[0], self.ticks(seconds), self.variable()
            taken = whole.get(key[1:]) if kind in (B, I, W) else None
            if taken is not None and kind is not B:
                taken = taken.negated()
            self.start[key], self.end[key], self.taken[key] = start, start + size, taken
            self.interval[key] = (
                model.new_fixed_size_interval_var(start, size, "")
                if taken is None
                else model.new_optional_fixed_size_interval_var(start, size, taken, "")
            )
            places.setdefault(self.tasks.places[key], []).append(self.interval[key])
            self._enforce(self.makespan >= self.end[key], key)
        for key, before in self.tasks.after.items():
            for other in before:
                self._enforce(self.start[key] >= self.end[other], key, other)
        for intervals in places.values():
            model.add_no_overlap(intervals)

    def _enforce(self, constraint, *keys):
        literals = [self.taken[key] for key in keys if self.taken[key] is not None]
        self.model.add(constraint).only_enforce_if(literals)

    def _add_memory(self):
        for group in {one.stage.devices for one in self.line}:
            mine = [s for s, one in enumerate(self.line) if one.stage.devices == group]
            self._add_hosts(mine)
            room = self.line[mine[0]].memory - sum(self.line[s].static for s in mine)
            held = [each for s in mine for each in self._held(s)]
            if sum(size for _, size in held) > room:
                intervals, sizes = zip(*held, strict=True)
                self.model.add_cumulative(intervals, [math.ceil(size) for size in sizes], int(room))

    def _held(self, s):
        """Intervals with the bytes that a microbatch holds in them."""
        one = self.line[s]
        for m in range(self.problem.microbatches):
            done = self.variable()
            for kind in (B, W):
                if (kind, s, m) in self.end:
                    self._enforce(done == self.end[kind, s, m], (kind, s, m))
            begin = self.start[F, s, m]
            yield self._span(begin, done), one.saved
            for kind, size in zip((B, I), one.working, strict=True):
                if (kind, s, m) in self.start and size:
                    yield self._span(self.start[kind, s, m], done, self.taken[kind, s, m]), size
            if one.stage.offload:
                lasts = self.ticks(one.offload)
                yield self._span(begin, self.end[F, s, m] + lasts), one.offloaded
                yield self._span(self.start[B, s, m] - lasts, done), one.offloaded

    def _span(self, start, end, taken=None):
        size = self.model.new_int_var(0, 2 * self.horizon, "")
        if taken is None:
            return self.model.new_interval_var(start, size, end, "")
        return self.model.new_optional_interval_var(start, size, end, taken, "")

    def _add_hosts(self, mine):
        """One microbatch at a time to host memory, and one back."""
        to, fro = [], []
        for s in mine:
            if self.line[s].stage.offload:
                lasts = self.ticks(self.line[s].offload)
                for m in range(self.problem.microbatches):
                    span = self.model.new_fixed_size_interval_var
                    to.append(span(self.end[F, s, m], lasts, ""))
                    fro.append(span(self.start[B, s, m] - lasts, lasts, ""))
        self.model.add_no_overlap(to)
        self.model.add_no_overlap(fro)

    def solve(self, seconds):
        """Starts in seconds of all tasks; None: no schedule, "open": not known."""
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.max_time_in_seconds = seconds
        status = solver.solve(self.model)
        if status == cp_model.INFEASIBLE:
            return None
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return "open"
        begun = {
            key: solver.value(start)
            for key, start in self.start.items()
            if self.taken[key] is None or solver.boolean_value(self.taken[key])
        }
        if any(one.stage.offload for one in self.line):  # host memory sees when actions start
            return {key: value * self.tick for key, value in begun.items()}
        return self._timed(begun)

    def _timed(self, begun):
        """The earliest starts in this order, without rounding."""

        def order(key):
            return begun[key], begun[key] + self.ticks(self.tasks.seconds[key]), _along(key)

        starts, free = {}, {}
        for key in sorted(begun, key=order):
            seconds, place = self.tasks.seconds[key], self.tasks.places[key]
            ends = [starts[b] + self.tasks.seconds[b] for b in self.tasks.after[key] if b in starts]
            starts[key] = max([free.get(place, 0.0), *ends])
            free[place] = starts[key] + seconds
        return starts


def _along(key):
    """The order of tasks that take no time: along the way of a microbatch."""
    kind, s, m = key
    if kind in (F, SEND_F):
        return 0, s, kind is SEND_F, m
    if kind in (B, I, SEND_B):
        return 1, -s, kind is SEND_B, m
    return 2 + (W, REDUCE, UPDATE).index(kind), s, False, m
